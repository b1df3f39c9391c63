//! Stages made from closures over typed views.

use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;

use super::context::StageContext;
use super::stage::{Loss, SideInput, SideShapes, Stage, StageSignature};
use crate::error::Result;
use crate::exec::array::MpmdArray;
use crate::kernel::{ClosureIdentity, InferShapes, RunKernel, View, ViewMut, Views, check_dtypes};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::tree::{Empty, Tree};

/// The tree (input, parameters) of a stage made from closures.
type Pair = (MpmdArray, MpmdArray);

/// The tree (input, parameters, output gradient) of a stage made from closures.
type Triple = (MpmdArray, MpmdArray, MpmdArray);

/// Creates a stage from closures, with one array of parameters, one input and one output.
///
/// The closures take typed views, as those of [`kernel`](crate::kernel::kernel()), inputs first:
///
/// - `shapes` returns the shape of the output `y` for the shapes of `x` and `w`, or is
///   [`like_input`](crate::kernel::like_input): like `x`.
/// - `forward` takes `x` and `w`, and writes `y`.
/// - `input_gradient` takes `x`, `w` and `dy`, and writes the gradient `dx` of the input.
/// - `gradient` takes `x`, `w` and `dy`, and *adds* the gradient of the parameters to `dw`, which
///   is zero before the first microbatch.
///
/// `x` is the input, `w` the parameters, `dy` the gradient of the output. `input_gradient` is not
/// called where no gradient of the input is needed, as on the first stage. Each device of the
/// stage's mesh computes all of them, so replicate `w` over the mesh.
///
/// A closure that captures values needs [`with`](ClosureStage::with). On CUDA devices the closures
/// compute on the host, which is slow. Implement [`Stage`] for all else: several parameters,
/// residuals, collectives.
///
/// ```
/// use mpmd_core::pipeline::stage;
/// use mpmd_core::prelude::*;
///
/// // y = x * w
/// let scale = stage(
///     like_input,
///     |x: View<f32>, w: View<f32>, mut y: ViewMut<f32>| y[0] = x[0] * w[0],
///     |_: View<f32>, w: View<f32>, dy: View<f32>, mut dx: ViewMut<f32>| dx[0] = w[0] * dy[0],
///     |x: View<f32>, _: View<f32>, dy: View<f32>, mut dw: ViewMut<f32>| dw[0] += x[0] * dy[0],
/// );
/// ```
#[track_caller]
pub fn stage<S, B, F, G, H, A1, A2, A3>(
    shapes: S,
    forward: F,
    input_gradient: G,
    gradient: H,
) -> ClosureStage<S, F, G, H, (B, A1, A2, A3)>
where
    F: RunKernel<A1, In = Pair, Out = MpmdArray>,
    S: InferShapes<B, Pair, MpmdArray>,
    G: RunKernel<A2, In = Triple, Out = MpmdArray>,
    H: RunKernel<A3, In = Triple, Out = MpmdArray>,
{
    let captured = size_of::<(F, G, H)>() != 0;
    ClosureStage {
        shapes,
        forward,
        input_gradient,
        gradient,
        identity: ClosureIdentity::new("stage", Location::caller(), captured),
        arguments: PhantomData,
    }
}

/// A stage made of four closures by [`stage`]. `A` has the types of their arguments.
pub struct ClosureStage<S, F, G, H, A> {
    shapes: S,
    forward: F,
    input_gradient: G,
    gradient: H,
    identity: ClosureIdentity,
    arguments: PhantomData<fn() -> A>,
}

impl<S, F, G, H, A> ClosureStage<S, F, G, H, A> {
    /// Declares a value that the closures capture, so that the processes can compare it. May be
    /// called several times.
    #[must_use]
    pub fn with(mut self, value: impl fmt::Debug) -> Self {
        self.identity.declare(&value);
        self
    }
}

impl<S, F, G, H, B, A1, A2, A3> Stage for ClosureStage<S, F, G, H, (B, A1, A2, A3)>
where
    F: RunKernel<A1, In = Pair, Out = MpmdArray>,
    S: InferShapes<B, Pair, MpmdArray>,
    G: RunKernel<A2, In = Triple, Out = MpmdArray>,
    H: RunKernel<A3, In = Triple, Out = MpmdArray>,
    B: 'static,
    A1: 'static,
    A2: 'static,
    A3: 'static,
{
    type Params = MpmdArray;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        w: &ShapedArray,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        self.identity.check()?;
        let given = (x.clone(), w.clone());
        check_dtypes("input", &given, F::INPUTS)?;
        let y = self.shapes.infer(&given)?;
        check_dtypes("output", &y, F::OUTPUTS)?;

        let given = (x.clone(), w.clone(), y.clone());
        check_dtypes("for the input gradient: input", &given, G::INPUTS)?;
        check_dtypes("for the input gradient: output", x, G::OUTPUTS)?;
        check_dtypes("for the gradient: input", &given, H::INPUTS)?;
        check_dtypes("for the gradient: output", w, H::OUTPUTS)?;
        Ok(StageSignature::new(y))
    }

    fn forward(
        &self,
        _: &mut StageContext<'_, '_>,
        w: View<'_>,
        x: View<'_>,
        y: ViewMut<'_>,
    ) -> Result<()> {
        self.forward.run((x, w), y)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
        dw: ViewMut<'_>,
    ) -> Result<()> {
        let x: View<'_> = cx.input()?;
        // The gradient of frozen parameters has the shape `[0]`.
        if dw.global().shape() == w.global().shape() {
            self.gradient.run((x, w, dy), dw)?;
        }
        match dx {
            Some(dx) => self.input_gradient.run((x, w, dy), dx),
            None => Ok(()),
        }
    }

    fn name(&self) -> &str {
        self.identity.name()
    }

    fn statics(&self) -> Vec<u64> {
        self.identity.statics()
    }

    fn computes_on_host(&self) -> bool {
        true
    }
}

/// Creates the last stage of a pipeline from closures: a [`Loss`] without parameters.
///
/// `forward` takes the input `x`, and writes the sum of the losses over all items to a scalar.
/// `gradient` takes `x`, and writes the gradient of that sum. If both take a second input, that is
/// the side input of the stage, such as labels: see [`Microbatch::side`](super::Microbatch::side).
///
/// The number of items is the first dimension of `x`, or 1 for a scalar. A closure that captures
/// values needs [`with`](LossStage::with).
///
/// ```
/// use mpmd_core::pipeline::loss_stage;
/// use mpmd_core::prelude::*;
///
/// // The sum of (x - label)²
/// let square = loss_stage(
///     |x: View<f32>, label: View<f32>, mut sum: ViewMut<f32>| {
///         sum[0] = x.iter().zip(&*label).map(|(x, label)| (x - label).powi(2)).sum();
///     },
///     |x: View<f32>, label: View<f32>, mut dx: ViewMut<f32>| {
///         for (dx, (x, label)) in dx.iter_mut().zip(x.iter().zip(&*label)) {
///             *dx = 2.0 * (x - label);
///         }
///     },
/// );
/// ```
#[track_caller]
pub fn loss_stage<F, G, A1, A2>(forward: F, gradient: G) -> LossStage<F, G, (A1, A2)>
where
    F: RunKernel<A1, Out = MpmdArray>,
    F::In: LossInputs,
    G: RunKernel<A2, In = F::In, Out = MpmdArray>,
{
    let captured = size_of::<(F, G)>() != 0;
    LossStage {
        forward,
        gradient,
        identity: ClosureIdentity::new("loss", Location::caller(), captured),
        arguments: PhantomData,
    }
}

/// A stage made of two closures by [`loss_stage`]. `A` has the types of their arguments.
pub struct LossStage<F, G, A> {
    forward: F,
    gradient: G,
    identity: ClosureIdentity,
    arguments: PhantomData<fn() -> A>,
}

impl<F, G, A> LossStage<F, G, A> {
    /// Declares a value that the closures capture, so that the processes can compare it. May be
    /// called several times.
    #[must_use]
    pub fn with(mut self, value: impl fmt::Debug) -> Self {
        self.identity.declare(&value);
        self
    }
}

/// The inputs that the closures of a [`loss_stage`] take: one array, or an array and the side
/// input.
pub trait LossInputs: Tree<Leaf = MpmdArray> + sealed::Sealed {
    /// Returns the type of the side inputs.
    #[doc(hidden)]
    fn side() -> SideInput;

    /// Returns the shapes of the closures' inputs.
    ///
    /// # Errors
    ///
    /// If `side` is not of the type that [`LossInputs::side`] returns.
    #[doc(hidden)]
    fn shapes(x: &ShapedArray, side: &SideShapes) -> Result<Vec<ShapedArray>>;

    /// Returns the views of the closures' inputs.
    ///
    /// # Errors
    ///
    /// If the side inputs in `cx` are not of the type that [`LossInputs::side`] returns.
    #[doc(hidden)]
    fn views<'v>(x: View<'v>, cx: &StageContext<'v, '_>) -> Result<Views<'v, Self>>;
}

/// Prevents implementations of `LossInputs` in other crates.
mod sealed {
    use super::{MpmdArray, Pair};

    pub trait Sealed {}
    impl Sealed for MpmdArray {}
    impl Sealed for Pair {}
}

impl LossInputs for MpmdArray {
    fn side() -> SideInput {
        SideInput::none()
    }

    fn shapes(x: &ShapedArray, _: &SideShapes) -> Result<Vec<ShapedArray>> {
        Ok(vec![x.clone()])
    }

    fn views<'v>(x: View<'v>, _: &StageContext<'v, '_>) -> Result<View<'v>> {
        Ok(x)
    }
}

impl LossInputs for Pair {
    fn side() -> SideInput {
        SideInput::of::<MpmdArray>()
    }

    fn shapes(x: &ShapedArray, side: &SideShapes) -> Result<Vec<ShapedArray>> {
        Ok(vec![x.clone(), side.tree()?])
    }

    fn views<'v>(x: View<'v>, cx: &StageContext<'v, '_>) -> Result<(View<'v>, View<'v>)> {
        Ok((x, cx.side()?))
    }
}

impl<F, G, A1, A2> Stage for LossStage<F, G, (A1, A2)>
where
    F: RunKernel<A1, Out = MpmdArray>,
    F::In: LossInputs,
    G: RunKernel<A2, In = F::In, Out = MpmdArray>,
    A1: 'static,
    A2: 'static,
{
    type Params = Empty<MpmdArray>;
    type In = MpmdArray;
    type Out = Loss<MpmdArray>;

    fn infer(
        &self,
        _: &Empty<ShapedArray>,
        x: &ShapedArray,
        side: &SideShapes,
    ) -> Result<StageSignature<Loss<ShapedArray>>> {
        self.identity.check()?;
        let given = F::In::shapes(x, side)?;
        check_dtypes("input", &given, F::INPUTS)?;
        check_dtypes("for the gradient: input", &given, G::INPUTS)?;
        check_dtypes("for the gradient: output", x, G::OUTPUTS)?;

        let scalar = ShapedArray::new(&[], F::OUTPUTS[0]);
        Ok(StageSignature::new(Loss::new(scalar.clone(), scalar)))
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: Empty<View<'_>>,
        x: View<'_>,
        mut loss: Loss<ViewMut<'_>>,
    ) -> Result<()> {
        let items = x.global().shape().first().copied().unwrap_or(1);
        match F::OUTPUTS[0] {
            DType::F64 => loss.weight.fill(items as f64)?,
            // Another type than these two is refused before, by `Loss::check`.
            _ => loss.weight.fill(items as f32)?,
        }
        self.forward.run(F::In::views(x, cx)?, loss.sum)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: Empty<View<'_>>,
        _: Loss<View<'_>>,
        dx: Option<ViewMut<'_>>,
        _: Empty<ViewMut<'_>>,
    ) -> Result<()> {
        // The runner seeds the gradient of the sum with 1.
        match dx {
            Some(dx) => self.gradient.run(F::In::views(cx.input()?, cx)?, dx),
            None => Ok(()),
        }
    }

    fn side(&self) -> SideInput {
        F::In::side()
    }

    fn name(&self) -> &str {
        self.identity.name()
    }

    fn statics(&self) -> Vec<u64> {
        self.identity.statics()
    }

    fn computes_on_host(&self) -> bool {
        true
    }
}
