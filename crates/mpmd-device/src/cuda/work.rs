//! Descriptions of work on a CUDA device: the grids of launches and the arithmetic of products.

use mpmd_layout::aval::DType;

/// Threads per block in [`Grid::over`].
const THREADS: u32 = 256;

/// The number of blocks and threads that run a function.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Grid {
    /// Blocks along x, y and z.
    pub blocks: (u32, u32, u32),
    /// Threads per block along x, y and z.
    pub threads: (u32, u32, u32),
    /// Dynamic shared memory of each block in bytes, in addition to the function's own
    /// declarations. If it is more than 48 KiB, the launch asks the driver for it.
    pub shared_bytes: u32,
}

impl Grid {
    /// Returns a grid with one thread for each element, in blocks of 256 threads, and at least one
    /// block.
    ///
    /// The last block has threads beyond the last element, so the function must compare its index
    /// with the number of elements. The grid has at most 2³¹ - 1 blocks. For more elements than
    /// that covers, the function must loop in steps of the grid's size.
    pub fn over(elements: usize) -> Self {
        let blocks = elements
            .div_ceil(THREADS as usize)
            .clamp(1, i32::MAX as usize);
        // Clamped above.
        Self::new(blocks as u32, THREADS)
    }

    /// Returns a grid of `blocks` blocks with `threads` threads each, along x.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self {
            blocks: (blocks, 1, 1),
            threads: (threads, 1, 1),
            shared_bytes: 0,
        }
    }

    /// Sets the dynamic shared memory of each block, in bytes.
    #[must_use]
    pub const fn shared(self, bytes: u32) -> Self {
        Self {
            shared_bytes: bytes,
            ..self
        }
    }
}

/// The precision of products of `f32` elements. Sums are always in `f32`.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Math {
    /// Full `f32` precision.
    #[default]
    F32,
    /// Operands are rounded to 10 bits of mantissa first, which is fast on tensor cores.
    Tf32,
    /// Operands are rounded to `f16` first, which also has a smaller range.
    F16,
    /// Operands are rounded to `bf16` first: 7 bits of mantissa.
    Bf16,
}

/// The dtypes and the precision of a product.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Types {
    /// The dtype of A and B.
    pub factors: DType,
    /// The dtype of the result.
    pub result: DType,
    /// The precision of products of `f32`.
    pub math: Math,
}
