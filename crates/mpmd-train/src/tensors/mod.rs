//! safetensors files of whole arrays, of which each process reads and writes only some regions.

pub(crate) mod disk;
mod file;
pub(crate) mod files;
pub(crate) mod owners;
mod pointer;
mod runs;
mod save;
mod surrogates;
mod unique_json;

pub use disk::{FolderClaim, check_folder, claim_folder, replace};
pub(crate) use file::{LONGEST_HEADER, failed};
pub use file::{TensorFile, header};
pub use mpmd_core::{file_note, hash_samples};
pub use pointer::{read_regular, refuse_pointer};
pub use runs::runs;
pub(crate) use save::host_owners;
pub use save::save;
pub use unique_json::{InvalidJson, JsonError, read_json};
