//! A shard in an accelerator's memory that is assembled from pieces.

use std::mem::replace;
use std::sync::Arc;

use mpmd_base::block::Mutex;
use mpmd_device::accelerator::{Accelerator, Addition, RegionCopy};
use mpmd_device::copy::copy_region;
use mpmd_memory::{OutOfMemory, Reservation};
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::router::Failure;

use super::NewShard;
use crate::exec::moves::chunks::{COPY_INLINE, WaitingChunks};
use crate::exec::moves::reach::when_made;
use crate::exec::moves::transfer::RegionTransfer;
use crate::exec::waits::async_buffer::{AsyncBuffer, IssuedPromises, Resolver};
use crate::exec::{OpGuard, Outcome, Runtime};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::MemoryKind;
use mpmd_layout::topology::DeviceId;

/// A shard in an accelerator's memory that is assembled from pieces. It is complete when the copies
/// of all its pieces have ended.
///
/// The device copies the pieces. A copy is issued as soon as its bytes exist, or the work that
/// makes them is issued. So the shard is issued with its last copy, and ends when all copies have
/// ended.
///
/// If the source has partial sums, the pieces of each sum but the first are copied to a second
/// buffer. The device then adds that buffer to the shard. The sums are added in their order, not in
/// order of arrival, so the bits equal those of a sum on the host.
pub(crate) struct DeviceAssembly {
    runtime: Arc<Runtime>,
    accelerator: Arc<Accelerator>,
    op: u64,
    region: Region,
    item_bytes: usize,
    sum: Option<Addition>,
    open: Mutex<Option<OpenDeviceShard>>,
    ending: Arc<ShardEnding>,
}

/// The state of a shard that still lacks copies.
struct OpenDeviceShard {
    resolver: Resolver,
    memory: DeviceShardMemory,
    /// Number of pieces whose copies are not all issued, indexed by partial sum.
    missing: Vec<usize>,
    /// Index of the partial sum that is being assembled.
    term: usize,
    /// Pieces of later partial sums that have arrived early.
    waiting: Vec<EarlyPiece>,
}

/// A piece that arrived before its partial sum is assembled.
struct EarlyPiece {
    transfer: Arc<RegionTransfer>,
    bytes: SharedBuffer,
    source: Option<AsyncBuffer>,
    // Last, so that it is dropped after the bytes.
    guard: OpGuard,
}

/// The memory of a shard that still takes pieces.
enum DeviceShardMemory {
    /// Memory that is reserved. It is allocated when the first piece needs it.
    Reserved(Reservation),
    /// Allocated memory: the shard, and a second buffer for the partial sum to be added.
    Here(OwnedBuffer, Option<OwnedBuffer>),
    /// No memory: the allocation failed, and with it the shard.
    Gone,
}

/// The completion state of the issued copies. The end of the last copy also ends the shard.
struct ShardEnding {
    runtime: Arc<Runtime>,
    op: u64,
    state: Mutex<ShardEndState>,
}

/// The state of a shard's issued copies until all have ended.
struct ShardEndState {
    /// Number of copies that have not ended, plus one until the shard is issued or has failed.
    left: usize,
    /// The first failure of a copy, or of the shard itself.
    failed: Option<Arc<Failure>>,
    issued: Option<IssuedPromises>,
    // Dropped when `left` is 0.
    guard: Option<OpGuard>,
}

impl DeviceAssembly {
    /// Creates a shard in memory of `accelerator`. With several partial sums, `sum` adds them, and
    /// the reservation must have room for two shards.
    pub(crate) fn new(
        shard: NewShard,
        runtime: Arc<Runtime>,
        accelerator: Arc<Accelerator>,
        item_bytes: usize,
        sum: Option<Addition>,
    ) -> Arc<Self> {
        let NewShard {
            op,
            region,
            missing,
            reservation,
            resolver,
            guard,
        } = shard;

        let memory = DeviceShardMemory::Reserved(reservation);
        let open = Mutex::new(Some(OpenDeviceShard {
            resolver,
            memory,
            missing,
            term: 0,
            waiting: Vec::new(),
        }));
        let state = Mutex::new(ShardEndState {
            left: 1,
            failed: None,
            issued: None,
            guard: Some(guard),
        });
        let ending = Arc::new(ShardEnding {
            runtime: runtime.clone(),
            op,
            state,
        });
        Arc::new(Self {
            runtime,
            accelerator,
            op,
            region,
            item_bytes,
            sum,
            open,
            ending,
        })
    }

    /// Returns true if the shard still takes pieces.
    pub(crate) fn is_open(&self) -> bool {
        self.open.lock().is_some()
    }

    /// Returns true if the shard is open, nothing was written to it, and `piece` is the only piece
    /// that it waits for.
    pub(super) fn is_whole(&self, piece: &Region) -> bool {
        let reserved = |open: &OpenDeviceShard| {
            open.missing == [1] && matches!(open.memory, DeviceShardMemory::Reserved(_))
        };
        *piece == self.region && self.open.lock().as_ref().is_some_and(reserved)
    }

    /// Returns true if the shard can use these bytes as its own: they are in this device's memory.
    pub(super) fn can_be(&self, bytes: &SharedBuffer) -> bool {
        let here = bytes
            .device()
            .is_some_and(|place| place.device == self.accelerator.ordinal());
        here && !bytes.is_far() && !bytes.is_limited()
    }

    /// Ends the shard with its complete bytes, or with a failure. Issued copies still run to their
    /// end.
    pub(crate) fn end(&self, outcome: Outcome) {
        let Some(OpenDeviceShard {
            resolver, memory, ..
        }) = self.open.lock().take()
        else {
            return;
        };
        drop(memory);
        match outcome {
            Ok(bytes) => {
                resolver.keep(Ok(bytes));
                self.ending.over(Ok(()));
            }
            Err(failure) => {
                resolver.keep(Err(failure.clone()));
                self.ending.over(Err(failure));
            }
        }
    }

    /// Issues the shard with its complete bytes, which issued work of `source` fills. The shard
    /// ends when that work has ended.
    pub(super) fn end_as(&self, bytes: SharedBuffer, source: &AsyncBuffer) {
        let Some(OpenDeviceShard {
            resolver, memory, ..
        }) = self.open.lock().take()
        else {
            return;
        };
        drop(memory);
        self.ending.issued(resolver.issue(bytes));
        let ending = self.ending.clone();
        source.on_completion(move |made| ending.over(made));
    }

    /// Starts the copy of a piece into the shard. A piece of a later partial sum waits until the
    /// earlier sums are complete. `source` is the async buffer of the bytes, if the work that fills
    /// them may not have ended.
    pub(super) fn place(
        self: &Arc<Self>,
        transfer: &Arc<RegionTransfer>,
        bytes: SharedBuffer,
        source: Option<AsyncBuffer>,
        guard: &OpGuard,
    ) {
        if let Some(open) = self.open.lock().as_mut()
            && open.term != transfer.term
        {
            open.waiting.push(EarlyPiece {
                transfer: transfer.clone(),
                bytes,
                source,
                guard: guard.clone(),
            });
            return;
        }

        if bytes.device().is_some() || bytes.is_pinned() {
            self.copy(&bytes, &transfer.holds, &transfer.region, source, ());
            self.placed();
        } else if transfer.bytes <= COPY_INLINE {
            self.place_packed(transfer, &bytes);
        } else {
            WaitingChunks::begin(
                &self.runtime,
                self.clone(),
                transfer.clone(),
                bytes,
                guard.clone(),
            );
        }
    }

    /// Starts a copy of the whole shard from pinned host memory. Replaces the copy of the only
    /// piece.
    pub(crate) fn fill(self: &Arc<Self>, bytes: &SharedBuffer) {
        self.copy(bytes, &self.region, &self.region, None, ());
        self.placed();
    }

    /// Packs a small piece, on this thread, into host memory that the device can read. Then starts
    /// its copy to the shard.
    fn place_packed(self: &Arc<Self>, transfer: &RegionTransfer, bytes: &SharedBuffer) {
        let RegionTransfer { region, holds, .. } = transfer;
        if let Some(packed) = self.pack(bytes, holds, region) {
            self.copy(&packed, region, region, None, ());
            self.placed();
        }
    }

    /// Copies the bytes of `region`, from bytes that cover `holds`, to pinned memory. If there is
    /// no memory, fails the shard and returns `None`.
    pub(crate) fn pack(
        &self,
        bytes: &[u8],
        holds: &Region,
        region: &Region,
    ) -> Option<SharedBuffer> {
        match self
            .runtime
            .staging
            .allocate(region.elements() * self.item_bytes)
        {
            Ok(mut packed) => {
                copy_region(bytes, holds, &mut packed, region, region, self.item_bytes);
                Some(packed.freeze())
            }
            Err(error) => {
                self.fail(self.runtime.out_of_memory(self.op, &error));
                None
            }
        }
    }

    /// Issues the copy of `region` into the shard, from bytes that cover `holds`. `until` is
    /// dropped when the copy has ended or cannot be issued. `source` is the async buffer of the
    /// bytes, if the work that fills them may not have ended. Fails the shard if there is no
    /// memory.
    pub(crate) fn copy(
        &self,
        bytes: &SharedBuffer,
        holds: &Region,
        region: &Region,
        source: Option<AsyncBuffer>,
        until: impl Send + 'static,
    ) {
        let part = RegionCopy {
            from: holds,
            to: &self.region,
            piece: region,
            item_bytes: self.item_bytes,
        };

        let failed = self.with_memory(|buffer| {
            let ending = self.ending.one_more();
            let then = move |result: Result<(), _>| {
                let copied = result.map_err(|error| ending.runtime.copy_failed(ending.op, &error));
                // If the bytes were never made, that failure is the cause.
                when_made(source, move |made| ending.over(made.and(copied)));
                drop(until);
            };
            self.accelerator
                .inward()
                .copy_in(bytes, buffer, part, Box::new(then));
        });
        if let Err(failure) = failed {
            self.fail(failure);
        }
    }

    /// Starts to fill the whole shard with copies of `element`. Replaces the copy of the only
    /// piece. Fails the shard if there is no memory.
    pub(crate) fn fill_with(self: &Arc<Self>, element: &[u8]) {
        let failed = self.with_memory(|buffer| {
            let ending = self.ending.one_more();
            let then = move |result: Result<(), _>| {
                ending.over(result.map_err(|error| ending.runtime.copy_failed(ending.op, &error)));
            };
            self.accelerator
                .inward()
                .fill(buffer, element, Box::new(then));
        });
        match failed {
            Ok(()) => self.placed(),
            Err(failure) => self.fail(failure),
        }
    }

    /// Notes that all copies of a piece are issued. After the last piece of a partial sum, starts
    /// the copies of the next sum's pieces. After the last sum, issues the shard.
    pub(crate) fn placed(self: &Arc<Self>) {
        let mut guard = self.open.lock();
        let Some(open) = guard.as_mut() else { return };
        open.missing[open.term] -= 1;
        if open.missing[open.term] > 0 {
            return;
        }

        if open.term > 0
            && let DeviceShardMemory::Here(shard, Some(beside)) = &mut open.memory
        {
            self.add(shard, beside);
        }
        open.term += 1;
        if open.term < open.missing.len() {
            let term = open.term;
            let next = open
                .waiting
                .extract_if(.., |piece| piece.transfer.term == term)
                .collect::<Vec<_>>();
            drop(guard);
            for EarlyPiece {
                transfer,
                bytes,
                source,
                guard,
            } in next
            {
                self.place(&transfer, bytes, source, &guard);
            }
            return;
        }

        if let Some(OpenDeviceShard {
            resolver,
            memory: DeviceShardMemory::Here(shard, beside),
            ..
        }) = guard.take()
        {
            drop(guard);
            // Goes back to the pool once the addition is over.
            drop(beside);
            self.ending.issued(resolver.issue(shard.freeze()));
            self.ending.over(Ok(()));
        }
    }

    /// Issues the addition of the second buffer to the shard, on the device.
    fn add(&self, shard: &mut OwnedBuffer, beside: &mut OwnedBuffer) {
        let (Some(_), Some(_), Some(sum)) = (shard.device(), beside.device(), self.sum) else {
            return;
        };
        let ending = self.ending.one_more();
        let then = move |result: Result<(), _>| {
            ending.over(result.map_err(|error| ending.runtime.copy_failed(ending.op, &error)));
        };
        let fence = sum.issue(
            &self.accelerator,
            self.region.elements(),
            [shard, beside],
            Box::new(then),
        );
        if let Some(fence) = fence {
            shard.add_fence(fence.clone());
            beside.add_fence(fence);
        }
    }

    fn fail(&self, failure: Arc<Failure>) {
        self.runtime.remember(&failure);
        self.end(Err(failure));
    }

    /// Calls `with` with the memory for pieces of the current partial sum. Allocates the memory if
    /// needed. Does nothing if the shard has ended. Fails if there is no memory.
    fn with_memory(&self, with: impl FnOnce(&mut OwnedBuffer)) -> Result<(), Arc<Failure>> {
        let mut guard = self.open.lock();
        let Some(open) = guard.as_mut() else {
            return Ok(());
        };
        if let DeviceShardMemory::Reserved(_) = open.memory
            && let DeviceShardMemory::Reserved(reservation) =
                replace(&mut open.memory, DeviceShardMemory::Gone)
        {
            let failed = |error: OutOfMemory| self.runtime.out_of_memory(self.op, &error);
            open.memory = if open.missing.len() > 1 {
                let bytes = self.region.elements() * self.item_bytes;
                let mut both = reservation
                    .allocate_all([bytes; 2].into_iter())
                    .map_err(failed)?;
                let beside = both.pop();
                both.pop().map_or(DeviceShardMemory::Gone, |shard| {
                    DeviceShardMemory::Here(shard, beside)
                })
            } else {
                DeviceShardMemory::Here(reservation.allocate().map_err(failed)?, None)
            };
        }

        if let DeviceShardMemory::Here(shard, beside) = &mut open.memory {
            match beside {
                Some(beside) if open.term > 0 => with(beside),
                _ => with(shard),
            }
        }
        Ok(())
    }
}

/// A region of a larger buffer.
pub(crate) struct BufferPart {
    /// The region that the whole buffer covers.
    pub(crate) whole: Region,
    pub(crate) part: Region,
    pub(crate) item_bytes: usize,
}

impl Runtime {
    /// Starts a copy of `values` to an accelerator, in reserved memory. Resolves `resolver` with
    /// the shard when the copy is issued.
    pub(crate) fn copy_in(
        self: &Arc<Self>,
        device: DeviceId,
        op: u64,
        values: SharedBuffer,
        reservation: Reservation,
        resolver: Resolver,
        guard: OpGuard,
    ) {
        let Some(accelerator) = self.accelerator_of(device, MemoryKind::Device) else {
            return;
        };

        let all = Region::full(&[values.len()]);
        let shard = DeviceAssembly::new(
            NewShard {
                op,
                region: all,
                missing: vec![1],
                reservation,
                resolver,
                guard,
            },
            self.clone(),
            accelerator.clone(),
            1,
            None,
        );
        shard.fill(&values);
    }

    /// Starts a copy of a part of the buffer of `slot`, on the device that holds it. Resolves
    /// `resolver` with the copy. Fails `resolver` if there is no memory.
    pub(crate) fn copy_on_device(
        self: &Arc<Self>,
        device: DeviceId,
        op: u64,
        slot: &AsyncBuffer,
        of: BufferPart,
        resolver: Resolver,
        guard: OpGuard,
    ) {
        let Some(accelerator) = self.accelerator_of(device, MemoryKind::Device) else {
            return;
        };
        let BufferPart {
            whole,
            part,
            item_bytes,
        } = of;
        let pool = self
            .devices
            .iter()
            .find(|local| local.id == device)
            .map(|local| &local.pool);

        let reservation = match pool.map(|pool| pool.reserve(part.elements() * item_bytes)) {
            Some(Ok(reservation)) => reservation,
            Some(Err(error)) => {
                let failure = self.out_of_memory(op, &error);
                self.remember(&failure);
                return resolver.keep(Err(failure));
            }
            None => return,
        };

        let shard = DeviceAssembly::new(
            NewShard {
                op,
                region: part.clone(),
                missing: vec![1],
                reservation,
                resolver,
                guard,
            },
            self.clone(),
            accelerator.clone(),
            item_bytes,
            None,
        );

        let source = slot.clone();
        slot.on_issued(move |outcome| match outcome {
            Ok(bytes) => {
                shard.copy(bytes, &whole, &part, Some(source), ());
                shard.placed();
            }
            Err(failure) => shard.end(Err(failure.clone())),
        });
    }
}

impl ShardEnding {
    fn one_more(self: &Arc<Self>) -> Arc<Self> {
        self.state.lock().left += 1;
        self.clone()
    }

    fn issued(&self, resolver: IssuedPromises) {
        self.state.lock().issued = Some(resolver);
    }

    /// Notes that a copy, or the issue of the shard, has ended. After the last end, ends the shard,
    /// with the first failure if there was one.
    fn over(&self, result: Result<(), Arc<Failure>>) {
        let mut state = self.state.lock();
        if let Err(failure) = result {
            state.failed.get_or_insert(failure);
        }
        state.left -= 1;
        if state.left > 0 {
            return;
        }
        let issued = state.issued.take();
        let failed = state.failed.take();
        let guard = state.guard.take();
        drop(state);

        if let Some(failure) = &failed {
            self.runtime.remember(failure);
        }
        if let Some(issued) = issued {
            issued.end(failed.map_or(Ok(()), Err));
        }
        drop(guard);
    }
}
