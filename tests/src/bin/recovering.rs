//! `recovering STEPS [shrink|leave|hold]`: a job that goes on after the loss of a process. With
//! `shrink` it goes on with fewer ones, and with `leave` its first process leaves it. With `hold`
//! its second process leaves it, and the first one is killed before it has left the epoch. Each
//! process prints the sum of the final values. Some steps after the start of an epoch it prints the
//! bytes of shared memory that it has mapped, its own and that of others.

use std::time::Duration;

use mpmd_core::OnLoss;
use mpmd_core::prelude::*;
use mpmd_core::topology::DeviceId;
use rustix::process::{Signal, getpid, kill_process};

/// Number of elements of each process: enough for messages that the receiver must grant.
const EACH: usize = 64 << 10;

/// Number of the step in an epoch after which mapped memory is counted.
const WARM: u64 = 20;

/// Sleep between two steps, so that kills hit all parts of a step.
const PAUSE: Duration = Duration::from_millis(2);

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let steps: u64 = std::env::args()
        .nth(1)
        .ok_or("the number of steps is missing")?
        .parse()?;
    let mode = std::env::args().nth(2).unwrap_or_default();
    let shrinks = !mode.is_empty();
    let leaver = match &*mode {
        "leave" => Some(0),
        "hold" => Some(1),
        _ => None,
    };
    let on_loss = if shrinks {
        OnLoss::Shrink
    } else {
        OnLoss::Wait
    };
    let builder = Program::builder().spares(1).on_loss(on_loss);
    let sum = builder.run(|p, commits| -> Result<Option<f64>> {
        println!(
            "process {} has pid {} in epoch {}",
            p.process(),
            std::process::id(),
            p.epoch()
        );
        let n = p.topology().devices().len() as u32;
        let mesh = p.mesh(&[("x", n as usize)])?;
        let here = mesh.sharding(spec!["x"]);
        let turned = (0..n)
            .map(|device| DeviceId((device + 1) % n))
            .collect::<Vec<_>>();
        let there = p
            .mesh_of(&[("x", n as usize)], &turned)?
            .sharding(spec!["x"]);
        let mut state =
            p.array_from_fn(f32s([n as usize * EACH]), &here, |region, mut values| {
                Ok(values.fill(region.range(0).start as f32)?)
            })?;
        let first = commits.restore(p, &mut state)?;
        let change = elementwise(|x: f32| x * 1.001 + 0.5);
        let change = p.jit(change).on(&mesh).outputs(here.clone()).build()?;
        for step in first..steps {
            state = change.call(p, state)?;
            let moved = p.device_put(&state, &there)?;
            state = p.device_put(&moved, &here)?;
            p.step_end()?;
            let is_leaver = leaver == Some(p.process().0);
            if is_leaver && (p.epoch(), step) == (1, 100) {
                commits.ask_to_leave();
            }
            let committed = p.commit(step + 1, &state);
            if mode == "hold" && (p.epoch(), p.process().0) == (1, 0) && committed.is_err() {
                std::thread::sleep(PAUSE * 50);
                let _ = kill_process(getpid(), Signal::KILL);
            }
            committed?;
            if step == first + WARM {
                println!("epoch {}: {} bytes are mapped", p.epoch(), mapped()?);
            }
            std::thread::sleep(PAUSE);
        }
        let all = p.device_put(&state, mesh.replicated())?.to_host()?;
        let sum = |values: HostArray| -> Result<f64> {
            Ok(values.to_vec::<f32>()?.into_iter().map(f64::from).sum())
        };
        all.map(sum).transpose()
    })?;
    match sum.flatten() {
        Some(sum) => println!("sum {sum:?}"),
        None => println!("it was not needed"),
    }
    Ok(())
}

/// Returns the bytes of shared memory that this process has mapped.
fn mapped() -> Result<u64> {
    let wrong = |error: std::io::Error| Error::Environment(error.to_string());
    let maps = std::fs::read_to_string("/proc/self/maps").map_err(wrong)?;
    let bytes = |line: &str| {
        let (from, to) = line.split(' ').next()?.split_once('-')?;
        let [from, to] = [from, to].map(|at| u64::from_str_radix(at, 16).ok());
        Some(to? - from?)
    };
    Ok(maps
        .lines()
        .filter(|line| line.contains("memfd:mpmd"))
        .filter_map(bytes)
        .sum())
}
