//! The folder of checkpoints: names, creation of a checkpoint's folder, manifests, and removal.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use mpmd_core::Result;

use crate::tensors::disk::{beside, create_folder, remove, sync_folder, write_new};
use crate::tensors::failed;
use crate::tensors::files::{INDEX, MODEL, TensorFiles, indexed};

/// Returns the path of the manifest of the checkpoint of step `step`.
pub(super) fn manifest(folder: &Path, step: u64) -> PathBuf {
    folder.join(format!("step-{step:08}.json"))
}

/// Returns the folder for the files of a checkpoint that epoch `epoch` of the job writes. Each
/// epoch has its own folder, so a stopped process that wakes up later cannot change another epoch's
/// files.
pub(super) fn files(folder: &Path, step: u64, epoch: u64) -> PathBuf {
    folder.join(match epoch {
        1 => format!("step-{step:08}"),
        _ => format!("step-{step:08}{EPOCH}{epoch}"),
    })
}

/// The text between the step and the epoch in a folder's name. Folders of epoch 1 lack it.
const EPOCH: &str = "-epoch-";

/// Returns the file name of a process's list of the pieces that it has written.
pub(super) fn list(process: usize) -> String {
    format!("pieces-{process}.json")
}

/// Returns the steps that have a manifest, in ascending order. Empty if the folder does not exist.
pub(super) fn steps(folder: &Path) -> Result<Vec<u64>> {
    let names = names(folder)?;
    let files = names.iter().filter(|name| folder.join(name).is_file());
    let mut steps: Vec<u64> = files
        .filter_map(|name| step_of(name.strip_suffix(".json")?))
        .collect();
    steps.sort_unstable();
    Ok(steps)
}

/// Returns the names in a folder. Empty if the folder does not exist.
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

/// Returns the step in a name such as `step-00000100`. Returns `None` for other spellings of the
/// number, since a save does not write them.
fn step_of(name: &str) -> Option<u64> {
    let text = name.strip_prefix("step-")?;
    text.parse()
        .ok()
        .filter(|step: &u64| format!("{step:08}") == text)
}

/// Returns (step, epoch) of a folder's name that [`files`] has made; else `None`.
fn step_and_epoch_of(name: &str) -> Option<(u64, u64)> {
    let (step, epoch) = match name.split_once(EPOCH) {
        Some((step, epoch)) => (step, epoch.parse().ok()?),
        None => (name, 1),
    };
    let step = step_of(step)?;
    (files(Path::new(""), step, epoch) == Path::new(name)).then_some((step, epoch))
}

/// Creates the folder of a step and its files, without values. First removes the files of a broken
/// save of this step and epoch. If an earlier epoch of the job has saved the step, returns false
/// and changes nothing: that checkpoint has the same values.
///
/// # Errors
///
/// If the step has a manifest in epoch 1; then nothing is changed. If a file cannot be written.
pub(super) fn prepare(folder: &Path, step: u64, epoch: u64, plan: &TensorFiles) -> Result<bool> {
    create_folder(folder)?;
    let manifest = manifest(folder, step);
    if manifest.exists() && epoch > 1 {
        return Ok(false);
    }
    if manifest.exists() {
        let problem = format!("there is a checkpoint of step {step} already, which is kept");
        return Err(failed(&manifest, &problem));
    }

    let files = files(folder, step, epoch);
    remove_save(&files)?;
    match fs::create_dir(&files) {
        // It has files of somebody else, which are kept.
        Err(error) if error.kind() == ErrorKind::AlreadyExists && is_folder(&files) => {}
        created => created.map_err(|error| failed(&files, &error))?,
    }

    // First, so that the rest of a broken save can be removed by it.
    if let Some(index) = plan.index(&plan.names(1)) {
        let path = files.join(INDEX);
        write_new(&path, &index).map_err(|error| failed(&path, &error))?;
    }
    plan.create(&files, "")?;
    Ok(true)
}

/// Writes the manifest of a step, so that readers see it complete or not at all. The checkpoint's
/// files must be on the disk. After epoch 1, keeps a manifest that a slow process of an earlier
/// epoch has written.
///
/// # Errors
///
/// If the manifest exists in epoch 1, or a file cannot be written.
pub(super) fn commit(folder: &Path, step: u64, epoch: u64, content: &[u8]) -> Result<()> {
    let path = manifest(folder, step);
    let partial = beside(&path);
    let placed = write_new(&partial, content)
        .and_then(|()| place(&partial, &path, epoch, |from, to| fs::hard_link(from, to)));
    // It may have its name already, or not exist.
    let _ = fs::remove_file(&partial);
    placed.map_err(|error| failed(&path, &error))?;
    sync_folder(folder)
}

/// Gives the file `partial` the name `path` by the function `link`, without replacing a file at
/// `path`. After epoch 1, a file at `path` is no error. The old name may remain.
fn place(
    partial: &Path,
    path: &Path,
    epoch: u64,
    link: impl Fn(&Path, &Path) -> io::Result<()>,
) -> io::Result<()> {
    let id = |path| {
        fs::symlink_metadata(path)
            .map(|found| (found.dev(), found.ino()))
            .ok()
    };
    match link(partial, path) {
        Ok(()) => Ok(()),
        // NFS repeats a request whose answer is lost, and then finds the link that it has made.
        Err(_) if id(path).is_some() && id(path) == id(partial) => Ok(()),
        Err(_) if path.exists() && epoch > 1 => Ok(()),
        // The file system has no hard links.
        Err(_) if !path.exists() => fs::rename(partial, path),
        Err(error) => Err(error),
    }
}

/// Removes all checkpoints but the newest `keep` and that of step `best`, and files of broken saves
/// before the newest checkpoint. Keeps folders that also have files of others.
pub(super) fn remove_old(folder: &Path, keep: usize, best: Option<u64>) -> Result<()> {
    let steps = steps(folder)?;
    let Some(newest) = steps.last() else {
        return Ok(());
    };
    let (old, kept) = steps.split_at(steps.len().saturating_sub(keep.max(1)));
    for step in old.iter().filter(|step| Some(**step) != best) {
        remove(&manifest(folder, *step))?;
    }

    // A manifest must not outlive its files.
    sync_folder(folder)?;
    for name in names(folder)? {
        let is_kept = |step: u64| kept.contains(&step) || Some(step) == best;
        let is_old = |step: u64| step < *newest && !is_kept(step);
        if step_and_epoch_of(&name).is_some_and(|(step, _)| is_old(step)) {
            remove_save(&folder.join(name))?;
        }
    }
    Ok(())
}

/// Removes the files of broken saves: those of steps without a manifest. The disk may be full of
/// them. Keeps folders that also have files of others.
pub(super) fn remove_broken(folder: &Path) -> Result<()> {
    for name in names(folder)? {
        if step_and_epoch_of(&name).is_some_and(|(step, _)| !manifest(folder, step).exists()) {
            remove_save(&folder.join(name))?;
        }
    }
    Ok(())
}

/// Removes the files of a save, and their folder if it is then empty. Does nothing if the folder
/// does not exist or is a link.
fn remove_save(folder: &Path) -> Result<()> {
    if !is_folder(folder) {
        return Ok(());
    }
    let is_list = |name: &String| {
        let number = name
            .strip_prefix("pieces-")
            .and_then(|name| name.strip_suffix(".json"));
        number
            .and_then(|number| number.parse().ok())
            .is_some_and(|number| list(number) == *name)
    };

    let lists = names(folder)?.into_iter().filter(is_list);
    // The index names the others, so it is the last.
    let all = indexed(folder)
        .into_iter()
        .chain(lists)
        .chain([MODEL, INDEX].map(str::to_owned));
    all.into_iter()
        .try_for_each(|name| remove(&folder.join(name)))?;

    match fs::remove_dir(folder) {
        Err(error) if error.kind() != ErrorKind::DirectoryNotEmpty => Err(failed(folder, &error)),
        _ => Ok(()),
    }
}

/// Returns true if `path` is a folder, and not a link to one.
fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|found| found.is_dir())
}

#[cfg(test)]
mod tests {
    use mpmd_layout::aval::f32s;

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
        let plan = TensorFiles::plan(&[], 1 << 20, &Default::default()).unwrap();
        assert!(prepare(folder, 7, 1, &plan).unwrap());
        let early = files(folder, 7, 1).join(list(3));
        fs::write(&early, "of a process that sleeps").unwrap();
        assert!(prepare(folder, 7, 2, &plan).unwrap());
        assert!(early.exists() && files(folder, 7, 2).is_dir());
        commit(folder, 7, 2, b"manifest").unwrap();
        assert!(!prepare(folder, 7, 3, &plan).unwrap());
        assert!(prepare(folder, 7, 1, &plan).is_err());
        assert!(!files(folder, 7, 3).exists());
        commit(folder, 8, 2, b"manifest").unwrap();
        remove_old(folder, 1, None).unwrap();
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
        remove_old(folder, 2, None).unwrap();
        assert_eq!(steps(folder).unwrap(), [7, 8]);
        let mut folders: Vec<_> = names(folder)
            .unwrap()
            .iter()
            .filter_map(|n| step_of(n))
            .collect();
        folders.sort_unstable();
        assert_eq!(folders, [7, 8, 9]);
        assert!(folder.join("step-1.json").exists());
    }

    #[test]
    fn broken_saves_are_removed_and_whole_ones_kept() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let save = |step: u64, epoch: u64| {
            let files = files(folder, step, epoch);
            fs::create_dir(&files).unwrap();
            fs::write(files.join(MODEL), [0; 8]).unwrap();
            fs::write(files.join(list(0)), "[]").unwrap();
            files
        };
        let whole = save(20, 1);
        fs::write(manifest(folder, 20), "{}").unwrap();
        let (broken, of_epoch) = (save(40, 1), save(60, 2));
        let with_others = save(80, 1);
        fs::write(with_others.join("notes.txt"), "mine").unwrap();

        remove_broken(folder).unwrap();
        assert!(whole.join(MODEL).exists());
        assert!(!broken.exists() && !of_epoch.exists());
        assert_eq!(names(&with_others).unwrap(), ["notes.txt"]);
        remove_broken(&folder.join("missing")).unwrap();
    }

    #[test]
    fn files_of_others_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let arrays: Vec<_> = ["a", "b"].map(|name| (name.to_owned(), f32s([2]))).into();
        let plan = TensorFiles::plan(&arrays, 1, &Default::default()).unwrap();
        let [parts, other, elsewhere] = [1, 2, 3].map(|step| files(folder, step, 1));
        for step in [1, 2] {
            assert!(prepare(folder, step, 1, &plan).unwrap());
        }
        let foreign = [
            other.join("notes.txt"),
            other.join("model-00009-of-00009.safetensors"),
            other.join("pieces-x.json"),
            folder.join("step-00000002-epoch-ANYTHING").join(MODEL),
            folder.join("step-00000002-epoch-1").join(MODEL),
            folder.join("step-00000002-epoch-02").join(MODEL),
        ];
        foreign
            .iter()
            .for_each(|path| fs::create_dir_all(path.parent().unwrap()).unwrap());
        foreign
            .iter()
            .for_each(|path| fs::write(path, "of somebody else").unwrap());
        let target = tempfile::tempdir().unwrap();
        fs::write(target.path().join(MODEL), "of somebody else").unwrap();
        std::os::unix::fs::symlink(target.path(), &elsewhere).unwrap();
        commit(folder, 9, 1, b"manifest").unwrap();
        remove_old(folder, 1, None).unwrap();
        assert!(
            !parts.exists() && foreign.iter().all(|path| path.exists()),
            "{foreign:?}"
        );
        assert_eq!(names(&other).unwrap().len(), 3);
        assert!(target.path().join(MODEL).exists());
        // A save of the step goes into the folder, but through no link.
        assert!(prepare(folder, 2, 1, &plan).unwrap());
        assert!(prepare(folder, 3, 1, &plan).is_err());
    }

    #[test]
    fn repeated_link_of_nfs_is_no_failure() {
        let folder = tempfile::tempdir().unwrap();
        let [partial, path] = ["partial", "manifest"].map(|name| folder.path().join(name));
        fs::write(&partial, "new").unwrap();
        let twice = |from: &Path, to: &Path| {
            fs::hard_link(from, to)?;
            fs::hard_link(from, to)
        };
        place(&partial, &path, 1, twice).unwrap();
        fs::remove_file(&partial).unwrap();
        fs::write(&partial, "newer").unwrap();
        assert!(place(&partial, &path, 1, twice).is_err());
        place(&partial, &path, 2, twice).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        // Without hard links the file is renamed.
        let none = |_: &Path, _: &Path| Err(ErrorKind::Unsupported.into());
        place(&partial, &folder.path().join("other"), 1, none).unwrap();
        assert!(!partial.exists());
    }
}
