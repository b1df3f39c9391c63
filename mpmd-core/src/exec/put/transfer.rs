//! The regions that a `device_put` moves as far as this process is concerned, and the shards that
//! they are pieces of.

use std::ops::Range;
use std::sync::Arc;

use mpmd_ids::ProcessId;

use crate::device::copy::contiguous_bytes;
use crate::exec::Runtime;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::reshard::{self, Delivery};
use mpmd_layout::sharding::{Layout, MemoryKind};
use mpmd_layout::topology::DeviceId;

/// A shard that this process will own.
pub(super) struct Target {
    pub(super) device: DeviceId,
    pub(super) local_index: usize,
    pub(super) region: Region,
    /// How many transfers bring a piece of it, by partial sum of the source. Of none where it is
    /// empty, or one of the destination's partial sums that are zero.
    pub(super) pieces: Vec<usize>,
    /// Whether each of them is one run of the shard's bytes.
    pub(super) in_parts: bool,
    /// What it may share memory with.
    pub(super) alias: Option<Origin>,
}

/// One region: where this process has it from, and where it goes.
#[derive(Clone)]
pub(in crate::exec) struct Transfer {
    /// Its number in messages.
    pub(in crate::exec) id: u64,
    /// Which of the source's partial sums it is of.
    pub(in crate::exec) term: usize,
    /// Never empty.
    pub(in crate::exec) region: Region,
    /// What the bytes that come are of: all that the origin has, or the region alone. Another
    /// process sends all of its shard where it hands that over and the region is no run of it: the
    /// bytes are taken from their place then, and nobody packs them.
    pub(in crate::exec) holds: Region,
    /// Where the region's bytes are one run of those.
    pub(super) run: Option<Range<usize>>,
    /// Bytes of the region.
    pub(in crate::exec) bytes: usize,
    pub(super) origin: Origin,
    /// Places among the plan's targets.
    pub(super) targets: Vec<usize>,
    /// The processes that get it from this one.
    pub(in crate::exec) peers: Vec<ProcessId>,
}

#[derive(Clone, Copy)]
pub(super) enum Origin {
    /// A device of this process.
    Device(DeviceId),
    /// A message.
    Process(ProcessId),
    /// The host values that every process has.
    Host,
}

/// Each device copies its part of values that every process has.
pub(super) fn from_host(targets: &[Target], layout: &Layout, aval: &ShapedArray) -> Vec<Transfer> {
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
pub(super) fn in_place(targets: &[Target], item: usize) -> Vec<Transfer> {
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

    pub(super) fn new(
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
    pub(in crate::exec) fn is_by_itself(&self) -> bool {
        self.holds == self.region
    }

    /// The same, from bytes that are of the region alone.
    pub(in crate::exec) fn alone(self: &Arc<Self>) -> Arc<Self> {
        if self.is_by_itself() {
            return self.clone();
        }
        Arc::new(Self { holds: self.region.clone(), run: Some(0..self.bytes), ..Self::clone(self) })
    }

    /// Bytes of an element.
    pub(in crate::exec) fn item_bytes(&self) -> usize {
        self.bytes / self.region.elements()
    }
}
