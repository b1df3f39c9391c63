//! Model files for other programs.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use half::{bf16, f16};
use mpmd_core::{Error, MpmdArray, Program, Result};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::{MemoryKind, Sharding};

use super::failed;
use super::files::{Files, FilesWriter, INDEX, MODEL, sync_folder};
use super::owners::{PIECE_BYTES, owners, pieces};
use crate::agree::{agree, on_first};

/// Suffix of a file's name until all files are complete.
const PARTIAL: &str = ".partial";

/// Writes arrays to safetensors files in `folder`, as hubs of models have them. Every process must
/// call it, and see the same folder. Blocks until the files are complete.
///
/// Each array has a name, and the dtype that it gets in the file: its own, or `bf16` or `f16` for
/// an array of `f32`. The file is `model.safetensors`. If it would have more than `file_bytes`
/// bytes, there are `model-00001-of-00003.safetensors` and so on, with
/// `model.safetensors.index.json`. An array is always in one file.
///
/// Each process writes the regions that its devices hold; a region of several devices is written
/// by the first of them. The files get their names when all are complete, so a crash before leaves
/// an older model as it was. Files of an older model that the new one does not have are removed.
///
/// In a dry run it writes nothing.
///
/// # Errors
///
/// If two arrays have one name, a dtype is none of those above, or an array holds partial sums. If
/// an array's operation failed, or a file cannot be written. Every process gets the same error.
pub fn save(
    p: &mut Program,
    folder: &Path,
    arrays: &[(String, MpmdArray, DType)],
    file_bytes: u64,
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let mut planned = Vec::with_capacity(arrays.len());
    for (name, array, dtype) in arrays {
        let halves = matches!((array.dtype(), dtype), (DType::F32, DType::Bf16 | DType::F16));
        if array.dtype() != *dtype && !halves {
            let problem = format!("{name}: {} cannot be saved as {dtype}", array.aval());
            return Err(Error::kernel(problem));
        }
        planned.push((name.clone(), ShapedArray::try_new(array.shape(), *dtype)?));
    }
    let files = Files::plan(&planned, file_bytes, metadata)?;
    let shardings: Vec<Sharding> =
        arrays.iter().map(|(_, array, _)| host_owners(p, array)).collect::<Result<_>>()?;
    on_first(p, (), || {
        fs::create_dir_all(folder).map_err(|error| failed(folder, &error))?;
        files.create(folder, PARTIAL)
    })?;
    let mut writer = files.writer(folder, PARTIAL);
    let mut written = Ok(());
    for (place, ((_, array, dtype), to)) in arrays.iter().zip(shardings).enumerate() {
        let array = p.device_put(array, to)?;
        if written.is_ok() {
            written = write(&mut writer, place, &array, *dtype);
        }
    }
    agree(p, written.and_then(|()| writer.sync()))?;
    on_first(p, (), || name(&files, folder))
}

/// Returns the sharding of an array in which each region is in the host memory of its owner.
pub(crate) fn host_owners(p: &Program, array: &MpmdArray) -> Result<Sharding> {
    let first = || Sharding::single_device(p.topology().device_ids()[0]);
    let sharding = array.sharding().cloned().unwrap_or_else(first);
    Ok(owners(array.aval(), &sharding)?.with_memory_kind(MemoryKind::Host))
}

/// Writes this process's regions of an array.
fn write(
    writer: &mut FilesWriter<'_>,
    place: usize,
    array: &MpmdArray,
    dtype: DType,
) -> Result<()> {
    if array.is_fully_remote() {
        return Ok(());
    }
    let item = array.dtype().size();
    for shard in array.addressable_shards()? {
        let mut rest = &shard.data.bytes()[..];
        for piece in pieces(&shard.region, item, PIECE_BYTES) {
            let (bytes, later) = rest.split_at(piece.elements() * item);
            rest = later;
            writer.write(place, &piece, &converted(bytes, array.dtype(), dtype))?;
        }
    }
    Ok(())
}

/// Converts elements of dtype `from`, which [`save`] has checked.
fn converted(bytes: &[u8], from: DType, to: DType) -> Cow<'_, [u8]> {
    let singles = bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes));
    match to {
        _ if from == to => Cow::Borrowed(bytes),
        DType::F16 => singles.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        _ => singles.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

/// Gives the complete files their names, and removes those of an older model.
fn name(files: &Files, folder: &Path) -> Result<()> {
    let mut names: Vec<&str> = files.files.iter().map(|file| file.name.as_str()).collect();
    if names.len() > 1 {
        names.push(INDEX);
    }
    for name in &names {
        let path = folder.join(name);
        fs::rename(folder.join(format!("{name}{PARTIAL}")), &path)
            .map_err(|error| failed(&path, &error))?;
    }
    for entry in fs::read_dir(folder).map_err(|error| failed(folder, &error))? {
        let entry = entry.map_err(|error| failed(folder, &error))?;
        let old = entry.file_name().to_str().is_some_and(|name| {
            let part = name.starts_with("model-") && name.ends_with(".safetensors");
            (part || [MODEL, INDEX].contains(&name)) && !names.contains(&name)
        });
        if old {
            fs::remove_file(entry.path()).map_err(|error| failed(&entry.path(), &error))?;
        }
    }
    sync_folder(folder)
}
