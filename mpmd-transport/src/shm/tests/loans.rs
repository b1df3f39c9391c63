//! The ledger of an owner, process 0, and the loans of its borrowers.

use std::any::Any;
use std::cell::OnceCell;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::shm::doorbell::Doorbell;
use crate::shm::ledger::{BorrowerEnd, EndedLoan, LoanLedger, TakenPart};
use crate::shm::loans::BorrowedMemory;
use crate::shm::note::{CLOSED, LAST, LoanId, PASSED_ON, RETURNED};
use crate::shm::record::LoanRecord;
use crate::shm::returns::ReturnPath;
use crate::shm::ring::Ring;
use crate::transport::Ticket;
use mpmd_memory::{Arena, Pool, Segment, SegmentPosition, SharedBuffer};
use mpmd_proto::wire::ProcessId;

const OWNER: ProcessId = ProcessId(0);
/// Capacity in bytes of each ring of returns: 16 notes.
const RING: usize = 1024;

/// An owner and its borrowers.
struct Scene {
    pool: Pool,
    /// The pool's memory as the borrowers see it.
    mapped: OnceCell<Arc<Segment>>,
    ledger: LoanLedger,
    /// The way back of each borrower, from process 1 on.
    returns: Vec<Arc<ReturnPath>>,
    rings: Vec<Ring>,
    /// The number of the next loan, of any lender.
    next: u64,
}

impl Scene {
    fn new(borrowers: usize) -> Self {
        let pool = Pool::in_arena("test", None, &Arena::shared().unwrap());
        let rings: Vec<Ring> = (0..borrowers).map(|_| Ring::alone(RING)).collect();
        let consumers = rings.iter().map(|ring| Some(ring.consumer()));
        let ledger = LoanLedger::new([None].into_iter().chain(consumers));
        let door = Doorbell::alone;
        let returns = rings
            .iter()
            .map(|ring| ReturnPath::new(ring.producer(), door()))
            .collect();
        Self {
            pool,
            mapped: OnceCell::new(),
            ledger,
            returns,
            rings,
            next: 0,
        }
    }

    fn own(&self, bytes: usize) -> SharedBuffer {
        self.pool.allocate(bytes).unwrap().freeze()
    }

    /// Lends own memory to a borrower, and borrows it there.
    fn lend(&mut self, to: u32, own: &SharedBuffer) -> SharedBuffer {
        self.lend_with(to, own, Ticket::NONE)
    }

    fn lend_with(&mut self, to: u32, own: &SharedBuffer, ticket: Ticket) -> SharedBuffer {
        self.next += 1;
        let loan = LoanId {
            lender: OWNER,
            number: self.next,
        };
        self.ledger
            .lend(ProcessId(to), loan, own.clone(), ticket, false);
        self.borrow(to, loan, own)
    }

    /// Re-lends borrowed memory, and borrows it there. `None` if the owner cannot be told.
    fn re_lend(&mut self, from: u32, to: u32, there: &SharedBuffer) -> Option<SharedBuffer> {
        let loan = self.pass_on(from, to, there)?;
        Some(self.borrow(to, loan, there))
    }

    /// Tells the owner of the memory `there` that process `from`, which borrowed it, lends it on to
    /// process `to`. Does not borrow it for `to`. `None` if the owner cannot be told.
    fn pass_on(&mut self, from: u32, to: u32, there: &SharedBuffer) -> Option<LoanId> {
        self.next += 1;
        let number = self.next;
        let offset = there.place().unwrap().offset;
        let has_room =
            borrowed(there).pass_on(ProcessId(to), number, &(offset..offset + there.len()));
        has_room.then_some(LoanId {
            lender: ProcessId(from),
            number,
        })
    }

    /// Borrows `bytes` as process `to` does when a message lends them.
    fn borrow(&self, to: u32, loan: LoanId, bytes: &SharedBuffer) -> SharedBuffer {
        let SegmentPosition { segment, offset } = bytes.place().unwrap();
        // All buffers of a scene are in one segment.
        let segment = self.mapped.get_or_init(|| {
            let fd = segment.descriptor().unwrap().try_clone_to_owned().unwrap();
            Arc::new(Segment::foreign(fd, segment.bytes() as u64).unwrap())
        });
        let lent = lent(loan.number, offset as u64, bytes.len() as u64);
        let returns = &self.returns[to as usize - 1];
        let there = BorrowedMemory::new(segment.clone(), loan.lender, &lent, returns).unwrap();
        SharedBuffer::lent(Box::new(there))
    }

    /// Reads the rings. Returns the lengths of the loans that have ended.
    fn collect(&mut self) -> Vec<usize> {
        lengths(self.ledger.collect())
    }

    fn exit(&mut self, borrower: u32) -> Vec<usize> {
        lengths(self.ledger.note_exit(ProcessId(borrower)))
    }

    fn live(&self) -> u64 {
        self.pool.stats().live
    }
}

fn lengths(ended: Vec<EndedLoan>) -> Vec<usize> {
    let mut lengths: Vec<usize> = ended.iter().map(|loan| loan.buffer.len()).collect();
    lengths.sort_unstable();
    lengths
}

fn borrowed(bytes: &SharedBuffer) -> &BorrowedMemory {
    (bytes.loan().unwrap() as &dyn Any).downcast_ref().unwrap()
}

fn lent(loan: u64, offset: u64, bytes: u64) -> LoanRecord {
    LoanRecord {
        loan: loan.into(),
        offset: offset.into(),
        bytes: bytes.into(),
        segment: 0.into(),
        flags: 0.into(),
        owner: OWNER.0.into(),
    }
}

#[test]
fn block_is_reused_after_its_last_reader() {
    let mut scene = Scene::new(1);
    let mut buffer = scene.pool.allocate(1000).unwrap();
    buffer.fill(7);
    let buffer = buffer.freeze();
    let there = scene.lend(1, &buffer);
    drop(buffer);
    let lent = scene.ledger.bytes(ProcessId(1));
    assert_eq!(
        (lent, scene.returns[0].borrowed(), scene.live()),
        (1000, 1000, 1024)
    );
    assert!(there.iter().all(|byte| *byte == 7));
    let part = there.slice(10..20);
    drop(there);
    assert!(scene.collect().is_empty(), "a part is held");
    drop(part);
    assert_eq!(scene.returns[0].borrowed(), 0);
    assert_eq!(scene.collect(), [1000]);
    assert_eq!(
        (
            scene.ledger.bytes(ProcessId(1)),
            scene.ledger.open(),
            scene.live()
        ),
        (0, 0, 0)
    );
}

#[test]
fn borrowed_memory_can_be_re_lent() {
    let mut scene = Scene::new(2);
    let mut own = scene.pool.allocate(5000).unwrap();
    own[4999] = 9;
    let own = own.freeze();
    let at_one = scene.lend(1, &own);
    drop(own);
    let at_two = scene.re_lend(1, 2, &at_one.slice(4000..5000)).unwrap();
    drop(at_one);
    assert_eq!(
        scene.collect(),
        [5000],
        "the first loan does not wait for the second"
    );
    let lent = [1, 2].map(|process| scene.ledger.bytes(ProcessId(process)));
    assert_eq!(
        (at_two[999], lent, scene.live()),
        (9, [0, 1000], Pool::rounded(5000))
    );
    drop(at_two);
    assert_eq!(scene.collect(), [1000]);
    assert_eq!((scene.ledger.open(), scene.live()), (0, 0));
}

#[test]
fn return_may_be_read_before_its_registration() {
    // Rings are read in the order of the processes.
    for way in [[1, 2, 3], [3, 2, 1], [2, 3, 1], [1, 3, 2]] {
        let mut scene = Scene::new(3);
        let own = scene.own(100);
        let first = scene.lend(way[0], &own);
        let second = scene.re_lend(way[0], way[1], &first).unwrap();
        let third = scene.re_lend(way[1], way[2], &second).unwrap();
        drop((third, second, first));
        assert_eq!(scene.collect(), [100; 3], "{way:?}");
        assert_eq!(scene.ledger.open(), 0);
    }
}

#[test]
fn loans_of_memory_that_goes_around_stay_flat() {
    let mut scene = Scene::new(3);
    let own = scene.own(100);
    let mut most = 0;
    for _ in 0..10_000 {
        let first = scene.lend(1, &own);
        let second = scene.re_lend(1, 2, &first).unwrap();
        drop(first);
        let third = scene.re_lend(2, 3, &second).unwrap();
        drop(second);
        borrowed(&third).count_to_owner();
        let (loan, offset) = (borrowed(&third).loan(), third.place().unwrap().offset);
        drop(third);
        let TakenPart { part, ended } =
            scene
                .ledger
                .take_part(ProcessId(3), loan, offset as u64, 100);
        assert!(part.unwrap().same_place(&own));
        drop(ended);
        if scene.ledger.has_news() {
            scene.collect();
        }
        most = most.max(scene.ledger.open());
    }
    assert!(most <= 64, "{most} open loans");
    scene.collect();
    assert_eq!(
        (scene.ledger.open(), scene.ledger.bytes(ProcessId(3))),
        (0, 0)
    );
}

#[test]
fn loan_waits_for_messages_with_its_memory_to_its_owner() {
    let mut scene = Scene::new(1);
    let own = scene.own(100);
    let there = scene.lend_with(1, &own, Ticket(7));
    let (loan, first) = (
        borrowed(&there).loan(),
        there.place().unwrap().offset as u64,
    );
    (0..3).for_each(|_| borrowed(&there).count_to_owner());
    let take = |scene: &mut Scene, offset, bytes| {
        scene.ledger.take_part(ProcessId(1), loan, offset, bytes)
    };
    assert!(take(&mut scene, first, 100).part.unwrap().same_place(&own));
    drop(there);
    assert!(scene.collect().is_empty(), "two messages are on their way");
    let TakenPart { part, ended } = take(&mut scene, first + 10, 20);
    assert!(part.unwrap().same_place(&own.slice(10..30)) && ended.is_empty());
    let TakenPart { part, ended } = take(&mut scene, first + 90, 11);
    assert!(part.is_none(), "the loan is shorter");
    assert_eq!(ended[0].ticket, Ticket(7));
    assert!(
        take(&mut scene, first, 1).part.is_none(),
        "the loan has ended"
    );
    // Once no messages of the borrower are taken any more, none is waited for.
    for ends_first in [true, false] {
        let mut scene = Scene::new(1);
        let there = scene.lend_with(1, &own, Ticket(8));
        borrowed(&there).count_to_owner();
        let loan = scene.lend_with(1, &own, Ticket(9));
        if ends_first {
            assert_eq!(scene.ledger.close_account(ProcessId(1)).tickets.len(), 2);
        }
        drop(there);
        let over = scene.collect().len();
        if !ends_first {
            let BorrowerEnd { ended, tickets } = scene.ledger.close_account(ProcessId(1));
            assert_eq!((ended[0].ticket, tickets), (Ticket(8), vec![Ticket(9)]));
        }
        assert_eq!((over, scene.ledger.open()), (usize::from(ends_first), 1));
        drop(loan);
    }
}

#[test]
fn dead_re_lender_ends_its_loans_and_no_others() {
    let mut scene = Scene::new(2);
    let [passed_on, kept, given_back] = [1000, 2000, 3000].map(|bytes| {
        let own = scene.own(bytes);
        scene.lend(1, &own)
    });
    let third = scene.re_lend(1, 2, &passed_on).unwrap();
    let fourth = scene.re_lend(1, 2, &given_back.slice(0..500)).unwrap();
    drop(given_back);
    assert_eq!(scene.exit(1), [1000, 2000, 3000]);
    assert_eq!(
        (
            scene.ledger.bytes(ProcessId(1)),
            scene.ledger.bytes(ProcessId(2))
        ),
        (0, 1500)
    );
    assert_eq!(
        scene.live(),
        Pool::rounded(1000) + Pool::rounded(3000),
        "process 2 reads them"
    );
    drop((third, fourth));
    assert_eq!((scene.collect(), scene.live()), (vec![500, 1000], 0));
    // Nothing is entered for a process that has exited.
    let own = scene.own(100);
    let there = scene.lend(2, &own);
    assert!(scene.pass_on(2, 1, &there).is_some());
    assert!(scene.collect().is_empty() && scene.exit(1).is_empty());
    assert_eq!(
        (scene.ledger.bytes(ProcessId(1)), scene.ledger.open()),
        (0, 1)
    );
    drop((passed_on, kept, there, own));
}

#[test]
fn retired_loan_is_readable_and_ends_with_its_pool() {
    for bytes in [100, 1 << 20] {
        let mut scene = Scene::new(1);
        let mut own = scene.pool.allocate(bytes).unwrap();
        own.fill(7);
        let own = own.freeze();
        let there = scene.lend(1, &own);
        let segment = Arc::downgrade(&own.place().unwrap().segment);
        scene.ledger.retire();
        let own = own.into_owned().unwrap_err();
        drop(own);
        assert_eq!(scene.live(), 0);
        // It may still be read, so no other block gets the memory.
        scene.pool.allocate(bytes).unwrap().fill(8);
        // The segment ends with the pool, whose borrower has a mapping of its own.
        scene.pool = Pool::new("other", None);
        assert_eq!(segment.strong_count(), 0, "{bytes}");
        assert!(there.iter().all(|byte| *byte == 7));
    }
}

#[test]
fn loan_that_was_lost_with_its_lender_ends() {
    // The owner reads the note of the lost loan before the borrower's, or after it: rings are read
    // in the order of the processes.
    for (lender, borrower) in [(1, 2), (2, 1)] {
        let mut scene = Scene::new(2);
        let own = scene.own(100);
        let there = scene.lend(lender, &own);
        let arrived = scene.re_lend(lender, borrower, &there).unwrap();
        // The note was written, and the process died before the message.
        assert!(scene.pass_on(lender, borrower, &there).is_some());
        scene.returns[borrower as usize - 1].say_last(borrowed(&arrived).loan());
        let ended = scene.exit(lender);
        assert_eq!(ended, vec![100; if lender == 1 { 2 } else { 1 }]);
        assert_eq!(
            (scene.ledger.bytes(ProcessId(borrower)), scene.ledger.open()),
            (100, 1)
        );
        drop(arrived);
        assert_eq!((scene.collect(), scene.ledger.open()), (vec![100], 0));
        drop(there);
    }
}

#[test]
fn re_lending_needs_room_to_tell_the_owner() {
    let mut scene = Scene::new(2);
    let own = scene.own(64);
    let (there, other) = (scene.lend(1, &own), scene.lend(1, &own));
    let mut copies = Vec::new();
    while let Some(copy) = scene.re_lend(1, 2, &there) {
        copies.push(copy);
        assert_eq!(
            scene.ledger.has_news(),
            copies.len() >= RING / 64 / 2,
            "half of it is full"
        );
    }
    assert_eq!(copies.len(), RING / 64);
    // A note that has no room waits, and those after it wait too.
    drop(other);
    assert!(scene.pass_on(1, 2, &there).is_none() && scene.collect().is_empty());
    assert!(scene.pass_on(1, 2, &there).is_some());
    assert_eq!(scene.collect(), [64]);
}

#[test]
fn rings_are_to_be_read_after_every_64_loans() {
    let mut scene = Scene::new(1);
    let lend = |scene: &mut Scene, number| {
        let loan = LoanId {
            lender: OWNER,
            number,
        };
        scene
            .ledger
            .lend(ProcessId(1), loan, vec![1].into(), Ticket::NONE, false)
    };
    for round in 0..3 {
        assert!((1..64).all(|number| !lend(&mut scene, 100 * round + number)));
        assert!(lend(&mut scene, 100 * round + 64));
        scene.collect();
    }
}

#[test]
fn returns_before_a_corrupt_record_count() {
    let mut scene = Scene::new(1);
    let mut lend = |bytes: usize, number, ticket| {
        let loan = LoanId {
            lender: OWNER,
            number,
        };
        scene.ledger.lend(
            ProcessId(1),
            loan,
            vec![1; bytes].into(),
            Ticket(ticket),
            true,
        );
        loan
    };
    let loan = lend(10, 1, 3);
    lend(20, 2, 4);
    scene.returns[0].give_back(loan, 0, false);
    scene.returns[0].say_closed(9);
    // The second record's length, after three lines of counts and the first record.
    scene.rings[0].words()[4 * 8].store(u64::MAX, Ordering::Relaxed);
    let ledger = &mut scene.ledger;
    let back: Vec<Ticket> = ledger
        .collect()
        .into_iter()
        .map(|loan| loan.ticket)
        .collect();
    assert_eq!(
        (back, ledger.corrupt(ProcessId(1)).is_some()),
        (vec![Ticket(3)], true)
    );
    assert!(!ledger.has_news() && ledger.is_awaited());
    assert!(
        ledger.note_exit(ProcessId(1)).is_empty(),
        "the peer's last records are lost"
    );
    let tickets = ledger.take_tickets(ProcessId(1));
    assert_eq!((ledger.bytes(ProcessId(1)), tickets), (20, vec![Ticket(4)]));
}

#[test]
fn late_returns_arrive_and_bad_numbers_end_no_loan() {
    let mut scene = Scene::new(1);
    let loans: Vec<LoanId> = (0..100)
        .map(|number| LoanId {
            lender: OWNER,
            number: 100 + number,
        })
        .collect();
    for (i, loan) in loans.iter().enumerate() {
        let (bytes, ticket) = (vec![i as u8; 10].into(), Ticket(i as u64));
        scene.ledger.lend(ProcessId(1), *loan, bytes, ticket, true);
    }
    let returns = scene.returns[0].clone();
    returns.give_back(
        LoanId {
            lender: OWNER,
            number: 12345,
        },
        0,
        true,
    );
    returns.give_back(
        LoanId {
            lender: ProcessId(1),
            number: 100,
        },
        0,
        true,
    );
    returns.give_back(loans[0], 0, true);
    returns.give_back(loans[0], 0, false);
    assert!(scene.ledger.is_awaited() && scene.ledger.has_news());
    for loan in &loans[1..] {
        returns.give_back(*loan, 0, false);
    }
    let mut tickets = Vec::new();
    for _ in 0..100 {
        tickets.extend(scene.ledger.collect().into_iter().map(|loan| loan.ticket));
        returns.flush();
    }
    assert_eq!(
        (scene.ledger.bytes(ProcessId(1)), scene.ledger.is_awaited()),
        (0, false)
    );
    assert_eq!(tickets, (0..100).map(Ticket).collect::<Vec<_>>());
}

#[test]
fn ranges_outside_the_segment_are_not_borrowed() {
    let scene = Scene::new(1);
    let segment = scene.own(64).place().unwrap().segment;
    let end = segment.bytes() as u64;
    for (offset, bytes) in [
        (end, 1),
        (0, end + 1),
        (u64::MAX, 1),
        (1, u64::MAX),
        (u64::MAX, u64::MAX),
    ] {
        let lent = lent(1, offset, bytes);
        assert!(BorrowedMemory::new(segment.clone(), OWNER, &lent, &scene.returns[0]).is_none());
    }
    assert_eq!(scene.returns[0].borrowed(), 0);
}

#[test]
fn fuzz_shm_returns() {
    const BORROWERS: usize = 3;
    let pool = Pool::in_arena("test", None, &Arena::shared().unwrap());
    let own = pool.allocate(100).unwrap().freeze();
    let first = own.place().unwrap().offset as u64;
    mpmd_fuzz::cases("shm-returns", |rng| {
        let rings: [Ring; BORROWERS] = std::array::from_fn(|_| Ring::alone(RING));
        let consumers = rings.iter().map(|ring| Some(ring.consumer()));
        let mut ledger = LoanLedger::new([None].into_iter().chain(consumers));
        let mut peers = rings.each_ref().map(Ring::producer);
        // Bytes of the direct loans, by ticket.
        let mut open: HashMap<u64, usize> = HashMap::new();
        let mut next = [0; BORROWERS];
        for step in 0..rng.u64(..40) {
            let at = rng.usize(..BORROWERS);
            let borrower = ProcessId(at as u32 + 1);
            let mut process = || rng.u64(..5);
            let (lender, to) = (process(), process());
            let number = if rng.u8(..4) == 0 {
                mpmd_fuzz::integer(rng)
            } else {
                rng.u64(..12)
            };
            let loan = LoanId {
                lender: ProcessId(lender as u32),
                number,
            };
            let ended = match rng.u8(..9) {
                0..3 => {
                    next[at] += 1;
                    let loan = LoanId {
                        lender: OWNER,
                        number: next[at],
                    };
                    let part = own.slice(0..rng.usize(..100));
                    open.insert(step + 1, part.len());
                    ledger.lend(borrower, loan, part, Ticket(step + 1), rng.bool());
                    Vec::new()
                }
                3..6 => {
                    let words = [lender, number, to, rng.u64(..12), first, rng.u64(..120)];
                    let kinds = [(RETURNED, 3), (PASSED_ON, 6), (LAST, 2), (CLOSED, 1)];
                    let (kind, words_used) = match rng.usize(..6) {
                        4 => (RETURNED, 3),
                        5 => (rng.u32(..20), rng.usize(..7)),
                        kind => kinds[kind],
                    };
                    let said = words.map(u64::to_le_bytes);
                    let mut said = said[..words_used].as_flattened();
                    if rng.u8(..8) == 0 {
                        said = &said[..rng.usize(..=said.len())];
                    }
                    peers[at].push(kind, &[said]);
                    Vec::new()
                }
                6 if rng.u8(..4) == 0 => {
                    let word = [0, 24, 32][rng.usize(..3)];
                    rings[at].words()[word].store(mpmd_fuzz::integer(rng), Ordering::Relaxed);
                    Vec::new()
                }
                6 => {
                    ledger
                        .take_part(borrower, loan, first, rng.u64(..100))
                        .ended
                }
                7 if rng.u8(..8) == 0 => ledger.close_account(borrower).ended,
                _ => ledger.collect(),
            };
            for EndedLoan { buffer, ticket } in ended {
                if let Some(bytes) = open.remove(&ticket.0) {
                    assert_eq!(buffer.len(), bytes);
                } else {
                    assert_eq!(ticket, Ticket::NONE, "a ticket ends once");
                }
            }
            let _ = (
                ledger.has_news(),
                ledger.is_awaited(),
                ledger.take_closed(borrower),
            );
        }
        for borrower in (1..=BORROWERS as u32).map(ProcessId) {
            drop(ledger.note_exit(borrower));
        }
        for borrower in (1..=BORROWERS as u32).map(ProcessId) {
            if ledger.corrupt(borrower).is_none() {
                assert_eq!(ledger.bytes(borrower), 0);
            }
        }
    });
    // The ledgers are dropped, so no loan is left.
    assert!(own.into_owned().is_ok());
}
