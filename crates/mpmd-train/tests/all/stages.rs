//! Two tiny stages: a table of token vectors, and a linear layer with squared error.

use std::collections::BTreeMap;

use mpmd_core::pipeline::{
    Loss, ParamSharding, Pipeline, Schedule, SideInput, SideShapes, Stage, StageContext,
    StageSignature,
};
use mpmd_core::prelude::*;
use mpmd_core::random::{Key, uniform_f32};
use mpmd_core::sharding::Sharding;
use mpmd_core::topology::Mesh;
use mpmd_train::data::{BLOCK, TextBytes, Windows};
use mpmd_train::optimizer::OptimizerSettings;
use mpmd_train::{StepReport, Trainer};

pub(crate) const WIDTH: usize = 4;
pub(crate) const TOKENS: usize = 256;
pub(crate) const MICROBATCHES: usize = 4;

/// A stage that replaces each token by a vector of its table.
#[derive(Default)]
pub(crate) struct Embed {
    /// True if the table is not trained.
    pub(crate) frozen: bool,
    /// True if the vectors are scaled by a random number in training.
    pub(crate) draws: bool,
}

/// A last stage: the squared error of `x · w + b` against the target token divided by 256. Side
/// inputs: `targets`, and `weights` if there are any.
pub(crate) struct Head;

#[derive(Clone, Tree)]
pub(crate) struct HeadParams<L> {
    pub(crate) w: L,
    pub(crate) b: L,
}

type Side<L> = BTreeMap<String, L>;

impl Stage for Embed {
    type Params = MpmdArray;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        table: &ShapedArray,
        tokens: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        let shape = [tokens.shape()[0], tokens.shape()[1], table.shape()[1]];
        Ok(StageSignature::new(f32s(shape)))
    }

    fn is_frozen(&self, _: &str) -> bool {
        self.frozen
    }

    fn draws_random(&self) -> bool {
        self.draws
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        table: View<'_>,
        tokens: View<'_>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let (table, tokens) = (table.as_slice::<f32>()?, tokens.as_slice::<u32>()?);
        let draws = self.draws && cx.is_training();
        let scale = if draws {
            1.0 + uniform_f32(cx.key()?, 0)
        } else {
            1.0
        };
        let y = y.as_mut_slice::<f32>()?.chunks_mut(WIDTH);
        for (y, token) in y.zip(tokens) {
            let row = &table[*token as usize * WIDTH..][..WIDTH];
            y.iter_mut().zip(row).for_each(|(y, x)| *y = scale * x);
        }
        Ok(())
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        _: View<'_>,
        dy: View<'_>,
        _: Option<ViewMut<'_>>,
        mut gradient: ViewMut<'_>,
    ) -> Result<()> {
        let tokens: View<'_> = cx.input()?;
        let gradient = gradient.as_mut_slice::<f32>()?;
        let dy = dy.as_slice::<f32>()?.chunks(WIDTH);
        for (dy, token) in dy.zip(tokens.as_slice::<u32>()?) {
            let row = &mut gradient[*token as usize * WIDTH..][..WIDTH];
            row.iter_mut().zip(dy).for_each(|(sum, dy)| *sum += dy);
        }
        Ok(())
    }
}

/// The error below which a token counts in the metric `near` of [`Head`].
pub(crate) const NEAR: f32 = 0.25;

impl Head {
    /// Returns (weight, error) of each token.
    pub(crate) fn errors(
        params: &HeadParams<View<'_>>,
        x: &View<'_>,
        side: &Side<View<'_>>,
    ) -> Result<Vec<(f32, f32)>> {
        let (w, b) = (params.w.as_slice::<f32>()?, params.b.as_slice::<f32>()?[0]);
        let targets = side["targets"].as_slice::<u32>()?;
        let weights = side
            .get("weights")
            .map(|weights| weights.as_slice::<f32>())
            .transpose()?;
        let x = x.as_slice::<f32>()?.chunks(WIDTH);
        let errors = x.zip(targets).enumerate().map(|(i, (x, target))| {
            let y: f32 = x.iter().zip(w).map(|(x, w)| x * w).sum::<f32>() + b;
            (
                weights.map_or(1.0, |weights| weights[i]),
                y - *target as f32 / TOKENS as f32,
            )
        });
        Ok(errors.collect())
    }
}

impl Stage for Head {
    type Params = HeadParams<MpmdArray>;
    type In = MpmdArray;
    type Out = Loss<MpmdArray>;

    fn infer(
        &self,
        _: &HeadParams<ShapedArray>,
        _: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<Loss<ShapedArray>>> {
        Ok(StageSignature::new(
            Loss::new(f32s([]), f32s([])).metric("near", f32s([])),
        ))
    }

    fn side(&self) -> SideInput {
        SideInput::of::<Side<MpmdArray>>()
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: HeadParams<View<'_>>,
        x: View<'_>,
        mut loss: Loss<ViewMut<'_>>,
    ) -> Result<()> {
        let errors = Self::errors(&params, &x, &cx.side()?)?;
        loss.sum.fill(
            errors
                .iter()
                .map(|(weight, error)| weight * error * error)
                .sum::<f32>(),
        )?;
        let near = errors.iter().filter(|(_, error)| error.abs() < NEAR);
        loss.metrics
            .get_mut("near")
            .expect("it is declared")
            .fill(near.map(|(weight, _)| weight).sum::<f32>())?;
        Ok(loss
            .weight
            .fill(errors.iter().map(|(weight, _)| weight).sum::<f32>())?)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: HeadParams<View<'_>>,
        dloss: Loss<View<'_>>,
        dx: Option<ViewMut<'_>>,
        mut gradient: HeadParams<ViewMut<'_>>,
    ) -> Result<()> {
        let x: View<'_> = cx.input()?;
        let errors = Self::errors(&params, &x, &cx.side()?)?;
        let (x, dloss) = (x.as_slice::<f32>()?, dloss.sum.scalar::<f32>()?);
        let slopes = errors
            .iter()
            .map(|(weight, error)| 2.0 * weight * error * dloss);
        let slopes: Vec<f32> = slopes.collect();
        let (w, dw) = (
            params.w.as_slice::<f32>()?,
            gradient.w.as_mut_slice::<f32>()?,
        );
        for (x, slope) in x.chunks(WIDTH).zip(&slopes) {
            dw.iter_mut().zip(x).for_each(|(dw, x)| *dw += slope * x);
        }
        gradient.b.as_mut_slice::<f32>()?[0] += slopes.iter().sum::<f32>();
        if let Some(mut dx) = dx {
            for (dx, slope) in dx.as_mut_slice::<f32>()?.chunks_mut(WIDTH).zip(&slopes) {
                dx.iter_mut().zip(w).for_each(|(dx, w)| *dx = slope * w);
            }
        }
        Ok(())
    }
}

/// Returns a text with a pattern, long enough for held-out windows.
pub(crate) fn text() -> TextBytes {
    let byte = |i: usize| 1 + ((i * i / 7 + i / 3) % 250) as u8;
    TextBytes::of_files(&[(0..20 * BLOCK).map(byte).collect()]).unwrap()
}

/// Returns windows of 6 tokens in microbatches of 2 rows.
pub(crate) fn windows() -> Windows {
    Windows::new(&text(), 6, 2).unwrap()
}

/// The meshes of two stages, each of two devices.
pub(crate) fn meshes(p: &Program) -> Result<Vec<Mesh>> {
    Ok(p.mesh(&[("stage", 2), ("data", 2)])?.split("stage")?)
}

fn random(p: &mut Program, shape: &[usize], to: &Sharding, key: u64) -> Result<MpmdArray> {
    let columns = *shape.last().unwrap();
    p.array_from_fn(f32s(shape), to, move |region, mut values| {
        let last = region.ndim() - 1;
        let rows = if last == 0 { 0..1 } else { region.range(0) };
        let places = rows.flat_map(|row| region.range(last).map(move |column| (row, column)));
        for (value, (row, column)) in values.as_mut_slice::<f32>()?.iter_mut().zip(places) {
            *value = uniform_f32(Key(key), (row * columns + column) as u64) - 0.5;
        }
        Ok(())
    })
}

/// Creates the pipeline of both stages. If `sharded`, each device stores a part of the parameters.
pub(crate) fn pipeline(
    p: &mut Program,
    sharded: bool,
) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
    pipeline_of(p, Embed::default(), sharded)
}

/// Creates the pipeline of both stages, with this first one.
pub(crate) fn pipeline_of(
    p: &mut Program,
    embed: Embed,
    sharded: bool,
) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
    let meshes = meshes(p)?;
    let places = |mesh: &Mesh| match sharded {
        true => [
            mesh.sharding(spec![None, "data"]),
            mesh.sharding(spec!["data"]),
        ],
        false => [mesh.replicated(), mesh.replicated()],
    };
    let table = random(p, &[TOKENS, WIDTH], &places(&meshes[0])[0], 1)?;
    let w = random(p, &[WIDTH], &places(&meshes[1])[1], 2)?;
    let b = random(p, &[1], &meshes[1].replicated(), 3)?;
    let mut pipeline =
        Pipeline::first(embed, &meshes[0], table)?.then(Head, &meshes[1], HeadParams { w, b })?;
    for (stage, mesh) in meshes.iter().enumerate() {
        pipeline.store(
            stage,
            ParamSharding::new(vec![mesh.replicated(); 1 + stage]),
        )?;
    }
    Ok(pipeline)
}

/// Creates a trainer of both stages.
pub(crate) fn trainer(
    p: &mut Program,
    sharded: bool,
    settings: impl Into<OptimizerSettings>,
) -> Result<Trainer<MpmdArray>> {
    let pipeline = pipeline(p, sharded)?;
    Trainer::new(
        p,
        pipeline,
        Schedule::one_f_one_b(2, MICROBATCHES)?,
        settings,
    )
}

/// Returns a report with a time of zero, to compare runs.
pub(crate) fn untimed(report: StepReport) -> StepReport {
    StepReport {
        seconds: 0.0,
        ..report
    }
}

/// Returns the values of an array on every process that has the job's first device.
pub(crate) fn read(p: &mut Program, array: &MpmdArray) -> Result<Option<Vec<f32>>> {
    let first = Sharding::single_device(p.topology().device_ids()[0]);
    let array = p.device_put(array, first)?;
    Ok(array
        .to_host()?
        .map(|host| host.to_vec::<f32>())
        .transpose()?)
}

/// Returns the values of all parameters, on the process that has the job's first device.
pub(crate) fn params(
    p: &mut Program,
    trainer: &Trainer<MpmdArray>,
) -> Result<Vec<Option<Vec<f32>>>> {
    let arrays: Vec<MpmdArray> = (0..2)
        .flat_map(|stage| trainer.pipeline().params(stage))
        .map(|(_, array)| array)
        .collect();
    arrays.iter().map(|array| read(p, array)).collect()
}
