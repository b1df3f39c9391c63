//! A shard that is put together from pieces.

use std::sync::Arc;

use mpmd_transport::memory::{ALIGNMENT, Reservation};
use mpmd_transport::router::{Failure, FailureKind};
use mpmd_transport::{OwnedBuffer, Payload, ProcessId, SharedBuffer};
use parking_lot::Mutex;

use super::slot::Promise;
use super::{OpGuard, Outcome, Runtime};
use crate::region::Region;
use crate::reshard::copy_region;

/// A shard of one device, incomplete until all its pieces have come.
pub(crate) struct Assembly {
    op: u64,
    region: Region,
    item_bytes: usize,
    state: Mutex<State>,
}

struct State {
    /// `None` once the shard has ended.
    open: Option<Open>,
}

struct Open {
    promise: Promise,
    /// Memory set aside, until the first piece needs it.
    reservation: Option<Reservation>,
    buffer: Option<OwnedBuffer>,
    missing: usize,
    // Last, so that it is dropped after the memory.
    guard: OpGuard,
}

impl Assembly {
    /// A shard of `region` that `pieces` pieces will fill.
    pub(crate) fn new(
        op: u64,
        region: Region,
        item_bytes: usize,
        pieces: usize,
        reservation: Reservation,
        promise: Promise,
        guard: OpGuard,
    ) -> Arc<Self> {
        let open = Open { promise, reservation: Some(reservation), buffer: None, missing: pieces, guard };
        Arc::new(Self { op, region, item_bytes, state: Mutex::new(State { open: Some(open) }) })
    }

    /// Ends the shard with what is the whole of it, or with a failure.
    pub(crate) fn end(&self, outcome: Outcome) {
        let open = self.state.lock().open.take();
        if let Some(Open { promise, reservation, buffer, guard, .. }) = open {
            drop((reservation, buffer));
            promise.keep(outcome);
            drop(guard);
        }
    }

    /// Memory for the whole shard, for a piece that covers it. `None` where the shard has ended.
    fn take_whole(&self) -> Option<Result<OwnedBuffer, Arc<Failure>>> {
        let reservation = self.state.lock().open.as_mut()?.reservation.take()?;
        Some(reservation.allocate().map_err(|error| self.out_of_memory(&error.to_string())))
    }

    /// Copies a piece into its place. `from` are the bytes of `from_region`, which contains `piece`.
    pub(crate) fn add(&self, piece: &Region, from: &[u8], from_region: &Region) {
        let mut state = self.state.lock();
        let Some(open) = state.open.as_mut() else { return };
        if let Some(reservation) = open.reservation.take() {
            match reservation.allocate() {
                Ok(buffer) => open.buffer = Some(buffer),
                Err(error) => {
                    drop(state);
                    self.end(Err(self.out_of_memory(&error.to_string())));
                    return;
                }
            }
        }
        let Some(buffer) = open.buffer.as_mut() else { return };
        copy_region(from, from_region, buffer, &self.region, piece, self.item_bytes);
        open.missing -= 1;
        if open.missing == 0 {
            let whole = open.buffer.take().map(OwnedBuffer::freeze);
            drop(state);
            if let Some(whole) = whole {
                self.end(Ok(whole));
            }
        }
    }

    fn out_of_memory(&self, why: &str) -> Arc<Failure> {
        let message = format!("operation {}: {why}", self.op);
        Arc::new(Failure::new(FailureKind::Memory, ProcessId(0), self.op, message))
    }
}

impl Runtime {
    /// A piece of a shard has come from a peer, or never will.
    pub(super) fn deliver_piece(
        self: &Arc<Self>,
        assembly: &Arc<Assembly>,
        region: Region,
        from: ProcessId,
        result: Result<Payload, Arc<Failure>>,
    ) {
        match result {
            Err(failure) => self.fail_shard(assembly, failure),
            Ok(Payload::Empty) => self.add_piece(assembly, region, Vec::new().into()),
            // Kernels read shards as typed slices, so one that was read into memory without alignment is copied.
            Ok(Payload::Inline(bytes))
                if region == assembly.region && bytes.as_ptr().addr().is_multiple_of(ALIGNMENT) =>
            {
                assembly.end(Ok(bytes));
            }
            Ok(Payload::Inline(bytes)) => self.add_piece(assembly, region, bytes),
            Ok(Payload::Waiting(fetch)) => {
                let whole = region == assembly.region;
                let bytes = region.elements() * assembly.item_bytes;
                let buffer = if whole {
                    match assembly.take_whole() {
                        Some(buffer) => buffer,
                        None => return,
                    }
                } else {
                    self.staging.allocate(bytes).map_err(|error| assembly.out_of_memory(&error.to_string()))
                };
                let buffer = match buffer {
                    Ok(buffer) => buffer,
                    Err(failure) => return self.fail_shard(assembly, failure),
                };
                let (runtime, assembly) = (self.clone(), assembly.clone());
                fetch.fetch(
                    buffer,
                    Box::new(move |result| match result {
                        Ok(buffer) if whole => assembly.end(Ok(buffer.freeze())),
                        Ok(buffer) => runtime.add_piece(&assembly, region, buffer.freeze()),
                        Err(error) => {
                            let failure = runtime.fetch_failed(from, assembly.op, &error);
                            runtime.fail_shard(&assembly, failure);
                        }
                    }),
                );
            }
        }
    }

    /// Copies a piece into its shard on the mover: the transport's threads have messages to carry.
    fn add_piece(self: &Arc<Self>, assembly: &Arc<Assembly>, region: Region, bytes: SharedBuffer) {
        let assembly = assembly.clone();
        self.move_data(Box::new(move || {
            assembly.add(&region, &bytes, &region);
            drop(bytes);
        }));
    }

    pub(super) fn fail_shard(&self, assembly: &Assembly, failure: Arc<Failure>) {
        self.remember(&failure);
        assembly.end(Err(failure));
    }
}
