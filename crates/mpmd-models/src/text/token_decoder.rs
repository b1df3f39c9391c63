//! Tokens as text: the one place that calls the decoder of a tokenizer.

use std::collections::HashMap;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use mpmd::{Error, Result};
use tokenizers::Tokenizer;

use super::piece_rule::{PieceRule, TextPlace, TokenPiece};

/// Turns the tokens of a model into text. Made once for a model, and shared by its texts.
///
/// The text of a token depends on its place: many tokenizers leave out the blank of the first token
/// of a text. So the text of a reply is that of its tokens behind the prompt's: see
/// [`TextStream`](crate::TextStream).
///
/// Most tokenizers have a rule that gives each token bytes of its own. The text is those bytes read
/// as UTF-8, each longest invalid part as one U+FFFD. The library `tokenizers` agrees where all
/// bytes are valid. Else it may turn a whole run of byte tokens into U+FFFD, valid characters
/// included. Added tokens are text here, even if their characters are those of bytes and make no
/// UTF-8. For other decoders a new token's text is what some last tokens together have more.
pub struct TokenDecoder {
    tokenizer: Arc<Tokenizer>,
    /// The texts of the special tokens.
    specials: HashMap<u32, String>,
    /// The bytes of each token. `None` if the decoder only knows texts of several tokens.
    rule: Option<Arc<PieceRule>>,
}

/// The effect of a token on a text.
pub(super) enum TokenEffect<'a> {
    /// A special token, which adds nothing, and its text.
    Special(&'a str),
    /// A number that the tokenizer lacks.
    Unknown,
    Piece(TokenPiece),
}

impl TokenDecoder {
    /// Creates the decoder of a tokenizer.
    pub fn new(tokenizer: Arc<Tokenizer>) -> Self {
        let added = tokenizer.get_added_tokens_decoder().into_iter();
        let specials = added.filter(|(_, token)| {
            let vocabulary = tokenizer.get_added_vocabulary();
            token.special || vocabulary.is_special_token(&token.content)
        });
        let specials = specials.map(|(id, token)| (id, token.content)).collect();
        let rule = PieceRule::of(tokenizer.get_decoder()).map(Arc::new);
        Self {
            tokenizer,
            specials,
            rule,
        }
    }

    /// Returns the text of tokens, with special tokens as text. Tokens that the tokenizer lacks add
    /// no text.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails.
    pub fn text(&self, tokens: &[u32]) -> Result<String> {
        let Some(rule) = &self.rule else {
            return self.decoded(tokens);
        };
        let mut bytes = Vec::new();
        let mut place = rule.start();
        for token in tokens {
            let piece = match self.effect(*token) {
                TokenEffect::Special(text) => TokenPiece {
                    text: text.to_owned(),
                    is_added: true,
                },
                TokenEffect::Piece(piece) => piece,
                TokenEffect::Unknown => continue,
            };
            bytes.extend(rule.add(piece, &mut place).map_err(|why| failed(&why))?);
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// True if the tokenizer has the token. The model's vocabulary may have more rows than tokens.
    pub fn knows(&self, token: u32) -> bool {
        !matches!(self.effect(token), TokenEffect::Unknown)
    }

    /// True if a text contains that of a special token.
    pub(super) fn has_special(&self, text: &str) -> bool {
        let mut specials = self.specials.values();
        specials.any(|special| !special.is_empty() && text.contains(special))
    }

    /// Returns the effect of a token on a text.
    pub(super) fn effect(&self, token: u32) -> TokenEffect<'_> {
        if let Some(special) = self.specials.get(&token) {
            return TokenEffect::Special(special);
        }
        let Some(text) = self.tokenizer.id_to_token(token) else {
            return TokenEffect::Unknown;
        };
        let added = self.tokenizer.get_added_vocabulary();
        let is_added = added.get_added_tokens_decoder().contains_key(&token);
        TokenEffect::Piece(TokenPiece { text, is_added })
    }

    /// Returns the rule for the bytes of each token.
    pub(super) fn rule(&self) -> Option<&Arc<PieceRule>> {
        self.rule.as_ref()
    }

    /// Returns the bytes that a token adds at `place`, and moves `place` behind it. Special and
    /// unknown tokens add none.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails.
    pub(super) fn add(
        &self,
        rule: &PieceRule,
        token: u32,
        place: &mut TextPlace,
    ) -> Result<Vec<u8>> {
        match self.effect(token) {
            TokenEffect::Piece(piece) => rule.add(piece, place).map_err(|why| failed(&why)),
            TokenEffect::Special(_) | TokenEffect::Unknown => Ok(Vec::new()),
        }
    }

    /// Returns what the tokenizer makes of tokens, with special tokens as text.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails or panics.
    pub(super) fn decoded(&self, tokens: &[u32]) -> Result<String> {
        // Some decoders of the library panic where a text, or a part of it, is empty.
        let decode = || self.tokenizer.decode(tokens, false);
        if !tokens.iter().any(|token| self.knows(*token)) {
            return Ok(String::new());
        }
        catch_unwind(AssertUnwindSafe(decode))
            .map_err(|_| failed(&"its decoder panicked"))?
            .map_err(|why| failed(&why))
    }
}

impl fmt::Debug for TokenDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.specials.len();
        write!(f, "a decoder with {count} special tokens")
    }
}

/// Returns the error for a decoder that fails.
fn failed(why: &dyn fmt::Display) -> Error {
    Error::Environment(format!("the tokenizer: {why}"))
}
