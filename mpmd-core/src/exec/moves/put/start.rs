//! Starts a `device_put`: sends this process's pieces, opens its new shards, and registers the
//! pieces that they wait for.

use std::sync::Arc;

use mpmd_device::accelerator::{Accelerator, Addition};
use mpmd_memory::Reservation;
use mpmd_memory::SharedBuffer;

use super::{PutPlan, PutSource, PutWhat, SMALL, kind_of};
use crate::exec::array::host_array::HostArray;
use crate::exec::moves::assembly::NewShard;
use crate::exec::moves::receive::Receive;
use crate::exec::moves::send::Send;
use crate::exec::moves::transfer::{PieceOrigin, RegionTransfer, TargetShard};
use crate::exec::{
    Assembly, AsyncBuffer, DeviceAssembly, HostAssembly, OpGuard, Outcome, Resolver, Runtime,
    follow,
};
use mpmd_layout::topology::DeviceId;

/// A `device_put` that is being started.
pub(super) struct PutStart<'a> {
    pub(super) plan: &'a PutPlan,
    pub(super) runtime: &'a Arc<Runtime>,
    pub(super) guard: &'a OpGuard,
    pub(super) source: &'a PutSource<'a>,
    /// The assembly of each target shard. `None` if the shard is not assembled from pieces.
    pub(super) shards: Vec<Option<Assembly>>,
}

/// A new shard of this process.
pub(super) struct OpenedShard {
    pub(super) slot: AsyncBuffer,
    /// The assembly of the shard. `None` if the shard needs no pieces.
    pub(super) assembly: Option<Assembly>,
}

impl OpenedShard {
    fn without_pieces(slot: AsyncBuffer) -> Self {
        Self {
            slot,
            assembly: None,
        }
    }
}

impl PutStart<'_> {
    /// Registers the send of a region of a local shard to the peers that get it from this process.
    /// The send starts once the shard is filled. In accelerator memory, it starts once the shard is
    /// issued.
    pub(super) fn send(&self, transfer: &Arc<RegionTransfer>, device: DeviceId) {
        let Some(slot) = self.source.slot(device) else {
            return;
        };
        let send = self.send_of(transfer);
        let kind = kind_of(self.plan.what.from.as_ref());
        if self.runtime.accelerator_of(device, kind).is_some() {
            send.begin_from_accelerator(self.runtime, slot);
        } else {
            send.begin(self.runtime, slot);
        }
    }

    fn send_of(&self, transfer: &Arc<RegionTransfer>) -> Send {
        Send {
            transfer: transfer.clone(),
            guard: self.guard.clone(),
        }
    }

    /// Reserves the memory of a new shard of this process. If there is no memory, the shard fails.
    pub(super) fn open(&self, target: &TargetShard, may_alias: bool) -> OpenedShard {
        let Self {
            plan,
            runtime,
            guard,
            source,
            ..
        } = *self;
        let op = guard.op();
        if target.region.is_empty() {
            return OpenedShard::without_pieces(AsyncBuffer::filled(Vec::new().into()));
        }
        if may_alias {
            match (target.alias, source) {
                (Some(PieceOrigin::Device(device)), _) => {
                    let slot = alias(runtime, guard, source.slot(device));
                    return OpenedShard::without_pieces(slot);
                }
                (Some(PieceOrigin::Host), PutSource::Host(host)) => {
                    return OpenedShard::without_pieces(self.hold(target, host));
                }
                _ => {}
            }
        }

        let PutWhat { aval, to, .. } = &*plan.what;
        let (resolver, slot) = AsyncBuffer::new();
        let bytes = target.region.elements() * plan.item_bytes();
        let accelerator = runtime.accelerator_of(target.device, to.memory_kind());
        // Partial sums that a device adds need a second buffer of the shard's size.
        let sum = plan.sum_on_device(target);
        let sizes = std::iter::repeat_n(bytes, 1 + usize::from(sum.is_some())).collect();
        let reserved =
            runtime.reserve_all(target.local_index, to.memory_kind(), sizes, op, &*plan.what);

        let assembly = match (reserved, accelerator) {
            (Ok(reservation), Some(accelerator)) => {
                self.open_on_accelerator(target, accelerator, sum, reservation, resolver)
            }
            (Ok(reservation), None) if target.pieces.is_empty() => {
                self.fill_with_identity(reservation, resolver);
                None
            }
            (Ok(reservation), None) => {
                let shard = HostAssembly::new(
                    NewShard {
                        op,
                        region: target.region.clone(),
                        missing: target.pieces.clone(),
                        reservation,
                        resolver,
                        guard: guard.clone(),
                    },
                    runtime.clone(),
                    aval.dtype(),
                    target.in_parts && target.pieces != [1] && bytes > SMALL,
                    plan.is_small,
                );
                Some(Assembly::Host(shard))
            }
            (Err(failure), _) => {
                runtime.remember(&failure);
                resolver.keep(Err(failure));
                None
            }
        };
        OpenedShard { slot, assembly }
    }

    /// Returns a shard that shares the memory of host values. The memory counts against the
    /// device's limit, unless the device has these bytes already. If the limit is exceeded, the
    /// shard fails.
    fn hold(&self, target: &TargetShard, host: &HostArray) -> AsyncBuffer {
        let Self {
            plan,
            runtime,
            guard,
            ..
        } = *self;
        let kind = plan.what.to.memory_kind();
        let bytes = host.bytes();
        if bytes.is_counted_by(runtime.pool(target.local_index, kind)) {
            return AsyncBuffer::filled(bytes.clone());
        }

        let reserved = runtime.reserve(
            target.local_index,
            kind,
            bytes.len(),
            guard.op(),
            &*plan.what,
        );
        match reserved {
            Ok(reservation) => AsyncBuffer::filled(reservation.hold_for(bytes.clone())),
            Err(failure) => {
                runtime.remember(&failure);
                let (resolver, slot) = AsyncBuffer::new();
                resolver.keep(Err(failure));
                slot
            }
        }
    }

    /// Creates a shard in an accelerator's memory. Returns its assembly, which is in host memory if
    /// the host adds partial sums. Returns `None` if the shard gets no pieces or has failed.
    fn open_on_accelerator(
        &self,
        target: &TargetShard,
        accelerator: &Arc<Accelerator>,
        sum: Option<Addition>,
        reservation: Reservation,
        resolver: Resolver,
    ) -> Option<Assembly> {
        let Self {
            plan,
            runtime,
            guard,
            ..
        } = *self;
        let on_host = target.pieces.len() > 1 && sum.is_none();
        let missing = if on_host || target.pieces.is_empty() {
            vec![1]
        } else {
            target.pieces.clone()
        };
        let shard = DeviceAssembly::new(
            NewShard {
                op: guard.op(),
                region: target.region.clone(),
                missing,
                reservation,
                resolver,
                guard: guard.clone(),
            },
            runtime.clone(),
            accelerator.clone(),
            plan.item_bytes(),
            sum,
        );

        if target.pieces.is_empty() {
            shard.fill_with(plan.what.aval.dtype().sum_identity());
            return None;
        }
        if on_host {
            self.open_sum_on_host(target, shard)
        } else {
            Some(Assembly::Device(shard))
        }
    }

    /// Creates a host assembly that adds a shard's partial sums and then fills `shard` with the
    /// result. Returns `None` if there is no memory, which fails the shard.
    fn open_sum_on_host(
        &self,
        target: &TargetShard,
        shard: Arc<DeviceAssembly>,
    ) -> Option<Assembly> {
        let Self {
            plan,
            runtime,
            guard,
            ..
        } = *self;
        let op = guard.op();
        let region = &target.region;
        let bytes = region.elements() * plan.item_bytes();
        let reservation = match runtime.staging.reserve(bytes) {
            Ok(reservation) => reservation,
            Err(error) => {
                let failure = runtime.out_of_memory(op, &error);
                runtime.remember(&failure);
                shard.end(Err(failure));
                return None;
            }
        };

        let (resolver, sum) = AsyncBuffer::new();
        let host = HostAssembly::new(
            NewShard {
                op,
                region: region.clone(),
                missing: target.pieces.clone(),
                reservation,
                resolver,
                guard: guard.clone(),
            },
            runtime.clone(),
            plan.what.aval.dtype(),
            false,
            plan.is_small,
        );
        sum.on_end(move |outcome| match outcome {
            Ok(sum) => shard.fill(sum),
            Err(failure) => shard.end(Err(failure.clone())),
        });
        Some(Assembly::Host(host))
    }

    /// Queues the fill of a host shard that gets no pieces: it is an empty partial sum.
    fn fill_with_identity(&self, reservation: Reservation, resolver: Resolver) {
        let runtime = self.runtime.clone();
        let guard = self.guard.clone();
        let elements = self.plan.what.aval.dtype().sum_identity().repeat(64);
        self.runtime.move_data(Box::new(move || {
            let filled = reservation.allocate().map(|mut buffer| {
                for part in buffer.chunks_mut(elements.len()) {
                    part.copy_from_slice(&elements[..part.len()]);
                }
                buffer.freeze()
            });
            resolver.keep(filled.map_err(|error| runtime.out_of_memory(guard.op(), &error)));
            drop(guard);
        }));
    }

    /// Registers the copy of each region into the shards that contain it. A region from a peer is
    /// received even if no shard needs it any more, so that its sender does not wait. It is then
    /// forwarded to the transfer's peers. Does not wait for the regions. Pieces of a small move
    /// that are already here are copied now.
    pub(super) fn receive(&self) {
        let from_peer = |transfer: &RegionTransfer| match transfer.origin {
            PieceOrigin::Process(from) => Some(from),
            PieceOrigin::Device(_) | PieceOrigin::Host => None,
        };

        let transfers = &self.plan.transfers;
        let mut origins = transfers.iter().map(|transfer| from_peer(transfer));
        if origins.any(|from| from.is_some()) {
            self.runtime.with_router(|router| {
                for transfer in transfers {
                    if let Some(from) = from_peer(transfer) {
                        let shards = self.shards_of(transfer).collect();
                        let forward = self.send_of(transfer);
                        Receive {
                            from,
                            shards,
                            forward,
                        }
                        .begin(self.runtime, router);
                    }
                }
            });
        }
        transfers.iter().for_each(|transfer| self.copy(transfer));
    }

    /// Returns the assemblies of the shards that contain a region.
    fn shards_of(&self, transfer: &RegionTransfer) -> impl Iterator<Item = Assembly> {
        transfer
            .targets
            .iter()
            .filter_map(|at| self.shards[*at].clone())
    }

    /// Registers the copy of a region of this process's own values.
    fn copy(&self, transfer: &Arc<RegionTransfer>) {
        let shards = self.shards_of(transfer);
        let runtime = self.runtime;
        let guard = self.guard;
        match (transfer.origin, self.source) {
            (PieceOrigin::Process(_), _) => {}
            (PieceOrigin::Host, PutSource::Host(host)) => {
                for shard in shards {
                    shard.place(runtime, transfer, host.bytes().clone(), None, guard);
                }
            }
            (PieceOrigin::Host, PutSource::Shards(_)) => {}
            (PieceOrigin::Device(device), _) => {
                let Some(slot) = self.source.slot(device) else {
                    return;
                };

                // An accelerator's shard is taken once its work is issued; the copy is ordered
                // behind it. Other shards are taken once they are filled.
                let on_accelerator = runtime
                    .accelerator_of(device, kind_of(self.plan.what.from.as_ref()))
                    .is_some();
                for shard in shards {
                    let runtime = runtime.clone();
                    let transfer = transfer.clone();
                    let guard = guard.clone();
                    let source = on_accelerator.then(|| slot.clone());
                    let place = move |outcome: &Outcome| match outcome {
                        Ok(buffer) => {
                            shard.place(&runtime, &transfer, buffer.clone(), source, &guard)
                        }
                        Err(failure) => {
                            runtime.remember(failure);
                            shard.end(Err(failure.clone()));
                        }
                    };
                    if on_accelerator {
                        slot.on_issued(place);
                    } else {
                        slot.on_end(place);
                    }
                }
            }
        }
    }
}

/// Returns an async buffer that shares the memory of `source`, as soon as `source` has its buffer.
/// The operation stays in flight until `source` has ended.
fn alias(runtime: &Arc<Runtime>, guard: &OpGuard, source: Option<&AsyncBuffer>) -> AsyncBuffer {
    let (resolver, slot) = AsyncBuffer::new();
    if let Some(source) = source {
        follow(
            source,
            resolver,
            SharedBuffer::clone,
            Some(runtime.clone()),
            Some(guard.clone()),
        );
    }
    slot
}
