//! Collectives of CUDA devices by NCCL: on a software NCCL, or on real devices (`MPMD_TEST_GPU=1`)
//! if there are enough.

use std::time::{Duration, Instant};

use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use half::{bf16, f16};
use mpmd_core::aval::{DType, Element};
use mpmd_core::prelude::*;
use mpmd_core::topology::{CudaCollectives, DeviceKind};
use mpmd_core::{Builder, ProcessId, Simulation};

/// True if the calling process must return: the test has run in another process with the software
/// driver, or it is skipped. The arguments are settings, as in `softcuda::again!`.
macro_rules! elsewhere {
    ($($setting:tt)*) => {{
        if softcuda::real() {
            println!("SKIPPED: on a real driver, which does not do as it is told");
            true
        } else {
            softcuda::again!($($setting)*)
        }
    }};
}

/// Returns the number of devices that NCCL can use together, but no more than `most`; 0 without
/// CUDA or NCCL. 0 or 1 are too few for the tests.
fn devices_up_to(most: usize) -> usize {
    match (mpmd_device::cuda::found(), mpmd_device::cuda::nccl()) {
        (Ok(driver), Ok(_)) => driver.gpus.len().min(most),
        _ => 0,
    }
}

const CUDA: DeviceKind = DeviceKind::Cuda;
const CPU: DeviceKind = DeviceKind::Cpu;
const NCCL: CudaCollectives = CudaCollectives::Nccl;
const HOST: CudaCollectives = CudaCollectives::Host;

/// Functions of NCCL that transfer values between devices.
const CARRYING: [&str; 5] = [
    "ncclAllReduce",
    "ncclReduceScatter",
    "ncclAllGather",
    "ncclSend",
    "ncclRecv",
];

fn called(functions: &[&str]) -> u64 {
    functions
        .iter()
        .filter_map(|function| softcuda::calls(function))
        .sum()
}

/// Returns the bytes that this process has copied between devices and host, in both directions, as
/// the software driver counts them.
fn staged() -> u64 {
    let kinds = [
        "pinned_to_device",
        "pageable_to_device",
        "device_to_pinned",
        "device_to_pageable",
    ];
    kinds.iter().filter_map(|kind| softcuda::bytes(kind)).sum()
}

fn alone(way: CudaCollectives, devices: usize) -> Program {
    Program::builder()
        .devices(devices)
        .device_kinds(&[CUDA])
        .cuda_collectives(way)
        .alone()
        .unwrap()
}

fn simulated(way: CudaCollectives, kinds: &[DeviceKind], devices: usize) -> Simulation {
    let settings = |builder: Builder| builder.device_kinds(kinds).cuda_collectives(way);
    Simulation::new(kinds.len(), devices).settings(settings)
}

/// An element type of a test: made from an integer, compared as `f64`.
trait Number: Element {
    fn of(value: i32) -> Self;
    fn wide(self) -> f64;
}

macro_rules! numbers {
    ($($t:ty: $of:expr, $wide:expr;)*) => {$(
        impl Number for $t {
            fn of(value: i32) -> Self {
                $of(value)
            }
            fn wide(self) -> f64 {
                $wide(self)
            }
        }
    )*};
}

numbers! {
    i8: |v| v as i8, f64::from;
    u8: |v| v as u8, f64::from;
    i16: |v| v as i16, f64::from;
    i32: |v| v, f64::from;
    u32: |v| v as u32, f64::from;
    i64: i64::from, |v| v as f64;
    u64: |v| v as u64, |v| v as f64;
    f16: |v| f16::from_f32(1.0 / (v as f32 + 3.0)), f64::from;
    bf16: |v| bf16::from_f32(1.0 / (v as f32 + 3.0)), f64::from;
    f32: |v| 1.0 / (v as f32 + 3.0), f64::from;
    f64: |v| 1.0 / (f64::from(v) + 3.0), |v| v;
}

fn values<T: Number>(count: usize) -> MpmdArray {
    let values: Vec<T> = (0..count).map(|i| T::of((i * 7 % 113) as i32)).collect();
    MpmdArray::from_slice(&[count], &values).unwrap()
}

fn shape(dtype: DType, elements: usize) -> ShapedArray {
    ShapedArray::new(&[elements], dtype)
}

/// Calls all five collectives on `each` elements per device, in one kernel. Returns the values of
/// this process's shards, by output.
fn five<T: Number>(
    p: &mut Program,
    devices: usize,
    each: usize,
    reduce: Reduce,
) -> Result<Vec<Vec<f64>>> {
    let (mesh, dtype) = (p.mesh(&[("x", devices)])?, T::DTYPE);
    let to = mesh.sharding(spec!["x"]);
    let whole = move |per_device: usize| shape(dtype, per_device * devices);
    // Nothing is sent to the first device, and the last sends nothing.
    let shift: Vec<_> = (1..devices).map(|i| (i - 1, i)).collect();
    let infer = move |_: &[ShapedArray]| {
        let part = || shape(dtype, each);
        let outputs = vec![
            whole(each),
            whole(each * devices),
            whole(each),
            whole(each),
            whole(each / devices),
        ];
        let signature = Signature::new(outputs)
            .all_reduce_with("x", part(), reduce)
            .all_gather("x", part());
        let signature = signature.permute("x", part(), shift.clone());
        Ok(signature
            .all_to_all("x", part())
            .reduce_scatter_with("x", part(), reduce))
    };
    let kernel = fun("Five", infer, |cx, x, mut y| {
        let cuda = cx.cuda().expect("on a CUDA device");
        cuda.copy(&x[0], &mut y[0])?;
        cx.all_reduce_on_cuda("x", &mut y[0])?;
        cx.all_gather_on_cuda("x", &x[0], &mut y[1])?;
        cx.permute_on_cuda("x", &x[0], &mut y[2])?;
        cx.all_to_all_on_cuda("x", &x[0], &mut y[3])?;
        cx.reduce_scatter_on_cuda("x", &x[0], &mut y[4])
    });
    let jit = p.jit(kernel).on(&mesh).outputs(to.clone()).build()?;
    let x = p.device_put(&values::<T>(each * devices), to)?;
    let y = jit.call(p, vec![x])?;
    let mut found = Vec::new();
    for y in &y {
        for shard in y.addressable_shards()? {
            found.push(shard.data.to_vec::<T>()?.into_iter().map(T::wide).collect());
        }
    }
    Ok(found)
}

/// Returns true if the lists have equal lengths and their values differ by at most four relative
/// rounding errors of `unit`.
fn close(one: &[Vec<f64>], other: &[Vec<f64>], unit: f64) -> bool {
    let near = |(a, b): (&f64, &f64)| (a - b).abs() <= 4.0 * unit * a.abs().max(b.abs());
    one.len() == other.len()
        && one
            .iter()
            .zip(other)
            .all(|(a, b)| a.len() == b.len() && a.iter().zip(b).all(near))
}

fn compare<T: Number>(unit: f64, reduce: Reduce, devices: usize) {
    // Large enough for several rings with many devices.
    let each = 24 << 10;
    let run = |way| {
        let mut p = alone(way, devices);
        let found = five::<T>(&mut p, devices, each, reduce).unwrap();
        p.finish().unwrap();
        found
    };
    let before = called(&CARRYING);
    let host = run(HOST);
    assert_eq!(called(&CARRYING), before, "by way of the host");
    let nccl = run(NCCL);
    assert!(called(&CARRYING) > before || softcuda::real(), "by NCCL");
    assert!(
        close(&host, &nccl, unit),
        "{} {reduce} of {devices}",
        T::DTYPE
    );
}

#[test]
fn nccl_matches_host_collectives_in_every_dtype() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "4", "SOFTCUDA_RACES" = "abort") {
        return;
    }
    if devices_up_to(2) < 2 {
        return println!("SKIPPED: there are no two processors, or there is no NCCL");
    }
    let _limit = watchdog(110);
    for devices in [2, devices_up_to(4)] {
        compare::<i8>(0.0, Reduce::Sum, devices);
        compare::<u8>(0.0, Reduce::Max, devices);
        compare::<i32>(0.0, Reduce::Sum, devices);
        compare::<u32>(0.0, Reduce::Min, devices);
        compare::<i64>(0.0, Reduce::Sum, devices);
        compare::<u64>(0.0, Reduce::Sum, devices);
        compare::<f16>(1e-3, Reduce::Sum, devices);
        compare::<bf16>(8e-3, Reduce::Sum, devices);
        compare::<f32>(1.2e-7, Reduce::Sum, devices);
        compare::<f32>(0.0, Reduce::Max, devices);
        compare::<f64>(2.3e-16, Reduce::Sum, devices);
    }
}

#[test]
fn devices_of_several_processes_work_together() {
    if elsewhere!(
        "SOFTCUDA_DEVICES" = "4",
        "SOFTCUDA_PACE" = "seed:4",
        "SOFTCUDA_RACES" = "abort"
    ) {
        return;
    }
    let _limit = watchdog(110);
    for processes in [2, 4] {
        let run = |way| -> Vec<_> {
            let simulation = simulated(way, &vec![CUDA; processes], 4);
            let results = simulation.run(|p| five::<f32>(p, 4, 1 << 10, Reduce::Sum));
            results.into_iter().map(|result| result.unwrap()).collect()
        };
        let (host, nccl) = (run(HOST), run(NCCL));
        assert!(
            host.iter()
                .zip(&nccl)
                .all(|(host, nccl)| close(host, nccl, 1.2e-7))
        );
    }
    assert!(called(&["ncclAllReduce"]) >= 8);
}

/// Calls a kernel `times` times that sums over each axis of a square of four devices. Returns the
/// values of this process's shards.
fn over_both_axes(p: &mut Program, times: usize) -> Result<Vec<f32>> {
    let mesh = p.mesh(&[("x", 2), ("y", 2)])?;
    let to = mesh.sharding(spec![("x", "y")]);
    let infer = |x: &[ShapedArray]| {
        let part = || f32s([100]);
        Ok(Signature::new(vec![x[0].clone()])
            .alias("0", "0")
            .all_reduce("x", part())
            .all_reduce("y", part()))
    };
    let kernel = fun("Both", infer, |cx, _, mut y| {
        cx.all_reduce_on_cuda("x", &mut y[0])?;
        cx.all_reduce_on_cuda("y", &mut y[0])
    });
    let jit = p
        .jit(kernel)
        .on(&mesh)
        .outputs(to.clone())
        .donate("0")
        .build()?;
    let ones = MpmdArray::from_slice(&[400], &[1.0_f32; 400]).unwrap();
    let mut x = p.device_put(&ones, to)?;
    for _ in 0..times {
        x = jit.call(p, vec![x])?.remove(0);
    }
    let mut found = Vec::new();
    for shard in x.addressable_shards()? {
        found.extend(shard.data.to_vec::<f32>()?);
    }
    Ok(found)
}

#[test]
fn group_joins_once_and_then_bypasses_the_host() {
    if elsewhere!("SOFTCUDA_DEVICES" = "4", "SOFTCUDA_RACES" = "abort") {
        return;
    }
    let _limit = watchdog(60);
    let mut p = alone(NCCL, 4);
    let begin = Instant::now();
    assert_eq!(over_both_axes(&mut p, 1).unwrap(), [4.0; 400]);
    // Each device is in one group for each axis.
    assert_eq!(called(&["ncclCommInitRankConfig"]), 8);
    let (first, bytes) = (called(&["ncclAllReduce"]), staged());
    assert_eq!(over_both_axes(&mut p, 8).unwrap(), [4.0_f32.powi(8); 400]);
    assert_eq!(called(&["ncclCommInitRankConfig"]), 8);
    assert_eq!(called(&["ncclAllReduce"]), first + 8 * 8);
    // The array was copied to the devices and back, nothing else.
    assert_eq!(staged() - bytes, 2 * 400 * 4);
    p.finish().unwrap();
    assert_eq!(called(&["ncclCommDestroy"]), 8, "all were closed");
    assert_eq!(called(&["ncclCommAbort"]), 0);
    println!("took {:?}", begin.elapsed());
}

#[test]
fn groups_unsupported_by_nccl_go_through_the_host() {
    if elsewhere!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let _limit = watchdog(110);
    let sums = |p: &mut Program, devices| five::<f32>(p, devices, 256, Reduce::Sum);
    // Two devices on each GPU.
    let run = |way| -> Vec<_> {
        let results = simulated(way, &[CUDA, CUDA], 4).run(|p| sums(p, 4));
        results.into_iter().map(|result| result.unwrap()).collect()
    };
    assert!(run(NCCL) == run(HOST), "to the bit");
    // One device.
    let mut p = alone(NCCL, 1);
    five::<f32>(&mut p, 1, 16, Reduce::Sum).unwrap();
    p.finish().unwrap();
    // Both kinds of devices, and a dtype that NCCL does not support.
    let results = simulated(NCCL, &[CUDA, CPU], 2).run(|p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let infer = |x: &[ShapedArray]| {
            Ok(Signature::new(vec![x[0].clone()])
                .alias("0", "0")
                .all_reduce("x", f32s([8])))
        };
        let kernel = fun("Mixed", infer, |cx, _, mut y| match cx.cuda() {
            Some(_) => cx.all_reduce_on_cuda("x", &mut y[0]),
            None => cx.all_reduce("x", y[0].as_mut_slice::<f32>()?),
        });
        let jit = p
            .jit(kernel)
            .on(&mesh)
            .outputs(mesh.sharding(spec!["x"]))
            .donate("0")
            .build()?;
        let x = p.device_put(
            &MpmdArray::from_slice(&[16], &[1.0_f32; 16]).unwrap(),
            mesh.sharding(spec!["x"]),
        )?;
        let y = jit.call(p, vec![x])?;
        Ok(y[0].addressable_shards()?[0].data.to_vec::<f32>()?)
    });
    for result in results {
        assert_eq!(result.unwrap(), [2.0; 8]);
    }
    let mut p = alone(NCCL, 2);
    let found = five::<i16>(&mut p, 2, 64, Reduce::Sum).unwrap();
    p.finish().unwrap();
    let mut p = alone(HOST, 2);
    assert!(found == five::<i16>(&mut p, 2, 64, Reduce::Sum).unwrap());
    p.finish().unwrap();
    assert_eq!(called(&CARRYING) + called(&["ncclCommInitRankConfig"]), 0);
}

/// Runs a kernel with one collective on two processes with a device each. Returns the error of each
/// process, which must have one.
fn errors(
    simulation: &Simulation,
    infer: impl Fn(&[ShapedArray]) -> Result<Signature<Vec<ShapedArray>>>
    + Clone
    + Send
    + Sync
    + 'static,
    run: impl Fn(&mut Context<'_>, &mut ViewMut<'_>) -> Result<()> + Clone + Send + Sync + 'static,
) -> Vec<String> {
    let results = simulation.run(move |p| {
        let mesh = p.mesh(&[("x", 2)])?;
        let (infer, run) = (infer.clone(), run.clone());
        let kernel = fun("Wrong", infer, move |cx, _, mut y| {
            cx.zero(&mut y[0])?;
            run(cx, &mut y[0])
        });
        let jit = p
            .jit(kernel)
            .on(&mesh)
            .outputs(mesh.sharding(spec!["x"]))
            .build()?;
        let x = p.device_put(&values::<f32>(16), mesh.sharding(spec!["x"]))?;
        let y = jit.call(p, vec![x])?;
        y[0].block_until_ready().map(|_| ())
    });
    results
        .into_iter()
        .map(|result| result.unwrap_err().to_string())
        .collect()
}

fn reducing(x: &[ShapedArray]) -> Result<Signature<Vec<ShapedArray>>> {
    Ok(like_first(x)?.all_reduce("x", f32s([8])))
}

#[test]
fn different_calls_are_errors_and_do_not_block_in_nccl() {
    if elsewhere!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let _limit = watchdog(60);
    let uneven = |cx: &mut Context<'_>, y: &mut ViewMut<'_>| {
        let skip = cx.axis_index("x")?;
        cx.all_reduce_on_cuda("x", y.at(skip))
    };
    for way in [HOST, NCCL] {
        for error in errors(&simulated(way, &[CUDA, CUDA], 2), reducing, uneven) {
            let parts = [
                "collective 0 of operation 2",
                "declared as all_reduce",
                "with different lengths",
            ];
            assert!(
                parts.iter().all(|part| error.contains(part)),
                "{way}: {error}"
            );
        }
    }
    let sides = |cx: &mut Context<'_>, y: &mut ViewMut<'_>| match cx.axis_index("x")? {
        0 => cx.all_reduce_on_cuda("x", y),
        _ => cx.all_reduce("x", &mut [1.0_f32; 8]),
    };
    for error in errors(&simulated(NCCL, &[CUDA, CUDA], 2), reducing, sides) {
        assert!(
            error.contains("do not agree: one calls it with values"),
            "{error}"
        );
    }
    let half = |cx: &mut Context<'_>, y: &mut ViewMut<'_>| match cx.axis_index("x")? {
        0 => cx.all_reduce_on_cuda("x", y),
        _ => Err(Error::kernel("no part of mine")),
    };
    for error in errors(&simulated(NCCL, &[CUDA, CUDA], 2), reducing, half) {
        assert!(error.contains("no part of mine"), "{error}");
    }
    let other = |cx: &mut Context<'_>, y: &mut ViewMut<'_>| {
        let values = cx
            .cuda()
            .expect("on a CUDA device")
            .scratch(DType::F32, 8)?;
        cx.all_to_all_on_cuda("x", &values, y)
    };
    for error in errors(&simulated(NCCL, &[CUDA, CUDA], 2), reducing, other) {
        assert!(error.contains("the kernel calls all_to_all of"), "{error}");
    }
    assert_eq!(called(&CARRYING) + called(&["ncclCommInitRankConfig"]), 0);
}

#[test]
fn host_values_in_nccl_groups_go_through_the_host() {
    if elsewhere!("SOFTCUDA_DEVICES" = "3") {
        return;
    }
    let _limit = watchdog(60);
    let run = |way| {
        let results = simulated(way, &[CUDA, CUDA, CUDA], 3).run(|p| {
            let mesh = p.mesh(&[("x", 3)])?;
            // More than one round takes.
            let many = mpmd_core::kernel::TWO_ROUNDS_FROM_BYTES;
            let infer = move |_: &[ShapedArray]| {
                let signature = Signature::new(vec![f32s([6])]).all_reduce("x", f32s([many]));
                Ok(signature
                    .all_gather("x", f32s([2]))
                    .all_reduce("x", f32s([2])))
            };
            let kernel = fun("Host", infer, move |cx, _, mut y| {
                let cuda = cx.cuda().expect("on a CUDA device");
                let index = cx.axis_index("x")? as f32;
                let mut mine = vec![1.0 / (index + 3.0); many];
                cx.all_reduce("x", &mut mine)?;
                let mut all = [0.0; 6];
                cx.all_gather("x", &[index, mine[many - 1]], &mut all)?;
                cuda.fill(&mut y[0], all[1] + all[4])?;
                cx.all_reduce_on_cuda("x", &mut y[0])
            });
            let jit = p
                .jit(kernel)
                .on(&mesh)
                .outputs(mesh.sharding(spec!["x"]))
                .build()?;
            let y = jit.call(p, vec![MpmdArray::scalar(0.0_f32)])?;
            Ok(y[0].addressable_shards()?[0].data.to_vec::<f32>()?)
        });
        results
            .into_iter()
            .map(|result| result.unwrap())
            .collect::<Vec<_>>()
    };
    assert_eq!(run(HOST), run(NCCL));
    assert_eq!(called(&["ncclAllReduce"]), 3);
}

#[test]
fn missing_nccl_is_reported_only_if_requested() {
    if elsewhere!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let _limit = watchdog(60);
    let folder = std::env::var("LD_LIBRARY_PATH").unwrap();
    let folder = folder.split(':').next().unwrap();
    std::fs::remove_file(std::path::Path::new(folder).join("libnccl.so.2")).unwrap();
    if let Ok(version) = mpmd_device::cuda::nccl() {
        println!("SKIPPED: NCCL {version} is also installed elsewhere on this machine");
        return;
    }
    let ask = |way| {
        Program::builder()
            .devices(2)
            .device_kinds(&[CUDA])
            .cuda_collectives(way)
            .alone()
    };
    let said = ask(NCCL).unwrap_err().to_string();
    assert!(
        said.contains("no NCCL found: looked for libnccl.so"),
        "{said}"
    );
    let results = simulated(NCCL, &[CUDA, CUDA], 2).run(|_| Ok(()));
    assert!(
        results
            .iter()
            .all(|result| result.as_ref().is_err_and(|why| why.to_string() == said))
    );
    // A process without CUDA devices needs no NCCL either.
    let p = Program::builder()
        .device_kinds(&[CPU])
        .cuda_collectives(NCCL)
        .alone()
        .unwrap();
    p.finish().unwrap();
    let mut p = ask(HOST).unwrap();
    five::<f32>(&mut p, 2, 16, Reduce::Sum).unwrap();
    p.finish().unwrap();
}

/// Time limit for failing processes, which must not wait for peers that never come.
const SOON: Duration = Duration::from_secs(20);

/// Runs reductions over three devices of `processes` processes, in which the first operation of a
/// given kind fails on process 0. Checks that all processes fail soon, with an error that contains
/// `part`.
fn fails(case: &str, processes: usize, part: &str) {
    let begin = Instant::now();
    let results = simulated(NCCL, &vec![CUDA; processes], 3).run(|p| {
        if p.process().0 == 0 {
            softcuda::driver().expect("it is loaded").fail(case, 1);
        }
        reductions(p, 5)
    });
    assert!(begin.elapsed() < SOON, "{case}: {:?}", begin.elapsed());
    let said: Vec<_> = results
        .into_iter()
        .map(|result| result.unwrap_err().to_string())
        .collect();
    assert!(
        said.iter().all(|said| said.contains(part)),
        "{case} of {processes}: {said:#?}"
    );
}

/// Runs `times` sums over three devices, one after the other, and waits for the last.
fn reductions(p: &mut Program, times: usize) -> Result<()> {
    let mesh = p.mesh(&[("x", 3)])?;
    let to = mesh.sharding(spec!["x"]);
    let infer = |x: &[ShapedArray]| {
        Ok(Signature::new(vec![x[0].clone()])
            .alias("0", "0")
            .all_reduce("x", f32s([1000])))
    };
    let kernel = fun("Sum", infer, |cx, _, mut y| {
        cx.all_reduce_on_cuda("x", &mut y[0])
    });
    let jit = p
        .jit(kernel)
        .on(&mesh)
        .outputs(to.clone())
        .donate("0")
        .build()?;
    let mut x = p.device_put(&values::<f32>(3000), to)?;
    for _ in 0..times {
        x = jit.call(p, vec![x])?.remove(0);
    }
    x.block_until_ready().map(|_| ())
}

// Each test runs in its own process: a device that has failed stays failed.

/// Text of the CUDA or NCCL error of a failed device's work, and of all later work on that device.
const LOST: &str = "an illegal memory access was encountered";

#[test]
fn failed_device_does_not_block_its_process() {
    if elsewhere!("SOFTCUDA_DEVICES" = "3") {
        return;
    }
    let _limit = watchdog(60);
    fails("launch", 1, LOST);
}

#[test]
fn failed_device_does_not_block_other_processes() {
    if elsewhere!("SOFTCUDA_DEVICES" = "3", "SOFTCUDA_PACE" = "seed:8") {
        return;
    }
    let _limit = watchdog(60);
    fails("launch", 3, LOST);
}

#[test]
fn failed_nccl_call_on_one_device_fails_all() {
    if elsewhere!("SOFTCUDA_DEVICES" = "3") {
        return;
    }
    let _limit = watchdog(110);
    for function in ["ncclAllReduce", "ncclCommInitRankConfig", "ncclGetUniqueId"] {
        for processes in [1, 3] {
            fails(function, processes, "ncclInternalError");
        }
    }
}

#[test]
fn lost_process_is_named_by_the_others() {
    if elsewhere!("SOFTCUDA_DEVICES" = "3") {
        return;
    }
    let _limit = watchdog(60);
    let begin = Instant::now();
    // Its first operation is an array. The next is the call that it does not make.
    let results = simulated(NCCL, &[CUDA; 3], 3)
        .lose(ProcessId(2), 6)
        .run(|p| reductions(p, 20));
    assert!(begin.elapsed() < SOON, "{:?}", begin.elapsed());
    for result in results {
        let said = result.unwrap_err().to_string();
        assert!(said.contains("process 2"), "{said}");
    }
}

#[test]
fn dry_run_needs_no_nccl_and_shows_its_groups() {
    let operations_with = |way| {
        let builder = Program::builder()
            .devices(2)
            .device_kinds(&[CUDA])
            .cuda_collectives(way);
        let mut p = builder.dry_run(2).unwrap();
        let mesh = p.mesh(&[("x", 2)]).unwrap();
        let infer = |x: &[ShapedArray]| {
            Ok(Signature::new(vec![x[0].clone()]).all_reduce("x", f32s([1000])))
        };
        let kernel = fun("Sum", infer, |_, _, _| Ok(()));
        let jit = p
            .jit(kernel)
            .on(&mesh)
            .outputs(mesh.sharding(spec!["x"]))
            .build()
            .unwrap();
        let x = p
            .device_put(&values::<f32>(2000), mesh.sharding(spec!["x"]))
            .unwrap();
        drop(jit.call(&mut p, vec![x]).unwrap());
        let operations = format!("{:?}", p.dry_run().unwrap());
        p.finish().unwrap();
        operations
    };
    assert!(
        operations_with(HOST).contains("bytes: 4000")
            && !operations_with(HOST).contains("bytes: 144")
    );
    assert!(
        operations_with(NCCL).contains("bytes: 4000")
            && operations_with(NCCL).contains("bytes: 144")
    );
}
