//! Warnings to the user.

use std::io::Write;

/// Writes a line to standard error and to the log.
pub(crate) fn warn_user(line: &str) {
    tracing::warn!(target: "mpmd", "{line}");
    // In one write: other processes of the job may be writing to the same place. Who has closed it
    // hears nothing.
    let _ = std::io::stderr().write_all(format!("mpmd: {line}\n").as_bytes());
}
