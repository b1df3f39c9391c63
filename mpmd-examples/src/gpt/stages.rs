//! The stages of the pipeline: the first, the middle and the last stage, and the whole model in
//! one.
//!
//! Every stage computes its blocks with the same functions, so the results have the same bits for
//! every division. A stage's mesh has the axes [`DATA_AXIS`] and [`MODEL_AXIS`].
//!
//! Along [`DATA_AXIS`] each device has some sequences of a microbatch, with their residuals and
//! loss. The losses are all-reduced, and the gradients of the parameters are partial sums. Along
//! [`MODEL_AXIS`] the blocks' matrices are sharded, and the outputs of their branches are
//! all-reduced.
//!
//! On a CUDA device a stage launches the same computation (`gpt/cuda`). Neighbouring stages may be
//! on either kind of device.

use std::sync::Arc;

use mpmd::aval::{DType, f64s};
use mpmd::cuda::{CUBLAS, Math, Source};
use mpmd::kernel::{Reducible, Shapes, Views, ViewsMut};
use mpmd::pipeline::{
    Loss, Passes, PlacedShape, SideInput, SideShapes, Stage, StageContext, StageSignature,
};
use mpmd::prelude::*;
use mpmd::sharding::Spec;
use mpmd::tree::Empty;
use parking_lot::Mutex;

use super::block::{self, BlockGradients, BlockInputs, BlockInterior};
use super::clock::{Clock, Pass};
use super::cuda::KERNELS;
use super::embed::{EmbedParameters, embed_backward_weight, embed_forward};
use super::head::{self, HeadGradients, HeadResiduals};
use super::params::{Part, StageParams};
use super::placement::{DATA_AXIS, Grid, MODEL_AXIS};
use super::shape::spec_of;
use super::{BYTES, BlockShape, LeafShape};
use crate::math::Real;

/// A float type of the stages: `f32`, or `f64` for comparing gradients with finite differences.
pub trait Float: Real + Reducible {}

impl<T: Real + Reducible> Float for T {}

/// The input of the pipeline: the tokens of a microbatch.
#[derive(Clone, Debug, Tree)]
pub struct Tokens<L> {
    /// Bytes, one for each token: `[batch, time]`.
    pub tokens: L,
}

/// The activations that one stage passes to the next.
#[derive(Clone, Debug, Tree)]
pub struct Rows<L> {
    /// Floats, `[batch, time, width]`.
    pub rows: L,
}

/// The side input of the last stage for each microbatch.
#[derive(Clone, Debug, Tree)]
pub struct Targets<L> {
    /// The byte that comes after each token, `[batch, time]`.
    pub targets: L,
}

/// The output of a pipeline that samples.
#[derive(Clone, Debug, Tree)]
pub struct Logits<L> {
    /// Floats, `[batch, time, BYTES]`.
    pub logits: L,
}

/// Arrays that a stage's forward pass writes for the input gradient.
#[derive(Clone, Debug, Tree)]
pub struct StageResidual<L> {
    /// The stage's input bytes. Only the stage with the embedding has them.
    pub(super) tokens: Option<L>,
    pub(super) blocks: Vec<BlockResidual<L>>,
    pub(super) head: Option<HeadResiduals<L>>,
    /// The target bytes. Only the stage with the loss has them.
    pub(super) targets: Option<L>,
}

#[derive(Clone, Debug, Tree)]
pub(super) struct BlockResidual<L> {
    pub(super) inputs: BlockInputs<L>,
    pub(super) interior: BlockInterior<L>,
}

/// Arrays that a stage's input gradient writes for the weight gradient.
#[derive(Clone, Debug, Tree)]
pub struct StageWeightResidual<L> {
    pub(super) embed: Option<EmbedWeightResidual<L>>,
    pub(super) blocks: Vec<BlockWeightResidual<L>>,
    pub(super) head: Option<HeadWeightResidual<L>>,
}

#[derive(Clone, Debug, Tree)]
pub(super) struct EmbedWeightResidual<L> {
    pub(super) tokens: L,
    pub(super) dx: L,
}

#[derive(Clone, Debug, Tree)]
pub(super) struct BlockWeightResidual<L> {
    pub(super) inputs: BlockInputs<L>,
    pub(super) gradients: BlockGradients<L>,
}

#[derive(Clone, Debug, Tree)]
pub(super) struct HeadWeightResidual<L> {
    pub(super) norm_hat: L,
    pub(super) norm_out: L,
    pub(super) gradients: HeadGradients<L>,
}

/// The computation of a stage, for any kind of input and output.
#[derive(Clone, Debug)]
pub(super) struct Core<T> {
    part: Part,
    pub(super) grid: Grid,
    pub(super) clock: Clock,
    /// Precision of matrix products on CUDA devices.
    pub(super) math: Math,
    /// Buffers of calls that have ended. Later calls reuse them.
    buffers: Arc<Mutex<Vec<Buffers<T>>>>,
}

/// Memory of one call. It is reused between calls, because allocating it each time costs more than
/// filling it.
#[derive(Clone, Debug, Default)]
struct Buffers<T> {
    /// The input of a block, or its gradient.
    h: Vec<T>,
    /// The output of a block, or its gradient.
    next: Vec<T>,
    scratch: Vec<T>,
}

/// The destination of a stage's results.
pub(super) enum Exit<'a, 'b> {
    Rows(ViewMut<'a>),
    /// (loss to write, targets to compute it with).
    Loss(Loss<ViewMut<'a>>, View<'b>),
    Logits(ViewMut<'a>),
}

/// The gradient from which a stage's backward pass starts.
pub(super) enum Seed<'a> {
    Rows(View<'a>),
    /// The gradient of the loss sum: an `f64` scalar.
    Loss(View<'a>),
    /// No gradient, for a pipeline without a loss. The backward pass is then an error.
    Nothing,
}

/// (shapes of a stage's residuals, shapes of its weight residuals).
type ResidualShapes = (StageResidual<PlacedShape>, StageWeightResidual<PlacedShape>);

impl<T: Float> Core<T> {
    fn new(part: Part, (grid, math): (Grid, Math), clock: &Clock) -> Self {
        Self { part, grid, clock: clock.clone(), math, buffers: Arc::default() }
    }

    /// Returns the sizes of the stage's blocks on one device, for an input `[batch, time]` or
    /// `[batch, time, width]`. An input that does not fit the model or the devices is an error.
    pub(super) fn shape(&self, x: &ShapedArray) -> Result<BlockShape> {
        let whole = self.whole_shape(x)?;
        let (model, Grid { data, model: devices }) = (self.part.model, self.grid);
        if devices == 0
            || !model.heads.is_multiple_of(devices)
            || !model.hidden.is_multiple_of(devices)
        {
            let problem =
                format!("the heads or hidden columns of {model:?} do not divide among {devices}");
            return Err(Error::kernel(problem));
        }
        if data == 0 || !whole.batch.is_multiple_of(data) {
            let problem =
                format!("the {} sequences of {x} do not divide among {data} devices", whole.batch);
            return Err(Error::kernel(problem));
        }
        Ok(BlockShape { batch: whole.batch / data, ..whole.split(devices) })
    }

    /// Returns the sizes of the stage's blocks on all devices together. An input that does not fit
    /// the model is an error.
    fn whole_shape(&self, x: &ShapedArray) -> Result<BlockShape> {
        let model = self.part.model;
        let fits = match *x.shape() {
            [batch, time] => Some((batch, time)).filter(|_| x.dtype() == DType::U8),
            [batch, time, width] => {
                Some((batch, time)).filter(|_| width == model.width && x.dtype() == T::DTYPE)
            }
            _ => None,
        };
        let fits = fits.filter(|(batch, time)| *batch > 0 && (1..=model.time).contains(time));
        let (batch, time) = fits.ok_or_else(|| {
            Error::kernel(format!("the input {x} does not fit a stage of {model:?}"))
        })?;
        Ok(model.shape(batch, time))
    }

    /// Declares a stage's signature: the output `out`, the residuals, the residuals that become
    /// weight residuals, and the all-reduces.
    fn declare<O>(
        &self,
        out: O,
        x: &ShapedArray,
        targets: Option<&ShapedArray>,
    ) -> Result<StageSignature<O>> {
        let local = self.shape(x)?;
        // Declared shapes are global.
        let shape = self.whole_shape(x)?;
        if let Some(targets) = targets
            && (targets.shape() != [shape.batch, shape.time] || targets.dtype() != DType::U8)
        {
            return Err(Error::kernel(format!("targets {targets} for an input {x}")));
        }
        let (residual, weight) = self.residuals(shape, targets.is_some());
        let mut signature = StageSignature::new(out).residual(residual).weight_residual(weight);
        if self.part.entrance {
            signature = signature.keep("tokens", "embed/tokens");
        }
        for block in 0..self.part.blocks {
            for field in shape.block_inputs().structure().paths() {
                let path = format!("blocks/{block}/inputs/{field}");
                signature = signature.keep(path.clone(), path);
            }
        }
        if self.part.exit {
            for field in ["norm_hat", "norm_out"] {
                let path = format!("head/{field}");
                signature = signature.keep(path.clone(), path);
            }
        }
        if self.grid.model > 1 {
            let rows = ShapedArray::new(&[local.batch, local.time, local.width], T::DTYPE);
            let reduces = (0..2 * self.part.blocks).fold(Signature::new(()), |declared, _| {
                declared.all_reduce(MODEL_AXIS, rows.clone())
            });
            signature =
                signature.forward_collectives(reduces.clone()).backward_collectives(reduces);
        }
        if self.grid.data > 1 && targets.is_some() {
            let reduce = Signature::new(()).all_reduce(DATA_AXIS, f64s([2]));
            signature = signature.forward_collectives(reduce);
        }
        Ok(signature)
    }

    fn residuals(&self, shape: BlockShape, targets: bool) -> ResidualShapes {
        let Part { blocks, entrance, exit, .. } = self.part;
        let (batch, time) = (shape.batch, shape.time);
        let bytes =
            || PlacedShape::new(ShapedArray::new(&[batch, time], DType::U8), spec![DATA_AXIS]);
        let rows = || place::<T>(&LeafShape::of_batch([batch, time, shape.width]));
        let inputs = || shape.block_inputs().each(place::<T>);
        let residual = StageResidual {
            tokens: entrance.then(bytes),
            blocks: (0..blocks)
                .map(|_| BlockResidual {
                    inputs: inputs(),
                    interior: shape.block_interior().each(place::<T>),
                })
                .collect(),
            head: exit.then(|| shape.head_residuals().each(place::<T>)),
            targets: targets.then(bytes),
        };
        let weight = StageWeightResidual {
            embed: entrance.then(|| EmbedWeightResidual { tokens: bytes(), dx: rows() }),
            blocks: (0..blocks)
                .map(|_| BlockWeightResidual {
                    inputs: inputs(),
                    gradients: shape.block_gradients().each(place::<T>),
                })
                .collect(),
            head: exit.then(|| HeadWeightResidual {
                norm_hat: rows(),
                norm_out: rows(),
                gradients: shape.head_gradients().each(place::<T>),
            }),
        };
        (residual, weight)
    }

    fn forward(
        &self,
        cx: &mut Context<'_>,
        params: &StageParams<View<'_>>,
        x: View<'_>,
        exit: Exit<'_, '_>,
        mut residual: StageResidual<ViewMut<'_>>,
    ) -> Result<()> {
        let _timer = self.clock.start(Pass::Forward);
        let shape = self.shape(x.global())?;
        if let Some(device) = self.device(cx)? {
            return self.forward_on((cx, device), shape, params, x, exit, residual);
        }
        let Buffers { mut h, mut next, mut scratch } =
            self.buffers(shape, block::forward_scratch(shape));
        match (&params.embed, &mut residual.tokens) {
            (Some(embed), Some(kept)) => {
                let tokens = x.as_slice::<u8>()?;
                kept.as_mut_slice::<u8>()?.copy_from_slice(tokens);
                let bytes = embed.bytes.as_slice::<T>()?;
                let positions = &embed.positions.as_slice::<T>()?[..shape.time * shape.width];
                embed_forward(shape, &EmbedParameters { bytes, positions }, &mut h, tokens);
            }
            _ => h.copy_from_slice(x.as_slice::<T>()?),
        }
        for (params, residual) in params.blocks.iter().zip(&mut residual.blocks) {
            let params = params.try_each(|leaf| leaf.as_slice::<T>())?;
            let mut inputs = residual.inputs.try_each_mut(|leaf| leaf.as_mut_slice::<T>())?;
            let mut interior = residual.interior.try_each_mut(|leaf| leaf.as_mut_slice::<T>())?;
            let reduce = |summand: &mut [T]| self.reduce(cx, summand);
            block::forward(
                shape,
                &params,
                &mut inputs,
                &mut interior,
                &mut next,
                &h,
                &mut scratch,
                reduce,
            )?;
            std::mem::swap(&mut h, &mut next);
        }
        let head = match (&params.head, &mut residual.head) {
            (Some(params), Some(residual)) => Some((
                params.try_each(|leaf| leaf.as_slice::<T>())?,
                residual.try_each_mut(|leaf| leaf.as_mut_slice::<T>())?,
            )),
            _ => None,
        };
        match (exit, head) {
            (Exit::Rows(mut rows), _) => rows.as_mut_slice()?.copy_from_slice(&h),
            (Exit::Loss(mut loss, targets), Some((params, mut head))) => {
                let targets = targets.as_slice::<u8>()?;
                let (sum, weight) = head::forward(shape, &params, &mut head, &h, targets);
                let mut both = [sum, weight as f64];
                if self.grid.data > 1 {
                    let _timer = self.clock.start(Pass::AllReduce);
                    cx.all_reduce(DATA_AXIS, &mut both)?;
                }
                loss.sum.fill(both[0])?;
                loss.weight.fill(both[1])?;
                if let Some(kept) = &mut residual.targets {
                    kept.as_mut_slice::<u8>()?.copy_from_slice(targets);
                }
            }
            (Exit::Logits(mut logits), Some((params, mut head))) => {
                head::logits(shape, &params, &mut head, &h);
                logits.as_mut_slice()?.copy_from_slice(head.probabilities);
            }
            (_, None) => return Err(no_head()),
        }
        self.buffers.lock().push(Buffers { h, next, scratch });
        Ok(())
    }

    fn backward_input(
        &self,
        cx: &mut Context<'_>,
        params: &StageParams<View<'_>>,
        residual: &StageResidual<View<'_>>,
        seed: &Seed<'_>,
        dx: Option<ViewMut<'_>>,
        mut weight: StageWeightResidual<ViewMut<'_>>,
    ) -> Result<()> {
        let _timer = self.clock.start(Pass::BackwardInput);
        // Without blocks, only the input determines the shape.
        let shape = match seed {
            Seed::Rows(dy) => self.shape(dy.global())?,
            Seed::Loss(_) => self.shape(residual.targets.as_ref().ok_or_else(no_head)?.global())?,
            Seed::Nothing => {
                return Err(Error::kernel("a pipeline that samples has no backward pass"));
            }
        };
        if let Some(device) = self.device(cx)? {
            return self.backward_input_on(cx, device, shape, params, residual, seed, dx, weight);
        }
        let Buffers { h: mut d, mut next, mut scratch } =
            self.buffers(shape, block::backward_scratch(shape));
        match seed {
            Seed::Rows(dy) => d.copy_from_slice(dy.as_slice()?),
            Seed::Loss(factor) => {
                let (Some(params), Some(residual), Some(targets), Some(weight)) =
                    (&params.head, &residual.head, &residual.targets, &mut weight.head)
                else {
                    return Err(no_head());
                };
                let params = params.try_each(|leaf| leaf.as_slice::<T>())?;
                let residual = HeadResiduals {
                    norm_hat: weight.norm_hat.as_slice::<T>()?,
                    norm_inv_std: residual.norm_inv_std.as_slice()?,
                    norm_out: weight.norm_out.as_slice()?,
                    probabilities: residual.probabilities.as_slice()?,
                };
                let mut gradients =
                    weight.gradients.try_each_mut(|leaf| leaf.as_mut_slice::<T>())?;
                let (targets, factor) = (targets.as_slice::<u8>()?, factor.scalar::<f64>()?);
                head::backward_input(
                    shape,
                    &params,
                    &residual,
                    &mut gradients,
                    &mut d,
                    targets,
                    factor,
                );
            }
            Seed::Nothing => {}
        }
        let blocks = params.blocks.iter().zip(&residual.blocks).zip(&mut weight.blocks);
        for ((params, residual), weight) in blocks.rev() {
            let params = params.try_each(|leaf| leaf.as_slice::<T>())?;
            let inputs = weight.inputs.try_each(|leaf| leaf.as_slice::<T>())?;
            let interior = residual.interior.try_each(|leaf| leaf.as_slice::<T>())?;
            let mut gradients = weight.gradients.try_each_mut(|leaf| leaf.as_mut_slice::<T>())?;
            let kept = (&inputs, &interior);
            let reduce = |summand: &mut [T]| self.reduce(cx, summand);
            block::backward_input(
                shape,
                &params,
                kept,
                &mut gradients,
                &mut next,
                &d,
                &mut scratch,
                reduce,
            )?;
            std::mem::swap(&mut d, &mut next);
        }
        if let Some(embed) = &mut weight.embed {
            embed.dx.as_mut_slice()?.copy_from_slice(&d);
        } else if let Some(mut dx) = dx {
            dx.as_mut_slice()?.copy_from_slice(&d);
        }
        self.buffers.lock().push(Buffers { h: d, next, scratch });
        Ok(())
    }

    fn backward_weight(
        &self,
        cx: &mut Context<'_>,
        weight: &StageWeightResidual<View<'_>>,
        mut gradient: StageParams<ViewMut<'_>>,
    ) -> Result<()> {
        let _timer = self.clock.start(Pass::BackwardWeight);
        if let Some(device) = self.device(cx)? {
            return self.backward_weight_on(device, weight, gradient);
        }
        for (weight, gradient) in weight.blocks.iter().zip(&mut gradient.blocks) {
            let shape = self.shape(weight.gradients.d_mlp.global())?;
            let inputs = weight.inputs.try_each(|leaf| leaf.as_slice::<T>())?;
            let gradients = weight.gradients.try_each(|leaf| leaf.as_slice::<T>())?;
            let mut gradient = gradient.try_each_mut(|leaf| leaf.as_mut_slice::<T>())?;
            block::backward_weight(shape, &inputs, &gradients, &mut gradient);
        }
        if let (Some(weight), Some(gradient)) = (&weight.embed, &mut gradient.embed) {
            let shape = self.shape(weight.dx.global())?;
            let bytes = gradient.bytes.as_mut_slice::<T>()?;
            let positions =
                &mut gradient.positions.as_mut_slice::<T>()?[..shape.time * shape.width];
            let (dx, tokens) = (weight.dx.as_slice()?, weight.tokens.as_slice()?);
            embed_backward_weight(shape, &mut EmbedParameters { bytes, positions }, dx, tokens);
        }
        if let (Some(weight), Some(gradient)) = (&weight.head, &mut gradient.head) {
            let shape = self.shape(weight.norm_hat.global())?;
            let inputs = (weight.norm_hat.as_slice::<T>()?, weight.norm_out.as_slice::<T>()?);
            let gradients = weight.gradients.try_each(|leaf| leaf.as_slice::<T>())?;
            let mut gradient = gradient.try_each_mut(|leaf| leaf.as_mut_slice::<T>())?;
            head::backward_weight(shape, inputs, &gradients, &mut gradient);
        }
        Ok(())
    }

    fn reduce(&self, cx: &mut Context<'_>, summand: &mut [T]) -> Result<()> {
        if self.grid.model == 1 {
            return Ok(());
        }
        let _timer = self.clock.start(Pass::AllReduce);
        cx.all_reduce(MODEL_AXIS, summand)
    }

    /// Returns buffers for a call, with arbitrary content: two for the rows of `shape`, and at
    /// least `scratch` scratch elements. Reuses those of an earlier call.
    fn buffers(&self, shape: BlockShape, scratch: usize) -> Buffers<T> {
        let mut buffers = self.buffers.lock().pop().unwrap_or_default();
        let rows = shape.rows() * shape.width;
        buffers.h.resize(rows, T::ZERO);
        buffers.next.resize(rows, T::ZERO);
        if buffers.scratch.len() < scratch {
            buffers.scratch.resize(scratch, T::ZERO);
        }
        buffers
    }

    fn rows(&self, x: &ShapedArray) -> Result<ShapedArray> {
        let BlockShape { batch, time, width, .. } = self.whole_shape(x)?;
        Ok(ShapedArray::new(&[batch, time, width], T::DTYPE))
    }

    fn logits(&self, x: &ShapedArray) -> Result<ShapedArray> {
        let BlockShape { batch, time, .. } = self.whole_shape(x)?;
        Ok(ShapedArray::new(&[batch, time, BYTES], T::DTYPE))
    }

    fn statics(&self) -> Vec<u64> {
        let Part { model, first_block, blocks, entrance, exit } = self.part;
        let Grid { data, model: devices } = self.grid;
        let words = [model.layers, model.heads, model.hidden, first_block, blocks, data, devices];
        let mut words: Vec<u64> = words.into_iter().map(|word| word as u64).collect();
        words.push(u64::from(entrance) | u64::from(exit) << 1);
        words.push(self.math as u64);
        words
    }
}

fn place<T: Float>(leaf: &LeafShape) -> PlacedShape {
    PlacedShape::new(ShapedArray::new(&leaf.dims, T::DTYPE), spec_of(leaf))
}

pub(super) fn no_head() -> Error {
    Error::kernel("this stage has no head")
}

/// Declares a type of stage: its input and output, its results, and the start of its gradients.
macro_rules! stage {
    (
        $(#[$doc:meta])* $name:ident: $in:ident.$x:ident, $side:ty => $out:ty;
        infer($core:ident, $shape:ident, $targets:pat) $infer:expr;
        forward($y:ident, $side_view:pat) $exit:expr;
        backward($dy:pat) $seed:expr;
        output($spec:expr);
    ) => {
        $(#[$doc])*
        #[derive(Clone, Debug)]
        pub struct $name<T>(Core<T>);

        impl<T: Float> $name<T> {
            /// Creates the stage of `part`, for meshes with the axes of `grid`. `math` is the
            /// precision of matrix products on CUDA devices.
            pub fn new(part: Part, (grid, math): (Grid, Math), clock: &Clock) -> Self {
                Self(Core::new(part, (grid, math), clock))
            }
        }

        impl<T: Float> Stage for $name<T> {
            type Params = StageParams<MpmdArray>;
            type In = $in<MpmdArray>;
            type Out = $out;

            fn infer(
                &self,
                _: &Shapes<Self::Params>,
                x: &Shapes<Self::In>,
                side: &SideShapes,
            ) -> Result<StageSignature<Shapes<Self::Out>>> {
                let side: Shapes<$side> = side.tree()?;
                let ($core, $shape, $targets) = (&self.0, &x.$x, &side);
                $infer
            }

            fn side(&self) -> SideInput {
                SideInput::of::<$side>()
            }

            fn forward(
                &self,
                cx: &mut StageContext<'_, '_>,
                params: Views<'_, Self::Params>,
                x: Views<'_, Self::In>,
                y: ViewsMut<'_, Self::Out>,
            ) -> Result<()> {
                let side: Views<'_, $side> = cx.side()?;
                let residual = cx.residual_mut()?;
                let ($y, $side_view) = (y, side);
                self.0.forward(cx, &params, x.$x, $exit, residual)
            }

            fn passes(&self) -> Passes {
                Passes::Split
            }

            fn backward_input(
                &self,
                cx: &mut StageContext<'_, '_>,
                params: Views<'_, Self::Params>,
                dy: Views<'_, Self::Out>,
                dx: Option<ViewsMut<'_, Self::In>>,
            ) -> Result<()> {
                let ($dy, dx) = (dy, dx.map(|dx| dx.$x));
                let (residual, weight_residual) = (cx.residual()?, cx.weight_residual_mut()?);
                self.0.backward_input(cx, &params, &residual, &$seed, dx, weight_residual)
            }

            fn backward_weight(
                &self,
                cx: &mut StageContext<'_, '_>,
                gradient: ViewsMut<'_, Self::Params>,
            ) -> Result<()> {
                let weight_residual = cx.weight_residual()?;
                self.0.backward_weight(cx, &weight_residual, gradient)
            }

            fn input_spec(&self) -> Spec {
                spec![DATA_AXIS]
            }

            fn output_spec(&self) -> Spec {
                $spec
            }

            fn statics(&self) -> Vec<u64> {
                self.0.statics()
            }

            fn cuda(&self) -> Vec<&'static Source> {
                vec![&KERNELS, &CUBLAS]
            }
        }
    };
}

fn loss() -> Loss<ShapedArray> {
    Loss { sum: f64s([]), weight: f64s([]) }
}

stage! {
    /// The first of several stages: the embedding and the stage's blocks. It takes no side input.
    First: Tokens.tokens, Empty<MpmdArray> => Rows<MpmdArray>;
    infer(core, x, _) core.declare(Rows { rows: core.rows(x)? }, x, None);
    forward(y, _) Exit::Rows(y.rows);
    backward(dy) Seed::Rows(dy.rows);
    output(spec![DATA_AXIS]);
}

stage! {
    /// A stage between two others: only blocks, without a side input.
    Middle: Rows.rows, Empty<MpmdArray> => Rows<MpmdArray>;
    infer(core, x, _) core.declare(Rows { rows: core.rows(x)? }, x, None);
    forward(y, _) Exit::Rows(y.rows);
    backward(dy) Seed::Rows(dy.rows);
    output(spec![DATA_AXIS]);
}

stage! {
    /// The last of several stages: the stage's blocks, the head and the loss. The targets are its
    /// side input.
    Last: Rows.rows, Targets<MpmdArray> => Loss<MpmdArray>;
    infer(core, x, side) core.declare(loss(), x, Some(&side.targets));
    forward(y, side) Exit::Loss(y, side.targets);
    backward(dy) Seed::Loss(dy.sum);
    output(spec![]);
}

stage! {
    /// The only stage of a pipeline: the whole model and the loss. The targets are its side input.
    Whole: Tokens.tokens, Targets<MpmdArray> => Loss<MpmdArray>;
    infer(core, x, side) core.declare(loss(), x, Some(&side.targets));
    forward(y, side) Exit::Loss(y, side.targets);
    backward(dy) Seed::Loss(dy.sum);
    output(spec![]);
}

stage! {
    /// The last of several stages in a pipeline that samples. It has no loss and no backward pass.
    LastLogits: Rows.rows, Empty<MpmdArray> => Logits<MpmdArray>;
    infer(core, x, _) core.declare(Logits { logits: core.logits(x)? }, x, None);
    forward(y, _) Exit::Logits(y.logits);
    backward(_) Seed::Nothing;
    output(spec![DATA_AXIS]);
}

stage! {
    /// The only stage of a pipeline that samples: the whole model. It has no loss and no backward
    /// pass.
    WholeLogits: Tokens.tokens, Empty<MpmdArray> => Logits<MpmdArray>;
    infer(core, x, _) core.declare(Logits { logits: core.logits(x)? }, x, None);
    forward(y, _) Exit::Logits(y.logits);
    backward(_) Seed::Nothing;
    output(spec![DATA_AXIS]);
}
