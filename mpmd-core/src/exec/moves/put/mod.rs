//! This process's part of a `device_put`: the pieces that it copies, sends and receives.
//!
//! One mechanism serves every pair of shardings. The plan of the whole operation is the same on
//! every process; a [`PutPlan`] keeps this process's part. That part may be local copies, sends,
//! receives, any mix of them, or nothing.

mod alias;
mod start;

use std::fmt;
use std::sync::{Arc, Once};

use mpmd_base::ProcessId;
use mpmd_device::accelerator::{Addition, DeviceError};
use mpmd_device::copy::contiguous_bytes;

use crate::exec::moves::transfer::{
    PieceOrigin, RegionTransfer, SourceLayout, TargetShard, from_host, in_place,
};
pub(crate) use alias::{OnlyPiece, ShardPlace};
use start::PutStart;

use crate::exec::array::host_array::HostArray;
use crate::exec::array::{LocalShard, Made};
use crate::exec::dry_run::KnownDescriptor;
use crate::exec::{AsyncBuffer, OpGuard, Rolling, Runtime};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::reshard::{self, ReshardError};
use mpmd_layout::sharding::{Layout, MemoryKind, Sharding};
use mpmd_layout::topology::DeviceId;

/// Maximum number of bytes that a process copies in a small move. The threads that receive the
/// pieces of a small move copy them, because waking a copy worker would take longer. Larger shards
/// are written by several copy workers at the same time.
const SMALL: usize = 1 << 20;

/// One process's part in moving arrays of one shape from one sharding to another.
pub(crate) struct PutPlan {
    pub(crate) made: Arc<Made>,
    pub(crate) what: Arc<PutWhat>,
    pub(crate) fingerprint: u64,
    targets: Vec<TargetShard>,
    /// Regions that move to, from or through this process, in the order in which they are started.
    transfers: Vec<Arc<RegionTransfer>>,
    /// Number of pieces that this process sends or forwards to peers.
    sends: usize,
    /// Bytes of new memory that this process may need for the move.
    bytes: u64,
    /// True if this process copies at most [`SMALL`] bytes.
    is_small: bool,
    /// Cached indices of the move's descriptors in a dry run: without and with memory shared with
    /// the source.
    pub(crate) known_descriptors: [KnownDescriptor; 2],
    /// The compiled functions that add partial sums, for the accelerators that need one.
    sums: Vec<DeviceSum>,
}

/// A compiled addition of partial sums on an accelerator.
struct DeviceSum {
    device: DeviceId,
    /// Size in bytes of the second buffer, which holds the partial sum to be added.
    bytes: usize,
    /// The result of the compilation.
    ready: Result<(), DeviceError>,
}

/// The memory kinds of the source and the target of a move.
#[derive(Clone, Copy)]
struct MoveKinds {
    from: MemoryKind,
    to: MemoryKind,
}

/// The description of a `device_put` in messages.
pub(crate) struct PutWhat {
    pub(crate) aval: ShapedArray,
    pub(crate) from: Option<Sharding>,
    pub(crate) to: Sharding,
}

/// The source of a `device_put`.
pub(crate) enum PutSource<'a> {
    /// Host values, the same on every process.
    Host(&'a HostArray),
    /// This process's shards of a source array on devices. Empty if it owns none.
    Shards(&'a [LocalShard]),
}

impl PutPlan {
    /// Computes this process's part of the move.
    ///
    /// # Errors
    ///
    /// If the two layouts cannot belong to one array.
    pub(crate) fn new(
        runtime: &Arc<Runtime>,
        aval: &ShapedArray,
        from: Option<SourceLayout<'_>>,
        to: &Sharding,
        layout: Arc<Layout>,
    ) -> Result<Self, ReshardError> {
        let item = aval.dtype().size();
        let kinds = MoveKinds {
            from: kind_of(from.map(|from| from.sharding)),
            to: to.memory_kind(),
        };
        let mut targets = local_targets(runtime, &layout);
        let mut transfers = plan_transfers(runtime, aval, from, &layout, &targets)?;
        order_transfers(runtime, &mut transfers);

        let mut bytes: usize = targets
            .iter()
            .map(|target| target.region.elements() * item)
            .sum();
        let mut copied = 0;
        for transfer in &transfers {
            copied += transfer.bytes * transfer.targets.len();
            if needs_staging(runtime, transfer, &targets, kinds) {
                bytes += transfer.bytes;
            }
            for at in &transfer.targets {
                targets[*at].add_piece(runtime, transfer, kinds, item);
            }
        }
        let sums = prepare_sums(runtime, &targets, aval, kinds.to);
        // The second buffer of each shard, for the partial sum to be added.
        bytes += sums.iter().map(|sum| sum.bytes).sum::<usize>();

        let from = from.map(|from| from.sharding);
        let what = Arc::new(PutWhat {
            aval: aval.clone(),
            from: from.cloned(),
            to: to.clone(),
        });
        let made = Made::new(
            aval.clone(),
            to.clone(),
            layout,
            what.clone(),
            runtime.clone(),
        );
        Ok(Self {
            made: Arc::new(made),
            fingerprint: fingerprint(runtime, &what),
            what,
            targets,
            sends: transfers.iter().map(|transfer| transfer.peers.len()).sum(),
            transfers: transfers.into_iter().map(Arc::new).collect(),
            bytes: bytes as u64,
            is_small: copied <= SMALL,
            known_descriptors: Default::default(),
            sums,
        })
    }

    /// Returns true if the move can share an operation with moves of other leaves. It must have at
    /// most `most` bytes and no partial sums: the piece numbers have no bits left for the index of
    /// a sum.
    pub(crate) fn is_joinable(&self, most: usize) -> bool {
        let PutWhat { aval, from, to } = &*self.what;
        let whole = |sharding: &Sharding| sharding.unreduced_axes().is_empty();
        aval.elements() * aval.dtype().size() <= most && from.iter().all(whole) && whole(to)
    }

    /// Returns true if this process neither sends, receives nor owns any part of the move.
    pub(crate) fn is_idle(&self) -> bool {
        self.transfers.is_empty() && self.targets.is_empty()
    }

    /// Returns the bytes of new memory that this process may need for the move.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Registers this process's sends of the move. Returns an async buffer that ends when all sends
    /// have ended, or `None` without sends. Never blocks. Call it before [`PutPlan::receive`],
    /// which may block while peers wait for the pieces.
    pub(crate) fn send(
        &self,
        runtime: &Arc<Runtime>,
        guard: &OpGuard,
        source: &PutSource<'_>,
    ) -> Option<AsyncBuffer> {
        let sent = (self.sends > 0).then(|| guard.expect_sends(self.sends));

        let start = PutStart {
            plan: self,
            runtime,
            guard,
            source,
            shards: Vec::new(),
        };
        let sending = self.transfers.iter();
        for transfer in sending.filter(|transfer| !transfer.peers.is_empty()) {
            if let PieceOrigin::Device(device) = transfer.origin {
                start.send(transfer, device);
            }
        }
        sent
    }

    /// Creates the shards that this process will own, registers the pieces that they wait for, and
    /// returns the shards. Does not wait for the move. May block while there is no memory for the
    /// shards. The first call may also block for a kernel's compilation.
    ///
    /// With `may_alias` a shard may share memory with the source, since arrays never change.
    pub(crate) fn receive(
        &self,
        runtime: &Arc<Runtime>,
        guard: &OpGuard,
        source: &PutSource<'_>,
        may_alias: bool,
    ) -> Vec<LocalShard> {
        let mut start = PutStart {
            plan: self,
            runtime,
            guard,
            source,
            shards: Vec::new(),
        };

        let mut result = Vec::with_capacity(self.targets.len());
        for target in &self.targets {
            let opened = start.open(target, may_alias);
            start.shards.push(opened.assembly);
            result.push(LocalShard {
                device: target.device,
                slot: opened.slot,
            });
        }
        start.receive();
        result
    }

    /// Returns the device function that adds the partial sums of a shard. `None` if the host adds
    /// them or the source has no partial sums.
    fn sum_on_device(&self, target: &TargetShard) -> Option<Addition> {
        if target.pieces.len() < 2 {
            return None;
        }
        let mut sums = self.sums.iter();
        let prepared = sums.find(|sum| sum.device == target.device)?;
        let sum = Addition::of(self.what.aval.dtype())?;

        let ready = prepared.ready.as_ref().inspect_err(|error| {
            static SAID: Once = Once::new();
            SAID.call_once(
                || tracing::warn!(%error, "partial sums of accelerators are added up by the host"),
            );
        });
        ready.ok().map(|()| sum)
    }

    fn item_bytes(&self) -> usize {
        self.what.aval.dtype().size()
    }
}

impl PutSource<'_> {
    fn slot(&self, device: DeviceId) -> Option<&AsyncBuffer> {
        match self {
            PutSource::Host(_) => None,
            PutSource::Shards(shards) => shards
                .iter()
                .find(|shard| shard.device == device)
                .map(|shard| &shard.slot),
        }
    }
}

/// Returns the shards that this process will own, before their pieces are added.
fn local_targets(runtime: &Runtime, layout: &Layout) -> Vec<TargetShard> {
    let all = layout.iter();
    all.filter_map(|(device, region)| {
        let local_index = runtime.local_index(device)?;
        Some(TargetShard {
            device,
            local_index,
            region: region.clone(),
            pieces: Vec::new(),
            in_parts: true,
            alias: None,
        })
    })
    .collect()
}

/// Returns the regions that move to, from or through this process.
fn plan_transfers(
    runtime: &Runtime,
    aval: &ShapedArray,
    from: Option<SourceLayout<'_>>,
    layout: &Layout,
    targets: &[TargetShard],
) -> Result<Vec<RegionTransfer>, ReshardError> {
    let item = aval.dtype().size();
    let Some(from) = from else {
        return Ok(from_host(targets, layout, aval));
    };

    // Equal layouts: each partial sum stays in place.
    if from.layout.terms() > 1 && *from.layout == *layout {
        return Ok(in_place(targets, item));
    }

    let plan = reshard::plan(from.layout, layout, item, &runtime.topology)?;
    let deliveries = plan.part_of(runtime.me).deliveries.into_iter();
    Ok(deliveries
        .map(|delivery| RegionTransfer::new(runtime, delivery, from, targets, item))
        .collect())
}

/// Sorts the transfers into the order in which they are started. Each process starts with the next
/// higher process, so that not all processes send to the same peer.
fn order_transfers(runtime: &Runtime, transfers: &mut [RegionTransfer]) {
    let processes = runtime.topology.processes();
    let distance =
        |peer: &ProcessId| (peer.index() + processes - runtime.me.index() % processes) % processes;
    for transfer in &mut *transfers {
        // Forwarded pieces keep the order of the plan.
        if !matches!(transfer.origin, PieceOrigin::Process(_)) {
            transfer.peers.sort_by_key(distance);
        }
    }
    transfers.sort_by_key(|transfer| {
        (
            transfer.peers.first().map_or(usize::MAX, distance),
            transfer.id,
        )
    });
}

/// Returns true if the piece needs a staging buffer on this process, to be forwarded or packed. A
/// zero-copy transfer needs none.
fn needs_staging(
    runtime: &Runtime,
    transfer: &RegionTransfer,
    targets: &[TargetShard],
    kinds: MoveKinds,
) -> bool {
    match transfer.origin {
        PieceOrigin::Process(from) => {
            let in_place = runtime.zero_copy(from) && transfer.is_by_itself();
            let mut devices = transfer.targets.iter().map(|at| targets[*at].device);
            let to_accelerator =
                devices.any(|device| runtime.accelerator_of(device, kinds.to).is_some());
            (!transfer.peers.is_empty() || to_accelerator) && !in_place
        }
        PieceOrigin::Device(device) => {
            let on_accelerator = runtime.accelerator_of(device, kinds.from).is_some();
            transfer.peers.iter().any(|peer| {
                let lends = runtime.lends(device, kinds.from, *peer);
                (transfer.run.is_none() && !lends)
                    || (on_accelerator && !runtime.carries_device_memory(*peer))
            })
        }
        PieceOrigin::Host => false,
    }
}

impl TargetShard {
    /// Counts a piece of the shard, and determines if the shard can share the memory of its source.
    fn add_piece(
        &mut self,
        runtime: &Runtime,
        transfer: &RegionTransfer,
        kinds: MoveKinds,
        item: usize,
    ) {
        if self.pieces.len() <= transfer.term {
            self.pieces.resize(transfer.term + 1, 0);
        }
        self.pieces[transfer.term] += 1;
        // Pieces of later partial sums are added, so they cannot be written in place.
        self.in_parts &=
            transfer.term == 0 && contiguous_bytes(&self.region, &transfer.region, item).is_some();

        let from = match transfer.origin {
            PieceOrigin::Device(device) => Some(ShardPlace {
                device,
                kind: kinds.from,
            }),
            PieceOrigin::Host => None,
            PieceOrigin::Process(_) => {
                self.alias = None;
                return;
            }
        };
        let only = OnlyPiece {
            from,
            held: &transfer.holds,
            region: &transfer.region,
        };
        let to = ShardPlace {
            device: self.device,
            kind: kinds.to,
        };
        let can_alias = self.pieces == [1] && only.can_alias(runtime, to, &self.region);
        self.alias = can_alias.then_some(transfer.origin);
    }
}

/// Compiles the additions for the shards whose partial sums an accelerator adds.
fn prepare_sums(
    runtime: &Runtime,
    targets: &[TargetShard],
    aval: &ShapedArray,
    kind: MemoryKind,
) -> Vec<DeviceSum> {
    let adds =
        |target: &&TargetShard| target.pieces.len() > 1 && Addition::of(aval.dtype()).is_some();
    let sums = targets.iter().filter(adds).filter_map(|target| {
        let accelerator = runtime.accelerator_of(target.device, kind)?;
        let pool = &runtime.devices[target.local_index].pool;
        Some(DeviceSum {
            device: target.device,
            bytes: target.region.elements() * aval.dtype().size(),
            ready: Addition::prepare(accelerator, pool),
        })
    });
    sums.collect()
}

/// Returns a hash of the move and of the topology. Processes that see different links make
/// different plans; the topology in the hash turns this into an error instead of a hang.
fn fingerprint(runtime: &Runtime, what: &PutWhat) -> u64 {
    let PutWhat { aval, from, to } = what;
    let words = [
        from.as_ref().map_or(1, Sharding::fingerprint),
        to.fingerprint(),
        runtime.topology_fingerprint,
        Rolling::default()
            .mix_bytes(aval.to_string().as_bytes())
            .word(),
    ];
    words
        .into_iter()
        .fold(Rolling::default(), Rolling::mix)
        .word()
}

/// Returns the memory kind of the source. Host values count as the default kind, device memory.
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
    use std::sync::Arc;

    use mpmd_base::ProcessId;
    use mpmd_base::block::{Mutex, mpsc};

    use crate::api::program::Simulation;
    use crate::prelude::*;
    use mpmd_layout::sharding::Sharding;
    use mpmd_layout::topology::DeviceId;

    #[test]
    fn packed_pieces_count_as_memory_direct_sends_do_not() {
        let results = Simulation::new(2, 2).run(|p| {
            let mesh = p.mesh(&[("x", 2)])?;
            let (rows, columns) = (mesh.sharding(spec!["x"]), mesh.sharding(spec![None, "x"]));
            let x = p.array_from_fn(f32s([8, 8]), &rows, |_, mut view| Ok(view.fill(1.0f32)?))?;
            let mut bytes = |to| {
                p.put_plan("", &x, to, false)
                    .map(|plan| plan.bytes())
                    .expect("it fits")
            };
            // A shard has 32 elements. The other process gets 16 elements that are not contiguous
            // in this process's shard.
            let found = (bytes(&columns), bytes(&mesh.replicated()));
            Ok(found)
        });
        for result in results {
            assert_eq!(result.unwrap(), (4 * (32 + 16), 4 * 64));
        }
    }

    #[test]
    fn small_move_needs_no_copy_worker() {
        let mut p = Program::builder().devices(2).alone().unwrap();
        let mesh = p.mesh(&[("x", 2)]).unwrap();
        let rows = mesh.sharding(spec!["x"]);
        let x = p
            .array_from_fn(f32s([8, 8]), &rows, |_, mut view| Ok(view.fill(1.0f32)?))
            .unwrap();
        x.block_until_ready().unwrap();
        // No copy worker is free until this is dropped.
        let (busy, free) = mpsc::channel::<()>();
        let free = Arc::new(Mutex::new(free));
        for _ in 0..8 {
            let free = free.clone();
            p.runtime.move_data(Box::new(move || {
                let _ = free.lock().recv();
            }));
        }
        let y = p.device_put(&x, mesh.sharding(spec![None, "x"])).unwrap();
        assert!(y.is_complete());
        drop(busy);
        p.finish().unwrap();
    }

    #[test]
    fn long_chain_of_small_moves_ends() {
        let mut p = Program::builder().devices(1).alone().unwrap();
        let (go, gone) = mpsc::channel::<()>();
        let gone = Mutex::new(gone);
        let on = Sharding::single_device(DeviceId(0));
        let mut x = p
            .array_from_fn(f32s([4]), &on, move |_, mut view| {
                let _ = gone.lock().recv();
                Ok(view.fill(3.0f32)?)
            })
            .unwrap();
        // All of them wait for the first, and each ends the next.
        for _ in 0..1000 {
            x = p
                .device_put_with(&x, &on, MoveOptions::default().may_alias(false))
                .unwrap();
        }
        drop(go);
        assert_eq!(
            x.to_host().unwrap().unwrap().to_vec::<f32>().unwrap(),
            [3.0; 4]
        );
        p.finish().unwrap();
    }

    /// Moves rows to columns, so that no piece is contiguous in its shard. Returns, by process, the
    /// peak bytes of staging memory and the bytes that the plan counts.
    fn staged(simulation: &Simulation) -> Vec<(u64, u64)> {
        let results = simulation.run(|p| {
            let mesh = p.mesh(&[("x", p.processes())])?;
            let (rows, columns) = (mesh.sharding(spec!["x"]), mesh.sharding(spec![None, "x"]));
            let x = p.array_from_fn(f32s([12, 24]), &rows, |region, mut view| {
                let (rows, columns) = (region.range(0), region.range(1));
                let values = rows.flat_map(|i| columns.clone().map(move |j| (i * 24 + j) as f32));
                view.as_mut_slice::<f32>()?
                    .iter_mut()
                    .zip(values)
                    .for_each(|(to, value)| *to = value);
                Ok(())
            })?;
            let bytes = p
                .put_plan("", &x, &columns, false)
                .map(|plan| plan.bytes())
                .expect("it fits");
            let y = p.device_put(&x, &columns)?;
            for shard in y.addressable_shards()? {
                let columns = shard.region.range(1);
                let values =
                    (0..12).flat_map(|i| columns.clone().map(move |j| (i * 24 + j) as f32));
                assert_eq!(shard.data.to_vec::<f32>()?, values.collect::<Vec<_>>());
                assert!(!shard.data.bytes().is_lent());
            }
            // A barrier: every process has sent before any reads its counters.
            for process in 0..p.processes() as u32 {
                p.broadcast_value(ProcessId(process), 0u8, || Ok(0))?;
            }
            Ok((p.runtime.staging.stats().peak, bytes))
        });
        results.into_iter().map(Result::unwrap).collect()
    }

    #[test]
    fn zero_copy_transfers_are_never_packed() {
        let packing = staged(&Simulation::new(2, 2));
        assert!(
            packing
                .iter()
                .all(|(peak, bytes)| *peak > 0 && *bytes == 4 * (12 * 12 + 6 * 12))
        );
        let shared = staged(&Simulation::new(2, 2).zero_copy(&[0, 0]));
        assert_eq!(shared, [(0, 4 * 12 * 12); 2]);
        // Only two of the three processes share memory: both pack for the third.
        let mixed = staged(&Simulation::new(3, 3).zero_copy(&[5, 5]));
        assert!(
            mixed
                .iter()
                .all(|(peak, bytes)| *peak > 0 && *bytes > 4 * 12 * 8),
            "{mixed:?}"
        );
        // Zero-copy between all four, of whole shards and of parts.
        let four = staged(&Simulation::new(4, 4).zero_copy(&[1; 4]));
        assert_eq!(four, [(0, 4 * 12 * 6); 4]);
    }

    /// Strided parts go to a host with two processes. Each of them borrows the shard for one part
    /// and packs that part for the other process, which expects the region alone.
    #[test]
    fn forwarder_packs_a_strided_part_of_a_shard() {
        let simulation = Simulation::new(3, 6)
            .zero_copy(&[0, 0, 0])
            .settings(|b| b.hosts(&[0, 1, 1]));
        let results = simulation.run(|p| {
            let x = p.array_from_fn(
                f32s([64, 64]),
                Sharding::single_device(DeviceId(0)),
                |_, mut view| {
                    let values = view.as_mut_slice::<f32>()?.iter_mut().enumerate();
                    values.for_each(|(i, value)| *value = i as f32);
                    Ok(())
                },
            )?;
            let mesh = p.mesh_of(&[("copies", 2), ("x", 2)], &[2, 3, 4, 5].map(DeviceId))?;
            let y = p.device_put(&x, mesh.sharding(spec![None, "x"]))?;
            let shards = if y.is_fully_remote() {
                Vec::new()
            } else {
                y.addressable_shards()?
            };
            for shard in shards {
                let columns = shard.region.range(1);
                let values =
                    (0..64).flat_map(|i| columns.clone().map(move |j| (i * 64 + j) as f32));
                assert_eq!(shard.data.to_vec::<f32>()?, values.collect::<Vec<_>>());
            }
            for process in 0..3 {
                p.broadcast_value(ProcessId(process), 0u8, || Ok(0))?;
            }
            Ok(p.runtime.staging.stats().peak)
        });
        let peaks: Vec<u64> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(peaks[0], 0, "the sender packs nothing");
        assert_eq!(peaks[1] + peaks[2], 2 * 64 * 32 * 4, "each half once");
    }
}
