//! The fields of a request's JSON. Each is taken once. Fields that are left at the end
//! are not supported.

use std::ops::RangeInclusive;

use mpmd::train::tensors::{JsonError, read_json};
use mpmd_models::{Conversation, ConversationError, ConversationFault};
use serde_json::{Map, Value};

use super::failure::HttpFailure;
use super::neutral_fields::{is_neutral, is_of_other_servers};

/// Largest length of a value that an error message quotes, in characters.
pub(super) const SHOWN: usize = 60;

/// Largest number of wrong letters in a name that counts as a misspelling of another one.
const MOST_EDITS: usize = 2;

/// The JSON fields of a request that have not been taken.
pub(super) struct Fields<'a> {
    body: &'a [u8],
    fields: Map<String, Value>,
    /// The names that were asked for: the fields of the endpoint.
    known: Vec<String>,
}

impl<'a> Fields<'a> {
    pub(super) fn of(body: &'a [u8]) -> Result<Self, HttpFailure> {
        match read_json(body) {
            Ok(Value::Object(fields)) => Ok(Self {
                body,
                fields,
                known: Vec::new(),
            }),
            Ok(_) => Err(HttpFailure::invalid("the body: expected an object")),
            Err(why) => Err(invalid_json(why)),
        }
    }

    /// Removes and reads the conversation of a chat: its messages, and the variables of the
    /// template. The keys of messages keep their order, which maps of `serde_json` do not.
    pub(super) fn conversation(&mut self) -> Result<Conversation, HttpFailure> {
        let messages = self.fields.remove("messages").unwrap_or_default();
        self.fields.remove("chat_template_kwargs");
        if messages.is_null() || messages.as_array().is_some_and(Vec::is_empty) {
            let why = "expected a list of messages, found none";
            return Err(HttpFailure::field("messages", why));
        }
        Conversation::of_json(self.body).map_err(|why| match why {
            ConversationError::Json(why) => invalid_json(why),
            ConversationError::Fault(ConversationFault {
                field,
                expected,
                found,
            }) => HttpFailure::field(field, format!("expected {expected}, found {found}")),
        })
    }

    /// Removes and returns a field. `None` if it is absent or null.
    pub(super) fn take<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&Value) -> Option<T>,
    ) -> Result<Option<T>, HttpFailure> {
        self.known.push(name.to_owned());
        let Some(value) = self.fields.remove(name).filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        let wrong = || {
            let found: String = value.to_string().chars().take(SHOWN).collect();
            HttpFailure::field(name, format!("expected {expected}, found {found}"))
        };
        read(&value).map(Some).ok_or_else(wrong)
    }

    pub(super) fn flag(&mut self, name: &str, default: bool) -> Result<bool, HttpFailure> {
        Ok(self
            .take(name, "true or false", Value::as_bool)?
            .unwrap_or(default))
    }

    pub(super) fn number(&mut self, name: &str, default: f64) -> Result<f64, HttpFailure> {
        Ok(self
            .take(name, "a number", Value::as_f64)?
            .unwrap_or(default))
    }

    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, HttpFailure> {
        self.take(name, "a text", |value| value.as_str().map(str::to_owned))
    }

    /// Removes and returns a field that must be a whole number in `range`.
    pub(super) fn count(
        &mut self,
        name: &str,
        range: RangeInclusive<u64>,
    ) -> Result<Option<usize>, HttpFailure> {
        let least = range.start();
        let expected = match range.end() {
            &u64::MAX => format!("a whole number, {least} or more"),
            most => format!("a whole number from {least} to {most}"),
        };
        self.take(name, &expected, |value| {
            let count = u64::try_from(whole(value)?).ok()?;
            let count = Some(count).filter(|count| range.contains(count))?;
            usize::try_from(count).ok()
        })
    }

    /// Returns an error if a field is left that asks for something.
    pub(super) fn end(mut self) -> Result<(), HttpFailure> {
        for (choice, list) in [("tool_choice", "tools"), ("function_call", "functions")] {
            // None of the list may be called.
            if self
                .fields
                .get(choice)
                .is_some_and(|choice| choice == "none")
            {
                self.fields.remove(list);
            }
        }
        match self
            .fields
            .iter()
            .find(|(name, value)| !is_neutral(name, value))
        {
            None => Ok(()),
            Some((name, value)) => {
                let found: String = value.to_string().chars().take(SHOWN).collect();
                let shown: String = name.chars().take(SHOWN).collect();
                let why = match self.similar(name) {
                    Some(known) => format!("there is no such field; did you mean {known}?"),
                    None => format!("not supported by this server, leave it out: {found}"),
                };
                Err(HttpFailure::field(shown, why).code("unsupported_parameter"))
            }
        }
    }

    /// Returns the field of the endpoint of which `name` may be a misspelling.
    fn similar(&self, name: &str) -> Option<&str> {
        if is_of_other_servers(name) {
            return None;
        }
        let known = self.known.iter().map(|known| {
            let edits = strsim::damerau_levenshtein(known, name);
            (edits, known.as_str())
        });
        let (edits, known) = known.min()?;
        (edits <= MOST_EDITS && name.len() > 2 * MOST_EDITS).then_some(known)
    }
}

/// Returns a whole number, which may be written as `5.0`. `None` for all other values, and for
/// those beyond 2^53 that are not written as whole numbers.
pub(super) fn whole(value: &Value) -> Option<i128> {
    const EXACT: f64 = (1u64 << 53) as f64;
    if let Some(whole) = value.as_u64() {
        return Some(whole.into());
    }
    if let Some(whole) = value.as_i64() {
        return Some(whole.into());
    }
    let number = value.as_f64()?;
    let is_whole = number.fract() == 0.0 && number.abs() <= EXACT;
    is_whole.then_some(number as i128)
}

/// Returns the error for a body that is no JSON, or repeats a key. The field at fault is the
/// repeated key, or the key whose value is no JSON.
fn invalid_json(why: JsonError) -> HttpFailure {
    match why {
        JsonError::RepeatedKey { key, line, column } => {
            let key: String = key.chars().take(SHOWN).collect();
            let why =
                format!("expected once in its object, found again at line {line} column {column}");
            HttpFailure::field(key, why)
        }
        JsonError::Invalid(why) => {
            let said = format!("expected JSON: {}", why.fault());
            match &why.key {
                Some(key) => HttpFailure::field(key.chars().take(SHOWN).collect::<String>(), said),
                None => HttpFailure::invalid(format!("the body: {said}")),
            }
        }
    }
}
