//! The pipeline has two stages, and the schedule is for four ranks.
//!
//! kind: a schedule that does not fit the pipeline
//! found by: issue
//! named: all
//! says: is for 4 stages (on 4 ranks), and the pipeline has 2

use mpmd::pipeline::{Microbatch, Pipeline, Schedule, loss_stage, stage};
use mpmd::prelude::*;
use mpmd::tree::Empty;

use super::ones;

pub(crate) fn run(p: &mut Program) -> Result<()> {
    let scale = stage(
        like_input,
        |x: View<f32>, w: View<f32>, mut y: ViewMut<f32>| y[0] = x[0] * w[0],
        |_: View<f32>, w: View<f32>, dy: View<f32>, mut dx: ViewMut<f32>| dx[0] = w[0] * dy[0],
        |x: View<f32>, _: View<f32>, dy: View<f32>, mut dw: ViewMut<f32>| dw[0] += x[0] * dy[0],
    );
    let square = loss_stage(
        |y: View<f32>, mut sum: ViewMut<f32>| sum[0] = y[0] * y[0],
        |y: View<f32>, mut dy: ViewMut<f32>| dy[0] = 2.0 * y[0],
    );

    let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
    let w = p.device_put(&ones(1)?, meshes[0].replicated())?;
    let x = p.device_put(&ones(1)?, meshes[0].replicated())?;
    let pipeline = Pipeline::first(scale, &meshes[0], w)?;
    let mut pipeline = pipeline.then(square, &meshes[1], Empty::new())?;

    let schedule = Schedule::one_f_one_b(4, 1)?;
    let output = pipeline.train_step(p, &schedule, vec![Microbatch::new(x)])?; // at fault
    output.loss.sum.block_until_ready()?;
    Ok(())
}
