//! Stages for tests of pipelines, and the direct computation of their gradients.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mpmd_core::kernel;
use mpmd_core::pipeline::{
    Loss, Microbatch, Passes, Pipeline, PlacedShape, Schedule, SideInput, SideShapes, Stage,
    StageContext, StageSignature,
};
use mpmd_core::prelude::*;
use mpmd_core::sharding::Spec;
use mpmd_core::topology::Mesh;

pub(crate) const WIDTH: usize = 3;

/// The rows of a microbatch that a device of a stage has.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Rows {
    All,
    /// An equal part of the rows, over the mesh axis `data`.
    Part,
}

impl Rows {
    pub(crate) fn spec(self) -> Spec {
        match self {
            Self::All => Spec::default(),
            Self::Part => spec!["data"],
        }
    }
}

/// A stage with y = x * w, element by element, with one w for all rows.
#[derive(Clone)]
pub(crate) struct Scale {
    pub(crate) rows: Rows,
    pub(crate) passes: Passes,
    pub(crate) keeps: Keeps,
    /// True if the stage counts its forward passes in its state, a `usize`.
    pub(crate) counts: bool,
}

/// The form in which the input of a forward pass is kept for the backward pass. A [`Scale`] with
/// [`Passes::Fused`] may have any.
#[derive(Clone)]
pub(crate) enum Keeps {
    /// A declared residual.
    Copy,
    /// The input itself, which the runner keeps.
    Input,
    /// An object as residual.
    Object(Arc<Alive>),
}

/// The objects of [`Keeps::Object`] that exist now, and the most that have existed at once.
#[derive(Default)]
pub(crate) struct Alive {
    pub(crate) now: AtomicUsize,
    pub(crate) most: AtomicUsize,
}

/// Declared bytes of an object.
pub(crate) const OBJECT_BYTES: u64 = 8 << 10;

/// A residual: the input of a forward pass.
struct Kept {
    x: Vec<f32>,
    alive: Arc<Alive>,
}

impl Kept {
    fn new(x: &[f32], alive: &Arc<Alive>) -> Self {
        let now = alive.now.fetch_add(1, Ordering::SeqCst) + 1;
        alive.most.fetch_max(now, Ordering::SeqCst);
        Self {
            x: x.to_vec(),
            alive: alive.clone(),
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.alive.now.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Scale {
    /// Creates a stage with separate backward passes for the gradients of inputs and weights.
    pub(crate) fn of(rows: Rows) -> Self {
        Self {
            rows,
            passes: Passes::Split,
            keeps: Keeps::Copy,
            counts: false,
        }
    }

    /// Creates a stage with one backward pass.
    pub(crate) fn small(keeps: Keeps) -> Self {
        Self {
            passes: Passes::Fused,
            keeps,
            ..Self::of(Rows::All)
        }
    }
}

/// A stage with two inputs, a and b: y = a * w + b.
pub(crate) struct Join;

/// A last stage. Its loss is the sum of squares of (x * w - labels), and its weight is the number
/// of rows.
pub(crate) struct Square(pub(crate) Rows);

fn floats<'a>(view: &'a View<'_>) -> Result<&'a [f32]> {
    Ok(view.as_slice::<f32>()?)
}

/// Adds the products of the inputs and the output gradients, which is the gradient of the weights.
fn add_products(x: &[f32], dy: &[f32], mut gradient: ViewMut<'_>) -> Result<()> {
    let gradient = gradient.as_mut_slice::<f32>()?;
    let width = gradient.len();
    (0..x.len()).for_each(|i| gradient[i % width] += x[i] * dy[i]);
    Ok(())
}

impl Stage for Scale {
    type Params = MpmdArray;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        w: &ShapedArray,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        if x.shape()[1] != w.shape()[0] {
            return Err(Error::kernel(format!("{x} * {w}")));
        }
        let signature = StageSignature::new(x.clone());
        let kept = PlacedShape::new(x.clone(), self.rows.spec());
        Ok(match self.keeps {
            Keeps::Copy => signature
                .residual(kept.clone())
                .weight_residual((kept.clone(), kept))
                .keep("", "0"),
            Keeps::Input => signature,
            Keeps::Object(_) => signature.residual(PlacedShape::object_of_bytes(OBJECT_BYTES)),
        })
    }

    fn input_spec(&self) -> Spec {
        self.rows.spec()
    }

    fn output_spec(&self) -> Spec {
        self.rows.spec()
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        x: View<'_>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        if self.counts {
            *cx.state::<usize>()? += 1;
        }
        let (w, x) = (floats(&w)?, floats(&x)?);
        let y = y.as_mut_slice::<f32>()?;
        (0..x.len()).for_each(|i| y[i] = x[i] * w[i % w.len()]);
        let residual = cx.residual_mut::<ViewMut<'_>>();
        match &self.keeps {
            Keeps::Copy => residual?.as_mut_slice()?.copy_from_slice(x),
            Keeps::Input => assert!(residual.is_err(), "none is declared"),
            Keeps::Object(alive) => residual?.put_object(Kept::new(x, alive))?,
        }
        Ok(())
    }

    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
    ) -> Result<()> {
        let (_, mut out): (ViewMut<'_>, ViewMut<'_>) = cx.weight_residual_mut()?;
        let (w, dy) = (floats(&w)?, floats(&dy)?);
        out.as_mut_slice()?.copy_from_slice(dy);
        if let Some(mut dx) = dx {
            let dx = dx.as_mut_slice::<f32>()?;
            (0..dy.len()).for_each(|i| dx[i] = dy[i] * w[i % w.len()]);
        }
        Ok(())
    }

    fn backward_weight(&self, cx: &mut StageContext<'_, '_>, gradient: ViewMut<'_>) -> Result<()> {
        let (x, dy): (View<'_>, View<'_>) = cx.weight_residual()?;
        add_products(floats(&x)?, floats(&dy)?, gradient)
    }

    fn passes(&self) -> Passes {
        self.passes
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
        gradient: ViewMut<'_>,
    ) -> Result<()> {
        let (weights, dys) = (floats(&w)?, floats(&dy)?);
        if let Some(mut dx) = dx {
            let dx = dx.as_mut_slice::<f32>()?;
            (0..dys.len()).for_each(|i| dx[i] = dys[i] * weights[i % weights.len()]);
        }
        match self.keeps {
            Keeps::Copy => add_products(floats(&cx.residual()?)?, dys, gradient),
            Keeps::Input => add_products(floats(&cx.input()?)?, dys, gradient),
            Keeps::Object(_) => {
                let kept = cx.residual::<View<'_>>()?.object::<Kept>()?;
                add_products(&kept.x, dys, gradient)
            }
        }
    }
}

impl Stage for Join {
    type Params = MpmdArray;
    type In = (MpmdArray, MpmdArray);
    type Out = MpmdArray;

    fn infer(
        &self,
        _: &ShapedArray,
        (a, b): &(ShapedArray, ShapedArray),
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        if a != b {
            return Err(Error::kernel(format!("{a} + {b}")));
        }
        let kept = PlacedShape::replicated(a.clone());
        let signature = StageSignature::new(a.clone()).residual(kept.clone());
        Ok(signature
            .weight_residual((kept.clone(), kept))
            .keep("", "0"))
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        (a, b): (View<'_>, View<'_>),
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let mut residual: ViewMut<'_> = cx.residual_mut()?;
        let (w, a, b) = (floats(&w)?, floats(&a)?, floats(&b)?);
        residual.as_mut_slice()?.copy_from_slice(a);
        let y = y.as_mut_slice::<f32>()?;
        (0..a.len()).for_each(|i| y[i] = a[i] * w[i % w.len()] + b[i]);
        Ok(())
    }

    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        dy: View<'_>,
        dx: Option<(ViewMut<'_>, ViewMut<'_>)>,
    ) -> Result<()> {
        let (_, mut out): (ViewMut<'_>, ViewMut<'_>) = cx.weight_residual_mut()?;
        let (w, dy) = (floats(&w)?, floats(&dy)?);
        out.as_mut_slice()?.copy_from_slice(dy);
        if let Some((mut da, mut db)) = dx {
            let da = da.as_mut_slice::<f32>()?;
            (0..dy.len()).for_each(|i| da[i] = dy[i] * w[i % w.len()]);
            db.as_mut_slice()?.copy_from_slice(dy);
        }
        Ok(())
    }

    fn backward_weight(&self, cx: &mut StageContext<'_, '_>, gradient: ViewMut<'_>) -> Result<()> {
        let (x, dy): (View<'_>, View<'_>) = cx.weight_residual()?;
        add_products(floats(&x)?, floats(&dy)?, gradient)
    }

    fn passes(&self) -> Passes {
        Passes::Split
    }
}

impl Stage for Square {
    type Params = MpmdArray;
    type In = MpmdArray;
    type Out = Loss<MpmdArray>;

    fn infer(
        &self,
        _: &ShapedArray,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<Loss<ShapedArray>>> {
        let kept = || PlacedShape::new(x.clone(), self.0.spec());
        let loss = Loss::new(f32s([]), f32s([]));
        let signature = StageSignature::new(loss)
            .residual((kept(), kept()))
            .weight_residual((kept(), kept()));
        let signature = signature.keep("0", "0").keep("1", "1");
        Ok(if self.0 == Rows::Part {
            signature.forward_collectives(Signature::new(()).all_reduce("data", f32s([2])))
        } else {
            signature
        })
    }

    fn side(&self) -> SideInput {
        SideInput::of::<MpmdArray>()
    }

    fn input_spec(&self) -> Spec {
        self.0.spec()
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        x: View<'_>,
        mut y: Loss<ViewMut<'_>>,
    ) -> Result<()> {
        let labels: View<'_> = cx.side()?;
        let (mut kept, mut error): (ViewMut<'_>, ViewMut<'_>) = cx.residual_mut()?;
        let (w, x, labels) = (floats(&w)?, floats(&x)?, floats(&labels)?);
        kept.as_mut_slice()?.copy_from_slice(x);
        let error = error.as_mut_slice::<f32>()?;
        (0..x.len()).for_each(|i| error[i] = x[i] * w[i % w.len()] - labels[i]);
        let mut loss = [
            error.iter().map(|e| e * e).sum::<f32>(),
            (x.len() / w.len()) as f32,
        ];
        if self.0 == Rows::Part {
            cx.all_reduce("data", &mut loss)?;
        }
        y.sum.fill(loss[0])?;
        y.weight.fill(loss[1])?;
        Ok(())
    }

    fn backward_input(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        dy: kernel::Views<'_, Loss<MpmdArray>>,
        dx: Option<ViewMut<'_>>,
    ) -> Result<()> {
        let (_, mut error): (ViewMut<'_>, ViewMut<'_>) = cx.weight_residual_mut()?;
        let (w, scale) = (floats(&w)?, dy.sum.scalar::<f32>()?);
        let error = error.as_mut_slice::<f32>()?;
        error.iter_mut().for_each(|e| *e *= 2.0 * scale);
        if let Some(mut dx) = dx {
            let dx = dx.as_mut_slice::<f32>()?;
            (0..dx.len()).for_each(|i| dx[i] = error[i] * w[i % w.len()]);
        }
        Ok(())
    }

    fn backward_weight(&self, cx: &mut StageContext<'_, '_>, gradient: ViewMut<'_>) -> Result<()> {
        let (x, dy): (View<'_>, View<'_>) = cx.weight_residual()?;
        add_products(floats(&x)?, floats(&dy)?, gradient)
    }

    fn passes(&self) -> Passes {
        Passes::Split
    }
}

/// The results of a step: the loss as (sum, weight), and the gradient of each stage. `None` for
/// values that this process does not own.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    pub(crate) loss: Option<[f32; 2]>,
    pub(crate) gradients: Vec<Option<Vec<f32>>>,
}

pub(crate) fn value(microbatch: usize, i: usize) -> f32 {
    0.31 + 0.1 * (i % 7) as f32 + 0.043 * microbatch as f32
}

pub(crate) fn label(microbatch: usize, i: usize) -> f32 {
    0.2 * value(microbatch, i + 1)
}

pub(crate) fn weight(stage: usize, i: usize) -> f32 {
    0.87 + 0.061 * ((3 * stage + i) % 5) as f32
}

pub(crate) fn weights(stage: usize) -> Vec<f32> {
    (0..WIDTH).map(|i| weight(stage, i)).collect()
}

pub(crate) fn read(array: &MpmdArray) -> Result<Option<Vec<f32>>> {
    array
        .to_host()?
        .map(|host| host.to_vec::<f32>().map_err(Error::from))
        .transpose()
}

/// Returns a mesh for each rank: an equal part of the devices, in order.
pub(crate) fn meshes(p: &mut Program, ranks: usize) -> Result<Vec<Mesh>> {
    Ok(p.mesh(&[("rank", ranks)])?.split("rank")?)
}

/// Creates the weights of a stage, replicated on a mesh.
pub(crate) fn params(p: &mut Program, stage: usize, mesh: &Mesh) -> Result<MpmdArray> {
    p.device_put(
        &MpmdArray::from_slice(&[WIDTH], &weights(stage))?,
        mesh.replicated(),
    )
}

/// Creates a pipeline of [`Scale`] stages with [`Square`] at the end, on the ranks that `schedule`
/// gives the stages.
pub(crate) fn chain(
    p: &mut Program,
    schedule: &Schedule,
    fuses: bool,
) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
    chain_of(
        p,
        schedule,
        if fuses { Passes::Both } else { Passes::Split },
    )
}

/// Creates a pipeline as [`chain`] does, of [`Scale`] stages with these backward passes.
pub(crate) fn chain_of(
    p: &mut Program,
    schedule: &Schedule,
    passes: Passes,
) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
    chain_with(p, schedule, |_| Scale {
        passes,
        ..Scale::of(Rows::All)
    })
}

/// Creates a pipeline as [`chain`] does, of these stages and [`Square`].
pub(crate) fn chain_with(
    p: &mut Program,
    schedule: &Schedule,
    of: impl Fn(usize) -> Scale,
) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
    let (meshes, last) = (meshes(p, schedule.ranks())?, schedule.stages() - 1);
    let mesh = |stage: usize| &meshes[schedule.rank_of(stage)];
    let mut front = Pipeline::first(of(0), mesh(0), params(p, 0, mesh(0))?)?;
    for stage in 1..last {
        front = front.then(of(stage), mesh(stage), params(p, stage, mesh(stage))?)?;
    }
    front.then(Square(Rows::All), mesh(last), params(p, last, mesh(last))?)
}

/// Returns one microbatch for each entry of `rows`, with that many rows, and labels for the last
/// stage.
pub(crate) fn microbatches(
    p: &mut Program,
    pipeline: &Pipeline<MpmdArray, Loss<MpmdArray>>,
    rows: &[usize],
) -> Result<Vec<Microbatch<MpmdArray>>> {
    let last = pipeline.stages() - 1;
    let mut all = Vec::new();
    for (m, rows) in rows.iter().copied().enumerate() {
        let mut put = |of: fn(usize, usize) -> f32, mesh: &Mesh| {
            let values: Vec<f32> = (0..rows * WIDTH).map(|i| of(m, i)).collect();
            p.device_put(
                &MpmdArray::from_slice(&[rows, WIDTH], &values)?,
                mesh.replicated(),
            )
        };
        let x = put(value, pipeline.mesh(0))?;
        all.push(Microbatch::new(x).side(last, put(label, pipeline.mesh(last))?));
    }
    Ok(all)
}

/// Runs one training step with microbatches of these numbers of rows. Returns the results that this
/// process owns.
pub(crate) fn step(
    p: &mut Program,
    pipeline: &mut Pipeline<MpmdArray, Loss<MpmdArray>>,
    schedule: &Schedule,
    rows: &[usize],
) -> Result<Outcome> {
    let batch = microbatches(p, pipeline, rows)?;
    let output = pipeline.train_step(p, schedule, batch)?;
    p.step_end()?;
    let loss = match (read(&output.loss.sum)?, read(&output.loss.weight)?) {
        (Some(sum), Some(weight)) => Some([sum[0], weight[0]]),
        _ => None,
    };
    let mut gradients = Vec::new();
    for stage in &output.gradients {
        gradients.push(match stage.first() {
            Some((_, gradient)) => read(gradient)?,
            None => None,
        });
    }
    Ok(Outcome { loss, gradients })
}

/// Computes the results of one step of [`chain`] directly, without a pipeline. The microbatches are
/// added in ascending order.
pub(crate) fn by_hand(stages: usize, rows: &[usize]) -> Outcome {
    let w: Vec<Vec<f32>> = (0..stages).map(weights).collect();
    let mut gradients = vec![vec![0.0f32; WIDTH]; stages];
    let mut loss: Option<[f32; 2]> = None;
    for (m, rows) in rows.iter().copied().enumerate() {
        let count = rows * WIDTH;
        let mut inputs: Vec<Vec<f32>> = vec![(0..count).map(|i| value(m, i)).collect()];
        for w in &w[..stages - 1] {
            let x = &inputs[inputs.len() - 1];
            inputs.push((0..count).map(|i| x[i] * w[i % WIDTH]).collect());
        }
        let x = &inputs[stages - 1];
        let mut d: Vec<f32> = (0..count)
            .map(|i| x[i] * w[stages - 1][i % WIDTH] - label(m, i))
            .collect();
        let one = [d.iter().map(|e| e * e).sum::<f32>(), rows as f32];
        loss = Some(loss.map_or(one, |sum| [sum[0] + one[0], sum[1] + one[1]]));
        d.iter_mut().for_each(|e| *e *= 2.0);
        for stage in (0..stages).rev() {
            (0..count).for_each(|i| gradients[stage][i % WIDTH] += inputs[stage][i] * d[i]);
            d.iter_mut()
                .enumerate()
                .for_each(|(i, d)| *d *= w[stage][i % WIDTH]);
        }
    }
    Outcome {
        loss,
        gradients: gradients.into_iter().map(Some).collect(),
    }
}

/// Combines the outcomes of all processes: for each value, that of the first process that owns it.
pub(crate) fn together(outcomes: Vec<Result<Outcome>>) -> Outcome {
    let mut all = Outcome::default();
    for outcome in outcomes {
        let outcome = outcome.unwrap();
        all.loss = all.loss.or(outcome.loss);
        all.gradients.resize(outcome.gradients.len(), None);
        for (all, one) in all.gradients.iter_mut().zip(outcome.gradients) {
            *all = all.take().or(one);
        }
    }
    all
}
