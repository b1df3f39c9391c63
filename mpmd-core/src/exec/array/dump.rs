//! Dumps: safetensors files with the inputs of one operation, for [`run_here`](crate::run_here).
//!
//! A file has the inputs on one device, named `0`, `1` and so on in the order of the leaves. Its
//! metadata has the `operation` and its line, `at`.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::panic::Location;
use std::path::{Path, PathBuf};

use mpmd_launch::{LaunchError, variables};
use mpmd_transport::SharedBuffer;
use safetensors::tensor::{Dtype, SafeTensors, View, serialize_to_file};

use crate::error::{Error, Result};
use crate::exec::array::host_array::HostArray;
use crate::exec::array::{MpmdArray, Repr};
use crate::files::read_regular;
use crate::warning::warn_user;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::topology::DeviceId;

/// The folder of a dump that names none.
const FOLDER: &str = "dump";

/// The operation to dump, and the folder for its files.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Dump {
    pub(crate) op: u64,
    pub(crate) folder: PathBuf,
}

impl Dump {
    /// Writes the inputs of the operation on each device of this process, as they are before it.
    /// Blocks until they are there. Without inputs on this process it writes nothing. A failure is
    /// only a warning.
    pub(crate) fn write(&self, what: &str, takes: &[&MpmdArray], at: &'static Location<'static>) {
        let op = self.op;
        let describe = format!("operation {op} ({what}) at {at}");
        match self.try_write(what, takes, at) {
            Ok(files) => files.iter().for_each(|file| {
                warn_user(&format!("the inputs of {describe} are in {}", file.display()));
            }),
            Err(why) => warn_user(&format!("the inputs of {describe} cannot be written: {why}")),
        }
    }

    fn try_write(
        &self,
        what: &str,
        takes: &[&MpmdArray],
        at: &'static Location<'static>,
    ) -> Result<Vec<PathBuf>, String> {
        // By device: (number of the input, its values).
        let mut inputs: BTreeMap<DeviceId, Vec<(usize, HostArray)>> = BTreeMap::new();
        let mut everywhere = Vec::new();
        for (number, array) in takes.iter().enumerate() {
            if array.aval().is_object() {
                continue;
            }
            if let Repr::Host(host) = &array.repr {
                everywhere.push((number, host.clone()));
            }
            for shard in array.shards_here(at).map_err(|error| error.to_string())? {
                inputs.entry(shard.device).or_default().push((number, shard.data));
            }
        }
        std::fs::create_dir_all(&self.folder)
            .map_err(|error| format!("creating {}: {error}", self.folder.display()))?;
        let about = [("operation".to_owned(), what.to_owned()), ("at".to_owned(), at.to_string())];
        let about: HashMap<String, String> = about.into();
        let mut files = Vec::new();
        for (device, arrays) in inputs {
            let path =
                self.folder.join(format!("operation-{}-device-{device}.safetensors", self.op));
            let tensors = arrays.iter().chain(&everywhere);
            let tensors =
                tensors.map(|(number, array)| Ok((number.to_string(), Tensor::of(array)?)));
            let tensors = tensors.collect::<Result<Vec<_>, String>>()?;
            serialize_to_file(tensors, Some(about.clone()), &path)
                .map_err(|error| format!("writing {}: {error}", path.display()))?;
            files.push(path);
        }
        Ok(files)
    }
}

/// An array as safetensors sees it.
struct Tensor<'a> {
    array: &'a HostArray,
    dtype: Dtype,
}

impl<'a> Tensor<'a> {
    fn of(array: &'a HostArray) -> Result<Self, String> {
        let dtype = safetensors_dtype(array.dtype())
            .ok_or_else(|| format!("the format has no {}", array.aval()))?;
        Ok(Self { array, dtype })
    }
}

impl View for Tensor<'_> {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        self.array.shape()
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.array.bytes())
    }

    fn data_len(&self) -> usize {
        self.array.bytes().len()
    }
}

impl HostArray {
    /// Reads a dump of `mpmd run --dump`: the inputs of one operation on one device, in the order
    /// of their leaves. [`run_here`](crate::run_here) runs the operation's kernel on them again. An
    /// input that was not on the device is left out.
    ///
    /// ```no_run
    /// use mpmd_core::prelude::*;
    /// use mpmd_core::run_here;
    ///
    /// let inputs = HostArray::read_dump("dump/operation-12-device-0.safetensors")?;
    /// let y = run_here(elementwise(|x: f32| x + 1.0), &inputs[0])?;
    /// println!("{:?}", y.to_vec::<f32>()?);
    /// # Ok::<(), mpmd_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// If the file cannot be read or is no dump.
    pub fn read_dump(path: impl AsRef<Path>) -> Result<Vec<Self>> {
        let path = path.as_ref();
        let wrong = |why: String| Error::Dump { path: path.to_owned(), why };
        let bytes = read_regular(path, u64::MAX).map_err(|error| wrong(error.to_string()))?;
        let file = SafeTensors::deserialize(&bytes).map_err(|error| wrong(error.to_string()))?;
        let mut arrays = BTreeMap::new();
        for (name, view) in file.iter() {
            let number: usize = name
                .parse()
                .map_err(|_| wrong(format!("{name:?} is not the number of an input")))?;
            let dtype = DType::ALL
                .into_iter()
                .find(|dtype| safetensors_dtype(*dtype) == Some(view.dtype()));
            let dtype = dtype
                .ok_or_else(|| wrong(format!("input {name} has the dtype {:?}", view.dtype())))?;
            let aval = ShapedArray::try_new(view.shape(), dtype)?;
            let data = SharedBuffer::from(view.data().to_vec());
            arrays.insert(number, Self::from_bytes(aval, data)?);
        }
        Ok(arrays.into_values().collect())
    }
}

/// Returns safetensors' name of a dtype, if it has one.
pub fn safetensors_dtype(dtype: DType) -> Option<Dtype> {
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

/// Returns (number of the operation, folder) for a value of
/// [`variables::DUMP`](mpmd_launch::variables::DUMP), `OP` or `OP:FOLDER`.
///
/// # Errors
///
/// [`LaunchError::Variable`] for another text. Operations are counted from 1.
pub fn parse_dump(text: &str) -> Result<(u64, PathBuf), LaunchError> {
    let (op, folder) = text.split_once(':').unwrap_or((text, FOLDER));
    match op.parse() {
        Ok(op @ 1..) if !folder.is_empty() => Ok((op, folder.into())),
        _ => Err(LaunchError::Variable {
            variable: variables::DUMP.into(),
            value: text.into(),
            expected: "the number of an operation, from 1, or number:folder".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dump_is_a_number_and_perhaps_a_folder() {
        assert_eq!(parse_dump("12"), Ok((12, "dump".into())));
        assert_eq!(parse_dump("7:/tmp/a:b"), Ok((7, "/tmp/a:b".into())));
        for wrong in ["", "0", "x", "-1", "3:", ":/tmp"] {
            let error = parse_dump(wrong).unwrap_err().to_string();
            assert!(error.contains("the number of an operation"), "{error}");
        }
    }
}
