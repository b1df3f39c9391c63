//! Checks after the death of a peer that all other peers can still be heard.
//!
//! Processes of one host write into one queue in the receiver's memory, each into the next free
//! place. A process can be killed after it has taken a place and before it has marked the place as
//! filled. The receiver never gets past that gap: from then on it hears nobody. UCX does not notice
//! this. So after a death the engine sends a ping to every peer. A peer that does not answer in
//! time is treated as dead.

use std::time::{Duration, Instant};

use super::state::{RollCall, UcxEngine, id};
use super::traffic::prefix;
use crate::transport::TransportError;
use mpmd_proto::wire::ProcessId;

/// Time within which a peer must answer a ping. Even an engine that rarely gets a core is far
/// faster.
const ANSWER_WITHIN: Duration = Duration::from_secs(2);

impl UcxEngine {
    /// Sends a ping to every connected peer, because the peer `dead` has died and others may have
    /// too.
    pub(super) fn begin_roll_call(&mut self, dead: ProcessId) {
        for to in (0..self.peers.len() as u32).map(ProcessId) {
            let peer = &mut self.peers[to.index()];
            if peer.endpoint.is_some() && peer.pass.is_some() && peer.down.is_none() {
                peer.in_reach = false;
                let header = prefix(self.me, peer.pass);
                self.send(to, id::PING, &header);
            }
        }
        self.roll_call = Some(RollCall {
            dead,
            until: Instant::now() + ANSWER_WITHIN,
        });
    }

    /// Answers a ping of the peer `to`.
    pub(super) fn answer_roll_call(&mut self, to: ProcessId) {
        let peer = &self.peers[to.index()];
        if peer.down.is_none() {
            let header = prefix(self.me, peer.pass);
            self.send(to, id::PONG, &header);
        }
    }

    /// Ends the roll call once all peers have answered its pings or the time is over. Treats peers
    /// that have not answered as gone.
    pub(super) fn call_the_roll(&mut self) {
        let Some(roll_call) = &self.roll_call else {
            return;
        };
        let dead = roll_call.dead;
        let until = roll_call.until;

        let missing = self
            .peers
            .iter()
            .zip(0..)
            .filter(|(peer, _)| peer.down.is_none() && !peer.in_reach);
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
