//! The values that can be written in a tactic, and their parser.

use super::error::{ErrorKind, ParseError};
use super::reader::{TacticReader, starts_identifier};

/// Maximum nesting depth of brackets. The reader recurses once for each level, and the text may be
/// untrusted.
const MOST_NESTED: usize = 100;

/// A literal value in a tactic, in the notation of Python.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Literal {
    /// The literal `None`.
    None,
    /// The literal `True` or `False`.
    Bool(bool),
    /// A whole number that fits 64 bits, also written as `1_000`, `0x3e8`, `0o17`, `0b11`.
    Int(i64),
    /// A number with a point or an exponent.
    Float(f64),
    /// Text in either kind of quotes.
    Str(String),
    /// A tuple, written `(a, b)`.
    Tuple(Vec<Literal>),
    /// A list, written `[a, b]`.
    List(Vec<Literal>),
    /// A set, written `{a, b}`, with its elements in the order written.
    Set(Vec<Literal>),
    /// A dict, written `{a: b}`, as (key, value) in the order written.
    Dict(Vec<(Literal, Literal)>),
}

impl Literal {
    /// Returns the axis names of a string, or of a list or tuple of one string or more. Returns
    /// `None` for other values, also for a set, which has no order.
    pub fn axes(&self) -> Option<Vec<String>> {
        let text = |literal: &Self| match literal {
            Self::Str(text) => Some(text.clone()),
            _ => None,
        };
        match self {
            Self::Str(axis) => Some(vec![axis.clone()]),
            Self::List(axes) | Self::Tuple(axes) if !axes.is_empty() => {
                axes.iter().map(text).collect()
            }
            _ => None,
        }
    }

    /// Returns a whole or fractional number as `f64`, or `None` for other values.
    pub fn number(&self) -> Option<f64> {
        match self {
            Self::Int(int) => Some(*int as f64),
            Self::Float(float) => Some(*float),
            _ => None,
        }
    }

    /// Returns the whole number, or `None` for other values.
    pub fn int(&self) -> Option<i64> {
        match self {
            Self::Int(int) => Some(*int),
            _ => None,
        }
    }

    /// Returns `True` or `False` as a `bool`, or `None` for other values.
    pub fn bool(&self) -> Option<bool> {
        match self {
            Self::Bool(bool) => Some(*bool),
            _ => None,
        }
    }
}

impl TacticReader<'_> {
    /// Reads one value. `nested` is the number of brackets that are open around it. Fails if the
    /// text is no literal, or if brackets are nested too deeply.
    pub(super) fn value(&mut self, nested: usize) -> Result<Literal, ParseError> {
        if nested > MOST_NESTED {
            return Err(self.error(
                ErrorKind::Syntax,
                &format!("at most {MOST_NESTED} nested brackets"),
            ));
        }

        match self.peek() {
            Some('"' | '\'') => self.strings(),
            Some('+' | '-') => self.signed_number(),
            Some(c) if self.starts_number(c) => self.number(),
            Some('[') => {
                self.bump();
                Ok(Literal::List(self.items(']', Vec::new(), nested)?))
            }
            Some('(') => self.parenthesised(nested),
            Some('{') => self.braced(nested),
            Some(c) if starts_identifier(c) => self.constant(),
            // `*args`, `~1` and `...` are expressions of Python.
            Some('*' | '~' | '.') => Err(self.error(ErrorKind::Value, "a literal")),
            _ => Err(self.error(ErrorKind::Syntax, "a literal")),
        }
    }

    fn constant(&mut self) -> Result<Literal, ParseError> {
        let start = self.at;
        match self.identifier() {
            Some("None") => Ok(Literal::None),
            Some("True") => Ok(Literal::Bool(true)),
            Some("False") => Ok(Literal::Bool(false)),
            _ => {
                self.at = start;
                Err(self.error(ErrorKind::Value, "a literal"))
            }
        }
    }

    /// Reads a tuple, or one value in brackets, from an opening `(`.
    fn parenthesised(&mut self, nested: usize) -> Result<Literal, ParseError> {
        self.bump();
        self.skip_blanks();
        if self.peek() == Some(')') {
            self.bump();
            return Ok(Literal::Tuple(Vec::new()));
        }
        let first = self.value(nested + 1)?;
        if self.comma_or(')')? {
            return Ok(Literal::Tuple(self.items(')', vec![first], nested)?));
        }
        self.bump();
        Ok(first)
    }

    /// Reads a set or a dict from an opening `{`.
    fn braced(&mut self, nested: usize) -> Result<Literal, ParseError> {
        self.bump();
        self.skip_blanks();
        if self.peek() == Some('}') {
            self.bump();
            return Ok(Literal::Dict(Vec::new()));
        }

        let first = self.value(nested + 1)?;
        self.skip_blanks();
        if self.peek() != Some(':') {
            self.comma_or('}')?;
            return Ok(Literal::Set(self.items('}', vec![first], nested)?));
        }

        let mut pairs = Vec::new();
        let mut key = first;
        loop {
            self.skip_blanks();
            if self.peek() != Some(':') {
                return Err(self.error(ErrorKind::Syntax, "`:`"));
            }
            self.bump();
            self.skip_blanks();
            pairs.push((key, self.value(nested + 1)?));
            self.comma_or('}')?;
            self.skip_blanks();
            if self.peek() == Some('}') {
                self.bump();
                return Ok(Literal::Dict(pairs));
            }
            key = self.value(nested + 1)?;
        }
    }

    /// Reads values up to `close`, appends them to `items` and returns `items`. Consumes `close`.
    fn items(
        &mut self,
        close: char,
        mut items: Vec<Literal>,
        nested: usize,
    ) -> Result<Vec<Literal>, ParseError> {
        loop {
            self.skip_blanks();
            if self.peek() == Some(close) {
                self.bump();
                return Ok(items);
            }
            items.push(self.value(nested + 1)?);
            self.comma_or(close)?;
        }
    }

    fn signed_number(&mut self) -> Result<Literal, ParseError> {
        let negative = self.peek() == Some('-');
        self.bump();
        self.skip_blanks();
        if !self.peek().is_some_and(|c| self.starts_number(c)) {
            let kind = if self.peek().is_none() {
                ErrorKind::Syntax
            } else {
                ErrorKind::Value
            };
            return Err(self.error(kind, "a number"));
        }

        Ok(match self.number()? {
            Literal::Int(int) if negative => Literal::Int(-int),
            Literal::Float(float) if negative => Literal::Float(-float),
            number => number,
        })
    }

    fn starts_number(&self, c: char) -> bool {
        let after_point = || {
            self.rest()
                .chars()
                .nth(1)
                .is_some_and(|c| c.is_ascii_digit())
        };
        c.is_ascii_digit() || (c == '.' && after_point())
    }

    fn number(&mut self) -> Result<Literal, ParseError> {
        let start = self.at;
        let has_radix = ["0x", "0X", "0o", "0O", "0b", "0B"]
            .iter()
            .any(|p| self.rest().starts_with(p));
        while let Some(c) = self.peek() {
            let in_exponent = !has_radix && self.text[start..self.at].ends_with(['e', 'E']);
            let goes_on = c.is_ascii_alphanumeric() || matches!(c, '_' | '.');
            let signs_exponent = in_exponent && matches!(c, '+' | '-');
            if !goes_on && !signs_exponent {
                break;
            }
            self.bump();
        }

        let written = &self.text[start..self.at];
        let number = read_number(written);
        let kind = if written.ends_with(['j', 'J']) || is_long_int(written) {
            ErrorKind::Value
        } else {
            ErrorKind::Syntax
        };
        number.ok_or_else(|| {
            self.at = start;
            self.error(kind, "a number of 64 bits")
        })
    }

    /// Reads a string in quotes. Joins several strings that follow one another.
    fn strings(&mut self) -> Result<Literal, ParseError> {
        let mut text = String::new();
        loop {
            self.string(&mut text)?;
            let end = self.at;
            self.skip_blanks();
            if !matches!(self.peek(), Some('"' | '\'')) {
                self.at = end;
                return Ok(Literal::Str(text));
            }
        }
    }

    fn string(&mut self, text: &mut String) -> Result<(), ParseError> {
        let quote = self.peek();
        let start = self.at;
        self.bump();
        loop {
            match self.peek() {
                None | Some('\n') => {
                    self.at = start;
                    return Err(self.error(ErrorKind::Syntax, "a text with its closing quote"));
                }
                Some('\\') => self.escape(text)?,
                c if c == quote => {
                    self.bump();
                    return Ok(());
                }
                Some(c) => {
                    text.push(c);
                    self.bump();
                }
            }
        }
    }

    fn escape(&mut self, text: &mut String) -> Result<(), ParseError> {
        let start = self.at;
        self.bump();
        let Some(c) = self.peek() else { return Ok(()) };

        self.bump();
        let plain = match c {
            '\\' | '\'' | '"' => Some(c),
            'n' => Some('\n'),
            'r' => Some('\r'),
            't' => Some('\t'),
            _ => None,
        };

        if let Some(plain) = plain {
            text.push(plain);
            return Ok(());
        }

        let digits = match c {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            // Escapes of Python that no axis name needs.
            'a' | 'b' | 'f' | 'v' | 'N' | '0'..='7' | '\n' => 0,
            other => {
                text.extend(['\\', other]);
                return Ok(());
            }
        };

        let code = self
            .rest()
            .get(..digits)
            .filter(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()));
        let code = code.and_then(|hex| u32::from_str_radix(hex, 16).ok());

        match code.and_then(char::from_u32) {
            Some(c) => {
                self.at += digits;
                text.push(c);
                Ok(())
            }
            None => {
                self.at = start;
                Err(self.error(
                    ErrorKind::Syntax,
                    "one of \\\\ \\' \\\" \\n \\r \\t \\xhh \\uhhhh \\Uhhhhhhhh",
                ))
            }
        }
    }
}

fn is_long_int(written: &str) -> bool {
    !written.starts_with('0') && written.bytes().all(|b| b.is_ascii_digit())
}

fn read_number(written: &str) -> Option<Literal> {
    let is_lonely = |i: usize| {
        let neighbours = [
            written[..i].chars().next_back(),
            written[i + 1..].chars().next(),
        ];
        !neighbours
            .iter()
            .all(|c| c.is_some_and(|c| c.is_ascii_alphanumeric()))
    };
    if written.match_indices('_').any(|(i, _)| is_lonely(i)) {
        return None;
    }

    let plain = written.replace('_', "");
    for (prefix, radix) in [("0x", 16), ("0o", 8), ("0b", 2)] {
        if let Some(digits) = plain.to_ascii_lowercase().strip_prefix(prefix) {
            return i64::from_str_radix(digits, radix).ok().map(Literal::Int);
        }
    }

    if !plain.bytes().all(|b| b.is_ascii_digit()) {
        // Starts with a digit or a point, so it is not a word like `inf` that also parses.
        return plain.parse().ok().map(Literal::Float);
    }

    let leading_zero = plain.starts_with('0') && plain.bytes().any(|b| b != b'0');
    plain
        .parse()
        .ok()
        .filter(|_| !leading_zero)
        .map(Literal::Int)
}
