//! Pipelines: gradients, schedules, processes.

use crate::stages::{Rows, Scale, Square};
use mpmd_core::Simulation;
use mpmd_core::pipeline::{Microbatch, ParamSharding, Passes, Pipeline, Schedule};
use mpmd_core::prelude::*;
use mpmd_core::sharding::Sharding;

const WIDTH: usize = 4;
const ROWS: usize = 2;

/// The loss as (sum, weight), and the gradient of every stage. `None` for values that this process
/// does not own.
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
    array
        .to_host()?
        .map(|host| host.to_vec::<f32>().map_err(Error::from))
        .transpose()
}

/// Runs one training step of four stages and returns this process's results. With `nudged`, as
/// (stage, element, amount), the amount is added to that element of the stage's weights.
fn step(
    p: &mut Program,
    schedule: &Schedule,
    nudged: Option<(usize, usize, f32)>,
) -> Result<Outcome> {
    let meshes = p.mesh(&[("stage", 4)])?.split("stage")?;
    let w = |p: &mut Program, stage: usize| {
        let values: Vec<f32> = (0..WIDTH)
            .map(|i| {
                let nudge = nudged
                    .filter(|(s, e, _)| (*s, *e) == (stage, i))
                    .map_or(0.0, |(_, _, by)| by);
                weight(stage, i) + nudge
            })
            .collect();
        p.device_put(
            &MpmdArray::from_slice(&[WIDTH], &values)?,
            meshes[stage].replicated(),
        )
    };
    let (w0, w1, w2, w3) = (w(p, 0)?, w(p, 1)?, w(p, 2)?, w(p, 3)?);
    let mut pipeline = Pipeline::first(Scale::of(Rows::All), &meshes[0], w0)?
        .then(Scale::of(Rows::All), &meshes[1], w1)?
        .then(Scale::of(Rows::All), &meshes[2], w2)?
        .then(Square(Rows::All), &meshes[3], w3)?;
    let microbatches = (0..schedule.microbatches())
        .map(|m| {
            let x: Vec<f32> = (0..ROWS * WIDTH).map(|i| value(m, i)).collect();
            let labels: Vec<f32> = (0..ROWS * WIDTH).map(|i| 0.2 * value(m, i + 1)).collect();
            let shape = [ROWS, WIDTH];
            let x = p.device_put(&MpmdArray::from_slice(&shape, &x)?, meshes[0].replicated())?;
            let labels = p.device_put(
                &MpmdArray::from_slice(&shape, &labels)?,
                meshes[3].replicated(),
            )?;
            Ok(Microbatch::new(x).side(3, labels))
        })
        .collect::<Result<Vec<_>>>()?;
    let output = pipeline.train_step(p, schedule, microbatches)?;
    p.step_end()?;
    let loss = match (read(&output.loss.sum)?, read(&output.loss.weight)?) {
        (Some(sum), Some(weight)) => Some([sum, weight].concat()),
        _ => None,
    };
    let gradients = output
        .gradients
        .iter()
        .map(|stage| read(&stage[0].1))
        .collect::<Result<Vec<_>>>()?;
    Ok(Outcome { loss, gradients })
}

fn alone(schedule: &Schedule, nudged: Option<(usize, usize, f32)>) -> Outcome {
    Simulation::new(1, 4)
        .run(|p| step(p, schedule, nudged))
        .remove(0)
        .unwrap()
}

#[test]
fn gradients_agree_with_finite_differences() {
    let schedule = Schedule::gpipe(4, 3).unwrap();
    let outcome = alone(&schedule, None);
    assert_eq!(
        outcome.loss.as_ref().unwrap()[1],
        (3 * ROWS) as f32,
        "the weight counts rows"
    );
    let step = 1e-2;
    for stage in 0..4 {
        for element in 0..WIDTH {
            let loss =
                |by| f64::from(alone(&schedule, Some((stage, element, by))).loss.unwrap()[0]);
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
fn every_schedule_gives_same_bits_at_every_process_count() {
    let reference = alone(&Schedule::gpipe(4, 5).unwrap(), None);
    for schedule in [
        Schedule::gpipe(4, 5).unwrap(),
        Schedule::one_f_one_b(4, 5).unwrap(),
    ] {
        for processes in [1, 2, 4] {
            let simulation =
                Simulation::new(processes, 4).delays(11, std::time::Duration::from_millis(2));
            let outcomes = simulation.run(|p| step(p, &schedule, None));
            let outcomes: Vec<Outcome> = outcomes
                .into_iter()
                .map(|outcome| outcome.unwrap())
                .collect();
            let (_, last) = outcomes.split_at(processes - 1);
            assert_eq!(
                last[0].loss,
                reference.loss,
                "{} over {processes}",
                schedule.name()
            );
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
    assert_eq!(
        alone(&Schedule::one_f_one_b(4, 2).unwrap(), None),
        reference
    );
}

#[test]
fn a_schedule_that_does_not_fit_the_pipeline_is_refused() {
    let results = Simulation::new(1, 4).run(|p| step(p, &Schedule::gpipe(3, 2).unwrap(), None));
    let error = results[0].as_ref().unwrap_err().to_string();
    assert!(
        error.contains("3 stages") && error.contains("4 stages"),
        "{error}"
    );
}

/// The results of a step of two stages, and its number of operations. The results are the loss, a
/// forward pass's loss, and the gradients; `None` except on process 0.
type Stored = (Option<[Vec<f32>; 4]>, u64);

/// Runs one training step and one forward pass of two stages on two devices each. Either each
/// device has all rows, or rows and stored weights are divided in halves over a stage's devices.
fn stored_step(p: &mut Program, schedule: &Schedule, rows: Rows, passes: Passes) -> Result<Stored> {
    let meshes = p.mesh(&[("stage", 2), ("data", 2)])?.split("stage")?;
    let mut params = Vec::new();
    for (stage, mesh) in meshes.iter().enumerate() {
        let values: Vec<f32> = (0..WIDTH).map(|i| weight(stage, i)).collect();
        params.push(p.device_put(
            &MpmdArray::from_slice(&[WIDTH], &values)?,
            mesh.sharding(rows.spec()),
        )?);
    }
    let [w0, w1] = [params[0].clone(), params[1].clone()];
    let front = Pipeline::first(
        Scale {
            passes,
            ..Scale::of(rows)
        },
        &meshes[0],
        w0,
    )?;
    let mut pipeline = front.then(Square(rows), &meshes[1], w1)?;
    if rows == Rows::Part {
        for (stage, mesh) in meshes.iter().enumerate() {
            let storage = ParamSharding::new(vec![mesh.replicated()]).partial_over(&["data"])?;
            pipeline.store(stage, storage)?;
        }
    }
    let microbatches = |p: &mut Program| -> Result<Vec<Microbatch<MpmdArray>>> {
        let mut put = |values: Vec<f32>, mesh: usize| {
            let values = MpmdArray::from_slice(&[ROWS, WIDTH], &values)?;
            p.device_put(&values, meshes[mesh].sharding(rows.spec()))
        };
        let one = |m: usize| {
            let x = put((0..ROWS * WIDTH).map(|i| value(m, i)).collect(), 0)?;
            let labels = put(
                (0..ROWS * WIDTH).map(|i| 0.2 * value(m, i + 1)).collect(),
                1,
            )?;
            Ok(Microbatch::new(x).side(1, labels))
        };
        (0..schedule.microbatches()).map(one).collect()
    };
    let batch = microbatches(p)?;
    let before = p.operations();
    let output = pipeline.train_step(p, schedule, batch)?;
    let operations = p.operations() - before;
    for (stage, param) in params.iter().enumerate() {
        let (gradient, kept) = (&output.gradients[stage][0].1, &pipeline.params(stage)[0].1);
        assert_eq!(
            gradient.sharding(),
            param.sharding(),
            "gradients come where parameters are stored"
        );
        assert_eq!(kept.sharding(), param.sharding());
    }
    let once = microbatches(p)?.swap_remove(0);
    let forward = pipeline.forward(p, once)?;
    p.step_end()?;
    let mut all = Vec::new();
    let results = [
        &output.loss.sum,
        &output.gradients[0][0].1,
        &output.gradients[1][0].1,
        &forward.sum,
    ];
    for array in results {
        let device = p.topology().device_ids()[0];
        all.push(read(
            &p.device_put(array, Sharding::single_device(device))?,
        )?);
    }
    let all: Option<Vec<Vec<f32>>> = all.into_iter().collect();
    Ok((all.and_then(|all| all.try_into().ok()), operations))
}

#[test]
fn stored_weights_are_gathered_once_and_gradients_reduced() {
    for microbatches in [1, 2, 5] {
        for schedule in [
            Schedule::gpipe(2, microbatches).unwrap(),
            Schedule::one_f_one_b(2, microbatches).unwrap(),
        ] {
            let run = |processes: usize, rows: Rows| -> Stored {
                let simulation =
                    Simulation::new(processes, 4).delays(5, std::time::Duration::from_millis(1));
                let mut results = simulation
                    .run(|p| stored_step(p, &schedule, rows, Passes::Split))
                    .into_iter();
                let first = results.next().unwrap().unwrap();
                assert!(
                    results.all(|result| result.unwrap() == (None, first.1)),
                    "the same operations"
                );
                first
            };
            let (whole, plain) = run(1, Rows::All);
            let (divided, operations) = run(1, Rows::Part);
            assert_eq!(
                operations,
                plain + 4,
                "one gather and one reduction for each stage"
            );
            for (found, expected) in divided
                .iter()
                .flatten()
                .flatten()
                .zip(whole.iter().flatten().flatten())
            {
                assert!(
                    (found - expected).abs() < 1e-5 * expected.abs().max(1.0),
                    "{divided:?} {whole:?}"
                );
            }
            for processes in [2, 4] {
                let found = run(processes, Rows::Part).0;
                assert_eq!(
                    found,
                    divided,
                    "{} in {processes} processes",
                    schedule.name()
                );
            }
        }
    }
}

/// Values that a process reads from some steps, and the number of operations issued up to the end
/// of each step. A value is `None` on processes that do not own it.
type Steps = (Vec<Option<Vec<f32>>>, Vec<u64>);

/// Runs five steps of two stages stored in parts, the last two with another schedule. Each step's
/// gradients are the parameters of the next. With `replay`, repeated steps are replayed. Returns
/// this process's gradients and losses, and the numbers of operations.
fn replayed_steps(p: &mut Program, replay: bool) -> Result<Steps> {
    let rows = Rows::Part;
    let meshes = p.mesh(&[("stage", 2), ("data", 2)])?.split("stage")?;
    let mut params = Vec::new();
    for (stage, mesh) in meshes.iter().enumerate() {
        let values: Vec<f32> = (0..WIDTH).map(|i| weight(stage, i)).collect();
        params.push(p.device_put(
            &MpmdArray::from_slice(&[WIDTH], &values)?,
            mesh.sharding(rows.spec()),
        )?);
    }
    let [w0, w1] = [params[0].clone(), params[1].clone()];
    let mut pipeline = Pipeline::first(Scale::of(rows), &meshes[0], w0)?;
    pipeline.replay(replay);
    let mut pipeline = pipeline.then(Square(rows), &meshes[1], w1)?;
    for (stage, mesh) in meshes.iter().enumerate() {
        pipeline.store(
            stage,
            ParamSharding::new(vec![mesh.replicated()]).partial_over(&["data"])?,
        )?;
    }
    let schedules = [Schedule::one_f_one_b(2, 4), Schedule::gpipe(2, 4)].map(Result::unwrap);
    let (mut read_here, mut counts) = (Vec::new(), Vec::new());
    for step in 0..5 {
        let mut put = |values: Vec<f32>, mesh: usize| {
            let values = MpmdArray::from_slice(&[ROWS, WIDTH], &values)?;
            p.device_put(&values, meshes[mesh].sharding(rows.spec()))
        };
        let labels = put(
            (0..ROWS * WIDTH)
                .map(|i| 0.2 * value(step, i + 1))
                .collect(),
            1,
        )?;
        let one = |m: usize| {
            let x = put((0..ROWS * WIDTH).map(|i| value(m + step, i)).collect(), 0)?;
            // One array for all microbatches.
            Ok(Microbatch::new(x).side(1, labels.clone()))
        };
        let microbatches = (0..4).map(one).collect::<Result<Vec<_>>>()?;
        let output = pipeline.train_step(p, &schedules[usize::from(step >= 3)], microbatches)?;
        p.step_end()?;
        counts.push(p.operations());
        for (stage, gradients) in output.gradients.into_iter().enumerate() {
            let gradients: Vec<MpmdArray> = gradients.into_iter().map(|(_, array)| array).collect();
            let device = p.topology().device_ids()[0];
            read_here.push(read(
                &p.device_put(&gradients[0], Sharding::single_device(device))?,
            )?);
            pipeline.set_params(stage, gradients)?;
        }
        for loss in output.losses.iter().chain([&output.loss]) {
            read_here.extend([read(&loss.sum)?, read(&loss.weight)?]);
        }
    }
    Ok((read_here, counts))
}

#[test]
fn a_pipeline_that_replays_its_steps_gives_the_same_bits() {
    for processes in [1, 2, 4] {
        let simulation =
            Simulation::new(processes, 4).delays(5, std::time::Duration::from_millis(1));
        let run = |replay| {
            simulation
                .run(|p| replayed_steps(p, replay))
                .into_iter()
                .map(Result::unwrap)
        };
        let (issued, replayed): (Vec<_>, Vec<_>) = (run(false).collect(), run(true).collect());
        assert_eq!(issued, replayed, "{processes} processes");
    }
    // Only a process that replays differs from one that does not.
    let results = Simulation::new(2, 4).run(|p| {
        let replay = p.process().0 == 0;
        replayed_steps(p, replay)
    });
    assert!(
        results
            .into_iter()
            .all(|result| result.unwrap_err().is_divergence())
    );
}

#[test]
fn param_sharding_that_does_not_fit_the_stage_is_refused() {
    let results = Simulation::new(2, 4).run(|p| {
        let meshes = p.mesh(&[("stage", 2), ("data", 2)])?.split("stage")?;
        let w = MpmdArray::from_slice(&[WIDTH], &[1.0f32; WIDTH])?;
        let w = p.device_put(&w, meshes[0].sharding(spec!["data"]))?;
        let mut pipeline = Pipeline::first(Scale::of(Rows::Part), &meshes[0], w)?;
        let mut refused = |shardings: Vec<Sharding>| {
            let refused = pipeline.store(0, ParamSharding::new(shardings));
            refused
                .err()
                .map_or_else(String::new, |error| error.to_string())
        };
        let here = &meshes[0];
        let axis = ParamSharding::new(vec![here.replicated()]).partial_over(&["model"]);
        let divided =
            ParamSharding::new(vec![here.sharding(spec!["data"])]).partial_over(&["data"]);
        Ok([
            refused(vec![here.replicated(); 2]),
            refused(vec![meshes[1].replicated()]),
            refused(vec![here.sharding(spec!["data", "data"])]),
            axis.unwrap_err().to_string(),
            divided.unwrap_err().to_string(),
        ])
    });
    let expected = [
        "2 shardings for the 1 parameters",
        "not on its mesh",
        "cannot compute",
        "`model`",
        "`data`",
    ];
    for result in results {
        for (found, expected) in result.unwrap().iter().zip(expected) {
            assert!(found.contains(expected), "{found}");
        }
    }
}

#[test]
fn fused_stage_adds_partial_sums_like_a_split_one() {
    for schedule in [
        Schedule::one_f_one_b(2, 3),
        Schedule::named("zb-h1", 2, 3, None),
    ] {
        let schedule = schedule.unwrap();
        let run = |passes: Passes| {
            let mut results = Simulation::new(1, 4)
                .run(|p| Ok(stored_step(p, &schedule, Rows::Part, passes)?.0))
                .into_iter();
            results.next().unwrap().unwrap()
        };
        let split = run(Passes::Split);
        assert!(split.is_some());
        assert_eq!(run(Passes::Fused), split);
        assert_eq!(run(Passes::Both), split);
    }
}
