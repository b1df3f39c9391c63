//! Errors: files of a model, and settings that do not fit it.

use std::fmt;
use std::path::Path;

use mpmd::Error;
use mpmd::candle::candle_core::Error as CandleError;
use mpmd_base::bytes_text;

/// A setting that does not fit the model or another setting. Retrying will not help.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{setting}: expected {expected}, found {found}")]
pub struct InvalidSetting {
    /// The name of the field in [`Division`](crate::Division) or [`Sampling`](crate::Sampling).
    pub setting: &'static str,
    /// The values that are allowed.
    pub expected: String,
    /// The value that was given.
    pub found: String,
}

impl InvalidSetting {
    pub(crate) fn new(
        setting: &'static str,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> Self {
        Self {
            setting,
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}

impl From<InvalidSetting> for Error {
    fn from(invalid: InvalidSetting) -> Self {
        Self::Environment(invalid.to_string())
    }
}

/// Error: a model cannot be divided as requested. Retrying will not help.
#[derive(Debug, thiserror::Error)]
pub enum DivisionError {
    /// A setting of the division does not fit the model or the others.
    #[error(transparent)]
    Setting(#[from] InvalidSetting),
    /// The devices of a stage have too little memory.
    #[error("memory: {}", too_little(*.stage, *.needed, *.limit))]
    Memory {
        /// Index of the stage.
        stage: usize,
        /// The bytes that each device of the stage needs.
        needed: u64,
        /// The bytes that each device of the stage has.
        limit: u64,
    },
    /// The model has fewer layers or positions than a setting asks for.
    #[error("{why}")]
    ModelSize {
        /// The setting: `stages` or `positions`, as in [`Stages::new`](crate::Stages::new).
        setting: &'static str,
        /// The error, which names the file and its key.
        why: Box<Error>,
    },
    /// The files of the model do not fit the division, or cannot be read.
    #[error(transparent)]
    Model(#[from] Error),
}

impl From<DivisionError> for Error {
    fn from(error: DivisionError) -> Self {
        match error {
            DivisionError::ModelSize { why, .. } => *why,
            DivisionError::Model(error) => error,
            other => Self::Environment(other.to_string()),
        }
    }
}

/// Returns the message for a stage with too little memory.
fn too_little(stage: usize, needed: u64, limit: u64) -> String {
    let needs = bytes_text(needed);
    let has = bytes_text(limit);
    let more = bytes_text(needed.saturating_sub(limit));
    format!("stage {stage} needs {needs}, and has {has}: {more} more, or more stages")
}

/// Returns an error of candle as one of mpmd, without the backtrace that candle may capture:
/// clients see the reason why weights are refused.
pub(crate) fn of_candle(error: CandleError) -> Error {
    match error {
        CandleError::WithBacktrace { inner, .. } => of_candle(*inner),
        error => Error::kernel(error.to_string()),
    }
}

/// Returns the error for a value in `file` other than expected. `subject` is the tensor or key with
/// the value; it is empty if the file as a whole is meant.
pub(crate) fn unexpected(
    file: &Path,
    subject: &str,
    expected: impl fmt::Display,
    found: impl fmt::Display,
) -> Error {
    let colon = if subject.is_empty() { "" } else { ": " };
    let file = file.display();
    Error::Environment(format!(
        "{file}: {subject}{colon}expected {expected}, found {found}"
    ))
}

#[cfg(test)]
mod tests {
    use std::backtrace::Backtrace;

    use super::*;

    #[test]
    fn errors_of_candle_have_no_backtrace() {
        let inner = CandleError::Msg("the reason".to_owned());
        let with_backtrace = |inner| CandleError::WithBacktrace {
            inner: Box::new(inner),
            backtrace: Box::new(Backtrace::force_capture()),
        };
        let error = of_candle(with_backtrace(with_backtrace(inner)));
        assert_eq!(error.to_string(), Error::kernel("the reason").to_string());
    }
}
