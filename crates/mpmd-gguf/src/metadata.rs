//! The metadata of a file, with getters that say which type they expected.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::error::GgufError;
use crate::values::{MetadataArray, MetadataValue, TextArray};

/// Found value in an error about a missing key.
const NO_KEY: &str = "no such key";

/// The metadata of a file: a value for each key. Errors name the file, the key, and the expected
/// and the found type.
#[derive(Clone, Debug)]
pub struct Metadata {
    path: PathBuf,
    values: BTreeMap<String, MetadataValue>,
}

impl Metadata {
    pub(crate) fn new(path: &Path, values: BTreeMap<String, MetadataValue>) -> Self {
        Self {
            path: path.to_owned(),
            values,
        }
    }

    /// Returns the value of a key; `None` if the key is missing.
    pub fn get(&self, key: &str) -> Option<&MetadataValue> {
        self.values.get(key)
    }

    /// Returns true if the file has the key.
    pub fn contains(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// Iterates over all keys and values, in the order of the keys.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &MetadataValue)> {
        self.values.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// Calls a getter if the file has the key, and returns `None` if not:
    /// `metadata.optional("general.name", Metadata::text)`.
    ///
    /// # Errors
    ///
    /// If the key has a value of another type.
    pub fn optional<'a, T>(
        &'a self,
        key: &str,
        getter: impl FnOnce(&'a Self, &str) -> Result<T, GgufError>,
    ) -> Result<Option<T>, GgufError> {
        match self.contains(key) {
            true => getter(self, key).map(Some),
            false => Ok(None),
        }
    }

    /// Returns a text.
    ///
    /// # Errors
    ///
    /// If the key is missing or its value is no text.
    pub fn text(&self, key: &str) -> Result<&str, GgufError> {
        match self.get(key) {
            Some(MetadataValue::Text(text)) => Ok(text),
            other => Err(self.mismatch(key, "a text", other)),
        }
    }

    /// Returns a truth value.
    ///
    /// # Errors
    ///
    /// If the key is missing or its value is no bool.
    pub fn bool(&self, key: &str) -> Result<bool, GgufError> {
        match self.get(key) {
            Some(MetadataValue::Bool(value)) => Ok(*value),
            other => Err(self.mismatch(key, "a bool", other)),
        }
    }

    /// Returns an integer of any type.
    ///
    /// # Errors
    ///
    /// If the key is missing, or its value is no integer or is negative.
    pub fn u64(&self, key: &str) -> Result<u64, GgufError> {
        let found = self.get(key);
        let value = found.and_then(MetadataValue::integer);
        match value.map(u64::try_from) {
            Some(Ok(value)) => Ok(value),
            Some(Err(_)) => Err(self.wrong(key, "an integer of at least 0", "a negative one")),
            None => Err(self.mismatch(key, "an integer", found)),
        }
    }

    /// Returns an integer of any type.
    ///
    /// # Errors
    ///
    /// If the key is missing, or its value is no integer or exceeds an i64.
    pub fn i64(&self, key: &str) -> Result<i64, GgufError> {
        let found = self.get(key);
        let value = found.and_then(MetadataValue::integer);
        match value.map(i64::try_from) {
            Some(Ok(value)) => Ok(value),
            Some(Err(_)) => Err(self.wrong(key, "an integer below 2^63", "a larger one")),
            None => Err(self.mismatch(key, "an integer", found)),
        }
    }

    /// Returns a number of any type. Integers beyond 2^53 are rounded.
    ///
    /// # Errors
    ///
    /// If the key is missing or its value is no number.
    pub fn f64(&self, key: &str) -> Result<f64, GgufError> {
        let found = self.get(key);
        match found {
            Some(MetadataValue::F32(value)) => Ok((*value).into()),
            Some(MetadataValue::F64(value)) => Ok(*value),
            _ => match found.and_then(MetadataValue::integer) {
                Some(value) => Ok(value as f64),
                None => Err(self.mismatch(key, "a number", found)),
            },
        }
    }

    /// Returns an array of any type.
    ///
    /// # Errors
    ///
    /// If the key is missing or its value is no array.
    pub fn array(&self, key: &str) -> Result<&MetadataArray, GgufError> {
        match self.get(key) {
            Some(MetadataValue::Array(array)) => Ok(array),
            other => Err(self.mismatch(key, "an array", other)),
        }
    }

    /// Returns an array of texts.
    ///
    /// # Errors
    ///
    /// If the key is missing or its value is no array of texts.
    pub fn texts(&self, key: &str) -> Result<&TextArray, GgufError> {
        match self.get(key) {
            Some(MetadataValue::Array(MetadataArray::Text(texts))) => Ok(texts),
            other => Err(self.mismatch(key, "an array of text", other)),
        }
    }

    /// Returns an array of integers of any type.
    ///
    /// # Errors
    ///
    /// If the key is missing, its value is no array of integers, or one of them exceeds an i64.
    pub fn integers(&self, key: &str) -> Result<Vec<i64>, GgufError> {
        let found = self.get(key);
        let values = match found {
            Some(MetadataValue::Array(array)) => array.integers(),
            _ => None,
        };
        let values = values.ok_or_else(|| self.mismatch(key, "an array of integers", found))?;
        let values: Result<_, _> = values.into_iter().map(i64::try_from).collect();
        values.map_err(|_| self.wrong(key, "integers below 2^63", "a larger one"))
    }

    /// Returns an array of numbers of any type. Integers beyond 2^53 are rounded.
    ///
    /// # Errors
    ///
    /// If the key is missing or its value is no array of numbers.
    pub fn numbers(&self, key: &str) -> Result<Vec<f64>, GgufError> {
        let found = self.get(key);
        let Some(MetadataValue::Array(array)) = found else {
            return Err(self.mismatch(key, "an array of numbers", found));
        };
        match array {
            MetadataArray::F32(values) => Ok(values.iter().map(|value| (*value).into()).collect()),
            MetadataArray::F64(values) => Ok(values.clone()),
            _ => match array.integers() {
                Some(values) => Ok(values.into_iter().map(|value| value as f64).collect()),
                None => Err(self.mismatch(key, "an array of numbers", found)),
            },
        }
    }

    fn mismatch(
        &self,
        key: &str,
        expected: &'static str,
        found: Option<&MetadataValue>,
    ) -> GgufError {
        self.wrong(
            key,
            expected,
            found.map_or(NO_KEY, MetadataValue::type_name),
        )
    }

    fn wrong(&self, key: &str, expected: &'static str, found: &str) -> GgufError {
        GgufError::Metadata {
            path: self.path.clone(),
            key: key.to_owned(),
            expected,
            found: found.to_owned(),
        }
    }
}
