//! From two layouts to the pieces that turn one into the other.

use std::cmp::Reverse;
use std::collections::HashMap;

use mpmd_transport::ProcessId;
use serde::{Deserialize, Serialize};

use crate::region::Region;
use crate::sharding::Layout;
use crate::topology::{DeviceId, Topology};

/// What goes where, so that every destination region is covered exactly once.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Plan {
    /// Ordered by the destination device's place in its layout, then by region.
    pub pieces: Vec<Piece>,
}

/// One region that goes from one device to one device; possibly the same.
#[derive(Clone, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Piece {
    /// Who has it.
    pub src: DeviceId,
    /// Who needs it.
    pub dst: DeviceId,
    /// Which part of the whole array. Never empty.
    pub region: Region,
}

/// Why there is no plan. Always the caller's fault, and the same on every process.
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
        /// The device.
        device: DeviceId,
        /// How many devices there are.
        devices: usize,
    },
    /// No device of the source has the region.
    #[error("no device of the source has region {region}, which device {dst} needs")]
    Uncovered {
        /// The device that needs it.
        dst: DeviceId,
        /// What nobody has.
        region: Region,
    },
}

/// The pieces that turn an array laid out as `src` into one laid out as `dst`.
///
/// Where several devices have a piece it comes from the destination device itself, else from its
/// process, else from the process that sends least so far and there from the device that does; ties go
/// to the first in the source's device order. A pure function of its arguments.
///
/// # Errors
///
/// Fails where the shapes differ, a device is not of the job, or the source lacks a part.
pub fn plan(src: &Layout, dst: &Layout, topology: &Topology) -> Result<Plan, ReshardError> {
    if src.shape() != dst.shape() {
        return Err(ReshardError::Shape { expected: dst.shape().to_vec(), found: src.shape().to_vec() });
    }
    let mut sources = Sources::new(src, topology)?;
    let index = Index::new(&sources.held);
    // Replicas of a destination region are cut the same way.
    let mut cuts: HashMap<&Region, Vec<(usize, Region)>> = HashMap::new();
    let mut pieces = Vec::new();
    for (device, region) in dst.iter() {
        let process = process_of(topology, device)?;
        if region.is_empty() {
            continue;
        }
        if src.region_of(device).is_some_and(|held| held.contains(region)) {
            pieces.push(Piece { src: device, dst: device, region: region.clone() });
            continue;
        }
        let cut = match cuts.get(region) {
            Some(cut) => cut,
            None => {
                let cut = cut(region, &sources.held, &index)
                    .map_err(|region| ReshardError::Uncovered { dst: device, region })?;
                cuts.entry(region).or_insert(cut)
            }
        };
        for (held, region) in cut {
            let src = sources.choose(*held, device, process, region.elements());
            pieces.push(Piece { src, dst: device, region: region.clone() });
        }
    }
    Ok(Plan { pieces })
}

fn process_of(topology: &Topology, device: DeviceId) -> Result<ProcessId, ReshardError> {
    let unknown = || ReshardError::UnknownDevice { device, devices: topology.devices().len() };
    topology.process_of(device).ok_or_else(unknown)
}

/// A region of the source that at least one device holds.
struct Held {
    region: Region,
    /// Its holders, by their place in the source's device order.
    places: Vec<usize>,
}

/// The source's distinct regions, and who sent how much so far.
struct Sources {
    held: Vec<Held>,
    /// By place in the source's device order.
    devices: Vec<Source>,
    /// Elements sent to other processes, by process.
    sent_by: Vec<usize>,
}

struct Source {
    device: DeviceId,
    process: ProcessId,
    /// Elements sent to other devices.
    sent: usize,
}

impl Sources {
    fn new(src: &Layout, topology: &Topology) -> Result<Self, ReshardError> {
        let mut held: Vec<Held> = Vec::new();
        let mut known: HashMap<&Region, usize> = HashMap::new();
        let mut devices = Vec::with_capacity(src.devices().len());
        for (place, (device, region)) in src.iter().enumerate() {
            devices.push(Source { device, process: process_of(topology, device)?, sent: 0 });
            if region.is_empty() {
                continue;
            }
            let at = *known.entry(region).or_insert_with(|| {
                held.push(Held { region: region.clone(), places: Vec::new() });
                held.len() - 1
            });
            held[at].places.push(place);
        }
        Ok(Self { held, devices, sent_by: vec![0; topology.processes()] })
    }

    /// Which holder gives `elements` to `to`.
    fn choose(&mut self, held: usize, to: DeviceId, process: ProcessId, elements: usize) -> DeviceId {
        let rank = |place: &&usize| {
            let source = &self.devices[**place];
            let here = source.device == to;
            let near = source.process == process;
            let link = if near { 0 } else { self.sent_by[source.process.index()] };
            (Reverse(here), Reverse(near), link, source.sent, **place)
        };
        let place = self.held[held].places.iter().min_by_key(rank).expect("a region is held by somebody");
        let source = &mut self.devices[*place];
        if source.device != to {
            source.sent = source.sent.saturating_add(elements);
        }
        if source.process != process {
            let sent = &mut self.sent_by[source.process.index()];
            *sent = sent.saturating_add(elements);
        }
        source.device
    }
}

/// Cuts a destination region into the parts that distinct regions of the source hold, in order; gives
/// a part that nobody holds as the error.
fn cut(region: &Region, held: &[Held], index: &Index) -> Result<Vec<(usize, Region)>, Region> {
    if let Some(at) = index.containing(region, held) {
        return Ok(vec![(at, region.clone())]);
    }
    let mut missing = vec![region.clone()];
    let mut cut = Vec::new();
    for at in index.candidates(region) {
        let candidate = &held[at].region;
        if candidate.intersect(region).is_none() {
            continue;
        }
        // Held regions may overlap: only what is not yet covered is taken from this one.
        let mut still = Vec::with_capacity(missing.len());
        for part in missing {
            if let Some(common) = part.intersect(candidate) {
                cut.push((at, common));
            }
            still.extend(part.without(candidate));
        }
        missing = still;
        if missing.is_empty() {
            break;
        }
    }
    match missing.into_iter().min() {
        Some(part) => Err(part),
        None => {
            cut.sort_by(|a, b| a.1.cmp(&b.1));
            Ok(cut)
        }
    }
}

/// Finds held regions by where they lie along the dimension that is divided most.
struct Index {
    dim: usize,
    /// Start along `dim` and place among the held, ascending.
    by_start: Vec<(usize, usize)>,
    /// For each of `by_start` the largest end up to it.
    ends: Vec<usize>,
}

impl Index {
    fn new(held: &[Held]) -> Self {
        let ndim = held.first().map_or(0, |held| held.region.ndim());
        let divided = |dim: &usize| {
            let mut starts: Vec<usize> = held.iter().map(|held| held.region.range(*dim).start).collect();
            starts.sort_unstable();
            starts.dedup();
            (starts.len(), Reverse(*dim))
        };
        let dim = (0..ndim).max_by_key(divided).unwrap_or(0);
        let range = |at: usize| if ndim == 0 { 0..1 } else { held[at].region.range(dim) };
        let mut by_start: Vec<_> = (0..held.len()).map(|at| (range(at).start, at)).collect();
        by_start.sort_unstable();
        let ends = by_start.iter().scan(0, |end, (_, at)| {
            *end = range(*at).end.max(*end);
            Some(*end)
        });
        Self { dim, ends: ends.collect(), by_start }
    }

    /// Held regions that may have something of `region`, in the order they are held.
    fn candidates(&self, region: &Region) -> Vec<usize> {
        let mut candidates: Vec<usize> = self.window(region).iter().map(|(_, at)| *at).collect();
        candidates.sort_unstable();
        candidates
    }

    /// The first held region that has all of `region`.
    fn containing(&self, region: &Region, held: &[Held]) -> Option<usize> {
        let having = self.window(region).iter().map(|(_, at)| *at);
        having.filter(|at| held[*at].region.contains(region)).min()
    }

    fn window(&self, region: &Region) -> &[(usize, usize)] {
        let range = if region.ndim() == 0 { 0..1 } else { region.range(self.dim) };
        let last = self.by_start.partition_point(|(start, _)| *start < range.end);
        let first = self.ends.partition_point(|end| *end <= range.start).min(last);
        &self.by_start[first..last]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::sharding::{Sharding, Spec, SpecEntry};
    use crate::spec;
    use crate::topology::Mesh;

    fn mesh(axes: &[(&str, usize)], first: u32) -> Mesh {
        let count: u32 = axes.iter().map(|(_, size)| *size as u32).product();
        Mesh::new(axes, (first..first + count).map(DeviceId).collect()).unwrap()
    }

    fn planned(src: &Sharding, dst: &Sharding, shape: &[usize], topology: &Topology) -> Vec<String> {
        let plan = plan(&src.layout(shape).unwrap(), &dst.layout(shape).unwrap(), topology).unwrap();
        plan.pieces.iter().map(|piece| format!("{}>{} {}", piece.src, piece.dst, piece.region)).collect()
    }

    #[test]
    fn different_device_counts_and_dimensions() {
        let topology = Topology::even(2, 4);
        let four = mesh(&[("x", 4)], 0).sharding(spec!["x"]);
        let two = mesh(&[("y", 2)], 4).sharding(spec!["y"]);
        assert_eq!(
            planned(&four, &two, &[8], &topology),
            ["0>4 [0..2]", "1>4 [2..4]", "2>5 [4..6]", "3>5 [6..8]"]
        );
        assert_eq!(
            planned(&two, &four, &[4], &topology),
            ["4>0 [0..1]", "4>1 [1..2]", "5>2 [2..3]", "5>3 [3..4]"]
        );
        let columns = mesh(&[("y", 2)], 4).sharding(spec![None, "y"]);
        let rows = mesh(&[("y", 2)], 4).sharding(spec!["y"]);
        assert_eq!(
            planned(&rows, &columns, &[2, 2], &topology),
            ["4>4 [0..1, 0..1]", "5>4 [1..2, 0..1]", "4>5 [0..1, 1..2]", "5>5 [1..2, 1..2]"]
        );
    }

    #[test]
    fn replicas_come_from_here_then_from_near_then_from_the_idle() {
        let topology = Topology::even(4, 2);
        let everywhere = mesh(&[("x", 4)], 0).replicated();
        // Device 3 has it; 4 to 7 are on processes without it, and the two holding processes share.
        let wanted = mesh(&[("y", 5)], 3).replicated();
        assert_eq!(
            planned(&everywhere, &wanted, &[6], &topology),
            ["3>3 [0..6]", "0>4 [0..6]", "2>5 [0..6]", "1>6 [0..6]", "3>7 [0..6]"]
        );
        let one = Mesh::new(&[("x", 2)], vec![DeviceId(0), DeviceId(2)]).unwrap().replicated();
        assert_eq!(planned(&one, &Sharding::single_device(DeviceId(3)), &[], &topology), ["2>3 []"]);
    }

    #[test]
    fn empty_destinations_get_nothing() {
        let topology = Topology::even(1, 4);
        let (a, b) = (mesh(&[("x", 2)], 0).sharding(spec!["x"]), mesh(&[("x", 2)], 2).replicated());
        assert!(planned(&a, &b, &[0, 3], &topology).is_empty());
    }

    #[test]
    fn overlapping_holders_are_not_taken_twice_and_gaps_are_named() {
        let topology = Topology::even(1, 3);
        let bounds = |start, end| [(start, end)].into_iter().collect::<Region>();
        let devices = vec![DeviceId(0), DeviceId(1)];
        let src = Layout::new(&[8], devices.clone(), vec![bounds(0, 5), bounds(3, 8)], false);
        let dst = Layout::new(&[8], vec![DeviceId(2)], vec![bounds(0, 8)], true);
        let pieces = plan(&src, &dst, &topology).unwrap().pieces;
        let found: Vec<_> = pieces.iter().map(|piece| (piece.src.0, piece.region.range(0))).collect();
        assert_eq!(found, [(0, 0..5), (1, 5..8)]);
        let gap = Layout::new(&[8], devices, vec![bounds(0, 3), bounds(5, 8)], false);
        assert_eq!(
            plan(&gap, &dst, &topology),
            Err(ReshardError::Uncovered { dst: DeviceId(2), region: bounds(3, 5) })
        );
    }

    #[test]
    fn shapes_and_devices_are_checked() {
        let sharding = Sharding::single_device(DeviceId(5));
        let (a, b) = (sharding.layout(&[2]).unwrap(), sharding.layout(&[3]).unwrap());
        let topology = Topology::even(1, 4);
        assert!(matches!(plan(&a, &b, &topology), Err(ReshardError::Shape { .. })));
        assert_eq!(
            plan(&a, &a, &topology),
            Err(ReshardError::UnknownDevice { device: DeviceId(5), devices: 4 })
        );
    }

    #[test]
    fn equal_layouts_of_thousands_of_devices_move_nothing() {
        let topology = Topology::even(64, 64);
        let sharding = mesh(&[("x", 64), ("y", 64)], 0).sharding(spec!["x", "y"]);
        let layout = sharding.layout(&[640, 640]).unwrap();
        let pieces = plan(&layout, &layout, &topology).unwrap().pieces;
        assert_eq!(pieces.len(), 4096);
        assert!(pieces.iter().all(|piece| piece.src == piece.dst));
    }

    /// A sharding of a 2-d array of 24 by 24 over some of 8 devices, in some order.
    fn any_sharding() -> impl Strategy<Value = Sharding> {
        let devices = Just((0..8).map(DeviceId).collect::<Vec<_>>()).prop_shuffle();
        (devices, 1..=4usize, 1..=2usize, 0..6usize).prop_map(|(devices, a, b, spec)| {
            let mesh = Mesh::new(&[("a", a), ("b", b)], devices[..a * b].to_vec()).unwrap();
            let spec = match spec {
                0 => spec![],
                1 => spec!["a"],
                2 => spec![None, "b"],
                3 => spec!["b", "a"],
                4 => spec![None, ("b", "a")],
                _ => Spec::new(vec![SpecEntry::from(("a", "b"))]),
            };
            mesh.sharding(spec)
        })
    }

    proptest! {
        #[test]
        fn every_destination_element_comes_once_from_a_device_that_has_it(
            src in any_sharding(), dst in any_sharding(), per_process in 1usize..=4,
        ) {
            let topology = Topology::even(8usize.div_ceil(per_process), per_process);
            let (src, dst) = (src.layout(&[24, 24]).unwrap(), dst.layout(&[24, 24]).unwrap());
            let pieces = plan(&src, &dst, &topology).unwrap().pieces;
            for piece in &pieces {
                prop_assert!(src.region_of(piece.src).unwrap().contains(&piece.region));
            }
            for (device, region) in dst.iter() {
                let own: Vec<_> = pieces.iter().filter(|piece| piece.dst == device).collect();
                for (i, a) in own.iter().enumerate() {
                    prop_assert!(region.contains(&a.region) && !a.region.is_empty());
                    prop_assert!(own[i + 1..].iter().all(|b| a.region.intersect(&b.region).is_none()));
                    // A piece comes from this device, or process, wherever anybody there has it.
                    let has = |other: &DeviceId| src.region_of(*other).is_some_and(|r| r.contains(&a.region));
                    let process = topology.process_of(device).unwrap();
                    if has(&device) {
                        prop_assert_eq!(a.src, device);
                    } else if topology.devices_of(process).iter().any(has) {
                        prop_assert_eq!(topology.process_of(a.src), Some(process));
                    }
                }
                let covered: usize = own.iter().map(|piece| piece.region.elements()).sum();
                prop_assert_eq!(covered, region.elements());
            }
            let place = |piece: &Piece| (dst.place_of(piece.dst), piece.region.clone());
            prop_assert!(pieces.is_sorted_by_key(place));
            prop_assert_eq!(plan(&src, &dst, &topology).unwrap().pieces, pieces);
        }
    }
}
