//! Small leaves of a tree share an operation and a message, and still end one by one.

use std::sync::Arc;

use super::sends::{Gate, on, sevens};
use crate::common::arrays::{check, values};
use crate::common::watchdog;
use mpmd_core::aval::DType;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{ProcessId, Simulation};

const LEAVES: usize = 64;

/// Runs a program on two processes with a device each, with copies and without.
fn on_two(program: impl Fn(&mut Program) -> Result<()> + Sync) {
    let _limit = watchdog(120);
    for zero_copy in [false, true] {
        let simulation = Simulation::new(2, 2);
        let simulation = if zero_copy {
            simulation.zero_copy(&[0, 0])
        } else {
            simulation
        };
        simulation
            .run(&program)
            .into_iter()
            .for_each(Result::unwrap);
    }
}

/// Returns leaves of 1 KiB on device 0.
fn small(p: &mut Program) -> Result<Vec<MpmdArray>> {
    (0..LEAVES).map(|_| sevens(p, 1024, &on(0))).collect()
}

fn all_end(x: &[MpmdArray]) -> Result<()> {
    x.iter().try_for_each(|x| x.block_until_ready().map(drop))
}

fn messages(p: &Program) -> u64 {
    p.metrics().messages_sent.iter().sum()
}

#[test]
fn small_leaves_share_an_operation_and_a_message() {
    on_two(|p| {
        let x = small(p)?;
        let before = (p.operations(), messages(p));
        let y = p.device_put(&x, on(1))?;
        assert_eq!(p.operations(), before.0 + 1);
        all_end(&y)?;
        let sent = u64::from(p.process() == ProcessId(0));
        assert_eq!(messages(p), before.1 + sent);
        for y in &y {
            let Some(y) = y.to_host()? else { continue };
            assert_eq!(y.to_vec::<u8>()?, [7; 1024]);
        }
        Ok(())
    });
}

#[test]
fn large_leaves_and_other_devices_have_operations_of_their_own() {
    on_two(|p| {
        let mut x = small(p)?;
        x[3] = sevens(p, 100_000, &on(0))?;
        x[5] = sevens(p, 1024, &on(1))?;
        let before = p.operations();
        let y = p.device_put(&x, on(1))?;
        assert_eq!(p.operations(), before + 3);
        for (x, y) in x.iter().zip(y) {
            assert_eq!(x.aval(), y.aval());
            let bytes = y.to_host()?.map(|y| y.to_vec::<u8>()).transpose()?;
            assert!(bytes.is_none_or(|bytes| bytes.iter().all(|byte| *byte == 7)));
        }
        Ok(())
    });
}

#[test]
fn failed_leaf_fails_alone() {
    let _limit = watchdog(60);
    let results = Simulation::new(2, 2).run(|p| {
        let mut x = small(p)?;
        x[9] = p.array_from_fn(u8s([1024]), on(0), |_, _| {
            Err(Error::kernel("no values today"))
        })?;
        let before = p.operations();
        let y = p.device_put(&x, on(1))?;
        assert_eq!(p.operations(), before + 1);
        for (leaf, y) in y.iter().enumerate() {
            let ended = y.block_until_ready();
            match leaf {
                9 => {
                    let error = ended.expect_err("its source has failed").to_string();
                    assert!(error.contains("no values today"), "{error}");
                }
                _ => drop(ended?),
            }
        }
        Ok(())
    });
    // The end of a program reports the failure.
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("no values today"), "{error}");
    }
}

#[test]
fn leaf_that_is_late_holds_back_no_other() {
    let gate = Arc::new(Gate::default());
    let _limit = watchdog(60);
    let results = Simulation::new(2, 2).run(|p| {
        let mut x = small(p)?;
        let late = gate.clone();
        x[9] = p.array_from_fn(u8s([1024]), on(0), move |_, mut view| {
            late.pass();
            Ok(view.fill(1u8)?)
        })?;
        let y = p.device_put(&x, on(1))?;
        for (leaf, y) in y.iter().enumerate() {
            match leaf {
                9 => assert!(p.process() == ProcessId(0) || !y.is_complete(), "{y:?}"),
                _ => drop(y.block_until_ready()?),
            }
        }
        if p.process() == ProcessId(1) {
            gate.open();
        }
        let late = y[9].to_host()?.map(|y| y.to_vec::<u8>()).transpose()?;
        assert!(late.is_none_or(|late| late == [1; 1024]));
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn donated_leaves_are_released_and_refused_one_by_one() {
    on_two(|p| {
        let x = small(p)?;
        let given: Vec<MpmdArray> = x[..32].to_vec();
        let before = p.operations();
        let y = p.device_put_with(&given, on(1), MoveOptions::default().donate(true))?;
        assert_eq!(p.operations(), before + 1);
        all_end(&y)?;
        for (leaf, x) in x.iter().enumerate() {
            let again = p.device_put(x, on(1));
            match leaf < 32 {
                true => assert!(again.unwrap_err().to_string().contains("donated")),
                false => drop(again?.block_until_ready()?),
            }
        }
        Ok(())
    });
}

/// Shapes whose leaves have from 0 bytes to more than one operation is shared for.
fn shapes() -> Vec<Vec<usize>> {
    let sizes = [0, 1, 3, 64, 129, 1024, 5000, 20_000];
    (0..250)
        .map(|i| vec![sizes[i * 7 % sizes.len()] + i % 5, 1 + i % 3])
        .collect()
}

/// Moves a tree of mixed leaves between all of these shardings.
fn tour(p: &mut Program, placed: &[Sharding]) -> Result<()> {
    let hosts: Vec<_> = shapes()
        .iter()
        .map(|shape| values(shape, DType::F32))
        .collect();
    let mut x: Vec<MpmdArray> = hosts.iter().cloned().map(MpmdArray::from_host).collect();
    for to in placed {
        x = p.device_put(&x, to)?;
        for (x, host) in x.iter().zip(&hosts) {
            check(p, x, host)?;
        }
    }
    Ok(())
}

#[test]
fn mixed_leaves_move_between_shardings() {
    let _limit = watchdog(180);
    for processes in [1, 2, 4] {
        let results = Simulation::new(processes, 4).run(|p| {
            let ids = |devices: &[u32]| devices.iter().copied().map(DeviceId).collect();
            let chunk = |devices: &[u32]| Sharding::chunk(0, ids(devices)).unwrap();
            let grid = p.mesh(&[("x", 2), ("y", 2)])?;
            let placed = [
                chunk(&[0, 1]),
                chunk(&[3, 2]),
                grid.replicated(),
                chunk(&[1, 3, 0, 2]),
                on(2),
            ];
            tour(p, &placed)
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn shared_operation_is_replayed() {
    on_two(|p| {
        let to_and_fro = |p: &mut Program, x: Vec<MpmdArray>| {
            let y = p.device_put(&x, on(1))?;
            p.device_put(&y, on(0))
        };
        let mut x = small(p)?;
        x[1] = sevens(p, 100_000, &on(0))?;
        let (mut x, step) = p.capture(x, to_and_fro)?;
        let before = p.operations();
        for _ in 0..3 {
            x = step.replay(p, x)?;
            p.step_end()?;
        }
        assert_eq!(p.operations(), before + 3 * 4);
        for x in &x {
            let bytes = x.to_host()?.map(|x| x.to_vec::<u8>()).transpose()?;
            assert!(bytes.is_none_or(|bytes| bytes.iter().all(|byte| *byte == 7)));
        }
        Ok(())
    });
}

#[test]
fn dry_run_has_the_leaves_of_a_shared_operation() {
    let mut p = Program::builder().devices(2).dry_run(2).unwrap();
    let x = small(&mut p).unwrap();
    let y = p.device_put(&x, on(1)).unwrap();
    p.device_put(&y[60..].to_vec(), on(0)).unwrap();
    let dry_run = p.dry_run().unwrap();
    p.finish().unwrap();
    let puts: Vec<_> = (1..=dry_run.operations.len() as u64)
        .filter_map(|operation| dry_run.descriptor_of(operation))
        .filter(|descriptor| !descriptor.messages.is_empty())
        .collect();
    assert_eq!(puts.len(), 2);
    assert!(
        puts[0].what.starts_with("device_put of 64 leaves"),
        "{}",
        puts[0].what
    );
    let leaves: Vec<u32> = puts[0]
        .messages
        .iter()
        .map(|message| message.leaf)
        .collect();
    assert_eq!(leaves, (0..LEAVES as u32).collect::<Vec<_>>());
    assert_eq!((puts[0].results.len(), puts[1].results.len()), (LEAVES, 4));
    let flow = dry_run.flow();
    // Leaves that different operations made leave by themselves; those of one move leave together.
    let transfers: Vec<u32> = flow
        .transfers
        .iter()
        .map(|transfer| transfer.messages)
        .collect();
    assert_eq!(transfers.iter().sum::<u32>(), LEAVES as u32 + 4);
    let memory = dry_run.memory(&flow);
    assert!(memory.devices[1].in_time.bytes >= 64 * 1024);
}
