//! The receiving half of a transfer: from the router to the shards of this process that contain the
//! region, and on to other processes.

use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_memory::ALIGNMENT;
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::router::{Failure, FailureKind, Router};
use mpmd_transport::transport::Fetch;
use mpmd_transport::{Payload, TransportError};

use crate::exec::moves::driver;
use crate::exec::moves::send::Send;
use crate::exec::{Assembly, AsyncBuffer, InProcess, OpGuard, Resolver, Runtime};
use mpmd_record::trace::PieceStep;

/// The receiver of a piece.
pub(crate) enum Waiter {
    /// Shards of this process that contain the piece, and processes to which it is forwarded.
    Piece(Box<Receive>),
    /// A buffer for the bytes of a piece, which resolve `resolver`.
    Bytes {
        resolver: Resolver,
        from: ProcessId,
        op: u64,
        piece: u64,
    },
    /// No receiver. The piece is still taken, so that its sender does not wait.
    Nobody(#[expect(dead_code, reason = "held for its drop")] OpGuard),
}

/// The receive of one region from a peer.
///
/// The region is forwarded even if this process cannot use it: a failed shard, or one without
/// memory, must not affect other processes. If the region does not come, all its receivers get the
/// failure.
pub(crate) struct Receive {
    pub(crate) from: ProcessId,
    /// The shards of this process that contain the region and are assembled from pieces.
    pub(crate) shards: Vec<Assembly>,
    /// The send that forwards the region to the peers of the transfer. The last field, so that its
    /// guard is dropped after the memory.
    pub(crate) forward: Send,
}

/// The target of a read of a region's bytes.
#[derive(Clone, Copy)]
enum ReadTarget {
    /// The whole memory of the shard with this index in [`Receive::shards`].
    Whole(usize),
    /// The region's part of the only shard in [`Receive::shards`].
    Part,
    /// A staging buffer.
    Staging,
}

/// Memory into which a region's bytes are read.
struct ReadRoom {
    buffer: OwnedBuffer,
    target: ReadTarget,
}

impl Receive {
    /// Registers the receive with the router. A region that no shard needs any more is received
    /// too, so that its sender does not wait. Register all receives of an operation within one lock
    /// of the router, which reports the operation as taken once no receive is left.
    pub(crate) fn begin(self, runtime: &Runtime, router: &mut Router<InProcess>) {
        let from = self.from;
        let Send {
            transfer, guard, ..
        } = &self.forward;
        let key = guard.key(transfer.id);
        let hash = guard.hash();
        let now = runtime.now();
        let bytes = (transfer.holds.elements() * transfer.item_bytes()) as u64;
        runtime.trace_piece(PieceStep::Expected, key, from, transfer.bytes as u64);

        let waiter = if self.shards.is_empty() && transfer.peers.is_empty() {
            Waiter::Nobody(self.forward.guard)
        } else {
            Waiter::Piece(Box::new(self))
        };
        router.expect(from, key, hash, bytes, waiter, now);
    }

    /// Passes an arrived region to its receivers. If the region never arrives, fails them with the
    /// reason.
    fn end(self: Box<Self>, runtime: &Arc<Runtime>, result: Result<Payload, Arc<Failure>>) {
        match result {
            Err(failure) => self.fail(runtime, &failure),
            Ok(Payload::Empty) => self.spread(runtime, Vec::new().into(), None, |_| false),
            Ok(Payload::Inline(bytes) | Payload::Lent(bytes)) => self.take(runtime, bytes),
            Ok(Payload::Waiting(fetch)) => self.read(runtime, fetch),
        }
    }

    /// Takes a region's bytes in memory that this process can read, and passes them to the region's
    /// receivers.
    fn take(&self, runtime: &Arc<Runtime>, bytes: SharedBuffer) {
        self.trace_taken(runtime);
        let transfer = &self.forward.transfer;
        // Kernels read shards as typed slices, so unaligned bytes are copied. So is a region that
        // is only a part of a lent shard.
        let address = bytes
            .device()
            .map_or_else(|| bytes.as_ptr().addr() as u64, |place| place.address);
        let aligned = address.is_multiple_of(ALIGNMENT as u64);

        let fits = aligned && transfer.is_by_itself();
        let whole =
            |shard: &Assembly| fits && shard.is_whole(&transfer.region) && shard.can_be(&bytes);
        let mut whole: Vec<usize> = (0..self.shards.len())
            .filter(|at| whole(&self.shards[*at]))
            .collect();
        if !bytes.is_lent() {
            // Only lent bytes may be shared by several shards: they are not a device's own memory.
            whole.truncate(1);
        }
        let source = self.arriving(runtime, &bytes);
        self.spread(runtime, bytes, source, |at| whole.contains(&at));
    }

    /// Starts to read bytes that the transport still has to fetch. Then passes the bytes to the
    /// receivers of the region.
    fn read(self: Box<Self>, runtime: &Arc<Runtime>, fetch: Box<dyn Fetch>) {
        let room = match self.room(runtime, fetch.bytes()) {
            Ok(Some(room)) => room,
            // Dropped: the payload is read and discarded.
            Ok(None) => return,
            Err(failure) => return self.fail(runtime, &failure),
        };

        let from = self.from;
        let then = runtime.clone();
        let then = move |result: Result<OwnedBuffer, TransportError>| {
            let buffer = match result {
                Ok(buffer) => buffer,
                Err(error) => {
                    let failure = then.broken_off(from, self.forward.guard.op(), &error);
                    return self.fail(&then, &failure);
                }
            };
            self.trace_taken(&then);
            match room.target {
                ReadTarget::Part => self.shards[0].give_back(buffer),
                ReadTarget::Whole(at) => {
                    self.spread(&then, buffer.freeze(), None, |shard| shard == at);
                }
                ReadTarget::Staging => self.spread(&then, buffer.freeze(), None, |_| false),
            }
        };
        runtime.fetch(from, fetch, room.buffer, Box::new(then));
    }

    /// Returns an async buffer that ends when a peer has filled device memory that it lent before.
    /// `None` if the bytes are already filled.
    fn arriving(&self, runtime: &Arc<Runtime>, bytes: &SharedBuffer) -> Option<AsyncBuffer> {
        if bytes.device().is_none() || bytes.is_made() {
            return None;
        }
        let (resolver, slot) = AsyncBuffer::new();
        let issued = resolver.issue(bytes.clone());
        let runtime = runtime.clone();
        let op = self.forward.guard.op();
        let from = self.from;
        bytes.on_made(Box::new(move |failure| {
            issued.end(failure.map_or(Ok(()), |why| Err(runtime.never_made(from, op, &why))));
        }));
        Some(slot)
    }

    /// Returns memory to read the region into. `None` if no receiver needs the region any more.
    /// Fails if there is no memory.
    fn room(&self, runtime: &Runtime, bytes: u64) -> Result<Option<ReadRoom>, Arc<Failure>> {
        let room = |buffer, target| Ok(Some(ReadRoom { buffer, target }));
        let Send {
            transfer, guard, ..
        } = &self.forward;
        let by_itself = transfer.is_by_itself();
        for (at, shard) in self.shards.iter().enumerate().filter(|_| by_itself) {
            if let Some(buffer) = shard.take_whole(&transfer.region) {
                return room(buffer, ReadTarget::Whole(at));
            }
        }

        // A region that is also forwarded needs a buffer that outlives the shard's part.
        if let [shard] = &self.shards[..]
            && by_itself
            && transfer.peers.is_empty()
            && let Some(part) = shard.take_part(&transfer.region)
        {
            return room(part, ReadTarget::Part);
        }

        if transfer.peers.is_empty() && !self.shards.iter().any(|shard| shard.is_open()) {
            return Ok(None);
        }
        match runtime.staging.allocate(in_memory(bytes)) {
            Ok(buffer) => room(buffer, ReadTarget::Staging),
            Err(error) => Err(runtime.out_of_memory(guard.op(), &error)),
        }
    }

    fn trace_taken(&self, runtime: &Runtime) {
        let Send {
            transfer, guard, ..
        } = &self.forward;
        let bytes = transfer.bytes as u64;
        runtime.trace_piece(PieceStep::Taken, guard.key(transfer.id), self.from, bytes);
    }

    /// Passes the region to its receivers. Other processes come first, because more processes may
    /// wait behind them. The shards for which `in_place` is true use the bytes without a copy; the
    /// others copy them. So each device's shard is its own memory or borrowed memory. Its memory
    /// use and its in-place updates do not depend on other devices.
    ///
    /// `source` is the async buffer of the bytes, if the work that fills them has not ended.
    fn spread(
        &self,
        runtime: &Arc<Runtime>,
        bytes: SharedBuffer,
        source: Option<AsyncBuffer>,
        in_place: impl Fn(usize) -> bool,
    ) {
        let Self {
            shards, forward, ..
        } = self;
        let Send {
            transfer, guard, ..
        } = forward;
        let carried =
            |peer: &ProcessId| bytes.device().is_none() || runtime.carries_device_memory(*peer);
        if transfer.is_by_itself() && transfer.peers.iter().all(carried) {
            forward.offer(runtime, &transfer.peers, bytes.clone());
        } else if !transfer.peers.is_empty() {
            // The peers expect the region alone.
            let peers = transfer.peers.clone();
            forward
                .clone()
                .pack_and_offer(runtime, peers, bytes.clone(), source.clone());
        }

        let (whole, others) = (0..shards.len()).partition::<Vec<_>, _>(|at| in_place(*at));
        for at in others {
            shards[at].place(runtime, transfer, bytes.clone(), source.clone(), guard);
        }
        // The last shard holds the bytes alone, so that a kernel may take them over.
        if let Some((last, before)) = whole.split_last() {
            before
                .iter()
                .for_each(|at| shards[*at].end_as(bytes.clone(), source.clone()));
            shards[*last].end_as(bytes, source);
        }
    }

    fn fail(&self, runtime: &Arc<Runtime>, failure: &Arc<Failure>) {
        runtime.remember(failure);
        self.forward
            .poison(runtime, &self.forward.transfer.peers, failure);
        for shard in &self.shards {
            shard.end(Err(failure.clone()));
        }
    }
}

impl Runtime {
    /// Passes a piece to its receiver, or the failure if the piece does not come.
    pub(crate) fn deliver(self: &Arc<Self>, waiter: Waiter, result: Result<Payload, Arc<Failure>>) {
        match waiter {
            Waiter::Piece(receive) => receive.end(self, result),
            Waiter::Bytes {
                resolver,
                from,
                op,
                piece,
            } => {
                self.deliver_bytes(resolver, from, (op, piece), result);
            }
            Waiter::Nobody(_) => drop(result),
        }
    }

    fn deliver_bytes(
        self: &Arc<Self>,
        resolver: Resolver,
        from: ProcessId,
        key: (u64, u64),
        result: Result<Payload, Arc<Failure>>,
    ) {
        let op = key.0;
        let fetch = match result {
            Err(failure) => return resolver.keep(Err(failure)),
            Ok(Payload::Empty) => return resolver.keep(Ok(Vec::new().into())),
            Ok(Payload::Inline(bytes) | Payload::Lent(bytes)) if bytes.device().is_some() => {
                // Collectives send each other host memory.
                let message =
                    format!("operation {op}: process {from} sent device memory to a collective");
                let failure = Failure::new(FailureKind::Transport, from, op, message);
                return resolver.keep(Err(Arc::new(failure)));
            }
            Ok(Payload::Inline(bytes) | Payload::Lent(bytes)) => {
                self.trace_piece(PieceStep::Taken, key, from, bytes.len() as u64);
                return resolver.keep(Ok(bytes));
            }
            Ok(Payload::Waiting(fetch)) => fetch,
        };

        // The router has checked that this piece may have this length.
        let buffer = match self.staging.allocate(in_memory(fetch.bytes())) {
            Ok(buffer) => buffer,
            Err(error) => return resolver.keep(Err(self.out_of_memory(op, &error))),
        };

        let runtime = self.clone();
        let then = move |result: Result<OwnedBuffer, TransportError>| {
            resolver.keep(match result {
                Ok(buffer) => {
                    runtime.trace_piece(PieceStep::Taken, key, from, buffer.len() as u64);
                    Ok(buffer.freeze())
                }
                Err(error) => Err(runtime.broken_off(from, op, &error)),
            });
        };
        self.fetch(from, fetch, buffer, Box::new(then));
    }

    /// Creates the failure of operation `op` after a transfer from or to process `peer` broke off.
    pub(crate) fn broken_off(
        &self,
        peer: ProcessId,
        op: u64,
        error: &TransportError,
    ) -> Arc<Failure> {
        if let TransportError::Environment { .. } = error {
            let message = format!("operation {op} waited for process {peer}: {error}");
            return Arc::new(Failure::new(FailureKind::Transport, peer, op, message));
        }
        // A peer that has failed closes its end. Its failure is the cause, if it has said so.
        let router = self.router.lock();
        router
            .why_never(peer, op)
            .unwrap_or_else(|| router.lost_while(peer, op, &driver::reason(error)))
    }

    /// Creates the failure of operation `op`, which borrowed bytes that process `from` then failed
    /// to fill.
    fn never_made(&self, from: ProcessId, op: u64, why: &str) -> Arc<Failure> {
        let router = self.router.lock();
        if !router.still_here().contains(&from) {
            return router.lost_while(from, op, why);
        }
        let message =
            format!("operation {op}: process {from} lent bytes that it then failed to make: {why}");
        Arc::new(Failure::new(FailureKind::Kernel, from, op, message))
    }
}

/// Converts a length in bytes to `usize`. A length that does not fit becomes `usize::MAX`, so that
/// allocation fails.
fn in_memory(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}
