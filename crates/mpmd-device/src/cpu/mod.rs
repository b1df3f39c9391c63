//! The CPU back end.

#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod bits;
pub mod lanes;
pub mod logits;
pub mod matmul;
pub mod packed;
pub mod paged;
mod products;
pub mod rows;
pub mod stream;
mod widest;
mod width;

pub use mpmd_base::VectorWidth;
pub use width::{narrow, processor_width, width};
