//! A layout as a set of distinct regions (tiles), each with its holders.
//!
//! Most layouts are grids: each dimension is cut into ranges, and every combination of ranges is a
//! tile. A search in each dimension finds the tiles that a region touches, so pairs of tiles of two
//! layouts are never listed. Layouts that are not grids are searched along one dimension.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::ops::Range;

use mpmd_base::ProcessId;

use super::ReshardError;
use crate::region::Region;
use crate::sharding::Layout;
use crate::topology::{DeviceId, Topology};

/// The tiles of a layout, which are its distinct non-empty regions, and the devices that hold them.
#[derive(Clone, Debug)]
pub(super) struct Tiling {
    tiles: Vec<LayoutTile>,
    /// The hosts that hold each tile, grouped by tile and ascending in each group. The field
    /// `processes` is grouped by host in the same way.
    hosts: Vec<HostHolders>,
    processes: Vec<ProcessHolders>,
    /// The devices that hold a tile, grouped by process, in the layout's order.
    devices: Vec<DeviceId>,
    /// Each device that holds a tile, with the tile's index; ascending by device.
    tile_of: Vec<DeviceTile>,
    lookup: TileLookup,
}

/// A device, and the index of the tile that it holds.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct DeviceTile {
    device: DeviceId,
    tile: u32,
}

/// A device that holds a tile. Holders are ordered by their fields. So sorting groups them by tile,
/// host and process, and keeps the layout's order inside a process.
#[derive(Clone, Copy, Eq, Ord, PartialEq, PartialOrd)]
struct TileHolder {
    tile: u32,
    host: u32,
    process: ProcessId,
    /// Index of the device in the layout's list of devices.
    place: usize,
    device: DeviceId,
}

/// One range into which a dimension is cut. Ordered by its start.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct CutRange {
    start: usize,
    end: usize,
}

/// A tile, and its first index along [`TileLine::dim`].
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
struct TileStart {
    start: usize,
    tile: u32,
}

#[derive(Clone, Debug)]
pub(super) struct LayoutTile {
    pub(super) region: Region,
    hosts: Range<u32>,
}

/// The holders of a tile on one host.
#[derive(Clone, Debug)]
pub(super) struct HostHolders {
    pub(super) host: u32,
    processes: Range<u32>,
}

/// The holders of a tile in one process.
#[derive(Clone, Debug)]
pub(super) struct ProcessHolders {
    pub(super) process: ProcessId,
    pub(super) host: u32,
    devices: Range<u32>,
}

/// Numbers of hosts, processes and devices that hold a tile.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct HolderCounts {
    pub(super) hosts: usize,
    pub(super) processes: usize,
    pub(super) devices: usize,
}

#[derive(Clone, Debug)]
enum TileLookup {
    Grid {
        /// The ranges into which each dimension is cut, ascending.
        cuts: Vec<Vec<CutRange>>,
        /// Index of the tile in each cell of the grid of ranges, row-major.
        cells: Vec<u32>,
    },
    Line(TileLine),
}

/// The tiles, sorted by their start along the dimension with the most cuts.
#[derive(Clone, Debug)]
struct TileLine {
    dim: usize,
    /// Each tile's start along `dim`, with the tile's index; ascending.
    by_start: Vec<TileStart>,
    /// For each entry of `by_start`, the largest end along `dim` of that entry and all earlier
    /// ones.
    ends: Vec<usize>,
}

impl Tiling {
    /// Returns the tiles that the devices with partial sum `term` hold, in the order of their first
    /// holders. Fails if a device of the layout is not in the topology.
    pub(super) fn new(
        layout: &Layout,
        term: usize,
        topology: &Topology,
    ) -> Result<Self, ReshardError> {
        let mut tiles: Vec<LayoutTile> = Vec::new();
        let mut known: HashMap<&Region, u32> = HashMap::with_capacity(layout.devices().len());
        let mut held: Vec<TileHolder> = Vec::with_capacity(layout.devices().len());
        for (place, (device, region)) in layout.iter().enumerate() {
            let unknown = || ReshardError::UnknownDevice {
                device,
                devices: topology.devices().len(),
            };
            let process = topology.process_of(device).ok_or_else(unknown)?;
            if region.is_empty() || layout.term_of(place) != term {
                continue;
            }
            let tile = *known.entry(region).or_insert_with(|| {
                tiles.push(LayoutTile {
                    region: region.clone(),
                    hosts: 0..0,
                });
                tiles.len() as u32 - 1
            });
            held.push(TileHolder {
                tile,
                host: topology.host_of(process),
                process,
                place,
                device,
            });
        }

        let mut tile_of: Vec<DeviceTile> = held
            .iter()
            .map(|holder| DeviceTile {
                device: holder.device,
                tile: holder.tile,
            })
            .collect();
        tile_of.sort_unstable();
        held.sort_unstable();

        let mut tiling = Self {
            lookup: TileLookup::new(&tiles),
            tiles,
            hosts: Vec::new(),
            processes: Vec::new(),
            devices: Vec::with_capacity(held.len()),
            tile_of,
        };
        tiling.group(&held);
        Ok(tiling)
    }

    /// Fills `hosts`, `processes` and `devices` from the sorted holders of all tiles.
    fn group(&mut self, held: &[TileHolder]) {
        for of_tile in held.chunk_by(|a, b| a.tile == b.tile) {
            let first_host = self.hosts.len() as u32;

            for on_host in of_tile.chunk_by(|a, b| a.host == b.host) {
                let host = on_host[0].host;
                let first_process = self.processes.len() as u32;

                for in_process in on_host.chunk_by(|a, b| a.process == b.process) {
                    let first_device = self.devices.len() as u32;
                    self.devices
                        .extend(in_process.iter().map(|holder| holder.device));
                    self.processes.push(ProcessHolders {
                        process: in_process[0].process,
                        host,
                        devices: first_device..self.devices.len() as u32,
                    });
                }

                self.hosts.push(HostHolders {
                    host,
                    processes: first_process..self.processes.len() as u32,
                });
            }

            let tile = of_tile[0].tile as usize;
            self.tiles[tile].hosts = first_host..self.hosts.len() as u32;
        }
    }

    /// Returns the number of tiles. Tile indices run from 0 to one below it.
    pub(super) fn len(&self) -> u32 {
        self.tiles.len() as u32
    }

    pub(super) fn tile(&self, tile: u32) -> &LayoutTile {
        &self.tiles[tile as usize]
    }

    /// Returns the index of the tile that a device holds, or `None` if it holds none.
    pub(super) fn tile_of(&self, device: DeviceId) -> Option<u32> {
        let at = self
            .tile_of
            .binary_search_by_key(&device, |holder| holder.device)
            .ok()?;
        Some(self.tile_of[at].tile)
    }

    /// Returns the hosts that hold a tile.
    pub(super) fn hosts(&self, tile: u32) -> &[HostHolders] {
        slice(&self.hosts, &self.tile(tile).hosts)
    }

    /// Returns the processes on a host that hold the tile of the entry `host`.
    pub(super) fn processes(&self, host: &HostHolders) -> &[ProcessHolders] {
        slice(&self.processes, &host.processes)
    }

    /// Returns the devices of a process that hold the tile of the entry `process`.
    pub(super) fn devices(&self, process: &ProcessHolders) -> &[DeviceId] {
        slice(&self.devices, &process.devices)
    }

    /// Returns the holders of a tile on a host, or `None` if no device there holds the tile.
    pub(super) fn on_host(&self, tile: u32, host: u32) -> Option<&HostHolders> {
        let hosts = self.hosts(tile);
        hosts
            .binary_search_by_key(&host, |found| found.host)
            .ok()
            .map(|at| &hosts[at])
    }

    /// Returns the holders of a tile in a process, or `None` if none of its devices holds the tile.
    /// `host` is the host of the process.
    pub(super) fn in_process(
        &self,
        tile: u32,
        process: ProcessId,
        host: u32,
    ) -> Option<&ProcessHolders> {
        let processes = self.processes(self.on_host(tile, host)?);
        processes
            .binary_search_by_key(&process, |found| found.process)
            .ok()
            .map(|at| &processes[at])
    }

    /// Returns the numbers of holders of a tile.
    pub(super) fn holders(&self, tile: u32) -> HolderCounts {
        let processes = self.all_processes(tile);
        let devices = self.all_devices(tile);
        HolderCounts {
            hosts: self.hosts(tile).len(),
            processes: processes.len(),
            devices: devices.len(),
        }
    }

    /// Returns the numbers of hosts, processes and devices that hold tile `a` of this layout and
    /// tile `b` of `other`. Takes time in proportion to the shorter of the two lists.
    pub(super) fn common_holders(&self, a: u32, other: &Self, b: u32) -> HolderCounts {
        if other.holders(b).devices < self.holders(a).devices {
            return other.common_holders(b, self, a);
        }
        let on = |host: &&HostHolders| other.on_host(b, host.host).is_some();
        let within =
            |held: &&ProcessHolders| other.in_process(b, held.process, held.host).is_some();
        let at = |device: &&DeviceId| other.tile_of(**device) == Some(b);
        HolderCounts {
            hosts: self.hosts(a).iter().filter(on).count(),
            processes: self.all_processes(a).iter().filter(within).count(),
            devices: self.all_devices(a).iter().filter(at).count(),
        }
    }

    /// Returns the processes that hold a tile, on all hosts.
    fn all_processes(&self, tile: u32) -> &[ProcessHolders] {
        match self.hosts(tile) {
            [] => &[],
            [first, .., last] => slice(
                &self.processes,
                &(first.processes.start..last.processes.end),
            ),
            [only] => self.processes(only),
        }
    }

    /// Returns the devices that hold a tile, in all processes.
    fn all_devices(&self, tile: u32) -> &[DeviceId] {
        match self.all_processes(tile) {
            [] => &[],
            [first, .., last] => slice(&self.devices, &(first.devices.start..last.devices.end)),
            [only] => self.devices(only),
        }
    }

    /// Returns the indices of the tiles that share elements with a non-empty region, in an order
    /// that never varies.
    pub(super) fn touching(&self, region: &Region) -> Vec<u32> {
        match &self.lookup {
            TileLookup::Grid { cuts, cells } => {
                let mut found = vec![0];
                for (cuts, range) in cuts.iter().zip(region.ranges()) {
                    let touched = touched(cuts, &range);
                    if let [only] = found[..] {
                        found.clear();
                        found.extend(touched.map(|at| only * cuts.len() + at));
                    } else {
                        let inner = |cell: &usize| {
                            let first = cell * cuts.len();
                            touched.clone().map(move |at| first + at)
                        };
                        found = found.iter().flat_map(inner).collect();
                    }
                }
                found.into_iter().map(|cell| cells[cell]).collect()
            }
            TileLookup::Line(line) => {
                let mut found: Vec<u32> =
                    line.window(region).iter().map(|start| start.tile).collect();
                found.retain(|tile| self.tile(*tile).region.intersect(region).is_some());
                found.sort_unstable();
                found
            }
        }
    }

    /// Returns the position of `tile` in the list of tiles that [touch](Self::touching) `region`.
    /// The tile must be in the list.
    pub(super) fn turn(&self, tile: u32, region: &Region) -> usize {
        match &self.lookup {
            TileLookup::Grid { cuts, .. } => {
                let dims = cuts
                    .iter()
                    .zip(region.ranges())
                    .zip(self.tile(tile).region.ranges());
                dims.fold(0, |turn, ((cuts, range), own)| {
                    let touched = touched(cuts, &range);
                    let at = cuts.partition_point(|cut| cut.start < own.start);
                    turn * touched.len() + at.saturating_sub(touched.start)
                })
            }
            TileLookup::Line(_) => self
                .touching(region)
                .iter()
                .position(|found| *found == tile)
                .unwrap_or(0),
        }
    }
}

/// Returns the half-open range of the indices of those `cuts` that overlap `range`. The cuts of the
/// dimension are ascending.
fn touched(cuts: &[CutRange], range: &Range<usize>) -> Range<usize> {
    let first = cuts.partition_point(|cut| cut.end <= range.start);
    first..cuts.partition_point(|cut| cut.start < range.end).max(first)
}

fn slice<'a, T>(all: &'a [T], range: &Range<u32>) -> &'a [T] {
    &all[range.start as usize..range.end as usize]
}

impl TileLookup {
    fn new(tiles: &[LayoutTile]) -> Self {
        Self::grid(tiles).unwrap_or_else(|| Self::Line(TileLine::new(tiles)))
    }

    /// Returns a grid lookup if the tiles are the cells of a grid, or `None` otherwise.
    fn grid(tiles: &[LayoutTile]) -> Option<Self> {
        let ndim = tiles.first().map_or(0, |tile| tile.region.ndim());
        let mut cuts = Vec::with_capacity(ndim);
        let mut count = 1usize;
        for dim in 0..ndim {
            let mut ranges: Vec<CutRange> = tiles
                .iter()
                .map(|tile| {
                    let range = tile.region.range(dim);
                    CutRange {
                        start: range.start,
                        end: range.end,
                    }
                })
                .collect();
            ranges.sort_unstable();
            ranges.dedup();
            if ranges.windows(2).any(|pair| pair[1].start < pair[0].end) {
                return None;
            }
            count = count.checked_mul(ranges.len())?;
            cuts.push(ranges);
        }

        // The tiles are distinct combinations of these ranges. They form a grid if their number
        // equals the number of combinations.
        if count != tiles.len() {
            return None;
        }

        let mut cells = vec![0; count];
        for (at, tile) in tiles.iter().enumerate() {
            let cell = cuts
                .iter()
                .zip(tile.region.ranges())
                .fold(0, |cell, (cuts, range)| {
                    cell * cuts.len() + cuts.partition_point(|cut| cut.start < range.start)
                });
            cells[cell] = at as u32;
        }

        Some(Self::Grid { cuts, cells })
    }
}

impl TileLine {
    fn new(tiles: &[LayoutTile]) -> Self {
        let ndim = tiles.first().map_or(0, |tile| tile.region.ndim());
        let cut = |dim: &usize| {
            let mut starts: Vec<usize> = tiles
                .iter()
                .map(|tile| tile.region.range(*dim).start)
                .collect();
            starts.sort_unstable();
            starts.dedup();
            (starts.len(), Reverse(*dim))
        };

        let dim = (0..ndim).max_by_key(cut).unwrap_or(0);
        let range = |tile: u32| tiles[tile as usize].region.range(dim);
        let mut by_start: Vec<TileStart> = (0..tiles.len() as u32)
            .map(|tile| TileStart {
                start: range(tile).start,
                tile,
            })
            .collect();
        by_start.sort_unstable();
        let ends = by_start.iter().scan(0, |end, start| {
            *end = range(start.tile).end.max(*end);
            Some(*end)
        });

        Self {
            dim,
            ends: ends.collect(),
            by_start,
        }
    }

    fn window(&self, region: &Region) -> &[TileStart] {
        let range = region.range(self.dim);
        let last = self.by_start.partition_point(|tile| tile.start < range.end);
        let first = self
            .ends
            .partition_point(|end| *end <= range.start)
            .min(last);
        &self.by_start[first..last]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn region<const N: usize>(bounds: [(usize, usize); N]) -> Region {
        bounds.into_iter().collect()
    }

    fn tiling(shape: &[usize], regions: Vec<Region>) -> Tiling {
        let devices = (0..regions.len() as u32).map(DeviceId).collect();
        let topology = Topology::even(regions.len(), 1);
        Tiling::new(&Layout::new(shape, devices, regions, false), 0, &topology).unwrap()
    }

    fn quarters() -> Vec<Region> {
        let halves = [(0, 2), (2, 6)];
        halves
            .iter()
            .flat_map(|a| halves.iter().map(|b| region([*a, *b])))
            .collect()
    }

    #[test]
    fn grids_are_found_in_any_order_of_their_tiles() {
        let mut regions = quarters();
        regions.reverse();
        let tiling = tiling(&[6, 6], regions);
        assert!(matches!(tiling.lookup, TileLookup::Grid { .. }));
        // Tiles are numbered in the order of their holders and found in the order of the grid.
        assert_eq!(tiling.touching(&region([(0, 6), (0, 6)])), [3, 2, 1, 0]);
        assert_eq!(tiling.touching(&region([(1, 3), (2, 3)])), [2, 0]);
        assert_eq!(tiling.turn(0, &region([(1, 3), (2, 3)])), 1);
        assert_eq!(tiling.turn(2, &region([(0, 6), (0, 6)])), 1);
    }

    #[test]
    fn tilings_that_are_no_grid_are_searched_along_a_line() {
        let tiles = [
            [(0, 2), (0, 4)],
            [(0, 4), (4, 6)],
            [(2, 6), (0, 4)],
            [(4, 6), (4, 6)],
        ]
        .map(region)
        .to_vec();
        let tiling = tiling(&[6, 6], tiles.clone());
        assert!(matches!(tiling.lookup, TileLookup::Line(_)));
        for wanted in tiles
            .iter()
            .cloned()
            .chain([region([(1, 5), (3, 5)]), region([(5, 6), (5, 6)])])
        {
            let expected: Vec<u32> = (0..4)
                .filter(|at| tiles[*at as usize].intersect(&wanted).is_some())
                .collect();
            assert_eq!(tiling.touching(&wanted), expected);
            for (turn, tile) in expected.iter().enumerate() {
                assert_eq!(tiling.turn(*tile, &wanted), turn);
            }
        }
    }

    #[test]
    fn holders_are_grouped_by_host_and_process() {
        let whole = Region::full(&[4]);
        let devices: Vec<DeviceId> = [5, 0, 3, 1, 7].map(DeviceId).to_vec();
        let layout = Layout::new(&[4], devices, vec![whole; 5], true);
        let topology = Topology::even(4, 2).on_hosts(&[0, 1, 0, 1]).unwrap();
        let tiling = Tiling::new(&layout, 0, &topology).unwrap();
        let groups: Vec<_> = tiling
            .hosts(0)
            .iter()
            .map(|host| {
                let devices = |process: &ProcessHolders| {
                    tiling
                        .devices(process)
                        .iter()
                        .map(|device| device.0)
                        .collect()
                };
                let of = |process: &ProcessHolders| (process.process.0, devices(process));
                (
                    host.host,
                    tiling
                        .processes(host)
                        .iter()
                        .map(of)
                        .collect::<Vec<(u32, Vec<u32>)>>(),
                )
            })
            .collect();
        assert_eq!(
            groups,
            [
                (0, vec![(0, vec![0, 1]), (2, vec![5])]),
                (1, vec![(1, vec![3]), (3, vec![7])])
            ]
        );
        assert!(tiling.in_process(0, ProcessId(1), 1).is_some());
        assert!(tiling.in_process(0, ProcessId(1), 0).is_none());
        assert_eq!(
            (tiling.tile_of(DeviceId(7)), tiling.tile_of(DeviceId(2))),
            (Some(0), None)
        );
    }

    #[test]
    fn scalars_and_empty_arrays() {
        let scalar = tiling(&[], vec![Region::full(&[])]);
        assert_eq!(scalar.touching(&Region::full(&[])), [0]);
        assert!(tiling(&[0], vec![Region::full(&[0])]).tiles.is_empty());
    }
}
