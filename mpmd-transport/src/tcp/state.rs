//! The state that posting threads and the transport's thread share.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::transport::{Ticket, TransportError};
use mpmd_memory::{Pool, SharedBuffer};
use mpmd_proto::wire::{Header, MessageKind, ProcessId};

use super::connection::{ConnectionSender, Endings};

/// State shared by posting threads and the transport's thread.
pub(super) struct TcpState {
    pub(super) process: ProcessId,
    pub(super) pool: Pool,
    pub(super) endings: Endings,
    /// The connections to each process, by process; `None` for this process.
    pub(super) peers: Vec<Option<TcpPeer>>,
    pub(super) closing: AtomicBool,
}

/// The sending halves of the two connections to a peer.
pub(super) struct TcpPeer {
    pub(super) control: ConnectionSender,
    pub(super) bulk: ConnectionSender,
}

impl TcpState {
    pub(super) fn processes(&self) -> usize {
        self.peers.len()
    }

    /// Queues a message to a peer on the connection for the message's kind.
    pub(super) fn post(
        &self,
        to: ProcessId,
        header: Header,
        payload: Option<SharedBuffer>,
        ticket: Ticket,
    ) {
        let Some(peer) = &self.peers[to.index()] else {
            return;
        };
        let data = header.kind == MessageKind::Data;
        let line = if data { &peer.bulk } else { &peer.control };
        line.post(&header, payload, ticket, !data, &self.endings);
    }

    /// Returns the error for a message or payload that a peer will never send. It is `Closed` if
    /// this transport is closing, else `PeerGone`.
    pub(super) fn lost(&self, peer: ProcessId, why: &str) -> TransportError {
        if self.closing.load(Ordering::Acquire) {
            TransportError::Closed
        } else {
            TransportError::PeerGone {
                peer,
                why: why.to_owned(),
            }
        }
    }

    pub(super) fn lines(&self) -> impl Iterator<Item = &ConnectionSender> {
        self.peers
            .iter()
            .flatten()
            .flat_map(|peer| [&peer.control, &peer.bulk])
    }

    pub(super) fn fail_all(&self) {
        for line in self.lines() {
            line.fail(TransportError::Closed, &self.endings);
        }
    }
}
