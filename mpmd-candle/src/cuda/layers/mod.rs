//! Layers on CUDA devices. Each returns `None` for tensors that are not on one, or that it does not
//! take; then the caller has another way.

mod embedding;
mod linear;

pub(crate) use embedding::embedding;
pub(crate) use linear::{add_bias, grouped, linear};
