//! Device memory, lent between processes of one host.
//!
//! It is lent as host memory is: a segment is given once, as the description by which another
//! process opens it. A message then names the payload's place in it. Three things differ:
//!
//! - Two processes test before the first message if they can lend each other device memory
//!   (`agreeing.rs`).
//! - Memory is lent once the devices' work that writes it has ended: a device that waits for the
//!   device of another process may wait for ever if that process dies. A message is held back until
//!   then (`lending_devices.rs`). The lender may not know yet if the content is valid, and reports
//!   that (`LANDED`).
//! - Memory must not be freed while others have it open (`foreign.rs`). A freed segment stays until
//!   all processes that were given it have closed it (`CLOSED`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::reaper::Reaper;
use crate::transport::Ticket;
use mpmd_memory::{DeviceSharing, Leaving, Retired, SharedBuffer};
use mpmd_proto::wire::{Header, ProcessId};

/// The state of a process's transport that only device memory needs.
pub(super) struct DeviceLoans {
    pub(super) sharing: OnceLock<Arc<dyn DeviceSharing>>,
    /// True for each process that has provably exited, by process.
    pub(super) gone: Arc<[AtomicBool]>,
    /// Messages with device payloads that cannot be sent yet.
    pub(super) held: Mutex<Vec<HeldMessage>>,
    /// Memory of freed device segments that other processes still have open.
    partings: Mutex<Vec<FreedMemory>>,
    pub(super) reaper: Arc<Reaper>,
}

/// A message that is not sent yet. The device work that writes its payload has not finished, or the
/// owner of borrowed memory could not yet be told that the memory is lent on.
pub(super) struct HeldMessage {
    pub(super) to: ProcessId,
    pub(super) header: Header,
    pub(super) bytes: SharedBuffer,
    pub(super) ticket: Ticket,
}

/// Device memory that this process has freed and that some processes still have open.
struct FreedMemory {
    number: u32,
    /// The memory; `None` once the reaper has got it to free it.
    memory: Option<Leaving>,
    /// Indices of the processes that may still have the memory open.
    awaited: Vec<usize>,
}

impl DeviceLoans {
    pub(super) fn new(processes: usize) -> Self {
        let gone = (0..processes).map(|_| AtomicBool::new(false)).collect();
        Self {
            sharing: OnceLock::new(),
            gone,
            held: Mutex::default(),
            partings: Mutex::default(),
            reaper: Reaper::new(),
        }
    }

    /// Records that a process has provably exited. The memory of its devices is lost.
    pub(super) fn note_exit(&self, process: ProcessId) {
        self.gone[process.index()].store(true, Ordering::Release);
    }

    /// Returns true if no message waits for device work.
    pub(super) fn is_flushed(&self) -> bool {
        self.held.lock().is_empty()
    }

    /// Drops all held messages, which will never be sent, and returns their tickets.
    pub(super) fn take_tickets(&self) -> Vec<Ticket> {
        let held = std::mem::take(&mut *self.held.lock());
        held.into_iter().map(|held| held.ticket).collect()
    }

    /// Keeps the memory of a freed segment until all living processes in `awaited` have closed it.
    pub(super) fn part(&self, segment: Retired, awaited: Vec<usize>) {
        let Retired { number, memory } = segment;
        if memory.is_some() {
            self.partings.lock().push(FreedMemory {
                number,
                memory,
                awaited,
            });
        }
    }

    /// Records that `process` has closed the segments `numbers`, which belong to this process.
    pub(super) fn note_closed(&self, process: usize, numbers: &[u32]) {
        let mut partings = self.partings.lock();
        for parting in partings.iter_mut() {
            if numbers.contains(&parting.number) {
                parting.awaited.retain(|awaited| *awaited != process);
            }
        }
    }

    /// Frees the memory that no process has open any more, on the reaper's thread.
    pub(super) fn free(&self) {
        let over = {
            let mut partings = self.partings.lock();
            for parting in partings.iter_mut() {
                parting
                    .awaited
                    .retain(|awaited| !self.gone[*awaited].load(Ordering::Acquire));
            }

            partings
                .extract_if(.., |parting| parting.awaited.is_empty())
                .collect::<Vec<_>>()
        };

        for mut parting in over {
            let memory = parting.memory.take();
            self.reaper.later(move || drop(memory));
        }
    }
}

impl Drop for FreedMemory {
    fn drop(&mut self) {
        // Another process may have it open, and this process will not hear when it is closed. The
        // end of this process frees it.
        std::mem::forget(self.memory.take());
    }
}
