//! The place of `cuda_layers` in builds without the feature `cuda`: no tensor is on a CUDA device.

use std::convert::Infallible;
use std::ops::Range;

use candle_core::{CudaStorage, Layout, Result, Shape, Tensor, bail};
use mpmd_core::cuda::Source;
use mpmd_core::cuda::layers::ActivationCurve;
use mpmd_layout::aval::DType;
use mpmd_layout::random::Key;

use crate::exchange::CollectiveStep;

/// Returns an error: without the feature `cuda`, no collective runs on a CUDA device.
pub(crate) fn collective(
    axis: &str,
    _: CollectiveStep,
    _: &CudaStorage,
    _: &Layout,
) -> Result<(CudaStorage, Shape)> {
    bail!("a collective over axis {axis:?} on a CUDA device: build with the feature `cuda`")
}

/// Returns `None`, so that the caller computes the layer on the CPU.
pub(crate) fn linear(
    _: &Tensor,
    _: &Tensor,
    _: Option<&Tensor>,
    _: &[usize],
) -> Option<Result<Tensor>> {
    None
}

pub(crate) fn grouped(
    _: &Tensor,
    _: &Tensor,
    _: impl Iterator<Item = Range<usize>>,
) -> Option<Result<Tensor>> {
    None
}

pub(crate) fn add_bias(y: &Tensor, bias: &Tensor) -> Result<Tensor> {
    y.broadcast_add(bias)
}

pub(crate) fn embedding(_: &Tensor, _: &Tensor, _: &[usize]) -> Option<Result<Tensor>> {
    None
}

pub(crate) fn activated(
    _: [&Tensor; 3],
    _: ActivationCurve,
    _: &[usize],
) -> Option<Result<Tensor>> {
    None
}

pub(crate) fn activate(_: &Tensor, _: ActivationCurve) -> Option<Result<Tensor>> {
    None
}

pub(crate) fn norm(
    _: &Tensor,
    _: &Tensor,
    _: Option<&Tensor>,
    _: bool,
    _: f64,
) -> Option<Result<Tensor>> {
    None
}

/// The keys that each query sees.
pub(crate) enum CudaSight {
    All,
    Causal,
    From(Tensor),
    Additive(Tensor),
}

pub(crate) fn attention(
    _: [&Tensor; 3],
    sight: CudaSight,
    _: f64,
    _: Option<f64>,
) -> Option<Result<Tensor>> {
    match sight {
        CudaSight::From(tensor) | CudaSight::Additive(tensor) => drop(tensor),
        CudaSight::All | CudaSight::Causal => {}
    }
    None
}

pub(crate) fn self_attention(_: &Tensor, _: usize, _: bool, _: f64) -> Option<Result<Tensor>> {
    None
}

pub(crate) fn cross_entropy(
    _: &Tensor,
    _: &Tensor,
    _: Option<&Tensor>,
) -> Option<Result<(Tensor, Tensor)>> {
    None
}

pub(crate) fn softmax(_: &Tensor, _: bool) -> Option<Result<Tensor>> {
    None
}

pub(crate) fn dropout(_: &Tensor, _: Key, _: f32) -> Option<Result<Tensor>> {
    None
}

pub(crate) fn rotary(_: &Tensor, _: &Tensor, _: &Tensor) -> Option<Result<Tensor>> {
    None
}

/// Stand-in for keys and values on a CUDA device in a build without the feature `cuda`. No value
/// exists.
#[derive(Clone, Debug)]
pub(crate) struct DeviceBlocks(Infallible);

pub(crate) fn paged(
    cache: &mut Option<DeviceBlocks>,
    _: [usize; 3],
    _: [&Tensor; 3],
    _: &[(usize, usize, &[u32])],
    _: (f64, Option<f64>, Option<usize>),
) -> Option<Result<Tensor>> {
    cache.as_ref().map(|blocks| match blocks.0 {})
}

/// Returns no sources: without the feature `cuda` there are no CUDA kernels.
pub(crate) fn kernels(
    _: impl Iterator<Item = DType>,
    _: impl Iterator<Item = usize>,
) -> Vec<&'static Source> {
    Vec::new()
}
