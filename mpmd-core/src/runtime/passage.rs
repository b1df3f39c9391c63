//! A region that comes from a peer: to the devices here that want it, and on to other processes.

use std::sync::Arc;

use mpmd_transport::memory::ALIGNMENT;
use mpmd_transport::router::{Failure, FailureKind};
use mpmd_transport::{OwnedBuffer, Payload, ProcessId, SharedBuffer};

use super::transfer::Transfer;
use super::{Assembly, OpGuard, Outgoing, Runtime};

/// What becomes of a region that a peer sends.
///
/// It goes on to others whatever becomes of it here: a shard that has failed, or that there was no memory
/// for, must not keep anybody else from theirs. Where it does not come, all of them are told.
pub(crate) struct Passage {
    pub(super) op: u64,
    pub(super) from: ProcessId,
    pub(super) transfer: Arc<Transfer>,
    /// The shards of this process that it is a piece of.
    pub(super) shards: Vec<Arc<Assembly>>,
    // Last, so that it is dropped after the memory.
    pub(super) guard: OpGuard,
}

/// What the bytes of a region are read into.
#[derive(Clone, Copy)]
enum Place {
    /// One of the shards.
    Whole(usize),
    /// Its part of the only shard.
    Part,
    /// A buffer of its own.
    Staging,
}

impl Runtime {
    /// The region has come, or never will.
    pub(super) fn pass(self: &Arc<Self>, passage: Box<Passage>, result: Result<Payload, Arc<Failure>>) {
        match result {
            Err(failure) => self.fail_passage(&passage, &failure),
            Ok(Payload::Empty) => self.spread(&passage, Vec::new().into(), None),
            Ok(Payload::Inline(bytes) | Payload::Lent(bytes)) => {
                // Kernels read shards as typed slices, so one that was read into memory without alignment
                // is copied.
                let aligned = bytes.as_ptr().addr().is_multiple_of(ALIGNMENT);
                let whole = |shard: &Arc<Assembly>| shard.is_whole(&passage.transfer.region);
                let in_place = if aligned { passage.shards.iter().position(whole) } else { None };
                self.spread(&passage, bytes, in_place);
            }
            Ok(Payload::Waiting(fetch)) => {
                let (buffer, place) = match self.room(&passage) {
                    Ok(Some(room)) => room,
                    // Dropped, it is read and thrown away.
                    Ok(None) => return,
                    Err(failure) => return self.fail_passage(&passage, &failure),
                };
                let runtime = self.clone();
                self.fetch(
                    passage.from,
                    fetch,
                    buffer,
                    Box::new(move |result| match result {
                        Ok(buffer) => match place {
                            Place::Part => passage.shards[0].give_back(buffer),
                            Place::Whole(at) => runtime.spread(&passage, buffer.freeze(), Some(at)),
                            Place::Staging => runtime.spread(&passage, buffer.freeze(), None),
                        },
                        Err(error) => {
                            let failure = runtime.fetch_failed(passage.from, passage.op, &error);
                            runtime.fail_passage(&passage, &failure);
                        }
                    }),
                );
            }
        }
    }

    /// Memory to read the region into, and what it is. `None` where nobody wants the region any more.
    fn room(&self, passage: &Passage) -> Result<Option<(OwnedBuffer, Place)>, Arc<Failure>> {
        for (at, shard) in passage.shards.iter().enumerate() {
            if let Some(buffer) = shard.take_whole(&passage.transfer.region) {
                return Ok(Some((buffer, Place::Whole(at))));
            }
        }
        // Who else wants it needs a buffer that stays while the shard goes its way.
        if let [shard] = &passage.shards[..]
            && passage.transfer.peers.is_empty()
            && let Some(part) = shard.take_part(&passage.transfer.region)
        {
            return Ok(Some((part, Place::Part)));
        }
        if passage.transfer.peers.is_empty() && !passage.shards.iter().any(|shard| shard.is_open()) {
            return Ok(None);
        }
        match self.staging.allocate(passage.transfer.bytes) {
            Ok(buffer) => Ok(Some((buffer, Place::Staging))),
            Err(error) => {
                let message = format!("operation {}: {error}", passage.op);
                Err(Arc::new(Failure::new(FailureKind::Memory, self.me, passage.op, message)))
            }
        }
    }

    /// Gives the region to who is to have it: processes first, they have others behind them. The shard
    /// `in_place` takes the bytes as they are, the others copy them: each device's shards are its own
    /// memory, so that what it has room for, and what it may update in place, does not depend on its
    /// neighbours.
    fn spread(self: &Arc<Self>, passage: &Passage, bytes: SharedBuffer, in_place: Option<usize>) {
        let Passage { op, transfer, shards, guard, .. } = passage;
        self.send_to_peers(*op, transfer, bytes.clone(), guard);
        for (at, shard) in shards.iter().enumerate() {
            if in_place != Some(at) {
                shard.place(self, transfer, bytes.clone(), guard);
            }
        }
        if let Some(at) = in_place {
            shards[at].end(Ok(bytes));
        }
    }

    /// Offers a region's bytes to every process that gets it from this one.
    pub(super) fn send_to_peers(
        self: &Arc<Self>,
        op: u64,
        transfer: &Transfer,
        bytes: SharedBuffer,
        guard: &OpGuard,
    ) {
        for peer in &transfer.peers {
            let outgoing = Outgoing { buffer: bytes.clone(), guard: guard.clone() };
            let key = (op, transfer.id);
            self.with_router(|router| router.offer(*peer, key, bytes.len() as u64, outgoing));
        }
    }

    /// Tells every process that gets a region from this one that it will not come.
    pub(super) fn poison_peers(self: &Arc<Self>, op: u64, transfer: &Transfer, failure: &Failure) {
        for peer in &transfer.peers {
            self.with_router(|router| router.poison(*peer, (op, transfer.id), failure));
        }
    }

    fn fail_passage(self: &Arc<Self>, passage: &Passage, failure: &Arc<Failure>) {
        self.remember(failure);
        self.poison_peers(passage.op, &passage.transfer, failure);
        for shard in &passage.shards {
            shard.end(Err(failure.clone()));
        }
    }
}
