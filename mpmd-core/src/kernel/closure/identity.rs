//! The identity of closures, by which processes see whether they run the same ones.

use std::fmt;
use std::panic::Location;

use crate::error::{Error, Result};
use crate::exec::Rolling;

/// Maximum length in bytes of the declared values that a kernel's name shows.
const SHOWN_VALUES: usize = 40;

/// The source line of a kernel or stage made from closures, and the values that they capture.
pub(crate) struct ClosureIdentity {
    name: String,
    declared: Vec<String>,
    /// The source line of the closures.
    at: &'static Location<'static>,
    /// True if the closures capture values, which processes must then compare.
    captures: bool,
}

impl ClosureIdentity {
    /// Creates the identity of closures made at line `at`. `kind` is the first word of the name.
    pub(crate) fn new(kind: &str, at: &'static Location<'static>, captures: bool) -> Self {
        Self {
            name: format!("{kind} at {}:{}", at.file(), at.line()),
            declared: Vec::new(),
            at,
            captures,
        }
    }

    /// Adds a captured value, as the text that `Debug` writes. A short text is shown in the name.
    pub(crate) fn declare(&mut self, value: &dyn fmt::Debug) {
        let shown = self.shown_values().len();
        self.name.truncate(self.name.len() - shown);
        self.declared.push(format!("{value:?}"));
        self.name += &self.shown_values();
    }

    /// Returns the declared values in parentheses. Empty if there are none or their text is too
    /// long.
    fn shown_values(&self) -> String {
        let values = self.declared.join(", ");
        if values.is_empty() || values.len() > SHOWN_VALUES {
            return String::new();
        }
        format!(" ({values})")
    }

    /// Returns an error if the closures capture values and none is declared.
    pub(crate) fn check(&self) -> Result<()> {
        if self.captures && self.declared.is_empty() {
            return Err(Error::kernel(format!(
                "the closure at {} captures values: declare each by `.with(value)`, so that \
                 processes can compare them",
                self.at
            )));
        }
        Ok(())
    }

    /// Returns the name for messages.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns hashes of the closures' source position and of each declared value. The name lacks
    /// the column and long values.
    pub(crate) fn statics(&self) -> Vec<u64> {
        let hash = |text: &str| Rolling::default().mix_bytes(text.as_bytes()).word();
        let place = hash(&self.at.to_string());
        [place]
            .into_iter()
            .chain(self.declared.iter().map(|text| hash(text)))
            .collect()
    }
}
