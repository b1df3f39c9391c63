//! A server of language models over the stages of a pipeline.

#![forbid(unsafe_code)]

mod engine;
mod http;
mod metrics;
mod model;
mod queue;
mod request;
mod scheduler;
mod serve;

pub use engine::{Engine, run};
pub use http::{Front, HttpArgs};
pub use metrics::{Figures, StageFigures};
pub use model::Model;
pub use queue::{Arrival, Arrivals, Limits, Phase, Queue, Refused, Sender, Stream, queue};
pub use request::{Event, Finish, Logprobs, Request, Token};
pub use scheduler::{Counts, Decision, Scheduler, Sizes};
pub use serve::{ServeArgs, run as serve};
