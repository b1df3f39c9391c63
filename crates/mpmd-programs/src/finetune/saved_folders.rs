//! The folders in which `finetune` saves: created before the job starts, and claimed by the job.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use mpmd::launch::JobEnv;
use mpmd::train::tensors::{FolderClaim, check_folder, claim_folder};
use mpmd::{Error, Program};
use mpmd_models::{Adapter, Folder};

use crate::model::is_gguf;

/// The option that names the folder of checkpoints.
const CHECKPOINTS: &str = "--checkpoints";

/// A folder for a model or an adapter, with the option that names it.
#[derive(Clone, Copy)]
pub(super) struct SavedFolder<'a> {
    pub(super) option: &'static str,
    pub(super) path: &'a Path,
    /// The space that the model takes.
    pub(super) bytes: u64,
}

/// All folders in which a job saves.
#[derive(Default)]
pub(super) struct SavedFolders<'a> {
    pub(super) models: Vec<SavedFolder<'a>>,
    pub(super) checkpoints: Option<&'a Path>,
}

impl SavedFolders<'_> {
    /// Creates the folders, except in a dry run. Those for models must differ from each other and
    /// from the folders of the model and of the adapter that it is used with, and lie outside of
    /// that of checkpoints.
    ///
    /// A folder that cannot be created is found here, before hours of training.
    pub(super) fn create(&self, source: &Folder, adapter: Option<&Adapter>) -> anyhow::Result<()> {
        let is_dry_run = JobEnv::from_env()?.is_some_and(|env| env.dry_run.is_some());
        let create = |option: &str, path: &Path| -> anyhow::Result<()> {
            if is_dry_run {
                return Ok(());
            }
            let named = || format!("{option} {}: cannot create this folder", path.display());
            std::fs::create_dir_all(path).with_context(named)
        };

        if let Some(checkpoints) = self.checkpoints {
            create(CHECKPOINTS, checkpoints)?;
        }
        let mut taken = vec![("--model or --new", found(source.path()))];
        taken.extend(adapter.map(|adapter| ("--adapter", found(adapter.path()))));
        for SavedFolder { option, path, .. } in &self.models {
            let name = path.display();
            ensure!(
                !is_gguf(path),
                "{option} {name}: expected a folder: models are saved as safetensors, not as GGUF"
            );
            create(option, path)?;

            let folder = found(path);
            let is_same = |other: &Option<PathBuf>| folder.is_some() && *other == folder;
            if let Some((other, _)) = taken.iter().find(|(_, other)| is_same(other)) {
                bail!("{option} {name}: expected another folder than that of {other}");
            }
            ensure!(
                !self.is_in_checkpoints(path),
                "{option} {name}: expected a folder outside of that of {CHECKPOINTS}"
            );
            taken.push((option, folder));
        }
        Ok(())
    }

    fn is_in_checkpoints(&self, path: &Path) -> bool {
        let checkpoints = self.checkpoints.and_then(found);
        let both = found(path).zip(checkpoints);
        both.is_some_and(|(path, checkpoints)| path.starts_with(checkpoints))
    }

    /// Checks the folders on all processes. In the first epoch of the job also claims those for
    /// models: the process that has the claims may be stopped and replaced later. Every process
    /// must call it, and keep the claims until its end.
    pub(super) fn claim(&self, p: &mut Program) -> mpmd::Result<Vec<FolderClaim>> {
        if let Some(folder) = self.checkpoints {
            check_folder(p, folder, 0).map_err(|error| named(CHECKPOINTS, error))?;
        }
        let mut claims = Vec::new();
        for SavedFolder {
            option,
            path,
            bytes,
        } in &self.models
        {
            let checked = match p.epoch() {
                1 => claim_folder(p, path, *bytes).map(|claim| claims.push(claim)),
                _ => check_folder(p, path, *bytes),
            };
            checked.map_err(|error| named(option, error))?;
        }
        Ok(claims)
    }
}

/// Returns the path of a folder, without links. `None` if there is no such folder.
fn found(path: &Path) -> Option<PathBuf> {
    path.canonicalize().ok()
}

/// Puts the option before an error that begins with the folder.
fn named(option: &str, error: Error) -> Error {
    match error {
        Error::Environment(why) => Error::Environment(format!("{option} {why}")),
        other => other,
    }
}
