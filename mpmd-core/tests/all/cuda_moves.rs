//! Moves arrays to, from and between CUDA devices: on a software driver, or on real devices
//! (`MPMD_TEST_GPU=1`).

use std::future::IntoFuture;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::common::arrays::check;
use crate::common::chains::chain;
use crate::common::cuda::{CPU, CUDA};
use crate::common::watchdog;
use crate::partial_sums::signs_survive;
use crate::spans::Log;
use half::{bf16, f16};
use mpmd_core::Simulation;
use mpmd_core::aval::DType;
use mpmd_core::prelude::*;
use mpmd_core::sharding::{MemoryKind, Sharding};
use mpmd_core::topology::{DeviceId, DeviceKind};

fn alone(devices: usize) -> Program {
    Program::builder()
        .devices(devices)
        .device_kinds(&[CUDA])
        .alone()
        .unwrap()
}

/// Returns an `f32` array in which each element is its row-major index.
fn numbered(shape: &[usize]) -> HostArray {
    let count = shape.iter().product::<usize>();
    HostArray::from_slice(shape, &(0..count).map(|i| i as f32).collect::<Vec<_>>()).unwrap()
}

/// Creates the array in which each element is its row-major index, filled by the owners of its
/// shards.
fn made(p: &mut Program, shape: [usize; 2], to: &Sharding) -> Result<MpmdArray> {
    p.array_from_fn(f32s(shape), to, move |region, mut view| {
        let columns = region.range(1);
        let values = region
            .range(0)
            .flat_map(|i| columns.clone().map(move |j| (i * shape[1] + j) as f32));
        view.as_mut_slice::<f32>()?
            .iter_mut()
            .zip(values)
            .for_each(|(to, value)| *to = value);
        Ok(())
    })
}

#[test]
fn host_values_of_any_size_come_back_from_a_device() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(60);
    let mut p = alone(2);
    let mesh = p.mesh(&[("x", 2)]).unwrap();
    // Copied inline; in several chunks; empty; and a single element.
    for shape in [vec![6, 5], vec![2, 2_700_001], vec![0, 4], vec![]] {
        let host = numbered(&shape);
        let mut shardings = vec![mesh.replicated(), Sharding::single_device(DeviceId(1))];
        if shape.len() == 2 {
            shardings.push(mesh.sharding(spec!["x"]));
        }
        for to in shardings {
            for kind in [MemoryKind::Device, MemoryKind::Host] {
                let x = p
                    .device_put(
                        &MpmdArray::from_host(host.clone()),
                        to.with_memory_kind(kind),
                    )
                    .unwrap();
                check(&p, &x, &host).unwrap();
                assert_eq!(
                    x.to_host().unwrap().unwrap().bytes()[..],
                    host.bytes()[..],
                    "{to}"
                );
                assert!(x.is_complete());
            }
        }
    }
    p.finish().unwrap();
}

#[test]
fn arrays_are_made_split_joined_donated_and_read() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2", "SOFTCUDA_PACE" = "lazy") {
        return;
    }
    let _limit = watchdog(60);
    let mut p = alone(2);
    let mesh = p.mesh(&[("x", 2)]).unwrap();
    let host = numbered(&[8, 6]);
    let x = made(&mut p, [8, 6], &mesh.sharding(spec!["x"])).unwrap();
    check(&p, &x, &host).unwrap();
    let (send, read) = channel();
    x.then(move |values| send.send(values.unwrap().to_vec::<f32>().unwrap()).unwrap());
    let columns = p.device_put(&x, mesh.sharding(spec![None, "x"])).unwrap();
    check(&p, &columns, &host).unwrap();
    // Parts that are contiguous in their shard, and parts that are not.
    for (dim, array) in [(0, &x), (1, &x), (0, &columns), (1, &columns)] {
        let parts = array
            .microbatches(&mut p, dim, if dim == 0 { 2 } else { 3 })
            .unwrap();
        for (j, part) in parts.iter().enumerate() {
            for shard in part.addressable_shards().unwrap() {
                let whole = array.addressable_shards().unwrap();
                let whole = whole
                    .iter()
                    .find(|other| other.device == shard.device)
                    .unwrap();
                let (rows, width) = (shard.data.shape().to_vec(), whole.data.shape()[1]);
                let values = whole.data.to_vec::<f32>().unwrap();
                let from = |at: usize| if dim == at { j * rows[at] } else { 0 };
                let expected: Vec<f32> = (0..rows[0])
                    .flat_map(|i| {
                        let begin = (i + from(0)) * width + from(1);
                        values[begin..begin + rows[1]].to_vec()
                    })
                    .collect();
                assert_eq!(
                    shard.data.to_vec::<f32>().unwrap(),
                    expected,
                    "part {j} along {dim}"
                );
            }
        }
    }
    let halves = p
        .split_by_mesh_axis(&x, "x", 2, Default::default())
        .unwrap();
    let joined = p
        .concatenate_by_mesh_axis(&halves, "x", Default::default())
        .unwrap();
    check(&p, &joined, &host).unwrap();
    let moved = p
        .device_put_with(
            &joined,
            mesh.replicated(),
            MoveOptions::default().donate(true),
        )
        .unwrap();
    assert!(joined.to_host().is_err());
    check(&p, &moved, &host).unwrap();
    assert_eq!(
        read.recv_timeout(Duration::from_secs(30)).unwrap(),
        host.to_vec::<f32>().unwrap()
    );
    drop((x, columns, halves, joined));
    let awaited = futures::executor::block_on(moved.into_future()).unwrap();
    check(&p, &awaited, &host).unwrap();
    // Only the end of the program waits for a running callback.
    let (send, read) = channel();
    awaited.then(move |values| send.send(values.is_ok()).unwrap());
    p.finish().unwrap();
    assert_eq!(read.try_recv(), Ok(true));
}

/// Runs a chain of moves for each seed: whole, in parts, packed, partial sums, donated, in either
/// memory. Processes are with and without CUDA devices. Panics if a value changes.
fn chains(seeds: std::ops::Range<u64>, zero_copy: bool) {
    let _limit = watchdog(110);
    let simulation = |processes, devices| {
        let simulation = Simulation::new(processes, devices);
        if zero_copy {
            simulation.zero_copy(&vec![0; processes])
        } else {
            simulation
        }
    };
    seeds.for_each(|seed| chain(seed, true, simulation, zero_copy));
}

#[test]
fn chains_with_copies_keep_their_values() {
    if !softcuda::again!("SOFTCUDA_DEVICES" = "3") {
        chains(0..12, false);
    }
}

#[test]
fn chains_with_zero_copy_transfers_keep_their_values() {
    if !softcuda::again!("SOFTCUDA_DEVICES" = "3") {
        chains(0..24, true);
    }
}

#[test]
fn chains_on_lazy_streams_keep_their_values() {
    if !softcuda::again!(
        "SOFTCUDA_DEVICES" = "3",
        "SOFTCUDA_PACE" = "lazy",
        "SOFTCUDA_RACES" = "abort"
    ) {
        chains(24..36, true);
    }
}

#[test]
fn chains_on_an_irregular_device_keep_their_values() {
    if !softcuda::again!("SOFTCUDA_PACE" = "seed:7", "SOFTCUDA_RACES" = "abort") {
        chains(36..48, true);
    }
}

#[test]
fn zero_copy_transfers_are_not_staged_and_others_are() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(60);
    // Expected: whether the sender, and the receiver, stages the array in host memory.
    for (kinds, zero_copy, expected) in [
        ([CUDA, CUDA], true, [false, false]),
        ([CUDA, CUDA], false, [true, true]),
        ([CUDA, CPU], true, [true, false]),
        ([CUDA, CPU], false, [true, false]),
        ([CPU, CUDA], true, [false, true]),
        ([CPU, CPU], true, [false, false]),
    ] {
        let simulation = Simulation::new(2, 2).settings(|b| b.device_kinds(&kinds));
        let simulation = if zero_copy {
            simulation.zero_copy(&[0, 0])
        } else {
            simulation
        };
        let results = simulation.run(|p| {
            let host = numbered(&[256, 1000]);
            let [here, there] = [0, 1].map(|device| Sharding::single_device(DeviceId(device)));
            let x = made(p, [256, 1000], &here)?;
            x.block_until_ready()?;
            p.forget_memory_peak();
            let before = p.memory().staging_recent_peak;
            let y = p.device_put(&x, &there)?;
            y.block_until_ready()?;
            if p.process().0 == 0 {
                // Waits until the receiver has the array, so that the transfer is over.
                p.device_put(&y, &here)?.block_until_ready()?;
            } else {
                let staged = p.memory().staging_recent_peak > before;
                p.device_put(&y, &here)?.block_until_ready()?;
                check(p, &y, &host)?;
                return Ok(staged);
            }
            let staged = p.memory().staging_recent_peak > before;
            Ok(staged)
        });
        let found: Vec<bool> = results.into_iter().map(Result::unwrap).collect();
        if kinds[0] == CUDA || !zero_copy {
            assert_eq!(found, expected, "{kinds:?}, handed over: {zero_copy}");
        } else {
            // On the way back the lender's device packs the array.
            assert_eq!(found[1], expected[1], "{kinds:?}, handed over: {zero_copy}");
        }
    }
}

/// Returns the term that the device at index `place` of the mesh adds to an element. Sums of the
/// terms depend on the order of additions.
fn share(place: usize, index: usize) -> f32 {
    ((index * 7 + place * 13) % 97) as f32 * 0.1 * 10f32.powi(place as i32 * 2 - 3)
}

/// A kernel that writes each device's term of a sum over all devices; see `share`.
struct Shares;

impl Kernel for Shares {
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(&self, cx: &mut Context<'_>, x: View<'_>, mut y: ViewMut<'_>) -> Result<()> {
        let (place, count) = (cx.device().0 as usize, x.region().elements());
        fn fill<T: mpmd_core::aval::Element>(
            y: &mut ViewMut<'_>,
            of: impl Fn(usize) -> T,
        ) -> Result<()> {
            y.as_mut_slice::<T>()?
                .iter_mut()
                .enumerate()
                .for_each(|(i, value)| *value = of(i));
            Ok(())
        }
        assert_eq!(count, y.region().elements());
        match x.global().dtype() {
            DType::F32 => fill(&mut y, |i| share(place, i)),
            DType::F64 => fill(&mut y, |i| f64::from(share(place, i)) / 3.0),
            DType::Bf16 => fill(&mut y, |i| bf16::from_f32(share(place, i))),
            DType::F16 => fill(&mut y, |i| f16::from_f32(share(place, i))),
            _ => fill(&mut y, |i| (share(place, i) * 1000.0) as i32),
        }
    }
}

/// Partial sums move from CPU devices to CUDA devices, in several orders of arrival. The sums must
/// have the bits of a run on CPU devices only.
#[test]
fn partial_sums_have_cpu_bits_in_any_arrival_order() {
    // Without the compile cache: other versions may have filled it.
    if softcuda::again!("SOFTCUDA_PACE" = "seed:11", "SOFTCUDA_RACES" = "abort") {
        return;
    }
    let _limit = watchdog(110);
    let run = |kind: DeviceKind, zero_copy: bool, seed: u64| {
        let kinds = [CPU, CPU, kind, kind];
        let mut simulation = Simulation::new(4, 4).settings(|b| b.device_kinds(&kinds));
        simulation = simulation.delays(seed, Duration::from_millis(2));
        if zero_copy {
            simulation = simulation.zero_copy(&[0; 4]);
        }
        let results = simulation.run(|p| {
            let givers = p.mesh_of(&[("x", 2)], &[0, 1].map(DeviceId))?;
            let takers = p.mesh_of(&[("x", 2)], &[2, 3].map(DeviceId))?;
            let shares = p
                .jit(Shares)
                .on(&givers)
                .outputs(givers.replicated().unreduced(&["x"])?)
                .build()?;
            let mut sums = Vec::new();
            for dtype in [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::I32] {
                let like = HostArray::from_bytes(
                    ShapedArray::new(&[16, 24], dtype),
                    vec![0; 16 * 24 * dtype.size()].into(),
                )?;
                let x = shares.call(p, MpmdArray::from_host(like))?;
                for to in [
                    takers.replicated(),
                    takers.sharding(spec!["x"]),
                    takers.sharding(spec![None, "x"]),
                ] {
                    let sum = p.device_put(&x, to)?;
                    if !sum.is_fully_remote() {
                        let shards = sum.addressable_shards()?;
                        sums.extend(shards.iter().map(|shard| shard.data.bytes().to_vec()));
                    }
                }
            }
            Ok(sums)
        });
        results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let expected = run(CPU, false, 0);
    assert!(
        expected[2]
            .iter()
            .all(|bytes| bytes.iter().any(|byte| *byte != 0))
            && expected[2].len() == 15
    );
    for seed in 1..4 {
        for zero_copy in [false, true] {
            assert!(
                run(CUDA, zero_copy, seed) == expected,
                "seed {seed}, handed over: {zero_copy}"
            );
        }
    }
    // The devices add, if there is a kernel for it.
    assert!(softcuda::calls("cuLaunchKernel").is_none_or(|launches| launches > 0));
}

#[test]
fn signs_of_zeros_survive_partial_sums_on_devices() {
    if softcuda::again!("SOFTCUDA_PACE" = "seed:5", "SOFTCUDA_RACES" = "abort") {
        return;
    }
    let _limit = watchdog(60);
    signs_survive(&mut alone(4)).unwrap();
}

/// Moves an array between two processes while a copy on a device fails. Returns the errors of both
/// processes; each must have one.
fn fails(kinds: [DeviceKind; 2], zero_copy: bool) -> Vec<String> {
    let _limit = watchdog(60);
    let mut simulation = Simulation::new(2, 2).settings(|b| b.device_kinds(&kinds));
    if zero_copy {
        simulation = simulation.zero_copy(&[0, 0]);
    }
    let results = simulation.run(|p| {
        let [here, there] = [0, 1].map(|device| Sharding::single_device(DeviceId(device)));
        let x = made(p, [16, 16], &here)?;
        let y = p.device_put(&x, &there)?;
        // No process may treat data that was not copied as values.
        if !y.is_fully_remote() {
            y.to_host()?;
        }
        Ok(())
    });
    results
        .into_iter()
        .map(|result| result.unwrap_err().to_string())
        .collect()
}

#[test]
fn failed_copy_into_a_device_is_reported_to_all_waiters() {
    if softcuda::again!("SOFTCUDA_FAIL" = "copy:1") {
        return;
    }
    let said = fails([CUDA, CPU], false);
    assert!(
        said.iter().all(|said| said.contains("CUDA_ERROR")),
        "{said:#?}"
    );
}

#[test]
fn failed_copy_out_of_a_device_is_reported_to_its_receiver() {
    if softcuda::again!("SOFTCUDA_FAIL" = "copy:2") {
        return;
    }
    let said = fails([CUDA, CPU], false);
    assert!(
        said.iter().all(|said| said.contains("CUDA_ERROR")),
        "{said:#?}"
    );
}

#[test]
fn array_lent_before_its_failure_has_no_value() {
    if softcuda::again!("SOFTCUDA_FAIL" = "copy:1", "SOFTCUDA_PACE" = "lazy") {
        return;
    }
    let said = fails([CUDA, CUDA], true);
    assert!(
        said.iter().all(|said| said.contains("CUDA_ERROR")),
        "{said:#?}"
    );
}

#[test]
fn a_thousand_puts_take_no_more_memory_than_a_few() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let _limit = watchdog(100);
    let simulation = Simulation::new(2, 2).settings(|b| b.device_kinds(&[CUDA, CPU]));
    let results = simulation.run(|p| {
        let host = numbered(&[64, 1000]);
        let [here, there] = [0, 1].map(|device| Sharding::single_device(DeviceId(device)));
        let mut mapped = Vec::new();
        for i in 0..1000 {
            let x = p.device_put(&MpmdArray::from_host(host.clone()), &here)?;
            let y = p.device_put(&x, &there)?;
            // The memory of work that runs ahead depends on the relative speed of both sides.
            let z = p.device_put(&y, &here)?.block_until_ready()?.clone();
            if i % 100 == 0 {
                check(p, &z, &host)?;
                mapped.push(p.memory().mapped);
            }
        }
        Ok(mapped)
    });
    for result in results {
        let mapped = result.unwrap();
        assert_eq!(mapped[4], mapped[9], "{mapped:?}");
    }
}

#[test]
fn large_user_values_are_staged_in_a_few_chunks() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(60);
    let mut p = alone(1);
    let host = numbered(&[3, 7_000_001]);
    let to = Sharding::single_device(DeviceId(0));
    let arrays: Vec<MpmdArray> = (0..3)
        .map(|_| {
            p.device_put(&MpmdArray::from_host(host.clone()), &to)
                .unwrap()
        })
        .collect();
    arrays
        .iter()
        .for_each(|x| drop(x.block_until_ready().unwrap().clone()));
    let peak = p.memory().staging_recent_peak;
    // At most eight chunks are in flight. Each of up to four copy workers may still hold one that
    // is already copied.
    assert!(
        peak > 0 && peak <= (8 + 4) * (4 << 20),
        "{peak} bytes of 3 times {}",
        host.bytes().len()
    );
    arrays.iter().for_each(|x| check(&p, x, &host).unwrap());
    p.finish().unwrap();
}

#[test]
fn refused_pinning_warns_once_and_values_arrive() {
    if softcuda::again!("SOFTCUDA_PIN" = "refuse") {
        return;
    }
    let _limit = watchdog(60);
    let log = Log::of_this_process();
    let mut p = alone(1);
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    for shape in [[2, 300_001], [3, 400_001], [1, 5]] {
        let host = numbered(&shape);
        let x = p
            .device_put(&MpmdArray::from_host(host.clone()), mesh.replicated())
            .unwrap();
        check(&p, &x, &host).unwrap();
    }
    p.finish().unwrap();
    let warnings = log.text().matches("cannot pin host memory").count();
    assert!(softcuda::real() || warnings == 1, "{}", log.text());
}
