//! JSON from files and clients, in which a key may occur only once in an object.
//!
//! Parsers disagree on which of two equal keys counts. So a repeated key is an error, wherever JSON
//! comes in. Half a character, as a text that was cut within one has it, is U+FFFD.

use std::collections::HashSet;
use std::fmt;

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor,
};

use super::surrogates::without_lone_surrogates;

/// Words that programs write for values that are no numbers of JSON.
const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
/// Largest number of characters of a key in a message.
const SHOWN: usize = 60;

/// Error: JSON that cannot be read. Retrying will not help.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// An object has a key twice.
    #[error("the key {key:?} twice in an object, the second time at line {line} column {column}")]
    RepeatedKey {
        /// The key.
        key: String,
        /// Line of the second one, from 1.
        line: usize,
        /// Column behind the second one, in bytes from 1.
        column: usize,
    },
    /// The bytes are no JSON, or JSON of another form than expected.
    #[error(transparent)]
    Invalid(InvalidJson),
}

/// Error: bytes that are no JSON, or JSON of another form than expected. The message ends with line
/// and column.
#[derive(Debug, thiserror::Error)]
pub struct InvalidJson {
    /// The key whose value is at fault. `None` if none is, or the form of the JSON is at fault.
    pub key: Option<String>,
    /// The word in place of a number, such as `NaN`, which some programs write.
    word: Option<&'static str>,
    #[source]
    why: serde_json::Error,
}

impl InvalidJson {
    /// Returns the line of the fault, from 1.
    pub fn line(&self) -> usize {
        self.why.line()
    }

    /// Returns the column of the fault, in bytes from 1.
    pub fn column(&self) -> usize {
        self.why.column()
    }

    /// Returns the message without the key.
    pub fn fault(&self) -> String {
        match self.word {
            Some(word) => format!("{word}, {}", self.lacking()),
            None => self.why.to_string(),
        }
    }

    /// Returns the message about a number that JSON lacks.
    fn lacking(&self) -> String {
        let (line, column) = (self.line(), self.column());
        format!("a number that JSON lacks at line {line} column {column}")
    }
}

impl fmt::Display for InvalidJson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.key.as_ref();
        let key = key.map(|key| key.chars().take(SHOWN).collect::<String>());
        match (key, self.word) {
            (Some(key), Some(word)) => {
                write!(f, "{word} as the value of {key:?}, {}", self.lacking())
            }
            (Some(key), None) => write!(f, "the value of {key:?}: {}", self.why),
            (None, _) => f.write_str(&self.fault()),
        }
    }
}

/// Reads a value from JSON whose objects have each key once. This holds for all objects, also for
/// those that `T` does not keep. Lone surrogates are read as U+FFFD.
///
/// # Errors
///
/// If the bytes are no JSON, have a repeated key, or do not describe a `T`.
pub fn read_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, JsonError> {
    let bytes = &*without_lone_surrogates(bytes);
    let mut faults = KeyFaults::default();
    let mut from = serde_json::Deserializer::from_slice(bytes);
    let unique = UniqueKeys {
        faults: &mut faults,
    };

    let checked = unique.deserialize(&mut from);
    let KeyFaults {
        repeated,
        innermost,
    } = faults;
    if let (Err(why), Some(key)) = (&checked, repeated) {
        return Err(JsonError::RepeatedKey {
            key,
            line: why.line(),
            column: why.column(),
        });
    }

    // An invalid text has the error of the second reading, which knows the expected form.
    serde_json::from_slice(bytes).map_err(|why: serde_json::Error| {
        let is_here = |checked: &serde_json::Error| {
            checked.line() == why.line() && checked.column() == why.column()
        };
        let key = innermost.filter(|_| checked.is_err_and(|checked| is_here(&checked)));
        JsonError::Invalid(InvalidJson {
            key,
            word: word_at(bytes, &why),
            why,
        })
    })
}

/// Returns the word that stands in place of a number where the parser has failed.
fn word_at(bytes: &[u8], why: &serde_json::Error) -> Option<&'static str> {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let line = lines.nth(why.line().checked_sub(1)?)?;
    // The parser may have read the sign, or one letter.
    let starts = why.column().saturating_sub(2)..=why.column();
    starts
        .filter_map(|start| line.get(start..))
        .find_map(|rest| {
            WORDS
                .into_iter()
                .find(|word| rest.starts_with(word.as_bytes()))
        })
}

/// The keys at fault in a text.
#[derive(Default)]
struct KeyFaults {
    /// A key that its object has twice.
    repeated: Option<String>,
    /// The innermost key whose value is no JSON.
    innermost: Option<String>,
}

/// A visitor that reads a whole value and finds the keys at fault in it.
struct UniqueKeys<'a> {
    faults: &'a mut KeyFaults,
}

impl<'de> DeserializeSeed<'de> for UniqueKeys<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, from: D) -> Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for UniqueKeys<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_bool<E>(self, _: bool) -> Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> Result<(), E> {
        Ok(())
    }

    fn visit_str<E>(self, _: &str) -> Result<(), E> {
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        loop {
            let one = UniqueKeys {
                faults: &mut *self.faults,
            };
            if list.next_element_seed(one)?.is_none() {
                return Ok(());
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut keys = HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            if keys.contains(&key) {
                self.faults.repeated = Some(key);
                return Err(A::Error::custom("a repeated key"));
            }
            let value = map.next_value_seed(UniqueKeys {
                faults: &mut *self.faults,
            });
            if let Err(why) = value {
                self.faults.innermost.get_or_insert(key);
                return Err(why);
            }
            keys.insert(key);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[test]
    fn repeated_keys_are_refused_at_any_depth() {
        for text in [
            r#"{"a": 1, "a": 1}"#,
            r#"{"x": [null, {"b": {}, "a": true, "a": "text"}]}"#,
            r#"{"x": {"a": -1, "\u0061": 0.5}}"#,
        ] {
            let error = read_json::<Value>(text.as_bytes()).unwrap_err();
            let JsonError::RepeatedKey { key, line, .. } = &error else {
                panic!("{text}: {error}");
            };
            assert_eq!(key, "a");
            assert_eq!(*line, 1);
        }
        let text = "{\"a\": 1,\n \"b\": 2, \"a\": 3}";
        let said = read_json::<Value>(text.as_bytes()).unwrap_err().to_string();
        let expected = "the key \"a\" twice in an object, the second time at line 2 column 12";
        assert_eq!(said, expected);
    }

    #[test]
    fn equal_keys_of_different_objects_are_allowed() {
        let text = r#"[{"a": {"a": 1}}, {"a": [-1, 0.5, null, false, "a"]}]"#;
        let read: Value = read_json(text.as_bytes()).unwrap();
        assert_eq!(read[1]["a"][0], -1);
    }

    #[test]
    fn words_and_faults_are_shown_with_their_key_and_place() {
        for (text, expected) in [
            (
                "{\"temperature\": NaN}",
                "NaN as the value of \"temperature\", a number that JSON lacks at line 1 column 17",
            ),
            (
                "{\"a\": {\"b\": [1,\n -Infinity]}}",
                "-Infinity as the value of \"b\", a number that JSON lacks at line 2 column 3",
            ),
            (
                "{\"a\": 1, \"window\":Infinity}",
                "Infinity as the value of \"window\", a number that JSON lacks at line 1 column 19",
            ),
            (
                "{\"a\": tru}",
                "the value of \"a\": expected ident at line 1 column 10",
            ),
            ("[NaN]", "NaN, a number that JSON lacks at line 1 column 2"),
        ] {
            let found = read_json::<Value>(text.as_bytes()).unwrap_err();
            assert_eq!(found.to_string(), expected);
        }
    }

    #[test]
    fn lone_surrogates_are_read_in_keys_and_values() {
        let text = r#"{"a\ud83d": ["\udc00", "\ud83d\ude00"]}"#;
        let read: Value = read_json(text.as_bytes()).unwrap();
        let expected = serde_json::json!({ "a\u{fffd}": ["\u{fffd}", "\u{1f600}"] });
        assert_eq!(read, expected);
    }

    #[test]
    fn text_that_is_no_json_has_the_usual_error() {
        for text in ["", "{", "{\"a\": 1} x", &"[".repeat(100_000)] {
            let expected = serde_json::from_str::<Value>(text).unwrap_err().to_string();
            let found = read_json::<Value>(text.as_bytes()).unwrap_err().to_string();
            assert_eq!(found, expected);
        }
    }
}
