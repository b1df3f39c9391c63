//! Launches of a model's kernels and products on a CUDA device.

use mpmd::aval::DType;
use mpmd::cuda::{Arg, Cuda, Gemm, Grid, Math, Part, Scratch};
use mpmd::prelude::*;

use super::KERNELS;
use crate::gpt::stages::Float;

/// Threads that work on one row.
const WARP: u32 = 32;

/// Number of warps in a block. Each warp works on one row at a time.
const WARPS: u32 = 4;

/// Threads of a block in kernels with one thread per element.
const THREADS: u32 = 256;

/// Limit on the number of blocks of a launch: several for each multiprocessor of the largest
/// device. For larger arrays, each block does several parts.
const MOST_BLOCKS: usize = 1 << 16;

/// A CUDA device on which kernels and products are launched, in order.
#[derive(Clone, Copy)]
pub(crate) struct Device<'c> {
    cuda: Cuda<'c>,
    math: Math,
}

/// Returns the device on which a kernel runs, or `None` if it is not a CUDA device. `math` is the
/// precision of the device's matrix products.
///
/// # Errors
///
/// If it is a CUDA device and the kernel's float type is not `f32`.
pub(crate) fn device<'c, T: Float>(cx: &mut Context<'c>, math: Math) -> Result<Option<Device<'c>>> {
    let Some(cuda) = cx.cuda() else { return Ok(None) };
    if T::DTYPE != DType::F32 {
        let problem = format!("on CUDA devices the model is computed in f32, not in {}", T::DTYPE);
        return Err(Error::kernel(problem));
    }
    Ok(Some(Device { cuda, math }))
}

/// Sizes of products of dense row-major matrices. `out` is `[m, n]`. `k` is the number of columns
/// of the first operand and of rows of the second.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Product {
    pub(crate) m: usize,
    pub(crate) k: usize,
    pub(crate) n: usize,
    /// Number of products. The matrices of successive products are adjacent in all three arrays.
    pub(crate) batch: usize,
    /// True if the product is added to the values of `out`.
    pub(crate) add: bool,
}

impl Product {
    /// Creates the sizes of one product that overwrites `out`.
    pub(crate) fn new(m: usize, k: usize, n: usize) -> Self {
        Self { m, k, n, batch: 1, add: false }
    }

    /// Sets the number of products.
    pub(crate) fn batch(self, batch: usize) -> Self {
        Self { batch, ..self }
    }

    /// Makes the product add to the values of `out`.
    pub(crate) fn added(self) -> Self {
        Self { add: true, ..self }
    }
}

impl<'c> Device<'c> {
    /// Returns the CUDA interface of the device.
    pub(crate) fn cuda(self) -> Cuda<'c> {
        self.cuda
    }

    /// Allocates scratch memory for `elements` floats. It is freed after the work issued in this
    /// call.
    pub(crate) fn floats(self, elements: usize) -> Result<Scratch<'c>> {
        self.cuda.scratch(DType::F32, elements)
    }

    /// Allocates scratch memory for `elements` doubles, with the same lifetime as that of
    /// [`floats`](Self::floats).
    pub(crate) fn doubles(self, elements: usize) -> Result<Scratch<'c>> {
        self.cuda.scratch(DType::F64, elements)
    }

    /// Launches the kernel `function` with one warp per row, up to a limit on the number of blocks.
    /// Without rows, does nothing. Does not wait.
    pub(crate) fn rows(self, function: &'static str, rows: usize, args: &[Arg<'_>]) -> Result<()> {
        let blocks = rows.div_ceil(WARPS as usize).min(MOST_BLOCKS);
        self.launch(function, Grid::new(blocks as u32, WARPS * WARP), args)
    }

    /// Launches the kernel `function` with one thread per element, up to a limit on the number of
    /// blocks. Without elements, does nothing. Does not wait.
    pub(crate) fn elements(
        self,
        function: &'static str,
        elements: usize,
        args: &[Arg<'_>],
    ) -> Result<()> {
        let blocks = elements.div_ceil(THREADS as usize).min(MOST_BLOCKS);
        self.launch(function, Grid::new(blocks as u32, THREADS), args)
    }

    /// Launches the kernel `function` on a given grid, and does not wait. A grid without blocks
    /// does nothing.
    pub(crate) fn launch(self, function: &'static str, grid: Grid, args: &[Arg<'_>]) -> Result<()> {
        // Without elements there is no work, and CUDA rejects a launch without blocks.
        if grid.blocks.0 == 0 || grid.blocks.1 == 0 {
            return Ok(());
        }
        self.cuda.launch(&KERNELS, function, grid, args)
    }

    /// Issues `out = a b`, with `a [m, k]` and `b [k, n]`, or `out += a b` if `of.add` is set.
    pub(crate) fn matmul(self, of: Product, out: Part<'_>, a: Part<'_>, b: Part<'_>) -> Result<()> {
        self.gemm(of, (false, false), out, a, b)
    }

    /// Issues `out = a bᵀ`, with `a [m, k]` and `b [n, k]`, or `out += a bᵀ` if `of.add` is set.
    pub(crate) fn matmul_nt(
        self,
        of: Product,
        out: Part<'_>,
        a: Part<'_>,
        b: Part<'_>,
    ) -> Result<()> {
        self.gemm(of, (false, true), out, a, b)
    }

    /// Issues `out = aᵀ b`, with `a [k, m]` and `b [k, n]`, or `out += aᵀ b` if `of.add` is set.
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

/// Converts a size to the type of kernel arguments.
///
/// # Errors
///
/// If it has more than 32 bits.
pub(crate) fn size(size: usize) -> Result<u32> {
    u32::try_from(size)
        .map_err(|_| Error::kernel(format!("a size of {size} is too large for a CUDA kernel")))
}

#[cfg(test)]
mod tests {
    use mpmd::topology::DeviceKind;

    use super::*;
    use crate::gpt::cuda::testing::elsewhere;

    /// A kernel with the float type `f64`. It computes nothing.
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
    fn doubles_are_an_error_on_cuda_only() {
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
    fn sizes_over_32_bits_are_errors() {
        assert_eq!(size(7).unwrap(), 7);
        assert!(size(1 << 32).unwrap_err().to_string().contains("too large"));
    }
}
