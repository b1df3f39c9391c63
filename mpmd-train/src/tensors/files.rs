//! The safetensors files of some arrays: which array is where, and their creation and writing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use mpmd_core::{Error, Result};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use serde_json::json;

use super::runs::runs;
use super::{failed, header};

/// The name of the file with all arrays.
pub(crate) const MODEL: &str = "model.safetensors";
/// The name of the file that says which array is in which file, if there are several.
pub(crate) const INDEX: &str = "model.safetensors.index.json";

/// The plan of the files of some arrays. It depends on names, shapes and dtypes only, so it is the
/// same on every process.
#[derive(Clone)]
pub(crate) struct Files {
    pub(crate) files: Vec<PlannedFile>,
    arrays: Vec<PlannedArray>,
}

/// A file to be written.
#[derive(Clone)]
pub(crate) struct PlannedFile {
    pub(crate) name: String,
    /// The bytes before the first value.
    pub(crate) start: Vec<u8>,
    /// Length of the file in bytes.
    pub(crate) bytes: u64,
}

#[derive(Clone)]
struct PlannedArray {
    name: String,
    aval: ShapedArray,
    /// Index of the file.
    file: usize,
    /// Offset of the values in the file, in bytes.
    offset: u64,
}

impl Files {
    /// Puts the arrays into files, in order. Begins a new file when one would have more than
    /// `file_bytes` bytes of values.
    ///
    /// # Errors
    ///
    /// If two arrays have one name, or safetensors lacks the dtype of an array.
    pub(crate) fn plan(
        arrays: &[(String, ShapedArray)],
        file_bytes: u64,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let mut names = BTreeSet::new();
        if let Some((name, _)) = arrays.iter().find(|(name, _)| !names.insert(name)) {
            return Err(Error::kernel(format!("two arrays to be saved have the name {name:?}")));
        }
        let mut groups: Vec<&[(String, ShapedArray)]> = Vec::new();
        let (mut start, mut bytes) = (0, 0);
        for (place, (_, aval)) in arrays.iter().enumerate() {
            if place > start && bytes + aval.bytes() as u64 > file_bytes {
                groups.push(&arrays[start..place]);
                (start, bytes) = (place, 0);
            }
            bytes += aval.bytes() as u64;
        }
        groups.push(&arrays[start..]);
        let count = groups.len();
        let mut plan = Self { files: Vec::with_capacity(count), arrays: Vec::new() };
        for (file, group) in groups.into_iter().enumerate() {
            let (start, offsets) = header(group, metadata)?;
            let values: usize = group.iter().map(|(_, aval)| aval.bytes()).sum();
            let bytes = (start.len() + values) as u64;
            let name = match count {
                1 => MODEL.to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", file + 1),
            };
            plan.files.push(PlannedFile { name, start, bytes });
            plan.arrays.extend(group.iter().zip(offsets).map(|((name, aval), offset)| {
                PlannedArray { name: name.clone(), aval: aval.clone(), file, offset }
            }));
        }
        Ok(plan)
    }

    /// Creates the files in `folder` with their headers and full lengths, and the index if there
    /// are several. Appends `suffix` to all names. Overwrites files of these names.
    pub(crate) fn create(&self, folder: &Path, suffix: &str) -> Result<()> {
        for planned in &self.files {
            let path = folder.join(planned.name.clone() + suffix);
            let write = || -> std::io::Result<()> {
                let mut file = File::create(&path)?;
                file.write_all(&planned.start)?;
                file.set_len(planned.bytes)
            };
            write().map_err(|error| failed(&path, &error))?;
        }
        if self.files.len() > 1 {
            let values: usize = self.arrays.iter().map(|array| array.aval.bytes()).sum();
            let files = self.arrays.iter().map(|array| (&array.name, &self.files[array.file].name));
            let map: BTreeMap<&String, &String> = files.collect();
            let index = json!({ "metadata": { "total_size": values }, "weight_map": map });
            let path = folder.join(INDEX.to_owned() + suffix);
            write_synced(&path, format!("{index:#}\n").as_bytes())?;
        }
        Ok(())
    }

    /// Opens the files in `folder`, which [`Files::create`] has made with the same `suffix`, when
    /// they are first written to.
    pub(crate) fn writer(&self, folder: &Path, suffix: &str) -> FilesWriter<'_> {
        let paths = self.files.iter().map(|file| folder.join(file.name.clone() + suffix));
        FilesWriter { plan: self, files: paths.map(|path| (path, None)).collect() }
    }
}

/// Writes regions of arrays to files that other processes write to as well.
pub(crate) struct FilesWriter<'a> {
    plan: &'a Files,
    files: Vec<(PathBuf, Option<File>)>,
}

impl FilesWriter<'_> {
    /// Writes a region of the array at index `array`. `bytes` are its elements in row-major order.
    pub(crate) fn write(&mut self, array: usize, region: &Region, bytes: &[u8]) -> Result<()> {
        let PlannedArray { name, aval, file, offset } = &self.plan.arrays[array];
        let (path, open) = &mut self.files[*file];
        let file = match open {
            Some(file) => file,
            None => {
                let opened = OpenOptions::new().write(true).open(&*path);
                open.insert(opened.map_err(|error| failed(path, &error))?)
            }
        };
        let mut rest = bytes;
        for run in runs(aval.shape(), region, aval.dtype().size()) {
            let (now, later) = rest.split_at((run.end - run.start) as usize);
            file.write_all_at(now, offset + run.start)
                .map_err(|error| failed(path, &format!("{name}: region {region}: {error}")))?;
            rest = later;
        }
        Ok(())
    }

    /// Blocks until all that was written is on the disk.
    pub(crate) fn sync(self) -> Result<()> {
        self.files.iter().try_for_each(|(path, file)| {
            let synced = file.as_ref().map_or(Ok(()), File::sync_all);
            synced.map_err(|error| failed(path, &error))
        })
    }
}

/// Writes a file, and blocks until it is on the disk. Overwrites a file of this name.
pub(crate) fn write_synced(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().map_err(|error| failed(path, &error))
}

/// Blocks until the names in a folder are on the disk.
pub(crate) fn sync_folder(folder: &Path) -> Result<()> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    synced.map_err(|error| failed(folder, &error))
}
