//! A kernel bound to a mesh, called on the leaves of its trees. The kernel's type is not known
//! here, so that this code is compiled once and not for each kernel.

use std::panic::Location;
use std::sync::{Arc, Weak};

use mpmd_base::block::Mutex;

use super::call::{CallInput, IssuedCall, Leftovers};
use super::plan::{Bound, CallPlan};
use super::prepared::{CallLists, DeviceSlots, PreparedCalls, QueuedCall};
use super::recompute::Checker;
use super::settings::KernelSettings;
use super::warm::Warm;
use crate::api::program::{Again, IssuedOp, NewOp, OpPart, Program, Replayed};
use crate::error::{Error, IssueProblem, Result};
use crate::exec::array::{MpmdArray, Placed, Repr, emptied};
use crate::exec::{AsyncBuffer, OpGuard, Rolling, Runtime};
use mpmd_layout::sharding::MemoryKind;
use mpmd_layout::tree::Structure;

/// Maximum number of call plans that an [`UntypedJit`] keeps. A further plan replaces the oldest.
const PLANS_KEPT: usize = 8;

/// A kernel bound to a mesh, called on the leaves of its trees.
pub(super) struct UntypedJit {
    pub(super) settings: KernelSettings,
    /// The program that created this kernel. Calls with another program fail, because the plans are
    /// for this program's devices.
    pub(super) program: Weak<Runtime>,
    pub(super) warm: Arc<Warm>,
    pub(super) kept: Mutex<KeptPlans>,
}

/// The plans and lists that an [`UntypedJit`] keeps between calls.
#[derive(Default)]
pub(super) struct KeptPlans {
    pub(super) plans: Vec<Arc<Bound>>,
    lists: CallLists,
    /// The check kernels of the devices that recompute this kernel's calls.
    pub(super) checkers: Vec<Arc<Checker>>,
}

impl KeptPlans {
    /// Returns a kept plan that fits these inputs and their leaves, if any.
    fn known_plan<'a>(
        &self,
        inputs: &dyn CallInputs<'a>,
        leaves: &[&'a MpmdArray],
    ) -> Option<KnownPlan> {
        self.plans.iter().find_map(|bound| {
            let same = bound.unchanged.lock().count(leaves);
            let fits = bound.plan.fits(leaves, same)
                // Two different trees may have the same leaves.
                && inputs.has_structure(&bound.plan.input_structure);
            fits.then(|| KnownPlan {
                bound: bound.clone(),
                same,
            })
        })
    }
}

/// The inputs of a call: a tree of a type that only the implementation knows.
pub(super) trait CallInputs<'a> {
    /// Calls `f` with each leaf, in order.
    fn each_leaf(&self, f: &mut dyn FnMut(&'a MpmdArray));

    fn has_structure(&self, structure: &Structure) -> bool;

    fn structure(&self) -> Structure;
}

/// The inputs of a call, without their tree.
struct ListedInputs<'a> {
    structure: &'a Structure,
    leaves: &'a [&'a MpmdArray],
}

impl<'a> CallInputs<'a> for ListedInputs<'a> {
    fn each_leaf(&self, f: &mut dyn FnMut(&'a MpmdArray)) {
        self.leaves.iter().copied().for_each(f);
    }

    fn has_structure(&self, structure: &Structure) -> bool {
        self.structure == structure
    }

    fn structure(&self) -> Structure {
        self.structure.clone()
    }
}

/// A kept plan that fits the leaves of a call.
struct KnownPlan {
    bound: Arc<Bound>,
    /// The number of leading leaves that are the same arrays as in the plan's last calls.
    same: usize,
}

/// A call that has a number. Its jobs are not queued yet.
pub(super) struct NumberedCall<'a> {
    pub(super) bound: Arc<Bound>,
    pub(super) op: u64,
    leaves: Vec<&'a MpmdArray>,
    pub(super) prepared: PreparedCalls,
}

impl UntypedJit {
    /// Checks a call and issues it. [`start`](Self::start) then queues the jobs of this process's
    /// devices.
    pub(super) fn issue<'a>(
        &self,
        program: &mut Program,
        inputs: &dyn CallInputs<'a>,
        at: &'static Location<'static>,
    ) -> Result<NumberedCall<'a>> {
        let mut kept = self.kept.lock();
        let CallLists {
            leaves,
            mut prepared,
        } = std::mem::take(&mut kept.lists);
        let mut leaves: Vec<&'a MpmdArray> = leaves;
        inputs.each_leaf(&mut |leaf| leaves.push(leaf));
        let known = kept.known_plan(inputs, &leaves);
        drop(kept);

        let numbered = known
            .map_or_else(|| self.new_plan(program, inputs.structure(), &leaves), Ok)
            .and_then(|KnownPlan { bound, same }| {
                let op = self.issue_checked(program, &bound, &leaves, same, &mut prepared, at)?;
                Ok((bound, op))
            });
        let (bound, op) = numbered.map_err(|problem| self.wrong(problem, at))?;
        Ok(NumberedCall {
            bound,
            op,
            leaves,
            prepared,
        })
    }

    /// Queues the jobs of a call, and keeps its lists for the next one. Returns the plan.
    pub(super) fn start(&self, program: &Program, call: NumberedCall<'_>) -> Arc<Bound> {
        let NumberedCall {
            bound,
            leaves,
            mut prepared,
            ..
        } = call;
        prepared.start(&program.runtime);
        self.kept.lock().lists = CallLists {
            leaves: emptied(leaves),
            prepared,
        };
        bound
    }

    /// True if [`check_call`](Self::check_call) does something for a call of this plan.
    pub(super) fn is_checked(program: &Program, plan: &CallPlan) -> bool {
        program.runtime.config.check_replicas || plan.is_recomputable
    }

    /// Issues the checks that the job asks for behind a call with inputs `x` and outputs `y`: the
    /// comparison of replicas, and the recomputation.
    pub(super) fn check_call(
        &self,
        program: &mut Program,
        plan: &CallPlan,
        x: &[&MpmdArray],
        y: &[&MpmdArray],
        at: &'static Location<'static>,
    ) -> Result<()> {
        if program.runtime.config.check_replicas {
            let paths = plan.output_structure.paths();
            let outputs = paths.into_iter().zip(y.iter().copied());
            program.check_replicas(self.settings.kernel.name(), outputs, at)?;
        }
        if plan.is_recomputable && program.is_turn_to_recompute() {
            self.recompute(program, plan, x, y, at)?;
        }
        Ok(())
    }

    /// Calls the kernel as [`Jit::call`](super::Jit::call) does. Returns (structure of the outputs,
    /// their leaves).
    #[track_caller]
    pub(super) fn call_leaves(
        &self,
        program: &mut Program,
        structure: &Structure,
        leaves: &[&MpmdArray],
    ) -> Result<(Structure, Vec<MpmdArray>)> {
        let at = program.caller(Location::caller());
        let mut call = self.issue(program, &ListedInputs { structure, leaves }, at)?;
        let slots = &mut call.prepared.slots;
        let arrays: Vec<_> = call.bound.plan.arrays(slots, call.op, at).collect();
        let bound = self.start(program, call);

        program.synced(at)?;
        if Self::is_checked(program, &bound.plan) {
            let outputs: Vec<&MpmdArray> = arrays.iter().collect();
            self.check_call(program, &bound.plan, leaves, &outputs, at)?;
        }
        Ok((bound.plan.output_structure.clone(), arrays))
    }

    /// Checks and issues a call on leaves that fit the plan. Returns its operation number. The
    /// first `same` leaves are the same arrays as in the plan's last calls.
    fn issue_checked(
        &self,
        program: &mut Program,
        bound: &Arc<Bound>,
        leaves: &[&MpmdArray],
        same: usize,
        prepared: &mut PreparedCalls,
        at: &'static Location<'static>,
    ) -> std::result::Result<u64, IssueProblem> {
        self.check_program(program)?;
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
        structure: Structure,
        leaves: &[&MpmdArray],
    ) -> std::result::Result<KnownPlan, IssueProblem> {
        self.check_program(program)?;
        let plan = CallPlan::new(&self.settings, &program.runtime, structure, leaves)?;
        let bound = Arc::new(Bound::new(
            self.settings.kernel.clone(),
            plan,
            self.warm.clone(),
        ));
        let plans = &mut self.kept.lock().plans;
        if plans.len() >= PLANS_KEPT {
            plans.remove(0);
        }
        plans.push(bound.clone());
        Ok(KnownPlan { bound, same: 0 })
    }

    /// Returns an error if another program has created this kernel.
    fn check_program(&self, program: &Program) -> std::result::Result<(), IssueProblem> {
        if std::ptr::eq(self.program.as_ptr(), Arc::as_ptr(&program.runtime)) {
            return Ok(());
        }
        Err(IssueProblem::Foreign {
            path: "the kernel".to_owned(),
        })
    }

    /// Returns the error of a call at `at`.
    pub(super) fn wrong(&self, problem: IssueProblem, at: &'static Location<'static>) -> Error {
        problem.at(at, format!("jit {}", self.settings.kernel.name()))
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
fn issue(
    program: &mut Program,
    bound: &Arc<Bound>,
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
fn prepare(
    prepared: &mut PreparedCalls,
    program: &Program,
    bound: &Arc<Bound>,
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

impl Again for Bound {
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
