//! The protocol between the processes of a job.
//!
//! It does no I/O, starts no thread and reads no clock. Its driver, `mpmd-core`, feeds it events
//! and carries out its actions. So a test can run many processes in one thread, in any order.
//!
//! - [`wire`]: the fixed, versioned header that every message starts with.
//! - [`control`]: the encoding of small control payloads.
//! - [`router`]: matches messages to operations, finds divergence, and says what a waiting
//!   operation waits for. All processes learn of an error as its [`Failure`].

#![forbid(unsafe_code)]

pub mod control;
pub mod router;
pub mod wire;

pub use router::{Failure, FailureKind};
pub use wire::{Header, MessageKind, ProcessId};
