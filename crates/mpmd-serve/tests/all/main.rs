//! The front over engines that compute nothing, and the engine against the results of
//! `transformers`.

mod client;
mod clients;
mod control;
mod endpoints;
mod engine;
mod failing;
mod fields;
mod folder;
mod guide;
mod keys;
mod leaving;
mod live;
mod metrics;
mod origins;
mod page;
mod prompt_lists;
mod refusals;
mod server;
mod serving;
mod streaming;
mod token_texts;
mod versions;
