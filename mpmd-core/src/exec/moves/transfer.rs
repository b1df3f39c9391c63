//! The regions that a `device_put` moves to, from or through this process, and the shards that they
//! are pieces of.

use std::ops::Range;
use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_device::copy::contiguous_bytes;

use crate::exec::Runtime;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::reshard::{self, Delivery};
use mpmd_layout::sharding::{Layout, MemoryKind};
use mpmd_layout::topology::DeviceId;

/// A shard that this process will own.
pub(crate) struct Target {
    pub(crate) device: DeviceId,
    pub(crate) local_index: usize,
    pub(crate) region: Region,
    /// Number of transfers that bring a piece of the shard, by partial sum of the source. Empty if
    /// the shard is empty, or is a partial sum of the target that stays zero.
    pub(crate) pieces: Vec<usize>,
    /// True if every piece is contiguous in the shard and is copied, not added.
    pub(crate) in_parts: bool,
    /// The source that the shard may share memory with; `None` if its memory must be its own.
    pub(crate) alias: Option<Origin>,
}

/// One region: its source and its destinations, as seen by this process.
#[derive(Clone)]
pub(crate) struct Transfer {
    /// The piece number of the region, in messages and in the trace.
    pub(crate) id: u64,
    /// Index of the source's partial sum that the region belongs to.
    pub(crate) term: usize,
    /// The region, in indices of the whole array. Never empty.
    pub(crate) region: Region,
    /// The region that the incoming bytes cover: the origin's whole shard or `region` alone. A
    /// zero-copy sender gives its whole shard if `region` is not contiguous in it. Then neither
    /// side packs.
    pub(crate) holds: Region,
    /// Byte range of `region` within the bytes of `holds`, if contiguous.
    pub(crate) run: Option<Range<usize>>,
    /// Size of the region in bytes.
    pub(crate) bytes: usize,
    pub(crate) origin: Origin,
    /// Indices of the shards that contain the region, among the plan's targets.
    pub(crate) targets: Vec<usize>,
    /// The processes to which this one sends the region.
    pub(crate) peers: Vec<ProcessId>,
}

#[derive(Clone, Copy)]
pub(crate) enum Origin {
    /// A device of this process.
    Device(DeviceId),
    /// Another process, which sends a message.
    Process(ProcessId),
    /// The host values that every process has.
    Host,
}

/// Returns the transfers by which each device gets its part of host values, which every process
/// has. Of several partial sums, only the first gets them.
pub(crate) fn from_host(targets: &[Target], layout: &Layout, aval: &ShapedArray) -> Vec<Transfer> {
    let whole = Region::full(aval.shape());
    let term = |device| {
        layout
            .place_of(device)
            .map_or(0, |place| layout.term_of(place))
    };
    let targets = targets
        .iter()
        .enumerate()
        .filter(|(_, target)| term(target.device) == 0);
    let targets = targets.filter(|(_, target)| !target.region.is_empty());
    let transfer = |(at, target): (usize, &Target)| {
        Transfer::local(at, target, Origin::Host, whole.clone(), aval.dtype().size())
    };
    targets.map(transfer).collect()
}

/// Returns the transfers by which each device keeps its own shard.
pub(crate) fn in_place(targets: &[Target], item: usize) -> Vec<Transfer> {
    let targets = targets
        .iter()
        .enumerate()
        .filter(|(_, target)| !target.region.is_empty());
    let transfer = |(at, target): (usize, &Target)| {
        Transfer::local(
            at,
            target,
            Origin::Device(target.device),
            target.region.clone(),
            item,
        )
    };
    targets.map(transfer).collect()
}

impl Transfer {
    /// Creates a transfer of the whole shard of target `at`, from local bytes that cover `holds`.
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

    pub(crate) fn new(
        runtime: &Runtime,
        delivery: Delivery,
        (source, kind): (&Layout, MemoryKind),
        targets: &[Target],
        item: usize,
    ) -> Self {
        let Delivery {
            id,
            term,
            region,
            from,
            giver,
            targets: devices,
            peers,
        } = delivery;
        let shard = giver.and_then(|device| source.region_of(device));
        let (origin, holds) = match from {
            reshard::Origin::Device(device) => (Origin::Device(device), shard),
            reshard::Origin::Process(process) => {
                // Same rule as on the sender: a contiguous part of its shard is sent alone.
                let strided = |shard: &&Region| contiguous_bytes(shard, &region, item).is_none();
                let lent = giver.is_some_and(|device| runtime.lends(device, kind, process));
                (
                    Origin::Process(process),
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

    /// True if the incoming bytes cover exactly the region.
    pub(crate) fn is_by_itself(&self) -> bool {
        self.holds == self.region
    }

    /// Returns the same transfer, with the region itself as the region that the incoming bytes
    /// cover.
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

    /// Returns the bytes per element.
    pub(crate) fn item_bytes(&self) -> usize {
        self.bytes / self.region.elements()
    }
}
