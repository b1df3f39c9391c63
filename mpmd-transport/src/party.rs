//! Handshakes between two processes of a job. The facts about an end, little-endian:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | its process |
//! | 4 | 4 | number of processes of the job |
//! | 8 | 8 | epoch |
//! | 16 | 4 | of a caller: the process that it calls |
//! | 20 | 4 | of a caller: the number of the channel, among those of the two processes |

use mpmd_handshake::token::Token;
use mpmd_handshake::{Handshake, Protocol, Refusal};
use mpmd_proto::wire::ProcessId;

use crate::transport::TransportError;

/// Number of bytes that the caller (first) and the answerer (second) send about themselves.
const FACTS: [usize; 2] = [24, 16];

/// Length of the first handshake message in bytes.
#[cfg(feature = "ucx")]
pub(crate) const HELLO_BYTES: usize = Protocol {
    magic: [0; 8],
    version: 0,
    facts: FACTS,
}
.hello_bytes();

/// This process's identity in handshakes with its peers. In each pair the process with the higher
/// id opens the connection.
#[derive(Clone)]
pub(crate) struct Party {
    protocol: Protocol,
    pub(crate) process: ProcessId,
    processes: u32,
    epoch: u64,
    token: Token,
}

impl Party {
    /// Creates the identity of `process` in `epoch` of a job of `processes` processes. `protocol`
    /// is the magic number and version of the transport's protocol.
    pub(crate) fn new(
        protocol: ([u8; 8], u16),
        process: ProcessId,
        processes: usize,
        epoch: u64,
        token: [u8; 32],
    ) -> Self {
        let protocol = Protocol {
            magic: protocol.0,
            version: protocol.1,
            facts: FACTS,
        };
        Self {
            protocol,
            process,
            processes: processes as u32,
            epoch,
            token: Token::new(token),
        }
    }

    /// Creates this process's end of a connection that it opens to `to`.
    pub(crate) fn call(&self, to: ProcessId, channel: u32, nonce: [u8; 32]) -> Handshake {
        let facts = [self.facts(), [to.0, channel].map(u32::to_le_bytes).concat()].concat();
        Handshake::call(self.protocol, self.token.clone(), nonce, &facts)
    }

    /// Creates this process's end of a connection that another process has opened.
    pub(crate) fn answer(&self, nonce: [u8; 32]) -> Handshake {
        Handshake::answer(self.protocol, self.token.clone(), nonce, &self.facts())
    }

    /// Checks the facts that a caller has sent; it has proved that it knows the token. Returns the
    /// caller's id and its channel, which is below `channels`.
    ///
    /// # Errors
    ///
    /// [`TransportError::Protocol`] if the caller cannot work with this process.
    pub(crate) fn check_caller(
        &self,
        facts: &[u8],
        channels: u32,
    ) -> Result<(ProcessId, u32), TransportError> {
        let from = process(facts);
        let to = u32_at(facts, 16);
        let channel = u32_at(facts, 20);
        self.check(from, facts)?;

        let misfit = |why| Err(TransportError::Protocol { peer: from, why });
        if to != self.process.0 || from == self.process || u32_at(facts, 0) >= self.processes {
            return misfit(format!(
                "process {from} expects process {to} here, but this is process {} of {}; the \
                 processes have different lists of addresses",
                self.process, self.processes
            ));
        }
        if from < self.process {
            return misfit("the lower process of a pair does not connect to the higher".to_owned());
        }
        if channel >= channels {
            return misfit(format!("it asks for an unknown channel {channel}"));
        }
        Ok((from, channel))
    }

    /// Checks the facts that an answerer has sent. It should be the process `to`.
    ///
    /// # Errors
    ///
    /// Same as [`check_caller`](Self::check_caller).
    pub(crate) fn check_answerer(&self, facts: &[u8], to: ProcessId) -> Result<(), TransportError> {
        self.check(to, facts)?;
        let found = u32_at(facts, 0);
        if found != to.0 {
            let why = format!("process {found} is at its address; the lists of addresses differ");
            return Err(TransportError::Protocol { peer: to, why });
        }
        Ok(())
    }

    /// Checks that a peer belongs to the same epoch and to a job of the same size.
    fn check(&self, peer: ProcessId, facts: &[u8]) -> Result<(), TransportError> {
        let misfit = |why| Err(TransportError::Protocol { peer, why });
        let epoch = u64::from(u32_at(facts, 8)) | u64::from(u32_at(facts, 12)) << 32;
        if epoch != self.epoch {
            return misfit(format!(
                "it belongs to epoch {epoch} of the job, this process to {}",
                self.epoch
            ));
        }

        let processes = u32_at(facts, 4);
        if processes != self.processes {
            return misfit(format!(
                "it belongs to a job of {processes} processes, this process to one of {}",
                self.processes
            ));
        }
        Ok(())
    }

    /// Returns a text that explains why a handshake was refused.
    pub(crate) fn why(&self, refusal: Refusal) -> String {
        match refusal {
            Refusal::Stranger => "the program there is not of mpmd".to_owned(),
            Refusal::OtherVersion { theirs } => format!(
                "it speaks version {theirs} of the protocol, this process speaks {}; run the same \
                 build on every process",
                self.protocol.version
            ),
            Refusal::WrongProof => "it does not know the job token".to_owned(),
        }
    }

    fn facts(&self) -> Vec<u8> {
        let Self {
            process,
            processes,
            epoch,
            ..
        } = self;
        [
            &process.0.to_le_bytes()[..],
            &processes.to_le_bytes(),
            &epoch.to_le_bytes(),
        ]
        .concat()
    }
}

/// Returns the id of the process that sent `facts`.
pub(crate) fn process(facts: &[u8]) -> ProcessId {
    ProcessId(u32_at(facts, 0))
}

fn u32_at(facts: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([facts[at], facts[at + 1], facts[at + 2], facts[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn party(process: u32, processes: usize, epoch: u64) -> Party {
        let magic = (*b"MPMDTEST", 3);
        Party::new(magic, ProcessId(process), processes, epoch, [7; 32])
    }

    /// Passes the messages of a handshake between its two ends until both are done.
    fn complete(caller: &mut Handshake, answerer: &mut Handshake) {
        while !caller.is_done() || !answerer.is_done() {
            answerer.take(&caller.say()).unwrap();
            caller.take(&answerer.say()).unwrap();
        }
    }

    #[test]
    fn misfits_are_named_on_both_sides() {
        let meet = |caller: Party, to: u32, channel: u32, answerer: Party| {
            let mut calls = caller.call(ProcessId(to), channel, [1; 32]);
            let mut answers = answerer.answer([2; 32]);
            complete(&mut calls, &mut answers);
            let found = answerer.check_caller(answers.proved_facts().unwrap(), 2);
            let here = caller.check_answerer(calls.proved_facts().unwrap(), ProcessId(to));
            (
                found.map_err(|error| error.to_string()),
                here.map_err(|error| error.to_string()),
            )
        };
        let (far, fine) = (1 << 40, party(0, 4, 1 << 40));
        assert_eq!(
            meet(party(3, 4, far), 0, 1, fine.clone()),
            (Ok((ProcessId(3), 1)), Ok(()))
        );
        for (caller, to, channel, says, hears) in [
            (
                party(3, 4, 9),
                0,
                1,
                "belongs to epoch 9 of the job, this process to",
                "epoch 1099511",
            ),
            (
                party(3, 5, far),
                0,
                1,
                "a job of 5 processes",
                "a job of 4 processes",
            ),
            (
                party(3, 4, far),
                2,
                1,
                "expects process 2 here",
                "process 0 is at its address",
            ),
            (party(0, 4, far), 0, 1, "expects process 0 here", ""),
            (party(9, 4, far), 0, 1, "process 9 expects", ""),
            (party(3, 4, far), 0, 2, "unknown channel 2", ""),
        ] {
            let (found, here) = meet(caller, to, channel, fine.clone());
            let found = found.unwrap_err();
            assert!(found.contains(says), "{found}");
            assert!(
                here.map_or_else(|here| here.contains(hears), |()| hears.is_empty()),
                "{hears}"
            );
        }
        let (found, _) = meet(party(0, 4, far), 2, 0, party(2, 4, far));
        assert!(
            found
                .unwrap_err()
                .contains("does not connect to the higher")
        );
    }
}
