//! Processes with devices find out here, before the first message, which pairs can lend each other
//! device memory.
//!
//! Each process sends samples of its own to all others, tries theirs, and reports the result. Two
//! processes lend each other device memory if both could open the other's samples. All packets go
//! through the sockets of the meeting. No process waits in a cycle: each sends everything before it
//! receives.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::peer::ShmPeer;
use super::state::ShmState;
use crate::transport::TransportError;
use mpmd_base::deadline::after;
use mpmd_memory::{DeviceSharing, MOST_WORDS};

/// Prefixes of the packets that describe samples of device memory. `SAMPLE`: a sample follows.
/// `NO_MORE`: all samples were sent. `NONE`: the process has no samples; the reason follows.
const SAMPLE: [u8; 4] = *b"SAMP";
const NO_MORE: [u8; 4] = *b"OVER";
const NONE: [u8; 4] = *b"NONE";
/// Prefixes of the packet with the result of opening a peer's samples. `GOOD`: all could be opened.
/// `BAD`: one could not; the reason follows.
const GOOD: [u8; 4] = *b"GOOD";
const BAD: [u8; 4] = *b"BAD!";

/// Limit on the number of sample packets that are read from one process. No process has so many
/// devices.
const MOST_SAMPLES: usize = 1024;

impl ShmState {
    /// Finds out with which of the peers marked in `with` this process can share device memory.
    /// Exchanges samples of device memory with them. Blocks until all have answered, and fails
    /// after `peer_timeout`. See [`Transport::share_devices`](crate::Transport::share_devices).
    pub(super) fn share_devices(
        &self,
        sharing: Arc<dyn DeviceSharing>,
        with: &[bool],
        peer_timeout: Duration,
    ) -> Result<(), TransportError> {
        let deadline = after(Instant::now(), peer_timeout);
        let is_asked = |index: usize| with.get(index).is_some_and(|with| *with);
        let peers: Vec<(usize, &ShmPeer)> = self
            .peers
            .iter()
            .enumerate()
            .filter(|(index, _)| is_asked(*index))
            .filter_map(|(index, peer)| Some((index, peer.as_ref()?)))
            .collect();
        let samples = sharing.samples().map_err(|error| error.to_string());

        // The reason why memory cannot be shared, for each of `peers`.
        let mut why_not: Vec<Option<String>> = peers.iter().map(|_| None).collect();
        let step = |peer: usize, result: io::Result<Option<String>>| match result {
            Ok(why) => Ok(why),
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                Err(TransportError::TimedOut {
                    event: format!("process {peer} to say which memory of devices it can share"),
                    peer_timeout,
                })
            }
            // The peer is gone or sent an invalid packet. Here it only matters that it does not
            // share devices.
            Err(error) => Ok(Some(format!("process {peer} could not be asked: {error}"))),
        };

        // Each process sends everything before it receives, so none waits in a cycle.
        for (at, (index, peer)) in peers.iter().enumerate() {
            let shown =
                show(peer, samples.as_deref(), deadline).map(|()| samples.as_ref().err().cloned());
            note(&mut why_not[at], step(*index, shown)?);
        }
        for (at, (index, peer)) in peers.iter().enumerate() {
            let tried = try_all(peer, &*sharing, deadline);
            note(&mut why_not[at], step(*index, tried)?);
        }
        for (at, (index, peer)) in peers.iter().enumerate() {
            let verdict = hear_verdict(peer, deadline);
            note(&mut why_not[at], step(*index, verdict)?);
        }

        let mut apart: BTreeMap<String, Vec<u32>> = BTreeMap::new();
        for ((index, peer), why) in peers.into_iter().zip(why_not) {
            match why {
                None => peer.share_devices(),
                Some(why) => apart.entry(why).or_default().push(index as u32),
            }
        }
        for (why, others) in apart {
            self.report_apart(&why, &others, sharing.is_turned_off());
        }

        // A second call changes nothing.
        let _ = self.devices.sharing.set(sharing);
        Ok(())
    }

    /// Logs that this process does not share device memory with `others`, for the reason `why`. The
    /// log level is a warning unless the user has turned sharing off.
    fn report_apart(&self, why: &str, others: &[u32], is_turned_off: bool) {
        let said = format!(
            "process {} and {others:?} do not lend each other memory of their devices: {why}; \
             what one of them needs of the other's devices is copied through host memory, at \
             a fraction of the speed",
            self.process
        );
        match is_turned_off {
            true => tracing::info!(target: "mpmd::transport", "{said}"),
            false => tracing::warn!(target: "mpmd::transport", "{said}"),
        }
    }
}

/// Stores the reason `found` in `known`, unless `known` already contains a reason.
fn note(known: &mut Option<String>, found: Option<String>) {
    if known.is_none() {
        *known = found;
    }
}

/// Sends a peer the descriptions of this process's samples, or the reason why there are none.
fn show(peer: &ShmPeer, samples: Result<&[Vec<u8>], &String>, deadline: Instant) -> io::Result<()> {
    match samples {
        Ok(samples) => {
            for sample in samples {
                say(peer, SAMPLE, sample, deadline)?;
            }
            say(peer, NO_MORE, &[], deadline)
        }
        Err(why) => say(peer, NONE, cut(why), deadline),
    }
}

/// Opens a peer's samples and sends the peer the result. Returns the reason why the peer's device
/// memory cannot be opened, or `None` if it can.
fn try_all(
    peer: &ShmPeer,
    sharing: &dyn DeviceSharing,
    deadline: Instant,
) -> io::Result<Option<String>> {
    let mut why = None;

    for _ in 0..MOST_SAMPLES {
        let packet = peer.socket.receive_until(deadline)?.bytes;
        let Some((kind, rest)) = packet.split_first_chunk::<4>() else {
            return Err(nonsense());
        };

        match *kind {
            SAMPLE => {
                let refused = sharing.try_sample(rest).err();
                note(&mut why, refused.map(|error| error.to_string()));
            }
            NO_MORE => {
                match &why {
                    None => say(peer, GOOD, &[], deadline)?,
                    Some(why) => say(peer, BAD, cut(why), deadline)?,
                }
                return Ok(why);
            }
            NONE => {
                let theirs = String::from_utf8_lossy(rest).into_owned();
                say(peer, BAD, cut(&theirs), deadline)?;
                return Ok(Some(theirs));
            }
            _ => return Err(nonsense()),
        }
    }
    Err(nonsense())
}

/// Waits until a peer reports if it could open this process's samples. Returns the reason why it
/// could not, or `None` if it could.
fn hear_verdict(peer: &ShmPeer, deadline: Instant) -> io::Result<Option<String>> {
    let packet = peer.socket.receive_until(deadline)?.bytes;
    match packet.split_first_chunk::<4>() {
        Some((&GOOD, [])) => Ok(None),
        Some((&BAD, why)) => Ok(Some(String::from_utf8_lossy(why).into_owned())),
        _ => Err(nonsense()),
    }
}

fn say(peer: &ShmPeer, kind: [u8; 4], rest: &[u8], deadline: Instant) -> io::Result<()> {
    let mut packet = kind.to_vec();
    packet.extend_from_slice(rest);
    peer.socket.send_until(&packet, &[], deadline)
}

/// Cuts the text `why` to the number of bytes that fit a packet. The cut may split a character.
fn cut(why: &str) -> &[u8] {
    &why.as_bytes()[..why.len().min(MOST_WORDS)]
}

fn nonsense() -> io::Error {
    io::Error::other("it sent an invalid packet about its devices")
}
