//! Who has what of whose memory.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::record::RETURNED;
use super::ring::{Consumer, Corrupt, Producer};
use crate::memory::{Loan, Place, Segment, SharedBuffer};

/// What this process has lent to one peer.
///
/// Numbers of loans are never used twice: a peer that gives something back twice by a bug ends no other loan.
pub(super) struct Book {
    open: HashMap<u64, SharedBuffer>,
    next: u64,
    bytes: u64,
    /// Numbers of loans that the peer is done with.
    returns: Consumer,
}

impl Book {
    pub(super) fn new(returns: Consumer) -> Self {
        Self { open: HashMap::new(), next: 1, bytes: 0, returns }
    }

    /// Keeps `bytes` until they come back; returns the number of the loan.
    pub(super) fn lend(&mut self, bytes: SharedBuffer) -> u64 {
        let loan = self.next;
        self.next += 1;
        self.bytes += bytes.len() as u64;
        self.open.insert(loan, bytes);
        loan
    }

    /// What has come back, to be dropped once no lock is held: it may go back to a pool, or to its own owner.
    pub(super) fn collect(&mut self) -> Result<Vec<SharedBuffer>, Corrupt> {
        let mut back = Vec::new();
        let Self { open, returns, bytes, .. } = self;
        let mut take = |kind: u32, numbers: &[u8]| {
            // Anything else in this ring means nothing.
            let numbers = if kind == RETURNED { numbers.as_chunks::<8>().0 } else { &[] };
            for number in numbers {
                if let Some(buffer) = open.remove(&u64::from_le_bytes(*number)) {
                    *bytes -= buffer.len() as u64;
                    back.push(buffer);
                }
            }
        };
        while returns.pop(&mut take)?.is_some() {}
        Ok(back)
    }

    /// Everything that is lent comes back: only where the peer is proved to be no more.
    pub(super) fn end_all(&mut self) -> Vec<SharedBuffer> {
        self.bytes = 0;
        self.open.drain().map(|(_, buffer)| buffer).collect()
    }

    /// Bytes lent.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}

/// What goes back to one peer. Outlives the transport: arrays do.
pub(super) struct Returns {
    state: Mutex<State>,
    /// Bytes of the peer's that are held here.
    borrowed: AtomicU64,
}

struct State {
    ring: Producer,
    /// Numbers for which there was no room.
    late: Vec<u64>,
}

impl Returns {
    pub(super) fn new(ring: Producer) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { ring, late: Vec::new() }), borrowed: AtomicU64::new(0) })
    }

    /// A loan is over. The owner is not woken for it: it looks when it needs memory.
    fn give_back(&self, loan: u64) {
        let mut state = self.state.lock();
        if !state.late.is_empty() || !state.ring.push(RETURNED, &[&loan.to_le_bytes()]) {
            state.late.push(loan);
        }
    }

    /// Gives back what there was no room for before.
    pub(super) fn flush(&self) {
        let State { ring, late } = &mut *self.state.lock();
        let fitting = late.iter().take_while(|loan| ring.push(RETURNED, &[&loan.to_le_bytes()])).count();
        late.drain(..fitting);
    }

    /// Bytes of the peer's that are held here.
    pub(super) fn borrowed(&self) -> u64 {
        self.borrowed.load(Ordering::Relaxed)
    }
}

/// Memory of a peer's; goes back to it when dropped.
pub(super) struct Borrowed {
    segment: Arc<Segment>,
    range: Range<usize>,
    loan: u64,
    returns: Arc<Returns>,
}

impl Borrowed {
    /// `None` where the segment has no such range; then nothing is borrowed.
    pub(super) fn new(
        segment: Arc<Segment>,
        offset: u64,
        bytes: u64,
        loan: u64,
        returns: &Arc<Returns>,
    ) -> Option<Self> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(bytes).ok()?)?;
        segment.lent(start..end)?;
        returns.borrowed.fetch_add(bytes, Ordering::Relaxed);
        Some(Self { segment, range: start..end, loan, returns: returns.clone() })
    }
}

impl Loan for Borrowed {
    fn bytes(&self) -> &[u8] {
        // It was there when this was made, and segments do not shrink.
        self.segment.lent(self.range.clone()).unwrap_or_default()
    }

    fn place(&self) -> Option<Place> {
        Some(Place { segment: self.segment.clone(), offset: self.range.start })
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.returns.borrowed.fetch_sub(self.range.len() as u64, Ordering::Relaxed);
        self.returns.give_back(self.loan);
    }
}

#[cfg(test)]
mod tests {
    use super::super::ring::Ring;
    use super::*;
    use crate::memory::{Arena, Pool};

    fn lender() -> (Book, Arc<Returns>) {
        let ring = Ring::alone(1024);
        (Book::new(ring.consumer()), Returns::new(ring.producer()))
    }

    /// What a receiver makes of the place of `buffer`.
    fn borrow(buffer: &SharedBuffer, loan: u64, returns: &Arc<Returns>) -> SharedBuffer {
        let Place { segment, offset } = buffer.place().unwrap();
        let fd = segment.descriptor().unwrap().try_clone_to_owned().unwrap();
        let segment = Arc::new(Segment::foreign(fd, segment.bytes() as u64).unwrap());
        let borrowed = Borrowed::new(segment, offset as u64, buffer.len() as u64, loan, returns);
        SharedBuffer::lent(Box::new(borrowed.unwrap()))
    }

    #[test]
    fn a_block_is_used_again_only_when_its_last_reader_has_let_go() {
        let pool = Pool::in_arena("test", None, &Arena::shared().unwrap());
        let (mut book, returns) = lender();
        let mut buffer = pool.allocate(1000).unwrap();
        buffer.fill(7);
        let buffer = buffer.freeze();
        let there = borrow(&buffer, book.lend(buffer.clone()), &returns);
        drop(buffer);
        assert_eq!((book.bytes(), returns.borrowed(), pool.stats().live), (1000, 1000, 1024));
        assert!(there.iter().all(|byte| *byte == 7));
        let part = there.slice(10..20);
        drop(there);
        assert!(book.collect().unwrap().is_empty(), "a part is held");
        drop(part);
        assert_eq!(returns.borrowed(), 0);
        drop(book.collect().unwrap());
        assert_eq!((book.bytes(), book.is_empty(), pool.stats().live), (0, true, 0));
    }

    #[test]
    fn what_is_borrowed_can_be_lent_on_and_stays_until_the_third_has_let_go() {
        let pool = Pool::in_arena("test", None, &Arena::shared().unwrap());
        let (mut first, to_first) = lender();
        let (mut second, to_second) = lender();
        let mut own = pool.allocate(5000).unwrap();
        own[4999] = 9;
        let own = own.freeze();
        let at_second = borrow(&own, first.lend(own.clone()), &to_first);
        drop(own);
        let at_third = borrow(&at_second.slice(4000..5000), second.lend(at_second.clone()), &to_second);
        drop(at_second);
        assert!(first.collect().unwrap().is_empty());
        assert_eq!(at_third[999], 9);
        drop(at_third);
        drop(second.collect().unwrap());
        drop(first.collect().unwrap());
        assert_eq!(pool.stats().live, 0);
    }

    #[test]
    fn returns_that_find_no_room_come_later_and_nonsense_ends_no_loan() {
        let (mut book, returns) = lender();
        let loans: Vec<u64> = (0..100).map(|i| book.lend(vec![i as u8; 10].into())).collect();
        returns.give_back(12345);
        returns.give_back(loans[0]);
        returns.give_back(loans[0]);
        for loan in &loans[1..] {
            returns.give_back(*loan);
        }
        let mut back = 0;
        for _ in 0..100 {
            back += book.collect().unwrap().len();
            returns.flush();
        }
        assert_eq!((back, book.bytes()), (100, 0));
        assert_eq!(book.lend(vec![1].into()), 101);
        assert_eq!(book.end_all().len(), 1);
    }

    #[test]
    fn places_that_are_not_there_are_not_borrowed() {
        let (_, returns) = lender();
        let arena = Arena::shared().unwrap();
        let buffer = Pool::in_arena("test", None, &arena).allocate(64).unwrap().freeze();
        let segment = buffer.place().unwrap().segment;
        let end = segment.bytes() as u64;
        for (offset, bytes) in [(end, 1), (0, end + 1), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)] {
            assert!(Borrowed::new(segment.clone(), offset, bytes, 1, &returns).is_none());
        }
        assert_eq!(returns.borrowed(), 0);
    }
}
