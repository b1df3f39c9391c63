//! The loop of a training: metrics, evaluations, stops and hooks.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};

use mpmd_core::pipeline::{Microbatch, Schedule};
use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;
use mpmd_core::{ProcessId, Simulation};
use mpmd_train::data::{Data, MicrobatchPlace};
use mpmd_train::optimizer::AdamW;
use mpmd_train::stop::StopFlag;
use mpmd_train::{BestEvaluation, Checkpoints, Rate, ReportAnswer, Run, RunOutcome, Trainer};
use serde_json::Value;

use crate::stages::{Embed, MICROBATCHES, params, pipeline_of, trainer, untimed, windows};

const SIGTERM: i32 = 15;

/// Held-out data that asks one process to stop when microbatch `at` is made.
struct Stopping<D> {
    data: D,
    at: usize,
    stop: Option<StopFlag>,
}

impl<D: Data<MpmdArray>> Data<MpmdArray> for Stopping<D> {
    fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        at: MicrobatchPlace,
    ) -> Result<Microbatch<MpmdArray>> {
        self.data.training(p, meshes, at)
    }

    fn held_out_len(&self) -> usize {
        self.data.held_out_len()
    }

    fn held_out(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        index: usize,
    ) -> Result<Microbatch<MpmdArray>> {
        if index == self.at {
            self.stop.iter().for_each(|stop| stop.set(SIGTERM));
        }
        self.data.held_out(p, meshes, index)
    }
}

/// Runs a training on every process. Returns outcome and parameters.
fn run(
    processes: usize,
    replay: bool,
    options: impl Fn() -> Run<'static> + Sync,
) -> Vec<(RunOutcome, Vec<Option<Vec<f32>>>)> {
    let results = Simulation::new(processes, 4).run(|p| {
        let trainer = trainer(p, true, AdamW::default())?;
        let trainer = trainer
            .rate(Rate::Constant(0.02))
            .clip(1.0)
            .seed(4)
            .replay(replay);
        let mut trainer = trainer.stop_on(&StopFlag::default());
        let outcome = trainer.run(p, options().progress(false), &windows())?;
        Ok((without_time(outcome), params(p, &trainer)?))
    });
    results.into_iter().map(Result::unwrap).collect()
}

/// Returns the outcome with a time of zero.
fn without_time(mut outcome: RunOutcome) -> RunOutcome {
    outcome.last = outcome.last.map(untimed);
    outcome
}

#[test]
fn outcome_is_the_same_on_any_number_of_processes() {
    let options = || Run::steps(6).evaluate_every(2);
    let (expected, values) = run(1, false, options).remove(0);
    assert_eq!((expected.steps, expected.stopped), (6, None));
    assert_eq!(expected.last.as_ref().unwrap().step, 6);
    assert!(expected.evaluation.unwrap() > 0.0);
    for (processes, replay) in [(1, true), (2, false), (2, true), (4, false)] {
        let all = run(processes, replay, options);
        assert!(
            all.iter().all(|(outcome, _)| *outcome == expected),
            "{processes}, {replay}"
        );
        assert_eq!(all[0].1, values, "{processes} processes, replay {replay}");
    }
}

#[test]
fn metrics_are_lines_of_json() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("metrics.jsonl");
    run(2, false, || Run::steps(4).evaluate_every(2).metrics(&file));
    let text = std::fs::read_to_string(&file).unwrap();
    let lines: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let steps: Vec<&Value> = lines.iter().filter(|line| line["loss"].is_f64()).collect();
    let numbers: Vec<u64> = steps
        .iter()
        .filter_map(|line| line["step"].as_u64())
        .collect();
    assert_eq!(numbers, [1, 2, 3, 4]);
    for line in &steps {
        assert!(line["norm"].is_f64() && line["seconds"].is_f64(), "{line}");
        assert_eq!(
            (line["rate"].as_f64(), line["tokens"].as_f64()),
            (Some(0.02), Some(48.0))
        );
    }
    let evaluations: Vec<u64> = lines
        .iter()
        .filter(|line| line["evaluation"].is_f64())
        .filter_map(|line| line["step"].as_u64())
        .collect();
    assert_eq!(evaluations, [2, 4]);
}

#[test]
fn flag_of_one_process_stops_all_after_the_same_step() {
    for (processes, stopped) in [(1, 0), (2, 1), (4, 2)] {
        let results = Simulation::new(processes, 4).run(|p| {
            let stop = StopFlag::default();
            let mut trainer = trainer(p, false, AdamW::default())?.stop_on(&stop);
            let me = p.process() == ProcessId(stopped);
            let seen = RefCell::new(Vec::new());
            let run = Run::steps(1000).progress(false).on_step(|report| {
                seen.borrow_mut().push(report.step);
                if me && report.step == 3 {
                    stop.set(SIGTERM);
                }
            });
            let outcome = trainer.run(p, run, &windows())?;
            let seen = seen.borrow().clone();
            assert_eq!(seen, (1..=outcome.steps).collect::<Vec<_>>());
            Ok(without_time(outcome))
        });
        let outcomes: Vec<RunOutcome> = results.into_iter().map(Result::unwrap).collect();
        assert!(
            outcomes.iter().all(|outcome| *outcome == outcomes[0]),
            "{outcomes:?}"
        );
        assert_eq!(
            (outcomes[0].stopped, outcomes[0].evaluation),
            (Some(SIGTERM), None)
        );
        // The report of a step is read after two further steps are issued.
        assert!((6..20).contains(&outcomes[0].steps), "{outcomes:?}");
    }
}

#[test]
fn flag_set_in_an_evaluation_stops_all_after_the_same_step() {
    let results = Simulation::new(4, 4).run(|p| {
        let stop = StopFlag::default();
        let here = p.process() == ProcessId(2);
        let data = Stopping {
            data: windows(),
            at: 20,
            stop: here.then(|| stop.clone()),
        };
        let mut trainer = trainer(p, false, AdamW::default())?.stop_on(&stop);
        trainer.run(p, Run::steps(1000).evaluate_every(5).progress(false), &data)
    });
    for result in results {
        let outcome = result.unwrap();
        assert_eq!((outcome.steps, outcome.stopped), (5, Some(SIGTERM)));
        assert_eq!((outcome.last.unwrap().step, outcome.evaluation), (5, None));
    }
}

#[test]
fn loss_that_is_not_finite_is_an_error_everywhere() {
    let results = Simulation::new(2, 4).run(|p| {
        let trainer = trainer(p, false, AdamW::default())?.rate(Rate::Constant(1e30));
        let mut trainer = trainer.stop_on(&StopFlag::default());
        trainer.run(p, Run::steps(50).progress(false), &windows())
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("of the training has loss"), "{error}");
    }
}

/// Runs a training of two processes after `before`. It keeps two checkpoints. Returns its error,
/// which both have, and the steps of the checkpoints.
fn spoiled(
    options: impl Fn() -> Run<'static> + Sync,
    rate: Rate,
    before: impl Fn(&mut Program, &mut Trainer<MpmdArray>) -> Result<()> + Sync,
) -> (String, Vec<u64>) {
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path()).keep(2);
    let results = Simulation::new(2, 4).run(|p| {
        let trainer = trainer(p, false, AdamW::default())?.rate(rate);
        let mut trainer = trainer.stop_on(&StopFlag::default());
        before(p, &mut trainer)?;
        trainer.run(
            p,
            options().progress(false).checkpoints(to.clone()),
            &windows(),
        )
    });
    let mut errors: Vec<String> = results
        .into_iter()
        .map(|r| r.unwrap_err().to_string())
        .collect();
    // A process that hears of the other's end first says so before that error.
    errors.sort_by_key(String::len);
    assert!(errors[1].ends_with(&errors[0]), "{errors:?}");
    (errors[0].clone(), to.steps().unwrap())
}

/// Returns a rate that is small up to step 4, and then `rate`.
fn small_then(rate: f64) -> Rate {
    Rate::WarmupCosine {
        peak: 0.01,
        floor: rate,
        warmup: 4,
        total: 5,
    }
}

fn spoil_last_stage(p: &mut Program, trainer: &mut Trainer<MpmdArray>) -> Result<()> {
    fill_with_nan(p, trainer, 1)
}

/// Fills the parameters of a stage with NaN.
fn fill_with_nan(p: &mut Program, trainer: &mut Trainer<MpmdArray>, stage: usize) -> Result<()> {
    let params = trainer
        .pipeline()
        .params(stage)
        .into_iter()
        .map(|(_, array)| {
            let sharding = array.sharding().expect("it is on devices").clone();
            p.array_from_fn(array.aval().clone(), &sharding, |_, mut v| {
                Ok(v.fill(f32::NAN)?)
            })
        });
    let params = params.collect::<Result<Vec<_>>>()?;
    trainer.pipeline_mut().set_params(stage, params)
}

#[test]
fn last_update_that_spoils_the_model_is_an_error_and_not_saved() {
    // The loss of the only step is from before its update.
    let (error, saves) = spoiled(|| Run::steps(1), Rate::Constant(1e39), |_, _| Ok(()));
    assert!(
        error.contains("the model after step 1 cannot be used"),
        "{error}"
    );
    assert!(error.contains("of stage 0 is not finite"), "{error}");
    assert_eq!(saves, [0; 0]);
}

#[test]
fn last_model_of_no_use_gets_no_checkpoint() {
    // Its parameters are finite, and no loss is.
    let (error, saves) = spoiled(|| Run::steps(1), Rate::Constant(1e30), |_, _| Ok(()));
    assert!(
        error.contains("the evaluation after step 1 has loss"),
        "{error}"
    );
    assert!(
        error.contains("the parameters of all stages are finite"),
        "{error}"
    );
    assert_eq!(saves, [0; 0]);
}

#[test]
fn spoiled_model_replaces_no_good_checkpoint() {
    for (rate, said) in [
        (1e39, "the model after step 5 cannot be used"),
        (1e30, "step 6 of the"),
    ] {
        let options = || Run::steps(50).save_every(1);
        let (error, saves) = spoiled(options, small_then(rate), |_, _| Ok(()));
        assert!(error.contains(said), "{error}");
        assert_eq!(saves, [3, 4], "{error}");
    }
}

#[test]
fn good_save_under_way_is_complete_after_an_error() {
    let options = || Run::steps(50).save_every(4);
    let (error, saves) = spoiled(options, small_then(1e39), |_, _| Ok(()));
    assert!(error.contains("step 6 of the training has loss"), "{error}");
    assert_eq!(saves, [4]);
}

#[test]
fn frozen_parameter_that_is_not_finite_is_named() {
    let results = Simulation::new(2, 4).run(|p| {
        let pipeline = pipeline_of(
            p,
            Embed {
                frozen: true,
                draws: false,
            },
            false,
        )?;
        let schedule = Schedule::one_f_one_b(2, MICROBATCHES)?;
        let trainer = Trainer::new(p, pipeline, schedule, AdamW::default())?;
        let mut trainer = trainer.stop_on(&StopFlag::default());
        fill_with_nan(p, &mut trainer, 0)?;
        trainer.run(p, Run::steps(3).progress(false), &windows())
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("step 1 of the training has loss NaN"),
            "{error}"
        );
        assert!(
            error.contains("of stage 0 is not finite, and it is not trained"),
            "{error}"
        );
    }
}

#[test]
fn evaluation_that_is_not_finite_names_step_and_stage() {
    let options = || Run::steps(4).evaluate_every(2);
    let (error, saves) = spoiled(options, Rate::Constant(1e39), |_, _| Ok(()));
    assert!(
        error.contains("the evaluation after step 2 has loss"),
        "{error}"
    );
    assert!(error.contains("of stage 0 is not finite"), "{error}");
    assert_eq!(saves, [0; 0]);
    let options = || Run::steps(4).evaluate_every(1);
    let (error, _) = spoiled(options, Rate::Constant(0.01), spoil_last_stage);
    assert!(
        error.contains("the evaluation after step 1 has loss NaN"),
        "{error}"
    );
    assert!(error.contains("of stage 1 is not finite"), "{error}");
}

#[test]
fn gradients_that_are_not_finite_change_no_parameter() {
    // So the stage that had them first is found.
    let (error, saves) = spoiled(|| Run::steps(4), Rate::Constant(0.01), spoil_last_stage);
    assert!(
        error.contains("step 1 of the training has loss NaN"),
        "{error}"
    );
    assert!(error.contains("of stage 1 is not finite"), "{error}");
    assert_eq!(saves, [0; 0]);
}

#[test]
fn run_continues_after_earlier_updates() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("metrics.jsonl");
    let results = Simulation::new(2, 4).run(|p| {
        let trainer = trainer(p, false, AdamW::default())?;
        let mut trainer = trainer.stop_on(&StopFlag::default());
        let options = |steps| Run::steps(steps).progress(false).metrics(&file);
        let first = trainer.run(p, options(3), &windows())?;
        let second = trainer.run(p, options(5), &windows())?;
        let none = trainer.run(p, Run::steps(5).progress(false), &windows())?;
        Ok([first.steps, second.steps, none.steps])
    });
    assert!(
        results
            .into_iter()
            .all(|result| result.unwrap() == [3, 5, 5])
    );
    // Two evaluations follow the steps.
    assert_eq!(
        std::fs::read_to_string(&file).unwrap().lines().count(),
        5 + 2
    );
}

/// Runs a training in which the loss stays the same, from the newest checkpoint. Returns
/// the number of updates, the step of the best evaluation, and the number of later evaluations.
fn without_progress(processes: usize, to: &Checkpoints, steps: u64) -> (u64, u64, u64) {
    let results = Simulation::new(processes, 4).run(|p| {
        let trainer = trainer(p, false, AdamW::default())?.rate(Rate::Constant(0.0));
        let mut trainer = trainer.stop_on(&StopFlag::default());
        trainer.restore(p, to)?;
        let run = Run::steps(steps)
            .evaluate_every(2)
            .patience(2)
            .checkpoints(to.clone())
            .save_every(2)
            .progress(false);
        let outcome = trainer.run(p, run, &windows())?;
        Ok((outcome.steps, trainer.best()))
    });
    let mut all = results.into_iter().map(|result| {
        let (steps, best) = result.unwrap();
        let best = best.unwrap();
        (steps, best.step, best.later)
    });
    let first = all.next().unwrap();
    assert!(
        all.all(|other| other == first),
        "all processes decide alike"
    );
    first
}

#[test]
fn patience_and_best_checkpoint_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path()).keep(1).keep_best();
    assert_eq!(without_progress(1, &to, 3), (3, 2, 1));
    assert_eq!(to.steps().unwrap(), [2, 3]);
    assert_eq!(without_progress(2, &to, 100), (4, 2, 2));
    assert_eq!(to.steps().unwrap(), [2, 4]);
    // It has ended already, and evaluates the same model once more.
    assert_eq!(without_progress(4, &to, 100), (4, 2, 2));
    assert_eq!(to.steps().unwrap(), [2, 4]);
}

/// Creates a trainer whose loss falls, and restores the newest checkpoint.
fn learning(p: &mut Program, to: &Checkpoints) -> Result<Trainer<MpmdArray>> {
    let trainer = trainer(p, false, AdamW::default())?.rate(Rate::Constant(0.02));
    let mut trainer = trainer.stop_on(&StopFlag::default());
    trainer.restore(p, to)?;
    Ok(trainer)
}

#[test]
fn checkpoint_of_the_last_step_has_its_evaluation() {
    type End = fn() -> Run<'static>;
    let stop_early = || {
        Run::steps(100).evaluate_every(50).on_step(|report| {
            if report.step == 2 {
                ReportAnswer::Stop
            } else {
                ReportAnswer::Continue
            }
        })
    };
    let ends: [(End, u64); 3] = [
        (|| Run::steps(4).evaluate_every(2), 4),
        (stop_early, 2),
        (|| Run::steps(100).evaluate_every(50).seconds(1e-9), 2),
    ];
    for (end, last) in ends {
        let folder = tempfile::tempdir().unwrap();
        let to = Checkpoints::new(folder.path()).keep(1).keep_best();
        let results = Simulation::new(2, 4).run(|p| {
            let mut first = learning(p, &to)?;
            let run = end().checkpoints(to.clone()).save_every(2).progress(false);
            first.run(p, run, &windows())?;
            Ok((first.best(), learning(p, &to)?.best()))
        });
        for result in results {
            let (best, restored) = result.unwrap();
            assert_eq!(best.map(|best| best.step), Some(last), "the loss falls");
            assert_eq!(restored, best);
        }
        assert_eq!(to.steps().unwrap(), [last]);
    }
}

/// Trains to step 8 from the newest checkpoint. A signal ends the training when held-out microbatch
/// `at` is made. Returns the steps of its evaluations, and the best one.
fn stopped_in_evaluation(to: &Checkpoints, at: usize) -> (Vec<u64>, Option<BestEvaluation>) {
    let results = Simulation::new(2, 4).run(|p| {
        let mut trainer = learning(p, to)?;
        let stop = StopFlag::default();
        trainer = trainer.stop_on(&stop);
        let data = Stopping {
            data: windows(),
            at,
            stop: Some(stop),
        };
        let evaluated = RefCell::new(Vec::new());
        let run = Run::steps(8)
            .evaluate_every(2)
            .checkpoints(to.clone())
            .save_every(2)
            .progress(false)
            .on_evaluation(|report| evaluated.borrow_mut().push(report.step));
        trainer.run(p, run, &data)?;
        Ok((evaluated.into_inner(), trainer.best()))
    });
    let mut all = results.into_iter().map(Result::unwrap);
    let first = all.next().unwrap();
    assert!(all.all(|other| other == first), "all processes alike");
    first
}

#[test]
fn evaluation_that_a_signal_cuts_off_is_repeated() {
    let [first, second] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let without_break = Checkpoints::new(first.path());
    let (evaluated, best) = stopped_in_evaluation(&without_break, usize::MAX);
    assert_eq!(evaluated, [2, 4, 6, 8]);

    let to = Checkpoints::new(second.path());
    let (none, _) = stopped_in_evaluation(&to, 20);
    assert_eq!((none, to.steps().unwrap()), (vec![], vec![2]));
    assert_eq!(stopped_in_evaluation(&to, usize::MAX), (evaluated, best));
    // A model that is evaluated already is evaluated once more at the end alone.
    let (again, same) = stopped_in_evaluation(&to, usize::MAX);
    assert_eq!((again, same), (vec![8], best));
}

#[test]
fn best_models_are_given_to_the_caller() {
    let results = Simulation::new(2, 4).run(|p| {
        let trainer = trainer(p, false, AdamW::default())?.rate(Rate::Constant(0.02));
        let given = Arc::new(Mutex::new(Vec::new()));
        let sink = given.clone();
        let mut trainer = trainer
            .stop_on(&StopFlag::default())
            .after_best(move |_, best, _| {
                sink.lock().unwrap().push((best.step, best.loss));
                Ok(())
            });
        let evaluated = RefCell::new(Vec::new());
        let run = Run::steps(7)
            .evaluate_every(2)
            .progress(false)
            .on_evaluation(|report| evaluated.borrow_mut().push((report.step, report.loss())));
        trainer.run(p, run, &windows())?;
        let given = given.lock().unwrap().clone();
        Ok((given, evaluated.into_inner(), trainer.best()))
    });
    for result in results {
        let (given, evaluated, best) = result.unwrap();
        let mut lowest = f64::INFINITY;
        let mut expected = Vec::new();
        for (step, loss) in evaluated {
            if loss < lowest {
                lowest = loss;
                expected.push((step, loss));
            }
        }
        assert!(expected.len() > 1, "the model learns: {expected:?}");
        assert_eq!(given, expected);
        let best = best.unwrap();
        assert_eq!(expected.last(), Some(&(best.step, best.loss)));
    }
}
