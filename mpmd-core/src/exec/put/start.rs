//! Starts a `device_put`: sends this process's pieces, opens its new shards, and registers the
//! pieces that they wait for.

use std::sync::Arc;

use mpmd_ids::ProcessId;
use mpmd_transport::SharedBuffer;
use mpmd_transport::memory::Reservation;
use mpmd_transport::router::{Failure, FailureKind};

use super::transfer::{Origin, Target, Transfer};
use super::{COPY_INLINE, PutPlan, PutWhat, Source, kind_of};
use crate::device::cuda::Gpu;
use crate::exec::assembly::Sum;
use crate::exec::{
    Assembly, AsyncBuffer, DeviceAssembly, HostAssembly, OpGuard, Outcome, Receive, Resolver,
    Runtime, Waiter, follow,
};
use crate::trace::PieceStep;
use mpmd_layout::topology::DeviceId;

/// Shards of fewer bytes are assembled by one copy worker: waking a second one would cost more.
const WRITTEN_IN_PARTS: usize = 1 << 20;

/// A `device_put` that is being started.
pub(super) struct Start<'a> {
    pub(super) plan: &'a PutPlan,
    pub(super) runtime: &'a Arc<Runtime>,
    pub(super) op: u64,
    pub(super) guard: &'a OpGuard,
    pub(super) source: &'a Source<'a>,
    /// By target; `None` if the shard is not assembled from pieces.
    pub(super) shards: Vec<Option<Assembly>>,
}

impl Start<'_> {
    /// Sends a region of a local shard to the peers that get it from this process, once the shard
    /// is complete.
    pub(super) fn send(&self, transfer: &Arc<Transfer>, device: DeviceId) {
        let Some(slot) = self.source.slot(device) else { return };
        let (runtime, op, guard) = (self.runtime.clone(), self.op, self.guard.clone());
        if runtime.gpu_of(device, kind_of(self.plan.what.from.as_ref())).is_some() {
            return self.send_from_gpu(transfer, slot);
        }
        let transfer = transfer.clone();
        slot.on_end(move |outcome| match (outcome, &transfer.run) {
            (Err(failure), _) => runtime.poison_peers(op, &transfer, &transfer.peers, failure),
            (Ok(buffer), Some(run)) => {
                let bytes = buffer.slice(run.clone());
                runtime.send_to_peers(op, &transfer, &transfer.peers, bytes, &guard);
            }
            (Ok(buffer), None) => {
                // Peers with zero-copy transfer get the whole shard and read the region from it.
                // The others get the region packed.
                let hands_over = |peer: &ProcessId| runtime.hands_over(*peer);
                let (takers, others): (Vec<_>, Vec<_>) =
                    transfer.peers.iter().copied().partition(hands_over);
                runtime.send_to_peers(op, &transfer, &takers, buffer.clone(), &guard);
                if !others.is_empty() {
                    runtime.send_packed(op, transfer, others, buffer.clone(), None, guard);
                }
            }
        });
    }

    /// Same as [`send`](Self::send), for a shard in a CUDA device's memory. Peers that take device
    /// memory get the shard itself, even before it is filled. The others get a copy that begins as
    /// soon as the device can.
    fn send_from_gpu(&self, transfer: &Arc<Transfer>, slot: &AsyncBuffer) {
        let carried = |peer: &ProcessId| self.runtime.carries_device_memory(*peer);
        let (takers, others): (Vec<_>, Vec<_>) = transfer.peers.iter().copied().partition(carried);
        if !takers.is_empty() {
            let (runtime, op, guard) = (self.runtime.clone(), self.op, self.guard.clone());
            let (transfer, source) = (transfer.clone(), slot.clone());
            slot.on_issued(move |outcome| match outcome {
                Err(failure) => runtime.poison_peers(op, &transfer, &takers, failure),
                Ok(buffer) => {
                    let bytes = transfer
                        .run
                        .clone()
                        .map_or_else(|| buffer.clone(), |run| buffer.slice(run));
                    // The completion status tells the peers if an input of the shard failed. Their
                    // devices cannot see that.
                    let bytes = bytes.with_verdict(source.verdict());
                    runtime.send_to_peers(op, &transfer, &takers, bytes, &guard);
                }
            });
        }
        if !others.is_empty() {
            let (runtime, op, guard) = (self.runtime.clone(), self.op, self.guard.clone());
            let (transfer, source) = (transfer.clone(), slot.clone());
            slot.on_issued(move |outcome| match outcome {
                Err(failure) => runtime.poison_peers(op, &transfer, &others, failure),
                Ok(buffer) => {
                    runtime.send_packed(op, transfer, others, buffer.clone(), Some(source), guard)
                }
            });
        }
    }

    /// Opens a shard of this process. Also returns its assembly, if it is put together from pieces.
    pub(super) fn open(&self, target: &Target, may_alias: bool) -> (AsyncBuffer, Option<Assembly>) {
        let Self { plan, runtime, op, guard, source, .. } = *self;
        if target.region.is_empty() {
            return (AsyncBuffer::filled(Vec::new().into()), None);
        }
        if may_alias {
            match (target.alias, source) {
                (Some(Origin::Device(device)), _) => {
                    return (alias(runtime, guard, source.slot(device)), None);
                }
                (Some(Origin::Host), Source::Host(host)) => {
                    return (AsyncBuffer::filled(host.bytes().clone()), None);
                }
                _ => {}
            }
        }
        let PutWhat { aval, to, .. } = &*plan.what;
        let (resolver, slot) = AsyncBuffer::new();
        let bytes = target.region.elements() * plan.item_bytes();
        let gpu = runtime.gpu_of(target.device, to.memory_kind());
        // Partial sums that a device adds need a second buffer of the shard's size.
        let sum = plan.sum_on_device(target);
        let sizes = std::iter::repeat_n(bytes, 1 + usize::from(sum.is_some()));
        let reserved =
            runtime.reserve_all(target.local_index, to.memory_kind(), sizes, op, &*plan.what);
        match (reserved, gpu) {
            (Ok(reservation), Some(gpu)) => {
                (slot, self.open_on_gpu(target, gpu, sum, reservation, resolver))
            }
            (Ok(reservation), None) if target.pieces.is_empty() => {
                self.zeros(reservation, resolver);
                (slot, None)
            }
            (Ok(reservation), None) => {
                let (region, missing) = (target.region.clone(), target.pieces.clone());
                let (me, dtype, guard) = (runtime.me, aval.dtype(), guard.clone());
                let shard = HostAssembly::new(
                    me,
                    op,
                    region,
                    dtype,
                    missing,
                    target.in_parts && target.pieces != [1] && bytes >= WRITTEN_IN_PARTS,
                    reservation,
                    resolver,
                    guard,
                );
                (slot, Some(Assembly::Host(shard)))
            }
            (Err(failure), _) => {
                runtime.remember(&failure);
                resolver.keep(Err(failure));
                (slot, None)
            }
        }
    }

    /// Opens a shard in a CUDA device's memory.
    fn open_on_gpu(
        &self,
        target: &Target,
        gpu: &Arc<Gpu>,
        sum: Option<Sum>,
        reservation: Reservation,
        resolver: Resolver,
    ) -> Option<Assembly> {
        let Self { plan, runtime, op, guard, .. } = *self;
        let (item, region) = (plan.item_bytes(), target.region.clone());
        let on_host = target.pieces.len() > 1 && sum.is_none();
        let missing =
            if on_host || target.pieces.is_empty() { vec![1] } else { target.pieces.clone() };
        let shard = DeviceAssembly::new(
            runtime.clone(),
            gpu.clone(),
            op,
            region.clone(),
            item,
            missing,
            sum,
            reservation,
            resolver,
            guard.clone(),
        );
        if target.pieces.is_empty() {
            shard.zero();
            return None;
        }
        if !on_host {
            return Some(Assembly::Device(shard));
        }
        // The host adds the partial sums, then the device copies the result.
        let reservation = match runtime.staging.reserve(region.elements() * item) {
            Ok(reservation) => reservation,
            Err(error) => {
                let failure = runtime.out_of_memory(op, &error.to_string());
                runtime.remember(&failure);
                shard.end(Err(failure));
                return None;
            }
        };
        let (resolver, sum) = AsyncBuffer::new();
        let host = HostAssembly::new(
            runtime.me,
            op,
            region.clone(),
            plan.what.aval.dtype(),
            target.pieces.clone(),
            false,
            reservation,
            resolver,
            guard.clone(),
        );
        sum.on_end(move |outcome| match outcome {
            Ok(sum) => shard.fill(sum),
            Err(failure) => shard.end(Err(failure.clone())),
        });
        Some(Assembly::Host(host))
    }

    /// Fills with zeros a shard to which no piece contributes.
    fn zeros(&self, reservation: Reservation, resolver: Resolver) {
        let (me, op, guard) = (self.runtime.me, self.op, self.guard.clone());
        self.runtime.move_data(Box::new(move || {
            let zeros = reservation.allocate().map(|mut buffer| {
                buffer.fill(0);
                buffer.freeze()
            });
            resolver.keep(zeros.map_err(|error| {
                let message = format!("operation {op}: {error}");
                Arc::new(Failure::new(FailureKind::Memory, me, op, message))
            }));
            drop(guard);
        }));
    }

    /// Copies a region into the shards that contain it. A region from a peer is received even if no
    /// shard needs it any more, so that its sender does not wait. It is then forwarded to this
    /// process's peers.
    pub(super) fn receive(&self, transfer: &Arc<Transfer>) {
        let shards = transfer.targets.iter().filter_map(|at| self.shards[*at].clone());
        let (runtime, op, guard) = (self.runtime, self.op, self.guard);
        match (transfer.origin, self.source) {
            (Origin::Process(from), _) => {
                let shards: Vec<_> = shards.collect();
                let guard = guard.clone();
                let waiter = if shards.is_empty() && transfer.peers.is_empty() {
                    Waiter::Nobody(guard)
                } else {
                    Waiter::Piece(Box::new(Receive {
                        op,
                        from,
                        transfer: transfer.clone(),
                        shards,
                        guard,
                    }))
                };
                let hash = self.guard.hash();
                let bytes = transfer.holds.elements() * transfer.item_bytes();
                let (key, bytes, now) = ((op, transfer.id), bytes as u64, runtime.now());
                runtime.trace_piece(PieceStep::Expected, key, from, transfer.bytes as u64);
                runtime.with_router(|router| router.expect(from, key, hash, bytes, waiter, now));
            }
            (Origin::Host, Source::Host(host)) => {
                for shard in shards {
                    let bytes = host.bytes().clone();
                    if transfer.bytes <= COPY_INLINE {
                        shard.place_now(transfer, bytes, guard);
                    } else {
                        shard.place(runtime, transfer, bytes, None, guard);
                    }
                }
            }
            (Origin::Host, Source::Shards(_)) => {}
            (Origin::Device(device), _) => {
                let Some(slot) = self.source.slot(device) else { return };
                // A CUDA device's shard is taken once its work is issued; the copy is ordered
                // behind it. Other shards are taken once they are filled.
                let on_gpu =
                    runtime.gpu_of(device, kind_of(self.plan.what.from.as_ref())).is_some();
                for shard in shards {
                    let (runtime, transfer, guard) =
                        (runtime.clone(), transfer.clone(), guard.clone());
                    let source = on_gpu.then(|| slot.clone());
                    let place = move |outcome: &Outcome| match outcome {
                        Ok(buffer) => {
                            shard.place(&runtime, &transfer, buffer.clone(), source, &guard)
                        }
                        Err(failure) => {
                            runtime.remember(failure);
                            shard.end(Err(failure.clone()));
                        }
                    };
                    if on_gpu {
                        slot.on_issued(place);
                    } else {
                        slot.on_end(place);
                    }
                }
            }
        }
    }
}

/// Returns a shard that shares the memory of `source`.
fn alias(runtime: &Arc<Runtime>, guard: &OpGuard, source: Option<&AsyncBuffer>) -> AsyncBuffer {
    let (resolver, slot) = AsyncBuffer::new();
    if let Some(source) = source {
        follow(source, resolver, SharedBuffer::clone, Some(runtime.clone()), Some(guard.clone()));
    }
    slot
}
