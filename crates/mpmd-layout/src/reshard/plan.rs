//! Plans the pieces that turn an array of one layout into another layout.

use std::collections::BTreeMap;

use mpmd_base::ProcessId;

use super::spread::{RegionSpread, TileRef};
use super::tiling::{ProcessHolders, Tiling};
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
/// It is a pure function of the two layouts, the topology and the size of an element, and so the
/// same on every process. It stores only the two tilings. [`part_of`](ReshardPlan::part_of)
/// computes the work of one process without listing the work of the others.
///
/// If several devices hold a region, a destination device takes the region from itself if it can.
/// Next come devices of its process, then devices of its host. Equally near devices take turns.
///
/// A region that several devices want crosses the network once for each host without it. On a host
/// it goes once to each process without it, and the process copies it to its devices. If several
/// hosts want the region, each of them may pass it on to the next. They do if the topology's link
/// costs make this cheaper than repeated sends by the holders.
#[derive(Clone, Debug)]
pub struct ReshardPlan {
    /// The source's tiles: one tiling for each partial sum.
    sources: Vec<Tiling>,
    dst: Tiling,
    dst_devices: Vec<DeviceId>,
    topology: Topology,
    item_bytes: usize,
}

/// One region that moves from one device to another, or stays on the same device.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
pub struct ReshardPiece {
    /// The device that sends the region.
    pub src: DeviceId,
    /// The device that needs the region.
    pub dst: DeviceId,
    /// The moved part of the whole array. Never empty.
    pub region: Region,
    /// Index of the source's partial sum that the region is a part of; 0 if the source is not
    /// unreduced.
    pub term: u32,
    /// Position of this move in its chain of moves. It is 1 if `src` holds the region in the source
    /// array. If `src` received the region in another piece, it is one more than the step of that
    /// piece.
    pub step: u32,
}

/// The work of one process in a [`ReshardPlan`].
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct ProcessPart {
    /// The copies, sends and receives of the process, in ascending order of their ids.
    pub deliveries: Vec<PieceDelivery>,
}

/// A region that a process holds or receives, and the devices and processes that it passes the
/// region to.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PieceDelivery {
    /// The transfer's id in messages. The sending and the receiving process compute the same id.
    pub id: u64,
    /// Index of the source's partial sum that the region is a part of; 0 if the source is not
    /// unreduced.
    pub term: u32,
    /// The delivered part of the whole array. Never empty.
    pub region: Region,
    /// The device or process that the region is taken from.
    pub from: DeliveryOrigin,
    /// The device whose shard of the source array contains the region. `None` if the sending
    /// process has no such shard: it received the region and only passes it on.
    pub giver: Option<DeviceId>,
    /// The devices of this process that need the region in the destination array.
    pub targets: Vec<DeviceId>,
    /// The processes to which this process sends the region.
    pub peers: Vec<ProcessId>,
}

/// The device or process from which a process takes a region.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum DeliveryOrigin {
    /// The source array's shard on this device, which belongs to the process.
    Device(DeviceId),
    /// Another process, which sends the region.
    Process(ProcessId),
}

/// Totals of a plan: its pieces, its steps, and its bytes for each class of links.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Summary {
    /// Number of pieces of the plan.
    pub pieces: usize,
    /// Bytes over each class of links, indexed in the order of [`LinkClass::ALL`].
    pub bytes: [u64; 4],
    /// Bytes that the busiest device sends to other devices.
    pub max_bytes_sent_by_a_device: u64,
    /// Length of the longest chain of pieces in which each waits for the one before it; 0 if
    /// nothing is moved.
    pub steps: u32,
}

/// The reason that two layouts have no reshard plan. Always the caller's fault, and the same on
/// every process.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ReshardError {
    /// The source and destination layouts have different shapes.
    #[error("an array of shape {found:?} does not become one of shape {expected:?} by moving it")]
    Shape {
        /// Shape of the destination layout.
        expected: Vec<usize>,
        /// Shape of the source layout.
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
    /// The source or destination layout has more devices, or the source layout more partial sums,
    /// than the ids of deliveries can number.
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

/// Plans the moves from an array laid out as `src` to an array laid out as `dst`, with elements of
/// `item_bytes` bytes. Moves no data and lists no pieces: the methods of [`ReshardPlan`] compute
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
) -> Result<ReshardPlan, ReshardError> {
    if src.shape() != dst.shape() {
        return Err(ReshardError::Shape {
            expected: dst.shape().to_vec(),
            found: src.shape().to_vec(),
        });
    }

    let devices = src.devices().len().max(dst.devices().len());
    let terms = src.terms();
    let most_devices = 1 << TILE_BITS;
    let most_terms = 1 << TERM_BITS;
    if devices > most_devices || terms > most_terms {
        return Err(ReshardError::TooLarge {
            devices,
            terms,
            most_devices,
            most_terms,
        });
    }

    // invariant: every-element-once
    Ok(ReshardPlan {
        sources: (0..terms)
            .map(|term| Tiling::new(src, term, topology))
            .collect::<Result<_, _>>()?,
        dst: Tiling::new(dst, 0, topology)?,
        dst_devices: dst.devices().to_vec(),
        topology: topology.clone(),
        item_bytes,
    })
}

impl ReshardPlan {
    /// Returns the deliveries that one process carries out: its copies, sends and receives.
    pub fn part_of(&self, process: ProcessId) -> ProcessPart {
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
                    let pair = TilePair {
                        term,
                        src: a,
                        dst: *b,
                    };
                    self.deliveries(pair, process, host, &mut deliveries);
                }
            }

            // Source tiles that this process gives to others and does not want itself.
            for a in tiles(src) {
                for b in self.dst.touching(&src.tile(a).region) {
                    if wanted.binary_search(&b).is_err() {
                        let pair = TilePair {
                            term,
                            src: a,
                            dst: b,
                        };
                        self.deliveries(pair, process, host, &mut deliveries);
                    }
                }
            }
        }

        deliveries.sort_unstable_by_key(|delivery| (delivery.id, delivery.from));
        ProcessPart { deliveries }
    }

    /// Returns every piece, in an order in which they can be executed one after the other. They are
    /// sorted by step, then by the destination's device order, then by partial sum and region.
    pub fn pieces(&self) -> Vec<ReshardPiece> {
        let mut pieces = Vec::new();
        for dst in &self.dst_devices {
            let Some(b) = self.dst.tile_of(*dst) else {
                continue;
            };
            for (term, src) in self.sources.iter().enumerate() {
                for a in src.touching(&self.dst.tile(b).region) {
                    let pair = TilePair {
                        term,
                        src: a,
                        dst: b,
                    };
                    self.pieces_to(*dst, pair, &mut pieces);
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
    /// instead of listing pieces: an array gathered on each of n devices has n² pieces.
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

    /// Returns the route of the region that the two tiles of `pair` share, or `None` if they share
    /// no element.
    fn spread(&self, pair: TilePair) -> Option<RegionSpread<'_>> {
        let src = TileRef {
            tiling: &self.sources[pair.term],
            tile: pair.src,
        };
        let dst = TileRef {
            tiling: &self.dst,
            tile: pair.dst,
        };
        RegionSpread::new(src, dst, self.item_bytes, self.topology.links())
    }

    /// Appends the deliveries of process `process` on host `host` for the region that the two tiles
    /// of `pair` share.
    fn deliveries(
        &self,
        pair: TilePair,
        process: ProcessId,
        host: u32,
        into: &mut Vec<PieceDelivery>,
    ) {
        let Some(spread) = self.spread(pair) else {
            return;
        };
        let holding = self.sources[pair.term].in_process(pair.src, process, host);
        let wanting = self.dst.in_process(pair.dst, process, host);

        if let Some(holding) = holding {
            self.deliveries_inside(pair, &spread, holding, wanting, into);
            deliveries_to_peers(pair, &spread, holding, into);
        } else if let Some(wanting) = wanting {
            self.deliveries_from_peers(pair, &spread, wanting, into);
        }
    }

    /// Appends the deliveries between devices of one process that holds the source tile.
    fn deliveries_inside(
        &self,
        pair: TilePair,
        spread: &RegionSpread<'_>,
        holding: &ProcessHolders,
        wanting: Option<&ProcessHolders>,
        into: &mut Vec<PieceDelivery>,
    ) {
        for (device, targets) in self.local(spread, pair, holding, wanting) {
            into.push(PieceDelivery {
                id: pair.delivery_id(0),
                term: pair.term as u32,
                region: spread.region().clone(),
                from: DeliveryOrigin::Device(device),
                giver: Some(device),
                targets,
                peers: Vec::new(),
            });
        }
    }

    /// Appends the deliveries of a process without the region: it receives the region and may pass
    /// it on to peers.
    fn deliveries_from_peers(
        &self,
        pair: TilePair,
        spread: &RegionSpread<'_>,
        wanting: &ProcessHolders,
        into: &mut Vec<PieceDelivery>,
    ) {
        for part in 0..spread.parts() {
            let Some(giver) = spread.giver(wanting, part) else {
                continue;
            };
            let has_it = spread.has_it(giver.process, self.topology.host_of(giver.process));
            let takers = spread
                .takers(wanting.process, wanting.host, part)
                .into_iter();
            let peers: Vec<ProcessId> = takers.map(|taker| taker.process).collect();

            for piece in spread.pieces_of(part) {
                into.push(PieceDelivery {
                    id: pair.delivery_id(piece),
                    term: pair.term as u32,
                    region: spread.piece(piece),
                    from: DeliveryOrigin::Process(giver.process),
                    giver: has_it.then_some(giver.device),
                    targets: self.dst.devices(wanting).to_vec(),
                    peers: peers.clone(),
                });
            }
        }
    }

    /// Maps each source device of a process to the process's destination devices that copy from it.
    /// The process holds the source tile.
    fn local(
        &self,
        spread: &RegionSpread<'_>,
        pair: TilePair,
        holding: &ProcessHolders,
        wanting: Option<&ProcessHolders>,
    ) -> BTreeMap<DeviceId, Vec<DeviceId>> {
        let mut by_device: BTreeMap<DeviceId, Vec<DeviceId>> = BTreeMap::new();
        let mut rank = 0;

        for target in wanting.map_or(&[][..], |wanting| self.dst.devices(wanting)) {
            let from = if self.sources[pair.term].tile_of(*target) == Some(pair.src) {
                *target
            } else {
                rank += 1;
                spread.holder(holding, rank - 1)
            };
            by_device.entry(from).or_default().push(*target);
        }

        by_device
    }

    /// Appends the pieces that bring the region shared by the two tiles of `pair` to device `dst`.
    fn pieces_to(&self, dst: DeviceId, pair: TilePair, into: &mut Vec<ReshardPiece>) {
        let Some(spread) = self.spread(pair) else {
            return;
        };
        let Some(process) = self.topology.process_of(dst) else {
            return;
        };
        let host = self.topology.host_of(process);
        let Some(wanting) = self.dst.in_process(pair.dst, process, host) else {
            return;
        };

        let term = pair.term as u32;
        let piece = |src, region, step| ReshardPiece {
            src,
            dst,
            region,
            term,
            step,
        };

        if let Some(holding) = self.sources[pair.term].in_process(pair.src, process, host) {
            let local = self.local(&spread, pair, holding, Some(wanting));
            let from = local
                .into_iter()
                .find(|(_, targets)| targets.contains(&dst));
            into.extend(from.map(|(src, _)| piece(src, spread.region().clone(), 1)));
            return;
        }

        let landing = spread.landing_device(wanting);
        for part in 0..spread.parts() {
            let Some(giver) = spread.giver(wanting, part) else {
                continue;
            };
            let region = spread.part(part);
            let step = spread.step(wanting, part);
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

/// Returns the id of delivery `id` of leaf `leaf`, for leaves that move in one operation. The
/// leaves must not have partial sums: the id's field for the partial sum holds `leaf`.
pub fn joined(id: u64, leaf: u32) -> u64 {
    id | u64::from(leaf) << (2 * TILE_BITS + PIECE_BITS)
}

/// A source tile and a destination tile, by their indices in their tilings.
#[derive(Clone, Copy)]
struct TilePair {
    /// Index of the partial sum that `src` belongs to.
    term: usize,
    src: u32,
    dst: u32,
}

impl TilePair {
    /// Returns the delivery id of piece number `piece` of the region that the two tiles share.
    fn delivery_id(self, piece: usize) -> u64 {
        let tiles = (self.term as u64) << TILE_BITS | u64::from(self.src);
        (tiles << TILE_BITS | u64::from(self.dst)) << PIECE_BITS | piece as u64
    }
}

/// Appends the deliveries from a process that holds the region to peer processes.
fn deliveries_to_peers(
    pair: TilePair,
    spread: &RegionSpread<'_>,
    holding: &ProcessHolders,
    into: &mut Vec<PieceDelivery>,
) {
    for part in 0..spread.parts() {
        let mut by_device: BTreeMap<DeviceId, Vec<ProcessId>> = BTreeMap::new();
        for taker in spread.takers(holding.process, holding.host, part) {
            by_device
                .entry(taker.device)
                .or_default()
                .push(taker.process);
        }

        for (device, peers) in &by_device {
            for piece in spread.pieces_of(part) {
                into.push(PieceDelivery {
                    id: pair.delivery_id(piece),
                    term: pair.term as u32,
                    region: spread.piece(piece),
                    from: DeliveryOrigin::Device(*device),
                    giver: Some(*device),
                    targets: Vec::new(),
                    peers: peers.clone(),
                });
            }
        }
    }
}
