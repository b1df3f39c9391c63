//! What every test here starts with: a limit in time.

use std::io::Write;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Ends the test process, naming the test, unless it is dropped in time.
///
/// A test that hangs would otherwise hang its runner; this way it fails.
#[must_use = "the limit is lifted when this is dropped"]
pub(crate) struct Watchdog(#[expect(dead_code, reason = "held for its drop")] Sender<()>);

/// Gives the calling test that many seconds: far more than it needs, also on a busy machine.
pub(crate) fn watchdog(seconds: u64) -> Watchdog {
    let name = std::thread::current().name().unwrap_or("a test").to_owned();
    let limit = Duration::from_secs(seconds);
    let (alive, end) = channel();
    std::thread::spawn(move || {
        if end.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
            // Not by `eprintln`: what the test runner has captured is lost in an abort.
            let text = format!("\ntest {name} still runs after {limit:?}: it hangs\n");
            let _ = std::io::stderr().write_all(text.as_bytes());
            std::process::abort();
        }
    });
    Watchdog(alive)
}
