//! Cutting of each device's shard into equal parts.

use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use mpmd_device::copy::{contiguous_bytes, copy_region};

use crate::api::program::{IssuedOp, NewOp, OpPart, Program};
use crate::error::{IssueProblem, Result};
use crate::exec::array::{LocalShard, Made, MpmdArray, Origin, Placed, Repr};
use crate::exec::{AsyncBuffer, BufferPart, OpGuard, Resolver, Runtime, follow};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::MemoryKind;
use mpmd_record::dry_run::{self, OpDescriptor, OpKind, ShardMemory};

impl MpmdArray {
    /// Splits each device's shard into `m` equal parts along `dim`. Moves nothing between devices.
    ///
    /// Each of the `m` results has this array's sharding and 1/`m` of its size in `dim`. If `dim`
    /// is sharded, microbatch `j` consists of the `j`-th part of every device's rows.
    ///
    /// # Errors
    ///
    /// If a device's shard cannot be cut into `m` equal parts, `dim` does not exist, or the array
    /// is uncommitted, donated, or of another program.
    #[track_caller]
    pub fn microbatches(
        &self,
        program: &mut Program,
        dim: usize,
        m: usize,
    ) -> Result<Vec<MpmdArray>> {
        let at = Location::caller();
        program.refuse_in_capture(at, "microbatches")?;
        let placed = self
            .check_microbatches(program, dim, m)
            .map_err(|problem| problem.at(at, "microbatches"))?;

        let mut shape = self.shape().to_vec();
        shape[dim] /= m;
        let aval = ShapedArray::try_new(&shape, self.dtype())?;
        let wrong = |why| {
            IssueProblem::Sharding {
                path: String::new(),
                why,
            }
            .at(at, "microbatches")
        };
        let layout = placed.made.sharding.layout(&shape).map_err(wrong)?;

        let what = Arc::new(MicrobatchesWhat {
            aval: self.aval().clone(),
            dim,
            m,
        });
        let descriptor = || {
            let results =
                vec![dry_run::shards(&layout, self.dtype().size(), |_| ShardMemory::Of(0)); m];
            OpDescriptor::local(&what, OpKind::Relabel, results)
        };

        let words = [
            0x5b1,
            placed.origin.op,
            u64::from(placed.origin.leaf),
            dim as u64,
            m as u64,
        ];
        let IssuedOp { op, guard } = program.issue_op(
            words,
            NewOp {
                part: if placed.shards.is_empty() {
                    OpPart::Idle
                } else {
                    OpPart::Work(0)
                },
                takes: &[self],
                source: Some(placed.origin.op),
                ..NewOp::new(at, &|| what.clone(), &descriptor)
            },
        );
        let runtime = program.runtime.clone();
        let sharding = placed.made.sharding.clone();
        let made = Arc::new(Made::new(aval, sharding, layout, what, runtime.clone()));
        let part = |j: usize| {
            let shards: Vec<LocalShard> = placed
                .shards
                .iter()
                .map(|shard| {
                    let whole = Region::full(&placed.region(shard.device).shape());
                    let cut = ShardCut {
                        part: cut(&whole, dim, m, j),
                        whole,
                        item: self.dtype().size(),
                        op,
                    };
                    let kind = placed.made.sharding.memory_kind();
                    cut.take(&runtime, shard, kind, guard.clone())
                })
                .collect();
            Placed::array(
                made.clone(),
                shards,
                Origin {
                    op,
                    leaf: j as u32,
                    at,
                },
            )
        };
        Ok((0..m).map(part).collect())
    }

    /// Checks that the array's shards can be cut into `m` equal parts along `dim`, and returns the
    /// array's data on devices.
    fn check_microbatches(
        &self,
        program: &Program,
        dim: usize,
        m: usize,
    ) -> std::result::Result<&Placed, IssueProblem> {
        self.check_usable("")?;
        let Repr::Placed(placed) = &self.repr else {
            return Err(IssueProblem::Split(format!(
                "{} is uncommitted: device_put it first",
                self.aval()
            )));
        };
        if !Arc::ptr_eq(&placed.made.runtime, &program.runtime) {
            return Err(IssueProblem::Foreign {
                path: String::new(),
            });
        }

        if dim >= self.shape().len() {
            return Err(IssueProblem::Split(format!(
                "{} has no dimension {dim}",
                self.aval()
            )));
        }
        let uneven = placed
            .made
            .layout
            .regions()
            .iter()
            .any(|region| m == 0 || !region.range(dim).len().is_multiple_of(m));
        if uneven {
            return Err(IssueProblem::Split(format!(
                "dimension {dim} of {} as {} cannot be cut in {m} equal parts on each device",
                self.aval(),
                placed.made.sharding
            )));
        }
        Ok(placed)
    }
}

/// The cut of one part out of a shard.
struct ShardCut {
    whole: Region,
    part: Region,
    /// Bytes per element.
    item: usize,
    op: u64,
}

impl ShardCut {
    /// Returns the part as a shard. The part shares the memory of `shard` if it is contiguous in
    /// `shard`, else it is a copy. `guard` is kept until the part is filled.
    fn take(
        self,
        runtime: &Arc<Runtime>,
        shard: &LocalShard,
        kind: MemoryKind,
        guard: Option<OpGuard>,
    ) -> LocalShard {
        let (resolver, slot) = AsyncBuffer::new();
        match (contiguous_bytes(&self.whole, &self.part, self.item), guard) {
            (Some(range), guard) => {
                follow(
                    &shard.slot,
                    resolver,
                    move |bytes| bytes.slice(range),
                    None,
                    guard,
                );
            }
            (None, Some(guard)) => self.copy(runtime, shard, kind, resolver, guard),
            // A process that holds a shard has a guard, so this case does not occur.
            (None, None) => drop(resolver),
        }

        LocalShard {
            device: shard.device,
            slot,
        }
    }

    /// Copies the part out of `shard` to the same memory kind, and resolves `resolver` with the
    /// copy. The copy runs on the device's stream or on a copy worker.
    fn copy(
        self,
        runtime: &Arc<Runtime>,
        shard: &LocalShard,
        kind: MemoryKind,
        resolver: Resolver,
        guard: OpGuard,
    ) {
        let Self {
            whole,
            part,
            item,
            op,
        } = self;
        if runtime.accelerator_of(shard.device, kind).is_some() {
            return runtime.copy_on_device(
                shard.device,
                op,
                &shard.slot,
                BufferPart {
                    whole,
                    part,
                    item_bytes: item,
                },
                resolver,
                guard,
            );
        }

        let runtime = runtime.clone();
        shard.slot.on_end(move |outcome| {
            let buffer = match outcome {
                Ok(buffer) => buffer.clone(),
                Err(failure) => return resolver.keep(Err(failure.clone())),
            };
            let mover = runtime.clone();
            mover.move_data(Box::new(move || {
                let copied = runtime
                    .staging
                    .allocate(part.elements() * item)
                    .map(|mut copy| {
                        copy_region(&buffer, &whole, &mut copy, &part, &part, item);
                        copy.freeze()
                    });
                let outcome = copied.map_err(|error| runtime.out_of_memory(op, &error));
                drop(buffer);
                resolver.keep(outcome);
                drop(guard);
            }));
        });
    }
}

/// Returns the `j`-th of `m` equal parts of `whole` along `dim`.
fn cut(whole: &Region, dim: usize, m: usize, j: usize) -> Region {
    let ranges = whole.ranges().enumerate().map(|(d, range)| {
        if d == dim {
            let part = range.len() / m;
            range.start + j * part..range.start + (j + 1) * part
        } else {
            range
        }
    });
    Region::new(ranges.collect())
}

struct MicrobatchesWhat {
    aval: ShapedArray,
    dim: usize,
    m: usize,
}

impl fmt::Display for MicrobatchesWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} microbatches of {} along dimension {}",
            self.m, self.aval, self.dim
        )
    }
}
