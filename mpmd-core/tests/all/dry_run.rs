//! A dry run matches the job: its steps, its memory, and its end.

use std::time::{Duration, Instant};

use crate::common::kernels::{add_one, fun, like_first};
use crate::common::watchdog;
use mpmd_core::Simulation;
use mpmd_core::dry_run::{DryRun, DryRunEnd, OpKind};
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_memory::Pool;

const WIDTH: usize = 1 << 10;

fn on(device: u32) -> Sharding {
    Sharding::single_device(DeviceId(device))
}

/// Waits up to 20 seconds until this process has sent the expected bytes to each process. Returns
/// the bytes sent so far, by receiver.
fn sent(p: &Program, expected: &[u64]) -> Vec<u64> {
    let deadline = Instant::now() + Duration::from_secs(20);
    loop {
        let sent = p.metrics().bytes_sent;
        if sent == expected || Instant::now() > deadline {
            return sent;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Returns the bytes that each process sends to each other in all operations of a dry run, as
/// `[sender][receiver]`.
fn bytes_between(dry_run: &DryRun) -> Vec<Vec<u64>> {
    let count = dry_run.processes as usize;
    let mut bytes = vec![vec![0; count]; count];
    for ((from, to), link) in dry_run.links(1..dry_run.operations.len() as u64 + 1) {
        bytes[from as usize][to as usize] = link.bytes;
    }
    bytes
}

/// Runs `steps` steps. Each moves an array around all devices, adds one on each, and checks the
/// value. With `replays`, captures the third step and replays the later ones.
fn rounds(p: &mut Program, steps: usize, replays: bool) -> Result<()> {
    let devices = p.topology().devices().len() as u32;
    let kernels = (0..devices)
        .map(|device| add_one(p, device))
        .collect::<Result<Vec<_>>>()?;
    let scale = MpmdArray::scalar(2.0f32);
    let scale = p.device_put(&scale, on(0))?;
    let mut state = p.array_from_fn(f32s([WIDTH]), on(0), |_, mut view| Ok(view.fill(0.0f32)?))?;
    let around = |p: &mut Program, mut state: MpmdArray| -> Result<MpmdArray> {
        let _also = p.device_put(&scale, on(devices - 1))?;
        for device in (1..devices).chain([0]) {
            let moved = p.device_put(&state, on(device))?;
            let mut y = kernels[device as usize].call(p, vec![moved])?;
            state = y.remove(0);
        }
        Ok(state)
    };
    let mut captured = None;
    for step in 0..steps {
        state = match (&captured, replays && step > 1) {
            (Some(step), true) => {
                mpmd_core::Captured::<MpmdArray, MpmdArray>::replay(step, p, state)?
            }
            (None, true) => {
                let (y, step) = p.capture(state, around)?;
                captured = Some(step);
                y
            }
            _ => around(p, state)?,
        };
        let value = state.to_host()?;
        assert!(value.is_none_or(
            |value| value.to_vec::<f32>().unwrap()[0] == ((step + 1) * devices as usize) as f32
        ));
        p.step_end()?;
    }
    Ok(())
}

#[test]
fn replayed_steps_are_in_dry_runs_like_issued_ones() {
    let _limit = watchdog(120);
    let dry_run_with = |replays| {
        let mut p = Program::builder().devices(4).dry_run(4).unwrap();
        rounds(&mut p, 6, replays).unwrap();
        let dry_run = p.dry_run().unwrap();
        p.finish().unwrap();
        dry_run
    };
    let (by_hand, replayed) = (dry_run_with(false), dry_run_with(true));
    assert_eq!(by_hand.end, DryRunEnd::Open);
    assert_eq!(by_hand.operations, replayed.operations);
    assert_eq!(by_hand.descriptors, replayed.descriptors);
    for step in 0..6 {
        assert_eq!(by_hand.step(step), replayed.step(step));
    }
    // A replay releases its inputs when all of it is issued; in time this is immediate.
    let in_time = |dry_run: &DryRun| -> Vec<u64> {
        dry_run
            .memory(&dry_run.flow())
            .devices
            .iter()
            .map(|device| device.in_time.bytes)
            .collect()
    };
    assert_eq!(in_time(&by_hand), in_time(&replayed));
    let bytes = bytes_between(&replayed);
    assert_eq!(bytes[0][1], 6 * 4 * WIDTH as u64);
    let results = Simulation::new(4, 4).run(|p| {
        rounds(p, 6, true)?;
        Ok(sent(p, &bytes[p.process().index()]))
    });
    for (process, result) in results.into_iter().enumerate() {
        assert_eq!(result.unwrap(), bytes[process]);
    }
    let reads: Vec<_> = replayed
        .reads
        .iter()
        .map(|read| (read.after, read.values))
        .collect();
    let ends: Vec<_> = replayed
        .steps
        .iter()
        .map(|step| (step.operation, true))
        .collect();
    assert_eq!(reads, ends, "values are read at the end of each step");
}

#[test]
fn dry_run_memory_equals_use_of_a_fully_waiting_program() {
    let _limit = watchdog(120);
    let program = |p: &mut Program| -> Result<()> {
        let mesh = p.mesh(&[("x", 2)])?;
        let half = mesh.sharding(spec!["x"]);
        let double = fun("double", like_first, |_, x, mut y| {
            let x = x[0].as_slice::<f32>()?;
            y[0].as_mut_slice::<f32>()?
                .iter_mut()
                .zip(x)
                .for_each(|(y, x)| *y = x * 2.0);
            Ok(())
        });
        let double = p.jit(double).on(&mesh).outputs(&half).build()?;
        let values = MpmdArray::from_slice(&[16 * WIDTH], &vec![0.0f32; 16 * WIDTH])?;
        // Shares the memory of the values, and counts on each device.
        let _from_host = p.device_put(&values, mesh.replicated())?;
        let mut kept = Vec::new();
        let mut x = p.array_from_fn(f32s([16 * WIDTH]), &half, |_, mut view| {
            Ok(view.fill(1.0f32)?)
        })?;
        x.block_until_ready()?;
        for round in 0..4 {
            let y = double.call(p, vec![x])?.remove(0);
            y.block_until_ready()?;
            if round < 2 {
                kept.push(y.clone());
            }
            x = y;
        }
        // As a whole array, from which the kept halves are restored.
        let whole = p.device_put(&x, mesh.replicated())?;
        whole.block_until_ready()?;
        drop(kept);
        let back = p.device_put(&whole, &half)?;
        back.block_until_ready()?;
        Ok(())
    };
    for processes in [1, 2] {
        let mut dry_run = Program::builder().devices(2).dry_run(processes).unwrap();
        program(&mut dry_run).unwrap();
        let dry_run = dry_run.dry_run().unwrap();
        let memory = dry_run.memory(&dry_run.flow());
        let half = Pool::rounded(8 * WIDTH * 4);
        assert!(
            memory
                .devices
                .iter()
                .all(|device| device.in_order.bytes == memory.devices[0].in_order.bytes)
        );
        assert_eq!(
            memory.devices[0].in_order.bytes,
            3 * half + 2 * half + 2 * half,
            "two kept, the last, the whole, and the host values"
        );
        let results = Simulation::new(processes, 2).run(|p| {
            program(p)?;
            Ok(p.memory().peak_live)
        });
        let expected = (2 / processes) as u64 * memory.devices[0].in_order.bytes;
        for result in results {
            assert_eq!(result.unwrap(), expected);
        }
    }
}

/// The ways by which [`steps_that_wait`] ends a step.
#[derive(Clone, Copy, Debug)]
enum Waits {
    Reads,
    Syncs,
    /// The process of the other device reads, and tells this one.
    Hears,
    /// The batch comes from the other process, which does not wait.
    ReadsMoved,
}

/// Runs five steps. Each puts a batch of 256 KiB on device 0, reduces it to 4 bytes and waits.
fn steps_that_wait(p: &mut Program, waits: Waits) -> Result<()> {
    let first = fun(
        "first",
        |_| Ok(Signature::new(vec![f32s([1])])),
        |_, x, mut y| Ok(y[0].fill(x[0].as_slice::<f32>()?[0])?),
    );
    let mesh = p.mesh_of(&[("x", 1)], &[DeviceId(0)])?;
    let first = p.jit(first).on(&mesh).outputs(mesh.replicated()).build()?;
    let values = MpmdArray::from_slice(&[64 * WIDTH], &vec![1.0f32; 64 * WIDTH])?;
    let source = match waits {
        Waits::ReadsMoved => p.device_put(&values, on(1))?,
        _ => values,
    };
    for _ in 0..5 {
        let batch = p.device_put(&source, on(0))?;
        let loss = first.call(p, vec![batch])?.remove(0);
        match waits {
            Waits::Reads | Waits::ReadsMoved => drop(loss.to_host()?),
            Waits::Syncs => p.sync()?,
            Waits::Hears => {
                let there = p.device_put(&loss, on(1))?;
                there.block_until_ready()?;
                p.broadcast_value(mpmd_core::ProcessId(1), 0u8, || Ok(0))?;
            }
        }
        p.step_end()?;
    }
    Ok(())
}

#[test]
fn batches_put_after_waits_count_one_at_a_time() {
    let _limit = watchdog(120);
    let budget = Pool::rounded(256 * WIDTH) + Pool::rounded(4);
    for waits in [Waits::Reads, Waits::Syncs, Waits::Hears, Waits::ReadsMoved] {
        let mut p = Program::builder().devices(2).dry_run(2).unwrap();
        steps_that_wait(&mut p, waits).unwrap();
        let dry_run = p.dry_run().unwrap();
        assert!(dry_run.is_steady(), "{waits:?}");
        let memory = dry_run.memory(&dry_run.flow()).devices[0];
        assert_eq!(
            (memory.in_order.bytes, memory.in_time.bytes),
            (budget, budget),
            "{waits:?}"
        );
        p.finish().unwrap();
        // A little more: what a message is sent from may be freed only after the next call.
        let simulation = Simulation::new(2, 2).settings(|b| b.device_memory(budget + 4096));
        for result in simulation.run(|p| steps_that_wait(p, waits)) {
            assert!(result.is_ok(), "{waits:?}: {result:?}");
        }
    }
}

#[test]
fn only_dry_runs_list_operations() {
    let _limit = watchdog(60);
    let alone = Program::builder().alone().unwrap();
    assert_eq!(alone.dry_run(), None);
    alone.finish().unwrap();
    let mut p = Program::builder().devices(2).dry_run(2).unwrap();
    assert!(p.dry_run().unwrap().operations.is_empty());
    let agreed = p
        .broadcast_value(mpmd_core::ProcessId(1), 7u8, || Ok(8))
        .unwrap();
    assert_eq!(agreed, 7);
    let dry_run = p.dry_run().unwrap();
    assert_eq!(
        dry_run.descriptor_of(1).unwrap().kind,
        OpKind::BroadcastValue { from: 1, bytes: 1 }
    );
    assert!(
        dry_run.describe(1).contains("dry_run.rs:"),
        "{}",
        dry_run.describe(1)
    );
    p.finish().unwrap();
}
