//! Tracks memory lent to and borrowed from each peer.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::devices::Foreign;
use super::doorbell::Doorbell;
use super::futex::SystemFutex;
use super::record::{CLOSED, PASSED_ON, RETURNED};
use super::ring::{Consumer, Corrupt, Producer};
use crate::memory::{DevicePlace, Fence, Loan, Segment, SegmentPosition, SharedBuffer};
use crate::transport::Ticket;

/// The memory that this process has lent to one peer.
///
/// Numbers of loans are never reused: a peer that gives a loan back twice, by a bug, ends no other
/// loan.
pub(super) struct Book {
    open: HashMap<u64, Open>,
    next: u64,
    bytes: u64,
    /// Number of loans with the copy flag: the borrower copies them and returns them, and the
    /// lender waits for that.
    copied: usize,
    /// Numbers of device segments that the peer has closed.
    closed: Vec<u32>,
    /// The peer's ring of returns.
    returns: Consumer,
    /// The fault in the peer's ring of returns, if any.
    corrupt: Option<Corrupt>,
}

struct Open {
    buffer: SharedBuffer,
    /// The ticket that ends when the loan comes back, or `Ticket::NONE`.
    ticket: Ticket,
    is_copied: bool,
    /// True if the peer has re-lent the memory to others, which may read it even after the peer is
    /// gone.
    is_passed_on: bool,
}

impl Book {
    pub(super) fn new(returns: Consumer) -> Self {
        Self {
            open: HashMap::new(),
            next: 1,
            bytes: 0,
            copied: 0,
            closed: Vec::new(),
            returns,
            corrupt: None,
        }
    }

    /// Keeps `bytes` until they come back. Returns the number of the loan.
    pub(super) fn lend(&mut self, bytes: SharedBuffer, ticket: Ticket, is_copied: bool) -> u64 {
        let loan = self.next;
        self.next += 1;
        self.bytes += bytes.len() as u64;
        self.copied += usize::from(is_copied);
        self.open.insert(loan, Open { buffer: bytes, ticket, is_copied, is_passed_on: false });
        loan
    }

    /// Takes the loans that have come back, as (memory, ticket). The caller drops them while it
    /// holds no lock: they may go back to a pool, or to their own owner.
    pub(super) fn collect(&mut self) -> Vec<(SharedBuffer, Ticket)> {
        let mut back = Vec::new();
        let Self { open, returns, bytes, copied, closed, corrupt, .. } = self;
        let mut take = |kind: u32, numbers: &[u8]| {
            for number in
                numbers.as_chunks::<8>().0.iter().map(|number| u64::from_le_bytes(*number))
            {
                // Any other record in this ring is ignored.
                if kind == PASSED_ON
                    && let Some(open) = open.get_mut(&number)
                {
                    open.is_passed_on = true;
                }
                if kind == CLOSED {
                    closed.extend(u32::try_from(number));
                }
                if kind == RETURNED
                    && let Some(Open { buffer, ticket, is_copied, .. }) = open.remove(&number)
                {
                    *bytes -= buffer.len() as u64;
                    *copied -= usize::from(is_copied);
                    back.push((buffer, ticket));
                }
            }
        };
        for _ in 0..returns.most() {
            match returns.pop(&mut take) {
                Ok(Some(())) => {}
                Ok(None) => break,
                Err(nonsense) => {
                    *corrupt = Some(nonsense);
                    break;
                }
            }
        }
        back
    }

    /// Takes the numbers of the device segments that the peer says it has closed; each is returned
    /// once.
    pub(super) fn take_closed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.closed)
    }

    /// Ends all loans except those that the peer has re-lent, and returns their memory. After a
    /// fault in the ring, ends only those that came back. Only allowed once the peer's process has
    /// provably exited.
    pub(super) fn end_all(&mut self) -> Vec<SharedBuffer> {
        // The peer's last returns and notes of re-lending count.
        let mut back: Vec<SharedBuffer> =
            self.collect().into_iter().map(|(buffer, _)| buffer).collect();
        // With a corrupt ring, the peer's last notes of re-lending may be lost.
        if self.corrupt.is_none() {
            back.extend(
                self.open.extract_if(|_, open| !open.is_passed_on).map(|(_, open)| open.buffer),
            );
        }
        self.bytes = self.open.values().map(|open| open.buffer.len() as u64).sum();
        self.copied = self.open.values().filter(|open| open.is_copied).count();
        back
    }

    /// Leaks all lent memory, so that it is never reused while it may be read: its return would not
    /// be noticed.
    pub(super) fn keep_for_ever(&mut self) {
        self.open.drain().for_each(|(_, open)| std::mem::forget(open.buffer));
        (self.bytes, self.copied) = (0, 0);
    }

    /// The fault in the peer's ring of returns, if any. Nothing in the ring is read after that.
    pub(super) fn corrupt(&self) -> Option<&Corrupt> {
        self.corrupt.as_ref()
    }

    /// Takes the tickets of all loans, so that nothing waits for their end any more. The memory
    /// stays lent.
    pub(super) fn take_tickets(&mut self) -> Vec<Ticket> {
        self.copied = 0;
        self.open.values_mut().for_each(|open| open.is_copied = false);
        let tickets =
            self.open.values_mut().map(|open| std::mem::replace(&mut open.ticket, Ticket::NONE));
        tickets.filter(|ticket| *ticket != Ticket::NONE).collect()
    }

    /// True if the peer must still copy and return some loans.
    pub(super) fn is_awaited(&self) -> bool {
        self.copied > 0
    }

    /// True if one of the loans that the peer must copy and return may have come back.
    pub(super) fn has_news(&self) -> bool {
        self.copied > 0 && self.corrupt.is_none() && !self.returns.is_empty()
    }

    /// Number of bytes that are lent to the peer now.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

/// The way back for the loans of one peer's memory. Outlives the transport, as arrays do.
pub(super) struct Returns {
    state: Mutex<State>,
    /// The peer's doorbell.
    door: Doorbell,
    /// Bytes of the peer's memory that are held here.
    borrowed: AtomicU64,
}

struct State {
    ring: Producer,
    /// (Record kind, number) of the records for which the ring had no room, oldest first. The
    /// number is a loan's for `RETURNED`, a segment's for `CLOSED`.
    late: Vec<(u32, u64)>,
}

impl Returns {
    pub(super) fn new(ring: Producer, door: Doorbell) -> Arc<Self> {
        let state = Mutex::new(State { ring, late: Vec::new() });
        Arc::new(Self { state, door, borrowed: AtomicU64::new(0) })
    }

    /// Gives a loan back. Rings the owner only if it waits for this loan; otherwise the owner looks
    /// when it needs memory.
    pub(super) fn give_back(&self, loan: u64, is_awaited: bool) {
        let mut state = self.state.lock();
        state.late.push((RETURNED, loan));
        state.flush();
        drop(state);
        if is_awaited {
            self.door.ring(&SystemFutex);
        }
    }

    /// Tells the peer that a device segment which it has freed is closed here.
    pub(super) fn say_closed(&self, segment: u32) {
        let mut state = self.state.lock();
        state.late.push((CLOSED, u64::from(segment)));
        state.flush();
    }

    /// Tells the owner that other processes read a loan too. Returns false if the ring has no room.
    fn pass_on(&self, loan: u64) -> bool {
        self.state.lock().ring.push(PASSED_ON, &[&loan.to_le_bytes()])
    }

    /// Sends the returns that there was no room for before, and rings the peer if any was sent.
    pub(super) fn flush(&self) {
        if self.state.lock().flush() {
            // The owner may be waiting for one of them.
            self.door.ring(&SystemFutex);
        }
    }

    /// Number of bytes of the peer's memory that are held here.
    pub(super) fn borrowed(&self) -> u64 {
        self.borrowed.load(Ordering::Relaxed)
    }
}

impl State {
    /// Pushes the late records into the ring while there is room. Returns true if at least one was
    /// pushed.
    fn flush(&mut self) -> bool {
        let Self { ring, late } = self;
        let fits = |(kind, number): &&(u32, u64)| ring.push(*kind, &[&number.to_le_bytes()]);
        let fitting = late.iter().take_while(fits).count();
        late.drain(..fitting);
        fitting > 0
    }
}

/// Borrowed memory of a peer; given back when dropped.
pub(super) struct Borrowed {
    segment: Arc<Segment>,
    range: Range<usize>,
    loan: u64,
    is_awaited: bool,
    is_passed_on: AtomicBool,
    returns: Arc<Returns>,
}

impl Borrowed {
    /// Borrows `bytes` bytes at `offset` of `segment`. Returns `None`, and borrows nothing, if the
    /// segment has no such range.
    pub(super) fn new(
        segment: Arc<Segment>,
        offset: u64,
        bytes: u64,
        loan: u64,
        is_awaited: bool,
        returns: &Arc<Returns>,
    ) -> Option<Self> {
        let start = usize::try_from(offset).ok()?;
        let end = start.checked_add(usize::try_from(bytes).ok()?)?;
        if !segment.has(&(start..end)) {
            return None;
        }
        returns.borrowed.fetch_add(bytes, Ordering::Relaxed);
        let (range, is_passed_on, returns) = (start..end, AtomicBool::new(false), returns.clone());
        Some(Self { segment, range, loan, is_awaited, is_passed_on, returns })
    }
}

impl Borrowed {
    /// For device memory: a fence that fails once the owner, and so the memory, is gone.
    pub(super) fn life(&self) -> Option<Arc<dyn Fence>> {
        Foreign::life(&self.segment)
    }
}

impl Loan for Borrowed {
    fn bytes(&self) -> &[u8] {
        // The range was checked by `new`, and segments do not shrink.
        self.segment.lent(self.range.clone()).unwrap_or_default()
    }

    fn device(&self) -> Option<DevicePlace> {
        let memory = self.segment.device()?;
        let address = memory.address() + self.range.start as u64;
        Some(DevicePlace { device: memory.device(), address, bytes: self.range.len() })
    }

    fn is_far(&self) -> bool {
        self.segment.device().is_some_and(|memory| memory.is_far())
    }

    fn is_limited(&self) -> bool {
        self.is_awaited
    }

    fn place(&self) -> Option<SegmentPosition> {
        Some(SegmentPosition { segment: self.segment.clone(), offset: self.range.start })
    }

    fn pass_on(&self) -> bool {
        if !self.is_passed_on.load(Ordering::Relaxed) && self.returns.pass_on(self.loan) {
            // Sending it twice does no harm.
            self.is_passed_on.store(true, Ordering::Relaxed);
        }
        self.is_passed_on.load(Ordering::Relaxed)
    }
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.returns.borrowed.fetch_sub(self.range.len() as u64, Ordering::Relaxed);
        self.returns.give_back(self.loan, self.is_awaited);
    }
}

#[cfg(test)]
mod tests {
    use super::super::ring::Ring;
    use super::*;
    use crate::memory::{Arena, Pool};

    fn lender() -> (Book, Arc<Returns>) {
        let ring = Ring::alone(1024);
        (Book::new(ring.consumer()), Returns::new(ring.producer(), Doorbell::alone()))
    }

    /// Borrows `buffer`'s place as a receiver does.
    fn borrow(buffer: &SharedBuffer, loan: u64, returns: &Arc<Returns>) -> SharedBuffer {
        let SegmentPosition { segment, offset } = buffer.place().unwrap();
        let fd = segment.descriptor().unwrap().try_clone_to_owned().unwrap();
        let segment = Arc::new(Segment::foreign(fd, segment.bytes() as u64).unwrap());
        let borrowed =
            Borrowed::new(segment, offset as u64, buffer.len() as u64, loan, false, returns);
        SharedBuffer::lent(Box::new(borrowed.unwrap()))
    }

    #[test]
    fn block_is_reused_after_its_last_reader() {
        let pool = Pool::in_arena("test", None, &Arena::shared().unwrap());
        let (mut book, returns) = lender();
        let mut buffer = pool.allocate(1000).unwrap();
        buffer.fill(7);
        let buffer = buffer.freeze();
        let there = borrow(&buffer, book.lend(buffer.clone(), Ticket::NONE, false), &returns);
        drop(buffer);
        assert_eq!((book.bytes(), returns.borrowed(), pool.stats().live), (1000, 1000, 1024));
        assert!(there.iter().all(|byte| *byte == 7));
        let part = there.slice(10..20);
        drop(there);
        assert!(book.collect().is_empty(), "a part is held");
        drop(part);
        assert_eq!(returns.borrowed(), 0);
        drop(book.collect());
        assert_eq!((book.bytes(), book.open.len(), pool.stats().live), (0, 0, 0));
    }

    #[test]
    fn borrowed_memory_can_be_re_lent() {
        let pool = Pool::in_arena("test", None, &Arena::shared().unwrap());
        let (mut first, to_first) = lender();
        let (mut second, to_second) = lender();
        let mut own = pool.allocate(5000).unwrap();
        own[4999] = 9;
        let own = own.freeze();
        let at_second = borrow(&own, first.lend(own.clone(), Ticket::NONE, false), &to_first);
        drop(own);
        let at_third = borrow(
            &at_second.slice(4000..5000),
            second.lend(at_second.clone(), Ticket::NONE, false),
            &to_second,
        );
        drop(at_second);
        assert!(first.collect().is_empty());
        assert_eq!(at_third[999], 9);
        drop(at_third);
        drop(second.collect());
        drop(first.collect());
        assert_eq!(pool.stats().live, 0);
    }

    #[test]
    fn re_lent_memory_stays_lent_when_the_peer_ends() {
        let (mut book, returns) = lender();
        let pool = Pool::in_arena("test", None, &Arena::shared().unwrap());
        let [passed_on, kept, given_back] = [1000, 2000, 3000].map(|bytes| {
            let own = pool.allocate(bytes).unwrap().freeze();
            borrow(&own, book.lend(own.clone(), Ticket::NONE, false), &returns)
        });
        assert!(passed_on.pass_on() && passed_on.pass_on() && given_back.pass_on());
        drop(given_back);
        let back: Vec<usize> = book.end_all().iter().map(|buffer| buffer.len()).collect();
        assert_eq!((back, book.bytes()), (vec![3000, 2000], 1000));
        assert_eq!(pool.stats().live, 1024, "a third process may read it");
        book.keep_for_ever();
        assert_eq!((book.bytes(), pool.stats().live), (0, 1024));
        drop((passed_on, kept));
    }

    #[test]
    fn re_lending_needs_room_to_tell_the_owner() {
        let (mut book, returns) = lender();
        let own =
            Pool::in_arena("test", None, &Arena::shared().unwrap()).allocate(64).unwrap().freeze();
        let there = borrow(&own, book.lend(own.clone(), Ticket::NONE, false), &returns);
        while returns.pass_on(12345) {}
        assert!(!there.pass_on());
        drop(book.collect());
        assert!(there.pass_on());
    }

    #[test]
    fn fuzz_shm_returns() {
        mpmd_fuzz::cases("shm-returns", |rng| {
            let ring = Ring::alone(1024);
            let (mut book, mut peer) = (Book::new(ring.consumer()), ring.producer());
            // By loan: its bytes, and whether it must be copied.
            let mut open: HashMap<u64, (u64, bool)> = HashMap::new();
            for step in 0..rng.u64(..40) {
                match rng.u8(..8) {
                    0..3 => {
                        let (bytes, is_copied) = (rng.usize(..100), rng.bool());
                        let loan = book.lend(vec![1; bytes].into(), Ticket(step + 1), is_copied);
                        assert!(open.insert(loan, (bytes as u64, is_copied)).is_none());
                    }
                    3..6 => {
                        let numbers = (0..rng.u32(..4)).map(|_| match rng.u8(..4) {
                            0 => mpmd_fuzz::integer(rng),
                            _ => rng.u64(..12),
                        });
                        let mut said: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
                        said.truncate(said.len() - rng.usize(..=said.len().min(3)));
                        let kind =
                            [RETURNED, RETURNED, PASSED_ON, CLOSED, rng.u32(..20)][rng.usize(..5)];
                        peer.push(kind, &[&said]);
                    }
                    6 => {
                        let word = [0, 24, 32][rng.usize(..3)];
                        ring.words()[word].store(mpmd_fuzz::integer(rng), Ordering::Relaxed);
                    }
                    _ => {
                        let back = book.collect();
                        assert!(back.len() <= open.len());
                        open.retain(|loan, _| book.open.contains_key(loan));
                    }
                }
                let known = |loan: &u64| book.open.contains_key(loan);
                open.retain(|loan, _| known(loan));
                assert_eq!(book.open.len(), open.len());
                assert_eq!(book.bytes(), open.values().map(|(bytes, _)| bytes).sum::<u64>());
                assert_eq!(book.is_awaited(), open.values().any(|(_, is_copied)| *is_copied));
                let _ = (book.has_news(), book.take_closed());
            }
            drop(book.end_all());
            assert!(book.corrupt().is_some() || book.open.values().all(|open| open.is_passed_on));
            let left: Vec<u64> = book.open.keys().copied().collect();
            left.iter().for_each(|loan| drop(book.open.remove(loan)));
        });
    }

    #[test]
    fn returns_before_a_corrupt_record_count() {
        let ring = Ring::alone(1024);
        let (mut book, mut peer) = (Book::new(ring.consumer()), ring.producer());
        let loan = book.lend(vec![1; 10].into(), Ticket(3), true);
        book.lend(vec![1; 20].into(), Ticket(4), true);
        assert!(peer.push(RETURNED, &[&loan.to_le_bytes()]) && peer.push(9, &[&[1, 2, 3]]));
        // The second record's length, after three lines of counts and the first record.
        ring.words()[4 * 8].store(u64::MAX, Ordering::Relaxed);
        let back: Vec<Ticket> = book.collect().into_iter().map(|(_, ticket)| ticket).collect();
        assert_eq!((back, book.corrupt().is_some()), (vec![Ticket(3)], true));
        assert!(!book.has_news() && book.is_awaited());
        assert!(book.end_all().is_empty(), "the peer's last records are lost");
        assert_eq!((book.bytes(), book.take_tickets()), (20, vec![Ticket(4)]));
    }

    #[test]
    fn late_returns_arrive_and_bad_numbers_end_no_loan() {
        let (mut book, returns) = lender();
        let loans: Vec<u64> =
            (0..100).map(|i| book.lend(vec![i as u8; 10].into(), Ticket(i), true)).collect();
        returns.give_back(12345, true);
        returns.give_back(loans[0], true);
        returns.give_back(loans[0], false);
        assert!(book.is_awaited() && book.has_news());
        for loan in &loans[1..] {
            returns.give_back(*loan, false);
        }
        let mut back = 0;
        let mut tickets = Vec::new();
        for _ in 0..100 {
            let found = book.collect();
            back += found.len();
            tickets.extend(found.into_iter().map(|(_, ticket)| ticket));
            returns.flush();
        }
        assert_eq!((back, book.bytes(), book.is_awaited()), (100, 0, false));
        assert_eq!(tickets, (0..100).map(Ticket).collect::<Vec<_>>());
        assert_eq!(book.lend(vec![1].into(), Ticket(7), false), 101);
        assert_eq!((book.take_tickets(), book.take_tickets()), (vec![Ticket(7)], vec![]));
        assert_eq!(book.end_all().len(), 1);
    }

    #[test]
    fn ranges_outside_the_segment_are_not_borrowed() {
        let (_, returns) = lender();
        let arena = Arena::shared().unwrap();
        let buffer = Pool::in_arena("test", None, &arena).allocate(64).unwrap().freeze();
        let segment = buffer.place().unwrap().segment;
        let end = segment.bytes() as u64;
        for (offset, bytes) in
            [(end, 1), (0, end + 1), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)]
        {
            assert!(Borrowed::new(segment.clone(), offset, bytes, 1, false, &returns).is_none());
        }
        assert_eq!(returns.borrowed(), 0);
    }
}
