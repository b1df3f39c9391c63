//! Arrays that are sums of their shards: `device_put` adds them in one fixed order, in any order of
//! arrival.

use std::time::Duration;

use super::simulations::simulation;
use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use half::{bf16, f16};
use mpmd_core::aval::{DType, Element};
use mpmd_core::prelude::*;
use mpmd_core::sharding::{MemoryKind, Sharding, Spec};
use mpmd_core::topology::{DeviceId, Mesh};
use num_complex::Complex;

/// Returns the term that the device at index `place` of the mesh adds to an element. Sums of the
/// terms depend on the order of additions.
fn part(place: usize, index: usize) -> f32 {
    ((index * 7 + place * 13) % 97) as f32 * 0.1 * 10f32.powi(place as i32 * 2 - 3)
}

/// Creates an array in which each device of the mesh has a partial sum over `axes`: [`part`] of its
/// elements, converted by `element`.
fn partial<T: Element>(
    p: &mut Program,
    mesh: &Mesh,
    (spec, axes): (Spec, &[&str]),
    shape: [usize; 2],
    element: impl Fn(f32) -> T + Send + Sync + 'static,
) -> Result<MpmdArray> {
    let like = MpmdArray::from_slice(&shape, &vec![element(0.0); shape[0] * shape[1]])?;
    let devices = mesh.devices().to_vec();
    let parts = fun("parts", like_first, move |cx, _, mut y| {
        let place = devices
            .iter()
            .position(|device| *device == cx.device())
            .expect("of the mesh");
        let region = y[0].region().clone();
        let columns = region.range(1);
        let indices = region
            .range(0)
            .flat_map(|i| columns.clone().map(move |j| i * shape[1] + j));
        let values = y[0].as_mut_slice::<T>()?.iter_mut();
        values
            .zip(indices)
            .for_each(|(value, index)| *value = element(part(place, index)));
        Ok(())
    });
    let to = mesh.sharding(spec).unreduced(axes)?;
    Ok(p.jit(parts)
        .on(mesh)
        .outputs(to)
        .build()?
        .call(p, vec![like])?
        .remove(0))
}

/// Returns the sum of an element's terms over the four places of the mesh, added in ascending
/// order.
fn total<T: Copy + std::ops::Add<Output = T>>(index: usize, element: impl Fn(f32) -> T) -> T {
    (1..4).fold(element(part(0, index)), |sum, place| {
        sum + element(part(place, index))
    })
}

fn check<T: Element + PartialEq + std::fmt::Debug>(
    array: &MpmdArray,
    expected: impl Fn(usize) -> T,
) -> Result<()> {
    if array.is_fully_remote() {
        return Ok(());
    }
    let width = array.shape()[1];
    for shard in array.addressable_shards()? {
        let columns = shard.region.range(1);
        let indices = shard
            .region
            .range(0)
            .flat_map(|i| columns.clone().map(move |j| i * width + j));
        let found = shard.data.as_slice::<T>()?;
        for (found, index) in found.iter().zip(indices) {
            assert_eq!(
                *found,
                expected(index),
                "element {index} on {}",
                shard.device
            );
        }
    }
    Ok(())
}

fn targets(p: &Program) -> Result<Vec<Sharding>> {
    let mesh = p.mesh(&[("x", 4)])?;
    let pair = p.mesh_of(&[("y", 2)], &[DeviceId(3), DeviceId(1)])?;
    Ok(vec![
        mesh.replicated(),
        mesh.sharding(spec!["x"]),
        mesh.sharding(spec![None, "x"]),
        pair.replicated(),
        pair.sharding(spec!["y"]),
        Sharding::single_device(DeviceId(2)),
    ])
}

#[test]
fn sums_have_the_same_bits_at_every_destination() {
    let _limit = watchdog(120);
    for (processes, seed) in [(1, 0), (2, 1), (2, 2), (4, 3), (4, 4), (4, 5)] {
        // Small, and large enough to be reduce-scattered first.
        for shape in [[8, 4], [512, 256]] {
            let simulation = simulation(processes, 4).delays(seed, Duration::from_millis(1));
            let results = simulation.run(|p| {
                let mesh = p.mesh(&[("x", 4)])?;
                let x = partial(p, &mesh, (spec![], &["x"]), shape, |v| v)?;
                for to in targets(p)? {
                    let y = p.device_put(&x, &to)?;
                    check(&y, |index| total(index, |v| v))?;
                }
                let x = partial(p, &mesh, (spec![], &["x"]), shape, bf16::from_f32)?;
                for to in targets(p)? {
                    let y = p.device_put(&x, &to)?;
                    check(&y, |index| total(index, bf16::from_f32))?;
                }
                Ok(())
            });
            results.into_iter().for_each(Result::unwrap);
        }
    }
}

#[test]
fn sums_over_one_axis_of_a_grid() {
    let _limit = watchdog(60);
    for result in simulation(2, 4)
        .delays(9, Duration::from_millis(2))
        .run(|p| {
            let grid = p.mesh(&[("a", 2), ("b", 2)])?;
            // Places 0 and 1 hold the two partial sums of the upper half.
            let x = partial(p, &grid, (spec!["a"], &["b"]), [4, 8], |v| v)?;
            let expected = |index: usize| {
                let first = if index < 16 { 0 } else { 2 };
                part(first, index) + part(first + 1, index)
            };
            for to in targets(p)? {
                let y = p.device_put(&x, &to)?;
                check(&y, expected)?;
            }
            Ok(())
        })
    {
        result.unwrap();
    }
}

#[test]
fn large_sums_are_scattered_and_then_gathered() {
    let _limit = watchdog(60);
    let results = simulation(4, 4).run(|p| {
        let mesh = p.mesh(&[("x", 4)])?;
        let shape = [512, 512];
        let bytes = 4 * (512 * 512) as u64;
        let x = partial(p, &mesh, (spec![], &["x"]), shape, |v| v)?;
        let before = p.operations();
        let y = p.device_put(&x, mesh.replicated())?;
        assert_eq!(p.operations(), before + 2);
        check(&y, |index| total(index, |v| v))?;
        // Each device sends a quarter of its sum to each other device, then its own quarter of the
        // total.
        let sent: u64 = p.metrics().bytes_sent.iter().sum();
        assert!(sent <= 2 * bytes * 3 / 4, "{sent} bytes are sent");
        // A tree is moved in the same two steps. The sends of the first move come before.
        y.block_until_ready()?;
        let before = (p.operations(), p.metrics().bytes_sent.iter().sum::<u64>());
        let z = p
            .reshard(&(x.clone(),), mesh.replicated(), MoveOptions::default())?
            .0;
        check(&z, |index| total(index, |v| v))?;
        let after = (p.operations(), p.metrics().bytes_sent.iter().sum::<u64>());
        assert!(
            after.0 == before.0 + 2 && after.1 - before.1 <= 2 * bytes * 3 / 4,
            "{before:?} to {after:?}"
        );
        // If each part is wanted once, one step moves no more.
        let before = p.operations();
        let rows = p.device_put(&x, mesh.sharding(spec!["x"]))?;
        assert_eq!(p.operations(), before + 1);
        check(&rows, |index| total(index, |v| v))
    });
    results.into_iter().for_each(Result::unwrap);
}

#[test]
fn equal_partial_sums_are_moved_without_adding() {
    let _limit = watchdog(60);
    for result in simulation(2, 4)
        .delays(5, Duration::from_millis(2))
        .run(|p| {
            let mesh = p.mesh(&[("x", 4)])?;
            let sums = mesh.replicated().unreduced(&["x"])?;
            let x = partial(p, &mesh, (spec![], &["x"]), [4, 4], |v| v)?;
            x.block_until_ready()?;
            let live = p.memory().live;
            let same = p.device_put(&x, &sums)?;
            same.block_until_ready()?;
            assert_eq!(p.memory().live, live, "it is the same memory");
            check(&p.device_put(&same, mesh.replicated())?, |index| {
                total(index, |v| v)
            })
        })
    {
        result.unwrap();
    }
}

/// Two steps would pay off for this array if anything were added: it is large, with two copies of
/// every partial sum.
#[test]
fn sums_moved_to_host_memory_stay_partial() {
    let _limit = watchdog(60);
    for result in simulation(2, 4)
        .delays(8, Duration::from_millis(2))
        .run(|p| {
            let grid = p.mesh(&[("a", 2), ("b", 2)])?;
            let shape = [512, 512];
            let x = partial(p, &grid, (spec![], &["b"]), shape, |v| v)?;
            let there = grid
                .replicated()
                .unreduced(&["b"])?
                .with_memory_kind(MemoryKind::Host);
            let before = p.operations();
            let y = p.device_put(&x, &there)?;
            assert_eq!(p.operations(), before + 1, "nothing is added up");
            y.block_until_ready()?;
            let other = p.metrics().bytes_sent[1 - p.process().index()];
            assert_eq!(other, 0, "each device has its own");
            let flags = ShapedArray::new(&shape, DType::Bool);
            let flags =
                MpmdArray::from_host(HostArray::from_bytes(flags, vec![1; 512 * 512].into())?);
            let flags = p.device_put(&flags, grid.replicated().unreduced(&["b"])?)?;
            p.device_put(&flags, &there)?.block_until_ready()?;
            // Places 0 and 1 are the two sums of one copy, 2 and 3 those of another.
            let z = p.device_put(&y, Sharding::single_device(DeviceId(0)))?;
            check(&z, |index| part(0, index) + part(1, index))
        })
    {
        result.unwrap();
    }
}

#[test]
fn values_become_one_sum_and_zeros() {
    let _limit = watchdog(60);
    for processes in [1, 2, 4] {
        for result in simulation(processes, 4)
            .delays(6, Duration::from_millis(2))
            .run(|p| {
                let mesh = p.mesh(&[("x", 4)])?;
                let sums = mesh.replicated().unreduced(&["x"])?;
                let values: Vec<i32> = (0..24).map(|i| i * i - 70).collect();
                let host = MpmdArray::from_slice(&[6, 4], &values)?;
                let placed = p.device_put(&host, Sharding::single_device(DeviceId(1)))?;
                let rows = p.device_put(
                    &host,
                    p.mesh_of(&[("y", 2)], &[DeviceId(0), DeviceId(3)])?
                        .sharding(spec!["y"]),
                )?;
                let expected = |index: usize| values[index];
                for x in [&host, &placed, &rows] {
                    let y = p.device_put(x, &sums)?;
                    // As other partial sums: one of them has the total.
                    let z = p.device_put(&y, mesh.sharding(spec![]).unreduced(&["x"])?)?;
                    let grid = p.mesh(&[("a", 2), ("b", 2)])?;
                    let other = p.device_put(&z, grid.sharding(spec!["b"]).unreduced(&["a"])?)?;
                    for sums in [&y, &z, &other] {
                        check(&p.device_put(sums, mesh.replicated())?, expected)?;
                    }
                }
                Ok(())
            })
        {
            result.unwrap();
        }
    }
}

/// `-0.0 + 0.0` is `0.0`: terms without a value must be `-0.0`.
#[test]
fn signs_of_zeros_survive_partial_sums() {
    let _limit = watchdog(60);
    for result in simulation(2, 4).run(signs_survive) {
        result.unwrap();
    }
}

/// Checks that zeros of both signs survive partial sums over the job's four devices.
pub(crate) fn signs_survive(p: &mut Program) -> Result<()> {
    fn check_signs<T: Element>(p: &mut Program, values: &[T]) -> Result<()> {
        let mesh = p.mesh(&[("x", 4)])?;
        let host = MpmdArray::from_slice(&[values.len()], values)?;
        for from in [mesh.replicated(), mesh.sharding(spec!["x"])] {
            let x = p.device_put(&host, &from)?;
            let sums = p.device_put(&x, mesh.replicated().unreduced(&["x"])?)?;
            let y = p.device_put(&sums, &from)?;
            for (shard, expected) in y.addressable_shards()?.iter().zip(x.addressable_shards()?) {
                assert_eq!(
                    shard.data.bytes()[..],
                    expected.data.bytes()[..],
                    "{}",
                    T::DTYPE
                );
            }
        }
        Ok(())
    }

    check_signs(p, &[-0.0f32, 0.0, -1.5, 2.0])?;
    check_signs(p, &[-0.0f64, 0.0, -1.5, 2.0])?;
    check_signs(p, &[-0.0, 0.0, -1.5, 2.0].map(bf16::from_f32))?;
    check_signs(p, &[-0.0, 0.0, -1.5, 2.0].map(f16::from_f32))?;
    let complex = [(-0.0f32, 0.0), (0.0, -0.0), (1.0, -0.0), (-0.0, -0.0)];
    check_signs(p, &complex.map(|(re, im)| Complex::new(re, im)))?;
    check_signs(p, &[0i32, -1, 5, 7])
}

#[test]
fn booleans_have_no_sum() {
    let mut results = simulation(2, 4)
        .delays(7, Duration::from_millis(2))
        .run(|p| {
            let mesh = p.mesh(&[("x", 4)])?;
            let sums = mesh.replicated().unreduced(&["x"])?;
            let flags = MpmdArray::from_host(HostArray::from_bytes(
                ShapedArray::new(&[2, 2], DType::Bool),
                vec![1, 0, 1, 0].into(),
            )?);
            let x = p.device_put(&flags, &sums)?;
            drop(p.device_put(&x, &sums)?);
            let before = p.operations();
            let error = p.device_put(&x, mesh.replicated()).unwrap_err().to_string();
            assert_eq!(p.operations(), before);
            Ok(error)
        });
    let errors: Vec<String> = results.drain(..).map(Result::unwrap).collect();
    assert!(
        errors[0].contains("partial sums of booleans cannot be added up"),
        "{}",
        errors[0]
    );
    assert_eq!(errors[0], errors[1]);
}
