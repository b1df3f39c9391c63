//! This process's part of a `device_put`: which pieces it copies, sends and receives.
//!
//! There is one mechanism for every pair of shardings. The plan of the whole operation is the same
//! on every process; a [`PutPlan`] keeps what concerns this one. Local copy, send, receive, nothing and
//! every mix are what falls out.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Once};

use mpmd_transport::memory::Reservation;
use mpmd_transport::router::{Failure, FailureKind};
use mpmd_transport::{ProcessId, SharedBuffer};

use super::assembly::Sum;
use super::{
    Assembly, DeviceAssembly, HostAssembly, OpGuard, Outcome, Passage, Promise, Runtime, Slot, Waiter, follow,
};
use crate::array::{LocalShard, Made};
use crate::aval::{HostArray, ShapedArray};
use crate::backend::cuda::kernels::ADD;
use crate::backend::cuda::{Gpu, WarmUp};
use crate::program::KnownForm;
use crate::region::Region;
use crate::reshard::{self, Delivery, ReshardError, contiguous_bytes};
use crate::sharding::{Layout, MemoryKind, Sharding};
use crate::topology::DeviceId;
use crate::trace::PieceStep;

/// Copies from host values up to this size are made by the program thread itself: queueing would cost
/// more.
pub(super) const COPY_INLINE: usize = 64 << 10;

/// Smaller shards are put together by one mover: waking another would cost more than it does.
const WRITTEN_IN_PARTS: usize = 1 << 20;

/// What one process does for moving arrays of one shape from one sharding to another.
pub(crate) struct PutPlan {
    pub(crate) made: Arc<Made>,
    pub(crate) what: Arc<PutWhat>,
    pub(crate) fingerprint: u64,
    targets: Vec<Target>,
    /// In the order in which they are set going.
    transfers: Vec<Arc<Transfer>>,
    /// New memory this process may need.
    bytes: u64,
    /// What it is in a plan: without and with memory that may be shared.
    pub(crate) known_forms: [KnownForm; 2],
    /// What adds up partial sums, by CUDA device of this process that is to.
    warm_ups: Vec<(DeviceId, WarmUp)>,
}

/// Describes a `device_put` in messages.
pub(crate) struct PutWhat {
    pub(super) aval: ShapedArray,
    pub(super) from: Option<Sharding>,
    pub(super) to: Sharding,
}

/// A shard that this process will own.
struct Target {
    device: DeviceId,
    local_index: usize,
    region: Region,
    /// How many transfers bring a piece of it, by partial sum of the source. Of none where it is empty, or
    /// one of the destination's partial sums that are zero.
    pieces: Vec<usize>,
    /// Whether each of them is one run of the shard's bytes.
    in_parts: bool,
    /// What it may share memory with.
    alias: Option<Origin>,
}

/// One region: where this process has it from, and where it goes.
#[derive(Clone)]
pub(super) struct Transfer {
    /// Its number in messages.
    pub(super) id: u64,
    /// Which of the source's partial sums it is of.
    pub(super) term: usize,
    /// Never empty.
    pub(super) region: Region,
    /// What the bytes that come are of: all that the origin has, or the region alone. Another process sends
    /// all of its shard where it hands that over and the region is no run of it: the bytes are taken from
    /// their place then, and nobody packs them.
    pub(super) holds: Region,
    /// Where the region's bytes are one run of those.
    run: Option<Range<usize>>,
    /// Bytes of the region.
    pub(super) bytes: usize,
    origin: Origin,
    /// Places among the plan's targets.
    targets: Vec<usize>,
    /// The processes that get it from this one.
    pub(super) peers: Vec<ProcessId>,
}

#[derive(Clone, Copy)]
enum Origin {
    /// A device of this process.
    Device(DeviceId),
    /// A message.
    Process(ProcessId),
    /// The host values that every process has.
    Host,
}

/// Where the values are.
pub(crate) enum Source<'a> {
    /// The same values on every process.
    Host(&'a HostArray),
    /// On devices; these are the shards that this process owns.
    Shards(&'a [LocalShard]),
}

/// An operation being set going.
struct Start<'a> {
    plan: &'a PutPlan,
    runtime: &'a Arc<Runtime>,
    op: u64,
    guard: &'a OpGuard,
    source: &'a Source<'a>,
    /// By target; `None` where there is nothing to put together.
    shards: Vec<Option<Assembly>>,
}

impl PutPlan {
    /// Works out this process's part.
    ///
    /// # Errors
    ///
    /// Where the two layouts cannot be of one array.
    pub(crate) fn new(
        runtime: &Arc<Runtime>,
        aval: &ShapedArray,
        from: Option<(&Sharding, &Layout)>,
        to: &Sharding,
        layout: Arc<Layout>,
    ) -> Result<Self, ReshardError> {
        let mut targets: Vec<Target> = layout
            .iter()
            .filter_map(|(device, region)| {
                let local_index = runtime.local_index(device)?;
                Some(Target {
                    device,
                    local_index,
                    region: region.clone(),
                    pieces: Vec::new(),
                    in_parts: true,
                    alias: None,
                })
            })
            .collect();
        let item = aval.dtype().size();
        let mut transfers = match from {
            None => from_host(&targets, &layout, aval),
            // Each partial sum stays what it is.
            Some((_, source)) if source.terms() > 1 && *source == *layout => in_place(&targets, item),
            Some((_, source)) => {
                let part = reshard::plan(source, &layout, item, &runtime.topology)?.part_of(runtime.me);
                let deliveries = part.deliveries.into_iter();
                let kind = kind_of(from.map(|(from, _)| from));
                let transfer = |delivery| Transfer::new(runtime, delivery, (source, kind), &targets, item);
                deliveries.map(transfer).collect()
            }
        };
        let processes = runtime.topology.processes();
        // Every process starts with the one after it, so that not all of them send to one at a time.
        let distance =
            |peer: &ProcessId| (peer.index() + processes - runtime.me.index() % processes) % processes;
        for transfer in &mut transfers {
            // What is passed on comes in the order that the plan wants.
            if !matches!(transfer.origin, Origin::Process(_)) {
                transfer.peers.sort_by_key(distance);
            }
        }
        transfers.sort_by_key(|transfer| (transfer.peers.first().map_or(usize::MAX, distance), transfer.id));
        let (kind, to_kind) = (kind_of(from.map(|(from, _)| from)), to.memory_kind());
        let one_memory = from.is_none() || kind == to_kind;
        let mut bytes: usize = targets.iter().map(|target| target.region.elements() * item).sum();
        for transfer in &transfers {
            // What is passed on, or packed, waits in a buffer of its own for those who get it, unless it is
            // handed over.
            let mut places = transfer.targets.iter().map(|at| targets[*at].device);
            let kept = match transfer.origin {
                Origin::Process(from) => {
                    let in_place = runtime.hands_over(from) && transfer.is_by_itself();
                    let to_gpu = places.any(|device| runtime.gpu_of(device, to_kind).is_some());
                    (!transfer.peers.is_empty() || to_gpu) && !in_place
                }
                Origin::Device(device) => {
                    let on_gpu = runtime.gpu_of(device, kind).is_some();
                    transfer.peers.iter().any(|peer| {
                        let lends = runtime.lends(device, kind, *peer);
                        (transfer.run.is_none() && !lends)
                            || (on_gpu && !runtime.carries_device_memory(*peer))
                    })
                }
                Origin::Host => false,
            };
            if kept {
                bytes += transfer.bytes;
            }
            for at in &transfer.targets {
                let target = &mut targets[*at];
                if target.pieces.len() <= transfer.term {
                    target.pieces.resize(transfer.term + 1, 0);
                }
                target.pieces[transfer.term] += 1;
                // Partial sums are added to what is there already.
                target.in_parts &=
                    transfer.term == 0 && contiguous_bytes(&target.region, &transfer.region, item).is_some();
                let whole = target.pieces == [1] && target.region == transfer.region;
                let here = !matches!(transfer.origin, Origin::Process(_));
                // A CUDA device has nobody's memory but its own, and nobody has it.
                let apart = match transfer.origin {
                    Origin::Device(from) if from == target.device => false,
                    Origin::Device(from) => {
                        runtime.is_on_gpu(from, kind) || runtime.is_on_gpu(target.device, to_kind)
                    }
                    Origin::Host => runtime.is_on_gpu(target.device, to_kind),
                    Origin::Process(_) => true,
                };
                let same = whole && transfer.is_by_itself() && here && one_memory && !apart;
                target.alias = same.then_some(transfer.origin);
            }
        }
        let fingerprint = [
            from.map_or(1, |(sharding, _)| sharding.fingerprint()),
            to.fingerprint(),
            // Processes that see different links make different plans: they must hear of it, not hang.
            runtime.topology_fingerprint,
            super::Rolling::default().mix_bytes(aval.to_string().as_bytes()).word(),
        ]
        .into_iter()
        .fold(super::Rolling::default(), super::Rolling::mix)
        .word();
        let from = from.map(|(sharding, _)| sharding.clone());
        let what = Arc::new(PutWhat { aval: aval.clone(), from, to: to.clone() });
        let made = Made {
            aval: aval.clone(),
            sharding: to.clone(),
            layout,
            what: what.clone(),
            runtime: runtime.clone(),
        };
        let transfers = transfers.into_iter().map(Arc::new).collect();
        let known_forms = Default::default();
        let adds = |target: &&Target| target.pieces.len() > 1 && Sum::of(aval.dtype()).is_some();
        let warm_ups: Vec<_> = targets
            .iter()
            .filter(adds)
            .filter_map(|target| {
                let gpu = runtime.gpu_of(target.device, to_kind)?;
                let pool = &runtime.devices[target.local_index].pool;
                bytes += target.region.elements() * item;
                Some((target.device, gpu.warm_up(pool, vec![&ADD])))
            })
            .collect();
        Ok(Self {
            made: Arc::new(made),
            what,
            fingerprint,
            targets,
            transfers,
            bytes: bytes as u64,
            known_forms,
            warm_ups,
        })
    }

    /// Whether this process takes no part.
    pub(crate) fn is_idle(&self) -> bool {
        self.transfers.is_empty() && self.targets.is_empty()
    }

    /// Bytes of new memory this process may need.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Does this process's part of operation `op`: returns the shards it will own.
    ///
    /// With `may_alias` a shard may be another array's memory: arrays never change.
    pub(crate) fn run(
        &self,
        runtime: &Arc<Runtime>,
        op: u64,
        guard: &OpGuard,
        source: &Source<'_>,
        may_alias: bool,
    ) -> Vec<LocalShard> {
        let mut start = Start { plan: self, runtime, op, guard, source, shards: Vec::new() };
        // What others wait for first: making room below may take a while.
        for transfer in self.transfers.iter().filter(|transfer| !transfer.peers.is_empty()) {
            if let Origin::Device(device) = transfer.origin {
                start.send(transfer, device);
            }
        }
        let mut result = Vec::with_capacity(self.targets.len());
        for target in &self.targets {
            let (slot, shard) = start.open(target, may_alias);
            start.shards.push(shard);
            result.push(LocalShard { device: target.device, slot });
        }
        for transfer in &self.transfers {
            start.receive(transfer);
        }
        result
    }
}

/// Each device copies its part of values that every process has.
fn from_host(targets: &[Target], layout: &Layout, aval: &ShapedArray) -> Vec<Transfer> {
    let whole = Region::full(aval.shape());
    let term = |device| layout.place_of(device).map_or(0, |place| layout.term_of(place));
    let targets = targets.iter().enumerate().filter(|(_, target)| term(target.device) == 0);
    let targets = targets.filter(|(_, target)| !target.region.is_empty());
    let transfer = |(at, target): (usize, &Target)| {
        Transfer::local(at, target, Origin::Host, whole.clone(), aval.dtype().size())
    };
    targets.map(transfer).collect()
}

/// Each device keeps what it has.
fn in_place(targets: &[Target], item: usize) -> Vec<Transfer> {
    let targets = targets.iter().enumerate().filter(|(_, target)| !target.region.is_empty());
    let transfer = |(at, target): (usize, &Target)| {
        Transfer::local(at, target, Origin::Device(target.device), target.region.clone(), item)
    };
    targets.map(transfer).collect()
}

impl Transfer {
    /// The whole of a shard of this process, from bytes here that are of `holds`.
    fn local(at: usize, target: &Target, origin: Origin, holds: Region, item: usize) -> Self {
        Self {
            id: 0,
            term: 0,
            region: target.region.clone(),
            holds,
            run: None,
            bytes: target.region.elements() * item,
            origin,
            targets: vec![at],
            peers: Vec::new(),
        }
    }

    fn new(
        runtime: &Runtime,
        delivery: Delivery,
        (source, kind): (&Layout, MemoryKind),
        targets: &[Target],
        item: usize,
    ) -> Self {
        let Delivery { id, term, region, from, giver, targets: devices, peers } = delivery;
        let shard = giver.and_then(|device| source.region_of(device));
        let (origin, holds) = match from {
            reshard::Origin::Device(device) => (Origin::Device(device), shard),
            reshard::Origin::Process(process) => {
                // As the giver finds it: what is a run of its shard is sent by itself.
                let strided = |shard: &&Region| contiguous_bytes(shard, &region, item).is_none();
                let lent = giver.is_some_and(|device| runtime.lends(device, kind, process));
                (Origin::Process(process), shard.filter(|_| lent).filter(strided))
            }
        };
        let holds = holds.unwrap_or(&region).clone();
        let place = |device| targets.iter().position(|target| target.device == device);
        Self {
            id,
            term: term as usize,
            run: contiguous_bytes(&holds, &region, item),
            bytes: region.elements() * item,
            region,
            holds,
            origin,
            targets: devices.into_iter().filter_map(place).collect(),
            peers,
        }
    }

    /// Whether the bytes that come are the region alone.
    pub(super) fn is_by_itself(&self) -> bool {
        self.holds == self.region
    }

    /// The same, from bytes that are of the region alone.
    pub(super) fn alone(self: &Arc<Self>) -> Arc<Self> {
        if self.is_by_itself() {
            return self.clone();
        }
        Arc::new(Self { holds: self.region.clone(), run: Some(0..self.bytes), ..Self::clone(self) })
    }

    /// Bytes of an element.
    pub(super) fn item_bytes(&self) -> usize {
        self.bytes / self.region.elements()
    }
}

impl Start<'_> {
    /// Sends what a device of this process has to the processes that get it from here.
    fn send(&self, transfer: &Arc<Transfer>, device: DeviceId) {
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
                // Who is handed the shard takes the region from it, the others get it packed.
                let hands_over = |peer: &ProcessId| runtime.hands_over(*peer);
                let (takers, others): (Vec<_>, Vec<_>) = transfer.peers.iter().copied().partition(hands_over);
                runtime.send_to_peers(op, &transfer, &takers, buffer.clone(), &guard);
                if !others.is_empty() {
                    runtime.send_packed(op, transfer, others, buffer.clone(), None, guard);
                }
            }
        });
    }

    /// As [`send`](Self::send), from a CUDA device's memory: to who takes that as it is, also before it is made; to the others from a
    /// copy that begins as soon as the device can.
    fn send_from_gpu(&self, transfer: &Arc<Transfer>, slot: &Slot) {
        let carried = |peer: &ProcessId| self.runtime.carries_device_memory(*peer);
        let (takers, others): (Vec<_>, Vec<_>) = transfer.peers.iter().copied().partition(carried);
        if !takers.is_empty() {
            let (runtime, op, guard) = (self.runtime.clone(), self.op, self.guard.clone());
            let transfer = transfer.clone();
            slot.on_issued(move |outcome| match outcome {
                Err(failure) => runtime.poison_peers(op, &transfer, &takers, failure),
                Ok(buffer) => {
                    let bytes = transfer.run.clone().map_or_else(|| buffer.clone(), |run| buffer.slice(run));
                    runtime.send_to_peers(op, &transfer, &takers, bytes, &guard);
                }
            });
        }
        if !others.is_empty() {
            let (runtime, op, guard) = (self.runtime.clone(), self.op, self.guard.clone());
            let (transfer, source) = (transfer.clone(), slot.clone());
            slot.on_issued(move |outcome| match outcome {
                Err(failure) => runtime.poison_peers(op, &transfer, &others, failure),
                Ok(buffer) => runtime.send_packed(op, transfer, others, buffer.clone(), Some(source), guard),
            });
        }
    }

    /// A shard of this process, and where its pieces go, if it is put together from any.
    fn open(&self, target: &Target, may_alias: bool) -> (Slot, Option<Assembly>) {
        let Self { plan, runtime, op, guard, source, .. } = *self;
        if target.region.is_empty() {
            return (Slot::filled(Vec::new().into()), None);
        }
        if may_alias {
            match (target.alias, source) {
                (Some(Origin::Device(device)), _) => {
                    return (alias(runtime, guard, source.slot(device)), None);
                }
                (Some(Origin::Host), Source::Host(host)) => {
                    return (Slot::filled(host.bytes().clone()), None);
                }
                _ => {}
            }
        }
        let PutWhat { aval, to, .. } = &*plan.what;
        let (promise, slot) = Slot::new();
        let bytes = target.region.elements() * plan.item_bytes();
        let gpu = runtime.gpu_of(target.device, to.memory_kind());
        // Partial sums that a device adds up are put beside the shard first.
        let sum = plan.sum_on_device(target);
        let sizes = std::iter::repeat_n(bytes, 1 + usize::from(sum.is_some()));
        match runtime.reserve_all(target.local_index, to.memory_kind(), sizes, op, &*plan.what) {
            Ok(reservation) if let Some(gpu) = gpu => {
                (slot, self.open_on_gpu(target, gpu, sum, reservation, promise))
            }
            Ok(reservation) if target.pieces.is_empty() => {
                self.zeros(reservation, promise);
                (slot, None)
            }
            Ok(reservation) => {
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
                    promise,
                    guard,
                );
                (slot, Some(Assembly::Host(shard)))
            }
            Err(failure) => {
                runtime.remember(&failure);
                promise.keep(Err(failure));
                (slot, None)
            }
        }
    }

    /// A shard in a CUDA device's memory.
    fn open_on_gpu(
        &self,
        target: &Target,
        gpu: &Arc<Gpu>,
        sum: Option<Sum>,
        reservation: Reservation,
        promise: Promise,
    ) -> Option<Assembly> {
        let Self { plan, runtime, op, guard, .. } = *self;
        let (item, region) = (plan.item_bytes(), target.region.clone());
        let on_host = target.pieces.len() > 1 && sum.is_none();
        let missing = if on_host || target.pieces.is_empty() { vec![1] } else { target.pieces.clone() };
        let shard = DeviceAssembly::new(
            runtime.clone(),
            gpu.clone(),
            op,
            region.clone(),
            item,
            missing,
            sum,
            reservation,
            promise,
            guard.clone(),
        );
        if target.pieces.is_empty() {
            shard.zero();
            return None;
        }
        if !on_host {
            return Some(Assembly::Device(shard));
        }
        // They are added up in the host's memory then, and copied.
        let reservation = match runtime.staging.reserve(region.elements() * item) {
            Ok(reservation) => reservation,
            Err(error) => {
                let failure = runtime.out_of_memory(op, &error.to_string());
                runtime.remember(&failure);
                shard.end(Err(failure));
                return None;
            }
        };
        let (promise, sum) = Slot::new();
        let host = HostAssembly::new(
            runtime.me,
            op,
            region.clone(),
            plan.what.aval.dtype(),
            target.pieces.clone(),
            false,
            reservation,
            promise,
            guard.clone(),
        );
        sum.on_end(move |outcome| match outcome {
            Ok(sum) => shard.fill(sum),
            Err(failure) => shard.end(Err(failure.clone())),
        });
        Some(Assembly::Host(host))
    }

    /// A shard that is a partial sum of nothing.
    fn zeros(&self, reservation: Reservation, promise: Promise) {
        let (me, op, guard) = (self.runtime.me, self.op, self.guard.clone());
        self.runtime.move_data(Box::new(move || {
            let zeros = reservation.allocate().map(|mut buffer| {
                buffer.fill(0);
                buffer.freeze()
            });
            promise.keep(zeros.map_err(|error| {
                let message = format!("operation {op}: {error}");
                Arc::new(Failure::new(FailureKind::Memory, me, op, message))
            }));
            drop(guard);
        }));
    }

    /// Has a region put into the shards that it is a piece of; where it comes from a peer, it is taken
    /// also where none is left, so that nobody waits to send it, and passed on.
    fn receive(&self, transfer: &Arc<Transfer>) {
        let shards = transfer.targets.iter().filter_map(|at| self.shards[*at].clone());
        let (runtime, op, guard) = (self.runtime, self.op, self.guard);
        match (transfer.origin, self.source) {
            (Origin::Process(from), _) => {
                let shards: Vec<_> = shards.collect();
                let guard = guard.clone();
                let waiter = if shards.is_empty() && transfer.peers.is_empty() {
                    Waiter::Nobody(guard)
                } else {
                    Waiter::Piece(Box::new(Passage { op, from, transfer: transfer.clone(), shards, guard }))
                };
                let bytes = transfer.holds.elements() * transfer.item_bytes();
                let (key, bytes, now) = ((op, transfer.id), bytes as u64, runtime.now());
                runtime.trace_piece(PieceStep::Expected, key, from, transfer.bytes as u64);
                runtime.with_router(|router| router.expect(from, key, bytes, waiter, now));
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
                // Devices take what is issued, and copy when it is there; others take what is there.
                let on_gpu = runtime.gpu_of(device, kind_of(self.plan.what.from.as_ref())).is_some();
                for shard in shards {
                    let (runtime, transfer, guard) = (runtime.clone(), transfer.clone(), guard.clone());
                    let source = on_gpu.then(|| slot.clone());
                    let place = move |outcome: &Outcome| match outcome {
                        Ok(buffer) => shard.place(&runtime, &transfer, buffer.clone(), source, &guard),
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

impl PutPlan {
    /// How a CUDA device adds the partial sums of a shard, where there are several and it can. Waits until what it takes is
    /// compiled, the first time.
    fn sum_on_device(&self, target: &Target) -> Option<Sum> {
        if target.pieces.len() < 2 {
            return None;
        }
        let (_, ready) = self.warm_ups.iter().find(|(device, _)| *device == target.device)?;
        let sum = Sum::of(self.what.aval.dtype())?;
        let ready = ready.wait().inspect_err(|error| {
            static SAID: Once = Once::new();
            SAID.call_once(
                || tracing::warn!(%error, "partial sums of CUDA devices are added up by the host"),
            );
        });
        ready.ok().map(|()| sum)
    }

    fn item_bytes(&self) -> usize {
        self.what.aval.dtype().size()
    }
}

impl Source<'_> {
    fn slot(&self, device: DeviceId) -> Option<&Slot> {
        match self {
            Source::Host(_) => None,
            Source::Shards(shards) => {
                shards.iter().find(|shard| shard.device == device).map(|shard| &shard.slot)
            }
        }
    }
}

/// A shard that is another one's memory.
fn alias(runtime: &Arc<Runtime>, guard: &OpGuard, source: Option<&Slot>) -> Slot {
    let (promise, slot) = Slot::new();
    if let Some(source) = source {
        follow(source, promise, SharedBuffer::clone, Some(runtime.clone()), Some(guard.clone()));
    }
    slot
}

/// In which memory of its devices the source is. Host values are in none.
fn kind_of(from: Option<&Sharding>) -> MemoryKind {
    from.map_or_else(MemoryKind::default, Sharding::memory_kind)
}

impl fmt::Display for PutWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.from {
            Some(from) => write!(f, "device_put of {} from {from} to {}", self.aval, self.to),
            None => write!(f, "device_put of host values {} to {}", self.aval, self.to),
        }
    }
}

#[cfg(test)]
mod tests {
    use mpmd_transport::ProcessId;

    use crate::Simulation;
    use crate::prelude::*;
    use crate::sharding::Sharding;
    use crate::topology::DeviceId;

    #[test]
    fn what_is_packed_counts_as_memory_and_what_is_sent_from_its_place_does_not() {
        let results = Simulation::new(2, 2).run(|p| {
            let mesh = p.mesh(&[("x", 2)])?;
            let (rows, columns) = (mesh.sharding(spec!["x"]), mesh.sharding(spec![None, "x"]));
            let x = p.make(f32s([8, 8]), &rows, |_, mut view| Ok(view.fill(1.0f32)?))?;
            let mut bytes = |to| p.put_plan("", &x, to, false).map(|plan| plan.bytes()).expect("it fits");
            // A shard of 32 elements; of those that go to the other process 16 are no run of theirs.
            let found = (bytes(&columns), bytes(&mesh.replicated()));
            Ok(found)
        });
        for result in results {
            assert_eq!(result.unwrap(), (4 * (32 + 16), 4 * 64));
        }
    }

    /// Rows become columns, so that no piece is a run of its shard: peak bytes of what was packed or copied
    /// on the way, and the bytes that the plan counts, by process.
    fn staged(simulation: &Simulation) -> Vec<(u64, u64)> {
        let results = simulation.run(|p| {
            let mesh = p.mesh(&[("x", p.processes())])?;
            let (rows, columns) = (mesh.sharding(spec!["x"]), mesh.sharding(spec![None, "x"]));
            let x = p.make(f32s([12, 24]), &rows, |region, mut view| {
                let (rows, columns) = (region.range(0), region.range(1));
                let values = rows.flat_map(|i| columns.clone().map(move |j| (i * 24 + j) as f32));
                view.as_mut_slice::<f32>()?.iter_mut().zip(values).for_each(|(to, value)| *to = value);
                Ok(())
            })?;
            let bytes = p.put_plan("", &x, &columns, false).map(|plan| plan.bytes()).expect("it fits");
            let y = p.device_put(&x, &columns)?;
            for shard in y.addressable_shards()? {
                let columns = shard.region.range(1);
                let values = (0..12).flat_map(|i| columns.clone().map(move |j| (i * 24 + j) as f32));
                assert_eq!(shard.data.to_vec::<f32>()?, values.collect::<Vec<_>>());
                assert!(!shard.data.bytes().is_lent());
            }
            // Nobody looks before everybody has sent.
            for process in 0..p.processes() as u32 {
                p.agree(ProcessId(process), 0u8, || Ok(0))?;
            }
            Ok((p.runtime.staging.stats().peak, bytes))
        });
        results.into_iter().map(Result::unwrap).collect()
    }

    #[test]
    fn what_is_handed_over_is_never_packed() {
        let packing = staged(&Simulation::new(2, 2));
        assert!(packing.iter().all(|(peak, bytes)| *peak > 0 && *bytes == 4 * (12 * 12 + 6 * 12)));
        let shared = staged(&Simulation::new(2, 2).hands_over(&[0, 0]));
        assert_eq!(shared, [(0, 4 * 12 * 12); 2]);
        // Of three only two share memory: both of them pack for the third.
        let mixed = staged(&Simulation::new(3, 3).hands_over(&[5, 5]));
        assert!(mixed.iter().all(|(peak, bytes)| *peak > 0 && *bytes > 4 * 12 * 8), "{mixed:?}");
        // Whole shards of others, and parts of them.
        let four = staged(&Simulation::new(4, 4).hands_over(&[1; 4]));
        assert_eq!(four, [(0, 4 * 12 * 6); 4]);
    }

    /// Parts that are no runs go to a host of two processes: each is handed the shard for one of them, and packs
    /// what it passes on, as the other counts on the region alone.
    #[test]
    fn who_passes_a_part_of_a_shard_on_packs_it() {
        let simulation = Simulation::new(3, 6).hands_over(&[0, 0, 0]).settings(|b| b.hosts(&[0, 1, 1]));
        let results = simulation.run(|p| {
            let x = p.make(f32s([8, 8]), &Sharding::single_device(DeviceId(0)), |_, mut view| {
                let values = view.as_mut_slice::<f32>()?.iter_mut().enumerate();
                values.for_each(|(i, value)| *value = i as f32);
                Ok(())
            })?;
            let mesh = p.mesh_of(&[("copies", 2), ("x", 2)], &[2, 3, 4, 5].map(DeviceId))?;
            let y = p.device_put(&x, mesh.sharding(spec![None, "x"]))?;
            let shards = if y.is_fully_remote() { Vec::new() } else { y.addressable_shards()? };
            for shard in shards {
                let columns = shard.region.range(1);
                let values = (0..8).flat_map(|i| columns.clone().map(move |j| (i * 8 + j) as f32));
                assert_eq!(shard.data.to_vec::<f32>()?, values.collect::<Vec<_>>());
            }
            for process in 0..3 {
                p.agree(ProcessId(process), 0u8, || Ok(0))?;
            }
            Ok(p.runtime.staging.stats().peak)
        });
        let peaks: Vec<u64> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(peaks[0], 0, "the giver packs nothing");
        assert_eq!(peaks[1] + peaks[2], 2 * 8 * 4 * 4, "each half once");
    }
}
