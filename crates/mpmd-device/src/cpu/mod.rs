//! The CPU back end.

pub mod bits;
pub mod lanes;
pub mod logits;
pub mod matmul;
pub mod packed;
pub mod paged;
pub mod stream;
