//! JSON from files and clients, in which a key may occur only once in an object.
//!
//! Parsers disagree on which of two equal keys counts. So a repeated key is an error, wherever JSON
//! comes in.

use std::collections::HashSet;
use std::fmt;

use serde::de::{
    DeserializeOwned, DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor,
};

use super::python_number::python_number;

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
    Invalid(serde_json::Error),
}

/// Reads a value from JSON whose objects have each key once. This holds for all objects, also for
/// those that `T` does not keep.
///
/// # Errors
///
/// If the bytes are no JSON, have a repeated key, or do not describe a `T`.
pub fn read_json<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, JsonError> {
    let mut repeated = None;
    let mut from = serde_json::Deserializer::from_slice(bytes);
    let unique = UniqueKeys {
        repeated: &mut repeated,
    };

    let checked = unique.deserialize(&mut from);
    match (checked, repeated) {
        (Err(why), Some(key)) => Err(JsonError::RepeatedKey {
            key,
            line: why.line(),
            column: why.column(),
        }),
        // An invalid text has the error of the second reading, which knows the expected form.
        _ => serde_json::from_slice(bytes)
            .map_err(|why| JsonError::Invalid(python_number(bytes, &why).unwrap_or(why))),
    }
}

/// A visitor that reads a whole value and finds the first repeated key in it.
struct UniqueKeys<'a> {
    repeated: &'a mut Option<String>,
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
                repeated: &mut *self.repeated,
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
                *self.repeated = Some(key);
                return Err(A::Error::custom("a repeated key"));
            }
            keys.insert(key);
            map.next_value_seed(UniqueKeys {
                repeated: &mut *self.repeated,
            })?;
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
    fn text_that_is_no_json_has_the_usual_error() {
        for text in ["", "{", "{\"a\": 1} x", &"[".repeat(100_000)] {
            let expected = serde_json::from_str::<Value>(text).unwrap_err().to_string();
            let found = read_json::<Value>(text.as_bytes()).unwrap_err().to_string();
            assert_eq!(found, expected);
        }
    }
}
