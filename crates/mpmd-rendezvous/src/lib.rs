//! The rendezvous: the processes of a job meet here before there is a transport.
//!
//! One small service at one address, a [`RendezvousServer`], runs in process 0 or in the launcher.
//! If process 0 is lost, another one may go on with it, see `succession`. Every
//! process of the job is a client, a [`Rendezvous`]. Through it processes learn each other's
//! addresses ([`Rendezvous::join`]), share small values, meet at barriers and compare clocks. They
//! also hear at once when one of them dies. A process that fails reports the reason to the server's
//! owner ([`Rendezvous::report`]). A [`JobObserver`] asks all of them for their status. Large or
//! frequent data goes over the transports instead.
//!
//! The wire: a client opens with a handshake (`handshake`), in which both sides prove that they
//! know the job's [`Token`]. In it the server tells the interval of its pings. Then both sides send
//! frames: a 4-byte length, at most [`MAX_CONTROL_BYTES`](mpmd_proto::wire::MAX_CONTROL_BYTES), and
//! a [`control`](mpmd_proto::control) payload, all little-endian. The list of members is split over
//! several frames if it must be. The description of one process must fit a frame; the whole list
//! has no limit.
//!
//! The parts:
//!
//! - `protocol`: these bytes.
//! - `job`: the state of the job, with its members and pending requests. Pure: reads no clock and
//!   does no I/O. Its parts: `job/epochs` (which process has which place), `job/values`,
//!   `job/barriers` and `job/looks`.
//! - `server`: runs `job` over sockets, and `hub` without them, for simulated processes (`local`).
//! - `client`: a process's side, and `observer`: that of a tool which only looks at the job.
//! - `connection`: requests and answers, for both.
//! - `facts`: the options and files of a process that must be those of all.
//! - `connect`: how a client connects to the server, by its `config`.
//! - `succession`: who goes on with the service if its process is gone, `seeker`: a process that
//!   finds it there, and `contact`: the rule by which it may go on with the service itself.

#![forbid(unsafe_code)]

mod client;
mod clock_offset;
mod config;
mod connect;
mod connection;
mod contact;
mod error;
mod facts;
mod hub;
mod job;
mod local;
mod observer;
mod protocol;
mod seeker;
mod server;
mod size_range;
mod succession;

use serde::{Deserialize, Serialize};

use mpmd_base::VectorWidth;
use mpmd_proto::router::Failure;
use mpmd_proto::wire::ProcessId;

pub use client::Rendezvous;
pub use clock_offset::ClockOffset;
pub use config::{Identity, JoinConfig};
pub use connect::{check_resolves, split_address};
pub use contact::ServiceParting;
pub use error::RendezvousError;
pub use facts::{Difference, Fact};
pub use local::{LocalLink, LocalServer};
pub use observer::JobObserver;
pub use protocol::{MAX_VALUE_BYTES, ProcessStatus, VERSION};
pub use seeker::ServiceSeeker;
pub use server::{RendezvousServer, ServerConfig};
pub use size_range::SizeRange;
pub use succession::{Heir, Succession};

pub use mpmd_handshake::token::{Token, TokenError};

/// A process's description of itself, sent to the others when it joins.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct JobMember {
    /// The name of the process's host. Processes with equal names count as being on one host.
    pub host: String,
    /// The process's id in the operating system.
    pub pid: u32,
    /// Number of devices that the process owns.
    pub devices: u32,
    /// The addresses of the process's transports, as pairs: the transport's name, and an address in
    /// its own format.
    pub addresses: Vec<(String, String)>,
    /// A fingerprint of the program, equal on all processes. It may be empty on all.
    pub program: String,
    /// Facts about the program that must be equal on all processes. In [`JoinedEpoch::members`],
    /// only the first member has them.
    pub facts: Box<[Fact]>,
    /// The vectors that the process can compute with, and after its first epoch those of the job.
    pub vectors: VectorWidth,
    /// The reason why the process cannot take part; `None` if it can. The other processes then fail
    /// with this reason at once.
    pub trouble: Option<String>,
    /// The numbers of processes with which the program can run after the first epoch, ascending and
    /// equal on all processes. Empty if it needs all processes. In [`JoinedEpoch::members`], only
    /// the first member has them.
    pub sizes: Vec<SizeRange>,
    /// True if the process was added to a running job. It may make the job larger than at its
    /// start.
    pub is_added: bool,
    /// True if the process leaves the job but has copies of its state. It waits without a place
    /// until all others have completed a commit. If a process is lost before that, it gets a place
    /// again.
    pub leaves: bool,
    /// The address at which the process can take over the service. `None` on the process that runs
    /// the service, and in a job whose service cannot move.
    pub heir: Option<Heir>,
}

/// An epoch of the job that this process has joined, and its place in it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct JoinedEpoch {
    /// The number of this process. A spare gets the number of the process that it replaces.
    pub process: ProcessId,
    /// The number of the epoch; the first is 1.
    pub epoch: u64,
    /// The random identity of the job's run, equal in all epochs and on all processes. Two jobs
    /// with the same token have different identities.
    pub run: u128,
    /// The descriptions of all processes, by process number.
    pub members: Vec<JobMember>,
    /// The job's complete commits, and the number of processes that leave it.
    pub standing: CommitStanding,
}

impl JoinedEpoch {
    /// Returns the vectors that all processes compute with, the same in all epochs of the job.
    pub fn vectors(&self) -> VectorWidth {
        narrowest(&self.members)
    }
}

/// Returns the narrowest vectors of some processes.
fn narrowest<'a>(members: impl IntoIterator<Item = &'a JobMember>) -> VectorWidth {
    let widths = members.into_iter().map(|member| member.vectors);
    widths.min().unwrap_or_default()
}

/// The state of a job's commits at the start of an epoch.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct CommitStanding {
    /// The newest epoch of which all processes have completed a commit. `None` if there is none.
    pub whole: Option<u64>,
    /// Number of processes that leave the job. They keep copies of its state until all processes
    /// have completed a commit of this epoch.
    pub leavers: u32,
}

/// The role of a process in its job, as the server's owner sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum ProcessPart {
    /// The process has asked to join, and waits for a place (a process number) in the job.
    Waits,
    /// The process has this place in the current epoch. It may have died there.
    Holds(ProcessId),
    /// The process had this place in the last epoch, and has left in order.
    Left(ProcessId),
    /// The process died with this place, and the others have begun another epoch.
    Died(ProcessId),
    /// The process has lost its place: it was given up, or had left before others began a new
    /// epoch.
    Out,
}

/// The failure that ends a process, as it reports it to the server's owner.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct FailureReport {
    /// The first failure, which caused the others. It may be the failure of another process.
    pub failure: Failure,
    /// The rolling hash of the reporting process at the failure's operation. 0 if its program had
    /// ended before that operation. `None` if it had not reached the operation or no longer knows
    /// the hash.
    pub hash: Option<u128>,
}

/// The loss of a process or of the server, which ended without leaving in order, or the end of the
/// epoch that follows from a loss.
#[derive(Clone, Debug, Eq, PartialEq)]
pub enum Down {
    /// The loss of this process of the job, with the reason that the server gives.
    Process(ProcessId, String),
    /// The epoch that this process has joined is over: this other process has left it and will join
    /// the next one. Nobody who waits for it, or for another process of the epoch, needs to.
    Epoch(ProcessId),
    /// The loss of the server, with the reason: it has ended, cannot be reached, or is silent.
    /// Reported once. A process that has joined can go on, but may not be told of later losses of
    /// processes.
    Server(String),
}
