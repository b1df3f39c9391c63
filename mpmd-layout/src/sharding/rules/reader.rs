//! Reading the text of a tactic, character by character.

use super::error::ErrorKind;

/// A tactic that cannot be read.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("tactic {text:?}, column {column}: expected {expected}, found {found}")]
#[non_exhaustive]
pub struct ParseError {
    /// The whole tactic.
    pub text: String,
    /// Where, in characters from 1.
    pub column: usize,
    /// What could stand there.
    pub expected: String,
    /// What does.
    pub found: String,
    kind: ErrorKind,
}

/// A place in a tactic, and how to go on from it.
pub(super) struct Reader<'a> {
    pub(super) text: &'a str,
    /// In bytes, always between two characters.
    pub(super) at: usize,
}

impl ParseError {
    /// [`ErrorKind::Syntax`] or [`ErrorKind::Value`]; see
    /// [`Call::parse_tactic`](super::Call::parse_tactic).
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl<'a> Reader<'a> {
    /// Reads a comma, or sees `close` and leaves it; whether it was a comma.
    pub(super) fn comma_or(&mut self, close: char) -> Result<bool, ParseError> {
        self.skip_blanks();
        match self.peek() {
            Some(',') => {
                self.bump();
                Ok(true)
            }
            Some(c) if c == close => Ok(false),
            Some(c) => Err(self.error(after_value(c), &format!("`,` or `{close}`"))),
            None => Err(self.error(ErrorKind::Syntax, &format!("`,` or `{close}`"))),
        }
    }

    /// An identifier, or several joined by dots without blanks. Nothing is read where there is
    /// none.
    pub(super) fn dotted_name(&mut self) -> Option<&'a str> {
        let start = self.at;
        self.identifier()?;
        loop {
            let end = self.at;
            if self.peek() != Some('.') {
                break;
            }
            self.bump();
            if self.identifier().is_none() {
                self.at = end;
                break;
            }
        }
        Some(&self.text[start..self.at])
    }

    pub(super) fn identifier(&mut self) -> Option<&'a str> {
        self.peek().filter(|c| starts_identifier(*c))?;
        let rest = self.rest();
        let end = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
        self.at += end;
        Some(&rest[..end])
    }

    pub(super) fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    pub(super) fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    pub(super) fn bump(&mut self) {
        self.at += self.peek().map_or(0, char::len_utf8);
    }

    pub(super) fn skip_blanks(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start_matches(|c: char| c.is_ascii_whitespace()).len();
    }

    /// An error at the place that is read next.
    pub(super) fn error(&self, kind: ErrorKind, expected: &str) -> ParseError {
        let rest = self.rest();
        let word = rest.find(|c: char| c != '_' && !c.is_alphanumeric()).unwrap_or(rest.len());
        let found = match rest.chars().next() {
            None => "the end".to_owned(),
            Some(c) => {
                format!("`{}`", if word > 0 { &rest[..word] } else { &rest[..c.len_utf8()] })
            }
        };
        let column = self.text[..self.at].chars().count() + 1;
        ParseError {
            text: self.text.to_owned(),
            column,
            expected: expected.to_owned(),
            found,
            kind,
        }
    }
}

/// The kind of an error where `c` follows a whole value or call: an operator would make a larger
/// expression of it.
pub(super) fn after_value(c: char) -> ErrorKind {
    if "+-*/%@&^<>[(".contains(c) { ErrorKind::Value } else { ErrorKind::Syntax }
}

pub(super) fn starts_identifier(c: char) -> bool {
    c == '_' || c.is_alphabetic()
}

pub(super) fn is_constant(name: &str) -> bool {
    ["None", "True", "False"].contains(&name)
}
