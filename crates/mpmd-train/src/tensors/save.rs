//! Model files for other programs.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use mpmd_core::{Error, MoveOptions, MpmdArray, ProcessId, Program, Result};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{MemoryKind, Sharding};

use super::disk::{create_folder, partial, remove, replace, sync_folder};
use super::failed;
use super::files::{FilesWriter, INDEX, MODEL, TensorFiles, indexed};
use super::owners::{PIECE_BYTES, owners, pieces};
use crate::agree::{agree, on_first};

/// Writes arrays to safetensors files in `folder`, in the layout of model hubs. Every process must
/// call it and see the same folder. Blocks until the files are complete. Writes nothing in a dry
/// run.
///
/// Each array has a name, and a dtype in the file: its own dtype, or `bf16` or `f16` for an array
/// of `f32`. If the name has a `*`, each index of the first dimension is saved as an array of its
/// own, and the index replaces the `*`. The file is `model.safetensors`. If it would have more than
/// `file_bytes` bytes, there are `model-00001-of-00003.safetensors` and so on, with
/// `model.safetensors.index.json`. A saved array is always in one file.
///
/// Each process writes the regions that its devices hold. If several devices hold a region, the
/// first of them writes it.
///
/// At every moment the folder has either the older model or the new model, complete. The new files
/// are written beside the older files, never through links. If several new files would get names of
/// older files, they are named `model-2-00001-of-00003.safetensors` and so on. When all files are
/// complete, the index or the single file gets its name. Then the older model's index or
/// `model.safetensors` is removed, and the files that its index lists. A crash may leave unused
/// files: names that end with `.partial` and a number, parts of the new model without an index, or
/// parts of the older model.
///
/// # Errors
///
/// If two arrays have the same name, a dtype is none of the above, or an array holds partial sums.
/// If an array's operation failed, or a file cannot be written. Every process gets the same error.
pub fn save(
    p: &mut Program,
    folder: &Path,
    arrays: &[(String, MpmdArray, DType)],
    file_bytes: u64,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    // The saved arrays, and the place of each array's first one.
    let mut planned = Vec::with_capacity(arrays.len());
    let mut first = Vec::new();
    for (name, array, dtype) in arrays {
        let halves = matches!(
            (array.dtype(), dtype),
            (DType::F32, DType::Bf16 | DType::F16)
        );
        if array.dtype() != *dtype && !halves {
            let problem = format!("{name}: {} cannot be saved as {dtype}", array.aval());
            return Err(Error::kernel(problem));
        }
        first.push(planned.len());
        match array.shape() {
            [count, shape @ ..] if name.contains('*') => {
                for index in 0..*count {
                    let name = name.replace('*', &index.to_string());
                    planned.push((name, ShapedArray::try_new(shape, *dtype)?));
                }
            }
            shape => planned.push((name.clone(), ShapedArray::try_new(shape, *dtype)?)),
        }
    }
    let files = TensorFiles::plan(&planned, file_bytes, metadata)?;
    let shardings: Vec<Sharding> = arrays
        .iter()
        .map(|(_, array, _)| host_owners(p, array))
        .collect::<Result<_>>()?;
    let mut rests = None;
    let suffix = on_first(p, String::new(), || {
        create_folder(folder)?;
        let suffix = partial();
        let path = |name: String| folder.join(name + &suffix);
        rests = Some(Rests(files.names(1).into_iter().map(path).collect()));
        files.create(folder, &suffix)?;
        Ok(suffix)
    })?;
    let mut writer = files.writer(folder, &suffix);
    let once = MoveOptions::default().cache_plans(false);
    let mut written = Ok(());
    for ((first, (name, array, dtype)), to) in first.into_iter().zip(arrays).zip(shardings) {
        let array = p.device_put_with(array, to, once)?;
        if written.is_ok() {
            written = write(&mut writer, first, name.contains('*'), &array, *dtype);
        }
    }
    let created = p.process() == ProcessId(0);
    agree(p, written.and_then(|()| writer.sync(created)))?;
    let committed = on_first(p, (), || commit(&files, folder, &suffix, || {}));
    drop(rests);
    committed
}

/// The paths of a save's temporary files. Dropping it removes the files that were not renamed.
struct Rests(Vec<PathBuf>);

impl Drop for Rests {
    fn drop(&mut self) {
        // They may have got their names, or not exist yet.
        self.0.iter().for_each(|path| _ = fs::remove_file(path));
    }
}

/// Returns a sharding that puts each region of an array into the host memory of its owner.
pub(crate) fn host_owners(p: &Program, array: &MpmdArray) -> Result<Sharding> {
    let first = || Sharding::single_device(p.topology().device_ids()[0]);
    let sharding = array.sharding().cloned().unwrap_or_else(first);
    Ok(owners(array.aval(), &sharding)?.with_memory_kind(MemoryKind::Host))
}

/// Writes this process's regions of an array to the saved array at index `first`. If `is_several`
/// is true, writes each index of the first dimension to a saved array of its own, from `first` on.
fn write(
    writer: &mut FilesWriter<'_>,
    first: usize,
    is_several: bool,
    array: &MpmdArray,
    dtype: DType,
) -> Result<()> {
    if array.is_fully_remote() {
        return Ok(());
    }
    let item = array.dtype().size();
    for shard in array.addressable_shards()? {
        let mut rest = &shard.data.bytes()[..];
        let mut ranges: Vec<_> = shard.region.ranges().collect();
        let saved = match is_several && !ranges.is_empty() {
            true => first + ranges[0].start..first + ranges.remove(0).end,
            false => first..first + 1,
        };
        let region = Region::new(ranges);
        for (place, piece) in saved.flat_map(|place| {
            pieces(&region, item, PIECE_BYTES)
                .into_iter()
                .map(move |piece| (place, piece))
        }) {
            let (bytes, later) = rest.split_at(piece.elements() * item);
            rest = later;
            writer.write(place, &piece, &converted(bytes, array.dtype(), dtype))?;
        }
    }
    Ok(())
}

/// Converts elements from dtype `from` to dtype `to`. [`save`] has checked that it can.
fn converted(bytes: &[u8], from: DType, to: DType) -> Cow<'_, [u8]> {
    let singles = bytes
        .as_chunks::<4>()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes));
    match to {
        _ if from == to => Cow::Borrowed(bytes),
        DType::F16 => singles
            .flat_map(|x| f16::from_f32(x).to_le_bytes())
            .collect(),
        _ => singles
            .flat_map(|x| bf16::from_f32(x).to_le_bytes())
            .collect(),
    }
}

/// Renames the complete files from temporary names, which end in `suffix`, to the names of a model.
/// Then removes files that belong only to the older model. Calls `before` before each change of the
/// folder.
///
/// Readers use `model.safetensors` if it exists, otherwise the files of the index. So a single
/// renaming, or the removal of `model.safetensors`, replaces the older model by the new model.
fn commit(
    files: &TensorFiles,
    folder: &Path,
    suffix: &str,
    mut before: impl FnMut(),
) -> Result<()> {
    let old = indexed(folder);
    let names = reserve(files, folder, &mut before)?;
    let mut place = || {
        for (file, name) in files.files.iter().zip(&names) {
            before();
            let path = folder.join(name);
            fs::rename(folder.join(file.name.clone() + suffix), &path)
                .map_err(|error| failed(&path, &error))?;
        }
        sync_folder(folder)?;
        files.index(&names).map_or(Ok(()), |index| {
            before();
            replace(&folder.join(INDEX), &index)
        })
    };
    let placed = place();
    // The new index may have its name already.
    let published = indexed(folder);
    if placed.is_err() && names.len() > 1 && !names.iter().all(|name| published.contains(name)) {
        names
            .iter()
            .for_each(|name| _ = fs::remove_file(folder.join(name)));
    }
    placed?;
    before();
    remove(&folder.join(if names.len() > 1 { MODEL } else { INDEX }))?;
    sync_folder(folder)?;
    for name in old.iter().filter(|name| !names.contains(name)) {
        before();
        remove(&folder.join(name))?;
    }
    sync_folder(folder)
}

/// Chooses names for the files. If there are several files, reserves names that are free in the
/// folder by creating empty files.
fn reserve(files: &TensorFiles, folder: &Path, before: &mut impl FnMut()) -> Result<Vec<String>> {
    let mut list = 0;
    loop {
        list += 1;
        let names = files.names(list);
        if names.len() == 1 {
            return Ok(names);
        }
        let mut taken = 0;
        let refused = names.iter().find_map(|name| {
            before();
            let path = folder.join(name);
            let created = File::create_new(&path).inspect(|_| taken += 1);
            Some((path, created.err()?))
        });
        let Some((path, error)) = refused else {
            return Ok(names);
        };
        names[..taken]
            .iter()
            .for_each(|name| _ = fs::remove_file(folder.join(name)));
        if error.kind() != ErrorKind::AlreadyExists {
            return Err(failed(&path, &error));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use mpmd_layout::aval::f32s;

    use super::super::TensorFile;
    use super::*;

    /// The plan of a model of three arrays in some files.
    fn plan(files: usize) -> TensorFiles {
        let arrays = ["a", "b", "c"].map(|name| (name.to_owned(), f32s([2])));
        let file_bytes = match files {
            1 => 100,
            2 => 16,
            _ => 1,
        };
        TensorFiles::plan(&arrays, file_bytes, &BTreeMap::new()).unwrap()
    }

    /// Saves a model in which every element is `value`. Stops inside `commit` before its change
    /// number `stop` of the folder, counted from 0, as if the process were killed there. Temporary
    /// files are complete by then. Returns true if the save finished.
    fn save_until(folder: &Path, files: usize, value: f32, stop: usize) -> bool {
        let (files, suffix) = (plan(files), partial());
        files.create(folder, &suffix).unwrap();
        let mut writer = files.writer(folder, &suffix);
        let bytes = [value, value].map(f32::to_le_bytes).concat();
        for array in 0..3 {
            writer.write(array, &Region::full(&[2]), &bytes).unwrap();
        }
        writer.sync(true).unwrap();
        let mut changes = 0;
        let before = || {
            assert!(changes < stop, "the process is killed");
            changes += 1;
        };
        let committed = catch_unwind(AssertUnwindSafe(|| commit(&files, folder, &suffix, before)));
        committed.map(Result::unwrap).is_ok()
    }

    /// Loads the model of a folder as programs do that read the layout of hubs. Returns the value
    /// of all its elements.
    fn load(folder: &Path) -> f32 {
        let names = ["a", "b", "c"];
        let index = fs::read_to_string(folder.join(INDEX)).unwrap_or_default();
        let single = folder.join(MODEL).exists();
        let values = names.map(|name| {
            let file = if single {
                MODEL.to_owned()
            } else {
                let index: serde_json::Value = serde_json::from_str(&index).unwrap();
                index["weight_map"][name].as_str().unwrap().to_owned()
            };
            let mut bytes = [0; 8];
            let file = TensorFile::open(folder.join(file)).unwrap();
            file.read(name, &Region::full(&[2]), &mut bytes).unwrap();
            f32::from_le_bytes(*bytes.first_chunk().unwrap())
        });
        assert!(
            values.iter().all(|value| *value == values[0]),
            "a mixture: {values:?}"
        );
        values[0]
    }

    #[test]
    fn killed_save_leaves_the_old_or_the_new_model() {
        for (old, new) in (1..=3).flat_map(|old| (1..=3).map(move |new| (old, new))) {
            let mut found = Vec::new();
            for stop in 0.. {
                let folder = tempfile::tempdir().unwrap();
                let folder = folder.path();
                assert!(save_until(folder, old, 1.0, usize::MAX));
                let ended = save_until(folder, new, 2.0, stop);
                found.push(load(folder));
                // The next save succeeds all the same.
                assert!(save_until(folder, new, 3.0, usize::MAX));
                assert_eq!(load(folder), 3.0);
                if ended {
                    break;
                }
            }
            let case = format!("{old} files, then {new}: {found:?}");
            assert!(found.is_sorted() && found.len() > 2, "{case}");
            assert_eq!((found[0], found.last()), (1.0, Some(&2.0)), "{case}");
        }
    }

    #[test]
    fn models_of_equal_files_leave_nothing_of_the_older_ones() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        for (value, list) in [(1.0, ""), (2.0, "2-"), (3.0, ""), (4.0, "2-")] {
            assert!(save_until(folder, 2, value, usize::MAX));
            let entries = fs::read_dir(folder).unwrap().flatten();
            let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
            names.sort();
            let parts = [1, 2].map(|part| format!("model-{list}{part:05}-of-00002.safetensors"));
            assert_eq!(names, [&parts[0], &parts[1], INDEX]);
            assert_eq!(load(folder), value);
        }
    }
}
