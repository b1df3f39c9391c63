//! The tokens of a GGUF file: their texts, types and scores.

use std::collections::BTreeSet;
use std::collections::HashMap;

use mpmd::Result;
use serde_json::Value;

use super::keys::MetadataKeys;

/// The value of a special token's key that means that there is none.
const NONE: u64 = u32::MAX as u64;

/// The type of a token, by the numbers of the format.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum TokenKind {
    Normal,
    /// The token of characters that no other token has.
    Unknown,
    /// A token that only templates write.
    Control,
    /// A token that any text may spell.
    UserDefined,
    /// A place in the table that no token has.
    Unused,
    /// A single byte.
    Byte,
}

/// The tokens of a file.
pub(super) struct Vocabulary<'a> {
    pub(super) texts: Vec<&'a str>,
    pub(super) kinds: Vec<TokenKind>,
    /// The number of each token, by its text. Places without a text have none.
    pub(super) numbers: HashMap<&'a str, usize>,
}

impl<'a> Vocabulary<'a> {
    /// Reads the tokens. `keys` are those of `tokenizer.ggml`.
    ///
    /// # Errors
    ///
    /// If a key is missing or of the wrong length, or two tokens have the same text.
    pub(super) fn of(keys: &MetadataKeys<'a>) -> Result<Self> {
        let texts = keys.texts("tokens")?;
        let texts = texts.ok_or_else(|| keys.unexpected("tokens", "texts", "no such key"))?;
        let kinds = keys.integers("token_type")?;
        let found = kinds.as_ref().map_or(0, Vec::len);
        if found != texts.len() {
            let expected = format!("{} types, one for each token", texts.len());
            return Err(keys.unexpected("token_type", expected, found));
        }

        let mut numbers = HashMap::with_capacity(texts.len());
        for (number, text) in texts.iter().enumerate() {
            if text.is_empty() {
                continue;
            }
            if let Some(first) = numbers.insert(*text, number) {
                let found = format!("{text:?} at {first} and at {number}");
                return Err(keys.unexpected("tokens", "different texts", found));
            }
        }
        Ok(Self {
            kinds: kinds.into_iter().flatten().map(TokenKind::of).collect(),
            texts,
            numbers,
        })
    }

    /// True if the token is a piece: texts spell it by merges.
    pub(super) fn is_piece(&self, number: usize) -> bool {
        self.kinds[number] == TokenKind::Normal
    }

    /// Returns the size of the longest piece in bytes. `None` if there is no piece.
    pub(super) fn longest_piece(&self) -> Option<usize> {
        let pieces = (0..self.texts.len()).filter(|number| self.is_piece(*number));
        pieces.map(|number| self.texts[number].len()).max()
    }

    /// Returns the number of each token by its text, as a `tokenizer.json` has them. In the order
    /// of the numbers, so that all processes have the same bytes.
    pub(super) fn to_json(&self) -> Value {
        let texts = self.texts.iter().enumerate();
        let named = texts.filter(|(_, text)| !text.is_empty());
        let numbers = named.map(|(number, text)| ((*text).to_owned(), number.into()));
        Value::Object(numbers.collect())
    }

    /// Returns the number of a special token, which the file has under a key. `None` if the file
    /// has none.
    ///
    /// # Errors
    ///
    /// If there is no token of this number.
    pub(super) fn special(
        &self,
        keys: &MetadataKeys<'_>,
        key: &str,
        default: Option<usize>,
    ) -> Result<Option<usize>> {
        let Some(number) = keys.count(key)? else {
            return Ok(default.filter(|number| *number < self.texts.len()));
        };
        if number == NONE {
            return Ok(None);
        }
        match usize::try_from(number) {
            Ok(number) if number < self.texts.len() => Ok(Some(number)),
            _ => {
                let expected = format!("the number of a token, below {}", self.texts.len());
                Err(keys.unexpected(key, expected, number))
            }
        }
    }

    /// Returns the numbers of tokens that texts do not spell by merges: those that are looked for
    /// in a text first. `control` are further ones.
    pub(super) fn added(&self, control: &BTreeSet<usize>) -> impl Iterator<Item = usize> {
        let is_added = |number: &usize| {
            let kind = self.kinds[*number];
            let kinds = [
                TokenKind::Unknown,
                TokenKind::Control,
                TokenKind::UserDefined,
            ];
            let has_text = !self.texts[*number].is_empty();
            has_text && (kinds.contains(&kind) || control.contains(number))
        };
        (0..self.texts.len()).filter(is_added)
    }
}

impl TokenKind {
    /// Returns the kind of a number of the format. Numbers that it lacks are normal tokens.
    fn of(number: i64) -> Self {
        match number {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }
}
