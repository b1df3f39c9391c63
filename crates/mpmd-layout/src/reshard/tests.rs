//! Tests plans against brute force, over random layouts and topologies.

use std::collections::{BTreeMap, BTreeSet};

use mpmd_base::ProcessId;
use proptest::prelude::*;

use super::*;
use crate::region::Region;
use crate::sharding::{Layout, Sharding, Spec, SpecEntry};
use crate::spec;
use crate::topology::{DeviceId, LinkClass, LinkSpeed, LinkSpeeds, Mesh, Topology};

fn mesh(axes: &[(&str, usize)], first: u32) -> Mesh {
    let count: u32 = axes.iter().map(|(_, size)| *size as u32).product();
    Mesh::new(axes, (first..first + count).map(DeviceId).collect()).unwrap()
}

fn planned(src: &Sharding, dst: &Sharding, shape: &[usize], topology: &Topology) -> Vec<String> {
    let (src, dst) = (src.layout(shape).unwrap(), dst.layout(shape).unwrap());
    let pieces = plan(&src, &dst, 4, topology).unwrap().pieces();
    pieces
        .iter()
        .map(|piece| format!("{}>{} {}", piece.src, piece.dst, piece.region))
        .collect()
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
        [
            "4>4 [0..1, 0..1]",
            "5>4 [1..2, 0..1]",
            "4>5 [0..1, 1..2]",
            "5>5 [1..2, 1..2]"
        ]
    );
}

#[test]
fn replicas_come_from_nearest_holder_in_turns() {
    let topology = Topology::even(4, 2);
    let everywhere = mesh(&[("x", 4)], 0).replicated();
    // Device 3 has it. 4 to 7 are on processes without it: each process gets it once, from holders
    // in turn.
    let wanted = mesh(&[("y", 5)], 3).replicated();
    assert_eq!(
        planned(&everywhere, &wanted, &[6], &topology),
        [
            "3>3 [0..6]",
            "0>4 [0..6]",
            "2>6 [0..6]",
            "4>5 [0..6]",
            "6>7 [0..6]"
        ]
    );
    let one = Mesh::new(&[("x", 2)], vec![DeviceId(0), DeviceId(2)])
        .unwrap()
        .replicated();
    assert_eq!(
        planned(&one, &Sharding::single_device(DeviceId(3)), &[], &topology),
        ["2>3 []"]
    );
}

#[test]
fn copies_within_a_process_come_from_its_holders_in_turns() {
    let (held, wanted) = (
        mesh(&[("x", 2)], 0).replicated(),
        mesh(&[("y", 3)], 1).replicated(),
    );
    assert_eq!(
        planned(&held, &wanted, &[6], &Topology::even(1, 4)),
        ["1>1 [0..6]", "0>2 [0..6]", "1>3 [0..6]"]
    );
}

#[test]
fn parts_of_one_tile_come_from_all_its_holders() {
    // Four holders on four processes; eight others want an eighth each.
    let topology = Topology::even(12, 1);
    let (src, dst) = (
        mesh(&[("x", 4)], 0).replicated(),
        mesh(&[("y", 8)], 4).sharding(spec!["y"]),
    );
    let (src, dst) = (src.layout(&[8]).unwrap(), dst.layout(&[8]).unwrap());
    let summary = plan(&src, &dst, 4, &topology).unwrap().summary();
    assert_eq!(
        (
            summary.pieces,
            summary.max_bytes_sent_by_a_device,
            summary.steps
        ),
        (8, 8, 1)
    );
    // The same if the eighths are tiles of a grid with divided rows.
    let dst = mesh(&[("a", 2), ("b", 4)], 4)
        .sharding(spec!["a", "b"])
        .layout(&[2, 4])
        .unwrap();
    let src = mesh(&[("r", 2), ("x", 2)], 0)
        .sharding(spec!["x"])
        .layout(&[2, 4])
        .unwrap();
    let summary = plan(&src, &dst, 4, &topology).unwrap().summary();
    assert_eq!((summary.pieces, summary.max_bytes_sent_by_a_device), (8, 8));
}

#[test]
fn hosts_relay_large_regions_and_fetch_small_directly() {
    let topology = Topology::even(8, 1)
        .on_hosts(&[0, 0, 1, 1, 2, 2, 3, 3])
        .unwrap();
    let (src, dst) = (
        Sharding::single_device(DeviceId(0)),
        mesh(&[("x", 6)], 2).replicated(),
    );
    assert_eq!(
        planned(&src, &dst, &[1], &topology),
        [
            "0>2 [0..1]",
            "0>4 [0..1]",
            "0>6 [0..1]",
            "2>3 [0..1]",
            "4>5 [0..1]",
            "6>7 [0..1]"
        ]
    );
    assert_eq!(
        planned(&src, &dst, &[1 << 24], &topology)
            .join(" ")
            .replace("[0..16777216]", ""),
        "0>2  2>3  2>4  4>5  4>6  6>7 "
    );
    let large = plan(
        &src.layout(&[1 << 24]).unwrap(),
        &dst.layout(&[1 << 24]).unwrap(),
        4,
        &topology,
    )
    .unwrap();
    // It moves in chunks, so that the last host has it soon after the first.
    assert_eq!(large.part_of(ProcessId(2)).deliveries.len(), 32);
    assert_eq!(large.summary().steps, 4);
}

#[test]
fn holders_of_large_region_share_network_transfer() {
    let topology = Topology::even(4, 1).on_hosts(&[0, 0, 1, 1]).unwrap();
    let (src, dst) = (
        mesh(&[("x", 2)], 0).replicated(),
        mesh(&[("x", 2)], 2).replicated(),
    );
    assert_eq!(
        planned(&src, &dst, &[1 << 22], &topology),
        [
            "0>2 [0..2097152]",
            "1>3 [2097152..4194304]",
            "3>2 [2097152..4194304]",
            "2>3 [0..2097152]"
        ]
    );
}

#[test]
fn small_regions_for_many_hosts_come_from_all_holders_alike() {
    // Each half goes to three hosts, and either holder sends three of the six.
    let topology = Topology::even(8, 1)
        .on_hosts(&[0, 1, 2, 3, 4, 5, 6, 7])
        .unwrap();
    let src = mesh(&[("x", 2)], 0).replicated().layout(&[2]).unwrap();
    let dst = mesh(&[("y", 2), ("z", 3)], 2)
        .sharding(spec!["y"])
        .layout(&[2])
        .unwrap();
    let summary = plan(&src, &dst, 4, &topology).unwrap().summary();
    assert_eq!(
        (summary.pieces, summary.max_bytes_sent_by_a_device),
        (6, 3 * 4)
    );
}

#[test]
fn part_of_a_large_region_has_at_least_a_mebibyte() {
    // Four holders could send a part each, but there are only 3 MiB.
    let topology = Topology::even(8, 1)
        .on_hosts(&[0, 0, 0, 0, 1, 1, 1, 1])
        .unwrap();
    let (src, dst) = (
        mesh(&[("x", 4)], 0).replicated(),
        mesh(&[("x", 4)], 4).replicated(),
    );
    let far = |pieces: Vec<String>| {
        let pieces = pieces
            .into_iter()
            .filter(|piece| piece.as_bytes()[0] < b'4');
        pieces
            .map(|piece| piece[..1].to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        far(planned(&src, &dst, &[3 << 18], &topology)),
        ["0", "1", "2"]
    );
    assert_eq!(far(planned(&src, &dst, &[4 << 18], &topology)).len(), 4);
    assert_eq!(far(planned(&src, &dst, &[2 << 18], &topology)).len(), 2);
    assert_eq!(
        far(planned(&src, &dst, &[(2 << 18) - 1], &topology)).len(),
        1
    );
}

#[test]
fn whole_shards_move_in_one_piece_and_their_parts_in_chunks() {
    let deliveries = |src: &Sharding, dst: &Sharding, topology: &Topology, to: u32| {
        let (src, dst) = (
            src.layout(&[4 << 20]).unwrap(),
            dst.layout(&[4 << 20]).unwrap(),
        );
        plan(&src, &dst, 4, topology)
            .unwrap()
            .part_of(ProcessId(to))
            .deliveries
            .len()
    };
    let one = |device| Sharding::single_device(DeviceId(device));
    assert_eq!(deliveries(&one(0), &one(1), &Topology::even(2, 1), 1), 1);
    // Two holders send 8 MiB each, in chunks of 2 MiB.
    let topology = Topology::even(4, 1).on_hosts(&[0, 0, 1, 1]).unwrap();
    let (src, dst) = (
        mesh(&[("x", 2)], 0).replicated(),
        mesh(&[("x", 2)], 2).replicated(),
    );
    assert_eq!(deliveries(&src, &dst, &topology, 2), 8);
}

#[test]
fn processes_of_a_host_share_received_regions() {
    // Eight quarters of two columns, each from one device; each column is wanted by two processes.
    let topology = Topology::even(6, 2).on_hosts(&[0, 0, 0, 0, 1, 1]).unwrap();
    let src = mesh(&[("x", 4), ("y", 2)], 0)
        .sharding(spec!["x", "y"])
        .layout(&[64, 64])
        .unwrap();
    let dst = mesh(&[("x", 2), ("y", 2)], 8)
        .sharding(spec![None, "y"])
        .layout(&[64, 64])
        .unwrap();
    let plan = plan(&src, &dst, 4, &topology).unwrap();
    for process in [4, 5] {
        let part = plan.part_of(ProcessId(process));
        let from_far = |delivery: &&PieceDelivery| match delivery.from {
            DeliveryOrigin::Process(from) => from.0 < 4,
            DeliveryOrigin::Device(_) => false,
        };
        assert_eq!(
            part.deliveries.iter().filter(from_far).count(),
            4,
            "{part:?}"
        );
    }
    assert_eq!(plan.summary().max_bytes_sent_by_a_device, 2 * 16 * 32 * 4);
}

#[test]
fn empty_destinations_receive_nothing() {
    let topology = Topology::even(1, 4);
    let (a, b) = (
        mesh(&[("x", 2)], 0).sharding(spec!["x"]),
        mesh(&[("x", 2)], 2).replicated(),
    );
    assert!(planned(&a, &b, &[0, 3], &topology).is_empty());
}

#[test]
fn shapes_and_devices_are_checked() {
    let sharding = Sharding::single_device(DeviceId(5));
    let (a, b) = (
        sharding.layout(&[2]).unwrap(),
        sharding.layout(&[3]).unwrap(),
    );
    let topology = Topology::even(1, 4);
    assert!(matches!(
        plan(&a, &b, 4, &topology),
        Err(ReshardError::Shape { .. })
    ));
    let unknown = ReshardError::UnknownDevice {
        device: DeviceId(5),
        devices: 4,
    };
    assert_eq!(plan(&a, &a, 4, &topology).unwrap_err(), unknown);
}

#[test]
fn equal_layouts_of_thousands_of_devices_move_nothing() {
    let topology = Topology::even(64, 64);
    let sharding = mesh(&[("x", 64), ("y", 64)], 0).sharding(spec!["x", "y"]);
    let layout = sharding.layout(&[640, 640]).unwrap();
    let pieces = plan(&layout, &layout, 4, &topology).unwrap().pieces();
    assert_eq!(pieces.len(), 4096);
    assert!(pieces.iter().all(|piece| piece.src == piece.dst));
}

#[test]
fn part_of_large_gather_lists_only_own_deliveries() {
    // Each of 1024 processes wants the shards of all others: a million pieces, of which each
    // process has 1024.
    let topology = Topology::even(1024, 1)
        .on_hosts(&(0..1024).map(|p| p / 8).collect::<Vec<_>>())
        .unwrap();
    let mesh = mesh(&[("x", 1024)], 0);
    let (src, dst) = (
        mesh.sharding(spec!["x"]).layout(&[1024]),
        mesh.replicated().layout(&[1024]),
    );
    let part = plan(&src.unwrap(), &dst.unwrap(), 4, &topology)
        .unwrap()
        .part_of(ProcessId(77));
    let received = part
        .deliveries
        .iter()
        .filter(|delivery| matches!(delivery.from, DeliveryOrigin::Process(_)));
    assert_eq!(received.count(), 1023);
}

const DEVICES: u32 = 12;

/// Generates layouts of a 72 by 72 array: tiles by random cuts, each on a random device of its own.
fn any_tiling() -> impl Strategy<Value = Layout> {
    let devices = Just((0..DEVICES).map(DeviceId).collect::<Vec<_>>()).prop_shuffle();
    (
        devices,
        proptest::collection::vec((0..4usize, any::<bool>(), 1..23usize), 0..5),
    )
        .prop_map(|(devices, cuts)| {
            let mut tiles = vec![Region::full(&[72, 72])];
            for (tile, dim, at) in cuts {
                let tile = tiles.remove(tile % tiles.len());
                let range = tile.range(usize::from(dim));
                let at = range.start + at * range.len() / 24;
                for (start, end) in [(range.start, at), (at, range.end)] {
                    let ranges = tile.ranges().enumerate();
                    tiles.push(
                        ranges
                            .map(|(d, r)| {
                                if d == usize::from(dim) {
                                    (start, end)
                                } else {
                                    (r.start, r.end)
                                }
                            })
                            .collect(),
                    );
                }
            }
            Layout::new(&[72, 72], devices[..tiles.len()].to_vec(), tiles, false)
        })
}

/// Generates layouts of a 72 by 72 array by a named sharding over some of the devices, in random
/// order.
fn any_named() -> impl Strategy<Value = Layout> {
    let devices = Just((0..DEVICES).map(DeviceId).collect::<Vec<_>>()).prop_shuffle();
    (devices, 1..=4usize, 1..=3usize, 0..6usize).prop_map(|(devices, a, b, spec)| {
        let mesh = Mesh::new(&[("a", a), ("b", b)], devices[..a * b].to_vec()).unwrap();
        let spec = match spec {
            0 => spec![],
            1 => spec!["a"],
            2 => spec![None, "b"],
            3 => spec!["b", "a"],
            4 => spec![None, ("b", "a")],
            _ => Spec::new(vec![SpecEntry::from(("a", "b"))]),
        };
        (*mesh.sharding(spec).layout(&[72, 72]).unwrap()).clone()
    })
}

fn any_layout() -> impl Strategy<Value = Layout> {
    prop_oneof![3 => any_named(), 1 => any_tiling()]
}

fn any_topology() -> impl Strategy<Value = Topology> {
    let hosts = proptest::collection::vec(0..4u32, DEVICES as usize);
    (1..=4usize, hosts, prop_oneof![Just(0u64), Just(1_000_000)]).prop_map(
        |(per_process, hosts, latency_ns)| {
            let topology = Topology::even((DEVICES as usize).div_ceil(per_process), per_process);
            let hosts = &hosts[..topology.processes()];
            // Without latency everything is passed on, with very high latency nothing.
            let network = LinkSpeed {
                latency_ns,
                bytes_per_us: 1,
            };
            topology.on_hosts(hosts).unwrap().with_links(LinkSpeeds {
                network,
                ..LinkSpeeds::default()
            })
        },
    )
}

/// Returns the number of elements of a region that none of the regions `having` contain.
fn missing(region: &Region, having: &[&Region]) -> usize {
    let without = |parts: Vec<Region>, other: &&Region| {
        parts.iter().flat_map(|part| part.without(other)).collect()
    };
    having
        .iter()
        .fold(vec![region.clone()], without)
        .iter()
        .map(Region::elements)
        .sum()
}

/// Returns the number of elements that a group of devices wants and does not have, each counted
/// once.
fn lacking(src: &Layout, dst: &Layout, group: impl Fn(DeviceId) -> bool) -> usize {
    let having: Vec<&Region> = src
        .iter()
        .filter(|(device, _)| group(*device))
        .map(|(_, r)| r)
        .collect();
    let wanted: BTreeSet<&Region> = dst
        .iter()
        .filter(|(device, _)| group(*device))
        .map(|(_, r)| r)
        .collect();
    wanted
        .into_iter()
        .map(|region| missing(region, &having))
        .sum()
}

/// Generates a number of bytes per element: large enough that 72 by 72 elements are cut into parts
/// and chunks, or too small for that.
fn any_item() -> impl Strategy<Value = usize> {
    prop_oneof![Just(4usize), Just(1 << 15)]
}

proptest! {
    #[test]
    fn every_element_comes_once_from_a_current_holder(
        src in any_layout(), dst in any_layout(), topology in any_topology(), item in any_item(),
    ) {
        let plan = plan(&src, &dst, item, &topology).unwrap();
        let pieces = plan.pieces();
        let mut has: BTreeMap<DeviceId, Vec<(u32, Region)>> = BTreeMap::new();
        for (device, region) in src.iter() {
            has.entry(device).or_default().push((0, region.clone()));
        }
        let mut covered: BTreeMap<DeviceId, Vec<Region>> = BTreeMap::new();
        for piece in &pieces {
            let having = has.get(&piece.src).into_iter().flatten().find(|(step, region)| {
                *step < piece.step && region.contains(&piece.region)
            });
            prop_assert!(having.is_some_and(|(step, _)| step + 1 == piece.step), "{piece:?} of \
                {pieces:?}");
            let covered = covered.entry(piece.dst).or_default();
            prop_assert!(!piece.region.is_empty());
            prop_assert!(covered.iter().all(|other| other.intersect(&piece.region).is_none()));
            covered.push(piece.region.clone());
            has.entry(piece.dst).or_default().push((piece.step, piece.region.clone()));
        }
        for (device, region) in dst.iter() {
            let own = covered.get(&device).map_or(&[][..], Vec::as_slice);
            prop_assert!(own.iter().all(|part| region.contains(part)));
            prop_assert_eq!(own.iter().map(Region::elements).sum::<usize>(), region.elements());
        }
        prop_assert!(pieces.is_sorted_by_key(|piece| (piece.step, dst.place_of(piece.dst))));
    }

    #[test]
    fn slow_links_carry_only_missing_bytes(
        src in any_layout(), dst in any_layout(), topology in any_topology(), item in any_item(),
    ) {
        let plan = plan(&src, &dst, item, &topology).unwrap();
        let summary = plan.summary();
        let process = |device| topology.process_of(device).unwrap();
        let hosts: BTreeSet<u32> =
            (0..topology.processes()).map(|p| topology.host_of(ProcessId(p as u32))).collect();
        let network: usize = hosts
            .into_iter()
            .map(|host| lacking(&src, &dst, |device| topology.host_of(process(device)) == host))
            .sum();
        prop_assert_eq!(summary.bytes_over(LinkClass::Network), (network * item) as u64);
        let between: usize = (0..topology.processes())
            .map(|p| lacking(&src, &dst, |device| process(device).index() == p))
            .sum();
        // Parts land on several processes of a host, and each process gets the others' parts from
        // them.
        let found = [LinkClass::Network, LinkClass::SameHost].map(|link| summary.bytes_over(link));
        prop_assert_eq!(found.iter().sum::<u64>(), (between * item) as u64);
        let all: usize = dst.regions().iter().map(Region::elements).sum();
        prop_assert_eq!(summary.bytes.iter().sum::<u64>(), (all * item) as u64);
        prop_assert_eq!(plan.bytes_over_links(), summary.bytes);
    }

    #[test]
    fn parts_of_all_processes_match_each_other_and_pieces(
        src in any_layout(), dst in any_layout(), topology in any_topology(), item in any_item(),
    ) {
        let plan = plan(&src, &dst, item, &topology).unwrap();
        let process = |p: usize| ProcessId(p as u32);
        let processes = 0..topology.processes();
        let parts: Vec<ProcessPart> = processes.map(|p| plan.part_of(process(p))).collect();
        let mut sent = BTreeMap::new();
        let mut received = BTreeMap::new();
        let mut covered: BTreeMap<DeviceId, usize> = BTreeMap::new();
        for (p, part) in parts.iter().enumerate() {
            prop_assert!(part.deliveries.is_sorted_by_key(|delivery| delivery.id));
            for delivery in &part.deliveries {
                prop_assert!(delivery.id >> 63 == 0 && !delivery.region.is_empty());
                prop_assert!(!delivery.targets.is_empty() || !delivery.peers.is_empty());
                match delivery.from {
                    DeliveryOrigin::Device(device) => {
                        prop_assert!(src.region_of(device).unwrap().contains(&delivery.region));
                        prop_assert_eq!(topology.process_of(device), Some(process(p)));
                        prop_assert_eq!(delivery.giver, Some(device));
                    }
                    DeliveryOrigin::Process(from) => {
                        if let Some(device) = delivery.giver {
                            prop_assert!(src.region_of(device).unwrap().contains(&delivery.region));
                            prop_assert_eq!(topology.process_of(device), Some(from));
                        }
                        let what = (delivery.region.clone(), delivery.giver);
                        let before = received.insert((from, process(p), delivery.id), what);
                        prop_assert!(before.is_none() && from != process(p));
                    }
                }
                for peer in &delivery.peers {
                    // The receiver knows the device that holds the region in its shard, or that the
                    // region is passed on.
                    let is_in_shard = matches!(delivery.from, DeliveryOrigin::Device(_));
                    let giver = delivery.giver.filter(|_| is_in_shard);
                    let what = (delivery.region.clone(), giver);
                    let before = sent.insert((process(p), *peer, delivery.id), what);
                    prop_assert!(before.is_none());
                }
                for target in &delivery.targets {
                    prop_assert!(dst.region_of(*target).unwrap().contains(&delivery.region));
                    *covered.entry(*target).or_default() += delivery.region.elements();
                }
            }
        }
        prop_assert_eq!(&sent, &received);
        for (device, region) in dst.iter() {
            prop_assert_eq!(covered.get(&device).copied().unwrap_or(0), region.elements());
        }
        // The same bytes move between each two processes as in the pieces.
        let mut expected: BTreeMap<_, usize> = BTreeMap::new();
        for piece in plan.pieces() {
            let of = |device| topology.process_of(device).unwrap();
            let pair = (of(piece.src), of(piece.dst));
            if pair.0 != pair.1 {
                *expected.entry(pair).or_default() += piece.region.elements();
            }
        }
        let mut found: BTreeMap<_, usize> = BTreeMap::new();
        for ((from, to, _), (region, _)) in sent {
            *found.entry((from, to)).or_default() += region.elements();
        }
        prop_assert_eq!(found, expected);
    }
}
