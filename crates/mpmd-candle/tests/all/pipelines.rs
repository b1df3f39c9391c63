//! Losses have the same bits however the model is divided over processes, scheduled, recomputed or
//! replayed.

use std::collections::BTreeMap;

use candle_core::Tensor;
use candle_nn::Init;
use mpmd_candle::{Cx, VarBuilder, stage};
use mpmd_core::aval::DType;
use mpmd_core::kernel::elementwise;
use mpmd_core::pipeline::{Loss, Microbatch, MicrobatchShapes, Pipeline, Schedule, StepOutput};
use mpmd_core::prelude::*;
use mpmd_core::{Result, Simulation};

use crate::model::{self, Settings, microbatches, pipeline, shapes};

const MICROBATCHES: usize = 4;
const STEPS: u64 = 3;

/// The way in which a training runs.
#[derive(Clone, Copy)]
struct Run {
    settings: Settings,
    processes: usize,
    schedule: &'static str,
    recompute: bool,
    replay: bool,
    computes_in: DType,
}

const PLAIN: Run = Run {
    settings: Settings {
        stages: 2,
        dropout: 0.0,
        split: false,
    },
    processes: 1,
    schedule: "gpipe",
    recompute: false,
    replay: false,
    computes_in: DType::F32,
};

/// Updates the parameters of all stages by plain gradient descent.
fn update(p: &mut Program, model: &mut model::Model, output: StepOutput) -> Result<()> {
    for (stage, gradients) in output.gradients.into_iter().enumerate() {
        let descend = p
            .jit(elementwise(|w: f32, g: f32| w - 0.02 * g))
            .on(model.mesh(stage))
            .outputs(model.mesh(stage).replicated())
            .build()?;
        let mut params = Vec::new();
        for ((_, param), (_, gradient)) in model.params(stage).into_iter().zip(gradients) {
            params.push(descend.call(p, (param, gradient))?);
        }
        model.set_params(stage, params)?;
    }
    Ok(())
}

/// Returns the bits of the losses of some steps, with the losses of an evaluation at the end.
fn losses(run: Run) -> Vec<u32> {
    let Run {
        settings,
        processes,
        schedule,
        recompute,
        replay,
        computes_in,
    } = run;
    let stages = settings.stages;
    let results = Simulation::new(processes, stages.max(processes)).run(|p| {
        let mut model = pipeline(p, settings)?;
        (0..stages).for_each(|stage| model.recompute(stage, recompute));
        model.replay(replay);
        if computes_in != DType::F32 {
            model.compute_in(computes_in)?;
            model.probe(p, &shapes(stages))?;
        }
        let schedule = Schedule::named(schedule, stages, MICROBATCHES, None)?;
        let ends = [model.mesh(0).clone(), model.mesh(stages - 1).clone()];
        let ends = [&ends[0], &ends[1]];
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let batch = microbatches(p, ends, stages, (step, MICROBATCHES))?;
            let output = model.train_step(p, &schedule, batch)?;
            losses.push(output.loss.sum.clone());
            let gradients = output.gradients.iter().flatten();
            assert!(
                gradients
                    .into_iter()
                    .all(|(_, gradient)| gradient.dtype() == DType::F32)
            );
            update(p, &mut model, output)?;
            p.step_end()?;
        }
        let batch = microbatches(p, ends, stages, (STEPS, MICROBATCHES))?;
        let outputs = model.forward_all(p, &schedule, batch)?;
        losses.extend(outputs.into_iter().map(|loss| loss.sum));
        let read = |loss: &MpmdArray| Ok(loss.to_host()?.map(|host| host.to_vec::<f32>()));
        let found = losses.iter().map(read).collect::<Result<Vec<_>>>()?;
        found
            .into_iter()
            .flatten()
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(Error::from)
    });
    let results: Vec<Vec<Vec<f32>>> = results.into_iter().map(|result| result.unwrap()).collect();
    let found: Vec<f32> = results.into_iter().flatten().flatten().collect();
    assert_eq!(found.len(), STEPS as usize + MICROBATCHES, "{found:?}");
    assert!(found.iter().all(|loss| loss.is_finite()));
    found.into_iter().map(f32::to_bits).collect()
}

#[test]
fn losses_are_equal_at_every_process_count() {
    let dropout = Settings {
        stages: 4,
        dropout: 0.3,
        split: false,
    };
    let one = losses(Run {
        settings: dropout,
        ..PLAIN
    });
    for processes in [2, 4] {
        assert_eq!(
            losses(Run {
                settings: dropout,
                processes,
                ..PLAIN
            }),
            one,
            "{processes}"
        );
    }
}

#[test]
fn losses_are_equal_under_every_schedule() {
    for split in [false, true] {
        let settings = Settings {
            dropout: 0.3,
            split,
            ..Settings::default()
        };
        let plain = losses(Run { settings, ..PLAIN });
        for schedule in ["1f1b", "zb-h1"] {
            let run = Run {
                settings,
                schedule,
                processes: 2,
                ..PLAIN
            };
            assert_eq!(losses(run), plain, "{schedule}, split {split}");
        }
    }
}

#[test]
fn split_gradients_give_the_same_bits() {
    let settings = Settings {
        split: true,
        ..Settings::default()
    };
    let schedule = "zb-h1";
    assert_eq!(
        losses(Run {
            settings,
            schedule,
            ..PLAIN
        }),
        losses(PLAIN)
    );
}

#[test]
fn recomputation_draws_the_same_dropout_masks() {
    let settings = Settings {
        dropout: 0.3,
        ..Settings::default()
    };
    let plain = losses(Run { settings, ..PLAIN });
    assert_eq!(
        losses(Run {
            settings,
            recompute: true,
            processes: 2,
            ..PLAIN
        }),
        plain
    );
    assert_ne!(plain, losses(PLAIN), "dropout does nothing");
}

#[test]
fn replayed_steps_draw_new_dropout_masks() {
    let settings = Settings {
        dropout: 0.3,
        ..Settings::default()
    };
    let plain = losses(Run { settings, ..PLAIN });
    assert_eq!(
        losses(Run {
            settings,
            replay: true,
            processes: 2,
            ..PLAIN
        }),
        plain
    );
}

#[test]
fn models_compute_in_bf16_over_f32_parameters() {
    let single: Vec<f32> = losses(PLAIN).into_iter().map(f32::from_bits).collect();
    for split in [false, true] {
        let settings = Settings {
            dropout: 0.3,
            split,
            ..Settings::default()
        };
        let plain = Run {
            settings,
            computes_in: DType::Bf16,
            ..PLAIN
        };
        let bits = losses(plain);
        for schedule in ["1f1b", "zb-h1"] {
            let run = Run {
                schedule,
                processes: 2,
                recompute: true,
                replay: true,
                ..plain
            };
            assert_eq!(losses(run), bits, "{schedule}, split {split}");
        }
    }
    let half: Vec<f32> = losses(Run {
        computes_in: DType::Bf16,
        ..PLAIN
    })
    .into_iter()
    .map(f32::from_bits)
    .collect();
    // Later steps grow apart, since the rate is high.
    let (half, single) = (half[0], single[0]);
    assert!(
        half != single && (half - single).abs() < 0.01 * single,
        "{half} {single}"
    );
    let refused = Simulation::new(1, 2).run(|p| {
        let mut model = pipeline(p, Settings::default())?;
        Ok(model.compute_in(DType::I32).unwrap_err().to_string())
    });
    let refused = refused.into_iter().next().unwrap().unwrap();
    assert!(refused.contains("compute in f32, bf16 or f16"), "{refused}");
}

#[test]
fn scalar_parameters_and_whole_numbers_pass_in_bf16() {
    let results = Simulation::new(1, 2).run(|p| {
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        let first = stage(
            |vb: VarBuilder<'static>| vb.get_with_hints((), "scale", Init::Const(3.0)),
            |scale: &Tensor, x: Tensor, _: &mut Cx<'_>| {
                let count = Tensor::new(x.elem_count() as u32, x.device())?;
                Ok((x.broadcast_mul(scale)?, count))
            },
        )?;
        let last = || {
            stage(
                |_: VarBuilder<'static>| Ok(()),
                |(): &(), (x, count): (Tensor, Tensor), _: &mut Cx<'_>| {
                    let weight = count.to_dtype(candle_core::DType::F32)?;
                    Ok(Loss::new(x.sum_all()?, weight))
                },
            )
        };
        let params = first.init(p, &meshes[0], 0)?;
        let model = Pipeline::first(first, &meshes[0], params)?;
        let mut model = model.then(last()?, &meshes[1], BTreeMap::new())?;
        model.compute_in(DType::Bf16)?;
        let shapes = MicrobatchShapes::new(ShapedArray::new(&[4], DType::F32));
        model.probe(p, &shapes)?;
        let mut sums = Vec::new();
        for value in [3.0f32, 5.0] {
            let scale = p.device_put(&MpmdArray::scalar(value), meshes[0].replicated())?;
            model.set_params(0, vec![scale])?;
            let x = MpmdArray::from_slice(&[4], &[1.0f32, 2.0, 3.0, 4.0])?;
            let x = p.device_put(&x, meshes[0].replicated())?;
            let schedule = Schedule::named("gpipe", 2, 1, None)?;
            let output = model.train_step(p, &schedule, vec![Microbatch::new(x.clone())])?;
            let read =
                |array: &MpmdArray| array.to_host().map(|host| host.unwrap().to_vec::<f32>());
            sums.push((read(&output.loss.sum)??, read(&output.loss.weight)??));
            assert_eq!(read(&output.gradients[0][0].1)??, [10.0]);
            // Another last stage computes in the same dtype.
            let mut other = model.with_last(last()?)?;
            other.probe(p, &shapes)?;
            let again = other.forward(p, Microbatch::new(x))?;
            assert_eq!(read(&again.sum)??, sums.last().unwrap().0);
        }
        Ok(sums)
    });
    let sums = results.into_iter().next().unwrap().unwrap();
    assert_eq!(sums, [(vec![30.0], vec![4.0]), (vec![50.0], vec![4.0])]);
}

/// Trains one step of two stages of the model, of which only parameters that match `trainable` are
/// trained. Returns (path, values) of the gradients.
fn gradients(trainable: [Option<&'static str>; 2]) -> Vec<(String, Vec<f32>)> {
    let results = Simulation::new(1, 2).run(|p| {
        let settings = Settings::default();
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        let (mut first, mut last) = (model::middle(0, settings), model::last(settings));
        first = match trainable[0] {
            Some(pattern) => first.trainable(pattern)?,
            None => first.frozen(),
        };
        if let Some(pattern) = trainable[1] {
            last = last.trainable(pattern)?;
        }
        let a = first.init(p, &meshes[0], model::SEED)?;
        let b = last.init(p, &meshes[1], model::SEED)?;
        let mut pipeline = Pipeline::first(first, &meshes[0], a)?.then(last, &meshes[1], b)?;
        pipeline.probe(p, &model::shapes(2))?;
        let batch = microbatches(p, [&meshes[0], &meshes[1]], 2, (0, MICROBATCHES))?;
        let schedule = Schedule::named("1f1b", 2, MICROBATCHES, None)?;
        let output = pipeline.train_step(p, &schedule, batch)?;
        let read = |(path, gradient): (String, MpmdArray)| {
            Ok((
                path,
                gradient.to_host()?.expect("one process").to_vec::<f32>()?,
            ))
        };
        output
            .gradients
            .into_iter()
            .flatten()
            .map(read)
            .collect::<Result<Vec<_>>>()
    });
    results.into_iter().next().expect("one process").unwrap()
}

#[test]
fn frozen_parameters_leave_the_other_gradients_unchanged() {
    let all = gradients([Some(""), Some("")]);
    let of = |pattern: &[&str]| -> Vec<(String, Vec<f32>)> {
        let trained = |(path, _): &&(String, Vec<f32>)| pattern.iter().any(|p| path.contains(p));
        all.iter().filter(trained).cloned().collect()
    };
    assert_eq!(all.len(), 2 + 24);
    assert_eq!(
        gradients([Some("norm"), Some("up")]),
        of(&["0.norm", "1.norm", "2.up", "3.up"])
    );
    // Nothing in the first stage is trained.
    assert_eq!(gradients([None, Some("head")]), of(&["head"]));
}

/// Adds up three inputs in a first stage with or without a state, and multiplies by 10 in a second.
fn sums(has_state: bool) -> Vec<Result<Vec<Vec<f32>>>> {
    Simulation::new(2, 2).run(|p| {
        let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
        let add_up = |(): &(), x: Tensor, cx: &mut Cx<'_>| {
            let Some(mut total) = cx.state::<Option<Tensor>>()? else {
                return Ok(x);
            };
            let sum = match total.take() {
                Some(total) => (total + x)?,
                None => x,
            };
            *total = Some(sum.clone());
            Ok(sum)
        };
        let first = stage(|_| Ok(()), add_up)?.frozen();
        let last = stage(|_| Ok(()), |(): &(), x: Tensor, _: &mut Cx<'_>| x * 10.0)?.frozen();
        let pipeline = Pipeline::first(first, &meshes[0], BTreeMap::new())?;
        let mut pipeline = pipeline.then(last, &meshes[1], BTreeMap::new())?;
        if has_state {
            let total = p.object(&meshes[0], |_| Ok(None::<Tensor>))?;
            pipeline.state(0, &total)?;
        }
        let mut found = Vec::new();
        for round in 1..=3u8 {
            let x = p.array_from_fn(f32s([1, 2]), meshes[0].replicated(), move |_, mut view| {
                Ok(view.fill(f32::from(round))?)
            })?;
            let microbatch = Microbatch::new(x);
            pipeline.probe(p, &microbatch.shapes())?;
            let y = pipeline.forward(p, microbatch)?.to_host()?;
            found.extend(y.map(|y| y.to_vec::<f32>()).transpose()?);
        }
        Ok(found)
    })
}

#[test]
fn state_is_kept_between_passes_and_absent_in_a_probe() {
    let found: Vec<_> = sums(true)
        .into_iter()
        .flat_map(|result| result.unwrap())
        .collect();
    assert_eq!(found, [[10.0; 2], [30.0; 2], [60.0; 2]]);
    for result in sums(false) {
        let error = result.unwrap_err().to_string();
        let expected = "the stage has no state: give it one with `Pipeline::state`";
        assert!(error.contains(expected), "{error}");
    }
}
