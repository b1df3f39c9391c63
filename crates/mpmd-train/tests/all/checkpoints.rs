//! Checkpoints of trainings: restored to other processes, stages and shardings.

use std::path::Path;
use std::time::{Duration, Instant};

use mpmd_core::pipeline::Schedule;
use mpmd_core::prelude::*;
use mpmd_core::{Builder, ProcessId, Simulation};
use mpmd_train::optimizer::{AdamW, Sgd};
use mpmd_train::stop::StopFlag;
use mpmd_train::{Checkpoints, Rate, Run, StepReport, Trainer};
use safetensors::SafeTensors;

use crate::chain::{self, chain};
use crate::stages::{Embed, MICROBATCHES, params, pipeline_of, read, trainer, windows};

/// Trains until `steps`. Returns (step, bits of the loss) of each step of the run.
fn train(
    trainer: &mut Trainer<MpmdArray>,
    p: &mut Program,
    steps: u64,
    options: impl for<'a> Fn(Run<'a>) -> Run<'a>,
) -> Result<Vec<(u64, u64)>> {
    let mut losses = Vec::new();
    let note = |report: &StepReport| losses.push((report.step, report.loss.to_bits()));
    let run = options(Run::steps(steps).progress(false)).on_step(note);
    trainer.run(p, run, &windows())?;
    Ok(losses)
}

/// Runs `program` on every process. Returns the results, which must be equal.
fn on_all<T: std::fmt::Debug + PartialEq + Send>(
    processes: usize,
    program: impl Fn(&mut Program) -> Result<T> + Sync,
) -> T {
    let results = Simulation::new(processes, 4).run(|p| program(p));
    let mut results: Vec<T> = results.into_iter().map(Result::unwrap).collect();
    assert!(
        results.iter().all(|result| *result == results[0]),
        "{results:?}"
    );
    results.remove(0)
}

#[test]
fn restored_training_has_equal_bits_on_other_processes() {
    let expected = on_all(1, |p| train(&mut chain(p, 4, false)?, p, 12, |run| run));
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path());
    let mut found = Vec::new();
    for (processes, stages, restored, steps) in [
        (1, 1, None, 4),
        (2, 2, Some(4), 6),
        (4, 4, Some(6), 8),
        (2, 4, Some(8), 9),
        (1, 2, Some(9), 12),
    ] {
        found.extend(on_all(processes, |p| {
            let mut trainer = chain(p, stages, false)?;
            assert_eq!(trainer.restore(p, &to)?, restored);
            assert_eq!(trainer.steps(), restored.unwrap_or(0));
            train(&mut trainer, p, steps, |run| run.checkpoints(to.clone()))
        }));
    }
    assert_eq!(found, expected);
    assert_eq!(to.steps().unwrap(), [4, 6, 8, 9, 12]);
}

#[test]
fn seed_of_the_checkpoint_continues_the_random_keys() {
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path());
    let trainer = |p: &mut Program, seed: u64| -> Result<_> {
        let pipeline = pipeline_of(
            p,
            Embed {
                frozen: false,
                draws: true,
            },
            true,
        )?;
        let schedule = Schedule::one_f_one_b(2, MICROBATCHES)?;
        let settings = Sgd {
            momentum: 0.5,
            ..Sgd::default()
        };
        let trainer = Trainer::new(p, pipeline, schedule, settings)?.seed(seed);
        Ok(trainer.stop_on(&StopFlag::default()))
    };
    let expected = on_all(1, |p| train(&mut trainer(p, 5)?, p, 6, |run| run));
    on_all(2, |p| {
        train(&mut trainer(p, 5)?, p, 3, |run| run.checkpoints(to.clone()))
    });
    let found = on_all(4, |p| {
        let mut trainer = trainer(p, 6)?;
        trainer.restore(p, &to)?;
        train(&mut trainer, p, 6, |run| run)
    });
    assert_eq!(found, expected[3..]);
}

#[test]
fn other_shardings_have_equal_values_and_close_losses() {
    let folder = tempfile::tempdir().unwrap();
    let new = |p: &mut Program, sharded: bool| -> Result<_> {
        let trainer = trainer(p, sharded, AdamW::default())?;
        Ok(trainer
            .rate(Rate::Constant(0.01))
            .clip(0.5)
            .stop_on(&StopFlag::default()))
    };
    for (from, into) in [(false, true), (true, false)] {
        let to = Checkpoints::new(folder.path().join(from.to_string()));
        let saved = Simulation::new(2, 4).run(|p| {
            let mut trainer = new(p, from)?;
            train(&mut trainer, p, 5, |run| run.checkpoints(to.clone()))?;
            let values = params(p, &trainer)?;
            Ok((values, train(&mut trainer, p, 55, |run| run)?))
        });
        let restored = Simulation::new(4, 4).run(|p| {
            let mut trainer = new(p, into)?;
            trainer.restore(p, &to)?;
            let values = params(p, &trainer)?;
            Ok((values, train(&mut trainer, p, 55, |run| run)?))
        });
        let (expected, found) = (saved[0].as_ref().unwrap(), restored[0].as_ref().unwrap());
        assert_eq!(found.0, expected.0);
        assert_eq!(found.1.len(), 50);
        for (found, expected) in found.1.iter().zip(&expected.1) {
            let [loss, other] = [found.1, expected.1].map(f64::from_bits);
            assert!(
                (loss - other).abs() < 1e-5,
                "step {}: {loss} and {other}",
                found.0
            );
        }
    }
}

#[test]
fn tied_parameters_are_saved_once_and_restored() {
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path());
    let tied = |p: &mut Program| -> Result<_> {
        let mut pipeline = chain::pipeline(p, 2, false)?;
        pipeline.tie((0, "layers.1"), (1, "layers.3"))?;
        let schedule = Schedule::one_f_one_b(2, MICROBATCHES)?;
        let trainer = Trainer::new(p, pipeline, schedule, AdamW::default())?;
        Ok(trainer.stop_on(&StopFlag::default()))
    };
    let expected = on_all(2, |p| train(&mut tied(p)?, p, 6, |run| run));
    on_all(4, |p| {
        train(&mut tied(p)?, p, 3, |run| run.checkpoints(to.clone()))
    });
    let found = on_all(2, |p| {
        let mut trainer = tied(p)?;
        trainer.restore(p, &to)?;
        train(&mut trainer, p, 6, |run| run)
    });
    assert_eq!(found, expected[3..]);
    let names = saved_names(&folder.path().join("step-00000003/model.safetensors"));
    assert!(names.contains(&"layers.1".to_owned()) && !names.contains(&"layers.3".to_owned()));
}

fn saved_names(file: &Path) -> Vec<String> {
    let bytes = std::fs::read(file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.names().into_iter().map(str::to_owned).collect()
}

#[test]
fn several_files_are_read_by_the_safetensors_crate() {
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path()).file_bytes(100);
    let values = Simulation::new(2, 4).run(|p| {
        let mut trainer = chain(p, 2, false)?;
        train(&mut trainer, p, 2, |run| run.checkpoints(to.clone()))?;
        let mut all = Vec::new();
        for stage in 0..2 {
            for (name, array) in trainer.pipeline().params(stage) {
                all.push((name, read(p, &array)?));
            }
            for (name, array) in trainer.optimizer().state(stage) {
                all.push((format!("optimizer/{name}"), read(p, &array)?));
            }
        }
        assert_eq!(chain(p, 2, false)?.restore(p, &to)?, Some(2));
        Ok(all)
    });
    let files = folder.path().join("step-00000002");
    let index = std::fs::read(files.join("model.safetensors.index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let map = index["weight_map"].as_object().unwrap();
    assert_eq!(map.len(), 3 * chain::LAYERS);
    for (name, expected) in values.into_iter().next().unwrap().unwrap() {
        let bytes = std::fs::read(files.join(map[&name].as_str().unwrap())).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let found = file.tensor(&name).unwrap();
        let (found, _) = found.data().as_chunks::<4>();
        let found: Vec<f32> = found
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        assert_eq!(Some(found), expected, "{name}");
    }
}

#[test]
fn run_saves_while_it_trains_and_keeps_the_newest() {
    let folder = tempfile::tempdir().unwrap();
    for (processes, every) in [(1, 1), (2, 3), (4, 2)] {
        let to = Checkpoints::new(folder.path().join(processes.to_string())).keep(2);
        let expected = on_all(1, |p| train(&mut chain(p, 4, false)?, p, 13, |run| run));
        let found = on_all(processes, |p| {
            train(
                &mut chain(p, 4, false)?.replay(processes == 2),
                p,
                13,
                |run| run.checkpoints(to.clone()).save_every(every),
            )
        });
        assert_eq!(found, expected);
        let last = 12 / every * every;
        assert_eq!(to.steps().unwrap(), [last, 13]);
        let entries = std::fs::read_dir(folder.path().join(processes.to_string())).unwrap();
        assert_eq!(
            entries.count(),
            5,
            "two manifests, two folders and the lock"
        );
        // An older step restores too.
        on_all(2, |p| {
            let mut trainer = chain(p, 1, false)?;
            assert_eq!(trainer.restore(p, &to.clone().at(last))?, Some(last));
            let rest = train(&mut trainer, p, 13, |run| run)?;
            assert_eq!(rest, expected[last as usize..]);
            Ok(())
        });
    }
}

#[test]
fn stopped_run_saves_its_last_step() {
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path());
    let steps = on_all(4, |p| {
        let stop = StopFlag::default();
        let me = p.process() == ProcessId(2);
        let mut trainer = chain(p, 4, false)?.stop_on(&stop);
        let run = Run::steps(1000)
            .progress(false)
            .checkpoints(to.clone())
            .on_step(|report| {
                if me && report.step == 3 {
                    stop.set(15);
                }
            });
        let outcome = trainer.run(p, run, &windows())?;
        assert_eq!(outcome.stopped, Some(15));
        Ok(outcome.steps)
    });
    assert_eq!(to.steps().unwrap(), [steps]);
}

#[test]
fn equal_paths_in_two_stages_are_named_by_stage() {
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path());
    let expected = on_all(2, |p| train(&mut chain(p, 2, true)?, p, 4, |run| run));
    on_all(1, |p| {
        train(&mut chain(p, 2, true)?, p, 2, |run| {
            run.checkpoints(to.clone())
        })
    });
    let found = on_all(2, |p| {
        let mut trainer = chain(p, 2, true)?;
        trainer.restore(p, &to)?;
        train(&mut trainer, p, 4, |run| run)
    });
    assert_eq!(found, expected[2..]);
    let names = saved_names(&folder.path().join("step-00000002/model.safetensors"));
    assert!(
        names.contains(&"stage.1.optimizer/mean/layers.0".to_owned()),
        "{names:?}"
    );
    let said = on_all(2, |p| {
        let error = chain(p, 4, true)?.restore(p, &to).unwrap_err();
        Ok(error.to_string())
    });
    let expected = "step-00000002.json: its arrays are named by stage, since stages have \
                    parameters of one path. So it restores to 2 stages only, and the training \
                    has 4";
    assert!(said.ends_with(expected), "{said}");
}

#[test]
fn dry_run_issues_saves_and_writes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("checkpoints");
    let operations = |to: Option<Checkpoints>| {
        let mut p = Builder::default().devices(4).dry_run(2).unwrap();
        let mut trainer = chain(&mut p, 2, false).unwrap();
        if let Some(to) = &to {
            assert_eq!(trainer.restore(&mut p, to).unwrap(), None);
        }
        let run = Run::steps(1000).progress(false);
        let run = match to {
            Some(to) => run.checkpoints(to).save_every(3),
            None => run,
        };
        assert_eq!(trainer.run(&mut p, run, &windows()).unwrap().steps, 8);
        let operations = p.operations();
        p.finish().unwrap();
        operations
    };
    let more = operations(Some(Checkpoints::new(&path)));
    // Three saves copy twelve arrays each.
    assert!(more > operations(None) + 3 * 12, "{more}");
    assert!(!path.exists());
}

#[test]
fn save_needs_a_folder_without_later_steps() {
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path());
    let said = on_all(2, |p| {
        let mut old = chain(p, 2, false)?;
        train(&mut old, p, 3, |run| run.checkpoints(to.clone()))?;
        let before = p.operations();
        let again = old.save(p, &to).unwrap_err().to_string();
        assert_eq!(
            p.operations(),
            before + 1,
            "found before anything is copied"
        );
        let other = train(&mut chain(p, 2, false)?, p, 9, |run| {
            run.checkpoints(to.clone())
        });
        let every = train(&mut old, p, 9, |run| run.save_every(2));
        // The job has not failed, and goes on.
        train(&mut old, p, 4, |run| run.checkpoints(to.clone()))?;
        Ok([
            again,
            other.unwrap_err().to_string(),
            every.unwrap_err().to_string(),
        ])
    });
    let manifest = folder.path().join("step-00000003.json");
    let manifest = manifest.display();
    assert_eq!(
        said[0],
        format!("{manifest}: there is a checkpoint of step 3 already, which is kept")
    );
    let problem = "there is a checkpoint of step 3, and this training continues after step 0.";
    assert!(
        said[1].starts_with(&format!("{manifest}: {problem}")),
        "{said:?}"
    );
    assert_eq!(
        said[2],
        "`Run::save_every` needs a folder: set it by `Run::checkpoints`"
    );
    assert_eq!(to.steps().unwrap(), [3, 4]);
}

#[test]
fn save_is_completed_while_the_training_goes_on() {
    // The next save is due so late that only reports can complete the first.
    const FIRST: u64 = 1 << 20;
    let folder = tempfile::tempdir().unwrap();
    let to = Checkpoints::new(folder.path());
    let deadline = Instant::now() + Duration::from_secs(30);
    let results = Simulation::new(2, 4).run(|p| {
        let stop = StopFlag::default();
        let me = p.process() == ProcessId(0);
        let mut trainer = chain(p, 2, false)?.stop_on(&stop);
        trainer.optimizer_mut().set_updates(FIRST - 2);
        let mut seen = false;
        let run = Run::steps(1 << 40).progress(false).on_step(|_| {
            seen |= me && to.steps().unwrap() == [FIRST];
            if seen || Instant::now() > deadline {
                stop.set(15);
            }
        });
        trainer.run(p, run.checkpoints(to.clone()).save_every(FIRST), &windows())?;
        Ok(seen)
    });
    assert!(
        results.into_iter().next().unwrap().unwrap(),
        "the save was not completed"
    );
}
