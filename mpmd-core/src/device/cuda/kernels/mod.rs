//! What kernels of mpmd's own launch on CUDA devices.

use crate::device::cuda::source::Source;

/// Sums in place: `add_f32`, `add_f64`, `add_f16`, `add_bf16`, each of a number of elements, the
/// sums and what is added.
pub(crate) static ADD: Source = Source::cuda("add.cu", include_str!("add.cu")).exact();
