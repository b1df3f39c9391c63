//! [`MpmdArray`]: a handle to an array that lives on devices, wherever they are.

mod future;
mod handle;
mod read;

use std::fmt;
use std::ops::Deref;
use std::panic::Location;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, OnceLock};

use mpmd_transport::{Failure, FailureKind};

pub use future::{ArrayFuture, all_ready};
pub(crate) use handle::{Handle, WeakHandle};
pub use read::Shard;

use crate::error::{IssueProblem, Result};
use crate::exec::host_array::HostArray;
use crate::exec::{Runtime, Slot};
use mpmd_layout::aval::{DType, Element, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{Layout, Sharding};
use mpmd_layout::topology::DeviceId;
use mpmd_layout::tree::Leaf;

/// A handle to an array. Cheap to clone; clones are the same array, which never changes.
///
/// It is *committed* where it lives on devices by a sharding: on a process that owns some of them
/// it holds their buffers, or will once the operation that makes them has ended; on every other
/// process it is *fully remote*: shape, dtype and sharding, nothing else. It is *uncommitted* where
/// it is made of host values ([`MpmdArray::from_host`]): every process has the same.
///
/// Await it, or block on it, to know that the local part is complete. A fully remote array is
/// complete at once: knowing more would cost a message.
///
/// Dropping a handle never blocks; memory in use by an operation stays until that has ended.
#[derive(Clone)]
#[must_use = "an array that nobody uses was not worth making"]
pub struct MpmdArray {
    pub(crate) repr: Repr,
}

#[derive(Clone)]
pub(crate) enum Repr {
    Host(HostArray),
    Placed(Handle),
}

/// An array on devices.
pub(crate) struct Placed {
    pub(crate) made: Arc<Made>,
    pub(crate) shards: Shards,
    pub(crate) origin: Origin,
    donated: OnceLock<Donation>,
    /// Handles that there are.
    handles: AtomicUsize,
}

/// What all arrays have in common that one plan makes: in one place, so that making one more costs
/// a pointer.
pub(crate) struct Made {
    pub(crate) aval: ShapedArray,
    pub(crate) sharding: Sharding,
    pub(crate) layout: Arc<Layout>,
    /// The operation that makes them.
    pub(crate) what: Arc<dyn fmt::Display + Send + Sync>,
    pub(crate) runtime: Arc<Runtime>,
}

/// The shards of an array that this process owns. One takes no allocation.
#[derive(Clone)]
pub(crate) enum Shards {
    One(LocalShard),
    Several(Vec<LocalShard>),
}

/// The shard of a device that this process owns.
#[derive(Clone)]
pub(crate) struct LocalShard {
    pub(crate) device: DeviceId,
    pub(crate) slot: Slot,
}

/// The operation that made an array.
#[derive(Clone, Copy)]
pub(crate) struct Origin {
    pub(crate) op: u64,
    /// Which of the operation's results.
    pub(crate) leaf: u32,
    pub(crate) at: &'static Location<'static>,
}

#[derive(Clone, Copy)]
struct Donation {
    op: u64,
    at: &'static Location<'static>,
}

impl Leaf for MpmdArray {}

impl MpmdArray {
    /// An uncommitted array: these values, which must be the same on every process.
    ///
    /// Processes compare the hash of those that an operation takes: of up to 64 bytes always, of
    /// more in debug builds and where
    /// [`Builder::check_uncommitted`](crate::Builder::check_uncommitted) or
    /// `MPMD_CHECK=uncommitted` says so.
    pub fn from_host(values: HostArray) -> Self {
        Self { repr: Repr::Host(values) }
    }

    /// An uncommitted array of `shape` with these row-major values.
    ///
    /// # Errors
    ///
    /// Where the number of values is not that of the shape.
    #[track_caller]
    pub fn from_slice<T: Element>(shape: &[usize], values: &[T]) -> Result<Self> {
        Ok(Self::from_host(HostArray::from_slice(shape, values)?))
    }

    /// An uncommitted scalar: a step number, a learning rate.
    pub fn scalar<T: Element>(value: T) -> Self {
        Self::from_host(HostArray::scalar(value))
    }

    /// The shape and dtype.
    pub fn aval(&self) -> &ShapedArray {
        match &self.repr {
            Repr::Host(host) => host.aval(),
            Repr::Placed(placed) => &placed.made.aval,
        }
    }

    /// The global shape.
    pub fn shape(&self) -> &[usize] {
        self.aval().shape()
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.aval().dtype()
    }

    /// Where the array lives; `None` where it is uncommitted.
    pub fn sharding(&self) -> Option<&Sharding> {
        match &self.repr {
            Repr::Host(_) => None,
            Repr::Placed(placed) => Some(&placed.made.sharding),
        }
    }

    /// Whether this process owns none of the array's devices. Never true of an uncommitted array.
    pub fn is_fully_remote(&self) -> bool {
        match &self.repr {
            Repr::Host(_) => false,
            Repr::Placed(placed) => placed.shards.is_empty(),
        }
    }

    /// Whether both are handles of one array on devices.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        matches!((&self.repr, &other.repr), (Repr::Placed(a), Repr::Placed(b)) if a.is_same(b))
    }

    /// What of it is on this process's devices.
    pub(crate) fn shards(&self) -> &[LocalShard] {
        match &self.repr {
            Repr::Host(_) => &[],
            Repr::Placed(placed) => &placed.shards,
        }
    }

    /// The operation that made it, and which of its results it is, where it was placed.
    pub(crate) fn origin(&self) -> Option<(u64, u32)> {
        match &self.repr {
            Repr::Host(_) => None,
            Repr::Placed(placed) => Some(placed.origin()),
        }
    }

    /// Refuses an array that was donated.
    pub(crate) fn check_usable(&self, path: &str) -> std::result::Result<(), IssueProblem> {
        match &self.repr {
            Repr::Placed(placed) => placed.check_usable(path),
            Repr::Host(_) => Ok(()),
        }
    }
}

impl From<HostArray> for MpmdArray {
    fn from(values: HostArray) -> Self {
        Self::from_host(values)
    }
}

impl fmt::Debug for MpmdArray {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.repr {
            Repr::Host(host) => write!(f, "MpmdArray({}, uncommitted)", host.aval()),
            Repr::Placed(placed) => {
                write!(f, "MpmdArray({}, {}", placed.made.aval, placed.made.sharding)?;
                if placed.shards.is_empty() {
                    f.write_str(", fully remote")?;
                } else if placed.shards.iter().any(|shard| !shard.slot.has_ended()) {
                    f.write_str(", pending")?;
                }
                write!(f, ", operation {})", placed.origin.op)
            }
        }
    }
}

impl Placed {
    /// A handle to a new array.
    pub(crate) fn array(made: Arc<Made>, shards: impl Into<Shards>, origin: Origin) -> MpmdArray {
        let all: Arc<[Self]> = Arc::new([Self::new(made, shards.into(), origin)]);
        MpmdArray { repr: Repr::Placed(Handle::first_of(all, 0)) }
    }

    /// Handles to the new arrays of one operation, each to be taken. They share an allocation.
    pub(crate) fn arrays(all: Arc<[Self]>) -> impl Iterator<Item = MpmdArray> + use<> {
        (0..all.len() as u32).map(move |index| MpmdArray {
            repr: Repr::Placed(Handle::first_of(all.clone(), index)),
        })
    }

    pub(crate) fn new(made: Arc<Made>, shards: Shards, origin: Origin) -> Self {
        Self { made, shards, origin, donated: OnceLock::new(), handles: AtomicUsize::new(1) }
    }

    /// The operation that made it, and which of its results it is.
    pub(crate) fn origin(&self) -> (u64, u32) {
        (self.origin.op, self.origin.leaf)
    }

    /// What it is, for messages.
    pub(crate) fn describe(&self) -> String {
        let (Origin { op, at, .. }, Made { aval, what, .. }) = (&self.origin, &*self.made);
        format!("{aval} of operation {op} ({what}) at {at}")
    }

    /// Bytes that this process holds of it.
    pub(crate) fn local_bytes(&self) -> u64 {
        let Made { aval, layout, .. } = &*self.made;
        let region = |shard: &LocalShard| layout.region_of(shard.device);
        let elements = |shard| region(shard).map_or_else(|| aval.elements(), Region::elements);
        (self.shards.iter().map(elements).sum::<usize>() * aval.dtype().size()) as u64
    }

    pub(crate) fn region(&self, device: DeviceId) -> Region {
        let Made { aval, layout, .. } = &*self.made;
        layout.region_of(device).cloned().unwrap_or_else(|| Region::full(aval.shape()))
    }

    pub(crate) fn slot(&self, device: DeviceId) -> Option<&Slot> {
        self.shards.iter().find(|shard| shard.device == device).map(|shard| &shard.slot)
    }

    pub(crate) fn check_usable(&self, path: &str) -> std::result::Result<(), IssueProblem> {
        match self.donated.get() {
            None => Ok(()),
            Some(donation) => Err(IssueProblem::Donated {
                path: path.to_owned(),
                op: donation.op,
                donated_at: donation.at,
            }),
        }
    }

    /// Ends the array for every clone: operation `op`, issued at `at`, gets its memory.
    pub(crate) fn donate(&self, op: u64, at: &'static Location<'static>) {
        // A second donation cannot get here: the first made the array unusable.
        let _ = self.donated.set(Donation { op, at });
    }

    /// The operation that got its memory, and the line that issued it.
    pub(crate) fn donated_to(&self) -> Option<(u64, &'static Location<'static>)> {
        self.donated.get().map(|donation| (donation.op, donation.at))
    }

    /// What a reader of donated memory is told.
    pub(crate) fn donated_failure(&self) -> Arc<Failure> {
        let message = match self.donated.get() {
            Some(Donation { op, at }) => {
                format!("{} was donated to operation {op} at {at}", self.describe())
            }
            None => format!("{} was donated", self.describe()),
        };
        Arc::new(Failure::new(FailureKind::Donated, self.made.runtime.me, self.origin.op, message))
    }
}

impl Deref for Shards {
    type Target = [LocalShard];

    fn deref(&self) -> &[LocalShard] {
        match self {
            Self::One(shard) => std::slice::from_ref(shard),
            Self::Several(shards) => shards,
        }
    }
}

impl From<Vec<LocalShard>> for Shards {
    fn from(shards: Vec<LocalShard>) -> Self {
        match <[LocalShard; 1]>::try_from(shards) {
            Ok([shard]) => Self::One(shard),
            Err(shards) => Self::Several(shards),
        }
    }
}
