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
mod prepared;
mod recompute;
mod replicas;
mod settings;
mod unchanged_inputs;
mod untyped;
mod warm;

use std::fmt;
use std::marker::PhantomData;
use std::panic::Location;
use std::sync::{Arc, Weak};

use mpmd_base::block::Mutex;

use crate::api::program::Program;
use crate::error::{IssueProblem, Result};
use crate::exec::Runtime;
use crate::exec::array::MpmdArray;
use crate::kernel::{Kernel, Typed, UntypedKernel};
pub use call::run_here;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::Mesh;
use mpmd_layout::tree::{PrefixTree, Structure, Tree, TreeError};
use settings::KernelSettings;
use untyped::{CallInputs, UntypedJit};
use warm::Warm;

impl Program {
    /// Returns a builder that binds a kernel to a mesh:
    /// `program.jit(kernel).on(&mesh).outputs(sharding).build()?`.
    pub fn jit<K: Kernel>(&self, kernel: K) -> JitBuilder<K> {
        JitBuilder {
            kernel,
            settings: JitSettings {
                program: Arc::downgrade(&self.runtime),
                mesh: None,
                inputs: None,
                partial_sums: None,
                outputs: None,
                donate: Vec::new(),
            },
        }
    }
}

/// Builder of a [`Jit`]: mesh, shardings and donations of a kernel. Created by [`Program::jit`].
#[must_use = "a builder does nothing until `build`"]
pub struct JitBuilder<K> {
    kernel: K,
    settings: JitSettings,
}

/// The settings of a [`JitBuilder`], without its kernel.
struct JitSettings {
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
        self.settings.mesh = Some(mesh.clone());
        self
    }

    /// Sets the expected shardings of the inputs: one for all, or a tree prefix. Without it, an
    /// input may have any sharding that gives each device of the mesh a part. Partial sums and
    /// arrays in host memory must always be declared here.
    pub fn inputs(mut self, shardings: impl Into<PrefixTree<Sharding>>) -> Self {
        self.settings.inputs = Some(shardings.into());
        self
    }

    /// Accepts partial sums in the inputs at and below this path, without a declaration by
    /// [`inputs`](Self::inputs).
    pub(crate) fn partial_sums(mut self, path: &'static str) -> Self {
        self.settings.partial_sums = Some(path);
        self
    }

    /// Sets the shardings of the outputs: one for all, or a tree prefix. Unreduced axes declare
    /// that the kernel writes partial sums over them. Without it, the shardings follow from those
    /// of each call's inputs by the kernel's [rule](Kernel::rule); a kernel without a rule needs
    /// it.
    pub fn outputs(mut self, shardings: impl Into<PrefixTree<Sharding>>) -> Self {
        self.settings.outputs = Some(shardings.into());
        self
    }

    /// Donates the input at this path, or all inputs below it, with each call. The donated array
    /// and all its clones become unusable. If the signature aliases an output to the input, that
    /// output takes over the input's memory. Host values are copied instead, and stay usable. If
    /// the path names no input, each call is an error.
    pub fn donate(mut self, path: impl Into<String>) -> Self {
        self.settings.donate.push(path.into());
        self
    }

    /// Builds the bound kernel, and starts to compile its code for this process's CUDA devices. If
    /// the compilation fails, each call fails.
    ///
    /// # Errors
    ///
    /// If the mesh is missing, or the output shardings of a kernel without a rule. If an output
    /// sharding is in host memory, or is not on exactly the mesh's devices.
    #[track_caller]
    pub fn build(self) -> Result<Jit<K>> {
        let untyped = self
            .settings
            .build(Arc::new(Typed(self.kernel)), Location::caller())?;
        Ok(Jit {
            untyped,
            kernel: PhantomData,
        })
    }
}

impl JitSettings {
    /// Binds the kernel. `at` is the caller, for errors.
    fn build(
        self,
        kernel: Arc<dyn UntypedKernel>,
        at: &'static Location<'static>,
    ) -> Result<UntypedJit> {
        let call = format!("jit {}", kernel.name());
        let mesh = self.mesh.ok_or_else(|| {
            IssueProblem::Mesh("missing mesh: call `.on(&mesh)`".into()).at(at, &call)
        })?;
        match &self.outputs {
            Some(outputs) => {
                plan::check_outputs(outputs, &mesh).map_err(|problem| problem.at(at, &call))?;
            }
            None if kernel.rule().is_some() => {}
            None => return Err(IssueProblem::MissingOutputs.at(at, &call)),
        }

        let runtime = self.program.upgrade();
        let warm = runtime
            .map(|runtime| Warm::start(&*kernel, &mesh, &runtime))
            .unwrap_or_default();

        Ok(UntypedJit {
            warm: Arc::new(warm),
            settings: KernelSettings {
                kernel,
                mesh,
                inputs: self.inputs,
                partial_sums: self.partial_sums,
                outputs: self.outputs,
                donate: self.donate,
            },
            program: self.program,
            kept: Mutex::default(),
        })
    }
}

/// A kernel bound to a mesh.
pub struct Jit<K: Kernel> {
    untyped: UntypedJit,
    kernel: PhantomData<fn() -> K>,
}

impl<K: Kernel> Jit<K> {
    /// Queues the kernel on this process's devices of the mesh, and returns handles to its outputs.
    /// Each device runs the kernel once its inputs are ready.
    ///
    /// Does not wait for the kernel, but may block while the program is too far ahead or memory is
    /// short. If this process owns none of the mesh's devices, the outputs are fully remote
    /// handles.
    ///
    /// Of an uncommitted input every device gets what the kernel's [rule](Kernel::rule) asks for,
    /// or the whole without a rule.
    ///
    /// # Errors
    ///
    /// If an input is on other devices, not sharded as declared, or donated. If an input is in host
    /// memory or has partial sums, and that is not declared. If the kernel refuses the shapes, or
    /// its signature or its rule does not fit the shardings. These errors are the same on every
    /// process. A kernel that fails when it runs fails its outputs instead.
    #[track_caller]
    pub fn call(&self, program: &mut Program, x: K::In) -> Result<K::Out> {
        let at = program.caller(Location::caller());
        self.call_at(program, &x, at)
    }

    /// Returns the mesh that the kernel runs on.
    pub fn mesh(&self) -> &Mesh {
        &self.untyped.settings.mesh
    }

    /// Calls the kernel as [`Jit::call`] does, and records `at` as the source line of the call.
    pub(crate) fn call_at(
        &self,
        program: &mut Program,
        x: &K::In,
        at: &'static Location<'static>,
    ) -> Result<K::Out> {
        let mut call = self.untyped.issue(program, &TypedInputs(x), at)?;
        let slots = &mut call.prepared.slots;
        let arrays = call.bound.plan.arrays(slots, call.op, at);
        let y = assemble::<K::Out>(&call.bound.plan.output_structure, arrays);
        let bound = self.untyped.start(program, call);

        program.synced(at)?;
        let y = y.map_err(|error| self.untyped.wrong(IssueProblem::Tree(error), at))?;
        if UntypedJit::is_checked(program, &bound.plan) {
            self.untyped
                .check_call(program, &bound.plan, &x.leaves(), &y.leaves(), at)?;
        }
        Ok(y)
    }

    /// Calls the kernel as [`Jit::call`] does, on the leaves of a tree of this structure. Returns
    /// (structure of the outputs, their leaves).
    #[track_caller]
    pub(crate) fn call_leaves(
        &self,
        program: &mut Program,
        structure: &Structure,
        leaves: &[&MpmdArray],
    ) -> Result<(Structure, Vec<MpmdArray>)> {
        self.untyped.call_leaves(program, structure, leaves)
    }
}

/// The inputs of a call, of the kernel's type.
struct TypedInputs<'a, T>(&'a T);

impl<'a, T: Tree<Leaf = MpmdArray>> CallInputs<'a> for TypedInputs<'a, T> {
    fn each_leaf(&self, f: &mut dyn FnMut(&'a MpmdArray)) {
        self.0.each_leaf(f);
    }

    fn has_structure(&self, structure: &Structure) -> bool {
        self.0.has_structure(structure)
    }

    fn structure(&self) -> Structure {
        self.0.structure()
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

impl<K: Kernel> fmt::Debug for Jit<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Jit({} on {})",
            self.untyped.settings.kernel.name(),
            self.untyped.settings.mesh
        )
    }
}
