//! Metrics beside the loss, and what is done by them: stops, predictions.

use std::fs;
use std::path::Path;

use mpmd_core::Simulation;
use mpmd_core::aval::DType;
use mpmd_core::pipeline::{Loss, SideInput, SideShapes, Stage, StageContext, StageSignature};
use mpmd_core::prelude::*;
use mpmd_train::data::{Data as _, MicrobatchPlace};
use mpmd_train::optimizer::AdamW;
use mpmd_train::stop::StopFlag;
use mpmd_train::{Checkpoints, Rate, ReportAnswer, Run, RunOutcome};
use serde_json::Value;

use crate::stages::{Head, HeadParams, NEAR, read, trainer, windows};

/// The stage [`Head`], with its errors in place of its loss.
struct Errors;

impl Stage for Errors {
    type Params = HeadParams<MpmdArray>;
    type In = MpmdArray;
    type Out = MpmdArray;

    fn infer(
        &self,
        _: &HeadParams<ShapedArray>,
        x: &ShapedArray,
        _: &SideShapes,
    ) -> Result<StageSignature<ShapedArray>> {
        Ok(StageSignature::new(f32s([x.shape()[0] * x.shape()[1]])))
    }

    fn side(&self) -> SideInput {
        Head.side()
    }

    fn forward(
        &self,
        cx: &mut StageContext<'_, '_>,
        params: HeadParams<View<'_>>,
        x: View<'_>,
        mut y: ViewMut<'_>,
    ) -> Result<()> {
        let errors = Head::errors(&params, &x, &cx.side()?)?;
        y.as_mut_slice::<f32>()?
            .iter_mut()
            .zip(errors)
            .for_each(|(y, (_, error))| *y = error);
        Ok(())
    }

    fn backward(
        &self,
        _: &mut StageContext<'_, '_>,
        _: HeadParams<View<'_>>,
        _: View<'_>,
        _: Option<ViewMut<'_>>,
        _: HeadParams<ViewMut<'_>>,
    ) -> Result<()> {
        Err(Error::kernel("predictions are not trained"))
    }
}

/// Trains on this number of processes, and returns the outcome of each.
fn outcomes(processes: usize, options: impl Fn() -> Run<'static> + Sync) -> Vec<RunOutcome> {
    let results = Simulation::new(processes, 4).run(|p| {
        let mut trainer = trainer(p, true, AdamW::default())?
            .rate(Rate::Constant(0.02))
            .seed(4)
            .stop_on(&StopFlag::default());
        trainer.run(p, options().progress(false), &windows())
    });
    results.into_iter().map(Result::unwrap).collect()
}

fn lines(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect()
}

#[test]
fn metrics_are_means_alike_in_file_reports_and_outcome() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = None;
    for processes in [1, 2, 4] {
        let file = folder.path().join(format!("{processes}.jsonl"));
        let options = || {
            Run::steps(4)
                .evaluate_every(2)
                .metrics(&file)
                .on_step(|report| {
                    assert!((0.0..=1.0).contains(&report.metrics["near"]), "{report:?}");
                })
        };
        let all = outcomes(processes, options);
        let near = all[0].metrics["near"];
        assert!(near > 0.0 && near < 1.0, "{near}");
        for outcome in &all {
            assert_eq!(outcome.metrics, all[0].metrics);
            assert_eq!(
                outcome.last.as_ref().unwrap().metrics,
                all[0].last.as_ref().unwrap().metrics
            );
        }
        let found: Vec<Value> = lines(&file)
            .into_iter()
            .map(|line| line["metrics"]["near"].clone())
            .collect();
        assert_eq!(found.len(), 6);
        assert_eq!(found[5].as_f64(), Some(near));
        assert_eq!(
            first.get_or_insert(found.clone()),
            &found,
            "{processes} processes"
        );
    }
}

#[test]
fn reports_end_a_training_on_every_process() {
    for processes in [1, 2] {
        let by_step = || {
            Run::steps(20).on_step(|report| match report.step {
                4.. => ReportAnswer::Stop,
                _ => ReportAnswer::Continue,
            })
        };
        for outcome in outcomes(processes, by_step) {
            assert_eq!(
                (outcome.steps, outcome.stopped),
                (6, None),
                "two more were issued"
            );
            assert!(outcome.evaluation.is_some());
        }
        let mut evaluated = 0;
        let by_evaluation = move || {
            Run::steps(20)
                .evaluate_every(3)
                .on_evaluation(move |report| {
                    evaluated += 1;
                    assert_eq!(report.step, 3 * evaluated, "each model once");
                    if evaluated < 2 {
                        ReportAnswer::Continue
                    } else {
                        ReportAnswer::Stop
                    }
                })
        };
        for outcome in outcomes(processes, by_evaluation) {
            assert_eq!((outcome.steps, outcome.last.unwrap().step), (6, 6));
        }
    }
}

#[test]
fn predictions_are_of_the_trained_parameters() {
    for processes in [1, 2] {
        let results = Simulation::new(processes, 4).run(|p| {
            let mut trainer = trainer(p, true, AdamW::default())?
                .rate(Rate::Constant(0.02))
                .stop_on(&StopFlag::default());
            let data = windows();
            let outcome = trainer.run(p, Run::steps(5).progress(false), &data)?;
            let errors = trainer.predict(p, Errors, &data)?;
            assert_eq!(errors.len(), data.held_out_len());
            let (meshes, schedule) = (trainer.meshes(), trainer.schedule().clone());
            let batch = (0..4).map(|m| data.training(p, &meshes, MicrobatchPlace::new(0, 1, m, 4)));
            let batch = batch.collect::<Result<Vec<_>>>()?;
            let mut other = trainer.pipeline().with_last(Head)?;
            let error = other
                .train_step(p, &schedule, batch)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("made by `with_last` is not trained"),
                "{error}"
            );
            let mut all = Vec::new();
            for errors in &errors {
                all.extend(read(p, errors)?.unwrap_or_default());
            }
            let near = all.iter().filter(|error| error.abs() < NEAR).count() as f64;
            let share = (!all.is_empty()).then(|| near / all.len() as f64);
            Ok((outcome.metrics["near"], share))
        });
        let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
        assert_eq!(results[0].1, Some(results[0].0), "{processes} processes");
    }
}

#[test]
fn metric_that_is_no_float_scalar_is_refused_by_name() {
    let loss = || Loss::new(f32s([]), f32s([])).metric("near", f32s([]));
    loss().check().unwrap();
    for (aval, found) in [
        (f32s([16]), "f32[16]"),
        (ShapedArray::new(&[], DType::U8), "u8[]"),
    ] {
        let error = loss()
            .metric("right", aval)
            .check()
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("metric \"right\" of the loss is "),
            "{error}"
        );
        assert!(
            error.contains(&format!("{found}: it must be a scalar of f32 or f64")),
            "{error}"
        );
    }
}

#[test]
fn folders_that_differ_by_process_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let results = Simulation::new(2, 4).run(|p| {
        let mut trainer = trainer(p, true, AdamW::default())?.stop_on(&StopFlag::default());
        let own = folder.path().join(p.process().to_string());
        let run = Run::steps(1)
            .progress(false)
            .checkpoints(Checkpoints::new(own));
        trainer.run(p, run, &windows())
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(error.contains("process 0 names another folder"), "{error}");
    }
}

#[test]
fn seconds_of_a_metrics_file_never_fall() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("metrics.jsonl");
    let results = Simulation::new(1, 4).run(|p| {
        let mut trainer = trainer(p, true, AdamW::default())?.stop_on(&StopFlag::default());
        for steps in [20, 24] {
            trainer.run(
                p,
                Run::steps(steps).progress(false).metrics(&file),
                &windows(),
            )?;
        }
        Ok(())
    });
    results.into_iter().for_each(|result| result.unwrap());
    let seconds: Vec<f64> = lines(&file)
        .iter()
        .map(|line| line["seconds"].as_f64().unwrap())
        .collect();
    assert_eq!(seconds.len(), 26);
    assert!(seconds.is_sorted(), "{seconds:?}");
}

#[test]
fn full_disk_under_the_metrics_ends_no_training() {
    let results = Simulation::new(2, 4).run(|p| {
        let mut trainer = trainer(p, true, AdamW::default())?.stop_on(&StopFlag::default());
        let run = Run::steps(6)
            .evaluate_every(2)
            .progress(false)
            .metrics("/dev/full");
        trainer.run(p, run, &windows())
    });
    for outcome in results {
        let outcome = outcome.unwrap();
        assert!(
            outcome.steps == 6 && outcome.evaluation.is_some(),
            "{outcome:?}"
        );
    }
}
