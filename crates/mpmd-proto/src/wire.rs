//! The header that every message between processes starts with.
//!
//! Sixty-four bytes, little-endian, the same on every transport:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 4 | magic `MPMD` |
//! | 4 | 2 | version |
//! | 6 | 2 | kind |
//! | 8 | 8 | epoch: the incarnation of the job |
//! | 16 | 8 | operation |
//! | 24 | 8 | piece within the operation |
//! | 32 | 8 | bytes of payload (of the piece, for messages that speak of one without carrying it) |
//! | 40 | 16 | rolling hash of the sender's operations |
//! | 56 | 8 | count: number of operations the sender has issued, or another figure by kind |
//!
//! A header that does not start with the right magic and version is refused (invariant
//! *no-wire-without-version*).

pub use mpmd_base::ProcessId;
use zerocopy::byteorder::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Size in bytes of an encoded [`Header`].
pub const HEADER_BYTES: usize = 64;

/// The version of the wire protocol of this crate. All peers must have the same.
pub const VERSION: u16 = 6;

const MAGIC: [u8; 4] = *b"MPMD";

/// The largest payload, in bytes, of any message except [`MessageKind::Data`]. A header that
/// announces more is refused: only data that the receiver has granted may be large.
pub const MAX_CONTROL_BYTES: u64 = 1 << 20;

/// The kind of a message.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
#[repr(u16)]
pub enum MessageKind {
    /// A small piece, with its bytes as payload. It uses the sender's eager credit.
    Eager = 1,
    /// A small piece is ready, but the sender has no eager credit left. The message asks for a
    /// grant.
    Offer = 2,
    /// The receiver has issued the operation and has memory for the piece, so the piece may be
    /// sent.
    Grant = 3,
    /// A granted piece. Only this kind may have a payload larger than [`MAX_CONTROL_BYTES`].
    Data = 4,
    /// The piece will never be sent; the payload contains the reason.
    Poison = 5,
    /// Returns `count` bytes of eager credit. With zero-copy transfers, reports that the sender of
    /// this message has taken all pieces lent to it up to operation `op`.
    Credit = 6,
    /// Asks for the state of a piece that the sender of this message waits for. The receiver
    /// replies with [`MessageKind::Answer`].
    Probe = 7,
    /// The answer to a probe. The payload describes the state of the piece on the answering
    /// process.
    Answer = 8,
    /// The number of operations that the sender has issued (`count`), and its rolling hash at the
    /// last of them.
    Heartbeat = 9,
    /// The sender's number of issued operations and its rolling hash, at the end of step number
    /// `op`.
    Step = 10,
    /// The sender has issued its last operation. If its end was not orderly, the payload contains
    /// the reason.
    Goodbye = 11,
    /// The sender's recent operations. Two processes send them when their hashes differ.
    Records = 12,
    /// The job has failed; the payload contains the reason.
    Failure = 13,
    /// With zero-copy transfers: asks the receiver to report when it has taken all pieces lent to
    /// it up to operation `op`. The receiver replies with [`MessageKind::Credit`].
    AskTaken = 14,
    /// A payload of `count` messages with small pieces (`mpmd_transport::batch`).
    Batch = 15,
}

impl MessageKind {
    fn from_u16(kind: u16) -> Option<Self> {
        Some(match kind {
            1 => Self::Eager,
            2 => Self::Offer,
            3 => Self::Grant,
            4 => Self::Data,
            5 => Self::Poison,
            6 => Self::Credit,
            7 => Self::Probe,
            8 => Self::Answer,
            9 => Self::Heartbeat,
            10 => Self::Step,
            11 => Self::Goodbye,
            12 => Self::Records,
            13 => Self::Failure,
            14 => Self::AskTaken,
            15 => Self::Batch,
            _ => return None,
        })
    }

    /// Returns true if `bytes` in a header of this kind is the length of a payload that follows it.
    ///
    /// In offers and grants, `bytes` is the length of a piece that is not part of the message.
    pub fn carries_payload(self) -> bool {
        !matches!(
            self,
            Self::Offer
                | Self::Grant
                | Self::Credit
                | Self::Probe
                | Self::Heartbeat
                | Self::Step
                | Self::AskTaken
        )
    }
}

/// A decoded message header.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Header {
    /// The kind of the message.
    pub kind: MessageKind,
    /// The epoch of the job: the number of its incarnation.
    pub epoch: u64,
    /// Number of the operation that the message belongs to, or 0. In [`MessageKind::Step`], the
    /// number of the step.
    pub op: u64,
    /// Number of the piece within the operation.
    pub piece: u64,
    /// Length of the piece in bytes; length of the payload if [`MessageKind::carries_payload`].
    pub bytes: u64,
    /// The sender's rolling hash: at operation `op` for pieces, after `count` operations for
    /// heartbeats and goodbyes.
    pub hash: u128,
    /// Number of operations that the sender has issued. In [`MessageKind::Credit`], a number of
    /// bytes.
    pub count: u64,
}

/// The reason why bytes are not a valid header. The peer that sent them is at fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes do not start with the magic `MPMD`.
    #[error("not an mpmd message: starts with {found:02x?} instead of {MAGIC:02x?}")]
    Magic {
        /// The first four bytes.
        found: [u8; 4],
    },
    /// The peer speaks another version of the protocol.
    #[error(
        "the peer speaks wire version {found}, this process speaks {VERSION}; run the same build \
         on every process"
    )]
    Version {
        /// The peer's version.
        found: u16,
    },
    /// The message kind is unknown.
    #[error("unknown message kind {found}")]
    Kind {
        /// The unknown number of the kind.
        found: u16,
    },
    /// A control message announces a payload larger than [`MAX_CONTROL_BYTES`].
    #[error("a {kind:?} message announces {bytes} bytes; at most {MAX_CONTROL_BYTES} are allowed")]
    TooLong {
        /// The message's kind.
        kind: MessageKind,
        /// The announced length in bytes.
        bytes: u64,
    },
}

#[derive(FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    version: U16,
    kind: U16,
    epoch: U64,
    op: U64,
    piece: U64,
    bytes: U64,
    hash_low: U64,
    hash_high: U64,
    count: U64,
}

impl Header {
    /// Creates a header of `kind` with every other field zero.
    pub fn new(kind: MessageKind) -> Self {
        Self {
            kind,
            epoch: 0,
            op: 0,
            piece: 0,
            bytes: 0,
            hash: 0,
            count: 0,
        }
    }

    /// Returns the number of bytes of payload that follow this header on the wire.
    pub fn payload_bytes(&self) -> u64 {
        if self.kind.carries_payload() {
            self.bytes
        } else {
            0
        }
    }

    /// Encodes the header in its wire format.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let raw = RawHeader {
            magic: MAGIC,
            version: U16::new(VERSION),
            kind: U16::new(self.kind as u16),
            epoch: U64::new(self.epoch),
            op: U64::new(self.op),
            piece: U64::new(self.piece),
            bytes: U64::new(self.bytes),
            hash_low: U64::new(self.hash as u64),
            hash_high: U64::new((self.hash >> 64) as u64),
            count: U64::new(self.count),
        };
        zerocopy::transmute!(raw)
    }

    /// Decodes a header.
    ///
    /// # Errors
    ///
    /// If the magic, version or kind is wrong, or if a control message announces more than
    /// [`MAX_CONTROL_BYTES`].
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let raw: &RawHeader = zerocopy::transmute_ref!(bytes);
        // invariant: no-wire-without-version
        if raw.magic != MAGIC {
            return Err(WireError::Magic { found: raw.magic });
        }
        if raw.version.get() != VERSION {
            return Err(WireError::Version {
                found: raw.version.get(),
            });
        }

        let kind = MessageKind::from_u16(raw.kind.get()).ok_or(WireError::Kind {
            found: raw.kind.get(),
        })?;

        let header = Self {
            kind,
            epoch: raw.epoch.get(),
            op: raw.op.get(),
            piece: raw.piece.get(),
            bytes: raw.bytes.get(),
            hash: u128::from(raw.hash_low.get()) | (u128::from(raw.hash_high.get()) << 64),
            count: raw.count.get(),
        };

        if kind != MessageKind::Data && header.payload_bytes() > MAX_CONTROL_BYTES {
            return Err(WireError::TooLong {
                kind,
                bytes: header.bytes,
            });
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Header {
        Header {
            kind: MessageKind::Data,
            epoch: 3,
            op: 1 << 40,
            piece: 7,
            bytes: (1 << 33) + 5,
            hash: 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10,
            count: 42,
        }
    }

    #[test]
    fn header_round_trips_also_above_four_gib() {
        assert_eq!(Header::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn fuzz_wire_header() {
        let kinds = (1..=13).filter_map(MessageKind::from_u16);
        let samples: Vec<_> = kinds
            .map(|kind| {
                Header {
                    kind,
                    bytes: 9,
                    ..sample()
                }
                .encode()
                .to_vec()
            })
            .collect();
        mpmd_fuzz::bytes("wire-header", &samples, |input| {
            let mut bytes = [0; HEADER_BYTES];
            let length = input.len().min(HEADER_BYTES);
            bytes[..length].copy_from_slice(&input[..length]);
            if let Ok(header) = Header::decode(&bytes) {
                assert_eq!(header.encode(), bytes);
                assert!(
                    header.kind == MessageKind::Data || header.payload_bytes() <= MAX_CONTROL_BYTES
                );
            }
        });
    }

    #[test]
    fn encoded_header_has_documented_layout() {
        let bytes = sample().encode();
        assert_eq!(&bytes[0..4], b"MPMD");
        assert_eq!(bytes[4..6], VERSION.to_le_bytes());
        assert_eq!(bytes[16..24], (1u64 << 40).to_le_bytes());
        assert_eq!(bytes[32..40], ((1u64 << 33) + 5).to_le_bytes());
        assert_eq!(bytes[40], 0x10);
    }

    #[test]
    fn invalid_headers_are_refused() {
        assert_eq!(
            Header::decode(&[7; HEADER_BYTES]),
            Err(WireError::Magic { found: [7; 4] })
        );
        let mut other = sample().encode();
        other[4] = 9;
        assert_eq!(Header::decode(&other), Err(WireError::Version { found: 9 }));
        let mut unknown = sample().encode();
        unknown[6] = 200;
        assert_eq!(
            Header::decode(&unknown),
            Err(WireError::Kind { found: 200 })
        );
        let long = Header {
            kind: MessageKind::Eager,
            ..sample()
        };
        assert!(matches!(
            Header::decode(&long.encode()),
            Err(WireError::TooLong {
                kind: MessageKind::Eager,
                ..
            })
        ));
    }
}
