//! Shards that are put together from pieces.
//!
//! In the host's memory movers and transports write the pieces; in a CUDA device's memory the
//! device copies them. A piece's bytes may be in either.

mod device;
mod host;

use std::sync::Arc;

use mpmd_transport::{OwnedBuffer, SharedBuffer};

pub(crate) use device::{DeviceAssembly, Sum};
pub(crate) use host::HostAssembly;

use super::put::Transfer;
use super::slot::Slot;
use super::{OpGuard, Outcome, Runtime};
use crate::device::cuda::Part;
use mpmd_layout::region::Region;

/// A shard of this process that waits for pieces. Clones are the same shard.
#[derive(Clone)]
pub(crate) enum Assembly {
    /// In the host's memory.
    Host(Arc<HostAssembly>),
    /// In a CUDA device's.
    Device(Arc<DeviceAssembly>),
}

/// What of a shard a device's copy goes into.
enum Place {
    Whole,
    Part,
    /// None of it: it is copied on.
    Staging,
}

impl Assembly {
    /// Whether it still takes pieces.
    pub(super) fn is_open(&self) -> bool {
        match self {
            Self::Host(shard) => shard.is_open(),
            Self::Device(shard) => shard.is_open(),
        }
    }

    /// Whether a piece is all that an open shard waits for.
    pub(super) fn is_whole(&self, piece: &Region) -> bool {
        match self {
            Self::Host(shard) => shard.is_whole(piece),
            Self::Device(shard) => shard.is_whole(piece),
        }
    }

    /// Returns true where the shard can be these bytes as they are: they are in the memory that it
    /// is to be in, and stay valid.
    pub(super) fn can_be(&self, bytes: &SharedBuffer) -> bool {
        match self {
            Self::Host(shard) => bytes.device().is_none() && shard.can_be(bytes),
            Self::Device(shard) => shard.can_be(bytes),
        }
    }

    /// Ends the shard with what is the whole of it, or with a failure.
    pub(super) fn end(&self, outcome: Outcome) {
        match self {
            Self::Host(shard) => shard.end(outcome),
            Self::Device(shard) => shard.end(outcome),
        }
    }

    /// Ends the shard with what is the whole of it, once the work of `source` has made that, if it
    /// is given.
    pub(super) fn end_as(&self, bytes: SharedBuffer, source: Option<Slot>) {
        match (self, source) {
            (Self::Device(shard), Some(source)) => shard.end_as(bytes, &source),
            _ => self.end(Ok(bytes)),
        }
    }

    /// Memory of the host's for the whole shard, for a piece that is all of it. `None` where it is
    /// not, the shard has ended, or it is a device's.
    pub(super) fn take_whole(&self, piece: &Region) -> Option<OwnedBuffer> {
        match self {
            Self::Host(shard) => shard.take_whole(piece),
            Self::Device(_) => None,
        }
    }

    /// As [`HostAssembly::take_part`]; `None` where the shard is a device's.
    pub(super) fn take_part(&self, piece: &Region) -> Option<OwnedBuffer> {
        match self {
            Self::Host(shard) => shard.take_part(piece),
            Self::Device(_) => None,
        }
    }

    /// A part has its piece.
    pub(super) fn give_back(&self, part: OwnedBuffer) {
        if let Self::Host(shard) = self {
            shard.give_back(part);
        }
    }

    /// Has a piece copied to its place, by who copies such bytes: whoever has it has other things
    /// to do.
    ///
    /// `source` is the slot that makes the bytes, where they are a device's and its work may be
    /// under way.
    pub(super) fn place(
        &self,
        runtime: &Arc<Runtime>,
        transfer: &Arc<Transfer>,
        bytes: SharedBuffer,
        source: Option<Slot>,
        guard: &OpGuard,
    ) {
        match self {
            Self::Device(shard) => shard.place(transfer, bytes, source, guard),
            Self::Host(shard) if bytes.device().is_none() => {
                shard.place(runtime, transfer, bytes, guard)
            }
            Self::Host(shard) => shard.read(runtime, transfer, &bytes, source, guard),
        }
    }

    /// As [`place`](Self::place), of a few bytes of the host's, before this returns or by the
    /// device.
    pub(super) fn place_now(&self, transfer: &Arc<Transfer>, bytes: SharedBuffer, guard: &OpGuard) {
        match self {
            Self::Device(shard) => shard.place(transfer, bytes, None, guard),
            Self::Host(shard) => shard.place_now(transfer, bytes, guard),
        }
    }
}

impl HostAssembly {
    /// Has a piece copied from a device's memory: into its place where that is memory by itself.
    fn read(
        self: &Arc<Self>,
        runtime: &Arc<Runtime>,
        transfer: &Arc<Transfer>,
        bytes: &SharedBuffer,
        source: Option<Slot>,
        guard: &OpGuard,
    ) {
        let region = &transfer.region;
        let (to, place) = if let Some(whole) = self.take_whole(region) {
            (whole, Place::Whole)
        } else if let Some(part) = self.take_part(region) {
            (part, Place::Part)
        } else if !self.is_open() {
            return;
        } else {
            match runtime.staging.allocate(transfer.bytes) {
                Ok(staging) => (staging, Place::Staging),
                Err(error) => {
                    let failure = runtime.out_of_memory(self.op(), &error.to_string());
                    runtime.remember(&failure);
                    return self.end(Err(failure));
                }
            }
        };
        let part = Part {
            from: &transfer.holds,
            to: region,
            piece: region,
            item_bytes: transfer.item_bytes(),
        };
        let (shard, here, alone, guard) =
            (self.clone(), runtime.clone(), transfer.alone(), guard.clone());
        runtime.read_device(self.op(), bytes, source, part, to, move |result| {
            match (result, place) {
                (Ok(whole), Place::Whole) => shard.end(Ok(whole.freeze())),
                (Ok(part), Place::Part) => shard.give_back(part),
                (Ok(staging), Place::Staging) => {
                    shard.place(&here, &alone, staging.freeze(), &guard)
                }
                (Err(failure), _) => {
                    here.remember(&failure);
                    shard.end(Err(failure));
                }
            }
            drop(guard);
        });
    }
}
