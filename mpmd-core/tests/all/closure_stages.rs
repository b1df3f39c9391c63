//! Stages made from closures: values on any number of processes and devices, and refusals.

use mpmd_core::Simulation;
use mpmd_core::pipeline::{Microbatch, Pipeline, Schedule, loss_stage, stage};
use mpmd_core::prelude::*;
use mpmd_core::topology::Mesh;
use mpmd_core::tree::Empty;

use crate::common::watchdog;

const W: [f32; 3] = [0.5, -2.0, 3.0];

/// The rows (input, label) of three microbatches.
const BATCH: [[[f32; 3]; 2]; 3] = [
    [[1.0, 2.0, 3.0], [0.0, 1.0, 0.0]],
    [[-1.0, 0.5, 2.0], [4.0, 0.0, -1.0]],
    [[0.25, 0.0, -3.0], [1.0, 1.0, 1.0]],
];

/// Puts values on every device of a mesh.
fn put(p: &mut Program, values: &[f32], mesh: &Mesh) -> Result<MpmdArray> {
    let array = MpmdArray::from_slice(&[values.len()], values)?;
    p.device_put(&array, mesh.replicated())
}

/// Trains one step of the loss `(x * w - label)²`, element by element, over two stages of two
/// devices. Returns the values of the losses and of the gradient of `w` that this process has.
fn step(p: &mut Program, schedule: &Schedule) -> Result<[Option<Vec<f32>>; 2]> {
    let products = stage(
        like_input,
        |x: View<f32>, w: View<f32>, mut y: ViewMut<f32>| {
            (0..y.len()).for_each(|i| y[i] = x[i] * w[i]);
        },
        |_: View<f32>, w: View<f32>, dy: View<f32>, mut dx: ViewMut<f32>| {
            (0..dx.len()).for_each(|i| dx[i] = w[i] * dy[i]);
        },
        |x: View<f32>, _: View<f32>, dy: View<f32>, mut dw: ViewMut<f32>| {
            (0..dw.len()).for_each(|i| dw[i] += x[i] * dy[i]);
        },
    );
    let square = loss_stage(
        |y: View<f32>, label: View<f32>, mut sum: ViewMut<f32>| {
            sum[0] = (0..y.len()).map(|i| (y[i] - label[i]).powi(2)).sum();
        },
        |y: View<f32>, label: View<f32>, mut dy: ViewMut<f32>| {
            (0..dy.len()).for_each(|i| dy[i] = 2.0 * (y[i] - label[i]));
        },
    );

    let meshes = p.mesh(&[("stage", 2), ("copy", 2)])?.split("stage")?;
    let w = put(p, &W, &meshes[0])?;
    let pipeline = Pipeline::first(products, &meshes[0], w)?;
    let mut pipeline = pipeline.then(square, &meshes[1], Empty::new())?;
    let mut batch = Vec::new();
    for [x, label] in BATCH {
        let x = put(p, &x, &meshes[0])?;
        let label = put(p, &label, &meshes[1])?;
        batch.push(Microbatch::new(x).side(1, label));
    }

    let output = pipeline.train_step(p, schedule, batch)?;
    let read = |array: &MpmdArray| -> Result<_> {
        Ok(array.to_host()?.map(|x| x.to_vec::<f32>()).transpose()?)
    };
    Ok([read(&output.loss.sum)?, read(&output.gradients[0][0].1)?])
}

#[test]
fn closure_stages_train_on_any_number_of_processes() {
    let _limit = watchdog(60);
    let mut loss = 0.0;
    let mut gradient = [0.0; 3];
    for [x, label] in BATCH {
        for i in 0..3 {
            let error = x[i] * W[i] - label[i];
            loss += error * error;
            gradient[i] += 2.0 * error * x[i];
        }
    }

    for schedule in [Schedule::gpipe(2, 3), Schedule::one_f_one_b(2, 3)] {
        let schedule = schedule.unwrap();
        for processes in [1, 2, 4] {
            let results = Simulation::new(processes, 4).run(|p| step(p, &schedule));
            let results: Vec<_> = results.into_iter().map(Result::unwrap).collect();
            let losses: Vec<_> = results
                .iter()
                .filter_map(|[loss, _]| loss.as_ref())
                .collect();
            let gradients: Vec<_> = results.iter().filter_map(|[_, dw]| dw.as_ref()).collect();

            assert!(!losses.is_empty() && !gradients.is_empty());
            for found in losses {
                assert!((found[0] - loss).abs() < 1e-4, "{found:?} is not {loss}");
            }
            for found in gradients {
                let differs = |(a, b): (&f32, &f32)| (a - b).abs() > 1e-4;
                assert!(
                    !found.iter().zip(&gradient).any(differs),
                    "{found:?} is not {gradient:?}"
                );
            }
        }
    }
}

#[test]
fn closures_of_a_stage_that_do_not_fit_are_refused() {
    let _limit = watchdog(60);
    let mut p = Program::builder().devices(2).alone().unwrap();
    let meshes = p.mesh(&[("stage", 2)]).unwrap().split("stage").unwrap();
    let factor = std::hint::black_box(2.0f32);

    let mut refused = |gradient_of_labels: bool, with: bool| {
        let w = put(&mut p, &W, &meshes[0])?;
        let first = stage(
            like_input,
            move |x: View<f32>, _: View<f32>, mut y: ViewMut<f32>| y[0] = factor * x[0],
            |_: View<f32>, _: View<f32>, _: View<f32>, _: ViewMut<f32>| {},
            |_: View<f32>, _: View<f32>, _: View<f32>, _: ViewMut<f32>| {},
        );
        let first = if with { first.with(factor) } else { first };
        let pipeline = Pipeline::first(first, &meshes[0], w)?;
        let x = put(&mut p, &W, &meshes[0])?;
        let batch = vec![Microbatch::new(x)];
        let schedule = Schedule::gpipe(2, 1)?;
        if gradient_of_labels {
            let last = loss_stage(
                |_: View<f32>, mut sum: ViewMut<f32>| sum[0] = 1.0,
                |_: View<f64>, _: ViewMut<f32>| {},
            );
            let mut pipeline = pipeline.then(last, &meshes[1], Empty::new())?;
            return pipeline.train_step(&mut p, &schedule, batch).map(drop);
        }
        let last = loss_stage(
            |_: View<f32>, mut sum: ViewMut<f32>| sum[0] = 1.0,
            |_: View<f32>, _: ViewMut<f32>| {},
        );
        let mut pipeline = pipeline.then(last, &meshes[1], Empty::new())?;
        pipeline.train_step(&mut p, &schedule, batch).map(drop)
    };

    let error = refused(false, false).unwrap_err().to_string();
    assert!(
        error.contains("captures values: declare each by `.with(value)`"),
        "{error}"
    );
    let error = refused(true, true).unwrap_err().to_string();
    assert!(error.contains("for the gradient: input"), "{error}");
    refused(false, true).unwrap();
    p.finish().unwrap();
}
