//! Regions that processes pass on to each other: on several hosts, in chunks, and if a process in
//! the middle fails, dies or has no room.

use std::time::{Duration, Instant};

use super::simulations::{simulation, zero_copy};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::reshard::{self, DeliveryOrigin};
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::{DeviceId, LinkClass, LinkSpeeds, Mesh, Topology};
use mpmd_core::{FailureKind, ProcessId, Simulation};

const MIB: usize = 1 << 20;

/// Shape of an `f32` array of 6 MiB, which moves in three chunks.
const SHAPE: [usize; 2] = [1024, 1536];

/// Returns a function that fills a shard: every element gets its row-major index in an array of
/// `columns` columns.
fn numbered(columns: usize) -> impl Fn(&Region, ViewMut<'_>) -> Result<()> + Send + Sync + 'static {
    move |region, mut view| {
        let indices = region
            .range(0)
            .flat_map(|row| region.range(1).map(move |column| row * columns + column));
        view.as_mut_slice::<f32>()?
            .iter_mut()
            .zip(indices)
            .for_each(|(value, index)| *value = index as f32);
        Ok(())
    }
}

fn check(array: &MpmdArray, case: &str) -> Result<()> {
    if array.is_fully_remote() {
        return Ok(());
    }
    let columns = array.shape()[1];
    for shard in array.addressable_shards()? {
        let mut found = shard.data.as_slice::<f32>()?.iter();
        for row in shard.region.range(0) {
            for column in shard.region.range(1) {
                let expected = (row * columns + column) as f32;
                assert_eq!(
                    found.next(),
                    Some(&expected),
                    "{case}: ({row}, {column}) on {}",
                    shard.device
                );
            }
        }
    }
    Ok(())
}

fn mesh(p: &Program, axes: &[(&str, usize)], devices: std::ops::Range<u32>) -> Result<Mesh> {
    p.mesh_of(axes, &devices.map(DeviceId).collect::<Vec<_>>())
}

/// Returns (name, source sharding, target sharding) of moves over eight devices, some with large
/// parts that several devices want.
fn ways(p: &Program) -> Result<Vec<(&'static str, Sharding, Sharding)>> {
    let all = p.mesh(&[("x", 8)])?;
    let grid = p.mesh(&[("a", 2), ("b", 4)])?;
    let (front, back) = (mesh(p, &[("x", 4)], 0..4)?, mesh(p, &[("x", 4)], 4..8)?);
    let (rows, columns) = (spec!["x"], spec![None, "x"]);
    let one = Sharding::single_device(DeviceId(0));
    Ok(vec![
        ("one to all", one.clone(), all.replicated()),
        (
            "one to the others",
            one.clone(),
            mesh(p, &[("x", 7)], 1..8)?.replicated(),
        ),
        ("rows to all", all.sharding(rows.clone()), all.replicated()),
        ("half to half", front.replicated(), back.replicated()),
        (
            "rows to columns",
            all.sharding(rows.clone()),
            all.sharding(columns.clone()),
        ),
        (
            "rows to a grid with copies",
            front.sharding(rows),
            grid.sharding(spec![None, "b"]),
        ),
        (
            "columns to copies of rows",
            all.sharding(columns),
            grid.sharding(spec!["a"]),
        ),
        ("one to rows", one, back.sharding(spec!["x"])),
    ])
}

/// Waits up to 20 seconds until this process has sent exactly the expected bytes to each process,
/// by receiver.
fn sent_is(p: &Program, expected: &[u64], case: &str) {
    let until = Instant::now() + Duration::from_secs(20);
    while p.metrics().bytes_sent != expected {
        let found = p.metrics().bytes_sent;
        assert!(
            Instant::now() < until,
            "{case}: process {} sent {found:?}, not {expected:?}",
            p.process()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn shards_are_right_and_sent_bytes_match_the_plan() {
    let _limit = watchdog(120);
    let jobs: [(usize, &[u32]); 8] = [
        (1, &[0]),
        (2, &[0, 0]),
        (2, &[0, 1]),
        (4, &[0, 0, 0, 0]),
        (4, &[0, 1, 0, 1]),
        (4, &[0, 1, 2, 3]),
        (8, &[0, 0, 1, 1, 2, 2, 3, 3]),
        (8, &[0, 0, 0, 0, 1, 1, 1, 1]),
    ];
    for (seed, (processes, hosts)) in jobs.into_iter().enumerate() {
        let simulation = simulation(processes, 8).settings(|b| b.hosts(hosts));
        let simulation = simulation.delays(seed as u64, Duration::from_millis(1));
        let results = simulation.run(|p| {
            let topology = p.topology().clone();
            let mut sent = vec![0; processes];
            // Over all processes: bytes within hosts, and between them.
            let mut over = [0; 2];
            let mut planned = [0; 2];
            let mut passed_on = 0;
            for (name, from, to) in ways(p)? {
                let x = p.array_from_fn(f32s(SHAPE), &from, numbered(SHAPE[1]))?;
                let y = p.device_put(&x, &to)?;
                check(&y, name)?;
                let plan =
                    reshard::plan(&*from.layout(&SHAPE)?, &*to.layout(&SHAPE)?, 4, &topology)
                        .unwrap();
                for process in (0..processes as u32).map(ProcessId) {
                    for delivery in plan.part_of(process).deliveries {
                        for peer in delivery.peers {
                            let bytes = (delivery.region.elements() * 4) as u64;
                            let far = topology.host_of(process) != topology.host_of(peer);
                            over[usize::from(far)] += bytes;
                            passed_on +=
                                usize::from(matches!(delivery.from, DeliveryOrigin::Process(_)));
                            if process == p.process() {
                                sent[peer.index()] += bytes;
                            }
                        }
                    }
                }
                let summary = plan.summary();
                planned[0] += summary.bytes_over(LinkClass::SameHost);
                planned[1] += summary.bytes_over(LinkClass::Network);
                sent_is(p, &sent, name);
            }
            assert_eq!(over, planned, "{processes} processes on {hosts:?}");
            Ok(passed_on)
        });
        let passed_on = results.into_iter().map(Result::unwrap).max();
        let several = hosts.iter().any(|host| *host != hosts[0]) && processes > 2;
        assert_eq!(
            passed_on > Some(0),
            several,
            "{processes} processes on {hosts:?}"
        );
    }
}

/// Returns (simulation, order of receivers): four processes, each on its own host. An array of 8
/// MiB moves from process 0 to the others in chunks, and each passes it on to the next in this
/// order.
fn chain() -> (Simulation, [u32; 3]) {
    let hosts = [0, 1, 2, 3];
    let from = Sharding::single_device(DeviceId(0))
        .layout(&[8, MIB / 4])
        .unwrap();
    let others = Mesh::new(&[("x", 3)], [1, 2, 3].map(DeviceId).to_vec()).unwrap();
    let to = others.replicated().layout(&[8, MIB / 4]).unwrap();
    let topology = Topology::even(4, 1).on_hosts(&hosts).unwrap();
    let plan = reshard::plan(&from, &to, 4, &topology).unwrap();
    let mut order = Vec::new();
    let mut at = ProcessId(0);
    while let Some(delivery) = plan.part_of(at).deliveries.first()
        && let [next] = delivery.peers[..]
    {
        assert!(plan.part_of(at).deliveries.len() > 1, "it goes in chunks");
        order.push(next.0);
        at = next;
    }
    (
        simulation(4, 4).settings(|b| b.hosts(&hosts)),
        order.try_into().expect("one after the other"),
    )
}

fn eight_mib(p: &mut Program, device: u32) -> Result<MpmdArray> {
    let fill = numbered(MIB / 4);
    p.array_from_fn(
        f32s([8, MIB / 4]),
        Sharding::single_device(DeviceId(device)),
        fill,
    )
}

#[test]
fn source_failure_reaches_all_through_the_relays() {
    let _limit = watchdog(60);
    let (simulation, _) = chain();
    let results = simulation.delays(3, Duration::from_millis(2)).run(|p| {
        let fails = |_: &Region, _: ViewMut<'_>| Err(Error::kernel("no values today"));
        let x = p.array_from_fn(
            f32s([8, MIB / 4]),
            Sharding::single_device(DeviceId(0)),
            fails,
        )?;
        let y = p.device_put(&x, mesh(p, &[("x", 3)], 1..4)?.replicated())?;
        let mine = if p.process() == ProcessId(0) { x } else { y };
        let error = mine.block_until_ready().unwrap_err();
        let failure = error.failure().expect("a failure");
        assert_eq!(
            (failure.kind, failure.process),
            (FailureKind::Kernel, ProcessId(0)),
            "{failure}"
        );
        Err::<(), _>(error)
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("no values today"), "{error}");
    }
}

#[test]
fn death_of_a_relay_is_reported_to_all() {
    let _limit = watchdog(60);
    let (simulation, [first, middle, last]) = chain();
    for seed in 0..4 {
        // Before it takes the array, and while it passes it on.
        let (dying, op) = [(first, 2), (middle, 2), (first, 3), (middle, 3)][seed];
        let simulation = simulation
            .clone()
            .delays(seed as u64, Duration::from_millis(5));
        let results = simulation.lose(ProcessId(dying), op).run(|p| {
            let x = eight_mib(p, 0)?;
            let y = p.device_put(&x, mesh(p, &[("x", 3)], 1..4)?.replicated())?;
            let again = p.device_put(&y, Sharding::single_device(DeviceId(last)))?;
            if p.process() == ProcessId(last) {
                // Either the whole array, or an error that names the lost process.
                match again.block_until_ready() {
                    Ok(_) => check(&again, "the last")?,
                    Err(error) => assert!(error.is_peer_failure(), "{error}"),
                }
            }
            Ok(())
        });
        for (process, result) in results.into_iter().enumerate() {
            let error = result.expect_err("nobody can finish").to_string();
            assert!(
                error.contains(&format!("process {dying}")),
                "process {process}: {error}"
            );
        }
    }
}

#[test]
fn relay_without_room_still_passes_on() {
    let _limit = watchdog(60);
    let (simulation, [first, middle, last]) = chain();
    for full in [first, middle] {
        let simulation = simulation
            .clone()
            .settings(|b| b.device_memory(12 * MIB as u64));
        let results = simulation.run(|p| {
            let holder = eight_mib(p, full)?;
            holder.block_until_ready()?;
            let x = eight_mib(p, 0)?;
            let y = p.device_put(&x, mesh(p, &[("x", 3)], 1..4)?.replicated())?;
            if p.process() == ProcessId(full) {
                let failure = y.block_until_ready().unwrap_err();
                assert_eq!(
                    failure.failure().map(|f| f.kind),
                    Some(FailureKind::Memory),
                    "{failure}"
                );
            } else {
                check(&y, "with room")?;
            }
            // No process leaves before all have checked.
            for process in [first, middle, last] {
                p.broadcast_value(ProcessId(process), 0u8, || Ok(0))?;
            }
            drop(holder);
            Ok(())
        });
        for result in results {
            let error = result
                .expect_err("a failure of one is the job's")
                .to_string();
            assert!(error.contains("out of memory"), "{error}");
        }
    }
}

#[test]
fn devices_of_a_process_share_one_arrival() {
    let _limit = watchdog(60);
    // Small, received in place, and in chunks behind a relay.
    for (rows, links) in [(1, None), (2048, None), (2048, Some(LinkSpeeds::default()))] {
        let simulation = simulation(3, 9).settings(|b| match links {
            // Each on its own host: passed on from one to the next.
            Some(links) => b.hosts(&[0, 1, 2]).links(links),
            None => b,
        });
        let results = simulation.run(|p| {
            let x = p.array_from_fn(
                f32s([rows, 1024]),
                Sharding::single_device(DeviceId(0)),
                numbered(1024),
            )?;
            let y = p.device_put(&x, mesh(p, &[("x", 6)], 3..9)?.replicated())?;
            check(&y, "shared")?;
            // Small arrays may stay in the message's memory.
            if rows > 1 && !y.is_fully_remote() {
                // Zero-copy transfers stay in the lender's memory; chunks are copied together.
                let in_place = zero_copy() && links.is_none();
                let copies = if in_place { 0 } else { 3 };
                assert_eq!(
                    p.memory().live,
                    copies * (rows * 4096) as u64,
                    "each device has its own"
                );
            }
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}
