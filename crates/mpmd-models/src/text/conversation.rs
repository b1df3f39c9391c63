//! A conversation as it comes from outside, in the form of all clients and data sets.
//!
//! This is the only reader of messages. A message is an object with `role` and `content`. It may
//! have thoughts, calls of tools, and what others keep in a history. Values that say nothing are
//! taken as absent.

use minijinja::Value;
use minijinja::value::ValueKind;
use mpmd::train::tensors::{JsonError, read_json};
use serde::Deserialize;
use serde_json::Value as Json;

use crate::config::neutral::asks_for_nothing;

/// The keys of a message under which clients send the model's thoughts, and templates read them.
pub(super) const THOUGHTS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];
/// The keys by which a reply says whether it has a loss.
const WEIGHTS: [&str; 2] = ["weight", "train"];
/// Types of the parts of a content that are texts.
const TEXTS: [&str; 3] = ["text", "input_text", "output_text"];
/// Keys of a part that change no prompt.
const PART_KEYS: [&str; 4] = ["type", "text", "cache_control", "annotations"];
/// The key of the template's variables, in requests and lines of examples.
pub(super) const KWARGS: &str = "chat_template_kwargs";
/// Names that a client cannot give to variables of a template.
const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];
/// Largest length of a value that an error quotes, in characters.
const SHOWN: usize = 60;

/// A conversation: messages, and what a chat template reads beside them.
#[derive(Clone, Debug, Default)]
pub struct Conversation {
    pub(super) messages: Vec<Message>,
    /// The definitions of tools, if there are any.
    pub(super) tools: Option<Value>,
    /// Variables of the template by name.
    pub(super) variables: Vec<(String, Value)>,
}

/// A message of a conversation.
#[derive(Clone, Debug)]
pub(super) struct Message {
    pub(super) role: String,
    /// The values by key. They keep the order in which they came, since a template can write the
    /// whole message.
    pub(super) values: Vec<(String, Value)>,
    /// The thoughts before a reply. Templates differ in the key that they read.
    pub(super) thoughts: Option<String>,
    /// Keys with a value that this reader does not know. A template may read them.
    pub(super) unknown: Vec<String>,
    /// False for a reply that must not be learnt.
    pub(super) has_loss: bool,
}

/// Error: a value of a conversation is of the wrong kind.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{field}: expected {expected}, found {found}")]
pub struct ConversationFault {
    /// Path of the value, such as `messages[1].content`.
    pub field: String,
    /// The expected kind of value.
    pub expected: String,
    /// The start of the value, as JSON.
    pub found: String,
}

/// Error: a conversation cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// The bytes are no JSON object.
    #[error(transparent)]
    Json(#[from] JsonError),
    /// A value is of the wrong kind.
    #[error(transparent)]
    Fault(#[from] ConversationFault),
}

/// The fields of an object that make a conversation.
#[derive(Deserialize)]
struct ConversationFields {
    #[serde(default)]
    messages: Value,
    #[serde(default)]
    chat_template_kwargs: Value,
}

impl Conversation {
    /// Creates a conversation with one message of the role `user`.
    pub fn of_user(text: &str) -> Self {
        let values = [("role", "user"), ("content", text)];
        let message = Message {
            role: "user".to_owned(),
            values: values
                .map(|(key, value)| (key.to_owned(), value.into()))
                .into(),
            thoughts: None,
            unknown: Vec::new(),
            has_loss: true,
        };
        Self {
            messages: vec![message],
            ..Self::default()
        }
    }

    /// Reads the fields `messages` and `chat_template_kwargs` of a JSON object.
    ///
    /// # Errors
    ///
    /// If the bytes are no JSON object, or these fields no conversation with a message.
    pub fn of_json(object: &[u8]) -> Result<Self, ConversationError> {
        let fields: ConversationFields = read_json(object)?;
        let conversation = Self::of_messages("messages", &fields.messages)?;
        Ok(conversation.with_variables(KWARGS, &fields.chat_template_kwargs)?)
    }

    /// Reads the messages of a list. `field` is its name, for errors.
    pub(super) fn of_messages(field: &str, list: &Value) -> Result<Self, ConversationFault> {
        let expected = "a list of messages";
        let found = match list.kind() {
            ValueKind::Seq if list.len() == Some(0) => return Err(fault(field, expected, list)),
            ValueKind::Seq => list.try_iter().map_err(|_| fault(field, expected, list))?,
            _ => return Err(fault(field, expected, list)),
        };
        let messages = found
            .enumerate()
            .map(|(at, message)| Message::of(&format!("{field}[{at}]"), &message));
        Ok(Self {
            messages: messages.collect::<Result<_, _>>()?,
            ..Self::default()
        })
    }

    /// Gives the template a variable with this value.
    ///
    /// # Errors
    ///
    /// If the name is one that the template gets from the conversation.
    pub fn with_variable(mut self, name: &str, value: &Json) -> Result<Self, ConversationFault> {
        // All JSON is such a value.
        let value = serde_json::from_value(value.clone()).unwrap_or_default();
        self.add_variable(name, name, value)?;
        Ok(self)
    }

    /// Gives the template all variables of an object. `field` is its name, for errors. Nothing is
    /// added if `object` is null.
    pub(super) fn with_variables(
        mut self,
        field: &str,
        object: &Value,
    ) -> Result<Self, ConversationFault> {
        let expected = "an object with variables of the chat template";
        if object.is_none() || object.is_undefined() {
            return Ok(self);
        }
        for (name, value) in pairs(object).ok_or_else(|| fault(field, expected, object))? {
            self.add_variable(&format!("{field}.{name}"), &name, value)?;
        }
        Ok(self)
    }

    /// Adds the definitions of tools, unless `tools` is null.
    pub(super) fn with_tools(mut self, tools: Value) -> Result<Self, ConversationFault> {
        match tools.kind() {
            ValueKind::None | ValueKind::Undefined => self.tools = None,
            ValueKind::Seq => self.tools = Some(tools),
            _ => return Err(fault("tools", "a list of tools", &tools)),
        }
        Ok(self)
    }

    /// Returns this conversation followed by the messages of another.
    pub(super) fn followed_by(mut self, other: Self) -> Self {
        self.messages.extend(other.messages);
        self
    }

    fn add_variable(
        &mut self,
        field: &str,
        name: &str,
        value: Value,
    ) -> Result<(), ConversationFault> {
        if RESERVED.contains(&name) || name.ends_with("_token") {
            let expected = "another name, since the conversation or the tokenizer has this one";
            return Err(fault(field, expected, &value));
        }
        self.variables.retain(|(given, _)| given != name);
        self.variables.push((name.to_owned(), value));
        Ok(())
    }

    /// True if a message calls tools.
    pub(super) fn has_calls(&self) -> bool {
        let mut messages = self.messages.iter();
        messages.any(|message| message.get("tool_calls").is_some())
    }

    /// Returns the roles of the messages, in their order.
    pub fn roles(&self) -> impl Iterator<Item = &str> {
        self.messages.iter().map(|message| &*message.role)
    }
}

impl Message {
    /// Reads the message at the path `path`.
    fn of(path: &str, value: &Value) -> Result<Self, ConversationFault> {
        let expected = "an object with role and content";
        let found = pairs(value).ok_or_else(|| fault(path, expected, value))?;
        let mut message = Self {
            role: String::new(),
            values: Vec::new(),
            thoughts: None,
            unknown: Vec::new(),
            has_loss: true,
        };
        for (key, value) in found {
            let path = format!("{path}.{key}");
            if key != "content" && asks_for_nothing(&json(&value)) && !is_weight(&key) {
                continue;
            }
            match &*key {
                "role" => {
                    message.role = text(&path, &value)?;
                    message.push(key, value);
                }
                "content" => {
                    let content = Content::of(&path, &value)?;
                    if let Some(thoughts) = content.thoughts {
                        message.set_thoughts(&path, thoughts)?;
                    }
                    message.push(key, content.text.into());
                }
                "name" | "tool_call_id" => {
                    let text = text(&path, &value)?;
                    message.push(key, text.into());
                }
                "tool_calls" => {
                    check_calls(&path, &value)?;
                    message.push(key, value);
                }
                key if THOUGHTS.contains(&key) => {
                    message.set_thoughts(&path, text(&path, &value)?)?;
                }
                key if is_weight(key) => message.has_loss &= has_loss(&path, &value)?,
                _ => {
                    message.unknown.push(key.clone());
                    message.push(key, value);
                }
            }
        }

        if message.role.is_empty() {
            let found = Value::from_pairs(message.values);
            return Err(fault(&format!("{path}.role"), "a text", &found));
        }
        if message.get("content").is_none() {
            message.push("content".to_owned(), "".into());
        }
        Ok(message)
    }

    /// Sets the thoughts. Returns an error if the message has others already.
    fn set_thoughts(&mut self, path: &str, thoughts: String) -> Result<(), ConversationFault> {
        match &self.thoughts {
            Some(earlier) if *earlier != thoughts => {
                let expected = "the same thoughts as under another key, or in the content";
                Err(fault(path, expected, &thoughts.into()))
            }
            _ => {
                self.thoughts = Some(thoughts);
                Ok(())
            }
        }
    }

    fn push(&mut self, key: String, value: Value) {
        self.values.push((key, value));
    }

    /// Returns the value of a key, if the message has it.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let found = self.values.iter().find(|(own, _)| own == key);
        found.map(|(_, value)| value)
    }

    /// Returns the content.
    pub(super) fn content(&self) -> &str {
        self.get("content").and_then(Value::as_str).unwrap_or("")
    }
}

/// The content of a message: the texts of its parts, joined.
#[derive(Default)]
struct Content {
    text: String,
    thoughts: Option<String>,
}

impl Content {
    /// Reads a content: null, a text, or a list of parts.
    fn of(path: &str, value: &Value) -> Result<Self, ConversationFault> {
        let expected = "a text, or a list of objects with type \"text\" and text";
        match value.kind() {
            ValueKind::None | ValueKind::Undefined => return Ok(Self::default()),
            ValueKind::String => {
                return Ok(Self {
                    text: text(path, value)?,
                    thoughts: None,
                });
            }
            ValueKind::Seq => {}
            _ => return Err(fault(path, expected, value)),
        }

        let mut content = Self::default();
        let parts = value.try_iter().map_err(|_| fault(path, expected, value))?;
        for (at, part) in parts.enumerate() {
            content.add(&format!("{path}[{at}]"), &part)?;
        }
        Ok(content)
    }

    /// Adds a part: a text, or an object with a text or with thoughts.
    fn add(&mut self, path: &str, part: &Value) -> Result<(), ConversationFault> {
        let expected = "an object with type \"text\" and text";
        if part.kind() == ValueKind::String {
            self.text += &text(path, part)?;
            return Ok(());
        }
        let Some(values) = pairs(part) else {
            return Err(fault(path, expected, part));
        };

        let get = |key: &str| values.iter().find(|(own, _)| own == key);
        let kind = get("type").and_then(|(_, kind)| kind.as_str());
        let key = match kind {
            Some(kind) if TEXTS.contains(&kind) => "text",
            Some("thinking") => "thinking",
            _ => return Err(fault(path, expected, part)),
        };
        let (_, found) = get(key).ok_or_else(|| fault(path, expected, part))?;
        let found = Self::of(&format!("{path}.{key}"), found)?.text;
        match key {
            "text" => self.text += &found,
            _ => self.thoughts.get_or_insert_default().push_str(&found),
        }

        let asks = |(own, value): &&(String, Value)| {
            own != key && !PART_KEYS.contains(&&**own) && !asks_for_nothing(&json(value))
        };
        match values.iter().find(asks) {
            None => Ok(()),
            Some((own, value)) => Err(fault(&format!("{path}.{own}"), "no such key", value)),
        }
    }
}

/// Checks calls of tools: a list of objects with a name, and perhaps arguments. Some data sets
/// leave out the object `function` around them.
fn check_calls(path: &str, calls: &Value) -> Result<(), ConversationFault> {
    let expected = "a list of objects with a function and its name";
    if calls.kind() != ValueKind::Seq {
        return Err(fault(path, expected, calls));
    }
    let all = calls.try_iter().map_err(|_| fault(path, expected, calls))?;
    for (at, call) in all.enumerate() {
        let function = call.get_attr("function").unwrap_or_default();
        let function = if function.is_undefined() {
            &call
        } else {
            &function
        };
        let name = function.get_attr("name").unwrap_or_default();
        if pairs(&call).is_none() || name.as_str().is_none() {
            let expected = "an object with a function and its name";
            return Err(fault(&format!("{path}[{at}]"), expected, &call));
        }
        let arguments = function.get_attr("arguments").unwrap_or_default();
        if let Some(text) = arguments.as_str()
            && !text.trim().is_empty()
            && read_json::<Value>(text.as_bytes()).is_err()
        {
            return Err(fault(
                &format!("{path}[{at}].arguments"),
                "JSON",
                &arguments,
            ));
        }
    }
    Ok(())
}

/// True if a key says whether a reply has a loss.
fn is_weight(key: &str) -> bool {
    WEIGHTS.contains(&key)
}

/// Reads whether a reply has a loss: a flag, 0, or 1. It has one by default.
fn has_loss(path: &str, value: &Value) -> Result<bool, ConversationFault> {
    match json(value) {
        Json::Null => Ok(true),
        Json::Bool(flag) => Ok(flag),
        Json::Number(number) if number.as_f64() == Some(0.0) => Ok(false),
        Json::Number(number) if number.as_f64() == Some(1.0) => Ok(true),
        _ => Err(fault(path, "0 or 1, or true or false", value)),
    }
}

/// Reads a text.
fn text(path: &str, value: &Value) -> Result<String, ConversationFault> {
    let text = value.as_str().map(str::to_owned);
    text.ok_or_else(|| fault(path, "a text", value))
}

/// Returns the keys and values of an object, in its order. `None` if `value` is no object.
pub(super) fn pairs(value: &Value) -> Option<Vec<(String, Value)>> {
    if value.kind() != ValueKind::Map {
        return None;
    }
    let keys = value.try_iter().ok()?;
    let pair = |key: Value| Some((key.as_str()?.to_owned(), value.get_item(&key).ok()?));
    keys.map(pair).collect()
}

/// Returns a value as JSON.
fn json(value: &Value) -> Json {
    serde_json::to_value(value).unwrap_or_default()
}

fn fault(field: &str, expected: &str, found: &Value) -> ConversationFault {
    let found = if found.is_undefined() {
        "none".to_owned()
    } else {
        json(found).to_string()
    };
    ConversationFault {
        field: field.chars().take(2 * SHOWN).collect(),
        expected: expected.to_owned(),
        found: found.chars().take(SHOWN).collect(),
    }
}

#[cfg(test)]
mod tests;
