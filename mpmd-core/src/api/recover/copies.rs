//! The copies of a commit: an operation in which each process copies the regions that it keeps.
//!
//! Copy workers do so as soon as a region is there, and take its hash. The copies are in memory
//! that belongs to no epoch: never a loan of another process, nor a block of a device's pool.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use mpmd_base::block::Mutex;
use mpmd_device::copy::copy_region;
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{Layout, MemoryKind};
use mpmd_layout::spec;
use mpmd_memory::{Pool, SharedBuffer};
use mpmd_proto::router::Failure;
use mpmd_record::dry_run::{self, OpDescriptor, OpKind, ShardMemory};

use super::commit::first_devices;
use crate::api::program::{IssuedOp, NewOp, OpPart, Program};
use crate::error::Result;
use crate::exec::array::{LocalShard, Made, MpmdArray, Origin, Placed, Repr};
use crate::exec::recovery_store::{CommitId, RegionCopy, hash};
use crate::exec::{AsyncBuffer, OpGuard, Resolver, Runtime};

/// An array whose regions are committed.
pub(super) struct ArrayToCopy<'a> {
    pub(super) array: &'a MpmdArray,
    /// The array moved to the sharding in which buddies hold its regions.
    pub(super) buddies: &'a MpmdArray,
    /// The layout of the array with one device per region.
    pub(super) layout: Arc<Layout>,
}

/// Handles to the copies of a commit, once their operation is issued.
pub(super) struct IssuedCopies {
    /// The list of this process's copies, which grows as they are made.
    pub(super) made: Arc<Mutex<Vec<RegionCopy>>>,
    /// An array of the status words, one shard for each process. A process's shard is ready once
    /// its copies are made.
    pub(super) whole: MpmdArray,
}

/// A region that this process copies, and the async buffer that contains it.
struct RegionToCopy {
    copy: PlannedCopy,
    /// True if the region is in the memory of a CUDA device.
    on_accelerator: bool,
    slot: AsyncBuffer,
}

/// The description of one region's copy.
struct PlannedCopy {
    array: usize,
    is_own: bool,
    region: Region,
    /// The region of all bytes in the source buffer. It contains `region`.
    held: Region,
    /// Bytes per element.
    item: usize,
}

/// The state of a commit's copies on this process. The operation ends when the last holder drops
/// it.
struct CommitCopying {
    runtime: Arc<Runtime>,
    memory: Pool,
    made: Arc<Mutex<Vec<RegionCopy>>>,
    state: Mutex<CopyingState>,
    /// This process's status word, to be stored in its shard of [`IssuedCopies::whole`].
    word: u64,
    // Last, so that it is dropped after the memory.
    guard: OpGuard,
}

/// The progress of this process's copies of a commit.
struct CopyingState {
    /// Number of regions that are not copied yet, plus 1 until all are queued.
    left: usize,
    /// Resolves this process's shard of [`IssuedCopies::whole`] when all regions are copied or one
    /// has failed. `None` after that.
    resolver: Option<Resolver>,
}

/// The description of a commit's copies for messages.
struct CommitDescription {
    step: u64,
    arrays: usize,
}

impl Program {
    /// Issues the operation that copies the regions of the commit `id`. `word` is this process's
    /// status word, stored in its shard of [`IssuedCopies::whole`].
    pub(super) fn issue_copies(
        &mut self,
        id: CommitId,
        word: u64,
        arrays: &[ArrayToCopy<'_>],
        memory: Pool,
        at: &'static Location<'static>,
    ) -> Result<IssuedCopies> {
        let devices = first_devices(self.topology());
        let processes = self.mesh_of(&[("process", devices.len())], &devices)?;
        let sharding = processes
            .sharding(spec!["process"])
            .with_memory_kind(MemoryKind::Host);
        let aval = ShapedArray::new(&[devices.len()], DType::U64);
        let layout = sharding.layout(aval.shape())?;

        let runtime = self.runtime.clone();
        let own = devices
            .into_iter()
            .find(|device| runtime.local_index(*device).is_some());
        let sources: Vec<RegionToCopy> = arrays
            .iter()
            .enumerate()
            .flat_map(|(number, array)| RegionToCopy::of_array(&runtime, number, array))
            .collect();
        let bytes: usize = sources
            .iter()
            .map(|source| source.copy.region.elements() * source.copy.item)
            .sum();

        let what = Arc::new(CommitDescription {
            step: id.step,
            arrays: arrays.len(),
        });
        let descriptor = || {
            let results = vec![dry_run::shards(&layout, 1, |_| ShardMemory::Host)];
            OpDescriptor::local(&what, OpKind::ArrayFromFn, results)
        };
        let takes: Vec<&MpmdArray> = arrays
            .iter()
            .flat_map(|one| [one.array, one.buddies])
            .collect();
        let [low, high] = [id.hash as u64, (id.hash >> 64) as u64];
        let part = if own.is_some() {
            OpPart::Work(bytes as u64)
        } else {
            OpPart::Idle
        };

        let IssuedOp { op, guard } = self.issue_op(
            [0xc0b1, id.step, id.number, low, high],
            NewOp {
                part,
                takes: &takes,
                ..NewOp::new(at, &|| what.clone(), &descriptor)
            },
        );

        let made = Arc::default();
        let mut shards = Vec::new();
        if let (Some(device), Some(guard)) = (own, guard) {
            let (resolver, slot) = AsyncBuffer::new();
            let copying = Arc::new(CommitCopying {
                runtime: runtime.clone(),
                memory,
                made: Arc::clone(&made),
                state: Mutex::new(CopyingState {
                    // One more than the regions: a process without any has its copies at once.
                    left: sources.len() + 1,
                    resolver: Some(resolver),
                }),
                word,
                guard,
            });
            sources.into_iter().for_each(|source| copying.begin(source));
            copying.end(Ok(()));
            shards.push(LocalShard { device, slot });
        }

        let whole = Arc::new(Made::new(aval, sharding, layout, what, runtime));
        Ok(IssuedCopies {
            made,
            whole: Placed::array(whole, shards, Origin { op, leaf: 0, at }),
        })
    }
}

impl RegionToCopy {
    /// Returns the regions of an array that this process copies: its own regions, and those for
    /// which it is the buddy.
    fn of_array(runtime: &Runtime, number: usize, to_copy: &ArrayToCopy<'_>) -> Vec<Self> {
        let ArrayToCopy {
            array,
            buddies,
            layout,
        } = to_copy;
        let source = |is_own, region: &Region, held: &Region, on_accelerator, slot| Self {
            copy: PlannedCopy {
                array: number,
                is_own,
                region: region.clone(),
                held: held.clone(),
                item: array.dtype().size(),
            },
            on_accelerator,
            slot,
        };

        let own = layout
            .iter()
            .filter(|(device, _)| runtime.local_index(*device).is_some());
        let own = own.filter_map(|(device, region)| match &array.repr {
            Repr::Host(host) => {
                let slot = AsyncBuffer::filled(host.bytes().clone());
                Some(source(true, region, region, false, slot))
            }
            Repr::Placed(placed) => {
                let kind = placed.made.sharding.memory_kind();
                let on_accelerator = runtime.accelerator_of(device, kind).is_some();
                let slot = placed.slot(device)?.clone();
                Some(source(true, region, region, on_accelerator, slot))
            }
        });

        // A process alone has no buddy.
        let has_buddies = runtime.topology.processes() > 1;
        let mut sources: Vec<Self> = own.collect();
        for shard in buddies.shards().iter().filter(|_| has_buddies) {
            let Repr::Placed(placed) = &buddies.repr else {
                continue;
            };
            let held = placed.region(shard.device);
            let of_others = layout.iter().filter(|(device, region)| {
                runtime.local_index(*device).is_none() && held.contains(region)
            });
            let of_others = of_others
                .map(|(_, region)| source(false, region, &held, false, shard.slot.clone()));
            sources.extend(of_others);
        }
        sources
    }
}

impl CommitCopying {
    /// Queues the copy of a region, to run when the region's buffer is filled. Does not block.
    fn begin(self: &Arc<Self>, source: RegionToCopy) {
        let RegionToCopy {
            copy,
            on_accelerator,
            slot,
        } = source;
        let slot = match on_accelerator {
            true => self.runtime.in_host_memory(self.guard.op(), &slot),
            false => slot,
        };

        let copying = self.clone();
        slot.on_end(move |outcome| match outcome {
            Err(failure) => copying.end(Err(failure.clone())),
            Ok(bytes) => {
                let runtime = copying.runtime.clone();
                let bytes = bytes.clone();
                runtime.move_data(Box::new(move || copying.copy(copy, bytes)));
            }
        });
    }

    /// Copies a region out of the source buffer `bytes`.
    fn copy(&self, copy: PlannedCopy, bytes: SharedBuffer) {
        let PlannedCopy {
            array,
            is_own,
            region,
            held,
            item,
        } = copy;
        let copied = self
            .memory
            .allocate(region.elements() * item)
            .map(|mut copy| {
                copy_region(&bytes, &held, &mut copy, &region, &region, item);
                copy.freeze()
            });
        // Given back before the operation can end.
        drop(bytes);

        match copied {
            Ok(bytes) => {
                let hash = hash(&bytes);
                self.made.lock().push(RegionCopy {
                    array,
                    is_own,
                    region,
                    bytes,
                    hash,
                });
                self.end(Ok(()));
            }
            Err(error) => {
                let failure = self.runtime.out_of_memory(self.guard.op(), &error);
                self.runtime.remember(&failure);
                self.end(Err(failure));
            }
        }
    }

    /// Records that the copy of a region has ended, with success or failure.
    fn end(&self, copied: std::result::Result<(), Arc<Failure>>) {
        let mut state = self.state.lock();
        state.left -= 1;
        let outcome = match copied {
            Ok(()) if state.left > 0 => return,
            Ok(()) => Ok(self.word.to_ne_bytes().to_vec().into()),
            Err(failure) => Err(failure),
        };

        let resolver = state.resolver.take();
        drop(state);
        if let Some(resolver) = resolver {
            resolver.keep(outcome);
        }
    }
}

impl fmt::Display for CommitDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "commit of step {}, {} arrays", self.step, self.arrays)
    }
}
