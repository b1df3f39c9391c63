//! The CUDA driver in software: a dynamic library that is loaded under the names of CUDA's
//! libraries.
//!
//! `softcuda`, which tests use, says what it does and how it is set up. It is a package of its own
//! because the functions of this one must be in no test: a program that links CUDA would call them
//! instead of those of the library that is loaded.

#![allow(unsafe_code)]

mod alloc;
mod blas;
mod compile;
mod copy;
mod counters;
mod device;
mod entry;
mod error;
mod faults;
mod gemm;
mod handles;
mod host;
mod launch;
mod mapped;
mod nccl;
mod nvcc;
mod nvrtc;
mod rand;
mod settings;
mod source;

pub use nvcc::nvcc;
