//! Carries requests and replies between a job and its clients without sockets.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::{Condvar, Mutex, mpsc, now};

use super::job::{EpochPhase, JobAction, JobState};
use super::protocol::{ClientRequest, ServerReply};
use super::{FailureReport, RendezvousError};
use mpmd_base::deadline::after;
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

/// A client's end of its connection to a [`LocalHub`].
pub(super) struct LocalLine {
    hub: Arc<LocalHub>,
    link: Link,
}

impl LocalLine {
    pub(super) fn new(hub: Arc<LocalHub>, link: Link) -> Self {
        Self { hub, link }
    }

    pub(super) fn say(&self, request: ClientRequest) {
        self.hub
            .with(|state| state.job.said(self.link, request, now()));
    }

    pub(super) fn hang_up(&self) {
        self.hub.closed(self.link, "its connection was closed");
    }
}

/// The state of a job without sockets, and the channels for replies to its clients.
pub(super) struct LocalHub {
    state: Mutex<HubState>,
    /// Notified when the job's state has changed, and with it perhaps the next deadline.
    changed: Condvar,
    pub(super) processes: usize,
    pub(super) peer_timeout: Duration,
}

struct HubState {
    job: JobState,
    /// The channel for replies to each client, by connection.
    replies: BTreeMap<Link, mpsc::Sender<ServerReply>>,
    /// Number of connections that have been opened so far.
    links: Link,
    is_stopped: bool,
}

impl LocalHub {
    pub(super) fn new(processes: usize, peer_timeout: Duration, run: u128) -> Self {
        let job = JobState::new(processes, peer_timeout, run, now());
        let state = HubState {
            job,
            replies: BTreeMap::new(),
            links: 0,
            is_stopped: false,
        };

        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            processes,
            peer_timeout,
        }
    }

    /// Handles deadlines as they become due, until [`stop`](Self::stop) is called.
    pub(super) fn run(&self) {
        let mut state = self.state.lock();
        while !state.is_stopped {
            let due = state.job.tick(now());
            state.act();
            self.changed.wait_until(&mut state, due);
        }
    }

    pub(super) fn stop(&self) {
        let mut state = self.state.lock();
        state.is_stopped = true;
        // Without its sender a connection hears the replies that are left, and ends.
        let replies = std::mem::take(&mut state.replies);
        self.changed.notify_all();
        drop(state);
        drop(replies);
    }

    /// Waits until the job is over or can never be complete, for at most `time`. Returns `None`
    /// after `time`.
    pub(super) fn wait_end(&self, time: Duration) -> Option<Result<(), RendezvousError>> {
        let until = after(now(), time);
        let mut state = self.state.lock();
        loop {
            let epochs = state.job.epochs();
            if let EpochPhase::Failed(error) = epochs.phase() {
                return Some(Err(error.clone()));
            }
            if epochs.has_begun() && epochs.present() == 0 {
                return Some(Ok(()));
            }
            if state.is_stopped {
                return Some(Err(RendezvousError::Stopped));
            }

            if self.changed.wait_until(&mut state, until).timed_out() {
                return None;
            }
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.state.lock().job.epochs().has_begun()
    }

    pub(super) fn reports(&self) -> Vec<(ProcessId, FailureReport)> {
        self.state.lock().job.epochs().reports().to_vec()
    }

    pub(super) fn open(&self, replies: mpsc::Sender<ServerReply>) -> Link {
        self.with(|state| {
            state.links += 1;
            let link = state.links;
            // Without its sender the client hears that the service has stopped.
            if !state.is_stopped {
                state.replies.insert(link, replies);
            }
            state.job.opened(link, now());
            link
        })
    }

    pub(super) fn closed(&self, link: Link, why: &str) {
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
                JobAction::Say(link, reply) => {
                    if let Some(replies) = self.replies.get(&link) {
                        // A client that has just ended hears nothing more.
                        let _ = replies.send(reply);
                    }
                }
                JobAction::Close(link) => drop(self.replies.remove(&link)),
            }
        }
    }
}
