//! Results of work outside of operations, such as files, that all processes must learn alike.

use mpmd_core::{Error, ProcessId, Program, Result};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Returns the same result on every process: the error of the lowest-numbered process that has one,
/// else success. Every process must call it. Blocks until each process has called it. Succeeds in a
/// dry run.
pub(crate) fn agree(p: &mut Program, own: Result<()>) -> Result<()> {
    let own = own.err().map(|error| error.to_string());
    let errors = p.gather_value(None, || Ok(own))?;
    match errors.into_iter().flatten().next() {
        Some(error) => Err(Error::Environment(error)),
        None => Ok(()),
    }
}

/// Runs `f` on process 0 and returns its value or error on every process. Every process must call
/// it. A dry run returns `in_dry_run` and does not run `f`.
pub(crate) fn on_first<T: Serialize + DeserializeOwned>(
    p: &mut Program,
    in_dry_run: T,
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let run = || Ok(f().map_err(|error| error.to_string()));
    let result: Result<T, String> = p.broadcast_value(ProcessId(0), Ok(in_dry_run), run)?;
    result.map_err(Error::Environment)
}
