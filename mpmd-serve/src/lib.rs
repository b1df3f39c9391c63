//! A server of language models over the stages of a pipeline.

#![forbid(unsafe_code)]

mod request;

pub use request::{Event, Finish, Logprobs, Request, Token};
