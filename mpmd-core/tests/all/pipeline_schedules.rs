//! Every schedule runs and gives the same bits.

use std::time::Duration;

use mpmd_core::Simulation;
use mpmd_core::pipeline::{Action, ActionKind, Builtin, Microbatch, Pipeline, Schedule};
use mpmd_core::prelude::*;

use crate::stages::{
    Outcome, Rows, Scale, WIDTH, by_hand, chain, meshes, params, read, step, together, value,
    weights,
};

const RANKS: usize = 4;
const ROWS: [usize; 8] = [2; 8];

/// Returns all built-in schedules with backward passes on `ranks` ranks, with one and with two
/// stages per rank where possible.
fn schedules(ranks: usize, microbatches: usize) -> Vec<Schedule> {
    let mut all = Vec::new();
    for builtin in Builtin::ALL {
        let several = [1, 2].map(|chunks| builtin.schedule(ranks, microbatches, chunks));
        all.extend(several.into_iter().flatten().filter(Schedule::has_backward));
    }
    all
}

fn ascends(schedule: &Schedule) -> bool {
    let adds = |action: &&Action| {
        matches!(
            action.kind,
            ActionKind::Backward | ActionKind::BackwardWeight
        )
    };
    let mut next = vec![0; schedule.stages()];
    schedule.rows().iter().flatten().filter(adds).all(|action| {
        next[action.stage] += 1;
        action.microbatch + 1 == next[action.stage]
    })
}

fn run(schedule: &Schedule, processes: usize, buffers: bool, fuses: bool) -> Outcome {
    let simulation = Simulation::new(processes, RANKS).delays(3, Duration::from_millis(1));
    together(simulation.run(|p| {
        let mut pipeline = chain(p, schedule, fuses)?;
        pipeline.buffer_gradients(buffers);
        step(p, &mut pipeline, schedule, &ROWS)
    }))
}

fn near(found: &Outcome, expected: &Outcome) -> bool {
    let close = |(a, b): (&f32, &f32)| (a - b).abs() <= 1e-6 * b.abs().max(1.0);
    let sizes = |outcome: &Outcome| -> Vec<Option<usize>> {
        outcome
            .gradients
            .iter()
            .map(|gradients| gradients.as_ref().map(Vec::len))
            .collect()
    };
    found.loss == expected.loss
        && sizes(found) == sizes(expected)
        && found
            .gradients
            .iter()
            .flatten()
            .flatten()
            .zip(expected.gradients.iter().flatten().flatten())
            .all(close)
}

#[test]
fn every_schedule_gives_the_bits_of_a_direct_computation() {
    let (mut same, mut other) = (0, 0);
    for schedule in schedules(RANKS, ROWS.len()) {
        let expected = by_hand(schedule.stages(), &ROWS);
        for processes in [1, 2, 4] {
            let case = format!(
                "{} with {} stages over {processes}",
                schedule.name(),
                schedule.stages()
            );
            let found = run(&schedule, processes, false, processes == 2);
            if ascends(&schedule) {
                assert_eq!(found, expected, "{case}");
                same += 1;
                continue;
            }
            assert!(near(&found, &expected), "{case}: {found:?} {expected:?}");
            assert_eq!(
                run(&schedule, processes, true, false),
                expected,
                "{case}, buffered"
            );
            other += 1;
        }
    }
    assert!(same >= 21 && other >= 6, "{same} {other}");
}

#[test]
fn outputs_of_forward_passes_come_by_microbatch() {
    for chunks in [1, 2] {
        for name in ["forward", "bfs"] {
            let schedule = Schedule::named(name, RANKS, 6, Some(chunks)).unwrap();
            for processes in [1, 4] {
                let results = Simulation::new(processes, RANKS).run(|p| {
                    let meshes = meshes(p, RANKS)?;
                    let mesh = |stage: usize| &meshes[schedule.rank_of(stage)];
                    let scale = || Scale::of(Rows::All);
                    let mut pipeline = Pipeline::first(scale(), mesh(0), params(p, 0, mesh(0))?)?;
                    for stage in 1..schedule.stages() {
                        pipeline =
                            pipeline.then(scale(), mesh(stage), params(p, stage, mesh(stage))?)?;
                    }
                    let mut batch = Vec::new();
                    for m in 0..6 {
                        let x: Vec<f32> = (0..WIDTH).map(|i| value(m, i)).collect();
                        let x = MpmdArray::from_slice(&[1, WIDTH], &x)?;
                        batch.push(Microbatch::new(p.device_put(&x, mesh(0).replicated())?));
                    }
                    let outputs = pipeline.forward_all(p, &schedule, batch)?;
                    outputs.iter().map(read).collect::<Result<Vec<_>>>()
                });
                let mut found: Vec<Option<Vec<f32>>> = vec![None; 6];
                for result in results {
                    found
                        .iter_mut()
                        .zip(result.unwrap())
                        .for_each(|(all, one)| *all = all.take().or(one));
                }
                for (m, found) in found.into_iter().enumerate() {
                    let mut expected: Vec<f32> = (0..WIDTH).map(|i| value(m, i)).collect();
                    for stage in 0..schedule.stages() {
                        expected
                            .iter_mut()
                            .zip(weights(stage))
                            .for_each(|(x, w)| *x *= w);
                    }
                    assert_eq!(
                        found,
                        Some(expected),
                        "{name}, {chunks} chunks, microbatch {m}"
                    );
                }
            }
        }
    }
}

#[test]
fn stages_on_the_same_devices_move_nothing() {
    let moves = |name: &str, ranks: usize, chunks: usize| {
        let schedule = Schedule::named(name, ranks, 4, Some(chunks)).unwrap();
        let results = Simulation::new(1, ranks).run(|p| {
            let mut pipeline = chain(p, &schedule, false)?;
            let batch = crate::stages::microbatches(p, &pipeline, &[1; 4])?;
            // In the first step the processes also compare the schedule.
            pipeline.train_step(p, &schedule, batch)?;
            let batch = crate::stages::microbatches(p, &pipeline, &[1; 4])?;
            let before = p.operations();
            pipeline.train_step(p, &schedule, batch)?;
            Ok(p.operations() - before)
        });
        let operations = results.into_iter().next().unwrap().unwrap();
        // Three passes for each stage and microbatch; the losses are added up.
        operations - 3 * 4 * schedule.stages() as u64 - 3
    };
    let pairs = |pairs: u64| 2 * 4 * pairs;
    assert_eq!(moves("interleaved", 1, 4), 0, "all on one rank");
    assert_eq!(
        moves("interleaved", 2, 2),
        pairs(3),
        "there and back to the other rank"
    );
    assert_eq!(
        moves("zbv", 2, 2),
        pairs(2),
        "the middle stages share a rank"
    );
}

#[test]
fn a_schedule_without_backward_passes_does_not_train() {
    let schedule = Schedule::named("forward", RANKS, 4, None).unwrap();
    let results = Simulation::new(2, RANKS).run(|p| {
        let mut pipeline = chain(p, &schedule, false)?;
        step(p, &mut pipeline, &schedule, &[1; 4]).map(drop)
    });
    for result in results {
        let error = result.unwrap_err().to_string();
        assert!(
            error.contains("ForwardOnly has no backward passes"),
            "{error}"
        );
    }
}
