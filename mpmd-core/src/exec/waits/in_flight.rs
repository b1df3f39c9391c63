//! The operations that this process has issued and that have not ended: how far its program runs
//! ahead.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use mpmd_base::block::{Condvar, Instant, Mutex};
use mpmd_proto::Failure;

use crate::exec::waits::async_buffer::{AsyncBuffer, Resolver};
use crate::trace::Trace;
use mpmd_layout::reshard;
use mpmd_record::trace::TraceEventKind;
use tracing::Span;

/// Counts the operations that have a part on this process and have not ended.
#[derive(Default)]
pub(crate) struct InFlight {
    state: Mutex<InFlightState>,
    changed: Condvar,
    at_last_begin: AtLastBegin,
    trace: Trace,
}

/// The counts at the begin of the last operation, with payloads that are [left](LeftBehind) at
/// peers. Since then operations can only have ended, so the present counts are at most slightly
/// higher: if an operation left payloads at several peers. The program reads this before each
/// operation; the alignment keeps it off cache lines that other threads write.
#[derive(Default)]
#[repr(align(128))]
struct AtLastBegin {
    ops: AtomicUsize,
    bytes: AtomicU64,
}

/// The operations that have not ended.
#[derive(Default)]
struct InFlightState {
    counts: OpCounts,
    /// Open operations by ascending number, and some that have ended.
    open: VecDeque<OpenOperation>,
}

/// An operation that has not ended.
struct OpenOperation {
    op: u64,
    bytes: u64,
    /// Number of the operation's guards; 0 once it has ended.
    parts: usize,
    /// The sends that the program can wait for, by result of the operation, until they have ended.
    sends: Vec<ResultSends>,
    /// The span of the operation in the program's log, if the log records spans.
    span: Option<Span>,
}

/// This process's sends of one result of an operation. The entry exists until the last piece has
/// left or one has failed.
struct ResultSends {
    result: u32,
    missing: usize,
    resolver: Resolver,
}

impl OpenOperation {
    /// Removes and returns the sends of a result if `ended` returns true for them. Otherwise
    /// returns `None`.
    fn take_sends(
        &mut self,
        result: u32,
        ended: impl FnOnce(&mut ResultSends) -> bool,
    ) -> Option<ResultSends> {
        let at = self.sends.iter().position(|sends| sends.result == result)?;
        ended(&mut self.sends[at]).then(|| self.sends.swap_remove(at))
    }
}

impl InFlightState {
    /// Returns the entry of operation `op`, which must not have ended.
    fn find(&mut self, op: u64) -> Option<&mut OpenOperation> {
        // Mostly the operation that was issued last, or the oldest one.
        let last = self.open.len().checked_sub(1)?;
        let at = [last, 0].into_iter().find(|at| self.open[*at].op == op);
        let at = at.unwrap_or_else(|| self.open.partition_point(|open| open.op < op));
        self.open.get_mut(at)
    }

    /// Notes that an operation with `bytes` of new memory has ended.
    fn end(&mut self, bytes: u64) {
        self.counts.ops -= 1;
        self.counts.bytes -= bytes;
        self.counts.ended += 1;
        while self.open.front().is_some_and(|open| open.parts == 0) {
            self.open.pop_front();
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OpCounts {
    pub(crate) ops: usize,
    pub(crate) bytes: u64,
    /// Bytes of this process's memory that are lent to peers.
    pub(crate) lent: u64,
    /// Number of payloads that peers hold until they issue the receiving operation. The next field
    /// has their bytes. The sending operations may have ended on this process.
    pub(crate) left: usize,
    pub(crate) left_bytes: u64,
    /// Number of reads of arrays in progress. The operations that made the arrays may have ended.
    pub(crate) reads: usize,
    /// Number of operations ended and loans returned so far.
    pub(crate) ended: u64,
}

/// The amount of issued work that devices and peers have not caught up with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AheadOf {
    pub(crate) ops: usize,
    pub(crate) bytes: u64,
}

impl OpCounts {
    /// Returns the number and bytes of operations that have not ended. Includes payloads that peers
    /// hold.
    pub(crate) fn ahead(&self) -> AheadOf {
        AheadOf {
            ops: self.ops + self.left,
            bytes: self.bytes + self.left_bytes,
        }
    }
}

/// Memory of this process that is lent to a peer. Dropping it ends the loan in the counts.
pub(crate) struct OnLoan {
    bytes: u64,
    in_flight: Arc<InFlight>,
}

/// A payload that has left this process and that the peer has not taken. Dropping it ends the
/// count.
pub(crate) struct LeftBehind {
    bytes: u64,
    in_flight: Arc<InFlight>,
}

/// A read of an array in progress. Dropping it ends the read in the counts.
pub(crate) struct Reading(Arc<InFlight>);

/// The operation number of a guard that was released before its drop.
const RELEASED: u64 = u64::MAX;

/// A guard that every part of an operation holds. The operation ends when the last guard is
/// dropped.
///
/// Drop it after the operation's buffers: threads that wait for memory retry when operations end.
pub(crate) struct OpGuard {
    op: u64,
    /// Index of the operation's result to which the part belongs; 0 if it has only one result.
    result: u32,
    /// The program's rolling hash up to the operation.
    hash: u128,
    in_flight: Arc<InFlight>,
}

impl InFlight {
    /// Creates an `InFlight` that records the end of every operation in `trace`.
    pub(crate) fn traced(trace: Trace) -> Self {
        Self {
            trace,
            ..Self::default()
        }
    }

    /// Counts operation `op` as in flight, with `bytes` of new memory, until all clones of the
    /// returned guard are dropped. `hash` is the program's rolling hash up to the operation.
    pub(crate) fn begin(self: &Arc<Self>, op: u64, hash: u128, bytes: u64) -> OpGuard {
        let mut state = self.state.lock();
        state.counts.ops += 1;
        state.counts.bytes += bytes;
        let new = OpenOperation {
            op,
            bytes,
            parts: 1,
            sends: Vec::new(),
            span: None,
        };

        // The list is ascending; nearly always the new operation is the last.
        match state.open.back() {
            Some(last) if last.op >= op => {
                let at = state.open.partition_point(|before| before.op < op);
                state.open.insert(at, new);
            }
            _ => state.open.push_back(new),
        }

        let AheadOf { ops, bytes } = state.counts.ahead();
        self.at_last_begin.ops.store(ops, Ordering::Relaxed);
        self.at_last_begin.bytes.store(bytes, Ordering::Relaxed);
        OpGuard {
            op,
            result: 0,
            hash,
            in_flight: self.clone(),
        }
    }

    /// Sets the span of operation `op`, which has not ended. It is closed when the operation ends.
    pub(crate) fn set_span(&self, op: u64, span: Span) {
        if let Some(open) = self.state.lock().find(op).filter(|open| open.op == op) {
            open.span = Some(span);
        }
    }

    /// Returns the span of operation `op`, or `None` if it has none or has ended.
    pub(crate) fn span(&self, op: u64) -> Option<Span> {
        let mut state = self.state.lock();
        state
            .find(op)
            .filter(|open| open.op == op)
            .and_then(|open| open.span.clone())
    }

    /// Counts `bytes` of this process's memory as lent, until the returned object is dropped. No
    /// operation waits for the return of lent bytes: the peer may keep them as long as it likes.
    pub(crate) fn lend(self: &Arc<Self>, bytes: u64) -> OnLoan {
        self.state.lock().counts.lent += bytes;
        OnLoan {
            bytes,
            in_flight: self.clone(),
        }
    }

    /// Counts a read of an array as in progress until the returned object is dropped. A program
    /// that finishes waits for the read.
    pub(crate) fn reading(self: &Arc<Self>) -> Reading {
        self.state.lock().counts.reads += 1;
        Reading(self.clone())
    }

    pub(crate) fn counts(&self) -> OpCounts {
        self.state.lock().counts
    }

    /// Returns upper bounds for the operations and bytes of [`OpCounts::ahead`]. Takes no lock.
    /// Only for the thread that begins operations.
    pub(crate) fn at_most(&self) -> (usize, u64) {
        let AtLastBegin { ops, bytes } = &self.at_last_begin;
        (ops.load(Ordering::Relaxed), bytes.load(Ordering::Relaxed))
    }

    /// Returns the number of the first operation that has not ended, or `None` if all have.
    pub(crate) fn first_open(&self) -> Option<u64> {
        self.state.lock().open.front().map(|open| open.op)
    }

    /// Returns the counts, and true if an operation before `op` has not ended.
    pub(crate) fn counts_before(&self, op: u64) -> (OpCounts, bool) {
        let state = self.state.lock();
        (
            state.counts,
            state.open.front().is_some_and(|first| first.op < op),
        )
    }

    /// Blocks until `enough` returns true for the counts. Returns false after `deadline`.
    pub(crate) fn wait_until(&self, deadline: Instant, enough: impl Fn(&OpCounts) -> bool) -> bool {
        let mut state = self.state.lock();
        while !enough(&state.counts) {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return enough(&state.counts);
            }
        }
        true
    }
}

impl OnLoan {
    /// Counts the lent bytes as held by a peer that has not taken them, even if they were copied
    /// there.
    pub(crate) fn left_behind(&self) -> LeftBehind {
        let mut state = self.in_flight.state.lock();
        state.counts.left += 1;
        state.counts.left_bytes += self.bytes;
        LeftBehind {
            bytes: self.bytes,
            in_flight: self.in_flight.clone(),
        }
    }
}

impl Drop for LeftBehind {
    fn drop(&mut self) {
        let mut state = self.in_flight.state.lock();
        state.counts.left -= 1;
        state.counts.left_bytes -= self.bytes;
        self.in_flight.changed.notify_all();
    }
}

impl OpGuard {
    /// Returns the program's rolling hash up to the operation, which the router may no longer have.
    pub(crate) fn hash(&self) -> u128 {
        self.hash
    }

    /// Returns the number of the operation.
    pub(crate) fn op(&self) -> u64 {
        self.op
    }

    /// Returns a guard of the same operation for parts of the result with this index.
    pub(crate) fn of_result(&self, result: u32) -> Self {
        let mut guard = self.clone();
        guard.result = result;
        guard
    }

    /// Returns the identity of a piece of the guard's result in messages and traces: (operation,
    /// piece number). `id` is the piece's number in the plan of the result's move.
    pub(crate) fn key(&self, id: u64) -> (u64, u64) {
        (self.op, reshard::joined(id, self.result))
    }

    /// Registers `pieces` sends of the guard's result. Returns an async buffer without bytes. It
    /// ends when every piece is [sent](Self::sent), or with the first failure.
    pub(crate) fn expect_sends(&self, pieces: usize) -> AsyncBuffer {
        let (resolver, slot) = AsyncBuffer::new();
        if let Some(open) = self.in_flight.state.lock().find(self.op) {
            open.sends.push(ResultSends {
                result: self.result,
                missing: pieces,
                resolver,
            });
        }
        slot
    }

    /// Drops the guard of a piece that was taken by its receiver or copied out, and counts the
    /// piece as sent.
    pub(crate) fn sent(mut self) {
        self.release(true);
    }

    /// Fails the sends of the guard's result, unless they have ended.
    pub(crate) fn fail_sends(&self, failure: &Arc<Failure>) {
        let mut state = self.in_flight.state.lock();
        let open = state.find(self.op);
        let sends = open.and_then(|open| open.take_sends(self.result, |_| true));
        drop(state);
        if let Some(ResultSends { resolver, .. }) = sends {
            resolver.keep(Err(failure.clone()));
        }
    }

    /// Removes this part of the operation. The last part ends the operation. `sent` is true if the
    /// part was a piece that has left.
    fn release(&mut self, sent: bool) {
        let op = std::mem::replace(&mut self.op, RELEASED);
        let mut state = self.in_flight.state.lock();
        let Some(open) = state.find(op) else { return };
        let left = sent.then(|| {
            open.take_sends(self.result, |sends| {
                sends.missing -= 1;
                sends.missing == 0
            })
        });
        open.parts -= 1;

        let mut abandoned = Vec::new();
        let mut span = None;
        if open.parts == 0 {
            abandoned = std::mem::take(&mut open.sends);
            span = open.span.take();
            let bytes = open.bytes;
            state.end(bytes);
            // Under the lock: a thread that finds no open operation may end the trace.
            self.in_flight.trace.note(|| TraceEventKind::Over { op });
            self.in_flight.changed.notify_all();
        }
        drop(state);

        drop(span);
        if let Some(ResultSends { resolver, .. }) = left.flatten() {
            resolver.keep(Ok(Vec::new().into()));
        }
        // Their resolvers fail the sends.
        drop(abandoned);
    }
}

impl Clone for OpGuard {
    fn clone(&self) -> Self {
        if let Some(open) = self.in_flight.state.lock().find(self.op) {
            open.parts += 1;
        }
        Self {
            op: self.op,
            result: self.result,
            hash: self.hash,
            in_flight: self.in_flight.clone(),
        }
    }
}

impl Drop for OpGuard {
    fn drop(&mut self) {
        // invariant: memory-outlives-operation
        if self.op != RELEASED {
            self.release(false);
        }
    }
}

impl Drop for OnLoan {
    fn drop(&mut self) {
        let mut state = self.in_flight.state.lock();
        state.counts.lent -= self.bytes;
        state.counts.ended += 1;
        self.in_flight.changed.notify_all();
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.0.state.lock().counts.reads -= 1;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use mpmd_base::block::thread;

    use super::*;

    #[test]
    fn operation_ends_with_its_last_guard() {
        let in_flight = Arc::new(InFlight::default());
        let guard = in_flight.begin(7, 0, 10);
        let other = guard.clone();
        drop(guard);
        assert!(in_flight.counts_before(8).1 && !in_flight.counts_before(7).1);
        let soon = || Instant::now() + Duration::from_millis(5);
        assert!(!in_flight.wait_until(soon(), |counts| counts.ops == 0));
        assert_eq!(in_flight.counts().bytes, 10);
        let thread = thread::spawn(move || drop(other));
        let deadline = Instant::now() + Duration::from_secs(10);
        assert!(in_flight.wait_until(deadline, |counts| counts.ops == 0));
        thread.join().unwrap();
        let (counts, before) = in_flight.counts_before(8);
        assert_eq!((counts.ended, before), (1, false));
    }

    #[test]
    fn sends_end_with_the_last_piece_or_the_first_failure() {
        let in_flight = Arc::new(InFlight::default());
        let begin = |pieces| {
            let guard = in_flight.begin(3, 0, 0);
            let slot = guard.expect_sends(pieces);
            (guard, slot)
        };
        let (guard, slot) = begin(2);
        guard.clone().sent();
        drop(guard.clone());
        assert!(!slot.has_ended(), "one piece is missing");
        guard.sent();
        assert!(slot.peek().is_some_and(|outcome| outcome.is_ok()));
        let (guard, slot) = begin(2);
        let failure = Failure::new(
            mpmd_proto::FailureKind::Kernel,
            mpmd_base::ProcessId(0),
            3,
            "",
        );
        guard.fail_sends(&Arc::new(failure));
        assert!(slot.peek().is_some_and(|outcome| outcome.is_err()));
        guard.clone().sent();
        guard.sent();
        // An operation that ends without them was abandoned.
        let (guard, slot) = begin(1);
        drop(guard);
        assert!(slot.peek().is_some_and(|outcome| outcome.is_err()));
        assert_eq!(in_flight.counts().ops, 0);
    }

    #[test]
    fn first_open_is_right_for_any_order_of_ends() {
        let in_flight = Arc::new(InFlight::default());
        let mut guards: Vec<_> = (1..=4)
            .map(|op| Some(in_flight.begin(op * 10, 0, op)))
            .collect();
        assert_eq!(in_flight.at_most(), (4, 10));
        for (ended, first) in [(1, Some(10)), (0, Some(30)), (3, Some(30)), (2, None)] {
            guards[ended] = None;
            assert_eq!(in_flight.first_open(), first);
        }
        assert_eq!(
            (in_flight.counts().ops, in_flight.at_most()),
            (0, (4, 10)),
            "a bound, not the count"
        );
        let _guard = in_flight.begin(50, 0, 1);
        assert_eq!(in_flight.at_most(), (1, 1));
    }

    #[test]
    fn returned_loans_wake_waiters_and_hold_no_operation() {
        let in_flight = Arc::new(InFlight::default());
        let loans = [in_flight.lend(10), in_flight.lend(5)];
        let before = in_flight.counts();
        assert_eq!((before.lent, before.ops), (15, 0));
        let thread = thread::spawn(move || drop(loans));
        let deadline = Instant::now() + Duration::from_secs(10);
        assert!(in_flight.wait_until(deadline, |counts| counts.ended == before.ended + 2));
        thread.join().unwrap();
        assert_eq!(in_flight.counts().lent, 0);
    }
}
