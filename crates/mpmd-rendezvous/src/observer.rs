//! A look at a running job from outside of it.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::connection::{ServerConnection, open};
use super::protocol::{ClientRequest, ProcessStatus, RequestAnswer};
use super::{JoinConfig, RendezvousError, Token};
use mpmd_proto::wire::ProcessId;

/// A connection to a job's [`RendezvousServer`](super::RendezvousServer) that does not belong to a
/// process of the job.
///
/// It asks all processes for their status. Each process answers with the result of its function set
/// by [`Rendezvous::on_look`](super::Rendezvous::on_look).
pub struct JobObserver {
    pub(super) link: Arc<ServerConnection>,
    pub(super) local: SocketAddr,
}

impl JobObserver {
    /// Connects to the server at the address `server` (`host:port`), with the job's token. Starts a
    /// thread that reads the connection. Waits for the server for at most `timeout`.
    ///
    /// # Errors
    ///
    /// The errors of [`Rendezvous::connect`](super::Rendezvous::connect), except
    /// [`NoSuchProcess`](RendezvousError::NoSuchProcess).
    pub fn connect(server: &str, token: Token, timeout: Duration) -> Result<Self, RendezvousError> {
        let process = ProcessId(0);
        // An observer hears of no process that leaves, and so needs no number of processes.
        let config = JoinConfig {
            server: server.to_owned(),
            process,
            processes: 0,
            token,
            peer_timeout: timeout,
        };

        let (link, local) = open(&config, false)?;
        Ok(Self { link, local })
    }

    /// Returns the local address of the connection, at which the server can most likely reach this
    /// process.
    pub fn local_address(&self) -> SocketAddr {
        self.local
    }

    /// Asks each process for its status. Passes it `words`, which are empty or in the encoding that
    /// its function expects. Returns the status of each process in its own encoding, or the reason
    /// why there is none. The process has not joined, is starting, has ended, or has not answered
    /// within a second. Blocks until all have answered, for at most `timeout` plus two seconds.
    ///
    /// # Errors
    ///
    /// [`ServerGone`](RendezvousError::ServerGone) if the job has ended or no answer comes. The
    /// error of a job that can never be complete. [`OutOfTurn`](RendezvousError::OutOfTurn) if
    /// another thread is in `look` on this observer. [`TooLong`](RendezvousError::TooLong) if
    /// `words` do not fit a message.
    pub fn look(
        &self,
        words: &[u8],
        timeout: Duration,
    ) -> Result<BTreeMap<ProcessId, ProcessStatus>, RendezvousError> {
        self.link.state.lock().statuses.clear();
        let request = |ask| ClientRequest::Look {
            ask,
            words: words.into(),
        };
        match self.link.ask(timeout, request)?.answer {
            RequestAnswer::Done => Ok(std::mem::take(&mut self.link.state.lock().statuses)),
            other => Err(self.link.senseless(&other)),
        }
    }
}

impl Drop for JobObserver {
    fn drop(&mut self) {
        self.link.end(RendezvousError::Left);
    }
}

impl std::fmt::Debug for JobObserver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Observer(of {})", self.link.server)
    }
}
