//! candle models as stages: values, gradients, and what users do wrong.

mod collectives;
mod documented;
mod errors;
mod functions;
mod gradients;
mod model;
mod pipelines;
