//! The most bytes of text that one token of a tokenizer stands for.

use serde_json::Value;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{ModelWrapper, Tokenizer};

/// Factor by which the normal form C of Unicode makes a text shorter at most.
const COMPOSED: usize = 4;

/// A bound on the bytes of text that a token stands for, so that the length of a text tells how
/// many tokens it has at least.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct TokenBytes {
    /// Largest number of bytes of a token.
    longest: usize,
    /// True if a token may take any number of blanks beside it.
    takes_blanks: bool,
}

impl TokenBytes {
    /// Returns the bound of a tokenizer. `None` if a token may stand for a text of any length, as
    /// where unknown characters are dropped.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        if !has_every_byte(tokenizer) {
            return None;
        }
        let normalizer = match tokenizer.get_normalizer() {
            Some(normalizer) => serde_json::to_value(normalizer).ok()?,
            None => Value::Null,
        };
        let factor = shrinking(&normalizer)?;

        let vocabulary = tokenizer.get_vocab(true);
        let longest = vocabulary.keys().map(String::len).max()?;
        let added = tokenizer.get_added_tokens_decoder();
        Some(Self {
            longest: longest * factor,
            takes_blanks: added.values().any(|token| token.lstrip || token.rstrip),
        })
    }

    /// Returns a lower bound on the number of tokens of a text.
    pub fn fewest_tokens(self, text: &str) -> usize {
        let bytes = match self.takes_blanks {
            true => text.split_whitespace().map(str::len).sum(),
            false => text.len(),
        };
        bytes.div_ceil(self.longest)
    }
}

/// True if the tokenizer keeps every byte of a text, and has tokens for each by itself.
fn has_every_byte(tokenizer: &Tokenizer) -> bool {
    let ModelWrapper::BPE(bpe) = tokenizer.get_model() else {
        return false;
    };
    let splitter = tokenizer.get_pre_tokenizer().map(serde_json::to_value);
    let splitter = match splitter {
        Some(Ok(splitter)) => splitter,
        Some(Err(_)) => return false,
        None => Value::Null,
    };
    if !keeps_text(&splitter) {
        return false;
    }

    let has = |token: &str| tokenizer.token_to_id(token).is_some();
    let has_bytes = || (0..=u8::MAX).all(|byte| has(&format!("<0x{byte:02X}>")));
    let has_chars = || {
        ByteLevel::alphabet()
            .iter()
            .all(|char| has(&char.to_string()))
    };
    (bpe.byte_fallback && has_bytes()) || (has_type(&splitter, "ByteLevel") && has_chars())
}

/// True if a pre-tokenizer, as JSON, drops no part of a text.
fn keeps_text(splitter: &Value) -> bool {
    if splitter.is_null() {
        return true;
    }
    match splitter["type"].as_str() {
        Some("ByteLevel" | "Digits" | "Metaspace") => true,
        Some("Punctuation" | "Split") => splitter["behavior"] != "Removed",
        Some("Sequence") => {
            let parts = splitter["pretokenizers"].as_array();
            parts.is_some_and(|parts| parts.iter().all(keeps_text))
        }
        _ => false,
    }
}

/// True if a pre-tokenizer, as JSON, is of a type or has a part of it.
fn has_type(splitter: &Value, name: &str) -> bool {
    let parts = splitter["pretokenizers"].as_array();
    splitter["type"] == name
        || parts.is_some_and(|parts| parts.iter().any(|part| has_type(part, name)))
}

/// Returns the factor by which a normalizer, as JSON, makes a text shorter at most. `None` if it is
/// not known.
fn shrinking(normalizer: &Value) -> Option<usize> {
    if normalizer.is_null() {
        return Some(1);
    }
    match normalizer["type"].as_str()? {
        "ByteLevel" | "Prepend" => Some(1),
        "NFC" => Some(COMPOSED),
        "Replace" => {
            let pattern = normalizer["pattern"]["String"].as_str()?;
            let is_longer = normalizer["content"].as_str()?.len() >= pattern.len();
            is_longer.then_some(1)
        }
        "Sequence" => {
            let parts = normalizer["normalizers"].as_array()?;
            parts.iter().map(shrinking).product()
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// The byte-level tokenizer of the test folders.
    const BYTES: &str = include_str!("../../tests/folders/plain/tokenizer.json");

    fn bound_of(change: impl FnOnce(&mut Value)) -> Option<TokenBytes> {
        let mut tokenizer: Value = serde_json::from_str(BYTES).unwrap();
        change(&mut tokenizer);
        TokenBytes::of(&Tokenizer::from_bytes(tokenizer.to_string()).unwrap())
    }

    #[test]
    fn texts_have_no_fewer_tokens_than_the_bound() {
        let tokenizer = Tokenizer::from_bytes(BYTES).unwrap();
        let bound = TokenBytes::of(&tokenizer).unwrap();
        for text in [
            "",
            "a",
            "once upon a time",
            "日本語 🙂",
            &"the ".repeat(999),
        ] {
            let tokens = tokenizer.encode(text, false).unwrap().len();
            assert!(bound.fewest_tokens(text) <= tokens, "{text:.20}");
        }
        assert!(bound.fewest_tokens(&"x".repeat(1 << 20)) > 10_000);
    }

    #[test]
    fn tokenizers_that_drop_text_have_no_bound() {
        let plain = bound_of(|_| {}).unwrap();
        assert!(!plain.takes_blanks);
        let composed = bound_of(|json| json["normalizer"] = json!({ "type": "NFC" })).unwrap();
        assert_eq!(composed.longest, COMPOSED * plain.longest);

        let strip = json!({ "type": "Strip", "strip_left": true, "strip_right": true });
        assert_eq!(bound_of(|json| json["normalizer"] = strip), None);
        let words = json!({ "type": "WhitespaceSplit" });
        assert_eq!(bound_of(|json| json["pre_tokenizer"] = words), None);
        let taking = bound_of(|json| json["added_tokens"][0]["rstrip"] = json!(true)).unwrap();
        assert!(taking.takes_blanks && taking.fewest_tokens(&" ".repeat(1 << 20)) == 0);
    }
}
