//! Processes that die, leave early, panic or run another program. All others learn of it, none
//! hangs, and no wrong data is delivered.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::Duration;

use super::simulations::simulation;
use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{Error, ProcessId};

fn on(device: u32) -> Sharding {
    Sharding::single_device(DeviceId(device))
}

fn ones(p: &mut Program, elements: usize, to: &Sharding) -> Result<MpmdArray> {
    p.array_from_fn(f32s([elements]), to, |_, mut view| Ok(view.fill(1.0f32)?))
}

/// Runs every kind of operation, over four processes with a device each. Returns a sum that is the
/// same on all processes.
fn everything(p: &mut Program) -> Result<f32> {
    let stages = p.mesh(&[("stage", 2), ("x", 2)])?.split("stage")?;
    let rows = stages[0].sharding(spec!["x"]);
    let reduce = |x: &[ShapedArray]| {
        Ok(Signature::new(vec![x[0].clone()])
            .alias("0", "0")
            .all_reduce("x", f32s([4096])))
    };
    let reduce = fun("reduce", reduce, |cx, _, mut y| {
        cx.all_reduce("x", y[0].as_mut_slice::<f32>()?)
    });
    let front = p
        .jit(reduce)
        .on(&stages[0])
        .outputs(&rows)
        .donate("0")
        .build()?;
    let copy = fun("copy", like_first, |_, x, mut y| {
        y[0].as_mut_slice::<f32>()?
            .copy_from_slice(x[0].as_slice()?);
        Ok(())
    });
    let back = p
        .jit(copy)
        .on(&stages[1])
        .outputs(stages[1].replicated())
        .build()?;
    let mut x = ones(p, 8192, &rows)?;
    let mut sum = 0.0;
    for step in 0..2 {
        x = front.call(p, vec![x])?.remove(0);
        let parts = x.microbatches(p, 0, 2)?;
        let there = p.device_put(&parts, stages[1].replicated())?;
        let y = back.call(p, vec![there[1].clone()])?.remove(0);
        sum += p.broadcast_value(ProcessId(2), 0.0, || {
            Ok(y.to_host()?
                .map_or(Ok(0.0), |y| y.to_vec::<f32>().map(|y| y[0]))?)
        })?;
        let small = p.device_put(&MpmdArray::scalar(step), stages[1].replicated())?;
        drop(p.device_put(&small, stages[0].replicated())?);
        p.step_end()?;
    }
    Ok(sum)
}

#[test]
fn program_without_faults_succeeds() {
    let _limit = watchdog(60);
    for seed in 0..20 {
        let results = simulation(4, 4)
            .delays(seed, Duration::from_millis(2))
            .run(|p| {
                let sum = everything(p)?;
                Ok((sum, p.operations()))
            });
        for result in results {
            assert_eq!(result.unwrap(), (6.0, 15));
        }
    }
}

fn lose(seeds: std::ops::Range<u64>) {
    let _limit = watchdog(180);
    for seed in seeds {
        for op in 1..=15 {
            let lost = ProcessId(((op + seed) % 4) as u32);
            let simulation = simulation(4, 4)
                .delays(seed, Duration::from_millis(2))
                .lose(lost, op);
            for (process, result) in simulation.run(everything).into_iter().enumerate() {
                let error = result
                    .expect_err("every process ends with an error")
                    .to_string();
                let expected = format!("process {lost} ");
                assert!(
                    error.contains(&expected),
                    "seed {seed}, operation {op}, process {process}: {error}"
                );
            }
        }
    }
}

#[test]
fn process_lost_at_any_operation_is_named_by_all_others() {
    lose(0..4);
}

#[test]
fn process_lost_at_any_operation_is_named_with_more_seeds() {
    lose(4..8);
}

/// Returns the text of each process's error. Panics if one has ended without an error or with
/// another than a divergence error.
fn diverged(results: Vec<Result<()>>) -> Vec<String> {
    results
        .into_iter()
        .map(|result| {
            let error = result.expect_err("a diverged program does not end well");
            assert!(error.is_divergence(), "{error}");
            error.to_string()
        })
        .collect()
}

/// Returns the text of the divergence error of all processes, which must be the same. Panics if one
/// has no such error.
fn diverged_alike(results: Vec<Result<()>>) -> String {
    let mut texts = diverged(results);
    texts.dedup();
    assert_eq!(texts.len(), 1, "{texts:#?}");
    texts.remove(0)
}

#[test]
fn extra_transfer_that_meets_another_message_is_detected() {
    let _limit = watchdog(60);
    for seed in 0..20 {
        // Small transfers are sent at once, large ones are requested.
        for elements in [4, 100_000] {
            let seen = Mutex::new(Vec::new());
            let results = simulation(2, 2)
                .delays(seed, Duration::from_millis(2))
                .run(|p| {
                    let x = ones(p, elements, &on(0))?;
                    let y = p.array_from_fn(f32s([elements]), on(0), |_, mut view| {
                        Ok(view.fill(2.0f32)?)
                    })?;
                    if p.process() == ProcessId(1) {
                        let extra = p.device_put(&x, on(1))?;
                        let extra = extra.to_host();
                        seen.lock().unwrap().push(extra.is_ok());
                    }
                    let moved = p.device_put(&y, on(1))?;
                    if p.process() == ProcessId(1) {
                        seen.lock().unwrap().push(moved.to_host().is_ok());
                    }
                    Ok(())
                });
            assert_eq!(
                seen.into_inner().unwrap(),
                [false, false],
                "nothing is delivered"
            );
            let text = diverged_alike(results);
            let says = |part: &str| assert!(text.contains(part), "{text}\n  lacks {part}");
            says("first differ at operation 3");
            says("process 0 issued operation 3 (device_put of f32[");
            says("process 1 issued operation 3 (device_put of f32[");
            let lines: Vec<&str> = text.matches("tests/all/failures.rs:").collect();
            assert_eq!(lines.len(), 2, "{text}");
            // The two lines that issued them, not one line twice.
            let at = |process: usize| {
                text.split(&format!("process {process} issued"))
                    .nth(1)
                    .unwrap()
            };
            let line = |text: &str| {
                text.split("failures.rs:")
                    .nth(1)
                    .unwrap()
                    .split(':')
                    .next()
                    .unwrap()
                    .to_owned()
            };
            assert_ne!(line(at(0)), line(at(1)), "{text}");
        }
    }
}

#[test]
fn operation_issued_by_only_one_process_is_detected() {
    let _limit = watchdog(60);
    for seed in 0..20 {
        for skips in [true, false] {
            for at in [0, 2] {
                let results = simulation(3, 3)
                    .delays(seed, Duration::from_millis(2))
                    .run(|p| {
                        let mesh = p.mesh_of(&[("x", 1)], &[DeviceId(1)])?;
                        let same = fun("same", like_first, |_, _, _| Ok(()));
                        let same = p.jit(same).on(&mesh).outputs(mesh.replicated()).build()?;
                        let parts = ones(p, 6, &mesh.replicated())?.microbatches(p, 0, 3)?;
                        // Microbatches with equal shapes, on a mesh that only process 1 owns.
                        for (i, part) in parts.iter().enumerate() {
                            let odd = p.process() == ProcessId(1) && i == at;
                            for _ in 0..if !odd {
                                1
                            } else if skips {
                                0
                            } else {
                                2
                            } {
                                same.call(p, vec![part.clone()])?;
                            }
                            if i % 2 == 1 {
                                p.step_end()?;
                            }
                        }
                        Ok(())
                    });
                // With three processes two pairs differ; either may be reported.
                for text in diverged(results) {
                    let says = |part: &str| assert!(text.contains(part), "{text}\n  lacks {part}");
                    says("first differ at operation");
                    says("process 1 ");
                    says("jit same on {x:1} devices [1]");
                    says("tests/all/failures.rs:");
                }
            }
        }
    }
}

#[test]
fn process_waiting_for_a_missing_operation_gets_an_error() {
    let _limit = watchdog(60);
    for seed in 0..10 {
        let results = simulation(2, 2)
            .delays(seed, Duration::from_millis(2))
            .run(|p| {
                let x = ones(p, 4, &on(0))?;
                if p.process() == ProcessId(1) {
                    let y = p.device_put(&x, on(1))?;
                    assert!(
                        y.block_until_ready().is_err(),
                        "process 0 has ended without it"
                    );
                }
                Ok(())
            });
        let text = diverged_alike(results);
        assert!(
            text.contains("process 0 has issued only 1 operations"),
            "{text}"
        );
        assert!(
            text.contains("process 1 issued operation 2 (device_put of f32[4]"),
            "{text}"
        );
    }
}

#[test]
fn a_program_that_returns_an_error_early_ends_the_others() {
    let _limit = watchdog(60);
    for seed in 0..10 {
        for leaver in 0..3 {
            let results = simulation(3, 3)
                .delays(seed, Duration::from_millis(2))
                .run(|p| {
                    let x = ones(p, 100_000, &on(0))?;
                    let y = p.device_put(&x, on(1))?;
                    if p.process() == ProcessId(leaver) {
                        return Err(Error::Environment("the disk is full".to_owned()));
                    }
                    let z = p.device_put(&y, on(2))?;
                    let back = p.device_put(&z, on(0))?;
                    back.block_until_ready()?;
                    p.broadcast_value(ProcessId(0), 0, || Ok(1))?;
                    Ok(())
                });
            for (process, result) in results.into_iter().enumerate() {
                let error = result.unwrap_err();
                if process == leaver as usize {
                    assert_eq!(error.to_string(), "the disk is full");
                } else {
                    assert!(error.is_peer_failure(), "{error}");
                    let expected = format!("process {leaver} ended before its program finished");
                    let expected = format!("{expected}: the disk is full");
                    assert!(
                        error.to_string().contains(&expected),
                        "seed {seed}: {error}"
                    );
                }
            }
        }
    }
}

#[test]
fn forgiven_failures_do_not_end_the_job_and_later_ones_do() {
    let _limit = watchdog(60);
    let fails = |p: &mut Program| -> Result<()> {
        let bad = p.array_from_fn(f32s([4]), on(1), |_, mut view| {
            view.as_mut_slice::<f32>()?;
            Err(Error::kernel("refused"))
        })?;
        // Process 0 learns of it by the move.
        let moved = p.device_put(&bad, on(0))?;
        for array in [&bad, &moved] {
            if !array.is_fully_remote() {
                let said = array.block_until_ready().unwrap_err().to_string();
                assert!(said.contains("refused"), "{said}");
            }
        }
        Ok(())
    };
    for forgives_last in [true, false] {
        let results = simulation(2, 2).run(|p| {
            fails(p)?;
            p.forgive_failures();
            let sum = ones(p, 4, &on(1))?;
            let sum = p.device_put(&sum, on(0))?;
            sum.block_until_ready()?;
            p.step_end()?;
            fails(p)?;
            if forgives_last {
                p.forgive_failures();
            }
            Ok(())
        });
        for result in results {
            match (result, forgives_last) {
                (Ok(()), true) => {}
                (Err(why), false) => assert!(why.to_string().contains("refused"), "{why}"),
                (result, _) => panic!("{result:?}, {forgives_last}"),
            }
        }
    }
}

#[test]
fn dropped_program_lets_its_work_finish() {
    let _limit = watchdog(60);
    let has_ended = Arc::new(AtomicBool::new(false));
    let mut p = Program::builder().alone().unwrap();
    let mesh = p.mesh(&[("one", 1)]).unwrap();
    let ended = has_ended.clone();
    let slow = fun("slow", like_first, move |_, _, _| {
        std::thread::sleep(Duration::from_millis(200));
        ended.store(true, Ordering::SeqCst);
        Ok(())
    });
    let slow = p
        .jit(slow)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let x = ones(&mut p, 4, &mesh.replicated()).unwrap();
    drop(slow.call(&mut p, vec![x]).unwrap());
    drop(p);
    assert!(has_ended.load(Ordering::SeqCst));
}

#[test]
fn a_program_that_panics_ends_the_others() {
    let _limit = watchdog(60);
    let errors = Mutex::new(Vec::new());
    let simulation = simulation(3, 3).delays(1, Duration::from_millis(2));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        simulation.run(|p| {
            let x = ones(p, 100_000, &on(0))?;
            if p.process() == ProcessId(0) {
                panic!("a bug in the program");
            }
            let y = p.device_put(&x, on(1))?;
            let z = p.device_put(&y, on(2))?;
            let mine = if p.process() == ProcessId(1) { y } else { z };
            errors
                .lock()
                .unwrap()
                .push(mine.block_until_ready().unwrap_err().to_string());
            Ok(())
        })
    }));
    assert!(
        panicked.is_err(),
        "the panic reaches the caller of the simulation"
    );
    let errors = errors.into_inner().unwrap();
    assert_eq!(errors.len(), 2);
    for error in errors {
        assert!(
            error.contains("process 0 panicked before its program finished"),
            "{error}"
        );
    }
}

#[test]
fn agreements_carry_values_and_failures_of_all_sizes() {
    type Fault = fn() -> Result<String>;
    let _limit = watchdog(60);
    let results = simulation(4, 4)
        .delays(5, Duration::from_millis(2))
        .run(|p| {
            for (round, size) in [0usize, 1, 1000, 16 << 10, 20_000, 1_000_000]
                .into_iter()
                .enumerate()
            {
                let from = ProcessId(round as u32 % 4);
                let text = p.broadcast_value(from, String::new(), || Ok("x".repeat(size)))?;
                assert_eq!(text.len(), size);
            }
            // Repeated without waiting for the others: more than the credit for unrequested
            // messages.
            for i in 0..200u64 {
                assert_eq!(
                    p.broadcast_value(ProcessId(0), Vec::new(), || Ok(vec![i; 1500]))?,
                    vec![i; 1500]
                );
            }
            Ok(())
        });
    results.into_iter().for_each(Result::unwrap);
    let faults: [(Fault, &str); 3] = [
        (|| Err(Error::kernel("no more text")), "no more text"),
        (|| panic!("a bug"), "the closure panicked"),
        (|| Ok("x".repeat(2 << 20)), "broadcast_value (operation 1)"),
    ];
    for (fault, expected) in faults {
        let results =
            simulation(3, 3).run(|p| p.broadcast_value(ProcessId(1), String::new(), fault));
        for (process, result) in results.into_iter().enumerate() {
            let error = result.unwrap_err().to_string();
            assert!(
                error.contains(expected) && error.contains("tests/all/failures.rs:"),
                "{process}: {error}"
            );
        }
    }
}

#[test]
fn gathered_values_stand_in_order_and_the_first_error_wins() {
    let _limit = watchdog(60);
    let job = || simulation(4, 4).delays(6, Duration::from_millis(2));
    let results = job().run(|p| {
        let own = p.process().0;
        p.gather_value(7, || Ok(own * 10))
    });
    for result in results {
        assert_eq!(result.unwrap(), [0, 10, 20, 30]);
    }

    let results = job().run(|p| match p.process().0 {
        own @ (1 | 3) => p.gather_value((), || Err(Error::kernel(format!("no file on {own}")))),
        _ => p.gather_value((), || Ok(())),
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("no file on 1"), "{error}");
    }
}

#[test]
fn handles_and_futures_are_dropped_at_any_time() {
    let _limit = watchdog(60);
    for seed in 0..20u64 {
        let results = simulation(2, 4)
            .delays(seed, Duration::from_millis(2))
            .run(|p| {
                let mesh = p.mesh(&[("x", 4)])?;
                let x = ones(p, 4096, &mesh.sharding(spec!["x"]))?;
                let mut kept = Vec::new();
                for i in 0..30u64 {
                    let to = on((i % 4) as u32);
                    let y = p.device_put(&x, &to)?;
                    let mut future = Box::pin(y.clone().into_future());
                    let mut task = TaskContext::from_waker(Waker::noop());
                    match (seed + i) % 5 {
                        0 => {}
                        1 => drop(y),
                        // Polls a few times, then drops the future.
                        2 => (0..i % 4).for_each(|_| drop(future.as_mut().poll(&mut task))),
                        3 => {
                            let parts = y.microbatches(p, 0, 4)?;
                            kept.push(parts[i as usize % 4].clone());
                        }
                        _ => {
                            let done = futures::executor::block_on(future)?;
                            assert!(done.is_complete());
                            let again = std::pin::pin!(done.into_future()).poll(&mut task);
                            assert!(matches!(again, Poll::Ready(Ok(_))));
                        }
                    }
                    if i % 7 == 0 {
                        move_and_forget(p, &x)?;
                    }
                }
                for part in kept {
                    if let Some(values) = part.to_host()? {
                        assert_eq!(values.to_vec::<f32>()?, [1.0; 1024]);
                    }
                }
                Ok(())
            });
        results.into_iter().for_each(Result::unwrap);
    }
}

/// Moves an array to device 3, requests its values for a callback, and drops the handle without
/// waiting.
fn move_and_forget(p: &mut Program, x: &MpmdArray) -> Result<()> {
    p.device_put(x, on(3))?
        .then(|values| assert_eq!(values.unwrap().shape(), [4096]));
    Ok(())
}

#[test]
fn closures_given_to_then_have_run_when_finish_returns() {
    let _limit = watchdog(60);
    let (send, receive) = std::sync::mpsc::channel();
    let results = simulation(2, 2).run(|p| {
        let x = ones(p, 4, &on(0))?;
        for i in 0..10 {
            let send = send.clone();
            p.device_put(&x, on(i % 2))?.then(move |values| {
                std::thread::sleep(Duration::from_millis(5));
                let _ = send.send((i, values.is_ok()));
            });
        }
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
    let mut told: Vec<_> = receive.try_iter().collect();
    told.sort_unstable();
    assert_eq!(told, (0..10).map(|i| (i, true)).collect::<Vec<_>>());
}
