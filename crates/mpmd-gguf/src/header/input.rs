//! Reads the fields of a header, and refuses lengths beyond the file before memory is allocated.

use std::fmt::Display;
use std::io::{self, ErrorKind, Read};

use crate::error::GgufFlaw;
use crate::limits::MAX_HEADER_BYTES;

/// Number of bytes that are converted at a time when an array of numbers is read.
const CHUNK: usize = 8192;

/// An error of reading a header.
#[derive(Debug)]
pub(crate) enum HeaderError {
    Io(io::Error),
    /// The input ended before this offset, and was longer when its length was asked for.
    Cut(u64),
    Flaw(GgufFlaw),
}

impl From<GgufFlaw> for HeaderError {
    fn from(flaw: GgufFlaw) -> Self {
        Self::Flaw(flaw)
    }
}

/// Reads little-endian fields from the start of a file of known length. `place` says in errors
/// which part of the header is read.
pub(crate) struct HeaderInput<R> {
    input: R,
    /// Number of bytes that have been read.
    position: u64,
    /// Length of the file in bytes.
    size: u64,
}

impl<R: Read> HeaderInput<R> {
    pub(crate) fn new(input: R, size: u64) -> Self {
        Self {
            input,
            position: 0,
            size,
        }
    }

    /// Returns the number of bytes that have been read.
    pub(crate) fn position(&self) -> u64 {
        self.position
    }

    /// Checks that `count` items of at least `item_bytes` bytes are left in the file, within the
    /// limit on headers.
    pub(crate) fn require(
        &self,
        count: u64,
        item_bytes: u64,
        place: &dyn Display,
    ) -> Result<(), HeaderError> {
        let wanted = count.saturating_mul(item_bytes);
        let left = self.size - self.position;
        if wanted > left {
            let place = place.to_string();
            return Err(GgufFlaw::BeyondEnd {
                place,
                wanted,
                left,
            }
            .into());
        }

        if self.position + wanted > MAX_HEADER_BYTES {
            return Err(GgufFlaw::HeaderTooLong(place.to_string()).into());
        }
        Ok(())
    }

    /// Fills `bytes`.
    pub(crate) fn fill(
        &mut self,
        bytes: &mut [u8],
        place: &dyn Display,
    ) -> Result<(), HeaderError> {
        let length = bytes.len() as u64;
        self.require(length, 1, place)?;
        self.position += length;
        self.input
            .read_exact(bytes)
            .map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => HeaderError::Cut(self.position),
                _ => HeaderError::Io(error),
            })
    }

    pub(crate) fn fixed<const N: usize>(
        &mut self,
        place: &dyn Display,
    ) -> Result<[u8; N], HeaderError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, place)?;
        Ok(bytes)
    }

    pub(crate) fn u32(&mut self, place: &dyn Display) -> Result<u32, HeaderError> {
        self.fixed(place).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, place: &dyn Display) -> Result<u64, HeaderError> {
        self.fixed(place).map(u64::from_le_bytes)
    }

    /// Reads `count` numbers of `N` bytes.
    pub(crate) fn numbers<T, const N: usize>(
        &mut self,
        count: u64,
        from_bytes: fn([u8; N]) -> T,
        place: &dyn Display,
    ) -> Result<Vec<T>, HeaderError> {
        self.require(count, N as u64, place)?;
        let mut numbers = Vec::with_capacity(count as usize);

        let mut left = count as usize * N;
        let mut buffer = [0; CHUNK];
        while left > 0 {
            let chunk = &mut buffer[..left.min(CHUNK)];
            self.fill(chunk, place)?;
            numbers.extend(chunk.as_chunks().0.iter().copied().map(from_bytes));
            left -= chunk.len();
        }
        Ok(numbers)
    }

    /// Reads a text with its length before it, into `bytes`, and returns it.
    pub(crate) fn text<'a>(
        &mut self,
        bytes: &'a mut Vec<u8>,
        limit: u64,
        place: &dyn Display,
    ) -> Result<&'a str, HeaderError> {
        let length = self.u64(place)?;
        if length > limit {
            return Err(GgufFlaw::TooMany {
                what: format!("bytes of {place}"),
                found: length,
                limit,
            }
            .into());
        }

        self.require(length, 1, place)?;
        bytes.clear();
        bytes.resize(length as usize, 0);
        self.fill(bytes, place)?;
        str::from_utf8(bytes).map_err(|_| GgufFlaw::NotUtf8(place.to_string()).into())
    }
}
