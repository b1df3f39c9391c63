//! Tests `device_put` and `jit` where the system that this API is modelled on refuses them.
//! `transfers.rs` of the tests with processes has each kind of source and target.
//!
//! The errors there and the behaviour here:
//!
//! | there | here |
//! |---|---|
//! | any source to a target that is partly local: not implemented, or fails at completion | works |
//! | a source that is partly local to a local or partly local target: not implemented | works |
//! | uncommitted values to a partly local target: not implemented | works, without a message |
//! | a source on a single device: assertion, or equal layouts only | works |
//! | host values and scalars: attribute error | uncommitted arrays, placed without a message |
//! | layouts, memory kinds or device counts that differ: error | works |
//! | bf16, bool, 16-bit integers: type error | all dtypes work |
//! | waiting for a key for over 5 s: error | no such wait; waits are reported, peers watched |
//! | waiting for a handle a second time: returns nothing | returns the array as often as asked |
//! | local data of a remote array: value error | `to_host`: `None`; `addressable_shards`: error |
//! | `jit` without output shardings: value error | [`IssueProblem::MissingOutputs`] |
//! | `jit` with output shardings that are no prefix: value error | [`IssueProblem::Tree`] |
//! | `jit`, remote input, local output: value error | [`IssueProblem::InputMesh`] with the input |
//! | local inputs next to a remote one: silently ignored | [`IssueProblem::InputMesh`] |
//! | outputs that belong elsewhere: run here | [`IssueProblem::Mesh`] when it is built |

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::sends::Gate;
use super::simulations::simulation;
use crate::common::arrays::{check, values};
use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::aval::DType;
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::DeviceId;
use mpmd_core::{Error, IssueProblem, ProcessId};

#[test]
fn every_dtype_moves_unchanged() {
    let _limit = watchdog(60);
    for processes in [1, 2, 4] {
        let results = simulation(processes, 4)
            .delays(processes as u64, Duration::from_millis(2))
            .run(|p| {
                let grid = p.mesh(&[("x", 2), ("y", 2)])?;
                let ends = p.mesh_of(&[("x", 2)], &[DeviceId(3), DeviceId(0)])?;
                for dtype in DType::ALL {
                    let whole = values(&[4, 6], dtype);
                    let x = p.device_put(
                        &MpmdArray::from_host(whole.clone()),
                        grid.sharding(spec!["x", "y"]),
                    )?;
                    let y = p.device_put(&x, ends.sharding(spec![None, "x"]))?;
                    let z = p.device_put(&y, grid.sharding(spec!["y"]))?;
                    for array in [&x, &y, &z] {
                        check(p, array, &whole)?;
                    }
                }
                Ok(())
            });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn scalars_empty_and_large_arrays_move() {
    let _limit = watchdog(60);
    let shapes: [&[usize]; 8] = [
        &[],
        &[0],
        &[0, 4],
        &[4, 0, 2],
        &[1, 1],
        &[2, 2, 2, 2],
        &[2, 3, 5],
        &[64, 8192],
    ];
    for processes in [1, 2, 4] {
        let results = simulation(processes, 4)
            .delays(3, Duration::from_millis(2))
            .run(|p| {
                let left = p.mesh_of(&[("x", 2)], &[DeviceId(0), DeviceId(1)])?;
                let right = p.mesh_of(&[("x", 2)], &[DeviceId(3), DeviceId(2)])?;
                let all = p.mesh(&[("x", 4)])?;
                for shape in shapes {
                    let whole = values(shape, DType::F32);
                    let host = MpmdArray::from_host(whole.clone());
                    let first = if shape.is_empty() || shape[0] % 2 != 0 {
                        spec![]
                    } else {
                        spec!["x"]
                    };
                    let last = match shape {
                        [.., last] if last % 2 == 0 => {
                            let mut entries =
                                vec![mpmd_core::sharding::SpecEntry::None; shape.len()];
                            entries[shape.len() - 1] = "x".into();
                            mpmd_core::sharding::Spec::new(entries)
                        }
                        _ => spec![],
                    };
                    let x = p.device_put(&host, left.sharding(first.clone()))?;
                    let y = p.device_put(&x, right.sharding(last))?;
                    let z = p.device_put(&y, all.replicated())?;
                    let back = p.device_put(&z, left.sharding(first))?;
                    for array in [&x, &y, &z, &back] {
                        check(p, array, &whole)?;
                    }
                }
                Ok(())
            });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn trees_move_by_prefix_and_a_misfit_moves_nothing() {
    let _limit = watchdog(60);
    let results = simulation(2, 2)
        .delays(1, Duration::from_millis(2))
        .run(|p| {
            let mesh = p.mesh(&[("x", 2)])?;
            let (rows, all) = (mesh.sharding(spec!["x"]), mesh.replicated());
            let [a, b, c] = [
                values(&[4], DType::I32),
                values(&[2], DType::U8),
                values(&[6], DType::F16),
            ];
            let tree = (
                vec![
                    MpmdArray::from_host(a.clone()),
                    MpmdArray::from_host(b.clone()),
                ],
                MpmdArray::from_host(c.clone()),
            );
            let (moved, last) = p.device_put(&tree, (rows.clone(), all.clone()))?;
            check(p, &moved[0], &a)?;
            check(p, &moved[1], &b)?;
            check(p, &last, &c)?;
            assert_eq!(moved[0].sharding(), Some(&rows));
            assert_eq!(last.sharding(), Some(&all));

            let before = p.operations();
            let error = p
                .device_put(&tree, (all.clone(), all.clone(), all))
                .unwrap_err();
            assert!(
                matches!(&error, Error::Issue(issue) if matches!(issue.why, IssueProblem::Tree(_))),
                "{error}"
            );
            assert_eq!(p.operations(), before);
            Ok(())
        });
    results.into_iter().for_each(Result::unwrap);
}

/// Waits until the process's arrays take at most `bytes`, and panics after 20 seconds: memory is
/// freed on other threads.
fn memory_falls_to(p: &Program, bytes: u64) {
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
fn same_place_takes_no_memory_unless_a_copy_is_requested() {
    let _limit = watchdog(60);
    const BYTES: u64 = 4 << 20;
    let results = simulation(2, 4)
        .delays(1, Duration::from_millis(2))
        .run(|p| {
            let mesh = p.mesh(&[("x", 2), ("y", 2)])?;
            let x = p.array_from_fn(
                f32s([1 << 10, 1 << 10]),
                mesh.sharding(spec!["x"]),
                |_, mut view| Ok(view.fill(p_value(view.region()))?),
            )?;
            let before = x.block_until_ready().map(|_| p.memory().live)?;
            assert!(before >= BYTES, "two devices hold half of it each");

            let same = p.device_put(&x, mesh.sharding(spec!["x"]))?;
            same.block_until_ready()?;
            assert_eq!(
                p.memory().live,
                before,
                "the same sharding is the same memory"
            );
            // The same regions with other axis names.
            let flat = p.mesh(&[("z", 4)])?;
            let renamed = p.mesh(&[("a", 2), ("b", 2)])?;
            let relabelled = p.device_put(&x, renamed.sharding(spec!["a"]))?;
            relabelled.block_until_ready()?;
            assert_eq!(p.memory().live, before, "a relabelling moves nothing");

            let copy = p.device_put_with(
                &x,
                mesh.sharding(spec!["x"]),
                MoveOptions::default().may_alias(false),
            )?;
            copy.block_until_ready()?;
            assert_eq!(p.memory().live, 2 * before);
            assert_eq!(
                copy.addressable_shards()?[0].data.to_vec::<f32>()?[..3],
                [p_value_of(p); 3]
            );
            drop((same, relabelled, copy));
            memory_falls_to(p, before);

            let split = p.device_put(&x, flat.sharding(spec!["z"]))?;
            split.block_until_ready()?;
            drop(split);
            memory_falls_to(p, before);
            drop(x);
            memory_falls_to(p, 0);
            Ok(())
        });
    results.into_iter().for_each(Result::unwrap);
}

fn p_value(region: &Region) -> f32 {
    region.range(0).start as f32
}

fn p_value_of(p: &Program) -> f32 {
    if p.process() == ProcessId(0) {
        0.0
    } else {
        512.0
    }
}

#[test]
fn donated_memory_is_freed_and_a_later_use_names_both_lines() {
    let _limit = watchdog(60);
    let results = simulation(2, 2)
        .delays(1, Duration::from_millis(2))
        .run(|p| {
            let mesh = p.mesh(&[("x", 2)])?;
            let x = p.array_from_fn(f32s([1 << 18]), mesh.sharding(spec!["x"]), |_, mut v| {
                Ok(v.fill(1.0f32)?)
            })?;
            let other = x.clone();
            x.block_until_ready()?;
            assert!(p.memory().live >= 1 << 19);
            let to = Sharding::single_device(DeviceId(1));
            let donated_at = line!() + 1;
            let y = p.device_put_with(&x, to, MoveOptions::default().donate(true))?;
            y.block_until_ready()?;
            memory_falls_to(
                p,
                if p.process() == ProcessId(1) {
                    1 << 20
                } else {
                    0
                },
            );

            // The handles still exist, but their arrays do not.
            let before = p.operations();
            for handle in [&x, &other] {
                let used_at = line!() + 1;
                let used = p.device_put(handle, mesh.replicated());
                let error = used.unwrap_err().to_string();
                assert!(error.contains(&format!("routing.rs:{used_at}:")), "{error}");
                assert!(
                    error.contains(&format!("routing.rs:{donated_at}:")),
                    "{error}"
                );
                let read_at = line!() + 1;
                let error = handle.addressable_shards().unwrap_err().to_string();
                assert!(error.contains(&format!("routing.rs:{read_at}:")), "{error}");
                assert!(
                    error.contains(&format!("routing.rs:{donated_at}:")),
                    "{error}"
                );
            }
            assert_eq!(p.operations(), before);
            Ok(())
        });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn a_donated_array_serves_all_uses_issued_before() {
    let _limit = watchdog(60);
    let results = simulation(2, 2)
        .delays(1, Duration::from_millis(2))
        .run(|p| {
            let mesh = p.mesh(&[("x", 2)])?;
            let rows = mesh.sharding(spec!["x"]);
            let x = p.array_from_fn(f32s([8]), &rows, |_, mut view| Ok(view.fill(1.0f32)?))?;
            let slow = p
                .jit(fun("slow", like_first, |_, x, mut y| {
                    std::thread::sleep(Duration::from_millis(50));
                    y[0].as_mut_slice::<f32>()?
                        .copy_from_slice(x[0].as_slice()?);
                    Ok(())
                }))
                .on(&mesh)
                .outputs(&rows)
                .build()?;
            // The second call waits behind the first while `x` is donated.
            let first = slow.call(p, vec![x.clone()])?;
            let second = slow.call(p, vec![x.clone()])?;
            let parts = x.microbatches(p, 0, 2)?;
            let (send, told) = std::sync::mpsc::channel();
            p.device_put(&x, mesh.replicated())?
                .then(move |values| drop(send.send(values)));
            let moved =
                p.device_put_with(&x, mesh.replicated(), MoveOptions::default().donate(true))?;
            for array in first.iter().chain(&second).chain(&parts).chain([&moved]) {
                for shard in array.addressable_shards()? {
                    assert!(
                        shard
                            .data
                            .to_vec::<f32>()?
                            .iter()
                            .all(|value| *value == 1.0),
                        "{array:?}"
                    );
                }
            }
            let told = told
                .recv_timeout(Duration::from_secs(20))
                .expect("it is called");
            assert_eq!(told?.to_vec::<f32>()?, [1.0; 8]);
            Ok(())
        });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn values_requested_before_a_donation_still_arrive() {
    let _limit = watchdog(60);
    let results = simulation(1, 1)
        .delays(1, Duration::from_millis(2))
        .run(|p| {
            let mesh = p.mesh(&[("x", 1)])?;
            let to = mesh.replicated();
            for _ in 0..50 {
                let x = p.array_from_fn(f32s([4]), &to, |_, mut view| Ok(view.fill(2.0f32)?))?;
                let (send, told) = std::sync::mpsc::channel();
                x.then(move |values| drop(send.send(values)));
                let _moved = p.device_put_with(
                    &x,
                    &to,
                    MoveOptions::default().donate(true).may_alias(false),
                )?;
                let told = told
                    .recv_timeout(Duration::from_secs(20))
                    .expect("it is called");
                assert_eq!(told?.to_vec::<f32>()?, [2.0; 4]);
            }
            Ok(())
        });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn handles_can_be_waited_for_repeatedly() {
    let _limit = watchdog(60);
    let results = simulation(2, 2)
        .delays(1, Duration::from_millis(2))
        .run(|p| {
            let [first, second] = [0, 1].map(|device| Sharding::single_device(DeviceId(device)));
            let x = MpmdArray::from_slice(&[2], &[1.0f32, 2.0])?;
            x.block_until_ready()?.block_until_ready()?;
            let x = p.device_put(&x, &first)?;
            let y = p.device_put(&x, &second)?;
            for array in [&x, &y] {
                array
                    .block_until_ready()?
                    .block_until_ready()?
                    .wait_timeout(Duration::from_secs(20))?;
                let awaited =
                    futures::executor::block_on(async { array.clone().await?.await?.await })?;
                assert_eq!(awaited.is_fully_remote(), array.is_fully_remote());
                assert_eq!(array.to_host()?.is_none(), array.is_fully_remote());
                assert_eq!(array.to_host()?.is_none(), array.is_fully_remote());
            }
            let remote = if p.process() == ProcessId(0) { &y } else { &x };
            let at = line!() + 1;
            let error = remote.addressable_shards().unwrap_err().to_string();
            assert!(error.contains(&format!("routing.rs:{at}:")), "{error}");
            assert!(error.contains("owns none of its devices"), "{error}");
            Ok(())
        });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn jit_refuses_arrays_on_other_meshes() {
    let _limit = watchdog(60);
    let results = simulation(2, 2)
        .delays(1, Duration::from_millis(2))
        .run(|p| {
            let stages = p.mesh(&[("stage", 2)])?.split("stage")?;
            let (front, back) = (&stages[0], &stages[1]);
            let kernel = || fun("pick", like_first, |_, _, _| Ok(()));
            let here = p.device_put(&MpmdArray::scalar(1.0f32), front.replicated())?;
            let there = p.device_put(&MpmdArray::scalar(1.0f32), back.replicated())?;
            let before = p.operations();

            let error = p
                .jit(kernel())
                .on(front)
                .build()
                .map(drop)
                .expect_err("no outputs");
            assert!(matches!(&error, Error::Issue(issue)
                if matches!(issue.why, IssueProblem::MissingOutputs)));
            let error = p
                .jit(kernel())
                .on(front)
                .outputs(back.replicated())
                .build()
                .map(drop);
            let error = error.expect_err("elsewhere");
            assert!(
                matches!(&error, Error::Issue(issue) if matches!(issue.why, IssueProblem::Mesh(_))),
                "{error}"
            );

            let prefix = (front.replicated(), front.replicated());
            let wide = p.jit(kernel()).on(front).outputs(prefix).build()?;
            let error = wide.call(p, vec![here.clone()]).unwrap_err();
            assert!(
                matches!(&error, Error::Issue(issue) if matches!(issue.why, IssueProblem::Tree(_))),
                "{error}"
            );

            let jit = p
                .jit(kernel())
                .on(front)
                .outputs(front.replicated())
                .build()?;
            let error = jit.call(p, vec![here, there]).unwrap_err();
            let Error::Issue(issue) = &error else {
                panic!("{error}")
            };
            let is_input_1 =
                matches!(&issue.why, IssueProblem::InputMesh { path, .. } if path == "1");
            assert!(is_input_1, "{error}");
            assert_eq!(p.operations(), before);
            Ok(error.to_string())
        });
    let texts: BTreeSet<String> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(texts.len(), 1, "every process says the same: {texts:?}");
}

#[test]
fn handles_show_shape_sharding_devices_and_state() {
    let _limit = watchdog(60);
    let gate = Arc::new(Gate::default());
    let results = simulation(2, 4).run(|p| {
        let host = MpmdArray::from_host(values(&[4, 8], DType::F32));
        assert_eq!(format!("{host:?}"), "MpmdArray(f32[4,8], uncommitted)");
        let mesh = p.mesh_of(&[("x", 2)], &[DeviceId(2), DeviceId(3)])?;
        let waits = gate.clone();
        let x = p.array_from_fn(
            f32s([4, 8]),
            mesh.sharding(spec!["x"]),
            move |_, mut view| {
                waits.pass();
                view.zero();
                Ok(())
            },
        )?;
        let text = "MpmdArray(f32[4,8], P(x) on {x:2} devices [2, 3]";
        match p.process() {
            ProcessId(0) => {
                assert_eq!(
                    format!("{x:?}"),
                    format!("{text}, fully remote, operation 1)")
                )
            }
            _ => assert_eq!(format!("{x:?}"), format!("{text}, pending, operation 1)")),
        }
        if p.process() == ProcessId(1) {
            let error = x.wait_timeout(Duration::from_millis(20)).unwrap_err();
            assert!(matches!(error, Error::TimedOut { .. }), "{error}");
            gate.open();
            x.wait_timeout(Duration::from_secs(20))?;
            assert_eq!(format!("{x:?}"), format!("{text}, operation 1)"));
        }
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}

/// Makes a tree of arrays in which the n-th is full of n.
struct Numbers;

impl Kernel for Numbers {
    type In = MpmdArray;
    type Out = (Vec<MpmdArray>, (MpmdArray, Vec<MpmdArray>));

    fn infer(
        &self,
        x: &ShapedArray,
    ) -> Result<Signature<(Vec<ShapedArray>, (ShapedArray, Vec<ShapedArray>))>> {
        Ok(Signature::new((
            vec![x.clone(); 2],
            (x.clone(), vec![x.clone()]),
        )))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        _: View<'_>,
        (first, (second, third)): (Vec<ViewMut<'_>>, (ViewMut<'_>, Vec<ViewMut<'_>>)),
    ) -> Result<()> {
        for (number, mut y) in first.into_iter().chain([second]).chain(third).enumerate() {
            y.fill(number as f32)?;
        }
        Ok(())
    }
}

#[test]
fn prefix_of_outputs_places_each_branch() {
    let _limit = watchdog(60);
    let results = simulation(2, 2).run(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let (rows, all) = (mesh.sharding(spec!["x"]), mesh.replicated());
        // One sharding for the whole first branch, one for each part of the second.
        let prefix = (rows.clone(), (all.clone(), rows.clone()));
        let jit = p.jit(Numbers).on(&mesh).outputs(prefix).build()?;
        let x = p.device_put(&MpmdArray::from_host(values(&[4], DType::F32)), &all)?;
        let (first, (second, third)) = jit.call(p, x)?;
        let found: Vec<_> = first.iter().chain([&second]).chain(&third).collect();
        let shardings: Vec<_> = found.iter().filter_map(|y| y.sharding()).collect();
        assert_eq!(shardings, [&rows, &rows, &all, &rows]);
        for (number, y) in found.into_iter().enumerate() {
            check(p, y, &HostArray::from_slice(&[4], &[number as f32; 4])?)?;
        }
        Ok(())
    });
    results.into_iter().for_each(Result::unwrap);
}
