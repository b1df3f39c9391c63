//! Escapes of JSON that stand for half a character.
//!
//! JSON writes a character beyond U+FFFF as two escapes, a high and a low surrogate. A text that
//! was cut between them has one alone, which is no character. JavaScript and Python write it
//! nevertheless.

use std::borrow::Cow;

/// Number of bytes of an escape such as `\ud83d`.
const ESCAPE: usize = 6;

/// Returns the JSON with U+FFFD in place of every lone surrogate. Neither the length nor the
/// position of any other byte changes. Copies only if there is a lone surrogate.
pub(super) fn without_lone_surrogates(json: &[u8]) -> Cow<'_, [u8]> {
    let mut mended = Cow::Borrowed(json);
    let mut at = 0;
    while let Some(found) = json[at..].iter().position(|byte| *byte == b'\\') {
        at += found;
        at += match (surrogate(&json[at..]), surrogate_behind(json, at)) {
            (Some(Half::High), Some(Half::Low)) => 2 * ESCAPE,
            (Some(_), _) => {
                mended.to_mut()[at..at + ESCAPE].copy_from_slice(b"\\ufffd");
                ESCAPE
            }
            // Skips the byte behind the backslash, which may be a backslash.
            (None, _) => 2.min(json.len() - at),
        };
    }
    mended
}

/// One of the two halves of a character.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Half {
    High,
    Low,
}

/// Returns the half of a character that the bytes begin with as an escape.
fn surrogate(bytes: &[u8]) -> Option<Half> {
    let digits = bytes.strip_prefix(b"\\u")?.first_chunk::<4>()?;
    let [b'd' | b'D', second, rest @ ..] = digits else {
        return None;
    };
    if !rest.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    match second.to_ascii_lowercase() {
        b'8' | b'9' | b'a' | b'b' => Some(Half::High),
        b'c'..=b'f' => Some(Half::Low),
        _ => None,
    }
}

/// Returns the half of a character behind the escape at `at`.
fn surrogate_behind(json: &[u8], at: usize) -> Option<Half> {
    surrogate(json.get(at + ESCAPE..)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_stay_and_lone_halves_are_replaced() {
        // As Python reads these texts and decodes them from UTF-16 with `replace`.
        for (json, expected) in [
            (r#""cut \ud83d""#, "cut \u{fffd}"),
            (r#""\ud83d\ude00""#, "\u{1f600}"),
            (r#""\ude00\ud83d""#, "\u{fffd}\u{fffd}"),
            (r#""\ud83d\ud83d\ude00""#, "\u{fffd}\u{1f600}"),
            (r#""\\ud83d""#, "\\ud83d"),
            (r#""\\\ud83d""#, "\\\u{fffd}"),
            (r#""\ud83d\n""#, "\u{fffd}\n"),
            (r#""\ud83d\u0041""#, "\u{fffd}A"),
            (r#""\uDBFF\uDFFF\uDFFF""#, "\u{10ffff}\u{fffd}"),
            (r#""\uD800x\uDC00""#, "\u{fffd}x\u{fffd}"),
            (r#""\ud83d\\ude00""#, "\u{fffd}\\ude00"),
            (r#""\udead\udead""#, "\u{fffd}\u{fffd}"),
            (r#""\ud7ff\ue000""#, "\u{d7ff}\u{e000}"),
        ] {
            let mended = without_lone_surrogates(json.as_bytes());
            let found: String = serde_json::from_slice(&mended).unwrap();
            assert_eq!(found, expected, "{json}");
            assert_eq!(mended.len(), json.len());
        }
    }

    #[test]
    fn bytes_without_lone_halves_are_not_copied() {
        for json in [
            &b"{\"a\": \"\\ud83d\\ude00 \\n\"}"[..],
            b"\\",
            b"\\u",
            b"\"\\ud8",
            b"\"\\ud8zz\"",
            b"",
        ] {
            assert!(matches!(without_lone_surrogates(json), Cow::Borrowed(same) if same == json));
        }
    }
}
