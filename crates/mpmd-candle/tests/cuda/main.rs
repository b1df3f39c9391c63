//! Stages on CUDA devices against the same stages on CPUs. `cargo xtask candle-cuda` runs them on
//! the driver in software.

#[path = "../all/collectives.rs"]
mod collectives;
mod copies;
mod divided;
mod functions;
mod layers;
#[path = "../all/model.rs"]
mod model;
mod pipelines;
mod room;
