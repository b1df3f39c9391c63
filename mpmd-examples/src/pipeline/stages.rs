//! The stages of the example `pipeline`, written by hand.
//!
//! A stage is `y = x WA WB`. Each of its devices holds some columns of `WA` and the same rows of
//! `WB`. Its part of `y`, and of the gradient of `x`, is a summand. The sum over the mesh axis
//! `"model"` is the full value.

use std::marker::PhantomData;

use mpmd::kernel::Reducible;
use mpmd::kernels::host::{Scalar, matmul, matmul_nt, matmul_tn};
use mpmd::pipeline::{Loss, SideInput, SideShapes, Stage, StageContext, StageSignature};
use mpmd::prelude::*;
use mpmd::train::optimizer::Float;

/// A float type of the job: `f32` or `f64`.
pub trait Number: Scalar + Float + Reducible {}

impl Number for f32 {}
impl Number for f64 {}

/// The weights of a stage, or another value `L` for each of the two weights.
#[derive(Clone, Debug, Tree)]
pub(super) struct StageWeights<L> {
    /// Weights of the first product: `[width, width]`, columns sharded over `"model"`.
    pub(super) wa: L,
    /// Weights of the second product: `[width, width]`, rows sharded over `"model"`.
    pub(super) wb: L,
}

/// Any stage except the last: two matrix products.
pub(super) struct Products<T>(pub(super) PhantomData<fn() -> T>);

/// The last stage: two matrix products, and the mean square error of the result. The labels are the
/// side input.
pub(super) struct SquareError<T>(pub(super) PhantomData<fn() -> T>);

type Shape = ShapedArray;

impl<T: Number> Stage for Products<T> {
    type Params = StageWeights<MpmdArray>;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        layer: &StageWeights<Shape>,
        x: &Shape,
        _: &SideShapes,
    ) -> Result<StageSignature<Shape>> {
        check(layer, x)?;
        let sum = || Signature::new(()).all_reduce("model", x.clone());
        Ok(StageSignature::new(x.clone())
            .forward_collectives(sum())
            .backward_collectives(sum()))
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        layer: StageWeights<View<'_>>,
        x: View<'_>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let y = y.as_mut_slice::<T>()?;
        MatrixSizes::of(&layer, &x)
            .forward(cx, &layer, &x, y)
            .map(drop)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        layer: StageWeights<View<'_>>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
        gradient: StageWeights<ViewMut<'_>>,
    ) -> Result<()> {
        // Of the forward pass only `x` is kept. Its first product is computed again.
        let x: View<'_> = cx.input()?;
        let sizes = MatrixSizes::of(&layer, &x);
        let h = sizes.first_product(&layer, &x)?;
        let values = PassValues {
            x: &x,
            h: &h,
            dy: dy.as_slice()?,
        };
        sizes.backward::<T>(cx, &layer, values, dx, gradient)
    }
}

impl<T: Number> Stage for SquareError<T> {
    type Params = StageWeights<MpmdArray>;
    type In = MpmdArray;
    type Out = Loss<MpmdArray>;

    fn infer(
        &self,
        layer: &StageWeights<Shape>,
        x: &Shape,
        side: &SideShapes,
    ) -> Result<StageSignature<Loss<Shape>>> {
        check(layer, x)?;
        let labels: Shape = side.tree()?;
        if labels != *x {
            return Err(Error::kernel(format!("labels {labels} of {x}")));
        }
        let scalar = Shape::new(&[], x.dtype());
        let sum = || Signature::new(()).all_reduce("model", x.clone());
        Ok(StageSignature::new(Loss::new(scalar.clone(), scalar))
            .forward_collectives(sum())
            .backward_collectives(sum().all_reduce("model", x.clone())))
    }

    fn side(&self) -> SideInput {
        SideInput::of::<MpmdArray>()
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        layer: StageWeights<View<'_>>,
        x: View<'_>,
        mut loss: Loss<ViewMut<'_>>,
    ) -> Result<()> {
        let OutputErrors { errors, .. } = output_errors::<T>(cx, &layer, &x)?;
        let sum = errors
            .iter()
            .fold(T::ZERO, |sum, error| sum + *error * *error);
        loss.sum.fill(sum / T::from_double(errors.len() as f64))?;
        // The loss is a mean already: each microbatch is one item.
        Ok(loss.weight.fill(T::ONE)?)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        layer: StageWeights<View<'_>>,
        loss: Loss<View<'_>>,
        dx: Option<ViewMut<'_>>,
        gradient: StageWeights<ViewMut<'_>>,
    ) -> Result<()> {
        let x: View<'_> = cx.input()?;
        let OutputErrors { h, errors: mut dy } = output_errors::<T>(cx, &layer, &x)?;
        let scale = loss.sum.scalar::<T>()? * T::from_double(2.0 / dy.len() as f64);
        dy.iter_mut().for_each(|dy| *dy = scale * *dy);
        let values = PassValues {
            x: &x,
            h: &h,
            dy: &dy,
        };
        MatrixSizes::of(&layer, &x).backward(cx, &layer, values, dx, gradient)
    }
}

/// The results of the last stage's forward pass.
struct OutputErrors<T> {
    /// This device's part of `x WA`.
    h: Vec<T>,
    /// The differences between the complete output of the stage and the labels.
    errors: Vec<T>,
}

/// The values that a backward pass needs.
struct PassValues<'v, 'x, T> {
    /// The stage's input.
    x: &'v View<'x>,
    /// This device's part of `x WA`.
    h: &'v [T],
    /// The gradient of the stage's output.
    dy: &'v [T],
}

/// Computes the output of the last stage, and compares it with the labels.
fn output_errors<T: Number>(
    cx: &mut StageContext<'_, '_>,
    layer: &StageWeights<View<'_>>,
    x: &View<'_>,
) -> Result<OutputErrors<T>> {
    let labels: View<'_> = cx.side()?;
    let labels = labels.as_slice::<T>()?;
    let mut y = vec![T::ZERO; labels.len()];
    let h = MatrixSizes::of(layer, x).forward(cx, layer, x, &mut y)?;
    y.iter_mut()
        .zip(labels)
        .for_each(|(y, label)| *y = *y - *label);
    Ok(OutputErrors { h, errors: y })
}

/// The sizes of the matrices of a stage on one device.
#[derive(Clone, Copy)]
struct MatrixSizes {
    /// Rows of the microbatch.
    rows: usize,
    /// Columns of the stage's input and output.
    width: usize,
    /// Columns of `WA`, and rows of `WB`, on this device.
    hidden: usize,
}

impl MatrixSizes {
    fn of(layer: &StageWeights<View<'_>>, x: &View<'_>) -> Self {
        Self {
            rows: x.shape()[0],
            width: x.shape()[1],
            hidden: layer.wa.shape()[1],
        }
    }

    /// Computes this device's part of `x WA`.
    fn first_product<T: Number>(
        self,
        layer: &StageWeights<View<'_>>,
        x: &View<'_>,
    ) -> Result<Vec<T>> {
        let Self {
            rows,
            width,
            hidden,
        } = self;

        let mut h = vec![T::ZERO; rows * hidden];
        matmul(
            &mut h,
            x.as_slice()?,
            layer.wa.as_slice()?,
            rows,
            width,
            hidden,
            false,
        );
        Ok(h)
    }

    /// Computes the complete output `y` of the stage. Returns this device's part of `x WA`.
    fn forward<T: Number>(
        self,
        cx: &mut StageContext<'_, '_>,
        layer: &StageWeights<View<'_>>,
        x: &View<'_>,
        y: &mut [T],
    ) -> Result<Vec<T>> {
        let Self {
            rows,
            width,
            hidden,
        } = self;
        let h = self.first_product(layer, x)?;
        matmul(y, &h, layer.wb.as_slice()?, rows, hidden, width, false);
        cx.all_reduce("model", y)?;
        Ok(h)
    }

    /// Computes the complete gradient `dx` of the stage's input. Adds to the gradients of this
    /// device's weights.
    fn backward<T: Number>(
        self,
        cx: &mut StageContext<'_, '_>,
        layer: &StageWeights<View<'_>>,
        values: PassValues<'_, '_, T>,
        dx: Option<ViewMut<'_>>,
        mut gradient: StageWeights<ViewMut<'_>>,
    ) -> Result<()> {
        let Self {
            rows,
            width,
            hidden,
        } = self;
        let PassValues { x, h, dy } = values;

        let mut dh = vec![T::ZERO; rows * hidden];
        matmul_nt(
            &mut dh,
            dy,
            layer.wb.as_slice()?,
            rows,
            width,
            hidden,
            false,
        );

        let mut sum = vec![T::ZERO; rows * width];
        matmul_nt(
            &mut sum,
            &dh,
            layer.wa.as_slice()?,
            rows,
            hidden,
            width,
            false,
        );

        matmul_tn(
            gradient.wa.as_mut_slice()?,
            x.as_slice()?,
            &dh,
            width,
            rows,
            hidden,
            true,
        );
        matmul_tn(
            gradient.wb.as_mut_slice()?,
            h,
            dy,
            hidden,
            rows,
            width,
            true,
        );

        // The first stage declares the sum too, though nothing reads it.
        cx.all_reduce("model", &mut sum)?;
        if let Some(mut dx) = dx {
            dx.as_mut_slice()?.copy_from_slice(&sum);
        }
        Ok(())
    }
}

fn check(layer: &StageWeights<Shape>, x: &Shape) -> Result<()> {
    let StageWeights { wa, wb } = layer;
    let fits = matches!(
        (wa.shape(), wb.shape(), x.shape()),
        ([width, hidden], [rows, columns], [_, x])
            if (hidden, width, width) == (rows, columns, x)
    );
    if fits {
        Ok(())
    } else {
        Err(Error::kernel(format!(
            "{x} @ {wa} @ {wb} does not give a {x}"
        )))
    }
}
