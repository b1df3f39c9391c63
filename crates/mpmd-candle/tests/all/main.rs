//! candle models as stages: values, gradients, and mistakes of users.

mod collectives;
mod documented;
mod errors;
mod extremes;
mod functions;
mod gradients;
mod halves;
mod model;
mod pipelines;
