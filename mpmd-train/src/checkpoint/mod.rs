//! Checkpoints of a training: parameters, optimiser state and position, in a folder.
//!
//! A checkpoint of step 100 is the folder `step-00000100` and the manifest `step-00000100.json`
//! beside it. The folder has `model.safetensors`, or several files with an index as
//! [`tensors::save`](crate::tensors::save) writes them, and for each process a list of the pieces
//! that it wrote, with their hashes. The manifest is written last, and never replaced. A checkpoint
//! exists exactly if its manifest does. A folder without a manifest is the rest of a broken save.
//!
//! Parameters have their path within the stage as name, and the optimiser's arrays
//! `optimizer/<kind>/<path>`. If two stages have parameters of one path, all names begin with the
//! stage, as in `stage.1.`. Such a checkpoint restores to the same number of stages only.
//!
//! The data and the random keys of a microbatch depend on the seed, the step and the microbatch
//! only. So step and seed are the whole position of a training.
//!
//! All processes must see the same folder. Each writes its own regions of shared files, so several
//! hosts need a file system that keeps such writes apart, as those of clusters do. If one does not,
//! the hashes show it.

mod arrays;
mod folder;
mod load;
mod manifest;
mod save;

use std::path::PathBuf;

use mpmd_core::tree::Tree;
use mpmd_core::{MpmdArray, Program, Result};

use crate::Trainer;
use crate::agree::on_first;
use crate::tensors::failed;
use arrays::Contents;
pub(crate) use save::{Phase, SaveStatus, Saving};

/// A folder of checkpoints, how to write them, and which one to restore.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: Option<usize>,
    file_bytes: u64,
    at: Option<u64>,
}

impl Checkpoints {
    /// Names a folder of checkpoints, which need not exist. Keeps all checkpoints, and begins a new
    /// file after 4 GiB.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), keep: None, file_bytes: 4 << 30, at: None }
    }

    /// Keeps only the newest `n` checkpoints, at least one. Each save then removes older ones, and
    /// the rests of broken saves before it.
    #[must_use]
    pub fn keep(mut self, n: usize) -> Self {
        self.keep = Some(n.max(1));
        self
    }

    /// Begins a new file when one would have more than this number of bytes.
    #[must_use]
    pub fn file_bytes(mut self, bytes: u64) -> Self {
        self.file_bytes = bytes.max(1);
        self
    }

    /// Makes [`Trainer::restore`] take the checkpoint of this step, in place of the newest one.
    /// Saves do not depend on it.
    #[must_use]
    pub fn at(mut self, step: u64) -> Self {
        self.at = Some(step);
        self
    }

    /// Returns the steps of the complete checkpoints in the folder, in ascending order. None if the
    /// folder does not exist.
    ///
    /// # Errors
    ///
    /// If the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        folder::steps(&self.folder)
    }

    /// Returns an error on every process if there is a checkpoint of a later step, which a training
    /// that continues after `step` would meet.
    pub(crate) fn refuse_later(&self, p: &mut Program, step: u64) -> Result<()> {
        on_first(p, (), || {
            let Some(later) = self.steps()?.into_iter().rfind(|later| *later > step) else {
                return Ok(());
            };
            let problem = format!(
                "there is a checkpoint of step {later}, and this training continues after step \
                 {step}. Restore it, remove it with its folder, or save to another folder"
            );
            Err(failed(&folder::manifest(&self.folder, later), &problem))
        })
    }
}

impl<In: Tree<Leaf = MpmdArray>> Trainer<In> {
    /// Saves a checkpoint and blocks until it is complete. Every process must call it.
    ///
    /// Takes host memory for a copy of the process's regions. In a dry run it writes nothing.
    /// [`Run::checkpoints`](crate::Run::checkpoints) saves while the training goes on.
    ///
    /// # Errors
    ///
    /// If there is a checkpoint of this step already; then nothing is written. If an array's
    /// operation failed, or a file cannot be written. Every process gets the error.
    pub fn save(&mut self, p: &mut Program, to: &Checkpoints) -> Result<()> {
        self.begin_save(p, to)?.finish(p)
    }

    /// Begins to save a checkpoint: see [`Saving::begin`].
    pub(crate) fn begin_save(&mut self, p: &mut Program, to: &Checkpoints) -> Result<Saving> {
        let saving = Saving::begin(p, to, Contents::of(self), &self.status.save)?;
        self.saved = Some((to.folder.clone(), self.steps()));
        Ok(saving)
    }

    /// True if the folder has the arrays of the last step, since a save of this trainer was begun
    /// after it, or it was restored from there.
    pub(crate) fn is_saved(&self, to: &Checkpoints) -> bool {
        self.saved.as_ref().is_some_and(|saved| *saved == (to.folder.clone(), self.steps()))
    }

    /// Continues from the newest complete checkpoint of the folder, or from the one that
    /// [`Checkpoints::at`] names, and returns its step. Returns `None`, and changes nothing, if
    /// there is none. Every process must call it.
    ///
    /// Restores the parameters, the optimiser's state, the step and the seed; a seed set by
    /// [`Trainer::seed`] is replaced. Processes, stages and shardings may be others than those that
    /// saved. The schedule, the learning rate and the data are those of this program.
    ///
    /// Each piece is read once, by the first device that holds it, and compared with its hash. Old
    /// and new arrays are in memory at once. In a dry run it returns `None` and reads nothing.
    ///
    /// # Errors
    ///
    /// If there is no checkpoint of the step that was asked for. If a file is damaged, or the
    /// arrays are others than those of this trainer: by name, shape or dtype. Every process gets the
    /// same error, and nothing is changed. A damaged checkpoint is not passed over: the error names
    /// an older one, if there is one.
    pub fn restore(&mut self, p: &mut Program, from: &Checkpoints) -> Result<Option<u64>> {
        let contents = Contents::of(self);
        let Some((manifest, arrays)) = load::load(p, from, &contents)? else { return Ok(None) };
        Contents::set(self, arrays)?;
        self.optimizer.set_updates(manifest.step);
        self.seed = manifest.seed;
        self.saved = Some((from.folder.clone(), manifest.step));
        Ok(Some(manifest.step))
    }
}
