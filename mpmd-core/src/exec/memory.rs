//! Memory for the results of operations. It is reserved at issue, in the order of operations.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::{mpsc, now};
use mpmd_base::deadline::after;
use mpmd_base::{ProcessId, bytes_text};
use mpmd_memory::{BufferSizes, OutOfMemory, Pool, Reservation};
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::router::{Failure, FailureKind};
use mpmd_transport::Transport;

use crate::exec::Runtime;
use crate::exec::array::{ArrayHandle, LocalShard, WeakHandle};
use mpmd_layout::sharding::MemoryKind;
use mpmd_layout::topology::DeviceId;

/// Minimum size in bytes, on this process, of the arrays that out-of-memory errors list.
pub(super) const WORTH_NAMING: u64 = 64 << 10;

/// The large arrays of this process, for out-of-memory errors.
#[derive(Default)]
pub(crate) struct LargeArrays {
    arrays: BTreeMap<(u64, u32), WeakHandle>,
    sweep_at: usize,
}

impl LargeArrays {
    fn insert(&mut self, key: (u64, u32), array: &ArrayHandle) {
        if self.arrays.len() >= self.sweep_at {
            self.arrays.retain(|_, array| array.upgrade().is_some());
            self.sweep_at = (2 * self.arrays.len()).max(256);
        }
        self.arrays.insert(key, array.downgrade());
    }

    /// Returns up to `count` (bytes, array) with the most bytes in `pool`. Shards that are not made
    /// yet count if they are on one of `devices`. If arrays share memory, the bytes count for the
    /// oldest array only.
    fn largest(
        &self,
        count: usize,
        devices: &[DeviceId],
        kind: MemoryKind,
        pool: &Pool,
    ) -> Vec<(u64, ArrayHandle)> {
        let mut seen: Vec<SharedBuffer> = Vec::new();
        let mut is_there = |shard: &&LocalShard| match shard.slot.peek() {
            None => devices.contains(&shard.device),
            Some(Err(_)) => false,
            Some(Ok(bytes)) => {
                let counts =
                    bytes.is_counted_by(pool) && !seen.iter().any(|one| one.counts_with(&bytes));
                if counts {
                    seen.push(bytes);
                }
                counts
            }
        };

        let alive = self.arrays.values().filter_map(WeakHandle::upgrade);
        let alive = alive.filter(|array| array.made.sharding.memory_kind() == kind);
        let bytes = |array: ArrayHandle| {
            let shards = array.shards.iter().filter(&mut is_there);
            (shards.map(|shard| array.shard_bytes(shard)).sum(), array)
        };

        let mut largest: Vec<(u64, ArrayHandle)> = alive.map(bytes).collect();
        largest.retain(|(bytes, _)| *bytes > 0);
        largest.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        largest.truncate(count);
        largest
    }
}

impl Runtime {
    /// Returns the pool of the device with this local index, or of this process's host memory.
    pub(crate) fn pool(&self, local_index: usize, kind: MemoryKind) -> &Pool {
        match kind {
            MemoryKind::Device => &self.devices[local_index].pool,
            MemoryKind::Host => &self.host_memory,
        }
    }

    /// Reserves `bytes` in the device or host memory of the device with this local index. All
    /// devices share one host memory, which has no limit. Messages name operation `op` with its
    /// description.
    ///
    /// Blocks while operations that were issued before may still free memory. Never waits for later
    /// operations, nor for operation `op` itself, which is already in flight. Peers may never
    /// return the memory lent to them. If its return would be enough, waits for it up to the peer
    /// timeout.
    ///
    /// # Errors
    ///
    /// Out of memory. The message lists the largest arrays in the same memory and the lent bytes.
    pub(crate) fn reserve(
        &self,
        local_index: usize,
        kind: MemoryKind,
        bytes: usize,
        op: u64,
        call: &dyn fmt::Display,
    ) -> Result<Reservation, Arc<Failure>> {
        self.reserve_all(
            local_index,
            kind,
            std::iter::once(bytes).collect(),
            op,
            call,
        )
    }

    /// Reserves memory for buffers of these sizes, either all or none. Blocks and fails as
    /// [`Runtime::reserve`] does.
    pub(crate) fn reserve_all(
        &self,
        local_index: usize,
        kind: MemoryKind,
        sizes: BufferSizes,
        op: u64,
        call: &dyn fmt::Display,
    ) -> Result<Reservation, Arc<Failure>> {
        // invariant: lower-only
        let pool = self.pool(local_index, kind);
        // The usual case: there is memory, and no counts are needed.
        if let Ok(reservation) = pool.reserve_all(sizes) {
            return Ok(reservation);
        }

        let mut patient = self.is_patient();
        loop {
            let before = self.in_flight.counts();
            let error = match pool.reserve_all(sizes) {
                Ok(reservation) => return Ok(reservation),
                Err(error) => error,
            };

            let for_loans = patient && loans_are_enough(&error, before.lent);
            if before.ops <= 1 && !for_loans {
                let mut failure = Failure::clone(&self.out_of_memory(op, &error));
                let all: Vec<DeviceId> = self.devices.iter().map(|device| device.id).collect();
                let devices = match kind {
                    MemoryKind::Device => &all[local_index..=local_index],
                    MemoryKind::Host => &all[..],
                };
                for (bytes, array) in self.holders.lock().largest(5, devices, kind, pool) {
                    let bytes = bytes_text(bytes);
                    let array = array.describe();
                    failure.message.push_str(&format!("; {bytes} in {array}"));
                }
                return Err(Arc::new(failure));
            }

            if !self.has_ended_since(before.ended) {
                if before.ops <= 1 {
                    patient = false;
                    continue;
                }
                self.report_hang(&format!(
                    "process {}: operation {op} ({call}) waits for memory; {}",
                    self.me,
                    self.doing_and_why()
                ));
            }
        }
    }

    /// Returns the memory for an output of operation `op` that updates the input `memory` in place.
    /// Also returns the bytes to copy into that memory first, or `None` if it is the input's own
    /// memory. Call it on a device's thread.
    ///
    /// Host values that a pool counts are copied into the memory reserved for them there. If other
    /// readers still use `memory`, or a peer has lent it, the output gets another buffer. If there
    /// is no memory for that buffer, blocks while operations before `op` may release memory. Never
    /// waits for later operations. Waits for lent memory as [`Runtime::reserve`] does.
    ///
    /// # Errors
    ///
    /// If there is still no memory after these waits.
    pub(crate) fn take_over(
        &self,
        mut memory: SharedBuffer,
        pool: &Pool,
        op: u64,
        call: &dyn fmt::Display,
    ) -> Result<(OwnedBuffer, Option<SharedBuffer>), OutOfMemory> {
        let mut patient = self.is_patient();
        loop {
            // Read first, so that an operation that ends from here on is not missed below.
            let (before, any) = self.in_flight.counts_before(op);
            if let Some(room) = memory.take_room() {
                return Ok((room.allocate()?, Some(memory)));
            }
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
                    let parker = any || (patient && loans_are_enough(&error, before.lent));
                    if !parker {
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
                    "process {}: operation {op} ({call}) waits for memory that is still read; {}",
                    self.me,
                    self.doing_and_why()
                ));
            }
        }
    }

    /// Returns true if operations wait for lent memory to be returned. After the job has failed
    /// they do not: each would delay the job's end by the peer timeout.
    fn is_patient(&self) -> bool {
        self.trouble().is_none()
    }

    /// Waits until the count of ended operations exceeds `ended`. Returns false if the count does
    /// not within the peer timeout. Only time in which this process runs counts, since a stop may
    /// hit the whole job.
    fn has_ended_since(&self, ended: u64) -> bool {
        const SLICE: Duration = Duration::from_secs(1);
        let mut left = self.config.peer_timeout;
        loop {
            let slice = left.min(SLICE);
            if self
                .in_flight
                .wait_until(after(now(), slice), |counts| counts.ended > ended)
            {
                return true;
            }
            left -= slice;
            if left.is_zero() {
                return false;
            }
        }
    }

    /// Creates the failure of an operation that got no memory. The message has the operation's line
    /// and the bytes lent to peers.
    pub(crate) fn out_of_memory(&self, op: u64, error: &OutOfMemory) -> Arc<Failure> {
        let known = self.router.lock().describe(op);
        let operation = known.unwrap_or_else(|| format!("operation {op}"));
        let message = format!("{operation}: out of memory on {error}{}", self.on_loan());
        Arc::new(Failure::new(FailureKind::Memory, self.me, op, message))
    }

    /// Describes the memory lent to peers, in total and by peer, for messages. Empty if none is
    /// lent.
    pub(crate) fn on_loan(&self) -> String {
        let total = self.in_flight.counts().lent;
        if total == 0 {
            return String::new();
        }
        let lent = self.lent_to();
        let each = lent.iter().enumerate().filter(|(_, bytes)| **bytes > 0);
        let each: Vec<String> = each
            .map(|(peer, bytes)| format!("{} to {peer}", bytes_text(*bytes)))
            .collect();
        // Empty if all of it was returned in this moment.
        let each = if each.is_empty() {
            String::new()
        } else {
            format!(" ({})", each.join(", "))
        };
        format!("; {} are lent to other processes{each}", bytes_text(total))
    }

    /// Returns the bytes of this process's memory that are lent to each process, indexed by
    /// process.
    pub(crate) fn lent_to(&self) -> Vec<u64> {
        self.of_peers(|transport, peer| transport.lent_to(peer))
    }

    /// Returns the bytes that this process has borrowed from each process, indexed by process.
    pub(crate) fn borrowed_from(&self) -> Vec<u64> {
        self.of_peers(|transport, peer| transport.borrowed_from(peer))
    }

    fn of_peers(&self, of: impl Fn(&dyn Transport, ProcessId) -> u64) -> Vec<u64> {
        let peers = (0..self.topology.processes() as u32).map(ProcessId);
        let transport = self.transport.as_deref();
        peers
            .map(|peer| {
                transport
                    .filter(|_| peer != self.me)
                    .map_or(0, |transport| of(transport, peer))
            })
            .collect()
    }

    /// Adds an array with at least 64 KiB on this process to the list for out-of-memory errors.
    pub(crate) fn holds(&self, array: &ArrayHandle) {
        if array.local_bytes() >= WORTH_NAMING {
            self.holders.lock().insert(array.origin(), array);
        }
    }
}

/// Blocks until devices have read host memory that is about to be overwritten. Returns at once for
/// device memory, whose fences order later work.
fn wait_for_devices(memory: &mut OwnedBuffer) {
    if memory.device().is_some() || memory.fences().are_over() {
        return;
    }
    let (open, over) = mpsc::channel::<()>();
    // Dropping the sender is the signal.
    memory
        .fences()
        .clone()
        .on_over(Box::new(move || drop(open)));
    let _ = over.recv();
    memory.clear_fences();
}

/// Returns true if the allocation would succeed once all lent memory is returned.
fn loans_are_enough(error: &OutOfMemory, lent: u64) -> bool {
    let wanted = error.live + error.reserved + error.asked;
    lent > 0
        && error
            .limit
            .is_some_and(|limit| wanted.saturating_sub(limit) <= lent)
}
