//! The rendezvous service without sockets, for the processes of a simulation: they are threads of
//! this process.

use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use std::{fmt, io};

use mpmd_base::block::{Condvar, Mutex, mpsc, now, thread};

use super::connection::{Connection, State, Wire};
use super::job::{Action, Job, Link};
use super::protocol::{Reply, Request};
use super::{JoinConfig, Rendezvous, Token};
use mpmd_proto::wire::ProcessId;

/// The service where the simulated processes of one job meet: the same as a
/// [`Server`](super::Server), with the same state, without sockets. In a simulated world its time
/// is simulated too. Dropping it stops the service.
pub struct LocalServer {
    hub: Arc<Hub>,
    thread: Option<thread::JoinHandle<()>>,
}

/// A client's connection to a [`LocalServer`], by which it can be [cut](LocalServer::cut).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct LocalLink(Link);

impl LocalServer {
    /// Starts the service for a job of `processes`, on a thread of its own. `peer_timeout` is the
    /// time for all processes to join, and the longest silence of a process. `run` is the identity
    /// of the job's run.
    ///
    /// # Errors
    ///
    /// If the system gives no thread.
    pub fn start(processes: usize, peer_timeout: Duration, run: u128) -> io::Result<Self> {
        let job = Job::new(processes, peer_timeout, run, now());
        let state = HubState { job, replies: BTreeMap::new(), links: 0, is_stopped: false };
        let changed = Condvar::new();
        let hub = Arc::new(Hub { state: Mutex::new(state), changed, processes, peer_timeout });
        let ticks = hub.clone();
        let builder = thread::Builder::new().name("mpmd-rendezvous-server".to_owned());
        let thread = builder.spawn(move || ticks.run())?;
        Ok(Self { hub, thread: Some(thread) })
    }

    /// Connects a process to the service. Starts a thread that hears its replies. The process ends
    /// as it does with a [`Server`](super::Server): it leaves, or counts as died when its
    /// [`Rendezvous`] is dropped.
    ///
    /// # Errors
    ///
    /// If the system gives no thread.
    pub fn connect(&self, process: ProcessId) -> io::Result<(Rendezvous, LocalLink)> {
        let Hub { processes, peer_timeout, .. } = *self.hub;
        let (sender, replies) = mpsc::channel();
        let link = self.hub.open(sender);
        let (server, token) = ("simulation".to_owned(), Token::new([0; 32]));
        let connection = Arc::new(Connection {
            server: server.clone(),
            processes,
            wire: Wire::Local(Line { hub: self.hub.clone(), link }),
            state: Mutex::new(State::default()),
        });
        let listener = connection.clone();
        let builder = thread::Builder::new().name("mpmd-rendezvous".to_owned());
        builder.spawn(move || listener.listen_to(&replies))?;
        let config = JoinConfig { server, process, processes, token, peer_timeout };
        let local = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        Ok((Rendezvous { link: connection, config, local, clock_offset: 0 }, LocalLink(link)))
    }

    /// Ends a client's connection, as the system does if its process dies. Does nothing if it has
    /// ended.
    pub fn cut(&self, link: LocalLink) {
        self.hub.closed(link.0, "its connection was closed");
    }
}

impl Drop for LocalServer {
    fn drop(&mut self) {
        let mut state = self.hub.state.lock();
        state.is_stopped = true;
        // Without its sender a connection hears the replies that are left, and ends.
        let replies = std::mem::take(&mut state.replies);
        self.hub.changed.notify_all();
        drop(state);
        drop(replies);
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

/// A client's end of its connection.
pub(super) struct Line {
    hub: Arc<Hub>,
    link: Link,
}

impl Line {
    pub(super) fn say(&self, request: Request) {
        self.hub.with(|state| state.job.said(self.link, request, now()));
    }

    pub(super) fn hang_up(&self) {
        self.hub.closed(self.link, "its connection was closed");
    }
}

struct Hub {
    state: Mutex<HubState>,
    /// Notified when the job has changed, so that another time may be due.
    changed: Condvar,
    processes: usize,
    peer_timeout: Duration,
}

struct HubState {
    job: Job,
    /// By open connection.
    replies: BTreeMap<Link, mpsc::Sender<Reply>>,
    /// Number of connections so far.
    links: Link,
    is_stopped: bool,
}

impl Hub {
    /// Handles all that is due, until the service stops.
    fn run(&self) {
        let mut state = self.state.lock();
        while !state.is_stopped {
            let due = state.job.tick(now());
            state.act();
            self.changed.wait_until(&mut state, due);
        }
    }

    fn open(&self, replies: mpsc::Sender<Reply>) -> Link {
        self.with(|state| {
            state.links += 1;
            let link = state.links;
            state.replies.insert(link, replies);
            state.job.opened(link, now());
            link
        })
    }

    fn closed(&self, link: Link, why: &str) {
        self.with(|state| {
            if state.replies.remove(&link).is_some() {
                state.job.closed(link, why);
            }
        });
    }

    fn with<T>(&self, f: impl FnOnce(&mut HubState) -> T) -> T {
        let mut state = self.state.lock();
        let result = f(&mut state);
        state.act();
        self.changed.notify_all();
        result
    }
}

impl HubState {
    fn act(&mut self) {
        for action in self.job.actions() {
            match action {
                Action::Say(link, reply) => {
                    if let Some(replies) = self.replies.get(&link) {
                        // A client that has just ended hears nothing more.
                        let _ = replies.send(reply);
                    }
                }
                Action::Close(link) => drop(self.replies.remove(&link)),
            }
        }
    }
}
