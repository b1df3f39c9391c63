//! Kernels run on CUDA devices: on a driver in software, or on what there is (`MPMD_TEST_GPU=1`).

mod common;
#[path = "common/kernels.rs"]
mod kernels;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use common::watchdog;
use kernels::{fun, like_first};
use mpmd_core::cuda::{Cuda, Grid, Source};
use mpmd_core::prelude::*;
use mpmd_core::topology::DeviceKind;
use mpmd_core::{FailureKind, Simulation};

/// Whether the test is over for the calling process: it has run in another, or there is nothing to run.
macro_rules! elsewhere {
    ($($setting:tt)*) => {{
        if cfg!(feature = "cuda") {
            softcuda::again!($($setting)*)
        } else {
            println!("SKIPPED: built without the feature `cuda`");
            true
        }
    }};
}

const CUDA: DeviceKind = DeviceKind::Cuda;
const CPU: DeviceKind = DeviceKind::Cpu;

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

/// y = factor x, with the factor as a host value that both kinds of devices read.
struct Scale;

impl Kernel for Scale {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (x, _): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(x.clone()))
    }

    fn run(&self, cx: &mut Context<'_>, (x, factor): (View<'_>, View<'_>), mut y: ViewMut<'_>) -> Result<()> {
        let factor = factor.scalar::<f32>()?;
        if let Some(cuda) = cx.cuda() {
            let n = x.region().elements();
            let args = [n.into(), factor.into(), (&x).into(), (&mut y).into()];
            return cuda.launch(&STEPS, "scale", Grid::over(n), &args);
        }
        let pairs = y.as_mut_slice::<f32>()?.iter_mut().zip(x.as_slice::<f32>()?);
        pairs.for_each(|(y, x)| *y = x * factor);
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&STEPS]
    }
}

/// y += x, in place; remembers where y was.
struct Add(Arc<Mutex<Vec<u64>>>);

impl Add {
    fn new() -> Self {
        Self(Arc::default())
    }

    fn on(&self, cuda: Cuda<'_>, x: &View<'_>, y: &mut ViewMut<'_>) -> Result<()> {
        self.0.lock().unwrap().push(cuda.address(&*y)?);
        let n = y.region().elements();
        cuda.launch(&STEPS, "add", Grid::over(n), &[n.into(), x.into(), y.into()])
    }
}

impl Kernel for Add {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(&self, (_, y): &(ShapedArray, ShapedArray)) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(y.clone()).alias("1", ""))
    }

    fn run(&self, cx: &mut Context<'_>, (x, _): (View<'_>, View<'_>), mut y: ViewMut<'_>) -> Result<()> {
        if let Some(cuda) = cx.cuda() {
            return self.on(cuda, &x, &mut y);
        }
        y.as_mut_slice::<f32>()?.iter_mut().zip(x.as_slice::<f32>()?).for_each(|(y, x)| *y += x);
        Ok(())
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&STEPS]
    }
}

fn alone(kind: DeviceKind, devices: usize) -> Program {
    Program::builder().devices(devices).device_kinds(&[kind]).alone().unwrap()
}

/// Numbers whose sums are rounded.
fn numbers(count: usize) -> MpmdArray {
    let numbers: Vec<f32> = (0..count).map(|i| 1.0 / (i as f32 + 3.0)).collect();
    MpmdArray::from_slice(&[count], &numbers).unwrap()
}

fn read(x: &MpmdArray) -> Vec<f32> {
    x.to_host().unwrap().unwrap().to_vec::<f32>().unwrap()
}

/// A chain of calls, in place and not, with host values of all sizes.
fn chain(p: &mut Program, axis: usize) -> Result<Vec<Option<Vec<f32>>>> {
    let mesh = p.mesh(&[("x", axis)])?;
    let to = mesh.sharding(spec!["x"]);
    let scale = p.jit(Scale).on(&mesh).outputs(to.clone()).build()?;
    let add = p.jit(Add::new()).on(&mesh).outputs(to.clone()).donate("1").build()?;
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
    seen.iter().map(|x| Ok(x.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?)).collect()
}

#[test]
fn calls_give_the_bits_of_the_host_on_one_device_and_on_two() {
    if elsewhere!("SOFTCUDA_DEVICES" = "2") {
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
        assert!(cpu[1].as_ref().unwrap().iter().all(|x| x.is_finite() && *x > 0.0));
    }
}
