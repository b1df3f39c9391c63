//! A server of language models over the stages of a pipeline.

#![forbid(unsafe_code)]

mod request;
mod scheduler;

pub use request::{Event, Finish, Logprobs, Request, Token};
pub use scheduler::{Counts, Decision, Scheduler, Sizes};
