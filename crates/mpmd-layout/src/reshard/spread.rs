//! The route of one region from the devices that have it to the devices that want it.
//!
//! The nearest holder gives. A device that holds the region copies from itself. A process that
//! holds it on another device copies from there. On a host with a holder, other processes get it
//! from that process. Only hosts without a holder get it over the network, each of them once. There
//! one process receives each part and sends it on to the others.
//!
//! Each query is computed from the two tilings alone, so all processes find the same answer. A
//! process asks only for the regions that concern it.

use std::cell::OnceCell;
use std::ops::Range;

use mpmd_base::ProcessId;

use super::tiling::{HostHolders, ProcessHolders, Tiling};
use crate::region::Region;
use crate::topology::{DeviceId, LinkSpeeds};

/// Approximate size in bytes of the chunks in which a larger region travels between processes.
/// Chunks let packing, sending, passing on and unpacking overlap. This size keeps the fixed cost of
/// a message small in proportion.
pub(super) const CHUNK_BYTES: usize = 2 << 20;

/// Minimum size in bytes of each part of a region that is divided over several links.
const PART_BYTES: usize = 1 << 20;

/// Maximum number of chunks of one region. Chunk numbers must fit the piece field of a delivery's
/// id.
pub(super) const MOST_CHUNKS: usize = 1 << 13;

/// The route of one region: the intersection of tile `a` of the source and tile `b` of the
/// destination. A tile is one of the distinct regions of a layout.
pub(super) struct RegionSpread<'a> {
    src: &'a Tiling,
    dst: &'a Tiling,
    a: u32,
    b: u32,
    region: Region,
    /// Index of `b` among the destination tiles that touch `a`. Holders of `a` take turns by it.
    turn: usize,
    /// Index of `a` among the source tiles that touch `b`. The devices and processes that receive
    /// `b` for others take turns by it.
    arrival: OnceCell<usize>,
    /// Indices of the hosts that hold the region already, in the list of the hosts that want it.
    served: Vec<usize>,
    /// Number of hosts that want the region and do not hold it: they get it over the network.
    needing: usize,
    /// True if the hosts that get the region over the network pass it on from one to the next.
    /// False if each of them gets it from a holder.
    relay: bool,
    /// Number of parts into which the region is divided between hosts. Each part has a route of its
    /// own.
    parts: usize,
    /// Number of chunks into which each part is cut. Each chunk is one message.
    chunks: usize,
    /// The dimension along which parts and chunks are cut.
    dim: usize,
}

/// The process and the device from which a region is sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Giver {
    pub(super) process: ProcessId,
    pub(super) device: DeviceId,
}

/// A process that receives a piece, and the device that sends the piece to it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct PieceTaker {
    pub(super) process: ProcessId,
    pub(super) device: DeviceId,
}

/// One tile of a tiling.
#[derive(Clone, Copy)]
pub(super) struct TileRef<'a> {
    pub(super) tiling: &'a Tiling,
    pub(super) tile: u32,
}

/// The position of a host in its arc: a chain of hosts along which the region is passed on.
struct ArcPlace {
    arc: usize,
    place: usize,
}

impl<'a> RegionSpread<'a> {
    /// Computes the route of the region that two tiles share. Returns `None` if they share no
    /// element.
    pub(super) fn new(
        src_tile: TileRef<'a>,
        dst_tile: TileRef<'a>,
        item_bytes: usize,
        links: &LinkSpeeds,
    ) -> Option<Self> {
        let TileRef {
            tiling: src,
            tile: a,
        } = src_tile;
        let TileRef {
            tiling: dst,
            tile: b,
        } = dst_tile;
        let region = src.tile(a).region.intersect(&dst.tile(b).region)?;
        let bytes = region.elements().saturating_mul(item_bytes);
        let mut spread = Self {
            src,
            dst,
            a,
            b,
            region,
            turn: 0,
            arrival: OnceCell::new(),
            served: Vec::new(),
            needing: 0,
            relay: false,
            parts: 1,
            chunks: 1,
            dim: 0,
        };

        let having = src.hosts(a);
        let wanting = dst.hosts(b);
        // Searches from the shorter list: thousands of hosts may hold a tile that thousands of
        // destination tiles are part of.
        if wanting.len() < having.len() {
            let has = |host: &HostHolders| {
                having
                    .binary_search_by_key(&host.host, |found| found.host)
                    .is_ok()
            };
            spread
                .served
                .extend((0..wanting.len()).filter(|at| has(&wanting[*at])));
        } else {
            let place = |host: &HostHolders| {
                wanting
                    .binary_search_by_key(&host.host, |found| found.host)
                    .ok()
            };
            spread.served.extend(having.iter().filter_map(place));
        }

        spread.needing = wanting.len() - spread.served.len();
        let is_one = |host| matches!(src.processes(host), [at] if src.devices(at).len() == 1);
        let alone = matches!(having, [host] if is_one(host));
        if !alone {
            spread.turn = dst.turn(b, &src.tile(a).region);
        }

        let per_source = spread.needing.div_ceil(having.len()) as u64;
        if per_source > 1 {
            let link = links.network;
            // Sent one after the other from the same source, or passed on with each host one chunk
            // behind the host before it.
            let one_by_one = link.nanos(bytes as u64).saturating_mul(per_source);
            let chunk = link
                .nanos(bytes.min(CHUNK_BYTES) as u64)
                .saturating_mul(per_source - 1);
            spread.relay = link.nanos(bytes as u64).saturating_add(chunk) < one_by_one;
        }

        spread.divide(bytes);
        Some(spread)
    }

    /// Returns the region that the two tiles share.
    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    /// Sets the fields `parts`, `chunks` and `dim`. The size of the region is `bytes`.
    fn divide(&mut self, bytes: usize) {
        if bytes < 2 * PART_BYTES.min(CHUNK_BYTES) || !self.leaves_a_process() {
            return;
        }
        // Cutting the outermost dimension that has enough indices keeps parts contiguous.
        let lengths: Vec<usize> = self.region.ranges().map(|range| range.len()).collect();
        let wanted = bytes.div_ceil(CHUNK_BYTES).clamp(1, MOST_CHUNKS);
        let longest = || (0..lengths.len()).max_by_key(|dim| (lengths[*dim], usize::MAX - dim));
        let Some(dim) = lengths
            .iter()
            .position(|length| *length >= wanted)
            .or_else(longest)
        else {
            return;
        };

        self.dim = dim;
        let sources: usize = self
            .src
            .hosts(self.a)
            .iter()
            .map(|host| self.src.processes(host).len())
            .sum();
        if self.needing > 0 && sources > 1 {
            let fewest = (0..self.needing)
                .map(|rank| self.dst.processes(self.needing_host(rank)).len())
                .min()
                .unwrap_or(1);
            self.parts = fewest
                .min(sources)
                .min(bytes / PART_BYTES)
                .min(lengths[dim])
                .max(1);
        }

        let whole = self.region == self.src.tile(self.a).region
            && self.region == self.dst.tile(self.b).region;
        // A whole shard that is not passed on needs no chunks: it is a zero-copy transfer.
        if !whole || self.relay || self.parts > 1 {
            let each = lengths[dim] / self.parts;
            self.chunks = (bytes / self.parts)
                .div_ceil(CHUNK_BYTES)
                .min(each)
                .min(MOST_CHUNKS / self.parts)
                .max(1);
        }
    }

    /// True if some process wants the region and none of its shards of the source array has it.
    fn leaves_a_process(&self) -> bool {
        let without = |process: &ProcessHolders| {
            self.src
                .in_process(self.a, process.process, process.host)
                .is_none()
        };
        self.needing > 0
            || self
                .dst
                .hosts(self.b)
                .iter()
                .any(|host| self.dst.processes(host).iter().any(without))
    }

    /// Returns the number of pieces in which the region moves between processes: the parts times
    /// the chunks of each part.
    pub(super) fn pieces(&self) -> usize {
        self.parts * self.chunks
    }

    pub(super) fn parts(&self) -> usize {
        self.parts
    }

    /// Returns the half-open range of piece indices that part `part` consists of.
    pub(super) fn pieces_of(&self, part: usize) -> Range<usize> {
        part * self.chunks..(part + 1) * self.chunks
    }

    /// Returns the region of piece `piece`.
    pub(super) fn piece(&self, piece: usize) -> Region {
        cut(&self.region, self.dim, piece, self.pieces())
    }

    /// Returns the region of part `part`.
    pub(super) fn part(&self, part: usize) -> Region {
        cut(&self.region, self.dim, part, self.parts)
    }

    /// True if `process`, which runs on `host`, has the region in a shard of the source.
    pub(super) fn has_it(&self, process: ProcessId, host: u32) -> bool {
        self.src.in_process(self.a, process, host).is_some()
    }

    /// Returns the device of process `holding` that sends the region to a device of the same
    /// process. `rank` is the receiver's index among the process's devices without the region.
    pub(super) fn holder(&self, holding: &ProcessHolders, rank: usize) -> DeviceId {
        let devices = self.src.devices(holding);
        devices[(self.turn + rank) % devices.len()]
    }

    /// Returns the device that receives the region first, on behalf of all devices of its process.
    pub(super) fn landing_device(&self, wanting: &ProcessHolders) -> DeviceId {
        let devices = self.dst.devices(wanting);
        if devices.len() == 1 {
            return devices[0];
        }
        let processes = self
            .dst
            .on_host(self.b, wanting.host)
            .map_or(1, |host| self.dst.processes(host).len());
        devices[self.arrival() / processes % devices.len()]
    }

    /// Returns the sender of a part to a process that wants it, or `None` if the process has the
    /// region itself.
    pub(super) fn giver(&self, wanting: &ProcessHolders, part: usize) -> Option<Giver> {
        if self
            .src
            .in_process(self.a, wanting.process, wanting.host)
            .is_some()
        {
            return None;
        }

        if let Some(having) = self.src.on_host(self.a, wanting.host) {
            let neighbours = self.without(wanting.host);
            let rank = neighbours
                .iter()
                .position(|process| process.process == wanting.process)?;
            return Some(self.neighbour(having, neighbours.len(), rank));
        }

        let landing = self.landing(self.dst.on_host(self.b, wanting.host)?, part);
        if landing.process != wanting.process {
            return Some(Giver {
                process: landing.process,
                device: self.landing_device(landing),
            });
        }

        let rank = self.rank(wanting.host);
        if !self.relay {
            return Some(self.source(self.crossing(self.needing, rank, part)));
        }
        let ArcPlace { arc, place } = self.place_in_arc(rank);
        if place == 0 {
            return Some(self.source(self.crossing(self.arcs(), arc, part)));
        }

        let before = self.landing(
            self.needing_host((rank + self.needing - 1) % self.needing),
            part,
        );
        Some(Giver {
            process: before.process,
            device: self.landing_device(before),
        })
    }

    /// Returns the processes to which `process`, which runs on `host`, sends a part.
    pub(super) fn takers(&self, process: ProcessId, host: u32, part: usize) -> Vec<PieceTaker> {
        if self.has_it(process, host) {
            self.takers_from_holder(process, host, part)
        } else {
            self.takers_from_landing(process, host, part)
        }
    }

    /// Returns the processes to which a process that holds the region sends a part: neighbours on
    /// its host, and the first processes of other hosts.
    fn takers_from_holder(&self, process: ProcessId, host: u32, part: usize) -> Vec<PieceTaker> {
        let mut takers = Vec::new();
        let mut give = |giver: Giver, taker: &ProcessHolders| {
            if giver.process == process {
                takers.push(PieceTaker {
                    process: taker.process,
                    device: giver.device,
                });
            }
        };

        if let Some(having) = self.src.on_host(self.a, host) {
            let neighbours = self.without(host);
            for (rank, taker) in neighbours.iter().enumerate() {
                give(self.neighbour(having, neighbours.len(), rank), taker);
            }
        }

        let starts = if self.relay {
            self.arcs()
        } else {
            self.needing
        };
        for start in 0..starts {
            let giver = self.source(self.crossing(starts, start, part));
            if giver.process == process {
                let rank = if self.relay {
                    self.rank_in_arc(start, 0)
                } else {
                    start
                };
                give(giver, self.landing(self.needing_host(rank), part));
            }
        }
        takers
    }

    /// Returns the processes to which a process that does not hold the region passes a part on.
    /// Empty unless this process is the first on its host to receive the part.
    fn takers_from_landing(&self, process: ProcessId, host: u32, part: usize) -> Vec<PieceTaker> {
        let mut takers = Vec::new();
        let Some(here) = self.dst.on_host(self.b, host) else {
            return takers;
        };
        let landing = self.landing(here, part);
        if landing.process != process || self.src.on_host(self.a, host).is_some() {
            return takers;
        }

        let device = self.landing_device(landing);
        let taker = |process| PieceTaker { process, device };
        if self.relay {
            let ArcPlace { arc, place } = self.place_in_arc(self.rank(host));
            if place + 1 < self.arc(arc).len() {
                // The network transfer comes first.
                let next = self.needing_host(self.rank_in_arc(arc, place + 1));
                takers.push(taker(self.landing(next, part).process));
            }
        }

        let others = self
            .dst
            .processes(here)
            .iter()
            .filter(|other| other.process != process);
        takers.extend(others.map(|other| taker(other.process)));
        takers
    }

    /// Returns the number of transfers after which a part reaches the first device of a process. It
    /// is 1 if a holder sends it directly.
    pub(super) fn step(&self, wanting: &ProcessHolders, part: usize) -> u32 {
        if self.src.on_host(self.a, wanting.host).is_some() {
            return 1;
        }

        let passed = if self.relay {
            self.place_in_arc(self.rank(wanting.host)).place as u32
        } else {
            0
        };
        let landing = self
            .dst
            .on_host(self.b, wanting.host)
            .map(|host| self.landing(host, part).process);
        passed
            + if landing == Some(wanting.process) {
                1
            } else {
                2
            }
    }

    /// Returns the processes of a host that want the region and do not hold it.
    fn without(&self, host: u32) -> Vec<&'a ProcessHolders> {
        let wanting = self
            .dst
            .on_host(self.b, host)
            .map_or(&[][..], |host| self.dst.processes(host));
        let without = |process: &&ProcessHolders| {
            self.src
                .in_process(self.a, process.process, process.host)
                .is_none()
        };
        wanting.iter().filter(without).collect()
    }

    /// Returns the holder that sends the region to a process on its own host. `rank` is the
    /// receiver's index among the host's `count` processes without the region.
    fn neighbour(&self, having: &HostHolders, count: usize, rank: usize) -> Giver {
        self.among(having, self.turn * count + rank)
    }

    /// Returns the process that first receives a part on a host without the region. It passes the
    /// part on to the host's other wanting processes.
    fn landing(&self, wanting: &HostHolders, part: usize) -> &'a ProcessHolders {
        let processes = self.dst.processes(wanting);
        if processes.len() == 1 {
            return &processes[0];
        }
        &processes[(self.arrival() + part) % processes.len()]
    }

    fn arrival(&self) -> usize {
        *self
            .arrival
            .get_or_init(|| self.src.turn(self.a, &self.dst.tile(self.b).region))
    }

    /// Returns the sequence number of a part's transfer between hosts, counted over all regions of
    /// the source tile `a`. Each part has `transfers` transfers; `index` is the number of this one.
    fn crossing(&self, transfers: usize, index: usize, part: usize) -> usize {
        (self.turn * transfers + index) * self.parts + part
    }

    /// Returns the holder that sends in the transfer between hosts with sequence number `crossing`.
    /// Hosts take turns, then their processes, then their devices.
    fn source(&self, crossing: usize) -> Giver {
        let hosts = self.src.hosts(self.a);
        self.among(&hosts[crossing % hosts.len()], crossing / hosts.len())
    }

    fn among(&self, host: &HostHolders, turn: usize) -> Giver {
        let processes = self.src.processes(host);
        let process = &processes[turn % processes.len()];
        let devices = self.src.devices(process);
        Giver {
            process: process.process,
            device: devices[turn / processes.len() % devices.len()],
        }
    }

    /// Returns the host with index `rank` among the hosts that get the region over the network.
    fn needing_host(&self, rank: usize) -> &'a HostHolders {
        // Counts the served hosts before it. A binary search works because the number of needing
        // hosts before each served one never decreases.
        let mut before = 0;
        let mut end = self.served.len();
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

    /// Returns the index of `host` among the hosts that get the region over the network.
    fn rank(&self, host: u32) -> usize {
        let place = self
            .dst
            .hosts(self.b)
            .partition_point(|found| found.host < host);
        place - self.served.partition_point(|served| *served < place)
    }

    /// Returns the number of arcs: chains of hosts along which the region is passed on. There is
    /// one for each host that holds the region, but no more than hosts that need it.
    fn arcs(&self) -> usize {
        self.src.hosts(self.a).len().min(self.needing)
    }

    /// Returns the index of the host at which the ring of needing hosts is cut open: the first one
    /// after a source. So the sources of different regions load different links.
    fn opening(&self) -> usize {
        let hosts = self.src.hosts(self.a);
        self.rank(hosts[self.turn % hosts.len()].host) % self.needing
    }

    /// Returns the range of positions that arc `arc` has on the ring of needing hosts. Position 0
    /// is the opening.
    fn arc(&self, arc: usize) -> Range<usize> {
        let arcs = self.arcs();
        arc * self.needing / arcs..(arc + 1) * self.needing / arcs
    }

    /// Returns the arc of the needing host with index `rank`, and its position in the arc.
    fn place_in_arc(&self, rank: usize) -> ArcPlace {
        let on_ring = (rank + self.needing - self.opening()) % self.needing;
        let arc = ((on_ring + 1) * self.arcs()).div_ceil(self.needing) - 1;
        ArcPlace {
            arc,
            place: on_ring - self.arc(arc).start,
        }
    }

    fn rank_in_arc(&self, arc: usize, place: usize) -> usize {
        (self.arc(arc).start + place + self.opening()) % self.needing
    }
}

/// Divides `region` into `count` parts along dimension `dim` and returns the part with index `at`.
fn cut(region: &Region, dim: usize, at: usize, count: usize) -> Region {
    if count == 1 {
        return region.clone();
    }
    let ranges = region.ranges().enumerate().map(|(d, range)| {
        let bound = |at: usize| range.start + range.len() * at / count;
        if d == dim {
            (bound(at), bound(at + 1))
        } else {
            (range.start, range.end)
        }
    });
    ranges.collect()
}
