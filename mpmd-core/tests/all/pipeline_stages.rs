//! Small stages: kept inputs, one backward pass, objects as residuals, and state.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mpmd_core::pipeline::{Builtin, Passes, Schedule, Stage};
use mpmd_core::prelude::*;
use mpmd_core::tree::Empty;
use mpmd_core::{MpmdObject, Simulation, method};

use crate::stages::{
    Alive, Keeps, Outcome, Scale, chain, chain_with, microbatches, step, together,
};

const RANKS: usize = 3;
const ROWS: [usize; 4] = [2; 4];

/// Returns a stage that keeps its input as an object, or itself.
fn small(alive: Option<&Arc<Alive>>) -> Scale {
    Scale::small(alive.map_or(Keeps::Input, |alive| Keeps::Object(alive.clone())))
}

fn expected(schedule: &Schedule) -> Outcome {
    together(Simulation::new(1, RANKS).run(|p| {
        let mut pipeline = chain(p, schedule, false)?;
        step(p, &mut pipeline, schedule, &ROWS)
    }))
}

#[test]
fn kept_inputs_give_the_bits_of_declared_residuals() {
    for name in ["gpipe", "1f1b", "zb-h1", "interleaved", "zbv"] {
        let schedule = Schedule::named(name, RANKS, ROWS.len(), None).unwrap();
        let expected = expected(&schedule);
        for (processes, recomputes) in [(1, false), (RANKS, false), (RANKS, true)] {
            let found = together(Simulation::new(processes, RANKS).run(|p| {
                let mut pipeline = chain_with(p, &schedule, |_| small(None))?;
                (0..pipeline.stages()).for_each(|stage| pipeline.recompute(stage, recomputes));
                step(p, &mut pipeline, &schedule, &ROWS)
            }));
            // Fused gradients are added in the order of the input gradients.
            let close = |a: &f32, b: &f32| (a - b).abs() <= 1e-5 * b.abs().max(1.0);
            assert_eq!(found.loss, expected.loss, "{name}");
            for (found, expected) in found.gradients.iter().zip(&expected.gradients) {
                let (found, expected) = (found.as_ref().unwrap(), expected.as_ref().unwrap());
                let same = found == expected;
                let near = found.iter().zip(expected).all(|(a, b)| close(a, b));
                assert!(
                    same || (name != "1f1b" && near),
                    "{name}: {found:?}, {expected:?}"
                );
            }
        }
    }
}

#[test]
fn objects_as_residuals_live_from_forward_to_backward() {
    let schedule = Schedule::one_f_one_b(RANKS, ROWS.len()).unwrap();
    let expected = expected(&schedule);
    for recomputes in [false, true] {
        let alive: Vec<Arc<Alive>> = (0..RANKS).map(|_| Arc::default()).collect();
        let of = |stage: usize| small(Some(&alive[stage]));
        let found = together(Simulation::new(RANKS, RANKS).run(|p| {
            let mut pipeline = chain_with(p, &schedule, of)?;
            (0..RANKS - 1).for_each(|stage| pipeline.recompute(stage, recomputes));
            let outcome = step(p, &mut pipeline, &schedule, &ROWS)?;
            p.step_end()?;
            Ok(outcome)
        }));
        assert_eq!(found, expected);
        for (stage, alive) in alive[..RANKS - 1].iter().enumerate() {
            assert_eq!(alive.now.load(Ordering::SeqCst), 0, "of stage {stage}");
            if !recomputes {
                let in_flight = RANKS - stage;
                assert_eq!(
                    alive.most.load(Ordering::SeqCst),
                    in_flight,
                    "of stage {stage}"
                );
            }
        }
    }
}

#[test]
fn objects_are_dropped_after_a_forward_pass_alone() {
    let schedule = Schedule::gpipe(2, ROWS.len()).unwrap();
    let alive: Arc<Alive> = Arc::default();
    let of = |_| small(Some(&alive));
    let results = Simulation::new(2, 2).run(|p| {
        let mut pipeline = chain_with(p, &schedule, of)?;
        let batch = microbatches(p, &pipeline, &ROWS)?;
        let losses = pipeline.forward_all(p, &schedule, batch)?;
        losses
            .iter()
            .try_for_each(|loss| loss.sum.block_until_ready().map(drop))?;
        p.step_end()
    });
    results.into_iter().for_each(|result| result.unwrap());
    assert!(alive.most.load(Ordering::SeqCst) > 0);
    assert_eq!(alive.now.load(Ordering::SeqCst), 0);
}

#[test]
fn state_stays_with_its_stage_in_replays_and_recomputation() {
    let schedule = Schedule::one_f_one_b(2, ROWS.len()).unwrap();
    for (replays, objects) in [(false, false), (true, false), (false, true)] {
        let alive: Option<Arc<Alive>> = objects.then(Arc::default);
        let of = |_| Scale {
            counts: true,
            ..small(alive.as_ref())
        };
        let results = Simulation::new(2, 2).run(|p| {
            let mut pipeline = chain_with(p, &schedule, of)?;
            let mesh = pipeline.mesh(0).clone();
            let count: MpmdObject<usize> = p.object(&mesh, |_| Ok(0))?;
            let elsewhere: MpmdObject<usize> = p.object(&pipeline.mesh(1).clone(), |_| Ok(0))?;
            let error = pipeline.state(0, &elsewhere).unwrap_err().to_string();
            assert!(
                error.contains("Pipeline::state: stage 0 `Scale`: its state is "),
                "{error}"
            );
            pipeline.state(0, &count)?;
            pipeline.replay(replays);
            pipeline.recompute(0, objects);
            for _ in 0..3 {
                step(p, &mut pipeline, &schedule, &ROWS)?;
            }
            let read = method(
                || f32s([]),
                |count: &mut usize, mut y: ViewMut<f32>| y[0] = *count as f32,
            );
            let found = p
                .method(read)
                .on(&mesh)
                .build()?
                .call(p, &count, Empty::new())?;
            Ok(found
                .to_host()?
                .map(|count| count.to_vec::<f32>())
                .transpose()?)
        });
        let found = results.into_iter().next().unwrap().unwrap();
        let passes = 3 * ROWS.len() * if objects { 2 } else { 1 };
        assert_eq!(found, Some(vec![passes as f32]));
    }
}

#[test]
fn fused_stage_in_an_order_that_cannot_ascend_is_refused() {
    let descending = Builtin::ALL
        .iter()
        .filter_map(|builtin| builtin.schedule(2, 4, 2).ok());
    let descending = descending.filter(Schedule::has_backward);
    let mut refused = 0;
    for schedule in descending {
        let results = Simulation::new(1, schedule.ranks()).run(|p| {
            let mut pipeline = chain_with(p, &schedule, |_| small(None))?;
            pipeline.buffer_gradients(true);
            let batch = microbatches(p, &pipeline, &ROWS)?;
            let before = p.operations();
            match pipeline.train_step(p, &schedule, batch) {
                Ok(_) => Ok(0),
                Err(error) => {
                    let error = error.to_string();
                    assert!(error.contains("does not compute its gradients in ascending order"));
                    assert_eq!(p.operations(), before, "nothing was issued");
                    Ok(1)
                }
            }
        });
        refused += results
            .into_iter()
            .map(|result| result.unwrap())
            .sum::<usize>();
    }
    assert!(refused > 0, "some schedule has another order");
    assert_eq!(Passes::Fused, small(None).passes());
}
