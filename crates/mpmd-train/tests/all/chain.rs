//! A chain of layers that is cut into any number of stages. Layers have the same names in all cuts.

use std::collections::BTreeMap;
use std::ops::Range;

use mpmd_core::pipeline::{
    Loss, Pipeline, Schedule, SideInput, SideShapes, Stage, StageContext, StageSignature,
};
use mpmd_core::prelude::*;
use mpmd_core::random::{Key, uniform_f32};
use mpmd_core::topology::Mesh;
use mpmd_train::optimizer::AdamW;
use mpmd_train::stop::StopFlag;
use mpmd_train::{Rate, Trainer};

use crate::stages::{MICROBATCHES, TOKENS};

pub(crate) const LAYERS: usize = 4;
const WIDTH: usize = 8;

type Layers<L> = BTreeMap<String, L>;

/// The part of the chain before the last stage. Each layer multiplies by its weights, of shape
/// `[WIDTH]`.
struct Part {
    /// True if the input are tokens.
    first: bool,
}

/// The last stage: its layers, then the squared error of the sum against the target.
struct Last {
    first: bool,
}

/// Returns the input of each layer, and the output, each of shape `[tokens, WIDTH]`.
fn activations(first: bool, layers: &Layers<View<'_>>, x: &View<'_>) -> Result<Vec<Vec<f32>>> {
    let mut all = vec![match first {
        true => x
            .as_slice::<u32>()?
            .iter()
            .flat_map(|token| [number(*token); WIDTH])
            .collect(),
        false => x.as_slice::<f32>()?.to_vec(),
    }];
    for w in layers.values() {
        let w = w.as_slice::<f32>()?;
        let last = &all[all.len() - 1];
        all.push(
            last.chunks(WIDTH)
                .flat_map(|x| x.iter().zip(w).map(|(x, w)| x * w))
                .collect(),
        );
    }
    Ok(all)
}

/// Adds the layers' gradients for the output gradient `dy`. Returns the input gradient.
fn backward(
    layers: &Layers<View<'_>>,
    activations: &[Vec<f32>],
    mut dy: Vec<f32>,
    gradients: &mut Layers<ViewMut<'_>>,
) -> Result<Vec<f32>> {
    for ((name, w), x) in layers.iter().zip(activations).rev() {
        let gradient = gradients.get_mut(name).unwrap().as_mut_slice::<f32>()?;
        for (x, dy) in x.chunks(WIDTH).zip(dy.chunks(WIDTH)) {
            gradient
                .iter_mut()
                .zip(x)
                .zip(dy)
                .for_each(|((sum, x), dy)| *sum += x * dy);
        }
        let w = w.as_slice::<f32>()?;
        dy.chunks_mut(WIDTH)
            .for_each(|dy| dy.iter_mut().zip(w).for_each(|(dy, w)| *dy *= w));
    }
    Ok(dy)
}

fn number(token: u32) -> f32 {
    token as f32 / TOKENS as f32
}

impl Stage for Part {
    type Params = Layers<MpmdArray>;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        _: &Layers<ShapedArray>,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        Ok(StageSignature::new(f32s([
            x.shape()[0],
            x.shape()[1],
            WIDTH,
        ])))
    }

    fn forward(
        &self,
        _: &mut StageContext<'_, '_>,
        layers: Layers<View<'_>>,
        x: View<'_>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let all = activations(self.first, &layers, &x)?;
        y.as_mut_slice::<f32>()?.copy_from_slice(&all[layers.len()]);
        Ok(())
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        layers: Layers<View<'_>>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
        mut gradients: Layers<ViewMut<'_>>,
    ) -> Result<()> {
        let x: View<'_> = cx.input()?;
        let all = activations(self.first, &layers, &x)?;
        let found = backward(
            &layers,
            &all,
            dy.as_slice::<f32>()?.to_vec(),
            &mut gradients,
        )?;
        if let Some(mut dx) = dx {
            dx.as_mut_slice::<f32>()?.copy_from_slice(&found);
        }
        Ok(())
    }
}

impl Last {
    /// Returns the error of each token.
    fn errors(y: &[f32], side: &Layers<View<'_>>) -> Result<Vec<f32>> {
        let targets = side["targets"].as_slice::<u32>()?;
        let error = |(y, target): (&[f32], &u32)| y.iter().sum::<f32>() - number(*target);
        Ok(y.chunks(WIDTH).zip(targets).map(error).collect())
    }
}

impl Stage for Last {
    type Params = Layers<MpmdArray>;
    type In = MpmdArray;
    type Out = Loss<MpmdArray>;

    fn infer(
        &self,
        _: &Layers<ShapedArray>,
        _: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<Loss<ShapedArray>>> {
        Ok(StageSignature::new(Loss::new(f32s([]), f32s([]))))
    }

    fn side(&self) -> SideInput {
        SideInput::of::<Layers<MpmdArray>>()
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        layers: Layers<View<'_>>,
        x: View<'_>,
        mut loss: Loss<ViewMut<'_>>,
    ) -> Result<()> {
        let all = activations(self.first, &layers, &x)?;
        let errors = Self::errors(&all[layers.len()], &cx.side()?)?;
        loss.sum
            .fill(errors.iter().map(|error| error * error).sum::<f32>())?;
        Ok(loss.weight.fill(errors.len() as f32)?)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        layers: Layers<View<'_>>,
        dloss: Loss<View<'_>>,
        dx: Option<ViewMut<'_>>,
        mut gradients: Layers<ViewMut<'_>>,
    ) -> Result<()> {
        let x: View<'_> = cx.input()?;
        let all = activations(self.first, &layers, &x)?;
        let errors = Self::errors(&all[layers.len()], &cx.side()?)?;
        let dloss = dloss.sum.scalar::<f32>()?;
        let dy = errors
            .iter()
            .flat_map(|error| [2.0 * error * dloss; WIDTH])
            .collect();
        let found = backward(&layers, &all, dy, &mut gradients)?;
        if let Some(mut dx) = dx {
            dx.as_mut_slice::<f32>()?.copy_from_slice(&found);
        }
        Ok(())
    }
}

/// Creates the parameters of some layers. `name` returns the name of a layer in its stage.
fn layers(
    p: &mut Program,
    mesh: &Mesh,
    layers: Range<usize>,
    name: impl Fn(usize) -> String,
) -> Result<Layers<MpmdArray>> {
    let mut params = BTreeMap::new();
    for layer in layers {
        let values = move |region: &Region, mut view: ViewMut<'_>| {
            let values = view.as_mut_slice::<f32>()?.iter_mut().zip(region.range(0));
            values.for_each(|(v, i)| *v = 0.5 + uniform_f32(Key(layer as u64), i as u64));
            Ok(())
        };
        params.insert(
            name(layer),
            p.array_from_fn(f32s([WIDTH]), mesh.replicated(), values)?,
        );
    }
    Ok(params)
}

/// Creates a trainer of the chain in 1, 2 or 4 stages. If `local`, the layers of each stage have
/// the names that those of other stages have too.
pub(crate) fn chain(p: &mut Program, stages: usize, local: bool) -> Result<Trainer<MpmdArray>> {
    let pipeline = pipeline(p, stages, local)?;
    let schedule = Schedule::one_f_one_b(stages, MICROBATCHES)?;
    let trainer = Trainer::new(p, pipeline, schedule, AdamW::default())?;
    Ok(trainer
        .rate(Rate::Constant(0.02))
        .clip(1.0)
        .stop_on(&StopFlag::default()))
}

pub(crate) fn pipeline(
    p: &mut Program,
    stages: usize,
    local: bool,
) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
    let meshes = p
        .mesh(&[("stage", stages), ("data", 4 / stages)])?
        .split("stage")?;
    let each = LAYERS / stages;
    let own = |p: &mut Program, stage: usize| {
        let name = |layer| format!("layers.{}", if local { layer % each } else { layer });
        layers(p, &meshes[stage], stage * each..(stage + 1) * each, name)
    };
    let params = own(p, 0)?;
    if stages == 1 {
        return Pipeline::first(Last { first: true }, &meshes[0], params);
    }
    let mut pipeline = Pipeline::first(Part { first: true }, &meshes[0], params)?;
    for (stage, mesh) in meshes.iter().enumerate().take(stages - 1).skip(1) {
        let params = own(p, stage)?;
        pipeline = pipeline.then(Part { first: false }, mesh, params)?;
    }
    let params = own(p, stages - 1)?;
    pipeline.then(Last { first: false }, &meshes[stages - 1], params)
}
