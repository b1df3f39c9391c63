//! Optimisers of a pipeline against plain computations, and their state.

use std::collections::BTreeMap;

use mpmd_core::Simulation;
use mpmd_core::pipeline::{Microbatch, Schedule};
use mpmd_core::prelude::*;
use mpmd_train::data::{Data, MicrobatchPlace};
use mpmd_train::optimizer::{
    AdamStep, AdamW, Optimizer, OptimizerSettings, Sgd, UpdateRule, clip_factor, square_sum,
};
use mpmd_train::stop::StopFlag;
use mpmd_train::{Rate, Run, Trainer};

use crate::stages::{
    Embed, MICROBATCHES, meshes, params, pipeline, pipeline_of, read, trainer, untimed, windows,
};

const SGD: Sgd = Sgd {
    momentum: 0.9,
    decay: 0.01,
    nesterov: true,
};

/// Returns the parameters after three steps of the optimiser, and those of plain loops over whole
/// arrays with the same gradients. Both are from process 0.
fn updated(rule: UpdateRule, clip: f64) -> [Vec<Vec<f32>>; 2] {
    let results = Simulation::new(2, 4).run(|p| {
        let mut pipeline = pipeline(p, true)?;
        let mut optimizer = Optimizer::new(p, &pipeline, OptimizerSettings::new(rule).clip(clip))?;
        let (data, meshes) = (windows(), meshes(p)?);
        let schedule = Schedule::one_f_one_b(2, MICROBATCHES)?;
        let (mut found, mut plain) = (Vec::new(), Vec::new());
        let mut state: Vec<[Vec<f32>; 2]> = Vec::new();
        for step in 1..=3 {
            let one = |m| data.training(p, &meshes, MicrobatchPlace::new(0, step, m, 4));
            let microbatches = (0..MICROBATCHES).map(one).collect::<Result<Vec<_>>>()?;
            let output = pipeline.train_step(p, &schedule, microbatches)?;
            let mut before = Vec::new();
            for stage in 0..2 {
                let params = pipeline.params(stage);
                for ((_, param), (_, gradient)) in params.iter().zip(&output.gradients[stage]) {
                    before.push((read(p, param)?, read(p, gradient)?));
                }
            }
            let weight = read(p, &output.loss.weight)?;
            let figures = optimizer.step(p, &mut pipeline, output, 0.01)?;
            drop(figures);
            found.clear();
            for stage in 0..2 {
                for (_, param) in pipeline.params(stage) {
                    found.extend(read(p, &param)?);
                }
            }
            let Some(weight) = weight.map(|weight| f64::from(weight[0])) else {
                continue;
            };
            let before: Vec<(Vec<f32>, Vec<f32>)> = before
                .into_iter()
                .map(|(w, g)| (w.unwrap(), g.unwrap()))
                .collect();
            let sums = before.iter().map(|(_, gradient)| square_sum(gradient));
            let factor = clip_factor(sums, clip * weight).0 / weight;
            state.resize(before.len(), [Vec::new(), Vec::new()]);
            plain = before;
            for (leaf, ((w, gradient), [one, two])) in plain.iter_mut().zip(&mut state).enumerate()
            {
                one.resize(w.len(), 0.0);
                two.resize(w.len(), 0.0);
                // Only the table is a matrix.
                let decays = leaf == 0;
                match rule {
                    UpdateRule::AdamW(adamw) => {
                        let decay = if decays { adamw.decay } else { 0.0 };
                        let step = AdamStep {
                            number: step,
                            rate: 0.01,
                            gradient_factor: factor,
                        };
                        AdamW { decay, ..adamw }.update(step, w, one, two, gradient);
                    }
                    UpdateRule::Sgd(sgd) => {
                        let decay = if decays { sgd.decay } else { 0.0 };
                        let sum = (sgd.momentum != 0.0).then_some(&mut one[..]);
                        Sgd { decay, ..sgd }.update(0.01, factor, w, sum, gradient);
                    }
                }
            }
        }
        Ok([found, plain.into_iter().map(|(w, _)| w).collect()])
    });
    results.into_iter().next().unwrap().unwrap()
}

#[test]
fn updates_equal_those_of_plain_loops() {
    for rule in [AdamW::default().into(), SGD.into(), Sgd::default().into()] {
        // The first limit clips every step, the second none.
        for clip in [1e-3, 1e3] {
            let [found, plain] = updated(rule, clip);
            assert_eq!(found.len(), 3);
            for (found, plain) in found.iter().flatten().zip(plain.iter().flatten()) {
                // The sums over two devices round differently from one sum.
                let near = (found - plain).abs() <= 1e-6 * plain.abs().max(1e-3);
                assert!(near, "{rule:?}, {clip}: {found} {plain}");
            }
        }
    }
}

#[test]
fn sharded_parameters_get_the_same_bits() {
    let run = |processes: usize, sharded: bool, rule: UpdateRule| {
        let results = Simulation::new(processes, 4).run(|p| {
            let mut trainer = trainer(p, sharded, rule)?.rate(Rate::Constant(0.01));
            let (data, meshes) = (windows(), meshes(p)?);
            for step in 1..=3 {
                let one = |m| data.training(p, &meshes, MicrobatchPlace::new(0, step, m, 4));
                let microbatches = (0..MICROBATCHES).map(one).collect::<Result<Vec<_>>>()?;
                trainer.step(p, microbatches)?.read()?;
            }
            params(p, &trainer)
        });
        results.into_iter().next().unwrap().unwrap()
    };
    for rule in [AdamW::default().into(), SGD.into()] {
        let whole = run(1, false, rule);
        assert!(whole.iter().all(Option::is_some));
        for processes in [1, 2, 4] {
            assert_eq!(
                run(processes, true, rule),
                whole,
                "{processes} processes, {rule:?}"
            );
        }
    }
}

#[test]
fn state_is_named_and_continues_a_training() {
    let results = Simulation::new(2, 4).run(|p| {
        let (data, meshes) = (windows(), meshes(p)?);
        let steps = |p: &mut Program, trainer: &mut mpmd_train::Trainer<MpmdArray>, steps| {
            for step in steps {
                let one = |m| data.training(p, &meshes, MicrobatchPlace::new(0, step, m, 4));
                let microbatches = (0..MICROBATCHES).map(one).collect::<Result<Vec<_>>>()?;
                trainer.step(p, microbatches)?.read()?;
            }
            Ok::<(), Error>(())
        };
        let mut whole = trainer(p, true, AdamW::default())?;
        steps(p, &mut whole, 1..4)?;
        let expected = params(p, &whole)?;

        let mut first = trainer(p, true, AdamW::default())?;
        steps(p, &mut first, 1..3)?;
        let mut second = trainer(p, true, AdamW::default())?;
        for stage in 0..2 {
            let arrays = first
                .pipeline()
                .params(stage)
                .into_iter()
                .map(|(_, array)| array);
            second.pipeline_mut().set_params(stage, arrays.collect())?;
            let mut state = first.optimizer().state(stage);
            state.reverse();
            second.optimizer_mut().set_state(stage, state)?;
        }
        second.optimizer_mut().set_updates(first.steps());
        steps(p, &mut second, 3..4)?;
        assert_eq!(params(p, &second)?, expected);
        assert_eq!(second.steps(), 3);

        let names: Vec<String> = second
            .optimizer()
            .state(1)
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        let wrong = vec![(
            "mean/x".to_owned(),
            second.pipeline().params(1)[0].1.clone(),
        )];
        let error = second.optimizer_mut().set_state(1, wrong).unwrap_err();
        Ok((names, error.to_string()))
    });
    for result in results {
        let (names, error) = result.unwrap();
        assert_eq!(names, ["mean/w", "mean/b", "square/w", "square/b"]);
        assert!(error.contains("there is no array \"mean/w\""), "{error}");
    }
}

#[test]
fn predicate_chooses_the_decaying_parameters() {
    let after_a_step = |decay: f64, decays: fn(&str, &[usize]) -> bool| {
        let results = Simulation::new(1, 4).run(|p| {
            let adamw = AdamW {
                decay,
                ..AdamW::default()
            };
            let settings = OptimizerSettings::new(adamw).decays(decays);
            let mut trainer = trainer(p, false, settings)?;
            let (data, meshes) = (windows(), meshes(p)?);
            let one = |m| data.training(p, &meshes, MicrobatchPlace::new(0, 1, m, 4));
            let microbatches = (0..MICROBATCHES).map(one).collect::<Result<Vec<_>>>()?;
            trainer.step(p, microbatches)?.read()?;
            params(p, &trainer)
        });
        results.into_iter().next().unwrap().unwrap()
    };
    let none = after_a_step(0.0, |_, _| true);
    let only_w = after_a_step(0.5, |path, shape| path == "w" && shape == [4]);
    let differ: Vec<bool> = none.iter().zip(&only_w).map(|(a, b)| a != b).collect();
    assert_eq!(differ, [false, true, false]);
}

#[test]
fn other_dtypes_are_refused() {
    let results = Simulation::new(1, 4).run(|p| {
        let meshes = meshes(p)?;
        let table = MpmdArray::from_slice(&[2], &[1i32, 2])?;
        let table = p.device_put(&table, meshes[0].replicated())?;
        let pipeline = mpmd_core::pipeline::Pipeline::first(Embed::default(), &meshes[0], table)?;
        Ok(Optimizer::new(p, &pipeline, AdamW::default())
            .unwrap_err()
            .to_string())
    });
    let error = results.into_iter().next().unwrap().unwrap();
    assert!(
        error.contains("i32[2]") && error.contains("f32 and f64"),
        "{error}"
    );
}

#[test]
fn frozen_parameters_have_no_state_and_stay() {
    let results = Simulation::new(2, 4).run(|p| {
        let embed = Embed {
            frozen: true,
            draws: false,
        };
        let pipeline = pipeline_of(p, embed, true)?;
        let schedule = Schedule::one_f_one_b(2, MICROBATCHES)?;
        let trainer = Trainer::new(p, pipeline, schedule, AdamW::default())?;
        let before = params(p, &trainer)?;
        let run = Run::steps(3).progress(false);
        let mut trainer = trainer.stop_on(&StopFlag::default());
        trainer.run(p, run, &windows())?;
        let after = params(p, &trainer)?;
        let names: Vec<usize> = (0..2)
            .map(|stage| trainer.optimizer().state(stage).len())
            .collect();
        Ok((before, after, names))
    });
    let (before, after, names) = results.into_iter().next().unwrap().unwrap();
    assert_eq!((&before[0], names), (&after[0], vec![0, 4]));
    assert!(before[1] != after[1] && before[2] != after[2]);
}

#[test]
fn stage_that_draws_gets_a_key_in_every_microbatch() {
    let run = |processes: usize, replay: bool, seed: u64| {
        let results = Simulation::new(processes, 4).run(|p| {
            let pipeline = pipeline_of(
                p,
                Embed {
                    frozen: false,
                    draws: true,
                },
                false,
            )?;
            let schedule = Schedule::one_f_one_b(2, MICROBATCHES)?;
            let trainer = Trainer::new(p, pipeline, schedule, AdamW::default())?;
            let mut trainer = trainer
                .seed(seed)
                .replay(replay)
                .stop_on(&StopFlag::default());
            Ok(trainer
                .run(p, Run::steps(3).progress(false), &windows())?
                .last
                .map(untimed))
        });
        results.into_iter().next().unwrap().unwrap()
    };
    let expected = run(1, false, 1);
    assert_eq!(run(2, true, 1), expected);
    assert_ne!(run(1, false, 2), expected);
}

#[test]
fn step_without_items_has_gradients_of_zero() {
    let run = |rule: UpdateRule, clip: f64| {
        let results = Simulation::new(2, 4).run(|p| {
            let settings = OptimizerSettings::new(rule).clip(clip);
            let mut trainer = trainer(p, false, settings)?.rate(Rate::Constant(0.01));
            let before = params(p, &trainer)?;
            let (meshes, mut microbatches) = (meshes(p)?, Vec::new());
            let tokens = MpmdArray::from_slice(&[2, 6], &[1u32; 12])?;
            let weights = MpmdArray::from_slice(&[2, 6], &[0.0f32; 12])?;
            for _ in 0..MICROBATCHES {
                let x = p.device_put(&tokens, meshes[0].replicated())?;
                let targets = p.device_put(&tokens, meshes[1].replicated())?;
                let weights = p.device_put(&weights, meshes[1].replicated())?;
                let side = [("targets", targets), ("weights", weights)];
                let side = BTreeMap::from(side.map(|(name, array)| (name.to_owned(), array)));
                microbatches.push(Microbatch::new(x).side(1, side));
            }
            let report = trainer.step(p, microbatches)?.read()?;
            Ok((before, params(p, &trainer)?, untimed(report)))
        });
        results.into_iter().next().unwrap().unwrap()
    };
    let rules: [UpdateRule; 2] = [
        AdamW {
            decay: 0.0,
            ..AdamW::default()
        }
        .into(),
        Sgd::default().into(),
    ];
    for (rule, clip) in rules
        .into_iter()
        .flat_map(|rule| [(rule, f64::INFINITY), (rule, 1.0)])
    {
        let (before, after, report) = run(rule, clip);
        assert_eq!(
            (report.loss, report.weight, report.norm),
            (0.0, 0.0, 0.0),
            "{rule:?}"
        );
        assert_eq!(after, before, "{rule:?}, {clip}");
    }
}
