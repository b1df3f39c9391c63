//! Numbers that Python writes into JSON, and that JSON lacks: `NaN` and the infinities.

use serde::de::Error as _;

/// The words for these numbers. The longest comes first.
const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];

/// Returns the error for the first number of Python in a text that is no JSON: it names the number,
/// its key, its line and its column. `None` if there is none up to the place of `why`, the error of
/// serde_json for the text.
pub(super) fn python_number(bytes: &[u8], why: &serde_json::Error) -> Option<serde_json::Error> {
    let error = first_number(bytes)?;
    // That of serde_json may stand one byte before or behind.
    let place = (error.line(), error.column().saturating_sub(1));
    (place <= (why.line(), why.column())).then_some(error)
}

/// Returns the error for the first number of Python outside of the texts in `bytes`.
fn first_number(bytes: &[u8]) -> Option<serde_json::Error> {
    let mut key = None;
    let mut at = 0;
    while at < bytes.len() {
        if bytes[at] == b'"' {
            let end = end_of_text(bytes, at);
            let is_key = bytes[end..].trim_ascii_start().starts_with(b":");
            key = is_key.then_some(&bytes[at..end]).or(key);
            at = end;
            continue;
        }
        let found = WORDS
            .into_iter()
            .find(|word| bytes[at..].starts_with(word.as_bytes()));
        if let Some(word) = found {
            return Some(error(bytes, at, word, key));
        }
        at += 1;
    }
    None
}

/// Returns the end of the JSON text whose opening quote is at `start`.
fn end_of_text(bytes: &[u8], start: usize) -> usize {
    let mut at = start + 1;
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    bytes.len().min(at + 1)
}

/// Creates the error for the number `word` at the offset `at`. `key` is the text of the last key
/// before it, in quotes.
fn error(bytes: &[u8], at: usize, word: &str, key: Option<&[u8]>) -> serde_json::Error {
    let before = &bytes[..at];
    let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
    let start = before.iter().rposition(|byte| *byte == b'\n');
    let column = at - start.map_or(0, |start| start + 1) + 1;

    let key = key.map(String::from_utf8_lossy);
    let of = key.map_or_else(String::new, |key| format!(" as the value of {key}"));
    // serde_json takes the position from the end of the message.
    serde_json::Error::custom(format!(
        "{word}{of}, a number that JSON lacks at line {line} column {column}"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn numbers_of_python_are_named_with_key_and_place() {
        for (text, said) in [
            (
                "{\"a\": 1,\n \"b\": {\"c\": -Infinity}}",
                "-Infinity as the value of \"c\", a number that JSON lacks at line 2 column 13",
            ),
            (
                r#"{"a": "NaN: \" NaN", "list": [1, "x", NaN]}"#,
                "NaN as the value of \"list\", a number that JSON lacks at line 1 column 39",
            ),
            (
                "Infinity",
                "Infinity, a number that JSON lacks at line 1 column 1",
            ),
        ] {
            let why = serde_json::from_str::<Value>(text).unwrap_err();
            let error = python_number(text.as_bytes(), &why).unwrap();
            assert_eq!(error.to_string(), said);
            let at = format!("at line {} column {}", error.line(), error.column());
            assert!(said.ends_with(&at), "{said}, not {at}");
        }
        for text in [
            "",
            "{\"NaN\": nan",
            "\"NaN",
            "\"\\",
            "{\"a\": Infinite}",
            "{\"a\" 1, \"b\": NaN}",
        ] {
            let why = serde_json::from_str::<Value>(text).unwrap_err();
            let error = python_number(text.as_bytes(), &why);
            assert!(error.is_none(), "{text}: {error:?}");
        }
    }
}
