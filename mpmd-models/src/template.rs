//! The chat template of a folder: a conversation as text.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error as JinjaError, ErrorKind, Output, State, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use mpmd::Result;
use serde::Serialize as _;
use serde_json::ser::{Formatter, PrettyFormatter};

use crate::folder::Folder;
use crate::unexpected;

/// The file of the template, in newer folders.
const TEMPLATE: &str = "chat_template.jinja";
/// The files that may have special tokens, and the first a template.
const SETTINGS: [&str; 3] =
    ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"];
/// The key of the template in them.
const KEY: &str = "chat_template";
/// Limit on the instructions of a template: a stranger's may not end.
const FUEL: u64 = 10_000_000;
/// Stand around a reply, where a template says what a reply is. They are for private use.
const MARKS: [char; 2] = ['\u{f8f0e}', '\u{f8f0f}'];

/// The chat template of a folder.
pub(crate) struct Template {
    environment: Environment<'static>,
    special: BTreeMap<String, String>,
    marks_replies: bool,
}

/// Text, and the ranges of its bytes that are replies.
pub(crate) type Marked = (String, Vec<Range<usize>>);

/// Returns the special tokens of a folder by name, such as `eos_token`.
///
/// # Errors
///
/// If a file is damaged.
pub(crate) fn special_tokens(folder: &Folder) -> Result<BTreeMap<String, String>> {
    let mut all = BTreeMap::new();
    for settings in SETTINGS.iter().filter_map(|name| settings(folder, name).transpose()) {
        for (name, value) in settings?.as_object().into_iter().flatten() {
            let content = value.get("content").unwrap_or(value);
            if let Some(content) = content.as_str().filter(|_| name.ends_with("_token")) {
                all.entry(name.clone()).or_insert_with(|| content.to_owned());
            }
        }
    }
    Ok(all)
}

/// Reads a file of settings. `None` if the folder has none.
fn settings(folder: &Folder, name: &str) -> Result<Option<serde_json::Value>> {
    if !folder.companions().contains(&name) {
        return Ok(None);
    }
    let failed = |why: &dyn std::fmt::Display| {
        unexpected(&folder.path().join(name), "", "settings of a tokenizer", why)
    };
    let bytes = folder.small(name).map_err(|why| failed(&why))?;
    serde_json::from_slice(&bytes).map(Some).map_err(|why| failed(&why))
}

/// Returns the text of the template.
fn source(folder: &Folder) -> Result<Option<String>> {
    if folder.companions().contains(&TEMPLATE) {
        let failed = |why: &dyn std::fmt::Display| {
            unexpected(&folder.path().join(TEMPLATE), "", "a chat template", why)
        };
        let bytes = folder.small(TEMPLATE).map_err(|why| failed(&why))?;
        return String::from_utf8(bytes).map(Some).map_err(|why| failed(&why));
    }
    for name in SETTINGS {
        let settings = settings(folder, name)?.unwrap_or_default();
        let is_default = |one: &&serde_json::Value| one["name"] == "default";
        let found = match &settings[KEY] {
            serde_json::Value::Array(several) => {
                several.iter().find(is_default).map(|one| &one["template"])
            }
            one => Some(one),
        };
        if let Some(found) = found.and_then(serde_json::Value::as_str) {
            return Ok(Some(found.to_owned()));
        }
    }
    Ok(None)
}

impl Template {
    /// Reads the template of a folder.
    ///
    /// # Errors
    ///
    /// If the folder has none, or a file is damaged.
    pub(crate) fn of(folder: &Folder) -> Result<Self> {
        let path = folder.path();
        let Some(source) = source(folder)? else {
            let expected = format!("{TEMPLATE}, or {KEY} in {}", SETTINGS[0]);
            return Err(unexpected(path, "", expected, "none"));
        };
        Self::new(&source, special_tokens(folder)?)
            .map_err(|why| unexpected(path, KEY, "a template", format!("{why:#}")))
    }

    fn new(source: &str, special: BTreeMap<String, String>) -> Result<Self, JinjaError> {
        let (source, marks_replies) = with_filters(source);
        let mut environment = Environment::new();
        environment
            .set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_fuel(Some(FUEL));
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.set_formatter(format_value);
        environment.add_filter("tojson", to_json);
        environment
            .add_filter("generation", |text: String| format!("{}{text}{}", MARKS[0], MARKS[1]));
        environment.add_function("raise_exception", |why: String| -> Result<Value, JinjaError> {
            Err(JinjaError::new(ErrorKind::InvalidOperation, why))
        });
        environment.add_template_owned("chat", source)?;
        Ok(Self { environment, special, marks_replies })
    }

    /// Returns the texts of a conversation in which the replies of the assistant from message
    /// `from` on are marked: each with the prompt that it would have in a chat. It is one text, if
    /// the template does not change earlier messages, or itself says what a reply is.
    ///
    /// # Errors
    ///
    /// If there is no such reply, or the template refuses the conversation.
    pub(crate) fn texts(
        &self,
        messages: &[Value],
        from: usize,
        tools: Option<&Value>,
    ) -> Result<Vec<Marked>, JinjaError> {
        let is_reply = |message: &Value| {
            let role = message.get_attr("role");
            role.is_ok_and(|role| role.as_str() == Some("assistant"))
        };
        let failed = |why| JinjaError::new(ErrorKind::InvalidOperation, why);
        let replies = (from..messages.len()).filter(|at| is_reply(&messages[*at]));
        let replies: Vec<usize> = replies.collect();
        if self.marks_replies {
            let (text, mut marked) = self.render(messages, tools, false)?;
            let earlier = messages[..from].iter().filter(|message| is_reply(message)).count();
            marked.drain(..earlier.min(marked.len()));
            return Ok(vec![(text, marked)]);
        }
        let part = |at: &usize| {
            let (prompt, _) = self.render(&messages[..*at], tools, true)?;
            let (text, _) = self.render(&messages[..=*at], tools, false)?;
            match text.starts_with(&prompt) {
                true => Ok((prompt.len()..text.len(), text)),
                false => Err(failed("its text of a reply does not begin with that of the prompt")),
            }
        };
        let parts = replies.iter().map(part).collect::<Result<Vec<_>, _>>()?;
        match parts.last() {
            Some((_, last)) if parts.iter().all(|(_, text)| last.starts_with(text)) => {
                Ok(vec![(last.clone(), parts.iter().map(|(reply, _)| reply.clone()).collect())])
            }
            None => Err(failed("no message has the role \"assistant\"")),
            _ => Ok(parts.into_iter().map(|(reply, text)| (text, vec![reply])).collect()),
        }
    }

    /// Returns the text of a conversation, and the replies that the template marks. `asks` adds the
    /// start of a further reply.
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
        let text = self.environment.get_template("chat")?.render(context)?;
        let (mut plain, mut replies, mut start) = (String::new(), Vec::new(), 0);
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

/// Replaces the tags around replies, which are an extension of the library `transformers`, by those
/// of a filter. Returns true if there are any.
fn with_filters(source: &str) -> (String, bool) {
    let (mut text, mut found) = (String::new(), false);
    for (at, part) in source.split("{%").enumerate() {
        let Some((tag, rest)) = part.split_once("%}").filter(|_| at > 0) else {
            text += if at > 0 { "{%" } else { "" };
            text += part;
            continue;
        };
        let name = tag.trim_matches(['-', '+']).trim();
        let new = match name {
            "generation" => "filter generation",
            "endgeneration" => "endfilter",
            other => other,
        };
        found |= new != name;
        text += &format!("{{%{}%}}{rest}", tag.replacen(name, new, 1));
    }
    (text, found)
}

/// Writes a value as Python does.
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
    let (indent, _) =
        (options.get::<Option<usize>>("indent")?, options.get::<Option<bool>>("ensure_ascii")?);
    options.assert_all_used()?;
    let mut json = Vec::new();
    let written = match indent {
        Some(width) => {
            let indent = " ".repeat(width);
            let form = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, form))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut json, Spaced)),
    };
    let failed = |why: String| JinjaError::new(ErrorKind::BadSerialization, why);
    written.map_err(|why| failed(why.to_string()))?;
    String::from_utf8(json).map_err(|why| failed(why.to_string()))
}

/// JSON on one line, with blanks behind commas and colons.
struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: io::Write + ?Sized>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        to.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: io::Write + ?Sized>(
        &mut self,
        to: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.begin_array_value(to, first)
    }

    fn begin_object_value<W: io::Write + ?Sized>(&mut self, to: &mut W) -> io::Result<()> {
        to.write_all(b": ")
    }
}
