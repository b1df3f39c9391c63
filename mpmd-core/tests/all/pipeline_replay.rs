//! Pipelines that capture and replay their runs, as they do by default.

use std::sync::Arc;

use mpmd_core::Simulation;
use mpmd_core::pipeline::{Microbatch, Schedule};
use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;

use crate::common::watchdog;
use crate::models::{Counts, Model, WIDTH, batch, pipeline, train, update};
use crate::stages::read;

const COUNT: usize = 4;

#[test]
fn equal_steps_are_replayed_by_default() {
    let _limit = watchdog(60);
    let schedule = Schedule::gpipe(2, COUNT).unwrap();
    let run = |replays: Option<bool>| {
        let results = Simulation::new(1, 2).run(|p| {
            let counts: Arc<Counts> = Arc::default();
            let model = Model {
                counts: counts.clone(),
                ..Model::default()
            };
            let mut pipeline = pipeline(p, &[model])?;
            replays
                .into_iter()
                .for_each(|replays| pipeline.replay(replays));
            let mut issued = Vec::new();
            for step in 0..3 {
                update(p, &mut pipeline, step)?;
                train(p, &mut pipeline, &schedule, 2, None)?;
                issued.push(Counts::of(&counts.issued));
            }
            Ok(issued)
        });
        results.into_iter().next().unwrap().unwrap()
    };
    let replayed = run(None);
    assert!(
        replayed[0] == replayed[1] && replayed[1] == replayed[2],
        "{replayed:?}"
    );
    let issued = run(Some(false));
    assert!(issued[0] < issued[1] && issued[1] < issued[2], "{issued:?}");
}

#[test]
fn steps_are_captured_anew_where_calls_are_recomputed() {
    let _limit = watchdog(120);
    let schedule = Schedule::gpipe(2, COUNT).unwrap();
    let run = |every| {
        let simulation = Simulation::new(2, 2).settings(|builder| builder.check_replay(every));
        let results = simulation.run(|p| {
            let counts: Arc<Counts> = Arc::default();
            let model = Model {
                counts: counts.clone(),
                ..Model::default()
            };
            let mut pipeline = pipeline(p, &[model])?;
            let (mut losses, mut issued) = (Vec::new(), Vec::new());
            for step in 0..20 {
                update(p, &mut pipeline, step)?;
                losses.push(train(p, &mut pipeline, &schedule, 2, None)?);
                issued.push(Counts::of(&counts.issued));
                p.step_end()?;
            }
            Ok((losses, issued))
        });
        results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
    };
    let (without, with) = (run(0), run(2));
    for ((losses, issued), (checked, again)) in without.iter().zip(&with) {
        assert_eq!(losses, checked);
        assert_eq!(issued[0], issued[19]);
        assert!(again[0] == again[16] && again[16] < again[17], "{again:?}");
    }
}

#[test]
fn replayed_forms_survive_forms_seen_once() {
    let _limit = watchdog(120);
    let schedule = Schedule::gpipe(2, COUNT).unwrap();
    let results = Simulation::new(1, 2).run(|p| {
        let counts: Arc<Counts> = Arc::default();
        let model = Model {
            counts: counts.clone(),
            ..Model::default()
        };
        let mut pipeline = pipeline(p, &[model])?;
        // More other forms than a pipeline keeps.
        for rows in [1, 1].into_iter().chain(2..22) {
            train(p, &mut pipeline, &schedule, rows, None)?;
        }
        let before = Counts::of(&counts.issued);
        train(p, &mut pipeline, &schedule, 1, None)?;
        let replayed = Counts::of(&counts.issued);
        // The oldest form that was seen once has gone.
        train(p, &mut pipeline, &schedule, 2, None)?;
        Ok((before, replayed, Counts::of(&counts.issued)))
    });
    let (before, replayed, issued) = results.into_iter().next().unwrap().unwrap();
    assert!(
        before == replayed && replayed < issued,
        "{before} {replayed} {issued}"
    );
}

/// Evaluates microbatches of alternating shapes, with updates in between. Returns the losses that
/// this process has. `replays` is `None` for the default.
fn evaluations(
    p: &mut Program,
    replays: Option<bool>,
    prepares: bool,
) -> Result<Vec<Option<Vec<f32>>>> {
    let schedule = Schedule::gpipe(2, COUNT)?;
    let mut pipeline = pipeline(
        p,
        &[Model {
            prepares,
            ..Model::default()
        }],
    )?;
    replays
        .into_iter()
        .for_each(|replays| pipeline.replay(replays));
    let mut losses = Vec::new();
    for round in 0..4 {
        if round != 2 {
            update(p, &mut pipeline, round)?;
        }
        for rows in [1, 3] {
            let given = batch(p, &pipeline, (COUNT, rows), None)?;
            let output = pipeline.forward_all(p, &schedule, given)?;
            for given in batch(p, &pipeline, (2, rows), None)? {
                let one = pipeline.forward(p, given)?;
                losses.push(read(&one.sum)?);
            }
            for one in output {
                losses.push(read(&one.sum)?);
            }
            p.step_end()?;
        }
    }
    Ok(losses)
}

#[test]
fn forward_passes_are_replayed_with_the_same_bits() {
    let _limit = watchdog(120);
    for prepares in [false, true] {
        for processes in [1, 2] {
            let run = |replays| {
                let results =
                    Simulation::new(processes, 2).run(|p| evaluations(p, replays, prepares));
                results.into_iter().map(Result::unwrap).collect::<Vec<_>>()
            };
            let (issued, replayed) = (run(Some(false)), run(None));
            assert!(issued.iter().flatten().any(Option::is_some));
            assert_eq!(
                issued, replayed,
                "{processes} processes, prepares {prepares}"
            );
        }
    }
    // Only a process that replays differs from one that does not.
    let results = Simulation::new(2, 2).run(|p| {
        let replays = (p.process().0 == 0).then_some(false);
        evaluations(p, replays, false)
    });
    assert!(
        results
            .into_iter()
            .all(|result| result.unwrap_err().is_divergence())
    );
}

#[test]
fn refused_input_of_a_known_form_names_its_pass() {
    let _limit = watchdog(60);
    let schedule = Schedule::gpipe(2, COUNT).unwrap();
    let refused = |replays: bool| {
        let results = Simulation::new(1, 2).run(|p| {
            let mut pipeline = pipeline(p, &[Model::default()])?;
            pipeline.replay(replays);
            for _ in 0..2 {
                train(p, &mut pipeline, &schedule, 2, None)?;
            }
            let mut given = batch(p, &pipeline, (COUNT, 2), None)?;
            let mut ones = |mesh: &Mesh| {
                p.array_from_fn(f32s([2, WIDTH]), mesh.replicated(), |_, mut x| {
                    Ok(x.fill(1.0f32)?)
                })
            };
            let (x, labels) = (ones(pipeline.mesh(0))?, ones(pipeline.mesh(1))?);
            let options = MoveOptions::default().donate(true);
            drop(p.device_put_with(&x, pipeline.mesh(0).replicated(), options)?);
            given[2] = Microbatch::new(x).side(1, labels);
            Ok(pipeline
                .train_step(p, &schedule, given)
                .unwrap_err()
                .to_string())
        });
        results.into_iter().next().unwrap().unwrap()
    };
    let text = refused(true);
    assert!(
        text.contains("stage 0") && text.contains("microbatch 2"),
        "{text}"
    );
    assert!(text.contains("donated"), "{text}");
    assert_eq!(text, refused(false));
}

#[test]
fn forward_pass_within_a_capture_is_captured_with_it() {
    let _limit = watchdog(60);
    let results = Simulation::new(1, 2).run(|p| {
        let mut pipeline = pipeline(p, &[Model::default()])?;
        let meshes = [pipeline.mesh(0).clone(), pipeline.mesh(1).clone()];
        let given = |p: &mut Program, value: f32| {
            let mut filled = |mesh: &Mesh| {
                p.array_from_fn(f32s([2, WIDTH]), mesh.replicated(), move |_, mut x| {
                    Ok(x.fill(value)?)
                })
            };
            Ok::<_, Error>((filled(&meshes[0])?, filled(&meshes[1])?))
        };
        let mut forward = |p: &mut Program, (x, labels): (MpmdArray, MpmdArray)| {
            Ok(pipeline.forward(p, Microbatch::new(x).side(1, labels))?.sum)
        };
        let first = given(p, 1.0)?;
        let (_, captured) = p.capture(first, &mut forward)?;
        let second = given(p, 3.0)?;
        let issued = forward(p, second.clone())?;
        let replayed = captured.replay(p, second)?;
        Ok((read(&issued)?, read(&replayed)?))
    });
    let (issued, replayed) = results.into_iter().next().unwrap().unwrap();
    assert!(issued.is_some());
    assert_eq!(issued, replayed);
}
