//! Shared memory between processes of one host: payloads stay where they are.
//!
//! Every process's buffers lie in segments that others can map for reading
//! ([`Arena`](crate::memory::Arena)). A message with a payload says where that is; its receiver
//! maps the segment once and reads it in place, and gives it back when its last holder has let go.
//! So a message costs the same whatever its size.
//!
//! What is trusted: processes of the same user that know the job's secret, not to be bad. What is
//! not: that they are without bugs. None can write another's buffers or read segments that it was
//! not given; a wrong number, place or size ends the connection and does nothing else. Values that
//! an owner changes while they are lent are seen by who reads them.
//!
//! # Where things are
//!
//! Each pair has four rings (`ring.rs`) in memory that both write: messages and returned loans,
//! each way. Each process has a door (`door.rs`) at which peers ring where nobody in it is awake.
//! Whoever of a process's threads waits for a message may look at the rings itself; where nobody
//! does, the transport's thread is woken.
//!
//! # The end of a peer
//!
//! A peer is down when it has said goodbye or its socket has closed; what it has sent before is
//! delivered first. What it has been lent comes back only when its process is proved to be no more:
//! one that stands still may wake up and read. Even then what it had passed on to others does not,
//! as they may read it: it tells the owner before it passes anything on. What it has lent stays
//! readable until the last reader lets go, whatever became of it.

mod address;
mod agreeing;
mod devices;
mod door;
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

/// What [`Opened::connect`] needs to know of the job.
#[derive(Clone)]
pub struct ShmConfig {
    /// Who this process is.
    pub process: ProcessId,
    /// What each process's [`Opened::address`] said, by process; `None` for those that this
    /// transport does not go to. This process's own entry is not looked at.
    pub peers: Vec<Option<String>>,
    /// The job's secret: who does not know it is no peer.
    pub token: [u8; 32],
    /// The incarnation of the job, the same on every process.
    pub epoch: u64,
    /// How long all peers together may take to connect.
    pub patience: Duration,
}

impl fmt::Debug for ShmConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The token stays secret.
        f.debug_struct("ShmConfig")
            .field("process", &self.process)
            .field("peers", &self.peers)
            .field("epoch", &self.epoch)
            .field("patience", &self.patience)
            .finish_non_exhaustive()
    }
}

fn environment(doing: String, error: &std::io::Error) -> TransportError {
    TransportError::Environment { doing, why: error.to_string() }
}
