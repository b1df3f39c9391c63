//! Cuts arrays along an axis of their mesh and joins them again, without moving data.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::common::arrays::{check, part, values};
use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::aval::DType;
use mpmd_core::prelude::*;
use mpmd_core::sharding::{MemoryKind, Sharding, Spec};
use mpmd_core::topology::{DeviceId, Mesh};
use mpmd_core::{Error, IssueProblem, Simulation, simulate};

const PROCESSES: [usize; 3] = [1, 2, 4];

/// Creates a mesh of eight devices with axis `x` of 4 and axis `y` of 2.
fn grid(p: &Program) -> Result<Mesh> {
    p.mesh(&[("x", 4), ("y", 2)])
}

fn keep() -> SplitOptions {
    SplitOptions::default()
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

/// Returns the given rows and columns of a matrix, the rows in the given order.
fn pick(whole: &HostArray, rows: &[usize], columns: Range<usize>) -> HostArray {
    let row = |row: &usize| part(whole, &Region::new(vec![*row..row + 1, columns.clone()]));
    let bytes: Vec<u8> = rows.iter().flat_map(row).collect();
    HostArray::from_bytes(
        ShapedArray::new(&[rows.len(), columns.len()], whole.dtype()),
        bytes.into(),
    )
    .unwrap()
}

fn devices(array: &MpmdArray) -> Vec<u32> {
    array
        .sharding()
        .expect("it is placed")
        .devices()
        .iter()
        .map(|device| device.0)
        .collect()
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

/// Splits an 8 by 6 array of `spec` along `axis`, and compares each part with `expected`: (devices,
/// rows, columns). Then joins the parts and checks that no byte was copied.
fn splits(
    p: &mut Program,
    spec: Spec,
    axis: &str,
    sections: Sections,
    expected: &[(&[u32], &[usize], Range<usize>)],
) -> Result<()> {
    let whole = values(&[8, 6], DType::I32);
    let sharding = grid(p)?.sharding(spec.clone());
    let x = p.device_put(&MpmdArray::from_host(whole.clone()), &sharding)?;
    let before = p.operations();
    let parts = p.split_by_mesh_axis(&x, axis, sections, keep())?;
    assert_eq!(p.operations(), before + 1, "one operation");
    assert_eq!(parts.len(), expected.len());
    for (array, (on, rows, columns)) in parts.iter().zip(expected) {
        assert_eq!(devices(array), *on);
        assert_eq!(array.sharding().and_then(Sharding::spec), Some(&spec));
        assert_eq!(
            array.sharding().unwrap().mesh().unwrap().axis_names(),
            ["x", "y"]
        );
        check(p, array, &pick(&whole, rows, columns.clone()))?;
    }
    let again = p.concatenate_by_mesh_axis(&parts, axis, keep())?;
    assert_eq!(again.sharding(), Some(&sharding));
    check(p, &again, &whole)?;
    // No byte has moved.
    if !x.is_fully_remote() {
        for (a, b) in x
            .addressable_shards()?
            .iter()
            .zip(again.addressable_shards()?)
        {
            assert_eq!(
                (a.device, a.data.bytes().as_ptr()),
                (b.device, b.data.bytes().as_ptr())
            );
        }
    }
    Ok(())
}

#[test]
fn every_part_has_its_devices_and_its_values() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 8, processes as u64, |p| {
            let all = [0, 1, 2, 3, 4, 5, 6, 7];
            let (evens, odds) = ([0, 2, 4, 6], [1, 3, 5, 7]);
            splits(
                p,
                spec!["x", "y"],
                "x",
                Sections::Each,
                &[
                    (&[0, 1], &[0, 1], 0..6),
                    (&[2, 3], &[2, 3], 0..6),
                    (&[4, 5], &[4, 5], 0..6),
                    (&[6, 7], &[6, 7], 0..6),
                ],
            )?;
            splits(
                p,
                spec!["x", "y"],
                "x",
                [1].into(),
                &[
                    (&[0, 1], &[0, 1], 0..6),
                    (&[2, 3, 4, 5, 6, 7], &[2, 3, 4, 5, 6, 7], 0..6),
                ],
            )?;
            splits(
                p,
                spec!["x", "y"],
                "x",
                2.into(),
                &[
                    (&[0, 1, 2, 3], &[0, 1, 2, 3], 0..6),
                    (&[4, 5, 6, 7], &[4, 5, 6, 7], 0..6),
                ],
            )?;
            splits(
                p,
                spec!["x", "y"],
                "y",
                Sections::Each,
                &[(&[0, 2, 4, 6], &all, 0..3), (&[1, 3, 5, 7], &all, 3..6)],
            )?;
            // Not divided over the axis: replicas.
            splits(
                p,
                spec!["x", None],
                "y",
                2.into(),
                &[(&[0, 2, 4, 6], &all, 0..6), (&[1, 3, 5, 7], &all, 0..6)],
            )?;
            // Divided over both: strided blocks along the minor axis, runs along the major one.
            splits(
                p,
                spec![("x", "y"), None],
                "y",
                Sections::Each,
                &[(&[0, 2, 4, 6], &evens, 0..6), (&[1, 3, 5, 7], &odds, 0..6)],
            )?;
            splits(
                p,
                spec![("x", "y"), None],
                "x",
                2.into(),
                &[
                    (&[0, 1, 2, 3], &[0, 1, 2, 3], 0..6),
                    (&[4, 5, 6, 7], &[4, 5, 6, 7], 0..6),
                ],
            )?;
            splits(
                p,
                spec![("y", "x"), None],
                "x",
                [1, 3].into(),
                &[
                    (&[0, 1], &[0, 4], 0..6),
                    (&[2, 3, 4, 5], &[1, 2, 5, 6], 0..6),
                    (&[6, 7], &[3, 7], 0..6),
                ],
            )
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn trees_are_cut_and_joined_leaf_by_leaf() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 8, 7, |p| {
            let mesh = grid(p)?;
            let [a, b, c] = [
                values(&[8, 6], DType::F32),
                values(&[4], DType::Bf16),
                values(&[0, 2], DType::U8),
            ];
            let tree = (
                vec![
                    MpmdArray::from_host(a.clone()),
                    MpmdArray::from_host(b.clone()),
                ],
                MpmdArray::from_host(c.clone()),
            );
            let over = |spec| Sharding::named(mesh.clone(), spec, MemoryKind::Device);
            let specs = (
                vec![over(spec!["y", "x"]), over(spec!["x"])],
                over(spec![None, "y"]),
            );
            // 6 columns are not divisible by 4.
            assert!(p.device_put(&tree, specs.clone()).is_err());
            let specs = (
                vec![over(spec![("y", "x"), None]), over(spec!["x"])],
                over(spec![None, "y"]),
            );
            let x = p.device_put(&tree, specs)?;
            for array in [&x.0[0], &x.0[1], &x.1] {
                array.block_until_ready()?;
            }
            let before = (p.operations(), p.memory().live);
            let parts = p.split_by_mesh_axis(&x, "x", Sections::Each, keep())?;
            assert_eq!(parts.len(), 4);
            assert_eq!(parts[3].0[0].shape(), [2, 6]);
            assert_eq!(parts[3].0[1].shape(), [1]);
            assert_eq!(parts[3].1.shape(), [0, 2]);
            let donating = keep().donate(true);
            let front = p.concatenate_by_mesh_axis(&parts[..3], "x", donating)?;
            assert_eq!(front.0[0].shape(), [6, 6]);
            assert!(
                refusal(p.device_put(&parts[1].0[1], mesh.replicated())).contains("was donated")
            );
            let whole = p.concatenate_by_mesh_axis(&[front, parts[3].clone()], "x", donating)?;
            assert_eq!(p.operations(), before.0 + 3);
            for (array, values) in [(&whole.0[0], &a), (&whole.0[1], &b), (&whole.1, &c)] {
                check(p, array, values)?;
            }
            memory_falls_to(p, before.1);
            check(p, &x.0[0], &a)?;
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn a_donated_source_ends_and_its_memory_belongs_to_the_parts() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 8, 3, |p| {
            let mesh = grid(p)?;
            let shape = [64, 256];
            let x = p.array_from_fn(
                f32s(shape),
                mesh.sharding(spec!["x", "y"]),
                |_, mut view| Ok(view.fill(2.0f32)?),
            )?;
            let clone = x.clone();
            let parts = p.split_by_mesh_axis(&x, "y", Sections::Each, keep().donate(true))?;
            let error = refusal(p.split_by_mesh_axis(&clone, "y", Sections::Each, keep()));
            assert!(error.contains("was donated to operation 2"), "{error}");
            let [left, right] = &parts[..] else {
                panic!("two parts")
            };
            left.block_until_ready()?;
            right.block_until_ready()?;
            let all = p.memory().live;
            assert_eq!(all, (shape[0] * shape[1] * 4 / processes) as u64);
            drop(parts);
            // The handle of the source still exists, but holds no memory.
            memory_falls_to(p, 0);
            drop(x);
            Ok(())
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "a table of cases")]
fn invalid_cuts_and_joins_are_refused_without_effect() {
    let _limit = watchdog(60);
    let results = Simulation::new(2, 8).run(|p| {
        let mesh = grid(p)?;
        let host = MpmdArray::from_host(values(&[8, 6], DType::I32));
        let x = p.device_put(&host, mesh.sharding(spec!["x", "y"]))?;
        let single = p.device_put(&host, Sharding::single_device(DeviceId(0)))?;
        let turned = p.mesh(&[("x", 2), ("y", 4)])?;
        let other = p.device_put(&host, turned.sharding(spec!["x"]))?;
        let before = p.operations();
        let mut said = Vec::new();
        for sections in [
            3.into(),
            0.into(),
            [0].into(),
            [4].into(),
            [2, 2].into(),
            Sections::At(vec![3, 1]),
        ] {
            said.push(refusal(p.split_by_mesh_axis(
                &x,
                "x",
                sections,
                keep().donate(true),
            )));
        }
        for (i, part) in [
            "3 equal parts",
            "0 equal parts",
            "[0]",
            "[4]",
            "[2, 2]",
            "[3, 1]",
        ]
        .iter()
        .enumerate()
        {
            assert!(
                said[i].contains(part) && said[i].contains("axis `x` of {x:4, y:2}"),
                "{}",
                said[i]
            );
        }
        let z = refusal(p.split_by_mesh_axis(&x, "z", Sections::Each, keep()));
        assert_eq!(
            z,
            "there is no axis `z` in {x:4, y:2} devices [0, 1, 2, 3, 4, 5, 6, 7]"
        );
        let uncommitted =
            refusal(p.split_by_mesh_axis(&vec![x.clone(), host.clone()], "x", 2, keep()));
        assert!(
            uncommitted.starts_with("\"1\": i32[8,6] is uncommitted"),
            "{uncommitted}"
        );
        let unmeshed = refusal(p.split_by_mesh_axis(&vec![x.clone(), single], "x", 2, keep()));
        assert_eq!(unmeshed, "\"1\": device 0 is not over the axes of a mesh");
        let two = refusal(p.split_by_mesh_axis(&vec![x.clone(), other], "x", 2, keep()));
        assert!(
            two.starts_with("\"1\": is over mesh {x:2, y:4} devices ["),
            "{two}"
        );
        let twice =
            refusal(p.split_by_mesh_axis(&(x.clone(), x.clone()), "x", 2, keep().donate(true)));
        assert_eq!(twice, "\"1\" is donated, and is the same array as \"0\"");
        said.extend([z, uncommitted, unmeshed, two, twice]);
        assert_eq!(p.operations(), before, "nothing was issued");

        let parts = p.split_by_mesh_axis(&x, "x", Sections::Each, keep())?;
        let before = p.operations();
        let none: [MpmdArray; 0] = [];
        let mut join = |trees: &[MpmdArray], axis: &str| {
            refusal(p.concatenate_by_mesh_axis(trees, axis, keep().donate(true)))
        };
        let nothing = join(&none, "x");
        assert_eq!(nothing, "there is no tree to concatenate");
        let shared = join(&[parts[0].clone(), parts[0].clone()], "x");
        assert_eq!(shared, "device 0 is listed twice");
        let axis = join(&parts[..2], "z");
        assert_eq!(axis, "there is no axis `z` in {x:1, y:2} devices [0, 1]");
        let sizes = join(&[parts[0].clone(), x.clone()], "y");
        let [whole, part] = [
            "{x:4, y:2} devices [0, 1, 2, 3, 4, 5, 6, 7]",
            "{x:1, y:2} devices [0, 1]",
        ];
        assert_eq!(
            sizes,
            format!("mesh {whole} cannot follow {part} along axis `y`")
        );
        let half = p.mesh_of(&[("x", 1), ("y", 2)], &[DeviceId(2), DeviceId(3)])?;
        let [spec, shape] = [
            p.device_put(
                &MpmdArray::from_host(values(&[2, 6], DType::I32)),
                half.sharding(spec!["x"]),
            )?,
            p.device_put(
                &MpmdArray::from_host(values(&[4, 6], DType::I32)),
                half.sharding(spec!["x", "y"]),
            )?,
        ];
        let mut join = |other: MpmdArray| {
            refusal(p.concatenate_by_mesh_axis(&[parts[0].clone(), other], "x", keep()))
        };
        let spec = join(spec);
        assert!(
            spec.starts_with("\"1\": is sharded P(x) on {x:1, y:2}"),
            "{spec}"
        );
        let shape = join(shape);
        assert!(
            shape.contains("i32[4,6] over {x:1, y:2} devices [2, 3] cannot follow i32[2,6]"),
            "{shape}"
        );
        let trees = [
            vec![parts[0].clone()],
            vec![parts[1].clone(), parts[2].clone()],
        ];
        let error = p.concatenate_by_mesh_axis(&trees, "x", keep()).unwrap_err();
        assert!(
            matches!(&error, Error::Issue(issue) if matches!(issue.why, IssueProblem::Tree(_))),
            "{error}"
        );
        assert_eq!(
            p.operations(),
            before + 2,
            "two were put, nothing else was issued"
        );
        said.extend([nothing, shared, axis, sizes, spec, shape, error.to_string()]);
        check(p, &x, &values(&[8, 6], DType::I32))?;
        Ok(said)
    });
    let said: Vec<Vec<String>> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(said[0], said[1]);
}

#[test]
fn partial_sums_stay_and_are_not_separated() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 8, 9, |p| {
            let mesh = grid(p)?;
            let rows = mesh.sharding(spec!["x"]);
            let sums = rows.unreduced(&["y"])?;
            let ones = fun("ones", like_first, |_, _, mut y| Ok(y[0].fill(1.0f32)?));
            let ones = p.jit(ones).on(&mesh).outputs(&sums).build()?;
            let x = p.device_put(&MpmdArray::from_host(values(&[8, 6], DType::F32)), &rows)?;
            let x = ones.call(p, vec![x])?.remove(0);
            let error = refusal(p.split_by_mesh_axis(&x, "y", Sections::Each, keep()));
            assert!(
                error.starts_with("holds partial sums over axis `y`"),
                "{error}"
            );
            let parts = p.split_by_mesh_axis(&x, "x", 2, keep())?;
            for part in &parts {
                assert_eq!(part.sharding().unwrap().unreduced_axes(), ["y"]);
                assert_eq!(part.shape(), [4, 6]);
                part.block_until_ready()?;
            }
            let error = refusal(p.concatenate_by_mesh_axis(&parts, "y", keep()));
            assert!(
                error.starts_with("\"0\": holds partial sums over axis `y`"),
                "{error}"
            );
            let again = p.concatenate_by_mesh_axis(&parts, "x", keep())?;
            assert_eq!(again.sharding(), Some(&sums));
            again.block_until_ready().map(drop)
        });
        results.into_iter().for_each(Result::unwrap);
    }
}

#[test]
fn array_of_shards_shares_their_memory() {
    let _limit = watchdog(60);
    for processes in PROCESSES {
        let results = simulate(processes, 8, processes as u64, |p| {
            let whole = values(&[8, 6], DType::I32);
            let sharding = grid(p)?.sharding(spec!["y"]);
            let layout = sharding.layout(&[8, 6]).unwrap();
            let mut shards = Vec::new();
            for (device, region) in layout.iter().collect::<Vec<_>>().into_iter().rev() {
                let rows: Vec<usize> = region.range(0).collect();
                let shard = MpmdArray::from_host(pick(&whole, &rows, 0..6));
                shards.push(p.device_put(&shard, Sharding::single_device(device))?);
            }
            let before = p.operations();
            let x = p.array_from_shards(&[8, 6], &sharding, &shards, keep())?;
            assert_eq!(
                (p.operations(), x.sharding()),
                (before + 1, Some(&sharding))
            );
            check(p, &x, &whole)?;
            for shard in if x.is_fully_remote() {
                Vec::new()
            } else {
                x.addressable_shards()?
            } {
                let own = shards
                    .iter()
                    .find(|own| devices(own) == [shard.device.0])
                    .unwrap();
                let own = own.addressable_shards()?.remove(0);
                assert_eq!(own.data.bytes().as_ptr(), shard.data.bytes().as_ptr());
            }

            let mut wrong = |sharding: &Sharding, shards: &[MpmdArray]| {
                refusal(p.array_from_shards(&[8, 6], sharding, shards, keep()))
            };
            assert_eq!(
                wrong(&sharding, &shards[1..]),
                "device 7 of P(y) on {x:4, y:2} devices [0, 1, 2, 3, 4, 5, 6, 7] has no shard"
            );
            let twice = [&shards[..7], &shards[..1]].concat();
            assert_eq!(
                wrong(&sharding, &twice),
                "\"7\": is on device 7, as is shard 0"
            );
            assert_eq!(
                wrong(&sharding.mesh().unwrap().replicated(), &shards),
                "\"0\": is i32[4,6], but device 7 has i32[8,6] of it"
            );
            assert_eq!(
                wrong(&sharding, &[x]),
                "\"0\": is on 8 devices: a shard is on one"
            );
            let host = MpmdArray::from_host(whole);
            assert!(wrong(&sharding, &[host]).contains("is uncommitted"));
            assert_eq!(wrong(&sharding, &[]), "there is no shard");
            let donate = SplitOptions::default().donate(true);
            let y = p.array_from_shards(&[8, 6], &sharding, &shards, donate)?;
            check(p, &y, &values(&[8, 6], DType::I32))?;
            let again = refusal(p.array_from_shards(&[8, 6], &sharding, &shards, keep()));
            assert!(again.contains("donated"), "{again}");
            Ok(())
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}

#[test]
fn trees_without_leaves_come_back_as_they_are() {
    let _limit = watchdog(60);
    let mut p = Program::builder().devices(2).alone().unwrap();
    let empty: Vec<MpmdArray> = Vec::new();
    assert_eq!(
        p.split_by_mesh_axis(&empty, "x", 7, keep()).unwrap().len(),
        1
    );
    assert!(
        p.concatenate_by_mesh_axis(&[empty.clone(), empty], "x", keep())
            .unwrap()
            .is_empty()
    );
    assert_eq!(p.operations(), 0);
    p.finish().unwrap();
}
