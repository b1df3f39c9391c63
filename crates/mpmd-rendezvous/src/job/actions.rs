//! Types that the parts of a job share: the actions that they ask for, and their pending requests.

use std::time::Duration;

use mpmd_base::block::Instant;

use super::super::RendezvousError;
use super::super::protocol::{MAX_KEY_BYTES, RequestAnswer, ServerReply};
use mpmd_base::deadline::after;
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

/// An action that the server must carry out for the job.
#[derive(Debug, PartialEq)]
pub(crate) enum JobAction {
    Say(Link, ServerReply),
    /// Closes the connection once all replies are sent.
    Close(Link),
}

/// The actions that the server must carry out, in order.
#[derive(Default)]
pub(super) struct JobActions(Vec<JobAction>);

impl JobActions {
    pub(super) fn say(&mut self, link: Link, reply: ServerReply) {
        self.0.push(JobAction::Say(link, reply));
    }

    pub(super) fn answer(
        &mut self,
        link: Link,
        ask: u64,
        result: Result<RequestAnswer, RendezvousError>,
    ) {
        self.say(link, ServerReply::Answer { ask, result });
    }

    pub(super) fn close(&mut self, link: Link) {
        self.0.push(JobAction::Close(link));
    }

    pub(super) fn take(&mut self) -> Vec<JobAction> {
        std::mem::take(&mut self.0)
    }
}

/// A pending request of a client, with its deadline.
#[derive(Clone, Copy)]
pub(super) struct RequestWait {
    pub(super) ask: u64,
    pub(super) until: Instant,
    pub(super) peer_timeout: Duration,
}

impl RequestWait {
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

/// Checks the length of a name that error messages will contain.
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
