//! Plans the pieces that turn an array of one layout into another layout.

use std::collections::BTreeMap;

use mpmd_base::ProcessId;

use super::spread::Spread;
use super::tiling::{Process, Tiling};
use crate::region::Region;
use crate::sharding::Layout;
use crate::topology::{DeviceId, LinkClass, Topology};

/// Field widths of a delivery's id in bits: the partial sum, the tiles of source and destination,
/// and the piece of their intersection. The highest bit is free for other kinds of ids.
const TERM_BITS: u32 = 10;
const TILE_BITS: u32 = 20;
const PIECE_BITS: u32 = 13;

/// Maximum number of leaves that may move in one operation ([`joined`]).
pub const MOST_JOINED: usize = 1 << TERM_BITS;

/// A plan of the moves that fill every destination region exactly once.
///
/// A pure function of the two layouts, the topology and the size of an element, and so the same on
/// every process. It stores only the two tilings. [`part_of`](Plan::part_of) computes the work of
/// one process without listing the work of the others.
///
/// If several devices hold a region, a destination takes it from its own device first, then from
/// its process, then from its host. Equally near devices take turns. A region that several devices
/// want crosses the network once for each host without it. On a host it goes once to each process
/// without it, and spreads inside the process. If several hosts want it, each host may pass it on
/// to the next. This happens where the topology's link costs make it cheaper than sending it from
/// its holders repeatedly.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The source's tiles: one tiling for each partial sum.
    sources: Vec<Tiling>,
    dst: Tiling,
    dst_devices: Vec<DeviceId>,
    topology: Topology,
    item_bytes: usize,
}

/// One region that moves from one device to another, or stays on the same device.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct Piece {
    /// The device that sends the region.
    pub src: DeviceId,
    /// The device that needs the region.
    pub dst: DeviceId,
    /// The moved part of the whole array. Never empty.
    pub region: Region,
    /// Index of the source's partial sum that the region is a part of; 0 if the source is not
    /// unreduced.
    pub term: u32,
    /// The place of this move in its chain of moves. It is 1 if `src` holds the region in the
    /// source array. If `src` passes on a region that it received, it is one more than the step of
    /// that piece.
    pub step: u32,
}

/// The work of one process in a [`Plan`].
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Part {
    /// The deliveries, in ascending order of their ids.
    pub deliveries: Vec<Delivery>,
}

/// A region that a process holds or receives, with the devices and processes that get it from
/// there.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Delivery {
    /// The id of the transfer in messages. The sending and the receiving process compute the same
    /// id.
    pub id: u64,
    /// Index of the source's partial sum that the region is a part of; 0 if the source is not
    /// unreduced.
    pub term: u32,
    /// The delivered part of the whole array. Never empty.
    pub region: Region,
    /// The device or process that the region comes from.
    pub from: Origin,
    /// The device that holds the region in its shard of the source array. `None` if the sending
    /// process has no such shard and passes on the region alone, as it received it.
    pub giver: Option<DeviceId>,
    /// The devices of this process that need the region in the destination array.
    pub targets: Vec<DeviceId>,
    /// The processes to which this process sends the region.
    pub peers: Vec<ProcessId>,
}

/// The place from which a process takes a region.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Origin {
    /// The source array's shard on this device, which belongs to the process.
    Device(DeviceId),
    /// Another process, which sends the region.
    Process(ProcessId),
}

/// Totals of a plan: its pieces, its steps, and its bytes for each class of links.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Summary {
    /// Number of pieces.
    pub pieces: usize,
    /// Bytes over each class of links, indexed in the order of [`LinkClass::ALL`].
    pub bytes: [u64; 4],
    /// Bytes that the busiest device sends to other devices.
    pub max_bytes_sent_by_a_device: u64,
    /// Length of the longest chain of pieces in which each waits for the one before it; 0 if
    /// nothing is moved.
    pub steps: u32,
}

/// The reason that there is no plan. Always the caller's fault, and the same on every process.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReshardError {
    /// The layouts are of arrays of different shapes.
    #[error("an array of shape {found:?} does not become one of shape {expected:?} by moving it")]
    Shape {
        /// The destination's shape.
        expected: Vec<usize>,
        /// The source's shape.
        found: Vec<usize>,
    },
    /// A layout has a device that the job does not have.
    #[error("there is no device {device} in a job of {devices} devices")]
    UnknownDevice {
        /// The device that the job lacks.
        device: DeviceId,
        /// Number of devices in the job.
        devices: usize,
    },
    /// There are more devices or partial sums than the ids of deliveries can number.
    #[error(
        "a layout of {devices} devices with {terms} partial sums is too large: at most \
         {most_devices} and {most_terms}"
    )]
    TooLarge {
        /// Number of devices of the larger of the two layouts.
        devices: usize,
        /// Number of partial sums of the source.
        terms: usize,
        /// The largest allowed number of devices.
        most_devices: usize,
        /// The largest allowed number of partial sums.
        most_terms: usize,
    },
}

/// Plans the moves from an array laid out as `src` to one laid out as `dst`, with elements of
/// `item_bytes` bytes. Moves no data, and lists no pieces yet: the methods of [`Plan`] compute
/// them.
///
/// If the source is unreduced, the pieces of all its partial sums go to every device that wants
/// their sum. If the destination is unreduced, only the devices of its first partial sum receive
/// pieces.
///
/// # Errors
///
/// If the shapes differ or a device is not part of the job. Also if a layout has more than 2^20
/// devices, or the source more than 2^10 partial sums.
pub fn plan(
    src: &Layout,
    dst: &Layout,
    item_bytes: usize,
    topology: &Topology,
) -> Result<Plan, ReshardError> {
    if src.shape() != dst.shape() {
        return Err(ReshardError::Shape {
            expected: dst.shape().to_vec(),
            found: src.shape().to_vec(),
        });
    }
    let (devices, terms) = (src.devices().len().max(dst.devices().len()), src.terms());
    let (most_devices, most_terms) = (1 << TILE_BITS, 1 << TERM_BITS);
    if devices > most_devices || terms > most_terms {
        return Err(ReshardError::TooLarge {
            devices,
            terms,
            most_devices,
            most_terms,
        });
    }
    Ok(Plan {
        sources: (0..terms)
            .map(|term| Tiling::new(src, term, topology))
            .collect::<Result<_, _>>()?,
        dst: Tiling::new(dst, 0, topology)?,
        dst_devices: dst.devices().to_vec(),
        topology: topology.clone(),
        item_bytes,
    })
}

impl Plan {
    /// Returns the deliveries that one process carries out: its copies, sends and receives.
    pub fn part_of(&self, process: ProcessId) -> Part {
        let host = self.topology.host_of(process);
        let tiles = |tiling: &Tiling| {
            let devices = self.topology.devices_of(process).iter();
            let mut tiles: Vec<u32> = devices
                .filter_map(|device| tiling.tile_of(*device))
                .collect();
            tiles.sort_unstable();
            tiles.dedup();
            tiles
        };
        let wanted = tiles(&self.dst);
        let mut deliveries = Vec::new();
        for (term, src) in self.sources.iter().enumerate() {
            for b in &wanted {
                for a in src.touching(&self.dst.tile(*b).region) {
                    self.deliveries(term, a, *b, process, host, &mut deliveries);
                }
            }
            // Source tiles that this process gives to others and does not want itself.
            for a in tiles(src) {
                for b in self.dst.touching(&src.tile(a).region) {
                    if wanted.binary_search(&b).is_err() {
                        self.deliveries(term, a, b, process, host, &mut deliveries);
                    }
                }
            }
        }
        deliveries.sort_unstable_by_key(|delivery| (delivery.id, delivery.from));
        Part { deliveries }
    }

    /// Returns every piece, in an order in which they can be executed one after the other. They are
    /// sorted by step, then by the destination's device order, then by partial sum and region.
    pub fn pieces(&self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for dst in &self.dst_devices {
            let Some(b) = self.dst.tile_of(*dst) else {
                continue;
            };
            for (term, src) in self.sources.iter().enumerate() {
                for a in src.touching(&self.dst.tile(b).region) {
                    self.pieces_to(*dst, term, a, b, &mut pieces);
                }
            }
        }
        // The sort is stable: within a step the pieces are already in order.
        pieces.sort_by_key(|piece| piece.step);
        pieces
    }

    /// Computes the plan's totals. Takes time linear in the number of pieces.
    pub fn summary(&self) -> Summary {
        let mut summary = Summary::default();
        let mut sent: BTreeMap<DeviceId, u64> = BTreeMap::new();
        for piece in self.pieces() {
            let bytes = (piece.region.elements() as u64).saturating_mul(self.item_bytes as u64);
            let link = self
                .topology
                .link_between(piece.src, piece.dst)
                .unwrap_or(LinkClass::Network);
            summary.pieces += 1;
            summary.bytes[link as usize] = summary.bytes[link as usize].saturating_add(bytes);
            summary.steps = summary.steps.max(piece.step);
            if piece.src != piece.dst {
                let sent = sent.entry(piece.src).or_default();
                *sent = sent.saturating_add(bytes);
            }
        }
        summary.max_bytes_sent_by_a_device = sent.into_values().max().unwrap_or(0);
        summary
    }

    /// Returns the [bytes](Summary::bytes) of the plan over each class of links. Counts devices
    /// without listing pieces: a whole array gathered from n devices on each of them has n² pieces.
    pub(super) fn bytes_over_links(&self) -> [u64; 4] {
        let mut bytes = [0u64; 4];
        for src in &self.sources {
            for b in 0..self.dst.len() {
                let wanting = self.dst.holders(b);
                for a in src.touching(&self.dst.tile(b).region) {
                    let Some(region) = src.tile(a).region.intersect(&self.dst.tile(b).region)
                    else {
                        continue;
                    };
                    let both = src.common_holders(a, &self.dst, b);
                    // One copy crosses to each host without the region. From there, or from a
                    // holder of the host, one goes to each other process, and so to each device.
                    let network = wanting.hosts - both.hosts;
                    let host = wanting.processes - both.processes - network;
                    let process = wanting.devices - both.devices - network - host;
                    let of_region =
                        (region.elements() as u64).saturating_mul(self.item_bytes as u64);
                    for (class, copies) in [
                        (LinkClass::SameDevice, both.devices),
                        (LinkClass::SameProcess, process),
                        (LinkClass::SameHost, host),
                        (LinkClass::Network, network),
                    ] {
                        let moved = of_region.saturating_mul(copies as u64);
                        bytes[class as usize] = bytes[class as usize].saturating_add(moved);
                    }
                }
            }
        }
        bytes
    }

    /// Returns the intersection of tiles `a` and `b` and its route, or `None` if they share
    /// nothing.
    fn spread(&self, term: usize, a: u32, b: u32) -> Option<(Region, Spread<'_>)> {
        let src = &self.sources[term];
        let region = src.tile(a).region.intersect(&self.dst.tile(b).region)?;
        let spread = Spread::new(
            (src, a),
            (&self.dst, b),
            &region,
            self.item_bytes,
            self.topology.links(),
        );
        Some((region, spread))
    }

    /// Appends the deliveries of process `process` on host `host` for the intersection of tiles `a`
    /// and `b`.
    fn deliveries(
        &self,
        term: usize,
        a: u32,
        b: u32,
        process: ProcessId,
        host: u32,
        into: &mut Vec<Delivery>,
    ) {
        let Some((region, spread)) = self.spread(term, a, b) else {
            return;
        };
        let wanting = self.dst.in_process(b, process, host);
        let delivery = |piece: usize, region: Region, (from, giver), targets, peers| Delivery {
            id: number(term, a, b, piece),
            term: term as u32,
            region,
            from,
            giver,
            targets,
            peers,
        };
        let here = |device: DeviceId| (Origin::Device(device), Some(device));
        let Some(holding) = self.sources[term].in_process(a, process, host) else {
            let Some(wanting) = wanting else { return };
            for part in 0..spread.parts() {
                let Some(giver) = spread.giver(wanting, part) else {
                    continue;
                };
                let has_it = spread.has_it(giver.process, self.topology.host_of(giver.process));
                let from = (
                    Origin::Process(giver.process),
                    has_it.then_some(giver.device),
                );
                let takers = spread.takers(process, host, part).into_iter();
                let peers: Vec<ProcessId> = takers.map(|(peer, _)| peer).collect();
                for piece in spread.pieces_of(part) {
                    let targets = self.dst.devices(wanting).to_vec();
                    let region = spread.piece(&region, piece);
                    into.push(delivery(piece, region, from, targets, peers.clone()));
                }
            }
            return;
        };
        for (device, targets) in self.local(&spread, term, a, holding, wanting) {
            into.push(delivery(
                0,
                region.clone(),
                here(device),
                targets,
                Vec::new(),
            ));
        }
        for part in 0..spread.parts() {
            let mut by_device: BTreeMap<DeviceId, Vec<ProcessId>> = BTreeMap::new();
            for (peer, device) in spread.takers(process, host, part) {
                by_device.entry(device).or_default().push(peer);
            }
            for (device, peers) in &by_device {
                for piece in spread.pieces_of(part) {
                    let region = spread.piece(&region, piece);
                    into.push(delivery(
                        piece,
                        region,
                        here(*device),
                        Vec::new(),
                        peers.clone(),
                    ));
                }
            }
        }
    }

    /// Maps each giving device of a process that holds tile `a` to the process' devices that copy
    /// from it.
    fn local(
        &self,
        spread: &Spread<'_>,
        term: usize,
        a: u32,
        holding: &Process,
        wanting: Option<&Process>,
    ) -> BTreeMap<DeviceId, Vec<DeviceId>> {
        let mut by_device: BTreeMap<DeviceId, Vec<DeviceId>> = BTreeMap::new();
        let mut rank = 0;
        for target in wanting.map_or(&[][..], |wanting| self.dst.devices(wanting)) {
            let from = if self.sources[term].tile_of(*target) == Some(a) {
                *target
            } else {
                rank += 1;
                spread.holder(holding, rank - 1)
            };
            by_device.entry(from).or_default().push(*target);
        }
        by_device
    }

    /// Appends the pieces that bring the intersection of tiles `a` and `b` to device `dst`.
    fn pieces_to(&self, dst: DeviceId, term: usize, a: u32, b: u32, into: &mut Vec<Piece>) {
        let Some((region, spread)) = self.spread(term, a, b) else {
            return;
        };
        let Some(process) = self.topology.process_of(dst) else {
            return;
        };
        let host = self.topology.host_of(process);
        let Some(wanting) = self.dst.in_process(b, process, host) else {
            return;
        };
        let term_number = term as u32;
        let piece = |src, region, step| Piece {
            src,
            dst,
            region,
            term: term_number,
            step,
        };
        if let Some(holding) = self.sources[term].in_process(a, process, host) {
            let local = self.local(&spread, term, a, holding, Some(wanting));
            let from = local
                .into_iter()
                .find(|(_, targets)| targets.contains(&dst));
            into.extend(from.map(|(src, _)| piece(src, region, 1)));
            return;
        }
        let landing = spread.landing_device(wanting);
        for part in 0..spread.parts() {
            let Some(giver) = spread.giver(wanting, part) else {
                continue;
            };
            let (region, step) = (spread.part(&region, part), spread.step(wanting, part));
            // The other devices of the process copy it from the landing device.
            into.push(if dst == landing {
                piece(giver.device, region, step)
            } else {
                piece(landing, region, step + 1)
            });
        }
    }
}

impl Summary {
    /// Returns the bytes that move over links of `class`.
    pub fn bytes_over(&self, class: LinkClass) -> u64 {
        self.bytes[class as usize]
    }
}

/// Returns the number of delivery `id` of the leaf with index `leaf`, for leaves that move in one
/// operation. None of them may have partial sums: `leaf` takes the place of the partial sum.
pub fn joined(id: u64, leaf: u32) -> u64 {
    id | u64::from(leaf) << (2 * TILE_BITS + PIECE_BITS)
}

fn number(term: usize, a: u32, b: u32, piece: usize) -> u64 {
    (((term as u64) << TILE_BITS | u64::from(a)) << TILE_BITS | u64::from(b)) << PIECE_BITS
        | piece as u64
}
