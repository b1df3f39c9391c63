//! Errors of CUDA's libraries and devices.

use std::fmt;
use std::sync::Arc;

/// A failed call of a CUDA library, or failed work of a device. Clones share one error.
///
/// If work fails after it was issued, `doing` names the operation that waited for it. After such a
/// failure the device does nothing more in this process, and every later operation fails with the
/// same message.
#[derive(Clone, Eq, PartialEq)]
pub struct CudaError(Arc<ErrorParts>);

#[derive(Eq, PartialEq)]
struct ErrorParts {
    doing: String,
    name: String,
    text: String,
    /// True if the work may still run. Its end will never be known.
    is_lost: bool,
}

impl CudaError {
    /// Creates an error. `doing` describes the operation, and `name` and `text` are the library's
    /// name and description of the error.
    pub fn new(doing: impl Into<String>, name: impl Into<String>, text: impl Into<String>) -> Self {
        let is_lost = false;
        Self(Arc::new(ErrorParts {
            doing: doing.into(),
            name: name.into(),
            text: text.into(),
            is_lost,
        }))
    }

    /// Returns the error with a library's log appended; unchanged if the log is empty.
    pub(super) fn with_log(&self, log: &str) -> Self {
        let ErrorParts {
            doing, name, text, ..
        } = &*self.0;

        let text = if log.is_empty() {
            text.clone()
        } else {
            format!("{text}):\n{log}\n(end of log")
        };

        Self::new(doing.clone(), name.clone(), text)
    }

    /// Returns the error with an enclosing operation named before its own operation.
    pub(super) fn in_the_course_of(&self, operation: String) -> Self {
        let ErrorParts {
            doing, name, text, ..
        } = &*self.0;
        Self::new(format!("{operation}: {doing}"), name.clone(), text.clone())
    }

    /// Returns the error with the mark that the work may still be running.
    pub(super) fn lost(&self) -> Self {
        let ErrorParts {
            doing, name, text, ..
        } = &*self.0;

        let doing = doing.clone();
        let name = name.clone();
        let text = text.clone();
        Self(Arc::new(ErrorParts {
            doing,
            name,
            text,
            is_lost: true,
        }))
    }

    /// Returns true if the failed work may still be running. Memory that it uses must not be
    /// reused.
    pub(super) fn is_lost(&self) -> bool {
        self.0.is_lost
    }

    /// Returns true if the driver cannot load this form of a module: machine code or PTX. The other
    /// form may work.
    pub(super) fn is_unknown_image(&self) -> bool {
        let unknown = [
            "CUDA_ERROR_NO_BINARY_FOR_GPU",
            "CUDA_ERROR_INVALID_IMAGE",
            "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        ];
        unknown.contains(&self.name())
    }

    /// Returns the library's name of the error, such as `CUDA_ERROR_OUT_OF_MEMORY`. The name is
    /// empty if the error does not come from a library.
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ErrorParts {
            doing, name, text, ..
        } = &*self.0;

        if name.is_empty() {
            return write!(f, "{doing}: {text}");
        }
        write!(f, "{doing}: {name} ({text})")
    }
}

impl fmt::Debug for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaError({self})")
    }
}

impl std::error::Error for CudaError {}

/// Serializes the error's text.
impl serde::Serialize for CudaError {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
