//! Layers of stages on CUDA devices, with the feature `cuda`.
//!
//! Each returns `None` for tensors that are not on one, or that it does not take; then the caller
//! has another way.

mod activation;
mod attention;
mod collectives;
mod device_blocks;
mod embedding;
mod linear;
mod loss;
mod norm;
mod op;
mod rows;

pub(crate) use activation::activate;
pub(crate) use attention::{CudaSight, attention, self_attention};
pub(crate) use collectives::collective;
pub(crate) use device_blocks::{DeviceBlocks, paged};
pub(crate) use embedding::embedding;
pub(crate) use linear::{activated, add_bias, grouped, linear};
pub(crate) use loss::cross_entropy;
pub(crate) use norm::norm;
pub(crate) use rows::{dropout, rotary, softmax};

use mpmd_core::cuda::Source;
use mpmd_core::cuda::layers::sources;
use mpmd_device::cuda::kernels::ADD;
use mpmd_layout::aval::DType;

/// Returns the sources of the kernels that a stage may launch, for parameters of dtypes `dtypes`
/// and attentions of head dimensions `heads`.
pub(crate) fn kernels(
    dtypes: impl Iterator<Item = DType>,
    heads: impl Iterator<Item = usize>,
) -> Vec<&'static Source> {
    let heads: Vec<usize> = heads.collect();
    let halves = dtypes.filter(|dtype| *dtype == DType::Bf16).take(1);
    let mut all = vec![&ADD];
    for dtype in [DType::F32].into_iter().chain(halves) {
        let first = heads.first().copied().unwrap_or(usize::MAX);
        for dim in [first].iter().chain(&heads) {
            for source in sources(dtype, *dim) {
                if !all.iter().any(|known| std::ptr::eq(*known, source)) {
                    all.push(source);
                }
            }
        }
    }
    all
}
