//! The receive of a region from a peer: to the shards of this process that contain it, and on to
//! other processes.

use std::sync::Arc;

use mpmd_ids::ProcessId;
use mpmd_transport::memory::{ALIGNMENT, OutOfMemory};
use mpmd_transport::router::{Failure, FailureKind};
use mpmd_transport::{OwnedBuffer, Payload, SharedBuffer};

use super::driver::in_memory;
use super::put::Transfer;
use super::{Assembly, AsyncBuffer, OpGuard, Outcome, Outgoing, Runtime};
use crate::device::copy::copy_region;
use crate::device::cuda::Part;
use crate::trace::PieceStep;

/// The receive of one region from a peer.
///
/// The region is forwarded even if it cannot be used here. A failed shard, or one without memory,
/// must not affect other processes. If the region does not come, all its receivers are told.
pub(crate) struct Receive {
    pub(super) op: u64,
    pub(super) from: ProcessId,
    pub(super) transfer: Arc<Transfer>,
    /// The shards of this process that contain the region.
    pub(super) shards: Vec<Assembly>,
    // Last, so that it is dropped after the memory.
    pub(super) guard: OpGuard,
}

/// The buffer that a region's bytes are read into.
#[derive(Clone, Copy)]
enum ReadTarget {
    /// The whole memory of one of the shards, by index.
    Whole(usize),
    /// The region's part of the only shard.
    Part,
    /// A staging buffer.
    Staging,
}

impl Runtime {
    /// Handles the end of a receive: the region has come, or never will.
    pub(super) fn pass(
        self: &Arc<Self>,
        receive: Box<Receive>,
        result: Result<Payload, Arc<Failure>>,
    ) {
        match result {
            Err(failure) => self.fail_passage(&receive, &failure),
            Ok(Payload::Empty) => self.spread(&receive, Vec::new().into(), None, |_| false),
            Ok(Payload::Inline(bytes) | Payload::Lent(bytes)) => {
                self.trace_taken(&receive);
                // Kernels read shards as typed slices, so unaligned bytes are copied. So is a
                // region that is only a part of a lent shard.
                let address = bytes
                    .device()
                    .map_or_else(|| bytes.as_ptr().addr() as u64, |place| place.address);
                let aligned = address.is_multiple_of(ALIGNMENT as u64);
                let fits = aligned && receive.transfer.is_by_itself();
                let whole = |shard: &Assembly| {
                    fits && shard.is_whole(&receive.transfer.region) && shard.can_be(&bytes)
                };
                let mut whole: Vec<usize> =
                    (0..receive.shards.len()).filter(|at| whole(&receive.shards[*at])).collect();
                if !bytes.is_lent() {
                    // Only lent bytes may be shared by several shards: they are not a device's own
                    // memory.
                    whole.truncate(1);
                }
                let source = self.arriving(&receive, &bytes);
                self.spread(&receive, bytes, source, |at| whole.contains(&at));
            }
            Ok(Payload::Waiting(fetch)) => {
                let (buffer, place) = match self.room(&receive, fetch.bytes()) {
                    Ok(Some(room)) => room,
                    // Dropped: the payload is read and discarded.
                    Ok(None) => return,
                    Err(failure) => return self.fail_passage(&receive, &failure),
                };
                let runtime = self.clone();
                self.fetch(
                    receive.from,
                    fetch,
                    buffer,
                    Box::new(move |result| match result {
                        Ok(buffer) => {
                            runtime.trace_taken(&receive);
                            match place {
                                ReadTarget::Part => receive.shards[0].give_back(buffer),
                                ReadTarget::Whole(at) => {
                                    runtime.spread(&receive, buffer.freeze(), None, |shard| {
                                        shard == at
                                    });
                                }
                                ReadTarget::Staging => {
                                    runtime.spread(&receive, buffer.freeze(), None, |_| false)
                                }
                            }
                        }
                        Err(error) => {
                            let failure = runtime.fetch_failed(receive.from, receive.op, &error);
                            runtime.fail_passage(&receive, &failure);
                        }
                    }),
                );
            }
        }
    }

    /// Returns an async buffer with the completion status of device memory that a peer lent before
    /// it was filled. `None` if the bytes are already there.
    fn arriving(self: &Arc<Self>, receive: &Receive, bytes: &SharedBuffer) -> Option<AsyncBuffer> {
        if bytes.device().is_none() || bytes.is_made() {
            return None;
        }
        let (resolver, slot) = AsyncBuffer::new();
        let issued = resolver.issue(bytes.clone());
        let (runtime, op, from) = (self.clone(), receive.op, receive.from);
        bytes.on_made(Box::new(move |failure| {
            issued.end(failure.map_or(Ok(()), |why| Err(runtime.never_made(from, op, &why))));
        }));
        Some(slot)
    }

    /// Returns the failure of an operation that borrowed bytes that were then not made.
    fn never_made(&self, from: ProcessId, op: u64, why: &str) -> Arc<Failure> {
        let router = self.router.lock();
        if !router.still_here().contains(&from) {
            return router.lost_while(from, op, why);
        }
        let message =
            format!("operation {op}: process {from} lent bytes that it then failed to make: {why}");
        Arc::new(Failure::new(FailureKind::Kernel, from, op, message))
    }

    /// Returns memory to read the region into, and its kind. `None` if the region is no longer
    /// needed.
    fn room(
        &self,
        receive: &Receive,
        bytes: u64,
    ) -> Result<Option<(OwnedBuffer, ReadTarget)>, Arc<Failure>> {
        let by_itself = receive.transfer.is_by_itself();
        for (at, shard) in receive.shards.iter().enumerate().filter(|_| by_itself) {
            if let Some(buffer) = shard.take_whole(&receive.transfer.region) {
                return Ok(Some((buffer, ReadTarget::Whole(at))));
            }
        }
        // A region that is also forwarded needs a buffer that outlives the shard's part.
        if let [shard] = &receive.shards[..]
            && by_itself
            && receive.transfer.peers.is_empty()
            && let Some(part) = shard.take_part(&receive.transfer.region)
        {
            return Ok(Some((part, ReadTarget::Part)));
        }
        if receive.transfer.peers.is_empty() && !receive.shards.iter().any(|shard| shard.is_open())
        {
            return Ok(None);
        }
        match self.staging.allocate(in_memory(bytes)) {
            Ok(buffer) => Ok(Some((buffer, ReadTarget::Staging))),
            Err(error) => {
                let message = format!("operation {}: {error}", receive.op);
                Err(Arc::new(Failure::new(FailureKind::Memory, self.me, receive.op, message)))
            }
        }
    }

    fn trace_taken(&self, receive: &Receive) {
        let Receive { op, from, transfer, .. } = receive;
        self.trace_piece(PieceStep::Taken, (*op, transfer.id), *from, transfer.bytes as u64);
    }

    /// Gives the region to its receivers. Other processes come first, because more processes may
    /// wait behind them. The shards for which `in_place` is true use the bytes without a copy; the
    /// others copy them. So each device's shard is its own memory or borrowed memory. Its room and
    /// its in-place updates do not depend on other devices.
    ///
    /// `source` is the async buffer of the bytes, if their work is not over.
    fn spread(
        self: &Arc<Self>,
        receive: &Receive,
        bytes: SharedBuffer,
        source: Option<AsyncBuffer>,
        in_place: impl Fn(usize) -> bool,
    ) {
        let Receive { op, transfer, shards, guard, .. } = receive;
        let carried =
            |peer: &ProcessId| bytes.device().is_none() || self.carries_device_memory(*peer);
        if transfer.is_by_itself() && transfer.peers.iter().all(carried) {
            self.send_to_peers(*op, transfer, &transfer.peers, bytes.clone(), guard);
        } else if !transfer.peers.is_empty() {
            // The peers expect the region alone.
            self.send_packed(
                *op,
                transfer.clone(),
                transfer.peers.clone(),
                bytes.clone(),
                source.clone(),
                guard.clone(),
            );
        }
        let (whole, others): (Vec<_>, Vec<_>) = (0..shards.len()).partition(|at| in_place(*at));
        for at in others {
            shards[at].place(self, transfer, bytes.clone(), source.clone(), guard);
        }
        // The last shard holds the bytes alone, so that a kernel may take them over.
        if let Some((last, before)) = whole.split_last() {
            before.iter().for_each(|at| shards[*at].end_as(bytes.clone(), source.clone()));
            shards[*last].end_as(bytes, source);
        }
    }

    /// Offers the region's bytes, or bytes that contain it, to some of the peers that get it from
    /// this process.
    pub(super) fn send_to_peers(
        self: &Arc<Self>,
        op: u64,
        transfer: &Transfer,
        peers: &[ProcessId],
        bytes: SharedBuffer,
        guard: &OpGuard,
    ) {
        for peer in peers {
            self.trace_piece(PieceStep::Offered, (op, transfer.id), *peer, transfer.bytes as u64);
            let buffer = bytes.clone();
            let outgoing = Outgoing { buffer, bytes: transfer.bytes as u64, guard: guard.clone() };
            let key = (op, transfer.id);
            self.with_router(|router| {
                router.offer(*peer, key, guard.hash(), bytes.len() as u64, outgoing)
            });
        }
    }

    /// Packs a region, on a copy worker or by the device that has it. Then offers it to some of the
    /// peers that get it from this process.
    ///
    /// `source` is the async buffer of the bytes, if they are in device memory and its work may not
    /// be over.
    pub(super) fn send_packed(
        self: &Arc<Self>,
        op: u64,
        transfer: Arc<Transfer>,
        peers: Vec<ProcessId>,
        bytes: SharedBuffer,
        source: Option<AsyncBuffer>,
        guard: OpGuard,
    ) {
        let runtime = self.clone();
        if bytes.device().is_some() {
            let Transfer { region, holds, .. } = &*transfer;
            let part =
                Part { from: holds, to: region, piece: region, item_bytes: transfer.item_bytes() };
            let to = match self.staging.allocate(transfer.bytes) {
                Ok(to) => to,
                Err(error) => {
                    let failure = self.out_of_memory(op, &error.to_string());
                    self.remember(&failure);
                    return self.poison_peers(op, &transfer, &peers, &failure);
                }
            };
            let what = transfer.clone();
            return self.read_device(op, &bytes, source, part, to, move |packed| match packed {
                Ok(packed) => runtime.send_to_peers(op, &what, &peers, packed.freeze(), &guard),
                Err(failure) => {
                    runtime.remember(&failure);
                    runtime.poison_peers(op, &what, &peers, &failure);
                }
            });
        }
        self.move_data(Box::new(move || {
            let packed = runtime.pack(op, &bytes, &transfer);
            // Dropped before the operation can end: threads that wait for memory check it then.
            drop(bytes);
            match packed {
                Ok(packed) => runtime.send_to_peers(op, &transfer, &peers, packed, &guard),
                Err(failure) => {
                    runtime.remember(&failure);
                    runtime.poison_peers(op, &transfer, &peers, &failure);
                }
            }
        }));
    }

    /// Copies the region's bytes to a packed staging buffer.
    fn pack(&self, op: u64, from: &SharedBuffer, transfer: &Transfer) -> Outcome {
        let failed =
            |error: OutOfMemory| Failure::new(FailureKind::Memory, self.me, op, error.to_string());
        let mut packed =
            self.staging.allocate(transfer.bytes).map_err(|error| Arc::new(failed(error)))?;
        let Transfer { region, holds, .. } = transfer;
        copy_region(from, holds, &mut packed, region, region, transfer.item_bytes());
        Ok(packed.freeze())
    }

    /// Tells some of the peers that get a region from this process that it will not come.
    pub(super) fn poison_peers(
        self: &Arc<Self>,
        op: u64,
        transfer: &Transfer,
        peers: &[ProcessId],
        failure: &Failure,
    ) {
        for peer in peers {
            self.with_router(|router| router.poison(*peer, (op, transfer.id), failure));
        }
    }

    fn fail_passage(self: &Arc<Self>, receive: &Receive, failure: &Arc<Failure>) {
        self.remember(failure);
        self.poison_peers(receive.op, &receive.transfer, &receive.transfer.peers, failure);
        for shard in &receive.shards {
            shard.end(Err(failure.clone()));
        }
    }
}
