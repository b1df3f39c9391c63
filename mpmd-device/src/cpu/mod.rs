//! The CPU back end.

pub mod matmul;
pub mod packed;
pub mod stream;
