//! A server of language models over the stages of a pipeline.

#![forbid(unsafe_code)]

mod engine;
mod http;
mod log_target;
mod metrics;
mod model;
mod queue;
mod request;
mod scheduler;
mod serving;

pub use engine::Engine;
pub use http::{Front, FrontError, FrontSettings, KeyFile};
pub use metrics::{EngineFigures, StageFigures};
pub use model::Model;
pub use queue::{
    Denied, PauseMode, QueueLimits, Refused, ReplySender, ReplyStream, RequestArrival,
    RequestArrivals, RequestQueue, ServerPhase, Waker, WeightInfo, queue,
};
pub use request::{Finish, Logprobs, ReplyEvent, ReplyToken, TextRequest};
pub use scheduler::{Decision, Scheduler, SchedulerCounts, SchedulerSizes};
pub use serving::{Serving, ServingTurn, run};
