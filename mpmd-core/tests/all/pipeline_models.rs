//! Stages with prepared parameters, random keys, modes and frozen parameters.

use std::sync::Arc;

use mpmd_core::Simulation;
use mpmd_core::pipeline::{ParamSharding, Schedule};
use mpmd_core::prelude::*;
use mpmd_core::random::Key;
use parking_lot::Mutex;

use crate::common::watchdog;
use crate::models::{Counts, Model, batch, pipeline, steps, train, update};
use crate::stages::Outcome;

const COUNT: usize = 4;
const ROWS: usize = 2;
const STEPS: usize = 4;

/// Variations of a run that must not change its bits.
#[derive(Clone, Copy, Debug, Default)]
struct How {
    processes: usize,
    replays: bool,
    recomputes: bool,
}

const HOWS: [How; 5] = [
    How {
        processes: 1,
        replays: false,
        recomputes: false,
    },
    How {
        processes: 3,
        replays: false,
        recomputes: false,
    },
    How {
        processes: 3,
        replays: false,
        recomputes: true,
    },
    How {
        processes: 3,
        replays: true,
        recomputes: false,
    },
    How {
        processes: 1,
        replays: true,
        recomputes: true,
    },
];

/// Trains three stages, the first two of them like `model`, with updates between the steps.
fn run(model: &Model, how: How, key: Option<Key>) -> Vec<Outcome> {
    let schedule = Schedule::one_f_one_b(3, COUNT).unwrap();
    let results = Simulation::new(how.processes, 3).run(|p| {
        let mut pipeline = pipeline(p, &[model.clone(), model.clone()])?;
        pipeline.replay(how.replays);
        (0..2).for_each(|stage| pipeline.recompute(stage, how.recomputes));
        let mut outcomes = Vec::new();
        for step in 0..STEPS {
            update(p, &mut pipeline, step)?;
            let key = key.map(|key| key.fold_in(step as u64));
            outcomes.push(train(p, &mut pipeline, &schedule, ROWS, key)?);
        }
        Ok(outcomes)
    });
    steps(results)
}

#[test]
fn prepared_params_are_updated_once_a_step_with_equal_bits() {
    let _limit = watchdog(120);
    let expected = run(&Model::default(), HOWS[0], None);
    for how in HOWS {
        let counts: Arc<Counts> = Arc::default();
        let model = Model {
            prepares: true,
            counts: counts.clone(),
            ..Model::default()
        };
        assert_eq!(run(&model, how, None), expected, "{how:?}");
        assert_eq!(Counts::of(&counts.prepared), 2 * STEPS, "{how:?}");
    }
}

#[test]
fn params_are_prepared_again_only_after_a_change() {
    let _limit = watchdog(60);
    for replays in [false, true] {
        let schedule = Schedule::gpipe(2, COUNT).unwrap();
        let counts: Arc<Counts> = Arc::default();
        let model = Model {
            prepares: true,
            counts: counts.clone(),
            ..Model::default()
        };
        let results = Simulation::new(1, 2).run(|p| {
            let mut pipeline = pipeline(p, std::slice::from_ref(&model))?;
            pipeline.replay(replays);
            let mut found = Vec::new();
            for step in 0..6 {
                if step == 3 {
                    update(p, &mut pipeline, 1)?;
                }
                let one = batch(p, &pipeline, (1, ROWS), None)?.remove(0);
                if step % 2 == 1 {
                    pipeline.forward(p, one)?.sum.block_until_ready()?;
                } else {
                    train(p, &mut pipeline, &schedule, ROWS, None)?;
                }
                found.push(Counts::of(&counts.prepared));
            }
            Ok(found)
        });
        assert_eq!(
            results.into_iter().next().unwrap().unwrap(),
            [1, 1, 1, 2, 2, 2],
            "{replays}"
        );
    }
}

#[test]
fn prepared_params_follow_stored_parts_and_ties() {
    let _limit = watchdog(120);
    let schedule = Schedule::one_f_one_b(3, COUNT).unwrap();
    let run = |processes: usize, prepares: bool, replays: bool| {
        let model = Model {
            prepares,
            ..Model::default()
        };
        steps(Simulation::new(processes, 6).run(|p| {
            let mut pipeline = pipeline(p, &[model.clone(), model.clone()])?;
            let mesh = pipeline.mesh(0).clone();
            let part = p.device_put(&pipeline.params(0)[0].1, mesh.sharding(spec!["data"]))?;
            pipeline.set_params(0, vec![part])?;
            pipeline.store(0, ParamSharding::new(vec![mesh.replicated()]))?;
            pipeline.tie((0, ""), (1, ""))?;
            pipeline.replay(replays);
            let mut outcomes = Vec::new();
            for step in 0..STEPS {
                update(p, &mut pipeline, step)?;
                outcomes.push(train(p, &mut pipeline, &schedule, ROWS, None)?);
            }
            Ok(outcomes)
        }))
    };
    let expected = run(1, false, false);
    assert!(expected[0] != expected[1], "an update changes the results");
    for (processes, replays) in [(1, false), (3, false), (3, true)] {
        assert_eq!(
            run(processes, true, replays),
            expected,
            "{processes}, {replays}"
        );
    }
}

#[test]
fn failed_preparation_fails_all_later_passes() {
    let _limit = watchdog(60);
    for fails in [0, 1] {
        let all = Mutex::new(Vec::new());
        let _ = Simulation::new(1, 2).run(|p| {
            let model = Model {
                prepares: true,
                fails: Some(fails),
                ..Model::default()
            };
            let mut pipeline = pipeline(p, &[model])?;
            for step in 0..3 {
                update(p, &mut pipeline, step)?;
                let one = batch(p, &pipeline, (1, ROWS), None)?.remove(0);
                let loss = pipeline.forward(p, one)?.sum;
                all.lock().push(
                    loss.block_until_ready()
                        .err()
                        .map(|error| error.to_string()),
                );
            }
            Ok(())
        });
        let said = all.into_inner();
        assert_eq!(said.len(), 3);
        for (step, said) in said.into_iter().enumerate() {
            let Some(said) = said.filter(|_| step >= fails) else {
                assert!(step < fails, "step {step} of {fails} has not failed");
                continue;
            };
            for part in [
                "kernel Model",
                "(stage 0, parameters prepared)",
                "cannot prepare",
            ] {
                assert!(said.contains(part), "{said}\n  lacks {part}");
            }
        }
    }
}

#[test]
fn keys_give_equal_bits_in_every_mode_and_differ_by_step() {
    let _limit = watchdog(120);
    let model = Model {
        draws: true,
        ..Model::default()
    };
    let expected = run(&model, HOWS[0], Some(Key(7)));
    for how in HOWS {
        assert_eq!(run(&model, how, Some(Key(7))), expected, "{how:?}");
    }
    assert!(
        run(&model, HOWS[0], Some(Key(8))) != expected,
        "other keys give other numbers"
    );
    let schedule = Schedule::gpipe(3, COUNT).unwrap();
    let same_params = steps(Simulation::new(1, 3).run(|p| {
        let mut pipeline = pipeline(p, &[model.clone(), model.clone()])?;
        pipeline.replay(true);
        let one = |step: u64| {
            train(
                p,
                &mut pipeline,
                &schedule,
                ROWS,
                Some(Key(1).fold_in(step)),
            )
        };
        (0..3).map(one).collect()
    }));
    assert!(same_params[1] != same_params[2], "a replay gets new keys");
}

#[test]
fn drawing_stage_without_a_key_is_refused() {
    let _limit = watchdog(60);
    let schedule = Schedule::gpipe(2, COUNT).unwrap();
    let results = Simulation::new(2, 2).run(|p| {
        let mut pipeline = pipeline(
            p,
            &[Model {
                draws: true,
                ..Model::default()
            }],
        )?;
        let mut given = batch(p, &pipeline, (COUNT, ROWS), Some(Key(1)))?;
        given[2] = batch(p, &pipeline, (1, ROWS), None)?.remove(0);
        let before = p.operations();
        let error = pipeline
            .train_step(p, &schedule, given)
            .unwrap_err()
            .to_string();
        assert_eq!(p.operations(), before, "nothing was issued");
        let part = "Pipeline::train_step: stage 0 `Model` draws random numbers, and microbatch 2 \
                    has no key: give it one with `Microbatch::key`";
        assert!(error.contains(part), "{error}");
        let one = batch(p, &pipeline, (1, ROWS), None)?.remove(0);
        pipeline.forward(p, one)?.sum.block_until_ready().map(drop)
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn forward_passes_know_their_mode() {
    let _limit = watchdog(60);
    let schedule = Schedule::gpipe(2, COUNT).unwrap();
    let evaluation = (false, false);
    for (recomputes, frozen, trains, expected) in [
        (false, false, true, &[(true, true)][..]),
        (true, false, true, &[(true, false), (true, true)]),
        (false, true, true, &[(true, false)]),
        (true, false, false, &[evaluation]),
    ] {
        let counts: Arc<Counts> = Arc::default();
        let model = Model {
            frozen,
            counts: counts.clone(),
            ..Model::default()
        };
        let results = Simulation::new(2, 2).run(|p| {
            let mut pipeline = pipeline(p, std::slice::from_ref(&model))?;
            pipeline.recompute(0, recomputes);
            if trains {
                return train(p, &mut pipeline, &schedule, ROWS, None).map(drop);
            }
            let given = batch(p, &pipeline, (COUNT, ROWS), None)?;
            let losses = pipeline.forward_all(p, &schedule, given)?;
            losses
                .iter()
                .try_for_each(|loss| loss.sum.block_until_ready().map(drop))
        });
        results.into_iter().for_each(|result| result.unwrap());
        let found: Vec<(bool, bool)> = counts.modes.lock().iter().copied().collect();
        assert_eq!(found, expected, "{recomputes}, {frozen}, {trains}");
    }
}

#[test]
fn frozen_lower_stages_run_no_backward_pass() {
    let _limit = watchdog(120);
    for name in ["gpipe", "1f1b", "zb-h1"] {
        let schedule = Schedule::named(name, 4, COUNT, None).unwrap();
        let run = |frozen: [bool; 3], how: How| {
            let counts: [Arc<Counts>; 3] = Default::default();
            let model = |stage: usize| {
                let counts = counts[stage].clone();
                Model {
                    frozen: frozen[stage],
                    prepares: true,
                    counts,
                    ..Model::default()
                }
            };
            let models: Vec<Model> = (0..3).map(model).collect();
            let outcomes = steps(Simulation::new(how.processes, 4).run(|p| {
                let mut pipeline = pipeline(p, &models)?;
                for (stage, frozen) in frozen.iter().enumerate() {
                    assert_eq!(pipeline.trainable(stage), [!frozen]);
                    pipeline.recompute(stage, how.recomputes);
                }
                pipeline.replay(how.replays);
                (0..3)
                    .map(|_| train(p, &mut pipeline, &schedule, ROWS, None))
                    .collect()
            }));
            let with_dx = [0, 1, 2].map(|stage| Counts::of(&counts[stage].with_dx));
            let backward = [0, 1, 2].map(|stage| Counts::of(&counts[stage].backward));
            (outcomes, backward, with_dx)
        };
        let passes = 3 * COUNT;
        let (expected, ..) = run(
            [false; 3],
            How {
                processes: 1,
                ..How::default()
            },
        );
        for (frozen, backward, with_dx) in [
            ([true, true, false], [0, 0, passes], [0; 3]),
            ([true, false, true], [0, passes, passes], [0, 0, passes]),
            ([false, true, false], [passes; 3], [0, passes, passes]),
            ([true; 3], [0; 3], [0; 3]),
        ] {
            for processes in [1, 4] {
                let how = How {
                    processes,
                    replays: processes > 1,
                    recomputes: processes == 1,
                };
                let (found, passes, dx) = run(frozen, how);
                assert_eq!((passes, dx), (backward, with_dx), "{name}, {frozen:?}");
                for (found, expected) in found.iter().zip(&expected) {
                    assert_eq!(found.loss, expected.loss);
                    for stage in 0..4 {
                        let trained = stage == 3 || !frozen[stage];
                        let expected = expected.gradients[stage].clone().filter(|_| trained);
                        assert_eq!(
                            found.gradients[stage], expected,
                            "{name}, {frozen:?}, {stage}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn steps_of_alternating_forms_are_all_replayed() {
    let _limit = watchdog(60);
    let schedule = Schedule::gpipe(2, COUNT).unwrap();
    let forms = [1, 2, 3, 4];
    let results = Simulation::new(1, 2).run(|p| {
        let counts: Arc<Counts> = Arc::default();
        let model = Model {
            prepares: true,
            counts: counts.clone(),
            ..Model::default()
        };
        let mut replayed = pipeline(p, &[model])?;
        let mut plain = pipeline(p, &[Model::default()])?;
        plain.replay(false);
        let mut issued = Vec::new();
        for round in 0..4 {
            for rows in forms {
                for stale in [true, false] {
                    if stale {
                        update(p, &mut replayed, round)?;
                        update(p, &mut plain, round)?;
                    }
                    let found = train(p, &mut replayed, &schedule, rows, None)?;
                    assert_eq!(found, train(p, &mut plain, &schedule, rows, None)?);
                }
            }
            issued.push(Counts::of(&counts.issued));
        }
        Ok(issued)
    });
    let issued = results.into_iter().next().unwrap().unwrap();
    // The very first step makes the objects, so its form is captured in the second round.
    assert!(
        issued[0] < issued[1] && issued[1] == issued[3],
        "{issued:?}"
    );
}

#[test]
fn failing_pass_names_stage_microbatch_and_pass() {
    let _limit = watchdog(60);
    for replays in [false, true] {
        let all = Mutex::new(Vec::new());
        let _ = Simulation::new(3, 3).run(|p| {
            let models = [
                Model::default(),
                Model {
                    breaks: true,
                    ..Model::default()
                },
            ];
            let mut pipeline = pipeline(p, &models)?;
            pipeline.replay(replays);
            let schedule = Schedule::gpipe(3, COUNT)?;
            let given = batch(p, &pipeline, (COUNT, ROWS), None)?;
            let output = pipeline.train_step(p, &schedule, given)?;
            let failed = output.losses[2].sum.block_until_ready();
            all.lock()
                .extend(failed.err().map(|error| error.to_string()));
            Ok(())
        });
        let said = all.into_inner().concat();
        for part in [
            "kernel Model",
            "(stage 1, microbatch 2, forward)",
            "broken on purpose",
        ] {
            assert!(said.contains(part), "{said}\n  lacks {part}");
        }
    }
}

#[test]
fn dry_run_has_the_operations_of_prepared_stages() {
    let _limit = watchdog(60);
    let schedule = Schedule::gpipe(2, COUNT).unwrap();
    let issue = |p: &mut Program| {
        let model = Model {
            prepares: true,
            draws: true,
            ..Model::default()
        };
        let mut pipeline = pipeline(p, &[model])?;
        pipeline.replay(true);
        for step in 0..4 {
            update(p, &mut pipeline, step)?;
            let given = batch(p, &pipeline, (COUNT, ROWS), Some(Key(step as u64)))?;
            pipeline.train_step(p, &schedule, given)?;
        }
        Ok(p.operations())
    };
    let mut dry = Program::builder().devices(2).dry_run(2).unwrap();
    let planned = issue(&mut dry).unwrap();
    dry.finish().unwrap();
    for result in Simulation::new(2, 2).run(issue) {
        assert_eq!(result.unwrap(), planned);
    }
}
