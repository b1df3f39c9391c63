//! Reads and writes GGUF files, the format in which llama.cpp and others keep models.
//!
//! A GGUF file holds typed metadata ([`Metadata`]) and tensors ([`TensorInfo`]), whose values are
//! often quantised: packed in blocks of 32 or 256 elements ([`BlockType`]).
//!
//! ```no_run
//! # fn main() -> Result<(), mpmd_gguf::GgufError> {
//! use mpmd_gguf::{GgufFile, Metadata};
//!
//! let file = GgufFile::open("model-00001-of-00003.gguf")?;
//! let layers = file.metadata().u64("llama.block_count")?;
//! let scaling = file.metadata().optional("llama.rope.scaling.type", Metadata::text)?;
//!
//! let weight = file.tensor("blk.0.attn_q.weight")?;
//! let rows = weight.rows();
//! let columns = weight.columns();
//! let mut values = vec![0.0; rows * (columns / 2)];
//! file.read_rows("blk.0.attn_q.weight", 0..rows, 0..columns / 2, &mut values)?;
//! # _ = (layers, scaling);
//! # Ok(())
//! # }
//! ```
//!
//! - [`GgufFile`]: an open file, or all parts of a split one. Opening reads headers only; values
//!   are read by region.
//! - [`BlockType`]: how elements are packed, with [`BlockType::decode`] and [`BlockType::encode`].
//! - [`GgufWriter`]: writes a file.
//!
//! Files come from strangers. A file that contradicts itself is refused with a [`GgufFlaw`]. Before
//! that, at most a small multiple of the file's own bytes is allocated, and never more than the
//! limits in [`limits`] allow. No file is mapped into memory, so a file that shrinks while it is
//! used gives an error.

#![forbid(unsafe_code)]

mod block_type;
mod decode;
mod encode;
mod error;
mod file;
mod header;
pub mod limits;
mod metadata;
mod parts;
mod region;
mod tensor;
mod value_type;
mod values;
mod writer;

pub use block_type::BlockType;
pub use encode::EncodeError;
pub use error::{GgufError, GgufFlaw};
pub use file::{GgufFile, GgufPart, TensorBytes};
pub use metadata::Metadata;
pub use tensor::TensorInfo;
pub use values::{MetadataArray, MetadataValue, TextArray};
pub use writer::{GgufWriter, TensorWriter, WriteError};
