//! [`MpmdArray`]: a handle to an array on devices, of this process or of others.

mod future;
mod handle;
pub(crate) mod host_array;
pub(crate) mod object;
mod read;

use std::fmt;
use std::ops::Deref;
use std::panic::Location;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use mpmd_proto::{Failure, FailureKind};

pub use future::{ArrayFuture, all_ready};
pub(crate) use handle::{ArrayHandle, NewArrays, WeakHandle};
pub use read::Shard;

use crate::error::{IssueProblem, Result};
use crate::exec::array::host_array::HostArray;
use crate::exec::{AsyncBuffer, Runtime};
use mpmd_layout::aval::{DType, Element, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{Layout, Sharding};
use mpmd_layout::topology::DeviceId;
use mpmd_layout::tree::Leaf;

/// A handle to an array. Cheap to clone; clones refer to the same array, which never changes.
///
/// A *committed* array lives on devices by a sharding. A process that owns some of these devices
/// holds their shards. A shard gets its values when the operation that makes it has ended. On every
/// other process the array is *fully remote*: shape, dtype and sharding only. An *uncommitted*
/// array holds host values ([`MpmdArray::from_host`]), which are the same on every process.
///
/// Await the array, or block on it, to know that this process's part of its operation is done. That
/// is when the local shards are filled, and the pieces that this process sends or forwards were
/// received or copied out. So a sender can wait for its send. On a process without a part the
/// handle is complete from the start, and reports no failures of other processes.
///
/// Dropping a handle never blocks. An operation keeps the memory that it uses until it has ended.
#[derive(Clone)]
#[must_use = "an array that is not used was computed for nothing"]
pub struct MpmdArray {
    pub(crate) repr: Repr,
}

#[derive(Clone)]
pub(crate) enum Repr {
    Host(HostArray),
    Placed(ArrayHandle),
}

/// An array on devices.
pub(crate) struct Placed {
    pub(crate) made: Arc<Made>,
    pub(crate) shards: Shards,
    /// This process's sends in the operations that make the array. `None` without sends.
    pub(crate) sends: Option<Box<ArraySends>>,
    pub(crate) origin: Origin,
    donated: OnceLock<Donation>,
    /// True if [`Placed::watch`] was called: a donation of the array is then counted.
    watched: AtomicBool,
    /// Number of handles to this array.
    handles: AtomicUsize,
}

/// The properties that all arrays of one plan share. Each array points to the same object.
pub(crate) struct Made {
    pub(crate) aval: ShapedArray,
    pub(crate) sharding: Sharding,
    pub(crate) layout: Arc<Layout>,
    /// Describes the operation that makes the arrays, for messages.
    pub(crate) what: Arc<dyn fmt::Display + Send + Sync>,
    pub(crate) runtime: Arc<Runtime>,
    /// Size in bytes of the whole array.
    pub(crate) bytes: usize,
}

/// The shards of an array that this process owns. A single shard needs no allocation of its own.
#[derive(Clone)]
pub(crate) enum Shards {
    One(LocalShard),
    Several(Vec<LocalShard>),
}

/// One shard of an array, on a device of this process.
#[derive(Clone)]
pub(crate) struct LocalShard {
    pub(crate) device: DeviceId,
    pub(crate) slot: AsyncBuffer,
}

/// The pieces that this process sends to peers while an array is made.
#[derive(Clone)]
pub(crate) struct ArraySends {
    pub(crate) op: u64,
    /// An async buffer without bytes. It ends when all pieces were taken or copied out, or with the
    /// first failure.
    pub(crate) left: AsyncBuffer,
    /// The sends of the operation before, if the array's move takes several operations.
    pub(crate) before: Option<Box<Self>>,
}

/// The operation that made an array, and the line that issued it.
#[derive(Clone, Copy)]
pub(crate) struct Origin {
    pub(crate) op: u64,
    /// Index of the array among the operation's results.
    pub(crate) leaf: u32,
    pub(crate) at: &'static Location<'static>,
}

#[derive(Clone, Copy)]
struct Donation {
    op: u64,
    at: &'static Location<'static>,
}

/// Numbers of devices of an array.
struct DeviceCounts {
    /// Number of devices that this process owns.
    here: usize,
    all: usize,
}

impl Leaf for MpmdArray {}

impl MpmdArray {
    /// Creates an uncommitted array of these values, which must be the same on every process.
    ///
    /// Use [`Program::array_from_fn`](crate::Program::array_from_fn) for values that differ between
    /// processes, such as a process's part of a batch.
    ///
    /// Processes compare a hash of the values that an operation takes. Up to 4 KiB the hash covers
    /// all values. Of a larger array it covers 64 blocks of 64 bytes, and only at some calls all
    /// values. These are the calls 1, 2, 4, 8 and so on with about as many bytes, and a few others.
    /// In debug builds, or if [`Builder::check_uncommitted`](crate::Builder::check_uncommitted) or
    /// `MPMD_CHECK=uncommitted` is set, it covers all values at every call.
    pub fn from_host(values: HostArray) -> Self {
        Self {
            repr: Repr::Host(values),
        }
    }

    /// Creates an uncommitted array of `shape` from row-major values.
    ///
    /// # Errors
    ///
    /// If the number of values is not the number of elements of `shape`, or the shape is too large.
    #[track_caller]
    pub fn from_slice<T: Element>(shape: &[usize], values: &[T]) -> Result<Self> {
        Ok(Self::from_host(HostArray::from_slice(shape, values)?))
    }

    /// Creates an uncommitted scalar, such as a step number or a learning rate.
    pub fn scalar<T: Element>(value: T) -> Self {
        Self::from_host(HostArray::scalar(value))
    }

    /// Returns the shape and dtype.
    pub fn aval(&self) -> &ShapedArray {
        match &self.repr {
            Repr::Host(host) => host.aval(),
            Repr::Placed(placed) => &placed.made().aval,
        }
    }

    /// Returns the global shape.
    pub fn shape(&self) -> &[usize] {
        self.aval().shape()
    }

    /// Returns the element type.
    pub fn dtype(&self) -> DType {
        self.aval().dtype()
    }

    /// Returns the sharding; `None` for an uncommitted array.
    pub fn sharding(&self) -> Option<&Sharding> {
        match &self.repr {
            Repr::Host(_) => None,
            Repr::Placed(placed) => Some(&placed.made().sharding),
        }
    }

    /// Returns true if this process owns none of the array's devices. Always false for an
    /// uncommitted array.
    pub fn is_fully_remote(&self) -> bool {
        self.device_counts().is_some_and(|count| count.here == 0)
    }

    /// Returns true if this process owns all of the array's devices. Always false for an
    /// uncommitted array.
    pub fn is_fully_local(&self) -> bool {
        self.device_counts()
            .is_some_and(|count| count.here == count.all)
    }

    /// Returns true if this process owns some of the array's devices, but not all. Always false for
    /// an uncommitted array.
    pub fn is_partially_local(&self) -> bool {
        self.device_counts()
            .is_some_and(|count| count.here > 0 && count.here < count.all)
    }

    /// Counts the array's devices. `None` for an uncommitted array.
    fn device_counts(&self) -> Option<DeviceCounts> {
        match &self.repr {
            Repr::Host(_) => None,
            Repr::Placed(placed) => Some(DeviceCounts {
                here: placed.shards.len(),
                all: placed.made.sharding.devices().len(),
            }),
        }
    }

    /// Returns the properties that all arrays of the same plan share. `None` for an uncommitted
    /// array.
    pub(crate) fn made(&self) -> Option<&Arc<Made>> {
        match &self.repr {
            Repr::Host(_) => None,
            Repr::Placed(placed) => Some(placed.made()),
        }
    }

    /// Returns the word by which the array enters the rolling hash of an operation. All uncommitted
    /// arrays have the same word; their values are hashed separately.
    pub(crate) fn word(&self) -> u64 {
        match &self.repr {
            Repr::Placed(placed) => placed.whole_origin().word(),
            Repr::Host(_) => u64::MAX,
        }
    }

    /// Returns true if both are handles to the same array on devices. False for uncommitted arrays.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        matches!((&self.repr, &other.repr), (Repr::Placed(a), Repr::Placed(b)) if a.is_same(b))
    }

    /// Returns the shards on this process's devices. Empty for uncommitted and fully remote arrays.
    pub(crate) fn shards(&self) -> &[LocalShard] {
        match &self.repr {
            Repr::Host(_) => &[],
            Repr::Placed(placed) => &placed.shards,
        }
    }

    /// Returns this process's sends in the operations that make the array; `None` if it has none.
    pub(crate) fn sends(&self) -> Option<&ArraySends> {
        match &self.repr {
            Repr::Host(_) => None,
            Repr::Placed(placed) => placed.sends.as_deref(),
        }
    }

    /// Returns (number of the operation that made the array, index among its results). `None` for
    /// an uncommitted array.
    pub(crate) fn origin(&self) -> Option<(u64, u32)> {
        match &self.repr {
            Repr::Host(_) => None,
            Repr::Placed(placed) => {
                let Origin { op, leaf, .. } = placed.whole_origin();
                Some((op, leaf))
            }
        }
    }

    /// Returns an error if the array was donated. `path` names the array in the error.
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
                write!(
                    f,
                    "MpmdArray({}, {}",
                    placed.made.aval, placed.made.sharding
                )?;
                if placed.shards.is_empty() {
                    f.write_str(", fully remote")?;
                }
                if placed.parts().any(|part| !part.has_ended()) {
                    f.write_str(", pending")?;
                }
                write!(f, ", operation {})", placed.origin.op)
            }
        }
    }
}

impl Made {
    pub(crate) fn new(
        aval: ShapedArray,
        sharding: Sharding,
        layout: Arc<Layout>,
        what: Arc<dyn fmt::Display + Send + Sync>,
        runtime: Arc<Runtime>,
    ) -> Self {
        let bytes = aval.bytes();
        Self {
            aval,
            sharding,
            layout,
            what,
            runtime,
            bytes,
        }
    }
}

impl Origin {
    /// Returns a word that identifies the array within its program, if there are fewer than 2^40
    /// operations.
    fn word(self) -> u64 {
        self.op ^ u64::from(self.leaf) << 40
    }
}

impl Placed {
    /// Creates a new array and returns a handle to it.
    pub(crate) fn array(made: Arc<Made>, shards: impl Into<Shards>, origin: Origin) -> MpmdArray {
        Self::array_after(None, made, shards, origin)
    }

    /// Creates a new array and returns a handle to it. The array is complete only after `sends`
    /// too.
    pub(crate) fn array_after(
        sends: Option<ArraySends>,
        made: Arc<Made>,
        shards: impl Into<Shards>,
        origin: Origin,
    ) -> MpmdArray {
        Self {
            sends: sends.map(Box::new),
            ..Self::new(made, shards.into(), origin)
        }
        .into_array()
    }

    pub(crate) fn new(made: Arc<Made>, shards: Shards, origin: Origin) -> Self {
        Self {
            made,
            shards,
            sends: None,
            origin,
            donated: OnceLock::new(),
            watched: AtomicBool::new(false),
            handles: AtomicUsize::new(1),
        }
    }

    /// Returns the sends of the operations that make the array, last operation first.
    fn sends(&self) -> impl Iterator<Item = &ArraySends> {
        std::iter::successors(self.sends.as_deref(), |sends| sends.before.as_deref())
    }

    /// Returns the async buffers of this process's part in making the array: its shards, then its
    /// sends. The part is done when all have ended.
    fn parts(&self) -> impl Iterator<Item = &AsyncBuffer> {
        let shards = self.shards.iter().map(|shard| &shard.slot);
        shards.chain(self.sends().map(|sends| &sends.left))
    }

    /// Asks the receivers of unfinished sends to report as soon as they have taken the pieces. Does
    /// not block.
    fn ask_taken(&self) {
        for sends in self.sends().filter(|sends| !sends.left.has_ended()) {
            self.made.runtime.ask_taken(sends.op);
        }
    }

    /// Returns (number of the operation that made the array, index among its results).
    pub(crate) fn origin(&self) -> (u64, u32) {
        (self.origin.op, self.origin.leaf)
    }

    /// Returns the array as a dry run knows it.
    pub(crate) fn dry_run_array(&self) -> mpmd_record::dry_run::Array {
        mpmd_record::dry_run::Array {
            operation: self.origin.op,
            result: self.origin.leaf,
        }
    }

    /// Describes the array for messages: dtype and shape, operation, line.
    pub(crate) fn describe(&self) -> String {
        let Origin { op, at, .. } = &self.origin;
        let Made { aval, what, .. } = &*self.made;
        format!("{aval} of operation {op} ({what}) at {at}")
    }

    /// Returns the size in bytes of this process's shards of the array.
    pub(crate) fn local_bytes(&self) -> u64 {
        self.shards
            .iter()
            .map(|shard| self.shard_bytes(shard))
            .sum()
    }

    /// Returns the size in bytes of one of this process's shards.
    pub(crate) fn shard_bytes(&self, shard: &LocalShard) -> u64 {
        let Made { aval, layout, .. } = &*self.made;
        let region = layout.region_of(shard.device);
        let elements = region.map_or_else(|| aval.elements(), Region::elements);
        (elements * aval.dtype().size()) as u64
    }

    pub(crate) fn region(&self, device: DeviceId) -> Region {
        let Made { aval, layout, .. } = &*self.made;
        layout
            .region_of(device)
            .cloned()
            .unwrap_or_else(|| Region::full(aval.shape()))
    }

    pub(crate) fn slot(&self, device: DeviceId) -> Option<&AsyncBuffer> {
        self.shards
            .iter()
            .find(|shard| shard.device == device)
            .map(|shard| &shard.slot)
    }

    /// Returns true if the array was donated and must not be used any more.
    #[inline]
    pub(crate) fn is_donated(&self) -> bool {
        self.donated.get().is_some()
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

    /// Marks the array as donated, for every clone: operation `op`, issued at `at`, takes over its
    /// memory.
    pub(crate) fn donate(&self, op: u64, at: &'static Location<'static>) {
        // A second donation is impossible: the first has made the array unusable.
        let _ = self.donated.set(Donation { op, at });
        if self.watched.load(Ordering::Relaxed) {
            self.made
                .runtime
                .watched_donations
                .fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Watches the array: from now on its donation raises [`Runtime::watched_donations`]. While
    /// that count stays the same, the caller need not check its watched arrays again.
    pub(crate) fn watch(&self) {
        self.watched.store(true, Ordering::Relaxed);
    }

    /// Returns (operation that took over the array's memory, line that issued it). `None` if the
    /// array was not donated.
    pub(crate) fn donated_to(&self) -> Option<(u64, &'static Location<'static>)> {
        self.donated
            .get()
            .map(|donation| (donation.op, donation.at))
    }

    /// Creates the failure for readers of the array after it was donated.
    pub(crate) fn donated_failure(&self) -> Arc<Failure> {
        let message = match self.donated.get() {
            Some(Donation { op, at }) => {
                format!("{} was donated to operation {op} at {at}", self.describe())
            }
            None => format!("{} was donated", self.describe()),
        };
        Arc::new(Failure::new(
            FailureKind::Donated,
            self.made.runtime.me,
            self.origin.op,
            message,
        ))
    }
}

/// Clears a list of borrowed arrays and returns it with its capacity, for reuse by a later call.
pub(crate) fn emptied<'a>(mut leaves: Vec<&MpmdArray>) -> Vec<&'a MpmdArray> {
    leaves.clear();
    // Collected in place, so the capacity stays.
    leaves
        .into_iter()
        .map(|_| -> &'a MpmdArray { unreachable!("the list is empty") })
        .collect()
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
