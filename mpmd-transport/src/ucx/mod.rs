//! The transport over UCX: RDMA, shared memory or TCP, as UCX chooses from the transports of both
//! sides.
//!
//! Control messages carry their bytes with them. Large payloads stay with their sender until they
//! are fetched. If UCX has only TCP, both kinds share one connection, so messages behind a large
//! payload wait for it. On slow networks, use a peer timeout longer than the transfer of the
//! largest payload, or the transport [`tcp`](crate::tcp).
//!
//! Peers derive a secret from their handshake, which tells their messages from others. UCX itself,
//! below, authenticates nobody: use it on trusted networks only.
//!
//! Needs the cargo feature `ucx`. Without it the same items exist and return
//! [`TransportError::Unavailable`](crate::TransportError::Unavailable) with a hint how to get it.
//!
//! # Layers
//!
//! A message is an *active message* of UCX with this library's header. Matching, credit and order
//! stay with the router. Three layers keep the C library contained:
//!
//! - `sys.rs`: the C types and functions, looked up in the library that is found at run time.
//!   Statuses are numbers.
//! - `result.rs`: each call returns a `Result`.
//! - `safe/`: ownership. A worker holds the memory of every operation until UCX has ended it.
//!   Dropped futures and handles change nothing. After a forced close, memory stays in quarantine
//!   until the worker is destroyed, because UCX may still write into it. Callbacks only record
//!   events.
//!
//! Everything above is safe code. One thread owns every object of UCX (`engine.rs`, its state in
//! `state.rs`). It takes commands from a queue (`queue.rs`), lets UCX progress, and reports the
//! results (`traffic.rs`). Without work it polls for as long as polling has lately paid
//! (`crates/mpmd-base/src/block/spin.rs`). Then it arms the worker and sleeps. UCX has a thread of
//! its own besides.
//!
//! # Life of a connection
//!
//! Two processes do a handshake (`handshake`) before the first operation (`meeting.rs`). A leaving
//! process sends a goodbye. Its peers answer it once none of the leaver's memory is read any more
//! (`leaving.rs`). All processes of a host share a queue. A process that is killed during a write
//! may block it, and UCX does not notice. So after a death all peers are asked for an answer. A
//! peer that does not answer in time counts as lost (`roll_call.rs`).
//!
//! # Device memory
//!
//! UCX is told the kind of each memory. Both sides know whether UCX moves device memory
//! (`address.rs`). The core nevertheless sends device memory by way of pinned host memory.
//!
//! There is no UCX outside of this folder. A program built with the feature `ucx` loads the library
//! only when this transport is asked for, so it also runs on machines without UCX. The cluster's
//! own library goes first: `LD_LIBRARY_PATH`, then the system's folders, then the copy that was
//! built with the program.

#[cfg(feature = "ucx")]
mod address;
#[cfg(feature = "ucx")]
mod engine;
#[cfg(feature = "ucx")]
mod examine;
#[cfg(feature = "ucx")]
mod leaving;
#[cfg(feature = "ucx")]
mod meeting;
#[cfg(not(feature = "ucx"))]
mod no_ucx;
#[cfg(feature = "ucx")]
mod queue;
#[cfg(feature = "ucx")]
mod result;
#[cfg(feature = "ucx")]
mod roll_call;
#[cfg(feature = "ucx")]
mod safe;
#[cfg(feature = "ucx")]
mod settings;
#[cfg(feature = "ucx")]
mod state;
#[cfg(feature = "ucx")]
mod sys;
#[cfg(feature = "ucx")]
mod traffic;
#[cfg(feature = "ucx")]
mod transport;

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use mpmd_memory::Pool;
use mpmd_proto::wire::ProcessId;

#[cfg(feature = "ucx")]
pub use examine::examine;
#[cfg(not(feature = "ucx"))]
pub use no_ucx::{OpenedUcx, Ucx, examine};
#[cfg(feature = "ucx")]
pub use transport::{OpenedUcx, Ucx};

pub use mpmd_base::block::Spin;

/// The transport's name in options and environment variables.
pub const NAME: &str = "ucx";

/// The parameters of [`OpenedUcx::connect`].
#[derive(Clone)]
pub struct UcxConfig {
    /// The id of this process.
    pub process: ProcessId,
    /// Each process's [`OpenedUcx::address`], by process. This process's own element is ignored.
    pub peers: Vec<String>,
    /// The job's secret token. A process that cannot prove that it knows the token is refused.
    pub token: [u8; 32],
    /// The epoch of the job: the number of the incarnation, the same on every process.
    pub epoch: u64,
    /// Time limit for connecting to all peers together.
    pub peer_timeout: Duration,
    /// The pool that supplies buffers for payloads that UCX delivers together with their message.
    pub pool: Pool,
    /// The time for which the engine polls for work before it sleeps.
    pub spin: Spin,
    /// Number of processes of the job on this host, including this one. [`Spin::Auto`] needs it.
    pub neighbours: usize,
}

impl fmt::Debug for UcxConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token is secret, and addresses are hundreds of bytes long.
        f.debug_struct("UcxConfig")
            .field("process", &self.process)
            .field("processes", &self.peers.len())
            .field("epoch", &self.epoch)
            .field("peer_timeout", &self.peer_timeout)
            .field("spin", &self.spin)
            .field("neighbours", &self.neighbours)
            .finish_non_exhaustive()
    }
}

/// The UCX library that this process has loaded.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct UcxReport {
    /// The version of the library in use, such as `1.12.1`.
    pub version: String,
    /// The file that the library was loaded from.
    pub library: PathBuf,
}
