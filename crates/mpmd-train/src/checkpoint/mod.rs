//! Checkpoints of a training: parameters, optimiser state and position, in a folder.
//!
//! ```
//! use mpmd_core::prelude::*;
//! use mpmd_train::data::Data;
//! use mpmd_train::{Checkpoints, RunOutcome, Run, Trainer};
//!
//! /// Continues from the newest checkpoint, if there is one, and saves every 100 steps.
//! fn train<D: Data<MpmdArray>>(
//!     p: &mut Program,
//!     trainer: &mut Trainer<MpmdArray>,
//!     data: &D,
//! ) -> Result<RunOutcome> {
//!     let checkpoints = Checkpoints::new("checkpoints").keep(3);
//!     trainer.restore(p, &checkpoints)?;
//!     trainer.run(p, Run::steps(1000).checkpoints(checkpoints).save_every(100), data)
//! }
//! ```
//!
//! A checkpoint of step 100 is the folder `step-00000100` and the manifest `step-00000100.json`
//! beside it. The folder has `model.safetensors`, or several files with an index, as
//! [`tensors::save`](crate::tensors::save) writes them. It also has a list for each process: the
//! pieces that the process wrote, with their hashes. The manifest is written last, and never
//! replaced. A checkpoint exists exactly if its manifest does. A folder without a manifest is the
//! rest of a broken save. After a job has lost processes, it writes into folders such as
//! `step-00000100-epoch-2`. So a stopped process that wakes up again cannot change its files.
//!
//! Parameters have their path within the stage as name, and the optimiser's arrays
//! `optimizer/<kind>/<path>`. If two stages have parameters of one path, all names begin with the
//! stage, as in `stage.1.`. Such a checkpoint restores to the same number of stages only.
//!
//! The data and the random keys of a microbatch depend on the seed, the step and the microbatch
//! only. So step and seed are the whole position of a training. A checkpoint also has the best
//! evaluation so far.
//!
//! Process 0 holds a lock on the file `.lock`, so that only one job saves there.
//!
//! All processes must see the same folder. Each writes its own regions of shared files, so several
//! hosts need a file system that keeps such writes apart, as those of clusters do. If one does not,
//! the hashes show it.

mod folder;
mod load;
mod lock;
mod manifest;
mod pieces;
mod save;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mpmd_base::block::Mutex;
use mpmd_core::{MpmdArray, Program, Result};

use crate::agree::on_first;
use crate::best::BestEvaluation;
use crate::tensors::disk::create_folder;
use crate::tensors::{check_folder, failed};
pub(crate) use load::{LoadedCheckpoint, load};
use lock::FolderLock;
pub(crate) use save::{SaveProgress, SaveStatus, Saving};

/// The arrays of a training, its position (the step and the seed), and its best evaluation.
pub(crate) struct CheckpointContents {
    pub(crate) step: u64,
    pub(crate) seed: u64,
    pub(crate) best: Option<BestEvaluation>,
    pub(crate) stages: usize,
    /// True if the names of the arrays begin with their stage, as in `stage.1.`.
    pub(crate) by_stage: bool,
    /// (name, array) of the parameters of all stages, then of the optimiser's arrays of all stages.
    pub(crate) arrays: Vec<(String, MpmdArray)>,
}

/// The checkpoint to restore.
#[derive(Clone, Copy, Debug)]
enum RestorePoint {
    Newest,
    Step(u64),
}

/// A folder of checkpoints: how to save them, and which one to restore.
///
/// The first save, or the start of a run that saves, locks the folder. Dropping this value and all
/// its clones releases the lock. Until then, other jobs cannot save to the folder. A second
/// `Checkpoints` of this program for the folder cannot save either: clone this value.
#[derive(Clone, Debug)]
pub struct Checkpoints {
    folder: PathBuf,
    keep: Option<usize>,
    keeps_best: bool,
    file_bytes: u64,
    trained_only: bool,
    at: RestorePoint,
    settings: BTreeMap<String, String>,
    /// The lock of the folder, once process 0 has taken it. `None` on other processes.
    lock: Arc<Mutex<Option<FolderLock>>>,
}

impl Checkpoints {
    /// Creates the settings for checkpoints in `folder`, which need not exist. By default all
    /// checkpoints are kept, and a file has at most 4 GiB of values.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            keep: None,
            keeps_best: false,
            file_bytes: 4 << 30,
            trained_only: false,
            at: RestorePoint::Newest,
            settings: BTreeMap::new(),
            lock: Arc::default(),
        }
    }

    /// Keeps only the newest `n` checkpoints, at least one. Each save then removes older
    /// checkpoints, and files of broken saves before it. The save fails if they cannot be removed.
    #[must_use]
    pub fn keep(mut self, n: usize) -> Self {
        self.keep = Some(n.max(1));
        self
    }

    /// Also keeps the checkpoint of the [best evaluation](crate::Trainer::best), which
    /// [`at`](Self::at) restores. There is one if the training saved after the step of this
    /// evaluation. Has no effect without [`keep`](Self::keep).
    #[must_use]
    pub fn keep_best(mut self) -> Self {
        self.keeps_best = true;
        self
    }

    /// Sets the limit on the bytes of values in one file. A single array may exceed it.
    #[must_use]
    pub fn file_bytes(mut self, bytes: u64) -> Self {
        self.file_bytes = bytes.max(1);
        self
    }

    /// Saves and restores only the parameters that are trained. A checkpoint of a training of
    /// adapters then has only the adapters and their optimiser state. Restoring it needs a trainer
    /// with the same frozen parameters: declare their source by [`setting`](Self::setting).
    #[must_use]
    pub fn trained_only(mut self) -> Self {
        self.trained_only = true;
        self
    }

    /// Makes [`Trainer::restore`](crate::Trainer::restore) load the checkpoint of step `step`
    /// instead of the newest one. Has no effect on saves.
    #[must_use]
    pub fn at(mut self, step: u64) -> Self {
        self.at = RestorePoint::Step(step);
        self
    }

    /// Declares a setting of the model that shapes do not show, such as its number of attention
    /// heads. Saves store it, and [`Trainer::restore`] refuses a checkpoint with another value.
    ///
    /// [`Trainer::restore`]: crate::Trainer::restore
    #[must_use]
    pub fn setting(mut self, name: impl Into<String>, value: impl ToString) -> Self {
        self.settings.insert(name.into(), value.to_string());
        self
    }

    /// Returns the steps of the complete checkpoints in the folder, in ascending order. The list is
    /// empty if the folder does not exist.
    ///
    /// # Errors
    ///
    /// If the folder cannot be read.
    pub fn steps(&self) -> Result<Vec<u64>> {
        folder::steps(&self.folder)
    }

    /// Returns true if checkpoints leave out the parameters that are not trained.
    pub(crate) fn is_trained_only(&self) -> bool {
        self.trained_only
    }

    /// Returns the folder of the checkpoints.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Locks the folder for an epoch of a run, unless this value holds the lock already.
    fn lock(&self, run: u128, epoch: u64) -> Result<()> {
        let mut lock = self.lock.lock();
        if !lock.as_ref().is_some_and(|lock| lock.is_of(&self.folder)) {
            create_folder(&self.folder)?;
            *lock = Some(FolderLock::take(&self.folder, run, epoch)?);
        }
        Ok(())
    }

    /// Prepares the folder for the saves of a training that continues after the step of `contents`.
    /// In epoch 1, removes the files of broken saves. Every process gets the same error.
    ///
    /// Fails if the folder cannot be written, has no space for a checkpoint, or is locked by
    /// another job. In epoch 1, also fails if it has a checkpoint of a later step, since the
    /// training could not save that step.
    pub(crate) fn claim(&self, p: &mut Program, contents: &CheckpointContents) -> Result<()> {
        let bytes = contents
            .arrays
            .iter()
            .map(|(_, array)| array.aval().bytes() as u64)
            .sum();
        let step = contents.step;
        let run = p.run_id();
        let epoch = p.epoch();

        check_folder(p, &self.folder, 0)?;
        on_first(p, (), || {
            self.lock(run, epoch)?;
            match epoch {
                1 => folder::remove_broken(&self.folder),
                _ => Ok(()),
            }
        })?;
        check_folder(p, &self.folder, bytes)?;
        on_first(p, (), || {
            if epoch > 1 {
                return Ok(());
            }
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
