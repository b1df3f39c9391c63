//! The errors of files, and the flaws for which a file is refused.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use crate::limits;

/// An error of reading or writing a GGUF file. Each names the file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file cannot be opened, read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },

    /// The file was cut after it had been opened.
    #[error(
        "{}: it ends before byte {end}, and had {bytes} bytes when it was opened: something has \
         changed it meanwhile",
        path.display()
    )]
    Cut {
        /// The file.
        path: PathBuf,
        /// End of the range that was to be read, in bytes.
        end: u64,
        /// Length of the file when it was opened, in bytes.
        bytes: u64,
    },

    /// The file is no regular file, such as a folder or a pipe.
    #[error("{}: it is no regular file", path.display())]
    NotRegular {
        /// The path.
        path: PathBuf,
    },

    /// The content of the file is refused.
    #[error("{}: {flaw}", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// The reason.
        flaw: GgufFlaw,
    },

    /// A part of a split file is missing.
    #[error("{}: this part of the model is missing: it has {parts} parts", path.display())]
    MissingPart {
        /// The path at which the part was expected.
        path: PathBuf,
        /// Number of parts of the split file.
        parts: u64,
    },

    /// The file has no tensor of this name.
    #[error("{}: it has no tensor {name:?}", path.display())]
    NoTensor {
        /// The file; the first part of a split file.
        path: PathBuf,
        /// The name that was asked for.
        name: String,
    },

    /// The metadata lacks a key, or the key has a value of another type.
    #[error("{}: metadata {key:?}: expected {expected}, found {found}", path.display())]
    Metadata {
        /// The file; the first part of a split file.
        path: PathBuf,
        /// The key.
        key: String,
        /// The type that the caller expected.
        expected: &'static str,
        /// The type or value that the file has; `"no such key"` if the key is missing.
        found: String,
    },

    /// A region is not inside its tensor.
    #[error("{}: tensor {name:?}: {region} is not inside its {whole}", path.display())]
    OutsideTensor {
        /// The file that holds the tensor.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// The region that was asked for.
        region: String,
        /// The extent of the tensor.
        whole: String,
    },
}

/// The reason why the content of a file is refused. Retrying will not help: the file itself is at
/// fault, or needs a newer reader.
#[derive(Clone, Debug, Eq, Error, PartialEq)]
#[non_exhaustive]
pub enum GgufFlaw {
    /// The file does not begin with the letters `GGUF`.
    #[error(
        "it is no GGUF file: it begins with \"{}\"{}",
        .0.escape_ascii(),
        if .0 == b"vers" { ": a pointer of Git LFS begins so, fetch the file itself" } else { "" }
    )]
    NotGguf(Vec<u8>),

    /// The file has the byte order of other machines.
    #[error("it is a big-endian GGUF file, and only little-endian ones can be read: convert it")]
    BigEndian,

    /// The version of the format is unknown, or too old.
    #[error("it has version {0} of GGUF, and only 2 and 3 can be read")]
    Version(u32),

    /// A length or count points beyond the end of the file.
    #[error(
        "{place} takes {wanted} bytes or more, but the file has only {left} left: it is damaged, \
         or was not copied whole"
    )]
    BeyondEnd {
        /// The part of the header.
        place: String,
        /// Number of bytes that it claims, at least.
        wanted: u64,
        /// Number of bytes left in the file.
        left: u64,
    },

    /// The header is longer than [`limits::MAX_HEADER_BYTES`].
    #[error(
        "{0} ends beyond the first {max} bytes, the limit on headers",
        max = limits::MAX_HEADER_BYTES
    )]
    HeaderTooLong(String),

    /// A count or length exceeds one of the [`limits`].
    #[error("{what}: {found}, and at most {limit} are accepted")]
    TooMany {
        /// The things that are counted.
        what: String,
        /// Their number in the file.
        found: u64,
        /// The limit.
        limit: u64,
    },

    /// A text is not UTF-8.
    #[error("{0} is not UTF-8")]
    NotUtf8(String),

    /// A metadata value has an unknown type.
    #[error("metadata {key:?} has the unknown type {id}")]
    ValueType {
        /// The key.
        key: String,
        /// Number of the type in the file.
        id: u32,
    },

    /// A truth value is neither 0 nor 1.
    #[error("metadata {key:?} is a bool of value {found}")]
    NotBool {
        /// The key.
        key: String,
        /// The byte in the file.
        found: u8,
    },

    /// Arrays inside arrays exceed [`limits::MAX_ARRAY_DEPTH`].
    #[error("metadata {0:?} has arrays nested more than {max} deep", max = limits::MAX_ARRAY_DEPTH)]
    ArrayDepth(String),

    /// A key is empty.
    #[error("a metadata key is empty")]
    EmptyKey,

    /// A key occurs twice.
    #[error("the metadata has the key {0:?} twice")]
    KeyTwice(String),

    /// `general.alignment` is no power of two, or no u32.
    #[error("general.alignment is {0}, and must be a u32 that is a power of two")]
    Alignment(String),

    /// A tensor's name is empty.
    #[error("a tensor has an empty name")]
    EmptyName,

    /// Two tensors have the same name.
    #[error("it has two tensors of the name {0:?}")]
    NameTwice(String),

    /// A dimension of a tensor is 0.
    #[error("tensor {name:?} has no elements: its shape is {shape:?}")]
    NoElements {
        /// The tensor.
        name: String,
        /// The shape, outermost dimension first.
        shape: Vec<u64>,
    },

    /// The number of elements or bytes of a tensor exceeds what can be counted.
    #[error("tensor {name:?} is too large: its shape is {shape:?}")]
    TooLarge {
        /// The tensor.
        name: String,
        /// The shape, outermost dimension first.
        shape: Vec<u64>,
    },

    /// The block type is known, but has no decoder here.
    #[error("tensor {name:?} has type {type_name}, which cannot be read: convert it to another")]
    UnreadableType {
        /// The tensor.
        name: String,
        /// Name of the type.
        type_name: &'static str,
    },

    /// The block type is unknown.
    #[error("tensor {name:?} has the unknown type {id}")]
    UnknownType {
        /// The tensor.
        name: String,
        /// Number of the type in the file.
        id: u32,
    },

    /// A row of a tensor does not consist of whole blocks.
    #[error(
        "tensor {name:?} has rows of {columns} elements, no multiple of {type_name}'s {elements}"
    )]
    PartialBlock {
        /// The tensor.
        name: String,
        /// Number of elements in a row.
        columns: u64,
        /// Name of the block type.
        type_name: &'static str,
        /// Number of elements in a block.
        elements: usize,
    },

    /// The offset of a tensor is no multiple of the file's alignment.
    #[error("tensor {name:?} begins at offset {offset}, no multiple of the alignment {alignment}")]
    Unaligned {
        /// The tensor.
        name: String,
        /// Its offset from the start of the values, in bytes.
        offset: u64,
        /// The file's alignment, in bytes.
        alignment: u64,
    },

    /// A tensor's values end beyond the file.
    #[error(
        "tensor {name:?} ends at byte {end}, but the file has only {bytes}: it is damaged, or was \
         not copied whole"
    )]
    TensorBeyondEnd {
        /// The tensor.
        name: String,
        /// End of its values in the file, in bytes.
        end: u128,
        /// Length of the file, in bytes.
        bytes: u64,
    },

    /// Two tensors share bytes.
    #[error("the tensors {first:?} and {second:?} overlap")]
    Overlap {
        /// The tensor that begins first.
        first: String,
        /// The tensor that begins before the first one's end.
        second: String,
    },

    /// A part of a split file is not named as such, so that the other parts cannot be found.
    #[error(
        "it is one of {parts} parts, but is not named like NAME-00001-of-{parts:05}.gguf, so the \
         others cannot be found: give it its old name"
    )]
    PartName {
        /// Number of parts, from `split.count`.
        parts: u64,
    },

    /// A part of a split file contradicts its name or the other parts.
    #[error("{key} is {found}, and should be {expected}: the parts do not belong together")]
    PartMismatch {
        /// The metadata key.
        key: &'static str,
        /// The value in the file.
        found: u64,
        /// The value that its name or the other parts demand.
        expected: u64,
    },
}
