//! The optimiser: [`adamw`](crate::gpt::adamw) on a CUDA device.

use mpmd_core::cuda::{Grid, Part};
use mpmd_core::prelude::*;

use super::device::{Device, size};
use crate::gpt::adamw::AdamW;

/// The arrays of an update of one leaf, of the same length.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaf<'a> {
    /// Updated.
    pub(crate) w: Part<'a>,
    /// The running mean of the gradients: updated.
    pub(crate) mean: Part<'a>,
    /// The running mean of their squares: updated.
    pub(crate) square: Part<'a>,
    pub(crate) gradient: Part<'a>,
    pub(crate) elements: usize,
}

/// Update `number`, counted from one, of a leaf, at a learning rate; gradients are multiplied by `factor`, a double, first.
pub(crate) fn update(
    device: Device<'_>,
    adamw: AdamW,
    (number, rate): (u64, f64),
    factor: Part<'_>,
    leaf: Leaf<'_>,
) -> Result<()> {
    let Leaf { w, mean, square, gradient, elements } = leaf;
    // As on the host.
    let unbias = |beta: f64| 1.0 - beta.powf(number as f64);
    let numbers = [
        adamw.beta1,
        adamw.beta2,
        1.0 - adamw.beta1,
        1.0 - adamw.beta2,
        rate / unbias(adamw.beta1),
        unbias(adamw.beta2).sqrt().recip(),
        1.0 - rate * adamw.decay,
        adamw.epsilon,
    ];
    let [beta1, beta2, fresh1, fresh2, rate, root, keep, epsilon] = numbers.map(|number| number as f32);
    let args = [
        w.into(),
        mean.into(),
        square.into(),
        gradient.into(),
        factor.into(),
        elements.into(),
        beta1.into(),
        beta2.into(),
        fresh1.into(),
        fresh2.into(),
        rate.into(),
        root.into(),
        keep.into(),
        epsilon.into(),
    ];
    device.elements("adamw", elements, &args)
}

/// What a step's gradients are clipped by: `square_sums` are arrays of doubles with their lengths, in the order of
/// the leaves. All of these are doubles.
pub(crate) fn clip(
    device: Device<'_>,
    limit: f64,
    (factor, loss, norm): (Part<'_>, Part<'_>, Part<'_>),
    square_sums: &[(Part<'_>, usize)],
    (loss_sum, weight): (Part<'_>, Part<'_>),
) -> Result<()> {
    let total = device.doubles(1)?;
    for (at, (sums, count)) in square_sums.iter().enumerate() {
        let from_zero = u32::from(at == 0);
        let args = [(&total).into(), (*sums).into(), size(*count)?.into(), from_zero.into()];
        device.launch("add_in_order", Grid::new(1, 1), &args)?;
    }
    let args = [
        factor.into(),
        loss.into(),
        norm.into(),
        (&total).into(),
        loss_sum.into(),
        weight.into(),
        limit.into(),
    ];
    device.launch("clip", Grid::new(1, 1), &args)
}
