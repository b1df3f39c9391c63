//! The regular expressions that Python's `re` and our engine read alike.
//!
//! Rules come from Python programs, and their authors know `re`. A part of a pattern that `re`
//! refuses, or reads in another way, is a fault with a name. The meanings are those of
//! <https://docs.python.org/3.11/library/re.html>. Classes of characters beyond ASCII, such as
//! those of `\w`, still differ in a few.

use super::PatternFault;

/// Returns the first part of `pattern` that Python's `re` refuses or reads in another way. Faults
/// that the engine finds by itself are passed over.
pub(super) fn fault(pattern: &str) -> Option<PatternFault> {
    let mut reader = Reader {
        pattern,
        at: 0,
        verbose: is_verbose(pattern),
    };
    reader.read().err()
}

/// Returns true if the pattern begins with flags that contain `x`: white space and comments mean
/// nothing in it.
pub(super) fn is_verbose(pattern: &str) -> bool {
    let flags = pattern.strip_prefix("(?");
    let flags = flags.and_then(|rest| rest.split_once(')'));
    flags.is_some_and(|(flags, _)| {
        flags.chars().all(|flag| flag.is_ascii_alphabetic()) && flags.contains('x')
    })
}

/// The letters that may follow a backslash, outside of classes of characters.
const ESCAPES: &str = "AbBdDsSwWafnrtvxuU";

/// The letters that may follow a backslash in a class of characters.
const CLASS_ESCAPES: &str = "dDsSwWafnrtvxuU";

/// The characters that our engine reads as an operator between sets if they stand twice.
const SET_OPERATORS: &str = "-&~|";

struct Reader<'p> {
    pattern: &'p str,
    /// The position of the next character, in bytes.
    at: usize,
    verbose: bool,
}

type Read = Result<(), PatternFault>;

impl Reader<'_> {
    fn read(&mut self) -> Read {
        // True where a repeat count has nothing to repeat.
        let mut is_start = true;
        while let Some(next) = self.next() {
            let begins = self.at - next.len_utf8();
            let was_start = std::mem::replace(&mut is_start, matches!(next, '(' | '|'));
            match next {
                '\\' => self.read_escape(begins, ESCAPES)?,
                '[' => self.read_class()?,
                '(' => self.read_group(begins)?,
                '{' => self.read_count(begins, was_start)?,
                '#' if self.verbose => self.skip_past('\n'),
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads the rest of an escape that begins at `begins`, with one of these letters.
    fn read_escape(&mut self, begins: usize, letters: &str) -> Read {
        let Some(next) = self.next() else {
            return Ok(());
        };
        let escape = &self.pattern[begins..self.at];
        match next {
            '<' | '>' => Err(fault_at(
                begins,
                format!("{escape} is {next} in Python's re; write {next}"),
            )),
            'x' | 'u' | 'U' => {
                let digits = match next {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let is_hex = |digit: char| digit.is_ascii_hexdigit();
                match self
                    .rest()
                    .chars()
                    .take(digits)
                    .filter(|c| is_hex(*c))
                    .count()
                {
                    found if found == digits => Ok(()),
                    _ => Err(fault_at(
                        begins,
                        format!("Python's re needs {digits} hexadecimal digits after {escape}"),
                    )),
                }
            }
            letter if letter.is_ascii_alphabetic() && !letters.contains(letter) => Err(fault_at(
                begins,
                format!("Python's re has no escape {escape} here, or reads it in another way"),
            )),
            digit if digit.is_ascii_digit() => self.read_number(begins, digit, letters),
            _ => Ok(()),
        }
    }

    /// Checks the number after a backslash: it is a reference to a group, or in Python a character
    /// by its octal number.
    fn read_number(&mut self, begins: usize, first: char, letters: &str) -> Read {
        let octal = self.rest().chars().take(2);
        let octal = octal.filter(|digit| ('0'..='7').contains(digit)).count();
        if first == '0' || letters == CLASS_ESCAPES || (first <= '7' && octal == 2) {
            return Err(fault_at(
                begins,
                "Python's re reads this as the octal number of a character; write \\x and two \
                 hexadecimal digits"
                    .to_owned(),
            ));
        }
        Ok(())
    }

    /// Reads the rest of a class of characters.
    fn read_class(&mut self) -> Read {
        self.skip('^');
        self.skip(']');
        while let Some(next) = self.next() {
            let begins = self.at - next.len_utf8();
            match next {
                ']' => return Ok(()),
                '\\' => self.read_escape(begins, CLASS_ESCAPES)?,
                '[' => {
                    let why = "in a class, Python's re reads [ as itself; write \\[";
                    return Err(fault_at(begins, why.to_owned()));
                }
                operator
                    if SET_OPERATORS.contains(operator) && self.rest().starts_with(operator) =>
                {
                    return Err(fault_at(
                        begins,
                        format!(
                            "in a class, Python's re reads {operator}{operator} as characters; \
                             write \\{operator}\\{operator}"
                        ),
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Reads the beginning of a group after its parenthesis.
    fn read_group(&mut self, begins: usize) -> Read {
        if !self.skip('?') {
            return Ok(());
        }
        let rest = self.rest();
        let unknown = |what: &str| {
            let why = format!("Python's re has no group {what}");
            Err(fault_at(begins, why))
        };
        match rest.as_bytes() {
            [b'#', ..] => self.skip_past(')'),
            [b':' | b'=' | b'!' | b'>' | b'(', ..] => self.at += 1,
            [b'<', b'=' | b'!', ..] => self.at += 2,
            [b'<', ..] => return unknown("(?<name>; write (?P<name>"),
            [b'P', b'<' | b'=', ..] => self.at += 2,
            [b'P', ..] => return unknown("(?P that is neither (?P<name> nor (?P=name)"),
            _ => return self.read_flags(begins),
        }
        Ok(())
    }

    /// Reads the flags of a group, or of the whole pattern.
    fn read_flags(&mut self, begins: usize) -> Read {
        let rest = self.rest();
        let Some(end) = rest.find([':', ')']) else {
            return Ok(());
        };
        let flags = &rest[..end];
        if let Some(flag) = flags.chars().find(|flag| !"imsux-".contains(*flag)) {
            let why = format!("the flag {flag} is none of i, m, s, u and x");
            return Err(fault_at(begins, why));
        }
        if rest[end..].starts_with(')') && begins > 0 {
            let why = format!(
                "Python's re takes flags only at the beginning of a pattern; write \
                 (?{flags}:...) around a part"
            );
            return Err(fault_at(begins, why));
        }
        self.at += end;
        Ok(())
    }

    /// Reads a repeat count after its brace, if it is one.
    fn read_count(&mut self, begins: usize, is_start: bool) -> Read {
        let Some((count, _)) = self.rest().split_once('}') else {
            return Ok(());
        };
        let is_count = |c: char| c.is_ascii_digit() || c == ',' || c == ' ';
        if count.is_empty() || !count.chars().all(is_count) {
            return Ok(());
        }

        let fault = |why: &str| Err(fault_at(begins, why.to_owned()));
        if count.contains(' ') {
            return fault("Python's re reads a count with spaces as text");
        }
        if is_start {
            return fault("there is nothing to repeat");
        }
        let (least, most) = count.split_once(',').unwrap_or((count, count));
        // Numbers that are too large are found later.
        let number = |text: &str| text.parse::<u64>().ok();
        match (number(least), number(most)) {
            (Some(least), Some(most)) if least > most => {
                fault("the least count is larger than the most")
            }
            _ => Ok(()),
        }
    }

    fn rest(&self) -> &str {
        &self.pattern[self.at..]
    }

    fn next(&mut self) -> Option<char> {
        let next = self.rest().chars().next()?;
        self.at += next.len_utf8();
        Some(next)
    }

    /// Skips this character if it is the next one. Returns true if it was.
    fn skip(&mut self, character: char) -> bool {
        let is_next = self.rest().starts_with(character);
        self.at += if is_next { character.len_utf8() } else { 0 };
        is_next
    }

    /// Skips everything up to this character, and the character.
    fn skip_past(&mut self, character: char) {
        let rest = self.rest();
        self.at += rest
            .find(character)
            .map_or(rest.len(), |end| end + character.len_utf8());
    }
}

fn fault_at(position: usize, message: String) -> PatternFault {
    PatternFault {
        position: Some(position),
        message,
    }
}
