//! Trainings that evaluate, save and end in a wrong way.

pub(crate) mod begun_anew;
pub(crate) mod best_not_kept;
pub(crate) mod ends_by_itself;
pub(crate) mod saves_nowhere;
pub(crate) mod text_of_each_process;

use std::path::{Path, PathBuf};

use mpmd::pipeline::{Microbatch, Pipeline, Schedule, loss_stage, stage};
use mpmd::prelude::*;
use mpmd::topology::Mesh;
use mpmd::train::data::{Data, MicrobatchPlace, TextBytes};
use mpmd::train::{AdamW, Rate, Trainer};
use mpmd::tree::Empty;
use mpmd::{ProcessId, Program};

/// Data that are the same in every step.
#[derive(Default)]
struct Same {
    /// A text that the processes compare, of which the microbatches use nothing.
    text: Option<TextBytes>,
}

impl Same {
    fn microbatch(p: &mut Program, meshes: &[Mesh]) -> Result<Microbatch<MpmdArray>> {
        let x = MpmdArray::from_slice(&[2], &[1.0f32, 2.0])?;
        Ok(Microbatch::new(p.device_put(&x, meshes[0].replicated())?))
    }
}

impl Data<MpmdArray> for Same {
    fn compare(&self, p: &mut Program) -> Result<()> {
        self.text.as_ref().map_or(Ok(()), |text| text.compare(p))
    }

    fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        _: MicrobatchPlace,
    ) -> Result<Microbatch<MpmdArray>> {
        Self::microbatch(p, meshes)
    }

    fn held_out_len(&self) -> usize {
        1
    }

    fn held_out(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        _: usize,
    ) -> Result<Microbatch<MpmdArray>> {
        Self::microbatch(p, meshes)
    }
}

/// Creates a training of two stages with this learning rate.
fn trainer(p: &mut Program, rate: f64) -> Result<Trainer<MpmdArray>> {
    let scale = stage(
        like_input,
        |x: View<f32>, w: View<f32>, mut y: ViewMut<f32>| {
            y.iter_mut().zip(&*x).for_each(|(y, x)| *y = x * w[0]);
        },
        |_: View<f32>, w: View<f32>, dy: View<f32>, mut dx: ViewMut<f32>| {
            dx.iter_mut().zip(&*dy).for_each(|(dx, dy)| *dx = w[0] * dy);
        },
        |x: View<f32>, _: View<f32>, dy: View<f32>, mut dw: ViewMut<f32>| {
            dw[0] += x.iter().zip(&*dy).map(|(x, dy)| x * dy).sum::<f32>();
        },
    );
    let square = loss_stage(
        |y: View<f32>, mut sum: ViewMut<f32>| sum[0] = y.iter().map(|y| y * y).sum(),
        |y: View<f32>, mut dy: ViewMut<f32>| {
            dy.iter_mut().zip(&*y).for_each(|(dy, y)| *dy = 2.0 * y);
        },
    );
    let meshes = p.mesh(&[("stage", 2)])?.split("stage")?;
    let w = p.device_put(&MpmdArray::scalar(3.0f32), meshes[0].replicated())?;
    let pipeline = Pipeline::first(scale, &meshes[0], w)?.then(square, &meshes[1], Empty::new())?;
    let schedule = Schedule::one_f_one_b(2, 1)?;
    let trainer = Trainer::new(p, pipeline, schedule, AdamW::default())?;
    Ok(trainer.rate(Rate::Constant(rate)))
}

/// A folder for checkpoints, which process 0 removes at the end.
struct Folder {
    path: PathBuf,
    is_first: bool,
}

impl Folder {
    fn new(p: &mut Program) -> Result<Self> {
        let name = format!("mpmd-broken-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let path = p.broadcast_value(ProcessId(0), path.clone(), || Ok(path))?;
        // A dry run has no folder of its own, and removes nothing.
        let is_first = p.process() == ProcessId(0) && !p.is_dry_run();
        Ok(Self { path, is_first })
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.is_first {
            // It may not exist yet.
            _ = std::fs::remove_dir_all(&self.path);
        }
    }
}
