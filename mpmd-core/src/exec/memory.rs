//! Memory for an operation's results: set aside when it is issued, in the order of operations.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mpmd_ids::ProcessId;
use mpmd_transport::memory::{OutOfMemory, Pool, Reservation};
use mpmd_transport::router::{Failure, FailureKind};
use mpmd_transport::{OwnedBuffer, SharedBuffer, Transport};

use super::Runtime;
use crate::exec::array::{Handle, WeakHandle};
use mpmd_layout::sharding::MemoryKind;

/// Arrays smaller than this are not worth naming when memory runs out.
const WORTH_NAMING: u64 = 64 << 10;

/// Large arrays of this process, to be named when memory runs out.
#[derive(Default)]
pub(crate) struct Holders {
    arrays: BTreeMap<(u64, u32), WeakHandle>,
    sweep_at: usize,
}

impl Holders {
    fn insert(&mut self, key: (u64, u32), array: &Handle) {
        if self.arrays.len() >= self.sweep_at {
            self.arrays.retain(|_, array| array.upgrade().is_some());
            self.sweep_at = (2 * self.arrays.len()).max(256);
        }
        self.arrays.insert(key, array.downgrade());
    }

    fn largest(&self, count: usize) -> Vec<Handle> {
        let mut alive: Vec<_> = self.arrays.values().filter_map(WeakHandle::upgrade).collect();
        alive.sort_by_key(|array| std::cmp::Reverse(array.local_bytes()));
        alive.truncate(count);
        alive
    }
}

impl Runtime {
    /// Sets `bytes` aside in a memory of a device of this process.
    ///
    /// The memory of the host is one for all devices, without limit and counted by itself.
    ///
    /// Waits for operations that were issued before and will free memory; with none of those left
    /// it is an error that names the largest holders. It never waits for anything issued later, nor
    /// for operation `op` itself, which is in flight by now. What other processes have on loan they
    /// may keep for ever; where it would be enough it is waited for as long as the patience lasts,
    /// and then is an error.
    pub(crate) fn reserve(
        &self,
        local_index: usize,
        kind: MemoryKind,
        bytes: usize,
        op: u64,
        what: &dyn fmt::Display,
    ) -> Result<Reservation, Arc<Failure>> {
        self.reserve_all(local_index, kind, std::iter::once(bytes), op, what)
    }

    /// As [`Runtime::reserve`], for several buffers: room for all of them or for none.
    pub(crate) fn reserve_all(
        &self,
        local_index: usize,
        kind: MemoryKind,
        sizes: impl Iterator<Item = usize> + Clone,
        op: u64,
        what: &dyn fmt::Display,
    ) -> Result<Reservation, Arc<Failure>> {
        let pool = match kind {
            MemoryKind::Device => &self.devices[local_index].pool,
            MemoryKind::Host => &self.host_memory,
        };
        // Nearly always there is room: then nobody counts what is in flight.
        if let Ok(reservation) = pool.reserve_all(sizes.clone()) {
            return Ok(reservation);
        }
        // Whether loans are still waited for.
        let mut patient = true;
        loop {
            let before = self.in_flight.counts();
            let error = match pool.reserve_all(sizes.clone()) {
                Ok(reservation) => return Ok(reservation),
                Err(error) => error,
            };
            let for_loans = patient && loans_are_enough(&error, before.lent);
            if before.ops <= 1 && !for_loans {
                let mut message = format!("operation {op} ({what}): out of memory on {error}");
                for array in self.holders.lock().largest(5) {
                    message.push_str(&format!(
                        "; {} bytes in {}",
                        array.local_bytes(),
                        array.describe()
                    ));
                }
                message.push_str(&self.on_loan());
                return Err(Arc::new(Failure::new(FailureKind::Memory, self.me, op, message)));
            }
            if !self.has_ended_since(before.ended) {
                if before.ops <= 1 {
                    patient = false;
                    continue;
                }
                self.report_hang(&format!(
                    "process {}: operation {op} ({what}) waits for memory; {}",
                    self.me,
                    self.doing_and_why()
                ));
            }
        }
    }

    /// Memory that operation `op` takes over with what is in it, to be called on a device's thread.
    ///
    /// Where somebody else still reads it, or has lent it to this process, there is another buffer,
    /// and what is to be copied to it first. Where there is no room for that, this waits for
    /// operations that were issued before: those that pass the memory on to other processes let it
    /// go. It never waits for anything issued later, and for loans only as [`Runtime::reserve`]
    /// does.
    ///
    /// # Errors
    ///
    /// Where there is no room once all of those have ended.
    pub(crate) fn take_over(
        &self,
        mut memory: SharedBuffer,
        pool: &Pool,
        op: u64,
        what: &dyn fmt::Display,
    ) -> Result<(OwnedBuffer, Option<SharedBuffer>), OutOfMemory> {
        // Whether loans are still waited for.
        let mut patient = true;
        loop {
            // Looked at first: what ends from here on is not missed below.
            let (before, any) = self.in_flight.counts_before(op);
            memory = match memory.into_owned() {
                Ok(mut own) => {
                    wait_for_devices(&mut own);
                    return Ok((own, None));
                }
                Err(shared) => shared,
            };
            match pool.allocate(memory.len()) {
                Ok(other) => return Ok((other, Some(memory))),
                Err(error) => {
                    let waits = any || (patient && loans_are_enough(&error, before.lent));
                    if !waits {
                        return Err(error);
                    }
                }
            }
            if !self.has_ended_since(before.ended) {
                if !any {
                    patient = false;
                    continue;
                }
                self.report_hang(&format!(
                    "process {}: operation {op} ({what}) waits for memory that is still read; {}",
                    self.me,
                    self.doing_and_why()
                ));
            }
        }
    }

    /// Waits until an operation more than these `ended` ones has ended. Returns false where none
    /// does while the patience lasts. Only the time counts in which this process runs: a stop may
    /// have been the whole job's.
    fn has_ended_since(&self, ended: u64) -> bool {
        const SLICE: Duration = Duration::from_secs(1);
        let mut left = self.config.patience;
        loop {
            let slice = left.min(SLICE);
            if self.in_flight.wait_until(Instant::now() + slice, |counts| counts.ended > ended) {
                return true;
            }
            left -= slice;
            if left.is_zero() {
                return false;
            }
        }
    }

    /// For messages about memory: what others have on loan, and how much of it each of them. Empty
    /// where nothing is.
    pub(crate) fn on_loan(&self) -> String {
        let total = self.in_flight.counts().lent;
        if total == 0 {
            return String::new();
        }
        let lent = self.lent_to();
        let each = lent.iter().enumerate().filter(|(_, bytes)| **bytes > 0);
        let each: Vec<String> = each.map(|(peer, bytes)| format!("{bytes} to {peer}")).collect();
        // None where all of it has come back in this moment.
        let each = if each.is_empty() { String::new() } else { format!(" ({})", each.join(", ")) };
        format!("; {total} bytes are lent to other processes{each}")
    }

    /// Bytes of this process's memory that each process of the job has on loan.
    pub(crate) fn lent_to(&self) -> Vec<u64> {
        self.of_peers(|transport, peer| transport.lent_to(peer))
    }

    /// Bytes of each process's memory that this one has on loan.
    pub(crate) fn borrowed_from(&self) -> Vec<u64> {
        self.of_peers(|transport, peer| transport.borrowed_from(peer))
    }

    fn of_peers(&self, of: impl Fn(&dyn Transport, ProcessId) -> u64) -> Vec<u64> {
        let peers = (0..self.topology.processes() as u32).map(ProcessId);
        let transport = self.transport.as_deref();
        peers
            .map(|peer| {
                transport.filter(|_| peer != self.me).map_or(0, |transport| of(transport, peer))
            })
            .collect()
    }

    /// Remembers who holds memory.
    pub(crate) fn holds(&self, array: &Handle) {
        // Most arrays are too small whatever part of them is here: then nothing is looked up.
        let most = array.shards.len().saturating_mul(array.made.aval.bytes()) as u64;
        if most >= WORTH_NAMING && array.local_bytes() >= WORTH_NAMING {
            self.holders.lock().insert(array.origin(), array);
        }
    }
}

/// Waits until devices have read memory of the host's that is about to be written. What they make
/// in memory of their own comes after its fences by itself.
fn wait_for_devices(memory: &mut OwnedBuffer) {
    if memory.device().is_some() || memory.fences().are_over() {
        return;
    }
    let (open, over) = std::sync::mpsc::channel::<()>();
    // That it is dropped is all that it says.
    memory.fences().clone().on_over(Box::new(move || drop(open)));
    let _ = over.recv();
    memory.clear_fences();
}

/// Whether there would be room, were all that others have on loan to come back.
fn loans_are_enough(error: &OutOfMemory, lent: u64) -> bool {
    let wanted = error.live + error.reserved + error.asked;
    lent > 0 && error.limit.is_some_and(|limit| wanted.saturating_sub(limit) <= lent)
}
