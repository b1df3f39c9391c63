//! Marks in the texts that a template gets and makes: characters for private use, which tell where
//! a part of the result came from.
//!
//! A template cuts, trims and joins texts, so a position in its result says nothing about a
//! message. A mark goes with the text around it. All marks are removed again.

use std::borrow::Cow;
use std::ops::Range;

use aho_corasick::{AhoCorasick, MatchKind};
use minijinja::Value;
use minijinja::value::ValueKind;
use tokenizers::Tokenizer;

use crate::text::conversation::pairs;

/// Put before and after the replies that a template marks.
pub(super) const REPLY: [char; 2] = ['\u{f8f0e}', '\u{f8f0f}'];
/// Put into a text that spells a special token, so that it is no token.
const QUOTE: char = '\u{f8f10}';
/// The first of the characters that show whether a message is in the result.
const PRESENCE: u32 = 0xf8f20;
/// The last one.
const LAST_PRESENCE: u32 = 0xffffd;

/// True for the marks that stay in the texts of a rendered conversation.
fn is_mark(char: char) -> bool {
    char == QUOTE || REPLY.contains(&char)
}

/// A text that a template made of a conversation, without marks.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub(crate) struct RenderedText {
    pub(crate) text: String,
    /// The byte ranges of its replies.
    pub(crate) replies: Vec<Range<usize>>,
    /// Byte positions inside texts of messages that spell a special token. A token never spans such
    /// a position.
    quotes: Vec<usize>,
}

impl RenderedText {
    /// Removes the marks of a text.
    pub(super) fn of(marked: &str) -> Self {
        let mut found = Self::default();
        let mut start = 0;
        for part in marked.split_inclusive(is_mark) {
            found.text += part.trim_end_matches(is_mark);
            let at = found.text.len();
            match part.chars().next_back().filter(|last| is_mark(*last)) {
                Some(QUOTE) => found.quotes.push(at),
                Some(mark) if mark == REPLY[0] => start = at,
                Some(_) => found.replies.push(start..at),
                None => {}
            }
        }
        found
    }

    /// True if a quote is inside a byte range of the text.
    pub(crate) fn is_quoted(&self, place: &Range<usize>) -> bool {
        let next = self.quotes.partition_point(|at| *at <= place.start);
        self.quotes.get(next).is_some_and(|at| *at < place.end)
    }
}

/// The texts of the tokens that a tokenizer finds in every text, whatever is around them.
pub(crate) struct AddedTokens {
    /// Finds these tokens as the tokenizer does: the leftmost one, and there the longest.
    finder: AhoCorasick,
    texts: Vec<String>,
    /// True for the tokens that are special, in the order of `texts`.
    is_special: Vec<bool>,
}

impl AddedTokens {
    /// Returns the added tokens of a tokenizer. `None` if none of them is special.
    pub(crate) fn of(tokenizer: &Tokenizer) -> Option<Self> {
        let added = tokenizer.get_added_tokens_decoder();
        let mut added: Vec<(String, bool)> = added
            .into_values()
            .map(|token| (token.content, token.special))
            .filter(|(text, _)| !text.is_empty())
            .collect();
        added.sort();
        let (texts, is_special): (Vec<_>, Vec<_>) = added.into_iter().unzip();
        if !is_special.contains(&true) {
            return None;
        }
        let finder = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(&texts)
            .ok()?;
        Some(Self {
            finder,
            texts,
            is_special,
        })
    }

    /// Returns the special tokens, each with a number that no other one has.
    pub(crate) fn special(&self) -> impl Iterator<Item = (usize, &str)> {
        let texts = self.texts.iter().map(String::as_str).enumerate();
        texts.filter(|(at, _)| self.is_special[*at])
    }

    /// Returns the special tokens in a text, each with its number and its place.
    pub(crate) fn find(&self, text: &str) -> impl Iterator<Item = (usize, Range<usize>)> {
        let all = self.finder.find_iter(text);
        let all = all.map(|found| (found.pattern().as_usize(), found.range()));
        all.filter(|(at, _)| self.is_special[*at])
    }

    /// Returns a text with quotes in all that spells a special token, also where only the start or
    /// the end of one is at a border of the text.
    fn quoted(&self, text: &str) -> String {
        let second = |start: usize| {
            let first = text[start..].chars().next();
            start + first.map_or(0, char::len_utf8)
        };
        let mut at: Vec<usize> = self
            .find(text)
            .map(|(_, place)| second(place.start))
            .collect();

        let trimmed = text.trim_end();
        let start = text.len() - text.trim_start().len();
        let is_border = |token: &str, at: usize, border: Border| match border {
            Border::Start => trimmed[start.min(trimmed.len())..].starts_with(&token[at..]),
            Border::End => trimmed.ends_with(&token[..at]),
        };
        for (_, token) in self.special() {
            let inner = token.char_indices().skip(1).map(|(at, _)| at);
            let borders = [(Border::Start, start), (Border::End, trimmed.len())];
            for (border, position) in borders {
                if inner.clone().any(|at| is_border(token, at, border)) {
                    at.push(position);
                }
            }
        }
        if at.is_empty() {
            return text.to_owned();
        }

        at.sort_unstable();
        at.dedup();
        let mut quoted = String::with_capacity(text.len() + at.len() * QUOTE.len_utf8());
        let mut done = 0;
        for at in at {
            quoted += &text[done..at];
            quoted.push(QUOTE);
            done = at;
        }
        quoted + &text[done..]
    }
}

/// An end of a text.
#[derive(Clone, Copy)]
enum Border {
    Start,
    End,
}

/// Returns a value whose texts and keys have no marks of their own. With `added` tokens, those that
/// spell a special one have quotes.
pub(super) fn as_text(value: &Value, added: Option<&AddedTokens>) -> Value {
    match value.kind() {
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            plain_text(text, added).into()
        }
        ValueKind::Seq => match value.try_iter() {
            Ok(values) => values.map(|value| as_text(&value, added)).collect(),
            Err(_) => value.clone(),
        },
        ValueKind::Map => match pairs(value) {
            Some(pairs) => {
                let pairs = pairs.into_iter();
                let plain = |(key, value): (String, Value)| {
                    (plain_text(&key, added), as_text(&value, added))
                };
                Value::from_pairs(pairs.map(plain))
            }
            None => value.clone(),
        },
        _ => value.clone(),
    }
}

/// Returns a text with a replacement for each character that is used as a mark, and with quotes in
/// all that spells a special token among `added`.
fn plain_text(text: &str, added: Option<&AddedTokens>) -> String {
    let is_any = |char: char| is_mark(char) || is_presence_mark(&char);
    let text = match text.contains(is_any) {
        true => Cow::Owned(text.replace(is_any, "\u{fffd}")),
        false => Cow::Borrowed(text),
    };
    match added {
        Some(added) => added.quoted(&text),
        None => text.into_owned(),
    }
}

/// True for a character that shows that a message is in the result.
pub(super) fn is_presence_mark(char: &char) -> bool {
    (PRESENCE..=LAST_PRESENCE).contains(&u32::from(*char))
}

/// Returns the mark of the message with this number. `None` beyond the last one.
pub(super) fn presence_mark(number: usize) -> Option<char> {
    let code = u32::try_from(number).ok()?.checked_add(PRESENCE)?;
    char::from_u32(code).filter(|_| code <= LAST_PRESENCE)
}

/// Place of a mark in a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum MarkPlace {
    /// Behind the first character that is no blank.
    Start,
    /// Before the last character that is no blank.
    End,
}

/// Returns a text with a mark inside. Thoughts come before the mark, since templates leave them
/// out. `None` for blanks alone.
pub(super) fn with_presence(text: &str, mark: char, place: MarkPlace) -> Option<String> {
    const THOUGHTS_END: &str = "</think>";
    let behind = text
        .rfind(THOUGHTS_END)
        .map_or(0, |at| at + THOUGHTS_END.len());
    let from = if text[behind..].trim().is_empty() {
        0
    } else {
        behind
    };
    let rest = &text[from..];
    let first = rest.trim_start().chars().next()?;
    let last = rest.trim_end().char_indices().next_back()?;
    let at = from
        + match place {
            MarkPlace::Start => rest.len() - rest.trim_start().len() + first.len_utf8(),
            MarkPlace::End => last.0,
        };
    Some(format!("{}{mark}{}", &text[..at], &text[at..]))
}
