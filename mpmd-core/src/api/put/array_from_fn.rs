//! Creation of arrays on their owners.

use std::borrow::Borrow;
use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;

use mpmd_proto::{Failure, FailureKind};

use crate::api::program::{IssuedOp, NewOp, OpPart, Program};
use crate::error::{IssueProblem, Result, panic_text};
use crate::exec::array::{LocalShard, Made, MpmdArray, Origin, Placed};
use crate::exec::{AsyncBuffer, OpGuard, Resolver, Rolling, Runtime};
use crate::kernel::{ShardInfo, ViewMut};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{Layout, MemoryKind, Sharding};
use mpmd_layout::topology::DeviceId;
use mpmd_memory::Reservation;
use mpmd_record::dry_run::{self, OpDescriptor, OpKind, ShardMemory};

impl Program {
    /// Creates an array directly on its devices: `fill` runs on each device, for that device's
    /// region.
    ///
    /// Moves nothing, and no process holds more than its own part. `fill` must compute each element
    /// only from the element's index in the whole array, as [`mpmd_layout::random`] does. Then the
    /// array is the same under any sharding. Returns without waiting for `fill`.
    ///
    /// # Errors
    ///
    /// If the sharding does not fit the shape, or has unreduced axes. An error or a panic of `fill`
    /// fails the array instead.
    #[track_caller]
    pub fn array_from_fn(
        &mut self,
        aval: ShapedArray,
        sharding: impl Borrow<Sharding>,
        fill: impl Fn(&Region, ViewMut<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Result<MpmdArray> {
        let at = Location::caller();
        let sharding = sharding.borrow();
        self.refuse_in_capture(at, "array_from_fn")?;
        let layout = self
            .layout_to_fill(&aval, sharding)
            .map_err(|problem| problem.at(at, "array_from_fn"))?;
        let local: Vec<_> = layout
            .iter()
            .filter_map(|(device, region)| {
                Some(LocalPart {
                    local_index: self.runtime.local_index(device)?,
                    device,
                    region: region.clone(),
                })
            })
            .collect();

        let what = Arc::new(MakeWhat {
            aval: aval.clone(),
            sharding: sharding.clone(),
        });
        let descriptor = || {
            let memory = match sharding.memory_kind() {
                MemoryKind::Device => ShardMemory::Own,
                MemoryKind::Host => ShardMemory::Host,
            };
            let results = vec![dry_run::shards(&layout, aval.dtype().size(), |_| memory)];
            OpDescriptor::local(&what, OpKind::ArrayFromFn, results)
        };
        let item = aval.dtype().size();
        let kind = sharding.memory_kind();
        let bytes: usize = local.iter().map(|part| part.region.elements() * item).sum();
        let word = Rolling::default()
            .mix_bytes(aval.to_string().as_bytes())
            .word();
        let IssuedOp { op, guard } = self.issue_op(
            [0x3a4e, sharding.fingerprint(), word],
            NewOp {
                part: if local.is_empty() {
                    OpPart::Idle
                } else {
                    OpPart::Work(bytes as u64)
                },
                ..NewOp::new(at, &|| what.clone(), &descriptor)
            },
        );

        let runtime = self.runtime.clone();
        let fill = Arc::new(fill);
        let shards: Vec<LocalShard> = local
            .into_iter()
            .map(|part| {
                let (resolver, slot) = AsyncBuffer::new();
                let task = FillTask {
                    info: ShardInfo::new(aval.clone(), part.region),
                    runtime: runtime.clone(),
                    fill: fill.clone(),
                    what: what.clone(),
                    on_accelerator: runtime.accelerator_of(part.device, kind).is_some(),
                    local_index: part.local_index,
                    device: part.device,
                    op,
                    at,
                };
                task.queue(kind, guard.clone(), resolver);
                LocalShard {
                    device: part.device,
                    slot,
                }
            })
            .collect();

        let made = Made::new(aval, sharding.clone(), layout, what, runtime);
        drop(guard);
        self.synced(at)?;
        Ok(Placed::array(
            Arc::new(made),
            shards,
            Origin { op, leaf: 0, at },
        ))
    }

    /// Returns the layout of an array that is to be filled. Fails if the sharding does not fit the
    /// shape, or has unreduced axes.
    fn layout_to_fill(
        &self,
        aval: &ShapedArray,
        sharding: &Sharding,
    ) -> std::result::Result<Arc<Layout>, IssueProblem> {
        let wrong = |why| IssueProblem::Sharding {
            path: String::new(),
            why,
        };
        sharding
            .check_devices(&self.runtime.topology)
            .map_err(wrong)?;
        let layout = sharding.layout(aval.shape()).map_err(wrong)?;

        if !sharding.unreduced_axes().is_empty() {
            return Err(IssueProblem::Unreduced {
                path: String::new(),
                sharding: sharding.to_string(),
                reduced: sharding.reduced().to_string(),
            });
        }
        Ok(layout)
    }
}

/// A region of the array on a device of this process.
struct LocalPart {
    local_index: usize,
    device: DeviceId,
    region: Region,
}

/// The job that fills one device's region of the array.
struct FillTask<F> {
    info: ShardInfo,
    runtime: Arc<Runtime>,
    fill: Arc<F>,
    what: Arc<MakeWhat>,
    on_accelerator: bool,
    local_index: usize,
    device: DeviceId,
    op: u64,
    at: &'static Location<'static>,
}

impl<F> FillTask<F>
where
    F: Fn(&Region, ViewMut<'_>) -> Result<()> + Send + Sync + 'static,
{
    /// Reserves memory for the region, which may block, and queues the job on its device. A failure
    /// resolves `resolver` as failed. `guard` keeps the operation in flight until the region is
    /// filled.
    fn queue(self, kind: MemoryKind, guard: Option<OpGuard>, resolver: Resolver) {
        let runtime = self.runtime.clone();
        let local_index = self.local_index;
        let bytes = self.info.bytes();
        match runtime.reserve(local_index, kind, bytes, self.op, &*self.what) {
            Ok(reservation) => {
                let job = move || self.run(reservation, guard, resolver);
                runtime.run_on(local_index, Box::new(job));
            }
            Err(failure) => {
                runtime.remember(&failure);
                resolver.keep(Err(failure));
            }
        }
    }

    /// Fills the region in the reserved memory, and resolves `resolver` with the buffer or a
    /// failure.
    fn run(self, reservation: Reservation, guard: Option<OpGuard>, resolver: Resolver) {
        let Self {
            info,
            runtime,
            fill,
            what,
            on_accelerator,
            local_index,
            device,
            op,
            at,
        } = self;
        runtime.status.device_starts(local_index, op, what, None);
        let started = runtime.trace.now();
        let (buffer, copied) = match on_accelerator {
            true => (runtime.staging.allocate(info.bytes()), Some(reservation)),
            false => (reservation.allocate(), None),
        };
        runtime.trace_start(local_index, op, started, started, None);

        // The closure fills host memory; a CUDA device gets a copy of it.
        let outcome = buffer
            .map_err(|error| (FailureKind::Memory, format!("out of memory on {error}")))
            .and_then(|mut buffer| {
                let view = ViewMut::new(&mut buffer, &info);
                match catch_unwind(AssertUnwindSafe(|| fill(&info.region, view))) {
                    Ok(Ok(())) => Ok(buffer.freeze()),
                    Ok(Err(error)) => Err((FailureKind::Kernel, error.to_string())),
                    Err(panic) => Err((FailureKind::Kernel, panic_text(&*panic))),
                }
            })
            .map_err(|(kind, why)| {
                let message = format!(
                    "array_from_fn (operation {op}) at {at} failed on device \
                     {device}: {why}"
                );
                let failure = Arc::new(Failure::new(kind, runtime.me, op, message));
                runtime.remember(&failure);
                failure
            });
        runtime.status.device_ends(local_index, op);
        runtime.trace_end(local_index, op);

        match (outcome, copied, guard) {
            (Ok(values), Some(reservation), Some(guard)) => {
                runtime.copy_in(device, op, values, reservation, resolver, guard);
            }
            (outcome, _, guard) => {
                resolver.keep(outcome);
                drop(guard);
            }
        }
    }
}

struct MakeWhat {
    aval: ShapedArray,
    sharding: Sharding,
}

impl fmt::Display for MakeWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "array_from_fn {} as {}", self.aval, self.sharding)
    }
}
