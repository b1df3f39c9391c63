//! The prompts of a completion: one, or a list of them.

use serde_json::Value;

use super::failure::HttpFailure;
use super::fields::{Fields, whole};
use super::parsed_request::PromptSource;

/// Largest number of prompts in a request.
const MOST_PROMPTS: usize = 128;
const FIELD: &str = "prompt";
const EXPECTED: &str = "a text, a list of tokens, or a list of these";

/// A prompt of a request, and its name in error messages.
pub(super) struct NamedPrompt {
    pub(super) name: String,
    pub(super) source: PromptSource,
}

/// Removes and reads the field `prompt`: one prompt, or a list of them. `waiting` is the largest
/// number of requests that the server lets wait.
pub(super) fn prompts(
    fields: &mut Fields<'_>,
    waiting: usize,
) -> Result<Vec<NamedPrompt>, HttpFailure> {
    let special = fields.flag("add_special_tokens", true)?;
    let value = fields.take(FIELD, EXPECTED, |value| Some(value.clone()))?;
    let value = value.ok_or_else(|| HttpFailure::field(FIELD, "expected a prompt, found none"))?;

    let several = match value {
        Value::Array(several) if !several.first().is_some_and(Value::is_number) => several,
        one => vec![one],
    };
    let most = MOST_PROMPTS.min(waiting);
    if several.is_empty() || several.len() > most {
        let found = several.len();
        let why = format!("expected 1 to {most} prompts, found {found}");
        return Err(HttpFailure::field(FIELD, why));
    }

    let is_alone = several.len() == 1;
    let named = several.into_iter().enumerate().map(|(at, value)| {
        let name = match is_alone {
            true => FIELD.to_owned(),
            false => format!("{FIELD}[{at}]"),
        };
        match read_prompt(value, special) {
            Some(source) => Ok(NamedPrompt { name, source }),
            None => Err(HttpFailure::field(name, format!("expected {EXPECTED}"))),
        }
    });
    named.collect()
}

/// Reads one prompt. `None` if it is neither a text nor a list of tokens.
fn read_prompt(value: Value, special: bool) -> Option<PromptSource> {
    match value {
        Value::String(text) => Some(PromptSource::Text { text, special }),
        tokens => read_tokens(&tokens).map(PromptSource::Tokens),
    }
}

/// Reads a list of tokens from JSON. `None` if an element is not a token number.
pub(super) fn read_tokens(value: &Value) -> Option<Vec<u32>> {
    let token = |value: &Value| u32::try_from(whole(value)?).ok();
    value.as_array()?.iter().map(token).collect()
}
