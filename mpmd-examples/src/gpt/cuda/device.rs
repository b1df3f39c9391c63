//! A CUDA device as the parts of the model use it: rows, elements, products.

use mpmd::aval::DType;
use mpmd::cuda::{Arg, Cuda, Gemm, Grid, Math, Part, Scratch};
use mpmd::prelude::*;

use super::KERNELS;
use crate::gpt::stages::Float;

/// Threads that a row's work is done by.
const WARP: u32 = 32;

/// Rows of a block.
const WARPS: u32 = 4;

/// Threads of a block that has a thread for each element.
const THREADS: u32 = 256;

/// Most blocks of a launch: several for each of the largest device's processors. What is left the
/// same ones do.
const MOST_BLOCKS: usize = 1 << 16;

/// Where work is given to a device, in order.
#[derive(Clone, Copy)]
pub(crate) struct Device<'c> {
    cuda: Cuda<'c>,
    math: Math,
}

/// The device that a kernel runs on, where it is a CUDA device; its products are computed as `math`
/// says.
///
/// # Errors
///
/// Where it is one and the kernel computes in other numbers than `f32`.
pub(crate) fn device<'c, T: Float>(cx: &mut Context<'c>, math: Math) -> Result<Option<Device<'c>>> {
    let Some(cuda) = cx.cuda() else { return Ok(None) };
    if T::DTYPE != DType::F32 {
        let problem = format!("on CUDA devices the model is computed in f32, not in {}", T::DTYPE);
        return Err(Error::kernel(problem));
    }
    Ok(Some(Device { cuda, math }))
}

/// Products of dense row-major matrices: `out [m, n]`, `k` being the columns of the one and the
/// rows of the other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) k: usize,
    pub(crate) n: usize,
    /// How many there are, one behind the other in all three.
    pub(crate) batch: usize,
    /// Whether the product is added to what is there.
    pub(crate) add: bool,
}

impl Product {
    /// One product, written over what is there.
    pub(crate) fn new(m: usize, k: usize, n: usize) -> Self {
        Self { m, k, n, batch: 1, add: false }
    }

    /// As many, one behind the other.
    pub(crate) fn batch(self, batch: usize) -> Self {
        Self { batch, ..self }
    }

    /// Added to what is there.
    pub(crate) fn added(self) -> Self {
        Self { add: true, ..self }
    }
}

impl<'c> Device<'c> {
    /// The device without the words of this module.
    pub(crate) fn cuda(self) -> Cuda<'c> {
        self.cuda
    }

    /// Memory for `elements` floats until the work that is issued in this call is over.
    pub(crate) fn floats(self, elements: usize) -> Result<Scratch<'c>> {
        self.cuda.scratch(DType::F32, elements)
    }

    /// The same for doubles.
    pub(crate) fn doubles(self, elements: usize) -> Result<Scratch<'c>> {
        self.cuda.scratch(DType::F64, elements)
    }

    /// A warp for each of `rows`.
    pub(crate) fn rows(self, function: &'static str, rows: usize, args: &[Arg<'_>]) -> Result<()> {
        let blocks = rows.div_ceil(WARPS as usize).min(MOST_BLOCKS);
        self.launch(function, Grid::new(blocks as u32, WARPS * WARP), args)
    }

    /// A thread for each of `elements`.
    pub(crate) fn elements(
        self,
        function: &'static str,
        elements: usize,
        args: &[Arg<'_>],
    ) -> Result<()> {
        let blocks = elements.div_ceil(THREADS as usize).min(MOST_BLOCKS);
        self.launch(function, Grid::new(blocks as u32, THREADS), args)
    }

    /// A function on a grid of its own.
    pub(crate) fn launch(self, function: &'static str, grid: Grid, args: &[Arg<'_>]) -> Result<()> {
        // Of nothing there is nothing to do, and no launch without blocks.
        if grid.blocks.0 == 0 || grid.blocks.1 == 0 {
            return Ok(());
        }
        self.cuda.launch(&KERNELS, function, grid, args)
    }

    /// `out = a b`, with `a [m, k]` and `b [k, n]`.
    pub(crate) fn matmul(self, of: Product, out: Part<'_>, a: Part<'_>, b: Part<'_>) -> Result<()> {
        self.gemm(of, (false, false), out, a, b)
    }

    /// `out = a bᵀ`, with `a [m, k]` and `b [n, k]`.
    pub(crate) fn matmul_nt(
        self,
        of: Product,
        out: Part<'_>,
        a: Part<'_>,
        b: Part<'_>,
    ) -> Result<()> {
        self.gemm(of, (false, true), out, a, b)
    }

    /// `out = aᵀ b`, with `a [k, m]` and `b [k, n]`.
    pub(crate) fn matmul_tn(
        self,
        of: Product,
        out: Part<'_>,
        a: Part<'_>,
        b: Part<'_>,
    ) -> Result<()> {
        self.gemm(of, (true, false), out, a, b)
    }

    fn gemm(
        self,
        of: Product,
        (transpose_a, transpose_b): (bool, bool),
        out: Part<'_>,
        a: Part<'_>,
        b: Part<'_>,
    ) -> Result<()> {
        let Product { m, k, n, batch, add } = of;
        if [m, n, batch].contains(&0) {
            return Ok(());
        }
        let mut gemm = Gemm::new(m, n, k).math(self.math);
        if transpose_a {
            gemm = gemm.transpose_a();
        }
        if transpose_b {
            gemm = gemm.transpose_b();
        }
        if add {
            gemm = gemm.beta(1.0);
        }
        if batch > 1 {
            gemm = gemm.batch(batch, [m * k, k * n, m * n]);
        }
        self.cuda.gemm(gemm, a, b, out)
    }
}

/// A size as kernels are told it.
///
/// # Errors
///
/// Where it is too large for one.
pub(crate) fn size(size: usize) -> Result<u32> {
    u32::try_from(size)
        .map_err(|_| Error::kernel(format!("a size of {size} is too large for a CUDA kernel")))
}

#[cfg(test)]
mod tests {
    use mpmd::topology::DeviceKind;

    use super::*;
    use crate::gpt::cuda::testing::elsewhere;

    /// A kernel of doubles.
    struct Doubles;

    impl Kernel for Doubles {
        type In = MpmdArray;
        type Out = MpmdArray;

        fn infer(&self, x: &ShapedArray) -> Result<Signature<ShapedArray>> {
            Ok(Signature::new(x.clone()))
        }

        fn run(&self, cx: &mut Context<'_>, _: View<'_>, _: ViewMut<'_>) -> Result<()> {
            device::<f64>(cx, Math::F32).map(drop)
        }
    }

    #[test]
    fn doubles_are_for_the_host() {
        if elsewhere!() {
            return;
        }
        let run = |kind| -> Result<()> {
            let mut p = mpmd::Program::builder().device_kinds(&[kind]).alone()?;
            let mesh = p.mesh(&[("only", 1)])?;
            let doubles = p.jit(Doubles).on(&mesh).outputs(mesh.replicated()).build()?;
            let done = doubles.call(&mut p, MpmdArray::scalar(1.0))?;
            done.block_until_ready()?;
            p.finish()
        };
        run(DeviceKind::Cpu).unwrap();
        let error = run(DeviceKind::Cuda).unwrap_err().to_string();
        assert!(error.contains("computed in f32, not in f64"), "{error}");
    }

    #[test]
    fn sizes_of_more_than_32_bits_are_refused() {
        assert_eq!(size(7).unwrap(), 7);
        assert!(size(1 << 32).unwrap_err().to_string().contains("too large"));
    }
}
