//! Starts a `device_put`: sends this process's pieces, opens its new shards, and registers the
//! pieces that they wait for.

use std::sync::Arc;

use mpmd_device::accelerator::{Accelerator, Addition};
use mpmd_memory::Reservation;
use mpmd_memory::SharedBuffer;

use super::{PutPlan, PutWhat, SMALL, Source, kind_of};
use crate::exec::array::host_array::HostArray;
use crate::exec::moves::assembly::NewShard;
use crate::exec::moves::receive::Receive;
use crate::exec::moves::send::Send;
use crate::exec::moves::transfer::{Origin, Target, Transfer};
use crate::exec::{
    Assembly, AsyncBuffer, DeviceAssembly, HostAssembly, OpGuard, Outcome, Resolver, Runtime,
    follow,
};
use mpmd_layout::topology::DeviceId;

/// A `device_put` that is being started.
pub(super) struct Start<'a> {
    pub(super) plan: &'a PutPlan,
    pub(super) runtime: &'a Arc<Runtime>,
    pub(super) guard: &'a OpGuard,
    pub(super) source: &'a Source<'a>,
    /// Assembly of each target; `None` if the shard is not assembled from pieces.
    pub(super) shards: Vec<Option<Assembly>>,
}

impl Start<'_> {
    /// Registers the send of a region of a local shard to the peers that get it from this process.
    /// The send starts once the shard is filled, or in accelerator memory once it is issued.
    pub(super) fn send(&self, transfer: &Arc<Transfer>, device: DeviceId) {
        let Some(slot) = self.source.slot(device) else {
            return;
        };
        let send = self.send_of(transfer);
        if self
            .runtime
            .accelerator_of(device, kind_of(self.plan.what.from.as_ref()))
            .is_some()
        {
            send.begin_from_accelerator(self.runtime, slot);
        } else {
            send.begin(self.runtime, slot);
        }
    }

    fn send_of(&self, transfer: &Arc<Transfer>) -> Send {
        Send {
            transfer: transfer.clone(),
            guard: self.guard.clone(),
        }
    }

    /// Reserves the memory of a shard of this process. Returns (its async buffer, its assembly),
    /// and no assembly if the shard needs no pieces. If there is no memory, the shard fails.
    pub(super) fn open(&self, target: &Target, may_alias: bool) -> (AsyncBuffer, Option<Assembly>) {
        let Self {
            plan,
            runtime,
            guard,
            source,
            ..
        } = *self;
        let op = guard.op();
        if target.region.is_empty() {
            return (AsyncBuffer::filled(Vec::new().into()), None);
        }
        if may_alias {
            match (target.alias, source) {
                (Some(Origin::Device(device)), _) => {
                    return (alias(runtime, guard, source.slot(device)), None);
                }
                (Some(Origin::Host), Source::Host(host)) => return (self.hold(target, host), None),
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
        match (reserved, accelerator) {
            (Ok(reservation), Some(accelerator)) => (
                slot,
                self.open_on_accelerator(target, accelerator, sum, reservation, resolver),
            ),
            (Ok(reservation), None) if target.pieces.is_empty() => {
                self.zeros(reservation, resolver);
                (slot, None)
            }
            (Ok(reservation), None) => {
                let (region, missing) = (target.region.clone(), target.pieces.clone());
                let (dtype, guard) = (aval.dtype(), guard.clone());
                let shard = HostAssembly::new(
                    NewShard {
                        op,
                        region,
                        missing,
                        reservation,
                        resolver,
                        guard,
                    },
                    runtime.clone(),
                    dtype,
                    target.in_parts && target.pieces != [1] && bytes > SMALL,
                    plan.is_small,
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

    /// Returns a shard that shares the memory of host values. It counts as any shard of its device,
    /// unless the device has these bytes already: if there is no memory, it fails.
    fn hold(&self, target: &Target, host: &HostArray) -> AsyncBuffer {
        let Self {
            plan,
            runtime,
            guard,
            ..
        } = *self;
        let (kind, bytes) = (plan.what.to.memory_kind(), host.bytes());
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

    /// Opens a shard in an accelerator's memory. Returns its assembly, in host memory if the host
    /// adds its partial sums. `None` if it is filled with zeros or has failed.
    fn open_on_accelerator(
        &self,
        target: &Target,
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
        let op = guard.op();
        let (item, region) = (plan.item_bytes(), target.region.clone());
        let on_host = target.pieces.len() > 1 && sum.is_none();
        let missing = if on_host || target.pieces.is_empty() {
            vec![1]
        } else {
            target.pieces.clone()
        };
        let shard = DeviceAssembly::new(
            NewShard {
                op,
                region: region.clone(),
                missing,
                reservation,
                resolver,
                guard: guard.clone(),
            },
            runtime.clone(),
            accelerator.clone(),
            item,
            sum,
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

    /// Queues the filling with zeros of a host shard to which no piece contributes.
    fn zeros(&self, reservation: Reservation, resolver: Resolver) {
        let (runtime, guard) = (self.runtime.clone(), self.guard.clone());
        self.runtime.move_data(Box::new(move || {
            let zeros = reservation.allocate().map(|mut buffer| {
                buffer.fill(0);
                buffer.freeze()
            });
            resolver.keep(zeros.map_err(|error| runtime.out_of_memory(guard.op(), &error)));
            drop(guard);
        }));
    }

    /// Registers the copies of all regions into the shards that contain them. A region from a peer
    /// is received even if no shard needs it any more, so that its sender does not wait. It is then
    /// forwarded to the transfer's peers. Waits for none of this. The pieces of a small move that
    /// are there are copied now.
    pub(super) fn receive(&self) {
        let from_peer = |transfer: &Transfer| match transfer.origin {
            Origin::Process(from) => Some(from),
            Origin::Device(_) | Origin::Host => None,
        };
        let transfers = &self.plan.transfers;
        if transfers
            .iter()
            .any(|transfer| from_peer(transfer).is_some())
        {
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
    fn shards_of(&self, transfer: &Transfer) -> impl Iterator<Item = Assembly> {
        transfer
            .targets
            .iter()
            .filter_map(|at| self.shards[*at].clone())
    }

    /// Registers the copy of a region of this process's own values.
    fn copy(&self, transfer: &Arc<Transfer>) {
        let shards = self.shards_of(transfer);
        let (runtime, guard) = (self.runtime, self.guard);
        match (transfer.origin, self.source) {
            (Origin::Process(_), _) => {}
            (Origin::Host, Source::Host(host)) => {
                for shard in shards {
                    shard.place(runtime, transfer, host.bytes().clone(), None, guard);
                }
            }
            (Origin::Host, Source::Shards(_)) => {}
            (Origin::Device(device), _) => {
                let Some(slot) = self.source.slot(device) else {
                    return;
                };
                // An accelerator's shard is taken once its work is issued; the copy is ordered
                // behind it. Other shards are taken once they are filled.
                let on_accelerator = runtime
                    .accelerator_of(device, kind_of(self.plan.what.from.as_ref()))
                    .is_some();
                for shard in shards {
                    let (runtime, transfer, guard) =
                        (runtime.clone(), transfer.clone(), guard.clone());
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

/// Returns an async buffer that shares the memory of `source`, once that has its buffer. The
/// operation stays in flight until `source` has ended.
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
