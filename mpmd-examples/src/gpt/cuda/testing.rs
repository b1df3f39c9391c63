//! Helpers of the tests in this module: they run work on a CUDA device, for a comparison with the
//! host.

use mpmd::Program;
use mpmd::cuda::{CUBLAS, Math, Part, Source};
use mpmd::prelude::*;
use mpmd::topology::DeviceKind;
use mpmd::{
    HostArray,
    aval::{DType, Element},
};
use mpmd_core::device::cuda::{NoCuda, found};

use super::{Device, KERNELS, device};
use crate::gpt::testing::random;

/// True if a test of a CUDA device must return: CUDA is not built, or the test was run again with
/// the software driver. With `MPMD_TEST_GPU=1` it runs here, on a real device.
macro_rules! elsewhere {
    () => {
        crate::gpt::cuda::testing::is_missing() || softcuda::again!("MPMD_CUDA_CACHE" = "")
    };
}
pub(super) use elsewhere;

/// True if CUDA is not built. Prints a message then.
pub(super) fn is_missing() -> bool {
    let missing = matches!(found(), Err(NoCuda::NotBuilt));
    if missing {
        eprintln!("skipped: this test was built without the feature `cuda`");
    }
    missing
}

/// A test's work on a device. The arguments are the device, the inputs and the outputs.
trait Work: Fn(Device<'_>, &[Part<'_>], &[Part<'_>]) -> Result<()> + Send + Sync + 'static {}

impl<F> Work for F where
    F: Fn(Device<'_>, &[Part<'_>], &[Part<'_>]) -> Result<()> + Send + Sync + 'static
{
}

/// A kernel that runs `work` on a CUDA device. Its outputs have the shapes `outputs`.
struct Test<F> {
    outputs: Vec<ShapedArray>,
    work: F,
}

impl<F: Work> Kernel for Test<F> {
    type In = Vec<MpmdArray>;
    type Out = Vec<MpmdArray>;

    fn infer(&self, _: &Vec<ShapedArray>) -> Result<Signature<Vec<ShapedArray>>> {
        Ok(Signature::new(self.outputs.clone()))
    }

    fn run(&self, cx: &mut Context<'_>, x: Vec<View<'_>>, mut y: Vec<ViewMut<'_>>) -> Result<()> {
        let device = device::<f32>(cx, Math::F32)?.expect("the test's device is a CUDA device");
        let x: Vec<Part<'_>> = x.iter().map(Part::from).collect();
        let y: Vec<Part<'_>> = y.iter_mut().map(Part::from).collect();
        (self.work)(device, &x, &y)
    }

    fn cuda(&self) -> Vec<&'static Source> {
        vec![&KERNELS, &CUBLAS]
    }
}

/// Runs `work` on `inputs` on a CUDA device, and waits for the end. Returns the outputs, which have
/// the given dtypes and lengths.
///
/// # Panics
///
/// If the work fails.
pub(super) fn on_device(
    inputs: Vec<MpmdArray>,
    outputs: &[(DType, usize)],
    work: impl Fn(Device<'_>, &[Part<'_>], &[Part<'_>]) -> Result<()> + Send + Sync + 'static,
) -> Vec<HostArray> {
    let run = || -> Result<Vec<HostArray>> {
        let mut p = Program::builder().device_kinds(&[DeviceKind::Cuda]).alone()?;
        let mesh = p.mesh(&[("only", 1)])?;
        let outputs =
            outputs.iter().map(|(dtype, len)| ShapedArray::new(&[*len], *dtype)).collect();
        let test = p.jit(Test { outputs, work }).on(&mesh).outputs(mesh.replicated()).build()?;
        let outputs = test.call(&mut p, inputs)?;
        let outputs = outputs.iter().map(|output| Ok(output.to_host()?.expect("one process")));
        let outputs = outputs.collect::<Result<Vec<_>>>()?;
        p.finish()?;
        Ok(outputs)
    };
    run().unwrap()
}

/// Runs `work` as [`on_device`] does, with outputs that are all `f32` and have the given lengths.
pub(super) fn floats_on_device(
    inputs: Vec<MpmdArray>,
    outputs: &[usize],
    work: impl Fn(Device<'_>, &[Part<'_>], &[Part<'_>]) -> Result<()> + Send + Sync + 'static,
) -> Vec<Vec<f32>> {
    let outputs: Vec<(DType, usize)> = outputs.iter().map(|len| (DType::F32, *len)).collect();
    on_device(inputs, &outputs, work).iter().map(|output| output.to_vec::<f32>().unwrap()).collect()
}

/// Converts values to an input array of one dimension.
pub(super) fn array<T: Element>(values: &[T]) -> MpmdArray {
    MpmdArray::from_slice(&[values.len()], values).unwrap()
}

/// Returns floats in `[-1, 1)` that depend only on the seed.
pub(super) fn floats(len: usize, seed: u64) -> Vec<f32> {
    random(len, seed).into_iter().map(|value| value as f32).collect()
}

/// Checks that two arrays agree up to the rounding of sums in another order.
///
/// # Panics
///
/// If they differ by more.
pub(super) fn assert_near(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len(), "elements of {name}");
    for (at, (found, expected)) in found.iter().zip(expected).enumerate() {
        let near = (found - expected).abs() <= 2e-5 * (1.0 + expected.abs());
        assert!(near, "{name}[{at}]: {found}, not {expected}");
    }
}
