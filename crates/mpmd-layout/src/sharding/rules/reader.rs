//! Reads the text of a tactic, character by character.

use super::error::{ErrorKind, ParseError};

/// A reading position in the text of a tactic, with functions that read on from it.
pub(super) struct TacticReader<'a> {
    pub(super) text: &'a str,
    /// The position in bytes from 0, always at a character boundary.
    pub(super) at: usize,
}

impl<'a> TacticReader<'a> {
    /// Skips blanks. Before a comma, consumes it and returns true. Before `close`, consumes nothing
    /// and returns false. Fails before any other text.
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

    /// Reads an identifier, or several joined by dots without blanks. If there is none, consumes
    /// nothing and returns `None`.
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
        let end = rest
            .find(|c: char| c != '_' && !c.is_alphanumeric())
            .unwrap_or(rest.len());
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
        self.at += rest.len()
            - rest
                .trim_start_matches(|c: char| c.is_ascii_whitespace())
                .len();
    }

    /// Creates an error at the current position; `expected` says which text would be allowed.
    pub(super) fn error(&self, kind: ErrorKind, expected: &str) -> ParseError {
        let rest = self.rest();
        let word = rest
            .find(|c: char| c != '_' && !c.is_alphanumeric())
            .unwrap_or(rest.len());

        let found = match rest.chars().next() {
            None => "the end".to_owned(),
            Some(c) => {
                format!(
                    "`{}`",
                    if word > 0 {
                        &rest[..word]
                    } else {
                        &rest[..c.len_utf8()]
                    }
                )
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

/// Returns the kind of the error that character `c` causes after a complete value or call:
/// [`ErrorKind::Value`] for an operator, otherwise [`ErrorKind::Syntax`].
pub(super) fn after_value(c: char) -> ErrorKind {
    if "+-*/%@&^<>[(".contains(c) {
        ErrorKind::Value
    } else {
        ErrorKind::Syntax
    }
}

pub(super) fn starts_identifier(c: char) -> bool {
    c == '_' || c.is_alphabetic()
}

pub(super) fn is_constant(name: &str) -> bool {
    ["None", "True", "False"].contains(&name)
}
