//! A stage with passes that take a set time and compute nothing. A few cores can so show the
//! behaviour of many ranks.

use std::time::{Duration, Instant};

use mpmd_core::kernel::{Views, ViewsMut};
use mpmd_core::pipeline::{Loss, PlacedShape, SideShapes, Stage, StageContext, StageSignature};
use mpmd_core::{pipeline, prelude::*};
use mpmd_schedule::StageCosts;

/// The lengths of a stage's passes in seconds.
#[derive(Clone, Copy)]
pub(super) struct Passes {
    pub(super) costs: StageCosts,
    /// True if a schedule's combined backward pass runs as one pass that yields both gradients.
    pub(super) fused: bool,
}

impl Passes {
    /// Returns the backward passes that a stage implements.
    fn passes(&self) -> pipeline::Passes {
        if self.fused { pipeline::Passes::Both } else { pipeline::Passes::Split }
    }
}

/// A stage other than the last, with passes that only wait.
pub(super) struct Waits(pub(super) Passes);

/// The last stage, with passes that only wait and a loss.
pub(super) struct WaitsLast(pub(super) Passes);

/// Elements of the arrays between stages.
pub(super) const ELEMENTS: usize = 16;

/// The assumed delay of a sleep's end. The rest of a wait is spent without sleeping.
const LATE: Duration = Duration::from_micros(150);

/// Blocks this thread for `seconds`, to within some microseconds.
fn wait(seconds: f64) {
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    if let Some(asleep) = end.checked_duration_since(Instant::now() + LATE) {
        std::thread::sleep(asleep);
    }
    while Instant::now() < end {
        std::thread::yield_now();
    }
}

/// Returns the signature of a stage with the output `out`. The stage keeps its input `x` for both
/// gradients.
fn declared<O>(x: &ShapedArray, out: O) -> StageSignature<O> {
    let kept = || PlacedShape::replicated(x.clone());
    StageSignature::new(out).residual(kept()).weight_residual(kept()).keep("", "")
}

fn words(Passes { costs, fused }: &Passes) -> Vec<u64> {
    let costs = [costs.forward, costs.backward_input, costs.backward_weight].map(f64::to_bits);
    [&costs[..], &[u64::from(*fused)]].concat()
}

fn forward(costs: &StageCosts, x: &View<'_>, kept: &mut ViewMut<'_>) -> Result<()> {
    wait(costs.forward);
    kept.as_mut_slice::<f32>()?.copy_from_slice(x.as_slice()?);
    Ok(())
}

fn backward_input(costs: &StageCosts, dy: f32, dx: Option<ViewMut<'_>>) -> Result<()> {
    wait(costs.backward_input);
    dx.map_or(Ok(()), |mut dx| dx.fill(dy))?;
    Ok(())
}

/// Waits for the length of the pass. Then adds the first kept value to `sum`, so that a lost or
/// doubled microbatch is detected.
fn backward_weight(costs: &StageCosts, kept: &View<'_>, mut sum: ViewMut<'_>) -> Result<()> {
    wait(costs.backward_weight);
    sum.as_mut_slice::<f32>()?[0] += kept.as_slice::<f32>()?[0];
    Ok(())
}

impl Stage for Waits {
    type Params = MpmdArray;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        _: &ShapedArray,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        Ok(declared(x, x.clone()))
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: View<'_>,
        x: View<'_>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        forward(&self.0.costs, &x, &mut cx.residual_mut()?)?;
        y.as_mut_slice::<f32>()?.copy_from_slice(x.as_slice()?);
        Ok(())
    }

    fn backward_input(
        &self,
        _: &mut StageContext<'_, '_>,
        _: View<'_>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
    ) -> Result<()> {
        backward_input(&self.0.costs, dy.as_slice::<f32>()?[0], dx)
    }

    fn backward_weight(&self, cx: &mut StageContext<'_, '_>, sum: ViewMut<'_>) -> Result<()> {
        backward_weight(&self.0.costs, &cx.weight_residual()?, sum)
    }

    fn passes(&self) -> pipeline::Passes {
        self.0.passes()
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: View<'_>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
        sum: ViewMut<'_>,
    ) -> Result<()> {
        backward_input(&self.0.costs, dy.as_slice::<f32>()?[0], dx)?;
        backward_weight(&self.0.costs, &cx.residual()?, sum)
    }

    fn statics(&self) -> Vec<u64> {
        words(&self.0)
    }
}

impl Stage for WaitsLast {
    type Params = MpmdArray;
    type In = MpmdArray;
    type Out = Loss<MpmdArray>;

    fn infer(
        &self,
        _: &ShapedArray,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<Loss<ShapedArray>>> {
        Ok(declared(x, Loss::new(f32s([]), f32s([]))))
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: View<'_>,
        x: View<'_>,
        mut loss: ViewsMut<'_, Loss<MpmdArray>>,
    ) -> Result<()> {
        forward(&self.0.costs, &x, &mut cx.residual_mut()?)?;
        loss.sum.fill(x.as_slice::<f32>()?[0])?;
        loss.weight.fill(1.0f32)?;
        Ok(())
    }

    fn backward_input(
        &self,
        _: &mut StageContext<'_, '_>,
        _: View<'_>,
        loss: Views<'_, Loss<MpmdArray>>,
        dx: Option<ViewMut<'_>>,
    ) -> Result<()> {
        backward_input(&self.0.costs, loss.sum.scalar::<f32>()?, dx)
    }

    fn backward_weight(&self, cx: &mut StageContext<'_, '_>, sum: ViewMut<'_>) -> Result<()> {
        backward_weight(&self.0.costs, &cx.weight_residual()?, sum)
    }

    fn passes(&self) -> pipeline::Passes {
        self.0.passes()
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: View<'_>,
        dy: Views<'_, Loss<MpmdArray>>,
        dx: Option<ViewMut<'_>>,
        sum: ViewMut<'_>,
    ) -> Result<()> {
        backward_input(&self.0.costs, dy.sum.scalar::<f32>()?, dx)?;
        backward_weight(&self.0.costs, &cx.residual()?, sum)
    }

    fn statics(&self) -> Vec<u64> {
        words(&self.0)
    }
}
