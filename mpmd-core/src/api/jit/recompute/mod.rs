//! The check by recomputation: a kernel call is issued again on a device of another process, and
//! every process gets the hashes of both outputs.

#[cfg(test)]
mod tests;

use std::panic::Location;
use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_base::block::Mutex;

use super::Jit;
use super::plan::CallPlan;
use super::settings::KernelSettings;
use super::untyped::{KeptPlans, UntypedJit};
use super::warm::Warm;
use crate::api::program::{Comparison, Program, RecomputedCall, checkers};
use crate::error::{IssueProblem, Result};
use crate::exec::Rolling;
use crate::exec::array::MpmdArray;
use crate::kernel::{Context, Kernel, Signature, View, ViewMut};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{MemoryKind, Sharding};
use mpmd_layout::topology::{DeviceId, Mesh};
use mpmd_layout::tree::Structure;

/// Name of the axis of a mesh that has one device of each process.
const PROCESS: &str = "process";

/// Maximum number of [`Checker`]s, one for each device, that a kernel keeps. A further one replaces
/// the oldest.
const CHECKERS_KEPT: usize = 8;

/// A kernel bound to the device that recomputes its calls.
pub(super) struct Checker {
    device: DeviceId,
    kernel: UntypedJit,
    /// The kernels that hash the outputs: on the device of the original call, and on the
    /// recomputing device.
    hashes: [Jit<HashOutputs>; 2],
}

impl CallPlan {
    /// True if calls of this plan can be recomputed. They run on one device, donate nothing, and
    /// have neither objects nor collectives. Their inputs are host values or whole arrays in device
    /// memory. Another process must have a device of the same kind. The same on every process.
    pub(super) fn can_be_recomputed(&self) -> bool {
        let [device] = *self.mesh.mesh.devices() else {
            return false;
        };
        let is_whole = |sharding: &Sharding, shape: &[usize]| {
            let layout = sharding.layout(shape);
            sharding.unreduced_axes().is_empty()
                && sharding.memory_kind() == MemoryKind::Device
                && layout.is_ok_and(|it| it.region_of(device) == Some(&Region::full(shape)))
        };

        let inputs = self.inputs.iter().filter_map(|input| input.made.as_ref());
        let outputs = self.outputs.iter().map(|output| &output.made);
        self.objects.inputs.is_empty()
            && self.objects.outputs.is_empty()
            && self.mesh.collectives.is_empty()
            && !self.outputs.is_empty()
            && !self.inputs.iter().any(|input| input.donated)
            && inputs
                .chain(outputs)
                .all(|made| is_whole(&made.sharding, made.aval.shape()))
            && !checkers(&self.runtime.topology, device).is_empty()
    }
}

impl UntypedJit {
    /// Issues a call with inputs `x` and outputs `y` again on a device of another process, and then
    /// the comparison of both outputs. Does not wait.
    pub(super) fn recompute(
        &self,
        program: &mut Program,
        plan: &CallPlan,
        x: &[&MpmdArray],
        y: &[&MpmdArray],
        at: &'static Location<'static>,
    ) -> Result<()> {
        let [own] = *self.settings.mesh.devices() else {
            return Ok(());
        };
        let Some(again) = program.next_checker(own) else {
            return Ok(());
        };

        let kernel = self.settings.kernel.name().into();
        let call = RecomputedCall {
            processes: again.processes,
            is_only_pair: again.is_only_pair,
            kernel,
            at,
            step: 0,
        };

        let before = program.set_caller(Some(at));
        let hashes = program.without_recomputing(|program| {
            self.hashes_of_both(program, again.device, &plan.input_structure, x, y, at)
        });
        program.set_caller(before);
        program.will_compare([Comparison {
            call,
            hashes: hashes?,
        }]);
        Ok(())
    }

    /// Issues a call again on `device`. Returns the hashes of the original and of the recomputed
    /// outputs, on every process.
    fn hashes_of_both(
        &self,
        program: &mut Program,
        device: DeviceId,
        structure: &Structure,
        x: &[&MpmdArray],
        y: &[&MpmdArray],
        at: &'static Location<'static>,
    ) -> Result<[MpmdArray; 2]> {
        let checker = self.checker(program, device, at)?;
        let to = checker.kernel.settings.mesh.replicated();
        let placed: Vec<_> = x
            .iter()
            .filter(|leaf| leaf.made().is_some())
            .map(|leaf| (*leaf, &to))
            .collect();
        let moved = if placed.is_empty() {
            Vec::new()
        } else {
            program.put_list(&placed)?
        };
        let mut moved = moved.iter();
        // Host values are on every process.
        let x: Vec<&MpmdArray> = x
            .iter()
            .filter_map(|leaf| {
                if leaf.made().is_some() {
                    moved.next()
                } else {
                    Some(*leaf)
                }
            })
            .collect();

        let (_, again) = checker.kernel.call_leaves(program, structure, &x)?;
        let again: Vec<&MpmdArray> = again.iter().collect();

        let everywhere =
            everywhere(program).map_err(|problem| self.recompute_failed(problem, at))?;
        let [first, second] = &checker.hashes;
        let mut hash = |of: &Jit<HashOutputs>, y: &[&MpmdArray]| -> Result<MpmdArray> {
            let y: Vec<MpmdArray> = y.iter().map(|leaf| (*leaf).clone()).collect();
            let hash = of.call_at(program, &y, at)?;
            let mut moved = program.put_list(&[(&hash, &everywhere)])?;
            Ok(moved.remove(0))
        };
        Ok([hash(first, y)?, hash(second, &again)?])
    }

    /// Returns the [`Checker`] for `device`: a kept one, or a new one.
    fn checker(
        &self,
        program: &Program,
        device: DeviceId,
        at: &'static Location<'static>,
    ) -> Result<Arc<Checker>> {
        let known = |kept: &KeptPlans| {
            kept.checkers
                .iter()
                .find(|checker| checker.device == device)
                .cloned()
        };
        if let Some(known) = known(&self.kept.lock()) {
            return Ok(known);
        }

        let axes: Vec<(&str, usize)> = self
            .settings
            .mesh
            .axis_names()
            .iter()
            .map(|axis| (axis.as_str(), 1))
            .collect();
        let mesh = Mesh::new(&axes, vec![device])
            .map_err(|error| self.recompute_failed(IssueProblem::Mesh(error.to_string()), at))?;
        let hash = |mesh: &Mesh| {
            program
                .jit(HashOutputs)
                .on(mesh)
                .outputs(mesh.replicated())
                .build()
        };

        let hashes = [hash(&self.settings.mesh)?, hash(&mesh)?];
        let own = &*self.settings.kernel;
        let kernel = Self {
            warm: Arc::new(Warm::start(own, &mesh, &program.runtime)),
            settings: KernelSettings {
                kernel: self.settings.kernel.clone(),
                inputs: None,
                partial_sums: None,
                outputs: Some(mesh.replicated().into()),
                mesh,
                donate: Vec::new(),
            },
            program: self.program.clone(),
            kept: Mutex::default(),
        };
        let checker = Arc::new(Checker {
            device,
            kernel,
            hashes,
        });

        let checkers = &mut self.kept.lock().checkers;
        if checkers.len() >= CHECKERS_KEPT {
            checkers.remove(0);
        }
        checkers.push(checker.clone());
        Ok(checker)
    }

    fn recompute_failed(
        &self,
        problem: IssueProblem,
        at: &'static Location<'static>,
    ) -> crate::Error {
        problem.at(
            at,
            format!("recomputing jit {}", self.settings.kernel.name()),
        )
    }
}

/// Returns a sharding that replicates an array in host memory of every process.
fn everywhere(program: &Program) -> std::result::Result<Sharding, IssueProblem> {
    let topology = program.topology();
    let processes = (0..topology.processes() as u32).map(ProcessId);
    let firsts = processes.filter_map(|process| topology.devices_of(process).first().copied());
    let firsts: Vec<DeviceId> = firsts.collect();
    let mesh = Mesh::new(&[(PROCESS, firsts.len())], firsts);
    let mesh = mesh.map_err(|error| IssueProblem::Mesh(error.to_string()))?;
    Ok(mesh.replicated().with_memory_kind(MemoryKind::Host))
}

/// The kernel that hashes all outputs of a call to 128 bits.
struct HashOutputs;

impl Kernel for HashOutputs {
    type In = Vec<MpmdArray>;
    type Out = MpmdArray;

    fn infer(&self, _: &Vec<ShapedArray>) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(ShapedArray::new(&[2], DType::U64)))
    }

    fn run(&self, cx: &mut Context<'_>, x: Vec<View<'_>>, y: ViewMut<'_>) -> Result<()> {
        cx.on_host::<Self::In, Self::Out>(x, y, |_, x, mut y| {
            let hash = x
                .iter()
                .fold(Rolling::default(), |hash, x| hash.mix_bytes(x.bytes()));
            let value = hash.value();
            y.as_mut_slice::<u64>()?
                .copy_from_slice(&[value as u64, (value >> 64) as u64]);
            Ok(())
        })
    }

    fn name(&self) -> &str {
        "hash of a recomputed call"
    }
}
