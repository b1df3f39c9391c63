//! How one region gets from the devices that have it to the devices that want it.
//!
//! Nearness first: whoever has the region itself copies from itself, a process that has it
//! somewhere from there, a host that has it in some process from that process. Only hosts without
//! it get it over the network, each of them once, and a process of a host once from its neighbours;
//! inside, it spreads.
//!
//! Every answer is worked out by itself from the two tilings, so that a process asks only for what
//! concerns it, and all processes find the same.

use std::cell::OnceCell;
use std::ops::Range;

use mpmd_ids::ProcessId;

use super::tiling::{Host, Process, Tiling};
use crate::region::Region;
use crate::topology::{DeviceId, Links};

/// Larger pieces between processes move in chunks of about this size, so that packing, sending,
/// passing on and unpacking overlap: large enough that a message's own cost is a small part.
pub(super) const CHUNK_BYTES: usize = 2 << 20;

/// A region is divided over several links only where each part has at least this many bytes.
const PART_BYTES: usize = 1 << 20;

/// Chunks of one region, at most: their numbers have to fit a message's piece number.
pub(super) const MOST_CHUNKS: usize = 1 << 13;

/// The way of one region: what tile `a` of the source and tile `b` of the destination share.
pub(super) struct Spread<'a> {
    src: &'a Tiling,
    dst: &'a Tiling,
    a: u32,
    b: u32,
    /// Counts the regions that come from `a`, so that its holders take turns.
    turn: usize,
    /// Counts the regions that come to `b`, so that those who get them for others take turns.
    arrival: OnceCell<usize>,
    /// Places, among the hosts that want it, of those that have it already.
    served: Vec<usize>,
    /// Hosts that get it over the network.
    needing: usize,
    /// Whether they pass it on from one to the next, rather than all get it from a holder.
    relay: bool,
    /// Parts that travel between hosts by ways of their own.
    parts: usize,
    /// Chunks of each part.
    chunks: usize,
    /// The dimension that parts and chunks divide.
    dim: usize,
}

/// Who gives a region: a process, and the device there that has it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Giver {
    pub(super) process: ProcessId,
    pub(super) device: DeviceId,
}

impl<'a> Spread<'a> {
    pub(super) fn new(
        (src, a): (&'a Tiling, u32),
        (dst, b): (&'a Tiling, u32),
        region: &Region,
        item_bytes: usize,
        links: &Links,
    ) -> Self {
        let mut spread = Self {
            src,
            dst,
            a,
            b,
            turn: 0,
            arrival: OnceCell::new(),
            served: Vec::new(),
            needing: 0,
            relay: false,
            parts: 1,
            chunks: 1,
            dim: 0,
        };
        let (having, wanting) = (src.hosts(a), dst.hosts(b));
        // By the shorter of the two: thousands of hosts may have what thousands of tiles are each a
        // part of.
        if wanting.len() < having.len() {
            let has =
                |host: &Host| having.binary_search_by_key(&host.host, |found| found.host).is_ok();
            spread.served.extend((0..wanting.len()).filter(|at| has(&wanting[*at])));
        } else {
            let place =
                |host: &Host| wanting.binary_search_by_key(&host.host, |found| found.host).ok();
            spread.served.extend(having.iter().filter_map(place));
        }
        spread.needing = wanting.len() - spread.served.len();
        let alone = matches!(having, [host] if matches!(src.processes(host), [process] if src.devices(process).len() == 1));
        if !alone {
            spread.turn = dst.turn(b, &src.tile(a).region);
        }
        let bytes = region.elements().saturating_mul(item_bytes);
        let per_source = spread.needing.div_ceil(having.len()) as u64;
        if per_source > 1 {
            let link = links.network;
            // One after the other from the same source, or each a chunk behind the one before it.
            let one_by_one = link.nanos(bytes as u64).saturating_mul(per_source);
            let chunk = link.nanos(bytes.min(CHUNK_BYTES) as u64).saturating_mul(per_source - 1);
            spread.relay = link.nanos(bytes as u64).saturating_add(chunk) < one_by_one;
        }
        spread.divide(region, bytes);
        spread
    }

    /// Decides on parts and chunks.
    fn divide(&mut self, region: &Region, bytes: usize) {
        if bytes < 2 * PART_BYTES.min(CHUNK_BYTES) || !self.leaves_a_process() {
            return;
        }
        // The outermost dimension with indices enough keeps parts contiguous.
        let lengths: Vec<usize> = region.ranges().map(|range| range.len()).collect();
        let wanted = bytes.div_ceil(CHUNK_BYTES).clamp(1, MOST_CHUNKS);
        let longest = || (0..lengths.len()).max_by_key(|dim| (lengths[*dim], usize::MAX - dim));
        let Some(dim) = lengths.iter().position(|length| *length >= wanted).or_else(longest) else {
            return;
        };
        self.dim = dim;
        let sources: usize =
            self.src.hosts(self.a).iter().map(|host| self.src.processes(host).len()).sum();
        if self.needing > 0 && sources > 1 {
            let fewest = (0..self.needing)
                .map(|rank| self.dst.processes(self.needing_host(rank)).len())
                .min()
                .unwrap_or(1);
            self.parts = fewest.min(sources).min(bytes / PART_BYTES).min(lengths[dim]).max(1);
        }
        let whole =
            *region == self.src.tile(self.a).region && *region == self.dst.tile(self.b).region;
        // A whole shard that is not passed on is handed over in place.
        if !whole || self.relay || self.parts > 1 {
            let each = lengths[dim] / self.parts;
            self.chunks = (bytes / self.parts)
                .div_ceil(CHUNK_BYTES)
                .min(each)
                .min(MOST_CHUNKS / self.parts)
                .max(1);
        }
    }

    /// Whether a process wants the region that does not have it.
    fn leaves_a_process(&self) -> bool {
        let without = |process: &Process| {
            self.src.in_process(self.a, process.process, process.host).is_none()
        };
        self.needing > 0
            || self
                .dst
                .hosts(self.b)
                .iter()
                .any(|host| self.dst.processes(host).iter().any(without))
    }

    /// How many pieces the region moves in between processes: parts, and chunks of each.
    pub(super) fn pieces(&self) -> usize {
        self.parts * self.chunks
    }

    pub(super) fn parts(&self) -> usize {
        self.parts
    }

    /// The pieces that a part moves in.
    pub(super) fn pieces_of(&self, part: usize) -> Range<usize> {
        part * self.chunks..(part + 1) * self.chunks
    }

    /// The `piece`-th of the pieces of the region.
    pub(super) fn piece(&self, region: &Region, piece: usize) -> Region {
        cut(region, self.dim, piece, self.pieces())
    }

    /// The `part`-th of the parts of the region.
    pub(super) fn part(&self, region: &Region, part: usize) -> Region {
        cut(region, self.dim, part, self.parts)
    }

    /// Whether a process has the region in a shard of the source.
    pub(super) fn has_it(&self, process: ProcessId, host: u32) -> bool {
        self.src.in_process(self.a, process, host).is_some()
    }

    /// The device of a holding process that gives to the `rank`-th of its devices that have
    /// nothing.
    pub(super) fn holder(&self, holding: &Process, rank: usize) -> DeviceId {
        let devices = self.src.devices(holding);
        devices[(self.turn + rank) % devices.len()]
    }

    /// The device of a process that gets the region for all of it.
    pub(super) fn landing_device(&self, wanting: &Process) -> DeviceId {
        let devices = self.dst.devices(wanting);
        if devices.len() == 1 {
            return devices[0];
        }
        let processes =
            self.dst.on_host(self.b, wanting.host).map_or(1, |host| self.dst.processes(host).len());
        devices[self.arrival() / processes % devices.len()]
    }

    /// Who gives a part to a process that wants it; `None` where it has the region itself.
    pub(super) fn giver(&self, wanting: &Process, part: usize) -> Option<Giver> {
        if self.src.in_process(self.a, wanting.process, wanting.host).is_some() {
            return None;
        }
        if let Some(having) = self.src.on_host(self.a, wanting.host) {
            let neighbours = self.without(wanting.host);
            let rank = neighbours.iter().position(|process| process.process == wanting.process)?;
            return Some(self.neighbour(having, neighbours.len(), rank));
        }
        let landing = self.landing(self.dst.on_host(self.b, wanting.host)?, part);
        if landing.process != wanting.process {
            return Some(Giver { process: landing.process, device: self.landing_device(landing) });
        }
        let rank = self.rank(wanting.host);
        if !self.relay {
            return Some(self.source(self.crossing(self.needing, rank, part)));
        }
        let (arc, place) = self.place_in_arc(rank);
        if place == 0 {
            return Some(self.source(self.crossing(self.arcs(), arc, part)));
        }
        let before =
            self.landing(self.needing_host((rank + self.needing - 1) % self.needing), part);
        Some(Giver { process: before.process, device: self.landing_device(before) })
    }

    /// Whom a process gives a part to, and by which of its devices.
    pub(super) fn takers(
        &self,
        process: ProcessId,
        host: u32,
        part: usize,
    ) -> Vec<(ProcessId, DeviceId)> {
        let mut takers = Vec::new();
        if self.src.in_process(self.a, process, host).is_some() {
            let mut give = |giver: Giver, taker: &Process| {
                if giver.process == process {
                    takers.push((taker.process, giver.device));
                }
            };
            if let Some(having) = self.src.on_host(self.a, host) {
                let neighbours = self.without(host);
                for (rank, taker) in neighbours.iter().enumerate() {
                    give(self.neighbour(having, neighbours.len(), rank), taker);
                }
            }
            let starts = if self.relay { self.arcs() } else { self.needing };
            for start in 0..starts {
                let giver = self.source(self.crossing(starts, start, part));
                if giver.process == process {
                    let rank = if self.relay { self.rank_in_arc(start, 0) } else { start };
                    give(giver, self.landing(self.needing_host(rank), part));
                }
            }
            return takers;
        }
        let Some(here) = self.dst.on_host(self.b, host) else { return takers };
        let landing = self.landing(here, part);
        if landing.process != process || self.src.on_host(self.a, host).is_some() {
            return takers;
        }
        let device = self.landing_device(landing);
        let others = self.dst.processes(here).iter().filter(|other| other.process != process);
        if self.relay {
            let (arc, place) = self.place_in_arc(self.rank(host));
            if place + 1 < self.arc(arc).len() {
                // First what goes far.
                let next = self.needing_host(self.rank_in_arc(arc, place + 1));
                takers.push((self.landing(next, part).process, device));
            }
        }
        takers.extend(others.map(|other| (other.process, device)));
        takers
    }

    /// How many times a part was passed on when it reaches the first device of a process: 1
    /// straight from a holder.
    pub(super) fn step(&self, wanting: &Process, part: usize) -> u32 {
        if self.src.on_host(self.a, wanting.host).is_some() {
            return 1;
        }
        let passed =
            if self.relay { self.place_in_arc(self.rank(wanting.host)).1 as u32 } else { 0 };
        let landing =
            self.dst.on_host(self.b, wanting.host).map(|host| self.landing(host, part).process);
        passed + if landing == Some(wanting.process) { 1 } else { 2 }
    }

    /// The processes of a host that want the region and don't have it.
    fn without(&self, host: u32) -> Vec<&'a Process> {
        let wanting =
            self.dst.on_host(self.b, host).map_or(&[][..], |host| self.dst.processes(host));
        let without = |process: &&Process| {
            self.src.in_process(self.a, process.process, process.host).is_none()
        };
        wanting.iter().filter(without).collect()
    }

    /// The holder on the same host for the `rank`-th of `count` processes without.
    fn neighbour(&self, having: &Host, count: usize, rank: usize) -> Giver {
        self.among(having, self.turn * count + rank)
    }

    /// Which process of a host that has nothing gets a part for all of them.
    fn landing(&self, wanting: &Host, part: usize) -> &'a Process {
        let processes = self.dst.processes(wanting);
        if processes.len() == 1 {
            return &processes[0];
        }
        &processes[(self.arrival() + part) % processes.len()]
    }

    fn arrival(&self) -> usize {
        *self.arrival.get_or_init(|| self.src.turn(self.a, &self.dst.tile(self.b).region))
    }

    /// The number of a crossing between hosts, over all regions that come from `a`.
    fn crossing(&self, of: usize, start: usize, part: usize) -> usize {
        (self.turn * of + start) * self.parts + part
    }

    /// The holder that gives at a crossing: hosts take turns, then their processes, then their
    /// devices.
    fn source(&self, crossing: usize) -> Giver {
        let hosts = self.src.hosts(self.a);
        self.among(&hosts[crossing % hosts.len()], crossing / hosts.len())
    }

    fn among(&self, host: &Host, turn: usize) -> Giver {
        let processes = self.src.processes(host);
        let process = &processes[turn % processes.len()];
        let devices = self.src.devices(process);
        Giver { process: process.process, device: devices[turn / processes.len() % devices.len()] }
    }

    /// The `rank`-th host that gets the region over the network.
    fn needing_host(&self, rank: usize) -> &'a Host {
        // How many that have it already come before it: found by halves, since the number of hosts
        // that lack it before each of those only grows.
        let (mut before, mut end) = (0, self.served.len());
        while before < end {
            let middle = before.midpoint(end);
            if self.served[middle] - middle <= rank {
                before = middle + 1;
            } else {
                end = middle;
            }
        }
        &self.dst.hosts(self.b)[rank + before]
    }

    /// A host's rank among those that get the region over the network.
    fn rank(&self, host: u32) -> usize {
        let place = self.dst.hosts(self.b).partition_point(|found| found.host < host);
        place - self.served.partition_point(|served| *served < place)
    }

    /// Ways on which hosts pass the region on, one from each host that has it while there are
    /// enough.
    fn arcs(&self) -> usize {
        self.src.hosts(self.a).len().min(self.needing)
    }

    /// Where the ring of hosts is cut open: behind a source, so that the sources of different
    /// regions load different links.
    fn opening(&self) -> usize {
        let hosts = self.src.hosts(self.a);
        self.rank(hosts[self.turn % hosts.len()].host) % self.needing
    }

    /// The places on the opened ring that an arc has.
    fn arc(&self, arc: usize) -> Range<usize> {
        let arcs = self.arcs();
        arc * self.needing / arcs..(arc + 1) * self.needing / arcs
    }

    /// The arc that a host is on, and how many come before it there.
    fn place_in_arc(&self, rank: usize) -> (usize, usize) {
        let on_ring = (rank + self.needing - self.opening()) % self.needing;
        let arc = ((on_ring + 1) * self.arcs()).div_ceil(self.needing) - 1;
        (arc, on_ring - self.arc(arc).start)
    }

    fn rank_in_arc(&self, arc: usize, place: usize) -> usize {
        (self.arc(arc).start + place + self.opening()) % self.needing
    }
}

/// The `at`-th of `count` parts of a region along a dimension.
fn cut(region: &Region, dim: usize, at: usize, count: usize) -> Region {
    if count == 1 {
        return region.clone();
    }
    let ranges = region.ranges().enumerate().map(|(d, range)| {
        let bound = |at: usize| range.start + range.len() * at / count;
        if d == dim { (bound(at), bound(at + 1)) } else { (range.start, range.end) }
    });
    ranges.collect()
}
