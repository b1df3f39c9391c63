//! Trains a small candle model in two stages, each on a device of its own.

use mpmd::candle::nn::loss::cross_entropy_sum;
use mpmd::candle::nn::{self, Linear, Module};
use mpmd::candle::{Tensor, named, stage};
use mpmd::pipeline::{Loss, Microbatch, Pipeline, Schedule};
use mpmd::prelude::*;
use mpmd::random::{Key, uniform_f32};
use mpmd::topology::Mesh;
use mpmd::train::data::{Data, MicrobatchPlace};
use mpmd::train::{AdamW, Rate, Run, Trainer};

const WIDTH: usize = 32;
const ROWS: usize = 32;

fn main() -> Result<()> {
    Program::builder().devices(2).run(|p| {
        let loss = train(p, 200)?;
        if p.process().index() == 0 && !p.is_dry_run() {
            println!("loss of the last step: {loss:.4}");
        }
        Ok(())
    })
}

/// Trains the model for this number of steps. Returns the loss of the last step, which is the same
/// on every process.
fn train(p: &mut Program, steps: u64) -> Result<f64> {
    let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;

    // The model. Change it here: a stage is its parameters, and its forward function.
    let lower = stage(
        |vb| nn::linear(2, WIDTH, vb.pp("lower")),
        |layer: &Linear, x: Tensor, _| layer.forward(&x)?.gelu(),
    )?;
    let upper = stage(
        |vb| nn::linear(WIDTH, 2, vb.pp("upper")),
        |layer: &Linear, x: Tensor, cx| {
            let classes = cx.side("classes")?;
            let (sum, weight) = cross_entropy_sum(&layer.forward(&x)?, &classes, None)?;
            Ok(Loss::new(sum, weight))
        },
    )?;

    let lower_params = lower.init(p, &meshes[0], 0)?;
    let upper_params = upper.init(p, &meshes[1], 0)?;
    let pipeline = Pipeline::first(lower, &meshes[0], lower_params)?;
    let pipeline = pipeline.then(upper, &meshes[1], upper_params)?;

    let schedule = Schedule::one_f_one_b(2, 4)?; // 2 stages, 4 microbatches a step
    let trainer = Trainer::new(p, pipeline, schedule, AdamW::default())?;
    let run = Run::steps(steps).progress(false);
    let outcome = trainer.rate(Rate::Constant(1e-2)).run(p, run, &Circle)?;
    Ok(outcome.last.map_or(f64::NAN, |step| step.loss))
}

/// Random points of a square, in two classes: in the circle, and around it.
struct Circle;

impl Data<MpmdArray> for Circle {
    fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        at: MicrobatchPlace,
    ) -> Result<Microbatch<MpmdArray>> {
        let (points, classes) = points(at.key);
        let points = MpmdArray::from_slice(&[ROWS, 2], &points)?;
        let classes = MpmdArray::from_slice(&[ROWS], &classes)?;

        // The first stage takes the points, the last one the classes.
        let points = p.device_put(&points, meshes[0].replicated())?;
        let classes = p.device_put(&classes, meshes[1].replicated())?;
        Ok(Microbatch::new(points).side(1, named([("classes", classes)])))
    }
}

/// Returns the coordinates of `ROWS` points, and the class of each. They depend on the key alone,
/// so every process computes the same.
fn points(key: Key) -> (Vec<f32>, Vec<u32>) {
    let points: Vec<f32> = (0..2 * ROWS as u64)
        .map(|i| 2.0 * uniform_f32(key, i) - 1.0)
        .collect();
    let classes = points
        .chunks(2)
        .map(|point| u32::from(point[0].powi(2) + point[1].powi(2) > 0.6))
        .collect();
    (points, classes)
}

#[cfg(test)]
mod tests {
    use mpmd::testing::simulate;

    use super::*;

    #[test]
    fn one_process_and_two_get_the_same_loss() {
        // The processes are threads. The number 7 decides the order of all events.
        let alone = simulate(1, 2, 7, |p| train(p, 20));
        let both = simulate(2, 2, 7, |p| train(p, 20));
        let loss = *alone[0].as_ref().unwrap();
        assert!(loss < 0.69, "it learns nothing: {loss}");
        for result in &both {
            assert_eq!(*result.as_ref().unwrap(), loss);
        }
    }
}
