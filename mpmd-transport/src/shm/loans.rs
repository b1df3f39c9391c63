//! Borrowed memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::foreign_memory::ForeignMemory;
use super::note::LoanId;
use super::record::{COPY, LoanRecord};
use super::returns::ReturnPath;
use mpmd_memory::{DevicePlace, Fence, Loan, Segment, SegmentPosition};
use mpmd_proto::wire::ProcessId;

/// Memory that this process has borrowed from a peer, the owner. Dropping it returns the loan.
pub(super) struct BorrowedMemory {
    segment: Arc<Segment>,
    range: Range<usize>,
    owner: ProcessId,
    loan: LoanId,
    is_awaited: bool,
    /// Number of messages to the owner that contained parts of this memory.
    to_owner: AtomicU64,
    /// The ring through which the memory is returned to the owner.
    returns: Arc<ReturnPath>,
}

impl BorrowedMemory {
    /// Borrows the range of `segment` that the process `lender` lends. Returns `None`, and borrows
    /// nothing, if the segment has no such range.
    pub(super) fn new(
        segment: Arc<Segment>,
        lender: ProcessId,
        lent: &LoanRecord,

        returns: &Arc<ReturnPath>,
    ) -> Option<Self> {
        let start = usize::try_from(lent.offset.get()).ok()?;
        let end = start.checked_add(usize::try_from(lent.bytes.get()).ok()?)?;
        if !segment.has(&(start..end)) {
            return None;
        }
        returns
            .borrowed
            .fetch_add(lent.bytes.get(), Ordering::Relaxed);

        Some(Self {
            segment,
            range: start..end,
            owner: ProcessId(lent.owner.get()),
            loan: LoanId {
                lender,
                number: lent.loan.get(),
            },
            is_awaited: lent.flags.get() & COPY != 0,
            to_owner: AtomicU64::new(0),
            returns: returns.clone(),
        })
    }

    /// Returns the process that owns the memory.
    pub(super) fn owner(&self) -> ProcessId {
        self.owner
    }

    /// Returns the id under which the owner knows the loan.
    pub(super) fn loan(&self) -> LoanId {
        self.loan
    }

    /// Returns true if this memory is returned to its owner through `returns`.
    pub(super) fn goes_back_by(&self, returns: &Arc<ReturnPath>) -> bool {
        Arc::ptr_eq(&self.returns, returns)
    }

    /// Tells the owner that this process will lend the bytes at `range` of the segment to the
    /// process `to`, as loan `number`. Call it before that loan. Returns false if the owner cannot
    /// be told now.
    pub(super) fn pass_on(&self, to: ProcessId, number: u64, range: &Range<usize>) -> bool {
        self.returns.pass_on(self.loan, to, number, range)
    }

    /// Counts a message to the owner with a part of this memory. The owner ends the loan only after
    /// it has received all such messages.
    pub(super) fn count_to_owner(&self) {
        // Read when the last holder drops this, which is after all calls.
        self.to_owner.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns a fence that fails once the owner has exited and its memory is lost. `None` for host
    /// memory.
    pub(super) fn life(&self) -> Option<Arc<dyn Fence>> {
        ForeignMemory::life(&self.segment)
    }
}

impl Loan for BorrowedMemory {
    fn bytes(&self) -> &[u8] {
        // The range was checked by `new`, and segments do not shrink.
        self.segment.lent(self.range.clone()).unwrap_or_default()
    }

    fn device(&self) -> Option<DevicePlace> {
        let memory = self.segment.device()?;
        let address = memory.address() + self.range.start as u64;
        Some(DevicePlace {
            device: memory.device(),
            address,
            bytes: self.range.len(),
        })
    }

    fn is_far(&self) -> bool {
        self.segment.device().is_some_and(|memory| memory.is_far())
    }

    fn is_limited(&self) -> bool {
        self.is_awaited
    }

    fn place(&self) -> Option<SegmentPosition> {
        Some(SegmentPosition {
            segment: self.segment.clone(),
            offset: self.range.start,
        })
    }
}

impl Drop for BorrowedMemory {
    fn drop(&mut self) {
        self.returns
            .borrowed
            .fetch_sub(self.range.len() as u64, Ordering::Relaxed);
        self.returns
            .give_back(self.loan, *self.to_owner.get_mut(), self.is_awaited);
    }
}
