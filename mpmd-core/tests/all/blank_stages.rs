//! A stage that computes nothing, for tests of the memory of a pipeline.

use std::marker::PhantomData;

use mpmd_core::kernel::{Shapes, Views, ViewsMut};
use mpmd_core::pipeline::{
    Loss, Passes, PlacedShape, SideInput, SideShapes, Stage, StageContext, StageSignature,
};
use mpmd_core::prelude::*;
use mpmd_core::tree::Empty;

/// The output of a [`Blank`] stage.
pub(crate) trait Output: Tree<Leaf = MpmdArray> + 'static {
    /// The stage's side input.
    type Side: Tree<Leaf = MpmdArray>;

    fn shapes(elements: usize) -> Shapes<Self>;
}

impl Output for MpmdArray {
    type Side = Empty<MpmdArray>;

    fn shapes(elements: usize) -> ShapedArray {
        f32s([elements])
    }
}

/// The output of the last stage.
impl Output for Loss<MpmdArray> {
    type Side = MpmdArray;

    fn shapes(_: usize) -> Loss<ShapedArray> {
        Loss::new(f32s([]), f32s([]))
    }
}

/// A stage of which each pass calls `before` and then writes a constant to all that it makes.
pub(crate) struct Blank<F, O> {
    /// Called first in each pass. Its argument is the number of gradients that the pass makes, and
    /// 1 in a forward pass.
    before: F,
    /// Elements of an activation, and of a residual.
    elements: usize,
    /// `None` if the stage keeps its inputs and has one backward pass.
    residuals: Option<Residuals>,
    output: PhantomData<fn() -> O>,
}

/// The numbers of residuals of a stage with two backward passes.
#[derive(Clone, Copy)]
pub(crate) struct Residuals {
    pub(crate) forward: usize,
    pub(crate) weight: usize,
    /// The first ones, which are residuals of both kinds.
    pub(crate) kept: usize,
}

impl<F, O> Blank<F, O> {
    pub(crate) fn new(before: F, elements: usize, residuals: Option<Residuals>) -> Self {
        Self {
            before,
            elements,
            residuals,
            output: PhantomData,
        }
    }
}

pub(crate) fn write(out: &mut ViewMut<'_>) -> Result<()> {
    Ok(out.fill(0.5f32)?)
}

impl<F, O> Stage for Blank<F, O>
where
    F: Fn(u64) -> Result<()> + Send + Sync + 'static,
    O: Output,
{
    type Params = MpmdArray;
    type In = MpmdArray;
    type Out = O;

    fn infer(
        &self,
        _: &ShapedArray,
        _: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<Shapes<O>>> {
        let signature = StageSignature::new(O::shapes(self.elements));
        let Some(Residuals {
            forward,
            weight,
            kept,
        }) = self.residuals
        else {
            return Ok(signature);
        };
        let some = |count| vec![PlacedShape::replicated(f32s([self.elements])); count];
        let signature = signature
            .residual(some(forward))
            .weight_residual(some(weight));
        Ok((0..kept)
            .map(|i| i.to_string())
            .fold(signature, |all, i| all.keep(i.clone(), i)))
    }

    fn side(&self) -> SideInput {
        SideInput::of::<O::Side>()
    }

    fn passes(&self) -> Passes {
        if self.residuals.is_some() {
            Passes::Split
        } else {
            Passes::Fused
        }
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: View<'_>,
        _: View<'_>,
        y: ViewsMut<'_, O>,
    ) -> Result<()> {
        (self.before)(1)?;
        if self.residuals.is_some() {
            let mut residual: Vec<ViewMut<'_>> = cx.residual_mut()?;
            residual.iter_mut().try_for_each(write)?;
        }
        y.into_leaves().iter_mut().try_for_each(write)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: View<'_>,
        _: Views<'_, O>,
        mut dx: Option<ViewMut<'_>>,
        mut gradient: ViewMut<'_>,
    ) -> Result<()> {
        (self.before)(2)?;
        cx.input::<View<'_>>()?;
        dx.iter_mut().try_for_each(write)?;
        write(&mut gradient)
    }

    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: View<'_>,
        _: Views<'_, O>,
        mut dx: Option<ViewMut<'_>>,
    ) -> Result<()> {
        (self.before)(1)?;
        dx.iter_mut().try_for_each(write)?;
        let kept = self.residuals.map_or(0, |residuals| residuals.kept);
        let mut residual: Vec<ViewMut<'_>> = cx.weight_residual_mut()?;
        residual[kept..].iter_mut().try_for_each(write)
    }

    fn backward_weight(
        &self,
        _: &mut StageContext<'_, '_>,
        mut gradient: ViewMut<'_>,
    ) -> Result<()> {
        (self.before)(1)?;
        write(&mut gradient)
    }
}
