//! Descriptions of work on a CUDA device: the grids of launches and the arithmetic of products.

use mpmd_layout::aval::DType;

/// Number of threads per block in [`Grid::over`].
const THREADS: u32 = 256;

/// The numbers of blocks and threads with which a function is launched.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Grid {
    /// Number of blocks along x, y and z.
    pub blocks: (u32, u32, u32),
    /// Number of threads per block along x, y and z.
    pub threads: (u32, u32, u32),
    /// Dynamic shared memory per block in bytes, in addition to the function's static shared
    /// memory. Above 48 KiB, the launch requests it from the driver.
    pub shared_bytes: u32,
}

impl Grid {
    /// Returns a grid with one thread per element, in blocks of 256 threads, and at least one
    /// block.
    ///
    /// The last block has threads beyond the last element, so the function must compare its index
    /// with the number of elements. The grid has at most 2³¹ - 1 blocks. If there are more elements
    /// than threads, the function must loop in steps of the grid's size.
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

    /// Sets the dynamic shared memory per block, in bytes.
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
    /// Factors are first rounded to 10 bits of mantissa, which is fast on tensor cores.
    Tf32,
    /// Factors are first rounded to `f16`, which also has a smaller range.
    F16,
    /// Factors are first rounded to `bf16`: 7 bits of mantissa.
    Bf16,
}

/// The dtypes and the precision of a matrix product.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Types {
    /// The dtype of both factors.
    pub factors: DType,
    /// The dtype of the result.
    pub result: DType,
    /// The precision of products of `f32`.
    pub math: Math,
}
