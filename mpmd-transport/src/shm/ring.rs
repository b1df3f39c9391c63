//! A ring of bytes in shared memory: one process pushes records, one pops them.
//!
//! ```text
//! byte 0    tail: bytes pushed since the start; written by the producer
//!      64   head: bytes popped since the start; written by the consumer
//!     128   wanted: not zero if the producer waits for room
//!     192   records: `capacity` bytes
//! ```
//!
//! Records start at multiples of 64 bytes: a word with length (low half) and kind (high half), then
//! the payload. A record is contiguous. If it would cross the end, a record of the kind [`PADDING`]
//! fills the rest, and both are published at once.
//!
//! The other process may write any value at any time. So every access is atomic, and each end uses
//! its own count and never reads it back. A length is read once and then checked. Payloads are
//! returned as private copies.

use std::ptr::NonNull;
use std::sync::Arc;

use zerocopy::IntoBytes;

use super::shared_words::SharedWords;
use super::sync::{AtomicU64, Ordering, fence};

/// Alignment of records in bytes: a cache line.
const LINE_BYTES: usize = 64;
/// Length in bytes of the prefix of a record, before its payload.
const PREFIX_BYTES: usize = 8;
/// Length in bytes of the ring's counters, before its records.
const HEADER_BYTES: usize = 3 * LINE_BYTES;
const WORD_BYTES: usize = size_of::<u64>();
/// The kind of a record that only fills the space at the end of the ring.
const PADDING: u32 = u32::MAX;

/// Index of the word that counts pushed bytes. All indices are in words of 8 bytes.
const TAIL: usize = 0;
/// Index of the word that counts popped bytes.
const HEAD: usize = LINE_BYTES / WORD_BYTES;
/// Index of the word that is set while the producer waits for free space.
const WANTED: usize = 2 * LINE_BYTES / WORD_BYTES;

/// The memory of a ring, which has one producer and one consumer. Each of the two is created once,
/// in the same process or in another.
pub(super) struct Ring {
    words: SharedWords<AtomicU64>,
    capacity: usize,
}

impl Ring {
    /// Returns the number of bytes of memory for a ring whose records take `capacity` bytes.
    pub(super) const fn bytes(capacity: usize) -> usize {
        HEADER_BYTES + capacity
    }

    /// Returns the largest payload, in bytes, that a record of a ring of this capacity may have.
    pub(super) const fn largest(capacity: usize) -> usize {
        capacity / 4 - PREFIX_BYTES
    }

    /// Wraps the [`bytes`](Self::bytes) bytes at `first`. They must be zero before the producer or
    /// the consumer is used.
    ///
    /// # Safety
    ///
    /// These bytes must be mapped for reading and writing until `keep` is dropped. Until then, all
    /// processes must access them only by atomic operations on whole aligned words of 8 bytes.
    ///
    /// # Panics
    ///
    /// If `first` is not aligned to 8 bytes, or if `capacity` is less than 256 or not a power of
    /// two.
    pub(super) unsafe fn at(
        first: NonNull<u8>,
        capacity: usize,
        keep: Arc<dyn Send + Sync>,
    ) -> Self {
        // SAFETY: The caller's promise is that of `SharedWords::at`; any bytes are valid atomics.
        Self::of(
            unsafe { SharedWords::at(first, Self::bytes(capacity) / WORD_BYTES, keep) },
            capacity,
        )
    }

    /// Creates a ring in private memory.
    ///
    /// # Panics
    ///
    /// If `capacity` is less than 256 or not a power of two.
    #[cfg(test)]
    pub(super) fn alone(capacity: usize) -> Self {
        Self::of(
            SharedWords::alone(Self::bytes(capacity) / WORD_BYTES),
            capacity,
        )
    }

    fn of(words: SharedWords<AtomicU64>, capacity: usize) -> Self {
        assert!(
            capacity.is_power_of_two() && capacity >= 4 * LINE_BYTES,
            "a ring of {capacity} bytes"
        );
        Self { words, capacity }
    }

    /// Returns the producer of a ring into which nothing was pushed yet.
    pub(super) fn producer(&self) -> Producer {
        Producer {
            words: self.words.clone(),
            capacity: self.capacity,
            tail: 0,
            head: 0,
            refused: 0,
        }
    }

    /// Returns the consumer of a ring from which nothing was popped yet.
    pub(super) fn consumer(&self) -> Consumer {
        Consumer {
            words: self.words.clone(),
            capacity: self.capacity,
            head: 0,
            tail: 0,
            copy: Vec::new(),
        }
    }

    /// Returns the ring's words, for tests that write invalid values into them.
    #[cfg(test)]
    pub(super) fn words(&self) -> &[AtomicU64] {
        &self.words
    }
}

/// The end of a ring that pushes records.
pub(super) struct Producer {
    words: SharedWords<AtomicU64>,
    capacity: usize,
    /// Number of bytes pushed since the start.
    tail: u64,
    /// Number of bytes that the consumer had popped when its counter was last read.
    head: u64,
    /// Size in bytes of the last record, if the ring had no space for it; else 0.
    refused: usize,
}

impl Producer {
    /// Pushes a record whose payload is the concatenation of `parts`. Returns false, and writes
    /// nothing, if the ring has no space. The caller decides whether to ring the consumer's
    /// [doorbell](super::doorbell::Doorbell::ring).
    ///
    /// An invalid counter written by the consumer is ignored: the ring then stays full.
    ///
    /// # Panics
    ///
    /// If the parts are longer than [`Ring::largest`], or if the kind is `u32::MAX`.
    pub(super) fn push(&mut self, kind: u32, parts: &[&[u8]]) -> bool {
        let len = parts.iter().map(|part| part.len()).sum::<usize>();
        let largest = Ring::largest(self.capacity);
        assert!(
            len <= largest,
            "a record of {len} bytes in a ring that takes {largest}"
        );
        assert_ne!(kind, PADDING, "this kind is the ring's own");

        let size = record_bytes(len);
        let start = place(self.tail, self.capacity);
        let rest = self.capacity - start;
        let padding = if size > rest { rest } else { 0 };
        if !self.has_room(padding + size) {
            self.refused = padding + size;
            return false;
        }
        self.refused = 0;

        let records = &self.words[HEADER_BYTES / WORD_BYTES..];
        let start = if padding > 0 {
            records[start / WORD_BYTES]
                .store(prefix(padding - PREFIX_BYTES, PADDING), Ordering::Relaxed);
            0
        } else {
            start
        };
        let record = &records[start / WORD_BYTES..][..size / WORD_BYTES];
        record[0].store(prefix(len, kind), Ordering::Relaxed);
        copy_in(&record[1..], parts);

        self.tail = self.tail.wrapping_add((padding + size) as u64);
        self.words[TAIL].store(self.tail, Ordering::Release);
        true
    }

    /// Returns the number of free bytes. A record takes its payload plus 8 bytes, rounded up to 64.
    /// A record that does not fit before the end of the ring may take up to twice that.
    #[cfg(test)]
    pub(super) fn free(&mut self) -> usize {
        self.look();
        self.capacity - self.used()
    }

    /// Returns true if at least half of the ring is unread, by the consumer's counter as last read.
    pub(super) fn is_half_full(&mut self) -> bool {
        // The consumer's count is read again only if the known one is not enough.
        let half = self.capacity / 2;
        self.used() >= half && {
            self.look();
            self.used() >= half
        }
    }

    /// Announces that the producer waits for free space, then checks again. Returns true if it must
    /// wait: the last record still does not fit. The consumer learns from
    /// [`take_wanted`](Consumer::take_wanted) that it must ring when it frees space. Returns false
    /// if there is space, or if the last record was pushed.
    ///
    /// While a record waits for space, a process must call this in its last check before it sleeps.
    pub(super) fn wants_room(&mut self) -> bool {
        self.words[WANTED].store(1, Ordering::Relaxed);
        // Either the consumer, which pops and then reads this word, sees it, or this sees the room
        // that it made.
        fence(Ordering::SeqCst);
        if self.has_room(self.refused) {
            self.words[WANTED].store(0, Ordering::Relaxed);
            return false;
        }
        true
    }

    fn has_room(&mut self, bytes: usize) -> bool {
        if self.capacity - self.used() < bytes {
            self.look();
        }
        self.capacity - self.used() >= bytes
    }

    fn used(&self) -> usize {
        // Within the capacity: `look` accepts no other value.
        self.tail.wrapping_sub(self.head) as usize
    }

    /// Reads the consumer's counter, and stores it if it is valid.
    fn look(&mut self) {
        let head = self.words[HEAD].load(Ordering::Acquire);
        let popped = head.wrapping_sub(self.head);
        if popped <= self.used() as u64 && popped.is_multiple_of(LINE_BYTES as u64) {
            self.head = head;
        }
    }
}

/// The end of a ring that pops records.
pub(super) struct Consumer {
    words: SharedWords<AtomicU64>,
    capacity: usize,
    /// Number of bytes popped since the start.
    head: u64,
    /// Number of bytes that the producer had pushed when its counter was last read.
    tail: u64,
    /// Private copy of the payload of the last record.
    copy: Vec<u64>,
}

impl Consumer {
    /// Pops the next record and passes its kind and payload to `f`. Returns `None` if the ring is
    /// empty. The payload is a copy, aligned to 8 bytes. The record's space in the ring is freed
    /// before `f` is called.
    ///
    /// # Errors
    ///
    /// If the ring's memory contains values that no valid producer writes. Then nothing is popped,
    /// and the ring cannot be used any more.
    pub(super) fn pop<R>(&mut self, f: impl FnOnce(u32, &[u8]) -> R) -> Result<Option<R>, Corrupt> {
        if self.head == self.tail {
            let tail = self.words[TAIL].load(Ordering::Acquire);
            let used = tail.wrapping_sub(self.head);
            if used > self.capacity as u64 || !used.is_multiple_of(LINE_BYTES as u64) {
                let capacity = self.capacity;
                return Err(Corrupt(format!(
                    "{used} bytes are said to be in a ring of {capacity}"
                )));
            }
            if used == 0 {
                return Ok(None);
            }
            self.tail = tail;
        }

        let records = &self.words[HEADER_BYTES / WORD_BYTES..];

        // Checked where the tail was read.
        let mut used = self.tail.wrapping_sub(self.head) as usize;

        let mut head = self.head;
        let mut start = place(head, self.capacity);
        let (mut len, mut kind) = split(records[start / WORD_BYTES].load(Ordering::Relaxed));

        if kind == PADDING {
            let rest = self.capacity - start;
            if len != rest - PREFIX_BYTES || rest >= used || rest >= self.capacity / 4 {
                return Err(Corrupt(format!(
                    "padding of {len} bytes at {start}, with {used} bytes pushed"
                )));
            }
            used -= rest;
            head = head.wrapping_add(rest as u64);
            start = 0;
            (len, kind) = split(records[0].load(Ordering::Relaxed));
            if kind == PADDING {
                return Err(Corrupt("padding behind padding".into()));
            }
        }

        let largest = Ring::largest(self.capacity);
        if len > largest {
            return Err(Corrupt(format!(
                "a record of {len} bytes in a ring that takes {largest}"
            )));
        }
        let size = record_bytes(len);
        if size > used || size > self.capacity - start {
            let rest = self.capacity - start;
            return Err(Corrupt(format!(
                "a record of {len} bytes at {start}, with {used} bytes pushed and {rest} to the end"
            )));
        }

        self.copy.clear();
        let payload = &records[start / WORD_BYTES + 1..][..len.div_ceil(WORD_BYTES)];
        self.copy
            .extend(payload.iter().map(|word| word.load(Ordering::Relaxed)));
        self.head = head.wrapping_add(size as u64);
        self.words[HEAD].store(self.head, Ordering::Release);
        Ok(Some(f(kind, &self.copy.as_bytes()[..len])))
    }

    /// Returns the largest number of records that the ring can contain. A caller that pops more
    /// than this in one loop may never finish if the producer never stops.
    pub(super) fn most(&self) -> usize {
        self.capacity / LINE_BYTES
    }

    /// Returns true if there is no record to pop. Cheap.
    pub(super) fn is_empty(&self) -> bool {
        self.head == self.tail && self.words[TAIL].load(Ordering::Relaxed) == self.head
    }

    /// Returns true if half of the ring or more is unread. Cheap.
    pub(super) fn is_half_full(&self) -> bool {
        let tail = self.words[TAIL].load(Ordering::Relaxed);
        tail.wrapping_sub(self.head) >= self.capacity as u64 / 2
    }

    /// Returns true, once, if the producer [waits for space](Producer::wants_room). Call it after
    /// popping. If it returns true, the caller must ring the producer's
    /// [doorbell](super::doorbell::Doorbell::ring).
    pub(super) fn take_wanted(&mut self) -> bool {
        // Either this sees the producer's word, or the producer, which then checks for room, sees
        // the new head.
        fence(Ordering::SeqCst);
        let wanted = &self.words[WANTED];
        wanted.load(Ordering::Relaxed) != 0 && wanted.swap(0, Ordering::Relaxed) != 0
    }
}

/// The error of a ring whose memory contains values that no valid producer writes.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("a ring in shared memory holds nonsense: {0}")]
pub(super) struct Corrupt(String);

/// Converts `count`, a number of bytes since the start, to a byte offset within the ring's records.
fn place(count: u64, capacity: usize) -> usize {
    count as usize & (capacity - 1)
}

/// Returns the number of bytes of a ring that a record with a payload of `len` bytes takes.
fn record_bytes(len: usize) -> usize {
    (PREFIX_BYTES + len).next_multiple_of(LINE_BYTES)
}

fn prefix(len: usize, kind: u32) -> u64 {
    len as u64 | u64::from(kind) << 32
}

fn split(prefix: u64) -> (usize, u32) {
    (prefix as u32 as usize, (prefix >> 32) as u32)
}

/// Writes the concatenation of `parts` into `words`, and pads the last word with zeros.
fn copy_in(words: &[AtomicU64], parts: &[&[u8]]) {
    let mut words = words.iter();
    // The bytes of the word in which the last part ended.
    let mut begun = [0; WORD_BYTES];
    let mut filled = 0;
    for mut part in parts.iter().copied() {
        if filled > 0 {
            let (now, later) = part.split_at(part.len().min(WORD_BYTES - filled));
            begun[filled..filled + now.len()].copy_from_slice(now);
            filled += now.len();
            part = later;
            if filled < WORD_BYTES {
                continue;
            }
            store(&mut words, begun);
        }

        let (whole, rest) = part.as_chunks::<WORD_BYTES>();
        for bytes in whole {
            store(&mut words, *bytes);
        }
        begun[..rest.len()].copy_from_slice(rest);
        filled = rest.len();
    }

    if filled > 0 {
        begun[filled..].fill(0);
        store(&mut words, begun);
    }
}

fn store(words: &mut std::slice::Iter<'_, AtomicU64>, bytes: [u8; WORD_BYTES]) {
    let word = words
        .next()
        .expect("a record's memory has room for its payload");
    word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
}
