//! The way of borrowed memory back to its owner.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::doorbell::Doorbell;
use super::futex::SystemFutex;
use super::note::{LoanId, ReturnNote};
use super::ring::Producer;
use mpmd_proto::wire::ProcessId;

/// Returns borrowed memory to one peer, its owner. It outlives the transport if arrays still use
/// borrowed memory.
pub(super) struct ReturnPath {
    state: Mutex<ReturnRing>,
    /// The peer's doorbell.
    door: Doorbell,
    /// Number of bytes that this process has borrowed from the peer.
    pub(super) borrowed: AtomicU64,
}

/// A ring of notes about returned loans, with the notes that wait for space in the ring.
struct ReturnRing {
    ring: Producer,
    /// Notes that wait for space in the ring, oldest first.
    late: VecDeque<ReturnNote>,
}

impl ReturnPath {
    pub(super) fn new(ring: Producer, door: Doorbell) -> Arc<Self> {
        let state = Mutex::new(ReturnRing {
            ring,
            late: VecDeque::new(),
        });
        Arc::new(Self {
            state,
            door,
            borrowed: AtomicU64::new(0),
        })
    }

    /// Returns a loan to its owner. `to_owner` is the number of messages in which parts of it were
    /// posted to the owner. Rings the owner's doorbell only if it waits for this loan, or if the
    /// ring fills up. Otherwise the owner reads the ring when it needs memory.
    pub(super) fn give_back(&self, loan: LoanId, to_owner: u64, is_awaited: bool) {
        self.say(ReturnNote::Returned { loan, to_owner }, is_awaited);
    }

    /// Tells the peer that this process has closed a device segment that the peer has freed.
    pub(super) fn say_closed(&self, segment: u32) {
        self.say(ReturnNote::Closed(segment), false);
    }

    /// Tells the owner that `loan` was the last loan from its lender, which lends no more.
    pub(super) fn say_last(&self, loan: LoanId) {
        self.say(ReturnNote::Last(loan), false);
    }

    /// Tells the owner that a part of a loan will be lent to the process `to`, as loan `number`.
    /// Returns false if the ring has no space for the note now. Then the part must not be lent.
    pub(super) fn pass_on(
        &self,
        loan: LoanId,
        to: ProcessId,
        number: u64,
        range: &Range<usize>,
    ) -> bool {
        let note = ReturnNote::PassedOn {
            loan,
            to,
            number,
            offset: range.start as u64,
            bytes: range.len() as u64,
        };

        let mut state = self.state.lock();
        state.flush();
        let has_room = state.late.is_empty() && state.push(&note);
        self.unlock(state, false);
        has_room
    }

    /// Pushes waiting notes into the ring, and rings the peer's doorbell if at least one was
    /// pushed.
    pub(super) fn flush(&self) {
        let mut state = self.state.lock();
        // The owner may be waiting for one of them.
        let any = state.flush();
        self.unlock(state, any);
    }

    fn say(&self, note: ReturnNote, is_awaited: bool) {
        let mut state = self.state.lock();
        state.late.push_back(note);
        state.flush();
        self.unlock(state, is_awaited);
    }

    /// Releases the lock. Rings the owner's doorbell if it waits or if the ring fills up.
    fn unlock(&self, mut state: parking_lot::MutexGuard<'_, ReturnRing>, is_awaited: bool) {
        let is_filling = state.ring.is_half_full();
        drop(state);
        if is_awaited || is_filling {
            self.door.ring(&SystemFutex);
        }
    }

    /// Returns the number of bytes that this process has borrowed from the peer.
    pub(super) fn borrowed(&self) -> u64 {
        self.borrowed.load(Ordering::Relaxed)
    }
}

impl ReturnRing {
    /// Pushes waiting notes into the ring while it has space. Returns true if at least one was
    /// pushed.
    fn flush(&mut self) -> bool {
        let mut any = false;
        while let Some(note) = self.late.front().copied()
            && self.push(&note)
        {
            self.late.pop_front();
            any = true;
        }
        any
    }

    fn push(&mut self, note: &ReturnNote) -> bool {
        note.push(|kind, bytes| self.ring.push(kind, &[bytes]))
    }
}
