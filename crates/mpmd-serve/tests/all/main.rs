//! The front over engines that compute nothing, and the engine against the results of
//! `transformers`.

mod client;
mod control;
mod endpoints;
mod engine;
mod folder;
mod guide;
mod leaving;
mod live;
mod page;
mod refusals;
mod server;
mod serving;
mod streaming;
mod token_texts;
mod versions;
