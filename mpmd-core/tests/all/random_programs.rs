//! Random programs give the same bits on any number of processes, with any delays.
//!
//! A program is a list of steps made from a seed. It runs on one process for reference, then on
//! several with messages that overtake each other. The test compares every shard of every array
//! that is left at the end.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::simulations::{simulation, zero_copy};
use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::pipeline::flow::Flow;
use mpmd_core::plan::Plan;
use mpmd_core::prelude::*;
use mpmd_core::random::{Key, uniform_f32};
use mpmd_core::sharding::{Sharding, Spec, SpecEntry};
use mpmd_core::topology::{DeviceId, Mesh};
use mpmd_core::{ProcessId, Simulation};
use mpmd_ids::block::{block_on, thread};

const ROWS: usize = 16;
const COLUMNS: usize = 8;
const STEPS: usize = 40;

/// A step that all processes execute. Indices such as `source` count the arrays of the program in
/// the order of their creation.
#[derive(Clone, Debug)]
enum RandomStep {
    Make { rows: usize, to: Sharding, key: u64 },
    Host { rows: usize, to: Sharding, value: f32 },
    Put { source: usize, to: Sharding, options: MoveOptions },
    Scale { source: usize, factor: f32 },
    Reduce { source: usize, axis: String, size: usize },
    Update { source: usize, donate: bool },
    Add { left: usize, right: usize },
    Microbatches { source: usize, m: usize },
    Then { source: usize },
    Await { source: usize },
    Drop { source: usize },
    Agree { from: u32, value: u64 },
    Compare,
}

/// Shape and sharding of a live array, as the generator knows them.
#[derive(Clone)]
struct Known {
    rows: usize,
    sharding: Sharding,
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((x ^ (x >> 31)) % n as u64) as usize
    }

    fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len())]
    }

    /// Returns a random sharding for `rows` rows, on some of the devices in any order: on a mesh of
    /// them, in chunks, or in enumerated parts.
    fn sharding(&mut self, devices: usize, rows: usize) -> Sharding {
        let mut ids: Vec<u32> = (0..devices as u32).collect();
        for i in 0..ids.len() {
            let j = i + self.below(ids.len() - i);
            ids.swap(i, j);
        }
        let shapes: &[&[usize]] = &[&[1], &[2], &[4], &[2, 2], &[1, 4], &[4, 2]];
        let fitting: Vec<_> =
            shapes.iter().filter(|shape| shape.iter().product::<usize>() <= devices).collect();
        let shape = self.pick(&fitting);
        let axes: Vec<(&str, usize)> = ["a", "b"].into_iter().zip(shape.iter().copied()).collect();
        let count = shape.iter().product();
        let mesh = Mesh::new(&axes, ids[..count].iter().copied().map(DeviceId).collect()).unwrap();
        if count == 1 && self.below(2) == 0 {
            return Sharding::single_device(mesh.devices()[0]);
        }
        match self.below(8) {
            0 => {
                return Sharding::chunk(self.below(4) as isize - 2, mesh.devices().to_vec())
                    .unwrap();
            }
            1 => return self.parts(mesh.devices(), rows),
            _ => {}
        }
        loop {
            let mut entries = [SpecEntry::None, SpecEntry::None];
            for (axis, _) in &axes {
                let dim = self.below(3);
                if dim < 2 {
                    let before = entries[dim].axes().to_vec();
                    entries[dim] = SpecEntry::from([before, vec![(*axis).to_owned()]].concat());
                }
            }
            let sharding = mesh.sharding(Spec::new(entries.to_vec()));
            if sharding.layout(&[rows, COLUMNS]).is_ok() {
                return sharding;
            }
        }
    }

    /// Returns a sharding with one part for each device, made by random cuts from side to side.
    /// Some parts may be empty.
    fn parts(&mut self, devices: &[DeviceId], rows: usize) -> Sharding {
        let mut parts = vec![Region::full(&[rows, COLUMNS])];
        while parts.len() < devices.len() {
            let part = parts.swap_remove(self.below(parts.len()));
            let dim = self.below(2);
            let range = part.range(dim);
            let middle = range.start + self.below(range.len() + 1);
            for side in [range.start..middle, middle..range.end] {
                let mut ranges: Vec<_> = part.ranges().collect();
                ranges[dim] = side;
                parts.push(Region::new(ranges));
            }
        }
        Sharding::enumerated(devices.iter().copied().zip(parts).collect()).unwrap()
    }
}

/// Returns the steps of the program of a seed, for `devices` devices. Equal arguments give equal
/// programs.
fn program(seed: u64, devices: usize) -> Vec<RandomStep> {
    let mut random = Random(seed);
    let mut arrays: Vec<Option<Known>> = Vec::new();
    let mut steps = Vec::new();
    while steps.len() < STEPS {
        let alive: Vec<usize> = (0..arrays.len()).filter(|i| arrays[*i].is_some()).collect();
        if alive.len() < 3 {
            let (rows, key) = (*random.pick(&[ROWS, ROWS / 2]), random.below(1000) as u64);
            let to = random.sharding(devices, rows);
            arrays.push(Some(Known { rows, sharding: to.clone() }));
            steps.push(match random.below(3) {
                0 => RandomStep::Host { rows, to, value: key as f32 },
                _ => RandomStep::Make { rows, to, key },
            });
            continue;
        }
        let source = *random.pick(&alive);
        let known = arrays[source].clone().expect("it is alive");
        let mesh = known.sharding.mesh().cloned();
        let step = match (random.below(16), mesh) {
            (0..5, _) => {
                let to = random.sharding(devices, known.rows);
                let (donate, may_alias) = (random.below(4) == 0, random.below(4) != 0);
                arrays.push(Some(Known { rows: known.rows, sharding: to.clone() }));
                if donate {
                    arrays[source] = None;
                }
                RandomStep::Put {
                    source,
                    to,
                    options: MoveOptions::default().donate(donate).may_alias(may_alias),
                }
            }
            (5..7, Some(_)) => {
                arrays.push(Some(known));
                RandomStep::Scale { source, factor: (1 + random.below(7)) as f32 / 8.0 }
            }
            (7..9, Some(mesh)) => {
                let axis = random.pick(mesh.axis_names()).clone();
                let size = mesh.axis_size(&axis).unwrap();
                arrays.push(Some(known));
                RandomStep::Reduce { source, axis, size }
            }
            (9..11, Some(_)) => {
                let donate = random.below(3) != 0;
                arrays.push(Some(known));
                if donate {
                    arrays[source] = None;
                }
                RandomStep::Update { source, donate }
            }
            (11, Some(_)) => {
                let is_like = |i: &&usize| {
                    arrays[**i].as_ref().is_some_and(|other| {
                        other.rows == known.rows && other.sharding == known.sharding
                    })
                };
                let alike: Vec<usize> = alive.iter().filter(is_like).copied().collect();
                let right = *random.pick(&alike);
                arrays.push(Some(known));
                RandomStep::Add { left: source, right }
            }
            (12, _) => {
                let m = *random.pick(&[1, 2]);
                let rows = known.rows / m;
                // Its parts must still divide over the mesh: each device's rows must be divisible.
                let layout = known.sharding.layout(&[known.rows, COLUMNS]).unwrap();
                if !layout.regions().iter().all(|region| region.range(0).len().is_multiple_of(m)) {
                    continue;
                }
                // Enumerated parts apply to one shape only.
                if known.sharding.layout(&[rows, COLUMNS]).is_err() {
                    continue;
                }
                (0..m).for_each(|_| {
                    arrays.push(Some(Known { rows, sharding: known.sharding.clone() }))
                });
                RandomStep::Microbatches { source, m }
            }
            (13, _) => {
                arrays[source] = None;
                RandomStep::Drop { source }
            }
            (14, _) => match random.below(4) {
                0 => RandomStep::Agree {
                    from: random.below(devices) as u32,
                    value: random.below(1000) as u64,
                },
                1 => RandomStep::Then { source },
                2 => RandomStep::Await { source },
                _ => RandomStep::Compare,
            },
            _ => continue,
        };
        steps.push(step);
    }
    steps
}

/// The bytes of the shards that a process holds at the end, by (array index, device).
type Shards = BTreeMap<(usize, DeviceId), Vec<u8>>;

fn execute(p: &mut Program, steps: &[RandomStep]) -> Result<Shards> {
    let mut arrays: Vec<Option<MpmdArray>> = Vec::new();
    let rows_of = |rows: usize| f32s([rows, COLUMNS]);
    for step in steps {
        let array = |i: &usize| arrays[*i].clone().expect("the generator tracks live arrays");
        match step {
            RandomStep::Make { rows, to, key } => {
                let key = Key(*key);
                let made = p.array_from_fn(rows_of(*rows), to, move |region, mut view| {
                    let elements = region
                        .range(0)
                        .flat_map(|i| region.range(1).map(move |j| (i * COLUMNS + j) as u64));
                    let values = view.as_mut_slice::<f32>()?.iter_mut();
                    values
                        .zip(elements)
                        .for_each(|(value, element)| *value = uniform_f32(key, element));
                    Ok(())
                })?;
                arrays.push(Some(made));
            }
            RandomStep::Host { rows, to, value } => {
                let values: Vec<f32> = (0..rows * COLUMNS).map(|i| value + i as f32).collect();
                let host = MpmdArray::from_slice(&[*rows, COLUMNS], &values)?;
                arrays.push(Some(p.device_put(&host, to)?));
            }
            RandomStep::Put { source, to, options } => {
                let moved = p.device_put_with(&array(source), to, *options)?;
                arrays.push(Some(moved));
                if options.donate {
                    arrays[*source] = None;
                }
            }
            RandomStep::Scale { source, factor } => {
                let x = array(source);
                let (mesh, sharding) = bound(&x);
                let factor = MpmdArray::scalar(*factor);
                let scale = fun("scale", like_first, |cx, x, mut y| {
                    // Devices run at different speeds.
                    thread::sleep(Duration::from_micros(u64::from(cx.device().0 % 3) * 200));
                    let factor = x[1].scalar::<f32>()?;
                    let pairs = y[0].as_mut_slice::<f32>()?.iter_mut().zip(x[0].as_slice::<f32>()?);
                    pairs.for_each(|(y, x)| *y = x * factor);
                    Ok(())
                });
                let scale = p
                    .jit(scale)
                    .on(&mesh)
                    .inputs((&sharding, &sharding))
                    .outputs(&sharding)
                    .build()?;
                arrays.extend(scale.call(p, vec![x, factor])?.into_iter().map(Some));
            }
            RandomStep::Reduce { source, axis, size } => {
                let x = array(source);
                let (mesh, sharding) = bound(&x);
                let (name, size) = (axis.clone(), *size as f32);
                let declared = name.clone();
                // Every device calls it with the declared number of elements: all of its part.
                let part = sharding.layout(x.shape()).unwrap().regions()[0].shape();
                let reduce = fun(
                    "reduce",
                    move |x| {
                        Ok(Signature::new(vec![x[0].clone()])
                            .all_reduce(&declared, f32s(part.clone())))
                    },
                    move |cx, x, mut y| {
                        let y = y[0].as_mut_slice::<f32>()?;
                        y.copy_from_slice(x[0].as_slice()?);
                        cx.all_reduce(&name, y)?;
                        y.iter_mut().for_each(|y| *y /= size);
                        Ok(())
                    },
                );
                let reduce = p.jit(reduce).on(&mesh).outputs(&sharding).build()?;
                arrays.extend(reduce.call(p, vec![x])?.into_iter().map(Some));
            }
            RandomStep::Update { source, donate } => {
                let x = array(source);
                let (mesh, sharding) = bound(&x);
                let update = fun(
                    "update",
                    |x| Ok(Signature::new(vec![x[0].clone()]).alias("0", "0")),
                    |_, _, mut y| {
                        y[0].as_mut_slice::<f32>()?.iter_mut().for_each(|y| *y = 1.0 - *y / 3.0);
                        Ok(())
                    },
                );
                let update = p.jit(update).on(&mesh).outputs(&sharding);
                let update = if *donate { update.donate("0").build()? } else { update.build()? };
                arrays.extend(update.call(p, vec![x])?.into_iter().map(Some));
                if *donate {
                    arrays[*source] = None;
                }
            }
            RandomStep::Add { left, right } => {
                let (left, right) = (array(left), array(right));
                let (mesh, sharding) = bound(&left);
                let add = fun("add", like_first, |_, x, mut y| {
                    let sums = x[0].as_slice::<f32>()?.iter().zip(x[1].as_slice::<f32>()?);
                    let y = y[0].as_mut_slice::<f32>()?.iter_mut();
                    y.zip(sums).for_each(|(y, (a, b))| *y = (a + b) / 2.0);
                    Ok(())
                });
                let add = p.jit(add).on(&mesh).outputs(&sharding).build()?;
                arrays.extend(add.call(p, vec![left, right])?.into_iter().map(Some));
            }
            RandomStep::Microbatches { source, m } => {
                let parts = array(source).microbatches(p, 0, *m)?;
                arrays.extend(parts.into_iter().map(Some));
            }
            RandomStep::Then { source } => array(source).then(drop),
            RandomStep::Await { source } => drop(block_on(array(source).into_future())?),
            RandomStep::Drop { source } => arrays[*source] = None,
            RandomStep::Agree { from, value } => {
                let from = ProcessId(from % p.processes() as u32);
                assert_eq!(p.broadcast_value(from, *value, || Ok(*value))?, *value);
            }
            RandomStep::Compare => p.step_end()?,
        }
    }
    let mut shards = Shards::new();
    for (i, array) in arrays.iter().enumerate() {
        if let Some(array) = array.as_ref().filter(|array| !array.is_fully_remote()) {
            for shard in array.addressable_shards()? {
                let twice = shards.insert((i, shard.device), shard.data.bytes().to_vec());
                assert!(twice.is_none());
            }
        }
    }
    Ok(shards)
}

/// Returns (the mesh of an array's sharding, the sharding). Panics if the sharding has no mesh.
fn bound(x: &MpmdArray) -> (Mesh, Sharding) {
    let sharding = x.sharding().expect("it is placed").clone();
    (sharding.mesh().expect("the generator sees to it").clone(), sharding)
}

/// Returns (number of processes, host of each process) for a seed's program: all on one host, in
/// pairs, or each on its own.
fn processes_of(seed: u64, devices: usize) -> (usize, Vec<usize>) {
    let counts: Vec<usize> = (2..=devices).filter(|n| devices.is_multiple_of(*n)).collect();
    let processes = counts[(seed / 3) as usize % counts.len()];
    let hosts = (0..processes).map(|i| [0, i / 2, i][(seed / 2) as usize % 3]).collect();
    (processes, hosts)
}

/// Returns the job of a seed's program: its processes, hosts, zero-copy transfers and limits.
fn job(seed: u64, devices: usize) -> (usize, Simulation) {
    let (processes, hosts) = processes_of(seed, devices);
    let mut simulation = simulation(processes, devices);
    if seed.is_multiple_of(4) {
        simulation = simulation.settings(|b| b.run_ahead(3, 1 << 10));
    }
    simulation = simulation.settings(|b| b.hosts(&hosts));
    if zero_copy() && seed % 4 > 1 {
        // Some pairs use no zero-copy transfers: those of different hosts, or others.
        let groups: Vec<usize> = hosts.iter().map(|host| (host * seed as usize) % 3).collect();
        simulation = simulation.zero_copy(&groups);
    }
    (processes, simulation)
}

/// Panics unless the processes hold the shards of the program on one process, each once.
fn assert_same(seed: u64, found: Vec<Shards>, alone: &Shards) {
    let (processes, mut together) = (found.len(), Shards::new());
    for (key, bytes) in found.into_iter().flatten() {
        assert!(together.insert(key, bytes).is_none(), "seed {seed}: {key:?} has two owners");
    }
    assert_eq!(together.len(), alone.len(), "seed {seed} on {processes} processes");
    for (key, bytes) in alone {
        assert!(
            together.get(key) == Some(bytes),
            "seed {seed} on {processes} processes: {key:?} differs"
        );
    }
}

fn run_seeds(seeds: std::ops::Range<u64>) {
    let _limit = watchdog(180);
    for seed in seeds {
        let devices = [4, 6, 8][seed as usize % 3];
        let steps = program(seed, devices);
        let alone = simulation(1, devices).run(|p| execute(p, &steps)).remove(0);
        let alone = alone.unwrap_or_else(|error| panic!("seed {seed} alone: {error}\n{steps:#?}"));
        let simulation = job(seed, devices).1.delays(seed, Duration::from_millis(1));
        let results = simulation.run(|p| execute(p, &steps)).into_iter().enumerate();
        let found = results.map(|(process, shards)| {
            shards.unwrap_or_else(|error| panic!("seed {seed}, process {process}: {error}"))
        });
        assert_same(seed, found.collect(), &alone);
    }
}

#[test]
fn seeds_0_to_49_give_the_same_bits() {
    run_seeds(0..50);
}

#[test]
fn seeds_50_to_99_give_the_same_bits() {
    run_seeds(50..100);
}

#[test]
fn seeds_100_to_149_give_the_same_bits() {
    run_seeds(100..150);
}

#[test]
fn seeds_150_to_199_give_the_same_bits() {
    run_seeds(150..200);
}

/// Waits up to 20 seconds until this process has sent the planned bytes to each process. Returns
/// the bytes sent so far, by receiver.
fn sent(p: &Program, planned: &[u64]) -> Vec<u64> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let sent = p.metrics().bytes_sent;
        if sent == planned || Instant::now() > deadline {
            return sent;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Checks for each transfer that only nodes of its receiver take it, and only after the sender's
/// node that makes it, if any.
fn assert_before(flow: &Flow, seed: u64) {
    for (number, transfer) in flow.transfers.iter().enumerate() {
        let process = |node: u32| flow.lanes[flow.nodes[node as usize].lane as usize];
        let made = (transfer.after != u32::MAX).then_some(transfer.after);
        assert!(made.is_none_or(|made| process(made) == transfer.from), "seed {seed}");
        for (taker, node) in (0..).zip(&flow.nodes) {
            let (start, len) = node.takes;
            if flow.takes[start as usize..(start + len) as usize].contains(&(number as u32)) {
                assert!(
                    process(taker) == transfer.to && made.is_none_or(|made| made < taker),
                    "seed {seed}"
                );
            }
        }
    }
}

#[test]
fn seeds_0_to_59_send_the_bytes_of_their_dry_run() {
    let _limit = watchdog(180);
    let mut crossed = 0;
    for seed in 0..60 {
        let devices = [4, 6, 8][seed as usize % 3];
        let steps = program(seed, devices);
        let (processes, hosts) = processes_of(seed, devices);
        let mut dry_run =
            Program::builder().devices(devices).hosts(&hosts).dry_run(processes).unwrap();
        assert!(execute(&mut dry_run, &steps).unwrap().is_empty(), "it owns nothing");
        let plan = dry_run.plan().unwrap();
        let operations = dry_run.operations();
        assert_eq!(plan.operations.len() as u64, operations);
        let mut planned = vec![vec![0; processes]; processes];
        for ((from, to), link) in plan.links(1..operations + 1) {
            planned[from as usize][to as usize] = link.bytes;
            crossed += link.messages;
        }
        let simulation = simulation(processes, devices).settings(|b| b.hosts(&hosts));
        let results = simulation.run(|p| {
            execute(p, &steps)?;
            Ok((p.operations(), sent(p, &planned[p.process().index()])))
        });
        for (process, result) in results.into_iter().enumerate() {
            let (issued, sent) = result.unwrap();
            assert_eq!(issued, operations, "seed {seed}");
            assert_eq!(
                sent, planned[process],
                "seed {seed}, process {process} of {processes}\n{steps:#?}"
            );
        }
        // The transfers of the flow have the same bytes between processes. Both sides post every
        // transfer.
        let flow = plan.flow().flow;
        let mut moved = vec![vec![0; processes]; processes];
        flow.transfers.iter().for_each(|t| moved[t.from as usize][t.to as usize] += t.bytes);
        assert_eq!(moved, planned);
        assert_eq!(flow.posts.iter().map(Vec::len).sum::<usize>(), 2 * flow.transfers.len());
        assert_before(&flow, seed);
        let again: Plan = serde_json::from_str(&serde_json::to_string(&plan).unwrap()).unwrap();
        assert_eq!(again, plan);
    }
    assert!(crossed > 1000, "only {crossed} messages");
}
