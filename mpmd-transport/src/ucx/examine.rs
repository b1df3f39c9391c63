//! Reports which UCX library this machine has, for checks before a job.

use super::{UcxReport, engine, sys};
use crate::transport::TransportError;

/// Opens UCX as a job does, and reports the version and file of its library.
///
/// # Errors
///
/// If there is no library, or if UCX cannot be opened or finds no network or memory that it can
/// use.
pub fn examine() -> Result<UcxReport, TransportError> {
    drop(engine::worker(2)?);
    let library = sys::library().map_err(|why| TransportError::Unavailable {
        transport: super::NAME,
        why: why.to_string(),
    })?;
    Ok(UcxReport {
        version: library.version(),
        library: library.path.clone(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examine_reports_version_and_file() {
        let report = examine().expect("UCX is built with this program");
        assert!(report.version.starts_with("1."), "{report:?}");
        assert!(report.library.is_file(), "{report:?}");
    }
}
