//! What the example programs share: their arithmetic and their data.
//!
//! Nothing here knows of processes or devices: plain functions on slices, which the programs' kernels
//! call and which are tested against definitions and finite differences.

pub mod gpt;
pub mod math;
pub mod mm;
pub mod next_byte;
pub mod text;
