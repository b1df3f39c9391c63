//! Pipelines that are more than a chain: skip connections, tied weights, recomputed forward passes,
//! ragged shapes.

use std::time::Duration;

use mpmd_core::Simulation;
use mpmd_core::pipeline::{Loss, Pipeline, Schedule};
use mpmd_core::prelude::*;

use crate::stages::{
    Join, Outcome, Rows, Scale, Square, WIDTH, by_hand, chain, label, meshes, params, step,
    together, value, weights,
};

/// Creates a pipeline of four stages. Stage 2 takes the outputs of stages 1 and 0, and stage 3
/// shares the weights of stage 0.
fn skipping(p: &mut Program, schedule: &Schedule) -> Result<Pipeline<MpmdArray, Loss<MpmdArray>>> {
    let meshes = meshes(p, schedule.ranks())?;
    let mesh = |stage: usize| &meshes[schedule.rank_of(stage)];
    let scale = || Scale::of(Rows::All);
    let front = Pipeline::first(scale(), mesh(0), params(p, 0, mesh(0))?)?;
    let early = front.output();
    let front = front.then(scale(), mesh(1), params(p, 1, mesh(1))?)?;
    let late = front.output();
    let front = front.then_from(
        Join,
        mesh(2),
        params(p, 2, mesh(2))?,
        &(late, early.leaf("")),
    )?;
    let mut pipeline = front.then(Square(Rows::All), mesh(3), params(p, 3, mesh(3))?)?;
    pipeline.tie((0, ""), (3, ""))?;
    Ok(pipeline)
}

fn skipping_by_hand(rows: &[usize]) -> Outcome {
    let w: Vec<Vec<f32>> = [0, 1, 2, 0].into_iter().map(weights).collect();
    let mut gradients = vec![vec![0.0f32; WIDTH]; 4];
    let mut loss: Option<[f32; 2]> = None;
    for (m, rows) in rows.iter().copied().enumerate() {
        let mut squares = Vec::new();
        for i in 0..rows * WIDTH {
            let w = |stage: usize| w[stage][i % WIDTH];
            let x = value(m, i);
            let first = x * w(0);
            let second = first * w(1);
            let third = second * w(2) + first;
            let error = third * w(3) - label(m, i);
            squares.push(error * error);
            let error = 2.0 * error;
            let d_third = error * w(3);
            let d_second = d_third * w(2);
            let d_first = d_second * w(1) + d_third;
            let inputs = [
                (x, d_first),
                (first, d_second),
                (second, d_third),
                (third, error),
            ];
            for (gradient, (x, d)) in gradients.iter_mut().zip(inputs) {
                gradient[i % WIDTH] += x * d;
            }
        }
        let one = [squares.iter().sum::<f32>(), rows as f32];
        loss = Some(loss.map_or(one, |sum| [sum[0] + one[0], sum[1] + one[1]]));
    }
    let tied = gradients.pop().expect("four stages");
    gradients[0]
        .iter_mut()
        .zip(tied)
        .for_each(|(sum, more)| *sum += more);
    let gradients = gradients.into_iter().map(Some).chain([None]).collect();
    Outcome { loss, gradients }
}

#[test]
fn skip_and_tied_gradients_are_added_in_fixed_order() {
    let rows = [2; 4];
    let expected = skipping_by_hand(&rows);
    for (name, ranks, chunks) in [
        ("gpipe", 4, 1),
        ("1f1b", 4, 1),
        ("zb-h1", 4, 1),
        ("zbv", 2, 2),
        ("interleaved", 2, 2),
        ("interleaved", 1, 4),
    ] {
        let schedule = Schedule::named(name, ranks, rows.len(), Some(chunks)).unwrap();
        for processes in [1, 2, 4]
            .into_iter()
            .filter(|processes| *processes <= ranks)
        {
            for (replay, recompute) in [(false, false), (true, true)] {
                let simulation =
                    Simulation::new(processes, ranks).delays(9, Duration::from_millis(1));
                let found = together(simulation.run(|p| {
                    let mut pipeline = skipping(p, &schedule)?;
                    pipeline.replay(replay);
                    (0..4).for_each(|stage| pipeline.recompute(stage, recompute));
                    assert_eq!((pipeline.params(0).len(), pipeline.params(3).len()), (1, 0));
                    if replay {
                        step(p, &mut pipeline, &schedule, &rows)?;
                    }
                    step(p, &mut pipeline, &schedule, &rows)
                }));
                assert_eq!(found, expected, "{name} on {ranks} ranks over {processes}");
            }
        }
    }
}

#[test]
fn wiring_that_does_not_fit_is_refused() {
    let schedule = Schedule::gpipe(4, 2).unwrap();
    let results = Simulation::new(2, 4).run(|p| {
        let meshes = meshes(p, 4)?;
        let scale = || Scale::of(Rows::All);
        let first =
            |p: &mut Program| Pipeline::first(scale(), &meshes[0], params(p, 0, &meshes[0])?);
        let mut found = Vec::new();
        // An output of another pipeline.
        let (one, other) = (first(p)?, first(p)?);
        let w = params(p, 1, &meshes[1])?;
        found.push(one.then_from(scale(), &meshes[1], w, &other.output()).err());
        // An output that no stage reads: the output of stage 1.
        let skip = other.output();
        let w = params(p, 1, &meshes[1])?;
        let front = other.then(scale(), &meshes[1], w)?;
        let w = params(p, 2, &meshes[2])?;
        let front = front.then_from(scale(), &meshes[2], w, &skip)?;
        let w = params(p, 3, &meshes[3])?;
        let mut unread = front.then(Square(Rows::All), &meshes[3], w)?;
        found.push(step(p, &mut unread, &schedule, &[1; 2]).err());
        // An output that does not exist.
        let front = first(p)?;
        let no_leaf = front.output().leaf("h");
        let w = params(p, 1, &meshes[1])?;
        let front = front.then_from(scale(), &meshes[1], w, &no_leaf)?;
        let w = params(p, 2, &meshes[2])?;
        let front = front.then(scale(), &meshes[2], w)?;
        let w = params(p, 3, &meshes[3])?;
        found.push(
            step(
                p,
                &mut front.then(Square(Rows::All), &meshes[3], w)?,
                &schedule,
                &[1; 2],
            )
            .err(),
        );
        let mut pipeline = skipping(p, &schedule)?;
        found.push(pipeline.tie((1, ""), (3, "")).err());
        found.push(pipeline.tie((1, ""), (0, "")).err());
        found.push(pipeline.tie((1, "w"), (2, "")).err());
        found.push(pipeline.tie((1, ""), (9, "")).err());
        found.push(pipeline.tie((1, ""), (1, "")).err());
        found.push(
            pipeline
                .set_params(3, vec![MpmdArray::scalar(1.0f32)])
                .err(),
        );
        Ok(found
            .into_iter()
            .map(|error| error.map(|error| error.to_string()))
            .collect::<Vec<_>>())
    });
    let expected = [
        "an output of another pipeline",
        "output \"\" of stage 1 is read by no later stage",
        "stage 0 has no output \"h\"",
        "parameter \"\" of stage 3 `Square` is tied to another already",
        "other stages use parameter \"\" of stage 0 `Scale`",
        "stage 1 `Scale` has no parameter \"w\"; it has \"\"",
        "no stage 9",
        "of one stage cannot be tied",
        "1 arrays for the 0 parameters",
    ];
    for result in results {
        let found = result.unwrap();
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.into_iter().zip(expected) {
            let found = found.unwrap_or_default();
            assert!(found.contains(expected), "{found:?}, not {expected:?}");
        }
    }
}

/// Checks loss, weight and gradients of microbatches with different numbers of rows against a
/// direct computation. Each has kernels for its shapes, and its own weight in the loss.
#[test]
fn ragged_microbatches_count_by_their_rows() {
    let rows = [3, 1, 2, 3, 1, 4];
    let expected = by_hand(4, &rows);
    assert_eq!(expected.loss.unwrap()[1], 14.0);
    for (name, ranks, chunks) in [("1f1b", 4, 1), ("zb-h1", 4, 1), ("interleaved", 2, 2)] {
        let schedule = Schedule::named(name, ranks, rows.len(), Some(chunks)).unwrap();
        for processes in [1, 2] {
            for fuses in [false, true] {
                let found = together(Simulation::new(processes, ranks).run(|p| {
                    let mut pipeline = chain(p, &schedule, fuses)?;
                    pipeline.recompute(1, true);
                    step(p, &mut pipeline, &schedule, &rows)
                }));
                assert_eq!(found, expected, "{name} over {processes}");
            }
        }
    }
}

/// An error in an operation of a step names the line that called the step.
#[test]
fn errors_name_the_line_of_the_user() {
    let schedule = Schedule::gpipe(2, 1).unwrap();
    let results = Simulation::new(2, 2).run(|p| {
        let mut pipeline = chain(p, &schedule, false)?;
        let mut batch = crate::stages::microbatches(p, &pipeline, &[1])?;
        // Labels on the mesh of the first stage.
        let labels = MpmdArray::from_slice(&[1, WIDTH], &[0.0f32; WIDTH])?;
        let labels = p.device_put(&labels, pipeline.mesh(0).replicated())?;
        batch = batch
            .into_iter()
            .map(|microbatch| microbatch.side(1, labels.clone()))
            .collect();
        let (line, result) = (line!(), pipeline.train_step(p, &schedule, batch));
        Ok((
            line,
            result
                .err()
                .map_or_else(String::new, |error| error.to_string()),
        ))
    });
    for result in results {
        let (line, error) = result.unwrap();
        assert!(
            error.contains(&format!("pipeline_wiring.rs:{line}")),
            "{error}"
        );
    }
}
