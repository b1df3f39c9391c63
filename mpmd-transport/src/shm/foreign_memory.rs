//! Memory of other processes' devices that this process was given or has open.

use std::any::Any;
use std::io;
use std::num::TryFromIntError;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::devices::DeviceLoans;
use super::mappings::{FoundSegment, Mappings};
use super::reaper::Reaper;
use super::returns::ReturnPath;
use mpmd_memory::{DeviceMemory, Fence, Segment};
use mpmd_proto::wire::ProcessId;

/// The reason why a given segment of device memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeviceSegmentError {
    #[error(transparent)]
    TooLong(#[from] TryFromIntError),
    #[error("it is in the memory of a device of process {owner}, which has ended")]
    Lost { owner: ProcessId },
    #[error("this process has no devices that share memory")]
    NoDevices,
    /// The description is invalid here, or the driver refuses it.
    #[error(transparent)]
    Unopened(#[from] io::Error),
    #[error("it has {actual} bytes and is announced with {announced}")]
    OtherLength { actual: usize, announced: usize },
}

/// A segment of device memory that a peer has given.
pub(super) struct DeviceGiven {
    pub(super) words: Vec<u8>,
    pub(super) bytes: u64,
    /// The process that owns the memory: the peer may have opened it itself.
    pub(super) owner: ProcessId,
    open: OpenSegment,
}

/// Whether a given segment of device memory is open here.
enum OpenSegment {
    No,
    /// The segment was not open here when this peer gave it. It stays open until the peer says that
    /// it is freed.
    First(Arc<Segment>),
    /// Another peer had given the segment before; see [`Given`](super::mappings::HostGiven).
    Again(Weak<Segment>),
}

impl DeviceGiven {
    pub(super) fn new(words: Vec<u8>, bytes: u64, owner: ProcessId) -> Self {
        Self {
            words,
            bytes,
            owner,
            open: OpenSegment::No,
        }
    }

    /// Returns the segment, which its giver knows by `number`, and opens it if it is not open.
    pub(super) fn segment(
        &mut self,
        number: u32,
        returns: &Arc<ReturnPath>,
        mappings: &Mappings,
        devices: &DeviceLoans,
    ) -> Result<Arc<Segment>, DeviceSegmentError> {
        let open = match &self.open {
            OpenSegment::First(segment) => Some(segment.clone()),
            OpenSegment::Again(segment) => segment.upgrade(),
            OpenSegment::No => None,
        };
        if let Some(open) = open {
            return Ok(open);
        }

        let bytes = usize::try_from(self.bytes)?;
        let is_gone = devices
            .gone
            .get(self.owner.index())
            .is_some_and(|gone| gone.load(Ordering::Acquire));
        if is_gone {
            return Err(DeviceSegmentError::Lost { owner: self.owner });
        }

        let sharing = devices.sharing.get().ok_or(DeviceSegmentError::NoDevices)?;

        let make = || {
            let memory = sharing.open(&self.words, bytes)?;
            let foreign = ForeignMemory {
                memory: Some(memory),
                words: self.words.clone(),
                owner: self.owner,
                gone: devices.gone.clone(),
                givers: Mutex::new(vec![SegmentGiver::new(returns, number)]),
                reaper: devices.reaper.clone(),
            };
            Segment::of_device(Box::new(foreign)).map(Arc::new)
        };
        let FoundSegment { segment, is_new } = mappings.opened(&self.words, make)?;
        if segment.bytes() != bytes {
            return Err(DeviceSegmentError::OtherLength {
                actual: segment.bytes(),
                announced: bytes,
            });
        }

        let is_first = is_new && matches!(self.open, OpenSegment::No);
        self.open = if is_first {
            OpenSegment::First(segment.clone())
        } else {
            OpenSegment::Again(Arc::downgrade(&segment))
        };
        Ok(segment)
    }

    /// Handles the peer's notice that the segment is freed. Once it is closed here, each peer that
    /// gave it is told.
    pub(super) fn retire(self, number: u32, returns: &Arc<ReturnPath>) {
        let again = match self.open {
            // The peer is told once it is closed, which is when the last loan of it has gone back.
            OpenSegment::First(segment) => return drop(segment),
            OpenSegment::Again(segment) => segment.upgrade(),
            OpenSegment::No => None,
        };
        match again.as_deref().and_then(ForeignMemory::of) {
            // The first giver may be gone by then, so each giver is told separately.
            Some(foreign) => foreign
                .givers
                .lock()
                .push(SegmentGiver::new(returns, number)),
            None => returns.say_closed(number),
        }
    }
}

/// A peer that has given a segment.
struct SegmentGiver {
    returns: Arc<ReturnPath>,
    /// The number by which the peer knows the segment.
    number: u32,
}

impl SegmentGiver {
    fn new(returns: &Arc<ReturnPath>, number: u32) -> Self {
        Self {
            returns: returns.clone(),
            number,
        }
    }
}

/// Memory of another process's device, open here. When it is closed, the peers that gave it are
/// told.
pub(super) struct ForeignMemory {
    /// `None` while it is dropped.
    memory: Option<Box<dyn DeviceMemory>>,
    words: Vec<u8>,
    owner: ProcessId,
    gone: Arc<[AtomicBool]>,
    /// The peers to tell.
    givers: Mutex<Vec<SegmentGiver>>,
    reaper: Arc<Reaper>,
}

impl ForeignMemory {
    /// Returns the process that owns a segment of foreign device memory; `None` for any other
    /// segment.
    pub(super) fn owner(segment: &Segment) -> Option<ProcessId> {
        Self::of(segment).map(|foreign| foreign.owner)
    }

    /// Returns a fence that fails once the content of a foreign device segment is lost; `None` for
    /// any other segment.
    pub(super) fn life(segment: &Segment) -> Option<Arc<dyn Fence>> {
        let Self { owner, gone, .. } = Self::of(segment)?;
        Some(Arc::new(OwnerFence {
            owner: *owner,
            gone: gone.clone(),
        }))
    }

    fn of(segment: &Segment) -> Option<&Self> {
        (segment.device()? as &dyn Any).downcast_ref()
    }
}

/// A fence that is always over, but fails once the owner is gone: device memory does not outlive
/// its process.
struct OwnerFence {
    owner: ProcessId,
    gone: Arc<[AtomicBool]>,
}

impl Fence for OwnerFence {
    fn is_over(&self) -> bool {
        true
    }

    fn on_over(&self, then: Box<dyn FnOnce() + Send>) {
        then();
    }

    fn failure(&self) -> Option<String> {
        let is_gone = self.gone.get(self.owner.index())?.load(Ordering::Acquire);
        is_gone.then(|| DeviceSegmentError::Lost { owner: self.owner }.to_string())
    }
}

impl DeviceMemory for ForeignMemory {
    fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.address())
    }

    fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.bytes())
    }

    fn device(&self) -> u32 {
        self.memory
            .as_ref()
            .map_or(u32::MAX, |memory| memory.device())
    }

    fn export(&self) -> Option<&[u8]> {
        // A third process opens it by the owner's own description.
        Some(&self.words)
    }

    fn bind(&self) -> std::io::Result<()> {
        self.memory.as_ref().map_or(Ok(()), |memory| memory.bind())
    }

    fn is_far(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.is_far())
    }
}

impl Drop for ForeignMemory {
    fn drop(&mut self) {
        let memory = self.memory.take();
        let givers = std::mem::take(self.givers.get_mut());
        self.reaper.later(move || {
            drop(memory);
            for giver in givers {
                giver.returns.say_closed(giver.number);
            }
        });
    }
}
