//! `jit`: a kernel bound to a mesh, callable like a function of arrays.
//!
//! A call checks its inputs, takes one operation number, queues the kernel on this process's
//! devices of the mesh, and returns handles. The result of the checks is kept for the next call
//! with the same shapes and shardings.

mod call;
mod dimensions;
mod dry_run;
mod on_cuda;
mod plan;
mod recompute;
mod replicas;
mod unchanged_inputs;
mod warm;

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Weak};

use mpmd_base::block::Mutex;

use crate::api::program::{Again, IssuedOp, NewOp, OpPart, Program, Replayed};
use crate::error::{IssueProblem, Result};
use crate::exec::array::{MpmdArray, Placed, Repr, emptied};
use crate::exec::{AsyncBuffer, AsyncBuffers, Job, OpGuard, Rolling, Runtime};
use crate::kernel::Kernel;
pub use call::run_here;
use call::{CallInput, IssuedCall, Leftovers};
use mpmd_layout::sharding::{MemoryKind, Sharding};
use mpmd_layout::topology::{DeviceId, Mesh};
use mpmd_layout::tree::{PrefixTree, Structure, Tree, TreeError};
use plan::{Bound, CallPlan};
use recompute::Checker;
use warm::Warm;

/// Maximum number of call plans that a [`Jit`] keeps. A further plan replaces the oldest.
const PLANS_KEPT: usize = 8;

/// The plans and lists that a [`Jit`] keeps between calls.
struct KeptPlans<K: Kernel> {
    plans: Vec<Arc<Bound<K>>>,
    lists: CallLists,
    /// The check kernels of the devices that recompute this kernel's calls.
    checkers: Vec<Arc<Checker<K>>>,
}

impl<K: Kernel> Default for KeptPlans<K> {
    fn default() -> Self {
        Self {
            plans: Vec::new(),
            lists: CallLists::default(),
            checkers: Vec::new(),
        }
    }
}

impl<K: Kernel> KeptPlans<K> {
    /// Returns a kept plan that fits these leaves, if any. `fits` returns true for the structure of
    /// the leaves' tree.
    fn known_plan(
        &self,
        leaves: &[&MpmdArray],
        fits: impl Fn(&Structure) -> bool,
    ) -> Option<KnownPlan<K>> {
        self.plans.iter().find_map(|bound| {
            let same = bound.unchanged.lock().count(leaves);
            let fits = bound.plan.fits(leaves, same) && fits(&bound.plan.input_structure);
            fits.then(|| KnownPlan {
                bound: bound.clone(),
                same,
            })
        })
    }
}

/// A kept plan that fits the leaves of a call.
struct KnownPlan<K: Kernel> {
    bound: Arc<Bound<K>>,
    /// The number of leading leaves that are the same arrays as in the plan's last calls.
    same: usize,
}

/// Empty lists that are kept, so that the next call reuses their memory.
#[derive(Default)]
struct CallLists {
    leaves: Vec<&'static MpmdArray>,
    prepared: PreparedCalls,
}

/// The output buffers and the jobs of a call on this process's devices in the mesh.
#[derive(Default)]
struct PreparedCalls {
    slots: Vec<DeviceSlots>,
    calls: Vec<QueuedCall>,
}

/// The async buffers of all outputs' shards on one device.
struct DeviceSlots {
    device: DeviceId,
    buffers: AsyncBuffers,
}

/// The job that runs a call on the device with index `local_index`.
struct QueuedCall {
    local_index: usize,
    job: Job,
}

impl PreparedCalls {
    /// Queues the jobs on their devices, and empties the lists without freeing their memory. Must
    /// come last in a call: device threads then write to cache lines that this thread has just
    /// written.
    fn start(&mut self, runtime: &Runtime) {
        for QueuedCall { local_index, job } in self.calls.drain(..) {
            runtime.run_on(local_index, job);
        }
        self.slots.clear();
    }
}

impl Program {
    /// Returns a builder that binds a kernel to a mesh:
    /// `program.jit(kernel).on(&mesh).outputs(sharding).build()?`.
    pub fn jit<K: Kernel>(&self, kernel: K) -> JitBuilder<K> {
        let program = Arc::downgrade(&self.runtime);
        JitBuilder {
            kernel,
            program,
            mesh: None,
            inputs: None,
            partial_sums: None,
            outputs: None,
            donate: Vec::new(),
        }
    }
}

/// Builder of a [`Jit`]: mesh, shardings and donations of a kernel. Created by [`Program::jit`].
#[must_use = "a builder does nothing until `build`"]
pub struct JitBuilder<K> {
    kernel: K,
    program: Weak<Runtime>,
    mesh: Option<Mesh>,
    inputs: Option<PrefixTree<Sharding>>,
    partial_sums: Option<&'static str>,
    outputs: Option<PrefixTree<Sharding>>,
    donate: Vec<String>,
}

impl<K: Kernel> JitBuilder<K> {
    /// Sets the mesh. The kernel runs on its devices. Required.
    pub fn on(mut self, mesh: &Mesh) -> Self {
        self.mesh = Some(mesh.clone());
        self
    }

    /// Sets the expected shardings of the inputs: one for all, or a tree prefix. Without it, an
    /// input may have any sharding that gives each device of the mesh a part. Partial sums and
    /// arrays in host memory must always be declared here.
    pub fn inputs(mut self, shardings: impl Into<PrefixTree<Sharding>>) -> Self {
        self.inputs = Some(shardings.into());
        self
    }

    /// Accepts partial sums in the inputs at and below this path, without a declaration by
    /// [`inputs`](Self::inputs).
    pub(crate) fn partial_sums(mut self, path: &'static str) -> Self {
        self.partial_sums = Some(path);
        self
    }

    /// Sets the shardings of the outputs: one for all, or a tree prefix. Required. Unreduced axes
    /// declare that the kernel writes partial sums over them.
    pub fn outputs(mut self, shardings: impl Into<PrefixTree<Sharding>>) -> Self {
        self.outputs = Some(shardings.into());
        self
    }

    /// Donates the input at this path, or all inputs below it, with each call. The donated array
    /// and all its clones become unusable. If the signature aliases an output to the input, that
    /// output takes over the input's memory. Host values are copied instead, and stay usable. If
    /// the path names no input, each call is an error.
    pub fn donate(mut self, path: impl Into<String>) -> Self {
        self.donate.push(path.into());
        self
    }

    /// Builds the bound kernel, and starts to compile its code for this process's CUDA devices. If
    /// the compilation fails, each call fails.
    ///
    /// # Errors
    ///
    /// If the mesh or the output shardings are missing. If an output sharding is in host memory, or
    /// is not on exactly the mesh's devices.
    #[track_caller]
    pub fn build(self) -> Result<Jit<K>> {
        let at = Location::caller();
        let call = format!("jit {}", self.kernel.name());
        let mesh = self.mesh.ok_or_else(|| {
            IssueProblem::Mesh("missing mesh: call `.on(&mesh)`".into()).at(at, &call)
        })?;
        let outputs = self
            .outputs
            .ok_or_else(|| IssueProblem::MissingOutputs.at(at, &call))?;
        plan::check_outputs(&outputs, &mesh).map_err(|problem| problem.at(at, &call))?;

        let runtime = self.program.upgrade();
        let warm = runtime
            .map(|runtime| Warm::start(&self.kernel, &mesh, &runtime))
            .unwrap_or_default();

        Ok(Jit {
            warm: Arc::new(warm),
            kernel: Arc::new(self.kernel),
            program: self.program,
            mesh,
            inputs: self.inputs,
            partial_sums: self.partial_sums,
            outputs,
            donate: self.donate,
            kept: Mutex::new(KeptPlans::default()),
        })
    }
}

/// A kernel bound to a mesh.
pub struct Jit<K: Kernel> {
    kernel: Arc<K>,
    /// The program that created this kernel. Calls with another program fail, because the plans are
    /// for this program's devices.
    program: Weak<Runtime>,
    mesh: Mesh,
    inputs: Option<PrefixTree<Sharding>>,
    /// The path of inputs that may be partial sums although `inputs` does not declare them.
    partial_sums: Option<&'static str>,
    outputs: PrefixTree<Sharding>,
    donate: Vec<String>,
    warm: Arc<Warm>,
    kept: Mutex<KeptPlans<K>>,
}

impl<K: Kernel> Jit<K> {
    /// Queues the kernel on this process's devices of the mesh, and returns handles to its outputs.
    /// Each device runs the kernel once its inputs are ready.
    ///
    /// Does not wait for the kernel, but may block while the program is too far ahead or memory is
    /// short. If this process owns none of the mesh's devices, the outputs are fully remote
    /// handles.
    ///
    /// Every device gets the whole of an uncommitted input.
    ///
    /// # Errors
    ///
    /// If an input is on other devices, not sharded as declared, or donated. If an input is in host
    /// memory or has partial sums, and that is not declared. If the kernel refuses the shapes, or
    /// its signature does not fit the shardings. These errors are the same on every process. A
    /// kernel that fails when it runs fails its outputs instead.
    #[track_caller]
    pub fn call(&self, program: &mut Program, x: K::In) -> Result<K::Out> {
        let at = program.caller(Location::caller());
        self.call_at(program, &x, at)
    }

    /// Returns the mesh that the kernel runs on.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Calls the kernel as [`Jit::call`] does, and records `at` as the source line of the call.
    pub(crate) fn call_at(
        &self,
        program: &mut Program,
        x: &K::In,
        at: &'static Location<'static>,
    ) -> Result<K::Out> {
        let wrong = |problem: IssueProblem| problem.at(at, format!("jit {}", self.kernel.name()));
        let mut kept = self.kept.lock();
        let CallLists {
            leaves,
            mut prepared,
        } = std::mem::take(&mut kept.lists);
        let mut leaves: Vec<&MpmdArray> = leaves;
        x.each_leaf(&mut |leaf| leaves.push(leaf));
        // Two different trees may have the same leaves.
        let known = kept.known_plan(&leaves, |structure| x.has_structure(structure));
        drop(kept);
        let KnownPlan { bound, same } = match known {
            Some(known) => known,
            None => KnownPlan {
                bound: self.new_plan(program, x).map_err(wrong)?,
                same: 0,
            },
        };

        let op = self
            .issue_checked(program, &bound, &leaves, same, &mut prepared, at)
            .map_err(wrong)?;
        let arrays = bound.plan.arrays(&mut prepared.slots, op, at);
        let y = assemble::<K::Out>(&bound.plan.output_structure, arrays);
        prepared.start(&program.runtime);
        self.kept.lock().lists = CallLists {
            leaves: emptied(leaves),
            prepared,
        };

        program.synced(at)?;
        let y = y.map_err(|error| wrong(IssueProblem::Tree(error)))?;
        if program.runtime.config.check_replicas {
            program.check_replicas(self.kernel.name(), y.leaves_with_paths(), at)?;
        }
        if bound.plan.is_recomputable && program.is_turn_to_recompute() {
            self.recompute(program, &bound.plan, &x.leaves(), &y.leaves(), at)?;
        }
        Ok(y)
    }

    /// Calls the kernel as [`Jit::call`] does, on the leaves of an erased tree. Returns (structure
    /// of the outputs, their leaves). Builds a typed tree only if the call has new shapes.
    #[track_caller]
    pub(crate) fn call_leaves(
        &self,
        program: &mut Program,
        structure: &Structure,
        leaves: &[&MpmdArray],
    ) -> Result<(Structure, Vec<MpmdArray>)> {
        let at = program.caller(Location::caller());
        let wrong = |problem: IssueProblem| problem.at(at, format!("jit {}", self.kernel.name()));
        let mut kept = self.kept.lock();
        let mut prepared = std::mem::take(&mut kept.lists.prepared);
        let known = kept.known_plan(leaves, |known| known == structure);
        drop(kept);
        let KnownPlan { bound, same } = match known {
            Some(known) => known,
            None => {
                let arrays = leaves.iter().map(|leaf| (*leaf).clone());
                let x = K::In::from_leaves(structure, arrays)
                    .map_err(|error| wrong(IssueProblem::Tree(error)))?;
                KnownPlan {
                    bound: self.new_plan(program, &x).map_err(wrong)?,
                    same: 0,
                }
            }
        };

        let op = self
            .issue_checked(program, &bound, leaves, same, &mut prepared, at)
            .map_err(wrong)?;
        let arrays: Vec<_> = bound.plan.arrays(&mut prepared.slots, op, at).collect();
        prepared.start(&program.runtime);
        self.kept.lock().lists.prepared = prepared;

        program.synced(at)?;
        if program.runtime.config.check_replicas {
            let paths = bound.plan.output_structure.paths();
            program.check_replicas(self.kernel.name(), paths.into_iter().zip(&arrays), at)?;
        }
        if bound.plan.is_recomputable && program.is_turn_to_recompute() {
            let outputs: Vec<&MpmdArray> = arrays.iter().collect();
            self.recompute(program, &bound.plan, leaves, &outputs, at)?;
        }
        Ok((bound.plan.output_structure.clone(), arrays))
    }

    /// Checks and issues a call on leaves that fit the plan. Returns its operation number. The
    /// first `same` leaves are the same arrays as in the plan's last calls.
    fn issue_checked(
        &self,
        program: &mut Program,
        bound: &Arc<Bound<K>>,
        leaves: &[&MpmdArray],
        same: usize,
        prepared: &mut PreparedCalls,
        at: &'static Location<'static>,
    ) -> std::result::Result<u64, IssueProblem> {
        if !std::ptr::eq(self.program.as_ptr(), Arc::as_ptr(&program.runtime)) {
            return Err(IssueProblem::Foreign {
                path: "the kernel".to_owned(),
            });
        }

        let plan = &bound.plan;
        plan.check_donations(leaves)?;
        let inputs = bound
            .unchanged
            .lock()
            .check(plan, &program.runtime, leaves, same)?;
        if program.capture.is_some() {
            plan.check_given_up(program, leaves)?;
        }

        Ok(issue(
            program,
            bound,
            leaves,
            prepared,
            Numbering::New { inputs },
            at,
        ))
    }

    fn new_plan(
        &self,
        program: &Program,
        x: &K::In,
    ) -> std::result::Result<Arc<Bound<K>>, IssueProblem> {
        if !std::ptr::eq(self.program.as_ptr(), Arc::as_ptr(&program.runtime)) {
            return Err(IssueProblem::Foreign {
                path: "the kernel".to_owned(),
            });
        }

        let plan = CallPlan::new(self, &program.runtime, x)?;
        let bound = Arc::new(Bound::new(self.kernel.clone(), plan, self.warm.clone()));
        let plans = &mut self.kept.lock().plans;
        if plans.len() >= PLANS_KEPT {
            plans.remove(0);
        }
        plans.push(bound.clone());
        Ok(bound)
    }
}

/// The source of a call's operation number and hash.
enum Numbering<'a> {
    /// A new call takes the next number. `inputs` is the hash of all inputs.
    New { inputs: Rolling },
    /// A replay gives the call its number and hash.
    Replayed(Replayed<'a>),
}

/// Issues a call as one operation and returns its number. Marks the donated inputs, and fills
/// `prepared` with the output buffers and jobs of this process. The caller must queue the jobs. May
/// block while the program is too far ahead or memory is short.
fn issue<K: Kernel>(
    program: &mut Program,
    bound: &Arc<Bound<K>>,
    leaves: &[&MpmdArray],
    prepared: &mut PreparedCalls,
    numbering: Numbering<'_>,
    at: &'static Location<'static>,
) -> u64 {
    let (inputs, replayed) = match numbering {
        Numbering::New { inputs } => (inputs.value(), None),
        Numbering::Replayed(replayed) => (0, Some(replayed)),
    };

    let plan = &bound.plan;
    let dry_run = program.is_dry_run();
    let again = || (!plan.seats.is_empty() || dry_run).then(|| bound.clone() as Arc<dyn Again>);
    let IssuedOp { op, guard } = program.issue_op(
        [plan.fingerprint, inputs as u64, (inputs >> 64) as u64],
        NewOp {
            part: if plan.seats.is_empty() {
                OpPart::Idle
            } else {
                OpPart::Work(plan.bytes)
            },
            takes: leaves,
            takes_host_values: plan.takes_host_values,
            donates: &|i| plan.inputs[i].donated,
            known: Some(&plan.known_descriptor),
            again: &again,
            replayed,
            ..NewOp::new(at, &|| plan.what.clone(), &|| plan.descriptor())
        },
    );

    plan.donate(leaves, op, at);
    if let Some(guard) = guard {
        prepare(prepared, program, bound, leaves, op, guard, at);
    }
    op
}

/// Reserves memory for new outputs on each of this process's devices in the mesh, which may block.
/// Adds each device's output buffers and job to `prepared`.
fn prepare<K: Kernel>(
    prepared: &mut PreparedCalls,
    program: &Program,
    bound: &Arc<Bound<K>>,
    leaves: &[&MpmdArray],
    op: u64,
    guard: OpGuard,
    at: &'static Location<'static>,
) {
    let plan = &bound.plan;
    let runtime = &program.runtime;
    let mut guard = Some(guard);
    let leftovers = (!plan.mesh.collectives.is_empty()).then(|| {
        Arc::new(Leftovers {
            runtime: runtime.clone(),
            op,
        })
    });

    for (seat_index, seat) in plan.seats.iter().enumerate() {
        let inputs = leaves.iter().zip(&plan.inputs).zip(&seat.inputs);
        let inputs = inputs.map(|((leaf, input), shard)| match &leaf.repr {
            Repr::Host(host) => CallInput::Host(host.part(&shard.region)),
            Repr::Placed(handle) if input.donated => CallInput::Donated(handle.clone()),
            Repr::Placed(handle) => {
                let placed: &Placed = handle;
                match placed.slot(seat.place.device) {
                    Some(slot) => CallInput::AsyncBuffer {
                        slot: slot.issue_use(),
                        op: placed.origin.op,
                    },
                    // Cannot happen: the plan has checked that every device has its part.
                    None => {
                        let empty = AsyncBuffer::filled(Vec::new().into());
                        CallInput::AsyncBuffer {
                            slot: empty.issue_use(),
                            op: 0,
                        }
                    }
                }
            }
        });

        let memory = runtime.reserve_all(
            seat.local_index,
            MemoryKind::Device,
            seat.reserved,
            op,
            &*plan.what,
        );
        let (resolvers, slots) = AsyncBuffer::several(plan.outputs.len());
        prepared.slots.push(DeviceSlots {
            device: seat.place.device,
            buffers: slots,
        });

        let last = seat_index + 1 == plan.seats.len();
        let objects = plan.objects.inputs.iter().filter_map(|index| {
            leaves[*index]
                .shards()
                .iter()
                .find(|shard| shard.device == seat.place.device)
        });
        let objects = objects.map(|shard| shard.slot.clone());
        let Some(guard) = (if last { guard.take() } else { guard.clone() }) else {
            break;
        };

        let issued = IssuedCall {
            bound: bound.clone(),
            seat: seat_index,
            op,
            at,
            label: program.label(),
            resolvers,
            memory,
            guard,
            leftovers: leftovers.clone(),
        };
        prepared.calls.push(QueuedCall {
            local_index: seat.local_index,
            job: bound.spare().issue(issued, inputs, objects),
        });
    }
}

/// Builds a tree of this structure from all of `leaves`. Fails if there are too few or too many
/// leaves.
fn assemble<T: Tree<Leaf = MpmdArray>>(
    structure: &Structure,
    mut leaves: impl Iterator<Item = MpmdArray>,
) -> std::result::Result<T, TreeError> {
    let tree = T::build(structure, &mut leaves)?;
    match leaves.next() {
        None => Ok(tree),
        Some(_) => Err(TreeError::TooManyLeaves {
            expected: structure.leaves(),
        }),
    }
}

impl<K: Kernel> Again for Bound<K> {
    fn again(
        self: Arc<Self>,
        program: &mut Program,
        x: &[&MpmdArray],
        replayed: Replayed<'_>,
        at: &'static Location<'static>,
        made: &mut Vec<MpmdArray>,
    ) {
        let mut prepared = std::mem::take(&mut *self.prepared.lock());
        let op = issue(
            program,
            &self,
            x,
            &mut prepared,
            Numbering::Replayed(replayed),
            at,
        );

        made.extend(self.plan.arrays(&mut prepared.slots, op, at));
        prepared.start(&program.runtime);
        *self.prepared.lock() = prepared;
    }
}

impl<K: Kernel> fmt::Debug for Jit<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Jit({} on {})", self.kernel.name(), self.mesh)
    }
}
