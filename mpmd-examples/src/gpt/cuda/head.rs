//! The last layers of the model: [`head`](crate::gpt::head) and [`loss`](crate::gpt::loss) on a
//! CUDA device.

use mpmd::cuda::Part;
use mpmd::prelude::*;

use super::device::{Device, Product, size};
use super::norm::{NormOutputs, Rows, norm_backward_input, norm_backward_weight, norm_forward};
use super::sums::sum_doubles;
use crate::gpt::head::{HeadGradients, HeadParameters, HeadResiduals};
use crate::gpt::{BYTES, BlockShape};

fn rows(shape: BlockShape) -> Rows {
    Rows { rows: shape.rows(), width: shape.width }
}

/// Issues the head's layer norm and product: writes the logits of `x` to `residuals.probabilities`,
/// and the norm's arrays to the other residuals.
pub(crate) fn logits(
    device: Device<'_>,
    shape: BlockShape,
    p: &HeadParameters<Part<'_>>,
    residuals: &HeadResiduals<Part<'_>>,
    x: Part<'_>,
) -> Result<()> {
    let HeadResiduals { norm_hat: hat, norm_inv_std: inv_std, norm_out: out, probabilities } =
        *residuals;
    norm_forward(
        device,
        rows(shape),
        NormOutputs { hat, inv_std, out },
        x,
        (p.norm_gain, p.norm_bias),
    )?;
    device.matmul(Product::new(shape.rows(), shape.width, BYTES), probabilities, out, p.weight)
}

/// Issues the forward pass. `sum`, one double, becomes the sum over the rows of the cross-entropy
/// of `targets`, in nats. Also fills `residuals`.
pub(crate) fn forward(
    device: Device<'_>,
    shape: BlockShape,
    p: &HeadParameters<Part<'_>>,
    residuals: &HeadResiduals<Part<'_>>,
    sum: Part<'_>,
    (x, targets): (Part<'_>, Part<'_>),
) -> Result<()> {
    logits(device, shape, p, residuals, x)?;
    let rows = shape.rows();
    let losses = device.doubles(rows)?;
    let args =
        [residuals.probabilities.into(), (&losses).into(), targets.into(), size(rows)?.into()];
    device.rows("cross_entropy", rows, &args)?;
    sum_doubles(device, sum, (&losses).into(), rows)
}

/// Issues the input gradient: the gradient `dx` of the head's input, and the weight residuals
/// `gradients`. The loss is the loss sum times `factor`, one double in device memory.
pub(crate) fn backward_input(
    device: Device<'_>,
    shape: BlockShape,
    p: &HeadParameters<Part<'_>>,
    residuals: &HeadResiduals<Part<'_>>,
    gradients: &HeadGradients<Part<'_>>,
    dx: Part<'_>,
    (targets, factor): (Part<'_>, Part<'_>),
) -> Result<()> {
    let HeadGradients { d_norm, d_logits } = *gradients;
    let count = shape.rows();
    let args = [
        d_logits.into(),
        residuals.probabilities.into(),
        targets.into(),
        factor.into(),
        size(count)?.into(),
    ];
    device.rows("cross_entropy_gradient", count, &args)?;
    device.matmul_nt(Product::new(count, BYTES, shape.width), d_norm, d_logits, p.weight)?;
    let kept = (residuals.norm_hat, residuals.norm_inv_std, p.norm_gain);
    norm_backward_input(device, rows(shape), dx, None, d_norm, kept)
}

/// Issues the weight gradient: *adds* the gradients of the head's parameters to `d`. The residuals
/// are `norm_hat` and `norm_out`, in this order.
pub(crate) fn backward_weight(
    device: Device<'_>,
    shape: BlockShape,
    (norm_hat, norm_out): (Part<'_>, Part<'_>),
    gradients: &HeadGradients<Part<'_>>,
    d: &HeadParameters<Part<'_>>,
) -> Result<()> {
    let product = Product::new(shape.width, shape.rows(), BYTES).added();
    device.matmul_tn(product, d.weight, norm_out, gradients.d_logits)?;
    norm_backward_weight(
        device,
        rows(shape),
        (d.norm_gain, d.norm_bias),
        gradients.d_norm,
        norm_hat,
    )
}

#[cfg(test)]
mod tests {
    use mpmd::aval::DType;

    use super::*;
    use crate::gpt::cuda::testing::{array, assert_near, elsewhere, floats, on_device};
    use crate::gpt::head as host;

    const SHAPE: BlockShape =
        BlockShape { batch: 3, time: 3, width: 11, heads_total: 1, heads: 1, hidden: 1 };
    const FACTOR: f64 = 0.3;

    #[test]
    fn losses_and_gradients_match_the_host() {
        if elsewhere!() {
            return;
        }
        let (rows, width) = (SHAPE.rows(), SHAPE.width);
        let targets: Vec<u8> = vec![0, 255, 31, 32, 7, 7, 128, 200, 64];
        let (x, gain, bias, mut weight) =
            (floats(rows * width, 1), floats(width, 2), floats(width, 3), floats(width * BYTES, 4));
        weight.iter_mut().for_each(|w| *w *= 5.0);
        let before =
            SHAPE.head_parameters().each(|leaf| floats(leaf.elements(), leaf.elements() as u64));
        let zeros = |len: usize| vec![0.0f32; len];
        let parameters =
            HeadParameters { norm_gain: &gain[..], norm_bias: &bias[..], weight: &weight[..] };
        let mut residuals = SHAPE.head_residuals().each(|leaf| zeros(leaf.elements()));
        let (sum, count) = host::forward(
            SHAPE,
            &parameters,
            &mut residuals.each_mut(|leaf| leaf.as_mut_slice()),
            &x,
            &targets,
        );
        assert_eq!(count, rows);
        let (mut gradients, mut d_x) =
            (SHAPE.head_gradients().each(|leaf| zeros(leaf.elements())), zeros(rows * width));
        host::backward_input(
            SHAPE,
            &parameters,
            &residuals.each(|leaf| leaf.as_slice()),
            &mut gradients.each_mut(|leaf| leaf.as_mut_slice()),
            &mut d_x,
            &targets,
            FACTOR,
        );
        let mut d = before.clone();
        host::backward_weight(
            SHAPE,
            (&residuals.norm_hat, &residuals.norm_out),
            &gradients.each(|leaf| leaf.as_slice()),
            &mut d.each_mut(|leaf| leaf.as_mut_slice()),
        );
        let mut inputs = [&x, &gain, &bias, &weight].map(|values| array(values)).to_vec();
        inputs.extend([array(&targets), array(&[FACTOR])]);
        inputs.extend(
            [&before.norm_gain, &before.norm_bias, &before.weight].map(|values| array(values)),
        );
        let expected = [
            residuals.norm_hat,
            residuals.norm_inv_std,
            residuals.norm_out,
            residuals.probabilities,
            gradients.d_norm,
            gradients.d_logits,
            d_x,
            d.norm_gain,
            d.norm_bias,
            d.weight,
        ];
        let mut outputs: Vec<(DType, usize)> =
            expected.iter().map(|leaf| (DType::F32, leaf.len())).collect();
        outputs.push((DType::F64, 1));
        let found = on_device(inputs, &outputs, |device, x, y| {
            let p = HeadParameters { norm_gain: x[1], norm_bias: x[2], weight: x[3] };
            let residuals = HeadResiduals {
                norm_hat: y[0],
                norm_inv_std: y[1],
                norm_out: y[2],
                probabilities: y[3],
            };
            forward(device, SHAPE, &p, &residuals, y[10], (x[0], x[4]))?;
            let gradients = HeadGradients { d_norm: y[4], d_logits: y[5] };
            backward_input(device, SHAPE, &p, &residuals, &gradients, y[6], (x[4], x[5]))?;
            (0..3).try_for_each(|leaf| device.cuda().copy(x[6 + leaf], y[7 + leaf]))?;
            let d = HeadParameters { norm_gain: y[7], norm_bias: y[8], weight: y[9] };
            backward_weight(device, SHAPE, (y[0], y[2]), &gradients, &d)
        });
        let names = [
            "hat",
            "inv_std",
            "out",
            "probabilities",
            "d_norm",
            "d_logits",
            "d_x",
            "gain",
            "bias",
            "weight",
        ];
        for (name, (found, expected)) in names.iter().zip(found.iter().zip(&expected)) {
            assert_near(name, &found.to_vec().unwrap(), expected);
        }
        let found = found[10].to_vec::<f64>().unwrap()[0];
        assert!((found / sum - 1.0).abs() < 1e-6, "{found}, not {sum}");
    }
}
