//! Finds the cheapest way from one sharding to another: the direct plan, or two plans by way of an
//! intermediate sharding. The intermediate is on the source's devices and may still be divided.

use std::collections::BTreeMap;

use mpmd_ids::ProcessId;

use super::intermediate::{Intermediate, REPLICA, SPLIT, parts_by_dim};
use super::plan::{Plan, Summary, plan};
use crate::sharding::{Sharding, Spec, SpecEntry};
use crate::topology::{DeviceId, LinkClass, Mesh, Topology};

/// Limit of the number of intermediates that one search compares. A mesh that would give more has
/// its axes cut one at a time.
const MOST_CANDIDATES: usize = 256;

/// An intermediate sharding with a lower estimated cost than the direct way.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Detour {
    /// The sharding to move the array to first. All of its replicas serve as sources of the second
    /// step.
    pub intermediate: Intermediate,
    /// The cost of the direct plan, in the unit of the cost function.
    pub direct_cost: u64,
    /// The cost of both steps together, in the same unit. Lower than `direct_cost`.
    pub cost: u64,
}

/// Finds the intermediate sharding with the least `cost` on the way from `src` to `dst`.
///
/// The array has `shape` and elements of `item_bytes` bytes. Returns `None` if the direct way costs
/// no more. Also returns `None` if the source has no mesh, a sharding does not fit the shape or the
/// topology, or one holds partial sums.
///
/// Each axis that divides the source may be cut: for every divisor `t` of its size `s`, into `s /
/// t` replicas of `t` parts. Compared with
/// [`find_intermediate_sharding`](super::find_intermediate_sharding), the intermediate may stay
/// divided, an axis may share its dimension with others, and any two shardings are considered. The
/// replica axis takes the place next to the cut axis. If the axis is the last that divides its
/// dimension, every device therefore keeps its own shard as a part of the gathered one.
///
/// An intermediate never moves more bytes over slow links than the direct way. It moves none over a
/// class slower than the slowest class that the direct way uses. Over that class, both steps
/// together move at most as many bytes. Of equally cheap intermediates, the one with more parts
/// wins. `cost` is called for both steps and their costs are added; [`estimate_ns`] is one such
/// function. Deterministic if `cost` is.
pub fn best_intermediate(
    src: &Sharding,
    dst: &Sharding,
    shape: &[usize],
    item_bytes: usize,
    topology: &Topology,
    cost: &dyn Fn(&Plan) -> u64,
) -> Option<Detour> {
    let (mesh, spec) = (src.mesh()?, src.spec()?);
    let (from, to) = (src.layout(shape).ok()?, dst.layout(shape).ok()?);
    let partial = [src, dst].iter().any(|sharding| !sharding.unreduced_axes().is_empty());
    if from == to || partial {
        return None;
    }
    let direct = plan(&from, &to, item_bytes, topology).ok()?;
    let (direct_cost, direct_bytes) = (cost(&direct), direct.summary());
    let mut best: Option<Detour> = None;
    for candidate in candidates(src, mesh, spec) {
        let Ok(between) = candidate.sharding.layout(shape) else { continue };
        let steps = [
            plan(&from, &between, item_bytes, topology),
            plan(&between, &to, item_bytes, topology),
        ];
        let [Ok(gather), Ok(onward)] = steps else { continue };
        let cost = cost(&gather).saturating_add(cost(&onward));
        if cost >= best.as_ref().map_or(direct_cost, |best| best.cost) {
            continue;
        }
        if keeps_to_fast_links(&direct_bytes, [&gather.summary(), &onward.summary()]) {
            best = Some(Detour { intermediate: candidate, direct_cost, cost });
        }
    }
    best
}

/// Estimates the duration of a plan in nanoseconds: the largest total work of any device or
/// process.
///
/// A device copies one after the other the pieces that come from its own process. A process sends,
/// and receives, one message after the other. Each takes the latency and the time for its bytes
/// that the topology gives for its link. The order of pieces and the work of other operations are
/// left out. Takes time linear in the number of pieces.
pub fn estimate_ns(plan: &Plan, item_bytes: usize, topology: &Topology) -> u64 {
    let mut copies: BTreeMap<DeviceId, u64> = BTreeMap::new();
    let mut sends: BTreeMap<ProcessId, u64> = BTreeMap::new();
    let mut receives: BTreeMap<ProcessId, u64> = BTreeMap::new();
    for piece in plan.pieces() {
        let bytes = (piece.region.elements() as u64).saturating_mul(item_bytes as u64);
        let class = topology.link_between(piece.src, piece.dst).unwrap_or(LinkClass::Network);
        let nanos = topology.links().of(class).nanos(bytes);
        let charge = |total: &mut u64| *total = total.saturating_add(nanos);
        match (topology.process_of(piece.src), topology.process_of(piece.dst)) {
            (Some(from), Some(to)) if from != to => {
                charge(sends.entry(from).or_default());
                charge(receives.entry(to).or_default());
            }
            _ => charge(copies.entry(piece.dst).or_default()),
        }
    }
    copies.into_values().chain(sends.into_values()).chain(receives.into_values()).max().unwrap_or(0)
}

/// True if both steps together move no more bytes than the direct way over its slowest link class
/// and over slower ones. False if the direct way moves nothing.
fn keeps_to_fast_links(direct: &Summary, steps: [&Summary; 2]) -> bool {
    let slowest = LinkClass::ALL.into_iter().rev().find(|class| direct.bytes[*class as usize] > 0);
    let Some(slowest) = slowest else { return false };
    LinkClass::ALL
        .into_iter()
        .filter(|class| *class >= slowest && *class > LinkClass::SameDevice)
        .all(|class| {
            let both =
                steps.iter().map(|step| step.bytes[class as usize]).fold(0, u64::saturating_add);
            both <= direct.bytes[class as usize]
        })
}

/// Returns the intermediates to compare, those with more parts first.
fn candidates(src: &Sharding, mesh: &Mesh, spec: &Spec) -> Vec<Intermediate> {
    if parts_by_dim(mesh, spec.entries()).is_none() {
        return Vec::new();
    }
    let used = |axis: &String| spec.entries().iter().any(|entry| entry.axes().contains(axis));
    // The sizes to which each axis may be cut, the full size first.
    let choices: Vec<Vec<usize>> = mesh
        .axis_names()
        .iter()
        .zip(mesh.shape())
        .map(|(axis, size)| {
            let kept = (1..=*size)
                .rev()
                .filter(|kept| kept == size || (used(axis) && size.is_multiple_of(*kept)));
            kept.collect()
        })
        .collect();
    let count = choices.iter().fold(1usize, |count, choices| count.saturating_mul(choices.len()));
    let mut kept: Vec<Vec<usize>> = vec![Vec::new()];
    if count <= MOST_CANDIDATES {
        for choices in &choices {
            let longer = |kept: &Vec<usize>| {
                let kept = kept.clone();
                choices.iter().map(move |choice| kept.iter().copied().chain([*choice]).collect())
            };
            kept = kept.iter().flat_map(longer).collect();
        }
    } else {
        let one = |(axis, choices): (usize, &Vec<usize>)| {
            choices.iter().map(move |choice| (axis, *choice)).collect::<Vec<_>>()
        };
        kept = choices
            .iter()
            .enumerate()
            .flat_map(one)
            .map(|(axis, choice)| {
                let mut kept = mesh.shape().to_vec();
                kept[axis] = choice;
                kept
            })
            .collect();
    }
    let parts = |kept: &Vec<usize>| kept.iter().product::<usize>();
    kept.retain(|kept| kept != mesh.shape());
    // Stable, so that equal numbers of parts stay in the order of the axes.
    kept.sort_by_key(|kept| std::cmp::Reverse(parts(kept)));
    kept.iter().filter_map(|kept| cut_in_place(src, mesh, spec, kept)).collect()
}

/// Returns the intermediate in which each axis is cut to its size in `kept`. Returns `None` if a
/// new axis would have the name of another.
fn cut_in_place(src: &Sharding, mesh: &Mesh, spec: &Spec, kept: &[usize]) -> Option<Intermediate> {
    let mut axes: Vec<(String, usize)> = Vec::new();
    let mut replica_axes = Vec::new();
    for ((axis, size), kept) in mesh.axis_names().iter().zip(mesh.shape()).zip(kept) {
        if kept == size {
            axes.push((axis.clone(), *size));
        } else {
            let replica = format!("{axis}{REPLICA}");
            axes.push((format!("{axis}{SPLIT}"), *kept));
            axes.push((replica.clone(), size / kept));
            replica_axes.push(replica);
        }
    }
    let axes: Vec<(&str, usize)> = axes.iter().map(|(axis, size)| (axis.as_str(), *size)).collect();
    let new = Mesh::new(&axes, mesh.devices().to_vec()).ok()?;
    let renamed = |axis: &String| {
        if new.axis_index(axis).is_some() { axis.clone() } else { format!("{axis}{SPLIT}") }
    };
    let entry = |entry: &SpecEntry| {
        SpecEntry::from(entry.axes().iter().map(renamed).collect::<Vec<String>>())
    };
    let spec = Spec::new(spec.entries().iter().map(entry).collect());
    Some(Intermediate { sharding: Sharding::named(new, spec, src.memory_kind()), replica_axes })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec;

    fn on(axes: &[(&str, usize)], first: u32, spec: Spec) -> Sharding {
        let count: u32 = axes.iter().map(|(_, size)| *size as u32).product();
        Mesh::new(axes, (first..first + count).map(DeviceId).collect()).unwrap().sharding(spec)
    }

    fn best(
        src: &Sharding,
        dst: &Sharding,
        shape: &[usize],
        topology: &Topology,
    ) -> Option<Detour> {
        best_intermediate(src, dst, shape, 4, topology, &|plan| estimate_ns(plan, 4, topology))
    }

    fn moved(src: &Sharding, dst: &Sharding, shape: &[usize], topology: &Topology) -> Summary {
        let (src, dst) = (src.layout(shape).unwrap(), dst.layout(shape).unwrap());
        plan(&src, &dst, 4, topology).unwrap().summary()
    }

    /// 8 devices on one host and 4 on another, one process for each device.
    fn two_hosts() -> Topology {
        Topology::even(12, 1).on_hosts(&[0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1]).unwrap()
    }

    #[test]
    fn few_large_messages_without_losing_senders() {
        let topology = two_hosts();
        let src = on(&[("fsdp", 8), ("tp", 1)], 0, spec!["fsdp", "tp"]);
        let dst = on(&[("fsdp", 1), ("tp", 4)], 8, spec!["fsdp", "tp"]);
        // 2 MiB: 4 messages to each process, of rows that two processes put together first.
        let found = best(&src, &dst, &[1024, 512], &topology).unwrap();
        let (mesh, spec) =
            (found.intermediate.sharding.mesh().unwrap(), found.intermediate.sharding.spec());
        let (split, replica) = ("fsdp_intermediate_split", "fsdp_intermediate_replica");
        assert_eq!(mesh.axis_names(), [split, replica, "tp"]);
        assert_eq!(mesh.shape(), [4, 2, 1]);
        assert_eq!(spec, Some(&spec![split, "tp"]));
        assert_eq!(found.intermediate.replica_axes, [replica]);
        assert!(found.cost < found.direct_cost);
        // Every device keeps its own rows.
        let [held, gathered] =
            [&src, &found.intermediate.sharding].map(|s| s.layout(&[1024, 512]).unwrap());
        assert!(
            held.iter().all(|(device, rows)| gathered.region_of(device).unwrap().contains(rows))
        );
        let network = LinkClass::Network as usize;
        let onward = moved(&found.intermediate.sharding, &dst, &[1024, 512], &topology);
        assert_eq!(
            onward.bytes[network],
            moved(&src, &dst, &[1024, 512], &topology).bytes[network]
        );
    }

    #[test]
    fn tiny_arrays_are_gathered_large_ones_go_straight() {
        let topology = two_hosts();
        let src = on(&[("fsdp", 8), ("tp", 1)], 0, spec!["fsdp", "tp"]);
        let dst = on(&[("fsdp", 1), ("tp", 4)], 8, spec!["fsdp", "tp"]);
        let sizes = |rows: usize| {
            let found = best(&src, &dst, &[rows, 512], &topology)?;
            Some(found.intermediate.sharding.mesh().unwrap().shape()[0])
        };
        assert!(sizes(8).is_some_and(|split| split <= 2));
        assert_eq!(sizes(64 << 10), None);
        assert_eq!(best(&src, &src, &[1024, 512], &topology), None, "it is there");
    }

    #[test]
    fn nothing_is_gathered_over_the_network() {
        // Every device of the source is on a host of its own, so gathering would load the network
        // too.
        let topology = Topology::even(12, 1).on_hosts(&(0..12).collect::<Vec<_>>()).unwrap();
        let src = on(&[("x", 8)], 0, spec!["x"]);
        let dst = on(&[("y", 4)], 8, spec![None, "y"]);
        assert_eq!(best(&src, &dst, &[8, 8], &topology), None);
    }

    #[test]
    fn incomparable_shardings_go_straight() {
        let topology = two_hosts();
        let (rows, single) = (on(&[("x", 8)], 0, spec!["x"]), Sharding::single_device(DeviceId(9)));
        assert_eq!(best(&single, &rows, &[8, 8], &topology), None);
        assert_eq!(best(&rows, &single, &[7, 8], &topology), None, "7 rows are not divided by 8");
        assert_eq!(
            best(&rows, &on(&[("x", 8)], 90, spec!["x"]), &[8, 8], &topology),
            None,
            "no such device"
        );
        let sums = on(&[("x", 4), ("y", 2)], 0, spec!["x"]).unreduced(&["y"]).unwrap();
        assert_eq!(best(&sums, &single, &[8, 8], &topology), None);
        let taken = on(&[("x", 4), ("x_intermediate_split", 2)], 0, spec!["x"]);
        assert_eq!(best(&taken, &single, &[8, 8], &topology), None);
    }

    fn any_sharding(first: u32) -> impl Strategy<Value = Sharding> {
        (prop::sample::select(vec![(8, 1), (4, 2), (2, 4), (6, 1), (2, 2), (1, 4)]), 0..6usize)
            .prop_map(move |((a, b), spec)| {
                let spec = match spec {
                    0 => spec!["a"],
                    1 => spec![None, "b"],
                    2 => spec!["a", "b"],
                    3 => spec!["b", "a"],
                    4 => spec![("a", "b")],
                    _ => spec![],
                };
                on(&[("a", a), ("b", b)], first, spec)
            })
    }

    proptest! {
        #[test]
        fn a_detour_costs_less_and_never_more_over_the_network(
            src in any_sharding(0), dst in any_sharding(8), hosts in 1usize..=4,
            per_process in 1usize..=4, scale in prop::sample::select(vec![24usize, 240, 960]),
        ) {
            let processes = 16usize.div_ceil(per_process);
            let host = |process| process * hosts / processes;
            let names: Vec<usize> = (0..processes).map(host).collect();
            let topology = Topology::even(processes, per_process).on_hosts(&names).unwrap();
            let shape = [scale, scale];
            let found = best(&src, &dst, &shape, &topology);
            prop_assert_eq!(&found, &best(&src, &dst, &shape, &topology));
            let Some(found) = found else { return Ok(()) };
            prop_assert!(found.cost < found.direct_cost);
            let between = &found.intermediate.sharding;
            prop_assert_eq!(between.devices(), src.devices());
            let size = |axis: &String| between.mesh().unwrap().axis_size(axis).unwrap();
            prop_assert!(found.intermediate.replica_axes.iter().all(|axis| size(axis) > 1));
            let moved = |src, dst| moved(src, dst, &shape, &topology);
            let direct = moved(&src, &dst);
            let steps = [moved(&src, between), moved(between, &dst)];
            let both = |class: LinkClass| -> u64 {
                steps.iter().map(|step| step.bytes[class as usize]).sum()
            };
            let network = LinkClass::Network;
            prop_assert!(both(network) <= direct.bytes[network as usize]);
            if direct.bytes[network as usize] == 0 {
                let same_host = LinkClass::SameHost;
                prop_assert!(both(same_host) <= direct.bytes[same_host as usize]);
            }
        }
    }
}
