//! Kernels on CUDA devices: on a software driver, or on real devices (`MPMD_TEST_GPU=1`).

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::cuda::{CPU, CUDA};
use crate::common::kernels::{fun, like_first};
use crate::common::watchdog;
use crate::spans::Log;
use mpmd_core::cuda::{Cuda, Grid, Source};
use mpmd_core::prelude::*;
use mpmd_core::topology::DeviceKind;
use mpmd_core::{FailureKind, Simulation};

static STEPS: Source = Source::cuda(
    "steps.cu",
    r#"
    #define FIRST (blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x)

    extern "C" __global__ void scale(unsigned long long n, float factor, const float *x, float *y) {
        if (FIRST < n) y[FIRST] = x[FIRST] * factor;
    }

    extern "C" __global__ void add(unsigned long long n, const float *x, float *y) {
        if (FIRST < n) y[FIRST] += x[FIRST];
    }
    "#,
)
.exact();

/// A kernel that computes y = factor * x. The factor is a host value that CPU and CUDA devices
/// read.
struct Scale;

impl Kernel for Scale {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (x, _): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (x, factor): (View<'_>, View<'_>),
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let factor = factor.scalar::<f32>()?;
        if let Some(cuda) = cx.cuda() {
            let n = x.region().elements();
            let args = [n.into(), factor.into(), (&x).into(), (&mut y).into()];
            return cuda.launch(&STEPS, "scale", Grid::over(n), &args);
        }
        let pairs = y
            .as_mut_slice::<f32>()?
            .iter_mut()
            .zip(x.as_slice::<f32>()?);
        pairs.for_each(|(y, x)| *y = x * factor);
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&STEPS]
    }
}

/// A kernel that computes y += x in place, and records the device address of y.
struct Add(Arc<Mutex<Vec<u64>>>);

impl Add {
    fn new() -> Self {
        Self(Arc::default())
    }

    fn on(&self, cuda: Cuda<'_>, x: &View<'_>, y: &mut ViewMut<'_>) -> Result<()> {
        self.0.lock().unwrap().push(cuda.address(&*y)?);
        let n = y.region().elements();
        cuda.launch(
            &STEPS,
            "add",
            Grid::over(n),
            &[n.into(), x.into(), y.into()],
        )
    }
}

impl Kernel for Add {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (_, y): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(y.clone()).alias("1", ""))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (x, _): (View<'_>, View<'_>),
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        if let Some(cuda) = cx.cuda() {
            return self.on(cuda, &x, &mut y);
        }
        y.as_mut_slice::<f32>()?
            .iter_mut()
            .zip(x.as_slice::<f32>()?)
            .for_each(|(y, x)| *y += x);
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&STEPS]
    }
}

fn alone(kind: DeviceKind, devices: usize) -> Program {
    Program::builder()
        .devices(devices)
        .device_kinds(&[kind])
        .alone()
        .unwrap()
}

/// Returns `count` host values, 1/3, 1/4 and so on: their sums are rounded.
fn numbers(count: usize) -> MpmdArray {
    let numbers: Vec<f32> = (0..count).map(|i| 1.0 / (i as f32 + 3.0)).collect();
    MpmdArray::from_slice(&[count], &numbers).unwrap()
}

fn read(x: &MpmdArray) -> Vec<f32> {
    x.to_host().unwrap().unwrap().to_vec::<f32>().unwrap()
}

/// Waits up to 20 seconds until `expected` bytes are in use; returns the bytes in use. The thread
/// that reports the end of work may release its buffers a moment later.
fn settled(p: &Program, expected: u64) -> u64 {
    let deadline = Instant::now() + Duration::from_secs(20);
    while p.memory().live != expected && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    p.memory().live
}

/// Runs a chain of calls, in place and not, with host values as factors, over `axis` devices.
/// Returns the values of three arrays; `None` for those that this process does not own.
fn chain(p: &mut Program, axis: usize) -> Result<Vec<Option<Vec<f32>>>> {
    let mesh = p.mesh(&[("x", axis)])?;
    let to = mesh.sharding(spec!["x"]);
    let scale = p.jit(Scale).on(&mesh).outputs(to.clone()).build()?;
    let add = p
        .jit(Add::new())
        .on(&mesh)
        .outputs(to.clone())
        .donate("1")
        .build()?;
    let keep = p.jit(Add::new()).on(&mesh).outputs(to.clone()).build()?;
    let x = p.device_put(&numbers(4000), to)?;
    let mut sum = scale.call(p, (x.clone(), MpmdArray::scalar(0.3f32)))?;
    let before = sum.clone();
    let mut seen = vec![keep.call(p, (x.clone(), before))?];
    for step in 0..20 {
        let more = scale.call(p, (sum.clone(), MpmdArray::scalar(0.7f32 + step as f32)))?;
        sum = add.call(p, (more, sum))?;
    }
    seen.push(sum);
    seen.push(x);
    seen.iter()
        .map(|x| Ok(x.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?))
        .collect()
}

#[test]
fn calls_give_cpu_bits_on_one_and_two_devices() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let _limit = watchdog(60);
    for devices in [1, 2] {
        let [cpu, cuda] = [CPU, CUDA].map(|kind| {
            let mut p = alone(kind, devices);
            let found = chain(&mut p, devices).unwrap();
            p.finish().unwrap();
            found
        });
        assert_eq!(cuda, cpu, "{devices} devices");
        assert!(
            cpu[1]
                .as_ref()
                .unwrap()
                .iter()
                .all(|x| x.is_finite() && *x > 0.0)
        );
    }
}

/// Checks that the chain gives the same values on CPU and CUDA devices.
fn chain_in_order() {
    let _limit = watchdog(90);
    let [cpu, cuda] = [CPU, CUDA].map(|kind| {
        let mut p = alone(kind, 2);
        let found = chain(&mut p, 2).unwrap();
        p.finish().unwrap();
        found
    });
    assert_eq!(cuda, cpu);
}

#[test]
fn work_is_in_order_with_streams_that_run_lazily() {
    if softcuda::again!(
        "SOFTCUDA_DEVICES" = "2",
        "SOFTCUDA_PACE" = "lazy:20",
        "SOFTCUDA_RACES" = "abort"
    ) {
        return;
    }
    chain_in_order();
}

#[test]
fn work_is_in_order_with_streams_that_pause_randomly() {
    if softcuda::again!(
        "SOFTCUDA_DEVICES" = "2",
        "SOFTCUDA_PACE" = "seed:11",
        "SOFTCUDA_RACES" = "abort"
    ) {
        return;
    }
    chain_in_order();
}

#[test]
fn issue_and_end_of_a_kernel_are_logged() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(60);
    let log = Log::of_this_process();
    let mut p = alone(CUDA, 1);
    chain(&mut p, 1).unwrap();
    p.finish().unwrap();
    let text = log.text();
    let issued = "kernel{device=0}: mpmd::run: issued microseconds=";
    assert!(text.lines().any(|line| line.contains(issued)), "{text}");
    assert!(
        text.lines()
            .any(|line| line.contains("}: mpmd::run: ran device=0")),
        "{text}"
    );
}

#[test]
fn donated_inputs_are_updated_in_place_and_others_kept() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(60);
    let mut p = alone(CUDA, 1);
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    let [donating, keeping] = [Add::new(), Add::new()];
    let places = [donating.0.clone(), keeping.0.clone()];
    let add = p
        .jit(donating)
        .on(&mesh)
        .outputs(mesh.replicated())
        .donate("1")
        .build()
        .unwrap();
    let keep = p
        .jit(keeping)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let x = p.device_put(&numbers(1000), mesh.replicated()).unwrap();
    let first = p.device_put(&numbers(1000), mesh.replicated()).unwrap();
    let mut sum = keep.call(&mut p, (x.clone(), first.clone())).unwrap();
    sum.block_until_ready().unwrap();
    let live = p.memory().live;
    let moved = || softcuda::driver().map_or(0, |driver| driver.bytes("device_to_device"));
    let before = moved();
    for _ in 0..50 {
        let old = sum.clone();
        sum = add.call(&mut p, (x.clone(), sum)).unwrap();
        assert!(old.to_host().unwrap_err().to_string().contains("donated"));
    }
    sum.block_until_ready().unwrap();
    assert_eq!(moved(), before, "nothing is copied");
    let other = keep.call(&mut p, (x.clone(), sum.clone())).unwrap();
    assert_eq!(read(&first), read(&x), "it was not given up");
    assert!(
        read(&other)
            .iter()
            .zip(read(&sum))
            .all(|(other, sum)| *other > sum)
    );
    let [donated, kept] = places.map(|places| places.lock().unwrap().clone());
    assert!(
        donated.iter().all(|place| *place == kept[0]) && donated.len() == 50,
        "{donated:?}"
    );
    assert!(kept[1] != kept[0]);
    drop((other, first));
    assert_eq!(
        settled(&p, live - live / 3),
        live - live / 3,
        "one of three arrays less, and none more"
    );
    p.finish().unwrap();
}

#[test]
fn thousand_calls_ahead_use_the_memory_of_a_few() {
    if softcuda::again!("SOFTCUDA_PACE" = "seed:3") {
        return;
    }
    let _limit = watchdog(110);
    let array = 16 << 10;
    let builder = Program::builder()
        .device_kinds(&[CUDA])
        .device_memory(6 * array);
    let mut p = builder.alone().unwrap();
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    let scale = p
        .jit(Scale)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let add = p
        .jit(Add::new())
        .on(&mesh)
        .outputs(mesh.replicated())
        .donate("1")
        .build()
        .unwrap();
    let x = p.device_put(&numbers(4096), mesh.replicated()).unwrap();
    let mut sum = p.device_put(&numbers(4096), mesh.replicated()).unwrap();
    for _ in 0..1000 {
        let more = scale
            .call(&mut p, (x.clone(), MpmdArray::scalar(1.0f32)))
            .unwrap();
        sum = add.call(&mut p, (more, sum)).unwrap();
    }
    let one = 1.0f32 / 3.0;
    let expected = (0..1000).fold(one, |sum, _| sum + one);
    assert_eq!(read(&sum)[0], expected);
    assert!(p.memory().peak_live <= 6 * array, "{:?}", p.memory());
    p.finish().unwrap();
}

#[test]
fn handles_dropped_in_flight_leave_nothing_behind() {
    if softcuda::again!("SOFTCUDA_PACE" = "seed:5") {
        return;
    }
    let _limit = watchdog(60);
    let mut p = alone(CUDA, 1);
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    let scale = p
        .jit(Scale)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let x = p.device_put(&numbers(5000), mesh.replicated()).unwrap();
    x.block_until_ready().unwrap();
    let live = p.memory().live;
    for round in 0..100 {
        let y = scale
            .call(&mut p, (x.clone(), MpmdArray::scalar(2.0f32)))
            .unwrap();
        let z = scale
            .call(&mut p, (y.clone(), MpmdArray::scalar(2.0f32)))
            .unwrap();
        match round % 3 {
            0 => drop((y, z)),
            1 => drop((z, y)),
            _ => {
                drop(y);
                assert_eq!(read(&z)[0], 4.0 / 3.0);
            }
        }
    }
    let last = scale
        .call(&mut p, (x.clone(), MpmdArray::scalar(2.0f32)))
        .unwrap();
    last.block_until_ready().unwrap();
    drop(last);
    assert_eq!(settled(&p, live), live);
    p.finish().unwrap();
}

#[test]
fn host_values_are_passed_whole_and_updated_in_a_copy() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let _limit = watchdog(60);
    let found = [CPU, CUDA].map(|kind| {
        let mut p = alone(kind, 2);
        let mesh = p.mesh(&[("x", 2)]).unwrap();
        let to = mesh.sharding(spec!["x"]);
        // Each device sees all of the host's values, and its output is half of them.
        let like_second =
            |x: &[ShapedArray]| Ok(Signature::new(vec![x[1].clone()]).alias("1", "0"));
        let kernel = fun("Halves", like_second, |cx, x, mut y| {
            let (n, factor) = (y[0].region().elements(), x[0].as_slice::<f32>()?[7]);
            if let Some(cuda) = cx.cuda() {
                // The whole host values, as an argument that the launch copies to the device.
                let args = [n.into(), (&x[0]).into(), (&mut y[0]).into()];
                return cuda.launch(&STEPS, "add", Grid::over(n), &args);
            }
            assert!(factor > 0.0);
            y[0].as_mut_slice::<f32>()?
                .iter_mut()
                .zip(x[0].as_slice::<f32>()?)
                .for_each(|(y, x)| *y += x);
            Ok(())
        });
        let jit = p.jit(kernel).on(&mesh).outputs(to).build().unwrap();
        let y = jit
            .call(&mut p, vec![numbers(3000), numbers(3000)])
            .unwrap();
        let found = read(&y[0]);
        p.finish().unwrap();
        found
    });
    assert_eq!(found[0], found[1]);
    assert!(found[0][2999] > 0.0);
}

/// Returns a kernel that launches work on the device and then fails in the way `how`: "reads" or
/// "clears" device memory, "refuses", or "panics". Other words succeed.
fn wrong(how: &'static str) -> impl Kernel<In = Vec<MpmdArray>, Out = Vec<MpmdArray>> {
    fun("Wrong", like_first, move |cx, x, mut y| {
        let cuda = cx.cuda().expect("it runs on a CUDA device");
        cuda.fill(&mut y[0], 1.0f32)?;
        match how {
            "reads" => drop(x[0].as_slice::<f32>()?),
            "clears" => y[0].zero(),
            "refuses" => return Err(Error::kernel("not today")),
            "panics" => panic!("at once"),
            _ => {}
        }
        Ok(())
    })
}

#[test]
fn kernel_failing_at_issue_fails_only_its_outputs() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(60);
    let words = [
        ("reads", "the values are in the memory of a CUDA device"),
        ("clears", "the values are in the memory of a CUDA device"),
        ("refuses", "not today"),
        ("panics", "at once"),
    ];
    for (how, expected) in words {
        let mut p = alone(CUDA, 1);
        let mesh = p.mesh(&[("x", 1)]).unwrap();
        let scale = p
            .jit(Scale)
            .on(&mesh)
            .outputs(mesh.replicated())
            .build()
            .unwrap();
        let jit = p
            .jit(wrong(how))
            .on(&mesh)
            .outputs(mesh.replicated())
            .build()
            .unwrap();
        let x = p.device_put(&numbers(100), mesh.replicated()).unwrap();
        let y = jit.call(&mut p, vec![x.clone()]).unwrap().remove(0);
        let z = scale
            .call(&mut p, (y.clone(), MpmdArray::scalar(2.0f32)))
            .unwrap();
        let fine = scale.call(&mut p, (x, MpmdArray::scalar(2.0f32))).unwrap();
        for failed in [y, z] {
            let error = failed.to_host().unwrap_err().to_string();
            for part in [
                "kernel Wrong of operation 2",
                "failed on device 0",
                expected,
            ] {
                assert!(error.contains(part), "{how}: {error}");
            }
        }
        assert_eq!(read(&fine)[0], 2.0 / 3.0);
        assert!(p.finish().unwrap_err().to_string().contains(expected));
    }
}

static WILD: Source = Source::cuda(
    "wild.cu",
    r#"extern "C" __global__ void wild(float *y, unsigned long long far) { y[far] = 1.0f; }"#,
);

#[test]
fn kernel_failing_on_a_device_is_named_others_continue() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    if mpmd_device::cuda::found().is_ok_and(|driver| driver.gpus.len() < 2) {
        return println!("SKIPPED: there is one GPU, and all of it fails");
    }
    let _limit = watchdog(60);
    let mut p = alone(CUDA, 2);
    let mesh = p.mesh(&[("x", 2)]).unwrap();
    let sides = mesh.split("x").unwrap();
    let [wrong, right] = [&sides[0], &sides[1]];
    let kernel = fun("Wild", like_first, |cx, _, mut y| {
        let cuda = cx.cuda().expect("it runs on a CUDA device");
        cuda.launch(
            &WILD,
            "wild",
            Grid::new(1, 1),
            &[(&mut y[0]).into(), (1u64 << 36).into()],
        )
    });
    let wild = p
        .jit(kernel)
        .on(wrong)
        .outputs(wrong.replicated())
        .build()
        .unwrap();
    let [scale, other] = [wrong, right].map(|side| {
        p.jit(Scale)
            .on(side)
            .outputs(side.replicated())
            .build()
            .unwrap()
    });
    let x = p.device_put(&numbers(100), wrong.replicated()).unwrap();
    let z = p.device_put(&numbers(100), right.replicated()).unwrap();
    let before = scale
        .call(&mut p, (x.clone(), MpmdArray::scalar(2.0f32)))
        .unwrap();
    before.block_until_ready().unwrap();
    let y = wild.call(&mut p, vec![x.clone()]).unwrap().remove(0);
    let error = y.to_host().unwrap_err().to_string();
    for part in [
        "kernel Wild of operation 4",
        "failed on device 0",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
    ] {
        assert!(error.contains(part), "{error}");
    }
    let after = scale.call(&mut p, (x, MpmdArray::scalar(2.0f32))).unwrap();
    let error = after.to_host().unwrap_err().to_string();
    assert!(
        error.contains("kernel Scale") && error.contains("CUDA_ERROR_ILLEGAL_ADDRESS"),
        "{error}"
    );
    let fine = other.call(&mut p, (z, MpmdArray::scalar(2.0f32))).unwrap();
    assert_eq!(read(&fine)[0], 2.0 / 3.0);
    assert!(p.finish().unwrap_err().to_string().contains("kernel Wild"));
}

#[test]
fn failed_device_work_fails_its_call_and_later_calls() {
    if softcuda::again!("SOFTCUDA_PACE" = "lazy:50") {
        return;
    }
    let Some(driver) = softcuda::driver() else {
        return println!("SKIPPED: this driver fails when it does, not when it is told");
    };
    let _limit = watchdog(60);
    let mut p = alone(CUDA, 1);
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    let scale = p
        .jit(Scale)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let add = p
        .jit(Add::new())
        .on(&mesh)
        .outputs(mesh.replicated())
        .donate("1")
        .build()
        .unwrap();
    let x = p.device_put(&numbers(100), mesh.replicated()).unwrap();
    scale
        .call(&mut p, (x.clone(), MpmdArray::scalar(1.0f32)))
        .unwrap()
        .block_until_ready()
        .unwrap();
    // Fails the second of the following calls. Both others are issued before the failure is known.
    driver.fail("launch", 2);
    let y = scale
        .call(&mut p, (x.clone(), MpmdArray::scalar(1.0f32)))
        .unwrap();
    let z = scale
        .call(&mut p, (y.clone(), MpmdArray::scalar(1.0f32)))
        .unwrap();
    let sum = add.call(&mut p, (x, z)).unwrap();
    let error = sum.to_host().unwrap_err().to_string();
    // The error comes from the failed work, from its input, or from the device when it gets new
    // work. It depends on which is known first.
    let named = |error: &str| {
        error.contains("failed on device 0") && error.contains("CUDA_ERROR_ILLEGAL_ADDRESS")
    };
    assert!(named(&error), "{error}");
    let error = p.finish().unwrap_err().to_string();
    assert!(named(&error), "{error}");
    drop(y);
}

/// The first array is lent before its copy fails. Two kernels on the borrower and a second lend are
/// issued before the failure is known. All three arrays must report a CUDA error.
#[test]
fn failed_copy_fails_everything_derived_from_it() {
    if softcuda::again!(
        "SOFTCUDA_DEVICES" = "3",
        "SOFTCUDA_PACE" = "lazy:50",
        "SOFTCUDA_FAIL" = "copy:1"
    ) {
        return;
    }
    let _limit = watchdog(60);
    let simulation = Simulation::new(3, 3)
        .settings(|b| b.device_kinds(&[CUDA]))
        .zero_copy(&[0; 3]);
    let found = Mutex::new(Vec::new());
    // Each program also ends with the failure.
    let results = simulation.run(|p| {
        let mesh = p.mesh(&[("x", 3)])?;
        let [first, second, third] = mesh.split("x")?.try_into().expect("three devices");
        let scale = p
            .jit(Scale)
            .on(&second)
            .outputs(second.replicated())
            .build()?;
        let x = p.device_put(&numbers(20_000), first.replicated())?;
        let mut y = p.device_put(&x, second.replicated())?;
        for _ in 0..2 {
            y = scale.call(p, (y, MpmdArray::scalar(2.0f32)))?;
        }
        let z = p.device_put(&y, third.replicated())?;
        let mine = [x, y, z]
            .into_iter()
            .find(|array| !array.is_fully_remote())
            .expect("one is here");
        let value = mine
            .to_host()
            .map(|_| ())
            .map_err(|error| error.to_string());
        found.lock().unwrap().push((p.process(), value));
        Ok(())
    });
    let found = found.into_inner().unwrap();
    let is_told = |value: &Result<(), String>| {
        value
            .as_ref()
            .is_err_and(|said| said.contains("CUDA_ERROR"))
    };
    assert!(
        found.len() == 3 && found.iter().all(|(_, value)| is_told(value)),
        "{found:#?}\n{results:#?}"
    );
}

#[test]
fn out_of_memory_reports_the_driver_error() {
    if softcuda::again!("SOFTCUDA_MEMORY" = "16777216") {
        return;
    }
    let _limit = watchdog(60);
    let mut p = alone(CUDA, 1);
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    let kernel = fun(
        "Large",
        |_| Ok(Signature::new(vec![f32s([64 << 20])])),
        |cx, _, mut y| cx.zero(&mut y[0]),
    );
    let large = p
        .jit(kernel)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let y = large
        .call(&mut p, vec![MpmdArray::scalar(1.0f32)])
        .unwrap()
        .remove(0);
    let error = y.to_host().unwrap_err();
    assert_eq!(
        error.failure().map(|failure| failure.kind),
        Some(FailureKind::Memory)
    );
    let error = error.to_string();
    for part in [
        "operation 1 (jit Large",
        "out of memory on device 0",
        "CUDA_ERROR_OUT_OF_MEMORY",
    ] {
        assert!(error.contains(part), "{error}");
    }
    p.finish().unwrap_err();
}

/// Calls every collective in one kernel, on CPU or CUDA devices. Returns the values of this
/// process's shards.
fn collectives(p: &mut Program, devices: usize) -> Result<Vec<Vec<f32>>> {
    let mesh = p.mesh(&[("x", devices)])?;
    let to = mesh.sharding(spec!["x"]);
    // Large enough for two rounds with three devices.
    let each = 24 << 10;
    let infer = move |x: &[ShapedArray]| {
        let part = f32s([each]);
        let shift = (0..devices)
            .map(|i| (i, (i + 1) % devices))
            .collect::<Vec<_>>();
        let signature = Signature::new(vec![x[0].clone(), f32s([each * devices * devices])]);
        let signature = signature
            .alias("0", "0")
            .all_reduce("x", part.clone())
            .all_gather("x", part.clone());
        let signature = signature.permute("x", part.clone(), shift);
        Ok(signature
            .all_to_all("x", part.clone())
            .reduce_scatter("x", part))
    };
    let kernel = fun("All", infer, move |cx, _, mut y| {
        let mut second = y.pop().expect("two outputs");
        let mut first = y.pop().expect("two outputs");
        let share = each / devices;
        if let Some(cuda) = cx.cuda() {
            cx.all_reduce_on_cuda("x", &mut first)?;
            cx.all_gather_on_cuda("x", &first, &mut second)?;
            let moved = cuda.scratch(mpmd_core::aval::DType::F32, each)?;
            cx.permute_on_cuda("x", &first, &moved)?;
            let n = each;
            cuda.launch(
                &STEPS,
                "add",
                Grid::over(n),
                &[n.into(), (&moved).into(), (&mut first).into()],
            )?;
            cx.all_to_all_on_cuda("x", &first, &moved)?;
            cuda.copy(&moved, &mut first)?;
            let part = cuda.scratch(mpmd_core::aval::DType::F32, share)?;
            cx.reduce_scatter_on_cuda("x", &first, &part)?;
            return cuda.launch(
                &STEPS,
                "add",
                Grid::over(share),
                &[share.into(), (&part).into(), (&mut first).into()],
            );
        }
        let first = first.as_mut_slice::<f32>()?;
        let add = |y: &mut [f32], x: &[f32]| y.iter_mut().zip(x).for_each(|(y, x)| *y += x);
        cx.all_reduce("x", first)?;
        cx.all_gather("x", first, second.as_mut_slice::<f32>()?)?;
        let mut moved = vec![0.0; each];
        cx.permute("x", first, &mut moved)?;
        add(first, &moved);
        cx.all_to_all("x", first, &mut moved)?;
        first.copy_from_slice(&moved);
        let mut part = vec![0.0; share];
        cx.reduce_scatter("x", first, &mut part)?;
        add(first, &part);
        Ok(())
    });
    let jit = p
        .jit(kernel)
        .on(&mesh)
        .outputs(to.clone())
        .donate("0")
        .build()?;
    let x = p.device_put(&numbers(each * devices), to)?;
    let y = jit.call(p, vec![x])?;
    let mut found = Vec::new();
    for y in &y {
        for shard in y.addressable_shards()? {
            found.push(shard.data.to_vec::<f32>()?);
        }
    }
    Ok(found)
}

#[test]
fn collectives_give_cpu_bits_also_with_mixed_devices() {
    if softcuda::again!("SOFTCUDA_DEVICES" = "2") {
        return;
    }
    let _limit = watchdog(110);
    for devices in [1, 2, 3] {
        let [cpu, cuda] = [CPU, CUDA].map(|kind| {
            let mut p = alone(kind, devices);
            let found = collectives(&mut p, devices).unwrap();
            p.finish().unwrap();
            found
        });
        assert!(cuda == cpu, "{devices} devices");
    }
    let run = |kinds: &[DeviceKind]| -> Vec<_> {
        let simulation =
            Simulation::new(kinds.len(), 4).settings(|builder| builder.device_kinds(kinds));
        simulation
            .run(|p| collectives(p, 4))
            .into_iter()
            .map(|result| result.unwrap())
            .collect()
    };
    let cpu = run(&[CPU, CPU]);
    assert!(run(&[CPU, CUDA]) == cpu, "both kinds");
    assert!(run(&[CUDA, CUDA]) == cpu, "two processes");
}

#[test]
fn collective_reports_failure_of_another_device() {
    if softcuda::again!() {
        return;
    }
    let _limit = watchdog(60);
    let results = Simulation::new(2, 2)
        .settings(|builder| builder.device_kinds(&[CUDA, CPU]))
        .run(|p| {
            let mesh = p.mesh(&[("x", 2)])?;
            let infer = |x: &[ShapedArray]| {
                Ok(Signature::new(vec![x[0].clone()]).all_reduce("x", f32s([8])))
            };
            let kernel = fun("Half", infer, |cx, _, mut y| {
                if cx.cuda().is_none() {
                    return Err(Error::kernel("no part of mine"));
                }
                cx.zero(&mut y[0])?;
                cx.all_reduce_on_cuda("x", &mut y[0])
            });
            let jit = p
                .jit(kernel)
                .on(&mesh)
                .outputs(mesh.sharding(spec!["x"]))
                .build()?;
            let x = p.device_put(&numbers(16), mesh.sharding(spec!["x"]))?;
            let y = jit.call(p, vec![x])?;
            y[0].block_until_ready().map(|_| ())
        });
    for result in results {
        assert!(result.unwrap_err().to_string().contains("no part of mine"));
    }
}

#[test]
fn pipeline_of_both_device_kinds_passes_arrays_on() {
    if softcuda::again!("SOFTCUDA_PACE" = "seed:2", "SOFTCUDA_RACES" = "abort") {
        return;
    }
    let _limit = watchdog(60);
    let run = |kinds: &[DeviceKind]| -> Vec<_> {
        let simulation = Simulation::new(2, 2).settings(|builder| builder.device_kinds(kinds));
        let results = simulation.run(|p| {
            let mesh = p.mesh(&[("x", 2)])?;
            let sides = mesh.split("x")?;
            let mut calls = Vec::new();
            for side in &sides {
                calls.push(p.jit(Scale).on(side).outputs(side.replicated()).build()?);
            }
            let mut read = Vec::new();
            for step in 0..10 {
                let mut x = p.device_put(&numbers(2000), sides[0].replicated())?;
                for hop in 0..4 {
                    x = calls[hop % 2].call(p, (x, MpmdArray::scalar(0.9f32 + step as f32)))?;
                    x = p.device_put(&x, sides[(hop + 1) % 2].replicated())?;
                }
                read.push(x);
            }
            read.iter()
                .map(|x| Ok(x.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?))
                .collect::<Result<Vec<_>>>()
        });
        results.into_iter().map(|result| result.unwrap()).collect()
    };
    let cpu = run(&[CPU]);
    for kinds in [[CUDA, CPU], [CPU, CUDA], [CUDA, CUDA]] {
        assert!(run(&kinds) == cpu, "{kinds:?}");
    }
    assert!(cpu[0][9].is_some());
}

#[test]
fn traces_have_device_times_in_order() {
    if softcuda::again!("SOFTCUDA_PACE" = "seed:1") {
        return;
    }
    let _limit = watchdog(60);
    let folder = std::env::temp_dir().join(format!("mpmd-cuda-calls-{}", std::process::id()));
    let mut p = Program::builder()
        .device_kinds(&[CUDA])
        .trace(&folder)
        .alone()
        .unwrap();
    let mesh = p.mesh(&[("x", 1)]).unwrap();
    let scale = p
        .jit(Scale)
        .on(&mesh)
        .outputs(mesh.replicated())
        .build()
        .unwrap();
    let x = p.device_put(&numbers(2000), mesh.replicated()).unwrap();
    x.block_until_ready().unwrap();
    let mut y = x;
    for _ in 0..30 {
        y = scale.call(&mut p, (y, MpmdArray::scalar(1.0f32))).unwrap();
    }
    y.block_until_ready().unwrap();
    p.finish().unwrap();
    let (traces, problems) = mpmd_core::trace::ProcessTrace::read_all(&folder).unwrap();
    let run = mpmd_core::trace::TracedRun::merge(&traces, problems);
    std::fs::remove_dir_all(&folder).unwrap();
    let kernels: Vec<_> = run.kernels.iter().filter(|kernel| kernel.op >= 2).collect();
    assert_eq!(kernels.len(), 30);
    for kernel in &kernels {
        assert!(
            kernel.ended && kernel.since <= kernel.start && kernel.start <= kernel.end,
            "{kernel:?}"
        );
        let operation = run.operation(0, kernel.op).unwrap();
        assert!(operation.issued <= kernel.end && kernel.end <= operation.ended.unwrap() + 1e-6);
    }
    assert!(
        kernels
            .windows(2)
            .all(|pair| pair[0].end <= pair[1].start + 1e-6),
        "one after the other"
    );
    let busy: f64 = kernels.iter().map(|kernel| kernel.end - kernel.start).sum();
    assert!(busy > 0.0);
}
