//! Warnings to the user.

use std::io::Write;

use mpmd_launch::printable;

/// Writes `line` to standard error, with `mpmd: ` in front, and to the log as a warning. Ignores
/// write errors.
pub(crate) fn warn_user(line: &str) {
    tracing::warn!(target: "mpmd::warning", "{line}");
    write(line);
}

/// Writes `line` to standard error, with `mpmd: ` in front, and to the log. Ignores write errors.
pub(crate) fn tell_user(line: &str) {
    tracing::info!("{line}");
    write(line);
}

fn write(line: &str) {
    // A single write, since other processes of the job may write to the same stream. An error is
    // ignored: standard error may be closed.
    let _ = std::io::stderr().write_all(format!("mpmd: {}\n", printable(line)).as_bytes());
}
