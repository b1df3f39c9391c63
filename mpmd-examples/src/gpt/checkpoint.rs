//! Named arrays in a safetensors file. The file does not depend on the number of processes, stages
//! and devices.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mpmd::kernel::ViewMut;
use mpmd::region::Region;
use mpmd::sharding::Sharding;
use mpmd::{Error, MpmdArray, ProcessId, Program, Result};
use mpmd::{
    HostArray,
    aval::{DType, ShapedArray},
};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

/// Limit on the length of an accepted header, in bytes. It is far more than any model here needs,
/// and limits the memory that a broken file can make us allocate.
const LONGEST_HEADER: u64 = 16 << 20;

/// Writes arrays and metadata to `path`, and replaces an old file. Every process must call it.
/// Blocks until the file is written.
///
/// The arrays move to process 0, one after another. Process 0 writes them to a temporary file
/// beside `path` and then renames it. A reader sees either the old file or the complete new one.
///
/// # Errors
///
/// If an array's operation failed or the file cannot be written. Every process gets the error.
pub fn save(
    program: &mut Program,
    path: &Path,
    arrays: &[(String, MpmdArray)],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let writer = ProcessId(0);
    let device = program.topology().devices_of(writer)[0];
    let beside = path.with_extension("partial");
    let mut file = None;
    if program.process() == writer && !program.is_dry_run() {
        file = Some(header(arrays, metadata).and_then(|header| {
            let mut file = File::create(&beside).map_err(|error| at(&beside, &error))?;
            file.write_all(&header).map_err(|error| at(&beside, &error))?;
            Ok(file)
        }));
    }
    for (_, array) in arrays {
        let here = program.device_put(array, Sharding::single_device(device))?;
        if let Some(Ok(open)) = &mut file
            && let Some(values) = here.to_host()?
            && let Err(error) = open.write_all(values.bytes())
        {
            file = Some(Err(at(&beside, &error)));
        }
    }
    program.broadcast_value(writer, (), move || match file {
        Some(written) => written
            .and_then(|file| file.sync_all().map_err(|error| at(&beside, &error)))
            .and_then(|()| std::fs::rename(&beside, path).map_err(|error| at(path, &error))),
        None => Ok(()),
    })
}

fn at(path: &Path, error: &std::io::Error) -> Error {
    Error::kernel(format!("{}: {error}", path.display()))
}

/// Returns the start of a safetensors file: the length and the text of the header. The values of
/// `arrays` follow in the same order. A dtype that safetensors lacks is an error.
fn header(arrays: &[(String, MpmdArray)], metadata: &BTreeMap<String, String>) -> Result<Vec<u8>> {
    let mut offset = 0;
    let mut tensors = Vec::new();
    for (name, array) in arrays {
        let start = offset;
        offset += array.aval().bytes();
        let dtype = dtype(array.dtype()).ok_or_else(|| {
            Error::kernel(format!("{name}: safetensors has no {}", array.dtype()))
        })?;
        let info =
            TensorInfo { dtype, shape: array.shape().to_vec(), data_offsets: (start, offset) };
        tensors.push((name.clone(), info));
    }
    let metadata: HashMap<String, String> = metadata.clone().into_iter().collect();
    let wrong = |error: String| Error::kernel(format!("the header of a safetensors file: {error}"));
    let header =
        Metadata::new(Some(metadata), tensors).map_err(|error| wrong(error.to_string()))?;
    let mut text = serde_json::to_vec(&header).map_err(|error| wrong(error.to_string()))?;
    // Aligns the values to a multiple of eight bytes.
    text.resize(text.len().next_multiple_of(8), b' ');
    Ok([&(text.len() as u64).to_le_bytes()[..], &text].concat())
}

fn dtype(dtype: DType) -> Option<Dtype> {
    Some(match dtype {
        DType::Bool => Dtype::BOOL,
        DType::U8 => Dtype::U8,
        DType::I8 => Dtype::I8,
        DType::U16 => Dtype::U16,
        DType::I16 => Dtype::I16,
        DType::U32 => Dtype::U32,
        DType::I32 => Dtype::I32,
        DType::U64 => Dtype::U64,
        DType::I64 => Dtype::I64,
        DType::Bf16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::F32 => Dtype::F32,
        DType::F64 => Dtype::F64,
        _ => return None,
    })
}

/// An open safetensors file: its path and its header. The values are read later, by `load`.
#[derive(Clone, Debug)]
pub struct Checkpoint {
    path: PathBuf,
    header: Arc<Metadata>,
    /// Offset of the values in the file, in bytes.
    start: u64,
}

impl Checkpoint {
    /// Reads the header of a file, but no values.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is no safetensors file, or is shorter than its header says.
    pub fn open(path: &Path) -> Result<Self> {
        let file = File::open(path).map_err(|error| at(path, &error))?;
        let found = file.metadata().map_err(|error| at(path, &error))?.len();
        let (header, start) = read_header(file, found)
            .map_err(|why| Error::kernel(format!("{}: {why}", path.display())))?;
        Ok(Self { path: path.to_owned(), header: Arc::new(header), start })
    }

    /// Returns the value of a metadata key. `None` if the file does not have the key.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.header.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// Issues the loading of an array of the file, with any sharding, and returns at once. Each
    /// owner reads only its own part of the file.
    ///
    /// # Errors
    ///
    /// If the file has no such array, or one of another shape or dtype. Every process that reads
    /// the same file gets the same error. If a part cannot be read, the operation of the array
    /// fails.
    #[track_caller]
    pub fn load(
        &self,
        program: &mut Program,
        name: &str,
        aval: &ShapedArray,
        sharding: &Sharding,
    ) -> Result<MpmdArray> {
        let wrong = |why: String| Error::kernel(format!("{}: {name}: {why}", self.path.display()));
        let tensors = self.header.tensors();
        let info = tensors.get(name).ok_or_else(|| wrong("there is no such array".into()))?;
        if info.shape != aval.shape() || Some(info.dtype) != dtype(aval.dtype()) {
            return Err(wrong(format!(
                "it is {:?}{:?}, and {aval} is needed",
                info.dtype, info.shape
            )));
        }
        let (path, start) = (self.path.clone(), self.start + info.data_offsets.0 as u64);
        program.array_from_fn(aval.clone(), sharding, move |region, view| {
            let file = File::open(&path).map_err(|error| at(&path, &error))?;
            read_region(&file, start, region, view).map_err(|error| at(&path, &error))
        })
    }
}

/// Reads the header of a file of `found` bytes. Returns the header and the offset of the values in
/// the file, in bytes. The error says why the file is invalid.
fn read_header(mut file: impl Read, found: u64) -> Result<(Metadata, u64), String> {
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|_| "no safetensors file: it has no header")?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER {
        return Err(format!("no safetensors file: its header would have {length} bytes"));
    }
    let mut text = vec![0; length as usize];
    file.read_exact(&mut text).map_err(|_| "cut off within its header")?;
    let header: Metadata = serde_json::from_slice(&text)
        .map_err(|error| format!("no safetensors file: its header is invalid ({error})"))?;
    let start = 8 + length;
    let expected = start.saturating_add(header.data_len() as u64);
    if found < expected {
        return Err(format!("cut off: it has {found} bytes of {expected}"));
    }
    Ok((header, start))
}

/// Reads the elements of `region`, of an array that begins at byte `start` of the file, into
/// `view`. Each contiguous run is one read.
fn read_region(
    file: &File,
    start: u64,
    region: &Region,
    mut view: ViewMut<'_>,
) -> std::io::Result<()> {
    let item = view.global().dtype().size();
    let shape = view.global().shape().to_vec();
    let bytes = view.as_bytes_mut();
    // Dimensions that the region covers completely join one run with the dimension before them.
    let mut inner = shape.len();
    while inner > 0 && region.range(inner - 1) == (0..shape[inner - 1]) {
        inner -= 1;
    }
    let split = inner.saturating_sub(1);
    let run: usize = (split..shape.len()).map(|d| region.range(d).len()).product::<usize>() * item;
    if run == 0 {
        return Ok(());
    }
    let stride = |d: usize| shape[d + 1..].iter().product::<usize>();
    for (index, part) in bytes.chunks_mut(run).enumerate() {
        // The position of the run's first element, from the last outer dimension to the first.
        let mut rest = index;
        let mut first =
            if shape.is_empty() { 0 } else { region.range(split).start * stride(split) };
        for d in (0..split).rev() {
            let range = region.range(d);
            first += (range.start + rest % range.len()) * stride(d);
            rest /= range.len();
        }
        file.read_exact_at(part, start + (first * item) as u64)?;
    }
    Ok(())
}

/// Reads all arrays of a file into memory, by name, for programs that need a complete small file:
/// tests and tools. Omits arrays of a dtype that this project lacks.
///
/// # Errors
///
/// As [`Checkpoint::open`] and [`Checkpoint::load`].
pub fn read_all(path: &Path) -> Result<BTreeMap<String, HostArray>> {
    let checkpoint = Checkpoint::open(path)?;
    let mut program = Program::builder().alone()?;
    let device = Sharding::single_device(program.topology().device_ids()[0]);
    let mut all = BTreeMap::new();
    for (name, info) in checkpoint.header.tensors() {
        let dtype = DType::ALL.into_iter().find(|known| dtype(*known) == Some(info.dtype));
        let Some(dtype) = dtype else { continue };
        let aval = ShapedArray::try_new(&info.shape, dtype)?;
        if let Some(values) = checkpoint.load(&mut program, &name, &aval, &device)?.to_host()? {
            all.insert(name, values);
        }
    }
    program.finish()?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use mpmd::aval::f32s;
    use mpmd::{spec, testing::Simulation};

    use super::*;

    fn value(element: usize) -> f32 {
        element as f32 * 0.5 - 3.0
    }

    fn fill(region: &Region, mut view: ViewMut<'_>) -> Result<()> {
        let columns = view.global().shape()[1];
        let (rows, cols) = (region.range(0), region.range(1));
        let elements = rows.flat_map(|row| cols.clone().map(move |col| row * columns + col));
        view.as_mut_slice::<f32>()?.iter_mut().zip(elements).for_each(|(v, e)| *v = value(e));
        Ok(())
    }

    /// Saves a matrix `w` `[8, 6]`, sharded in both dimensions over four devices in two processes,
    /// and a scalar `step`. Returns each process's result.
    fn saved(path: &Path) -> Vec<Result<()>> {
        Simulation::new(2, 4).run(|p| {
            let mesh = p.mesh(&[("a", 2), ("b", 2)])?;
            let w = p.array_from_fn(f32s([8, 6]), &mesh.sharding(spec!["b", "a"]), fill)?;
            let step =
                p.array_from_fn(f32s([]), &mesh.replicated(), |_, mut v| Ok(v.fill(7.0f32)?))?;
            let metadata = BTreeMap::from([("kind".to_owned(), "test".to_owned())]);
            save(p, path, &[("w".to_owned(), w), ("step".to_owned(), step)], &metadata)
        })
    }

    #[test]
    fn saved_arrays_load_with_other_processes_and_shardings() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        saved(&path).into_iter().for_each(|result| result.unwrap());
        for (processes, devices) in [(1, 3), (3, 3)] {
            let results = Simulation::new(processes, devices).run(|p| {
                let checkpoint = Checkpoint::open(&path)?;
                assert_eq!(checkpoint.metadata("kind"), Some("test"));
                let mesh = p.mesh(&[("c", 3)])?;
                let w = checkpoint.load(p, "w", &f32s([8, 6]), &mesh.sharding(spec![None, "c"]))?;
                let step = checkpoint.load(p, "step", &f32s([]), &mesh.replicated())?;
                assert_eq!(step.to_host()?.map(|step| step.to_vec::<f32>()), Some(Ok(vec![7.0])));
                for shard in w.addressable_shards()? {
                    let cols = shard.region.range(1);
                    let expected: Vec<f32> = (0..8)
                        .flat_map(|row| cols.clone().map(move |col| value(row * 6 + col)))
                        .collect();
                    assert_eq!(shard.data.to_vec::<f32>()?, expected);
                }
                Ok(())
            });
            results.into_iter().for_each(|result| result.unwrap());
        }
        let all = read_all(&path).unwrap();
        assert_eq!(all["w"].to_vec::<f32>().unwrap(), (0..48).map(value).collect::<Vec<_>>());
    }

    #[test]
    fn impossible_data_offsets_are_errors() {
        let all = usize::MAX;
        let text = format!(r#"{{"w":{{"dtype":"U8","shape":[{all}],"data_offsets":[0,{all}]}}}}"#);
        let file = [&(text.len() as u64).to_le_bytes()[..], text.as_bytes(), b"values"].concat();
        let said = read_header(&file[..], file.len() as u64).unwrap_err();
        assert!(
            said.starts_with("no safetensors file") || said.starts_with("cut off: it has"),
            "{said}"
        );
    }

    #[test]
    fn fuzz_checkpoints() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        saved(&path).into_iter().for_each(|result| result.unwrap());
        let sample = std::fs::read(&path).unwrap();
        mpmd_fuzz::bytes("checkpoints", &[sample], |bytes| {
            let Ok((header, start)) = read_header(bytes, bytes.len() as u64) else { return };
            for (name, info) in header.tensors() {
                let (from, until) = info.data_offsets;
                let there = &bytes[start as usize..][from..until];
                let elements: usize = info.shape.iter().product();
                assert_eq!(there.len() * 8, elements * info.dtype.bitsize(), "{name}");
            }
        });
    }

    #[test]
    fn safetensors_crate_reads_a_saved_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        saved(&path).into_iter().for_each(|result| result.unwrap());
        let bytes = std::fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("w").unwrap().shape(), [8, 6]);
    }

    #[test]
    fn unwritable_path_is_an_error_on_every_process() {
        for result in saved(Path::new("/nonexistent/folder/model.safetensors")) {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("/nonexistent/folder/model.partial"), "{error}");
        }
    }

    #[test]
    fn failed_save_leaves_the_old_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        saved(&path).into_iter().for_each(|result| result.unwrap());
        let before = std::fs::read(&path).unwrap();
        let results = Simulation::new(2, 2).run(|p| {
            let mesh = p.mesh(&[("c", 2)])?;
            let good = p.array_from_fn(f32s([4, 4]), &mesh.replicated(), fill)?;
            let bad = p.array_from_fn(f32s([4, 4]), &mesh.replicated(), |_, _| {
                Err(Error::kernel("out of ink"))
            })?;
            save(p, &path, &[("good".to_owned(), good), ("bad".to_owned(), bad)], &BTreeMap::new())
        });
        for result in results {
            let error = result.unwrap_err().to_string();
            assert!(error.contains("out of ink"), "{error}");
        }
        assert!(std::fs::read(&path).unwrap() == before, "the old file has changed");
        assert_eq!(read_all(&path).unwrap()["w"].to_vec::<f32>().unwrap().len(), 48);
    }

    #[test]
    fn mismatched_files_are_errors_that_name_the_array() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        saved(&path).into_iter().for_each(|result| result.unwrap());
        let results = Simulation::new(2, 2).run(|p| {
            let checkpoint = Checkpoint::open(&path)?;
            let mesh = p.mesh(&[("c", 2)])?;
            let load = |p: &mut Program, name: &str, shape: [usize; 2]| {
                let loaded = checkpoint.load(p, name, &f32s(shape), &mesh.replicated());
                loaded.err().map_or_else(String::new, |error| error.to_string())
            };
            Ok([load(p, "v", [8, 6]), load(p, "w", [6, 8])])
        });
        for result in results {
            let [missing, shape] = result.unwrap();
            assert!(missing.contains("v: there is no such array"), "{missing}");
            assert!(shape.contains("[8, 6]") && shape.contains("f32[6,8] is needed"), "{shape}");
        }
        let bytes = std::fs::read(&path).unwrap();
        std::fs::write(&path, &bytes[..bytes.len() - 1]).unwrap();
        assert!(Checkpoint::open(&path).unwrap_err().to_string().contains("cut off"));
        std::fs::write(&path, b"nothing of the kind").unwrap();
        assert!(Checkpoint::open(&path).is_err());
    }
}
