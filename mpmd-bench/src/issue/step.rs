//! A training step of a pipeline with nearly empty kernels.

use mpmd_base::ProcessId;
use mpmd_core::Jit;
use mpmd_core::prelude::{
    Context, Kernel, MpmdArray, Program, Result, ShapedArray, Signature, View, ViewMut, f32s,
};
use mpmd_layout::topology::Mesh;
use mpmd_schedule::{Action, ActionKind, Schedule};

/// Elements of every array.
pub(super) const ELEMENTS: usize = 4;

/// The arguments of a step: (the sum of each stage, which is donated, the microbatches).
pub(super) type Given = (Vec<MpmdArray>, Vec<MpmdArray>);

/// The results of a step: the new sum of each stage.
pub(super) type Results = Vec<MpmdArray>;

/// The kernel of a forward pass: copies its input to the output and to the residual.
struct Forward;

impl Kernel for Forward {
    type In = MpmdArray;
    type Out = (MpmdArray, MpmdArray);

    fn infer(&self, x: &ShapedArray) -> Result<Signature<(ShapedArray, ShapedArray)>> {
        Ok(Signature::new((x.clone(), x.clone())))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        x: View<'_>,
        (mut y, mut kept): (ViewMut<'_>, ViewMut<'_>),
    ) -> Result<()> {
        y.as_mut_slice::<f32>()?.copy_from_slice(x.as_slice()?);
        kept.as_mut_slice::<f32>()?.copy_from_slice(x.as_slice()?);
        Ok(())
    }
}

/// The kernel of a backward pass: adds the residual to the stage's sum, and copies `dy` to `dx`.
struct Backward;

impl Kernel for Backward {
    type In = (MpmdArray, MpmdArray, MpmdArray);
    type Out = (MpmdArray, MpmdArray);

    fn infer(
        &self,
        (sum, _, dy): &(ShapedArray, ShapedArray, ShapedArray),
    ) -> Result<Signature<(ShapedArray, ShapedArray)>> {
        Ok(Signature::new((sum.clone(), dy.clone())).alias("0", "0"))
    }

    fn run(
        &self,
        _: &mut Context<'_>,
        (_, kept, dy): (View<'_>, View<'_>, View<'_>),
        (mut sum, mut dx): (ViewMut<'_>, ViewMut<'_>),
    ) -> Result<()> {
        let kept = kept.as_slice::<f32>()?;
        sum.as_mut_slice::<f32>()?.iter_mut().zip(kept).for_each(|(sum, kept)| *sum += kept);
        dx.as_mut_slice::<f32>()?.copy_from_slice(dy.as_slice()?);
        Ok(())
    }
}

/// A 1F1B pipeline with one stage on each process. It issues the same operations as the pipeline
/// runner, without the runner.
pub(super) struct Steps {
    meshes: Vec<Mesh>,
    forward: Vec<Jit<Forward>>,
    backward: Vec<Jit<Backward>>,
    order: Vec<Action>,
    microbatches: usize,
}

impl Steps {
    pub(super) fn new(p: &mut Program, microbatches: usize) -> Result<Self> {
        let stages = p.processes();
        let order = Schedule::one_f_one_b(stages, microbatches)?.global_order()?;
        let devices = p.topology().device_ids().to_vec();
        let mesh = |device: &_| p.mesh_of(&[("stage", 1)], &[*device]);
        let meshes = devices.iter().map(mesh).collect::<Result<Vec<_>>>()?;
        let forward = |mesh: &Mesh| p.jit(Forward).on(mesh).outputs(mesh.replicated()).build();
        let forward = meshes.iter().map(forward).collect::<Result<_>>()?;
        let backward = |mesh: &Mesh| {
            p.jit(Backward).on(mesh).outputs(mesh.replicated()).donate("0").donate("1").build()
        };
        let backward = meshes.iter().map(backward).collect::<Result<_>>()?;
        Ok(Self { meshes, forward, backward, order, microbatches })
    }

    /// Creates the arguments of the first step; all are zeros.
    pub(super) fn given(&self, p: &mut Program) -> Result<Given> {
        let mut zeros = |mesh: &Mesh| {
            p.array_from_fn(f32s([ELEMENTS]), mesh.replicated(), |_, mut view| {
                Ok(view.fill(0.0f32)?)
            })
        };
        let sums = self.meshes.iter().map(&mut zeros).collect::<Result<_>>()?;
        let inputs =
            (0..self.microbatches).map(|_| zeros(&self.meshes[0])).collect::<Result<_>>()?;
        Ok((sums, inputs))
    }

    /// Returns (the number of operations of a step, the arrivals at process `to`). An arrival is
    /// (the sender, the operation's number in the step, from 1).
    pub(super) fn arrivals(&self, to: ProcessId) -> (u64, Vec<(ProcessId, u64)>) {
        let last = self.meshes.len() - 1;
        let (mut count, mut arrivals) = (0, Vec::new());
        for action in &self.order {
            let here = action.stage == to.index();
            let from = match action.kind {
                ActionKind::Forward => action.stage.checked_sub(1),
                _ => (action.stage < last).then_some(action.stage + 1),
            };
            // An input from another stage is moved first. Then the action is computed.
            if let Some(from) = from {
                count += 1;
                if here {
                    arrivals.push((ProcessId(from as u32), count));
                }
            }
            count += 1;
        }
        (count, arrivals)
    }

    /// Issues a step call by call, and does not wait for its end. Returns the new sums.
    pub(super) fn step(&self, p: &mut Program, (mut sums, inputs): Given) -> Result<Results> {
        let (stages, microbatches) = (self.meshes.len(), self.microbatches);
        let place = |stage: usize, microbatch: usize| stage * microbatches + microbatch;
        // The inputs of each stage, forward and backward, and its residuals.
        let mut forward: Vec<Option<MpmdArray>> = vec![None; stages * microbatches];
        let mut backward: Vec<Option<MpmdArray>> = vec![None; stages * microbatches];
        let mut kept: Vec<Option<MpmdArray>> = vec![None; stages * microbatches];
        for (microbatch, x) in inputs.into_iter().enumerate() {
            forward[place(0, microbatch)] = Some(x);
        }
        let there = |slot: &mut Option<MpmdArray>| {
            slot.take().ok_or_else(|| mpmd_core::Error::kernel("an action comes before its input"))
        };
        for Action { stage, kind, microbatch } in self.order.iter().copied() {
            let at = place(stage, microbatch);
            if kind == ActionKind::Forward {
                let mut x = there(&mut forward[at])?;
                if stage > 0 {
                    x = p.device_put(&x, self.meshes[stage].replicated())?;
                }
                let (y, residual) = self.forward[stage].call(p, x)?;
                kept[at] = Some(residual);
                let to = if stage + 1 < stages {
                    &mut forward[place(stage + 1, microbatch)]
                } else {
                    &mut backward[at]
                };
                *to = Some(y);
            } else {
                let mut dy = there(&mut backward[at])?;
                if stage + 1 < stages {
                    dy = p.device_put(&dy, self.meshes[stage].replicated())?;
                }
                let residual = there(&mut kept[at])?;
                let (sum, dx) =
                    self.backward[stage].call(p, (sums[stage].clone(), residual, dy))?;
                sums[stage] = sum;
                if stage > 0 {
                    backward[place(stage - 1, microbatch)] = Some(dx);
                }
            }
        }
        Ok(sums)
    }
}
