//! safetensors files of whole arrays, of which each process reads and writes only some regions.

mod file;
mod runs;

pub use file::{TensorFile, header};
pub use runs::runs;
