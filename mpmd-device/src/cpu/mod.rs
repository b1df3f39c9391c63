//! The CPU back end.

pub mod matmul;
pub mod stream;
