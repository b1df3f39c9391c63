//! This process's part of a `device_put`: which pieces it copies, sends and receives.
//!
//! There is one mechanism for every pair of shardings. The plan of the whole operation is the same
//! on every process; a [`PutPlan`] keeps what concerns this one. Local copy, send, receive, nothing and
//! every mix are what falls out.

use std::fmt;
use std::sync::Arc;

use mpmd_transport::memory::Reservation;
use mpmd_transport::router::Failure;
use mpmd_transport::{ProcessId, SharedBuffer};

use super::assembly::Assembly;
use super::{OpGuard, Outgoing, Runtime, Slot, Waiter};
use crate::array::LocalShard;
use crate::aval::{HostArray, ShapedArray};
use crate::region::Region;
use crate::reshard::{self, ReshardError, contiguous_bytes, copy_region};
use crate::sharding::{Layout, Sharding};
use crate::topology::DeviceId;

/// Copies from host values up to this size are made by the program thread itself: queueing would cost
/// more.
const COPY_INLINE: usize = 64 << 10;

/// What one process does for moving arrays of one shape from one sharding to another.
pub(crate) struct PutPlan {
    pub(crate) layout: Arc<Layout>,
    pub(crate) what: Arc<PutWhat>,
    pub(crate) fingerprint: u64,
    sends: Vec<SendPiece>,
    targets: Vec<Target>,
}

/// Describes a `device_put` in messages.
pub(crate) struct PutWhat {
    aval: ShapedArray,
    from: Option<Sharding>,
    to: Sharding,
}

struct SendPiece {
    piece: u64,
    source: DeviceId,
    source_region: Region,
    to: ProcessId,
    region: Region,
}

/// A shard that this process will own.
struct Target {
    device: DeviceId,
    local_index: usize,
    region: Region,
    pieces: Vec<TargetPiece>,
}

struct TargetPiece {
    region: Region,
    origin: Origin,
}

enum Origin {
    /// A device of this process, which holds this region.
    Here { device: DeviceId, holds: Region },
    /// A message.
    There { piece: u64, from: ProcessId },
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

impl PutPlan {
    /// Works out this process's part.
    ///
    /// # Errors
    ///
    /// Where the two layouts cannot be of one array.
    pub(crate) fn new(
        runtime: &Runtime,
        aval: &ShapedArray,
        from: Option<(&Sharding, &Layout)>,
        to: &Sharding,
        layout: Arc<Layout>,
    ) -> Result<Self, ReshardError> {
        let mut targets: Vec<Target> = layout
            .iter()
            .filter_map(|(device, region)| {
                let local_index = runtime.local_index(device)?;
                Some(Target { device, local_index, region: region.clone(), pieces: Vec::new() })
            })
            .collect();
        let mut sends = Vec::new();
        match from {
            None => {
                for target in &mut targets {
                    let region = target.region.clone();
                    target.pieces.push(TargetPiece { region, origin: Origin::Host });
                }
            }
            Some((_, source)) => {
                let plan = reshard::plan(source, &layout, &runtime.topology)?;
                for (piece, step) in plan.pieces.into_iter().enumerate() {
                    let piece = piece as u64;
                    let holds = source.region_of(step.src).cloned().unwrap_or_else(|| step.region.clone());
                    let sender = runtime.topology.process_of(step.src).unwrap_or(runtime.me);
                    let receiver = runtime.topology.process_of(step.dst).unwrap_or(runtime.me);
                    if receiver == runtime.me {
                        let origin = if sender == runtime.me {
                            Origin::Here { device: step.src, holds }
                        } else {
                            Origin::There { piece, from: sender }
                        };
                        if let Some(target) = targets.iter_mut().find(|target| target.device == step.dst) {
                            target.pieces.push(TargetPiece { region: step.region, origin });
                        }
                    } else if sender == runtime.me {
                        sends.push(SendPiece {
                            piece,
                            source: step.src,
                            source_region: holds,
                            to: receiver,
                            region: step.region,
                        });
                    }
                }
            }
        }
        let fingerprint = [
            from.map_or(1, |(sharding, _)| sharding.fingerprint()),
            to.fingerprint(),
            super::Rolling::default().mix_bytes(aval.to_string().as_bytes()).word(),
        ]
        .into_iter()
        .fold(super::Rolling::default(), super::Rolling::mix)
        .word();
        let what =
            PutWhat { aval: aval.clone(), from: from.map(|(sharding, _)| sharding.clone()), to: to.clone() };
        Ok(Self { layout, what: Arc::new(what), fingerprint, sends, targets })
    }

    /// Whether this process takes no part.
    pub(crate) fn is_idle(&self) -> bool {
        self.sends.is_empty() && self.targets.is_empty()
    }

    /// Bytes of new memory this process may need.
    pub(crate) fn bytes(&self) -> u64 {
        let item = self.what.aval.dtype().size();
        self.targets.iter().map(|target| (target.region.elements() * item) as u64).sum()
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
        for send in &self.sends {
            self.send(runtime, op, guard, send, source);
        }
        self.targets
            .iter()
            .map(|target| {
                let slot = self.fill(runtime, op, guard, target, source, may_alias);
                LocalShard { device: target.device, slot }
            })
            .collect()
    }

    fn send(&self, runtime: &Arc<Runtime>, op: u64, guard: &OpGuard, send: &SendPiece, source: &Source<'_>) {
        let Some(slot) = source.slot(send.source) else { return };
        let (runtime, guard) = (runtime.clone(), guard.clone());
        let (key, to) = ((op, send.piece), send.to);
        let (region, holds, item) = (send.region.clone(), send.source_region.clone(), self.item_bytes());
        slot.on_end(move |outcome| match outcome {
            Err(failure) => runtime.with_router(|router| router.poison(to, key, failure)),
            Ok(buffer) => match contiguous_bytes(&holds, &region, item) {
                Some(range) => {
                    let buffer = buffer.slice(range);
                    offer(&runtime, to, key, Outgoing { buffer, guard });
                }
                None => {
                    let buffer = buffer.clone();
                    let mover = runtime.clone();
                    mover.move_data(Box::new(move || {
                        let packed = pack(&runtime, op, &buffer, &holds, &region, item);
                        // Before the operation can end: whoever waits for memory looks then.
                        drop(buffer);
                        match packed {
                            Ok(packed) => offer(&runtime, to, key, Outgoing { buffer: packed, guard }),
                            Err(failure) => {
                                runtime.remember(&Arc::new(failure.clone()));
                                runtime.with_router(|router| router.poison(to, key, &failure));
                            }
                        }
                    }));
                }
            },
        });
    }

    fn fill(
        &self,
        runtime: &Arc<Runtime>,
        op: u64,
        guard: &OpGuard,
        target: &Target,
        source: &Source<'_>,
        may_alias: bool,
    ) -> Slot {
        let item = self.item_bytes();
        if target.pieces.is_empty() || target.region.is_empty() {
            return Slot::filled(Vec::new().into());
        }
        if let [TargetPiece { region, origin }] = &target.pieces[..]
            && may_alias
            && *region == target.region
        {
            match (origin, source) {
                (Origin::Here { device, holds }, _) if holds == region => {
                    return alias(runtime, guard, source.slot(*device));
                }
                (Origin::Host, Source::Host(host)) if region.elements() == host.aval().elements() => {
                    return Slot::filled(host.bytes().clone());
                }
                _ => {}
            }
        }
        let bytes = target.region.elements() * item;
        let (promise, slot) = Slot::new();
        let reservation = match runtime.reserve(target.local_index, bytes, op, &*self.what) {
            Ok(reservation) => reservation,
            Err(failure) => {
                runtime.remember(&failure);
                promise.keep(Err(failure));
                self.refuse(runtime, op, guard, target);
                return slot;
            }
        };
        match source {
            Source::Host(host) => self.fill_from_host(runtime, op, guard, target, host, reservation, promise),
            Source::Shards(_) => {
                let assembly = Assembly::new(
                    op,
                    target.region.clone(),
                    item,
                    target.pieces.len(),
                    reservation,
                    promise,
                    guard.clone(),
                );
                self.fill_from_pieces(runtime, op, guard, target, source, &assembly);
            }
        }
        slot
    }

    #[expect(clippy::too_many_arguments, reason = "one call site; the parts have no life of their own")]
    fn fill_from_host(
        &self,
        runtime: &Arc<Runtime>,
        op: u64,
        guard: &OpGuard,
        target: &Target,
        host: &HostArray,
        reservation: Reservation,
        promise: super::Promise,
    ) {
        let (region, item) = (target.region.clone(), self.item_bytes());
        let assembly = Assembly::new(op, region.clone(), item, 1, reservation, promise, guard.clone());
        let whole = Region::full(host.shape());
        let bytes = host.bytes().clone();
        let copy = move || assembly.add(&region, &bytes, &whole);
        if target.region.elements() * item <= COPY_INLINE {
            copy();
        } else {
            runtime.move_data(Box::new(copy));
        }
    }

    fn fill_from_pieces(
        &self,
        runtime: &Arc<Runtime>,
        op: u64,
        guard: &OpGuard,
        target: &Target,
        source: &Source<'_>,
        assembly: &Arc<Assembly>,
    ) {
        for TargetPiece { region, origin } in &target.pieces {
            match origin {
                Origin::Here { device, holds } => {
                    let Some(slot) = source.slot(*device) else { continue };
                    let (runtime, guard, assembly) = (runtime.clone(), guard.clone(), assembly.clone());
                    let (region, holds) = (region.clone(), holds.clone());
                    slot.on_end(move |outcome| match outcome {
                        Err(failure) => runtime.fail_shard(&assembly, failure.clone()),
                        Ok(buffer) => {
                            let buffer = buffer.clone();
                            runtime.move_data(Box::new(move || {
                                assembly.add(&region, &buffer, &holds);
                                drop(buffer);
                                // Only now: whoever waits for memory looks when the operation ends.
                                drop(guard);
                            }));
                        }
                    });
                }
                Origin::There { piece, from } => {
                    let bytes = (region.elements() * self.item_bytes()) as u64;
                    let waiter =
                        Waiter::Shard { assembly: assembly.clone(), region: region.clone(), from: *from };
                    let now = runtime.now();
                    runtime.with_router(|router| router.expect(*from, (op, *piece), bytes, waiter, now));
                }
                Origin::Host => {}
            }
        }
    }

    /// Takes the pieces of a shard that there is no room for, so that nobody waits to send them.
    fn refuse(&self, runtime: &Arc<Runtime>, op: u64, guard: &OpGuard, target: &Target) {
        for TargetPiece { region, origin } in &target.pieces {
            if let Origin::There { piece, from } = origin {
                let bytes = (region.elements() * self.item_bytes()) as u64;
                let now = runtime.now();
                runtime.with_router(|router| {
                    router.expect(*from, (op, *piece), bytes, Waiter::Nobody(guard.clone()), now);
                });
            }
        }
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

fn offer(runtime: &Arc<Runtime>, to: ProcessId, key: (u64, u64), outgoing: Outgoing) {
    let bytes = outgoing.buffer.len() as u64;
    runtime.with_router(|router| router.offer(to, key, bytes, outgoing));
}

fn pack(
    runtime: &Runtime,
    op: u64,
    from: &SharedBuffer,
    holds: &Region,
    region: &Region,
    item: usize,
) -> Result<SharedBuffer, Failure> {
    let bytes = region.elements() * item;
    let mut packed = runtime.staging.allocate(bytes).map_err(|error| {
        Failure::new(mpmd_transport::router::FailureKind::Memory, runtime.me, op, error.to_string())
    })?;
    copy_region(from, holds, &mut packed, region, region, item);
    Ok(packed.freeze())
}

/// A shard that is another one's memory.
fn alias(runtime: &Arc<Runtime>, guard: &OpGuard, source: Option<&Slot>) -> Slot {
    let (promise, slot) = Slot::new();
    if let Some(source) = source {
        let (runtime, guard) = (runtime.clone(), guard.clone());
        source.on_end(move |outcome| {
            if let Err(failure) = outcome {
                runtime.remember(failure);
            }
            promise.keep(outcome.clone());
            drop(guard);
        });
    }
    slot
}

impl fmt::Display for PutWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.from {
            Some(from) => write!(f, "device_put of {} from {from} to {}", self.aval, self.to),
            None => write!(f, "device_put of host values {} to {}", self.aval, self.to),
        }
    }
}
