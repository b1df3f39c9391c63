//! Several small messages for one process in one ([`MessageKind::Batch`]).
//!
//! The payload is a sequence of messages, each a header with its payload. Only messages that carry
//! pieces travel so.

use crate::transport::{CopyOut, Payload};
use mpmd_memory::{OutOfMemory, Pool, SharedBuffer};
use mpmd_proto::wire::{HEADER_BYTES, Header, MAX_CONTROL_BYTES, MessageKind, WireError};

/// Largest payload, in bytes, of a message that is sent as part of a batch. Copying a larger
/// payload into a batch costs more than sending it as a message.
pub const MOST_BATCHED: usize = 4 << 10;

/// Largest size of a batch in bytes. A receiver keeps the whole batch until it has taken every
/// message in it.
pub const MOST_BATCH: usize = 128 << 10;

/// The fault of a malformed batch, which the sender made. Its text continues the words "it sent".
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum BatchError {
    /// The message that carries the batch has no payload in host memory.
    #[error("a batch without bytes")]
    NoBytes,
    /// The batch ends within its last header.
    #[error("a batch of {bytes} bytes that ends within a header")]
    CutHeader {
        /// The batch's length in bytes.
        bytes: usize,
    },
    /// A header is invalid.
    #[error("a batch with {0}")]
    Header(WireError),
    /// The batch contains a message whose kind is not "piece".
    #[error("a batch with a message of kind {kind:?}")]
    Kind {
        /// The message's kind.
        kind: MessageKind,
    },
    /// The payload of a piece ends beyond the batch.
    #[error("a batch with a piece of {bytes} bytes, of which it has {left}")]
    CutPiece {
        /// The piece's length in bytes, according to its header.
        bytes: u64,
        /// Number of bytes that the batch has after the piece's header.
        left: usize,
    },
}

/// Returns the number of bytes that a message with `payload` takes in a batch: header and payload.
pub fn size(payload: &SharedBuffer) -> usize {
    HEADER_BYTES + payload.len()
}

/// Copies messages into one batch, which is allocated in `pool`. The batch may have at most
/// [`MAX_CONTROL_BYTES`].
///
/// # Errors
///
/// If `pool` has no memory for the batch.
pub fn pack(
    messages: &[(Header, SharedBuffer)],
    pool: &Pool,
) -> Result<(Header, SharedBuffer), OutOfMemory> {
    let bytes = messages.iter().map(|(_, payload)| size(payload)).sum();
    debug_assert!(
        bytes as u64 <= MAX_CONTROL_BYTES,
        "a batch of {bytes} bytes"
    );

    let mut batch = pool.allocate(bytes)?;
    let mut rest = &mut batch[..];
    for (header, payload) in messages {
        let (message, others) = rest.split_at_mut(size(payload));
        message[..HEADER_BYTES].copy_from_slice(&header.encode());
        message[HEADER_BYTES..].copy_from_slice(payload);
        rest = others;
    }

    let epoch = messages.first().map_or(0, |(header, _)| header.epoch);
    let count = messages.len() as u64;
    let header = Header {
        epoch,
        count,
        bytes: bytes as u64,
        ..Header::new(MessageKind::Batch)
    };
    Ok((header, batch.freeze()))
}

/// Returns the messages of a batch. Their payloads stay in the batch and are copied when they are
/// fetched.
///
/// # Errors
///
/// If the batch is malformed. The sender is at fault.
pub fn unpack(batch: &SharedBuffer) -> Result<Vec<(Header, Payload)>, BatchError> {
    let mut messages = Vec::new();
    let mut at = 0;
    while at < batch.len() {
        let (header, _) = batch[at..]
            .split_first_chunk::<HEADER_BYTES>()
            .ok_or(BatchError::CutHeader { bytes: batch.len() })?;
        let header = Header::decode(header).map_err(BatchError::Header)?;
        if !matches!(header.kind, MessageKind::Eager | MessageKind::Data) {
            return Err(BatchError::Kind { kind: header.kind });
        }

        at += HEADER_BYTES;
        let left = batch.len() - at;
        let bytes = usize::try_from(header.bytes)
            .ok()
            .filter(|bytes| *bytes <= left);
        let bytes = bytes.ok_or(BatchError::CutPiece {
            bytes: header.bytes,
            left,
        })?;

        let payload = match bytes {
            0 => Payload::Empty,
            _ => Payload::Waiting(Box::new(CopyOut(batch.slice(at..at + bytes)))),
        };
        messages.push((header, payload));
        at += bytes;
    }
    Ok(messages)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(kind: MessageKind, piece: u64, bytes: &[u8]) -> (Header, SharedBuffer) {
        let header = Header {
            piece,
            bytes: bytes.len() as u64,
            ..Header::new(kind)
        };
        (header, bytes.to_vec().into())
    }

    fn packed(messages: &[(Header, SharedBuffer)]) -> SharedBuffer {
        let (header, bytes) = pack(messages, &Pool::new("test", None)).unwrap();
        assert_eq!(
            (header.kind, header.count),
            (MessageKind::Batch, messages.len() as u64)
        );
        assert_eq!(header.bytes, bytes.len() as u64);
        bytes
    }

    #[test]
    fn messages_come_out_of_a_batch_as_they_went_in() {
        let sent = [
            piece(MessageKind::Eager, 3, b"first"),
            piece(MessageKind::Data, 4, b""),
            piece(MessageKind::Data, 5, b"another"),
        ];
        let found = unpack(&packed(&sent)).unwrap();
        assert_eq!(found.len(), sent.len());
        for ((header, payload), (sent, bytes)) in found.into_iter().zip(&sent) {
            assert_eq!(header, *sent);
            match payload {
                Payload::Empty => assert!(bytes.is_empty()),
                Payload::Waiting(fetch) => {
                    let (into, bytes) =
                        (Pool::new("test", None).allocate(bytes.len()), bytes.clone());
                    let check = move |read: Result<mpmd_memory::OwnedBuffer, _>| {
                        assert_eq!(read.unwrap()[..], bytes[..]);
                    };
                    fetch.fetch(into.unwrap(), Box::new(check));
                }
                _ => panic!("no copy of its own"),
            }
        }
        assert!(unpack(&Vec::new().into()).unwrap().is_empty());
    }

    #[test]
    fn damaged_batch_is_refused() {
        let whole = packed(&[
            piece(MessageKind::Eager, 1, b"abc"),
            piece(MessageKind::Data, 2, b"de"),
        ]);
        let refused = |bytes: &[u8]| match unpack(&bytes.to_vec().into()) {
            Ok(_) => String::new(),
            Err(error) => error.to_string(),
        };
        // Every cut, except between the two messages.
        for end in (1..whole.len()).filter(|end| *end != HEADER_BYTES + 3) {
            let why = refused(&whole[..end]);
            assert!(
                why.contains("ends within a header") || why.contains("of which"),
                "{end}: {why}"
            );
        }
        assert!(refused(&[7; HEADER_BYTES]).contains("not an mpmd message"));
        let mut long = whole.to_vec();
        long[32..40].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(!refused(&long).is_empty());
        for kind in [
            MessageKind::Batch,
            MessageKind::Poison,
            MessageKind::Goodbye,
            MessageKind::Credit,
            MessageKind::Failure,
        ] {
            let header = Header::new(kind).encode();
            assert!(refused(&header).contains("of kind"), "{kind:?}");
        }
    }
}
