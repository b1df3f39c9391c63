//! candle models as stages: values, gradients, and mistakes of users.

mod collectives;
mod documented;
mod errors;
mod functions;
mod gradients;
mod model;
mod pipelines;
