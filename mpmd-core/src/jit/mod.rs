//! `jit`: a kernel bound to a mesh, callable like a function of arrays.
//!
//! A call checks its inputs, takes one operation number, queues the kernel on the devices of the mesh
//! that this process owns, and returns handles. What the checks work out is kept for the next call with
//! the same shapes and shardings.

mod call;
mod plan;

use std::fmt;
use std::panic::Location;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::array::{LocalShard, MpmdArray, Origin, Placed, Repr};
use crate::device_put::host_word;
use crate::error::{IssueProblem, Result};
use crate::kernel::Kernel;
use crate::program::Program;
use crate::runtime::{Runtime, Slot};
use crate::sharding::{MemoryKind, Sharding};
use crate::topology::Mesh;
use crate::tree::{PrefixTree, Tree};
pub use call::run_here;
use call::{DeviceCall, Input, Leftovers, Memory, Output};
use plan::CallPlan;

/// Call shapes that a [`Jit`] remembers.
const PLANS_KEPT: usize = 8;

impl Program {
    /// Binds a kernel to a mesh: `program.jit(kernel).on(&mesh).outputs(sharding).build()?`.
    pub fn jit<K: Kernel>(&self, kernel: K) -> JitBuilder<K> {
        let program = Arc::downgrade(&self.runtime);
        JitBuilder { kernel, program, mesh: None, inputs: None, outputs: None, donate: Vec::new() }
    }
}

/// What a kernel is bound to. Made by [`Program::jit`].
#[must_use = "a builder does nothing until `build`"]
pub struct JitBuilder<K> {
    kernel: K,
    program: Weak<Runtime>,
    mesh: Option<Mesh>,
    inputs: Option<PrefixTree<Sharding>>,
    outputs: Option<PrefixTree<Sharding>>,
    donate: Vec<String>,
}

impl<K: Kernel> JitBuilder<K> {
    /// The mesh whose devices run the kernel. Required.
    pub fn on(mut self, mesh: &Mesh) -> Self {
        self.mesh = Some(mesh.clone());
        self
    }

    /// How the inputs must be sharded: one sharding for all, or a tree prefix. Without it any sharding
    /// that gives each device of the mesh a part is taken.
    pub fn inputs(mut self, shardings: impl Into<PrefixTree<Sharding>>) -> Self {
        self.inputs = Some(shardings.into());
        self
    }

    /// How the outputs are sharded: one sharding for all, or a tree prefix. Required. With unreduced axes
    /// the kernel says that what it writes are partial sums over them.
    pub fn outputs(mut self, shardings: impl Into<PrefixTree<Sharding>>) -> Self {
        self.outputs = Some(shardings.into());
        self
    }

    /// Gives up the input at this path, or all below it, with each call: it ends for every clone, and
    /// the output that the kernel's signature aliases to it takes its memory over.
    pub fn donate(mut self, path: impl Into<String>) -> Self {
        self.donate.push(path.into());
        self
    }

    /// The bound kernel.
    ///
    /// # Errors
    ///
    /// Where mesh or output shardings are missing, or an output sharding is not on the mesh's devices or
    /// is in host memory.
    #[track_caller]
    pub fn build(self) -> Result<Jit<K>> {
        let at = Location::caller();
        let call = format!("jit {}", self.kernel.name());
        let mesh = self
            .mesh
            .ok_or_else(|| IssueProblem::Mesh("missing mesh: call `.on(&mesh)`".into()).at(at, &call))?;
        let outputs = self.outputs.ok_or_else(|| IssueProblem::MissingOutputs.at(at, &call))?;
        plan::check_outputs(&outputs, &mesh).map_err(|problem| problem.at(at, &call))?;
        Ok(Jit {
            kernel: Arc::new(self.kernel),
            program: self.program,
            mesh,
            inputs: self.inputs,
            outputs,
            donate: self.donate,
            plans: Mutex::new(Vec::new()),
        })
    }
}

/// A kernel bound to a mesh.
pub struct Jit<K: Kernel> {
    kernel: Arc<K>,
    /// Whose it is; plans are for its devices.
    program: Weak<Runtime>,
    mesh: Mesh,
    inputs: Option<PrefixTree<Sharding>>,
    outputs: PrefixTree<Sharding>,
    donate: Vec<String>,
    plans: Mutex<Vec<Arc<CallPlan>>>,
}

impl<K: Kernel> Jit<K> {
    /// Calls the kernel: on the devices of its mesh that this process owns, when their inputs are
    /// there. Returns at once; the outputs are remote handles where this process owns none of the mesh.
    ///
    /// Uncommitted inputs are seen whole by every device.
    ///
    /// # Errors
    ///
    /// Where an input is on other devices, sharded otherwise than declared or donated, where it is in host
    /// memory or of partial sums and not declared so, where the kernel refuses the shapes, and where its signature does not fit the shardings: the same on every
    /// process. A kernel that fails when it runs fails its outputs instead.
    #[track_caller]
    pub fn call(&self, program: &mut Program, x: K::In) -> Result<K::Out> {
        self.call_at(program, &x, Location::caller())
    }

    /// The mesh that the kernel runs on.
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    fn call_at(&self, program: &mut Program, x: &K::In, at: &'static Location<'static>) -> Result<K::Out> {
        let wrong = |problem: IssueProblem| problem.at(at, format!("jit {}", self.kernel.name()));
        let leaves = x.leaves();
        if !std::ptr::eq(self.program.as_ptr(), Arc::as_ptr(&program.runtime)) {
            return Err(wrong(IssueProblem::Foreign { path: "the kernel".to_owned() }));
        }
        let plan = match self.known_plan(x, &leaves) {
            Some(plan) => plan,
            None => self.new_plan(program, x).map_err(wrong)?,
        };
        plan.check_donations(&leaves).map_err(wrong)?;
        for (i, leaf) in leaves.iter().enumerate() {
            leaf.check_usable(plan.input_path(i)).map_err(wrong)?;
            if let Repr::Placed(placed) = &leaf.repr
                && !Arc::ptr_eq(&placed.runtime, &program.runtime)
            {
                return Err(wrong(IssueProblem::Foreign { path: plan.input_path(i).to_owned() }));
            }
        }
        if !plan.seats.is_empty() {
            program.admit(at);
        }
        let words =
            std::iter::once(plan.fingerprint).chain(leaves.iter().flat_map(|leaf| match &leaf.repr {
                Repr::Placed(placed) => [placed.origin.op, u64::from(placed.origin.leaf)],
                Repr::Host(host) => [host_word(host), u64::MAX],
            }));
        let op = program.issue(words, plan.what.clone(), at);
        for (i, leaf) in leaves.iter().enumerate() {
            if let Repr::Placed(placed) = &leaf.repr
                && plan.inputs[i].donated
            {
                placed.donate(op, at);
            }
        }
        let mut shards: Vec<Vec<LocalShard>> = plan.outputs.iter().map(|_| Vec::new()).collect();
        if !plan.seats.is_empty() {
            self.queue(program, &plan, &leaves, op, at, &mut shards);
        }
        let arrays = plan.outputs.iter().zip(shards).enumerate().map(|(i, (output, shards))| {
            let origin = Origin { op, leaf: i as u32, what: plan.what.clone(), at };
            let (aval, sharding, layout) =
                (output.aval.clone(), output.sharding.clone(), output.layout.clone());
            Placed::array(&program.runtime, aval, sharding, layout, shards, origin)
        });
        K::Out::from_leaves(&plan.output_structure, arrays).map_err(|error| wrong(IssueProblem::Tree(error)))
    }

    /// Queues the call on each local device, and makes the slots of its outputs.
    fn queue(
        &self,
        program: &Program,
        plan: &Arc<CallPlan>,
        leaves: &[&MpmdArray],
        op: u64,
        at: &'static Location<'static>,
        shards: &mut [Vec<LocalShard>],
    ) {
        let runtime = &program.runtime;
        let guard = runtime.in_flight.begin(op, plan.bytes);
        let leftovers =
            (!plan.mesh.collectives.is_empty()).then(|| Arc::new(Leftovers { runtime: runtime.clone(), op }));
        for (seat_index, seat) in plan.seats.iter().enumerate() {
            let inputs = leaves
                .iter()
                .zip(&plan.inputs)
                .map(|(leaf, input)| match &leaf.repr {
                    Repr::Host(host) => Input::Host(host.clone()),
                    Repr::Placed(placed) => match placed.slot(seat.place.device) {
                        Some(slot) if input.donated => Input::Donated(slot.clone(), placed.donated_failure()),
                        Some(slot) => Input::Slot(slot.issue_use()),
                        // Cannot happen: the plan has checked that every device has its part.
                        None => Input::Slot(Slot::filled(Vec::new().into()).issue_use()),
                    },
                })
                .collect();
            let outputs = plan
                .outputs
                .iter()
                .zip(&seat.outputs)
                .zip(shards.iter_mut())
                .map(|((output, info), shards)| {
                    let (promise, slot) = Slot::new();
                    shards.push(LocalShard { device: seat.place.device, slot });
                    let taken_over = output.alias.is_some_and(|input| plan.inputs[input].donated);
                    let memory = if taken_over {
                        Memory::TakenOver
                    } else {
                        Memory::New(runtime.reserve(
                            seat.local_index,
                            MemoryKind::Device,
                            info.bytes(),
                            op,
                            &*plan.what,
                        ))
                    };
                    Output { promise, memory }
                })
                .collect();
            let call = DeviceCall {
                kernel: self.kernel.clone(),
                plan: plan.clone(),
                seat: seat_index,
                op,
                at,
                inputs,
                outputs,
                runtime: runtime.clone(),
                guard: guard.clone(),
                leftovers: leftovers.clone(),
            };
            runtime.run_on(seat.local_index, Box::new(move || call.run()));
        }
    }

    fn known_plan(&self, x: &K::In, leaves: &[&MpmdArray]) -> Option<Arc<CallPlan>> {
        let plan = self.plans.lock().iter().find(|plan| plan.fits(leaves)).cloned()?;
        // Two trees may have the same leaves in other places.
        (plan.input_structure == x.structure()).then_some(plan)
    }

    fn new_plan(&self, program: &Program, x: &K::In) -> std::result::Result<Arc<CallPlan>, IssueProblem> {
        let plan = Arc::new(CallPlan::new(self, &program.runtime, x)?);
        let mut plans = self.plans.lock();
        if plans.len() >= PLANS_KEPT {
            plans.remove(0);
        }
        plans.push(plan.clone());
        Ok(plan)
    }
}

impl<K: Kernel> fmt::Debug for Jit<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Jit({} on {})", self.kernel.name(), self.mesh)
    }
}
