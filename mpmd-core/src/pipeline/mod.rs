//! Pipelines: stages wired by type, schedules as data, and the runner that turns both into plain `jit` and
//! `device_put` operations.
//!
//! A [`Pipeline`] is made of [`Stage`]s, each on a mesh of its own; a stage whose input is not the output of
//! the one before does not compile. A [`Schedule`] says in which order each rank computes; the runner
//! issues everything in one global order whose part on each rank is the schedule's. No second description of
//! a run exists. Buffers are dropped at the action after which nobody needs them.

pub mod check;
mod costs;
pub mod flow;
mod kernels;
mod lower;
mod lower_comms;
mod memory;
mod replay;
mod run;
mod schedule;
mod search;
mod shapes;
mod sidecar;
pub mod simulate;
mod stage;
mod storage;
mod text;
mod wired;

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;

pub use costs::{Costs, StageCosts};
pub use lower::{LowerError, Lowered, Step, StepKind, lower, lower_cells, lower_late};
pub use lower_comms::lower_comms;
pub use memory::{DeviceMemory, MemoryPlan, StageBytes};
use replay::Kept;
pub use run::{Gradients, Microbatch, StepOutput};
pub use schedule::{Action, ActionKind, Builtin, Placement, Schedule, ScheduleError};
pub use search::{Budget, Found, SearchOptions, search};
pub use shapes::MicrobatchShapes;
pub use sidecar::{Sidecar, SidecarError};
pub use stage::{Declared, Loss, Placed, PlacedShape, Stage, StageSignature};
pub use storage::Storage;
pub use text::{Cell, CellFault, Entry, Flavour, Text, TextError};
use wired::{AnyStage, Bundle, Wired};

use crate::array::MpmdArray;
use crate::error::{Error, Result};
use crate::program::Program;
use crate::topology::{DeviceId, Mesh};
use crate::tree::Tree;

/// Stages one after another: takes `In`, gives `Out`.
pub struct Pipeline<In, Out> {
    stages: Vec<Box<dyn AnyStage>>,
    replays: bool,
    /// The step that is replayed.
    kept: Option<Kept>,
    types: PhantomData<fn(In) -> Out>,
}

impl<In: Tree<Leaf = MpmdArray>, Out: Tree<Leaf = MpmdArray>> Pipeline<In, Out> {
    /// A pipeline of one stage, on the devices of `mesh`, with these parameters.
    ///
    /// # Errors
    ///
    /// Where a parameter does not live on the mesh's devices.
    #[track_caller]
    pub fn first<S: Stage<In = In, Out = Out>>(stage: S, mesh: &Mesh, params: S::Params) -> Result<Self> {
        let stages: Vec<Box<dyn AnyStage>> = vec![Box::new(Wired::new(stage, mesh, params, true)?)];
        Ok(Self { stages, replays: false, kept: None, types: PhantomData })
    }

    /// The pipeline with one stage more.
    ///
    /// ```compile_fail
    /// # use mpmd_core::pipeline::{Pipeline, Stage};
    /// # use mpmd_core::prelude::*;
    /// fn wire<A, B>(p: Pipeline<MpmdArray, (MpmdArray, MpmdArray)>, stage: B, mesh: &Mesh, w: B::Params)
    /// where
    ///     B: Stage<In = MpmdArray>, // takes one array, the pipeline gives two
    /// {
    ///     p.then(stage, mesh, w);
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Pipeline::first`].
    #[track_caller]
    pub fn then<S: Stage<In = Out>>(
        mut self,
        stage: S,
        mesh: &Mesh,
        params: S::Params,
    ) -> Result<Pipeline<In, S::Out>> {
        self.stages.push(Box::new(Wired::new(stage, mesh, params, false)?));
        Ok(Pipeline { stages: self.stages, replays: self.replays, kept: None, types: PhantomData })
    }

    /// Whether training steps are recorded and replayed, so that a process spends no time on what others do: the
    /// first step with a schedule, and with parameters and microbatches of the same shapes and shardings, is
    /// [recorded](Program::record), those that follow are [replayed](crate::Recorded::replay). Off by default. The
    /// same on every process, or they diverge.
    pub fn replay(&mut self, yes: bool) {
        (self.replays, self.kept) = (yes, None);
    }

    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.stages.len()
    }

    /// The mesh of a stage.
    ///
    /// # Panics
    ///
    /// Where there is no such stage.
    pub fn mesh(&self, stage: usize) -> &Mesh {
        self.stages[stage].mesh()
    }

    /// Has a stage's kernels compute with parameters in other shardings than those that they have now, which
    /// they keep: see [`Storage`]. Gradients come in the stored shardings, too.
    ///
    /// # Errors
    ///
    /// Where there are more or fewer shardings than the stage has parameters, or one is not on the devices of
    /// its mesh or does not divide its parameter.
    ///
    /// # Panics
    ///
    /// Where there is no such stage.
    pub fn store(&mut self, stage: usize, storage: Storage) -> Result<()> {
        self.kept = None;
        self.stages[stage].store(storage)
    }

    /// A stage's parameters with their paths, in leaf order, as they are stored.
    ///
    /// # Panics
    ///
    /// Where there is no such stage.
    pub fn params(&self, stage: usize) -> Vec<(String, MpmdArray)> {
        let Bundle { structure, leaves } = self.stages[stage].params();
        structure.paths().into_iter().zip(leaves).collect()
    }

    /// Puts other parameters in place, in leaf order: those that an optimiser has made.
    ///
    /// # Errors
    ///
    /// Where there are more or fewer than the stage has.
    ///
    /// # Panics
    ///
    /// Where there is no such stage.
    pub fn set_params(&mut self, stage: usize, params: Vec<MpmdArray>) -> Result<()> {
        self.stages[stage].set_params(params)
    }

    /// Runs one batch forward through all stages; nothing is kept for a backward pass.
    ///
    /// # Errors
    ///
    /// As the `jit` and `device_put` calls that it makes.
    #[track_caller]
    pub fn forward(&mut self, program: &mut Program, microbatch: Microbatch<In>) -> Result<Out> {
        run::forward(&mut self.stages, program, microbatch.into_parts())
    }
}

impl<In: Tree<Leaf = MpmdArray>> Pipeline<In, Loss<MpmdArray>> {
    /// The most memory that the devices of this process will have in use in a training step: see
    /// [`MemoryPlan`]. `beside` are arrays that the caller keeps all the time, such as an optimiser's state; not
    /// the microbatches' own, which count by themselves. Nothing is issued.
    ///
    /// The figures of other processes' devices are in it too, but as if only this process handed arrays over.
    ///
    /// # Errors
    ///
    /// Where the schedule is for another number of stages, shapes or side inputs do not fit, or a sharding does
    /// not divide what it is for.
    pub fn memory(
        &self,
        program: &Program,
        schedule: &Schedule,
        microbatch: &MicrobatchShapes<In>,
        beside: &[MpmdArray],
    ) -> Result<MemoryPlan> {
        let parts = microbatch.parts();
        let stages = shapes::stage_bytes(&self.stages, program, schedule, parts, beside, &mut |bytes| bytes)?;
        MemoryPlan::new(schedule, &stages).map_err(|error| Error::kernel(error.to_string()))
    }

    /// Has the devices of this process map now what a training step may need at most, whatever the pace of the
    /// neighbours: so that no step ever waits for the system. What is not used costs addresses, and no pages.
    /// Waits for the parameters and for `beside`, which are as in [`Pipeline::memory`]; issues nothing.
    /// Peaks that are counted from now on ([`Program::forget_memory_peak`]) are those of steps.
    ///
    /// # Errors
    ///
    /// As [`Pipeline::memory`], and where the parameters have failed. Where there is less memory than that, as
    /// much of it is mapped as there is.
    pub fn map_memory(
        &self,
        program: &Program,
        schedule: &Schedule,
        microbatch: &MicrobatchShapes<In>,
        beside: &[MpmdArray],
    ) -> Result<()> {
        let mut classes = BTreeSet::new();
        let plan = |counts: &mut dyn FnMut(u64) -> u64| {
            let stages =
                shapes::stage_bytes(&self.stages, program, schedule, microbatch.parts(), beside, counts)?;
            let plan =
                MemoryPlan::new(schedule, &stages).map_err(|error| Error::kernel(error.to_string()))?;
            Ok::<_, Error>((plan, stages))
        };
        plan(&mut |bytes| {
            classes.insert(bytes);
            bytes
        })?;
        let params = self.stages.iter().flat_map(|stage| stage.params().leaves);
        for array in params.chain(beside.iter().cloned()) {
            array.block_until_ready()?;
        }
        let mut blocks: BTreeMap<DeviceId, Vec<u64>> = BTreeMap::new();
        for class in classes {
            let (plan, stages) = plan(&mut |bytes| if bytes == class { bytes } else { 0 })?;
            for (device, memory) in plan.devices() {
                let kept: u64 =
                    stages.iter().filter_map(|stage| stage.get(&device)).map(|one| one.kept).sum();
                let more = memory.at_most.saturating_sub(kept) / class;
                blocks.entry(device).or_default().extend((0..more).map(|_| class));
            }
        }
        program.map_blocks(&blocks);
        Ok(())
    }

    /// Runs the forward and backward passes of one step, in the order of `schedule`.
    ///
    /// Returns at once, as all issuing does. The gradients are sums over the microbatches; divide them by
    /// the total weight.
    ///
    /// # Errors
    ///
    /// Where the schedule is for another number of stages or microbatches, where side inputs do not fit,
    /// and as the `jit` and `device_put` calls that it makes.
    #[track_caller]
    pub fn train_step(
        &mut self,
        program: &mut Program,
        schedule: &Schedule,
        microbatches: Vec<Microbatch<In>>,
    ) -> Result<StepOutput> {
        let parts = microbatches.into_iter().map(Microbatch::into_parts).collect();
        // Within a step that is recorded as a whole there is nothing to record by itself.
        if self.replays && program.recording.is_none() {
            return replay::train_step(&mut self.kept, &mut self.stages, program, schedule, parts);
        }
        run::train_step(&mut self.stages, program, schedule, parts)
    }
}
