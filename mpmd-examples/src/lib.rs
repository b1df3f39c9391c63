//! Code of the example programs that tests call too, or that several programs share.

#![forbid(unsafe_code)]

pub mod kernel_gpt;
pub mod layout;
pub mod pipeline;
pub mod sample;
pub mod training;
pub mod transformer;
