//! Stages on CUDA devices against the same stages on CPUs. `cargo xtask candle-cuda` runs them on
//! the driver in software.

mod layers;
#[path = "../all/model.rs"]
mod model;
mod pipelines;
