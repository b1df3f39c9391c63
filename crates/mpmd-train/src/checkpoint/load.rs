//! Reading a checkpoint: its manifest, its arrays' shapes, and the pieces of a region.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mpmd_base::block::Mutex;
use mpmd_core::{Error, MoveOptions, MpmdArray, Program, Result, open_regular, read_regular};
use mpmd_device::copy::copy_region;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::Sharding;

use super::manifest::{FileEntry, LARGEST, Manifest, hash, read_list};
use super::pieces::check_pieces;
use super::{CheckpointContents, Checkpoints, RestorePoint, folder};
use crate::agree::{agree, on_first};
use crate::best::BestEvaluation;
use crate::tensors::owners::owners;
use crate::tensors::{LONGEST_HEADER, TensorFile, failed};

/// The arrays of a checkpoint, in the order of the requested [`CheckpointContents`], with its step,
/// seed and best evaluation.
pub(crate) struct LoadedCheckpoint {
    pub(crate) step: u64,
    pub(crate) seed: u64,
    pub(crate) best: Option<BestEvaluation>,
    pub(crate) arrays: Vec<MpmdArray>,
}

/// An opened complete checkpoint. Values are read later, by region.
struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    arrays: BTreeMap<String, SavedArray>,
    /// Number of bytes of values that this process has read.
    bytes_read: AtomicU64,
}

struct SavedArray {
    file: TensorFile,
    /// The regions of the saved pieces, each with its hash.
    pieces: Vec<(Region, String)>,
}

impl Checkpoint {
    /// Reads the manifest, the lists of pieces and the files' headers, and compares their hashes.
    /// Checks that the pieces of each array cover each element once.
    fn open(from: &Checkpoints, step: u64) -> Result<Self> {
        let path = folder::manifest(&from.folder, step);
        let bytes = read_regular(&path, LARGEST).map_err(|error| failed(&path, &error))?;
        let manifest = Manifest::parse(&bytes).map_err(|why| failed(&path, &why))?;
        let files = folder::files(&from.folder, step, manifest.epoch);
        let names = manifest.files.iter().map(|file| &file.name);
        let mut names = names.chain(manifest.lists.iter().map(|list| &list.name));
        if let Some(name) = names.find(|name| Path::new(name).file_name() != Some(name.as_ref())) {
            return Err(failed(
                &path,
                &format!("the name of a file is expected, {name:?} found"),
            ));
        }

        let mut lists: HashMap<String, Vec<(Region, String)>> = HashMap::new();
        for list in &manifest.lists {
            for array in read_list(&files, list)? {
                lists.entry(array.array).or_default().extend(array.pieces);
            }
        }

        let mut arrays = BTreeMap::new();
        for entry in &manifest.files {
            let file = open_file(files.join(&entry.name), entry)?;
            for name in file.names() {
                let pieces = lists.remove(&name).unwrap_or_default();
                check_pieces(file.aval(&name)?.shape(), &pieces)
                    .map_err(|why| failed(file.path(), &format!("{name}: {why}")))?;
                let array = SavedArray {
                    file: file.clone(),
                    pieces,
                };
                if let Some(other) = arrays.insert(name.clone(), array) {
                    let problem = format!("{name}: {} has it, too", other.file.path().display());
                    return Err(failed(file.path(), &problem));
                }
            }
        }

        if let Some(name) = lists.keys().min() {
            return Err(failed(
                &path,
                &format!("{name}: no file has this array of the lists"),
            ));
        }
        Ok(Self {
            path,
            manifest,
            arrays,
            bytes_read: AtomicU64::new(0),
        })
    }

    /// Returns an error if the checkpoint's settings or arrays differ from those of the training.
    fn check(&self, from: &Checkpoints, contents: &CheckpointContents) -> Result<()> {
        let stages = self.manifest.stages;
        for (name, expected) in &from.settings {
            let found = self
                .manifest
                .settings
                .get(name)
                .map_or("none", String::as_str);
            if found != expected {
                let problem = format!(
                    "the checkpoint has {name} {found}, and this training has {name} {expected}: \
                     give the same, or another folder of checkpoints"
                );
                return Err(failed(&self.path, &problem));
            }
        }

        if self.manifest.by_stage && stages != contents.stages {
            let problem = format!(
                "its arrays are named by stage, since stages have parameters of one path. So it \
                 restores to {stages} stages only, and the training has {}",
                contents.stages
            );
            return Err(failed(&self.path, &problem));
        }

        for (name, array) in &contents.arrays {
            let other = |path: &Path, found: &str| {
                let of = match name.starts_with("optimizer/") {
                    true => "optimiser",
                    false => "model",
                };
                let aval = array.aval();
                let problem = format!(
                    "the checkpoint is of another {of}: {name}: {aval} is expected, {found} found"
                );
                failed(path, &problem)
            };
            let Some(saved) = self.arrays.get(name) else {
                return Err(other(&self.path, "no such array"));
            };
            let found = saved.file.aval(name)?;
            if found != *array.aval() {
                return Err(other(saved.file.path(), &found.to_string()));
            }
        }

        let known: HashSet<&String> = contents.arrays.iter().map(|(name, _)| name).collect();
        match self.arrays.iter().find(|(name, _)| !known.contains(name)) {
            Some((name, saved)) => {
                let found = saved.file.aval(name)?;
                let problem = format!(
                    "{name}: {found} found, which is none of the arrays that are restored. If it \
                     is not trained, leave `Checkpoints::trained_only` out"
                );
                Err(failed(saved.file.path(), &problem))
            }
            None => Ok(()),
        }
    }

    /// Reads region `region` of an array into `bytes`, in row-major order. Reads each overlapping
    /// piece once, and compares its hash.
    fn read(&self, name: &str, region: &Region, bytes: &mut [u8]) -> Result<()> {
        let missing = || failed(&self.path, &format!("{name}: there is no such array"));
        let SavedArray { file, pieces } = self.arrays.get(name).ok_or_else(missing)?;
        let damaged =
            |region, why: &str| failed(file.path(), &format!("{name}: region {region}: {why}"));

        let aval = file.aval(name)?;
        let item = aval.dtype().size();
        let mut buffer = Vec::new();
        for (piece, expected) in pieces {
            let Some(common) = piece.intersect(region) else {
                continue;
            };
            buffer.resize(piece.elements() * item, 0);
            file.read(name, piece, &mut buffer)?;
            self.bytes_read
                .fetch_add(buffer.len() as u64, Ordering::Relaxed);

            let found = hash(&buffer);
            if found != *expected {
                let why = format!("damaged: hash {expected} is expected, {found} found");
                return Err(damaged(piece, &why));
            }
            copy_region(&buffer, piece, bytes, region, &common, item);
        }
        Ok(())
    }
}

/// Opens a file of values. First compares the file's length and its header's hash with `entry`.
fn open_file(path: PathBuf, entry: &FileEntry) -> Result<TensorFile> {
    let mut header = Vec::new();
    let read = open_regular(&path).and_then(|file| {
        let bytes = file.metadata()?.len();
        file.take(entry.header_bytes.min(8 + LONGEST_HEADER))
            .read_to_end(&mut header)?;
        Ok(bytes)
    });
    let found = read.map_err(|error| failed(&path, &error))?;

    if found != entry.bytes {
        let problem = format!("damaged: {} bytes are expected, {found} found", entry.bytes);
        return Err(failed(&path, &problem));
    }
    if hash(&header) != entry.header_hash {
        let problem = "damaged: its header does not have the hash in the manifest";
        return Err(failed(&path, &problem));
    }
    TensorFile::open(path)
}

/// Loads the arrays of `contents`, with their shardings, from the newest checkpoint or the step
/// that `from` requests. Returns `None` if there is no checkpoint.
pub(crate) fn load(
    p: &mut Program,
    from: &Checkpoints,
    contents: &CheckpointContents,
) -> Result<Option<LoadedCheckpoint>> {
    let steps = on_first(p, Vec::new(), || from.steps())?;
    if p.is_dry_run() {
        return Ok(None);
    }

    let wanted = match from.at {
        RestorePoint::Newest => steps.last().copied(),
        RestorePoint::Step(step) => Some(step),
    };
    let step = match wanted {
        None => return Ok(None),
        Some(step) if steps.contains(&step) => step,
        Some(step) => {
            let problem = format!("there is no checkpoint of step {step}, but of {steps:?}");
            return Err(failed(&from.folder, &problem));
        }
    };

    let older: Vec<u64> = steps.into_iter().filter(|older| *older < step).collect();
    // Only for a damaged checkpoint: one that does not fit this training has older ones that do not
    // fit either.
    let advice = |error: Error| match older.last() {
        Some(older) => Error::Environment(format!(
            "{error}. There is an older checkpoint: to continue after step {older}, remove {}",
            folder::manifest(&from.folder, step).display()
        )),
        None => error,
    };

    let opened = Checkpoint::open(from, step).map_err(advice);
    let own = opened
        .as_ref()
        .map_or(Ok(String::new()), |opened| opened.manifest.hash());
    let first = on_first(p, String::new(), || own.clone())?;

    let checked = opened.and_then(|opened| {
        opened.check(from, contents)?;
        if own? != first {
            let problem = "process 0 sees another manifest: all processes must share the folder";
            return Err(failed(&opened.path, &problem));
        }
        Ok(opened)
    });
    agree(p, checked.as_ref().map(drop).map_err(Clone::clone))?;

    let checkpoint = Arc::new(checked?);
    let arrays = read_arrays(p, &checkpoint, &contents.arrays).map_err(advice)?;
    let Manifest {
        step, seed, best, ..
    } = checkpoint.manifest;
    Ok(Some(LoadedCheckpoint {
        step,
        seed,
        best,
        arrays,
    }))
}

/// The error at the first array and region that a process could not read.
struct ReadProblem {
    /// The index of the array in the list of arrays.
    place: usize,
    region: Region,
    error: Error,
}

/// Loads arrays with the shardings of `like`. Only the owner of a region reads it, and sends it to
/// the other devices that hold it. Blocks until all arrays are complete.
fn read_arrays(
    p: &mut Program,
    checkpoint: &Arc<Checkpoint>,
    like: &[(String, MpmdArray)],
) -> Result<Vec<MpmdArray>> {
    // A failed operation would end the job, so the error goes beside it.
    let problem: Arc<Mutex<Option<ReadProblem>>> = Arc::default();
    let first = p.topology().device_ids()[0];
    let once = MoveOptions::default().donate(true).cache_plans(false);
    let mut arrays = Vec::with_capacity(like.len());
    for (place, (name, like)) in like.iter().enumerate() {
        let to = like
            .sharding()
            .cloned()
            .unwrap_or_else(|| Sharding::single_device(first));
        let checkpoint = checkpoint.clone();
        let problem = problem.clone();
        let name = name.clone();
        let owned = owners(like.aval(), &to)?;

        let array = p.array_from_fn(like.aval().clone(), &owned, move |region, mut values| {
            if let Err(error) = checkpoint.read(&name, region, values.as_bytes_mut()) {
                let mut problem = problem.lock();
                let is_earlier =
                    |other: &ReadProblem| (other.place, &other.region) < (place, region);
                if !problem.as_ref().is_some_and(is_earlier) {
                    *problem = Some(ReadProblem {
                        place,
                        region: region.clone(),
                        error,
                    });
                }
            }
            Ok(())
        })?;
        arrays.push(p.device_put_with(&array, to, once)?);
    }

    let mut read = Ok(());
    for array in &arrays {
        read = read.and(array.block_until_ready().map(drop));
    }
    let problem = problem.lock().take();
    agree(
        p,
        read.and(problem.map_or(Ok(()), |problem| Err(problem.error))),
    )?;
    Ok(arrays)
}

#[cfg(test)]
mod tests {
    use mpmd_core::Simulation;
    use mpmd_core::kernel::ViewMut;
    use mpmd_layout::aval::f32s;
    use mpmd_layout::spec;
    use mpmd_layout::topology::Mesh;

    use super::*;
    use crate::checkpoint::{SaveStatus, Saving};

    const SHAPE: [usize; 2] = [1024, 1200];
    const BYTES: u64 = 1024 * 1200 * 4;

    /// Returns contents of one array with some sharding over four devices. Each element has the
    /// value of its row-major index, times `factor`.
    fn contents(
        p: &mut Program,
        sharding: impl Fn(&Mesh) -> Sharding,
        factor: f32,
    ) -> Result<CheckpointContents> {
        let to = sharding(&p.mesh(&[("a", 2), ("b", 2)])?);
        let fill = move |region: &Region, mut values: ViewMut<'_>| {
            let values = values
                .as_mut_slice::<f32>()?
                .iter_mut()
                .zip(region.indices(&SHAPE));
            values.for_each(|(value, index)| *value = index as f32 * factor);
            Ok(())
        };
        let w = p.array_from_fn(f32s(SHAPE), &to, fill)?;
        let arrays = vec![("w".to_owned(), w)];
        Ok(CheckpointContents {
            step: 1,
            seed: 2,
            best: None,
            stages: 1,
            by_stage: false,
            arrays,
        })
    }

    /// Saves with one sharding on two processes, and loads with another on four. Returns the bytes
    /// that each process has read.
    fn bytes_read(
        saved: impl Fn(&Mesh) -> Sharding + Sync,
        loaded: impl Fn(&Mesh) -> Sharding + Sync,
    ) -> Vec<u64> {
        let folder = tempfile::tempdir().unwrap();
        let to = Checkpoints::new(folder.path());
        let results = Simulation::new(2, 4).run(|p| {
            let contents = contents(p, &saved, 1.0)?;
            Saving::begin(p, &to, contents, &SaveStatus::default())?.finish(p)
        });
        results.into_iter().for_each(|result| result.unwrap());
        let results = Simulation::new(4, 4).run(|p| {
            let contents = contents(p, &loaded, 0.0)?;
            let checkpoint = Arc::new(Checkpoint::open(&to, 1)?);
            checkpoint.check(&to, &contents)?;
            for array in read_arrays(p, &checkpoint, &contents.arrays)? {
                for shard in array.addressable_shards()? {
                    let expected = shard.region.indices(&SHAPE).map(|index| index as f32);
                    assert!(shard.data.as_slice::<f32>()?.iter().copied().eq(expected));
                }
            }
            Ok(checkpoint.bytes_read.load(Ordering::Relaxed))
        });
        results.into_iter().map(Result::unwrap).collect()
    }

    #[test]
    fn manifest_with_overlapping_pieces_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let to = Checkpoints::new(folder.path());
        let results = Simulation::new(1, 4).run(|p| {
            let contents = contents(p, Mesh::replicated, 1.0)?;
            Saving::begin(p, &to, contents, &SaveStatus::default())?.finish(p)
        });
        results.into_iter().for_each(|result| result.unwrap());
        let (path, files) = (
            folder::manifest(folder.path(), 1),
            folder::files(folder.path(), 1, 1),
        );
        let mut manifest = Manifest::parse(&std::fs::read(&path).unwrap()).unwrap();
        let mut arrays = read_list(&files, &manifest.lists[0]).unwrap();
        let [first, second, ..] = &mut arrays[0].pieces[..] else {
            panic!("several pieces")
        };
        // The number of elements stays the same.
        assert_eq!(first.0.elements(), second.0.elements());
        second.clone_from(first);
        let list = serde_json::to_vec(&arrays).unwrap();
        std::fs::write(files.join(folder::list(0)), &list).unwrap();
        manifest.lists[0].hash = hash(&list);
        std::fs::write(&path, manifest.clone().seal().unwrap()).unwrap();
        let said = || Checkpoint::open(&to, 1).map(drop).unwrap_err().to_string();
        let expected = "model.safetensors: w: damaged: its pieces overlap or leave elements out";
        assert!(said().ends_with(expected), "{}", said());
        manifest.lists[0].name = "../list".to_owned();
        std::fs::write(&path, manifest.seal().unwrap()).unwrap();
        assert!(
            said().ends_with("the name of a file is expected, \"../list\" found"),
            "{}",
            said()
        );
    }

    #[test]
    fn equal_shardings_read_exactly_their_share() {
        let quarters = |mesh: &Mesh| mesh.sharding(spec!["a", "b"]);
        assert_eq!(bytes_read(quarters, quarters), [BYTES / 4; 4]);
        let halves = |mesh: &Mesh| mesh.sharding(spec!["b"]);
        assert_eq!(bytes_read(halves, halves), [BYTES / 2, BYTES / 2, 0, 0]);
        assert_eq!(bytes_read(halves, Mesh::replicated), [BYTES, 0, 0, 0]);
    }

    #[test]
    fn other_shardings_read_the_pieces_that_they_overlap() {
        let rows = |mesh: &Mesh| mesh.sharding(spec!["a"]);
        let columns = |mesh: &Mesh| mesh.sharding(spec![None, "a"]);
        assert_eq!(bytes_read(columns, rows).iter().sum::<u64>() / BYTES, 1);
        // Each process needs a half of each piece.
        assert_eq!(bytes_read(rows, columns), [BYTES, 0, BYTES, 0]);
        assert_eq!(bytes_read(columns, Mesh::replicated), [BYTES, 0, 0, 0]);
    }
}
