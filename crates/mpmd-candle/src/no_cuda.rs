//! The place of `cuda` in builds without that feature: there are no CUDA devices for candle.

use std::convert::Infallible;
use std::marker::PhantomData;

use candle_core::{Device, Tensor};
use mpmd_core::Result as CoreResult;
use mpmd_core::kernel::{Context, View, ViewMut};

/// Stand-in for access to a CUDA device in a build without the feature `cuda`. No value exists.
pub(crate) struct OnCuda<'a>(Infallible, PhantomData<&'a ()>);

/// Stand-in for a gradient on a CUDA device in a build without the feature `cuda`. No value exists.
pub(crate) struct DeviceGradient<'a>(Infallible, PhantomData<&'a ()>);

/// Returns false: without the feature `cuda`, no tensor is on a CUDA device.
pub(crate) fn are_on_cuda(_: &[&Tensor]) -> bool {
    false
}

impl<'a> OnCuda<'a> {
    pub(crate) fn enter(_: &Context<'a>) -> CoreResult<Option<Self>> {
        Ok(None)
    }

    pub(crate) fn keep_uploads(&mut self) {
        match self.0 {}
    }

    pub(crate) fn device(&self) -> Device {
        match self.0 {}
    }

    pub(crate) fn tensor_of(&self, _: &View<'_>, _: bool) -> CoreResult<Tensor> {
        match self.0 {}
    }

    pub(crate) fn refresh(&self, _: &Tensor, _: &View<'_>) -> CoreResult<()> {
        match self.0 {}
    }

    pub(crate) fn write(&self, _: &Tensor, _: &mut ViewMut<'_>) -> CoreResult<()> {
        match self.0 {}
    }

    pub(crate) fn add(&self, _: &Tensor, _: &mut ViewMut<'_>) -> CoreResult<()> {
        match self.0 {}
    }

    pub(crate) fn gradient<'g>(&'g self, _: &'g mut ViewMut<'_>) -> DeviceGradient<'g> {
        match self.0 {}
    }
}
