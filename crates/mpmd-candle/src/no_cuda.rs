//! The place of `cuda` in builds without that feature: there are no CUDA devices for candle.

use std::convert::Infallible;
use std::marker::PhantomData;

use candle_core::{Device, Tensor};
use mpmd_core::Result as CoreResult;
use mpmd_core::kernel::{Context, View, ViewMut};

/// Access to candle's device during a pass on a CUDA device. There is none.
pub(crate) struct OnCuda<'a>(Infallible, PhantomData<&'a ()>);

/// The gradient of a parameter on a CUDA device. There is none.
pub(crate) struct DeviceGradient<'a>(Infallible, PhantomData<&'a ()>);

/// Returns true if the tensors are on CUDA devices.
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
