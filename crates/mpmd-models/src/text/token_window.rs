//! The bytes that tokens add to a text, each behind the tokens before it.

use std::sync::Arc;

use mpmd::Result;

use super::piece_rule::{PieceRule, TextPlace};
use super::token_decoder::{TokenDecoder, TokenEffect};

/// Number of tokens before a new one that a decoder sees if it has no rule for each token.
const CONTEXT: usize = 16;
/// Number of tokens that may be the beginning of a character if the decoder has no rule for each.
const MOST_UNFINISHED: usize = 16;
/// Number of bytes before a text that may be the beginning of its first character, and one more.
const TAIL: usize = 4;

/// The place behind the tokens of a text, as far as the text of the next token depends on it.
pub(super) enum TokenContext {
    /// For decoders that know the bytes of each token.
    Place {
        rule: Arc<PieceRule>,
        place: TextPlace,
    },
    /// For other decoders.
    Window(TokenWindow),
}

impl TokenContext {
    /// Returns the place behind a prompt. Reads few of its tokens. Appends the last bytes of the
    /// prompt's text to `bytes`: those of an unfinished character, and perhaps some before them.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails.
    pub(super) fn behind(
        decoder: &TokenDecoder,
        prompt: &[u32],
        bytes: &mut Vec<u8>,
    ) -> Result<Self> {
        let Some(rule) = decoder.rule() else {
            return Ok(Self::Window(TokenWindow::behind(decoder, prompt)));
        };
        let place = place_behind(decoder, rule, prompt, bytes)?;
        let rule = rule.clone();
        Ok(Self::Place { rule, place })
    }

    /// Returns the bytes that a token adds to the text, and moves the place behind it. The bytes of
    /// an unfinished character may come with a later token.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails.
    pub(super) fn add(&mut self, decoder: &TokenDecoder, token: u32) -> Result<Vec<u8>> {
        match self {
            Self::Place { rule, place } => decoder.add(rule, token, place),
            Self::Window(window) => Ok(window.add(decoder, token)?.into_bytes()),
        }
    }

    /// Returns the bytes that a token would add here. Those of a special token are its text.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails.
    pub(super) fn bytes_of(&self, decoder: &TokenDecoder, token: u32) -> Result<Vec<u8>> {
        if let TokenEffect::Special(text) = decoder.effect(token) {
            return Ok(text.into());
        }
        match *self {
            Self::Place {
                ref rule,
                mut place,
            } => decoder.add(rule, token, &mut place),
            Self::Window(ref window) => Ok(window.with(decoder, token)?.into_bytes()),
        }
    }

    /// Returns the bytes that [`Self::add`] has kept for later. Call it after the last token.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails.
    pub(super) fn end(&mut self, decoder: &TokenDecoder) -> Result<Vec<u8>> {
        match self {
            Self::Place { .. } => Ok(Vec::new()),
            Self::Window(window) => Ok(window.more(decoder)?.into_bytes()),
        }
    }
}

/// Returns the place behind a prompt, and appends the last bytes of its text.
fn place_behind(
    decoder: &TokenDecoder,
    rule: &PieceRule,
    prompt: &[u32],
    bytes: &mut Vec<u8>,
) -> Result<TextPlace> {
    let mut place = rule.start();
    let mut read = 0;
    while read < prompt.len() && !place.is_settled() {
        bytes.extend(decoder.add(rule, prompt[read], &mut place)?);
        read += 1;
    }

    let mut tail = Vec::new();
    let mut from = prompt.len();
    while from > read && tail.len() < TAIL {
        from -= 1;
        let before = decoder.add(rule, prompt[from], &mut place)?;
        tail.splice(..0, before);
    }
    if from > read {
        bytes.clear();
    }
    bytes.extend(tail);
    Ok(place)
}

/// The last tokens of a text, for decoders that only know texts of several tokens. A new token adds
/// what the text of the window is longer with it.
pub(super) struct TokenWindow {
    /// Tokens that add text.
    tokens: Vec<u32>,
    /// Number of tokens in `tokens` whose text is known.
    known: usize,
}

impl TokenWindow {
    /// Returns the window behind a prompt.
    fn behind(decoder: &TokenDecoder, prompt: &[u32]) -> Self {
        let last = prompt.iter().rev().copied();
        let last = last.filter(|token| is_piece(decoder, *token));
        let mut tokens: Vec<u32> = last.take(CONTEXT).collect();
        tokens.reverse();
        Self {
            known: tokens.len(),
            tokens,
        }
    }

    /// Appends a token. Returns the new text, or nothing while it may be the beginning of a
    /// character.
    fn add(&mut self, decoder: &TokenDecoder, token: u32) -> Result<String> {
        if !is_piece(decoder, token) {
            return Ok(String::new());
        }
        self.tokens.push(token);
        let more = self.more(decoder)?;
        let unfinished = self.tokens.len() - self.known;
        if more.ends_with(char::REPLACEMENT_CHARACTER) && unfinished < MOST_UNFINISHED {
            return Ok(String::new());
        }
        self.tokens
            .drain(..self.tokens.len().saturating_sub(CONTEXT));
        self.known = self.tokens.len();
        Ok(more)
    }

    /// Returns the text that a token would add.
    fn with(&self, decoder: &TokenDecoder, token: u32) -> Result<String> {
        let known = &self.tokens[..self.known];
        added(decoder, known, &[known, &[token]].concat())
    }

    /// Returns the text of the tokens that are not known.
    fn more(&self, decoder: &TokenDecoder) -> Result<String> {
        added(decoder, &self.tokens[..self.known], &self.tokens)
    }
}

/// True if a token is neither special nor unknown.
fn is_piece(decoder: &TokenDecoder, token: u32) -> bool {
    matches!(decoder.effect(token), TokenEffect::Piece(_))
}

/// Returns the text that `all` tokens have more than the `known` ones at their start.
fn added(decoder: &TokenDecoder, known: &[u32], all: &[u32]) -> Result<String> {
    let before = decoder.decoded(known)?;
    let mut all = decoder.decoded(all)?;
    // A known text may end within a character.
    let whole = before.trim_end_matches(char::REPLACEMENT_CHARACTER);
    let start = if all.starts_with(whole) && !all.starts_with(&before) {
        whole.len()
    } else {
        before.len()
    };
    let start = (start..all.len()).find(|at| all.is_char_boundary(*at));
    Ok(all.split_off(start.unwrap_or(all.len())))
}
