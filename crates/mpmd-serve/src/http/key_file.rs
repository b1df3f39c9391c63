//! The file of keys: a key on each line, perhaps with a name and limits behind it.

use std::num::NonZeroU32;
use std::path::Path;

use mpmd::launch::{LaunchError, read_private};

/// Limit on the size of a file of keys, in bytes.
const LARGEST_FILE: usize = 64 << 10;
/// Largest number of characters of a key's name.
const LONGEST_NAME: usize = 64;

/// A line of a file of keys.
#[derive(Clone, Eq, PartialEq)]
pub(super) struct KeyEntry {
    /// The key that clients send. Never shown.
    pub(super) key: String,
    /// The name of the key in the log and in metrics.
    pub(super) name: Option<String>,
    pub(super) limits: KeyLimits,
}

/// The limits of a key. `None` is no limit.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(super) struct KeyLimits {
    /// Largest number of requests at once, each prompt of a list counted.
    pub(super) requests: Option<NonZeroU32>,
    /// Number of requests per minute, each prompt of a list counted.
    pub(super) requests_per_minute: Option<NonZeroU32>,
    /// Number of tokens of prompts and replies per minute.
    pub(super) tokens_per_minute: Option<NonZeroU32>,
}

/// The reason why a file of keys is refused.
pub(super) enum KeyFileFault {
    /// The file cannot be read, or users other than its owner can read it.
    Unreadable(LaunchError),
    /// The content that was expected, with the number of the line at fault.
    Invalid(String),
}

/// Reads a file of keys. The file must be readable by its owner only. `setting` is the name of the
/// file's setting, for messages.
///
/// # Errors
///
/// If the file cannot be read, or a line is invalid. The error has no text of the line, since that
/// may be a key.
pub(super) fn read_keys(setting: &'static str, path: &Path) -> Result<Vec<KeyEntry>, KeyFileFault> {
    let name = path
        .to_str()
        .ok_or_else(|| KeyFileFault::Invalid("a path in UTF-8".to_owned()))?;
    let text = read_private(name, setting, LARGEST_FILE).map_err(KeyFileFault::Unreadable)?;
    parse(&String::from_utf8_lossy(&text)).map_err(KeyFileFault::Invalid)
}

/// Returns the keys of a file's text. The error is the expectation, with the number of the line at
/// fault.
fn parse(text: &str) -> Result<Vec<KeyEntry>, String> {
    let mut keys: Vec<KeyEntry> = Vec::new();
    for (number, line) in (1..).zip(text.lines().map(str::trim)) {
        if line.is_empty() {
            continue;
        }
        let entry = parse_line(line).map_err(|fault| fault.on_line(number))?;

        // A plain key that is there twice says the same twice.
        if keys.contains(&entry) && entry.name.is_none() {
            continue;
        }
        if keys.iter().any(|other| other.key == entry.key) {
            return Err(LineFault::KnownKey.on_line(number));
        }
        let is_known = |name| keys.iter().any(|other| other.name.as_ref() == Some(name));
        if entry.name.as_ref().is_some_and(is_known) {
            return Err(LineFault::KnownName.on_line(number));
        }
        keys.push(entry);
    }
    match keys.is_empty() {
        true => Err("a key on a line, found none".to_owned()),
        false => Ok(keys),
    }
}

/// The reason why a line is no entry. Has no text of the line.
#[derive(Clone, Copy, Debug)]
enum LineFault {
    Comment,
    Characters,
    Attribute,
    Twice(&'static str),
    Name,
    Limit(&'static str),
    KnownKey,
    KnownName,
}

impl LineFault {
    /// Returns the expectation that the line with this number does not meet.
    fn on_line(self, number: usize) -> String {
        match self {
            Self::Comment => {
                format!("a key on each line and no comments, found one on line {number}")
            }
            Self::Characters => {
                format!("keys of ASCII characters without blanks, found another on line {number}")
            }
            Self::Attribute => format!(
                "behind the key only name=NAME, requests=N, requests-per-minute=N and \
                 tokens-per-minute=N, found something else on line {number}"
            ),
            Self::Twice(word) => format!("{word} once, found it twice on line {number}"),
            Self::Name => format!(
                "a name of 1 to {LONGEST_NAME} letters, digits, `-`, `_` and `.`, found another \
                 on line {number}"
            ),
            Self::Limit(word) => format!(
                "{word}=N with a whole number from 1 to {}, found another on line {number}",
                u32::MAX
            ),
            Self::KnownKey => {
                format!("each key once, found that of an earlier line on line {number}")
            }
            Self::KnownName => {
                format!("each name once, found that of an earlier line on line {number}")
            }
        }
    }
}

const NAME: &str = "name";
const REQUESTS: &str = "requests";
const REQUESTS_PER_MINUTE: &str = "requests-per-minute";
const TOKENS_PER_MINUTE: &str = "tokens-per-minute";

fn parse_line(line: &str) -> Result<KeyEntry, LineFault> {
    if line.starts_with('#') {
        return Err(LineFault::Comment);
    }
    let mut words = line.split_ascii_whitespace();
    let key = words.next().unwrap_or_default();
    if !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(LineFault::Characters);
    }

    let mut name = None;
    let mut limits = KeyLimits::default();
    for word in words {
        let (attribute, value) = word.split_once('=').ok_or(LineFault::Attribute)?;
        match attribute {
            NAME if is_name(value) => set_once(&mut name, NAME, value.to_owned())?,
            NAME => return Err(LineFault::Name),
            REQUESTS => set_once(&mut limits.requests, REQUESTS, limit(REQUESTS, value)?)?,
            REQUESTS_PER_MINUTE => set_once(
                &mut limits.requests_per_minute,
                REQUESTS_PER_MINUTE,
                limit(REQUESTS_PER_MINUTE, value)?,
            )?,
            TOKENS_PER_MINUTE => set_once(
                &mut limits.tokens_per_minute,
                TOKENS_PER_MINUTE,
                limit(TOKENS_PER_MINUTE, value)?,
            )?,
            _ => return Err(LineFault::Attribute),
        }
    }
    Ok(KeyEntry {
        key: key.to_owned(),
        name,
        limits,
    })
}

/// True if a text may be a name: it needs no escapes in the log, in metrics and in queries of them.
fn is_name(text: &str) -> bool {
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=LONGEST_NAME).contains(&text.len()) && text.bytes().all(is_safe)
}

fn limit(attribute: &'static str, value: &str) -> Result<NonZeroU32, LineFault> {
    let is_digits = value.bytes().all(|byte| byte.is_ascii_digit());
    let number = value.parse().ok().filter(|_| is_digits);
    number.ok_or(LineFault::Limit(attribute))
}

fn set_once<T>(to: &mut Option<T>, attribute: &'static str, value: T) -> Result<(), LineFault> {
    match to.replace(value) {
        Some(_) => Err(LineFault::Twice(attribute)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_have_a_key_and_perhaps_a_name_and_limits() {
        let text = "plain=\n\n  k1 name=alice requests=4 tokens-per-minute=60000 \n\
                    k2\ttokens-per-minute=1  name=bob-2_x.y requests-per-minute=20\nplain=\n";
        let keys = parse(text).unwrap();
        let entry = |key: &str, name: Option<&str>, requests, tokens| KeyEntry {
            key: key.to_owned(),
            name: name.map(str::to_owned),
            limits: KeyLimits {
                requests: NonZeroU32::new(requests),
                requests_per_minute: None,
                tokens_per_minute: NonZeroU32::new(tokens),
            },
        };
        let mut expected = [
            entry("plain=", None, 0, 0),
            entry("k1", Some("alice"), 4, 60_000),
            entry("k2", Some("bob-2_x.y"), 0, 1),
        ];
        expected[2].limits.requests_per_minute = NonZeroU32::new(20);
        assert!(keys == expected);
    }

    #[test]
    fn wrong_line_is_told_by_its_number_and_not_its_text() {
        let long = format!("secret name={}", "n".repeat(65));
        for (line, expected) in [
            ("# secret", "no comments, found one on line 3"),
            (
                "sécret",
                "keys of ASCII characters without blanks, found another on line 3",
            ),
            (
                "secret secret",
                "behind the key only name=NAME, requests=N, requests-per",
            ),
            ("secret secret=2", "something else on line 3"),
            ("secret Name=a", "something else on line 3"),
            (
                "secret name=",
                "a name of 1 to 64 letters, digits, `-`, `_` and `.`, found",
            ),
            ("secret name=a\"b", "found another on line 3"),
            ("secret name=é", "found another on line 3"),
            (&long, "found another on line 3"),
            (
                "secret name=a name=b",
                "name once, found it twice on line 3",
            ),
            (
                "secret requests=1 requests=1",
                "requests once, found it twice on line 3",
            ),
            (
                "secret requests=0",
                "requests=N with a whole number from 1 to 4294967295",
            ),
            ("secret requests=+4", "found another on line 3"),
            ("secret requests=-1", "found another on line 3"),
            (
                "secret tokens-per-minute=60k",
                "tokens-per-minute=N with a whole number from",
            ),
            (
                "secret tokens-per-minute=9999999999",
                "found another on line 3",
            ),
            (
                "first",
                "each key once, found that of an earlier line on line 3",
            ),
            (
                "secret name=holder",
                "each name once, found that of an earlier line on line 3",
            ),
        ] {
            let text = format!("first name=holder\n\n{line}\nlast\n");
            let why = parse(&text).err().unwrap();
            assert!(why.contains(expected), "{line}: {why}");
            assert!(!why.contains("secret") && !why.contains("first"), "{why}");
        }
    }
}
