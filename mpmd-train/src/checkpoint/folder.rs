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

/// Returns the path of the folder with the files of a step.
pub(super) fn files(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step:08}"))
}

/// Returns the steps that have a manifest, in ascending order. None if the folder does not exist.
pub(super) fn steps(folder: &Path) -> Result<Vec<u64>> {
    numbered(folder, ".json")
}

/// Returns the numbers of the entries `step-<number><suffix>` of a folder, in ascending order.
fn numbered(folder: &Path, suffix: &str) -> Result<Vec<u64>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|error| failed(folder, &error))?,
    };
    let mut numbers = Vec::new();
    for entry in entries {
        let name = entry.map_err(|error| failed(folder, &error))?.file_name();
        let number =
            name.to_str().and_then(|name| name.strip_prefix("step-")?.strip_suffix(suffix));
        // Other ways to write a number are names of somebody else's files.
        let number =
            number.and_then(|text| text.parse().ok().filter(|n: &u64| format!("{n:08}") == text));
        numbers.extend(number);
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Creates the folder of a step with its files, which have no values yet. Removes the rest of a
/// broken save of this step.
///
/// # Errors
///
/// If the step has a manifest; then nothing is changed. If a file cannot be written.
pub(super) fn prepare(folder: &Path, step: u64, plan: &Files) -> Result<()> {
    fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
    let manifest = manifest(folder, step);
    if manifest.exists() {
        let problem = format!("there is a checkpoint of step {step} already, which is kept");
        return Err(failed(&manifest, &problem));
    }
    let files = files(folder, step);
    remove_folder(&files)?;
    fs::create_dir(&files).map_err(|error| failed(&files, &error))?;
    plan.create(&files, "")
}

/// Makes the manifest of a step appear at once and whole. Its files must be on the disk.
///
/// # Errors
///
/// If the manifest exists, or a file cannot be written.
pub(super) fn commit(folder: &Path, step: u64, content: &[u8]) -> Result<()> {
    let path = manifest(folder, step);
    let partial = path.with_extension("json.partial");
    write_synced(&partial, content)?;
    match fs::hard_link(&partial, &path) {
        Ok(()) => fs::remove_file(&partial).map_err(|error| failed(&partial, &error))?,
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
        let path = manifest(folder, *step);
        fs::remove_file(&path).map_err(|error| failed(&path, &error))?;
    }
    // A manifest must not outlive its files.
    sync_folder(folder)?;
    let rests = numbered(folder, "")?.into_iter();
    for step in rests.filter(|step| step < newest && !kept.contains(step)) {
        remove_folder(&files(folder, step))?;
    }
    Ok(())
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
        commit(folder, 7, b"first").unwrap();
        assert!(commit(folder, 7, b"second").is_err());
        assert_eq!(fs::read(manifest(folder, 7)).unwrap(), b"first");
    }

    #[test]
    fn old_checkpoints_and_rests_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        // Steps 3 and 9 are rests of broken saves.
        (2..=9).for_each(|step| fs::create_dir(files(folder, step)).unwrap());
        for step in [2, 4, 5, 6, 7, 8] {
            commit(folder, step, b"manifest").unwrap();
        }
        fs::write(folder.join("step-1.json"), "of somebody else").unwrap();
        remove_old(folder, 2).unwrap();
        assert_eq!(steps(folder).unwrap(), [7, 8]);
        assert_eq!(numbered(folder, "").unwrap(), [7, 8, 9]);
        assert!(folder.join("step-1.json").exists());
    }
}
