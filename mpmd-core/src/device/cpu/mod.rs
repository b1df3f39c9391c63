//! The CPU back end.

pub mod matmul;
pub(crate) mod stream;
