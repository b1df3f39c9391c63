//! Reports of steps and evaluations, on every process.

use mpmd_core::prelude::*;
use mpmd_core::{Builder, Simulation};
use mpmd_train::data::{Data, MicrobatchPlace};
use mpmd_train::optimizer::{AdamW, Sgd};
use mpmd_train::{Rate, Run, StepReport};

use crate::stages::{MICROBATCHES, meshes, trainer, untimed, windows};

const RATE: Rate = Rate::WarmupLinear {
    peak: 0.1,
    floor: 0.0,
    warmup: 2,
    total: 6,
};

/// Issues all steps before it reads a report. Returns the reports on this process.
fn reports(p: &mut Program, replay: bool) -> Result<Vec<StepReport>> {
    let mut trainer = trainer(p, true, AdamW::default())?
        .rate(RATE)
        .clip(0.5)
        .replay(replay);
    let (data, meshes) = (windows(), meshes(p)?);
    let mut handles = Vec::new();
    for step in 1..=4 {
        let one = |m| data.training(p, &meshes, MicrobatchPlace::new(9, step, m, MICROBATCHES));
        let microbatches = (0..MICROBATCHES).map(one).collect::<Result<Vec<_>>>()?;
        handles.push(trainer.step(p, microbatches)?);
    }
    handles
        .into_iter()
        .map(|handle| handle.read().map(untimed))
        .collect()
}

#[test]
fn reports_have_the_same_bits_on_every_process() {
    let run = |processes: usize, replay: bool| -> Vec<Vec<StepReport>> {
        let simulation =
            Simulation::new(processes, 4).delays(3, std::time::Duration::from_millis(1));
        simulation
            .run(|p| reports(p, replay))
            .into_iter()
            .map(Result::unwrap)
            .collect()
    };
    let expected = run(1, false).remove(0);
    assert_eq!(
        expected
            .iter()
            .map(|report| report.step)
            .collect::<Vec<_>>(),
        [1, 2, 3, 4]
    );
    assert!(expected[3].loss < expected[0].loss, "{expected:?}");
    for report in &expected {
        assert_eq!((report.rate, report.stop), (RATE.at(report.step), None));
        assert_eq!(report.weight, (MICROBATCHES * 2 * 6) as f64);
        assert!(report.norm > 0.0);
    }
    for processes in [1, 2, 4] {
        for replay in [false, true] {
            for found in run(processes, replay) {
                assert_eq!(found, expected, "{processes} processes, replay {replay}");
            }
        }
    }
}

#[test]
fn evaluation_equals_the_loss_of_a_step() {
    for processes in [1, 2, 4] {
        let results = Simulation::new(processes, 4).run(|p| {
            let mut trainer = trainer(p, false, Sgd::default())?;
            let (data, meshes) = (windows(), meshes(p)?);
            let mut microbatches = || -> Result<Vec<_>> {
                (0..MICROBATCHES)
                    .map(|m| data.training(p, &meshes, MicrobatchPlace::new(0, 1, m, 4)))
                    .collect()
            };
            let (one, two) = (microbatches()?, microbatches()?);
            let evaluation = trainer.evaluate(p, one)?;
            let step = trainer.step(p, two)?.read()?;
            let evaluation = evaluation.read()?;
            assert_eq!((evaluation.weight, evaluation.stop), (step.weight, None));
            Ok((evaluation.loss(), step.loss))
        });
        for result in results {
            let (evaluated, trained) = result.unwrap();
            // A step adds the losses of its microbatches in single precision.
            assert!(
                (evaluated - trained).abs() < 1e-6 * trained,
                "{evaluated} {trained}"
            );
        }
    }
}

#[test]
fn step_with_a_loss_that_is_no_number_is_an_error() {
    let results = Simulation::new(2, 4).run(|p| {
        let mut trainer = trainer(p, true, Sgd::default())?.rate(Rate::Constant(f64::INFINITY));
        let (data, meshes) = (windows(), meshes(p)?);
        let mut reports = Vec::new();
        for step in 1..=2 {
            let one = |m| data.training(p, &meshes, MicrobatchPlace::new(0, step, m, 4));
            let microbatches = (0..MICROBATCHES).map(one).collect::<Result<Vec<_>>>()?;
            reports.push(trainer.step(p, microbatches)?.read());
        }
        Ok(reports)
    });
    for reports in results {
        let reports = reports.unwrap();
        assert!(reports[0].is_ok(), "{reports:?}");
        let said = reports[1].as_ref().unwrap_err().to_string();
        assert!(
            said.starts_with("step 2 of the training has loss NaN and gradients"),
            "{said}"
        );
    }
}

#[test]
fn dry_run_plans_a_few_steps_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("metrics.jsonl");
    let mut p = Builder::default().devices(4).dry_run(2).unwrap();
    let mut trainer = trainer(&mut p, true, AdamW::default()).unwrap();
    let run = Run::steps(1_000_000).evaluate_every(2).metrics(&file);
    let outcome = trainer.run(&mut p, run, &windows()).unwrap();
    assert_eq!(
        (outcome.steps, outcome.stopped, outcome.evaluation),
        (8, None, None)
    );
    assert!(!file.exists());
    p.finish().unwrap();
}
