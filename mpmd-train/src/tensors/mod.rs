//! safetensors files of whole arrays, of which each process reads and writes only some regions.

mod file;
pub(crate) mod files;
pub(crate) mod owners;
mod runs;
mod save;

pub(crate) use file::failed;
pub use file::{TensorFile, header};
pub use runs::runs;
pub(crate) use save::host_owners;
pub use save::save;
