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

/// The way back for the loans of one peer's memory. Outlives the transport, as arrays do.
pub(super) struct ReturnPath {
    state: Mutex<ReturnRing>,
    /// The peer's doorbell.
    door: Doorbell,
    /// Bytes of the peer's memory that are held here.
    pub(super) borrowed: AtomicU64,
}

/// A ring of returns, with the notes that wait for room in it.
struct ReturnRing {
    ring: Producer,
    /// Notes for which the ring had no room, oldest first.
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

    /// Gives a loan back, of which parts were posted to the owner in `to_owner` messages. Rings the
    /// owner only if it waits for this loan, or if the ring fills up; otherwise the owner looks
    /// when it needs memory.
    pub(super) fn give_back(&self, loan: LoanId, to_owner: u64, is_awaited: bool) {
        self.say(ReturnNote::Returned { loan, to_owner }, is_awaited);
    }

    /// Tells the peer that a device segment which it has freed is closed here.
    pub(super) fn say_closed(&self, segment: u32) {
        self.say(ReturnNote::Closed(segment), false);
    }

    /// Tells the owner the last loan that has come from a process that sends no more.
    pub(super) fn say_last(&self, loan: LoanId) {
        self.say(ReturnNote::Last(loan), false);
    }

    /// Tells the owner that a part of a loan is re-lent to process `to`, as loan `number`. Returns
    /// false if there is no room for the note now: then the part must not be re-lent.
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

    /// Sends the notes that there was no room for before, and rings the peer if any was sent.
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

    /// Releases the lock and rings the owner, if it waits or if it should make room.
    fn unlock(&self, mut state: parking_lot::MutexGuard<'_, ReturnRing>, is_awaited: bool) {
        let is_filling = state.ring.is_half_full();
        drop(state);
        if is_awaited || is_filling {
            self.door.ring(&SystemFutex);
        }
    }

    /// Returns the number of bytes of the peer's memory that are held here.
    pub(super) fn borrowed(&self) -> u64 {
        self.borrowed.load(Ordering::Relaxed)
    }
}

impl ReturnRing {
    /// Pushes the late notes into the ring while there is room. Returns true if at least one was
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
