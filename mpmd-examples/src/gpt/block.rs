//! A pre-norm transformer block: `h = x + attention(norm1(x))`, `y = h + mlp(norm2(h))`.
//!
//! [`forward`], [`backward_input`] and [`backward_weight`] are the complete passes. The first two
//! consist of three parts each. Between the parts, devices that share a block add up their summands
//! (see the [module](super)).

use crate::math::Real;

use super::BlockShape;
use super::attention::{
    AttentionOutputs, attention_backward_input, attention_forward, attention_scratch,
};
use super::linear::{LinearShape, linear_backward_weights};
use super::mlp::{mlp_backward_input, mlp_forward};
use super::norm::{NormOutputs, norm_backward_input, norm_backward_weight, norm_forward};

super::leaves! {
    /// Parameters of a block, in the order of their use. Shapes: [`BlockShape::block_parameters`].
    pub struct BlockParameters {
        /// Scale of each column after the first norm.
        norm1_gain,
        /// Shift of each column after the first norm.
        norm1_bias,
        /// Weights from rows to queries, keys and values, in this order, each grouped by head.
        w_qkv,
        /// Bias of queries, keys and values.
        b_qkv,
        /// Weights from the heads' outputs back to the rows.
        w_out,
        /// Bias of the attention branch. It is added once, after the sum over the devices.
        b_out,
        /// Scale of each column after the second norm.
        norm2_gain,
        /// Shift of each column after the second norm.
        norm2_bias,
        /// Weights from rows to the MLP's hidden columns.
        w_up,
        /// Bias of the MLP's hidden columns.
        b_up,
        /// Weights from the MLP's hidden columns back to the rows.
        w_down,
        /// Bias of the MLP branch. It is added once, after the sum over the devices.
        b_down,
    }
}

super::leaves! {
    /// Residuals that are kept until the weight gradient: the inputs of the layers with parameters.
    /// Shapes: [`BlockShape::block_inputs`].
    pub struct BlockInputs {
        /// The block's input rows, each normalised to mean 0 and variance 1, before the first
        /// norm's gain.
        norm1_hat,
        /// The first norm's output.
        norm1_out,
        /// The attention heads' outputs, before the output weights.
        context,
        /// The rows after the attention branch, each normalised to mean 0 and variance 1, before
        /// the second norm's gain.
        norm2_hat,
        /// The second norm's output.
        norm2_out,
        /// The MLP's hidden columns after GELU.
        activated,
    }
}

super::leaves! {
    /// Residuals that only the input gradient reads. They can be freed after that half of the
    /// backward pass. Shapes: [`BlockShape::block_interior`].
    pub struct BlockInterior {
        /// One over each row's standard deviation at the first norm.
        norm1_inv_std,
        /// Queries, keys and values, by head.
        qkv,
        /// Attention weight of each position for itself and each earlier one, by head. Later
        /// positions have weight 0.
        probabilities,
        /// One over each row's standard deviation at the second norm.
        norm2_inv_std,
        /// GELU's derivative at each of the MLP's hidden columns.
        slope,
    }
}

super::leaves! {
    /// Weight residuals: the input gradient writes them, and the weight gradient reads them. They
    /// are the gradients at the outputs of the layers with parameters. Shapes:
    /// [`BlockShape::block_gradients`].
    pub struct BlockGradients {
        /// Gradient at the first norm's output.
        d_norm1,
        /// Gradient at queries, keys and values.
        d_qkv,
        /// Gradient at the attention branch's output, which equals the gradient at `h`, the sum of
        /// the block's input and that branch.
        d_attention,
        /// Gradient at the second norm's output.
        d_norm2,
        /// Gradient at the MLP's hidden columns before GELU.
        d_pre,
        /// Gradient at the MLP branch's output: a copy of the gradient at the block's output.
        d_mlp,
    }
}

/// Returns the number of scratch elements that [`forward`] needs.
///
/// # Panics
///
/// Panics if the heads do not divide the width.
pub fn forward_scratch(shape: BlockShape) -> usize {
    shape.rows() * shape.width + attention_scratch(shape)
}

/// Returns the number of scratch elements that [`backward_input`] needs.
///
/// # Panics
///
/// Panics if the heads do not divide the width.
pub fn backward_scratch(shape: BlockShape) -> usize {
    attention_scratch(shape)
}

/// Computes the block's output `y` from `x`, both `[rows, width]`. Fills `inputs` and `interior`
/// for the backward pass.
///
/// Calls `reduce` twice, each time with this device's summand of a branch. `reduce` must replace
/// the summand with the sum over the devices; with one device it does nothing. `scratch` may have
/// any content and is overwritten.
///
/// # Errors
///
/// Only those of `reduce`.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`, or `scratch` is shorter than [`forward_scratch`].
#[expect(clippy::too_many_arguments, reason = "each is another array")]
pub fn forward<T: Real, E>(
    shape: BlockShape,
    p: &BlockParameters<&[T]>,
    inputs: &mut BlockInputs<&mut [T]>,
    interior: &mut BlockInterior<&mut [T]>,
    y: &mut [T],
    x: &[T],
    scratch: &mut [T],
    mut reduce: impl FnMut(&mut [T]) -> Result<(), E>,
) -> Result<(), E> {
    let (partial, scratch) = scratch.split_at_mut(shape.rows() * shape.width);
    forward_attention(shape, p, inputs, interior, partial, x, scratch);
    reduce(partial)?;
    forward_mlp(shape, p, inputs, interior, y, partial, x);
    reduce(partial)?;
    forward_end(p, y, partial);
    Ok(())
}

/// Runs the first part of [`forward`]: `partial` becomes this device's summand of the attention
/// branch. Fills the attention's arrays of `inputs` and `interior`.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`, or `scratch` is shorter than [`attention_scratch`].
pub fn forward_attention<T: Real>(
    shape: BlockShape,
    p: &BlockParameters<&[T]>,
    inputs: &mut BlockInputs<&mut [T]>,
    interior: &mut BlockInterior<&mut [T]>,
    partial: &mut [T],
    x: &[T],
    scratch: &mut [T],
) {
    let BlockInputs { norm1_hat: hat, norm1_out: out, context, .. } = inputs;
    let BlockInterior { norm1_inv_std: inv_std, qkv, probabilities, .. } = interior;
    norm_forward(NormOutputs { hat, inv_std, out }, x, p.norm1_gain, p.norm1_bias);
    let outputs = AttentionOutputs { qkv, probabilities, context };
    attention_forward(shape, partial, outputs, out, (p.w_qkv, p.b_qkv, p.w_out), scratch);
}

/// Runs the second part of [`forward`]. `partial` must hold the complete attention branch, and
/// becomes this device's summand of the MLP branch. `y` becomes `h`, the sum of `x`, the attention
/// branch and its bias. Fills the MLP's arrays of `inputs` and `interior`.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn forward_mlp<T: Real>(
    shape: BlockShape,
    p: &BlockParameters<&[T]>,
    inputs: &mut BlockInputs<&mut [T]>,
    interior: &mut BlockInterior<&mut [T]>,
    y: &mut [T],
    partial: &mut [T],
    x: &[T],
) {
    y.copy_from_slice(x);
    add_branch(y, partial, p.b_out);
    let BlockInputs { norm2_hat: hat, norm2_out: out, activated, .. } = inputs;
    let BlockInterior { norm2_inv_std: inv_std, slope, .. } = interior;
    norm_forward(NormOutputs { hat, inv_std, out }, y, p.norm2_gain, p.norm2_bias);
    mlp_forward(shape, partial, activated, slope, out, (p.w_up, p.b_up, p.w_down));
}

/// Runs the last part of [`forward`]: adds the complete MLP branch in `partial`, and its bias, to
/// `y`.
///
/// # Panics
///
/// Panics if the slices do not fit each other.
pub fn forward_end<T: Real>(p: &BlockParameters<&[T]>, y: &mut [T], partial: &[T]) {
    add_branch(y, partial, p.b_down);
}

/// Computes the gradient `dx` of the block's input, and the weight residuals `gradients`, from
/// `dy`, the gradient of the block's output.
///
/// Calls `reduce` twice, each time with this device's summand of a gradient. `reduce` must replace
/// the summand with the sum over the devices; with one device it does nothing. `scratch` may have
/// any content and is overwritten.
///
/// # Errors
///
/// Only those of `reduce`.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`, or `scratch` is shorter than [`backward_scratch`].
#[expect(clippy::too_many_arguments, reason = "each is another array")]
pub fn backward_input<T: Real, E>(
    shape: BlockShape,
    p: &BlockParameters<&[T]>,
    (inputs, interior): (&BlockInputs<&[T]>, &BlockInterior<&[T]>),
    gradients: &mut BlockGradients<&mut [T]>,
    dx: &mut [T],
    dy: &[T],
    scratch: &mut [T],
    mut reduce: impl FnMut(&mut [T]) -> Result<(), E>,
) -> Result<(), E> {
    backward_mlp(shape, p, interior, gradients, dy);
    reduce(gradients.d_norm2)?;
    backward_attention(shape, p, (inputs, interior), gradients, scratch);
    reduce(gradients.d_norm1)?;
    backward_end(p, (inputs, interior), gradients, dx);
    Ok(())
}

/// Runs the first part of [`backward_input`] from `dy`, the gradient of the block's output.
/// `gradients.d_norm2` becomes this device's summand of the gradient at the second norm's output.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn backward_mlp<T: Real>(
    shape: BlockShape,
    p: &BlockParameters<&[T]>,
    interior: &BlockInterior<&[T]>,
    gradients: &mut BlockGradients<&mut [T]>,
    dy: &[T],
) {
    let BlockGradients { d_norm2, d_pre, d_mlp, .. } = gradients;
    d_mlp.copy_from_slice(dy);
    mlp_backward_input(shape, d_norm2, d_pre, dy, interior.slope, (p.w_up, p.w_down));
}

/// Runs the second part of [`backward_input`]. `gradients.d_norm2` must hold the complete sum.
/// `gradients.d_norm1` becomes this device's summand of the gradient at the first norm's output.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`, or `scratch` is shorter than [`attention_scratch`].
pub fn backward_attention<T: Real>(
    shape: BlockShape,
    p: &BlockParameters<&[T]>,
    (inputs, interior): (&BlockInputs<&[T]>, &BlockInterior<&[T]>),
    gradients: &mut BlockGradients<&mut [T]>,
    scratch: &mut [T],
) {
    let BlockGradients { d_norm1, d_qkv, d_attention, d_norm2, d_mlp, .. } = gradients;
    d_attention.copy_from_slice(d_mlp);
    norm_backward_input(
        d_attention,
        d_norm2,
        inputs.norm2_hat,
        interior.norm2_inv_std,
        p.norm2_gain,
    );
    let kept = (interior.qkv, interior.probabilities);
    attention_backward_input(shape, d_norm1, d_qkv, d_attention, kept, (p.w_qkv, p.w_out), scratch);
}

/// Runs the last part of [`backward_input`]: `dx` becomes the gradient of the block's input.
/// `gradients.d_norm1` must hold the complete sum.
///
/// # Panics
///
/// Panics if the slices do not fit each other.
pub fn backward_end<T: Real>(
    p: &BlockParameters<&[T]>,
    (inputs, interior): (&BlockInputs<&[T]>, &BlockInterior<&[T]>),
    gradients: &BlockGradients<&mut [T]>,
    dx: &mut [T],
) {
    dx.copy_from_slice(gradients.d_attention);
    norm_backward_input(
        dx,
        gradients.d_norm1,
        inputs.norm1_hat,
        interior.norm1_inv_std,
        p.norm1_gain,
    );
}

/// *Adds* the gradients of the block's parameters to `d`, from the residuals of the forward pass
/// and of [`backward_input`].
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn backward_weight<T: Real>(
    shape: BlockShape,
    inputs: &BlockInputs<&[T]>,
    gradients: &BlockGradients<&[T]>,
    d: &mut BlockParameters<&mut [T]>,
) {
    let BlockShape { width, hidden, .. } = shape;
    let (rows, local) = (shape.rows(), shape.local_width());
    let g = gradients;
    norm_backward_weight(d.norm1_gain, d.norm1_bias, g.d_norm1, inputs.norm1_hat);
    let layer = |inputs, outputs| LinearShape { rows, inputs, outputs };
    linear_backward_weights(layer(width, 3 * local), d.w_qkv, d.b_qkv, inputs.norm1_out, g.d_qkv);
    linear_backward_weights(layer(local, width), d.w_out, d.b_out, inputs.context, g.d_attention);
    norm_backward_weight(d.norm2_gain, d.norm2_bias, g.d_norm2, inputs.norm2_hat);
    linear_backward_weights(layer(width, hidden), d.w_up, d.b_up, inputs.norm2_out, g.d_pre);
    linear_backward_weights(layer(hidden, width), d.w_down, d.b_down, inputs.activated, g.d_mlp);
}

/// Computes `y += branch + bias` for each row. The slices `y` and `branch` must have the same
/// length.
fn add_branch<T: Real>(y: &mut [T], branch: &[T], bias: &[T]) {
    assert_eq!(y.len(), branch.len(), "elements of a branch");
    for (y, branch) in y.chunks_exact_mut(bias.len()).zip(branch.chunks_exact(bias.len())) {
        for (y, (branch, bias)) in y.iter_mut().zip(branch.iter().zip(bias)) {
            *y += *branch + *bias;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use mpmd::tree::Tree as _;

    use super::*;
    use crate::gpt::LeafShape;
    use crate::gpt::lanes::dot;
    use crate::gpt::testing::{assert_gradient, random};

    const SHAPE: BlockShape =
        BlockShape { batch: 2, time: 3, width: 4, heads_total: 2, heads: 2, hidden: 6 };

    /// A block's arrays of all passes on one device.
    struct Device {
        shape: BlockShape,
        p: BlockParameters<Vec<f64>>,
        inputs: BlockInputs<Vec<f64>>,
        interior: BlockInterior<Vec<f64>>,
        gradients: BlockGradients<Vec<f64>>,
        d: BlockParameters<Vec<f64>>,
        scratch: Vec<f64>,
        partial: Vec<f64>,
        y: Vec<f64>,
        dx: Vec<f64>,
    }

    fn unset(leaf: &LeafShape) -> Vec<f64> {
        vec![f64::NAN; leaf.elements()]
    }

    impl Device {
        fn new(shape: BlockShape, p: BlockParameters<Vec<f64>>) -> Self {
            let rows = || vec![f64::NAN; shape.rows() * shape.width];
            Self {
                shape,
                d: p.each(|leaf| vec![0.0; leaf.len()]),
                p,
                inputs: shape.block_inputs().each(unset),
                interior: shape.block_interior().each(unset),
                gradients: shape.block_gradients().each(unset),
                scratch: vec![f64::NAN; forward_scratch(shape).max(backward_scratch(shape))],
                partial: rows(),
                y: rows(),
                dx: rows(),
            }
        }

        fn run(&mut self, x: &[f64], dy: &[f64]) {
            let p = self.p.each(|leaf| leaf.as_slice());
            let (shape, alone) = (self.shape, |_: &mut [f64]| Ok::<(), Infallible>(()));
            let inputs = &mut self.inputs.each_mut(|leaf| leaf.as_mut_slice());
            let interior = &mut self.interior.each_mut(|leaf| leaf.as_mut_slice());
            let Ok(()) =
                forward(shape, &p, inputs, interior, &mut self.y, x, &mut self.scratch, alone);
            let inputs = self.inputs.each(|leaf| leaf.as_slice());
            let interior = self.interior.each(|leaf| leaf.as_slice());
            let gradients = &mut self.gradients.each_mut(|leaf| leaf.as_mut_slice());
            let (dx, scratch) = (&mut self.dx, &mut self.scratch);
            let Ok(()) =
                backward_input(shape, &p, (&inputs, &interior), gradients, dx, dy, scratch, alone);
            self.weight();
        }

        fn weight(&mut self) {
            let inputs = self.inputs.each(|leaf| leaf.as_slice());
            let gradients = self.gradients.each(|leaf| leaf.as_slice());
            let d = &mut self.d.each_mut(|leaf| leaf.as_mut_slice());
            backward_weight(self.shape, &inputs, &gradients, d);
        }
    }

    fn parameters() -> BlockParameters<Vec<f64>> {
        let mut seed = 0;
        SHAPE.block_parameters().each(|leaf| {
            seed += 1;
            random(leaf.elements(), seed)
        })
    }

    /// Cuts each sharded leaf of `whole`, in place, to the half of device `index` of two. Returns a
    /// copy of the result.
    fn parts_of(whole: &mut BlockParameters<Vec<f64>>, index: usize) -> BlockParameters<Vec<f64>> {
        let shapes = SHAPE.block_parameters().into_leaves();
        for ((_, leaf), shape) in fields(whole).into_iter().zip(shapes) {
            if let Some(dim) = shape.sharded {
                let run = shape.dims[dim..].iter().product::<usize>() / 2;
                *leaf = leaf.chunks_exact(run).skip(index).step_by(2).flatten().copied().collect();
            }
        }
        whole.clone()
    }

    fn field(p: &mut BlockParameters<Vec<f64>>, i: usize) -> &mut Vec<f64> {
        fields(p).into_iter().nth(i).expect("twelve fields").1
    }

    fn fields(p: &mut BlockParameters<Vec<f64>>) -> [(&'static str, &mut Vec<f64>); 12] {
        [
            ("norm1_gain", &mut p.norm1_gain),
            ("norm1_bias", &mut p.norm1_bias),
            ("w_qkv", &mut p.w_qkv),
            ("b_qkv", &mut p.b_qkv),
            ("w_out", &mut p.w_out),
            ("b_out", &mut p.b_out),
            ("norm2_gain", &mut p.norm2_gain),
            ("norm2_bias", &mut p.norm2_bias),
            ("w_up", &mut p.w_up),
            ("b_up", &mut p.b_up),
            ("w_down", &mut p.w_down),
            ("b_down", &mut p.b_down),
        ]
    }

    #[test]
    fn gradients_equal_finite_differences() {
        let (x, dy) = (random(24, 20), random(24, 21));
        let mut device = Device::new(SHAPE, parameters());
        device.run(&x, &dy);
        let value = |(p, x): &(BlockParameters<Vec<f64>>, Vec<f64>)| {
            let mut device = Device::new(SHAPE, p.clone());
            device.run(x, &dy);
            dot(&dy, &device.y)
        };
        let mut at = (parameters(), x);
        assert_gradient("x", &device.dx, &mut at, |at| &mut at.1, value);
        for (i, (name, gradient)) in fields(&mut device.d).into_iter().enumerate() {
            assert_gradient(name, gradient, &mut at, |at| field(&mut at.0, i), value);
        }
    }

    #[test]
    fn weight_gradients_are_added() {
        let mut device = Device::new(SHAPE, parameters());
        device.run(&random(24, 20), &random(24, 21));
        let once = device.d.clone();
        device.weight();
        for ((name, twice), (_, once)) in
            fields(&mut device.d).into_iter().zip(fields(&mut once.clone()))
        {
            let doubled = twice.iter().zip(once.iter()).all(|(a, b)| (a - 2.0 * b).abs() < 1e-12);
            assert!(doubled, "{name}");
        }
    }

    #[test]
    fn two_devices_that_reduce_equal_one_device() {
        let (x, dy) = (random(24, 20), random(24, 21));
        let mut whole = Device::new(SHAPE, parameters());
        whole.run(&x, &dy);
        let shape = SHAPE.split(2);
        let mut devices: Vec<Device> =
            (0..2).map(|index| Device::new(shape, parts_of(&mut parameters(), index))).collect();

        // Runs each part of a pass on both devices, then adds up their summands, as callers do.
        for d in &mut devices {
            let inputs = &mut d.inputs.each_mut(|leaf| leaf.as_mut_slice());
            let interior = &mut d.interior.each_mut(|leaf| leaf.as_mut_slice());
            let p = d.p.each(|leaf| leaf.as_slice());
            forward_attention(shape, &p, inputs, interior, &mut d.partial, &x, &mut d.scratch);
        }
        add_up(&mut devices, |d| &mut d.partial);
        for d in &mut devices {
            let inputs = &mut d.inputs.each_mut(|leaf| leaf.as_mut_slice());
            let interior = &mut d.interior.each_mut(|leaf| leaf.as_mut_slice());
            let p = d.p.each(|leaf| leaf.as_slice());
            forward_mlp(shape, &p, inputs, interior, &mut d.y, &mut d.partial, &x);
        }
        add_up(&mut devices, |d| &mut d.partial);
        for d in &mut devices {
            forward_end(&d.p.each(|leaf| leaf.as_slice()), &mut d.y, &d.partial);
            let interior = d.interior.each(|leaf| leaf.as_slice());
            let gradients = &mut d.gradients.each_mut(|leaf| leaf.as_mut_slice());
            backward_mlp(shape, &d.p.each(|leaf| leaf.as_slice()), &interior, gradients, &dy);
        }
        add_up(&mut devices, |d| &mut d.gradients.d_norm2);
        for d in &mut devices {
            let p = d.p.each(|leaf| leaf.as_slice());
            let inputs = d.inputs.each(|leaf| leaf.as_slice());
            let interior = d.interior.each(|leaf| leaf.as_slice());
            let gradients = &mut d.gradients.each_mut(|leaf| leaf.as_mut_slice());
            backward_attention(shape, &p, (&inputs, &interior), gradients, &mut d.scratch);
        }
        add_up(&mut devices, |d| &mut d.gradients.d_norm1);
        for (index, d) in devices.iter_mut().enumerate() {
            let p = d.p.each(|leaf| leaf.as_slice());
            let inputs = d.inputs.each(|leaf| leaf.as_slice());
            let interior = d.interior.each(|leaf| leaf.as_slice());
            let gradients = d.gradients.each_mut(|leaf| leaf.as_mut_slice());
            backward_end(&p, (&inputs, &interior), &gradients, &mut d.dx);
            d.weight();
            assert_near("y", &d.y, &whole.y);
            assert_near("dx", &d.dx, &whole.dx);
            let mut parts = parts_of(&mut whole.d.clone(), index);
            for ((name, got), (_, expected)) in fields(&mut d.d).into_iter().zip(fields(&mut parts))
            {
                assert_near(name, got, expected);
            }
        }
    }

    fn add_up(devices: &mut [Device], leaf: impl Fn(&mut Device) -> &mut Vec<f64>) {
        let sum: Vec<f64> = {
            let first = leaf(&mut devices[0]).clone();
            first.iter().zip(leaf(&mut devices[1]).iter()).map(|(a, b)| a + b).collect()
        };
        devices.iter_mut().for_each(|device| leaf(device).clone_from(&sum));
    }

    fn assert_near(name: &str, got: &[f64], expected: &[f64]) {
        assert_eq!(got.len(), expected.len(), "{name}");
        let near = got.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-12);
        assert!(near, "{name}: {got:?}, not {expected:?}");
    }
}
