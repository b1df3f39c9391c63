//! The system's futex.

use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::Timespec;

use super::doorbell::Futex;
use super::sync::AtomicU32;

/// Length of the sleep that replaces a futex wait when the system refuses to wait. It keeps a
/// caller that waits in a loop from spinning.
const REFUSED: Duration = Duration::from_millis(1);

/// The Linux futex system call, for words in memory that several processes map.
pub(super) struct SystemFutex;

impl Futex for SystemFutex {
    fn wait(&self, word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
        // A timeout that is too long for the system counts as none.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match futex::wait(word, futex::Flags::empty(), expected, timeout.as_ref()) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
            Err(_) => std::thread::sleep(REFUSED),
        }
    }

    fn wake(&self, word: &AtomicU32, all: bool) {
        let count = if all { i32::MAX as u32 } else { 1 };
        // Fails only for unmapped memory, and a reference is always mapped.
        let _ = futex::wake(word, futex::Flags::empty(), count);
    }
}
