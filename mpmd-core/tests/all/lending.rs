//! Arrays lent by zero-copy transfer: their memory's owner, write access, and its return.

use std::time::{Duration, Instant};

use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::aval::DType;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{Builder, FailureKind, ProcessId, Simulation};

const MIB: u64 = 1 << 20;

fn on(device: u32) -> Sharding {
    Sharding::single_device(DeviceId(device))
}

/// Returns a simulation of processes that share memory on one host, with one device each.
fn sharing(processes: usize) -> Simulation {
    Simulation::new(processes, processes).zero_copy(&vec![0; processes])
}

/// Creates an array of 1 MiB of `f32` on a device; each element is its index.
fn numbered(p: &mut Program, device: u32) -> Result<MpmdArray> {
    p.array_from_fn(f32s([MIB as usize / 4]), on(device), |_, mut view| {
        let values = view.as_mut_slice::<f32>()?.iter_mut().enumerate();
        values.for_each(|(i, value)| *value = i as f32);
        Ok(())
    })
}

/// Returns true if the values count up by one from `first`. On a process without the values,
/// returns true at once.
fn counts_from(array: &MpmdArray, first: f32) -> Result<bool> {
    let Some(values) = array.to_host()? else {
        return Ok(true);
    };
    Ok(values
        .as_slice::<f32>()?
        .iter()
        .enumerate()
        .all(|(i, value)| *value == i as f32 + first))
}

fn is_lent(array: &MpmdArray) -> Result<bool> {
    Ok(array
        .addressable_shards()?
        .iter()
        .all(|shard| shard.data.bytes().is_lent()))
}

/// Blocks until all processes have called it.
fn meet(p: &mut Program) -> Result<()> {
    (0..p.processes() as u32).try_for_each(|process| {
        p.broadcast_value(ProcessId(process), 0u8, || Ok(0))
            .map(drop)
    })
}

fn becomes(kind: &str, found: impl Fn() -> u64, expected: u64) {
    let until = Instant::now() + Duration::from_secs(20);
    while found() != expected {
        assert!(
            Instant::now() < until,
            "{kind}: {} bytes, not {expected}",
            found()
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Donates `x` and returns an array with one added to each value, in the memory of `x` if possible.
fn add_one(p: &mut Program, x: MpmdArray) -> Result<MpmdArray> {
    let sharding = x.sharding().expect("it is placed").clone();
    let mesh = p.mesh_of(&[("x", 1)], sharding.devices())?;
    let y = p.device_put_with(&x, mesh.replicated(), MoveOptions::default().donate(true))?;
    drop(x);
    let alias = |x: &[ShapedArray]| Ok(like_first(x)?.alias("0", "0"));
    let add = fun("add one", alias, |_, _, mut y| {
        y[0].as_mut_slice::<f32>()?
            .iter_mut()
            .for_each(|y| *y += 1.0);
        Ok(())
    });
    let add = p
        .jit(add)
        .on(&mesh)
        .outputs(mesh.replicated())
        .donate("0")
        .build()?;
    Ok(add.call(p, vec![y])?.remove(0))
}

#[test]
fn lent_array_uses_lender_memory_until_last_drop() {
    let _limit = watchdog(60);
    // The order in which processes drop their arrays. Process 0 made it and lent it to 1, which
    // lent it on to 2.
    for order in [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ] {
        let results = sharing(3).run(|p| {
            let x = numbered(p, 0)?;
            let y = p.device_put(&x, on(1))?;
            let z = p.device_put(&y, on(2))?;
            let mut arrays = [Some(x), Some(y), Some(z)];
            let me = p.process();
            let mine = arrays[me.index()].clone().expect("nothing is dropped yet");
            assert!(counts_from(&mine, 0.0)?);
            assert_eq!(is_lent(&mine)?, me != ProcessId(0));
            assert_eq!(p.memory().live, if me == ProcessId(0) { MIB } else { 0 });
            drop(mine);
            meet(p)?;
            for (step, dropped) in order.into_iter().enumerate() {
                arrays[dropped] = None;
                let left: Vec<usize> = (0..3).filter(|who| arrays[*who].is_some()).collect();
                // The memory stays in use while any process holds the array, or re-lent it to one
                // that does.
                let borrowed = left.iter().any(|who| *who > 0);
                let live = if left.is_empty() { 0 } else { MIB };
                let (memory, kind) = (p.memory(), format!("{order:?}, step {step}"));
                assert!(memory.peak <= MIB, "{kind}");
                match me.0 {
                    0 => {
                        becomes(&kind, || p.memory().live, live);
                        becomes(&kind, || p.memory().lent, if borrowed { MIB } else { 0 });
                    }
                    1 => becomes(
                        &kind,
                        || p.memory().lent,
                        if left.contains(&2) { MIB } else { 0 },
                    ),
                    _ => becomes(&kind, || p.memory().lent, 0),
                }
                if let Some(array) = &arrays[me.index()] {
                    assert!(counts_from(array, 0.0)?, "{kind}");
                }
                meet(p)?;
            }
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn bools_of_a_peer_are_copied_and_other_values_are_lent() {
    let _limit = watchdog(60);
    let results = sharing(2).run(|p| {
        let bools = ShapedArray::new(&[1 << 20], DType::Bool);
        let x = p.array_from_fn(bools, on(0), |_, mut view| {
            view.as_mut_slice::<bool>()?.fill(true);
            Ok(())
        })?;
        let y = p.device_put(&x, on(1))?;
        let numbers = numbered(p, 0)?;
        let z = p.device_put(&numbers, on(1))?;
        if p.process() == ProcessId(1) {
            assert!(
                y.to_host()?
                    .expect("it is here")
                    .as_slice::<bool>()?
                    .iter()
                    .all(|value| *value)
            );
            // The owner could change a lent value to an invalid `bool` after the check.
            assert!(!is_lent(&y)? && is_lent(&z)?);
        }
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn processes_track_lent_and_borrowed_memory() {
    let _limit = watchdog(60);
    let results = sharing(3).run(|p| {
        let me = p.process().index();
        // From 0 to both others, and from 1 to 2.
        let (x, y) = (numbered(p, 0)?, numbered(p, 1)?);
        let mut there = vec![
            p.device_put(&x, on(1))?,
            p.device_put(&x, on(2))?,
            p.device_put(&y, on(2))?,
        ];
        drop((x, y));
        there
            .iter()
            .try_for_each(|array| array.block_until_ready().map(drop))?;
        meet(p)?;
        let lent = [vec![0, MIB, MIB], vec![0, 0, MIB], vec![0; 3]];
        let borrowed = [vec![0; 3], vec![MIB, 0, 0], vec![MIB, MIB, 0]];
        // Values of `meet` that are not taken yet are also lent: a few bytes.
        let whole = |bytes: &[u64]| {
            bytes
                .iter()
                .map(|bytes| bytes / MIB * MIB)
                .collect::<Vec<u64>>()
        };
        let until = Instant::now() + Duration::from_secs(20);
        loop {
            let found = p.metrics();
            if (&whole(&found.lent_to), &whole(&found.borrowed_from)) == (&lent[me], &borrowed[me])
            {
                break;
            }
            assert!(Instant::now() < until, "{found:?}");
        }
        meet(p)?;
        there.clear();
        for of in [
            |p: &Program| p.metrics().lent_to,
            |p: &Program| p.metrics().borrowed_from,
        ] {
            becomes("all is back", || whole(&of(p)).iter().sum(), 0);
        }
        meet(p)?;
        becomes("live", || p.memory().live, 0);
        assert_eq!(
            (p.memory().peak_live, p.memory().cached),
            if me < 2 { (MIB, MIB) } else { (0, 0) }
        );
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn kernel_that_updates_an_input_copies_lent_memory() {
    let _limit = watchdog(60);
    let results = sharing(3).run(|p| {
        let x = numbered(p, 0)?;
        let y = p.device_put(&x, on(1))?;
        let z = p.device_put(&y, on(2))?;
        // The borrower updates it in place, and then the lender, while the third process still
        // reads it.
        let more = add_one(p, y)?;
        assert!(counts_from(&more, 1.0)? && counts_from(&x, 0.0)? && counts_from(&z, 0.0)?);
        let own = add_one(p, x)?;
        assert!(counts_from(&own, 1.0)? && counts_from(&z, 0.0)?);
        if p.process() == ProcessId(1) {
            assert!(!is_lent(&more)?);
            assert_eq!(p.memory().live, MIB, "its own copy");
        }
        meet(p)?;
        drop(z);
        // Only the copies are left.
        becomes(
            "live",
            || p.memory().live,
            if p.process() == ProcessId(2) { 0 } else { MIB },
        );
        // An array that no other process has is updated in place.
        let again = add_one(p, own)?;
        assert!(counts_from(&again, 2.0)?);
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn aligned_reads_use_lent_memory_and_others_copy() {
    let _limit = watchdog(60);
    let results = sharing(2).run(|p| {
        // Rows of 20 bytes: only the first and every sixteenth row start at an aligned address.
        let x = p.array_from_fn(f32s([32, 5]), on(0), |_, mut view| {
            let values = view.as_mut_slice::<f32>()?.iter_mut().enumerate();
            values.for_each(|(i, value)| *value = i as f32);
            Ok(())
        })?;
        for (first, lent) in [(0, true), (1, false), (16, true), (17, false)] {
            let rows = |from: usize, to: usize| Region::new(vec![from..to, 0..5]);
            let mut parts = vec![(DeviceId(1), rows(first, 32))];
            if first > 0 {
                parts.push((DeviceId(0), rows(0, first)));
            }
            let y = p.device_put(&x, Sharding::enumerated(parts)?)?;
            if p.process() == ProcessId(1) {
                let shard = y.addressable_shards()?.remove(0);
                assert_eq!(shard.data.bytes().is_lent(), lent, "from row {first}");
                assert!(shard.data.bytes().as_ptr().addr().is_multiple_of(64));
                let values: Vec<f32> = (first * 5..160).map(|i| i as f32).collect();
                assert_eq!(shard.data.to_vec::<f32>()?, values);
                if first == 0 {
                    let host = y.to_host()?.expect("it is here");
                    assert!(host.bytes().is_lent() && host.bytes().same_place(shard.data.bytes()));
                }
            }
        }
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn kept_arrays_block_neither_lender_nor_finish() {
    let _limit = watchdog(60);
    let simulation = sharing(2).settings(|b| b.run_ahead(8, 1 << 30));
    let results = simulation.run(|p| {
        let kept: Vec<MpmdArray> = (0..100)
            .map(|i| {
                let x = p.array_from_fn(f32s([64]), on(0), move |_, mut view| {
                    Ok(view.fill(i as f32)?)
                })?;
                p.device_put(&x, on(1))
            })
            .collect::<Result<_>>()?;
        // Many more than may be in flight at a time. They outlive the program.
        Ok(kept)
    });
    let kept = results
        .into_iter()
        .map(Result::unwrap)
        .next_back()
        .expect("process 1");
    for (i, array) in kept.iter().enumerate() {
        assert!(is_lent(array).unwrap());
        assert_eq!(
            array.to_host().unwrap().unwrap().to_vec::<f32>().unwrap(),
            [i as f32; 64]
        );
    }
}

#[test]
fn kept_lent_memory_is_awaited_up_to_the_peer_timeout() {
    let _limit = watchdog(60);
    let settings = |b: Builder| {
        b.device_memory(MIB + MIB / 2)
            .peer_timeout(Duration::from_secs(2))
    };
    let results = sharing(2).settings(settings).run(|p| {
        let x = numbered(p, 0)?;
        let y = p.device_put(&x, on(1))?;
        drop(x);
        assert!(counts_from(&y, 0.0)?);
        if p.process() == ProcessId(1) {
            std::thread::sleep(Duration::from_millis(300));
        }
        drop(y);
        // There is room once the memory has come back.
        let again = numbered(p, 0)?;
        let kept = p.device_put(&again, on(1))?;
        drop(again);
        assert!(counts_from(&kept, 0.0)?);
        meet(p)?;
        let refused = numbered(p, 0)?;
        if p.process() == ProcessId(0) {
            let error = refused.block_until_ready().unwrap_err();
            assert_eq!(
                error.failure().map(|failure| failure.kind),
                Some(FailureKind::Memory)
            );
            let text = error.to_string();
            let expected = "1.0 MiB are lent to other processes (1.0 MiB to 1)";
            assert!(text.contains(expected), "{text}");
        } else {
            assert!(counts_from(&kept, 0.0)?);
        }
        // No process leaves before the other has checked.
        p.broadcast_value(ProcessId(0), 0u8, || Ok(0)).map(drop)
    });
    for result in results {
        assert!(result.unwrap_err().to_string().contains("out of memory"));
    }
}
