//! Moving arrays: `device_put`, and the ways to create arrays without a kernel.
//!
//! [`Program::device_put`] checks and plans all leaves first, then issues one or two operations for
//! each. This process's part of a move is in `PutPlan::run`.

use std::fmt;
use std::panic::{AssertUnwindSafe, Location, catch_unwind};
use std::sync::Arc;

use mpmd_transport::{Failure, FailureKind};

use crate::api::program::{Again, NewOp, Part, Program, PutKey, Replayed};
use crate::device::copy::{contiguous_bytes, copy_region};
use crate::dry_run::{self, Kind, Memory, OpDescriptor};
use crate::error::{IssueProblem, Result};
use crate::exec::array::{LocalShard, Made, MpmdArray, Origin, Placed, Repr};
use crate::exec::{AsyncBuffer, OpGuard, PutPlan, Resolver, Rolling, Runtime, Source, follow};
use crate::kernel::{ShardInfo, ViewMut};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::reshard::scattered;
use mpmd_layout::sharding::{Layout, MemoryKind, Sharding};
use mpmd_layout::tree::{PrefixTree, Tree};

/// Options of [`Program::device_put_with`] and [`Program::reshard`] for memory and plans.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct MoveOptions {
    /// True to donate the source arrays. Every clone of them becomes unusable, and the memory of
    /// each is freed as soon as no operation needs it. Off by default.
    pub donate: bool,
    /// True to let the result share memory with the source. On by default, which is safe since
    /// arrays never change.
    pub may_alias: bool,
    /// True to look up plans in the plan cache and store them there. On by default. Turn it off for
    /// arrays that are moved once.
    pub cache_plans: bool,
}

impl Default for MoveOptions {
    fn default() -> Self {
        Self { donate: false, may_alias: true, cache_plans: true }
    }
}

impl MoveOptions {
    /// Sets [`MoveOptions::donate`].
    #[must_use]
    pub fn donate(mut self, donate: bool) -> Self {
        self.donate = donate;
        self
    }

    /// Sets [`MoveOptions::may_alias`].
    #[must_use]
    pub fn may_alias(mut self, may_alias: bool) -> Self {
        self.may_alias = may_alias;
        self
    }

    /// Sets [`MoveOptions::cache_plans`].
    #[must_use]
    pub fn cache_plans(mut self, cache_plans: bool) -> Self {
        self.cache_plans = cache_plans;
        self
    }
}

/// The plans that move one array, in order.
pub(crate) struct PutSteps {
    /// For partial sums with several target devices: the plan that reduces and scatters them first.
    first: Option<Arc<PutPlan>>,
    last: Arc<PutPlan>,
}

impl Program {
    /// Moves every array of a tree to a sharding.
    ///
    /// Each process derives its own part from the ownership of regions: nothing, a local copy,
    /// sends, receives, or any mix. Any sharding moves to any other, on any devices. Returns
    /// without waiting for the move. `to` is one sharding for all leaves, or a tree of them that is
    /// a prefix of `x`.
    ///
    /// An uncommitted array has the same values on every process, so placing it sends no message.
    ///
    /// Partial sums are added up, unless the target has the same layout. The terms are added in the
    /// order of the unreduced axes and in the array's dtype, so the bits do not depend on timing.
    /// Large partial sums with several target devices take two operations: each device adds up a
    /// part, then the parts are gathered. A target with unreduced axes gets the values as its first
    /// partial sum, and zeros as the others.
    ///
    /// # Errors
    ///
    /// If a sharding does not fit its array, the prefix does not fit the tree, or an array was
    /// donated. If partial sums of booleans would have to be added up. The error is the same on
    /// every process, and nothing is moved.
    #[track_caller]
    pub fn device_put<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        to: impl Into<PrefixTree<Sharding>>,
    ) -> Result<T::With<MpmdArray>> {
        let at = self.caller(Location::caller());
        self.put_at(x, &to.into(), MoveOptions::default(), at)
    }

    /// Does the same as [`Program::device_put`], with [`MoveOptions`].
    ///
    /// # Errors
    ///
    /// The errors of [`Program::device_put`].
    #[track_caller]
    pub fn device_put_with<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        to: impl Into<PrefixTree<Sharding>>,
        options: MoveOptions,
    ) -> Result<T::With<MpmdArray>> {
        let at = self.caller(Location::caller());
        self.put_at(x, &to.into(), options, at)
    }

    fn put_at<T: Tree<Leaf = MpmdArray>>(
        &mut self,
        x: &T,
        to: &PrefixTree<Sharding>,
        options: MoveOptions,
        at: &'static Location<'static>,
    ) -> Result<T::With<MpmdArray>> {
        let wrong = |problem: IssueProblem| problem.at(at, "device_put");
        let shardings =
            to.broadcast(&x.structure()).map_err(|error| wrong(IssueProblem::Tree(error)))?;
        let leaves = x.leaves_with_paths();
        // All leaves are checked before any is moved.
        let mut plans = Vec::with_capacity(leaves.len());
        for ((path, array), sharding) in leaves.iter().zip(&shardings) {
            array.check_usable(path).map_err(wrong)?;
            plans.push(self.put_steps(path, array, sharding, options.cache_plans).map_err(wrong)?);
        }
        if options.donate {
            refuse_twice(&leaves).map_err(wrong)?;
            self.check_given_up(&leaves).map_err(wrong)?;
        }
        let mut moved = Vec::with_capacity(leaves.len());
        for ((_, array), steps) in leaves.into_iter().zip(plans) {
            moved.push(self.put_along(array, &steps, options, at));
        }
        let mut moved = moved.into_iter();
        Ok(x.map_ref(&mut |_| moved.next().expect("one result for each leaf")))
    }

    /// Returns the plans that move an array to a sharding. With `cache`, looks them up in the plan
    /// cache and stores them there.
    pub(crate) fn put_steps(
        &mut self,
        path: &str,
        array: &MpmdArray,
        to: &Sharding,
        cache: bool,
    ) -> std::result::Result<PutSteps, IssueProblem> {
        // This direct plan reports all mistakes, also if the array moves in two steps.
        let last = self.put_plan(path, array, to, cache)?;
        let sums = array.sharding().filter(|from| !from.unreduced_axes().is_empty() && *from != to);
        let through = sums.and_then(|from| {
            scattered(from, array.shape(), &last.made.layout, array.dtype().size())
        });
        let Some(through) = through else { return Ok(PutSteps { first: None, last }) };
        let first = self.put_plan(path, array, &through, cache)?;
        let last = self.put_plan_between(path, array.aval(), Some(&through), to, cache)?;
        Ok(PutSteps { first: Some(first), last })
    }

    /// Issues a checked and planned move: one operation, or two.
    pub(crate) fn put_along(
        &mut self,
        array: &MpmdArray,
        steps: &PutSteps,
        options: MoveOptions,
        at: &'static Location<'static>,
    ) -> MpmdArray {
        let Some(first) = &steps.first else {
            return self.put_one(array, &steps.last, options, at);
        };
        let summed = self.put_one(array, first, options, at);
        // The intermediate array has no other handle, so it can be donated.
        self.put_one(&summed, &steps.last, MoveOptions::default().donate(true), at)
    }

    /// Returns the plan that moves an array. With `cache`, looks it up in the plan cache and stores
    /// it there.
    pub(crate) fn put_plan(
        &mut self,
        path: &str,
        array: &MpmdArray,
        to: &Sharding,
        cache: bool,
    ) -> std::result::Result<Arc<PutPlan>, IssueProblem> {
        if let Repr::Placed(placed) = &array.repr
            && !Arc::ptr_eq(&placed.made.runtime, &self.runtime)
        {
            return Err(IssueProblem::Foreign { path: path.to_owned() });
        }
        self.put_plan_between(path, array.aval(), array.sharding(), to, cache)
    }

    /// Does the same as [`Program::put_plan`], for an array that does not have to exist yet.
    pub(crate) fn put_plan_between(
        &mut self,
        path: &str,
        aval: &ShapedArray,
        from: Option<&Sharding>,
        to: &Sharding,
        cache: bool,
    ) -> std::result::Result<Arc<PutPlan>, IssueProblem> {
        let wrong = |why| IssueProblem::Sharding { path: path.to_owned(), why };
        let key = PutKey { aval: aval.clone(), from: from.cloned(), to: to.clone() };
        if cache && let Some(plan) = self.put_plans.get(&key) {
            return Ok(plan);
        }
        to.check_devices(&self.runtime.topology).map_err(wrong)?;
        let layout = to.layout(aval.shape()).map_err(wrong)?;
        let source = from.map(|from| from.layout(aval.shape())).transpose().map_err(wrong)?;
        let from = from.zip(source.as_deref());
        check_partial_sums(path, aval, from, &layout)?;
        let plan = PutPlan::new(&self.runtime, aval, from, to, layout)
            .map_err(|error| IssueProblem::Signature(error.to_string()))?;
        let plan = Arc::new(plan);
        if cache {
            self.put_plans.insert(key, plan.clone());
        }
        Ok(plan)
    }

    /// Issues the checked and planned move of one array.
    pub(crate) fn put_one(
        &mut self,
        array: &MpmdArray,
        plan: &Arc<PutPlan>,
        options: MoveOptions,
        at: &'static Location<'static>,
    ) -> MpmdArray {
        self.issue_put(array, plan, options, None, at)
    }

    /// Issues a move, or issues it again in a replay. Runs this process's part, and releases the
    /// local shards of a donated source.
    fn issue_put(
        &mut self,
        array: &MpmdArray,
        plan: &Arc<PutPlan>,
        options: MoveOptions,
        replayed: Option<Replayed<'_>>,
        at: &'static Location<'static>,
    ) -> MpmdArray {
        let MoveOptions { donate, may_alias, .. } = options;
        let flags = u64::from(donate) | u64::from(may_alias) << 1;
        let origin = array.origin();
        let (source, leaf) = origin.unwrap_or_default();
        let dry_run = self.is_dry_run();
        let again = || {
            // A process that holds a shard of a donated source must release it, even if it takes no
            // other part in the move.
            let lets_go = donate && !array.shards().is_empty();
            let here = lets_go || !plan.is_idle() || dry_run;
            here.then(|| Arc::new(PutAgain { plan: plan.clone(), options }) as Arc<dyn Again>)
        };
        let words = [0x9a7, plan.fingerprint, flags, source, u64::from(leaf)];
        let (op, guard) = self.issue_op(
            words,
            NewOp {
                part: if plan.is_idle() { Part::Idle } else { Part::Work(plan.bytes()) },
                takes: &[array],
                donates: &|_| donate,
                source: origin.map(|(op, _)| op),
                known: Some(&plan.known_forms[usize::from(may_alias)]),
                again: &again,
                replayed,
                ..NewOp::new(at, &|| plan.what.clone(), &|| plan.descriptor(may_alias))
            },
        );
        let shards = guard.map_or_else(Vec::new, |guard| {
            let source = match &array.repr {
                Repr::Host(host) => Source::Host(host),
                Repr::Placed(placed) => Source::Shards(&placed.shards),
            };
            plan.run(&self.runtime, op, &guard, &source, may_alias)
        });
        if donate && let Repr::Placed(placed) = &array.repr {
            placed.donate(op, at);
            let failure = placed.donated_failure();
            for shard in placed.shards.iter() {
                // Takes effect after every use that was issued before: each of them has registered
                // with the slot.
                shard.slot.give_up(failure.clone());
            }
        }
        Placed::array(plan.made.clone(), shards, Origin { op, leaf: 0, at })
    }

    /// Creates an array on its owners: `fill` runs on each device, for that device's region.
    ///
    /// Moves nothing, and no process holds more than its own part. `fill` must compute each element
    /// only from the element's index in the whole array, as [`mpmd_layout::random`] does. Then the array
    /// is the same under any sharding. Returns without waiting for `fill`.
    ///
    /// # Errors
    ///
    /// If the sharding does not fit the shape, or has unreduced axes. An error or a panic of `fill`
    /// fails the array instead.
    #[track_caller]
    pub fn array_from_fn(
        &mut self,
        aval: ShapedArray,
        sharding: &Sharding,
        fill: impl Fn(&Region, ViewMut<'_>) -> Result<()> + Send + Sync + 'static,
    ) -> Result<MpmdArray> {
        let at = Location::caller();
        self.refuse_recording(at, "array_from_fn")?;
        let wrong =
            |why| IssueProblem::Sharding { path: String::new(), why }.at(at, "array_from_fn");
        sharding.check_devices(&self.runtime.topology).map_err(wrong)?;
        let layout = sharding.layout(aval.shape()).map_err(wrong)?;
        if !sharding.unreduced_axes().is_empty() {
            let (sharding, reduced) = (sharding.to_string(), sharding.reduced().to_string());
            let problem = IssueProblem::Unreduced { path: String::new(), sharding, reduced };
            return Err(problem.at(at, "array_from_fn"));
        }
        let what = Arc::new(MakeWhat { aval: aval.clone(), sharding: sharding.clone() });
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
        let bytes: usize = local.iter().map(|(_, _, region)| region.elements() * item).sum();
        let word = Rolling::default().mix_bytes(aval.to_string().as_bytes()).word();
        let (op, guard) = self.issue_op(
            [0x3a4e, sharding.fingerprint(), word],
            NewOp {
                part: if local.is_empty() { Part::Idle } else { Part::Work(bytes as u64) },
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
                let on_gpu = runtime.gpu_of(device, kind).is_some();
                let job = move || {
                    here.status.device_starts(local_index, op, what);
                    let started = here.trace.now();
                    let (buffer, copied) = match on_gpu {
                        true => (here.staging.allocate(info.bytes()), Some(reservation)),
                        false => (reservation.allocate(), None),
                    };
                    here.trace_start(local_index, op, started, started, None);
                    // The closure fills host memory; a CUDA device gets a copy of it.
                    let outcome = buffer
                        .map_err(|error| (FailureKind::Memory, error.to_string()))
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
                                "make (operation {op}) at {at} failed on device {device}: {why}"
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
        let made = Made { aval, sharding: sharding.clone(), layout, what, runtime };
        Ok(Placed::array(Arc::new(made), shards, Origin { op, leaf: 0, at }))
    }
}

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
        program.refuse_recording(at, "microbatches")?;
        let wrong = |problem: IssueProblem| problem.at(at, "microbatches");
        self.check_usable("").map_err(wrong)?;
        let split = |why: String| wrong(IssueProblem::Split(why));
        let Repr::Placed(placed) = &self.repr else {
            return Err(split(format!("{} is uncommitted: device_put it first", self.aval())));
        };
        if !Arc::ptr_eq(&placed.made.runtime, &program.runtime) {
            return Err(wrong(IssueProblem::Foreign { path: String::new() }));
        }
        let Some(size) = self.shape().get(dim).copied() else {
            return Err(split(format!("{} has no dimension {dim}", self.aval())));
        };
        let uneven = placed
            .made
            .layout
            .regions()
            .iter()
            .any(|region| m == 0 || !region.range(dim).len().is_multiple_of(m));
        if uneven {
            return Err(split(format!(
                "dimension {dim} of {} as {} cannot be cut in {m} equal parts on each device",
                self.aval(),
                placed.made.sharding
            )));
        }
        let mut shape = self.shape().to_vec();
        shape[dim] = size / m;
        let aval = ShapedArray::try_new(&shape, self.dtype())?;
        let why = |why| wrong(IssueProblem::Sharding { path: String::new(), why });
        let layout = placed.made.sharding.layout(&shape).map_err(why)?;
        let what = Arc::new(SplitWhat { aval: self.aval().clone(), dim, m });
        let descriptor = || {
            let results = vec![dry_run::shards(&layout, self.dtype().size(), |_| Memory::Of(0)); m];
            OpDescriptor::local(&what, Kind::Relabel, results)
        };
        let words = [0x5b1, placed.origin.op, u64::from(placed.origin.leaf), dim as u64, m as u64];
        let (op, guard) = program.issue_op(
            words,
            NewOp {
                part: if placed.shards.is_empty() { Part::Idle } else { Part::Work(0) },
                takes: &[self],
                source: Some(placed.origin.op),
                ..NewOp::new(at, &|| what.clone(), &descriptor)
            },
        );
        let runtime = program.runtime.clone();
        let made = Arc::new(Made {
            aval,
            sharding: placed.made.sharding.clone(),
            layout,
            what,
            runtime: runtime.clone(),
        });
        let part = |j: usize| {
            let shards: Vec<LocalShard> = placed
                .shards
                .iter()
                .map(|shard| {
                    let whole = Region::full(&placed.region(shard.device).shape());
                    let cut = cut(&whole, dim, m, j);
                    let (resolver, slot) = AsyncBuffer::new();
                    let (runtime, item) = (runtime.clone(), self.dtype().size());
                    let guard = guard.clone();
                    match (contiguous_bytes(&whole, &cut, item), guard) {
                        (Some(range), guard) => {
                            follow(
                                &shard.slot,
                                resolver,
                                move |bytes| bytes.slice(range),
                                None,
                                guard,
                            );
                        }
                        (None, Some(guard)) => {
                            let cut = Cut { whole, part: cut, item, op };
                            cut.copy(
                                &runtime,
                                shard,
                                placed.made.sharding.memory_kind(),
                                resolver,
                                guard,
                            );
                        }
                        // A process that holds a shard has a guard, so this case does not occur.
                        (None, None) => drop(resolver),
                    }
                    LocalShard { device: shard.device, slot }
                })
                .collect();
            Placed::array(made.clone(), shards, Origin { op, leaf: j as u32, at })
        };
        Ok((0..m).map(part).collect())
    }
}

/// A part of a shard that is not contiguous in memory and has to be copied.
struct Cut {
    whole: Region,
    part: Region,
    item: usize,
    op: u64,
}

impl Cut {
    /// Copies the part of `shard` and resolves `resolver` with it, in the same memory kind. The copy
    /// runs on the device's stream or on a copy worker.
    fn copy(
        self,
        runtime: &Arc<Runtime>,
        shard: &LocalShard,
        kind: MemoryKind,
        resolver: Resolver,
        guard: OpGuard,
    ) {
        let Self { whole, part, item, op } = self;
        if runtime.gpu_of(shard.device, kind).is_some() {
            return runtime.copy_on_device(
                shard.device,
                op,
                &shard.slot,
                (whole, part, item),
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
                let copied = runtime.staging.allocate(part.elements() * item).map(|mut copy| {
                    copy_region(&buffer, &whole, &mut copy, &part, &part, item);
                    copy.freeze()
                });
                let outcome = copied.map_err(|error| {
                    Arc::new(Failure::new(FailureKind::Memory, runtime.me, op, error.to_string()))
                });
                drop(buffer);
                resolver.keep(outcome);
                drop(guard);
            }));
        });
    }
}

/// A recorded move, to be replayed.
struct PutAgain {
    plan: Arc<PutPlan>,
    options: MoveOptions,
}

impl Again for PutAgain {
    fn again(
        self: Arc<Self>,
        program: &mut Program,
        x: &[&MpmdArray],
        replayed: Replayed<'_>,
        at: &'static Location<'static>,
    ) -> Vec<MpmdArray> {
        let put =
            |x: &&MpmdArray| program.issue_put(x, &self.plan, self.options, Some(replayed), at);
        x.iter().map(put).collect()
    }
}

/// Refuses a move that would have to add up partial sums of booleans.
fn check_partial_sums(
    path: &str,
    aval: &ShapedArray,
    from: Option<(&Sharding, &Layout)>,
    to: &Layout,
) -> std::result::Result<(), IssueProblem> {
    let Some((from, layout)) = from else { return Ok(()) };
    if from.unreduced_axes().is_empty() || layout == to || aval.dtype() != DType::Bool {
        return Ok(());
    }
    let leaf = if path.is_empty() { String::new() } else { format!("{path:?}: ") };
    Err(IssueProblem::Signature(format!(
        "{leaf}partial sums of booleans cannot be added up: {aval} as {from}"
    )))
}

/// Refuses to donate the same array twice in one call.
pub(crate) fn refuse_twice(
    leaves: &[(String, &MpmdArray)],
) -> std::result::Result<(), IssueProblem> {
    let twin = |j: usize| leaves[..j].iter().position(|(_, leaf)| leaf.is_same(leaves[j].1));
    match (1..leaves.len()).find_map(|j| Some((twin(j)?, j))) {
        None => Ok(()),
        Some((first, second)) => {
            let (first, second) = (&leaves[first].0, &leaves[second].0);
            let problem = format!("{second:?} is donated, and is the same array as {first:?}");
            Err(IssueProblem::Signature(problem))
        }
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

/// Returns the message of a panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panicked: {}", text.unwrap_or_else(|| "no message".to_owned()))
}

struct MakeWhat {
    aval: ShapedArray,
    sharding: Sharding,
}

impl fmt::Display for MakeWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "make {} as {}", self.aval, self.sharding)
    }
}

struct SplitWhat {
    aval: ShapedArray,
    dim: usize,
    m: usize,
}

impl fmt::Display for SplitWhat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} microbatches of {} along dimension {}", self.m, self.aval, self.dim)
    }
}
