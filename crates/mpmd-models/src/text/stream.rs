//! The text of new tokens, as it grows.

use std::sync::Arc;

use mpmd::{Error, Result};
use tokenizers::Tokenizer;

/// The text of generated tokens as it grows, up to the first stop text. Holds back the end of the
/// text while it may become another character or a stop text.
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    stops: Vec<String>,
    /// The last tokens. Earlier ones are included since a token's text depends on those before it.
    tokens: Vec<u32>,
    /// Number of tokens in `tokens` that are already in `text`.
    known: usize,
    text: String,
    /// Number of bytes of `text` that were returned.
    given: usize,
    is_stopped: bool,
}

impl TextStream {
    /// Creates an empty text with these stop texts. Empty stop texts are ignored.
    pub fn new(tokenizer: Arc<Tokenizer>, mut stops: Vec<String>) -> Self {
        stops.retain(|stop| !stop.is_empty());
        let tokens = Vec::new();
        let text = String::new();
        Self {
            tokenizer,
            stops,
            tokens,
            known: 0,
            text,
            given: 0,
            is_stopped: false,
        }
    }

    /// Appends a token. Returns the new text that can no longer change.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails.
    pub fn push(&mut self, token: u32) -> Result<&str> {
        self.tokens.push(token);
        let more = self.more()?;
        if !more.is_empty() && !more.ends_with('\u{fffd}') {
            self.text += &more;
            self.tokens.drain(..self.known);
            self.known = self.tokens.len();
        }
        Ok(self.give(false))
    }

    /// Returns the rest of the text. Call it after the last token.
    ///
    /// # Errors
    ///
    /// If the tokenizer fails.
    pub fn end(&mut self) -> Result<&str> {
        self.text += &self.more()?;
        self.known = self.tokens.len();
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

    /// Returns the text that the last tokens add to `text`.
    fn more(&self) -> Result<String> {
        let decode = |tokens: &[u32]| {
            let text = self.tokenizer.decode(tokens, true);
            text.map_err(|why| Error::Environment(format!("the tokenizer: {why}")))
        };
        let before = decode(&self.tokens[..self.known])?;
        let all = decode(&self.tokens)?;
        Ok(all.get(before.len()..).unwrap_or_default().to_owned())
    }

    fn give(&mut self, is_end: bool) -> &str {
        let from = self.given;
        if !self.is_stopped {
            let rest = &self.text[from..];
            let stop = self.stops.iter().filter_map(|stop| rest.find(stop)).min();
            self.is_stopped = stop.is_some();
            let held = self
                .stops
                .iter()
                .map(|stop| overlap(rest, stop))
                .max()
                .unwrap_or(0);
            let held = if is_end { 0 } else { held };
            self.given += stop.unwrap_or(rest.len() - held);
        }
        &self.text[from..self.given]
    }
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
mod tests {
    use super::*;
    use crate::{Folder, tokenizer};

    fn folder(name: &str) -> Arc<Tokenizer> {
        let path = format!("{}/tests/folders/{name}", env!("CARGO_MANIFEST_DIR"));
        Arc::new(tokenizer(&Folder::open(path).unwrap()).unwrap())
    }

    /// Returns the parts in which a text is given out, and whether it was stopped.
    fn parts(tokenizer: &Arc<Tokenizer>, tokens: &[u32], stops: &[&str]) -> (Vec<String>, bool) {
        let stops = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut text = TextStream::new(tokenizer.clone(), stops);
        let mut parts: Vec<String> = tokens
            .iter()
            .map(|token| text.push(*token).unwrap().to_owned())
            .collect();
        parts.push(text.end().unwrap().to_owned());
        assert_eq!(parts.concat(), text.given());
        (parts, text.is_stopped())
    }

    #[test]
    fn parts_are_together_what_all_tokens_are() {
        let long = "  A näive café — 日本語 🙂🙂, \u{fffd} twice  two.\n\n\tEnd ";
        for name in [
            "plain", "gemma2", "gpt2", "phi3", "neox", "qwen2", "mistral",
        ] {
            let tokenizer = folder(name);
            let tokens = tokenizer.encode(long, true).unwrap().get_ids().to_vec();
            for end in 0..=tokens.len() {
                let (parts, is_stopped) = parts(&tokenizer, &tokens[..end], &[]);
                let whole = tokenizer.decode(&tokens[..end], true).unwrap();
                assert_eq!(
                    (parts.concat(), is_stopped),
                    (whole, false),
                    "{name}, {end} tokens"
                );
            }
        }
    }

    #[test]
    fn characters_of_several_tokens_are_given_out_whole() {
        let tokenizer = folder("gpt2");
        let tokens = tokenizer.encode("a🙂b", false).unwrap().get_ids().to_vec();
        assert!(tokens.len() > 3);
        let (parts, _) = parts(&tokenizer, &tokens, &[]);
        assert!(
            parts.iter().all(|part| !part.contains('\u{fffd}')),
            "{parts:?}"
        );
    }

    #[test]
    fn stops_over_several_tokens_are_cut_and_never_begun() {
        let tokenizer = folder("gpt2");
        for (text, stops, expected) in [
            ("one two three", &["o th"] as &[&str], "one tw"),
            ("one two three", &["three", "two"], "one "),
            ("one two three", &["two", "one two"], ""),
            ("one two three", &["threefold"], "one two three"),
            ("ein 🙂 und 🙁", &["🙂 u"], "ein "),
            ("ein 🙂 und 🙁", &["🙁🙁", "x"], "ein 🙂 und 🙁"),
            ("aaab", &["aab"], "a"),
            ("text", &[""], "text"),
        ] {
            let tokens = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
            let (parts, is_stopped) = parts(&tokenizer, &tokens, stops);
            assert_eq!(parts.concat(), expected, "{text} {stops:?}");
            assert_eq!(is_stopped, expected.len() < text.len());
        }
        // Nothing is given out that a later token may turn into a stop.
        let tokens = tokenizer.encode("ab", false).unwrap().get_ids().to_vec();
        let mut text = TextStream::new(tokenizer, vec!["abc".to_owned()]);
        assert!(
            tokens
                .iter()
                .all(|token| text.push(*token).unwrap().is_empty())
        );
        assert_eq!(text.end().unwrap(), "ab");
    }
}
