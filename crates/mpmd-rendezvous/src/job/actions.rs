//! What the parts of a job share: the actions that they ask for, and their pending requests.

use std::time::Duration;

use mpmd_base::block::Instant;

use super::super::RendezvousError;
use super::super::protocol::{Answer, MAX_KEY_BYTES, Reply};
use mpmd_base::deadline::after;
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

/// An action that the server must carry out.
#[derive(Debug, PartialEq)]
pub(crate) enum Action {
    Say(Link, Reply),
    /// Close the connection once all replies are sent.
    Close(Link),
}

/// The actions that the server must carry out, in order.
#[derive(Default)]
pub(super) struct Actions(Vec<Action>);

impl Actions {
    pub(super) fn say(&mut self, link: Link, reply: Reply) {
        self.0.push(Action::Say(link, reply));
    }

    pub(super) fn answer(&mut self, link: Link, ask: u64, result: Result<Answer, RendezvousError>) {
        self.say(link, Reply::Answer { ask, result });
    }

    pub(super) fn close(&mut self, link: Link) {
        self.0.push(Action::Close(link));
    }

    pub(super) fn take(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.0)
    }
}

/// A pending request and its deadline.
#[derive(Clone, Copy)]
pub(super) struct Wait {
    pub(super) ask: u64,
    pub(super) until: Instant,
    pub(super) peer_timeout: Duration,
}

impl Wait {
    pub(super) fn new(ask: u64, now: Instant, peer_timeout: Duration) -> Self {
        Self {
            ask,
            until: after(now, peer_timeout),
            peer_timeout,
        }
    }

    pub(super) fn put_off(&mut self, stopped: Duration) {
        self.until = after(self.until, stopped);
    }
}

pub(super) fn processes(count: usize) -> impl Iterator<Item = ProcessId> {
    (0..count).map(|process| ProcessId(process as u32))
}

/// Checks the length of a text that error messages contain.
pub(super) fn check_name(what: &str, name: &str) -> Result<(), RendezvousError> {
    if name.len() <= MAX_KEY_BYTES {
        return Ok(());
    }
    Err(RendezvousError::TooLong {
        what: what.to_owned(),
        bytes: name.len(),
        limit: MAX_KEY_BYTES,
    })
}
