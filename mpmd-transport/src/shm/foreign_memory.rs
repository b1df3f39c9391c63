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

/// The reason why a segment of device memory that a peer has given cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum DeviceSegmentError {
    #[error(transparent)]
    TooLong(#[from] TryFromIntError),
    #[error("it is in the memory of a device of process {owner}, which has ended")]
    Lost { owner: ProcessId },
    #[error("this process has no devices that share memory")]
    NoDevices,
    /// The description of the memory is not valid for this process's devices, or the driver refuses
    /// it.
    #[error(transparent)]
    Unopened(#[from] io::Error),
    #[error("it has {actual} bytes and is announced with {announced}")]
    OtherLength { actual: usize, announced: usize },
}

/// A segment of device memory that a peer has given to this process.
pub(super) struct DeviceGiven {
    pub(super) words: Vec<u8>,
    pub(super) bytes: u64,
    /// The process that owns the memory. It need not be the peer, which may lend borrowed memory
    /// on.
    pub(super) owner: ProcessId,
    open: OpenSegment,
}

/// The state of a given segment: not open in this process, or open.
enum OpenSegment {
    No,
    /// No other peer had caused the segment to be opened before. It stays open until this peer
    /// reports that it is freed.
    First(Arc<Segment>),
    /// Another peer had given the segment before. This entry does not keep it open, as in
    /// [`HostGiven::Again`](super::mappings::HostGiven::Again).
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

    /// Returns the segment, and opens it if it is not open. `number` is the number by which the
    /// peer that gave it knows the segment.
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

    /// Handles the peer's report that the segment is freed. Once this process has closed the
    /// segment, it tells each peer that gave it.
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

/// A peer that has given a segment, and must be told when the segment is closed.
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

/// Memory of another process's device that is open in this process. When it is closed, the peers
/// that gave it are told.
pub(super) struct ForeignMemory {
    /// The open memory; `None` while this is dropped.
    memory: Option<Box<dyn DeviceMemory>>,
    words: Vec<u8>,
    owner: ProcessId,
    gone: Arc<[AtomicBool]>,
    /// The peers that must be told when the memory is closed.
    givers: Mutex<Vec<SegmentGiver>>,
    reaper: Arc<Reaper>,
}

impl ForeignMemory {
    /// Returns the process that owns a segment of another process's device memory. `None` for any
    /// other segment.
    pub(super) fn owner(segment: &Segment) -> Option<ProcessId> {
        Self::of(segment).map(|foreign| foreign.owner)
    }

    /// Returns a fence that fails once another process's device memory is lost. `None` for any
    /// other segment.
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

/// A fence that is always passed, but fails once the owner of the memory is gone: device memory
/// does not outlive its process.
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
