//! Borrowed memory, and its way back to the owner.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;

use super::devices::Foreign;
use super::doorbell::Doorbell;
use super::futex::SystemFutex;
use super::note::{LoanId, Note};
use super::record::{COPY, Lent};
use super::ring::Producer;
use crate::memory::{DevicePlace, Fence, Loan, Segment, SegmentPosition};
use mpmd_proto::wire::ProcessId;

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
    /// Notes for which the ring had no room, oldest first.
    late: VecDeque<Note>,
}

impl Returns {
    pub(super) fn new(ring: Producer, door: Doorbell) -> Arc<Self> {
        let state = Mutex::new(State { ring, late: VecDeque::new() });
        Arc::new(Self { state, door, borrowed: AtomicU64::new(0) })
    }

    /// Gives a loan back, of which parts were posted to the owner in `to_owner` messages. Rings the
    /// owner only if it waits for this loan, or if the ring fills up; otherwise the owner looks
    /// when it needs memory.
    pub(super) fn give_back(&self, loan: LoanId, to_owner: u64, is_awaited: bool) {
        self.say(Note::Returned { loan, to_owner }, is_awaited);
    }

    /// Tells the peer that a device segment which it has freed is closed here.
    pub(super) fn say_closed(&self, segment: u32) {
        self.say(Note::Closed(segment), false);
    }

    /// Tells the owner the last loan that has come from a process that sends no more.
    pub(super) fn say_last(&self, loan: LoanId) {
        self.say(Note::Last(loan), false);
    }

    /// Tells the owner that a part of a loan is re-lent to process `to`, as loan `number`. Returns
    /// false if there is no room for the note now: then the part must not be re-lent.
    fn pass_on(&self, loan: LoanId, to: ProcessId, number: u64, range: &Range<usize>) -> bool {
        let (offset, bytes) = (range.start as u64, range.len() as u64);
        let mut state = self.state.lock();
        state.flush();
        let note = Note::PassedOn { loan, to, number, offset, bytes };
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

    fn say(&self, note: Note, is_awaited: bool) {
        let mut state = self.state.lock();
        state.late.push_back(note);
        state.flush();
        self.unlock(state, is_awaited);
    }

    /// Releases the lock and rings the owner, if it waits or if it should make room.
    fn unlock(&self, mut state: parking_lot::MutexGuard<'_, State>, is_awaited: bool) {
        let is_filling = state.ring.is_half_full();
        drop(state);
        if is_awaited || is_filling {
            self.door.ring(&SystemFutex);
        }
    }

    /// Number of bytes of the peer's memory that are held here.
    pub(super) fn borrowed(&self) -> u64 {
        self.borrowed.load(Ordering::Relaxed)
    }
}

impl State {
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

    fn push(&mut self, note: &Note) -> bool {
        note.push(|kind, bytes| self.ring.push(kind, &[bytes]))
    }
}

/// Borrowed memory of a peer, the owner; given back to it when dropped.
pub(super) struct Borrowed {
    segment: Arc<Segment>,
    range: Range<usize>,
    owner: ProcessId,
    loan: LoanId,
    is_awaited: bool,
    /// Number of messages with parts of this memory that were posted to the owner.
    to_owner: AtomicU64,
    /// The way back to the owner.
    returns: Arc<Returns>,
}

impl Borrowed {
    /// Borrows the memory that process `lender` lends, in `segment`. Returns `None`, and borrows
    /// nothing, if the segment has no such range.
    pub(super) fn new(
        segment: Arc<Segment>,
        lender: ProcessId,
        lent: &Lent,
        returns: &Arc<Returns>,
    ) -> Option<Self> {
        let start = usize::try_from(lent.offset.get()).ok()?;
        let end = start.checked_add(usize::try_from(lent.bytes.get()).ok()?)?;
        if !segment.has(&(start..end)) {
            return None;
        }
        returns.borrowed.fetch_add(lent.bytes.get(), Ordering::Relaxed);
        Some(Self {
            segment,
            range: start..end,
            owner: ProcessId(lent.owner.get()),
            loan: LoanId { lender, number: lent.loan.get() },
            is_awaited: lent.flags.get() & COPY != 0,
            to_owner: AtomicU64::new(0),
            returns: returns.clone(),
        })
    }

    /// The process that owns the memory.
    pub(super) fn owner(&self) -> ProcessId {
        self.owner
    }

    /// The name of the loan at the owner.
    pub(super) fn loan(&self) -> LoanId {
        self.loan
    }

    /// Returns true if `returns` is the channel by which this memory goes back to its owner.
    pub(super) fn goes_back_by(&self, returns: &Arc<Returns>) -> bool {
        Arc::ptr_eq(&self.returns, returns)
    }

    /// Tells the owner that the bytes in `range` of the segment are re-lent to process `to`, as
    /// loan `number`. Called before they are. Returns false if the owner cannot be told now.
    pub(super) fn pass_on(&self, to: ProcessId, number: u64, range: &Range<usize>) -> bool {
        self.returns.pass_on(self.loan, to, number, range)
    }

    /// Counts a message to the owner with a part of this memory. The owner ends the loan only after
    /// it has taken all of them.
    pub(super) fn count_to_owner(&self) {
        // Read when the last holder drops this, which is after all calls.
        self.to_owner.fetch_add(1, Ordering::Relaxed);
    }

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
}

impl Drop for Borrowed {
    fn drop(&mut self) {
        self.returns.borrowed.fetch_sub(self.range.len() as u64, Ordering::Relaxed);
        self.returns.give_back(self.loan, *self.to_owner.get_mut(), self.is_awaited);
    }
}
