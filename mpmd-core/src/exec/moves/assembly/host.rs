//! A shard in host memory that is assembled from pieces.

use std::cell::Cell;
use std::collections::VecDeque;
use std::mem::replace;
use std::sync::Arc;

use mpmd_base::block::Mutex;
use mpmd_device::{
    copy::{contiguous_bytes, copy_part, copy_region},
    sum::add_region,
};
use mpmd_memory::{DividedBuffer, Reservation};
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::router::{Failure, FailureKind};

use super::NewShard;
use crate::exec::moves::transfer::RegionTransfer;
use crate::exec::waits::async_buffer::Resolver;
use crate::exec::{OpGuard, Outcome, Runtime};
use mpmd_layout::aval::DType;
use mpmd_layout::region::Region;

/// A shard in host memory that is assembled from pieces. It is complete when all its pieces are
/// written.
///
/// In a small move, the thread that receives a piece copies it. In larger moves, copy workers do.
///
/// If every piece is contiguous in the shard, each is a part that is written separately. Several
/// parts are written at the same time, and the transport reads directly into them. Otherwise one
/// copy worker at a time works on the shard, outside the lock. So copy workers with pieces of
/// different shards never wait for each other.
///
/// If the source has partial sums, the pieces of the first sum are copied, and those of later sums
/// are added. The sums are added in their order, not in order of arrival, so the result has the
/// same bits every time. Pieces of later sums wait.
pub(crate) struct HostAssembly {
    runtime: Arc<Runtime>,
    op: u64,
    region: Region,
    dtype: DType,
    /// True if every piece is contiguous in the shard and written separately.
    in_parts: bool,
    /// True if the whole move copies few enough bytes on this process for the receiving threads to
    /// copy.
    is_small: bool,
    state: Mutex<HostShardState>,
}

thread_local! {
    /// True while this thread copies a piece of a small move. If the end of the shard then starts
    /// another small move, a copy worker copies its pieces, so that the calls do not nest.
    static COPYING: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as one that copies a piece of a small move, until it is dropped.
struct CopyingMark(());

impl CopyingMark {
    /// Marks this thread. Returns `None` if it is marked already.
    fn begin() -> Option<Self> {
        // The guard is created only here: the drop of another one would take the mark away.
        (!COPYING.replace(true)).then(|| Self(()))
    }
}

impl Drop for CopyingMark {
    fn drop(&mut self) {
        COPYING.set(false);
    }
}

/// The state of a shard and of the pieces that wait for it.
struct HostShardState {
    /// The shard's assembly. `None` once the shard has ended.
    open: Option<OpenHostShard>,
    /// Pieces that have arrived and are not written yet, in order of arrival.
    waiting: VecDeque<QueuedPiece>,
    /// True if a copy worker writes the waiting pieces, or is queued to do so.
    busy: bool,
}

/// A shard that still takes pieces.
struct OpenHostShard {
    resolver: Resolver,
    memory: HostShardMemory,
    /// Number of pieces that are not written yet, indexed by partial sum.
    missing: Vec<usize>,
    /// Index of the partial sum that is being assembled.
    term: usize,
    // Last, so that it is dropped after the memory.
    guard: OpGuard,
}

/// The memory of a shard that still takes pieces.
enum HostShardMemory {
    /// Memory that is reserved. It is allocated when the first piece needs it.
    Reserved(Reservation),
    Here(OwnedBuffer),
    /// Memory that is split into parts. Each part is lent to the writer of its piece.
    Divided(DividedBuffer),
    /// Memory that a copy worker or the transport has taken to write to it.
    Lent,
}

/// A piece that has arrived. The transfer describes its bytes and its destination.
struct QueuedPiece {
    transfer: Arc<RegionTransfer>,
    bytes: SharedBuffer,
    // Last, so that it is dropped after the bytes: threads that wait for memory check it when
    // operations end.
    guard: OpGuard,
}

impl HostAssembly {
    /// Creates a shard. `in_parts` is true if each piece is a separate part of the memory.
    /// `is_small` is true if the threads that receive pieces copy them, because waking a copy
    /// worker would take longer than the copies of the whole move.
    pub(crate) fn new(
        shard: NewShard,
        runtime: Arc<Runtime>,
        dtype: DType,
        in_parts: bool,
        is_small: bool,
    ) -> Arc<Self> {
        let NewShard {
            op,
            region,
            missing,
            reservation,
            resolver,
            guard,
        } = shard;

        let open = OpenHostShard {
            resolver,
            memory: HostShardMemory::Reserved(reservation),
            missing,
            term: 0,
            guard,
        };
        let state = Mutex::new(HostShardState {
            open: Some(open),
            waiting: VecDeque::new(),
            busy: false,
        });
        Arc::new(Self {
            runtime,
            op,
            region,
            dtype,
            in_parts,
            is_small,
            state,
        })
    }

    /// Returns the number of the operation that makes the shard.
    pub(super) fn op(&self) -> u64 {
        self.op
    }

    /// Returns true if the shard still takes pieces.
    pub(crate) fn is_open(&self) -> bool {
        self.state.lock().open.is_some()
    }

    /// Ends the shard with its complete bytes, or with a failure. Drops the waiting pieces.
    pub(crate) fn end(&self, outcome: Outcome) {
        let (open, waiting) = {
            let mut state = self.state.lock();
            (state.open.take(), std::mem::take(&mut state.waiting))
        };
        drop(waiting);
        if let Some(OpenHostShard {
            resolver,
            memory,
            guard,
            ..
        }) = open
        {
            drop(memory);
            resolver.keep(outcome);
            drop(guard);
        }
    }

    /// Takes the shard's memory for a piece that is the whole shard. The caller writes the piece
    /// and [ends](Self::end) the shard. Returns `None` if the piece is smaller or the shard has
    /// ended. Also if there is no memory, which fails the shard.
    pub(crate) fn take_whole(&self, piece: &Region) -> Option<OwnedBuffer> {
        if !self.is_whole(piece) {
            return None;
        }
        let memory = replace(
            &mut self.state.lock().open.as_mut()?.memory,
            HostShardMemory::Lent,
        );
        match self.buffer(memory)? {
            Ok(buffer) => Some(buffer),
            Err(failure) => {
                self.end(Err(failure));
                None
            }
        }
    }

    /// Returns true if the shard is open and `piece` is the only piece that it waits for.
    pub(crate) fn is_whole(&self, piece: &Region) -> bool {
        *piece == self.region
            && self
                .state
                .lock()
                .open
                .as_ref()
                .is_some_and(|open| open.missing == [1])
    }

    /// Returns true if the shard can use the bytes without a copy. Booleans that a peer lends are
    /// copied: the peer can still write them, and a `bool` other than 0 or 1 is undefined
    /// behaviour, even if it was checked before.
    pub(super) fn can_be(&self, bytes: &SharedBuffer) -> bool {
        self.dtype != DType::Bool || !bytes.is_lent()
    }

    /// Copies a piece into the shard: on this thread if the move is small, else on a copy worker.
    /// Does not block.
    pub(crate) fn place(
        self: &Arc<Self>,
        runtime: &Runtime,
        transfer: &Arc<RegionTransfer>,
        bytes: SharedBuffer,
        guard: &OpGuard,
    ) {
        if self.in_parts {
            let assembly = self.clone();
            let transfer = transfer.clone();
            let guard = guard.clone();
            runtime.move_data(Box::new(move || {
                assembly.copy_part(&transfer, &bytes);
                drop(bytes);
                drop(guard);
            }));
        } else if self.queue(transfer, bytes, guard) {
            match CopyingMark::begin().filter(|_| self.is_small) {
                Some(_copying) => self.work(),
                None => {
                    let assembly = self.clone();
                    runtime.move_data(Box::new(move || assembly.work()));
                }
            }
        }
    }

    /// Takes the part of the shard's memory for a piece. The caller writes the piece, then [gives
    /// the part back](Self::give_back). Returns `None` if pieces are not separate parts or the
    /// shard has ended. Also if there is no memory, which fails the shard.
    pub(crate) fn take_part(&self, piece: &Region) -> Option<OwnedBuffer> {
        let run =
            contiguous_bytes(&self.region, piece, self.dtype.size()).filter(|_| self.in_parts)?;

        let mut state = self.state.lock();
        let open = state.open.as_mut()?;
        if let HostShardMemory::Reserved(_) = open.memory {
            match self.buffer(replace(&mut open.memory, HostShardMemory::Lent))? {
                Ok(buffer) => open.memory = HostShardMemory::Divided(DividedBuffer::new(buffer)),
                Err(failure) => {
                    drop(state);
                    self.end(Err(failure));
                    return None;
                }
            }
        }
        let HostShardMemory::Divided(divided) = &mut open.memory else {
            return None;
        };
        divided.part(run)
    }

    /// Gives back a part that now holds its piece. The last part ends the shard.
    pub(crate) fn give_back(&self, part: OwnedBuffer) {
        drop(part);
        let mut state = self.state.lock();
        let Some(open) = state.open.as_mut() else {
            return;
        };
        open.missing[0] -= 1;
        if open.missing[0] > 0 {
            return;
        }

        if let HostShardMemory::Divided(divided) = replace(&mut open.memory, HostShardMemory::Lent)
        {
            drop(state);
            // The last part is back, so the shard is complete.
            let whole = divided.join().map_err(|_| {
                let message = format!("operation {}: a part of the shard is still in use", self.op);
                Arc::new(Failure::new(
                    FailureKind::Memory,
                    self.runtime.me,
                    self.op,
                    message,
                ))
            });
            self.end(whole.map(OwnedBuffer::freeze));
        }
    }

    fn copy_part(&self, transfer: &RegionTransfer, bytes: &[u8]) {
        let Some(mut part) = self.take_part(&transfer.region) else {
            return;
        };
        let RegionTransfer { region, holds, .. } = transfer;
        let item = self.dtype.size();
        let written = self.region.elements() * item;
        copy_part(bytes, holds, &mut part, region, region, item, written);
        self.give_back(part);
    }

    /// Queues a piece. Returns true if no copy worker writes to the shard: the caller must then
    /// start one.
    fn queue(&self, transfer: &Arc<RegionTransfer>, bytes: SharedBuffer, guard: &OpGuard) -> bool {
        let piece = QueuedPiece {
            transfer: transfer.clone(),
            bytes,
            guard: guard.clone(),
        };
        let mut state = self.state.lock();
        if state.open.is_none() {
            drop(state);
            drop(piece);
            return false;
        }
        state.waiting.push_back(piece);
        !replace(&mut state.busy, true)
    }

    /// Copies or adds the queued pieces of the current partial sum to the shard until none is left.
    /// Ends the shard after its last piece.
    fn work(&self) {
        while let Some((piece, memory)) = self.next_piece() {
            let Some(buffer) = self.buffer(memory) else {
                return;
            };
            let mut buffer = match buffer {
                Ok(buffer) => buffer,
                Err(failure) => return self.end(Err(failure)),
            };

            let QueuedPiece {
                transfer,
                bytes,
                guard,
            } = piece;
            self.write_piece(&transfer, &bytes, &mut buffer);
            drop(bytes);
            self.finish_piece(transfer.term, buffer);
            drop(guard);
        }
    }

    /// Takes the next piece of the current partial sum, and the shard's memory. Returns `None` if
    /// no such piece waits, or the shard has ended.
    fn next_piece(&self) -> Option<(QueuedPiece, HostShardMemory)> {
        let mut state = self.state.lock();
        let HostShardState {
            open: Some(open),
            waiting,
            busy,
        } = &mut *state
        else {
            return None;
        };
        let mut pieces = waiting.iter();
        let Some(at) = pieces.position(|piece| piece.transfer.term == open.term) else {
            *busy = false;
            return None;
        };
        // Nearly always the first piece.
        let piece = waiting.remove(at)?;
        Some((piece, replace(&mut open.memory, HostShardMemory::Lent)))
    }

    /// Writes a piece to the shard: copies a piece of the first partial sum, adds one of a later
    /// sum.
    fn write_piece(&self, transfer: &RegionTransfer, bytes: &[u8], buffer: &mut [u8]) {
        let RegionTransfer {
            term,
            region,
            holds,
            ..
        } = transfer;
        // invariant: same-bits
        if *term == 0 {
            let item = self.dtype.size();
            copy_region(bytes, holds, buffer, &self.region, region, item);
        } else {
            add_region(bytes, holds, buffer, &self.region, region, self.dtype);
        }
    }

    /// Notes that a piece is written, and returns the memory to the shard. Ends the shard after its
    /// last piece.
    fn finish_piece(&self, term: usize, buffer: OwnedBuffer) {
        let mut state = self.state.lock();
        let Some(open) = state.open.as_mut() else {
            drop(state);
            drop(buffer);
            return;
        };
        open.missing[term] -= 1;
        if open.missing[term] == 0 {
            open.term += 1;
        }
        if open.term < open.missing.len() {
            open.memory = HostShardMemory::Here(buffer);
        } else {
            drop(state);
            self.end(Ok(buffer.freeze()));
        }
    }

    /// Returns the memory as one buffer, allocated now if needed. `None` if another thread writes
    /// to it.
    fn buffer(&self, memory: HostShardMemory) -> Option<Result<OwnedBuffer, Arc<Failure>>> {
        match memory {
            HostShardMemory::Reserved(reservation) => {
                let failed = |error| self.runtime.out_of_memory(self.op, &error);
                Some(reservation.allocate().map_err(failed))
            }
            HostShardMemory::Here(buffer) => Some(Ok(buffer)),
            HostShardMemory::Divided(_) | HostShardMemory::Lent => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_marks_leave_the_mark_of_the_outer_copy() {
        let outer = CopyingMark::begin().unwrap();
        assert!(CopyingMark::begin().is_none() && CopyingMark::begin().is_none());
        drop(outer);
        assert!(CopyingMark::begin().is_some());
        assert!(
            CopyingMark::begin().is_some(),
            "the mark ends with its guard"
        );
    }
}
