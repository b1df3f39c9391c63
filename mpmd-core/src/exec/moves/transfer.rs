//! The regions that a `device_put` moves to, from or through this process, and the shards that they
//! are pieces of.

use std::ops::Range;
use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_device::copy::contiguous_bytes;

use crate::exec::Runtime;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::reshard::{self, PieceDelivery};
use mpmd_layout::sharding::{Layout, Sharding};
use mpmd_layout::topology::DeviceId;

/// The sharding of a source array on devices, and its layout for the array's shape.
#[derive(Clone, Copy)]
pub(crate) struct SourceLayout<'a> {
    pub(crate) sharding: &'a Sharding,
    pub(crate) layout: &'a Layout,
}

/// A shard that this process will own.
pub(crate) struct TargetShard {
    pub(crate) device: DeviceId,
    pub(crate) local_index: usize,
    pub(crate) region: Region,
    /// Number of pieces of the shard, indexed by partial sum of the source. Empty if the shard is
    /// empty, or is a partial sum of the target that stays zero.
    pub(crate) pieces: Vec<usize>,
    /// True if every piece is contiguous in the shard and is copied, not added to other pieces.
    pub(crate) in_parts: bool,
    /// The source with which the shard may share memory. `None` if the shard must have its own
    /// memory.
    pub(crate) alias: Option<PieceOrigin>,
}

/// The transfer of one region: its source and its destinations, as seen by this process.
#[derive(Clone)]
pub(crate) struct RegionTransfer {
    /// The piece number of the region, in messages and in the trace.
    pub(crate) id: u64,
    /// Index of the source's partial sum to which the region belongs.
    pub(crate) term: usize,
    /// The region, in indices of the whole array. Never empty.
    pub(crate) region: Region,
    /// The region that the incoming bytes cover: the sender's whole shard, or `region` alone. A
    /// zero-copy sender lends its whole shard if `region` is not contiguous in it. Then neither
    /// side packs.
    pub(crate) holds: Region,
    /// Byte range of `region` within the bytes of `holds`. `None` if it is not contiguous there.
    pub(crate) run: Option<Range<usize>>,
    /// Size of the region in bytes.
    pub(crate) bytes: usize,
    pub(crate) origin: PieceOrigin,
    /// Indices of the target shards of the plan that contain the region.
    pub(crate) targets: Vec<usize>,
    /// The processes to which this one sends the region.
    pub(crate) peers: Vec<ProcessId>,
}

/// The source of a region, as seen by this process.
#[derive(Clone, Copy)]
pub(crate) enum PieceOrigin {
    /// A device of this process.
    Device(DeviceId),
    /// Another process, which sends a message.
    Process(ProcessId),
    /// The host values that every process has.
    Host,
}

/// Returns the transfers by which each device gets its part of host values, which every process
/// has. If the target has partial sums, only the first sum gets the values.
pub(crate) fn from_host(
    targets: &[TargetShard],
    layout: &Layout,
    aval: &ShapedArray,
) -> Vec<RegionTransfer> {
    let whole = Region::full(aval.shape());
    let term = |device| {
        layout
            .place_of(device)
            .map_or(0, |place| layout.term_of(place))
    };
    let item = aval.dtype().size();
    let mut transfers = Vec::new();
    for (at, target) in targets.iter().enumerate() {
        if term(target.device) == 0 && !target.region.is_empty() {
            let origin = PieceOrigin::Host;
            transfers.push(RegionTransfer::local(
                at,
                target,
                origin,
                whole.clone(),
                item,
            ));
        }
    }
    transfers
}

/// Returns the transfers for a move in which each device keeps its own shard.
pub(crate) fn in_place(targets: &[TargetShard], item: usize) -> Vec<RegionTransfer> {
    let targets = targets.iter().enumerate();
    let targets = targets.filter(|(_, target)| !target.region.is_empty());
    let transfers = targets.map(|(at, target)| {
        let origin = PieceOrigin::Device(target.device);
        RegionTransfer::local(at, target, origin, target.region.clone(), item)
    });
    transfers.collect()
}

impl RegionTransfer {
    /// Creates a transfer of the whole target shard `at`, from local bytes that cover `holds`.
    fn local(
        at: usize,
        target: &TargetShard,
        origin: PieceOrigin,
        holds: Region,
        item: usize,
    ) -> Self {
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

    /// Creates a transfer from this process's part of a plan.
    pub(crate) fn new(
        runtime: &Runtime,
        delivery: PieceDelivery,
        source: SourceLayout<'_>,
        targets: &[TargetShard],
        item: usize,
    ) -> Self {
        let PieceDelivery {
            id,
            term,
            region,
            from,
            giver,
            targets: devices,
            peers,
        } = delivery;
        let kind = source.sharding.memory_kind();
        let shard = giver.and_then(|device| source.layout.region_of(device));
        let (origin, holds) = match from {
            reshard::DeliveryOrigin::Device(device) => (PieceOrigin::Device(device), shard),
            reshard::DeliveryOrigin::Process(process) => {
                // Same rule as on the sender: a contiguous part of its shard is sent alone.
                let strided = |shard: &&Region| contiguous_bytes(shard, &region, item).is_none();
                let lent = giver.is_some_and(|device| runtime.lends(device, kind, process));
                (
                    PieceOrigin::Process(process),
                    shard.filter(|_| lent).filter(strided),
                )
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

    /// Returns true if the incoming bytes cover exactly the region.
    pub(crate) fn is_by_itself(&self) -> bool {
        self.holds == self.region
    }

    /// Returns the same transfer for incoming bytes that cover only the region.
    pub(crate) fn alone(self: &Arc<Self>) -> Arc<Self> {
        if self.is_by_itself() {
            return self.clone();
        }
        Arc::new(Self {
            holds: self.region.clone(),
            run: Some(0..self.bytes),
            ..Self::clone(self)
        })
    }

    /// Returns the number of bytes per element.
    pub(crate) fn item_bytes(&self) -> usize {
        self.bytes / self.region.elements()
    }
}
