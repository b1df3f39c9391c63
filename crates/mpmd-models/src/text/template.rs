//! The chat template of a folder: a conversation as text.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error as JinjaError, ErrorKind, Output, State, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use mpmd::train::tensors::read_json;
use mpmd::{Error, Result};
use serde::Serialize as _;
use serde_json::ser::{Formatter, PrettyFormatter};

use crate::error::unexpected;
use crate::hub::folder::Folder;

/// The names of a folder's two templates: for conversations with tools, and for all others.
const NAMES: [&str; 2] = ["tool_use", "default"];
/// The files of the templates [`NAMES`], in newer folders.
pub(crate) const FILES: [&str; 2] = [
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
];
/// The files that may have special tokens. The first and the last may also have templates.
const SETTINGS: [&str; 3] = [
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
];
/// The key of the templates in these files.
const KEY: &str = "chat_template";
/// Limit on the instructions that a template may run, since an untrusted one may not end.
const FUEL: u64 = 10_000_000;
/// Limit on the indent of JSON, in blanks, since the indent is built in memory.
const WIDEST: usize = 64;
/// Private-use characters that are put before and after the replies that a template marks.
const MARKS: [char; 2] = ['\u{f8f0e}', '\u{f8f0f}'];

/// The chat templates of a folder.
pub struct Templates {
    /// The templates in the order of [`NAMES`]. `None` if the folder has none of that name.
    all: [Option<Template>; 2],
}

/// One chat template, compiled, with the special tokens that it may use.
struct Template {
    environment: Environment<'static>,
    special: BTreeMap<String, String>,
    marks_replies: bool,
}

/// A message of a conversation. Its keys keep their order, since a template can write them with
/// `tojson`.
#[derive(Clone, Debug)]
pub struct ChatMessage(Value);

impl ChatMessage {
    /// Creates a message from pairs of a key, such as `role` or `content`, and its text.
    pub fn new<'a>(texts: impl IntoIterator<Item = (&'a str, String)>) -> Self {
        Self(Value::from_pairs(texts))
    }
}

/// Error: a template gives no text for a conversation.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TemplateFault {
    #[error("there is no template")]
    NoTemplate,
    /// No message after the first has the role `assistant`. `roles` has the roles of all messages.
    #[error("no reply of the role assistant behind a prompt, but {}", list(.roles))]
    NoReply { roles: Vec<String> },
    /// The template begins a reply differently in a prompt than in a finished conversation. Each
    /// text starts where the two differ.
    #[error(
        "a reply that does not follow its prompt: {prompt:?} in the prompt, {reply:?} with the \
        reply"
    )]
    Diverges { prompt: String, reply: String },
    /// The template raised an error for the conversation.
    #[error("{}", detail(.0))]
    Refused(#[from] JinjaError),
}

/// A text, and the byte ranges of its replies.
pub(crate) type Marked = (String, Vec<Range<usize>>);

/// Returns the special tokens of a folder by name, such as `eos_token`.
///
/// # Errors
///
/// If a file is damaged.
pub(crate) fn special_tokens(folder: &Folder) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for settings in SETTINGS
        .iter()
        .filter_map(|name| settings(folder, name).transpose())
    {
        for (name, value) in settings?.as_object().into_iter().flatten() {
            let content = value.get("content").unwrap_or(value);
            if let Some(content) = content.as_str().filter(|_| name.ends_with("_token")) {
                all.entry(name.clone())
                    .or_insert_with(|| content.to_owned());
            }
        }
    }
    Ok(all)
}

/// Reads a JSON file of settings. `None` if the folder lacks the file.
fn settings(folder: &Folder, name: &str) -> Result<Option<serde_json::Value>> {
    if !folder.companions().contains(&name) {
        return Ok(None);
    }
    let failed = |why: &dyn std::fmt::Display| {
        unexpected(
            &folder.path().join(name),
            "",
            "settings of a tokenizer",
            why,
        )
    };
    let bytes = folder.small(name).map_err(|why| failed(&why))?;
    read_json(&bytes).map(Some).map_err(|why| failed(&why))
}

/// Returns the source of the template `NAMES[name]`. `None` if the folder has none.
pub(crate) fn source(folder: &Folder, name: usize) -> Result<Option<String>> {
    if folder.companions().contains(&FILES[name]) {
        let failed = |why: &dyn std::fmt::Display| {
            unexpected(&folder.path().join(FILES[name]), "", "a chat template", why)
        };
        let bytes = folder.small(FILES[name]).map_err(|why| failed(&why))?;
        return String::from_utf8(bytes)
            .map(Some)
            .map_err(|why| failed(&why));
    }
    for file in SETTINGS {
        let settings = settings(folder, file)?.unwrap_or_default();
        let is_named = |one: &&serde_json::Value| one["name"] == NAMES[name];
        let found = match &settings[KEY] {
            serde_json::Value::Array(several) => {
                several.iter().find(is_named).map(|one| &one["template"])
            }
            one => Some(one).filter(|_| NAMES[name] == "default"),
        };
        if let Some(found) = found.and_then(serde_json::Value::as_str) {
            return Ok(Some(found.to_owned()));
        }
    }
    Ok(None)
}

impl Templates {
    /// Reads the templates of a folder.
    ///
    /// # Errors
    ///
    /// If the folder has none, or a file is damaged.
    pub fn of(folder: &Folder) -> Result<Self> {
        let path = folder.path();
        let special = special_tokens(folder)?;
        let read = |name| {
            let Some(source) = source(folder, name)? else {
                return Ok(None);
            };
            let failed = |why| unexpected(path, KEY, "a template", detail(&why));
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

    /// Returns the conversation as a prompt: the text after which the model writes its reply.
    ///
    /// # Errors
    ///
    /// If the template raises an error for these messages.
    pub fn prompt(&self, messages: &[ChatMessage]) -> Result<String> {
        let failed = |why: String| Error::Environment(format!("the chat template: {why}"));
        let messages: Vec<Value> = messages.iter().map(|message| message.0.clone()).collect();
        let template = self.all.iter().rev().flatten().next();
        let template = template.ok_or_else(|| failed("none".to_owned()))?;
        Ok(template
            .render(&messages, None, true)
            .map_err(|why| failed(detail(&why)))?
            .0)
    }

    /// Returns texts of a conversation with the assistant's replies from message `from` on marked.
    /// Each reply follows the same prompt as in a chat. A reply without a prompt before it is not
    /// marked.
    ///
    /// There is one text if the template does not change earlier messages, or marks replies itself.
    /// Otherwise each reply has a text of its own.
    ///
    /// # Errors
    ///
    /// If no message from `from` on is such a reply, or the template raises an error.
    pub(crate) fn texts(
        &self,
        messages: &[Value],
        from: usize,
        tools: Option<&Value>,
    ) -> Result<Vec<Marked>, TemplateFault> {
        let names: &[usize] = if tools.is_some() { &[0, 1] } else { &[1, 0] };
        let template = names.iter().find_map(|name| self.all[*name].as_ref());
        let template = template.ok_or(TemplateFault::NoTemplate)?;
        template.texts(messages, from, tools)
    }
}

/// Returns the roles of a conversation as one line.
fn list(roles: &[String]) -> String {
    match roles {
        [] => "no messages".to_owned(),
        _ => roles.join(", "),
    }
}

/// Returns the error of a template as one line.
fn detail(error: &JinjaError) -> String {
    match (error.kind(), error.detail()) {
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        _ => error.to_string(),
    }
}

impl Template {
    fn new(source: &str, special: BTreeMap<String, String>) -> Result<Self, JinjaError> {
        let (source, marks_replies) = with_filters(&source.replace("\r\n", "\n"));

        let mut environment = Environment::new();
        environment.set_syntax(
            SyntaxConfig::builder()
                .trim_blocks(true)
                .lstrip_blocks(true)
                .build()?,
        );
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_formatter(format_value);
        // Python's none is not.
        environment.add_test("iterable", |value: &Value| {
            !value.is_none() && value.try_iter().is_ok()
        });

        environment.add_filter("tojson", to_json);
        environment.add_filter("generation", |text: String| {
            format!("{}{text}{}", MARKS[0], MARKS[1])
        });
        environment.add_function(
            "raise_exception",
            |why: String| -> Result<Value, JinjaError> {
                Err(JinjaError::new(ErrorKind::InvalidOperation, why))
            },
        );

        environment.add_template_owned(KEY, source)?;
        Ok(Self {
            environment,
            special,
            marks_replies,
        })
    }

    /// Returns the marked texts of a conversation, as [`Templates::texts`] does.
    fn texts(
        &self,
        messages: &[Value],
        from: usize,
        tools: Option<&Value>,
    ) -> Result<Vec<Marked>, TemplateFault> {
        let render = |end, asks| self.render(&messages[..end], tools, asks);
        let role = |message: &Value| message.get_attr("role").unwrap_or_default();
        let is_reply = |at: &usize| role(&messages[*at]).as_str() == Some("assistant");

        let replies: Vec<usize> = (from.max(1)..messages.len()).filter(is_reply).collect();
        if replies.is_empty() {
            return Err(TemplateFault::NoReply {
                roles: messages.iter().map(|one| role(one).to_string()).collect(),
            });
        }

        if self.marks_replies {
            let (text, mut marked) = render(messages.len(), false)?;
            let (prompt, _) = if from == 0 {
                Marked::default()
            } else {
                render(from, false)?
            };
            let shared = common(&text, &prompt);
            marked.retain(|reply| reply.end > shared);
            return Ok(vec![(text, marked)]);
        }

        let part = |at: &usize| {
            let (prompt, _) = render(*at, true)?;
            let (text, _) = render(at + 1, false)?;
            let mut start = common(&text, &prompt);
            if start < prompt.len() {
                // The prompt of a reply may begin it otherwise than the template writes a reply.
                let (before, _) = render(*at, false)?;
                if start < before.len() || !text.starts_with(&before) {
                    let next = |text: &str| text[start..].chars().take(20).collect::<String>();
                    return Err(TemplateFault::Diverges {
                        prompt: next(&prompt),
                        reply: next(&text),
                    });
                }
                start = start.max(before.len());
            }
            Ok((start..text.len(), text))
        };

        let parts = replies
            .iter()
            .map(part)
            .collect::<Result<Vec<_>, TemplateFault>>()?;
        match parts.last() {
            Some((_, last)) if parts.iter().all(|(_, text)| last.starts_with(text)) => Ok(vec![(
                last.clone(),
                parts.iter().map(|(reply, _)| reply.clone()).collect(),
            )]),
            _ => Ok(parts
                .into_iter()
                .map(|(reply, text)| (text, vec![reply]))
                .collect()),
        }
    }

    /// Returns the text of a conversation, and the replies that the template itself marks. If
    /// `asks`, the text ends with the beginning of a further reply.
    fn render(
        &self,
        messages: &[Value],
        tools: Option<&Value>,
        asks: bool,
    ) -> Result<Marked, JinjaError> {
        let special = Value::from_pairs(self.special.clone());
        let messages = Value::from(messages.to_vec());
        let given = context! { messages, tools, documents => (), add_generation_prompt => asks };
        let context = context! { ..given, ..special };
        let text = self.environment.get_template(KEY)?.render(context)?;

        let mut plain = String::new();
        let mut replies = Vec::new();
        let mut start = 0;
        for part in text.split_inclusive(MARKS) {
            plain += part.trim_end_matches(MARKS);
            match part.chars().next_back().filter(|last| MARKS.contains(last)) {
                Some(mark) if mark == MARKS[0] => start = plain.len(),
                Some(_) => replies.push(start..plain.len()),
                None => {}
            }
        }
        Ok((plain, replies))
    }
}

/// Returns the length of the longest common prefix of two texts, in bytes.
fn common(a: &str, b: &str) -> usize {
    let same = a.chars().zip(b.chars()).take_while(|(a, b)| a == b);
    same.map(|(char, _)| char.len_utf8()).sum()
}

/// Replaces the tags `generation` and `endgeneration` of a template, an extension of the library
/// `transformers`, by tags of a filter. Returns the template, and true if it had such tags.
fn with_filters(source: &str) -> (String, bool) {
    let mut text = String::new();
    let mut found = false;
    let mut rest = source;
    while let Some(at) = rest.find("{%").into_iter().chain(rest.find("{#")).min() {
        let end = if rest[at..].starts_with("{#") {
            "#}"
        } else {
            "%}"
        };
        let Some(len) = rest[at..].find(end) else {
            break;
        };
        let before = &rest[..at];
        let (tag, after) = rest[at..].split_at(len);

        let name = tag
            .trim_start_matches(['{', '%', '-', '+'])
            .trim_end_matches(['-', '+'])
            .trim();
        let new = match name {
            "generation" => "filter generation",
            "endgeneration" => "endfilter",
            other => other,
        };

        found |= new != name;
        text += before;
        text += &tag.replacen(name, new, 1);
        rest = after;
    }
    (text + rest, found)
}

/// Writes none and booleans as Python writes them.
fn format_value(
    out: &mut Output<'_>,
    state: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), JinjaError> {
    match value.kind() {
        ValueKind::None => Ok(out.write_str("None")?),
        ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
        _ => minijinja::escape_formatter(out, state, value),
    }
}

/// Returns a value as JSON, as Python's module `json` writes it.
fn to_json(value: Value, options: Kwargs) -> Result<String, JinjaError> {
    let indent = options.get::<Option<usize>>("indent")?;
    let is_ascii = options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false);
    let is_sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    options.assert_all_used()?;
    if indent.is_some_and(|width| width > WIDEST) {
        let why = format!("tojson: expected an indent of at most {WIDEST}");
        return Err(JinjaError::new(ErrorKind::InvalidOperation, why));
    }

    let failed =
        |why: serde_json::Error| JinjaError::new(ErrorKind::BadSerialization, why.to_string());
    let value = match is_sorted {
        // Its maps are sorted.
        true => serde_json::to_value(&value)
            .and_then(serde_json::from_value)
            .map_err(failed)?,
        false => value,
    };

    let mut json = Vec::new();
    let written = match indent {
        Some(width) => {
            let indent = " ".repeat(width);
            let form = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, form))
        }
        None => {
            let [comma, colon] = separators
                .and_then(|pair| pair.try_into().ok())
                .unwrap_or_else(|| [", ".to_owned(), ": ".to_owned()]);
            let form = Separated { comma, colon };
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, form))
        }
    };
    written.map_err(failed)?;

    let json = String::from_utf8_lossy(&json);
    let mut pair = [0; 2];
    let mut escaped = |char: char| -> String {
        let units = char.encode_utf16(&mut pair).iter();
        units.map(|unit| format!("\\u{unit:04x}")).collect()
    };
    Ok(match is_ascii {
        true => json
            .chars()
            .map(|char| {
                if char.is_ascii() {
                    char.into()
                } else {
                    escaped(char)
                }
            })
            .collect(),
        false => json.into_owned(),
    })
}

/// A JSON formatter for one line, with the separators of Python's module `json`.
struct Separated {
    comma: String,
    colon: String,
}

impl Formatter for Separated {
    fn begin_array_value<W: io::Write + ?Sized>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        if first {
            Ok(())
        } else {
            to.write_all(self.comma.as_bytes())
        }
    }

    fn begin_object_key<W: io::Write + ?Sized>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_array_value(to, first)
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(self.colon.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_that_need_too_much_are_refused() {
        for source in [
            "{{ messages | tojson(indent=99999999999) }}",
            "{{ 'ab' * 99999999999999 }}",
            "{{ [1, 2] * 99999999999999 }}",
            "{{ range(99999999999) | list }}",
            "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        ] {
            let template = Template::new(source, BTreeMap::new()).unwrap();
            let templates = Templates {
                all: [None, Some(template)],
            };
            let found = templates.prompt(&[ChatMessage::new([("role", "user".to_owned())])]);
            assert!(found.is_err(), "{source}: {} bytes", found.unwrap().len());
        }
    }

    #[test]
    fn fuzz_templates() {
        let samples = [
            "{% for m in messages %}<{{ m.role }}>{{ m['content'] | trim }}{{ eos_token }}\
             {% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}",
            "{%- if messages[0].role == 'system' %}{{ messages[0].content.split('a')[-1] }}\
             {%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}\
             {% for m in rest %}\
             {% if loop.index0 % 2 != 0 %}{{ raise_exception('odd') }}{% endif %}\
             {% generation %}{{ m | tojson(indent=2) }}{% endgeneration %}{% endfor %}",
            "{% macro f(x, n=2) %}{{ x * n }}{% endmacro %}{% set ns = namespace(a=0) %}\
             {% for m in messages %}{% set ns.a = ns.a + m.content | length %}{% endfor %}\
             {{ f('ab', ns.a) }}{{ none }}{{ true }}{{ strftime_now }}",
        ];
        let messages = [
            ["system", "Say a {{ word }}."],
            ["user", "日本 {% endif %} a"],
        ];
        let messages = messages.map(|[role, content]| {
            ChatMessage::new([("role", role.to_owned()), ("content", content.to_owned())])
        });
        let special = BTreeMap::from([("eos_token".to_owned(), "</s>".to_owned())]);
        let samples = samples.map(|sample| sample.as_bytes().to_vec());
        mpmd_fuzz::bytes("templates", &samples, |source| {
            let source = String::from_utf8_lossy(source);
            let Ok(template) = Template::new(&source, special.clone()) else {
                return;
            };
            let templates = Templates {
                all: [None, Some(template)],
            };
            if let Ok(prompt) = templates.prompt(&messages) {
                assert!(!prompt.contains(MARKS));
            }
        });
    }
}
