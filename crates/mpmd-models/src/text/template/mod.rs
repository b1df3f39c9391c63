//! The chat template of a folder: a conversation as text.
//!
//! [`source`] finds the template, and [`prepared`] brings a conversation into its form. [`python`]
//! has the functions of Python. [`growth`] limits the values that a template makes. [`marks`] tells
//! messages, replies and the template's own text apart.

mod day;
mod growth;
mod marks;
mod prepared;
mod python;
mod source;

use std::collections::{BTreeMap, BTreeSet};
use std::thread;

use minijinja::{Environment, Error as JinjaError, ErrorKind, Value, context};
use mpmd::Result;

use crate::error::unexpected;
use crate::hub::folder::Folder;
use crate::text::conversation::Conversation;

pub use day::{Day, InvalidDay};
use marks::MarkPlace;
pub(crate) use marks::{AddedTokens, RenderedText};
use prepared::{CallForm, NeededMessage, PreparedConversation, TemplateHabits, has_word};
pub(crate) use source::{FILES, source as template_source, special_tokens};
use source::{KEY, SETTINGS};

/// Stack of the thread that reads and renders a template, in bytes. A template can put values
/// inside each other, as many as its fuel allows, and they are dropped by recursion. Memory is only
/// taken for the part that is used.
const STACK: usize = 1 << 30;

/// The chat templates of a folder.
pub(crate) struct Templates {
    /// The templates for conversations with tools, and for all others. `None` if the folder has
    /// none of that name.
    all: [Option<Template>; 2],
}

/// One chat template, compiled, with the special tokens that it may use.
struct Template {
    environment: Environment<'static>,
    source: String,
    habits: TemplateHabits,
    special: BTreeMap<String, String>,
    marks_replies: bool,
}

/// Error: a template gives no text for a conversation.
#[derive(Debug, thiserror::Error)]
pub enum TemplateFault {
    /// No message with a loss, after the first, has the role `assistant`.
    #[error("no reply of the role assistant behind a prompt, but {}", list(.roles))]
    NoReply {
        /// The roles of all messages.
        roles: Vec<String>,
    },
    /// All replies say that they have no loss.
    #[error("a reply with a loss, but each one has weight 0 or train false")]
    NoLoss,
    /// The template begins a reply differently in a prompt than in a finished conversation. Each
    /// text starts where the two differ.
    #[error(
        "a reply that does not follow its prompt: {prompt:?} in the prompt, {reply:?} with the \
        reply"
    )]
    Diverges {
        /// The text of the prompt.
        prompt: String,
        /// The text with the reply.
        reply: String,
    },
    /// The template leaves a message out, so the model would not know of it.
    #[error("the chat template leaves out message {message}, of the role {role}")]
    Lost {
        /// Index of the message.
        message: usize,
        /// Its role.
        role: String,
    },
    /// The template raised an error for the conversation.
    #[error("the chat template: {0}")]
    Refused(String),
    /// The operating system gives no thread for the template.
    #[error("no thread for the chat template: {0}")]
    NoThread(std::io::Error),
}

/// How a conversation becomes a text.
#[derive(Clone, Copy)]
pub(crate) struct RenderSettings<'a> {
    /// The added tokens that texts of messages must not become. `None` if they may.
    pub(crate) quoted: Option<&'a AddedTokens>,
    /// The day that the template may tell the model.
    pub(crate) day: Day,
    /// Variables of the template, unless the conversation has others.
    pub(crate) variables: &'a [(String, Value)],
}

impl Templates {
    /// Reads the templates of a folder.
    ///
    /// # Errors
    ///
    /// If the folder has none, or a file is damaged.
    pub(crate) fn of(folder: &Folder) -> Result<Self> {
        let path = folder.path();
        let special = special_tokens(folder)?;
        let read = |name| {
            let Some(source) = source::source(folder, name)? else {
                return Ok(None);
            };
            let failed = |why| unexpected(path, KEY, "a template", why);
            Template::new(&source, special.clone())
                .map(Some)
                .map_err(failed)
        };

        let all = [read(0)?, read(1)?];
        match all.iter().any(Option::is_some) {
            true => Ok(Self { all }),
            false => {
                let expected = format!("{}, or {KEY} in {}", FILES[1], SETTINGS[0]);
                Err(unexpected(path, "", expected, "none"))
            }
        }
    }

    /// Returns the template for a conversation.
    fn template(&self, conversation: &Conversation) -> &Template {
        let [with_tools, without] = &self.all;
        let (first, second) = match conversation.tools.is_some() {
            true => (with_tools, without),
            false => (without, with_tools),
        };
        let template = first.as_ref().or(second.as_ref());
        template.expect("a folder without a template has no templates")
    }

    /// Returns the keys of messages that neither the reader nor the template knows, each with the
    /// index of its message. They change no text.
    pub(crate) fn unread_keys<'a>(
        &'a self,
        conversation: &'a Conversation,
    ) -> impl Iterator<Item = (usize, &'a str)> {
        let source = &self.template(conversation).source;
        let messages = conversation.messages.iter().enumerate();
        let keys = messages.flat_map(|(at, message)| {
            let keys = message.unknown.iter();
            keys.map(move |key| (at, &**key))
        });
        keys.filter(|(_, key)| !has_word(source, key))
    }

    /// Returns the roles and other parts of a conversation that its template does not name, as
    /// texts for people. It may write or leave out each of them.
    pub(crate) fn unread_parts(&self, conversation: &Conversation) -> Vec<String> {
        const COMMON: [&str; 4] = ["system", "developer", "user", "assistant"];
        let source = &self.template(conversation).source;
        let roles = conversation.roles();
        let is_unknown = |role: &&str| !COMMON.contains(role) && !has_word(source, role);
        let mut parts: Vec<String> = roles
            .filter(is_unknown)
            .map(|role| format!("the role {role}"))
            .collect();
        if conversation.tools.is_some() && !has_word(source, "tools") {
            parts.push("tools".to_owned());
        }
        parts
    }

    /// Returns the conversation as a prompt: the text after which the model writes its reply.
    ///
    /// # Errors
    ///
    /// If the template raises an error for these messages, or leaves one out that the model must
    /// know of.
    pub(crate) fn prompt(
        &self,
        conversation: &Conversation,
        settings: RenderSettings<'_>,
    ) -> Result<RenderedText, TemplateFault> {
        let template = self.template(conversation);
        with_large_stack(|| {
            let (prepared, text) = template.prepared(conversation, settings, true)?;
            template.check_complete(&prepared, true)?;
            Ok(text)
        })
    }

    /// Returns texts of a conversation with the assistant's replies from message `from` on that
    /// have a loss. Each reply follows the same prompt as in a chat. A reply without a prompt
    /// before it has no loss.
    ///
    /// There is one text if the template does not change earlier messages, or marks replies itself.
    /// Otherwise each reply has a text of its own.
    ///
    /// # Errors
    ///
    /// If no message from `from` on is such a reply, or the template raises an error, or leaves out
    /// a message that the model must know of.
    pub(crate) fn texts(
        &self,
        conversation: &Conversation,
        from: usize,
        settings: RenderSettings<'_>,
    ) -> Result<Vec<RenderedText>, TemplateFault> {
        let template = self.template(conversation);
        with_large_stack(|| {
            let (prepared, _) = template.prepared(conversation, settings, false)?;
            template.check_complete(&prepared, false)?;
            template.texts(&prepared, from)
        })
    }
}

/// Returns the roles of a conversation as one line.
fn list(roles: &[String]) -> String {
    match roles {
        [] => "no messages".to_owned(),
        _ => roles.join(", "),
    }
}

impl From<JinjaError> for TemplateFault {
    /// Keeps the text alone: the error has values of the template, which need a large stack.
    fn from(error: JinjaError) -> Self {
        Self::Refused(match (error.kind(), error.detail()) {
            (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
            _ => error.to_string(),
        })
    }
}

/// Calls `f` on a thread whose stack is large enough for all values that a template can make.
fn with_large_stack<T: Send>(
    f: impl FnOnce() -> Result<T, TemplateFault> + Send,
) -> Result<T, TemplateFault> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK);
        let thread = thread.spawn_scoped(scope, f);
        let result = thread.map_err(TemplateFault::NoThread)?.join();
        result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

impl Template {
    fn new(source: &str, special: BTreeMap<String, String>) -> Result<Self, TemplateFault> {
        let (source, marks_replies) = source::with_filters(source);
        let environment = with_large_stack(|| {
            let mut environment = python::environment()?;
            environment.add_template_owned(KEY, growth::limited(&source)?)?;
            Ok(environment)
        })?;
        Ok(Self {
            environment,
            habits: TemplateHabits::of(&source),
            source,
            special,
            marks_replies,
        })
    }

    /// Returns a conversation in the form that this template takes, and its text.
    fn prepared(
        &self,
        conversation: &Conversation,
        settings: RenderSettings<'_>,
        asks: bool,
    ) -> Result<(PreparedConversation, RenderedText), TemplateFault> {
        let with = |form| {
            let prepared = PreparedConversation::new(conversation, &self.habits, settings, form);
            let text = self.render(&prepared, prepared.messages.len(), asks)?;
            Ok((prepared, text))
        };
        let mut forms = CallForm::ALL.into_iter().map(with);
        let first: Result<_, JinjaError> = forms.next().expect("there are forms");
        match first {
            Err(_) if conversation.has_calls() => {
                let later = forms.find_map(Result::ok);
                Ok(later.map_or(first, Ok)?)
            }
            first => Ok(first?),
        }
    }

    /// Returns an error if the text of a conversation lacks a message that the model must know of:
    /// one of the system or the developer, the last one of the user, and results of tools after it.
    fn check_complete(
        &self,
        prepared: &PreparedConversation,
        asks: bool,
    ) -> Result<(), TemplateFault> {
        let mut lost = BTreeSet::new();
        // A template may cut off the start or the end of a message, or look at it.
        for place in [MarkPlace::Start, MarkPlace::End] {
            let (marked, needed) = prepared.with_presence(place);
            let Ok(found) = self.render_marked(&marked, marked.messages.len(), asks) else {
                // Then the marks have misled the template.
                return Ok(());
            };
            let shown: BTreeSet<char> = found.chars().filter(marks::is_presence_mark).collect();
            let is_lost = |needed: &NeededMessage| {
                let is_candidate = place == MarkPlace::Start || lost.contains(&needed.message);
                is_candidate && !shown.contains(&needed.mark)
            };
            let needed = needed.into_iter().filter(is_lost);
            lost = needed.map(|needed| needed.message).collect();
            if lost.is_empty() {
                break;
            }
        }
        match lost.first() {
            None => Ok(()),
            Some(message) => Err(TemplateFault::Lost {
                message: *message,
                role: prepared.roles[*message].clone(),
            }),
        }
    }

    /// Returns the marked texts of a conversation, as [`Templates::texts`] does.
    fn texts(
        &self,
        prepared: &PreparedConversation,
        from: usize,
    ) -> Result<Vec<RenderedText>, TemplateFault> {
        let all = prepared.messages.len();
        let render = |end, asks| self.render(prepared, end, asks);
        let is_reply = |at: &usize| prepared.roles[*at] == "assistant";
        let replies: Vec<usize> = (from.max(1)..all).filter(is_reply).collect();
        if replies.is_empty() {
            return Err(TemplateFault::NoReply {
                roles: prepared.roles.clone(),
            });
        }
        let learnt: Vec<bool> = replies.iter().map(|at| prepared.has_loss[*at]).collect();
        if !learnt.contains(&true) {
            return Err(TemplateFault::NoLoss);
        }

        if self.marks_replies && !learnt.contains(&false) {
            let mut text = render(all, false)?;
            let prompt = if from == 0 {
                RenderedText::default()
            } else {
                render(from, false)?
            };
            let shared = common(&text.text, &prompt.text);
            text.replies.retain(|reply| reply.end > shared);
            return Ok(vec![text]);
        }

        let parts = replies
            .iter()
            .map(|at| self.reply(prepared, *at))
            .collect::<Result<Vec<_>, TemplateFault>>()?;
        let learnt = |parts: Vec<RenderedText>| {
            let parts = parts.into_iter().zip(&learnt);
            parts.filter(|(_, learnt)| **learnt).map(|(part, _)| part)
        };
        match parts.last() {
            Some(last) if parts.iter().all(|one| last.text.starts_with(&one.text)) => {
                let mut whole = last.clone();
                whole.replies = learnt(parts).flat_map(|part| part.replies).collect();
                Ok(vec![whole])
            }
            _ => Ok(learnt(parts).collect()),
        }
    }

    /// Returns the text of a conversation up to the reply at index `at`, with the part that the
    /// model writes as the only reply.
    fn reply(
        &self,
        prepared: &PreparedConversation,
        at: usize,
    ) -> Result<RenderedText, TemplateFault> {
        let prompt = self.render(prepared, at, true)?.text;
        let whole = self.render(prepared, at + 1, false)?;
        let text = &whole.text;
        let mut start = common(text, &prompt);
        if start < prompt.len() {
            // The prompt of a reply may begin it otherwise than the template writes a reply.
            let before = self.render(prepared, at, false)?.text;
            if start < before.len() || !text.starts_with(&before) {
                let next = |text: &str| text[start..].chars().take(20).collect::<String>();
                return Err(TemplateFault::Diverges {
                    prompt: next(&prompt),
                    reply: next(text),
                });
            }
            start = start.max(before.len());
        }

        // A template may say itself what a reply is.
        let mut whole = whole;
        if !self.marks_replies {
            let reply = start..whole.text.len();
            whole.replies = vec![reply];
        }
        whole.replies.retain(|reply| reply.end > start);
        Ok(whole)
    }

    /// Returns the text of the first `end` messages of a conversation. If `asks`, it ends with the
    /// beginning of a further reply.
    fn render(
        &self,
        prepared: &PreparedConversation,
        end: usize,
        asks: bool,
    ) -> Result<RenderedText, JinjaError> {
        let text = self.render_marked(prepared, end, asks)?;
        Ok(RenderedText::of(&text))
    }

    /// Returns the text of the first `end` messages of a conversation, with all marks.
    fn render_marked(
        &self,
        prepared: &PreparedConversation,
        end: usize,
        asks: bool,
    ) -> Result<String, JinjaError> {
        let messages = Value::from(prepared.messages[..end].to_vec());
        let tools = &prepared.tools;
        let given = context! { messages, tools, documents => (), add_generation_prompt => asks };
        let day = (
            python::DAY.to_owned(),
            Value::from(prepared.day.to_string()),
        );
        let variables = prepared.variables.iter().cloned().chain([day]);
        let special = self.special.iter();
        let special = special.map(|(name, token)| (name.clone(), Value::from(&**token)));
        let others = Value::from_pairs(special.chain(variables));
        let context = context! { ..given, ..others };

        let text = self.environment.get_template(KEY)?.render(context)?;
        match text.len() > python::LONGEST {
            true => Err(python::too_long()),
            false => Ok(text),
        }
    }
}

/// Returns the length of the longest common prefix of two texts, in bytes.
fn common(a: &str, b: &str) -> usize {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
    same.map(|(char, _)| char.len_utf8()).sum()
}

#[cfg(test)]
mod tests;
