//! What the example programs share: their arithmetic, their data, and how they are started.
//!
//! The arithmetic knows nothing of processes or devices: plain functions on slices, which the
//! programs' kernels call and which are tested against definitions and finite differences.

pub mod gpt;
pub mod job;
pub mod math;
pub mod mm;
pub mod next_byte;
pub mod next_byte_data;
pub mod next_byte_job;
pub mod next_byte_stages;
pub mod pipeline;
pub mod text;
