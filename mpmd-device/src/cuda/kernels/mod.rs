//! CUDA kernels of mpmd itself.

use crate::cuda::source::Source;

/// In-place sums: `add_f32`, `add_f64`, `add_f16`, `add_bf16`. Arguments: number of elements, sums,
/// summands.
pub static ADD: Source = Source::cuda("add.cu", include_str!("add.cu")).exact();

/// Optimisers, with the same bits as on the host: sums of squares, the figures of a step, updates
/// by AdamW and SGD.
pub static UPDATE: Source = Source::cuda("update.cu", include_str!("update.cu")).exact();
