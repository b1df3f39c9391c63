//! The front, over engines that compute nothing.

mod client;
mod endpoints;
mod guide;
mod leaving;
mod refusals;
mod server;
mod streaming;
