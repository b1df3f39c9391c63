//! The computation of a stage on a CUDA device: [`stages`](crate::gpt::stages) there.
//!
//! A stage's values are in views and in the device's scratch memory, without copies between them.
//! The first block reads the stage's input directly, and the last block writes its output.

use mpmd::cuda::Part;
use mpmd::kernel::View;
use mpmd::prelude::*;

use super::block;
use super::device::{Device, device};
use super::embed::{embed_backward_weight, embed_forward};
use super::head;
use super::sums::sum_doubles;
use crate::gpt::BlockShape;
use crate::gpt::clock::Pass;
use crate::gpt::embed::EmbedParameters;
use crate::gpt::head::HeadResiduals;
use crate::gpt::params::StageParams;
use crate::gpt::placement::{DATA_AXIS, MODEL_AXIS};
use crate::gpt::stages::{Core, Exit, Float, Seed, StageResidual, StageWeightResidual, no_head};

/// The arrays in device memory for a stage's results: activations, loss or logits.
#[derive(Clone, Copy)]
enum Goal<'a> {
    Rows(Part<'a>),
    Loss { sum: Part<'a>, weight: Part<'a>, targets: Part<'a> },
    Logits(Part<'a>),
}

impl<'a> Goal<'a> {
    fn of(exit: &'a mut Exit<'_, '_>) -> Self {
        match exit {
            Exit::Rows(rows) => Self::Rows(rows.into()),
            Exit::Loss(loss, targets) => Self::Loss {
                sum: (&mut loss.sum).into(),
                weight: (&mut loss.weight).into(),
                targets: (&*targets).into(),
            },
            Exit::Logits(logits) => Self::Logits(logits.into()),
        }
    }
}

impl<T: Float> Core<T> {
    /// Returns the device on which the kernel runs, or `None` if it is not a CUDA device.
    ///
    /// # Errors
    ///
    /// If it is a CUDA device and the stage's float type is not `f32`.
    pub(in crate::gpt) fn device<'c>(&self, cx: &mut Context<'c>) -> Result<Option<Device<'c>>> {
        device::<T>(cx, self.math)
    }

    /// Issues the stage's forward pass. The work writes the arrays of `exit` and `residual`. Blocks
    /// only in all-reduces with the other devices of the stage.
    pub(in crate::gpt) fn forward_on(
        &self,
        (cx, device): (&mut Context<'_>, Device<'_>),
        shape: BlockShape,
        params: &StageParams<View<'_>>,
        x: View<'_>,
        mut exit: Exit<'_, '_>,
        mut residual: StageResidual<ViewMut<'_>>,
    ) -> Result<()> {
        let elements = shape.rows() * shape.width;
        let (first, second, partial) =
            (device.floats(elements)?, device.floats(elements)?, device.floats(elements)?);
        let (between, partial) = ([Part::from(&first), Part::from(&second)], Part::from(&partial));
        let goal = Goal::of(&mut exit);
        let end = if let Goal::Rows(rows) = goal { Some(rows) } else { None };
        let blocks = params.blocks.len();
        let mut h = Part::from(&x);
        if let (Some(embed), Some(kept)) = (&params.embed, &mut residual.tokens) {
            device.cuda().copy(&x, kept)?;
            let embedded = end.filter(|_| blocks == 0).unwrap_or(between[0]);
            embed_forward(device, shape, &embed.each(Part::from), embedded, h)?;
            h = embedded;
        } else if let Some(end) = end.filter(|_| blocks == 0) {
            device.cuda().copy(h, end)?;
        }
        for (number, (p, residual)) in params.blocks.iter().zip(&mut residual.blocks).enumerate() {
            let (p, inputs) = (p.each(Part::from), residual.inputs.each_mut(Part::from));
            let interior = residual.interior.each_mut(Part::from);
            let y = end.filter(|_| number + 1 == blocks).unwrap_or(between[(number + 1) % 2]);
            block::forward_attention(device, shape, &p, (&inputs, &interior), partial, h)?;
            self.reduce_on(cx, partial)?;
            block::forward_mlp(device, shape, &p, (&inputs, &interior), (y, partial), h)?;
            self.reduce_on(cx, partial)?;
            block::forward_end(device, shape, &p, (y, partial))?;
            h = y;
        }
        let head = match (&params.head, &mut residual.head) {
            (Some(p), Some(residual)) => Some((p.each(Part::from), residual.each_mut(Part::from))),
            _ => None,
        };
        match (goal, head) {
            (Goal::Rows(_), _) => Ok(()),
            (Goal::Loss { sum, weight, targets }, Some((p, head))) => {
                if let Some(kept) = &mut residual.targets {
                    device.cuda().copy(targets, kept)?;
                }
                let rows = shape.rows() as f64;
                if self.grid.data == 1 {
                    head::forward(device, shape, &p, &head, sum, (h, targets))?;
                    return device.cuda().fill(weight, rows);
                }
                let both = device.doubles(2)?;
                head::forward(device, shape, &p, &head, both.at(0), (h, targets))?;
                device.cuda().fill(both.at(1), rows)?;
                let timer = self.clock.start(Pass::AllReduce);
                cx.all_reduce_on_cuda(DATA_AXIS, &both)?;
                drop(timer);
                sum_doubles(device, sum, both.at(0), 1)?;
                sum_doubles(device, weight, both.at(1), 1)
            }
            (Goal::Logits(logits), Some((p, head))) => {
                head::logits(device, shape, &p, &head, h)?;
                device.cuda().copy(head.probabilities, logits)
            }
            (_, None) => Err(no_head()),
        }
    }

    /// Issues the stage's input gradient. The work writes `dx` and the weight residuals `weight`.
    /// Blocks only in all-reduces with the other devices of the stage.
    #[expect(clippy::too_many_arguments, reason = "each is another array")]
    pub(in crate::gpt) fn backward_input_on(
        &self,
        cx: &mut Context<'_>,
        device: Device<'_>,
        shape: BlockShape,
        params: &StageParams<View<'_>>,
        residual: &StageResidual<View<'_>>,
        seed: &Seed<'_>,
        mut dx: Option<ViewMut<'_>>,
        mut weight: StageWeightResidual<ViewMut<'_>>,
    ) -> Result<()> {
        let elements = shape.rows() * shape.width;
        let (first, second) = (device.floats(elements)?, device.floats(elements)?);
        let between = [Part::from(&first), Part::from(&second)];
        let end = match (&mut weight.embed, &mut dx) {
            (Some(embed), _) => Some(Part::from(&mut embed.dx)),
            (None, dx) => dx.as_mut().map(Part::from),
        };
        let blocks = params.blocks.len();
        let last = end.filter(|_| blocks == 0);
        let mut d = match seed {
            Seed::Rows(dy) => {
                let dy = Part::from(dy);
                if let Some(last) = last {
                    device.cuda().copy(dy, last)?;
                }
                dy
            }
            Seed::Loss(factor) => {
                let (Some(p), Some(residual), Some(targets), Some(weight)) =
                    (&params.head, &residual.head, &residual.targets, &mut weight.head)
                else {
                    return Err(no_head());
                };
                let residual = HeadResiduals {
                    norm_hat: Part::from(&weight.norm_hat),
                    norm_inv_std: Part::from(&residual.norm_inv_std),
                    norm_out: Part::from(&weight.norm_out),
                    probabilities: Part::from(&residual.probabilities),
                };
                let (p, gradients) = (p.each(Part::from), weight.gradients.each_mut(Part::from));
                let (d, given) =
                    (last.unwrap_or(between[0]), (Part::from(targets), Part::from(factor)));
                head::backward_input(device, shape, &p, &residual, &gradients, d, given)?;
                d
            }
            Seed::Nothing => {
                return Err(Error::kernel("a pipeline that samples has no backward pass"));
            }
        };
        let all = params.blocks.iter().zip(&residual.blocks).zip(&mut weight.blocks);
        for (number, ((p, residual), weight)) in all.enumerate().rev() {
            let (p, inputs) = (p.each(Part::from), weight.inputs.each(Part::from));
            let interior = residual.interior.each(Part::from);
            let gradients = weight.gradients.each_mut(Part::from);
            let next = end.filter(|_| number == 0).unwrap_or(between[(blocks - number) % 2]);
            block::backward_mlp(device, shape, &p, &interior, &gradients, d)?;
            self.reduce_on(cx, gradients.d_norm2)?;
            block::backward_attention(device, shape, &p, (&inputs, &interior), &gradients)?;
            self.reduce_on(cx, gradients.d_norm1)?;
            block::backward_end(device, shape, &p, (&inputs, &interior), &gradients, next)?;
            d = next;
        }
        Ok(())
    }

    /// Issues the stage's weight gradient and returns without waiting. The work *adds* to
    /// `gradient`.
    pub(in crate::gpt) fn backward_weight_on(
        &self,
        device: Device<'_>,
        weight: &StageWeightResidual<View<'_>>,
        mut gradient: StageParams<ViewMut<'_>>,
    ) -> Result<()> {
        for (weight, gradient) in weight.blocks.iter().zip(&mut gradient.blocks) {
            let shape = self.shape(weight.gradients.d_mlp.global())?;
            let (inputs, gradients) =
                (weight.inputs.each(Part::from), weight.gradients.each(Part::from));
            block::backward_weight(
                device,
                shape,
                &inputs,
                &gradients,
                &gradient.each_mut(Part::from),
            )?;
        }
        if let (Some(weight), Some(gradient)) = (&weight.embed, &mut gradient.embed) {
            let shape = self.shape(weight.dx.global())?;
            let EmbedParameters { bytes, positions } = gradient.each_mut(Part::from);
            let (dx, tokens) = (Part::from(&weight.dx), Part::from(&weight.tokens));
            embed_backward_weight(
                device,
                shape,
                &EmbedParameters { bytes, positions },
                dx,
                tokens,
            )?;
        }
        if let (Some(weight), Some(gradient)) = (&weight.head, &mut gradient.head) {
            let shape = self.shape(weight.norm_hat.global())?;
            let inputs = (Part::from(&weight.norm_hat), Part::from(&weight.norm_out));
            let gradients = weight.gradients.each(Part::from);
            head::backward_weight(
                device,
                shape,
                inputs,
                &gradients,
                &gradient.each_mut(Part::from),
            )?;
        }
        Ok(())
    }

    fn reduce_on(&self, cx: &mut Context<'_>, summand: Part<'_>) -> Result<()> {
        if self.grid.model == 1 {
            return Ok(());
        }
        let _timer = self.clock.start(Pass::AllReduce);
        cx.all_reduce_on_cuda(MODEL_AXIS, summand)
    }
}
