//! The safetensors files of some arrays: which array is where, and their creation and writing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::{FileExt, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use mpmd_core::{Error, Result, read_regular};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use rustix::fs::OFlags;
use serde::Deserialize;
use serde_json::json;

use super::runs::runs;
use super::unique_json::read_json;
use super::{failed, header};

/// The name of a model's file if a single file has all arrays.
pub(crate) const MODEL: &str = "model.safetensors";
/// The name of a model's index, which maps each array to its file if there are several.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// Limit on the bytes that are read from an index.
pub(crate) const LARGEST_INDEX: u64 = 64 << 20;

/// A plan of the safetensors files for some arrays. It depends only on names, shapes and dtypes, so
/// it is the same on every process.
#[derive(Clone)]
pub(crate) struct TensorFiles {
    pub(crate) files: Vec<PlannedFile>,
    arrays: Vec<PlannedArray>,
}

/// A safetensors file that is to be written.
#[derive(Clone)]
pub(crate) struct PlannedFile {
    /// The default name of the file. A save may choose another name from [`TensorFiles::names`] if
    /// files of an older model have this one.
    pub(crate) name: String,
    /// The file's header: all bytes before the first value.
    pub(crate) start: Vec<u8>,
    /// Length of the file in bytes.
    pub(crate) bytes: u64,
}

#[derive(Clone)]
struct PlannedArray {
    name: String,
    aval: ShapedArray,
    /// Index of the array's file in the plan.
    file: usize,
    /// Offset of the array's values in the file, in bytes.
    offset: u64,
}

impl TensorFiles {
    /// Distributes the arrays over files, in order. Begins a new file when a file would have more
    /// than `file_bytes` bytes of values.
    ///
    /// # Errors
    ///
    /// If two arrays have the same name, or safetensors lacks the dtype of an array.
    pub(crate) fn plan(
        arrays: &[(String, ShapedArray)],
        file_bytes: u64,
        metadata: &BTreeMap<String, String>,
    ) -> Result<Self> {
        let mut names = BTreeSet::new();
        if let Some((name, _)) = arrays.iter().find(|(name, _)| !names.insert(name)) {
            return Err(Error::kernel(format!(
                "two arrays to be saved have the name {name:?}"
            )));
        }

        let mut groups: Vec<&[(String, ShapedArray)]> = Vec::new();
        let mut start = 0;
        let mut bytes = 0;
        for (place, (_, aval)) in arrays.iter().enumerate() {
            if place > start && bytes + aval.bytes() as u64 > file_bytes {
                groups.push(&arrays[start..place]);
                start = place;
                bytes = 0;
            }
            bytes += aval.bytes() as u64;
        }
        groups.push(&arrays[start..]);

        let count = groups.len();
        let mut plan = Self {
            files: Vec::with_capacity(count),
            arrays: Vec::new(),
        };
        for (file, group) in groups.into_iter().enumerate() {
            let (start, offsets) = header(group, metadata)?;
            let values: usize = group.iter().map(|(_, aval)| aval.bytes()).sum();
            let bytes = (start.len() + values) as u64;
            let name = file_name(file, count, 1);
            plan.files.push(PlannedFile { name, start, bytes });
            plan.arrays
                .extend(
                    group
                        .iter()
                        .zip(offsets)
                        .map(|((name, aval), offset)| PlannedArray {
                            name: name.clone(),
                            aval: aval.clone(),
                            file,
                            offset,
                        }),
                );
        }
        Ok(plan)
    }

    /// Returns the names of the files, in order. `list` numbers alternative lists of names from 1,
    /// so that a new model can be complete beside an older one. A single file always has the same
    /// name.
    pub(crate) fn names(&self, list: usize) -> Vec<String> {
        let count = self.files.len();
        (0..count)
            .map(|file| file_name(file, count, list))
            .collect()
    }

    /// Returns the content of the index, which maps each array to its file among `names`. Returns
    /// `None` if there is one file.
    pub(crate) fn index(&self, names: &[String]) -> Option<Vec<u8>> {
        if names.len() == 1 {
            return None;
        }
        let values: usize = self.arrays.iter().map(|array| array.aval.bytes()).sum();
        let files = self
            .arrays
            .iter()
            .map(|array| (&array.name, &names[array.file]));
        let map: BTreeMap<&String, &String> = files.collect();
        let index = json!({ "metadata": { "total_size": values }, "weight_map": map });
        Some(format!("{index:#}\n").into_bytes())
    }

    /// Creates the files in `folder` with their headers and full lengths. Appends `suffix` to each
    /// default name.
    ///
    /// # Errors
    ///
    /// If a file of such a name exists, or a file cannot be written.
    pub(crate) fn create(&self, folder: &Path, suffix: &str) -> Result<()> {
        for planned in &self.files {
            let path = folder.join(planned.name.clone() + suffix);
            let write = || -> std::io::Result<()> {
                let mut file = File::create_new(&path)?;
                file.write_all(&planned.start)?;
                file.set_len(planned.bytes)
            };
            write().map_err(|error| failed(&path, &error))?;
        }
        Ok(())
    }

    /// Returns a writer to the files that [`TensorFiles::create`] has created in `folder` with the
    /// same `suffix`. It opens a file at the first write.
    pub(crate) fn writer(&self, folder: &Path, suffix: &str) -> FilesWriter<'_> {
        let paths = self
            .files
            .iter()
            .map(|file| folder.join(file.name.clone() + suffix));
        FilesWriter {
            plan: self,
            files: paths.map(|path| (path, None)).collect(),
        }
    }
}

/// Writes regions of arrays to files to which other processes write too.
pub(crate) struct FilesWriter<'a> {
    plan: &'a TensorFiles,
    files: Vec<(PathBuf, Option<File>)>,
}

impl FilesWriter<'_> {
    /// Writes a region of the array at index `array`. `bytes` has its elements in row-major order.
    pub(crate) fn write(&mut self, array: usize, region: &Region, bytes: &[u8]) -> Result<()> {
        let PlannedArray {
            name,
            aval,
            file,
            offset,
        } = &self.plan.arrays[array];
        let (path, open) = &mut self.files[*file];
        let file = opened(path, open)?;
        let mut rest = bytes;
        for run in runs(aval.shape(), region, aval.dtype().size()) {
            let (now, later) = rest.split_at((run.end - run.start) as usize);
            file.write_all_at(now, offset + run.start)
                .map_err(|error| failed(path, &format!("{name}: region {region}: {error}")))?;
            rest = later;
        }
        Ok(())
    }

    /// Blocks until all written bytes are on the disk. `created` is true on the process that has
    /// created the files, so that their headers are included.
    pub(crate) fn sync(mut self, created: bool) -> Result<()> {
        self.files.iter_mut().try_for_each(|(path, open)| {
            if open.is_none() && !created {
                return Ok(());
            }
            let synced = opened(path, open)?.sync_all();
            synced.map_err(|error| failed(path, &error))
        })
    }
}

/// Returns the file for writing. Opens it at the first call.
fn opened<'a>(path: &Path, open: &'a mut Option<File>) -> Result<&'a File> {
    if let Some(file) = open {
        return Ok(file);
    }
    let flags = OFlags::NOFOLLOW.bits().cast_signed();
    let opened = File::options().write(true).custom_flags(flags).open(path);
    Ok(open.insert(opened.map_err(|error| failed(path, &error))?))
}

/// Returns the name of file `file` of `count` files, in list `list` of names.
fn file_name(file: usize, count: usize, list: usize) -> String {
    let file = file + 1;
    match (count, list) {
        (1, _) => MODEL.to_owned(),
        (_, 1) => format!("model-{file:05}-of-{count:05}.safetensors"),
        _ => format!("model-{list}-{file:05}-of-{count:05}.safetensors"),
    }
}

/// Returns the names of the safetensors files in `folder` that its index lists. Empty if the folder
/// has no valid index.
pub(crate) fn indexed(folder: &Path) -> BTreeSet<String> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: BTreeMap<String, String>,
    }

    let text = read_regular(&folder.join(INDEX), LARGEST_INDEX).unwrap_or_default();
    let index = read_json::<Index>(&text);
    let names = index
        .map_or_else(|_| BTreeMap::new(), |index| index.weight_map)
        .into_values();
    let is_own = |name: &String| {
        name.ends_with(".safetensors") && Path::new(name).file_name() == Some(name.as_ref())
    };
    names.filter(is_own).collect()
}
