//! Small stages: kept inputs, one backward pass, objects as residuals, and state.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use mpmd_core::pipeline::{
    Builtin, Loss, MicrobatchShapes, Passes, Pipeline, PlacedShape, Schedule, SideInput,
    SideShapes, Stage, StageContext, StageSignature,
};
use mpmd_core::prelude::*;
use mpmd_core::tree::Empty;
use mpmd_core::{MpmdObject, Simulation, method};

use crate::stages::{Outcome, WIDTH, chain, meshes, microbatches, params, step, together};

const RANKS: usize = 3;
const ROWS: [usize; 4] = [2; 4];
/// The declared bytes of an object.
const BYTES: u64 = 8 << 10;
/// Tolerance in bytes for the losses, which are added up one by one.
const SMALL: u64 = 4 << 10;

/// The values of a stage that exist now, and the most that have existed at once.
#[derive(Default)]
struct Alive {
    now: AtomicUsize,
    most: AtomicUsize,
}

/// A residual: the input of a forward pass.
struct Kept {
    x: Vec<f32>,
    alive: Arc<Alive>,
}

impl Kept {
    fn new(x: &[f32], alive: &Arc<Alive>) -> Self {
        let now = alive.now.fetch_add(1, Ordering::SeqCst) + 1;
        alive.most.fetch_max(now, Ordering::SeqCst);
        Self { x: x.to_vec(), alive: alive.clone() }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.alive.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A stage with y = x * w and one backward pass. It counts its forward passes in its state, if
/// `counts`.
#[derive(Clone, Default)]
struct Small {
    /// The counter of objects, if the residual is an object; else the stage keeps its input.
    objects: Option<Arc<Alive>>,
    counts: bool,
}

/// The last stage: its loss is the sum of squares of (x * w - labels). It keeps input and labels.
struct SmallSquare;

/// Adds the gradient of w, and returns that of x, for y = x * w.
fn gradients(
    x: &[f32],
    (w, dy): (&[f32], &[f32]),
    dx: Option<ViewMut<'_>>,
    mut gradient: ViewMut<'_>,
) -> Result<()> {
    if let Some(mut dx) = dx {
        let dx = dx.as_mut_slice::<f32>()?;
        (0..x.len()).for_each(|i| dx[i] = dy[i] * w[i % w.len()]);
    }
    let gradient = gradient.as_mut_slice::<f32>()?;
    (0..x.len()).for_each(|i| gradient[i % w.len()] += x[i] * dy[i]);
    Ok(())
}

impl Stage for Small {
    type Params = MpmdArray;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        _: &ShapedArray,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        let signature = StageSignature::new(x.clone());
        Ok(match self.objects {
            Some(_) => signature.residual(PlacedShape::object_of_bytes(BYTES)),
            None => signature,
        })
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
        let (w, x) = (w.as_slice::<f32>()?, x.as_slice::<f32>()?);
        let y = y.as_mut_slice::<f32>()?;
        (0..x.len()).for_each(|i| y[i] = x[i] * w[i % w.len()]);
        match &self.objects {
            Some(alive) => {
                let mut residual: ViewMut<'_> = cx.residual_mut()?;
                Ok(residual.put_object(Kept::new(x, alive))?)
            }
            None => cx.residual_mut::<ViewMut<'_>>().map_or(Ok(()), |_| {
                Err(Error::kernel("a stage without residuals has none to write"))
            }),
        }
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
        gradient: ViewMut<'_>,
    ) -> Result<()> {
        let both = (w.as_slice()?, dy.as_slice()?);
        if self.objects.is_some() {
            let kept = cx.residual::<View<'_>>()?.object::<Kept>()?;
            return gradients(&kept.x, both, dx, gradient);
        }
        let x: View<'_> = cx.input()?;
        gradients(x.as_slice()?, both, dx, gradient)
    }
}

impl Stage for SmallSquare {
    type Params = MpmdArray;
    type In = MpmdArray;
    type Out = Loss<MpmdArray>;

    fn infer(
        &self,
        _: &ShapedArray,
        x: &ShapedArray,
        side: &SideShapes,
    ) -> Result<StageSignature<Loss<ShapedArray>>> {
        if side.tree::<ShapedArray>()? != *x {
            return Err(Error::kernel("labels of another shape"));
        }
        Ok(StageSignature::new(Loss { sum: f32s([]), weight: f32s([]) }))
    }

    fn side(&self) -> SideInput {
        SideInput::of::<MpmdArray>()
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        x: View<'_>,
        mut loss: Loss<ViewMut<'_>>,
    ) -> Result<()> {
        let errors = errors(w.as_slice()?, x.as_slice()?, cx.side::<View<'_>>()?.as_slice()?);
        loss.sum.fill(errors.iter().map(|e| e * e).sum::<f32>())?;
        Ok(loss.weight.fill((errors.len() / WIDTH) as f32)?)
    }

    fn backward(
        &self,
        cx: &mut StageContext<'_, '_>,
        w: View<'_>,
        dy: Loss<View<'_>>,
        dx: Option<ViewMut<'_>>,
        gradient: ViewMut<'_>,
    ) -> Result<()> {
        let (w, x, labels) = (w.as_slice()?, cx.input::<View<'_>>()?, cx.side::<View<'_>>()?);
        let (x, scale) = (x.as_slice()?, dy.sum.scalar::<f32>()?);
        let mut errors = errors(w, x, labels.as_slice()?);
        errors.iter_mut().for_each(|e| *e *= 2.0 * scale);
        gradients(x, (w, &errors), dx, gradient)
    }
}

fn errors(w: &[f32], x: &[f32], labels: &[f32]) -> Vec<f32> {
    (0..x.len()).map(|i| x[i] * w[i % w.len()] - labels[i]).collect()
}

/// Creates a pipeline like [`chain`], of small stages.
fn small(
    p: &mut Program,
    schedule: &Schedule,
    of: impl Fn(usize) -> Small,
) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
    let (meshes, last) = (meshes(p, schedule.ranks())?, schedule.stages() - 1);
    let mesh = |stage: usize| &meshes[schedule.rank_of(stage)];
    let mut front = Pipeline::first(of(0), mesh(0), params(p, 0, mesh(0))?)?;
    for stage in 1..last {
        front = front.then(of(stage), mesh(stage), params(p, stage, mesh(stage))?)?;
    }
    front.then(SmallSquare, mesh(last), params(p, last, mesh(last))?)
}

fn expected(schedule: &Schedule) -> Outcome {
    together(Simulation::new(1, RANKS).run(|p| {
        let mut pipeline = chain(p, schedule, false)?;
        step(p, &mut pipeline, schedule, &ROWS)
    }))
}

#[test]
fn kept_inputs_give_the_bits_of_declared_residuals() {
    for name in ["gpipe", "1f1b", "zb-h1", "interleaved", "zbv"] {
        let schedule = Schedule::named(name, RANKS, ROWS.len(), None).unwrap();
        let expected = expected(&schedule);
        for (processes, recomputes) in [(1, false), (RANKS, false), (RANKS, true)] {
            let found = together(Simulation::new(processes, RANKS).run(|p| {
                let mut pipeline = small(p, &schedule, |_| Small::default())?;
                (0..pipeline.stages()).for_each(|stage| pipeline.recompute(stage, recomputes));
                step(p, &mut pipeline, &schedule, &ROWS)
            }));
            // Fused gradients are added in the order of the input gradients.
            let close = |a: &f32, b: &f32| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
            assert_eq!(found.loss, expected.loss, "{name}");
            for (found, expected) in found.gradients.iter().zip(&expected.gradients) {
                let (found, expected) = (found.as_ref().unwrap(), expected.as_ref().unwrap());
                let same = found == expected;
                let near = found.iter().zip(expected).all(|(a, b)| close(a, b));
                assert!(same || (name != "1f1b" && near), "{name}: {found:?}, {expected:?}");
            }
        }
    }
}

#[test]
fn objects_as_residuals_live_from_forward_to_backward() {
    let schedule = Schedule::one_f_one_b(RANKS, ROWS.len()).unwrap();
    let expected = expected(&schedule);
    for recomputes in [false, true] {
        let alive: Vec<Arc<Alive>> = (0..RANKS).map(|_| Arc::default()).collect();
        let of = |stage: usize| Small { objects: Some(alive[stage].clone()), ..Small::default() };
        let found = together(Simulation::new(RANKS, RANKS).run(|p| {
            let mut pipeline = small(p, &schedule, of)?;
            (0..RANKS - 1).for_each(|stage| pipeline.recompute(stage, recomputes));
            let outcome = step(p, &mut pipeline, &schedule, &ROWS)?;
            p.step_end()?;
            Ok(outcome)
        }));
        assert_eq!(found, expected);
        for (stage, alive) in alive[..RANKS - 1].iter().enumerate() {
            assert_eq!(alive.now.load(Ordering::SeqCst), 0, "of stage {stage}");
            if !recomputes {
                let in_flight = RANKS - stage;
                assert_eq!(alive.most.load(Ordering::SeqCst), in_flight, "of stage {stage}");
            }
        }
    }
}

#[test]
fn objects_are_dropped_after_a_forward_pass_alone() {
    let schedule = Schedule::gpipe(2, ROWS.len()).unwrap();
    let alive: Arc<Alive> = Arc::default();
    let of = |_| Small { objects: Some(alive.clone()), ..Small::default() };
    let results = Simulation::new(2, 2).run(|p| {
        let mut pipeline = small(p, &schedule, of)?;
        let batch = microbatches(p, &pipeline, &ROWS)?;
        let losses = pipeline.forward_all(p, &schedule, batch)?;
        losses.iter().try_for_each(|loss| loss.sum.block_until_ready().map(drop))?;
        p.step_end()
    });
    results.into_iter().for_each(|result| result.unwrap());
    assert!(alive.most.load(Ordering::SeqCst) > 0);
    assert_eq!(alive.now.load(Ordering::SeqCst), 0);
}

#[test]
fn declared_object_bytes_count_in_the_plan_of_memory() {
    let schedule = Schedule::gpipe(2, ROWS.len()).unwrap();
    let of = |objects: bool| {
        let alive: Option<Arc<Alive>> = objects.then(Arc::default);
        move |_| Small { objects: alive.clone(), ..Small::default() }
    };
    let results = Simulation::new(1, 2).run(|p| {
        let shape = f32s([ROWS[0], WIDTH]);
        let shapes = MicrobatchShapes::new(shape.clone()).side(1, &shape);
        let (mut found, mut most) = (Vec::new(), 0);
        for objects in [false, true] {
            let pipeline = small(p, &schedule, of(objects))?;
            let plan = pipeline.memory(p, &schedule, &shapes, &[])?;
            found.push(plan.of(&p.topology().device_ids()[..1]).expected);
            most = plan.of(p.topology().device_ids()).at_most;
        }
        let mut pipeline = small(p, &schedule, of(true))?;
        p.forget_memory_peak();
        step(p, &mut pipeline, &schedule, &ROWS)?;
        assert!(p.memory().recent_peak <= most + SMALL, "{} of {most}", p.memory().recent_peak);
        Ok((found[0], found[1]))
    });
    let (kept, objects) = results.into_iter().next().unwrap().unwrap();
    // GPipe holds the residuals of all microbatches.
    let all = BYTES * ROWS.len() as u64;
    assert!(objects + SMALL >= kept + all && objects <= kept + 2 * all, "{kept}, {objects}");
}

#[test]
fn state_stays_with_its_stage_in_replays_and_recomputation() {
    let schedule = Schedule::one_f_one_b(2, ROWS.len()).unwrap();
    for (replays, objects) in [(false, false), (true, false), (false, true)] {
        let alive: Option<Arc<Alive>> = objects.then(Arc::default);
        let of = |_| Small { objects: alive.clone(), counts: true };
        let results = Simulation::new(2, 2).run(|p| {
            let mut pipeline = small(p, &schedule, of)?;
            let mesh = pipeline.mesh(0).clone();
            let count: MpmdObject<usize> = p.object(&mesh, |_| Ok(0))?;
            let elsewhere: MpmdObject<usize> = p.object(&pipeline.mesh(1).clone(), |_| Ok(0))?;
            let error = pipeline.state(0, &elsewhere).unwrap_err().to_string();
            assert!(error.contains("Pipeline::state: stage 0 `Small`: its state is "), "{error}");
            pipeline.state(0, &count)?;
            pipeline.replay(replays);
            pipeline.recompute(0, objects);
            for _ in 0..3 {
                step(p, &mut pipeline, &schedule, &ROWS)?;
            }
            let read =
                method(|| f32s([]), |count: &mut usize, mut y: ViewMut<f32>| y[0] = *count as f32);
            let found = p.method(read).on(&mesh).build()?.call(p, &count, Empty::new())?;
            Ok(found.to_host()?.map(|count| count.to_vec::<f32>()).transpose()?)
        });
        let found = results.into_iter().next().unwrap().unwrap();
        let passes = 3 * ROWS.len() * if objects { 2 } else { 1 };
        assert_eq!(found, Some(vec![passes as f32]));
    }
}

#[test]
fn fused_stage_in_an_order_that_cannot_ascend_is_refused() {
    let descending = Builtin::ALL.iter().filter_map(|builtin| builtin.schedule(2, 4, 2).ok());
    let descending = descending.filter(Schedule::has_backward);
    let mut refused = 0;
    for schedule in descending {
        let results = Simulation::new(1, schedule.ranks()).run(|p| {
            let mut pipeline = small(p, &schedule, |_| Small::default())?;
            pipeline.buffer_gradients(true);
            let batch = microbatches(p, &pipeline, &ROWS)?;
            let before = p.operations();
            match pipeline.train_step(p, &schedule, batch) {
                Ok(_) => Ok(0),
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("does not compute its gradients in ascending order"));
                    assert_eq!(p.operations(), before, "nothing was issued");
                    Ok(1)
                }
            }
        });
        refused += results.into_iter().map(|result| result.unwrap()).sum::<usize>();
    }
    assert!(refused > 0, "some schedule has another order");
    assert_eq!(Passes::Fused, Small::default().passes());
}
