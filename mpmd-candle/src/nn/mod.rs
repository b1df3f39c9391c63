//! The layers of `candle_nn` under the same names, all with gradients.
//!
//! Layers of this module defer the gradients of their weights, which schedules without bubbles
//! need, and compute with kernels that are made for training.
