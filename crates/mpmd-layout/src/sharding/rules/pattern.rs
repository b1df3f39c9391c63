//! The patterns of rules: regular expressions that match whole names of leaves.

use fancy_regex::Regex;

/// The reason that a pattern is refused.
pub(super) struct PatternFault {
    /// Position of the problem in the pattern, in bytes, or `None` if it is unknown.
    pub(super) position: Option<usize>,
    pub(super) message: String,
}

/// Compiles `pattern` to a regular expression that matches only whole names of leaves.
pub(super) fn whole_name(pattern: &str) -> Result<Regex, PatternFault> {
    let bad = |error: fancy_regex::Error, known: bool| {
        let position = match &error {
            fancy_regex::Error::ParseError(position, _) if known => Some(*position),
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
    // First compiled alone: `a)(b` would be valid inside the brackets, and positions would be
    // wrong.
    Regex::new(pattern).map_err(|error| bad(error, true))?;
    Regex::new(&format!(r"\A(?:{pattern})\z")).map_err(|error| bad(error, false))
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
