//! The network as stages of a pipeline, and the optimiser's kernel.

use mpmd_core::kernel::{Views, ViewsMut};
use mpmd_core::pipeline::{
    Loss, Passes, PlacedShape, SideInput, SideShapes, Stage, StageContext, StageSignature,
};
use mpmd_core::prelude::*;

use super::mlp::{self, Shape, Weights};

/// The parameters of a layer, or other values in the same form.
#[derive(Clone, Debug, Tree)]
pub(super) struct Layer<L> {
    /// The value for the layer's matrix.
    pub(super) w: L,
    /// The value for the layer's bias.
    pub(super) b: L,
}

/// A stage of the network other than the last.
pub(super) struct Middle(pub(super) Shape);

/// The last stage of the network, with the loss.
pub(super) struct Last(pub(super) Shape);

/// A kernel `(parameters, gradients) -> parameters`, in place: plain gradient descent with this
/// learning rate.
pub(super) struct Update(pub(super) f32);

type Layers<L> = Vec<Layer<L>>;

/// The residuals of a forward pass: (the inputs of the layers, the output of the last layer). On
/// the last stage, the gradient of that output takes its place.
type Kept<L> = (Vec<L>, L);

/// The values for the weight gradients: (the inputs of the layers, the gradients of their outputs
/// before `relu`).
type Gradients<L> = (Vec<L>, Vec<L>);

/// Returns the signature that every stage declares, with these outputs. Fails if the layers do not
/// fit the shape.
fn declare<O>(
    shape: &Shape,
    layers: &[Layer<ShapedArray>],
    x: &ShapedArray,
    out: O,
) -> Result<StageSignature<O>> {
    let Shape { dim, rows, .. } = *shape;
    let fits = |layer: &Layer<ShapedArray>| layer.w == f32s([dim, dim]) && layer.b == f32s([dim]);
    if *x != f32s([rows, dim])
        || layers.len() != shape.layers_of_stage()
        || !layers.iter().all(fits)
    {
        let found = layers.len();
        return Err(Error::kernel(format!(
            "{x} and {found} layers do not fit rows {rows} and width {dim}"
        )));
    }
    let placed = || PlacedShape::replicated(x.clone());
    let each = || layers.iter().map(|_| placed()).collect::<Vec<_>>();
    let last = layers.len() - 1;
    let signature =
        StageSignature::new(out).residual((each(), placed())).weight_residual((each(), each()));
    let signature = (0..=last)
        .fold(signature, |signature, at| signature.keep(format!("0/{at}"), format!("0/{at}")));
    Ok(signature.keep("1", format!("1/{last}")))
}

fn weights<'a>(layers: &[Layer<View<'a>>]) -> Result<Vec<Weights<'a>>> {
    layers.iter().map(|layer| Ok((layer.w.as_slice()?, layer.b.as_slice()?))).collect()
}

fn slices_mut<'a>(views: &'a mut [ViewMut<'_>]) -> Result<Vec<&'a mut [f32]>> {
    views.iter_mut().map(|view| Ok(view.as_mut_slice()?)).collect()
}

fn slices<'a>(views: &'a [ViewMut<'_>]) -> Result<Vec<&'a [f32]>> {
    views.iter().map(|view| Ok(view.as_slice()?)).collect()
}

fn backward_input(
    shape: &Shape,
    layers: &[Layer<View<'_>>],
    mut dx: Option<ViewMut<'_>>,
    (inputs, mut gradients): Gradients<ViewMut<'_>>,
) -> Result<()> {
    let dx = dx.as_mut().map(|dx| dx.as_mut_slice()).transpose()?;
    mlp::backward_input(
        shape,
        &weights(layers)?,
        &slices(&inputs)?,
        &mut slices_mut(&mut gradients)?,
        dx,
    );
    Ok(())
}

fn backward_weight(
    shape: &Shape,
    (inputs, gradients): Gradients<View<'_>>,
    into: Layers<ViewMut<'_>>,
) -> Result<()> {
    for ((mut into, input), gradient) in into.into_iter().zip(inputs).zip(gradients) {
        let (dw, db) = (into.w.as_mut_slice()?, into.b.as_mut_slice()?);
        mlp::backward_weight(shape, input.as_slice()?, gradient.as_slice()?, dw, db);
    }
    Ok(())
}

/// Returns the sizes that processes must have in common, so that a difference is detected.
fn statics(shape: &Shape) -> Vec<u64> {
    [shape.dim, shape.layers, shape.stages, shape.rows].map(|number| number as u64).to_vec()
}

impl Stage for Middle {
    type Params = Layers<MpmdArray>;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        layers: &Layers<ShapedArray>,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        declare(&self.0, layers, x, x.clone())
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        layers: Layers<View<'_>>,
        x: View<'_>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let (mut inputs, mut output): Kept<ViewMut<'_>> = cx.residual_mut()?;
        let output = output.as_mut_slice()?;
        mlp::forward(
            &self.0,
            &weights(&layers)?,
            x.as_slice()?,
            &mut slices_mut(&mut inputs)?,
            output,
        );
        y.as_mut_slice()?.copy_from_slice(output);
        Ok(())
    }

    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        layers: Layers<View<'_>>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
    ) -> Result<()> {
        let mut kept: Gradients<ViewMut<'_>> = cx.weight_residual_mut()?;
        if let Some(output) = kept.1.last_mut() {
            mlp::through_relu(output.as_mut_slice()?, dy.as_slice()?);
        }
        backward_input(&self.0, &layers, dx, kept)
    }

    fn backward_weight(
        &self,
        cx: &mut StageContext<'_, '_>,
        gradient: Layers<ViewMut<'_>>,
    ) -> Result<()> {
        backward_weight(&self.0, cx.weight_residual()?, gradient)
    }

    fn passes(&self) -> Passes {
        Passes::Split
    }

    fn statics(&self) -> Vec<u64> {
        statics(&self.0)
    }
}

impl Stage for Last {
    type Params = Layers<MpmdArray>;
    type In = MpmdArray;
    type Out = Loss<MpmdArray>;

    fn infer(
        &self,
        layers: &Layers<ShapedArray>,
        x: &ShapedArray,
        side: &SideShapes,
    ) -> Result<StageSignature<Loss<ShapedArray>>> {
        let labels: ShapedArray = side.tree()?;
        if labels != *x {
            return Err(Error::kernel(format!("labels {labels} of {x}")));
        }
        declare(&self.0, layers, x, Loss::new(f32s([]), f32s([])))
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        layers: Layers<View<'_>>,
        x: View<'_>,
        mut loss: Loss<ViewMut<'_>>,
    ) -> Result<()> {
        let labels: View<'_> = cx.side()?;
        let (mut inputs, mut output): Kept<ViewMut<'_>> = cx.residual_mut()?;
        let output = output.as_mut_slice()?;
        mlp::forward(
            &self.0,
            &weights(&layers)?,
            x.as_slice()?,
            &mut slices_mut(&mut inputs)?,
            output,
        );
        loss.sum.fill(mlp::loss(&self.0, output, labels.as_slice()?))?;
        loss.weight.fill(self.0.rows as f32)?;
        Ok(())
    }

    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        layers: Layers<View<'_>>,
        loss: Views<'_, Loss<MpmdArray>>,
        dx: Option<ViewMut<'_>>,
    ) -> Result<()> {
        let mut kept: Gradients<ViewMut<'_>> = cx.weight_residual_mut()?;
        if let Some(output) = kept.1.last_mut() {
            let scale = loss.sum.scalar::<f32>()?;
            output.as_mut_slice::<f32>()?.iter_mut().for_each(|d| *d *= scale);
        }
        backward_input(&self.0, &layers, dx, kept)
    }

    fn backward_weight(
        &self,
        cx: &mut StageContext<'_, '_>,
        gradient: Layers<ViewMut<'_>>,
    ) -> Result<()> {
        backward_weight(&self.0, cx.weight_residual()?, gradient)
    }

    fn passes(&self) -> Passes {
        Passes::Split
    }

    fn side(&self) -> SideInput {
        SideInput::of::<MpmdArray>()
    }

    fn statics(&self) -> Vec<u64> {
        statics(&self.0)
    }
}

impl Kernel for Update {
    type In = (Vec<MpmdArray>, Vec<MpmdArray>);
    type Out = Vec<MpmdArray>;

    fn infer(
        &self,
        (params, gradients): &(Vec<ShapedArray>, Vec<ShapedArray>),
    ) -> Result<Signature<Vec<ShapedArray>>> {
        if params != gradients {
            return Err(Error::kernel("gradients of other shapes than the parameters"));
        }
        let signature = Signature::new(params.clone());
        let alias =
            |signature: Signature<_>, at| signature.alias(format!("0/{at}"), format!("{at}"));
        Ok((0..params.len()).fold(signature, alias))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        (_, gradients): (Vec<View<'_>>, Vec<View<'_>>),
        params: ViewsMut<'_, Self::Out>,
    ) -> Result<()> {
        for (mut params, gradient) in params.into_iter().zip(gradients) {
            mlp::update(params.as_mut_slice()?, gradient.as_slice()?, self.0);
        }
        Ok(())
    }

    fn statics(&self) -> Vec<u64> {
        vec![u64::from(self.0.to_bits())]
    }
}
