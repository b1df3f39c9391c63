//! What processes say to each other in rings.

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::wire::{HEADER_BYTES, Header};

/// A message whose payload follows its header.
pub(super) const INLINE: u32 = 1;
/// A message whose payload is the sender's memory: the header, then a [`Lent`].
pub(super) const LENT: u32 = 2;
/// Segments that are no more: four bytes each.
pub(super) const RETIRED: u32 = 3;
/// Nothing more will come.
pub(super) const GOODBYE: u32 = 4;
/// In the ring of returns: loans that are over, eight bytes each.
pub(super) const RETURNED: u32 = 5;

/// In the ring of returns: a loan that others than who it was lent to read too, eight bytes.
pub(super) const PASSED_ON: u32 = 6;

/// Payloads up to this size go with their header: to copy them costs less than to lend them.
pub(super) const LARGEST_INLINE: usize = 2 << 10;

/// Set in [`Lent::flags`] where the lender has limited memory: who gets it copies it and gives it back, which the
/// lender waits for.
pub(super) const COPY: u32 = 1;

/// Memory of the sender's.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq, Unaligned)]
#[repr(C)]
pub(super) struct Lent {
    /// What it is given back by.
    pub(super) loan: U64,
    pub(super) offset: U64,
    pub(super) bytes: U64,
    pub(super) segment: U32,
    pub(super) flags: U32,
}

/// A record that was understood.
#[derive(Debug, Eq, PartialEq)]
pub(super) enum Record<'a> {
    Inline(Header, &'a [u8]),
    Lent(Header, Lent),
    Retired(Vec<u32>),
    Goodbye,
}

/// Reads a record of the ring of messages; an error is the peer's fault.
pub(super) fn read(kind: u32, bytes: &[u8]) -> Result<Record<'_>, String> {
    let header = || {
        let (header, rest) = bytes
            .split_first_chunk::<HEADER_BYTES>()
            .ok_or_else(|| format!("a record of {} bytes", bytes.len()))?;
        Header::decode(header).map(|header| (header, rest)).map_err(|error| error.to_string())
    };
    let fits = |header: &Header, bytes: u64| {
        let announced = header.payload_bytes();
        if announced == bytes {
            Ok(())
        } else {
            Err(format!("{bytes} bytes of payload where {announced} are announced"))
        }
    };
    match kind {
        INLINE => {
            let (header, payload) = header()?;
            fits(&header, payload.len() as u64)?;
            Ok(Record::Inline(header, payload))
        }
        LENT => {
            let (header, rest) = header()?;
            let lent = Lent::read_from_bytes(rest).map_err(|_| format!("a loan in {} bytes", rest.len()))?;
            fits(&header, lent.bytes.get())?;
            Ok(Record::Lent(header, lent))
        }
        RETIRED if bytes.len().is_multiple_of(4) => {
            let numbers = bytes.as_chunks::<4>().0.iter();
            Ok(Record::Retired(numbers.map(|number| u32::from_le_bytes(*number)).collect()))
        }
        GOODBYE => Ok(Record::Goodbye),
        kind => Err(format!("a record of kind {kind} with {} bytes", bytes.len())),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::Kind;

    #[test]
    fn records_are_read_as_written() {
        let header = Header { bytes: 3, op: 7, ..Header::new(Kind::Data) };
        let bytes = [&header.encode()[..], &[1, 2, 3]].concat();
        assert_eq!(read(INLINE, &bytes), Ok(Record::Inline(header, &[1, 2, 3])));
        let lent = Lent {
            loan: 1.into(),
            offset: (1 << 33).into(),
            bytes: (1 << 32).into(),
            segment: 3.into(),
            flags: COPY.into(),
        };
        let header = Header { bytes: 1 << 32, ..header };
        let bytes = [&header.encode()[..], lent.as_bytes()].concat();
        assert_eq!(read(LENT, &bytes), Ok(Record::Lent(header, lent)));
        assert_eq!(read(RETIRED, &[1, 0, 0, 0, 2, 0, 0, 0]), Ok(Record::Retired(vec![1, 2])));
        assert_eq!(read(GOODBYE, &[]), Ok(Record::Goodbye));
    }

    #[test]
    fn what_contradicts_itself_is_refused() {
        let header = Header { bytes: 3, ..Header::new(Kind::Data) };
        let with = |rest: &[u8]| [&header.encode()[..], rest].concat();
        assert!(read(INLINE, &with(&[1, 2])).unwrap_err().contains("2 bytes of payload where 3"));
        assert!(read(INLINE, &with(&[1, 2])[..40]).is_err());
        assert!(read(LENT, &with(&[0; 31])).is_err());
        assert!(read(LENT, &with(&[0; 32])).unwrap_err().contains("0 bytes of payload where 3"));
        assert!(read(RETIRED, &[1, 2, 3]).is_err());
        assert!(read(99, &[]).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_do_any_harm(kind in 0u32..8, bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read(kind, &bytes);
        }
    }
}
