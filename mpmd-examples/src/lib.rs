//! Code of the example programs that tests call too, or that several programs share.

#![forbid(unsafe_code)]

#[cfg(feature = "candle")]
pub mod kernel_gpt;
#[cfg(feature = "candle")]
pub mod layout;
#[cfg(feature = "candle")]
pub mod pipeline;
pub mod sample;
#[cfg(feature = "candle")]
pub mod training;
#[cfg(feature = "candle")]
pub mod transformer;
