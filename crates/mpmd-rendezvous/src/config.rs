//! The configuration of a process that joins, and its identity.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{RendezvousError, Token};
use mpmd_handshake::token::random_bytes;
use mpmd_proto::wire::ProcessId;

/// The secret identity of a process in its job, by which the server knows it again in a later
/// epoch. Its `Debug` output does not show the key.
#[derive(Clone, Copy, Deserialize, Eq, PartialEq, Serialize)]
pub struct Identity {
    /// A number that no other process can guess, the same in all epochs.
    pub key: u128,
    /// The identity of the [run](super::JoinedEpoch::run) in which this process was before, if it
    /// was.
    pub run: Option<u128>,
}

/// The server to join, and this process's identity in the job.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// The server, as `host:port`.
    pub server: String,
    /// This process's id in the job. A spare has one beyond the job's.
    pub process: ProcessId,
    /// Number of processes in the job, as far as this process knows.
    pub processes: usize,
    /// The job's secret.
    pub token: Token,
    /// The peer timeout: the longest wait for the server, for the other processes, and for a sign
    /// of life.
    pub peer_timeout: Duration,
}

impl Identity {
    /// Creates the identity of a process that has not joined yet.
    ///
    /// # Errors
    ///
    /// [`Environment`](RendezvousError::Environment) if the system gives no random numbers.
    pub fn random() -> Result<Self, RendezvousError> {
        Ok(Self {
            key: random()?,
            run: None,
        })
    }

    /// Returns a number by which others can know this process again: it follows from the key, and
    /// does not reveal it.
    pub fn mark(&self) -> u128 {
        let digest = Sha256::digest(self.key.to_le_bytes());
        u128::from_le_bytes(std::array::from_fn(|i| digest[i]))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity(of run {:x?})", self.run)
    }
}

/// Returns a random number of the system, which nobody can guess.
pub(super) fn random() -> Result<u128, RendezvousError> {
    let bytes = random_bytes().map_err(|e| RendezvousError::Environment {
        doing: "making a random identity".into(),
        why: e.to_string(),
    })?;
    Ok(u128::from_le_bytes(std::array::from_fn(|i| bytes[i])))
}
