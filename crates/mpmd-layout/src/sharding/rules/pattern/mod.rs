//! Patterns of names: regular expressions as Python's `re` reads them.

mod dialect;

use std::fmt;

use fancy_regex::Regex;

/// A regular expression that matches names, such as the paths of parameters.
///
/// It is read as Python's `re` reads it. A pattern that `re` refuses or reads in another way is
/// refused.
///
/// ```
/// use mpmd_layout::sharding::rules::NamePattern;
///
/// let biases = NamePattern::anywhere(r"\.bias$")?;
/// assert!(biases.matches("layers.0.bias")?);
/// let error = NamePattern::anywhere(r"\<bias").unwrap_err();
/// assert_eq!(error.to_string(), r"position 0: \< is < in Python's re; write <");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct NamePattern {
    pattern: String,
    regex: Regex,
}

/// The reason that a pattern is refused, or cannot be matched with a name.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub struct PatternFault {
    /// Position of the problem in the pattern, in bytes, or `None` if it is unknown.
    pub(super) position: Option<usize>,
    pub(super) message: String,
}

impl fmt::Display for PatternFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(position) = self.position {
            write!(f, "position {position}: ")?;
        }
        f.write_str(&self.message)
    }
}

impl NamePattern {
    /// Compiles a pattern that matches a name if it matches any part of it, as `re.search` does.
    ///
    /// # Errors
    ///
    /// If `pattern` is no regular expression, or Python's `re` reads it in another way.
    pub fn anywhere(pattern: &str) -> Result<Self, PatternFault> {
        let bad = |error: fancy_regex::Error| {
            let position = match &error {
                fancy_regex::Error::ParseError(position, _) => Some(*position),
                _ => None,
            };
            PatternFault {
                position,
                message: error.to_string(),
            }
        };

        if let Some(position) = repeats_too_often(pattern) {
            return Err(PatternFault {
                position: Some(position),
                message: format!("repeats more than {MOST_REPEATED} times, or too often in all"),
            });
        }
        if let Some(fault) = dialect::fault(pattern) {
            return Err(fault);
        }
        Ok(Self {
            pattern: pattern.to_owned(),
            regex: Regex::new(pattern).map_err(bad)?,
        })
    }

    /// Compiles a pattern that matches a name if it matches the whole name, as `re.fullmatch` does.
    ///
    /// # Errors
    ///
    /// The errors of [`anywhere`](Self::anywhere).
    pub fn whole(pattern: &str) -> Result<Self, PatternFault> {
        // First compiled alone: `a)(b` would be valid inside the brackets, and positions would be
        // wrong.
        let anywhere = Self::anywhere(pattern)?;
        // A comment at the end goes as far as the line.
        let line = if dialect::is_verbose(pattern) {
            "\n"
        } else {
            ""
        };
        let regex = Regex::new(&format!(r"\A(?:{pattern}{line})\z"));
        let regex = regex.map_err(|error| PatternFault {
            position: None,
            message: error.to_string(),
        })?;
        Ok(Self { regex, ..anywhere })
    }

    /// Returns the pattern's text.
    pub fn as_str(&self) -> &str {
        &self.pattern
    }

    /// Returns true if the pattern matches a name.
    ///
    /// # Errors
    ///
    /// If a pattern with look-around or back references takes too many steps on the name.
    pub fn matches(&self, name: &str) -> Result<bool, PatternFault> {
        self.regex.is_match(name).map_err(|error| PatternFault {
            position: None,
            message: error.to_string(),
        })
    }
}

/// The largest repeat count that one `{n}` in a pattern may have.
const MOST_REPEATED: u64 = 1000;

/// The largest allowed product of all repeat counts of a pattern. The regex engine counts match
/// lengths in 64 bits.
const MOST_IN_ALL: u64 = 1 << 40;

/// Returns the position, in bytes from 0, of the first repeat count in a pattern that exceeds the
/// limits. Returns `None` if none does.
pub(super) fn repeats_too_often(pattern: &str) -> Option<usize> {
    let mut in_all: u64 = 1;
    let mut chars = pattern.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => drop(chars.next()),
            '{' => {
                let inside = pattern[at + 1..].split('}').next().unwrap_or_default();
                let is_count = |c: char| c.is_ascii_digit() || c == ',' || c.is_ascii_whitespace();
                if inside.is_empty() || !inside.chars().all(is_count) {
                    continue;
                }

                // A number that does not parse has more than 64 bits.
                let counts = inside
                    .split(',')
                    .map(str::trim)
                    .filter(|count| !count.is_empty());
                let most = counts
                    .map(|count| count.parse().unwrap_or(u64::MAX))
                    .max()
                    .unwrap_or(0);

                in_all = in_all.saturating_mul(most.max(1));
                if most > MOST_REPEATED || in_all > MOST_IN_ALL {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}
