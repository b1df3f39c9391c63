//! The text of new tokens, as it grows.

use std::sync::Arc;

use mpmd::Result;

use super::token_decoder::{TokenDecoder, TokenEffect};
use super::token_window::TokenContext;

/// The text of generated tokens behind a prompt as it grows, up to the first stop text. Prompt and
/// text together are the text of all tokens. Holds back the end of the text while it may become
/// another character or a stop text.
///
/// A character that begins in the prompt and ends in the new tokens is part of the new text.
pub struct TextStream {
    decoder: Arc<TokenDecoder>,
    stops: Vec<String>,
    /// The stop texts that contain the text of a special token.
    special_stops: Vec<String>,
    context: TokenContext,
    /// The first bytes of an unfinished character.
    unfinished: Vec<u8>,
    /// Number of bytes in `unfinished` that the prompt has.
    of_prompt: usize,
    text: String,
    /// Number of characters in `text`.
    characters: usize,
    /// Number of bytes of `text` that were returned.
    given: usize,
    /// The end of the text with special tokens, if there are stop texts with these.
    spelled: SpelledText,
    is_stopped: bool,
}

/// A text with its special tokens spelled out.
#[derive(Default)]
struct SpelledText {
    text: String,
    /// For each byte of `text` whether it is in the text without special tokens.
    is_shown: Vec<bool>,
}

impl TextStream {
    /// Creates an empty text behind the tokens of a prompt, with these stop texts. Empty stop texts
    /// are ignored.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails.
    pub fn new(decoder: Arc<TokenDecoder>, prompt: &[u32], mut stops: Vec<String>) -> Result<Self> {
        stops.retain(|stop| !stop.is_empty());
        let special_stops = stops.iter().filter(|stop| decoder.has_special(stop));
        let special_stops = special_stops.cloned().collect();

        let mut unfinished = Vec::new();
        let context = TokenContext::behind(&decoder, prompt, &mut unfinished)?;
        take_characters(&mut unfinished);
        let of_prompt = unfinished.len();
        Ok(Self {
            decoder,
            stops,
            special_stops,
            context,
            unfinished,
            of_prompt,
            text: String::new(),
            characters: 0,
            given: 0,
            spelled: SpelledText::default(),
            is_stopped: false,
        })
    }

    /// Appends a token. Returns the new text that can no longer change. Costs as much as the token
    /// and the stop texts are long, however long the text is.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails.
    pub fn push(&mut self, token: u32) -> Result<&str> {
        self.spell_special(token);
        let bytes = self.context.add(&self.decoder, token)?;
        self.unfinished.extend(bytes);
        self.grow(false);
        Ok(self.give(false))
    }

    /// Appends a token that ends the text, which adds nothing to it. Returns the new text that can
    /// no longer change. Call [`Self::end`] afterwards.
    pub fn push_end(&mut self, token: u32) -> &str {
        self.spell_special(token);
        self.give(false)
    }

    /// Returns the rest of the text. Call it after the last token.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails.
    pub fn end(&mut self) -> Result<&str> {
        let bytes = self.context.end(&self.decoder)?;
        self.unfinished.extend(bytes);
        self.grow(true);
        Ok(self.give(true))
    }

    /// True once a stop text has ended the text.
    pub fn is_stopped(&self) -> bool {
        self.is_stopped
    }

    /// Returns the whole text that was returned so far.
    pub fn given(&self) -> &str {
        &self.text[..self.given]
    }

    /// Returns the number of characters in the text of the tokens so far, also those that are held
    /// back. An unfinished character is not counted.
    pub fn characters(&self) -> usize {
        self.characters
    }

    /// Returns the bytes that a token would add to the text here, perhaps a part of a character.
    /// Those of a special token, which adds nothing, are its text.
    ///
    /// # Errors
    ///
    /// If the decoder of the tokenizer fails.
    pub fn bytes_of(&self, token: u32) -> Result<Vec<u8>> {
        self.context.bytes_of(&self.decoder, token)
    }

    /// Spells out a special token for stop texts that contain such tokens.
    fn spell_special(&mut self, token: u32) {
        if !self.special_stops.is_empty()
            && let TokenEffect::Special(special) = self.decoder.effect(token)
        {
            self.spelled.add(special, false);
        }
    }

    /// Moves finished characters to the text; at its end all bytes.
    fn grow(&mut self, is_end: bool) {
        let mut more = take_characters(&mut self.unfinished);
        if is_end && !self.unfinished.is_empty() {
            self.unfinished.clear();
            more.push(char::REPLACEMENT_CHARACTER);
        }
        if more.is_empty() {
            return;
        }
        // The prompt's text has the replacement of a character that has not become one.
        if self.of_prompt > 0
            && let Some(rest) = more.strip_prefix(char::REPLACEMENT_CHARACTER)
        {
            more = rest.to_owned();
        }
        self.of_prompt = 0;

        self.characters += more.chars().count();
        self.text += &more;
        if !self.special_stops.is_empty() {
            self.spelled.add(&more, true);
        }
    }

    /// Returns the text up to the first stop text, or else up to the last character that cannot
    /// begin one.
    fn give(&mut self, is_end: bool) -> &str {
        let from = self.given;
        if self.is_stopped {
            return "";
        }

        let rest = &self.text[from..];
        let spelled = &self.spelled;
        let spelled_stops = self.special_stops.iter();
        let spelled_stops = spelled_stops.filter_map(|stop| spelled.text.find(stop));
        let shown_before = |at| rest.len().saturating_sub(spelled.shown_from(at));
        let stops = self.stops.iter().filter_map(|stop| rest.find(stop));
        let stop = stops.chain(spelled_stops.map(shown_before)).min();

        let held = self.stops.iter().map(|stop| overlap(rest, stop));
        let spelled_held = self.special_stops.iter().map(|stop| {
            let begun = overlap(&spelled.text, stop);
            spelled.shown_from(spelled.text.len() - begun)
        });
        let held = held.chain(spelled_held).max().unwrap_or(0);
        let held = if is_end { 0 } else { held };
        self.is_stopped = stop.is_some();
        self.given += stop.unwrap_or(rest.len() - held);

        let longest = self.special_stops.iter().map(String::len).max();
        self.spelled.keep_end(longest.unwrap_or(0));
        &self.text[from..self.given]
    }
}

impl SpelledText {
    fn add(&mut self, text: &str, is_shown: bool) {
        self.text += text;
        self.is_shown.resize(self.text.len(), is_shown);
    }

    /// Returns the number of bytes from `at` on that are in the text without special tokens.
    fn shown_from(&self, at: usize) -> usize {
        self.is_shown[at..].iter().filter(|shown| **shown).count()
    }

    /// Removes all but the last bytes, at least `most` of them.
    fn keep_end(&mut self, most: usize) {
        let mut start = self.text.len().saturating_sub(most);
        while !self.text.is_char_boundary(start) {
            start -= 1;
        }
        self.text.drain(..start);
        self.is_shown.drain(..start);
    }
}

/// Removes and returns the characters at the start of `bytes`, invalid parts as U+FFFD. Leaves the
/// bytes of a last character that is not finished.
fn take_characters(bytes: &mut Vec<u8>) -> String {
    let mut text = String::new();
    let mut read = 0;
    let mut unfinished = 0;
    for chunk in bytes.utf8_chunks() {
        let invalid = chunk.invalid();
        text += chunk.valid();
        read += chunk.valid().len() + invalid.len();
        if read == bytes.len() && is_unfinished(invalid) {
            unfinished = invalid.len();
        } else if !invalid.is_empty() {
            text.push(char::REPLACEMENT_CHARACTER);
        }
    }
    bytes.drain(..bytes.len() - unfinished);
    text
}

/// True if more bytes may turn these into a character.
fn is_unfinished(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|why| why.error_len().is_none())
}

/// Returns the length of the longest suffix of `text` that is a prefix of `stop`, in bytes.
fn overlap(text: &str, stop: &str) -> usize {
    let starts = stop.char_indices().map(|(at, char)| at + char.len_utf8());
    starts
        .filter(|len| text.ends_with(&stop[..*len]))
        .max()
        .unwrap_or(0)
}

#[cfg(test)]
mod tests;
