//! The metadata keys of one namespace of a GGUF file, and the check that each was read.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Display;

use mpmd::{Error, Result};
use mpmd_gguf::{GgufError, GgufFile, Metadata, MetadataArray, MetadataValue};

use crate::error::unexpected;

/// The keys that begin with one prefix, such as `llama.`. Records which of them have been read, for
/// [`MetadataKeys::finish`].
pub(super) struct MetadataKeys<'a> {
    file: &'a GgufFile,
    prefix: String,
    read: RefCell<BTreeSet<String>>,
}

impl<'a> MetadataKeys<'a> {
    /// Creates the keys of `file` that begin with `namespace` and a dot.
    pub(super) fn new(file: &'a GgufFile, namespace: &str) -> Self {
        Self {
            file,
            prefix: format!("{namespace}."),
            read: RefCell::default(),
        }
    }

    /// Returns the file.
    pub(super) fn file(&self) -> &'a GgufFile {
        self.file
    }

    /// Returns the value of a key that is given without its prefix. `None` if the file lacks it.
    fn value<T>(
        &self,
        key: &str,
        getter: impl FnOnce(&'a Metadata, &str) -> Result<T, GgufError>,
    ) -> Result<Option<T>> {
        let key = format!("{}{key}", self.prefix);
        let found = self.file.metadata().optional(&key, getter);
        self.read.borrow_mut().insert(key);
        found.map_err(of_gguf)
    }

    /// Returns a whole number of 0 or more.
    pub(super) fn count(&self, key: &str) -> Result<Option<u64>> {
        self.value(key, Metadata::u64)
    }

    /// Returns a whole number, which must be there.
    pub(super) fn required_count(&self, key: &str) -> Result<u64> {
        let found = self.count(key)?;
        found.ok_or_else(|| self.unexpected(key, "a whole number", "no such key"))
    }

    /// Returns a finite number. An f32 becomes the shortest decimal number that rounds to it, since
    /// it was written from one: 1e-5, and not 9.99999974737875e-6.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>> {
        let number = self.value(key, |metadata, key| match metadata.get(key) {
            Some(MetadataValue::F32(value)) => Ok(decimal(*value)),
            _ => metadata.f64(key),
        })?;
        match number {
            Some(number) if !number.is_finite() => {
                Err(self.unexpected(key, "a finite number", number))
            }
            number => Ok(number),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.value(key, Metadata::bool)
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.value(key, Metadata::text)
    }

    pub(super) fn texts(&self, key: &str) -> Result<Option<Vec<&'a str>>> {
        let texts = self.value(key, Metadata::texts)?;
        Ok(texts.map(|texts| texts.iter().collect()))
    }

    pub(super) fn integers(&self, key: &str) -> Result<Option<Vec<i64>>> {
        self.value(key, Metadata::integers)
    }

    pub(super) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.value(key, Metadata::numbers)
    }

    /// Returns the flags of an array: of bools, or of integers that are 0 or 1. `None` also if the
    /// value is no array.
    pub(super) fn flags(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.value(key, |metadata, key| {
            Ok(match metadata.get(key) {
                Some(MetadataValue::Array(MetadataArray::Bool(flags))) => Some(flags.clone()),
                Some(MetadataValue::Array(_)) => {
                    let flags = metadata.integers(key)?;
                    Some(flags.into_iter().map(|flag| flag != 0).collect())
                }
                _ => None,
            })
        })
        .map(Option::flatten)
    }

    /// True if a key has been asked for.
    pub(super) fn was_read(&self, key: &str) -> bool {
        self.read
            .borrow()
            .contains(&format!("{}{key}", self.prefix))
    }

    /// Returns an error if the key has another number than `only`.
    pub(super) fn only_number(&self, key: &str, only: f64) -> Result<()> {
        match self.number(key)? {
            Some(found) if found != only => Err(self.unexpected(key, only, found)),
            _ => Ok(()),
        }
    }

    /// Returns an error if the key has another flag than `only`.
    pub(super) fn only_flag(&self, key: &str, only: bool) -> Result<()> {
        match self.flag(key)? {
            Some(found) if found != only => Err(self.unexpected(key, only, found)),
            _ => Ok(()),
        }
    }

    /// Returns an error for the first key that nothing has read, since it may change results. Keys
    /// listed in `harmless`, which are separated by blanks, are accepted. One that ends with a dot
    /// stands for all keys that begin with it.
    pub(super) fn finish(&self, harmless: &str) -> Result<()> {
        let read = self.read.borrow();
        let is_harmless = |key: &str| {
            harmless
                .split_whitespace()
                .any(|known| key == known || (known.ends_with('.') && key.starts_with(known)))
        };
        for (key, value) in self.file.metadata().iter() {
            let Some(own) = key.strip_prefix(&self.prefix) else {
                continue;
            };
            if !read.contains(key) && !is_harmless(own) {
                let expected = "no such key: it may change results, and nothing here handles it";
                return Err(self.unexpected(own, expected, shown(value)));
            }
        }
        Ok(())
    }

    /// Returns the error for the value of a key other than expected.
    pub(super) fn unexpected(
        &self,
        key: &str,
        expected: impl Display,
        found: impl Display,
    ) -> Error {
        let key = format!("{}{key}", self.prefix);
        unexpected(self.file.path(), &key, expected, found)
    }
}

/// Returns the shortest decimal number that rounds to an f32, as f64.
pub(super) fn decimal(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| value.into())
}

/// Returns an error of the reader as one of mpmd. Its text names the file.
pub(super) fn of_gguf(error: GgufError) -> Error {
    Error::Environment(error.to_string())
}

/// Returns a value as text, for messages.
fn shown(value: &MetadataValue) -> String {
    const SHOWN: usize = 60;
    match value {
        MetadataValue::Text(text) => {
            format!("{:?}", text.chars().take(SHOWN).collect::<String>())
        }
        MetadataValue::Array(array) => {
            format!("an {} with {} elements", array.type_name(), array.len())
        }
        MetadataValue::F32(value) => value.to_string(),
        MetadataValue::F64(value) => value.to_string(),
        MetadataValue::Bool(value) => value.to_string(),
        MetadataValue::U8(value) => value.to_string(),
        MetadataValue::I8(value) => value.to_string(),
        MetadataValue::U16(value) => value.to_string(),
        MetadataValue::I16(value) => value.to_string(),
        MetadataValue::U32(value) => value.to_string(),
        MetadataValue::I32(value) => value.to_string(),
        MetadataValue::U64(value) => value.to_string(),
        MetadataValue::I64(value) => value.to_string(),
        other => other.type_name().to_owned(),
    }
}
