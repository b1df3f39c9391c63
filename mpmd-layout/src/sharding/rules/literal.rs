//! The values that can be written in a tactic, and their parser.

use super::error::{ErrorKind, ParseError};
use super::reader::{Reader, starts_identifier};

/// The deepest nesting of brackets that is allowed. Each level is a recursive call of the reader,
/// and the text may be untrusted.
const MOST_NESTED: usize = 100;

/// A value that can be written in a tactic, in the notation of Python.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Literal {
    /// `None`
    None,
    /// `True` or `False`
    Bool(bool),
    /// A whole number that fits 64 bits, in decimal digits.
    Int(i64),
    /// A number with a point or an exponent.
    Float(f64),
    /// Text in either kind of quotes.
    Str(String),
    /// `(a, b)`
    Tuple(Vec<Literal>),
    /// `[a, b]`
    List(Vec<Literal>),
}

impl Literal {
    /// Returns axis names: of a text, or of a list or tuple of at least one text. Returns `None`
    /// for other values, also for a set, which has no order.
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

    /// Returns the number as `f64`, whole or not, or `None` for other values.
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

impl Reader<'_> {
    /// Reads a value inside `nested` levels of brackets. Fails if there is no literal, or if the
    /// brackets are nested too deeply.
    pub(super) fn value(&mut self, nested: usize) -> Result<Literal, ParseError> {
        if nested > MOST_NESTED {
            return Err(
                self.error(ErrorKind::Syntax, &format!("at most {MOST_NESTED} nested brackets"))
            );
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
            Some(c) if starts_identifier(c) => self.constant(),
            // Sets, dicts, `*args`, `~1` and `...` are expressions of Python.
            Some('{' | '*' | '~' | '.') => Err(self.error(ErrorKind::Value, "a literal")),
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

    /// Reads from an opening `(`: one value in brackets, or a tuple.
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
            let kind = if self.peek().is_none() { ErrorKind::Syntax } else { ErrorKind::Value };
            return Err(self.error(kind, "a number"));
        }
        Ok(match self.number()? {
            Literal::Int(int) if negative => Literal::Int(-int),
            Literal::Float(float) if negative => Literal::Float(-float),
            number => number,
        })
    }

    fn starts_number(&self, c: char) -> bool {
        let after_point = || self.rest().chars().nth(1).is_some_and(|c| c.is_ascii_digit());
        c.is_ascii_digit() || (c == '.' && after_point())
    }

    fn number(&mut self) -> Result<Literal, ParseError> {
        let start = self.at;
        while let Some(c) = self.peek() {
            let in_exponent = self.text[start..self.at].ends_with(['e', 'E']);
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
            self.error(kind, "a decimal number of 64 bits")
        })
    }

    /// Reads a text. Several texts one after the other are joined.
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
            '\\' | '\'' | '"' => c,
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            // Escapes of Python that no axis name needs.
            'a' | 'b' | 'f' | 'v' | 'x' | 'u' | 'U' | 'N' | '0'..='7' | '\n' => {
                self.at = start;
                let expected = "one of \\\\ \\' \\\" \\n \\r \\t";
                return Err(self.error(ErrorKind::Syntax, expected));
            }
            other => {
                text.push('\\');
                other
            }
        };
        text.push(plain);
        Ok(())
    }
}

fn is_long_int(written: &str) -> bool {
    !written.starts_with('0') && written.bytes().all(|b| b.is_ascii_digit())
}

fn read_number(written: &str) -> Option<Literal> {
    if !written.bytes().all(|b| b.is_ascii_digit()) {
        // Starts with a digit or a point, so it is not a word like `inf` that also parses.
        return written.parse().ok().map(Literal::Float);
    }
    let leading_zero = written.starts_with('0') && written.bytes().any(|b| b != b'0');
    written.parse().ok().filter(|_| !leading_zero).map(Literal::Int)
}
