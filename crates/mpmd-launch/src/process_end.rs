//! [`ProcessEnd`]: the exit status and the output of a process that has ended.

use std::fmt;
use std::time::Instant;

use crate::job_failure::ExitKind;

/// Number of lines at the end of each output stream that a message shows.
const LAST_LINES: usize = 20;

/// The exit status and the whole output of a process that has ended.
///
/// `Display` and `Debug` show the exit status and the last 20 lines of each output stream.
#[derive(Clone, Eq, PartialEq)]
#[non_exhaustive]
pub struct ProcessEnd {
    /// The name of the process in messages: `process 2`.
    pub name: String,
    /// The exit code of the process, or the signal that ended it.
    pub how: ExitKind,
    /// The standard output of the process. Bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// The standard error of the process. Bytes that are not UTF-8 are replaced.
    pub stderr: String,
    /// The time at which the test noticed that the process had ended.
    pub ended_at: Instant,
}

impl ProcessEnd {
    /// Returns the exit code that a shell would show: 0 for success, and for a signal 128 plus its
    /// number.
    pub fn code(&self) -> i32 {
        self.how.code()
    }
}

impl fmt::Display for ProcessEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_report(
            f,
            &self.name,
            &self.how,
            &self.stdout,
            &self.stderr,
            LAST_LINES,
        )
    }
}

// Test harnesses print errors with `Debug`, which must not escape the lines.
impl fmt::Debug for ProcessEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Writes the state of a process and at most `last` lines of each output stream.
pub(crate) fn write_report(
    to: &mut impl fmt::Write,
    name: &str,
    state: &dyn fmt::Display,
    stdout: &str,
    stderr: &str,
    last: usize,
) -> fmt::Result {
    write!(to, "--- {name}: {state}")?;

    for (stream, text) in [("output", stdout), ("error", stderr)] {
        let count = text.lines().count();
        match count {
            0 => continue,
            _ if count <= last => write!(to, "\n--- {name}, standard {stream}")?,
            _ => write!(
                to,
                "\n--- {name}, standard {stream}, last {last} of {count} lines"
            )?,
        }

        for line in text.lines().skip(count.saturating_sub(last)) {
            write!(to, "\n{line}")?;
        }
    }
    Ok(())
}
