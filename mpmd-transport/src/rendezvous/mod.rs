//! How the processes of a job meet before there is a transport.
//!
//! One small service at one address, a [`Server`], runs in process 0 or in the launcher; every
//! process of the job is a client, a [`Rendezvous`]. Through it processes learn each other's
//! addresses ([`Rendezvous::join`]), share small values, meet at barriers, compare clocks and hear
//! at once when one of them dies. A process that fails tells the server's owner why
//! ([`Rendezvous::report`]). Nothing large and nothing frequent goes this way: that is the
//! transports' work.
//!
//! The wire, all little-endian. A client opens with a fixed preamble:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `MPMDMEET` |
//! | 8 | 2 | version |
//! | 10 | 32 | the job's [`Token`] |
//!
//! A stranger gets no answer: with another magic or token the connection is closed before anything
//! else is read. A known client, and one of another version whatever its token, is answered with
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `MPMDMEET` |
//! | 8 | 2 | 0: welcome; 1: other version, and the connection ends |
//! | 10 | 2 | the server's version |
//! | 12 | 4 | milliseconds between the server's pings |
//!
//! and then both sides send frames: a 4-byte length, at most
//! [`MAX_CONTROL_BYTES`](crate::wire::MAX_CONTROL_BYTES), and a [`control`](crate::control)
//! payload. The list of members goes in as many frames as it takes: what one process tells of
//! itself must fit a frame, what all tell together has no limit.
//!
//! The parts: `protocol` (these bytes), `job` (who is in the job and who waits for what: pure,
//! reads no clock and does no I/O), `server` (carries it over sockets), `client`, `connect` (how a
//! client gets there).

mod client;
mod connect;
mod error;
mod job;
mod protocol;
mod server;
mod token;

use serde::{Deserialize, Serialize};

use crate::router::Failure;
use crate::wire::ProcessId;

pub use client::{ClockOffset, JoinConfig, Rendezvous};
pub use error::RendezvousError;
pub use protocol::{MAX_VALUE_BYTES, VERSION};
pub use server::{Server, ServerConfig};
pub(crate) use token::are_equal;
pub use token::{Token, TokenError};

/// What a process tells the others when it joins.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct Member {
    /// The name of its host, for people and for "same host or not".
    pub host: String,
    /// Its number in the operating system.
    pub pid: u32,
    /// How many devices it owns.
    pub devices: u32,
    /// Where its transports listen: the transport's name and an address in that transport's words.
    pub addresses: Vec<(String, String)>,
    /// A fingerprint of the program, which must be equal in all processes. May be empty, in all.
    pub program: String,
    /// Why it cannot take part after all, so that the others hear it instead of missing it.
    pub trouble: Option<String>,
}

/// The failure that a process ends with, as it tells the server's owner.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Report {
    /// The failure at its root. Its process need not be the one that reports.
    pub failure: Failure,
    /// The rolling hash of the reporting process at the failure's operation: 0 where its program
    /// had ended before that operation, `None` where it had not got there or no longer knows.
    pub hash: Option<u128>,
}

/// Somebody is gone who had not taken leave.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Down {
    /// A process of the job, and how the server noticed.
    Process(ProcessId, String),
    /// The server itself, which has ended, cannot be reached, or is silent. Said once: of a process
    /// that has joined this is no more than a warning. Ends of processes may not be heard of this
    /// way from now on.
    Server(String),
}
