//! Resharding of whole trees: the order of moves, intermediates, and the memory needed.

use std::time::{Duration, Instant};

use crate::common::arrays::{check, values};
use crate::common::watchdog;
use mpmd_core::aval::DType;
use mpmd_core::prelude::*;
use mpmd_core::reshard::find_intermediate_sharding;
use mpmd_core::sharding::{MemoryKind, Sharding, Spec};
use mpmd_core::topology::{DeviceId, Mesh};
use mpmd_core::{Error, FailureKind, IssueProblem, Simulation, simulate};

const MIB: usize = 1 << 20;

const PROCESSES: [usize; 3] = [1, 2, 4];

fn mesh_at(p: &Program, axes: &[(&str, usize)], first: u32) -> Result<Mesh> {
    let count: u32 = axes.iter().map(|(_, size)| *size as u32).product();
    p.mesh_of(
        axes,
        &(first..first + count).map(DeviceId).collect::<Vec<_>>(),
    )
}

/// Returns the text of an issue error, without the program's line in front. Panics for a success or
/// another error.
#[track_caller]
fn refusal<T>(result: Result<T>) -> String {
    match result.err().expect("it is refused") {
        Error::Issue(issue) => issue.why.to_string(),
        other => panic!("{other}"),
    }
}

/// Waits up to 20 seconds until this process's arrays take at most `bytes`, and checks that they
/// take exactly `bytes`. The last reader of a buffer may release it a moment later.
#[track_caller]
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
    assert_eq!(p.memory().live, bytes);
}

/// Returns the number of the operation that made an array, read from its debug text.
fn operation(array: &MpmdArray) -> u64 {
    let text = format!("{array:?}");
    text.rsplit("operation ")
        .next()
        .and_then(|end| end.trim_end_matches(')').parse().ok())
        .expect("it is placed")
}

#[test]
fn host_values_move_first_then_one_device_set_after_another() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 4, 11, |p| {
            let (left, right) = (mesh_at(p, &[("x", 2)], 0)?, mesh_at(p, &[("x", 2)], 2)?);
            let turned = p.mesh_of(&[("x", 2)], &[DeviceId(1), DeviceId(0)])?;
            let whole = values(&[4, 8], DType::F32);
            let host = MpmdArray::from_host(whole.clone());
            let a = p.device_put(&host, left.sharding(spec!["x"]))?;
            let b = p.device_put(&host, right.replicated())?;
            let c = p.device_put(&host, turned.sharding(spec![None, "x"]))?;
            let before = p.operations();
            let tree = ((a, b), vec![c, host]);
            let all = p.mesh(&[("x", 4)])?;
            let (rows, columns) = (all.sharding(spec!["x"]), all.sharding(spec![None, "x"]));
            let ((a, b), rest) = p.reshard(
                &tree,
                (&rows, vec![&columns, &rows]),
                MoveOptions::default(),
            )?;
            let (c, d) = (&rest[0], &rest[1]);
            let order = [d, &a, c, &b].map(operation);
            assert_eq!(order, [1, 2, 3, 4].map(|place| before + place));
            for (array, sharding) in [(&a, &rows), (&b, &rows), (c, &columns), (d, &rows)] {
                assert_eq!(array.sharding(), Some(sharding));
                check(p, array, &whole)?;
            }
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

/// A sharding, as (mesh axes with sizes, spec).
type Side = (Vec<(&'static str, usize)>, Spec);

/// Returns (source sharding, target sharding, shape) for pairs that have an intermediate sharding.
/// Both divide the shape.
fn pairs_with_an_intermediate() -> Vec<(Side, Side, Vec<usize>)> {
    vec![
        (
            (vec![("fsdp", 8), ("tp", 1)], spec!["fsdp", "tp"]),
            (vec![("fsdp", 1), ("tp", 4)], spec!["fsdp", "tp"]),
            vec![8, 8],
        ),
        (
            (vec![("x", 8)], spec!["x", None]),
            (vec![("y", 4)], spec![None, "y"]),
            vec![8, 4],
        ),
        (
            (vec![("x", 8)], spec!["x", None]),
            (vec![("y", 4)], spec![]),
            vec![16, 3],
        ),
        (
            (vec![("a", 2), ("b", 4)], spec!["a", "b"]),
            (vec![("y", 1)], spec![None, None]),
            vec![4, 8],
        ),
        (
            (vec![("a", 2), ("b", 4)], spec![None, "b"]),
            (vec![("y", 2)], spec!["y", None]),
            vec![6, 4],
        ),
        (
            (vec![("b", 4), ("a", 2)], spec!["b", None]),
            (vec![("y", 2)], spec![None, "y"]),
            vec![4, 6],
        ),
        (
            (vec![("a", 2), ("b", 2), ("c", 2)], spec!["a", "b", None]),
            (vec![("z", 2)], spec![None, None, "z"]),
            vec![2, 4, 2],
        ),
        (
            (vec![("a", 2), ("b", 2), ("c", 2)], spec!["a", ("b", "c")]),
            (vec![("z", 2)], spec![None, None]),
            vec![2, 8],
        ),
        (
            (vec![("b", 2), ("c", 2), ("a", 2)], spec!["a", ("b", "c")]),
            (vec![("z", 2)], spec![None, None]),
            vec![2, 8],
        ),
        (
            (vec![("a", 2), ("b", 6)], spec!["a", "b"]),
            (vec![("z", 3)], spec!["z", None]),
            vec![6, 6],
        ),
    ]
}

#[test]
fn moves_through_an_intermediate_give_the_direct_values() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 16, processes as u64, |p| {
            for (src, dst, shape) in pairs_with_an_intermediate() {
                let (src_mesh, dst_mesh) = (mesh_at(p, &src.0, 0)?, mesh_at(p, &dst.0, 12)?);
                let (src, dst) = (src_mesh.sharding(src.1), dst_mesh.sharding(dst.1));
                assert!(
                    find_intermediate_sharding(&src, &dst).is_ok(),
                    "{src} to {dst}"
                );
                let whole = values(&shape, DType::I32);
                let x = p.device_put(&MpmdArray::from_host(whole.clone()), &src)?;
                let options = MoveOptions::default();
                let direct = p.reshard(&x, &dst, options)?;
                let before = p.operations();
                let moved = p.reshard_with_intermediate_sharding(&x, &src, &dst, options)?;
                assert_eq!(p.operations(), before + 3, "gathered, one replica, onward");
                assert_eq!(moved.sharding(), Some(&dst));
                check(p, &direct, &whole)?;
                check(p, &moved, &whole)?;
                check(p, &x, &whole)?;
                let donated =
                    p.reshard_with_intermediate_sharding(&x, &src, &dst, options.donate(true))?;
                check(p, &donated, &whole)?;
                assert!(refusal(p.reshard(&x, &dst, options)).contains("was donated"));
            }
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn source_may_be_spelled_in_another_way() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 16, 5, |p| {
            let whole = values(&[8, 4], DType::F32);
            let (eight, square) = (
                mesh_at(p, &[("x", 8)], 0)?,
                mesh_at(p, &[("a", 2), ("b", 4)], 0)?,
            );
            let to = mesh_at(p, &[("y", 4)], 8)?.sharding(spec![None, "y"]);
            let x = p.device_put(
                &MpmdArray::from_host(whole.clone()),
                eight.sharding(spec!["x"]),
            )?;
            let options = MoveOptions::default();
            for from in [
                eight.sharding(spec!["x"]),
                eight.sharding(spec!["x", None]),
                square.sharding(spec![("a", "b")]),
            ] {
                let moved = p.reshard_with_intermediate_sharding(&x, &from, &to, options)?;
                check(p, &moved, &whole)?;
            }
            let before = p.operations();
            drop(p.reshard_with_intermediate_sharding(
                &x,
                eight.sharding(spec!["x"]),
                &to,
                options,
            )?);
            assert_eq!(
                p.operations(),
                before + 3,
                "a short spec has an intermediate, too"
            );
            let host = eight
                .sharding(spec!["x"])
                .with_memory_kind(MemoryKind::Host);
            for other in [square.sharding(spec![("b", "a")]), eight.replicated(), host] {
                let said = refusal(p.reshard_with_intermediate_sharding(&x, &other, &to, options));
                assert!(
                    said.contains(&format!("is said to come from {other}")),
                    "{said}"
                );
            }
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn a_function_of_the_caller_moves_the_first_replica() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 16, 5, |p| {
            let whole = values(&[16, 8], DType::F32);
            let host = MpmdArray::from_host(whole.clone());
            let from = mesh_at(p, &[("fsdp", 8), ("tp", 1)], 0)?.sharding(spec!["fsdp", "tp"]);
            let to = mesh_at(p, &[("fsdp", 1), ("tp", 4)], 8)?.sharding(spec!["fsdp", "tp"]);
            let direct = mesh_at(p, &[("x", 4)], 0)?.sharding(spec!["x"]);
            let x = p.device_put(&host, &from)?;
            let y = p.device_put(&host, &direct)?;
            let tree = (vec![x.clone(), y], host);
            let mut seen = Vec::new();
            let options = MoveOptions::default().donate(true);
            let source = (vec![&from, &direct], &direct);
            let (moved, last) = p.reshard_with_intermediate_sharding_by(
                &tree,
                source,
                &to,
                options,
                |p, moves| {
                    let texts = moves.iter().map(|(x, _)| x.sharding().unwrap().to_string());
                    seen.extend(texts);
                    moves.iter().map(|(x, to)| p.device_put(*x, *to)).collect()
                },
            )?;
            let split = "P(fsdp_intermediate_split, tp) on {fsdp_intermediate_replica:1, \
                         fsdp_intermediate_split:4, tp:1} devices [0, 1, 2, 3]";
            assert_eq!(seen, [split.to_owned(), direct.to_string()]);
            for z in moved.iter().chain([&last]) {
                assert_eq!(z.sharding(), Some(&to));
                check(p, z, &whole)?;
            }
            assert!(
                refusal(p.device_put(&x, &to)).contains("was donated"),
                "it was gathered"
            );
            check(p, &tree.0[1], &whole)?;
            let short = p.reshard_with_intermediate_sharding_by(
                &moved[0],
                &to,
                &from,
                MoveOptions::default(),
                |_, _| Ok(Vec::new()),
            );
            assert_eq!(refusal(short), "the function returned 0 arrays for 1");
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn moves_without_an_intermediate_are_direct() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 16, 5, |p| {
            let whole = values(&[24, 24], DType::F32);
            let host = MpmdArray::from_host(whole.clone());
            let on = |p: &Program, axes: &[(&str, usize)], first, spec| {
                Ok::<_, Error>(mesh_at(p, axes, first)?.sharding(spec))
            };
            let pairs = [
                (
                    on(p, &[("x", 8)], 0, spec!["x"])?,
                    on(p, &[("x", 4)], 12, spec!["x"])?,
                ),
                (
                    on(p, &[("x", 8)], 0, spec!["x"])?,
                    on(p, &[("y", 3)], 12, spec!["y"])?,
                ),
                (
                    on(p, &[("x", 8)], 0, spec!["x"])?,
                    on(p, &[("y", 4)], 12, spec!["y", None])?,
                ),
                (
                    on(p, &[("a", 3), ("b", 4)], 0, spec!["a", "b"])?,
                    on(p, &[("y", 2)], 12, spec!["y", None])?,
                ),
                (
                    on(p, &[("x", 4)], 0, spec!["x"])?,
                    Sharding::single_device(DeviceId(9)),
                ),
            ];
            let sources: Vec<MpmdArray> = pairs
                .iter()
                .map(|(src, _)| p.device_put(&host, src))
                .collect::<Result<_>>()?;
            let before = p.operations();
            let (from, to): (Vec<Sharding>, Vec<Sharding>) = pairs.into_iter().unzip();
            let moved =
                p.reshard_with_intermediate_sharding(&sources, from, to, MoveOptions::default())?;
            assert_eq!(
                p.operations(),
                before + 4,
                "the first and the third share one"
            );
            for array in &moved {
                check(p, array, &whole)?;
            }
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn donation_needs_memory_for_one_more_leaf_only() {
    let _limit = watchdog(60);
    const LEAVES: usize = 4;
    // Both devices hold 8 MiB of the tree. Resharding to columns takes 2 MiB more for each leaf.
    // Moving to device 0 takes 16 MiB there, and 2 more for the last leaf's source; without
    // donation 24.
    for (processes, between, budget) in [(1, false, 11), (2, false, 11), (1, true, 19)] {
        let budget = budget * MIB as u64;
        let simulation = Simulation::new(processes, 2).settings(|b| b.device_memory(budget));
        for donate in [true, false] {
            let results = simulation.run(|p| {
                let mesh = p.mesh(&[("x", 2)])?;
                let rows = mesh.sharding(spec!["x"]);
                let columns = mesh.sharding(spec![None, "x"]);
                let make = |p: &mut Program| {
                    p.array_from_fn(f32s([1024, 1024]), &rows, |region, mut view| {
                        Ok(view.fill(region.range(0).start as f32)?)
                    })
                };
                let tree: Vec<MpmdArray> = (0..LEAVES).map(|_| make(p)).collect::<Result<_>>()?;
                for array in &tree {
                    array.block_until_ready()?;
                }
                assert_eq!(p.memory().live, (LEAVES * 4 * MIB / processes) as u64);
                let options = MoveOptions::default().donate(donate);
                let moved = if between {
                    let one = mesh_at(p, &[("y", 1)], 0)?.replicated();
                    assert!(find_intermediate_sharding(&rows, &one).is_ok());
                    p.reshard_with_intermediate_sharding(&tree, &rows, &one, options)?
                } else {
                    p.reshard(&tree, &columns, options)?
                };
                for array in &moved {
                    array.block_until_ready()?;
                }
                for array in &moved {
                    for shard in array.addressable_shards()? {
                        let (values, width) =
                            (shard.data.to_vec::<f32>()?, shard.region.range(1).len());
                        let expected = |i: usize| (i / width / 512 * 512) as f32;
                        assert!(
                            values
                                .iter()
                                .enumerate()
                                .all(|(i, value)| *value == expected(i))
                        );
                    }
                }
                assert!(p.memory().peak <= budget * 2 / processes as u64);
                memory_falls_to(p, (LEAVES * 4 * MIB / processes) as u64);
                drop(tree);
                Ok(())
            });
            for result in results {
                match result {
                    Ok(()) => assert!(donate, "there was no room for two copies"),
                    Err(error) => {
                        assert!(!donate, "{error}");
                        assert_eq!(
                            error.failure().map(|f| f.kind),
                            Some(FailureKind::Memory),
                            "{error}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn without_alias_the_memory_is_fresh() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 8, 2, |p| {
            let mesh = mesh_at(p, &[("x", 4)], 0)?;
            let rows = mesh.sharding(spec!["x"]);
            let whole = values(&[8, 4], DType::F64);
            let x = p.device_put(&MpmdArray::from_host(whole.clone()), &rows)?;
            let tree = vec![x.clone(), MpmdArray::from_host(whole.clone())];
            for alias in [true, false] {
                let moved = p.reshard(&tree, &rows, MoveOptions::default().may_alias(alias))?;
                for array in &moved {
                    check(p, array, &whole)?;
                }
                if !x.is_fully_remote() {
                    for (a, b) in x
                        .addressable_shards()?
                        .iter()
                        .zip(moved[0].addressable_shards()?)
                    {
                        assert_eq!(a.data.bytes().as_ptr() == b.data.bytes().as_ptr(), alias);
                    }
                }
            }
            // The same through an intermediate: from device 0 to device 0.
            let one = mesh_at(p, &[("y", 1)], 0)?.replicated();
            let column = p
                .mesh_of(&[("x", 2)], &[DeviceId(0), DeviceId(1)])?
                .sharding(spec!["x"]);
            let x = p.device_put(&x, &column)?;
            let options = MoveOptions::default().may_alias(false);
            let y = p.reshard_with_intermediate_sharding(&x, &column, &one, options)?;
            check(p, &y, &whole)
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn an_error_in_the_last_leaf_moves_nothing() {
    let _limit = watchdog(60);
    let results = Simulation::new(2, 4).run(|p| {
        let mesh = p.mesh(&[("x", 4)])?;
        let (rows, columns) = (mesh.sharding(spec!["x"]), mesh.sharding(spec![None, "x"]));
        let whole = values(&[4, 8], DType::F32);
        let put = |p: &mut Program| p.device_put(&MpmdArray::from_host(whole.clone()), &rows);
        let tree = (
            put(p)?,
            vec![
                put(p)?,
                p.device_put(&MpmdArray::scalar(1.0f32), mesh.replicated())?,
            ],
        );
        let before = p.operations();
        let options = MoveOptions::default().donate(true);
        let mut said = Vec::new();

        said.push(refusal(p.reshard(&tree, &columns, options)));
        assert!(
            said[0].starts_with("\"1/1\": P(None, x) has 2 entries"),
            "{}",
            said[0]
        );
        let error = p
            .reshard(&tree, (&columns, vec![&columns]), options)
            .unwrap_err();
        assert!(
            matches!(&error, Error::Issue(issue) if matches!(issue.why, IssueProblem::Tree(_))),
            "{error}"
        );
        said.push(refusal::<()>(Err(error)));
        assert!(said[1].starts_with("not a prefix: at `1`"), "{}", said[1]);
        let nowhere = Mesh::new(&[("x", 1)], vec![DeviceId(4)])?.replicated();
        said.push(refusal(p.reshard(
            &tree,
            (&rows, vec![&rows, &nowhere]),
            options,
        )));
        assert_eq!(
            said[2],
            "\"1/1\": there is no device 4 in a job of 4 devices"
        );
        let twice = (tree.0.clone(), vec![tree.0.clone()]);
        said.push(refusal(p.reshard(&twice, &rows, options)));
        assert_eq!(
            said[3],
            "\"1/0\" is donated, and is the same array as \"0\""
        );

        let all = mesh.replicated();
        said.push(refusal(
            p.reshard_with_intermediate_sharding(&tree, &rows, &all, options),
        ));
        assert!(
            said[4].starts_with("\"1/1\": is sharded P() on {x:4}"),
            "{}",
            said[4]
        );
        assert!(said[4].contains("is said to come from P(x)"), "{}", said[4]);
        let from = (&rows, vec![&rows, &all]);
        said.push(refusal(p.reshard_with_intermediate_sharding(
            &tree, from, &columns, options,
        )));
        assert!(
            said[5].starts_with("\"1/1\": P(None, x) has 2 entries"),
            "{}",
            said[5]
        );
        let from = (&rows, (&rows, &all, &all));
        said.push(refusal(
            p.reshard_with_intermediate_sharding(&tree, from, &all, options),
        ));
        assert!(said[6].starts_with("not a prefix: at `1`"), "{}", said[6]);

        assert_eq!(p.operations(), before, "nothing was issued");
        check(p, &tree.0, &whole)?;
        check(p, &tree.1[0], &whole)?;
        Ok(said)
    });
    let said: Vec<Vec<String>> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(said[0], said[1]);
}

#[test]
fn a_function_of_the_caller_moves_each_group() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 4, 11, |p| {
            let (left, right) = (mesh_at(p, &[("x", 2)], 0)?, mesh_at(p, &[("x", 2)], 2)?);
            let whole = values(&[4, 8], DType::F32);
            let host = MpmdArray::from_host(whole.clone());
            let a = p.device_put(&host, left.sharding(spec!["x"]))?;
            let b = p.device_put(&host, right.replicated())?;
            let c = p.device_put(&host, left.replicated())?;
            let tree = (vec![a, b, c], host);
            let all = p.mesh(&[("x", 4)])?;
            let (rows, columns) = (all.sharding(spec!["x"]), all.sharding(spec![None, "x"]));
            let mut groups = Vec::new();
            // By way of columns.
            let (moved, last) = p.reshard_with(&tree, &rows, |p, moves| {
                groups.push(moves.len());
                let mut moved = Vec::new();
                for (x, to) in moves {
                    let between = p.device_put(*x, &columns)?;
                    moved.push(p.device_put(&between, *to)?);
                }
                Ok(moved)
            })?;
            assert_eq!(
                groups,
                [2, 1],
                "arrays on the same devices together, host values not"
            );
            for y in moved.iter().chain([&last]) {
                assert_eq!(y.sharding(), Some(&rows));
                check(p, y, &whole)?;
            }
            let short = p.reshard_with(&tree, &rows, |_, _| Ok(Vec::new()));
            assert_eq!(refusal(short), "the function returned 0 arrays for 2");
            let same = p.reshard_with(&tree, &rows, |_, moves| {
                Ok(moves.iter().map(|(x, _)| (*x).clone()).collect())
            });
            let said = refusal(same);
            assert!(said.contains("returned MpmdArray(f32[4,8]") && said.contains("as P(x)"));
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}
