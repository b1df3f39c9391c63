//! Helpers of several topics, and a time limit for tests.

pub(crate) mod arrays;
pub(crate) mod chains;
pub(crate) mod cuda;
pub(crate) mod kernels;
pub(crate) mod log;

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// A time limit for a test, made by [`watchdog`]. If it is not dropped in time, the test process
/// aborts with the name of the test.
///
/// Without it, a test that hangs would hang its runner. With it, the test fails.
#[must_use = "the limit is lifted when this is dropped"]
pub(crate) struct Watchdog(#[expect(dead_code, reason = "held for its drop")] Sender<()>);

/// Starts a time limit in seconds for the calling test, which ends when the result is dropped. It
/// should be far more than the test needs on a busy machine.
pub(crate) fn watchdog(seconds: u64) -> Watchdog {
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    let limit = Duration::from_secs(seconds);
    let (alive, end) = channel();
    std::thread::spawn(move || {
        if end.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            // Not `eprintln`: an abort loses the output that the test runner has captured.
            let text = format!("\ntest {name} still runs after {limit:?}: it hangs\n");
            let _ = std::io::stderr().write_all(text.as_bytes());
            std::process::abort();
        }
    });
    Watchdog(alive)
}
