//! One face to devices of every kind: memory, streams of work, copies of regions and sums of them.

#![allow(unsafe_code)]

pub mod accelerator;
pub mod collective;
pub mod copy;
pub mod cpu;
pub mod cuda;
pub mod sum;
