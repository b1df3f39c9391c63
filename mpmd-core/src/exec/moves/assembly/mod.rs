//! Shards that are assembled from pieces.
//!
//! Copy workers and transports write the pieces of a shard in host memory. The device copies the
//! pieces of a shard in an accelerator's memory. The bytes of a piece may be in either memory.

mod device;
mod host;

use std::sync::Arc;

use mpmd_device::accelerator::RegionCopy;
use mpmd_memory::Reservation;
use mpmd_memory::{OwnedBuffer, SharedBuffer};

pub(crate) use device::{BufferPart, DeviceAssembly};
pub(crate) use host::HostAssembly;

use crate::exec::moves::transfer::RegionTransfer;
use crate::exec::waits::async_buffer::{AsyncBuffer, Resolver};
use crate::exec::{OpGuard, Outcome, Runtime};
use mpmd_layout::region::Region;

/// A shard of this process that waits for pieces. Clones refer to the same shard.
#[derive(Clone)]
pub(crate) enum Assembly {
    /// A shard in host memory.
    Host(Arc<HostAssembly>),
    /// A shard in an accelerator's memory.
    Device(Arc<DeviceAssembly>),
}

/// The properties of a new shard that waits for pieces.
pub(crate) struct NewShard {
    /// The number of the operation that makes the shard.
    pub(crate) op: u64,
    pub(crate) region: Region,
    /// Number of missing pieces, indexed by partial sum.
    pub(crate) missing: Vec<usize>,
    pub(crate) reservation: Reservation,
    pub(crate) resolver: Resolver,
    pub(crate) guard: OpGuard,
}

/// The destination of a copy from device memory.
enum CopyTarget {
    Whole,
    Part,
    /// A staging buffer. A second copy brings the piece from it to the shard.
    Staging,
}

impl Assembly {
    /// Returns true if the shard has not ended and still lacks pieces.
    pub(crate) fn is_open(&self) -> bool {
        match self {
            Self::Host(shard) => shard.is_open(),
            Self::Device(shard) => shard.is_open(),
        }
    }

    /// Returns true if the shard is open and lacks only `piece`, which covers the whole shard.
    pub(crate) fn is_whole(&self, piece: &Region) -> bool {
        match self {
            Self::Host(shard) => shard.is_whole(piece),
            Self::Device(shard) => shard.is_whole(piece),
        }
    }

    /// Returns true if the shard can use these bytes without a copy: they are in the shard's own
    /// kind of memory, and no peer can change them.
    pub(crate) fn can_be(&self, bytes: &SharedBuffer) -> bool {
        match self {
            Self::Host(shard) => bytes.device().is_none() && shard.can_be(bytes),
            Self::Device(shard) => shard.can_be(bytes),
        }
    }

    /// Ends the shard with its complete bytes, or with a failure.
    pub(crate) fn end(&self, outcome: Outcome) {
        match self {
            Self::Host(shard) => shard.end(outcome),
            Self::Device(shard) => shard.end(outcome),
        }
    }

    /// Ends the shard with its complete bytes. If `source` is given, its issued work still fills
    /// the bytes: a device shard is issued now and ends when that work has ended.
    pub(crate) fn end_as(&self, bytes: SharedBuffer, source: Option<AsyncBuffer>) {
        match (self, source) {
            (Self::Device(shard), Some(source)) => shard.end_as(bytes, &source),
            _ => self.end(Ok(bytes)),
        }
    }

    /// Takes the shard's host memory for a piece that is the whole shard. Returns `None` if the
    /// piece is smaller, the shard has ended, or the shard is in device memory.
    pub(crate) fn take_whole(&self, piece: &Region) -> Option<OwnedBuffer> {
        match self {
            Self::Host(shard) => shard.take_whole(piece),
            Self::Device(_) => None,
        }
    }

    /// Takes the part of a host shard for a piece. The caller writes the piece, then gives the part
    /// back. Returns `None` if pieces are not separate parts, the shard has ended, or the shard is
    /// in device memory.
    pub(crate) fn take_part(&self, piece: &Region) -> Option<OwnedBuffer> {
        match self {
            Self::Host(shard) => shard.take_part(piece),
            Self::Device(_) => None,
        }
    }

    /// Gives back a part of a host shard that now holds its piece. The last part ends the shard.
    pub(crate) fn give_back(&self, part: OwnedBuffer) {
        if let Self::Host(shard) = self {
            shard.give_back(part);
        }
    }

    /// Starts the copy of a piece into the shard, by a copy worker or the device. In host memory,
    /// copies the pieces of small moves on this thread. Does not block.
    ///
    /// `source` is the async buffer of the bytes, if they are in device memory and the work that
    /// fills them may not have ended.
    pub(crate) fn place(
        &self,
        runtime: &Arc<Runtime>,
        transfer: &Arc<RegionTransfer>,
        bytes: SharedBuffer,
        source: Option<AsyncBuffer>,
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
}

impl HostAssembly {
    /// Starts the copy of a piece from device memory into a host shard. Copies directly if the
    /// piece has a separate part there, else through a staging buffer.
    fn read(
        self: &Arc<Self>,
        runtime: &Arc<Runtime>,
        transfer: &Arc<RegionTransfer>,
        bytes: &SharedBuffer,
        source: Option<AsyncBuffer>,
        guard: &OpGuard,
    ) {
        let region = &transfer.region;
        let (to, place) = if let Some(whole) = self.take_whole(region) {
            (whole, CopyTarget::Whole)
        } else if let Some(part) = self.take_part(region) {
            (part, CopyTarget::Part)
        } else if !self.is_open() {
            return;
        } else {
            match runtime.staging.allocate(transfer.bytes) {
                Ok(staging) => (staging, CopyTarget::Staging),
                Err(error) => {
                    let failure = runtime.out_of_memory(self.op(), &error);
                    runtime.remember(&failure);
                    return self.end(Err(failure));
                }
            }
        };
        let part = RegionCopy {
            from: &transfer.holds,
            to: region,
            piece: region,
            item_bytes: transfer.item_bytes(),
        };

        let shard = self.clone();
        let here = runtime.clone();
        let alone = transfer.alone();
        let guard = guard.clone();
        runtime.read_device(self.op(), bytes, source, part, to, move |result| {
            match (result, place) {
                (Ok(whole), CopyTarget::Whole) => shard.end(Ok(whole.freeze())),
                (Ok(part), CopyTarget::Part) => shard.give_back(part),
                (Ok(staging), CopyTarget::Staging) => {
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
