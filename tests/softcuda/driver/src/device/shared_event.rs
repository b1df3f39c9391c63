//! Interprocess events: the numbers of issued and completed records are in shared memory.

use std::os::fd::OwnedFd;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::device::ipc::started;
use crate::device::memory::memory_file;
use crate::error::Result;
use crate::mapped::{self, Mapped};
use crate::settings::settings;

/// Number of slots of an event. Record n uses slot `n % SLOTS`. So a record also counts as done
/// when the record `SLOTS` after it is done.
const SLOTS: u64 = 64;
/// Interval at which a waiting thread checks that the recording process is still alive.
const LOOK: Duration = Duration::from_millis(50);
/// Time that a waiting thread gives a recording process to enter itself in the slot. After it, the
/// process counts as dead.
const GRACE: Duration = Duration::from_secs(1);

/// The layout of an event's shared memory. All zeros mean an event that was never recorded.
#[repr(C)]
struct Page {
    /// Number of the newest record of any process, from 1; 0 before the first.
    issued: AtomicU64,
    /// A futex counter that changes when a record is done. Waiting threads sleep on it.
    changes: AtomicU32,
    slots: [Slot; SLOTS as usize],
}

/// The state of one record, at index `number % SLOTS`.
#[repr(C)]
struct Slot {
    /// Number of the record that `process` and `started` belong to.
    named: AtomicU64,
    process: AtomicU32,
    started: AtomicU64,
    /// Number of the newest completed record in this slot.
    done: AtomicU64,
}

/// The shared state of an event, mapped into this process, and its file.
pub(crate) struct SharedEvent {
    file: OwnedFd,
    page: Mapped<Page>,
}

// SAFETY: all of it is atomics.
unsafe impl mapped::Page for Page {}

impl SharedEvent {
    /// Creates an event that was never recorded, in a new memory file.
    pub(crate) fn new() -> Result<SharedEvent> {
        Self::map(memory_file(size_of::<Page>() as u64)?)
    }

    /// Maps the event in a memory file, which another process may have created.
    pub(crate) fn map(file: OwnedFd) -> Result<SharedEvent> {
        let page = Mapped::of(&file)?;
        Ok(SharedEvent { file, page })
    }

    /// Returns the memory file, which another process can map.
    pub(crate) fn file(&self) -> &OwnedFd {
        &self.file
    }

    fn slot(&self, number: u64) -> &Slot {
        &self.page.slots[(number % SLOTS) as usize]
    }

    /// Returns the number of the newest record of any process; 0 if there is no record.
    pub(crate) fn newest(&self) -> u64 {
        self.page.issued.load(Ordering::SeqCst)
    }

    /// Takes the next number, from 1, for a new record of this process, and enters this process in
    /// the record's slot.
    pub(crate) fn record(&self) -> u64 {
        static STARTED: LazyLock<u64> = LazyLock::new(|| started(std::process::id()).unwrap_or(0));
        let number = self.page.issued.fetch_add(1, Ordering::SeqCst) + 1;
        let slot = self.slot(number);
        slot.process.store(std::process::id(), Ordering::SeqCst);
        slot.started.store(*STARTED, Ordering::SeqCst);
        slot.named.store(number, Ordering::SeqCst);
        number
    }

    /// Marks a record as done and wakes its waiters in all processes.
    pub(crate) fn fire(&self, number: u64) {
        self.slot(number).done.fetch_max(number, Ordering::SeqCst);
        let changes = &self.page.changes;
        changes.fetch_add(1, Ordering::SeqCst);
        // SAFETY: wakes the sleepers on a word that is mapped.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                changes.as_ptr(),
                libc::FUTEX_WAKE,
                i32::MAX,
            )
        };
    }

    /// True if a record is done. A record of a dead process is marked as done, with a message, and
    /// counts as done. With `SOFTCUDA_ORPHANS` at `hang`, it is never done.
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

        if settings().orphans_hang {
            return false;
        }

        eprintln!("softcuda: process {process} died before an event that it recorded was done");
        self.fire(number);
        true
    }

    /// Blocks until a record is done, or until its process has died. Gives up with a message if no
    /// process enters itself in the record's slot within a second.
    pub(crate) fn wait(&self, number: u64) {
        let start = Instant::now();
        loop {
            let changes = &self.page.changes;
            let seen = changes.load(Ordering::SeqCst);
            if self.is_done(number) {
                return;
            }

            let is_named = self.slot(number).named.load(Ordering::SeqCst) >= number;
            if !is_named && start.elapsed() > GRACE && !settings().orphans_hang {
                eprintln!("softcuda: a process died as it recorded an event");
                return;
            }

            let time = libc::timespec {
                tv_sec: 0,
                tv_nsec: LOOK.as_nanos() as i64,
            };
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
    fn records_complete_independently() {
        let event = SharedEvent::new().unwrap();
        assert!(event.is_done(event.newest()));
        let (first, second) = (event.record(), event.record());
        event.fire(second);
        assert!(!event.is_done(first) && event.is_done(second));
        event.fire(first);
        assert!(event.is_done(first));
    }

    #[test]
    fn record_of_dead_process_counts_as_done() {
        let event = SharedEvent::new().unwrap();
        let number = event.record();
        assert!(!event.is_done(number));
        // The record seems to be of an earlier process with this id.
        event.slot(number).started.store(1, Ordering::SeqCst);
        event.wait(number);
        assert!(event.is_done(number));
    }
}
