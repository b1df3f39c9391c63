//! UCX between processes: RDMA, shared memory or TCP, whatever both sides have and UCX thinks best.
//!
//! Control messages go with their bytes, large payloads stay with their sender until they are
//! fetched. Where UCX has nothing but TCP both share one connection, so that what follows a payload
//! under way waits for it: slow networks want a patience beyond the time that the largest piece
//! takes, or the transport [`tcp`](crate::tcp).
//!
//! Messages are told from strangers' by a secret that peers exchange; UCX itself, below, asks
//! nobody who they are: use it on networks you trust.
//!
//! Needs the cargo feature `ucx`. Without it everything here is still there, and says
//! [`TransportError::Unavailable`](crate::TransportError::Unavailable) with how to get it.

#[cfg(not(feature = "ucx"))]
mod absent;
#[cfg(feature = "ucx")]
mod engine;
#[cfg(feature = "ucx")]
mod examine;
#[cfg(feature = "ucx")]
mod leaving;
#[cfg(feature = "ucx")]
mod meeting;
#[cfg(feature = "ucx")]
mod present;
#[cfg(feature = "ucx")]
mod queue;
#[cfg(feature = "ucx")]
mod rest;
#[cfg(feature = "ucx")]
mod result;
#[cfg(feature = "ucx")]
mod roll_call;
#[cfg(feature = "ucx")]
mod safe;
#[cfg(feature = "ucx")]
mod settings;
#[cfg(feature = "ucx")]
mod sys;
#[cfg(feature = "ucx")]
mod traffic;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::memory::Pool;
use crate::wire::ProcessId;

#[cfg(not(feature = "ucx"))]
pub use absent::{Opened, Ucx, examine};
#[cfg(feature = "ucx")]
pub use examine::examine;
#[cfg(feature = "ucx")]
pub use present::{Opened, Ucx};

pub use mpmd_ids::block::Spin;

/// The transport's name as the user writes it.
pub const NAME: &str = "ucx";

/// What [`Opened::connect`] needs to know of the job.
#[derive(Clone)]
pub struct UcxConfig {
    /// Who this process is.
    pub process: ProcessId,
    /// What each process's [`Opened::address`] said, by process; this process's own entry is not
    /// looked at.
    pub peers: Vec<String>,
    /// The job's secret: who does not know it is no peer.
    pub token: [u8; 32],
    /// The incarnation of the job, the same on every process.
    pub epoch: u64,
    /// How long all peers together may take to connect.
    pub patience: Duration,
    /// Where payloads that are not waited for are copied into.
    pub pool: Pool,
    /// How long the engine looks for work before it sleeps.
    pub spin: Spin,
    /// Processes of the job on this host, itself included; what [`Spin::Auto`] goes by.
    pub neighbours: usize,
}

impl fmt::Debug for UcxConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token stays secret, and addresses are hundreds of bytes.
        f.debug_struct("UcxConfig")
            .field("process", &self.process)
            .field("processes", &self.peers.len())
            .field("epoch", &self.epoch)
            .field("patience", &self.patience)
            .field("spin", &self.spin)
            .field("neighbours", &self.neighbours)
            .finish_non_exhaustive()
    }
}

/// What UCX finds on this machine.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Report {
    /// The version of the library in use, such as `1.12.1`.
    pub version: String,
    /// The file it was loaded from.
    pub library: PathBuf,
    /// What it can use: pairs of a transport and a device, such as `posix` and `memory`.
    pub resources: Vec<(String, String)>,
    /// What two processes on this host would use between them, a line of UCX's own words for each
    /// lane.
    pub lanes: Vec<String>,
}
