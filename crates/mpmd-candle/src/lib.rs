//! candle functions as kernels, and candle models as stages of a pipeline.
//!
//! [`stage`] makes a stage of a pipeline from a model's constructor and its forward function.
//! [`function`] makes a kernel from a function of tensors. [`nn`] has the layers of `candle_nn`,
//! all with gradients.

// `#[derive(Tree)]` names this crate from outside.
extern crate mpmd_core as mpmd;

use mpmd_layout::topology::DeviceKind;

mod bridge;
mod collectives;
#[cfg_attr(not(feature = "cuda"), path = "no_cuda.rs")]
mod cuda;
#[cfg_attr(not(feature = "cuda"), path = "no_cuda_layers.rs")]
mod cuda_layers;
mod cx;
mod dtypes;
mod exchange;
mod function;
mod matmul;
pub mod nn;
mod params;
mod pass;
mod shortage;
mod stage;
mod tensors;
mod threads;
mod tree_form;

pub use candle_core::{self, D, DType, Device, IndexOp, Module, Result, Tensor, Var};
pub use candle_nn::VarBuilder;
pub use cx::Cx;
pub use function::{FunctionKernel, TensorFunction, function};
pub use params::parts_builder;
pub use stage::{CandleStage, named, stage};
pub use tensors::{TensorLeaf, Tensors, Values};

/// Returns true if candle stages compute on devices of this kind. Otherwise they compute in host
/// memory.
pub fn computes_on(kind: DeviceKind) -> bool {
    match kind {
        DeviceKind::Cpu => true,
        DeviceKind::Cuda => cfg!(feature = "cuda"),
    }
}
