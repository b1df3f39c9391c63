//! Programs with the progress, clocks and settings that their operators wanted.

pub(crate) mod environment_of_one_process;
pub(crate) mod evaluation_on_one_process;
pub(crate) mod own_clock_ends_a_training;
pub(crate) mod progress_ends_a_step;
pub(crate) mod shards_without_a_question;

use mpmd::prelude::*;
use mpmd::topology::Mesh;

/// Returns the mesh of each of two stages, with a device each.
pub(crate) fn stages(p: &Program) -> Result<Vec<Mesh>> {
    Ok(p.mesh(&[("stage", 2)])?.split("stage")?)
}

/// Computes a step: an array that grows by one on each stage. Returns it on the last stage.
pub(crate) fn step(p: &mut Program, stages: &[Mesh]) -> Result<MpmdArray> {
    let mut x = MpmdArray::scalar(1.0f32);
    for stage in stages {
        x = p.device_put(&x, stage.replicated())?;
        let next = p.jit(elementwise(|x: f32| x + 1.0)).on(stage);
        x = next.outputs(stage.replicated()).build()?.call(p, x)?;
    }
    Ok(x)
}
