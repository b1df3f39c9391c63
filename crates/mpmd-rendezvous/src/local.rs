//! The rendezvous service without sockets, for the processes of a simulation: they are threads of
//! this process.

use std::net::{Ipv4Addr, SocketAddr, SocketAddrV4};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use mpmd_base::block::{Condvar, Mutex, mpsc, thread};

use super::connection::{ConnectionState, ServerConnection, ServerWire};
use super::hub::{LocalHub, LocalLine};
use super::{FailureReport, JobObserver, JoinConfig, Rendezvous, RendezvousError, Token};
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

/// The rendezvous service of a job whose processes are all simulated in this OS process. It works
/// like a [`RendezvousServer`](super::RendezvousServer), without sockets. In a simulated world its
/// time is simulated too. Dropping it stops the service.
pub struct LocalServer {
    hub: Arc<LocalHub>,
    thread: Option<thread::JoinHandle<()>>,
}

/// The address that both ends of every connection report.
const HERE: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0));

/// Identifies a client's connection to a [`LocalServer`], for [`LocalServer::cut`].
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LocalLink(Link);

impl LocalServer {
    /// Starts the service for a job of `processes` processes, on a new thread. `peer_timeout` is
    /// the time limit for all processes to join, and the longest silence of a process. `run` is the
    /// identity of the job's run.
    ///
    /// # Errors
    ///
    /// If the system cannot start a thread.
    pub fn start(processes: usize, peer_timeout: Duration, run: u128) -> io::Result<Self> {
        let hub = Arc::new(LocalHub::new(processes, peer_timeout, run));
        let ticks = hub.clone();
        let builder = thread::Builder::new().name("mpmd-rendezvous-server".to_owned());
        let thread = builder.spawn(move || ticks.run())?;

        Ok(Self {
            hub,
            thread: Some(thread),
        })
    }

    /// Connects a process to the service, and starts a thread that handles the service's replies.
    /// As with a [`RendezvousServer`](super::RendezvousServer), the process should leave. It counts
    /// as dead when its [`Rendezvous`] is dropped.
    ///
    /// # Errors
    ///
    /// If the system cannot start a thread.
    pub fn connect(&self, process: ProcessId) -> io::Result<(Rendezvous, LocalLink)> {
        let LocalHub {
            processes,
            peer_timeout,
            ..
        } = *self.hub;

        let (connection, link) = self.open()?;
        let server = connection.server.clone();
        let token = Token::new([0; 32]);
        let config = JoinConfig {
            server,
            process,
            processes,
            token,
            peer_timeout,
        };
        Ok((
            Rendezvous {
                link: connection,
                config,
                local: HERE,
                clock_offset: 0,
            },
            link,
        ))
    }

    /// Connects an observer to the service.
    ///
    /// # Errors
    ///
    /// If the system cannot start a thread.
    pub fn observe(&self) -> io::Result<JobObserver> {
        let (link, _) = self.open()?;
        Ok(JobObserver { link, local: HERE })
    }

    fn open(&self) -> io::Result<(Arc<ServerConnection>, LocalLink)> {
        let (sender, replies) = mpsc::channel();
        let link = self.hub.open(sender);
        let connection = Arc::new(ServerConnection {
            server: "simulation".to_owned(),
            wire: ServerWire::Local(LocalLine::new(self.hub.clone(), link)),
            state: Mutex::new(ConnectionState::new(self.hub.peer_timeout)),
            changed: Condvar::new(),
        });

        let listener = connection.clone();
        let builder = thread::Builder::new().name("mpmd-rendezvous".to_owned());
        builder.spawn(move || listener.listen_to(&replies))?;
        Ok((connection, LocalLink(link)))
    }

    /// Stops the service: all connections end, and no process can join any more.
    pub fn stop(&self) {
        self.hub.stop();
    }

    /// Waits until the job ends, for at most `time`, as
    /// [`RendezvousServer::wait_end`](super::RendezvousServer::wait_end) does.
    pub fn wait_end(&self, time: Duration) -> Option<Result<(), RendezvousError>> {
        self.hub.wait_end(time)
    }

    /// Returns true once all processes have joined the job.
    pub fn is_complete(&self) -> bool {
        self.hub.is_complete()
    }

    /// Returns the failures that processes have reported, in order of arrival.
    pub fn reports(&self) -> Vec<(ProcessId, FailureReport)> {
        self.hub.reports()
    }

    /// Ends a client's connection, as the death of its process would. Does nothing if it has ended.
    pub fn cut(&self, link: LocalLink) {
        self.hub.closed(link.0, "its connection was closed");
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        self.hub.stop();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the simulated rendezvous service's thread panicked");
        }
    }
}

impl fmt::Debug for LocalServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LocalServer(of {} processes)", self.hub.processes)
    }
}
