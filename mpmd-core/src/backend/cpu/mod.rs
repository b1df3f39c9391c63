//! The CPU back end.

pub mod matmul;
