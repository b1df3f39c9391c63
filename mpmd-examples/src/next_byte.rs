//! The arithmetic of a model that predicts the next byte of a text from the last [`CONTEXT`] bytes.
//!
//! Each context byte is looked up in a table. The rows found are joined and go through layers
//! `tanh(x W + b)`. A last layer without `tanh` gives one logit for each byte value. The loss is
//! the cross-entropy of the next byte, in nats.
//!
//! The backward pass of a layer has two halves, for pipelines. [`linear_backward_input`] gives the
//! gradient that the layer before waits for, and `dz`. [`linear_backward_weights`] can use `dz`
//! later. Gradients of weights are *added* to the values in their buffers.
//!
//! Sums run over rows in order on one thread, so results do not depend on the number of processes.

use std::ops::Range;

use crate::math::{Real, matmul, matmul_nt, matmul_tn};

/// Length of a context, in bytes: the bytes from which the model predicts the next one.
pub const CONTEXT: usize = 16;
/// Number of values of a byte.
pub const BYTES: usize = 256;

/// Copies each context byte's row of `table` to `y`. Shapes: `contexts` `[rows, CONTEXT]`, `table`
/// `[BYTES, width]`, `y` `[rows, CONTEXT * width]`.
///
/// # Panics
///
/// Panics if the slices do not fit each other and `width`.
pub fn embed<T: Real>(y: &mut [T], contexts: &[u8], table: &[T], width: usize) {
    assert_embedding(y.len(), contexts, table.len(), width);
    for (y, byte) in y.chunks_exact_mut(width).zip(contexts) {
        y.copy_from_slice(&table[row(*byte, width)]);
    }
}

/// *Adds* the gradient of the table to `dtable`. `dy` is the gradient of [`embed`]'s `y`.
///
/// # Panics
///
/// Panics if the slices do not fit each other and `width`.
pub fn embed_backward<T: Real>(dtable: &mut [T], contexts: &[u8], dy: &[T], width: usize) {
    assert_embedding(dy.len(), contexts, dtable.len(), width);
    for (dy, byte) in dy.chunks_exact(width).zip(contexts) {
        for (dtable, dy) in dtable[row(*byte, width)].iter_mut().zip(dy) {
            *dtable += *dy;
        }
    }
}

fn assert_embedding(outputs: usize, contexts: &[u8], table: usize, width: usize) {
    assert!(width > 0, "an embedding of no width");
    assert!(
        contexts.len().is_multiple_of(CONTEXT),
        "{} bytes are not a whole number of contexts",
        contexts.len()
    );
    assert_eq!(outputs, contexts.len() * width, "embedded elements");
    assert_eq!(table, BYTES * width, "table elements");
}

fn row(byte: u8, width: usize) -> Range<usize> {
    usize::from(byte) * width..(usize::from(byte) + 1) * width
}

/// The function that a layer applies to its sums.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Activation {
    /// No change: for the layer of the logits.
    Identity,
    /// Maps into (-1, 1). Its slope follows from its value, so only outputs are kept.
    Tanh,
}

/// The sizes of a layer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LinearShape {
    /// Number of rows of the batch.
    pub rows: usize,
    /// Number of columns of the layer's input.
    pub inputs: usize,
    /// Number of columns of the layer's output.
    pub outputs: usize,
}

/// Computes `y = activation(x w + bias)`.
///
/// Shapes: `x` `[rows, inputs]`, `w` `[inputs, outputs]`, `bias` `[outputs]`, `y` `[rows,
/// outputs]`.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn linear_forward<T: Real>(
    shape: LinearShape,
    activation: Activation,
    y: &mut [T],
    x: &[T],
    w: &[T],
    bias: &[T],
) {
    let LinearShape { rows, inputs, outputs } = shape;
    assert_eq!((y.len(), bias.len()), (rows * outputs, outputs), "elements of output and bias");
    if outputs == 0 {
        return;
    }
    for y in y.chunks_exact_mut(outputs) {
        y.copy_from_slice(bias);
    }
    matmul(y, x, w, rows, inputs, outputs, true);
    if activation == Activation::Tanh {
        for y in y {
            *y = y.tanh();
        }
    }
}

/// Computes two gradients from `dy`, the gradient of the layer's output: `dx` of its input, and
/// `dz` of its sums before the activation.
///
/// `y` is the output of [`linear_forward`], and `dz` has its shape.
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn linear_backward_input<T: Real>(
    shape: LinearShape,
    activation: Activation,
    dx: &mut [T],
    dz: &mut [T],
    dy: &[T],
    y: &[T],
    w: &[T],
) {
    let LinearShape { rows, inputs, outputs } = shape;
    assert_eq!(
        (dz.len(), dy.len(), y.len()),
        (rows * outputs, rows * outputs, rows * outputs),
        "outputs"
    );
    match activation {
        Activation::Identity => dz.copy_from_slice(dy),
        Activation::Tanh => {
            for ((dz, dy), y) in dz.iter_mut().zip(dy).zip(y) {
                *dz = *dy * (T::ONE - *y * *y);
            }
        }
    }
    matmul_nt(dx, dz, w, rows, outputs, inputs, false);
}

/// *Adds* the gradients of weights and bias: `dw += xᵀ dz`, and `dbias +=` the sum of the rows of
/// `dz`. `dz` is from [`linear_backward_input`].
///
/// # Panics
///
/// Panics if a slice does not fit `shape`.
pub fn linear_backward_weights<T: Real>(
    shape: LinearShape,
    dw: &mut [T],
    dbias: &mut [T],
    x: &[T],
    dz: &[T],
) {
    let LinearShape { rows, inputs, outputs } = shape;
    assert_eq!((dbias.len(), dz.len()), (outputs, rows * outputs), "elements of bias and outputs");
    matmul_tn(dw, x, dz, inputs, rows, outputs, true);
    if outputs == 0 {
        return;
    }
    for dz in dz.chunks_exact(outputs) {
        for (dbias, dz) in dbias.iter_mut().zip(dz) {
            *dbias += *dz;
        }
    }
}

/// Returns the sum over the rows of the cross-entropy, in nats: `logits` `[rows, BYTES]`, `targets`
/// `[rows]`. For the mean, divide by the number of rows.
///
/// # Panics
///
/// Panics if the two do not fit each other.
pub fn cross_entropy<T: Real>(logits: &[T], targets: &[u8]) -> T {
    assert_eq!(logits.len(), targets.len() * BYTES, "logits");
    logits
        .chunks_exact(BYTES)
        .zip(targets)
        .map(|(logits, target)| {
            let (largest, sum) = exponentials(logits);
            sum.ln() - (logits[usize::from(*target)] - largest)
        })
        .sum()
}

/// Writes the gradient of [`cross_entropy`] with respect to the logits, times `scale`, to
/// `dlogits`. `scale` is, for instance, one over the number of rows of the whole batch.
///
/// # Panics
///
/// Panics if the slices do not fit each other.
pub fn cross_entropy_gradient<T: Real>(dlogits: &mut [T], logits: &[T], targets: &[u8], scale: T) {
    assert_eq!(
        (dlogits.len(), logits.len()),
        (targets.len() * BYTES, targets.len() * BYTES),
        "logits"
    );
    let rows = dlogits.chunks_exact_mut(BYTES).zip(logits.chunks_exact(BYTES)).zip(targets);
    for ((dlogits, logits), target) in rows {
        let (largest, sum) = exponentials(logits);
        for (dlogit, logit) in dlogits.iter_mut().zip(logits) {
            *dlogit = scale * ((*logit - largest).exp() / sum);
        }
        dlogits[usize::from(*target)] -= scale;
    }
}

/// Returns the largest logit, and the sum of the exponentials of the logits minus the largest.
/// These exponentials cannot overflow.
fn exponentials<T: Real>(logits: &[T]) -> (T, T) {
    let largest = logits.iter().copied().fold(logits[0], |a, b| if b > a { b } else { a });
    (largest, logits.iter().map(|logit| (*logit - largest).exp()).sum())
}

/// The Adam optimiser's constants.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    /// Step size.
    pub learning_rate: f64,
    /// Weight of the past values in the running mean of the gradients.
    pub beta1: f64,
    /// Weight of the past values in the running mean of the squared gradients.
    pub beta2: f64,
    /// Small number that prevents a division by zero.
    pub epsilon: f64,
}

impl Default for Adam {
    fn default() -> Self {
        Self { learning_rate: 1e-3, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 }
    }
}

impl Adam {
    /// Updates the parameters `w`, the running mean `mean` of the gradients, and the running mean
    /// `square` of their squares, once. Both running means must be zeros before the first update.
    /// `step` counts updates from one.
    ///
    /// # Panics
    ///
    /// Panics if the slices differ in length or `step` is zero.
    pub fn update<T: Real>(
        &self,
        step: u32,
        w: &mut [T],
        mean: &mut [T],
        square: &mut [T],
        gradient: &[T],
    ) {
        assert!(step > 0, "updates are counted from one");
        let len = w.len();
        assert_eq!(
            (mean.len(), square.len(), gradient.len()),
            (len, len, len),
            "state and gradient"
        );
        // The running means start at zero. These factors correct the bias in the first updates.
        let unbias = |beta: f64| 1.0 - beta.powf(f64::from(step));
        let rate = T::of(self.learning_rate / unbias(self.beta1));
        let root = T::of(unbias(self.beta2).sqrt().recip());
        let (beta1, beta2, epsilon) = (T::of(self.beta1), T::of(self.beta2), T::of(self.epsilon));
        let state = mean.iter_mut().zip(square.iter_mut());
        for ((w, (mean, square)), gradient) in w.iter_mut().zip(state).zip(gradient) {
            *mean = beta1 * *mean + (T::ONE - beta1) * *gradient;
            *square = beta2 * *square + (T::ONE - beta2) * *gradient * *gradient;
            *w -= rate * *mean / (square.sqrt() * root + epsilon);
        }
    }
}

/// Returns the half-width of the uniform distribution of a layer's initial weights. It keeps
/// activations and gradients at about the same size from layer to layer (Glorot and Bengio, 2010).
pub fn initial_scale(inputs: usize, outputs: usize) -> f64 {
    (6.0 / (inputs + outputs) as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::math::{random_bits, random_unit};

    const WIDTH: usize = 3;
    const HIDDEN: usize = 5;

    /// A whole small model: table, two hidden layers, the layer of the logits.
    struct Model {
        /// The table, then the weights and the bias of each layer.
        parameters: Vec<Vec<f64>>,
        contexts: Vec<u8>,
        targets: Vec<u8>,
    }

    fn random(len: usize, seed: u64, scale: f64) -> Vec<f64> {
        (0..len).map(|i| scale * random_unit(seed, i as u64)).collect()
    }

    impl Model {
        fn new(rows: usize) -> Self {
            let byte = |seed, i| random_bits(seed, i as u64) as u8;
            let mut model = Self {
                parameters: vec![random(BYTES * WIDTH, 1, 1.0)],
                contexts: (0..rows * CONTEXT).map(|i| byte(2, i)).collect(),
                targets: (0..rows).map(|i| byte(3, i)).collect(),
            };
            // This byte occurs twice, so its row gets two gradients.
            model.contexts[1] = model.contexts[0];
            for (i, (shape, _)) in model.layers().into_iter().enumerate() {
                let scale = initial_scale(shape.inputs, shape.outputs);
                model.parameters.push(random(shape.inputs * shape.outputs, 10 + i as u64, scale));
                model.parameters.push(random(shape.outputs, 20 + i as u64, 0.5));
            }
            model
        }

        fn layers(&self) -> [(LinearShape, Activation); 3] {
            let rows = self.targets.len();
            [
                (LinearShape { rows, inputs: CONTEXT * WIDTH, outputs: HIDDEN }, Activation::Tanh),
                (LinearShape { rows, inputs: HIDDEN, outputs: HIDDEN }, Activation::Tanh),
                (LinearShape { rows, inputs: HIDDEN, outputs: BYTES }, Activation::Identity),
            ]
        }

        /// Returns each layer's input, and the logits.
        fn forward(&self) -> Vec<Vec<f64>> {
            let mut x = vec![0.0; self.contexts.len() * WIDTH];
            embed(&mut x, &self.contexts, &self.parameters[0], WIDTH);
            let mut outputs = vec![x];
            for (i, (shape, activation)) in self.layers().into_iter().enumerate() {
                let mut y = vec![f64::NAN; shape.rows * shape.outputs];
                let (w, bias) = (&self.parameters[1 + 2 * i], &self.parameters[2 + 2 * i]);
                linear_forward(shape, activation, &mut y, &outputs[i], w, bias);
                outputs.push(y);
            }
            outputs
        }

        fn loss(&self) -> f64 {
            cross_entropy(&self.forward()[3], &self.targets) / self.targets.len() as f64
        }

        /// Returns the gradients, in the order of `parameters`.
        fn gradients(&self) -> Vec<Vec<f64>> {
            let outputs = self.forward();
            let mut gradients: Vec<Vec<f64>> =
                self.parameters.iter().map(|parameter| vec![0.0; parameter.len()]).collect();
            let mut dy = vec![f64::NAN; outputs[3].len()];
            cross_entropy_gradient(
                &mut dy,
                &outputs[3],
                &self.targets,
                1.0 / self.targets.len() as f64,
            );
            for (i, (shape, activation)) in self.layers().into_iter().enumerate().rev() {
                let mut dx = vec![f64::NAN; shape.rows * shape.inputs];
                let mut dz = vec![f64::NAN; dy.len()];
                let w = &self.parameters[1 + 2 * i];
                linear_backward_input(shape, activation, &mut dx, &mut dz, &dy, &outputs[i + 1], w);
                let (dw, dbias) = gradients[1 + 2 * i..].split_at_mut(1);
                linear_backward_weights(shape, &mut dw[0], &mut dbias[0], &outputs[i], &dz);
                dy = dx;
            }
            embed_backward(&mut gradients[0], &self.contexts, &dy, WIDTH);
            gradients
        }
    }

    /// Returns the slope of `f` at `x` along element `at`, by central differences.
    fn slope(x: &[f64], at: usize, f: impl Fn(&[f64]) -> f64) -> f64 {
        let shifted = |by: f64| {
            let mut x = x.to_vec();
            x[at] += by;
            f(&x)
        };
        (shifted(1e-5) - shifted(-1e-5)) / 2e-5
    }

    #[test]
    fn gradients_of_all_parameters_equal_finite_differences() {
        for rows in [1, 2, 7] {
            let model = Model::new(rows);
            for (i, gradient) in model.gradients().iter().enumerate() {
                // Every element of the small parameters, and the rows of the table that were looked
                // up.
                let looked_up = |at: usize| model.contexts.contains(&((at / WIDTH) as u8));
                for at in (0..gradient.len()).filter(|at| i > 0 || looked_up(*at)) {
                    let expected = slope(&model.parameters[i], at, |parameter| {
                        let mut parameters = model.parameters.clone();
                        parameters[i] = parameter.to_vec();
                        let (contexts, targets) = (model.contexts.clone(), model.targets.clone());
                        Model { parameters, contexts, targets }.loss()
                    });
                    let error = (gradient[at] - expected).abs();
                    assert!(
                        error < 1e-8,
                        "{rows} rows, parameter {i}[{at}]: {} not {expected}",
                        gradient[at]
                    );
                }
                let untouched = (0..gradient.len()).filter(|at| i == 0 && !looked_up(*at));
                assert!(untouched.into_iter().all(|at| gradient[at] == 0.0));
            }
        }
    }

    #[test]
    fn layer_input_gradient_equals_finite_differences() {
        for (rows, activation) in
            [(1, Activation::Tanh), (4, Activation::Tanh), (3, Activation::Identity)]
        {
            let shape = LinearShape { rows, inputs: 4, outputs: 3 };
            let (x, w, bias, dy) = (
                random(rows * 4, 1, 1.0),
                random(12, 2, 1.0),
                random(3, 3, 1.0),
                random(rows * 3, 4, 1.0),
            );
            let forward = |x: &[f64]| {
                let mut y = vec![f64::NAN; rows * 3];
                linear_forward(shape, activation, &mut y, x, &w, &bias);
                y
            };
            let (mut dx, mut dz) = (vec![f64::NAN; rows * 4], vec![f64::NAN; rows * 3]);
            linear_backward_input(shape, activation, &mut dx, &mut dz, &dy, &forward(&x), &w);
            for (at, dx) in dx.iter().enumerate() {
                let expected =
                    slope(&x, at, |x| forward(x).iter().zip(&dy).map(|(y, dy)| y * dy).sum());
                assert!((dx - expected).abs() < 1e-8, "{activation:?}, {rows} rows, {at}");
            }
        }
    }

    #[test]
    fn gradients_add_up_over_microbatches() {
        let whole = Model::new(6);
        let mut sum: Vec<Vec<f64>> = whole.parameters.iter().map(|p| vec![0.0; p.len()]).collect();
        for part in 0..3 {
            let (contexts, targets) = (
                whole.contexts[part * 2 * CONTEXT..(part + 1) * 2 * CONTEXT].to_vec(),
                whole.targets[part * 2..(part + 1) * 2].to_vec(),
            );
            let part = Model { parameters: whole.parameters.clone(), contexts, targets };
            for (sum, gradient) in sum.iter_mut().flatten().zip(part.gradients().iter().flatten()) {
                *sum += gradient / 3.0;
            }
        }
        let gradients = whole.gradients();
        assert!(
            sum.iter()
                .flatten()
                .zip(gradients.iter().flatten())
                .all(|(a, b)| (a - b).abs() < 1e-14)
        );
    }

    #[test]
    fn cross_entropy_is_exact_for_equal_and_large_logits() {
        assert!(
            (cross_entropy(&[0.0f64; 2 * BYTES], &[3, 200]) - 2.0 * (BYTES as f64).ln()).abs()
                < 1e-12
        );
        let mut logits = [0.0f32; BYTES];
        logits[7] = 1e4;
        assert_eq!(cross_entropy(&logits, &[7]), 0.0);
        assert_eq!(cross_entropy(&logits, &[8]), 1e4);
        let mut gradient = [f32::NAN; BYTES];
        cross_entropy_gradient(&mut gradient, &logits, &[8], 0.5);
        assert_eq!((gradient[7], gradient[8], gradient[9]), (0.5, -0.5, 0.0));
    }

    #[test]
    fn adam_update_matches_its_definition() {
        let adam = Adam { learning_rate: 0.1, beta1: 0.5, beta2: 0.75, epsilon: 0.0 };
        let (mut w, mut mean, mut square) = ([1.0f64, -2.0], [0.0; 2], [0.0; 2]);
        // After the correction, the first step has the size of the learning rate for any gradient.
        adam.update(1, &mut w, &mut mean, &mut square, &[4.0, -0.01]);
        assert!((w[0] - 0.9).abs() < 1e-15 && (w[1] + 1.9).abs() < 1e-15, "{w:?}");
        adam.update(2, &mut w, &mut mean, &mut square, &[0.0, 0.0]);
        // The mean is 4/4 = 1 with weight 3/4. The square is 16 * 3/16 = 3 with weight 7/16.
        let expected = 0.9 - 0.1 * (1.0 / 0.75) / (3.0f64 / (7.0 / 16.0)).sqrt();
        assert!((w[0] - expected).abs() < 1e-15, "{w:?}");
    }

    #[test]
    fn loss_falls_after_updates_in_f32() {
        let shape = LinearShape { rows: 8, inputs: 6, outputs: BYTES };
        let single = |len, seed, scale| {
            random(len, seed, scale).iter().map(|v| *v as f32).collect::<Vec<_>>()
        };
        let (x, targets) = (single(48, 1, 1.0), [1u8, 2, 3, 4, 5, 6, 7, 8]);
        let (mut w, mut bias) = (single(6 * BYTES, 2, 0.1), vec![0.0f32; BYTES]);
        let (mut mean, mut square) = (vec![0.0; w.len()], vec![0.0; w.len()]);
        let mut losses = Vec::new();
        for step in 1..=50 {
            let mut y = vec![0.0f32; 8 * BYTES];
            linear_forward(shape, Activation::Identity, &mut y, &x, &w, &bias);
            losses.push(cross_entropy(&y, &targets) / 8.0);
            let mut dy = vec![0.0; y.len()];
            cross_entropy_gradient(&mut dy, &y, &targets, 0.125);
            let mut dw = vec![0.0; w.len()];
            let mut dbias = vec![0.0; BYTES];
            linear_backward_weights(shape, &mut dw, &mut dbias, &x, &dy);
            Adam { learning_rate: 0.1, ..Adam::default() }.update(
                step,
                &mut w,
                &mut mean,
                &mut square,
                &dw,
            );
            bias.iter_mut().zip(&dbias).for_each(|(b, d)| *b -= 0.1 * d);
        }
        assert!(losses[49] < 0.2 * losses[0], "{losses:?}");
    }
}
