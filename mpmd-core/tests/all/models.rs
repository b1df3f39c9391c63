//! A stage for tests as an autograd model would be: it prepares its parameters, draws random keys,
//! has an object as residual, and may be frozen.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::{any::Any, collections::BTreeSet};

use mpmd_core::pipeline::{
    Loss, Microbatch, Passes, Pipeline, PlacedShape, Schedule, SideShapes, Stage, StageContext,
    StageSignature,
};
use mpmd_core::prelude::*;
use mpmd_core::random::{Key, bits};
use mpmd_core::topology::Mesh;
use parking_lot::Mutex;

use crate::stages::{Outcome, Rows, Square, label, read, value, weight};

pub(crate) const WIDTH: usize = 4;
/// Declared bytes of a residual, and of the prepared parameters.
pub(crate) const BYTES: u64 = 8 << 10;

/// Counts of what the stages of a test have done, on all devices together.
#[derive(Default)]
pub(crate) struct Counts {
    pub(crate) prepared: AtomicUsize,
    pub(crate) backward: AtomicUsize,
    pub(crate) with_dx: AtomicUsize,
    /// Calls of `passes`, which every step that is not replayed makes.
    pub(crate) issued: AtomicUsize,
    /// (is_training, keeps_residuals) of all forward passes.
    pub(crate) modes: Mutex<BTreeSet<(bool, bool)>>,
}

impl Counts {
    pub(crate) fn of(counter: &AtomicUsize) -> usize {
        counter.load(Ordering::SeqCst)
    }
}

/// A stage with y = x * w * mask. The mask is drawn in training, if the stage `draws`; else all
/// ones.
#[derive(Clone, Default)]
pub(crate) struct Model {
    /// True if the passes compute with a copy of w that `prepare` has made.
    pub(crate) prepares: bool,
    pub(crate) draws: bool,
    pub(crate) frozen: bool,
    /// The number of the call of `prepare` that fails.
    pub(crate) fails: Option<usize>,
    /// True if the forward passes fail.
    pub(crate) breaks: bool,
    pub(crate) counts: Arc<Counts>,
}

fn count(counter: &AtomicUsize) -> usize {
    counter.fetch_add(1, Ordering::SeqCst)
}

impl Model {
    fn weights(&self, cx: &mut StageContext<'_, '_>, w: &View<'_>) -> Result<Vec<f32>> {
        if self.prepares {
            return Ok(cx.prepared::<Vec<f32>>()?.clone());
        }
        Ok(w.as_slice::<f32>()?.to_vec())
    }

    fn mask(&self, cx: &StageContext<'_, '_>, i: usize) -> Result<f32> {
        if !self.draws || !cx.is_training() {
            return Ok(1.0);
        }
        Ok((bits(cx.key()?, i as u64) % 3) as f32)
    }
}

impl Stage for Model {
    type Params = MpmdArray;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        _: &ShapedArray,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        let residual = PlacedShape::object_of_bytes(BYTES);
        Ok(StageSignature::new(x.clone()).residual(residual))
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        x: View<'_>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        if self.breaks {
            return Err(Error::kernel("broken on purpose"));
        }
        self.counts
            .modes
            .lock()
            .insert((cx.is_training(), cx.keeps_residuals()));
        let (w, x) = (self.weights(cx, &w)?, x.as_slice::<f32>()?);
        let y = y.as_mut_slice::<f32>()?;
        for i in 0..x.len() {
            y[i] = x[i] * w[i % w.len()] * self.mask(cx, i)?;
        }
        let kept = if cx.keeps_residuals() {
            x.to_vec()
        } else {
            Vec::new()
        };
        Ok(cx.residual_mut::<ViewMut<'_>>()?.put_object(kept)?)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        dy: View<'_>,
        mut dx: Option<ViewMut<'_>>,
        mut gradient: ViewMut<'_>,
    ) -> Result<()> {
        count(&self.counts.backward);
        if dx.is_some() {
            count(&self.counts.with_dx);
        }
        let (w, dy) = (self.weights(cx, &w)?, dy.as_slice::<f32>()?);
        let x = cx.residual::<View<'_>>()?.take_object::<Vec<f32>>()?;
        let gradient = gradient.as_mut_slice::<f32>()?;
        assert_eq!(gradient.is_empty(), self.frozen);
        for i in 0..x.len() {
            let d = dy[i] * self.mask(cx, i)?;
            if !self.frozen {
                gradient[i % w.len()] += x[i] * d;
            }
            if let Some(dx) = &mut dx {
                dx.as_mut_slice::<f32>()?[i] = d * w[i % w.len()];
            }
        }
        Ok(())
    }

    fn passes(&self) -> Passes {
        count(&self.counts.issued);
        Passes::Fused
    }

    fn draws_random(&self) -> bool {
        self.draws
    }

    fn is_frozen(&self, path: &str) -> bool {
        assert_eq!(path, "", "the only parameter");
        self.frozen
    }

    fn prepared_bytes(&self, w: &ShapedArray) -> Option<u64> {
        assert!(w.shape().iter().product::<usize>() <= WIDTH, "{w}");
        self.prepares.then_some(BYTES)
    }

    fn prepare(
        &self,
        _: &mut Context<'_>,
        w: View<'_>,
        prepared: &mut Option<Box<dyn Any + Send>>,
    ) -> Result<()> {
        let call = count(&self.counts.prepared);
        if self.fails == Some(call) {
            return Err(Error::kernel("cannot prepare"));
        }
        let w = w.as_slice::<f32>()?;
        match prepared
            .as_mut()
            .and_then(|known| known.downcast_mut::<Vec<f32>>())
        {
            Some(known) => known.copy_from_slice(w),
            None => *prepared = Some(Box::new(w.to_vec())),
        }
        Ok(())
    }
}

/// Returns a mesh for each stage, with the axis `data`.
pub(crate) fn meshes(p: &mut Program, stages: usize) -> Result<Vec<Mesh>> {
    let devices = p.topology().device_ids().len();
    Ok(p.mesh(&[("stage", stages), ("data", devices / stages)])?
        .split("stage")?)
}

/// Returns the weights of a stage after a number of updates, replicated on a mesh.
pub(crate) fn weights(
    p: &mut Program,
    (stage, update): (usize, usize),
    mesh: &Mesh,
) -> Result<MpmdArray> {
    let values: Vec<f32> = (0..WIDTH)
        .map(|i| weight(stage, i) + 0.01 * (update * (i + 1)) as f32)
        .collect();
    p.device_put(
        &MpmdArray::from_slice(&[WIDTH], &values)?,
        mesh.replicated(),
    )
}

/// Creates a pipeline of these models, with [`Square`] at the end.
pub(crate) fn pipeline(
    p: &mut Program,
    models: &[Model],
) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
    let meshes = meshes(p, models.len() + 1)?;
    let w = weights(p, (0, 0), &meshes[0])?;
    let mut front = Pipeline::first(models[0].clone(), &meshes[0], w)?;
    for (stage, model) in models.iter().enumerate().skip(1) {
        let w = weights(p, (stage, 0), &meshes[stage])?;
        front = front.then(model.clone(), &meshes[stage], w)?;
    }
    let last = models.len();
    let w = weights(p, (last, 0), &meshes[last])?;
    front.then(Square(Rows::All), &meshes[last], w)
}

/// Sets the weights that all stages have after `update` updates.
pub(crate) fn update(
    p: &mut Program,
    pipeline: &mut Pipeline<MpmdArray, Loss<MpmdArray>>,
    update: usize,
) -> Result<()> {
    for stage in 0..pipeline.stages() {
        if !pipeline.params(stage).is_empty() {
            let w = weights(p, (stage, update), &pipeline.mesh(stage).clone())?;
            let stored = pipeline.params(stage)[0].1.sharding().cloned();
            let w = p.device_put(&w, stored.expect("it is placed"))?;
            pipeline.set_params(stage, vec![w])?;
        }
    }
    Ok(())
}

/// Returns `count` microbatches of `rows` rows, with keys that depend on `key`, if there is one.
pub(crate) fn batch(
    p: &mut Program,
    pipeline: &Pipeline<MpmdArray, Loss<MpmdArray>>,
    (count, rows): (usize, usize),
    key: Option<Key>,
) -> Result<Vec<Microbatch<MpmdArray>>> {
    let last = pipeline.stages() - 1;
    let mut all = Vec::new();
    for m in 0..count {
        let mut put = |of: fn(usize, usize) -> f32, mesh: &Mesh| {
            let values: Vec<f32> = (0..rows * WIDTH).map(|i| of(m, i)).collect();
            p.device_put(
                &MpmdArray::from_slice(&[rows, WIDTH], &values)?,
                mesh.replicated(),
            )
        };
        let x = put(value, pipeline.mesh(0))?;
        let one = Microbatch::new(x).side(last, put(label, pipeline.mesh(last))?);
        all.push(match key {
            Some(key) => one.key(key.fold_in(m as u64)),
            None => one,
        });
    }
    Ok(all)
}

/// Runs a training step with microbatches of `rows` rows. Returns the values that this process has.
pub(crate) fn train(
    p: &mut Program,
    pipeline: &mut Pipeline<MpmdArray, Loss<MpmdArray>>,
    schedule: &Schedule,
    rows: usize,
    key: Option<Key>,
) -> Result<Outcome> {
    let batch = batch(p, pipeline, (schedule.microbatches(), rows), key)?;
    let output = pipeline.train_step(p, schedule, batch)?;
    p.step_end()?;
    let loss = read(&output.loss.sum)?.zip(read(&output.loss.weight)?);
    let mut gradients = Vec::new();
    for stage in &output.gradients {
        gradients.push(
            stage
                .first()
                .map(|(_, array)| read(array))
                .transpose()?
                .flatten(),
        );
    }
    Ok(Outcome {
        loss: loss.map(|(sum, weight)| [sum[0], weight[0]]),
        gradients,
    })
}

/// Combines the outcomes of each step over all processes.
pub(crate) fn steps(results: Vec<Result<Vec<Outcome>>>) -> Vec<Outcome> {
    let mut processes: Vec<_> = results
        .into_iter()
        .map(|result| result.unwrap().into_iter())
        .collect();
    let count = processes[0].len();
    let mut step = || {
        processes
            .iter_mut()
            .filter_map(|steps| steps.next().map(Ok))
            .collect()
    };
    (0..count)
        .map(|_| crate::stages::together(step()))
        .collect()
}
