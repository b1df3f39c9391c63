//! What CUDA's libraries answered.

use std::fmt;
use std::sync::Arc;

/// A call of one of CUDA's libraries that failed, or work of a device's that did. Clones are the
/// same error.
///
/// Work fails after it was issued: `doing` says what was waited for then. A device that has failed
/// so does nothing more in this process, and all that is asked of it fails with the same words.
#[derive(Clone, Eq, PartialEq)]
pub struct CudaError(Arc<Inner>);

#[derive(Eq, PartialEq)]
struct Inner {
    doing: String,
    name: String,
    text: String,
    /// The work may go on, or wait for ever: nobody waits for its end.
    is_lost: bool,
}

impl CudaError {
    /// While `doing`, a library answered with the error of this name, which means `text`.
    pub(crate) fn new(
        doing: impl Into<String>,
        name: impl Into<String>,
        text: impl Into<String>,
    ) -> Self {
        let is_lost = false;
        Self(Arc::new(Inner { doing: doing.into(), name: name.into(), text: text.into(), is_lost }))
    }

    /// The same with what a library has written of it besides, below.
    #[cfg(feature = "cuda")]
    pub(super) fn with_log(&self, log: &str) -> Self {
        let Inner { doing, name, text, .. } = &*self.0;
        let text =
            if log.is_empty() { text.clone() } else { format!("{text}):\n{log}\n(end of log") };
        Self::new(doing.clone(), name.clone(), text)
    }

    /// The same, with what it was all for in front.
    #[cfg(feature = "cuda")]
    pub(super) fn in_the_course_of(&self, what: String) -> Self {
        let Inner { doing, name, text, .. } = &*self.0;
        Self::new(format!("{what}: {doing}"), name.clone(), text.clone())
    }

    /// The same, of work that is not known to be over.
    #[cfg(feature = "cuda")]
    pub(super) fn lost(&self) -> Self {
        let Inner { doing, name, text, .. } = &*self.0;
        let (doing, name, text) = (doing.clone(), name.clone(), text.clone());
        Self(Arc::new(Inner { doing, name, text, is_lost: true }))
    }

    /// Whether work that ended with this is not known to be over, so that what it uses must be left
    /// alone.
    #[cfg(feature = "cuda")]
    pub(super) fn is_lost(&self) -> bool {
        self.0.is_lost
    }

    /// Whether the driver does not know what to make of a module.
    #[cfg(feature = "cuda")]
    pub(super) fn is_unknown_image(&self) -> bool {
        let unknown = [
            "CUDA_ERROR_NO_BINARY_FOR_GPU",
            "CUDA_ERROR_INVALID_IMAGE",
            "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        ];
        unknown.contains(&self.name())
    }

    /// The library's own name of the error, such as `CUDA_ERROR_OUT_OF_MEMORY`; empty where the
    /// error is not a library's.
    pub fn name(&self) -> &str {
        &self.0.name
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { doing, name, text, .. } = &*self.0;
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
