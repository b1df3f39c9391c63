//! Moves, computes on and reads arrays in chunks, in parts of any shape and as partial sums.

use std::collections::BTreeMap;

use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use mpmd_core::prelude::*;
use mpmd_core::sharding::{MemoryKind, Sharding};
use mpmd_core::topology::{DeviceId, Mesh};
use mpmd_core::{Error, Simulation, simulate};

fn ids(devices: &[u32]) -> Vec<DeviceId> {
    devices.iter().copied().map(DeviceId).collect()
}

fn chunk(dim: isize, devices: &[u32]) -> Sharding {
    Sharding::chunk(dim, ids(devices)).unwrap()
}

fn listed(shards: &[(u32, [(usize, usize); 2])]) -> Sharding {
    let shard = |(device, bounds): &(u32, [(usize, usize); 2])| {
        (
            DeviceId(*device),
            bounds.iter().copied().collect::<Region>(),
        )
    };
    Sharding::enumerated(shards.iter().map(shard).collect()).unwrap()
}

/// Returns `f32` values of this shape: each element is its row-major index.
fn counting(shape: &[usize]) -> HostArray {
    let values: Vec<f32> = (0..shape.iter().product::<usize>())
        .map(|i| i as f32)
        .collect();
    HostArray::from_bytes(
        f32s(shape),
        values
            .iter()
            .flat_map(|x| x.to_le_bytes())
            .collect::<Vec<_>>()
            .into(),
    )
    .unwrap()
}

/// Returns the values of one region of [`counting`], in row-major order of the region.
fn part(shape: &[usize], region: &Region) -> Vec<f32> {
    let mut at = vec![0];
    for (range, size) in region.ranges().zip(shape) {
        at = at
            .iter()
            .flat_map(|base| range.clone().map(move |i| base * size + i))
            .collect();
    }
    at.into_iter().map(|i| i as f32).collect()
}

/// Checks that this process holds exactly its shards of [`counting`], each value times `factor`.
fn check(p: &Program, array: &MpmdArray, factor: f32) -> Result<()> {
    let sharding = array.sharding().expect("it is placed").clone();
    let layout = sharding.layout(array.shape())?;
    let here = p.topology().devices_of(p.process());
    let expected = sharding
        .devices()
        .iter()
        .filter(|device| here.contains(device))
        .count();
    if expected == 0 {
        assert!(array.is_fully_remote() && array.to_host()?.is_none());
        return Ok(());
    }
    let shards = array.addressable_shards()?;
    assert_eq!(shards.len(), expected);
    for shard in shards {
        assert_eq!(Some(&shard.region), layout.region_of(shard.device));
        let values: Vec<f32> = part(array.shape(), &shard.region)
            .iter()
            .map(|x| x * factor)
            .collect();
        assert_eq!(
            shard.data.to_vec::<f32>()?,
            values,
            "{sharding} on device {}",
            shard.device
        );
    }
    Ok(())
}

/// Returns shardings of all kinds for arrays of 5 rows and 6 columns on up to four devices.
fn shardings(p: &Program) -> Result<Vec<Sharding>> {
    let grid = p.mesh(&[("x", 2), ("y", 2)])?;
    let column = p.mesh_of(&[("x", 3)], &ids(&[3, 1, 0]))?;
    Ok(vec![
        chunk(0, &[0, 1, 2, 3]),
        chunk(0, &[3, 1, 0, 2]),
        chunk(-2, &[2, 1]),
        chunk(1, &[1, 0, 3, 2]),
        chunk(-1, &[1, 3]).with_memory_kind(MemoryKind::Host),
        chunk(0, &[2]),
        // A spiral.
        listed(&[
            (0, [(0, 5), (0, 1)]),
            (3, [(0, 1), (1, 6)]),
            (1, [(1, 5), (5, 6)]),
            (2, [(1, 5), (1, 5)]),
        ]),
        listed(&[
            (1, [(0, 5), (2, 6)]),
            (0, [(3, 3), (1, 2)]),
            (3, [(0, 4), (0, 2)]),
            (2, [(4, 5), (0, 2)]),
        ]),
        grid.replicated(),
        grid.sharding(spec![None, "y"]),
        column.sharding(spec![None, "x"]),
        Sharding::single_device(DeviceId(2)).with_memory_kind(MemoryKind::Host),
    ])
}

#[test]
fn every_kind_moves_to_every_other() {
    let _limit = watchdog(120);
    let shape = [5, 6];
    for processes in [1, 2, 4] {
        let results = simulate(processes, 4, 1, |p| {
            let host = MpmdArray::from_host(counting(&shape));
            let all = shardings(p)?;
            for from in &all {
                let x = p.device_put(&host, from)?;
                let fill = |region: &Region, mut view: ViewMut<'_>| {
                    view.as_mut_slice::<f32>()?
                        .copy_from_slice(&part(&[5, 6], region));
                    Ok(())
                };
                let made = p.array_from_fn(f32s(shape), from, fill)?;
                check(p, &x, 1.0)?;
                check(p, &made, 1.0)?;
                for to in &all {
                    let y = p.device_put(&x, to)?;
                    check(p, &y, 1.0)?;
                }
                if processes == 1 {
                    let back = x.to_host()?.expect("all is here").to_vec::<f32>()?;
                    assert_eq!(back, part(&shape, &Region::full(&shape)), "{from}");
                }
            }
            Ok(())
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}

/// Checks the values of each device after moves between chunk shardings. The cases are PyTorch's,
/// including permutations that PyTorch gets wrong.
#[test]
fn chunks_move_as_in_the_reference() {
    let _limit = watchdog(60);
    type Held = [(u32, &'static [f32])];
    let cases: [(&[usize], Sharding, Sharding, &Held); 4] = [
        (
            &[4, 6],
            chunk(0, &[1, 0]),
            chunk(1, &[0, 1]),
            &[
                (0, &[0., 1., 2., 6., 7., 8., 12., 13., 14., 18., 19., 20.]),
                (1, &[3., 4., 5., 9., 10., 11., 15., 16., 17., 21., 22., 23.]),
            ],
        ),
        (
            &[5, 3],
            chunk(0, &[0, 1, 2, 3]),
            chunk(1, &[3, 1, 0, 2]),
            &[
                (3, &[0., 3., 6., 9., 12.]),
                (1, &[1., 4., 7., 10., 13.]),
                (0, &[2., 5., 8., 11., 14.]),
                (2, &[]),
            ],
        ),
        (
            &[5, 2],
            chunk(0, &[0, 1, 2]),
            chunk(0, &[2, 1, 0]),
            &[
                (2, &[0., 1., 2., 3.]),
                (1, &[4., 5., 6., 7.]),
                (0, &[8., 9.]),
            ],
        ),
        (
            &[13, 2],
            chunk(0, &[0, 1, 2]),
            chunk(0, &[1, 2, 0]),
            &[
                (1, &[0., 1., 2., 3., 4., 5., 6., 7., 8., 9.]),
                (2, &[10., 11., 12., 13., 14., 15., 16., 17., 18., 19.]),
                (0, &[20., 21., 22., 23., 24., 25.]),
            ],
        ),
    ];
    for processes in [1, 4] {
        let results = simulate(processes, 4, 1, |p| {
            let mut found = Vec::new();
            for (shape, from, to, _) in &cases {
                let x = p.device_put(&MpmdArray::from_host(counting(shape)), from)?;
                let y = p.device_put(&x, to)?;
                let shards = if y.is_fully_remote() {
                    Vec::new()
                } else {
                    y.addressable_shards()?
                };
                let values = shards
                    .iter()
                    .map(|shard| Ok((shard.device.0, shard.data.to_vec::<f32>()?)));
                found.push(values.collect::<Result<Vec<_>>>()?);
            }
            Ok(found)
        });
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        for (case, (shape, from, to, expected)) in cases.iter().enumerate() {
            let found: BTreeMap<u32, Vec<f32>> =
                results.iter().flat_map(|each| each[case].clone()).collect();
            let expected = expected
                .iter()
                .map(|(device, values)| (*device, values.to_vec()))
                .collect();
            assert_eq!(found, expected, "{shape:?} from {from} to {to}");
        }
    }
}

#[test]
fn kernels_run_on_chunks_and_lists() {
    let _limit = watchdog(60);
    for processes in [1, 2, 4] {
        let results = simulate(processes, 4, 1, |p| {
            let mesh = p.mesh(&[("x", 4)])?;
            let host = MpmdArray::from_host(counting(&[5, 6]));
            let double = || {
                fun("double", like_first, |_, x, mut y| {
                    let x = x[0].as_slice::<f32>()?;
                    y[0].as_mut_slice::<f32>()?
                        .iter_mut()
                        .zip(x)
                        .for_each(|(y, x)| *y = 2.0 * x);
                    Ok(())
                })
            };
            for sharding in shardings(p)?
                .into_iter()
                .filter(|sharding| sharding.devices().len() == 4)
            {
                let x = p.device_put(&host, &sharding)?;
                let jit = p
                    .jit(double())
                    .on(&mesh)
                    .inputs(&sharding)
                    .outputs(&sharding)
                    .build()?;
                let y = jit.call(p, vec![x])?.remove(0);
                check(p, &y, 2.0)?;
            }
            // Two notations of the same chunks are equal.
            let x = p.device_put(&host, chunk(-1, &[0, 1, 2, 3]))?;
            let columns = chunk(1, &[0, 1, 2, 3]);
            let jit = p
                .jit(double())
                .on(&mesh)
                .inputs(&columns)
                .outputs(&columns)
                .build()?;
            let y = jit.call(p, vec![x])?.remove(0);
            check(p, &y, 2.0)?;
            // An input may be on more devices than the kernel, even if its shard there is empty.
            let short = p.device_put(&host, chunk(0, &[0, 1, 2, 3]))?;
            let last = p.mesh_of(&[("x", 1)], &ids(&[3]))?;
            let count = fun(
                "count",
                |_| Ok(Signature::new(vec![f32s([])])),
                |_, x, mut y| Ok(y[0].fill(x[0].as_slice::<f32>()?.len() as f32)?),
            );
            let jit = p.jit(count).on(&last).outputs(last.replicated()).build()?;
            Ok(jit.call(p, vec![short])?[0]
                .to_host()?
                .map(|y| y.to_vec::<f32>())
                .transpose()?)
        });
        let counts: Vec<_> = results
            .into_iter()
            .filter_map(|result| result.unwrap())
            .collect();
        assert_eq!(counts, [[0.0]], "device 3 has no row");
    }
}

#[test]
fn microbatches_of_chunks() {
    let _limit = watchdog(60);
    for processes in [1, 4] {
        let results = simulate(processes, 4, 1, |p| {
            // Chunks of 2, 2, 2 and 0 rows.
            let host = MpmdArray::from_host(counting(&[6, 2]));
            let rows = p.device_put(&host, chunk(0, &[2, 0, 1, 3]))?;
            let mut found = Vec::new();
            for half in rows.microbatches(p, 0, 2)? {
                assert_eq!(half.shape(), [3, 2]);
                let shards = half.addressable_shards()?;
                let values = shards
                    .iter()
                    .map(|shard| Ok((shard.device.0, shard.data.to_vec::<f32>()?)));
                found.push(values.collect::<Result<Vec<_>>>()?);
            }
            let error = p.device_put(
                &MpmdArray::from_host(counting(&[9, 2])),
                chunk(0, &[0, 1, 2, 3]),
            )?;
            assert!(
                error.microbatches(p, 0, 3).is_ok(),
                "chunks of 3, 3, 3 and 0 rows"
            );
            assert!(error.microbatches(p, 0, 2).is_err());
            let list = listed(&[(0, [(0, 4), (0, 2)]), (1, [(4, 6), (0, 2)])]);
            let error = p
                .device_put(&host, list)?
                .microbatches(p, 0, 2)
                .unwrap_err();
            assert!(
                error
                    .to_string()
                    .contains("device 0 has [0..4, 0..2], which is past the end"),
                "{error}"
            );
            Ok(found)
        });
        let mut halves = [BTreeMap::new(), BTreeMap::new()];
        for found in results {
            for (half, values) in halves.iter_mut().zip(found.unwrap()) {
                half.extend(values);
            }
        }
        let [first, second] = halves;
        let of = |rows: [&[f32]; 4]| {
            (0..4)
                .zip(rows.map(<[f32]>::to_vec))
                .collect::<BTreeMap<u32, _>>()
        };
        assert_eq!(first, of([&[4., 5.], &[8., 9.], &[0., 1.], &[]]));
        assert_eq!(second, of([&[6., 7.], &[10., 11.], &[2., 3.], &[]]));
    }
}

/// A kernel writes partial sums because its output's sharding says so. A second kernel declares
/// them as input, gets each device's term, and adds the terms up itself.
#[test]
fn partial_sums_go_to_a_kernel_that_declares_them() {
    let _limit = watchdog(60);
    for processes in [1, 2, 4] {
        let results = Simulation::new(processes, 4).run(|p| {
            let mesh = p.mesh(&[("data", 2), ("model", 2)])?;
            let rows = mesh.sharding(spec!["data"]);
            let sums = rows.unreduced(&["model"])?;
            let write = fun(
                "write",
                |_| Ok(Signature::new(vec![f32s([4])])),
                |cx, _, mut y| Ok(y[0].fill(1.0 + cx.axis_index("model")? as f32)?),
            );
            let write = p.jit(write).on(&mesh).outputs(&sums).build()?;
            let add = fun(
                "add",
                |x| Ok(Signature::new(vec![x[0].clone()]).all_reduce("model", f32s([2]))),
                |cx, x, mut y| {
                    let y = y[0].as_mut_slice::<f32>()?;
                    y.copy_from_slice(x[0].as_slice()?);
                    cx.all_reduce("model", y)
                },
            );
            let add = p.jit(add).on(&mesh).inputs(&sums).outputs(&rows).build()?;
            let terms = write.call(p, vec![])?.remove(0);
            assert_eq!(terms.sharding(), Some(&sums));
            let same = p.device_put(&terms, &sums)?;
            let halves = terms.microbatches(p, 0, 2)?;
            assert_eq!(
                (halves[1].shape(), halves[1].sharding()),
                (&[2][..], Some(&sums))
            );
            let y = add.call(p, vec![same])?.remove(0);
            for shard in y.addressable_shards()? {
                assert_eq!(shard.data.to_vec::<f32>()?, [3.0, 3.0]);
            }
            // Each read is refused on every process, even on one without a shard of the array.
            let texts = [
                terms.to_host().map(drop).unwrap_err(),
                terms.addressable_shards().map(drop).unwrap_err(),
                halves[0].to_host().map(drop).unwrap_err(),
            ];
            for error in texts {
                assert!(matches!(error, Error::Read { .. }), "{error}");
                let expected = "put it to a sharding without unreduced axes first";
                assert!(error.to_string().contains(expected), "{error}");
            }
            let (sender, receiver) = std::sync::mpsc::channel();
            terms.then(move |values| sender.send(values.is_err()).unwrap_or_default());
            assert_eq!(
                receiver.recv_timeout(std::time::Duration::from_secs(30)),
                Ok(true)
            );
            Ok(())
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}

#[test]
fn partial_sum_reads_are_refused_without_a_local_shard() {
    let _limit = watchdog(60);
    let results = simulate(2, 2, 1, |p| {
        let one = Mesh::new(&[("x", 1)], ids(&[0])).unwrap();
        let sums = one.replicated().unreduced(&["x"])?;
        let write = fun(
            "write",
            |_| Ok(Signature::new(vec![f32s([2])])),
            |_, _, mut y| Ok(y[0].fill(1.0f32)?),
        );
        let terms = p
            .jit(write)
            .on(&one)
            .outputs(&sums)
            .build()?
            .call(p, vec![])?
            .remove(0);
        terms.block_until_ready()?;
        Ok(terms.to_host().map(drop).unwrap_err().to_string())
    });
    let texts: Vec<String> = results.into_iter().map(Result::unwrap).collect();
    assert_eq!(texts[0], texts[1], "the processes say the same");
    assert!(texts[0].contains("jit write on {x:1}"), "{}", texts[0]);
}
