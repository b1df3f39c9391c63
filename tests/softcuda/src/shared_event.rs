//! Events of several processes: what is recorded and what is done stands in memory that they share.

use std::os::fd::OwnedFd;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::ipc::started;
use crate::mapped::{self, Mapped};
use crate::memory::memory_file;

/// Records of one event that may be under way at once.
const SLOTS: u64 = 64;
/// How often a waiter looks whether who recorded is still there.
const LOOK: Duration = Duration::from_millis(50);
/// How long a record may have a number but not yet its recorder's name.
const GRACE: Duration = Duration::from_secs(1);

/// The shared memory; all zeros is an event that was never recorded.
#[repr(C)]
struct Page {
    /// Number of the newest record.
    issued: AtomicU64,
    /// Changes when a record is done; what waiters sleep on.
    changes: AtomicU32,
    slots: [Slot; SLOTS as usize],
}

/// One record, at its number modulo the slots there are.
#[repr(C)]
struct Slot {
    /// The record that the recorder's name is for.
    named: AtomicU64,
    process: AtomicU32,
    started: AtomicU64,
    /// The newest record of this slot that is done.
    done: AtomicU64,
}

/// An event's shared memory, mapped here.
pub(crate) struct SharedEvent {
    file: OwnedFd,
    page: Mapped<Page>,
}

// SAFETY: all of it is atomics.
unsafe impl mapped::Page for Page {}

impl SharedEvent {
    /// A new event.
    pub(crate) fn new() -> Result<SharedEvent> {
        Self::map(memory_file(size_of::<Page>() as u64)?)
    }

    /// The event of another process, whose file this is.
    pub(crate) fn map(file: OwnedFd) -> Result<SharedEvent> {
        let page = Mapped::of(&file)?;
        Ok(SharedEvent { file, page })
    }

    /// The file, for another process to map.
    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    fn slot(&self, number: u64) -> &Slot {
        &self.page.slots[(number % SLOTS) as usize]
    }

    /// Number of the newest record, by whichever process; 0 for none.
    pub(crate) fn newest(&self) -> u64 {
        self.page.issued.load(Ordering::SeqCst)
    }

    /// Takes the number of a new record of this process.
    pub(crate) fn record(&self) -> u64 {
        static STARTED: LazyLock<u64> = LazyLock::new(|| started(std::process::id()).unwrap_or(0));
        let number = self.page.issued.fetch_add(1, Ordering::SeqCst) + 1;
        let slot = self.slot(number);
        slot.process.store(std::process::id(), Ordering::SeqCst);
        slot.started.store(*STARTED, Ordering::SeqCst);
        slot.named.store(number, Ordering::SeqCst);
        number
    }

    /// Says that a record is done.
    pub(crate) fn fire(&self, number: u64) {
        self.slot(number).done.fetch_max(number, Ordering::SeqCst);
        let changes = &self.page.changes;
        changes.fetch_add(1, Ordering::SeqCst);
        // SAFETY: a wake of whoever sleeps on a word that is mapped.
        unsafe { libc::syscall(libc::SYS_futex, changes.as_ptr(), libc::FUTEX_WAKE, i32::MAX) };
    }

    /// Whether a record is done, or never will be, as its recorder has died.
    pub(crate) fn is_done(&self, number: u64) -> bool {
        let slot = self.slot(number);
        if number == 0 || slot.done.load(Ordering::SeqCst) >= number {
            return true;
        }
        let named = slot.named.load(Ordering::SeqCst) >= number;
        let process = slot.process.load(Ordering::SeqCst);
        if !named || started(process) == Some(slot.started.load(Ordering::SeqCst)) {
            return false;
        }
        eprintln!("softcuda: process {process} died before an event that it recorded was done");
        self.fire(number);
        true
    }

    /// Waits until a record is done, asleep; ends too when its recorder has died.
    pub(crate) fn wait(&self, number: u64) {
        let start = Instant::now();
        loop {
            let changes = &self.page.changes;
            let seen = changes.load(Ordering::SeqCst);
            if self.is_done(number) {
                return;
            }
            if self.slot(number).named.load(Ordering::SeqCst) < number && start.elapsed() > GRACE {
                eprintln!("softcuda: a process died as it recorded an event");
                return;
            }
            let time = libc::timespec { tv_sec: 0, tv_nsec: LOOK.as_nanos() as i64 };
            // SAFETY: sleeps while the word is what was seen, at most for the time given; both live
            // through the call.
            unsafe {
                libc::syscall(
                    libc::SYS_futex,
                    changes.as_ptr(),
                    libc::FUTEX_WAIT,
                    seen,
                    &raw const time,
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_done_each_by_itself() {
        let event = SharedEvent::new().unwrap();
        assert!(event.is_done(event.newest()));
        let (first, second) = (event.record(), event.record());
        event.fire(second);
        assert!(!event.is_done(first) && event.is_done(second));
        event.fire(first);
        assert!(event.is_done(first));
    }

    #[test]
    fn a_record_of_a_process_that_is_gone_counts_as_done() {
        let event = SharedEvent::new().unwrap();
        let number = event.record();
        assert!(!event.is_done(number));
        // As of this process, but from another time.
        event.slot(number).started.store(1, Ordering::SeqCst);
        event.wait(number);
        assert!(event.is_done(number));
    }
}
