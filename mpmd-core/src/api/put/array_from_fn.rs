//! Creation of arrays on their owners.

use std::borrow::Borrow;
use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;

use mpmd_proto::{Failure, FailureKind};

use crate::api::program::{NewOp, Part, Program};
use crate::error::{IssueProblem, Result, panic_text};
use crate::exec::array::{LocalShard, Made, MpmdArray, Origin, Placed};
use crate::exec::{AsyncBuffer, Rolling};
use crate::kernel::{ShardInfo, ViewMut};
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{MemoryKind, Sharding};
use mpmd_record::dry_run::{self, Kind, Memory, OpDescriptor};

impl Program {
    /// Creates an array on its owners: `fill` runs on each device, for that device's region.
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
        let (at, sharding) = (Location::caller(), sharding.borrow());
        self.refuse_in_capture(at, "array_from_fn")?;
        let wrong = |why| {
            IssueProblem::Sharding {
                path: String::new(),
                why,
            }
            .at(at, "array_from_fn")
        };
        sharding
            .check_devices(&self.runtime.topology)
            .map_err(wrong)?;
        let layout = sharding.layout(aval.shape()).map_err(wrong)?;
        if !sharding.unreduced_axes().is_empty() {
            let (sharding, reduced) = (sharding.to_string(), sharding.reduced().to_string());
            let problem = IssueProblem::Unreduced {
                path: String::new(),
                sharding,
                reduced,
            };
            return Err(problem.at(at, "array_from_fn"));
        }
        let what = Arc::new(MakeWhat {
            aval: aval.clone(),
            sharding: sharding.clone(),
        });
        let local: Vec<_> = layout
            .iter()
            .filter_map(|(device, region)| {
                Some((self.runtime.local_index(device)?, device, region.clone()))
            })
            .collect();
        let descriptor = || {
            let memory = match sharding.memory_kind() {
                MemoryKind::Device => Memory::Own,
                MemoryKind::Host => Memory::Host,
            };
            let results = vec![dry_run::shards(&layout, aval.dtype().size(), |_| memory)];
            OpDescriptor::local(&what, Kind::ArrayFromFn, results)
        };
        let (item, kind) = (aval.dtype().size(), sharding.memory_kind());
        let bytes: usize = local
            .iter()
            .map(|(_, _, region)| region.elements() * item)
            .sum();
        let word = Rolling::default()
            .mix_bytes(aval.to_string().as_bytes())
            .word();
        let (op, guard) = self.issue_op(
            [0x3a4e, sharding.fingerprint(), word],
            NewOp {
                part: if local.is_empty() {
                    Part::Idle
                } else {
                    Part::Work(bytes as u64)
                },
                ..NewOp::new(at, &|| what.clone(), &descriptor)
            },
        );
        let runtime = self.runtime.clone();
        let fill = Arc::new(fill);
        let shards: Vec<LocalShard> = local
            .into_iter()
            .map(|(local_index, device, region)| {
                let (resolver, slot) = AsyncBuffer::new();
                let shard = LocalShard { device, slot };
                let reservation = match runtime.reserve(
                    local_index,
                    kind,
                    region.elements() * item,
                    op,
                    &*what,
                ) {
                    Ok(reservation) => reservation,
                    Err(failure) => {
                        runtime.remember(&failure);
                        resolver.keep(Err(failure));
                        return shard;
                    }
                };
                let info = ShardInfo::new(aval.clone(), region);
                let (here, fill, guard, what) =
                    (runtime.clone(), fill.clone(), guard.clone(), what.clone());
                let on_accelerator = runtime.accelerator_of(device, kind).is_some();
                let job = move || {
                    here.status.device_starts(local_index, op, what);
                    let started = here.trace.now();
                    let (buffer, copied) = match on_accelerator {
                        true => (here.staging.allocate(info.bytes()), Some(reservation)),
                        false => (reservation.allocate(), None),
                    };
                    here.trace_start(local_index, op, started, started, None);
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
                            let failure = Arc::new(Failure::new(kind, here.me, op, message));
                            here.remember(&failure);
                            failure
                        });
                    here.status.device_ends(local_index, op);
                    here.trace_end(local_index, op);
                    match (outcome, copied, guard) {
                        (Ok(values), Some(reservation), Some(guard)) => {
                            here.copy_in(device, op, values, reservation, resolver, guard);
                        }
                        (outcome, _, guard) => {
                            resolver.keep(outcome);
                            drop(guard);
                        }
                    }
                };
                runtime.run_on(local_index, Box::new(job));
                shard
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
