//! Layer norm: [`norm`](crate::gpt::norm) on a CUDA device.

use mpmd::cuda::Part;
use mpmd::prelude::*;

use super::device::{Device, size};
use super::sums::add_column_sums;

/// The sizes of an array of rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rows {
    /// Number of rows.
    pub(crate) rows: usize,
    /// Number of columns: at least one.
    pub(crate) width: usize,
}

impl Rows {
    /// Returns the kernel arguments (rows, width, 1 / width). A number of more than 32 bits is an
    /// error.
    fn sizes(self) -> Result<(u32, u32, f32)> {
        Ok((size(self.rows)?, size(self.width)?, (1.0 / self.width as f64) as f32))
    }
}

/// Arrays that [`norm_forward`] writes, as on the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NormOutputs<'a> {
    /// The rows at mean 0 and variance 1: `[rows, width]`.
    pub(crate) hat: Part<'a>,
    /// One over the standard deviation of each row: `[rows]`.
    pub(crate) inv_std: Part<'a>,
    /// The rows after gain and bias: `[rows, width]`.
    pub(crate) out: Part<'a>,
}

/// The branch that is added to a block's rows `x` before the norm: `y = x + (branch + bias)`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Join<'a> {
    pub(crate) y: Part<'a>,
    pub(crate) branch: Part<'a>,
    pub(crate) bias: Part<'a>,
}

/// Issues the layer norm of the rows of `x`. The results go to `outputs`.
pub(crate) fn norm_forward(
    device: Device<'_>,
    shape: Rows,
    outputs: NormOutputs<'_>,
    x: Part<'_>,
    (gain, bias): (Part<'_>, Part<'_>),
) -> Result<()> {
    let NormOutputs { hat, inv_std, out } = outputs;
    let (rows, width, share) = shape.sizes()?;
    device.rows(
        "norm_forward",
        shape.rows,
        &[
            hat.into(),
            inv_std.into(),
            out.into(),
            x.into(),
            gain.into(),
            bias.into(),
            rows.into(),
            width.into(),
            share.into(),
        ],
    )
}

/// Issues `y = x + (branch + bias)` with the arrays of `join`, and the layer norm of `y`. The
/// norm's results go to `outputs`.
pub(crate) fn branch_norm_forward(
    device: Device<'_>,
    shape: Rows,
    outputs: NormOutputs<'_>,
    x: Part<'_>,
    join: Join<'_>,
    (gain, bias): (Part<'_>, Part<'_>),
) -> Result<()> {
    let NormOutputs { hat, inv_std, out } = outputs;
    let Join { y, branch, bias: branch_bias } = join;
    let (rows, width, share) = shape.sizes()?;
    device.rows(
        "branch_norm_forward",
        shape.rows,
        &[
            y.into(),
            hat.into(),
            inv_std.into(),
            out.into(),
            x.into(),
            branch.into(),
            branch_bias.into(),
            gain.into(),
            bias.into(),
            rows.into(),
            width.into(),
            share.into(),
        ],
    )
}

/// Issues `y += branch + bias`; the bias is added to each row.
pub(crate) fn add_branch(
    device: Device<'_>,
    shape: Rows,
    y: Part<'_>,
    branch: Part<'_>,
    bias: Part<'_>,
) -> Result<()> {
    let (rows, width, _) = shape.sizes()?;
    let args = [y.into(), branch.into(), bias.into(), rows.into(), width.into()];
    device.rows("add_branch", shape.rows, &args)
}

/// Issues `dx = base +` the gradient of the norm's input. A `base` of `None` counts as zero.
/// `d_out` is the gradient of the norm's output.
pub(crate) fn norm_backward_input(
    device: Device<'_>,
    shape: Rows,
    dx: Part<'_>,
    base: Option<Part<'_>>,
    d_out: Part<'_>,
    (hat, inv_std, gain): (Part<'_>, Part<'_>, Part<'_>),
) -> Result<()> {
    let (rows, width, share) = shape.sizes()?;
    device.rows(
        "norm_backward_input",
        shape.rows,
        &[
            dx.into(),
            // The kernel does not read it if there is no base.
            base.unwrap_or(dx).into(),
            u32::from(base.is_some()).into(),
            d_out.into(),
            hat.into(),
            inv_std.into(),
            gain.into(),
            rows.into(),
            width.into(),
            share.into(),
        ],
    )
}

/// Issues the weight gradient: *adds* the gradient of the gain to `d_gain` and that of the bias to
/// `d_bias`. `d_out` is the gradient of the norm's output.
pub(crate) fn norm_backward_weight(
    device: Device<'_>,
    shape: Rows,
    (d_gain, d_bias): (Part<'_>, Part<'_>),
    d_out: Part<'_>,
    hat: Part<'_>,
) -> Result<()> {
    add_column_sums(device, (shape.rows, shape.width), d_bias, d_out, Some((d_gain, hat)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::cuda::testing::{array, assert_near, elsewhere, floats, floats_on_device};
    use crate::gpt::norm as host;

    /// Rows that do not fill a block, and columns that do not fill a warp.
    const SHAPE: Rows = Rows { rows: 13, width: 43 };
    const ELEMENTS: usize = 13 * 43;

    #[test]
    fn normalised_rows_match_the_host() {
        if elsewhere!() {
            return;
        }
        let (x, branch) = (floats(ELEMENTS, 1), floats(ELEMENTS, 2));
        let [gain, bias, branch_bias] = [3, 4, 5].map(|seed| floats(SHAPE.width, seed));
        let forward = |x: &[f32]| {
            let (mut hat, mut inv_std, mut out) = (x.to_vec(), vec![0.0; SHAPE.rows], x.to_vec());
            let outputs = host::NormOutputs { hat: &mut hat, inv_std: &mut inv_std, out: &mut out };
            host::norm_forward(outputs, x, &gain, &bias);
            [hat, inv_std, out]
        };
        let joined: Vec<f32> =
            (0..ELEMENTS).map(|i| x[i] + (branch[i] + branch_bias[i % SHAPE.width])).collect();
        let inputs =
            vec![array(&x), array(&branch), array(&branch_bias), array(&gain), array(&bias)];
        let lens =
            [ELEMENTS, SHAPE.rows, ELEMENTS, ELEMENTS, ELEMENTS, SHAPE.rows, ELEMENTS, ELEMENTS];
        let found = floats_on_device(inputs, &lens, |device, x, y| {
            let outputs =
                |at: usize| NormOutputs { hat: y[at], inv_std: y[at + 1], out: y[at + 2] };
            norm_forward(device, SHAPE, outputs(0), x[0], (x[3], x[4]))?;
            let join = Join { y: y[3], branch: x[1], bias: x[2] };
            branch_norm_forward(device, SHAPE, outputs(4), x[0], join, (x[3], x[4]))?;
            device.cuda().copy(x[0], y[7])?;
            add_branch(device, SHAPE, y[7], x[1], x[2])
        });
        let expected = [
            &forward(&x)[..],
            std::slice::from_ref(&joined),
            &forward(&joined),
            std::slice::from_ref(&joined),
        ]
        .concat();
        for (name, (found, expected)) in
            ["hat", "inv_std", "out", "y", "hat of y", "inv_std of y", "out of y", "sum"]
                .iter()
                .zip(found.iter().zip(&expected))
        {
            assert_near(name, found, expected);
        }
    }

    #[test]
    fn norm_gradients_match_the_host() {
        if elsewhere!() {
            return;
        }
        let (d_out, hat, base) = (floats(ELEMENTS, 1), floats(ELEMENTS, 2), floats(ELEMENTS, 3));
        let (inv_std, gain) = (floats(SHAPE.rows, 4), floats(SHAPE.width, 5));
        let (before_gain, before_bias) = (floats(SHAPE.width, 6), floats(SHAPE.width, 7));
        let mut added = base.clone();
        host::norm_backward_input(&mut added, &d_out, &hat, &inv_std, &gain);
        let mut alone = vec![0.0; ELEMENTS];
        host::norm_backward_input(&mut alone, &d_out, &hat, &inv_std, &gain);
        let (mut d_gain, mut d_bias) = (before_gain.clone(), before_bias.clone());
        host::norm_backward_weight(&mut d_gain, &mut d_bias, &d_out, &hat);
        let inputs = [&d_out, &hat, &base, &inv_std, &gain, &before_gain, &before_bias];
        let inputs = inputs.into_iter().map(|values| array(values)).collect();
        let lens = [ELEMENTS, ELEMENTS, SHAPE.width, SHAPE.width];
        let found = floats_on_device(inputs, &lens, |device, x, y| {
            let kept = (x[1], x[3], x[4]);
            norm_backward_input(device, SHAPE, y[0], Some(x[2]), x[0], kept)?;
            norm_backward_input(device, SHAPE, y[1], None, x[0], kept)?;
            device.cuda().copy(x[5], y[2])?;
            device.cuda().copy(x[6], y[3])?;
            norm_backward_weight(device, SHAPE, (y[2], y[3]), x[0], x[1])
        });
        for (name, (found, expected)) in ["added", "alone", "gain", "bias"]
            .iter()
            .zip(found.iter().zip([added, alone, d_gain, d_bias]))
        {
            assert_near(name, found, &expected);
        }
    }
}
