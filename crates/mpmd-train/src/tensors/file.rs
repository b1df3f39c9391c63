//! A safetensors file: its header, and regions of its arrays.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mpmd_core::{Error, Result, hash_samples, open_regular};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::random::Key;
use mpmd_layout::region::Region;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::refuse_pointer;
use super::runs::runs;
use super::unique_json::{JsonError, read_json};

/// Limit on the length of an accepted header, in bytes. It bounds the memory that a damaged file
/// can make the reader allocate.
pub(crate) const LONGEST_HEADER: u64 = 100 << 20;

/// An open safetensors file: its path and its header. Values are read later, by region. Clones
/// share the header.
#[derive(Clone)]
pub struct TensorFile {
    path: Arc<Path>,
    file: Arc<File>,
    header: Arc<Metadata>,
    /// Offset of the values in the file, in bytes.
    start: u64,
}

impl TensorFile {
    /// Opens a file and reads its header, but no values.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is no safetensors file (such as a pointer of Git LFS), or is
    /// shorter than its header says.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let path = path.into();
        let file = open_regular(&path).map_err(|error| failed(&path, &error))?;
        let found = file
            .metadata()
            .map_err(|error| failed(&path, &error))?
            .len();
        refuse_pointer(&path, found).map_err(|error| failed(&path, &error))?;
        let (header, start) = read_header(&file, found).map_err(|why| failed(&path, &why))?;
        Ok(Self {
            path: path.into(),
            file: Arc::new(file),
            header: Arc::new(header),
            start,
        })
    }

    /// Returns the path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the value of a metadata key; `None` if the file does not have the key.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.header
            .metadata()
            .as_ref()?
            .get(key)
            .map(String::as_str)
    }

    /// Returns the names of the arrays, in the order of their values in the file.
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// Returns the global shape and dtype of an array.
    ///
    /// # Errors
    ///
    /// If the file has no such array, or the array has a dtype that mpmd lacks.
    pub fn aval(&self, name: &str) -> Result<ShapedArray> {
        let info = self.info(name)?;
        let known = DType::ALL
            .into_iter()
            .find(|known| safetensors_dtype(*known) == Some(info.dtype));
        let known = known
            .ok_or_else(|| self.failed(name, &format!("dtype {:?} is unknown", info.dtype)))?;
        Ok(ShapedArray::try_new(&info.shape, known)?)
    }

    /// Reads the elements of `region` of an array into `bytes`, in row-major order. Each contiguous
    /// run is one read.
    ///
    /// # Errors
    ///
    /// If the file has no such array or cannot be read.
    ///
    /// # Panics
    ///
    /// If `bytes` does not have the region's size.
    pub fn read(&self, name: &str, region: &Region, bytes: &mut [u8]) -> Result<()> {
        let info = self.info(name)?;
        let item = self.aval(name)?.dtype().size();
        assert_eq!(
            bytes.len(),
            region.elements() * item,
            "{region:?} of {name:?}"
        );

        let start = self.start + info.data_offsets.0 as u64;
        let mut done = 0;
        for run in runs(&info.shape, region, item) {
            let len = (run.end - run.start) as usize;
            let read = self
                .file
                .read_exact_at(&mut bytes[done..done + len], start + run.start);
            read.map_err(|error| self.failed(name, &format!("region {region:?}: {error}")))?;
            done += len;
        }
        Ok(())
    }

    /// Returns a hash of an array's shape, dtype and samples of its values. Takes up to `samples`
    /// samples of 4 KiB, spread evenly over the values.
    ///
    /// # Errors
    ///
    /// If the file has no such array or cannot be read.
    pub fn hash_samples(&self, name: &str, samples: u64) -> Result<u64> {
        let info = self.info(name)?;
        let [start, end] =
            [info.data_offsets.0, info.data_offsets.1].map(|offset| self.start + offset as u64);
        let hash = hash_samples(&self.file, start..end, samples);
        let hash = hash.map_err(|error| self.failed(name, &error))?;
        let form = format!("{:?} {:?}", info.dtype, info.shape);
        Ok(form
            .bytes()
            .fold(Key(hash), |key, byte| key.fold_in(byte.into()))
            .0)
    }

    fn info(&self, name: &str) -> Result<&TensorInfo> {
        self.header
            .info(name)
            .ok_or_else(|| self.failed(name, &"there is no such array"))
    }

    fn failed(&self, name: &str, why: &dyn fmt::Display) -> Error {
        failed(&self.path, &format!("{name}: {why}"))
    }
}

impl fmt::Debug for TensorFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TensorFile")
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

/// Creates an error that names a file or folder and the reason.
pub(crate) fn failed(path: &Path, why: &dyn fmt::Display) -> Error {
    Error::Environment(format!("{}: {why}", path.display()))
}

/// Returns the header of a safetensors file with these arrays, and the offset of each array's
/// values in the file, in bytes. The values follow in the same order, without gaps.
///
/// # Errors
///
/// If safetensors has no name for the dtype of an array.
pub fn header(
    arrays: &[(String, ShapedArray)],
    metadata: &BTreeMap<String, String>,
) -> Result<(Vec<u8>, Vec<u64>)> {
    let mut offset = 0;
    let mut tensors = Vec::with_capacity(arrays.len());
    for (name, aval) in arrays {
        let start = offset;
        offset += aval.bytes();
        let dtype = safetensors_dtype(aval.dtype()).ok_or_else(|| {
            Error::kernel(format!("{name}: safetensors has no dtype {}", aval.dtype()))
        })?;
        let shape = aval.shape().to_vec();
        let data_offsets = (start, offset);
        tensors.push((
            name.clone(),
            TensorInfo {
                dtype,
                shape,
                data_offsets,
            },
        ));
    }
    let offsets: Vec<usize> = tensors
        .iter()
        .map(|(_, info)| info.data_offsets.0)
        .collect();
    let metadata: HashMap<String, String> = metadata.clone().into_iter().collect();
    let wrong = |error: String| Error::kernel(format!("the header of a safetensors file: {error}"));
    let header =
        Metadata::new(Some(metadata), tensors).map_err(|error| wrong(error.to_string()))?;
    let mut text = serde_json::to_vec(&header).map_err(|error| wrong(error.to_string()))?;
    // Aligns the values to a multiple of eight bytes.
    text.resize(text.len().next_multiple_of(8), b' ');
    let start = [&(text.len() as u64).to_le_bytes()[..], &text].concat();
    let offsets = offsets
        .into_iter()
        .map(|offset| (start.len() + offset) as u64)
        .collect();
    Ok((start, offsets))
}

/// A reason why a file is not a complete safetensors file.
#[derive(Debug, thiserror::Error)]
enum HeaderFault {
    #[error("no safetensors file: it has no header")]
    Missing,
    #[error("no safetensors file: its header would have {length} bytes")]
    Long { length: u64 },
    #[error("cut off within its header")]
    Cut,
    #[error("no safetensors file: its header is invalid ({0})")]
    Json(#[from] JsonError),
    #[error("cut off: it has {found} bytes of {expected}")]
    CutValues { found: u64, expected: u64 },
}

/// Reads the header of a file of `found` bytes. Returns the header, and the offset of the values in
/// the file, in bytes.
fn read_header(mut file: impl Read, found: u64) -> Result<(Metadata, u64), HeaderFault> {
    let mut length = [0; 8];
    file.read_exact(&mut length)
        .map_err(|_| HeaderFault::Missing)?;
    let length = u64::from_le_bytes(length);
    if length > LONGEST_HEADER {
        return Err(HeaderFault::Long { length });
    }

    let mut text = Vec::new();
    let read = file.take(length).read_to_end(&mut text);
    if read.ok() != Some(length as usize) {
        return Err(HeaderFault::Cut);
    }

    let header: Metadata = read_json(&text)?;
    let start = 8 + length;
    let expected = start.saturating_add(header.data_len() as u64);
    if found < expected {
        return Err(HeaderFault::CutValues { found, expected });
    }
    Ok((header, start))
}

/// Returns safetensors' name of a dtype; `None` if it lacks the dtype.
fn safetensors_dtype(dtype: DType) -> Option<Dtype> {
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

#[cfg(test)]
mod tests {
    use mpmd_layout::aval::{f32s, f64s};

    use super::*;

    /// Returns a file with a matrix `w` `[3, 2]` of f32 and a scalar `step` of f64.
    fn sample() -> Vec<u8> {
        let arrays = [
            ("w".to_owned(), f32s([3, 2])),
            ("step".to_owned(), f64s([])),
        ];
        let metadata = BTreeMap::from([("kind".to_owned(), "test".to_owned())]);
        let (mut file, offsets) = header(&arrays, &metadata).unwrap();
        assert_eq!(offsets, [file.len() as u64, file.len() as u64 + 24]);
        (0..6).for_each(|i| file.extend((i as f32).to_le_bytes()));
        file.extend(7f64.to_le_bytes());
        file
    }

    #[test]
    fn regions_are_read_in_place() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        std::fs::write(&path, sample()).unwrap();
        let file = TensorFile::open(&path).unwrap();
        assert_eq!(
            (file.metadata("kind"), file.names().len()),
            (Some("test"), 2)
        );
        assert_eq!(file.aval("w").unwrap(), f32s([3, 2]));
        let mut bytes = [0; 8];
        file.read("w", &Region::new(vec![1..3, 1..2]), &mut bytes)
            .unwrap();
        assert_eq!(bytes, [3f32.to_le_bytes(), 5f32.to_le_bytes()].concat()[..]);
        let missing = file.aval("v").unwrap_err().to_string();
        assert!(
            missing.contains("model.safetensors: v: there is no such array"),
            "{missing}"
        );
    }

    #[test]
    fn safetensors_crate_reads_the_same() {
        let bytes = sample();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(file.tensor("w").unwrap().shape(), [3, 2]);
        assert_eq!(file.tensor("step").unwrap().data(), 7f64.to_le_bytes());
    }

    #[test]
    fn broken_headers_are_errors() {
        let all = usize::MAX;
        let text = format!(r#"{{"w":{{"dtype":"U8","shape":[{all}],"data_offsets":[0,{all}]}}}}"#);
        let file = [
            &(text.len() as u64).to_le_bytes()[..],
            text.as_bytes(),
            b"values",
        ]
        .concat();
        let said = read_header(&file[..], file.len() as u64)
            .unwrap_err()
            .to_string();
        assert!(
            said.starts_with("no safetensors file") || said.starts_with("cut off: it has"),
            "{said}"
        );
        // Readers disagree on which of the two types counts.
        let info =
            |dtype: &str| format!(r#"{{"dtype":"{dtype}","shape":[1],"data_offsets":[0,2]}}"#);
        let text = format!(r#"{{"w":{},"w":{}}}"#, info("F16"), info("BF16"));
        let file = [
            &(text.len() as u64).to_le_bytes()[..],
            text.as_bytes(),
            b"va",
        ]
        .concat();
        let said = read_header(&file[..], file.len() as u64)
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("its header is invalid (the key \"w\" twice"),
            "{said}"
        );

        let whole = sample();
        for end in 0..whole.len() {
            assert!(
                read_header(&whole[..end], end as u64).is_err(),
                "cut off at {end}"
            );
        }
    }
    #[test]
    fn fuzz_tensor_files() {
        mpmd_fuzz::bytes("tensor-files", &[sample()], |bytes| {
            let Ok((header, start)) = read_header(bytes, bytes.len() as u64) else {
                return;
            };
            for (name, info) in header.tensors() {
                let (from, until) = info.data_offsets;
                let values = &bytes[start as usize..][from..until];
                let elements: usize = info.shape.iter().product();
                assert_eq!(values.len() * 8, elements * info.dtype.bitsize(), "{name}");
            }
        });
    }
}
