//! The system's futex.

use std::time::Duration;

use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::Timespec;

use super::door::Futex;
use super::sync::AtomicU32;

/// How long a wait takes that the system refuses, so that who repeats it does not spin.
const REFUSED: Duration = Duration::from_millis(1);

/// The system's futex, for words in memory that several processes map.
pub(super) struct SystemFutex;

impl Futex for SystemFutex {
    fn wait(&self, word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
        // What is too long for the system is as good as for ever.
        let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
        match futex::wait(word, futex::Flags::empty(), expected, timeout.as_ref()) {
            Ok(()) | Err(Errno::AGAIN | Errno::INTR | Errno::TIMEDOUT) => {}
            Err(_) => std::thread::sleep(REFUSED),
        }
    }

    fn wake(&self, word: &AtomicU32, all: bool) {
        let count = if all { i32::MAX as u32 } else { 1 };
        // It fails for memory that is not there only, and a reference is.
        let _ = futex::wake(word, futex::Flags::empty(), count);
    }
}
