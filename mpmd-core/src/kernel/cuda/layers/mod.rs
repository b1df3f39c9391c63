//! Layers of neural networks for kernels that run on a CUDA device. Products of matrices are
//! [`Cuda::gemm`].
//!
//! The functions issue work and return, like all calls of [`Cuda`]. Arrays of one call have the
//! same dtype, `f32` or `bf16`, unless a function says otherwise. All arithmetic and all sums are
//! in `f32`, and so are gradients of parameters. Sums have fixed orders: equal inputs give equal
//! bits on equal devices. A part may be longer than needed: its first elements are used. A result
//! may be an input only where a function says so.
//!
//! A kernel lists the sources of the layers that it calls in
//! [`Kernel::cuda`](crate::kernel::Kernel::cuda), or all of them by [`sources`].

mod activation;
mod attention;
mod columns;
mod elementwise;
mod embedding;
mod norm;
mod paged_attention;
mod rotary;
mod softmax;

pub use activation::{
    ActivationCurve, GateHalves, activate, activate_backward, gate, gate_backward,
};
pub use attention::{CudaAttention, CudaMask, Heads};
pub use columns::sum_rows;
pub use elementwise::{add, add_bias, add_scaled, convert, dropout};
pub use embedding::CudaEmbedding;
pub use mpmd_device::cuda::kernels::{
    ACTIVATION, ATTENTION_64, ATTENTION_128, ATTENTION_256, COLUMNS, ELEMENTWISE, EMBEDDING, NORM,
    PAGED, ROTARY, SOFTMAX, SourcePair,
};
pub use norm::CudaNorm;
pub use paged_attention::{AttentionScores, PagedKeysValues, PagedTokens};
pub use rotary::{Rotary, RotaryAngles};
pub use softmax::{CudaCrossEntropy, softmax, softmax_backward};

use super::{Arg, Cuda, CudaPart, Grid, Source};
use crate::error::{Error, Result};
use mpmd_layout::aval::DType;

/// Returns the CUDA sources of all layers for arrays of `dtype`, with attention for heads of `dim`
/// elements. Empty unless the dtype is `f32` or `bf16`.
pub fn sources(dtype: DType, dim: usize) -> Vec<&'static Source> {
    let pairs = [
        &ACTIVATION,
        &COLUMNS,
        &ELEMENTWISE,
        &EMBEDDING,
        &NORM,
        &PAGED,
        &ROTARY,
        &SOFTMAX,
    ];

    let all = pairs.into_iter().chain(attention::source(dim));
    all.filter_map(|pair| pair.of(dtype)).collect()
}

/// The shape of a matrix, `[rows, width]`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MatrixShape {
    /// Number of rows.
    pub rows: usize,
    /// Elements of a row.
    pub width: usize,
}

impl MatrixShape {
    /// Creates the shape of `rows` rows of `width` elements each.
    pub fn new(rows: usize, width: usize) -> Self {
        Self { rows, width }
    }

    /// Returns the number of elements, or `usize::MAX` if it is larger.
    fn elements(self) -> usize {
        product(&[self.rows, self.width])
    }
}

/// The destination of a result. The result overwrites the old values, unless [`add_to`] created the
/// target.
#[derive(Clone, Copy, Debug)]
pub struct ResultTarget<'a> {
    part: CudaPart<'a>,
    adds: bool,
}

/// Returns a destination that adds a result to its old values.
pub fn add_to<'a>(part: impl Into<CudaPart<'a>>) -> ResultTarget<'a> {
    ResultTarget {
        part: part.into(),
        adds: true,
    }
}

impl<'a, P: Into<CudaPart<'a>>> From<P> for ResultTarget<'a> {
    fn from(part: P) -> Self {
        Self {
            part: part.into(),
            adds: false,
        }
    }
}

/// Number of threads in a block.
const THREADS: u32 = 256;

/// Returns a reference to an array of arguments.
macro_rules! args {
    ($($value:expr),* $(,)?) => { &[$($crate::kernel::cuda::Arg::from($value)),*] };
}
use args;

/// Checks the arguments of a function, and launches it.
#[derive(Clone, Copy)]
struct LayerCall<'a> {
    cuda: &'a Cuda<'a>,
    /// The name of the function in messages.
    name: &'static str,
    source: &'static Source,
    dtype: DType,
}

impl<'a> LayerCall<'a> {
    /// Creates a call for arrays of the dtype of `like`.
    fn new(
        cuda: &'a Cuda<'a>,
        name: &'static str,
        pair: &'static SourcePair,
        like: &CudaPart<'_>,
    ) -> Result<Self> {
        let dtype = like.dtype();
        let source = pair
            .of(dtype)
            .ok_or_else(|| Error::kernel(format!("{name} of {dtype}: expected f32 or bf16")))?;
        Ok(Self {
            cuda,
            name,
            source,
            dtype,
        })
    }

    /// Checks arrays of the call's dtype, given as (name, part, minimum number of elements).
    fn has(&self, parts: &[(&str, &CudaPart<'_>, usize)]) -> Result<()> {
        parts
            .iter()
            .try_for_each(|(name, part, least)| self.one(name, part, self.dtype, *least))
    }

    /// Checks arrays of `f32`, given as (name, part, minimum number of elements).
    fn has_f32(&self, parts: &[(&str, &CudaPart<'_>, usize)]) -> Result<()> {
        parts
            .iter()
            .try_for_each(|(name, part, least)| self.one(name, part, DType::F32, *least))
    }

    fn one(&self, name: &str, part: &CudaPart<'_>, dtype: DType, least: usize) -> Result<()> {
        if part.dtype() != dtype {
            return self.fail(&format!("{name} is of {}: expected {dtype}", part.dtype()));
        }
        let elements = part.elements().unwrap_or(0);
        if elements < least {
            return self.fail(&format!("{name} has {elements} elements: expected {least}"));
        }
        Ok(())
    }

    /// Checks an array of indices, and returns the bytes per index.
    fn indices(&self, name: &str, part: &CudaPart<'_>, least: usize) -> Result<u32> {
        match part.dtype() {
            DType::U8 | DType::U32 | DType::I64 => {}
            other => return self.fail(&format!("{name} is of {other}: expected u8, u32 or i64")),
        }
        self.one(name, part, part.dtype(), least)?;
        // At most 8.
        Ok(part.dtype().size() as u32)
    }

    /// Checks that these parts, which get results, are writable.
    fn writes(&self, parts: &[&CudaPart<'_>]) -> Result<()> {
        match parts.iter().all(|part| part.is_writable()) {
            true => Ok(()),
            false => self.fail("a result cannot go to values that are only read"),
        }
    }

    fn fail<T>(&self, why: &str) -> Result<T> {
        Err(Error::kernel(format!("{}: {why}", self.name)))
    }

    /// Launches a function with `blocks` blocks. Does nothing if `blocks` is 0.
    fn blocks(&self, function: &str, blocks: usize, args: &[Arg<'_>]) -> Result<()> {
        self.shared(function, blocks, 0, args)
    }

    /// Launches a function with `blocks` blocks that have `bytes` bytes of shared memory each.
    fn shared(&self, function: &str, blocks: usize, bytes: u32, args: &[Arg<'_>]) -> Result<()> {
        match i32::try_from(blocks) {
            Ok(0) => Ok(()),
            // Not negative.
            Ok(blocks) => self.launch(
                function,
                Grid::new(blocks as u32, THREADS).shared(bytes),
                args,
            ),
            Err(_) => self.fail(&format!("{blocks} blocks are more than a device takes")),
        }
    }

    /// Launches a function with `threads` threads.
    fn over(&self, function: &str, threads: usize, args: &[Arg<'_>]) -> Result<()> {
        self.launch(function, Grid::over(threads), args)
    }

    fn launch(&self, function: &str, grid: Grid, args: &[Arg<'_>]) -> Result<()> {
        self.cuda.launch(self.source, function, grid, args)
    }
}

/// Returns the product of sizes. `usize::MAX` if the product is larger: no part has as many
/// elements.
fn product(sizes: &[usize]) -> usize {
    sizes
        .iter()
        .fold(1, |product: usize, size| product.saturating_mul(*size))
}

/// Returns the kernel arguments for a cap: 1 or 0 for its presence, and its value.
fn capped(cap: Option<f32>) -> [Arg<'static>; 2] {
    [
        u32::from(cap.is_some()).into(),
        cap.unwrap_or_default().into(),
    ]
}

/// Returns the number of threads for a matrix if each handles four elements of a row.
fn fours(rows: usize, width: usize) -> usize {
    product(&[rows, width.div_ceil(4)])
}
