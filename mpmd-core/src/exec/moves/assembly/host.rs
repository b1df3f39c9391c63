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
use crate::exec::moves::transfer::Transfer;
use crate::exec::waits::async_buffer::Resolver;
use crate::exec::{OpGuard, Outcome, Runtime};
use mpmd_layout::aval::DType;
use mpmd_layout::region::Region;

/// A shard in host memory that is assembled from pieces. It is complete when all its pieces are in
/// place.
///
/// Pieces of small moves are copied by the thread that brings them. For larger moves copy workers
/// do so.
///
/// If every piece is contiguous in the shard, each is a part that is written separately. Several
/// parts are written at the same time, and the transport reads directly into them. Otherwise one
/// copy worker at a time works on the shard, outside the lock. So copy workers with pieces of
/// different shards never wait for each other.
///
/// If the source has partial sums, the pieces of the first are copied and those of the others are
/// added. The sums are added in their order, not in order of arrival, so the result has the same
/// bits every time. Early pieces wait.
pub(crate) struct HostAssembly {
    runtime: Arc<Runtime>,
    op: u64,
    region: Region,
    dtype: DType,
    /// True if every piece is a separate part.
    in_parts: bool,
    /// True if the whole move is small on this process.
    is_small: bool,
    state: Mutex<State>,
}

thread_local! {
    /// True while this thread copies a piece of a small move. The end of the shard may start the
    /// next of a chain of moves; a copy worker goes on then, so that the calls do not nest.
    static COPYING: Cell<bool> = const { Cell::new(false) };
}

/// Marks this thread as one that copies a piece of a small move, until it is dropped.
struct Copying(());

impl Copying {
    /// Returns `None` if this thread is marked already.
    fn begin() -> Option<Self> {
        // The guard is created only here: the drop of another one would take the mark away.
        (!COPYING.replace(true)).then(|| Self(()))
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        COPYING.set(false);
    }
}

struct State {
    /// `None` once the shard has ended.
    open: Option<Open>,
    /// Pieces that have arrived and are not in place yet, in order of arrival.
    waiting: VecDeque<Piece>,
    /// True if a copy worker works on the waiting pieces, or soon will.
    busy: bool,
}

struct Open {
    resolver: Resolver,
    memory: Memory,
    /// By partial sum: the number of pieces that are not in place yet.
    missing: Vec<usize>,
    /// Index of the partial sum that is being assembled.
    term: usize,
    // Last, so that it is dropped after the memory.
    guard: OpGuard,
}

enum Memory {
    /// Reserved until the first piece needs it.
    Reserved(Reservation),
    Here(OwnedBuffer),
    /// Split into parts, which are lent to those that write pieces.
    Divided(DividedBuffer),
    /// Taken by a copy worker or the transport, which writes to it.
    Lent,
}

/// A piece that has arrived. The transfer describes its bytes and its destination.
struct Piece {
    transfer: Arc<Transfer>,
    bytes: SharedBuffer,
    // Last, so that it is dropped after the bytes: threads that wait for memory check it when
    // operations end.
    guard: OpGuard,
}

impl HostAssembly {
    /// Creates a shard. `in_parts` is true if each piece is a separate part of the memory.
    /// `is_small` is true if the threads that bring pieces copy them: the copies of the whole move
    /// take less time than waking a copy worker.
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
        let open = Open {
            resolver,
            memory: Memory::Reserved(reservation),
            missing,
            term: 0,
            guard,
        };
        let state = State {
            open: Some(open),
            waiting: VecDeque::new(),
            busy: false,
        };
        let state = Mutex::new(state);
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

    /// True if the shard still takes pieces.
    pub(crate) fn is_open(&self) -> bool {
        self.state.lock().open.is_some()
    }

    /// Ends the shard with its complete bytes, or with a failure. Drops the pieces that wait.
    pub(crate) fn end(&self, outcome: Outcome) {
        let (open, waiting) = {
            let mut state = self.state.lock();
            (state.open.take(), std::mem::take(&mut state.waiting))
        };
        drop(waiting);
        if let Some(Open {
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

    /// Takes the memory of the whole shard for a piece that is all of it. The caller writes it and
    /// [ends](Self::end) the shard. `None` if the piece is smaller or the shard has ended. Also if
    /// there is no memory, which fails the shard.
    pub(crate) fn take_whole(&self, piece: &Region) -> Option<OwnedBuffer> {
        if !self.is_whole(piece) {
            return None;
        }
        let memory = replace(&mut self.state.lock().open.as_mut()?.memory, Memory::Lent);
        match self.buffer(memory)? {
            Ok(buffer) => Some(buffer),
            Err(failure) => {
                self.end(Err(failure));
                None
            }
        }
    }

    /// True if the shard is open and `piece` is all that it waits for.
    pub(crate) fn is_whole(&self, piece: &Region) -> bool {
        *piece == self.region
            && self
                .state
                .lock()
                .open
                .as_ref()
                .is_some_and(|open| open.missing == [1])
    }

    /// True if the shard can use the bytes without a copy. Bools that a peer lends are copied. The
    /// peer can still write them, and a `bool` that is neither 0 nor 1 is undefined behaviour even
    /// if it was checked before.
    pub(super) fn can_be(&self, bytes: &SharedBuffer) -> bool {
        self.dtype != DType::Bool || !bytes.is_lent()
    }

    /// Copies a piece to its place: on this thread if the move is small, else on a copy worker.
    /// Does not block.
    pub(crate) fn place(
        self: &Arc<Self>,
        runtime: &Runtime,
        transfer: &Arc<Transfer>,
        bytes: SharedBuffer,
        guard: &OpGuard,
    ) {
        if self.in_parts {
            let (assembly, transfer, guard) = (self.clone(), transfer.clone(), guard.clone());
            runtime.move_data(Box::new(move || {
                assembly.copy_part(&transfer, &bytes);
                drop(bytes);
                drop(guard);
            }));
        } else if self.queue(transfer, bytes, guard) {
            match Copying::begin().filter(|_| self.is_small) {
                Some(_copying) => self.work(),
                None => {
                    let assembly = self.clone();
                    runtime.move_data(Box::new(move || assembly.work()));
                }
            }
        }
    }

    /// Takes the part of the shard for a piece. The caller writes it, then [gives it
    /// back](Self::give_back). `None` if pieces are not separate parts, or the shard has ended.
    /// Also if there is no memory, which fails the shard.
    pub(crate) fn take_part(&self, piece: &Region) -> Option<OwnedBuffer> {
        let run =
            contiguous_bytes(&self.region, piece, self.dtype.size()).filter(|_| self.in_parts)?;
        let mut state = self.state.lock();
        let open = state.open.as_mut()?;
        if let Memory::Reserved(_) = open.memory {
            match self.buffer(replace(&mut open.memory, Memory::Lent))? {
                Ok(buffer) => open.memory = Memory::Divided(DividedBuffer::new(buffer)),
                Err(failure) => {
                    drop(state);
                    self.end(Err(failure));
                    return None;
                }
            }
        }
        let Memory::Divided(divided) = &mut open.memory else {
            return None;
        };
        divided.part(run)
    }

    /// Gives back a part that now holds its piece. After the last one the shard ends.
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
        if let Memory::Divided(divided) = replace(&mut open.memory, Memory::Lent) {
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

    fn copy_part(&self, transfer: &Transfer, bytes: &[u8]) {
        let Some(mut part) = self.take_part(&transfer.region) else {
            return;
        };
        let Transfer { region, holds, .. } = transfer;
        let (item, written) = (
            self.dtype.size(),
            self.region.elements() * self.dtype.size(),
        );
        copy_part(bytes, holds, &mut part, region, region, item, written);
        self.give_back(part);
    }

    /// Queues a piece. Returns true if no copy worker works on the shard: the caller must then
    /// start one.
    fn queue(&self, transfer: &Arc<Transfer>, bytes: SharedBuffer, guard: &OpGuard) -> bool {
        let piece = Piece {
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
        loop {
            let (piece, memory) = {
                let mut state = self.state.lock();
                let State {
                    open: Some(open),
                    waiting,
                    busy,
                } = &mut *state
                else {
                    return;
                };
                let Some(at) = waiting
                    .iter()
                    .position(|piece| piece.transfer.term == open.term)
                else {
                    *busy = false;
                    return;
                };
                // Nearly always the first piece.
                let Some(piece) = waiting.remove(at) else {
                    return;
                };
                (piece, replace(&mut open.memory, Memory::Lent))
            };
            let Some(buffer) = self.buffer(memory) else {
                return;
            };
            let mut buffer = match buffer {
                Ok(buffer) => buffer,
                Err(failure) => return self.end(Err(failure)),
            };
            let Piece {
                transfer,
                bytes,
                guard,
            } = piece;
            let Transfer {
                term,
                region,
                holds,
                ..
            } = &*transfer;
            if *term == 0 {
                copy_region(
                    &bytes,
                    holds,
                    &mut buffer,
                    &self.region,
                    region,
                    self.dtype.size(),
                );
            } else {
                add_region(&bytes, holds, &mut buffer, &self.region, region, self.dtype);
            }
            drop(bytes);
            let mut state = self.state.lock();
            match state.open.as_mut() {
                None => {
                    drop(state);
                    drop(buffer);
                }
                Some(open) => {
                    open.missing[*term] -= 1;
                    if open.missing[*term] == 0 {
                        open.term += 1;
                    }
                    if open.term < open.missing.len() {
                        open.memory = Memory::Here(buffer);
                    } else {
                        drop(state);
                        self.end(Ok(buffer.freeze()));
                    }
                }
            }
            drop(guard);
        }
    }

    fn buffer(&self, memory: Memory) -> Option<Result<OwnedBuffer, Arc<Failure>>> {
        match memory {
            Memory::Reserved(reservation) => {
                let failed = |error| self.runtime.out_of_memory(self.op, &error);
                Some(reservation.allocate().map_err(failed))
            }
            Memory::Here(buffer) => Some(Ok(buffer)),
            Memory::Divided(_) | Memory::Lent => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_marks_leave_the_mark_of_the_outer_copy() {
        let outer = Copying::begin().unwrap();
        assert!(Copying::begin().is_none() && Copying::begin().is_none());
        drop(outer);
        assert!(Copying::begin().is_some());
        assert!(Copying::begin().is_some(), "the mark ends with its guard");
    }
}
