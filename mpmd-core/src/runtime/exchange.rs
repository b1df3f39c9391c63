//! The messages of collectives: between devices, wherever they are.
//!
//! A device's contribution to a collective is a piece of the kernel's operation, numbered by the
//! collective's index and the two devices. Between devices of one process it goes through a mailbox,
//! between processes through the router.

use std::collections::HashMap;
use std::sync::Arc;

use mpmd_transport::SharedBuffer;
use mpmd_transport::router::{Failure, FailureKind};
use parking_lot::Mutex;

use super::slot::{Outcome, Promise, Slot};
use super::{OpGuard, Outgoing, Runtime, Waiter};
use crate::topology::DeviceId;

/// Set in the piece numbers of collectives, never in those of transfers.
const COLLECTIVE: u64 = 1 << 63;

/// Contributions between devices of this process that were posted or are waited for.
#[derive(Default)]
pub(crate) struct Mailbox(Mutex<HashMap<(u64, u64), Letter>>);

/// A contribution: whoever comes first, poster or collector, makes the place for it.
type Letter = (Option<Promise>, Slot);

impl Mailbox {
    fn post(&self, key: (u64, u64), outcome: Outcome) {
        let promise = {
            let mut mail = self.0.lock();
            let entry = mail.entry(key).or_insert_with(fresh);
            entry.0.take()
        };
        if let Some(promise) = promise {
            promise.keep(outcome);
        }
    }

    fn slot(&self, key: (u64, u64)) -> Slot {
        self.0.lock().entry(key).or_insert_with(fresh).1.clone()
    }

    fn remove(&self, key: (u64, u64)) {
        self.0.lock().remove(&key);
    }

    fn forget(&self, op: u64) {
        self.0.lock().retain(|key, _| key.0 != op);
    }
}

fn fresh() -> Letter {
    let (promise, slot) = Slot::new();
    (Some(promise), slot)
}

impl Runtime {
    /// Drops what devices gave to a call that has ended on every device here, and nobody took.
    pub(crate) fn forget(self: &Arc<Self>, op: u64) {
        self.mailbox.forget(op);
        self.with_router(|router| router.forget(op));
    }
}

/// One kernel call's access to the other devices of its mesh.
pub(crate) struct Exchange {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) guard: OpGuard,
}

impl Exchange {
    /// A copy of `bytes` that may leave the kernel.
    pub(crate) fn copy_in(&self, bytes: &[u8]) -> Outcome {
        let mut buffer = self.runtime.staging.allocate(bytes.len()).map_err(|error| {
            Arc::new(Failure::new(FailureKind::Memory, self.runtime.me, 0, error.to_string()))
        })?;
        buffer.copy_from_slice(bytes);
        Ok(buffer.freeze())
    }

    /// Gives `buffer` to every other device of the group.
    pub(crate) fn post(
        &self,
        op: u64,
        index: usize,
        me: DeviceId,
        group: &[DeviceId],
        buffer: &SharedBuffer,
    ) {
        for other in group.iter().filter(|other| **other != me) {
            let key = (op, piece(index, me, *other));
            let process = self.runtime.topology.process_of(*other);
            if process == Some(self.runtime.me) {
                self.runtime.mailbox.post(key, Ok(buffer.clone()));
            } else if let Some(process) = process {
                let outgoing = Outgoing { buffer: buffer.clone(), guard: self.guard.clone() };
                // Announced: a kernel that calls with another length on another device must get an error.
                self.runtime
                    .with_router(|router| router.announce(process, key, buffer.len() as u64, outgoing));
            }
        }
    }

    /// Tells every other device of the group that nothing comes from this one.
    pub(crate) fn poison(
        &self,
        op: u64,
        index: usize,
        me: DeviceId,
        group: &[DeviceId],
        failure: &Arc<Failure>,
    ) {
        for other in group.iter().filter(|other| **other != me) {
            let key = (op, piece(index, me, *other));
            let process = self.runtime.topology.process_of(*other);
            if process == Some(self.runtime.me) {
                self.runtime.mailbox.post(key, Err(failure.clone()));
            } else if let Some(process) = process {
                self.runtime.with_router(|router| router.poison(process, key, failure));
            }
        }
    }

    /// Takes what the other devices of the group give to a collective that this one will not call, so that
    /// no process waits to send it.
    pub(crate) fn decline(&self, op: u64, index: usize, me: DeviceId, group: &[DeviceId]) {
        for other in group.iter().filter(|other| **other != me) {
            // What comes from this process waits for nobody, and goes with the call.
            if let Some(process) = self.runtime.topology.process_of(*other)
                && process != self.runtime.me
            {
                let (key, waiter) = ((op, piece(index, *other, me)), Waiter::Nobody(self.guard.clone()));
                self.runtime.with_router(|router| router.decline(process, key, waiter, self.runtime.now()));
            }
        }
    }

    /// What every device of the group contributed, in the group's order; blocks until all is here.
    pub(crate) fn collect(
        &self,
        op: u64,
        index: usize,
        me: DeviceId,
        group: &[DeviceId],
        mine: &SharedBuffer,
    ) -> Result<Vec<SharedBuffer>, Arc<Failure>> {
        let slots: Vec<Slot> = group
            .iter()
            .map(|other| {
                let key = (op, piece(index, *other, me));
                let process = self.runtime.topology.process_of(*other).unwrap_or(self.runtime.me);
                if *other == me {
                    Slot::filled(mine.clone())
                } else if process == self.runtime.me {
                    self.runtime.mailbox.slot(key)
                } else {
                    let (promise, slot) = Slot::new();
                    let waiter = Waiter::Bytes { promise, from: process, op };
                    self.runtime.with_router(|router| {
                        router.expect_any_size(process, key, mine.len() as u64, waiter, self.runtime.now());
                    });
                    slot
                }
            })
            .collect();
        // Ends: every wait is for a kernel of a lower place in some device's queue, for this very
        // operation on another device, or for a peer that the router watches.
        let parts: Vec<Outcome> =
            slots.iter().map(|slot| slot.wait_until(None).expect("no deadline was set")).collect();
        for other in group {
            self.runtime.mailbox.remove((op, piece(index, *other, me)));
        }
        let parts = parts.into_iter().collect::<Result<Vec<_>, _>>()?;
        match parts.iter().find(|part| part.len() != mine.len()) {
            None => Ok(parts),
            Some(part) => Err(Arc::new(Failure::new(
                FailureKind::Kernel,
                self.runtime.me,
                op,
                format!(
                    "collective {index} of operation {op}: device {me} gives {} bytes, another device of its group {}",
                    mine.len(),
                    part.len()
                ),
            ))),
        }
    }
}

/// The piece that one device contributes to another in the collective with this index.
fn piece(index: usize, from: DeviceId, to: DeviceId) -> u64 {
    const DEVICE_BITS: u32 = 22;
    COLLECTIVE | (index as u64) << (2 * DEVICE_BITS) | u64::from(from.0) << DEVICE_BITS | u64::from(to.0)
}
