//! A server of language models over the stages of a pipeline.

#![forbid(unsafe_code)]

mod engine;
mod metrics;
mod queue;
mod request;
mod scheduler;

pub use engine::{Engine, run};
pub use metrics::{Figures, StageFigures};
pub use queue::{Arrival, Arrivals, Limits, Phase, Queue, Refused, Sender, Stream, queue};
pub use request::{Event, Finish, Logprobs, Request, Token};
pub use scheduler::{Counts, Decision, Scheduler, Sizes};
