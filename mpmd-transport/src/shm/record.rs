//! The records that processes exchange in rings.

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use mpmd_proto::wire::{HEADER_BYTES, Header, MessageKind, WireError};

/// Record kind: a message with its payload after the header.
pub(super) const INLINE: u32 = 1;
/// Record kind: a message with a lent payload. The payload is the sender's memory, or memory of
/// another process that the sender has borrowed. Contains the header, then a [`LoanRecord`].
pub(super) const LENT: u32 = 2;
/// Record kind: segments that the sender has freed. Contains their numbers, four bytes each.
pub(super) const RETIRED: u32 = 3;
/// Record kind: a goodbye. It is the last record that the sender writes.
pub(super) const GOODBYE: u32 = 4;
/// Record kind: the memory of a device loan has been written, or the write has failed. Contains the
/// loan's number (eight bytes); after a failure, the reason follows.
pub(super) const LANDED: u32 = 7;
/// Record kind: a message whose payload could not be produced. Contains the header, then the
/// reason.
pub(super) const BROKEN: u32 = 8;
/// Record kind: a message with a payload in the receiver's own memory, borrowed by the sender
/// earlier. Contains the header, then a [`ToOwner`].
pub(super) const TO_OWNER: u32 = 11;

/// Record kind: a new segment in which later messages may lend memory. Contains its number (four
/// bytes).
pub(super) const ANNOUNCED: u32 = 12;

/// Largest payload, in bytes, that is copied into the ring after its header. Copying it costs less
/// than lending it.
pub(super) const LARGEST_INLINE: usize = 2 << 10;

/// Flag in [`LoanRecord::flags`]: the lender's memory is limited. The borrower copies the bytes and
/// returns the loan, and the lender waits for that.
pub(super) const COPY: u32 = 1;
/// Flag in [`LoanRecord::flags`]: the device memory is not written yet. A [`LANDED`] record follows
/// later.
pub(super) const LATER: u32 = 2;

/// The description of a lent payload, which is the sender's memory or memory that it has borrowed.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq, Unaligned,
)]
#[repr(C)]
pub(super) struct LoanRecord {
    /// The loan's number, which the sender chose and never reuses. The sender's id and this number
    /// identify the loan when it is returned to the owner.
    pub(super) loan: U64,
    pub(super) offset: U64,
    pub(super) bytes: U64,
    /// The number of the segment that contains the memory, as the sender has given it.
    pub(super) segment: U32,
    pub(super) flags: U32,
    /// The id of the process that owns the memory.
    pub(super) owner: U32,
}

/// The description of a payload that is the receiver's own memory, which the sender has borrowed.
#[derive(
    Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq, Unaligned,
)]
#[repr(C)]
pub(super) struct ToOwner {
    /// The number of the loan by which the sender borrowed the memory.
    pub(super) loan: U64,
    /// Offset of the payload in bytes within its segment.
    pub(super) offset: U64,
    pub(super) bytes: U64,
    /// The id of the process that lent the memory to the sender of the record.
    pub(super) lender: U32,
}

/// A decoded record.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum MessageRecord<'a> {
    /// A message with its payload.
    Inline(Header, &'a [u8]),
    /// A message with a lent payload.
    Lent(Header, LoanRecord),
    /// A message whose payload is the receiver's own memory.
    ToOwner(Header, ToOwner),
    /// Numbers of segments that the sender has freed.
    Retired(Vec<u32>),
    /// Number of a new segment in which later messages may lend memory.
    Announced(u32),
    /// Number of a device loan whose memory was written; with the reason if the write failed.
    Landed(u64, Option<String>),
    /// A message whose payload could not be produced, with the reason.
    Broken(Header, String),
    Goodbye,
}

/// The fault of a malformed record. The peer that wrote the record is at fault.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum RecordError {
    #[error("a record of {bytes} bytes")]
    CutHeader { bytes: usize },
    #[error(transparent)]
    Header(#[from] WireError),
    #[error("{bytes} bytes of payload where {announced} are announced")]
    PayloadLength { bytes: u64, announced: u64 },
    #[error("a loan in {bytes} bytes")]
    LoanLength { bytes: usize },
    #[error("a part of the receiver's memory in {bytes} bytes")]
    PartLength { bytes: usize },
    #[error("a loan named in {bytes} bytes")]
    LoanNumber { bytes: usize },
    /// A message of a kind without payload has a lent payload.
    #[error("a message of kind {kind:?} with a loan")]
    LendingKind { kind: MessageKind },
    /// A message of a kind that is not a single piece reports a payload that could not be produced.
    #[error("a message of kind {kind:?} that cannot be had")]
    BrokenKind { kind: MessageKind },
    /// The record kind is unknown, or records of this kind have another length.
    #[error("a record of kind {kind} with {bytes} bytes")]
    UnknownKind { kind: u32, bytes: usize },
}

/// Decodes a record of the ring of messages.
pub(super) fn read(kind: u32, bytes: &[u8]) -> Result<MessageRecord<'_>, RecordError> {
    let header = || {
        let (header, rest) = bytes
            .split_first_chunk::<HEADER_BYTES>()
            .ok_or(RecordError::CutHeader { bytes: bytes.len() })?;
        Ok::<_, RecordError>((Header::decode(header)?, rest))
    };

    let fits = |header: &Header, bytes: u64| {
        let announced = header.payload_bytes();
        if announced == bytes {
            Ok(())
        } else {
            Err(RecordError::PayloadLength { bytes, announced })
        }
    };

    match kind {
        INLINE => {
            let (header, payload) = header()?;
            fits(&header, payload.len() as u64)?;
            Ok(MessageRecord::Inline(header, payload))
        }
        LENT => {
            let (header, rest) = header()?;
            let lent = LoanRecord::read_from_bytes(rest)
                .map_err(|_| RecordError::LoanLength { bytes: rest.len() })?;
            check_lending_kind(&header)?;
            fits(&header, lent.bytes.get())?;
            Ok(MessageRecord::Lent(header, lent))
        }
        TO_OWNER => {
            let (header, rest) = header()?;
            let part = ToOwner::read_from_bytes(rest)
                .map_err(|_| RecordError::PartLength { bytes: rest.len() })?;
            check_lending_kind(&header)?;
            fits(&header, part.bytes.get())?;
            Ok(MessageRecord::ToOwner(header, part))
        }
        LANDED => {
            let (loan, why) = bytes
                .split_first_chunk()
                .ok_or(RecordError::LoanNumber { bytes: bytes.len() })?;
            let why = String::from_utf8_lossy(why);
            Ok(MessageRecord::Landed(
                u64::from_le_bytes(*loan),
                (!why.is_empty()).then(|| why.into_owned()),
            ))
        }
        BROKEN => {
            let (header, why) = header()?;
            if !matches!(header.kind, MessageKind::Data | MessageKind::Eager) {
                return Err(RecordError::BrokenKind { kind: header.kind });
            }
            Ok(MessageRecord::Broken(
                header,
                String::from_utf8_lossy(why).into_owned(),
            ))
        }
        RETIRED if bytes.len().is_multiple_of(4) => {
            let numbers = bytes.as_chunks::<4>().0.iter();
            Ok(MessageRecord::Retired(
                numbers.map(|number| u32::from_le_bytes(*number)).collect(),
            ))
        }
        ANNOUNCED if bytes.len() == 4 => Ok(MessageRecord::Announced(u32::from_le_bytes(
            bytes.as_chunks().0[0],
        ))),
        GOODBYE => Ok(MessageRecord::Goodbye),
        kind => Err(RecordError::UnknownKind {
            kind,
            bytes: bytes.len(),
        }),
    }
}

/// Checks that messages of this kind may have a lent payload.
fn check_lending_kind(header: &Header) -> Result<(), RecordError> {
    if header.kind.carries_payload() {
        Ok(())
    } else {
        Err(RecordError::LendingKind { kind: header.kind })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_read_as_written() {
        let header = Header {
            bytes: 3,
            op: 7,
            ..Header::new(MessageKind::Data)
        };
        let bytes = [&header.encode()[..], &[1, 2, 3]].concat();
        assert_eq!(
            read(INLINE, &bytes),
            Ok(MessageRecord::Inline(header, &[1, 2, 3]))
        );
        let lent = LoanRecord {
            loan: 1.into(),
            offset: (1 << 33).into(),
            bytes: (1 << 32).into(),
            segment: 3.into(),
            flags: COPY.into(),
            owner: 5.into(),
        };
        let header = Header {
            bytes: 1 << 32,
            ..header
        };
        let bytes = [&header.encode()[..], lent.as_bytes()].concat();
        assert_eq!(read(LENT, &bytes), Ok(MessageRecord::Lent(header, lent)));
        let part = ToOwner {
            loan: 1.into(),
            offset: 2.into(),
            bytes: (1 << 32).into(),
            lender: 4.into(),
        };
        let bytes = [&header.encode()[..], part.as_bytes()].concat();
        assert_eq!(
            read(TO_OWNER, &bytes),
            Ok(MessageRecord::ToOwner(header, part))
        );
        assert_eq!(
            read(LANDED, &7u64.to_le_bytes()),
            Ok(MessageRecord::Landed(7, None))
        );
        let failed = [&7u64.to_le_bytes()[..], b"it broke"].concat();
        assert_eq!(
            read(LANDED, &failed),
            Ok(MessageRecord::Landed(7, Some("it broke".into())))
        );
        let bytes = [&header.encode()[..], b"no"].concat();
        assert_eq!(
            read(BROKEN, &bytes),
            Ok(MessageRecord::Broken(header, "no".into()))
        );
        assert_eq!(
            read(RETIRED, &[1, 0, 0, 0, 2, 0, 0, 0]),
            Ok(MessageRecord::Retired(vec![1, 2]))
        );
        assert_eq!(
            read(ANNOUNCED, &[7, 0, 0, 1]),
            Ok(MessageRecord::Announced((1 << 24) + 7))
        );
        assert_eq!(read(GOODBYE, &[]), Ok(MessageRecord::Goodbye));
    }

    #[test]
    fn inconsistent_records_are_refused() {
        let header = Header {
            bytes: 3,
            ..Header::new(MessageKind::Data)
        };
        let with = |rest: &[u8]| [&header.encode()[..], rest].concat();
        assert!(
            read(INLINE, &with(&[1, 2]))
                .unwrap_err()
                .to_string()
                .contains("2 bytes of payload where 3")
        );
        assert!(read(INLINE, &with(&[1, 2])[..40]).is_err());
        assert!(read(LENT, &with(&[0; 35])).is_err() && read(LENT, &with(&[0; 37])).is_err());
        assert!(
            read(LENT, &with(&[0; 36]))
                .unwrap_err()
                .to_string()
                .contains("0 bytes of payload where 3")
        );
        assert!(
            read(TO_OWNER, &with(&[0; 27])).is_err() && read(TO_OWNER, &with(&[0; 29])).is_err()
        );
        assert!(
            read(TO_OWNER, &with(&[0; 28]))
                .unwrap_err()
                .to_string()
                .contains("0 bytes of payload where")
        );
        assert!(read(RETIRED, &[1, 2, 3]).is_err() && read(ANNOUNCED, &[1; 8]).is_err());
        assert!(read(99, &[]).is_err());
        let grant = Header {
            bytes: 4096,
            ..Header::new(MessageKind::Grant)
        }
        .encode();
        for (kind, bytes) in [(LENT, 36), (TO_OWNER, 28)] {
            let loan = [&grant[..], &vec![0; bytes]].concat();
            assert_eq!(
                read(kind, &loan),
                Err(RecordError::LendingKind {
                    kind: MessageKind::Grant
                })
            );
        }
        assert_eq!(
            read(BROKEN, &grant),
            Err(RecordError::BrokenKind {
                kind: MessageKind::Grant
            })
        );
        assert!(read(LANDED, &[1; 7]).is_err() && read(BROKEN, &[1; 7]).is_err());
    }

    #[test]
    fn fuzz_shm_records() {
        let header = Header {
            bytes: 3,
            op: 7,
            ..Header::new(MessageKind::Data)
        };
        let lent = |flags: u32| LoanRecord {
            loan: 1.into(),
            offset: 64.into(),
            bytes: 3.into(),
            segment: 3.into(),
            flags: flags.into(),
            owner: 5.into(),
        };
        let part = ToOwner {
            loan: 1.into(),
            offset: 64.into(),
            bytes: 3.into(),
            lender: 4.into(),
        };
        let with = |kind: u32, parts: &[&[u8]]| [&[kind as u8], parts.concat().as_slice()].concat();
        let samples = [
            with(INLINE, &[&header.encode(), &[1, 2, 3]]),
            with(LENT, &[&header.encode(), lent(COPY).as_bytes()]),
            with(LENT, &[&header.encode(), lent(LATER).as_bytes()]),
            with(TO_OWNER, &[&header.encode(), part.as_bytes()]),
            with(RETIRED, &[&[1, 0, 0, 0, 2, 0, 0, 0]]),
            with(ANNOUNCED, &[&[1, 0, 0, 0]]),
            with(GOODBYE, &[]),
            with(LANDED, &[&7u64.to_le_bytes(), b"it broke"]),
            with(BROKEN, &[&header.encode(), b"no"]),
        ];
        mpmd_fuzz::bytes("shm-records", &samples, |bytes| {
            let Some((kind, bytes)) = bytes.split_first() else {
                return;
            };
            match read(u32::from(*kind), bytes) {
                Ok(MessageRecord::Inline(header, payload)) => {
                    assert_eq!(header.payload_bytes(), payload.len() as u64);
                }
                Ok(MessageRecord::Lent(header, lent)) => {
                    assert_eq!(header.payload_bytes(), lent.bytes.get());
                    assert_eq!(lent.as_bytes(), &bytes[HEADER_BYTES..]);
                }
                Ok(MessageRecord::ToOwner(header, part)) => {
                    assert_eq!(header.payload_bytes(), part.bytes.get());
                }
                Ok(MessageRecord::Retired(numbers)) => assert_eq!(4 * numbers.len(), bytes.len()),
                Ok(
                    MessageRecord::Announced(_)
                    | MessageRecord::Landed(..)
                    | MessageRecord::Broken(..)
                    | MessageRecord::Goodbye,
                ) => {}
                Err(error) => assert!(!error.to_string().is_empty()),
            }
        });
    }
}
