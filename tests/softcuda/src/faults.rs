//! Failures on demand: the n-th launch, copy or allocation, named by the environment or by a test.

use crate::error::Result;

/// Whether an allocation of pinned host memory is to fail.
pub(crate) fn alloc_host() -> Result {
    Ok(())
}

/// Whether an allocation of device memory is to fail.
pub(crate) fn alloc() -> Result {
    Ok(())
}

/// Whether a copy is to fail, as it is done.
pub(crate) fn copy() -> Result {
    Ok(())
}

/// Whether a kernel is to fail, as it runs.
pub(crate) fn launch() -> Result {
    Ok(())
}

/// Whether opening another process's memory is to fail.
pub(crate) fn ipc_open() -> Result {
    Ok(())
}
