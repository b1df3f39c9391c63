//! Trainings that lose processes and go on, in simulated time.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use mpmd_core::prelude::*;
use mpmd_core::{Commits, ProcessId, Simulation};
use mpmd_train::optimizer::AdamW;
use mpmd_train::stop::StopFlag;
use mpmd_train::{BestEvaluation, Checkpoints, Rate, Run};

use crate::stages::{params, trainer, windows};

const STEPS: u64 = 12;
const PROCESSES: usize = 4;

/// The losses and parameters of a process at the end.
struct Found {
    /// The step from which it went on in the last epoch.
    first: u64,
    /// The bits of the loss of each step since then, and of those that a commit had.
    losses: BTreeMap<u64, u64>,
    best: Option<BestEvaluation>,
    params: Vec<Option<Vec<f32>>>,
}

/// Trains, with all reports since the last commit, and checkpoints in `folder`.
fn train(p: &mut Program, commits: &Commits, folder: &Path) -> Result<Found> {
    let trainer = trainer(p, true, AdamW::default())?;
    let trainer = trainer.rate(Rate::Constant(0.02)).clip(1.0).seed(4);
    let mut trainer = trainer.stop_on(&StopFlag::default());
    let checkpoints = Checkpoints::new(folder);
    let first = trainer.resume(p, commits, Some(&checkpoints))?;
    let losses = RefCell::new(BTreeMap::new());
    let note = |step, loss: f64| {
        let before = losses.borrow_mut().insert(step, loss.to_bits());
        assert_eq!(before, None, "step {step} is reported twice");
    };
    let run = Run::steps(STEPS)
        .progress(false)
        .on_step(|report| note(report.step, report.loss));
    let run = run.metrics(folder.join("metrics")).evaluate_every(5);
    let outcome = trainer.run(p, run.checkpoints(checkpoints).save_every(4), &windows())?;
    assert!(outcome.evaluation.is_some());
    Ok(Found {
        first,
        losses: losses.into_inner(),
        best: trainer.best(),
        params: params(p, &trainer)?,
    })
}

/// Returns the numbers of the steps, of the evaluations, and of the epochs that began with a
/// recovery, in a file of metrics.
fn lines(folder: &Path) -> (Vec<u64>, Vec<u64>, Vec<u64>) {
    let text = std::fs::read_to_string(folder.join("metrics")).unwrap();
    let lines = text
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let (mut steps, mut evaluations, mut epochs) = (Vec::new(), Vec::new(), Vec::new());
    for line in lines {
        let step = line["step"].as_u64().unwrap();
        if let Some(epoch) = line["recovery"].as_u64() {
            let useful = line["useful"].as_f64().unwrap();
            assert!(
                line["reached"].as_u64() >= Some(step) && useful > 0.0 && useful < 1.0,
                "{line}"
            );
            epochs.push(epoch);
        } else if line.get("evaluation").is_some() {
            evaluations.push(step);
        } else {
            steps.push(step);
        }
    }
    (steps, evaluations, epochs)
}

/// Runs the training with these faults, and compares it with one that nothing disturbs. Returns the
/// step from which it went on, and the first step that was reported since.
fn goes_on_with(faults: impl Fn(Simulation) -> Simulation) -> (u64, u64) {
    let run = |simulation: Simulation| {
        let folder = tempfile::tempdir().unwrap();
        let (results, report) = simulation
            .seed(1)
            .run_recovering(1, |p, commits| train(p, commits, folder.path()));
        assert_eq!(report.left, [""; 0]);
        let errors: Vec<_> = results
            .iter()
            .filter_map(|result| result.as_ref().err())
            .collect();
        let errors = format!("{errors:?}");
        let found: Vec<Found> = results
            .into_iter()
            .filter_map(|result| result.ok()?)
            .collect();
        assert_eq!(found.len(), PROCESSES, "{errors}");
        let saved = Checkpoints::new(folder.path()).steps().unwrap();
        assert_eq!(
            saved.last(),
            Some(&STEPS),
            "a save may have been broken off: {saved:?}"
        );
        let every: Vec<u64> = (1..=STEPS).collect();
        let (steps, evaluations, epochs) = lines(folder.path());
        assert_eq!((steps, evaluations), (every, vec![5, 10, 12]));
        (found, epochs)
    };
    let simulation = || Simulation::new(PROCESSES, 4);
    let (mut expected, no_epochs) = run(simulation());
    let (mut found, epochs) = run(faults(simulation()));
    assert_eq!((no_epochs, epochs.first()), (vec![], Some(&2)));
    let all = expected[0].losses.clone();
    assert_eq!(
        all.keys().copied().collect::<Vec<_>>(),
        (1..=STEPS).collect::<Vec<_>>()
    );
    let (first, repeated) = (found[0].first, *found[0].losses.keys().next().unwrap());
    for Found { losses, best, .. } in &found {
        assert_eq!(*best, expected[0].best, "no evaluation counts twice");
        assert!(
            losses.iter().eq(all.range(repeated..)),
            "{losses:?}, {all:?}"
        );
    }
    let sorted = |found: &mut Vec<Found>| {
        let mut params: Vec<_> = found.drain(..).map(|found| found.params).collect();
        params.sort_by_key(|params| params.iter().position(Option::is_some));
        params
    };
    assert_eq!(sorted(&mut found), sorted(&mut expected));
    (first, repeated)
}

#[test]
fn training_loses_a_process_and_goes_on_with_the_same_bits() {
    let (first, repeated) = goes_on_with(|s| {
        s.lose_after(ProcessId(2), Duration::from_millis(60))
            .spare_after(Duration::ZERO)
    });
    // The commit has the last steps.
    assert!(first > 2 && repeated == first - 2, "{first}, {repeated}");
}

/// Without copies of both processes the last checkpoint is used.
#[test]
fn training_loses_both_copies_and_goes_on_from_a_checkpoint() {
    let (first, repeated) = goes_on_with(|s| {
        let at = Duration::from_millis(320);
        let all = (0..4).fold(s, |s, _| s.spare_after(Duration::ZERO));
        (1..4).fold(all, |s, process| s.lose_after(ProcessId(process), at))
    });
    assert_eq!(
        (first % 4, repeated),
        (0, first + 1),
        "a checkpoint each fourth step"
    );
}
