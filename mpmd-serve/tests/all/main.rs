//! The front, over engines that compute nothing.

mod client;
mod endpoints;
mod leaving;
mod refusals;
mod server;
mod streaming;
