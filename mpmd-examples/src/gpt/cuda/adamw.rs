//! The optimiser: [`adamw`](crate::gpt::adamw) on a CUDA device.

use mpmd::cuda::{Grid, Part};
use mpmd::prelude::*;

use super::device::{Device, size};
use crate::gpt::adamw::AdamW;

/// The arrays of an update of one leaf, each of `elements` floats.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leaf<'a> {
    /// The parameters, updated in place.
    pub(crate) w: Part<'a>,
    /// The running mean of the gradients, updated in place.
    pub(crate) mean: Part<'a>,
    /// The running mean of the squared gradients, updated in place.
    pub(crate) square: Part<'a>,
    pub(crate) gradient: Part<'a>,
    pub(crate) elements: usize,
}

/// Issues the AdamW update of a leaf. `number` counts updates from one, and `rate` is the learning
/// rate. The kernel first multiplies the gradients by `factor`, one double in device memory.
pub(crate) fn update(
    device: Device<'_>,
    adamw: AdamW,
    (number, rate): (u64, f64),
    factor: Part<'_>,
    leaf: Leaf<'_>,
) -> Result<()> {
    let Leaf { w, mean, square, gradient, elements } = leaf;
    // The same formula as on the host.
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
    let [beta1, beta2, fresh1, fresh2, rate, root, keep, epsilon] =
        numbers.map(|number| number as f32);
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

/// Issues the computation of the gradients' `factor`, the mean `loss`, and the `norm` of the mean
/// gradient. The factor limits that norm to `limit` and divides by `weight`.
///
/// `square_sums` are pairs of an array and its length, in the order of the leaves. All arrays are
/// doubles in device memory.
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

#[cfg(test)]
mod tests {
    use mpmd::aval::DType;

    use super::*;
    use crate::gpt::adamw::{self as host, AdamStep};
    use crate::gpt::cuda::testing::{
        array, assert_near, elsewhere, floats, floats_on_device, on_device,
    };

    #[test]
    fn update_matches_the_host() {
        if elsewhere!() {
            return;
        }
        let (elements, factor, rate) = (700, 0.25, 0.01);
        let (w, gradient, mean) = (floats(elements, 1), floats(elements, 2), floats(elements, 3));
        let square: Vec<f32> = floats(elements, 4).iter().map(|x| x * x).collect();
        let adamw = AdamW::default();
        let mut expected = [w.clone(), mean.clone(), square.clone()];
        let [new_w, new_mean, new_square] = &mut expected;
        let step = AdamStep { number: 3, rate, gradient_factor: factor };
        adamw.update(step, new_w, new_mean, new_square, &gradient);
        let mut inputs = [&w, &mean, &square, &gradient].map(|values| array(values)).to_vec();
        inputs.push(array(&[factor]));
        let found = floats_on_device(inputs, &[elements; 3], move |device, x, y| {
            (0..3).try_for_each(|leaf| device.cuda().copy(x[leaf], y[leaf]))?;
            let leaf = Leaf { w: y[0], mean: y[1], square: y[2], gradient: x[3], elements };
            update(device, adamw, (3, rate), x[4], leaf)
        });
        for (name, (found, expected)) in
            ["w", "mean", "square"].iter().zip(found.iter().zip(&expected))
        {
            assert_near(name, found, expected);
        }
    }

    #[test]
    fn clipping_matches_the_host() {
        if elsewhere!() {
            return;
        }
        let (first, second, sum, weight) = ([1.0, 4.0, 0.5], [30.5], 12.0, 8.0);
        for limit in [0.5, 100.0] {
            let inputs = vec![array(&first), array(&second), array(&[sum]), array(&[weight])];
            let found = on_device(inputs, &[(DType::F64, 1); 3], move |device, x, y| {
                let sums = [(x[0], 3), (x[1], 1)];
                clip(device, limit, (y[0], y[1], y[2]), &sums, (x[2], x[3]))
            });
            let all = first.into_iter().chain(second);
            let (factor, norm) = host::clip_factor(all, limit * weight);
            let expected = [factor / weight, sum / weight, norm / weight];
            for (found, expected) in found.iter().zip(expected) {
                assert_eq!(found.to_vec::<f64>().unwrap(), [expected], "clipped to {limit}");
            }
        }
    }
}
