//! The configuration of a process that joins, and its identity.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{RendezvousError, Token};
use mpmd_handshake::token::random_bytes;
use mpmd_proto::wire::ProcessId;

/// The secret identity of a process in its job, by which the server recognises it in a later epoch.
/// The `Debug` output does not show the key.
#[derive(Clone, Copy, Deserialize, Eq, PartialEq, Serialize)]
pub struct Identity {
    /// A number that no other process can guess, the same in all epochs.
    pub key: u128,
    /// The identity of the [run](super::JoinedEpoch::run) of the job that this process has been in.
    /// `None` if it has not been in one.
    pub run: Option<u128>,
}

/// The parameters of a [`Rendezvous`](super::Rendezvous): the server, and this process's place in
/// the job.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// The server's address, as `host:port`.
    pub server: String,
    /// This process's number in the job. A spare has a number beyond those of the job.
    pub process: ProcessId,
    /// Number of processes in the job, as this process was started with. The server compares it.
    pub processes: usize,
    /// The job's secret token.
    pub token: Token,
    /// The peer timeout: the longest time to wait for the server, for other processes to join, and
    /// for the next sign of life.
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

    /// Returns a hash of the key, by which other processes can recognise this process. It does not
    /// reveal the key.
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

/// Returns a random number from the system, which nobody can guess.
pub(super) fn random() -> Result<u128, RendezvousError> {
    let bytes = random_bytes().map_err(|e| RendezvousError::Environment {
        doing: "making a random identity".into(),
        why: e.to_string(),
    })?;
    Ok(u128::from_le_bytes(std::array::from_fn(|i| bytes[i])))
}
