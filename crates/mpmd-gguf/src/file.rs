//! An open GGUF file, or all parts of a split one.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::{BufReader, ErrorKind};
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::OFlags;

use crate::error::{GgufError, GgufFlaw};
use crate::header::{Header, HeaderError};
use crate::metadata::Metadata;
use crate::parts::{check_part, check_tensor_count, part_count, part_paths};
use crate::tensor::TensorInfo;

/// An open GGUF file: its headers. Values are read later, by region. Clones share the headers.
///
/// All methods may be called by several threads at once.
#[derive(Clone)]
pub struct GgufFile {
    shared: Arc<Shared>,
}

struct Shared {
    /// The parts in order; a file that is not split has one.
    parts: Vec<GgufPart>,
    metadata: Metadata,
    tensors: BTreeMap<String, TensorInfo>,
}

/// One file of a [`GgufFile`].
#[derive(Debug)]
pub struct GgufPart {
    pub(crate) path: PathBuf,
    pub(crate) file: File,
    /// Length when it was opened, in bytes.
    pub(crate) bytes: u64,
}

/// A file and the byte range in it that holds the blocks of a tensor.
#[derive(Clone, Debug)]
pub struct TensorBytes<'a> {
    /// Path of the file.
    pub path: &'a Path,
    /// The open file.
    pub file: &'a File,
    /// Offsets of the first byte and of the end.
    pub range: Range<u64>,
}

impl GgufFile {
    /// Opens a file and reads its headers, but no values. If the file is one part of a split file,
    /// opens all parts. Any part may be given: the others are in the same folder and have the same
    /// name with other numbers. The metadata are those of the first part.
    ///
    /// # Errors
    ///
    /// If a file cannot be read, is not regular, or is refused for a [`GgufFlaw`], and if a part is
    /// missing.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, GgufError> {
        let path = path.as_ref();
        let given = OpenedFile::open(path)?;
        let count = part_count(&given.metadata)?;
        if count == 1 {
            return Self::join(vec![given]);
        }

        let paths = part_paths(path, count).map_err(|flaw| refused(path, flaw))?;
        let mut given = Some(given);
        let mut files = Vec::with_capacity(paths.len());
        for (index, part) in paths.iter().enumerate() {
            let opened = match given.take_if(|given| given.part.path == *part) {
                Some(given) => given,
                None => OpenedFile::open(part).map_err(|error| missing_part(error, count))?,
            };
            check_part(&opened.metadata, part, index as u64, count)?;
            files.push(opened);
        }
        Self::join(files)
    }

    /// Joins the tensors of all parts.
    fn join(files: Vec<OpenedFile>) -> Result<Self, GgufError> {
        let mut tensors = BTreeMap::new();
        let mut parts = Vec::with_capacity(files.len());
        let mut first_metadata = None;
        for (index, opened) in files.into_iter().enumerate() {
            for (name, mut tensor) in opened.tensors {
                tensor.part = index;
                if tensors.insert(name.clone(), tensor).is_some() {
                    return Err(refused(&opened.part.path, GgufFlaw::NameTwice(name)));
                }
            }
            parts.push(opened.part);
            first_metadata.get_or_insert(opened.metadata);
        }

        let metadata = first_metadata.expect("a file has a part");
        if parts.len() > 1 {
            check_tensor_count(&metadata, &parts[0].path, tensors.len())?;
        }
        let shared = Shared {
            parts,
            metadata,
            tensors,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Returns the path of the file; that of the first part if the file is split.
    pub fn path(&self) -> &Path {
        &self.shared.parts[0].path
    }

    /// Returns the parts in order. A file that is not split has one.
    pub fn parts(&self) -> &[GgufPart] {
        &self.shared.parts
    }

    /// Returns the metadata.
    pub fn metadata(&self) -> &Metadata {
        &self.shared.metadata
    }

    /// Returns the tensors of all parts, by name.
    pub fn tensors(&self) -> &BTreeMap<String, TensorInfo> {
        &self.shared.tensors
    }

    /// Returns true if there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.shared.tensors.contains_key(name)
    }

    /// Returns the tensor of this name.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo, GgufError> {
        let found = self.shared.tensors.get(name);
        found.ok_or_else(|| GgufError::NoTensor {
            path: self.path().to_owned(),
            name: name.to_owned(),
        })
    }

    /// Returns the path of the part that holds a tensor.
    ///
    /// # Errors
    ///
    /// If there is no such tensor.
    pub fn path_of(&self, name: &str) -> Result<&Path, GgufError> {
        Ok(self.tensor_bytes(name)?.path)
    }

    /// Returns the size in bytes of a row of a tensor.
    ///
    /// # Errors
    ///
    /// If there is no such tensor.
    pub fn bytes_of_row(&self, name: &str) -> Result<u64, GgufError> {
        Ok(self.tensor(name)?.bytes_of_row())
    }

    /// Returns the file and byte range that hold the blocks of a tensor, as for a hash of them.
    ///
    /// # Errors
    ///
    /// If there is no such tensor.
    pub fn tensor_bytes(&self, name: &str) -> Result<TensorBytes<'_>, GgufError> {
        let tensor = self.tensor(name)?;
        let part = self.part_of(tensor);
        Ok(TensorBytes {
            path: &part.path,
            file: &part.file,
            range: tensor.range(),
        })
    }

    pub(crate) fn part_of(&self, tensor: &TensorInfo) -> &GgufPart {
        &self.shared.parts[tensor.part]
    }
}

impl fmt::Debug for GgufFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufFile")
            .field("path", &self.path())
            .field("parts", &self.shared.parts.len())
            .field("tensors", &self.shared.tensors.len())
            .finish_non_exhaustive()
    }
}

/// A file with its header.
struct OpenedFile {
    part: GgufPart,
    metadata: Metadata,
    tensors: BTreeMap<String, TensorInfo>,
}

impl OpenedFile {
    fn open(path: &Path) -> Result<Self, GgufError> {
        let part = GgufPart::open(path)?;
        let header = Header::read(BufReader::new(&part.file), part.bytes);
        let header = header.map_err(|error| match error {
            HeaderError::Io(source) => io_error(path, source),
            HeaderError::Cut(end) => part.cut(end),
            HeaderError::Flaw(flaw) => refused(path, flaw),
        })?;
        Ok(Self {
            part,
            metadata: Metadata::new(path, header.values),
            tensors: header.tensors,
        })
    }
}

impl GgufPart {
    /// Returns the path of the part.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the length of the part when it was opened, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Opens a regular file.
    fn open(path: &Path) -> Result<Self, GgufError> {
        // Opening a pipe without this flag would wait for its writer.
        let flags = (OFlags::NONBLOCK | OFlags::NOCTTY).bits().cast_signed();
        let file = File::options().read(true).custom_flags(flags).open(path);
        let file = file.map_err(|source| io_error(path, source))?;

        // From the open file: the path may name another file by now.
        let found = file.metadata().map_err(|source| io_error(path, source))?;
        match found.is_file() {
            true => Ok(Self {
                path: path.to_owned(),
                file,
                bytes: found.len(),
            }),
            false => Err(GgufError::NotRegular {
                path: path.to_owned(),
            }),
        }
    }

    /// Creates an error about a file that ended before byte `end`.
    pub(crate) fn cut(&self, end: u64) -> GgufError {
        GgufError::Cut {
            path: self.path.clone(),
            end,
            bytes: self.bytes,
        }
    }
}

fn missing_part(error: GgufError, parts: u64) -> GgufError {
    match error {
        GgufError::Io { path, source } if source.kind() == ErrorKind::NotFound => {
            GgufError::MissingPart { path, parts }
        }
        other => other,
    }
}

fn refused(path: &Path, flaw: GgufFlaw) -> GgufError {
    let path = path.to_owned();
    GgufError::Refused { path, flaw }
}

fn io_error(path: &Path, source: std::io::Error) -> GgufError {
    let path = path.to_owned();
    GgufError::Io { path, source }
}
