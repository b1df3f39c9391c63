//! A conversation in the form that one template takes.

use minijinja::Value;
use minijinja::value::ValueKind;
use mpmd::train::tensors::read_json;

use super::marks::{MarkPlace, as_text, presence_mark, with_presence};
use super::python::json_text;
use super::{Day, RenderSettings};
use crate::text::conversation::{Conversation, Message, THOUGHTS, pairs};

/// Form of a message that calls tools. Templates differ in what they take.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct CallForm {
    /// True for arguments as an object, false for JSON in a text, as requests have it.
    pub(super) has_objects: bool,
    /// True if the content may be none where it is empty.
    pub(super) may_be_none: bool,
}

impl CallForm {
    /// The forms in the order in which they are tried.
    pub(super) const ALL: [Self; 4] = [
        Self::of(true, true),
        Self::of(true, false),
        Self::of(false, true),
        Self::of(false, false),
    ];

    const fn of(has_objects: bool, may_be_none: bool) -> Self {
        Self {
            has_objects,
            may_be_none,
        }
    }

    /// Returns arguments in this form.
    fn arguments(self, arguments: &Value) -> Value {
        match (self.has_objects, arguments.as_str()) {
            (false, None) => json_text(arguments).map_or_else(|_| arguments.clone(), Value::from),
            (true, Some(text)) => {
                let is_empty = matches!(text.trim(), "" | "null");
                let text = if is_empty { "{}" } else { text };
                let object = read_json::<Value>(text.as_bytes()).ok();
                let object = object.filter(|object| object.kind() == ValueKind::Map);
                object.unwrap_or_else(|| arguments.clone())
            }
            _ => arguments.clone(),
        }
    }
}

/// A conversation in the form that one template takes.
#[derive(Clone)]
pub(super) struct PreparedConversation {
    pub(super) messages: Vec<Value>,
    /// The role of each message, as it came.
    pub(super) roles: Vec<String>,
    /// For each message, false for a reply that must not be learnt.
    pub(super) has_loss: Vec<bool>,
    pub(super) tools: Option<Value>,
    pub(super) variables: Vec<(String, Value)>,
    pub(super) day: Day,
}

/// A message that must be in the text of a conversation.
pub(super) struct NeededMessage {
    /// Index of the message.
    pub(super) message: usize,
    /// The character that shows that it is there.
    pub(super) mark: char,
}

impl PreparedConversation {
    /// Prepares a conversation for a template with these habits.
    pub(super) fn new(
        conversation: &Conversation,
        habits: &TemplateHabits,
        settings: RenderSettings<'_>,
        form: CallForm,
    ) -> Self {
        let text = |value: &Value| as_text(value, settings.quoted);
        let all = &conversation.messages;
        let messages = all.iter().map(|message| {
            let value = habits.message(message, form);
            // A reply may have special tokens, for instance around calls of tools.
            match &*message.role {
                "assistant" => as_text(&value, None),
                _ => text(&value),
            }
        });
        let variables = settings.variables.iter().chain(&conversation.variables);
        let variables = variables.map(|(name, value)| (name.clone(), text(value)));
        Self {
            messages: messages.collect(),
            roles: all.iter().map(|message| message.role.clone()).collect(),
            has_loss: all.iter().map(|message| message.has_loss).collect(),
            tools: conversation.tools.as_ref().map(text),
            variables: variables.collect(),
            day: settings.day,
        }
    }

    /// Returns the conversation with a mark in each message that its text must have.
    pub(super) fn with_presence(&self, place: MarkPlace) -> (Self, Vec<NeededMessage>) {
        let mut marked = self.clone();
        let mut needed = Vec::new();
        let last_user = self.roles.iter().rposition(|role| role == "user");
        for (at, role) in self.roles.iter().enumerate() {
            let is_needed = match &**role {
                "user" => Some(at) == last_user,
                "assistant" => false,
                "tool" | "function" => Some(at) > last_user,
                _ => true,
            };
            let content = self.messages[at].get_attr("content").ok();
            let content = content.as_ref().and_then(Value::as_str);
            let mark = presence_mark(needed.len()).filter(|_| is_needed);
            let Some(mark) = mark else { continue };
            if let Some(content) = content.and_then(|text| with_presence(text, mark, place)) {
                marked.messages[at] = with_content(&self.messages[at], content.into());
                needed.push(NeededMessage { message: at, mark });
            }
        }
        (marked, needed)
    }
}

/// Returns a message with another content.
fn with_content(message: &Value, content: Value) -> Value {
    let pairs = pairs(message).unwrap_or_default().into_iter();
    let pairs = pairs.map(|(key, value)| match &*key {
        "content" => (key, content.clone()),
        _ => (key, value),
    });
    Value::from_pairs(pairs)
}

/// The forms of messages that a template takes. They are found in its source.
pub(super) struct TemplateHabits {
    /// True if it has a case for the role `developer`.
    knows_developer: bool,
    /// True if it asks whether a content is none, as a reply with calls alone has it.
    asks_for_none: bool,
    /// True if it takes arguments as they came.
    takes_texts: bool,
    /// The keys under which it reads thoughts.
    thoughts: Vec<&'static str>,
}

impl TemplateHabits {
    pub(super) fn of(source: &str) -> Self {
        let is_name = |char: char| char.is_alphanumeric() || char == '_';
        let asks_for_none = source.match_indices("content").any(|(at, name)| {
            let behind = source[at + name.len()..].trim_start_matches(['\'', '"', ']']);
            let asks = behind.starts_with(" is none") || behind.starts_with(" is not none");
            asks && !source[..at].ends_with(is_name)
        });
        let reads = |key: &&str| has_word(source, key);
        let thoughts: Vec<&str> = THOUGHTS.into_iter().filter(reads).collect();
        Self {
            knows_developer: source.contains("developer"),
            asks_for_none,
            takes_texts: source.contains("arguments is string"),
            thoughts: match thoughts.is_empty() {
                true => vec![THOUGHTS[0]],
                false => thoughts,
            },
        }
    }

    /// Returns a message as the template takes it.
    fn message(&self, message: &Message, form: CallForm) -> Value {
        let has_calls = message.get("tool_calls").is_some();
        let may_be_none = has_calls && self.asks_for_none && form.may_be_none;
        let pairs = message.values.iter().map(|(key, value)| {
            let value = match &**key {
                "role" if message.role == "developer" && !self.knows_developer => "system".into(),
                "content" if may_be_none && message.content().is_empty() => Value::from(()),
                "tool_calls" if !self.takes_texts => {
                    with_calls(value, &|arguments| form.arguments(arguments))
                }
                _ => value.clone(),
            };
            (key.clone(), value)
        });
        let thoughts = message.thoughts.iter().flat_map(|thoughts| {
            let keys = self.thoughts.iter();
            keys.map(|key| ((*key).to_owned(), Value::from(&**thoughts)))
        });
        Value::from_pairs(pairs.chain(thoughts))
    }
}

/// True if a source has a word, not as a part of a longer one.
pub(super) fn has_word(source: &str, word: &str) -> bool {
    let is_name = |char: char| char.is_alphanumeric() || char == '_';
    let mut places = source.match_indices(word);
    places.any(|(at, _)| {
        !source[..at].ends_with(is_name) && !source[at + word.len()..].starts_with(is_name)
    })
}

/// Returns calls of tools with their arguments changed by `change`.
fn with_calls(calls: &Value, change: &impl Fn(&Value) -> Value) -> Value {
    let calls = calls.try_iter().into_iter().flatten();
    calls.map(|call| with_arguments(&call, change)).collect()
}

/// Returns a call, or a function in it, with its arguments changed.
fn with_arguments(call: &Value, change: &impl Fn(&Value) -> Value) -> Value {
    let pairs = pairs(call).unwrap_or_default().into_iter();
    let pairs = pairs.map(|(key, value)| match &*key {
        "arguments" => (key, change(&value)),
        "function" => (key, with_arguments(&value, change)),
        _ => (key, value),
    });
    Value::from_pairs(pairs)
}
