//! The block's second branch: [`mlp`](crate::gpt::mlp) on a CUDA device.

use mpmd::cuda::Part;
use mpmd::prelude::*;

use super::device::{Device, Product, size};
use crate::gpt::BlockShape;

/// Issues `out = gelu(x w_up + b_up) w_down`: this device's summand, without the output bias. Also
/// writes GELU's value to `activated` and GELU's derivative to `slope`.
pub(crate) fn mlp_forward(
    device: Device<'_>,
    shape: BlockShape,
    out: Part<'_>,
    (activated, slope): (Part<'_>, Part<'_>),
    x: Part<'_>,
    (w_up, b_up, w_down): (Part<'_>, Part<'_>, Part<'_>),
) -> Result<()> {
    let BlockShape { width, hidden, .. } = shape;
    let rows = shape.rows();
    // The sums before GELU are needed only here, so the slopes overwrite them.
    device.matmul(Product::new(rows, width, hidden), slope, x, w_up)?;
    let args =
        [activated.into(), slope.into(), b_up.into(), size(rows)?.into(), size(hidden)?.into()];
    device.rows("bias_gelu", rows, &args)?;
    device.matmul(Product::new(rows, hidden, width), out, activated, w_down)
}

/// Issues the computation of gradients from `d_out`, the gradient of the branch's complete output.
/// `d_pre` becomes the gradient of the sums before GELU. `d_x` becomes this device's summand of the
/// gradient of the input.
pub(crate) fn mlp_backward_input(
    device: Device<'_>,
    shape: BlockShape,
    (d_x, d_pre): (Part<'_>, Part<'_>),
    d_out: Part<'_>,
    slope: Part<'_>,
    (w_up, w_down): (Part<'_>, Part<'_>),
) -> Result<()> {
    let BlockShape { width, hidden, .. } = shape;
    let rows = shape.rows();
    device.matmul_nt(Product::new(rows, width, hidden), d_pre, d_out, w_down)?;
    let elements = rows * hidden;
    device.elements("multiply", elements, &[d_pre.into(), slope.into(), elements.into()])?;
    device.matmul_nt(Product::new(rows, hidden, width), d_x, d_pre, w_up)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::cuda::testing::{array, assert_near, elsewhere, floats, floats_on_device};
    use crate::gpt::mlp as host;

    const SHAPE: BlockShape =
        BlockShape { batch: 1, time: 5, width: 9, heads_total: 1, heads: 1, hidden: 37 };

    #[test]
    fn branch_and_its_gradients_match_the_host() {
        if elsewhere!() {
            return;
        }
        let (rows, width, hidden) = (SHAPE.rows(), SHAPE.width, SHAPE.hidden);
        let lens = [rows * width, width * hidden, hidden, hidden * width, rows * width];
        let [mut x, w_up, b_up, w_down, d_out] =
            std::array::from_fn(|i| floats(lens[i], i as u64 + 1));
        // Large inputs, so that some columns are at each flat end of GELU.
        x.iter_mut().for_each(|x| *x *= 20.0);
        let zeros = |len: usize| vec![0.0f32; len];
        let (mut out, mut activated, mut slope) =
            (zeros(rows * width), zeros(rows * hidden), zeros(rows * hidden));
        let weights = (&w_up[..], &b_up[..], &w_down[..]);
        host::mlp_forward(SHAPE, &mut out, &mut activated, &mut slope, &x, weights);
        let (mut d_x, mut d_pre) = (zeros(rows * width), zeros(rows * hidden));
        host::mlp_backward_input(SHAPE, &mut d_x, &mut d_pre, &d_out, &slope, (&w_up, &w_down));
        let inputs = [&x, &w_up, &b_up, &w_down, &d_out].map(|values| array(values)).to_vec();
        let expected = [out, activated, slope, d_x, d_pre];
        let found = floats_on_device(inputs, &expected.each_ref().map(Vec::len), |device, x, y| {
            mlp_forward(device, SHAPE, y[0], (y[1], y[2]), x[0], (x[1], x[2], x[3]))?;
            mlp_backward_input(device, SHAPE, (y[3], y[4]), x[4], y[2], (x[1], x[3]))
        });
        let names = ["out", "activated", "slope", "d_x", "d_pre"];
        for (name, (found, expected)) in names.iter().zip(found.iter().zip(&expected)) {
            assert_near(name, found, expected);
        }
    }
}
