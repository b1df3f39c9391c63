//! Memory limits and the order of transfers: programs that would work with unlimited buffers must
//! work with limited memory too.

use std::time::{Duration, Instant};

use super::simulations::{simulation, zero_copy};
use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::{MemoryKind, Sharding};
use mpmd_core::topology::DeviceId;
use mpmd_core::{Builder, FailureKind, ProcessId};

pub(super) const MIB: usize = 1 << 20;

pub(super) fn on(device: u32) -> Sharding {
    Sharding::single_device(DeviceId(device))
}

/// Creates an array of 8 MiB filled with `value` on one device, which is ready after `delay`. Does
/// not wait for it.
#[track_caller]
pub(super) fn large(
    p: &mut Program,
    device: u32,
    value: f32,
    delay: Duration,
) -> Result<MpmdArray> {
    p.array_from_fn(f32s([2 * MIB]), on(device), move |_, mut view| {
        std::thread::sleep(delay);
        Ok(view.fill(value)?)
    })
}

pub(super) fn is_all(array: &MpmdArray, value: f32) -> Result<bool> {
    let values = array.to_host()?;
    Ok(values.is_none_or(|values| {
        values
            .as_slice::<f32>()
            .is_ok_and(|v| v.iter().all(|v| *v == value))
    }))
}

pub(super) fn memory_falls_to(p: &Program, bytes: u64) {
    let until = Instant::now() + Duration::from_secs(20);
    while p.memory().live > bytes {
        assert!(
            Instant::now() < until,
            "{} bytes are still in use, expected {bytes}",
            p.memory().live
        );
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn later_transfer_that_is_ready_first_blocks_nothing() {
    let _limit = watchdog(60);
    for seed in 0..3 {
        let simulation = simulation(2, 4).delays(seed, Duration::from_millis(3));
        let results = simulation.run(|p| {
            let slow = Duration::from_millis(200);
            // One device is slow, its neighbour is not; in both directions at once.
            let sources = [
                large(p, 0, 1.0, slow)?,
                large(p, 2, 2.0, slow)?,
                large(p, 1, 3.0, Duration::ZERO)?,
                large(p, 3, 4.0, Duration::ZERO)?,
            ];
            let targets = [2, 0, 3, 1];
            let moved: Vec<MpmdArray> = sources
                .iter()
                .zip(targets)
                .map(|(array, device)| p.device_put(array, on(device)))
                .collect::<Result<_>>()?;
            // Then on to a device that waits for the first transfer.
            let again = p.device_put(&moved[2], on(0))?;
            for (i, array) in moved.iter().enumerate() {
                assert!(is_all(array, i as f32 + 1.0)?);
            }
            assert!(is_all(&again, 3.0)?);
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn two_receives_with_room_for_one_both_finish() {
    let _limit = watchdog(60);
    for seed in 0..3 {
        let simulation = simulation(3, 3)
            .delays(seed, Duration::from_millis(3))
            .settings(|b| b.device_memory(12 * MIB as u64));
        let results = simulation.run(|p| {
            let sum = fun(
                "sum",
                |_| Ok(Signature::new(vec![f32s([1])])),
                |_, x, mut y| Ok(y[0].fill(x[0].as_slice::<f32>()?.iter().sum::<f32>())?),
            );
            let mesh = p.mesh_of(&[("x", 1)], &[DeviceId(1)])?;
            let sum = p.jit(sum).on(&mesh).outputs(mesh.replicated()).build()?;
            // Issued first, ready last.
            let late = large(p, 0, 0.25, Duration::from_millis(200))?;
            let early = large(p, 2, 0.5, Duration::ZERO)?;
            let mut sums = Vec::new();
            for source in [&late, &early, &late, &early] {
                let here = p.device_put(source, mesh.replicated())?;
                sums.extend(sum.call(p, vec![here])?);
            }
            for (sum, each) in sums.iter().zip([0.25, 0.5, 0.25, 0.5]) {
                assert!(is_all(sum, each * 2.0 * MIB as f32)?);
            }
            assert!(p.memory().peak <= 12 * MIB as u64);
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn full_memory_is_an_error_that_names_its_holders() {
    let _limit = watchdog(60);
    let simulation = simulation(3, 3).settings(|b| b.device_memory(12 * MIB as u64));
    let results = simulation.run(|p| {
        let holder_line = line!() + 1;
        let holder = large(p, 1, 1.0, Duration::ZERO)?;
        holder.block_until_ready()?;
        let source = large(p, 0, 2.0, Duration::ZERO)?;
        let put_line = line!() + 1;
        let refused = p.device_put(&source, on(1))?;
        let onward = p.device_put(&refused, on(2))?;
        drop(source);
        if p.process() == ProcessId(0) {
            // The sender releases it, although no receiver has room for it.
            memory_falls_to(p, 0);
        } else {
            let mine = if p.process() == ProcessId(1) {
                &refused
            } else {
                &onward
            };
            let error = mine.block_until_ready().unwrap_err();
            let failure = error.failure().expect("a failure");
            assert_eq!(
                (failure.kind, failure.op, failure.process),
                (FailureKind::Memory, 3, ProcessId(1))
            );
            let text = error.to_string();
            assert!(
                text.contains("out of memory") && text.contains("operation 3"),
                "{text}"
            );
            assert!(
                text.contains(
                    "8.0 MiB asked for, 8.0 MiB in use and 0 B reserved of a limit of 12.0"
                ),
                "{text}"
            );
            assert!(
                text.contains("; 8.0 MiB in f32[2097152] of operation 1"),
                "{text}"
            );
            for line in [holder_line, put_line] {
                assert!(text.contains(&format!("resources.rs:{line}:")), "{text}");
            }
        }
        drop(holder);
        Ok(())
    });
    for (process, result) in results.into_iter().enumerate() {
        let error = result.expect_err("everybody hears of it").to_string();
        assert!(
            error.contains("out of memory"),
            "process {process}: {error}"
        );
    }
}

#[test]
fn host_memory_is_counted_separately_and_never_shared() {
    let _limit = watchdog(60);
    let simulation = simulation(2, 2).settings(|b| b.device_memory(12 * MIB as u64));
    let results = simulation.run(|p| {
        let eight = 8 * MIB as u64;
        let there = Sharding::single_device(DeviceId(0)).with_memory_kind(MemoryKind::Host);
        let other = Sharding::single_device(DeviceId(1)).with_memory_kind(MemoryKind::Host);
        let first = p.process() == ProcessId(0);
        let x = large(p, 0, 1.0, Duration::ZERO)?;
        // More than the device has room for; each a copy.
        let kept: Vec<MpmdArray> = (0..3)
            .map(|_| p.device_put(&x, &there))
            .collect::<Result<_>>()?;
        let made = p.array_from_fn(
            f32s([2 * MIB]),
            &there,
            |_, mut view| Ok(view.fill(2.0f32)?),
        )?;
        for array in &kept {
            assert!(is_all(array, 1.0)?);
        }
        assert!(is_all(&made, 2.0)?);
        if first {
            assert_eq!((p.memory().live, p.memory().host_live), (eight, 4 * eight));
        }
        drop(x);
        // Back, now that there is room again, and to another process's host.
        let back = p.device_put(&made, on(0))?;
        let across = p.device_put(&kept[0], &other)?;
        // A put to the same place in the same memory may share it.
        let same = p.device_put(&kept[1], &there)?;
        assert!(is_all(&back, 2.0)? && is_all(&across, 1.0)? && is_all(&same, 1.0)?);
        if first {
            assert_eq!(
                (p.memory().host_live, p.memory().host_peak),
                (4 * eight, 4 * eight)
            );
            memory_falls_to(p, eight);
        } else {
            // Zero-copy transfers stay in the lender's memory.
            assert_eq!(
                (p.memory().live, p.memory().host_live),
                (0, if zero_copy() { 0 } else { eight })
            );
        }
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn outputs_and_made_arrays_that_do_not_fit_fail_too() {
    let _limit = watchdog(60);
    for made in [true, false] {
        let simulation = simulation(2, 2).settings(|b| b.device_memory(12 * MIB as u64));
        let results = simulation.run(|p| {
            let mesh = p.mesh_of(&[("x", 1)], &[DeviceId(0)])?;
            let first = large(p, 0, 1.0, Duration::ZERO)?;
            let second = if made {
                large(p, 0, 2.0, Duration::ZERO)?
            } else {
                let copy = fun("copy", like_first, |_, x, mut y| {
                    Ok(y[0].fill(x[0].as_slice::<f32>()?[0])?)
                });
                let copy = p.jit(copy).on(&mesh).outputs(mesh.replicated()).build()?;
                copy.call(p, vec![first.clone()])?.remove(0)
            };
            let there = p.device_put(&second, on(1))?;
            let mine = if p.process() == ProcessId(0) {
                second
            } else {
                there
            };
            let failure = mine.block_until_ready().map(drop).unwrap_err();
            assert_eq!(
                failure.failure().map(|failure| failure.kind),
                Some(FailureKind::Memory),
                "{failure}"
            );
            drop(first);
            Err::<(), _>(failure)
        });
        results
            .into_iter()
            .for_each(|result| assert!(result.unwrap_err().to_string().contains("out of memory")));
    }
}

#[test]
fn an_update_in_place_needs_no_second_copy() {
    let _limit = watchdog(60);
    let simulation = simulation(2, 2).settings(|b| b.device_memory(12 * MIB as u64));
    let results = simulation.run(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let update = fun(
            "update",
            |x| Ok(Signature::new(vec![x[0].clone()]).alias("0", "0")),
            |_, _, mut y| {
                y[0].as_mut_slice::<f32>()?
                    .iter_mut()
                    .for_each(|y| *y += 1.0);
                Ok(())
            },
        );
        let rows = mesh.sharding(spec!["x"]);
        let update = p.jit(update).on(&mesh).outputs(&rows).donate("0").build()?;
        let mut x =
            p.array_from_fn(f32s([4 * MIB]), &rows, |_, mut view| Ok(view.fill(0.0f32)?))?;
        for _ in 0..10 {
            x = update.call(p, vec![x])?.remove(0);
        }
        let shards = x.addressable_shards()?;
        assert!(shards.iter().all(|s| {
            s.data
                .as_slice::<f32>()
                .is_ok_and(|v| v.iter().all(|v| *v == 10.0))
        }));
        assert_eq!(p.memory().peak, 8 * MIB as u64);
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

/// Two processes on a host receive an array, one of them through the other. The relay updates it in
/// place while its neighbour is late. There is room for one copy, so the update waits for a
/// transfer issued earlier.
#[test]
fn update_in_place_waits_for_other_readers() {
    let _limit = watchdog(60);
    let simulation =
        simulation(3, 3).settings(|b| b.hosts(&[0, 1, 1]).device_memory(12 * MIB as u64));
    let results = simulation.run(|p| {
        let mesh = p.mesh_of(&[("x", 2)], &[DeviceId(1), DeviceId(2)])?;
        let add = |x: &[ShapedArray]| Ok(Signature::new(vec![x[0].clone()]).alias("0", "0"));
        let update = fun("update", add, |_, _, mut y| {
            y[0].as_mut_slice::<f32>()?
                .iter_mut()
                .for_each(|y| *y += 1.0);
            Ok(())
        });
        let update = p
            .jit(update)
            .on(&mesh)
            .outputs(mesh.replicated())
            .donate("0")
            .build()?;
        for round in 0..3 {
            let x = large(p, 0, 1.0, Duration::ZERO)?;
            if p.process() == ProcessId(2 - round % 2) {
                std::thread::sleep(Duration::from_millis(100));
            }
            let y = p.device_put(&x, mesh.replicated())?;
            drop(x);
            let z = update.call(p, vec![y])?.remove(0);
            assert!(is_all(&z, 2.0)?);
            drop(z);
            memory_falls_to(p, 0);
        }
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn a_fast_stage_runs_only_so_far_ahead_of_a_slow_one() {
    let _limit = watchdog(60);
    // Limited by the number of operations; by bytes in flight on the fast side and by the budget on
    // the slow one.
    for (ops, bytes, budget) in [(8, u64::MAX, 1 << 40), (usize::MAX, 4 << 20, 12 << 20)] {
        let settings = |b: Builder| b.run_ahead(ops, bytes).device_memory(budget);
        let simulation = simulation(2, 2).settings(settings);
        let results = simulation.run(|p| {
            let stages = p.mesh(&[("stage", 2)])?.split("stage")?;
            let fast = fun("fast", like_first, |_, _, mut y| Ok(y[0].fill(1.0f32)?));
            let slow = fun(
                "slow",
                |_| Ok(Signature::new(vec![f32s([1])])),
                |_, x, mut y| {
                    std::thread::sleep(Duration::from_millis(5));
                    Ok(y[0].fill(x[0].as_slice::<f32>()?[0])?)
                },
            );
            let fast = p
                .jit(fast)
                .on(&stages[0])
                .outputs(stages[0].replicated())
                .build()?;
            let slow = p
                .jit(slow)
                .on(&stages[1])
                .outputs(stages[1].replicated())
                .build()?;
            let x = p.array_from_fn(f32s([MIB / 4]), stages[0].replicated(), |_, mut v| {
                Ok(v.fill(0.0f32)?)
            })?;
            let mut last = None;
            for _ in 0..60 {
                let y = fast.call(p, vec![x.clone()])?.remove(0);
                let y = p.device_put(&y, stages[1].replicated())?;
                last = slow.call(p, vec![y])?.pop();
            }
            assert!(is_all(&last.expect("sixty rounds"), 1.0)?);
            Ok(p.memory().peak)
        });
        // With zero-copy transfers the lender counts the arrays of both sides that run ahead.
        let most = if zero_copy() {
            budget.min(24 << 20)
        } else {
            12 << 20
        };
        for peak in results.into_iter().map(Result::unwrap) {
            assert!(peak <= most, "{peak} bytes at once of 60 MiB in all");
        }
    }
}

#[test]
fn memory_stays_flat_over_many_steps() {
    let _limit = watchdog(60);
    let results = simulation(2, 4).run(|p| {
        let stages = p.mesh(&[("stage", 2), ("x", 2)])?.split("stage")?;
        let reduce = |x: &[ShapedArray]| {
            Ok(Signature::new(vec![x[0].clone()])
                .all_reduce("x", ShapedArray::new(&[1 << 14], x[0].dtype())))
        };
        let work = fun("work", reduce, |cx, x, mut y| {
            let y = y[0].as_mut_slice::<f32>()?;
            y.copy_from_slice(x[0].as_slice()?);
            cx.all_reduce("x", y)?;
            y.iter_mut().for_each(|y| *y *= 0.5);
            Ok(())
        });
        let shardings = [
            stages[0].sharding(spec!["x"]),
            stages[1].sharding(spec![None, "x"]),
        ];
        let jit = p.jit(work).on(&stages[0]).outputs(&shardings[0]).build()?;
        let mut x = p.array_from_fn(f32s([128, 256]), &shardings[0], |_, mut view| {
            Ok(view.fill(1.0f32)?)
        })?;
        let mut mapped = 0;
        for step in 0..500 {
            let parts = jit.call(p, vec![x])?.remove(0).microbatches(p, 0, 2)?;
            let there = p.device_put(&parts, &shardings[1])?;
            let whole = p.device_put(&there[0], &shardings[0])?;
            let doubled = double(p, &whole, &shardings[0])?;
            x = jit.call(p, vec![doubled])?.remove(0);
            p.step_end()?;
            if step % 10 == 0 {
                there
                    .iter()
                    .try_for_each(|part| part.block_until_ready().map(drop))?;
                p.broadcast_value(ProcessId(0), 0, || x.block_until_ready().map(|_| step))?;
            }
            if step == 100 {
                mapped = p.memory().mapped;
            }
        }
        x.block_until_ready()?;
        let end = p.memory();
        assert!(
            end.mapped <= mapped + 4 * MIB as u64,
            "{mapped} bytes after 100 steps, then {}",
            end.mapped
        );
        drop(x);
        memory_falls_to(p, 0);
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

/// Returns an array twice as tall as `half`, in the sharding `to`: each device writes its rows of
/// `half` twice.
fn double(p: &mut Program, half: &MpmdArray, to: &Sharding) -> Result<MpmdArray> {
    let mesh = to.mesh().expect("a named sharding").clone();
    let double = fun(
        "double",
        |x| {
            Ok(Signature::new(vec![f32s([
                2 * x[0].shape()[0],
                x[0].shape()[1],
            ])]))
        },
        |_, x, mut y| {
            let x = x[0].as_slice::<f32>()?;
            for part in y[0].as_mut_slice::<f32>()?.chunks_mut(x.len()) {
                part.copy_from_slice(x);
            }
            Ok(())
        },
    );
    Ok(p.jit(double)
        .on(&mesh)
        .outputs(to)
        .build()?
        .call(p, vec![half.clone()])?
        .remove(0))
}

#[test]
fn devices_of_a_process_join_a_collective_at_any_time() {
    let _limit = watchdog(60);
    let results =
        simulation(2, 4)
            .delays(1, Duration::from_millis(2))
            .run(|p| {
                // Device 0 reduces with 2, device 1 with 3; 1 and 2 come late.
                let mesh = p.mesh(&[("data", 2), ("model", 2)])?;
                let reduce = |x: &[ShapedArray]| {
                    Ok(Signature::new(vec![x[0].clone()]).all_reduce("data", f32s([8192])))
                };
                let late = fun("late", reduce, |cx, _, mut y| {
                    if [DeviceId(1), DeviceId(2)].contains(&cx.device()) {
                        std::thread::sleep(Duration::from_millis(20));
                    }
                    let own = cx.device().0 as f32;
                    y[0].fill(own)?;
                    cx.all_reduce("data", y[0].as_mut_slice::<f32>()?)
                });
                let rows = mesh.sharding(spec!["model"]);
                let jit = p.jit(late).on(&mesh).outputs(&rows).build()?;
                // Small arrays that are sent at once, and large ones that are requested.
                for elements in [2usize, 16384] {
                    let x = p.array_from_fn(f32s([elements]), &rows, |_, mut view| {
                        Ok(view.fill(0.0f32)?)
                    })?;
                    for _ in 0..5 {
                        let y = jit.call(p, vec![x.clone()])?;
                        for shard in y[0].addressable_shards()? {
                            let sum = if shard.region.range(0).start == 0 {
                                2.0f32
                            } else {
                                4.0
                            };
                            assert!(
                                shard
                                    .data
                                    .as_slice::<f32>()?
                                    .iter()
                                    .all(|value| *value == sum),
                                "{shard:?}"
                            );
                        }
                    }
                }
                Ok(())
            });
    results.into_iter().for_each(Result::unwrap);
}
