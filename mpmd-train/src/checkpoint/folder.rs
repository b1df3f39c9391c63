//! The folder of checkpoints: names, creation of a checkpoint's folder, manifests, and removal.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use mpmd_core::Result;

use crate::tensors::failed;
use crate::tensors::files::{Files, sync_folder, write_synced};

/// Returns the path of the manifest of a step.
pub(super) fn manifest(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step:08}.json"))
}

/// Returns the path of the folder with the files of a step that an epoch of the job has written. A
/// process that wakes after its epoch has ended writes into no folder of another one.
pub(super) fn files(folder: &Path, step: u64, epoch: u64) -> PathBuf {
    folder.join(match epoch {
        1 => format!("step-{step:08}"),
        _ => format!("step-{step:08}{EPOCH}{epoch}"),
    })
}

/// The text between step and epoch in the name of a folder, if the epoch is not the first.
const EPOCH: &str = "-epoch-";

/// Returns the steps that have a manifest, in ascending order. None if the folder does not exist.
pub(super) fn steps(folder: &Path) -> Result<Vec<u64>> {
    let mut steps: Vec<u64> =
        names(folder)?.iter().filter_map(|name| step_of(name.strip_suffix(".json")?)).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Returns the names in a folder. None if it does not exist.
fn names(folder: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|error| failed(folder, &error))?,
    };
    let name = |entry: std::io::Result<fs::DirEntry>| {
        let entry = entry.map_err(|error| failed(folder, &error))?;
        Ok(entry.file_name().to_string_lossy().into_owned())
    };
    entries.map(name).collect()
}

/// Returns the step in a name. `None` for other ways to write a number: those are of somebody
/// else's files.
fn step_of(name: &str) -> Option<u64> {
    let text = name.strip_prefix("step-")?;
    text.parse().ok().filter(|step: &u64| format!("{step:08}") == text)
}

/// Creates the folder of a step with its files, which have no values yet. Removes the rest of a
/// broken save of this step and epoch. Returns false and changes nothing if an earlier epoch of the
/// job has saved the step: its checkpoint has the same values.
///
/// # Errors
///
/// If the step has a manifest in the first epoch; then nothing is changed. If a file cannot be
/// written.
pub(super) fn prepare(folder: &Path, step: u64, epoch: u64, plan: &Files) -> Result<bool> {
    fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    let manifest = manifest(folder, step);
    if manifest.exists() && epoch > 1 {
        return Ok(false);
    }
    if manifest.exists() {
        let problem = format!("there is a checkpoint of step {step} already, which is kept");
        return Err(failed(&manifest, &problem));
    }
    let files = files(folder, step, epoch);
    remove_folder(&files)?;
    fs::create_dir(&files).map_err(|error| failed(&files, &error))?;
    plan.create(&files, "")?;
    Ok(true)
}

/// Makes the manifest of a step appear at once and whole. Its files must be on the disk. After the
/// first epoch of a job it may be there, from a process of an earlier epoch that was slow.
///
/// # Errors
///
/// If the manifest exists in the first epoch, or a file cannot be written.
pub(super) fn commit(folder: &Path, step: u64, epoch: u64, content: &[u8]) -> Result<()> {
    let path = manifest(folder, step);
    let partial = match epoch {
        1 => path.with_extension("json.partial"),
        _ => path.with_extension(format!("json.partial{EPOCH}{epoch}")),
    };
    write_synced(&partial, content)?;
    match fs::hard_link(&partial, &path) {
        Err(_) if path.exists() && epoch > 1 => remove_file(&partial)?,
        Ok(()) => remove_file(&partial)?,
        // The file system has no hard links.
        Err(_) if !path.exists() => {
            fs::rename(&partial, &path).map_err(|error| failed(&path, &error))?;
        }
        Err(error) => return Err(failed(&path, &error)),
    }
    sync_folder(folder)
}

/// Removes all checkpoints but the newest `keep`, and the rests of broken saves before the newest.
pub(super) fn remove_old(folder: &Path, keep: usize) -> Result<()> {
    let steps = steps(folder)?;
    let Some(newest) = steps.last() else { return Ok(()) };
    let (old, kept) = steps.split_at(steps.len().saturating_sub(keep));
    for step in old {
        remove_file(&manifest(folder, *step))?;
    }
    // A manifest must not outlive its files.
    sync_folder(folder)?;
    for name in names(folder)? {
        let text = name.split_once(EPOCH).map_or(&name[..], |(step, _)| step);
        if step_of(text).is_some_and(|step| step < *newest && !kept.contains(&step)) {
            remove_folder(&folder.join(name))?;
        }
    }
    Ok(())
}

fn remove_file(path: &Path) -> Result<()> {
    fs::remove_file(path).map_err(|error| failed(path, &error))
}

/// Removes a folder with all its files, if it exists.
fn remove_folder(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(failed(folder, &error)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifests_are_never_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        commit(folder, 7, 1, b"first").unwrap();
        assert!(commit(folder, 7, 1, b"second").is_err());
        // One that an earlier epoch has written has the same values.
        commit(folder, 7, 2, b"third").unwrap();
        assert_eq!(fs::read(manifest(folder, 7)).unwrap(), b"first");
    }

    #[test]
    fn later_epochs_have_folders_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let plan = Files::plan(&[], 1 << 20, &Default::default()).unwrap();
        assert!(prepare(folder, 7, 1, &plan).unwrap());
        let early = files(folder, 7, 1).join("of a process that sleeps");
        fs::write(&early, "early").unwrap();
        assert!(prepare(folder, 7, 2, &plan).unwrap());
        assert!(early.exists() && files(folder, 7, 2).is_dir());
        commit(folder, 7, 2, b"manifest").unwrap();
        assert!(!prepare(folder, 7, 3, &plan).unwrap());
        assert!(prepare(folder, 7, 1, &plan).is_err());
        assert!(!files(folder, 7, 3).exists());
        commit(folder, 8, 2, b"manifest").unwrap();
        remove_old(folder, 1).unwrap();
        assert_eq!(names(folder).unwrap(), ["step-00000008.json"]);
    }

    #[test]
    fn old_checkpoints_and_rests_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        // Steps 3 and 9 are rests of broken saves.
        (2..=9).for_each(|step| fs::create_dir(files(folder, step, 1)).unwrap());
        for step in [2, 4, 5, 6, 7, 8] {
            commit(folder, step, 1, b"manifest").unwrap();
        }
        fs::write(folder.join("step-1.json"), "of somebody else").unwrap();
        remove_old(folder, 2).unwrap();
        assert_eq!(steps(folder).unwrap(), [7, 8]);
        let mut folders: Vec<_> =
            names(folder).unwrap().iter().filter_map(|n| step_of(n)).collect();
        folders.sort_unstable();
        assert_eq!(folders, [7, 8, 9]);
        assert!(folder.join("step-1.json").exists());
    }
}
