//! The log probabilities of a reply's tokens, in the two forms of OpenAI.

use std::fmt::Write as _;

use mpmd::Result;
use mpmd_models::TextStream;
use serde_json::{Map, Value, json};

use crate::request::ReplyToken;

/// The value for the logarithm of probability 0, since JSON has no infinity.
const NEVER: f32 = -9999.0;

/// A token of a reply whose log probabilities the client gets.
pub(super) struct TokenLogprobs {
    chosen: TokenCandidate,
    /// The most probable tokens, the most probable first.
    top: Vec<TokenCandidate>,
    /// Number of characters in the reply before the token.
    offset: usize,
}

/// A token that may stand at a place of a reply.
struct TokenCandidate {
    id: u32,
    /// The bytes of the token there.
    bytes: Vec<u8>,
    logprob: f32,
}

impl TokenLogprobs {
    /// Returns the log probabilities of a token that comes behind `text`. `None` if the request
    /// does not ask for them.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails.
    pub(super) fn of(token: &ReplyToken, text: &TextStream) -> Result<Option<Self>> {
        let Some(logprobs) = &token.logprobs else {
            return Ok(None);
        };
        let candidate = |id: u32, logprob: f32| {
            let bytes = text.bytes_of(id)?;
            let logprob = logprob.max(NEVER);
            Ok(TokenCandidate { id, bytes, logprob })
        };
        let top = logprobs.top.iter();
        let top = top.map(|(id, logprob)| candidate(*id, *logprob));
        Ok(Some(Self {
            chosen: candidate(token.id, logprobs.chosen)?,
            top: top.collect::<Result<_>>()?,
            offset: text.characters(),
        }))
    }
}

/// Returns the field `logprobs` of a chat's choice.
pub(super) fn chat_logprobs(tokens: &[TokenLogprobs]) -> Value {
    let entry = |token: &TokenCandidate| {
        let text = String::from_utf8_lossy(&token.bytes);
        json!({ "token": text, "logprob": token.logprob, "bytes": token.bytes })
    };
    let content = tokens.iter().map(|token| {
        let mut content = entry(&token.chosen);
        content["top_logprobs"] = token.top.iter().map(entry).collect();
        content
    });
    json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
}

/// Returns the field `logprobs` of a completion's choice.
pub(super) fn text_logprobs(tokens: &[TokenLogprobs]) -> Value {
    let texts = tokens.iter().map(|token| token.chosen.name());
    let chosen = tokens.iter().map(|token| token.chosen.logprob);
    let offsets = tokens.iter().map(|token| token.offset);
    json!({
        "tokens": texts.collect::<Vec<_>>(),
        "token_logprobs": chosen.collect::<Vec<_>>(),
        "top_logprobs": tokens.iter().map(names_of_top).collect::<Vec<_>>(),
        "text_offset": offsets.collect::<Vec<_>>(),
    })
}

/// Returns the log probabilities of a token and of the most probable ones, each by its name. A
/// token with the name of another is told by its number.
fn names_of_top(token: &TokenLogprobs) -> Map<String, Value> {
    let mut names = Map::from_iter([(token.chosen.name(), token.chosen.logprob.into())]);
    let others = token.top.iter().filter(|top| top.id != token.chosen.id);
    for top in others {
        let mut name = top.name();
        if names.contains_key(&name) {
            name = format!("token_id:{}", top.id);
        }
        names.insert(name, top.logprob.into());
    }
    names
}

impl TokenCandidate {
    /// Returns the text of the token. Bytes that are no text are `bytes:` and their escapes, as
    /// OpenAI writes them.
    fn name(&self) -> String {
        match std::str::from_utf8(&self.bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => self
                .bytes
                .iter()
                .fold("bytes:".to_owned(), |mut name, byte| {
                    // Writing to a text cannot fail.
                    _ = write!(name, "\\x{byte:02x}");
                    name
                }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(id: u32, bytes: &[u8]) -> TokenCandidate {
        let bytes = bytes.to_owned();
        let logprob = -(id as f32);
        TokenCandidate { id, bytes, logprob }
    }

    #[test]
    fn tokens_of_equal_bytes_and_parts_of_characters_stay_apart() {
        let token = TokenLogprobs {
            chosen: candidate(5, b"\xf0\x9f"),
            top: vec![
                candidate(1, b"\xf0"),
                candidate(2, b"a"),
                candidate(3, b"a"),
                candidate(4, b""),
                candidate(5, b"\xf0\x9f"),
                candidate(6, b""),
                candidate(7, b"\xf0\x9f"),
            ],
            offset: 3,
        };
        let tokens = [token];
        assert_eq!(
            text_logprobs(&tokens),
            json!({
                "tokens": ["bytes:\\xf0\\x9f"],
                "token_logprobs": [-5.0],
                "top_logprobs": [{
                    "bytes:\\xf0": -1.0, "a": -2.0, "token_id:3": -3.0, "": -4.0,
                    "bytes:\\xf0\\x9f": -5.0, "token_id:6": -6.0, "token_id:7": -7.0,
                }],
                "text_offset": [3],
            })
        );
        let chat = chat_logprobs(&tokens);
        let content = &chat["content"][0];
        assert_eq!(content["token"], "\u{fffd}");
        assert_eq!(content["bytes"], json!([0xf0, 0x9f]));
        assert_eq!(content["top_logprobs"].as_array().unwrap().len(), 7);
    }
}
