//! The preamble: the fixed bytes that both ends of a connection send first.
//!
//! Sixty-four bytes, little-endian. Magic, version and token have the same place in every version:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `MPMDTCP` and a zero |
//! | 8 | 2 | version of the wire protocol |
//! | 10 | 1 | channel: 0 control, 1 bulk |
//! | 11 | 1 | zero |
//! | 12 | 32 | the job's token |
//! | 44 | 8 | epoch |
//! | 52 | 4 | from: the sending process |
//! | 56 | 4 | to: the intended receiving process |
//! | 60 | 4 | zero |

use crate::rendezvous::are_equal;
use crate::transport::TransportError;
use crate::wire::{ProcessId, VERSION};

pub(super) const PREAMBLE_BYTES: usize = 64;

const MAGIC: [u8; 8] = *b"MPMDTCP\0";

/// One of a pair's two connections.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Channel {
    Control = 0,
    Bulk = 1,
}

impl Channel {
    pub(super) const BOTH: [Self; 2] = [Self::Control, Self::Bulk];
}

/// The fields that are equal in all preambles of a process.
#[derive(Clone)]
pub(super) struct Job {
    pub(super) process: ProcessId,
    pub(super) processes: usize,
    pub(super) token: [u8; 32],
    pub(super) epoch: u64,
}

/// The reason why a preamble is refused.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Refusal {
    /// Magic or token is wrong. The sender gets no answer.
    Stranger,
    /// The preamble is of this job, but its sender cannot work with this process.
    Misfit(TransportError),
}

impl Job {
    /// Returns the preamble of this process for `to`.
    pub(super) fn preamble(&self, to: ProcessId, channel: Channel) -> [u8; PREAMBLE_BYTES] {
        let mut bytes = [0; PREAMBLE_BYTES];
        bytes[0..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = channel as u8;
        bytes[12..44].copy_from_slice(&self.token);
        bytes[44..52].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[52..56].copy_from_slice(&self.process.0.to_le_bytes());
        bytes[56..60].copy_from_slice(&to.0.to_le_bytes());
        bytes
    }

    /// Checks a preamble that this process has received. Returns (sender, channel). Magic and token
    /// are checked before all other fields.
    pub(super) fn check(
        &self,
        bytes: &[u8; PREAMBLE_BYTES],
    ) -> Result<(ProcessId, Channel), Refusal> {
        let shown = bytes[12..44].first_chunk();
        if bytes[..8] != MAGIC || !shown.is_some_and(|shown| are_equal(shown, &self.token)) {
            return Err(Refusal::Stranger);
        }
        let from = ProcessId(u32_at(bytes, 52));
        let misfit = |why| Err(Refusal::Misfit(TransportError::Protocol { peer: from, why }));
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return misfit(format!(
                "it speaks wire version {version}, this process speaks {VERSION}; run the same \
                 build on every \
                 process"
            ));
        }
        let epoch = u64::from(u32_at(bytes, 44)) | (u64::from(u32_at(bytes, 48)) << 32);
        if epoch != self.epoch {
            return misfit(format!(
                "it belongs to epoch {epoch} of the job, this process to {}",
                self.epoch
            ));
        }
        let to = ProcessId(u32_at(bytes, 56));
        if to != self.process || from == self.process || from.index() >= self.processes {
            return misfit(format!(
                "process {from} expects process {to} here, but this is process {} of {}; the \
                 processes have \
                 different lists of addresses",
                self.process, self.processes
            ));
        }
        match bytes[10] {
            0 => Ok((from, Channel::Control)),
            1 => Ok((from, Channel::Bulk)),
            channel => misfit(format!("it asks for an unknown channel {channel}")),
        }
    }
}

fn u32_at(bytes: &[u8; PREAMBLE_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(process: u32) -> Job {
        Job { process: ProcessId(process), processes: 4, token: [7; 32], epoch: 1 << 40 }
    }

    fn refusal(bytes: [u8; PREAMBLE_BYTES]) -> String {
        match job(0).check(&bytes) {
            Err(Refusal::Misfit(error)) => error.to_string(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn preamble_of_a_peer_is_accepted() {
        let bytes = job(3).preamble(ProcessId(0), Channel::Bulk);
        assert_eq!(job(0).check(&bytes), Ok((ProcessId(3), Channel::Bulk)));
    }

    #[test]
    fn wrong_token_is_refused_before_the_version() {
        let mut bytes = job(3).preamble(ProcessId(0), Channel::Control);
        bytes[8] = 99;
        bytes[43] ^= 1;
        assert_eq!(job(0).check(&bytes), Err(Refusal::Stranger));
        assert_eq!(job(0).check(&[0; PREAMBLE_BYTES]), Err(Refusal::Stranger));
    }

    #[test]
    fn fuzz_tcp_preamble() {
        let samples = Channel::BOTH.map(|channel| job(3).preamble(ProcessId(0), channel).to_vec());
        mpmd_fuzz::bytes("tcp-preamble", &samples, |bytes| {
            let mut all = [0; PREAMBLE_BYTES];
            let there = bytes.len().min(PREAMBLE_BYTES);
            all[..there].copy_from_slice(&bytes[..there]);
            match job(0).check(&all) {
                Ok((from, channel)) => {
                    assert!((1..4).contains(&from.0));
                    let said = job(from.0).preamble(ProcessId(0), channel);
                    assert_eq!((&said[..11], &said[12..60]), (&all[..11], &all[12..60]));
                }
                Err(Refusal::Misfit(error)) => assert!(!error.to_string().is_empty()),
                Err(Refusal::Stranger) => {}
            }
        });
    }

    #[test]
    fn misfit_error_names_the_difference() {
        let fine = job(3).preamble(ProcessId(0), Channel::Control);
        let with = |at: usize, byte: u8| {
            let mut bytes = fine;
            bytes[at] = byte;
            refusal(bytes)
        };
        assert!(with(8, 99).contains("speaks wire version 99"));
        assert!(with(44, 2).contains("belongs to epoch 1099511627778"));
        assert!(with(56, 2).contains("expects process 2 here"));
        assert!(with(52, 9).contains("process 9 expects"));
        assert!(with(10, 5).contains("unknown channel 5"));
    }
}
