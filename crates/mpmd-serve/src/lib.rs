//! A server of language models over the stages of a pipeline.

#![forbid(unsafe_code)]

mod engine;
mod http;
mod metrics;
mod model;
mod queue;
mod request;
mod scheduler;
mod serving;

pub use engine::Engine;
pub use http::{Front, FrontError, FrontSettings, KeyFile};
pub use metrics::{Figures, StageFigures};
pub use model::Model;
pub use queue::{
    Arrival, Arrivals, Denied, Limits, PauseMode, Phase, Queue, Refused, Sender, Stream, Waker,
    WeightInfo, queue,
};
pub use request::{Event, Finish, Logprobs, Request, Token};
pub use scheduler::{Counts, Decision, Scheduler, Sizes};
pub use serving::{Serving, Turn, run};
