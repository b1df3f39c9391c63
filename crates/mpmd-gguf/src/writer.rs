//! Writes GGUF files.

use std::collections::BTreeSet;
use std::io::{self, Write};

use thiserror::Error;

use crate::block_type::BlockType;
use crate::error::GgufFlaw;
use crate::header::{ALIGNMENT_KEY, DEFAULT_ALIGNMENT, header_bytes, parse_alignment};
use crate::limits::{MAX_DIMENSIONS, MAX_KEY_BYTES};
use crate::tensor::{TensorInfo, check_name};
use crate::values::MetadataValue;

/// An error of writing a file.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// The output failed.
    #[error(transparent)]
    Io(#[from] io::Error),

    /// No reader would accept the file.
    #[error("{0}")]
    Refused(#[from] GgufFlaw),

    /// The values do not fit the tensors.
    #[error("tensor {name:?}: {found} bytes are written, and it has {expected}")]
    Length {
        /// The tensor.
        name: String,
        /// Bytes that were given.
        found: u64,
        /// Bytes of the tensor.
        expected: u64,
    },

    /// There are more values than tensors.
    #[error("all tensors are written, and {0} more bytes were given")]
    NoTensorLeft(u64),
}

/// The header of a file that is to be written: metadata and a list of tensors. The values follow by
/// a [`TensorWriter`].
///
/// ```
/// use mpmd_gguf::{BlockType, GgufWriter};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut header = GgufWriter::new();
/// header.set("general.architecture", "llama")?;
/// header.declare("output.weight", BlockType::F32, &[2, 3])?;
/// let mut file = Vec::new();
/// let mut tensors = header.write(&mut file)?;
/// tensors.write(&[0; 24])?;
/// tensors.finish()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug, Default)]
pub struct GgufWriter {
    keys: BTreeSet<String>,
    /// In the order of the file.
    values: Vec<(String, MetadataValue)>,
    names: BTreeSet<String>,
    /// In the order of the file, with offset 0.
    tensors: Vec<TensorInfo>,
    alignment: Option<u32>,
}

impl GgufWriter {
    /// Creates an empty header.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds metadata. `general.alignment` also sets the alignment of the values.
    ///
    /// # Errors
    ///
    /// If the key is empty, too long or already set, or the alignment is invalid.
    pub fn set(&mut self, key: &str, value: impl Into<MetadataValue>) -> Result<(), GgufFlaw> {
        let value = value.into();
        if key.is_empty() {
            return Err(GgufFlaw::EmptyKey);
        }
        if key.len() as u64 > MAX_KEY_BYTES {
            return Err(GgufFlaw::TooMany {
                what: "bytes of a metadata key".to_owned(),
                found: key.len() as u64,
                limit: MAX_KEY_BYTES,
            });
        }

        if key == ALIGNMENT_KEY {
            self.alignment = Some(parse_alignment(&value)?);
        }
        if !self.keys.insert(key.to_owned()) {
            return Err(GgufFlaw::KeyTwice(key.to_owned()));
        }
        self.values.push((key.to_owned(), value));
        Ok(())
    }

    /// Adds a tensor of a shape, outermost dimension first. The values are written later, in the
    /// same order as the tensors were declared.
    ///
    /// # Errors
    ///
    /// If the name is empty, too long or already declared, or the shape has too many dimensions, no
    /// elements, or rows that are no whole blocks.
    pub fn declare(
        &mut self,
        name: &str,
        block_type: BlockType,
        shape: &[usize],
    ) -> Result<(), GgufFlaw> {
        check_name(name)?;
        if shape.len() > MAX_DIMENSIONS as usize {
            return Err(GgufFlaw::TooMany {
                what: format!("dimensions of tensor {name:?}"),
                found: shape.len() as u64,
                limit: MAX_DIMENSIONS.into(),
            });
        }

        let shape: Vec<u64> = shape.iter().map(|dimension| *dimension as u64).collect();
        let tensor = TensorInfo::new(name, block_type, &shape, 0)?;
        if !self.names.insert(name.to_owned()) {
            return Err(GgufFlaw::NameTwice(name.to_owned()));
        }
        self.tensors.push(tensor);
        Ok(())
    }

    /// Writes the header, and returns a writer of the tensors' values. `output` should be buffered.
    ///
    /// # Errors
    ///
    /// If the output fails.
    pub fn write<W: Write>(self, mut output: W) -> Result<TensorWriter<W>, WriteError> {
        let alignment = u64::from(self.alignment.unwrap_or(DEFAULT_ALIGNMENT));
        let mut header = header_bytes(&self.values, &self.tensors, alignment);
        let padded = (header.len() as u64).next_multiple_of(alignment);
        header.resize(padded as usize, 0);
        output.write_all(&header)?;
        Ok(TensorWriter {
            output,
            alignment,
            tensors: self.tensors.into_iter(),
            current: None,
        })
    }
}

/// Writes the values of tensors, one after the other, after a [`GgufWriter`]'s header.
#[derive(Debug)]
pub struct TensorWriter<W> {
    output: W,
    alignment: u64,
    /// The tensors that have not been begun.
    tensors: std::vec::IntoIter<TensorInfo>,
    current: Option<BegunTensor>,
}

/// A tensor whose values have been written in part.
#[derive(Debug)]
struct BegunTensor {
    tensor: TensorInfo,
    written: u64,
}

impl<W: Write> TensorWriter<W> {
    /// Writes the next bytes of blocks. A tensor may be written in several pieces; a piece does not
    /// reach into the next tensor. After the last one the padding is written.
    ///
    /// # Errors
    ///
    /// If the piece exceeds its tensor, all tensors are written, or the output fails.
    pub fn write(&mut self, blocks: &[u8]) -> Result<(), WriteError> {
        let length = blocks.len() as u64;
        if length == 0 {
            return Ok(());
        }
        let begun = match self.current.take() {
            Some(begun) => begun,
            None => BegunTensor {
                tensor: self
                    .tensors
                    .next()
                    .ok_or(WriteError::NoTensorLeft(length))?,
                written: 0,
            },
        };

        let BegunTensor { tensor, written } = begun;
        let written = written + length;
        if written > tensor.bytes() {
            return Err(wrong_length(&tensor, written));
        }

        self.output.write_all(blocks)?;
        if written < tensor.bytes() {
            self.current = Some(BegunTensor { tensor, written });
            return Ok(());
        }
        let padding = written.next_multiple_of(self.alignment) - written;
        io::copy(
            &mut io::Read::take(io::repeat(0), padding),
            &mut self.output,
        )?;
        Ok(())
    }

    /// Flushes the output and returns it.
    ///
    /// # Errors
    ///
    /// If values are missing, or the output fails.
    pub fn finish(mut self) -> Result<W, WriteError> {
        if let Some(begun) = &self.current {
            return Err(wrong_length(&begun.tensor, begun.written));
        }
        if let Some(tensor) = self.tensors.next() {
            return Err(wrong_length(&tensor, 0));
        }
        self.output.flush()?;
        Ok(self.output)
    }
}

fn wrong_length(tensor: &TensorInfo, found: u64) -> WriteError {
    WriteError::Length {
        name: tensor.name().to_owned(),
        found,
        expected: tensor.bytes(),
    }
}
