//! Who is still in reach once a peer has died.
//!
//! Processes of one host write into one queue of the receiver's memory, each into the next free
//! place. Who is killed after it has taken a place and before it has said that the place is filled
//! leaves a gap that the receiver never gets beyond: from then on it hears of nobody. UCX does not
//! notice. So after a death everybody is asked for an answer, and who does not give one in time is
//! out of reach, which is said like a death.

use std::time::{Duration, Instant};

use super::engine::{Engine, id};
use super::result::Way;
use super::traffic::prefix;
use crate::transport::TransportError;
use crate::wire::ProcessId;

/// How long a peer may take to answer: an engine that gets a core now and then is far quicker.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

/// Answers are awaited.
pub(super) struct RollCall {
    dead: ProcessId,
    until: Instant,
}

impl Engine {
    /// Asks everybody for an answer, because this peer has died.
    pub(super) fn begin_roll_call(&mut self, dead: ProcessId) {
        for to in (0..self.peers.len() as u32).map(ProcessId) {
            let peer = &mut self.peers[to.index()];
            if peer.endpoint.is_some() && peer.pass.is_some() && peer.down.is_none() {
                peer.in_reach = false;
                let header = prefix(self.me, peer.pass);
                self.send(to, id::PING, &header, None, Way::Eager, None);
            }
        }
        self.roll_call = Some(RollCall { dead, until: Instant::now() + ANSWER_WITHIN });
    }

    /// A peer asks for an answer.
    pub(super) fn answer_roll_call(&mut self, to: ProcessId) {
        let peer = &self.peers[to.index()];
        if peer.down.is_none() {
            let header = prefix(self.me, peer.pass);
            self.send(to, id::PONG, &header, None, Way::Eager, None);
        }
    }

    /// Looks whether all have answered, or had their time.
    pub(super) fn call_the_roll(&mut self) {
        let Some(RollCall { dead, until }) = &self.roll_call else { return };
        let (dead, until) = (*dead, *until);
        let missing =
            self.peers.iter().zip(0..).filter(|(peer, _)| peer.down.is_none() && !peer.in_reach);
        let missing: Vec<_> = missing.map(|(_, id)| ProcessId(id)).collect();
        if !missing.is_empty() && Instant::now() < until {
            return;
        }
        self.roll_call = None;
        for peer in missing {
            let why = format!(
                "process {dead} is gone, and since then nothing comes through from process {peer}"
            );
            self.shut_out(peer, TransportError::PeerGone { peer, why });
        }
    }
}
