//! Pipelines: gradients, schedules, processes.

use mpmd_core::aval::f32s;
use mpmd_core::pipeline::{
    Declared, Loss, Microbatch, Pipeline, PlacedShape, Schedule, Stage, StageSignature,
};
use mpmd_core::prelude::*;
use mpmd_core::tree::Empty;
use mpmd_core::{Simulation, kernel};

const WIDTH: usize = 3;
const ROWS: usize = 2;

/// y = x * w, element by element, w shared by the rows.
struct Scale;

impl Stage for Scale {
    type Params = MpmdArray;
    type In = MpmdArray;
    type Side = Empty<MpmdArray>;
    type Out = MpmdArray;
    type Residual = MpmdArray;
    type WeightResidual = (MpmdArray, MpmdArray);

    fn infer(&self, w: &ShapedArray, x: &ShapedArray, _: &Empty<ShapedArray>) -> Result<Declared<Self>> {
        if x.shape()[1] != w.shape()[0] {
            return Err(Error::kernel(format!("{x} * {w}")));
        }
        let kept = PlacedShape::replicated(x.clone());
        Ok(StageSignature::new(x.clone(), kept.clone(), (kept.clone(), kept)).keep("", "0"))
    }

    fn forward(
        &self,
        _: &mut Context<'_>,
        w: View<'_>,
        x: View<'_>,
        _: Empty<View<'_>>,
        mut y: ViewMut<'_>,
        mut residual: ViewMut<'_>,
    ) -> Result<()> {
        let (w, x) = (w.as_slice::<f32>()?, x.as_slice::<f32>()?);
        residual.as_mut_slice()?.copy_from_slice(x);
        let y = y.as_mut_slice::<f32>()?;
        (0..x.len()).for_each(|i| y[i] = x[i] * w[i % WIDTH]);
        Ok(())
    }

    fn backward_input(
        &self,
        _: &mut Context<'_>,
        w: View<'_>,
        _: View<'_>,
        dy: View<'_>,
        dx: Option<ViewMut<'_>>,
        (_, mut out): (ViewMut<'_>, ViewMut<'_>),
    ) -> Result<()> {
        let (w, dy) = (w.as_slice::<f32>()?, dy.as_slice::<f32>()?);
        out.as_mut_slice()?.copy_from_slice(dy);
        if let Some(mut dx) = dx {
            let dx = dx.as_mut_slice::<f32>()?;
            (0..dy.len()).for_each(|i| dx[i] = dy[i] * w[i % WIDTH]);
        }
        Ok(())
    }

    fn backward_weight(
        &self,
        _: &mut Context<'_>,
        (x, dy): (View<'_>, View<'_>),
        mut gradient: ViewMut<'_>,
    ) -> Result<()> {
        let (x, dy) = (x.as_slice::<f32>()?, dy.as_slice::<f32>()?);
        let gradient = gradient.as_mut_slice::<f32>()?;
        (0..x.len()).for_each(|i| gradient[i % WIDTH] += x[i] * dy[i]);
        Ok(())
    }
}

/// Sum of squares of (x * w - labels), over the rows.
struct Square;

impl Stage for Square {
    type Params = MpmdArray;
    type In = MpmdArray;
    type Side = MpmdArray;
    type Out = Loss<MpmdArray>;
    type Residual = (MpmdArray, MpmdArray);
    type WeightResidual = (MpmdArray, MpmdArray);

    fn infer(&self, _: &ShapedArray, x: &ShapedArray, _: &ShapedArray) -> Result<Declared<Self>> {
        let kept = || PlacedShape::replicated(x.clone());
        let loss = Loss { sum: f32s([]), weight: f32s([]) };
        Ok(StageSignature::new(loss, (kept(), kept()), (kept(), kept())).keep("0", "0").keep("1", "1"))
    }

    fn forward(
        &self,
        _: &mut Context<'_>,
        w: View<'_>,
        x: View<'_>,
        labels: View<'_>,
        mut y: Loss<ViewMut<'_>>,
        (mut kept, mut error): (ViewMut<'_>, ViewMut<'_>),
    ) -> Result<()> {
        let (w, x) = (w.as_slice::<f32>()?, x.as_slice::<f32>()?);
        let labels = labels.as_slice::<f32>()?;
        kept.as_mut_slice()?.copy_from_slice(x);
        let error = error.as_mut_slice::<f32>()?;
        (0..x.len()).for_each(|i| error[i] = x[i] * w[i % WIDTH] - labels[i]);
        y.sum.fill(error.iter().map(|e| e * e).sum::<f32>())?;
        y.weight.fill((x.len() / WIDTH) as f32)?;
        Ok(())
    }

    fn backward_input(
        &self,
        _: &mut Context<'_>,
        w: View<'_>,
        _: (View<'_>, View<'_>),
        dy: kernel::Views<'_, Loss<MpmdArray>>,
        dx: Option<ViewMut<'_>>,
        (_, mut error): (ViewMut<'_>, ViewMut<'_>),
    ) -> Result<()> {
        let (w, scale) = (w.as_slice::<f32>()?, dy.sum.scalar::<f32>()?);
        let error = error.as_mut_slice::<f32>()?;
        error.iter_mut().for_each(|e| *e *= 2.0 * scale);
        if let Some(mut dx) = dx {
            let dx = dx.as_mut_slice::<f32>()?;
            (0..dx.len()).for_each(|i| dx[i] = error[i] * w[i % WIDTH]);
        }
        Ok(())
    }

    fn backward_weight(
        &self,
        cx: &mut Context<'_>,
        kept: (View<'_>, View<'_>),
        gradient: ViewMut<'_>,
    ) -> Result<()> {
        Scale.backward_weight(cx, kept, gradient)
    }
}

/// Loss, weight, and the gradients of every stage, where they are owned here.
#[derive(Clone, Debug, Default, PartialEq)]
struct Outcome {
    loss: Option<Vec<f32>>,
    gradients: Vec<Option<Vec<f32>>>,
}

fn value(microbatch: usize, i: usize) -> f32 {
    0.3 + 0.1 * (i % 5) as f32 + 0.05 * microbatch as f32
}

fn weight(stage: usize, i: usize) -> f32 {
    0.8 + 0.2 * stage as f32 - 0.1 * i as f32
}

fn read(array: &MpmdArray) -> Result<Option<Vec<f32>>> {
    array.to_host()?.map(|host| host.to_vec::<f32>().map_err(Error::from)).transpose()
}

/// One step of four stages; the weight of `nudged` (stage, element) is changed by that much.
fn step(p: &mut Program, schedule: &Schedule, nudged: Option<(usize, usize, f32)>) -> Result<Outcome> {
    let meshes = p.mesh(&[("stage", 4)])?.split("stage")?;
    let w = |p: &mut Program, stage: usize| {
        let values: Vec<f32> = (0..WIDTH)
            .map(|i| {
                let nudge = nudged.filter(|(s, e, _)| (*s, *e) == (stage, i)).map_or(0.0, |(_, _, by)| by);
                weight(stage, i) + nudge
            })
            .collect();
        p.device_put(&MpmdArray::from_slice(&[WIDTH], &values)?, meshes[stage].replicated())
    };
    let (w0, w1, w2, w3) = (w(p, 0)?, w(p, 1)?, w(p, 2)?, w(p, 3)?);
    let mut pipeline = Pipeline::first(Scale, &meshes[0], w0)?
        .then(Scale, &meshes[1], w1)?
        .then(Scale, &meshes[2], w2)?
        .then(Square, &meshes[3], w3)?;
    let microbatches = (0..schedule.microbatches())
        .map(|m| {
            let x: Vec<f32> = (0..ROWS * WIDTH).map(|i| value(m, i)).collect();
            let labels: Vec<f32> = (0..ROWS * WIDTH).map(|i| 0.2 * value(m, i + 1)).collect();
            let shape = [ROWS, WIDTH];
            let x = p.device_put(&MpmdArray::from_slice(&shape, &x)?, meshes[0].replicated())?;
            let labels = p.device_put(&MpmdArray::from_slice(&shape, &labels)?, meshes[3].replicated())?;
            Ok(Microbatch::new(x).side(3, labels))
        })
        .collect::<Result<Vec<_>>>()?;
    let output = pipeline.train_step(p, schedule, microbatches)?;
    p.step_end()?;
    let loss = match (read(&output.loss.sum)?, read(&output.loss.weight)?) {
        (Some(sum), Some(weight)) => Some([sum, weight].concat()),
        _ => None,
    };
    let gradients = output.gradients.iter().map(|stage| read(&stage[0].1)).collect::<Result<Vec<_>>>()?;
    Ok(Outcome { loss, gradients })
}

fn alone(schedule: &Schedule, nudged: Option<(usize, usize, f32)>) -> Outcome {
    Simulation::new(1, 4).run(|p| step(p, schedule, nudged)).remove(0).unwrap()
}

#[test]
fn gradients_agree_with_finite_differences() {
    let schedule = Schedule::gpipe(4, 3).unwrap();
    let outcome = alone(&schedule, None);
    assert_eq!(outcome.loss.as_ref().unwrap()[1], (3 * ROWS) as f32, "the weight counts rows");
    let step = 1e-2;
    for stage in 0..4 {
        for element in 0..WIDTH {
            let loss = |by| f64::from(alone(&schedule, Some((stage, element, by))).loss.unwrap()[0]);
            let expected = (loss(step) - loss(-step)) / (2.0 * f64::from(step));
            let found = f64::from(outcome.gradients[stage].as_ref().unwrap()[element]);
            assert!(
                (expected - found).abs() < 1e-2 * expected.abs().max(0.1),
                "{stage}/{element}: {expected} {found}"
            );
        }
    }
}

#[test]
fn every_schedule_gives_the_same_bits_on_any_number_of_processes() {
    let reference = alone(&Schedule::gpipe(4, 5).unwrap(), None);
    for schedule in [Schedule::gpipe(4, 5).unwrap(), Schedule::one_f_one_b(4, 5).unwrap()] {
        for processes in [1, 2, 4] {
            let simulation = Simulation::new(processes, 4).delays(11, std::time::Duration::from_millis(2));
            let outcomes = simulation.run(|p| step(p, &schedule, None));
            let outcomes: Vec<Outcome> = outcomes.into_iter().map(|outcome| outcome.unwrap()).collect();
            let (_, last) = outcomes.split_at(processes - 1);
            assert_eq!(last[0].loss, reference.loss, "{} over {processes}", schedule.name());
            for stage in 0..4 {
                let owner = &outcomes[stage * processes / 4];
                assert_eq!(owner.gradients[stage], reference.gradients[stage]);
            }
        }
    }
}

#[test]
fn fewer_microbatches_than_ranks_work() {
    let reference = alone(&Schedule::gpipe(4, 2).unwrap(), None);
    assert_eq!(alone(&Schedule::one_f_one_b(4, 2).unwrap(), None), reference);
}

#[test]
fn a_schedule_that_does_not_fit_the_pipeline_is_refused() {
    let results = Simulation::new(1, 4).run(|p| step(p, &Schedule::gpipe(3, 2).unwrap(), None));
    let error = results[0].as_ref().unwrap_err().to_string();
    assert!(error.contains("3 stages") && error.contains("4 stages"), "{error}");
}

#[test]
fn orders_agree_with_the_golden_ones() {
    let golden: serde_json::Value =
        serde_json::from_str(include_str!("golden/schedules.json")).expect("well-formed");
    let mut compared = 0;
    for case in golden["cases"].as_array().expect("cases") {
        let number = |key: &str| case[key].as_u64().expect("a number") as usize;
        let name = case["schedule"].as_str().expect("a name");
        let Some(schedule) = Schedule::named(name, number("ranks"), number("microbatches")) else { continue };
        let rows: Vec<Vec<String>> = serde_json::from_value(case["rows"].clone()).expect("rows of cells");
        let ours: Vec<Vec<String>> = schedule
            .expect("a schedule")
            .rows()
            .iter()
            .map(|row| row.iter().map(ToString::to_string).collect())
            .collect();
        assert_eq!(ours, rows, "{name}");
        compared += 1;
    }
    assert_eq!(compared, 16, "the golden file has eight cases of each of the two schedules");
}
