//! Layers on CUDA devices. Each returns `None` for tensors that are not on one, or that it does not
//! take; then the caller has another way.

mod activation;
mod attention;
mod embedding;
mod linear;
mod loss;
mod norm;
mod rows;

pub(crate) use activation::activate;
pub(crate) use attention::{Sight, attention, self_attention};
pub(crate) use embedding::embedding;
pub(crate) use linear::{activated, add_bias, grouped, linear};
pub(crate) use loss::cross_entropy;
pub(crate) use norm::norm;
pub(crate) use rows::{dropout, rotary, softmax};

use mpmd_core::cuda::Source;
use mpmd_core::cuda::layers::sources;
use mpmd_device::cuda::kernels::ADD;
use mpmd_layout::aval::DType;

/// Returns the sources of kernels that a stage launches, whose parameters have these types.
pub(crate) fn kernels(mut dtypes: impl Iterator<Item = DType>) -> Vec<&'static Source> {
    let halves =
        if dtypes.any(|dtype| dtype == DType::Bf16) { sources(DType::Bf16) } else { Vec::new() };
    [vec![&ADD], sources(DType::F32), halves].concat()
}
