//! What work on a CUDA device is described by: grids of launches, and the arithmetic of products.

use mpmd_layout::aval::DType;

/// Threads of a block where [`Grid::over`] chooses.
const THREADS: u32 = 256;

/// How many threads run a function.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Grid {
    /// Blocks along x, y and z.
    pub blocks: (u32, u32, u32),
    /// Threads of each block along x, y and z.
    pub threads: (u32, u32, u32),
    /// Shared memory of each block beside what the function declares, in bytes. More than 48 KiB
    /// are asked of the driver as the function is launched first.
    pub shared_bytes: u32,
}

impl Grid {
    /// One thread for each element, in blocks of 256; at least one block, so that no elements are
    /// no error. The last block has threads beyond the last element: functions look. Above 2³¹
    /// blocks, each thread has several elements: functions that may see so many go on in steps of
    /// the grid's size.
    pub fn over(elements: usize) -> Self {
        let blocks = elements.div_ceil(THREADS as usize).clamp(1, i32::MAX as usize);
        // Just clamped.
        Self::new(blocks as u32, THREADS)
    }

    /// So many blocks of so many threads, along x.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        Self { blocks: (blocks, 1, 1), threads: (threads, 1, 1), shared_bytes: 0 }
    }

    /// The same with so much shared memory for each block.
    #[must_use]
    pub const fn shared(self, bytes: u32) -> Self {
        Self { shared_bytes: bytes, ..self }
    }
}

/// How `f32` operands are multiplied. Sums are in `f32` always.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum Math {
    /// As they are.
    #[default]
    F32,
    /// Rounded to 10 bits of mantissa first, which tensor cores are quick with.
    Tf32,
    /// Rounded to `f16` first, which also has less range.
    F16,
    /// Rounded to `bf16` first: 7 bits of mantissa.
    Bf16,
}

/// What elements of a product are, to cuBLAS.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Types {
    /// Of both factors.
    pub(crate) factors: DType,
    pub(crate) result: DType,
    pub(crate) math: Math,
}
