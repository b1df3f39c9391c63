//! Code shared by the example programs: arithmetic and data.
//!
//! The arithmetic consists of plain functions on slices. It does not depend on processes or
//! devices. The programs' kernels call it, and tests compare it with definitions and finite
//! differences.

#![forbid(unsafe_code)]

pub mod arrays;
pub mod math;
pub mod mm;
pub mod pipeline;
pub mod sample;
pub mod training;
pub mod transformer;
