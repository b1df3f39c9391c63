//! Zero-copy transfer through shared memory, between processes of one host.
//!
//! Every process's buffers lie in segments that peers can map for reading
//! ([`Arena`](crate::memory::Arena)). A message with a payload names the payload's place. The
//! receiver maps the segment once, reads the payload in place, and gives it back when the last
//! holder drops it. So the cost of a message does not depend on its size.
//!
//! Processes of the same user that know the job's secret are trusted not to be malicious. They are
//! not trusted to be free of bugs. None can write another's buffers or read segments that it was
//! not given. A wrong number, place or size ends the connection and has no other effect. If an
//! owner changes values while they are lent, their readers see the change.
//!
//! # Where things are
//!
//! Each pair has four rings (`ring.rs`) in memory that both write: messages and returned loans,
//! each way. Each process has a doorbell (`doorbell.rs`) that peers ring if no thread of it is
//! awake. A thread that waits for a message may poll the rings itself. If none does, the
//! transport's thread is woken.
//!
//! # The end of a peer
//!
//! A peer is down when it has said goodbye or its socket has closed; everything that it sent before
//! is delivered first. Memory lent to it comes back only when its process has provably exited,
//! since a stopped process may wake up and read. Even then, memory that it re-lent to others does
//! not come back, as they may read it. So it tells the owner before it re-lends. Memory that the
//! peer has lent stays readable until the last reader drops it, however the peer ended.

mod address;
mod agreeing;
mod devices;
mod doorbell;
mod futex;
mod loans;
mod mapped;
mod mappings;
mod meeting;
mod peer;
mod present;
mod reaper;
mod record;
mod ring;
mod shared;
mod socket;
mod sync;
#[cfg(test)]
mod tests;
mod words;

use std::fmt;
use std::time::Duration;

pub use address::{no_address, why_apart};
pub use present::{Opened, Shm};

use crate::transport::TransportError;
use crate::wire::ProcessId;

/// The transport's name as the user writes it.
pub const NAME: &str = "shm";

/// The job's configuration for [`Opened::connect`].
#[derive(Clone)]
pub struct ShmConfig {
    /// This process's id.
    pub process: ProcessId,
    /// Each process's [`Opened::address`], by process; `None` for processes that this transport
    /// does not reach. This process's own entry is ignored.
    pub peers: Vec<Option<String>>,
    /// The job's secret. Processes that do not know it are refused.
    pub token: [u8; 32],
    /// The incarnation of the job, the same on every process.
    pub epoch: u64,
    /// The peer timeout: the time for all peers together to connect.
    pub peer_timeout: Duration,
}

impl fmt::Debug for ShmConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token stays secret.
        f.debug_struct("ShmConfig")
            .field("process", &self.process)
            .field("peers", &self.peers)
            .field("epoch", &self.epoch)
            .field("peer_timeout", &self.peer_timeout)
            .finish_non_exhaustive()
    }
}

fn environment(doing: String, error: &std::io::Error) -> TransportError {
    TransportError::Environment { doing, why: error.to_string() }
}
