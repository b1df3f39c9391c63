//! The sending half of a transfer: from a shard of this process, or from received bytes, to the
//! router.

use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_device::accelerator::RegionCopy;
use mpmd_device::copy::copy_region;
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::router::Failure;

use crate::exec::moves::chunks::COPY_INLINE;
use crate::exec::moves::transfer::RegionTransfer;
use crate::exec::{AsyncBuffer, OpGuard, Outcome, Runtime};
use mpmd_record::trace::PieceStep;

/// A piece to send, and the guard that keeps its operation in flight.
pub(crate) struct Outgoing {
    pub(crate) buffer: SharedBuffer,
    /// Size of the piece in bytes. In a zero-copy transfer `buffer` may be larger: the whole shard
    /// that contains the piece.
    pub(crate) bytes: u64,
    pub(crate) guard: OpGuard,
}

/// The send of one region to one peer or several.
#[derive(Clone)]
pub(crate) struct Send {
    pub(crate) transfer: Arc<RegionTransfer>,
    // Last, so that it is dropped after the memory.
    pub(crate) guard: OpGuard,
}

impl Send {
    /// Registers the send of a region of a local host shard. Once the shard is filled, offers the
    /// region to the peers of the transfer. If the shard fails, sends the failure.
    pub(crate) fn begin(self, runtime: &Arc<Runtime>, slot: &AsyncBuffer) {
        let runtime = runtime.clone();
        slot.on_end(move |outcome| match (outcome, &self.transfer.run) {
            (Err(failure), _) => self.poison(&runtime, &self.transfer.peers, failure),
            (Ok(buffer), Some(run)) => {
                self.offer(&runtime, &self.transfer.peers, buffer.slice(run.clone()));
            }
            (Ok(buffer), None) => {
                // Peers with zero-copy transfer get the whole shard and read the region from it.
                // The others get the region packed.
                let zero_copy = |peer: &ProcessId| runtime.zero_copy(*peer);
                let peers = self.transfer.peers.iter().copied();
                let (takers, others) = peers.partition::<Vec<_>, _>(zero_copy);
                self.offer(&runtime, &takers, buffer.clone());
                if !others.is_empty() {
                    self.pack_and_offer(&runtime, others, buffer.clone(), None);
                }
            }
        });
    }

    /// Registers the send of a region of a shard in an accelerator's memory. Peers that accept
    /// device memory get the shard itself, even before it is filled. The others get a copy, which
    /// starts as soon as the device can make it. If the shard fails, the peers get the failure.
    pub(crate) fn begin_from_accelerator(self, runtime: &Arc<Runtime>, slot: &AsyncBuffer) {
        let carried = |peer: &ProcessId| runtime.carries_device_memory(*peer);
        let peers = self.transfer.peers.iter().copied();
        let (takers, others) = peers.partition::<Vec<_>, _>(carried);

        if !takers.is_empty() {
            let send = self.clone();
            let runtime = runtime.clone();
            let source = slot.clone();
            slot.on_issued(move |outcome| match outcome {
                Err(failure) => send.poison(&runtime, &takers, failure),
                Ok(buffer) => {
                    let run = send.transfer.run.clone();
                    let bytes = run.map_or_else(|| buffer.clone(), |run| buffer.slice(run));
                    // The completion status tells the peers if an input of the shard failed. Their
                    // devices cannot see that.
                    send.offer(&runtime, &takers, bytes.with_verdict(source.completion()));
                }
            });
        }
        if !others.is_empty() {
            let runtime = runtime.clone();
            let source = slot.clone();
            slot.on_issued(move |outcome| match outcome {
                Err(failure) => self.poison(&runtime, &others, failure),
                Ok(buffer) => self.pack_and_offer(&runtime, others, buffer.clone(), Some(source)),
            });
        }
    }

    /// Tells the router to send `bytes` to these peers. `bytes` are exactly the region, or contain
    /// it.
    pub(crate) fn offer(&self, runtime: &Arc<Runtime>, peers: &[ProcessId], bytes: SharedBuffer) {
        let key = self.guard.key(self.transfer.id);
        let size = self.transfer.bytes as u64;
        for peer in peers {
            runtime.trace_piece(PieceStep::Offered, key, *peer, size);
            let outgoing = Outgoing {
                buffer: bytes.clone(),
                bytes: size,
                guard: self.guard.clone(),
            };
            runtime.with_router(|router| {
                router.offer(*peer, key, self.guard.hash(), bytes.len() as u64, outgoing)
            });
        }
    }

    /// Packs the region into a staging buffer and offers it to these peers. If that fails, sends
    /// them the failure. Packs small regions on this thread, others on a copy worker or on the
    /// device that has the bytes. Does not block.
    ///
    /// `source` is the async buffer of the bytes, if they are in device memory and the work that
    /// fills them may not have ended.
    pub(crate) fn pack_and_offer(
        self,
        runtime: &Arc<Runtime>,
        peers: Vec<ProcessId>,
        bytes: SharedBuffer,
        source: Option<AsyncBuffer>,
    ) {
        let runtime = runtime.clone();
        if bytes.device().is_none() {
            let here = runtime.clone();
            let is_small = self.transfer.bytes <= COPY_INLINE;
            let pack = move || {
                let packed = self.pack(&runtime, &bytes);
                // Dropped before the operation can end: threads that wait for memory check it then.
                drop(bytes);
                self.offer_packed(&runtime, &peers, packed);
            };
            return if is_small {
                pack()
            } else {
                here.move_data(Box::new(pack))
            };
        }

        let transfer = self.transfer.clone();
        let RegionTransfer { region, holds, .. } = &*transfer;
        let part = RegionCopy {
            from: holds,
            to: region,
            piece: region,
            item_bytes: transfer.item_bytes(),
        };
        match runtime.staging.allocate(transfer.bytes) {
            Ok(to) => runtime.clone().read_device(
                self.guard.op(),
                &bytes,
                source,
                part,
                to,
                move |packed| {
                    self.offer_packed(&runtime, &peers, packed.map(OwnedBuffer::freeze));
                },
            ),
            Err(error) => {
                let failure = runtime.out_of_memory(self.guard.op(), &error);
                self.offer_packed(&runtime, &peers, Err(failure));
            }
        }
    }

    /// Copies the region's bytes to a packed staging buffer, on this thread. Fails if there is no
    /// memory.
    fn pack(&self, runtime: &Runtime, from: &SharedBuffer) -> Outcome {
        let transfer = &*self.transfer;
        let packed = runtime.staging.allocate(transfer.bytes);
        let mut packed = packed.map_err(|error| runtime.out_of_memory(self.guard.op(), &error))?;
        let RegionTransfer { region, holds, .. } = transfer;
        copy_region(
            from,
            holds,
            &mut packed,
            region,
            region,
            transfer.item_bytes(),
        );
        Ok(packed.freeze())
    }

    fn offer_packed(&self, runtime: &Arc<Runtime>, peers: &[ProcessId], packed: Outcome) {
        match packed {
            Ok(packed) => self.offer(runtime, peers, packed),
            Err(failure) => {
                runtime.remember(&failure);
                self.poison(runtime, peers, &failure);
            }
        }
    }

    /// Tells these peers that the region will not come, and fails this process's sends of the move.
    pub(crate) fn poison(
        &self,
        runtime: &Arc<Runtime>,
        peers: &[ProcessId],
        failure: &Arc<Failure>,
    ) {
        if !peers.is_empty() {
            self.guard.fail_sends(failure);
        }
        for peer in peers {
            let (op, piece) = self.guard.key(self.transfer.id);
            runtime.with_router(|router| router.poison(*peer, op, piece, failure));
        }
    }
}
