//! The kernels of a pipeline that trains the model of [`next_byte`](crate::next_byte), and the
//! arrays of each stage.
//!
//! A stage is one layer. The first stage also has the table of the embedding. A stage's device runs
//! [`Forward`], [`Backward`] and [`Update`]. The last stage also runs [`Loss`] and [`LossGradient`]
//! between the first two. A stage has one device, so regions are whole arrays here.
//!
//! All kernels are generic over the float type. Programs use `f32`; tests use `f64` to compare
//! gradients with finite differences.

use std::marker::PhantomData;

use mpmd::aval::Element;
use mpmd::prelude::*;

use crate::math::Real;
use crate::next_byte::{
    Activation, Adam, BYTES, CONTEXT, LinearShape, cross_entropy, cross_entropy_gradient, embed,
    embed_backward, linear_backward_input, linear_backward_weights, linear_forward,
};

/// A float type of the kernels: `f32` or `f64`.
pub trait Float: Real + Element {}

impl<T: Real + Element> Float for T {}

/// One leaf for each parameter of a stage: the parameters, their gradients, or the optimiser's
/// running means.
#[derive(Clone, Debug, Tree)]
pub struct Layer<L> {
    /// The embedding of each byte, `[BYTES, width]`. Only the first stage has it.
    pub table: Option<L>,
    /// Weights, `[inputs, outputs]`.
    pub w: L,
    /// Bias, `[outputs]`.
    pub bias: L,
}

/// The arrays that a stage keeps from step to step.
#[derive(Clone, Debug, Tree)]
pub struct StageState<L> {
    /// The parameters.
    pub parameters: Layer<L>,
    /// Gradients, summed over the microbatches of a step. They are zeros between steps.
    pub gradients: Layer<L>,
    /// Running mean of the gradients.
    pub mean: Layer<L>,
    /// Running mean of the squared gradients.
    pub square: Layer<L>,
}

/// Inputs of [`Forward`].
#[derive(Tree)]
pub struct ForwardIn<L> {
    /// The stage's parameters.
    pub parameters: Layer<L>,
    /// With a table, the contexts: bytes of `[rows, CONTEXT]`. Otherwise floats of `[rows,
    /// inputs]`.
    pub x: L,
}

/// Kernel that computes a stage's output, `[rows, outputs]`, from its input.
#[derive(Clone, Copy, Debug)]
pub struct Forward<T> {
    activation: Activation,
    float: PhantomData<fn() -> T>,
}

/// Inputs of [`Backward`].
#[derive(Tree)]
pub struct BackwardIn<L> {
    /// The stage's parameters.
    pub parameters: Layer<L>,
    /// The gradients so far. The kernel adds this microbatch's.
    pub gradients: Layer<L>,
    /// The input of [`Forward`].
    pub x: L,
    /// The output of [`Forward`].
    pub y: L,
    /// The gradient of the output of [`Forward`].
    pub dy: L,
}

/// Outputs of [`Backward`].
#[derive(Debug, Tree)]
pub struct BackwardOut<L> {
    /// The gradients of [`BackwardIn`] plus this microbatch's. They are updated in place if
    /// donated.
    pub gradients: Layer<L>,
    /// The gradient of the stage's input. `None` if the input is bytes.
    pub dx: Option<L>,
}

/// Kernel that computes the gradients of a stage's parameters and input from the gradient of the
/// stage's output.
#[derive(Clone, Copy, Debug)]
pub struct Backward<T> {
    activation: Activation,
    float: PhantomData<fn() -> T>,
}

/// Inputs of [`Loss`].
#[derive(Tree)]
pub struct LossIn<L> {
    /// Logits of the last stage, `[rows, BYTES]`.
    pub logits: L,
    /// The bytes that follow the contexts, `[rows]`.
    pub targets: L,
    /// The sum of the losses so far, a scalar. The kernel adds this microbatch's.
    pub sum: L,
}

/// Kernel that adds the cross-entropy of each row of logits of type `T`, in nats, to a sum of type
/// `S`.
#[derive(Clone, Copy, Debug)]
pub struct Loss<T, S> {
    floats: PhantomData<fn() -> (T, S)>,
}

/// Kernel that computes the gradient of the logits, `[rows, BYTES]`, from logits and targets. It is
/// the gradient of the mean loss over `windows`.
#[derive(Clone, Copy, Debug)]
pub struct LossGradient<T> {
    /// Number of rows of all microbatches of a step together.
    pub windows: usize,
    float: PhantomData<fn() -> T>,
}

/// Inputs of [`Update`].
#[derive(Tree)]
pub struct UpdateIn<L> {
    /// The stage's state, with the gradients of a whole step.
    pub state: StageState<L>,
    /// Number of the update, counted from one: a `u32`.
    pub step: L,
    /// The step size: an `f64`.
    pub learning_rate: L,
}

/// Kernel that makes one update by [`Adam`] and sets the gradients to zero. The state is updated in
/// place if donated.
#[derive(Clone, Copy, Debug)]
pub struct Update<T> {
    float: PhantomData<fn() -> T>,
}

impl<L> Layer<L> {
    /// Returns the leaves in the order of the fields.
    fn into_vec(self) -> Vec<L> {
        self.table.into_iter().chain([self.w, self.bias]).collect()
    }
}

impl<T> Forward<T> {
    /// Creates the forward pass of a stage that ends in `activation`.
    pub fn new(activation: Activation) -> Self {
        Self { activation, float: PhantomData }
    }
}

impl<T: Float> Kernel for Forward<T> {
    type In = ForwardIn<MpmdArray>;
    type Out = MpmdArray;

    fn infer(&self, input: &ForwardIn<ShapedArray>) -> Result<Signature<ShapedArray>> {
        let shape = stage_shape::<T>(&input.parameters, &input.x)?;
        Ok(Signature::new(ShapedArray::new(&[shape.rows, shape.outputs], T::DTYPE)))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        input: ForwardIn<View<'_>>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let ForwardIn { parameters, x } = input;
        let shape = stage_shape::<T>(&global(&parameters), x.global())?;
        let mut embedded: Vec<T> = Vec::new();
        let x = features(&parameters, &x, &mut embedded)?;
        let (w, bias) = (parameters.w.as_slice()?, parameters.bias.as_slice()?);
        linear_forward(shape, self.activation, y.as_mut_slice()?, x, w, bias);
        Ok(())
    }

    fn statics(&self) -> Vec<u64> {
        vec![self.activation as u64]
    }
}

impl<T> Backward<T> {
    /// Creates the backward pass of a stage that ends in `activation`.
    pub fn new(activation: Activation) -> Self {
        Self { activation, float: PhantomData }
    }
}

impl<T: Float> Kernel for Backward<T> {
    type In = BackwardIn<MpmdArray>;
    type Out = BackwardOut<MpmdArray>;

    fn infer(
        &self,
        input: &BackwardIn<ShapedArray>,
    ) -> Result<Signature<BackwardOut<ShapedArray>>> {
        let shape = stage_shape::<T>(&input.parameters, &input.x)?;
        let outputs = ShapedArray::new(&[shape.rows, shape.outputs], T::DTYPE);
        expect("y", &input.y, &outputs)?;
        expect("dy", &input.dy, &outputs)?;
        let gradients = input.gradients.clone();
        for ((path, gradient), parameter) in
            gradients.leaves_with_paths().into_iter().zip(input.parameters.leaves())
        {
            expect(&path, gradient, parameter)?;
        }
        let aliases: Vec<String> = gradients
            .leaves_with_paths()
            .into_iter()
            .map(|(path, _)| format!("gradients/{path}"))
            .collect();
        let dx = input.parameters.table.is_none().then(|| input.x.clone());
        let signature = Signature::new(BackwardOut { gradients, dx });
        Ok(aliases
            .into_iter()
            .fold(signature, |signature, path| signature.alias(path.clone(), path)))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        input: BackwardIn<View<'_>>,
        output: BackwardOut<ViewMut<'_>>,
    ) -> Result<()> {
        let BackwardIn { parameters, gradients: _, x: input_x, y, dy } = input;
        let BackwardOut { mut gradients, mut dx } = output;
        let shape = stage_shape::<T>(&global(&parameters), input_x.global())?;
        let mut embedded = Vec::new();
        let x: &[T] = features(&parameters, &input_x, &mut embedded)?;
        let mut dz = vec![T::default(); shape.rows * shape.outputs];
        let mut scratch =
            vec![T::default(); if dx.is_some() { 0 } else { shape.rows * shape.inputs }];
        let dx: &mut [T] = match &mut dx {
            Some(dx) => dx.as_mut_slice()?,
            None => &mut scratch,
        };
        let (y, dy, w) = (y.as_slice()?, dy.as_slice()?, parameters.w.as_slice()?);
        linear_backward_input(shape, self.activation, dx, &mut dz, dy, y, w);
        let (dw, dbias) = (gradients.w.as_mut_slice()?, gradients.bias.as_mut_slice()?);
        linear_backward_weights(shape, dw, dbias, x, &dz);
        if let Some(table) = &mut gradients.table {
            embed_backward(table.as_mut_slice()?, input_x.as_slice()?, dx, shape.inputs / CONTEXT);
        }
        Ok(())
    }

    fn statics(&self) -> Vec<u64> {
        vec![self.activation as u64]
    }
}

impl<T, S> Loss<T, S> {
    /// Creates the kernel, for logits of type `T` and a sum of type `S`.
    pub fn new() -> Self {
        Self { floats: PhantomData }
    }
}

impl<T, S> Default for Loss<T, S> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Float, S: Float> Kernel for Loss<T, S> {
    type In = LossIn<MpmdArray>;
    type Out = MpmdArray;

    fn infer(&self, input: &LossIn<ShapedArray>) -> Result<Signature<ShapedArray>> {
        check_logits::<T>(&input.logits, &input.targets)?;
        expect("sum", &input.sum, &ShapedArray::new(&[], S::DTYPE))?;
        Ok(Signature::new(input.sum.clone()).alias("sum", ""))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        input: LossIn<View<'_>>,
        mut sum: ViewMut<'_>,
    ) -> Result<()> {
        let loss: T = cross_entropy(input.logits.as_slice()?, input.targets.as_slice()?);
        sum.as_mut_slice::<S>()?[0] += S::of(loss.to_f64());
        Ok(())
    }
}

impl<T> LossGradient<T> {
    /// Creates the gradient of the mean loss over `windows` rows.
    pub fn new(windows: usize) -> Self {
        Self { windows, float: PhantomData }
    }
}

impl<T: Float> Kernel for LossGradient<T> {
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(
        &self,
        (logits, targets): &(ShapedArray, ShapedArray),
    ) -> Result<Signature<ShapedArray>> {
        check_logits::<T>(logits, targets)?;
        Ok(Signature::new(logits.clone()))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        (logits, targets): (View<'_>, View<'_>),
        mut dlogits: ViewMut<'_>,
    ) -> Result<()> {
        let scale = T::of(1.0 / self.windows as f64);
        cross_entropy_gradient(
            dlogits.as_mut_slice()?,
            logits.as_slice()?,
            targets.as_slice()?,
            scale,
        );
        Ok(())
    }

    fn statics(&self) -> Vec<u64> {
        vec![self.windows as u64]
    }
}

impl<T> Update<T> {
    /// Creates the kernel. Its inputs set the learning rate.
    pub fn new() -> Self {
        Self { float: PhantomData }
    }
}

impl<T> Default for Update<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: Float> Kernel for Update<T> {
    type In = UpdateIn<MpmdArray>;
    type Out = StageState<MpmdArray>;

    fn infer(&self, input: &UpdateIn<ShapedArray>) -> Result<Signature<StageState<ShapedArray>>> {
        let state = input.state.clone();
        for other in [&state.gradients, &state.mean, &state.square] {
            for ((path, parameter), other) in
                state.parameters.leaves_with_paths().into_iter().zip(other.leaves())
            {
                expect(&path, other, parameter)?;
            }
        }
        let paths: Vec<String> =
            state.leaves_with_paths().into_iter().map(|(path, _)| path).collect();
        let signature = Signature::new(state);
        Ok(paths
            .into_iter()
            .fold(signature, |signature, path| signature.alias(format!("state/{path}"), path)))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        input: UpdateIn<View<'_>>,
        state: StageState<ViewMut<'_>>,
    ) -> Result<()> {
        let adam = Adam { learning_rate: input.learning_rate.scalar()?, ..Adam::default() };
        let step = input.step.scalar()?;
        let StageState { parameters, gradients, mean, square } = state;
        let of_layer = parameters.into_vec().into_iter().zip(gradients.into_vec());
        let means = mean.into_vec().into_iter().zip(square.into_vec());
        for ((mut parameter, mut gradient), (mut mean, mut square)) in of_layer.zip(means) {
            let gradient = gradient.as_mut_slice::<T>()?;
            let (mean, square) = (mean.as_mut_slice()?, square.as_mut_slice()?);
            adam.update(step, parameter.as_mut_slice()?, mean, square, gradient);
            gradient.fill(T::default());
        }
        Ok(())
    }
}

/// Returns the sizes of a stage's layer. It is an error if `parameters` and the input `x` do not
/// fit each other.
fn stage_shape<T: Element>(
    parameters: &Layer<ShapedArray>,
    x: &ShapedArray,
) -> Result<LinearShape> {
    let [rows, columns] = dimensions("x", x)?;
    let [inputs, outputs] = dimensions("w", &parameters.w)?;
    expect("w", &parameters.w, &ShapedArray::new(&[inputs, outputs], T::DTYPE))?;
    expect("bias", &parameters.bias, &ShapedArray::new(&[outputs], T::DTYPE))?;
    match &parameters.table {
        Some(table) => {
            if inputs == 0 || !inputs.is_multiple_of(CONTEXT) {
                return Err(Error::kernel(format!(
                    "w: {inputs} inputs are not {CONTEXT} equal embeddings"
                )));
            }
            expect("x", x, &u8s([rows, CONTEXT]))?;
            expect("table", table, &ShapedArray::new(&[BYTES, inputs / CONTEXT], T::DTYPE))?;
        }
        None if columns != inputs => {
            return Err(Error::kernel(format!(
                "x has {columns} columns where w has {inputs} rows"
            )));
        }
        None => expect("x", x, &ShapedArray::new(&[rows, inputs], T::DTYPE))?,
    }
    Ok(LinearShape { rows, inputs, outputs })
}

fn check_logits<T: Element>(logits: &ShapedArray, targets: &ShapedArray) -> Result<()> {
    let [rows, _] = dimensions("logits", logits)?;
    expect("logits", logits, &ShapedArray::new(&[rows, BYTES], T::DTYPE))?;
    expect("targets", targets, &u8s([rows]))
}

fn dimensions(name: &str, aval: &ShapedArray) -> Result<[usize; 2]> {
    aval.shape().try_into().map_err(|_| Error::kernel(format!("{name}: {aval} is no matrix")))
}

fn expect(name: &str, found: &ShapedArray, expected: &ShapedArray) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::kernel(format!("{name}: expected {expected}, found {found}")))
}

fn global(parameters: &Layer<View<'_>>) -> Layer<ShapedArray> {
    parameters.map_ref(&mut |view| view.global().clone())
}

/// Returns the input of the layer: the stage's input or, with a table, the embedding of the stage's
/// input, computed in `embedded`.
fn features<'a, T: Float>(
    parameters: &Layer<View<'a>>,
    x: &View<'a>,
    embedded: &'a mut Vec<T>,
) -> Result<&'a [T]> {
    let Some(table) = &parameters.table else { return Ok(x.as_slice()?) };
    let (contexts, width) = (x.as_slice::<u8>()?, table.shape()[1]);
    embedded.resize(contexts.len() * width, T::default());
    embed(embedded, contexts, table.as_slice()?, width);
    Ok(embedded)
}

#[cfg(test)]
mod tests {
    use mpmd::kernel::run_here;

    use super::*;
    use crate::math::{random_bits, random_unit};

    const ROWS: usize = 3;

    fn random(shape: &[usize], seed: u64) -> HostArray {
        let elements = shape.iter().product::<usize>() as u64;
        let values: Vec<f64> = (0..elements).map(|i| random_unit(seed, i)).collect();
        HostArray::from_slice(shape, &values).unwrap()
    }

    fn bytes(shape: &[usize], seed: u64) -> HostArray {
        let elements = shape.iter().product::<usize>() as u64;
        let values: Vec<u8> = (0..elements).map(|i| random_bits(seed, i) as u8).collect();
        HostArray::from_slice(shape, &values).unwrap()
    }

    fn layer(width: Option<usize>, inputs: usize, outputs: usize, seed: u64) -> Layer<HostArray> {
        Layer {
            table: width.map(|width| random(&[BYTES, width], seed)),
            w: random(&[inputs, outputs], seed + 1),
            bias: random(&[outputs], seed + 2),
        }
    }

    fn values(array: &HostArray) -> Vec<f64> {
        array.to_vec().unwrap()
    }

    /// Returns the slope of `f` along element `at` of `x`, by central differences.
    fn slope(x: &HostArray, at: usize, f: impl Fn(HostArray) -> f64) -> f64 {
        let shifted = |by: f64| {
            let mut values = values(x);
            values[at] += by;
            f(HostArray::from_slice(x.shape(), &values).unwrap())
        };
        (shifted(1e-5) - shifted(-1e-5)) / 2e-5
    }

    fn assert_gradient(name: &str, gradient: &[f64], x: &HostArray, f: impl Fn(HostArray) -> f64) {
        for (at, found) in gradient.iter().enumerate() {
            let expected = slope(x, at, &f);
            assert!(
                (found - expected).abs() < 1e-8,
                "{name}[{at}]: {found}, by differences {expected}"
            );
        }
    }

    fn check_stage(activation: Activation, parameters: &Layer<HostArray>, x: &HostArray) {
        let forward = |parameters: Layer<HostArray>, x: HostArray| {
            run_here(Forward::<f64>::new(activation), &ForwardIn { parameters, x }).unwrap()
        };
        let y = forward(parameters.clone(), x.clone());
        let dy = random(y.shape(), 50);
        // The scalar function under test: the sum of `y * dy`.
        let weighed = |parameters: Layer<HostArray>, x: HostArray| -> f64 {
            values(&forward(parameters, x)).iter().zip(values(&dy)).map(|(y, dy)| y * dy).sum()
        };
        // The kernel adds to these gradients.
        let before = parameters.map_ref(&mut |leaf| random(leaf.shape(), 60));
        let input = BackwardIn {
            parameters: parameters.clone(),
            gradients: before.clone(),
            x: x.clone(),
            y,
            dy: dy.clone(),
        };
        let BackwardOut { gradients, dx } =
            run_here(Backward::<f64>::new(activation), &input).unwrap();
        let added = |after: &HostArray, before: &HostArray| -> Vec<f64> {
            values(after).iter().zip(values(before)).map(|(after, before)| after - before).collect()
        };
        let dw = added(&gradients.w, &before.w);
        assert_gradient("w", &dw, &parameters.w, |w| {
            weighed(Layer { w, ..parameters.clone() }, x.clone())
        });
        let dbias = added(&gradients.bias, &before.bias);
        assert_gradient("bias", &dbias, &parameters.bias, |bias| {
            weighed(Layer { bias, ..parameters.clone() }, x.clone())
        });
        match (dx, &parameters.table) {
            (Some(dx), None) => {
                assert_gradient("x", &values(&dx), x, |x| weighed(parameters.clone(), x));
            }
            (None, Some(table)) => {
                let dtable =
                    added(gradients.table.as_ref().unwrap(), before.table.as_ref().unwrap());
                let (width, contexts) = (table.shape()[1], x.to_vec::<u8>().unwrap());
                for (at, found) in dtable.iter().enumerate() {
                    // Most rows were not looked up: their gradient must be zero.
                    let looked_up = contexts.contains(&((at / width) as u8));
                    let expected = if looked_up {
                        let with = |table| Layer { table: Some(table), ..parameters.clone() };
                        slope(table, at, |table| weighed(with(table), x.clone()))
                    } else {
                        0.0
                    };
                    assert!(
                        (found - expected).abs() < 1e-8,
                        "table[{at}]: {found}, not {expected}"
                    );
                }
            }
            _ => panic!("a gradient of the input, or a table"),
        }
    }

    #[test]
    fn hidden_stage_gradients_equal_finite_differences() {
        check_stage(Activation::Tanh, &layer(None, 4, 3, 1), &random(&[ROWS, 4], 2));
    }

    #[test]
    fn last_stage_gradients_equal_finite_differences() {
        check_stage(Activation::Identity, &layer(None, 3, 4, 3), &random(&[ROWS, 3], 4));
    }

    #[test]
    fn first_stage_gradients_equal_finite_differences() {
        check_stage(Activation::Tanh, &layer(Some(1), CONTEXT, 2, 5), &bytes(&[ROWS, CONTEXT], 6));
    }

    #[test]
    fn loss_gradient_equals_finite_differences() {
        let (logits, targets) = (random(&[2, BYTES], 7), bytes(&[2], 8));
        let loss = |logits: HostArray, sum: f64| {
            let input = LossIn { logits, targets: targets.clone(), sum: HostArray::scalar(sum) };
            values(&run_here(Loss::<f64, f64>::new(), &input).unwrap())[0]
        };
        assert!((loss(logits.clone(), 10.0) - loss(logits.clone(), 0.0) - 10.0).abs() < 1e-12);
        let windows = 5;
        let gradient =
            run_here(LossGradient::<f64>::new(windows), &(logits.clone(), targets.clone()))
                .unwrap();
        let rescaled: Vec<f64> = values(&gradient).iter().map(|g| g * windows as f64).collect();
        assert_gradient("logits", &rescaled, &logits, |logits| loss(logits, 0.0));
    }

    #[test]
    fn update_matches_adam_and_clears_gradients() {
        let of = |seed| layer(Some(1), CONTEXT, 2, seed);
        let square = of(30).map(&mut |leaf| {
            let squares: Vec<f64> = values(&leaf).iter().map(|v| v * v).collect();
            HostArray::from_slice(leaf.shape(), &squares).unwrap()
        });
        let state = StageState { parameters: of(10), gradients: of(20), mean: of(25), square };
        let (step, learning_rate) = (HostArray::scalar(3u32), HostArray::scalar(0.01f64));
        let input = UpdateIn { state: state.clone(), step, learning_rate };
        let after = run_here(Update::<f64>::new(), &input).unwrap();
        for i in 0..3 {
            let of = |layer: &Layer<HostArray>| values(layer.leaves()[i]);
            let mut expected = [of(&state.parameters), of(&state.mean), of(&state.square)];
            let [w, mean, square] = &mut expected;
            let adam = Adam { learning_rate: 0.01, ..Adam::default() };
            adam.update(3, w, mean, square, &of(&state.gradients));
            assert_eq!([of(&after.parameters), of(&after.mean), of(&after.square)], expected);
            assert_ne!(of(&after.parameters), of(&state.parameters));
            assert!(of(&after.gradients).iter().all(|gradient| *gradient == 0.0));
        }
    }

    #[test]
    fn mismatched_shapes_are_errors_that_name_the_array() {
        let refused = |parameters: Layer<HostArray>, x: HostArray, what: &str| {
            let input = ForwardIn { parameters, x };
            let error =
                run_here(Forward::<f64>::new(Activation::Tanh), &input).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        refused(layer(None, 4, 3, 1), random(&[ROWS, 5], 2), "x has 5 columns where w has 4 rows");
        refused(layer(Some(1), CONTEXT, 3, 1), random(&[ROWS, CONTEXT], 2), "x: expected u8[3,16]");
        refused(
            layer(Some(2), CONTEXT, 3, 1),
            bytes(&[ROWS, CONTEXT], 2),
            "table: expected f64[256,1]",
        );
        refused(
            Layer { bias: random(&[4], 1), ..layer(None, 4, 3, 1) },
            random(&[1, 4], 2),
            "bias",
        );
        let logits = (random(&[2, 5], 1), bytes(&[2], 2));
        let error = run_here(LossGradient::<f64>::new(1), &logits).unwrap_err().to_string();
        assert!(error.contains("logits: expected f64[2,256]"), "{error}");
    }
}
