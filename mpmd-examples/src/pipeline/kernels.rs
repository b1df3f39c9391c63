//! Kernels of the pipeline job.
//!
//! Each device of a stage holds some columns of `WA` and the same rows of `WB`. Its part of the
//! stage's output, and of the gradient of its input, is a summand. The sum over the mesh axis
//! `"model"` is the full value.

use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use mpmd::kernel::Reducible;
use mpmd::prelude::*;

use crate::math::{Real, matmul};
use crate::mm::{self, StageShape};

/// A float type of the pipeline job: `f32` or `f64`.
pub trait Number: Real + Reducible + bytemuck::Pod {}

impl Number for f32 {}
impl Number for f64 {}

/// A stage's weights, or one value for each of them: gradients, shardings.
#[derive(Clone, Debug, Tree)]
pub struct Layer<L> {
    /// Weights of the first product: `[width, width]`, columns sharded over `"model"`.
    pub wa: L,
    /// Weights of the second product: `[width, width]`, rows sharded over `"model"`.
    pub wb: L,
}

/// The time spent in kernels, summed over the devices of one process. Clones share their counters.
///
/// It is wall-clock time: with fewer cores than devices, the wait for a core counts too.
#[derive(Clone, Debug, Default)]
pub struct Meter {
    computing: Arc<AtomicU64>,
    summing: Arc<AtomicU64>,
}

impl Meter {
    /// Returns the time so far of the kernels' own arithmetic.
    pub fn computing(&self) -> Duration {
        Duration::from_nanos(self.computing.load(Ordering::Relaxed))
    }

    /// Returns the time so far of all-reduces: moving, adding, and waiting for the other devices of
    /// the stage.
    pub fn summing(&self) -> Duration {
        Duration::from_nanos(self.summing.load(Ordering::Relaxed))
    }

    fn compute<R>(&self, f: impl FnOnce() -> R) -> R {
        timed(&self.computing, f)
    }

    fn sum<T: Number>(&self, cx: &mut Context<'_>, values: &mut [T]) -> Result<()> {
        timed(&self.summing, || cx.all_reduce("model", values))
    }
}

fn timed<R>(total: &AtomicU64, f: impl FnOnce() -> R) -> R {
    let start = Instant::now();
    let result = f();
    total.fetch_add(
        u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
        Ordering::Relaxed,
    );
    result
}

/// `(layer, x) -> y`: the forward pass of any stage except the last.
pub(super) struct Forward<T>(pub(super) Meter, pub(super) PhantomData<fn() -> T>);

/// `(layer, x, labels) -> loss`: the forward pass of the last stage, and its mean square error.
pub(super) struct ForwardLoss<T>(pub(super) Meter, pub(super) PhantomData<fn() -> T>);

/// `(layer, x, dy, gradients) -> (dx, gradients)`: the backward pass of any stage except the last.
/// Adds to the gradients, in place.
///
/// From the forward pass only `x` is kept. The other values are computed again.
pub(super) struct Backward<T>(pub(super) Meter, pub(super) PhantomData<fn() -> T>);

/// `(layer, x, labels, cotangent of the loss, gradients) -> (dx, gradients)`: the backward pass of
/// the last stage. Adds to the gradients, in place.
pub(super) struct BackwardLoss<T>(pub(super) Meter, pub(super) PhantomData<fn() -> T>);

/// `(weights, gradients, learning rate) -> weights`: an update by gradient descent, in place.
pub(super) struct Update<T>(pub(super) Meter, pub(super) PhantomData<fn() -> T>);

/// Kernel that computes the mean of one or more scalars, added in their order.
pub(super) struct Mean<T>(pub(super) PhantomData<fn() -> T>);

type Array = MpmdArray;
type Shape = ShapedArray;

impl<T: Number> Kernel for Forward<T> {
    type In = (Layer<Array>, Array);
    type Out = Array;

    fn infer(&self, (layer, x): &(Layer<Shape>, Shape)) -> Result<Signature<Shape>> {
        check(layer, x)?;
        Ok(Signature::new(x.clone()).all_reduce("model", x.clone()))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (layer, x): (Layer<View<'_>>, View<'_>),
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        forward::<T>(&self.0, cx, &layer, &x, y.as_mut_slice()?).map(drop)
    }
}

impl<T: Number> Kernel for ForwardLoss<T> {
    type In = (Layer<Array>, Array, Array);
    type Out = Array;

    fn infer(&self, (layer, x, labels): &(Layer<Shape>, Shape, Shape)) -> Result<Signature<Shape>> {
        check(layer, x)?;
        same(labels, x)?;
        Ok(Signature::new(Shape::new(&[], x.dtype())).all_reduce("model", x.clone()))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (layer, x, labels): (Layer<View<'_>>, View<'_>, View<'_>),
        mut loss: ViewMut<'_>,
    ) -> Result<()> {
        let labels = labels.as_slice::<T>()?;
        let mut y = vec![T::ZERO; labels.len()];
        forward(&self.0, cx, &layer, &x, &mut y)?;
        let error = self.0.compute(|| mm::mean_square_error(&y, labels));
        Ok(loss.fill(error)?)
    }
}

impl<T: Number> Kernel for Backward<T> {
    type In = (Layer<Array>, Array, Array, Layer<Array>);
    type Out = (Array, Layer<Array>);

    fn infer(
        &self,
        (layer, x, dy, gradients): &(Layer<Shape>, Shape, Shape, Layer<Shape>),
    ) -> Result<Signature<(Shape, Layer<Shape>)>> {
        check(layer, x)?;
        same(dy, x)?;
        same_layer(gradients, layer)?;
        let signature =
            Signature::new((x.clone(), gradients.clone())).all_reduce("model", x.clone());
        Ok(signature.alias("3/wa", "1/wa").alias("3/wb", "1/wb"))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (layer, x, dy, _): (Layer<View<'_>>, View<'_>, View<'_>, Layer<View<'_>>),
        (mut dx, mut gradients): (ViewMut<'_>, Layer<ViewMut<'_>>),
    ) -> Result<()> {
        let shape = stage_shape(&layer, &x);
        let mut h = vec![T::ZERO; shape.hidden_activations()];
        let (x_values, wa) = (x.as_slice::<T>()?, layer.wa.as_slice::<T>()?);
        self.0
            .compute(|| matmul(&mut h, x_values, wa, shape.rows, shape.width, shape.hidden, false));
        backward(&self.0, cx, &layer, &x, &h, dy.as_slice()?, dx.as_mut_slice()?, &mut gradients)
    }
}

impl<T: Number> Kernel for BackwardLoss<T> {
    type In = (Layer<Array>, Array, Array, Array, Layer<Array>);
    type Out = (Array, Layer<Array>);

    fn infer(
        &self,
        (layer, x, labels, cotangent, gradients): &(
            Layer<Shape>,
            Shape,
            Shape,
            Shape,
            Layer<Shape>,
        ),
    ) -> Result<Signature<(Shape, Layer<Shape>)>> {
        check(layer, x)?;
        same(labels, x)?;
        same(cotangent, &Shape::new(&[], x.dtype()))?;
        same_layer(gradients, layer)?;
        let signature = Signature::new((x.clone(), gradients.clone()));
        let signature = signature.all_reduce("model", x.clone()).all_reduce("model", x.clone());
        Ok(signature.alias("4/wa", "1/wa").alias("4/wb", "1/wb"))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        (layer, x, labels, cotangent, _): (
            Layer<View<'_>>,
            View<'_>,
            View<'_>,
            View<'_>,
            Layer<View<'_>>,
        ),
        (mut dx, mut gradients): (ViewMut<'_>, Layer<ViewMut<'_>>),
    ) -> Result<()> {
        let (labels, cotangent) = (labels.as_slice::<T>()?, cotangent.scalar::<T>()?);
        let mut y = vec![T::ZERO; labels.len()];
        let h = forward(&self.0, cx, &layer, &x, &mut y)?;
        let mut dy = vec![T::ZERO; y.len()];
        self.0.compute(|| mm::mean_square_error_gradient(&mut dy, &y, labels, cotangent));
        backward(&self.0, cx, &layer, &x, &h, &dy, dx.as_mut_slice()?, &mut gradients)
    }
}

impl<T: Number> Kernel for Update<T> {
    type In = (Layer<Array>, Layer<Array>, Array);
    type Out = Layer<Array>;

    fn infer(
        &self,
        (weights, gradients, _): &(Layer<Shape>, Layer<Shape>, Shape),
    ) -> Result<Signature<Layer<Shape>>> {
        same_layer(gradients, weights)?;
        Ok(Signature::new(weights.clone()).alias("0/wa", "wa").alias("0/wb", "wb"))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        (_, gradients, learning_rate): (Layer<View<'_>>, Layer<View<'_>>, View<'_>),
        mut weights: Layer<ViewMut<'_>>,
    ) -> Result<()> {
        let learning_rate = learning_rate.scalar::<T>()?;
        for (w, gradient) in [(&mut weights.wa, gradients.wa), (&mut weights.wb, gradients.wb)] {
            let (w, gradient) = (w.as_mut_slice()?, gradient.as_slice()?);
            self.0.compute(|| mm::descend(w, gradient, learning_rate));
        }
        Ok(())
    }
}

impl<T: Number> Kernel for Mean<T> {
    type In = Vec<Array>;
    type Out = Array;

    fn infer(&self, values: &Vec<Shape>) -> Result<Signature<Shape>> {
        let first =
            values.first().ok_or_else(|| Error::kernel("there are no losses to average"))?;
        Ok(Signature::new(first.clone()))
    }

    fn run(&self, _: &mut Context<'_>, values: Vec<View<'_>>, mut mean: ViewMut<'_>) -> Result<()> {
        let count = T::of(values.len() as f64);
        let mut sum = T::ZERO;
        for value in values {
            sum += value.scalar::<T>()?;
        }
        Ok(mean.fill(sum / count)?)
    }
}

/// Computes the complete output `y` of the stage, the sum over the stage's devices. Returns this
/// device's part of `x WA`.
fn forward<T: Number>(
    meter: &Meter,
    cx: &mut Context<'_>,
    layer: &Layer<View<'_>>,
    x: &View<'_>,
    y: &mut [T],
) -> Result<Vec<T>> {
    let shape = stage_shape(layer, x);
    let mut h = vec![T::ZERO; shape.hidden_activations()];
    let (x, wa, wb) = (x.as_slice()?, layer.wa.as_slice()?, layer.wb.as_slice()?);
    meter.compute(|| mm::stage_forward(shape, y, &mut h, x, wa, wb));
    meter.sum(cx, y)?;
    Ok(h)
}

/// Computes the complete gradient `dx` of the stage's input, the sum over the stage's devices. Adds
/// to the gradients of this device's weights.
#[expect(clippy::too_many_arguments, reason = "they are the mathematics' own")]
fn backward<T: Number>(
    meter: &Meter,
    cx: &mut Context<'_>,
    layer: &Layer<View<'_>>,
    x: &View<'_>,
    h: &[T],
    dy: &[T],
    dx: &mut [T],
    gradients: &mut Layer<ViewMut<'_>>,
) -> Result<()> {
    let shape = stage_shape(layer, x);
    let mut dh = vec![T::ZERO; shape.hidden_activations()];
    let (x, wa, wb) = (x.as_slice()?, layer.wa.as_slice()?, layer.wb.as_slice()?);
    let (dwa, dwb) = (gradients.wa.as_mut_slice()?, gradients.wb.as_mut_slice()?);
    meter.compute(|| {
        mm::stage_backward_input(shape, dx, &mut dh, dy, wa, wb);
        mm::stage_backward_weights(shape, dwa, dwb, x, h, &dh, dy);
    });
    meter.sum(cx, dx)
}

/// Returns the sizes of the arrays on this device.
fn stage_shape(layer: &Layer<View<'_>>, x: &View<'_>) -> StageShape {
    StageShape { rows: x.shape()[0], width: x.shape()[1], hidden: layer.wa.shape()[1] }
}

fn check(layer: &Layer<Shape>, x: &Shape) -> Result<()> {
    let fits = match (layer.wa.shape(), layer.wb.shape(), x.shape()) {
        ([width, hidden], [rows, columns], [_, x]) => (hidden, width, width) == (rows, columns, x),
        _ => false,
    };
    let Layer { wa, wb } = layer;
    if fits { Ok(()) } else { Err(Error::kernel(format!("{x} @ {wa} @ {wb} does not give a {x}"))) }
}

fn same(found: &Shape, expected: &Shape) -> Result<()> {
    if found == expected {
        Ok(())
    } else {
        Err(Error::kernel(format!("{found} instead of {expected}")))
    }
}

fn same_layer(found: &Layer<Shape>, expected: &Layer<Shape>) -> Result<()> {
    same(&found.wa, &expected.wa)?;
    same(&found.wb, &expected.wb)
}
