//! Connects to all peers: a [handshake](mpmd_handshake) with each, over messages.
//!
//! The higher process of each pair calls. A message belongs to no connection, and anybody may send
//! one in the name of a peer. So a message only changes this process's end of a handshake if it is
//! proved. Every hello is answered, each by a copy of the same end. A caller repeats its hello
//! before its proof, and the answerer remembers no hello. Both derive the passes of their messages
//! from the handshake.

use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};

use super::UcxConfig;
use super::address::UcxAddress;
use super::queue::ConnectedPeers;
use super::safe::MessageBody;
use super::state::{EarlyHello, UcxEngine, UcxMeeting, UcxPeer, id};
use crate::party::{HELLO_BYTES, Party};
use crate::transport::TransportError;
use mpmd_base::deadline::after;
use mpmd_handshake::Refusal;
use mpmd_handshake::token::random_bytes;
use mpmd_proto::wire::{ProcessId, VERSION};

const MAGIC: [u8; 8] = *b"MPMDUCX\0";
/// Limit on the number of handshake messages that are kept until this process starts to connect.
const HELLOS_KEPT: usize = 1 << 16;
/// Time for which handshakes go on after connecting has failed, so that peers learn the reason.
const LAST_WORDS: Duration = Duration::from_millis(500);

impl UcxMeeting {
    fn fail(&mut self, error: TransportError) {
        if self.failed.is_none() {
            self.failed = Some(error);
            self.until = self.until.min(Instant::now() + LAST_WORDS);
        }
    }
}

impl UcxEngine {
    /// Begins to connect to all peers of `config`. The result is sent to `reply` later.
    pub(super) fn connect(
        &mut self,
        config: UcxConfig,
        reply: Sender<Result<ConnectedPeers, TransportError>>,
    ) {
        self.worker.copy_into(config.pool.clone());
        self.me = config.process;
        self.set_spin(&config);
        self.peers = (0..config.peers.len())
            .map(|_| UcxPeer {
                endpoint: None,
                moves_cuda: false,
                handshake: None,
                expected: None,
                pass: None,
                down: None,
                sending: 0,
                fetching: 0,
                heard_bye: false,
                answered: false,
                has_heard: false,
                in_reach: true,
            })
            .collect();

        let UcxConfig {
            process,
            epoch,
            token,
            ..
        } = config;
        let party = Party::new((MAGIC, VERSION), process, config.peers.len(), epoch, token);
        let failed = self.call_all(&config, &party).err();

        let limit = if failed.is_some() {
            LAST_WORDS
        } else {
            config.peer_timeout
        };
        let until = after(Instant::now(), limit);
        self.meeting = Some(UcxMeeting {
            config,
            party,
            reply,
            until,
            failed,
        });

        for hello in std::mem::take(&mut self.hellos) {
            self.heard(hello.from, &hello.bytes);
        }
    }

    /// Creates endpoints to all peers, and sends the first handshake message to those with lower
    /// ids.
    fn call_all(&mut self, config: &UcxConfig, party: &Party) -> Result<(), TransportError> {
        let peers = (0..)
            .map(ProcessId)
            .zip(&config.peers)
            .filter(|(peer, _)| *peer != config.process);

        // All addresses are parsed before any is used, so that every process reports a peer with
        // another version.
        let addresses: Vec<_> = peers
            .map(|(peer, text)| UcxAddress::parse(text, peer).map(|address| (peer, address)))
            .collect::<Result<_, _>>()?;

        for (peer, address) in addresses {
            let nonce = random_bytes().map_err(|error| TransportError::Environment {
                doing: "reading random numbers".to_owned(),
                why: error.to_string(),
            })?;
            let endpoint =
                self.worker
                    .connect(&address.worker)
                    .map_err(|error| TransportError::PeerGone {
                        peer,
                        why: format!("no way leads there from here; UCX says {error}"),
                    })?;
            self.processes.insert(endpoint, peer);

            let is_called = peer < self.me;
            let mut handshake = if is_called {
                party.call(peer, 0, nonce)
            } else {
                party.answer(nonce)
            };
            let hello = handshake.say();

            let state = &mut self.peers[peer.index()];
            state.endpoint = Some(endpoint);
            state.moves_cuda = address.moves_cuda;
            state.handshake = Some(handshake);

            if is_called {
                self.say_to(peer, hello);
            }
        }
        Ok(())
    }

    /// Sends a handshake message to `peer`.
    fn say_to(&mut self, peer: ProcessId, bytes: Vec<u8>) {
        let header = self.me.0.to_le_bytes();
        self.send_with(peer, id::MEET, &header, Some(bytes.into()));
    }

    /// Handles a received handshake message, or keeps it until this process starts to connect.
    pub(super) fn greeted(&mut self, header: &[u8], body: MessageBody) {
        match (header.first_chunk(), body) {
            (Some(from), MessageBody::Here(bytes)) => {
                self.heard(ProcessId(u32::from_le_bytes(*from)), &bytes)
            }
            (_, body) => self.throw_away(body),
        }
    }

    /// Handles a handshake message. Its sender claims to be the process `from`.
    fn heard(&mut self, from: ProcessId, bytes: &[u8]) {
        let Some(mut meeting) = self.meeting.take() else {
            // Kept if this process has not started to connect yet.
            let is_early = self.peers.is_empty() && bytes.len() <= HELLO_BYTES;
            if is_early && self.hellos.len() < HELLOS_KEPT {
                self.hellos.push(EarlyHello {
                    from,
                    bytes: bytes.to_vec(),
                });
            }
            return;
        };

        match self.shake_hands(&meeting.party, from, bytes) {
            Ok(Ok(())) => {}
            Ok(Err(refusal)) => {
                let why = meeting.party.why(refusal);
                tracing::warn!("UCX's engine refused a message in the name of {from}: {why}");
            }
            Err(misfit) => meeting.fail(misfit),
        }
        self.meeting = Some(meeting);
    }

    /// Handles a handshake message and replies. Fails if the peer has proved that it knows the
    /// token but cannot work with this process. The inner error is the reason why the message was
    /// ignored.
    fn shake_hands(
        &mut self,
        party: &Party,
        from: ProcessId,
        bytes: &[u8],
    ) -> Result<Result<(), Refusal>, TransportError> {
        let known = self
            .peers
            .get(from.index())
            .and_then(|peer| peer.handshake.clone());
        let Some(mut handshake) = known else {
            return Ok(Err(Refusal::Stranger));
        };

        let calls = from > self.me;
        let (first, proof) = bytes.split_at(bytes.len().min(if calls { HELLO_BYTES } else { !0 }));
        let mut taken = handshake.take_packet(first);
        if !proof.is_empty() && taken.is_ok() {
            taken = handshake.take_packet(proof);
        }

        let reply = match taken {
            Ok(reply) => reply,
            Err(refusal) => {
                // One of another version is told.
                let last = handshake.say();
                if !last.is_empty() {
                    self.say_to(from, last);
                }
                return Ok(Err(refusal));
            }
        };

        let Some(facts) = handshake.proved_facts() else {
            // Strangers may say hello in the name of a peer that does not listen yet.
            if self.peers[from.index()].sending < HELLOS_KEPT {
                self.say_to(from, reply);
            }
            return Ok(Ok(()));
        };

        let fits = match calls {
            true => match party.check_caller(facts, 1) {
                // The answer to one peer, passed on to another.
                Ok((caller, _)) if caller != from => return Ok(Err(Refusal::Stranger)),
                checked => checked.map(drop),
            },
            false => party.check_answerer(facts, from),
        };

        // A peer that does not fit is answered too: it learns the reason.
        if calls {
            self.say_to(from, reply);
        } else if !handshake.is_done() {
            self.say_to(from, [handshake.hello(), &reply].concat());
        }

        let secret = handshake.secret();
        let [of_caller, of_answerer] =
            [0, 4].map(|at| u32::from_le_bytes([0, 1, 2, 3].map(|byte| secret[at + byte])));
        let (pass, expected) = if calls {
            (of_answerer, of_caller)
        } else {
            (of_caller, of_answerer)
        };

        let peer = &mut self.peers[from.index()];
        peer.pass = Some(pass);
        peer.expected = Some(expected);
        peer.handshake = Some(handshake);
        fits.map(Ok)
    }

    /// Ends the handshakes if all peers are connected, if one has failed, or if the time limit is
    /// over.
    pub(super) fn meet(&mut self) {
        let Some(mut meeting) = self.meeting.take() else {
            return;
        };

        let others = || {
            self.peers
                .iter()
                .zip(0..)
                .filter(|(_, id)| ProcessId(*id) != self.me)
        };

        // A peer that has sent its goodbye counts as met: it was only faster.
        let has_left = |peer: &UcxPeer| peer.heard_bye && peer.pass.is_some();
        let is_done = |peer: &UcxPeer| peer.handshake.as_ref().is_some_and(|end| end.is_done());
        let lost = others()
            .map(|(peer, _)| peer)
            .filter(|peer| !has_left(peer))
            .find_map(|peer| peer.down.clone());
        let waits = |peer: &UcxPeer| {
            !is_done(peer) && !has_left(peer) || (peer.sending > 0 && peer.down.is_none())
        };
        let silent: Vec<_> = others()
            .filter(|(peer, _)| waits(peer))
            .map(|(_, id)| ProcessId(id))
            .collect();
        let said = others().all(|(peer, _)| peer.sending == 0 || peer.down.is_some());

        if let Some(error) = lost {
            meeting.fail(error);
        }

        let late = Instant::now() >= meeting.until;
        let outcome = match meeting.failed.take() {
            Some(error) if said || late => Err(error),
            Some(error) => {
                meeting.failed = Some(error);
                self.meeting = Some(meeting);
                return;
            }
            None if silent.is_empty() => Ok(self.met()),
            None if late => {
                let what = name_missing(&silent, self.peers.len());
                Err(TransportError::TimedOut {
                    event: what,
                    peer_timeout: meeting.config.peer_timeout,
                })
            }
            None => {
                self.meeting = Some(meeting);
                return;
            }
        };

        // A caller that no longer waits has dropped the transport.
        let _ = meeting.reply.send(outcome);
    }

    /// Returns the result of connecting to all peers.
    fn met(&self) -> ConnectedPeers {
        let moves_cuda = self
            .peers
            .iter()
            .map(|peer| self.moves_cuda && peer.moves_cuda);
        ConnectedPeers {
            lanes: self.lanes(),
            moves_cuda: moves_cuda.collect(),
        }
    }

    /// Returns UCX's description of the connections (lanes) to each peer, by process; empty for
    /// this one.
    fn lanes(&self) -> Vec<String> {
        let lanes = self.peers.iter().zip(0..).map(|(peer, id)| {
            let lanes = peer
                .endpoint
                .map_or_else(String::new, |endpoint| self.worker.lanes(endpoint));
            if peer.endpoint.is_some() {
                tracing::debug!(peer = id, "UCX's choice of lanes\n{lanes}");
            }
            lanes
        });
        lanes.collect()
    }
}

/// Returns a text such as "waiting for process 2 and process 5 of 8 to connect over UCX".
fn name_missing(missing: &[ProcessId], processes: usize) -> String {
    let names: Vec<_> = missing
        .iter()
        .map(|peer| format!("process {peer}"))
        .collect();
    let names = match names.as_slice() {
        [rest @ .., last] if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        names => names.concat(),
    };
    format!("waiting for {names} of {processes} to connect over UCX")
}

#[cfg(test)]
mod tests;
