//! Pipelines: stages wired by type, schedules as data, and the runner that turns both into plain
//! `jit` and `device_put` operations.
//!
//! A [`Pipeline`] is made of [`Stage`]s, each on a mesh; several may be on the same. A stage whose
//! input is not the output of the one before, or of those that it is wired to, does not compile. A
//! [`Schedule`] says in which order each rank computes; the runner issues everything in one global
//! order whose part on each rank is the schedule's. No second description of a run exists. Buffers
//! are dropped at the action after which nobody needs them.

mod kernels;
mod links;
mod net;
mod replay;
mod run;
mod shapes;
mod stage;
mod storage;
mod wired;

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::panic::Location;

pub use links::{Output, Outputs};
pub use mpmd_schedule::*;
use net::Net;
use replay::Kept;
pub use run::{Gradients, Microbatch, StepOutput};
pub use shapes::MicrobatchShapes;
pub use stage::{Declared, Loss, Placed, PlacedShape, Stage, StageSignature};
pub use storage::Storage;
use wired::Wired;

use crate::error::{Error, IssueProblem, Result};
use crate::exec::array::MpmdArray;
use crate::{api::program::Program, trace::Label};
use mpmd_layout::topology::{DeviceId, Mesh};
use mpmd_layout::tree::Tree;

/// Stages one after another: takes `In`, gives `Out`.
pub struct Pipeline<In, Out> {
    net: Net,
    replays: bool,
    /// The step that is replayed.
    kept: Option<Kept>,
    /// The schedule that the processes have compared last.
    compared: Option<Schedule>,
    types: PhantomData<fn(In) -> Out>,
}

impl<In: Tree<Leaf = MpmdArray>, Out: Tree<Leaf = MpmdArray>> Pipeline<In, Out> {
    /// A pipeline of one stage, on the devices of `mesh`, with these parameters.
    ///
    /// # Errors
    ///
    /// Where a parameter does not live on the mesh's devices.
    #[track_caller]
    pub fn first<S: Stage<In = In, Out = Out>>(
        stage: S,
        mesh: &Mesh,
        params: S::Params,
    ) -> Result<Self> {
        let at = Location::caller();
        let named = net::named(0, stage.name());
        let stage = Wired::new(stage, mesh, params, true);
        let net = Net::new(Box::new(
            stage.map_err(|why| refused(why, at, "Pipeline::first", Some(&named)))?,
        ));
        Ok(Self { net, replays: false, kept: None, compared: None, types: PhantomData })
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
        self,
        stage: S,
        mesh: &Mesh,
        params: S::Params,
    ) -> Result<Pipeline<In, S::Out>> {
        let output = self.output();
        self.then_from(stage, mesh, params, &output)
    }

    /// The outputs of the last stage so far, for a later stage to take beside those of the stage
    /// before it.
    pub fn output(&self) -> Output<Out> {
        Output::new(self.net.stages.len() - 1, self.net.identity.clone())
    }

    /// As [`Pipeline::then`], for a stage that takes outputs of any earlier stages: skip
    /// connections.
    ///
    /// Each output goes where it is wanted as soon as it was computed, and is kept there until the
    /// stage reads it. The gradients of an output that several stages take are added up in the
    /// order of these stages, before the input gradient of the stage that gave it. What nobody
    /// takes has no gradient, so that every output of every stage but the last must be taken by
    /// one: this is seen with the first microbatch.
    ///
    /// ```
    /// # use mpmd_core::pipeline::{Pipeline, Stage};
    /// # use mpmd_core::prelude::*;
    /// # type Images = MpmdArray;
    /// /// The last of three stages sees what the first one gave, too.
    /// fn wire<Down, Mid, Up>(
    ///     (down, mid, up): (Down, Mid, Up),
    ///     (a, b, c): (Down::Params, Mid::Params, Up::Params),
    ///     meshes: &[Mesh],
    /// ) -> Result<Pipeline<Images, Up::Out>>
    /// where
    ///     Down: Stage<In = Images, Out = MpmdArray>,
    ///     Mid: Stage<In = MpmdArray, Out = MpmdArray>,
    ///     Up: Stage<In = (MpmdArray, MpmdArray)>,
    /// {
    ///     let pipeline = Pipeline::first(down, &meshes[0], a)?;
    ///     let early = pipeline.output();
    ///     let pipeline = pipeline.then(mid, &meshes[1], b)?;
    ///     let late = pipeline.output();
    ///     pipeline.then_from(up, &meshes[2], c, &(late, early))
    /// }
    /// # use mpmd_core::topology::Mesh;
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Pipeline::first`], and where an output is another pipeline's.
    #[track_caller]
    pub fn then_from<S: Stage<In = X::In>, X: Outputs>(
        mut self,
        stage: S,
        mesh: &Mesh,
        params: S::Params,
        from: &X,
    ) -> Result<Pipeline<In, S::Out>> {
        let at = Location::caller();
        let named = net::named(self.stages(), stage.name());
        let feed = from.feed().checked(&self.net.identity);
        let wired = feed.and_then(|feed| Ok((Wired::new(stage, mesh, params, false)?, feed)));
        let (stage, feed) =
            wired.map_err(|why| refused(why, at, "Pipeline::then", Some(&named)))?;
        self.net.push(Box::new(stage), feed);
        Ok(Pipeline {
            net: self.net,
            replays: self.replays,
            kept: None,
            compared: None,
            types: PhantomData,
        })
    }

    /// Has one stage use another's parameter as one of its own: tied weights. Both are known by
    /// stage and path.
    ///
    /// `owner` goes on storing it. `user` has its own no more, neither in [`Pipeline::params`] nor
    /// among the gradients: each step puts the owner's values to the sharding that the user's
    /// kernels compute with, and adds the user's gradients to the owner's after all its own; of
    /// several users in the order of their stages.
    ///
    /// # Errors
    ///
    /// Where there is no such stage or parameter, their shapes differ, both are of one stage, or
    /// one of them is tied already so that the values would go a way of two steps.
    #[track_caller]
    pub fn tie(&mut self, owner: (usize, &str), user: (usize, &str)) -> Result<()> {
        let at = Location::caller();
        self.kept = None;
        self.net.tie(owner, user).map_err(|why| refused(why, at, "Pipeline::tie", None))
    }

    /// Whether a stage keeps no residuals from its forward pass, but its input, and computes the
    /// forward pass once more right before the input gradient. Off by default. The bits are the
    /// same; the memory is that of the input for each microbatch between its passes, and of the
    /// residuals for one.
    ///
    /// # Panics
    ///
    /// Where there is no such stage.
    #[track_caller]
    pub fn recompute(&mut self, stage: usize, yes: bool) {
        self.net.stage(stage);
        (self.net.recomputes[stage], self.kept) = (yes, None);
    }

    /// Whether weight gradients are computed in ascending order of microbatches also where the
    /// schedule has them in another: one that comes before its turn waits, with its weight
    /// residuals, until the one of the microbatch before it is done. Then gradients are the same to
    /// the bit as with schedules that have them in this order. Off by default. What it costs is in
    /// [`Pipeline::memory`].
    pub fn buffer_gradients(&mut self, yes: bool) {
        (self.net.ascending, self.kept) = (yes, None);
    }

    /// Whether training steps are recorded and replayed, so that a process spends no time on what
    /// others do: the first step with a schedule, and with parameters and microbatches of the same
    /// shapes and shardings, is [recorded](Program::record), those that follow are
    /// [replayed](crate::Recorded::replay). Off by default. The same on every process, or they
    /// diverge.
    pub fn replay(&mut self, yes: bool) {
        (self.replays, self.kept) = (yes, None);
    }

    /// Number of stages.
    pub fn stages(&self) -> usize {
        self.net.stages.len()
    }

    /// The mesh of a stage.
    ///
    /// # Panics
    ///
    /// Where there is no such stage.
    #[track_caller]
    pub fn mesh(&self, stage: usize) -> &Mesh {
        self.net.stage(stage).mesh()
    }

    /// Has a stage's kernels compute with parameters in other shardings than those that they have
    /// now, which they keep: see [`Storage`]. Gradients come in the stored shardings, too.
    ///
    /// # Errors
    ///
    /// Where there is no such stage, there are more or fewer shardings than it has parameters, or
    /// one is not on the devices of its mesh or does not divide its parameter.
    #[track_caller]
    pub fn store(&mut self, stage: usize, storage: Storage) -> Result<()> {
        let at = Location::caller();
        self.kept = None;
        self.net
            .change(stage, |stage| stage.store(storage))
            .map_err(|why| refused(why, at, "Pipeline::store", None))
    }

    /// The parameters that a stage stores, with their paths, in leaf order, as they are stored.
    ///
    /// # Panics
    ///
    /// Where there is no such stage.
    #[track_caller]
    pub fn params(&self, stage: usize) -> Vec<(String, MpmdArray)> {
        let stage = self.net.stage(stage);
        let paths = stage.paths();
        let own = stage.own().into_iter().map(|place| paths[place].clone());
        own.zip(stage.params()).collect()
    }

    /// Puts other parameters in place, in leaf order: those that an optimiser has made.
    ///
    /// # Errors
    ///
    /// Where there is no such stage, there are more or fewer than it stores, or one is not on its
    /// mesh.
    #[track_caller]
    pub fn set_params(&mut self, stage: usize, params: Vec<MpmdArray>) -> Result<()> {
        let at = Location::caller();
        let set = self.net.change(stage, |stage| stage.set_params(params));
        set.map_err(|why| refused(why, at, "Pipeline::set_params", None))
    }

    /// Runs one batch forward through all stages; nothing is kept for a backward pass.
    ///
    /// # Errors
    ///
    /// As the `jit` and `device_put` calls that it makes.
    #[track_caller]
    pub fn forward(&mut self, program: &mut Program, microbatch: Microbatch<In>) -> Result<Out> {
        issue((&mut self.net, program), Location::caller(), "Pipeline::forward", |net, program| {
            run::forward(net, program, microbatch.into_parts())
        })
    }

    /// Runs the forward passes of a schedule, in its order; nothing is kept for backward passes,
    /// and those that the schedule has are left out. Returns at once, with the last stage's outputs
    /// of each microbatch.
    ///
    /// # Errors
    ///
    /// Where the schedule is for another number of stages or microbatches, where side inputs do not
    /// fit, and as the `jit` and `device_put` calls that it makes.
    #[track_caller]
    pub fn forward_all(
        &mut self,
        program: &mut Program,
        schedule: &Schedule,
        microbatches: Vec<Microbatch<In>>,
    ) -> Result<Vec<Out>> {
        let parts = microbatches.into_iter().map(Microbatch::into_parts).collect();
        issue(
            (&mut self.net, program),
            Location::caller(),
            "Pipeline::forward_all",
            |net, program| run::forward_all(net, program, schedule, parts),
        )
    }
}

impl<In: Tree<Leaf = MpmdArray>> Pipeline<In, Loss<MpmdArray>> {
    /// The most memory that the devices of this process will have in use in a training step: see
    /// [`MemoryPlan`]. `beside` are arrays that the caller keeps all the time, such as an
    /// optimiser's state; not the microbatches' own, which count by themselves. Nothing is issued.
    ///
    /// The figures of other processes' devices are in it too, but as if only this process handed
    /// arrays over.
    ///
    /// # Errors
    ///
    /// Where the schedule is for another number of stages, shapes or side inputs do not fit, or a
    /// sharding does not divide what it is for.
    #[track_caller]
    pub fn memory(
        &self,
        program: &Program,
        schedule: &Schedule,
        microbatch: &MicrobatchShapes<In>,
        beside: &[MpmdArray],
    ) -> Result<MemoryPlan> {
        let at = Location::caller();
        let plan =
            self.plan(program, schedule, std::slice::from_ref(microbatch), beside, &mut |bytes| {
                bytes
            });
        plan.map_err(|why| refused(why, at, "Pipeline::memory", None))
    }

    /// As [`Pipeline::memory`], where microbatches have different shapes: of each array the largest
    /// that any of them has.
    ///
    /// # Errors
    ///
    /// As [`Pipeline::memory`].
    #[track_caller]
    pub fn memory_of(
        &self,
        program: &Program,
        schedule: &Schedule,
        microbatches: &[MicrobatchShapes<In>],
        beside: &[MpmdArray],
    ) -> Result<MemoryPlan> {
        let at = Location::caller();
        let plan = self.plan(program, schedule, microbatches, beside, &mut |bytes| bytes);
        plan.map_err(|why| refused(why, at, "Pipeline::memory_of", None))
    }

    fn plan(
        &self,
        program: &Program,
        schedule: &Schedule,
        microbatches: &[MicrobatchShapes<In>],
        beside: &[MpmdArray],
        counts: &mut dyn FnMut(u64) -> u64,
    ) -> Result<MemoryPlan> {
        let schedule = run::effective(&self.net, schedule)?;
        let stages =
            shapes::stage_bytes(&self.net, program, &schedule, microbatches, beside, counts)?;
        Ok(MemoryPlan::of_net(&schedule, &stages)?)
    }

    /// Has the devices of this process map now what a training step may need at most, whatever the
    /// pace of the neighbours: so that no step ever waits for the system. What is not used costs
    /// addresses, and no pages. Waits for the parameters and for `beside`, which are as in
    /// [`Pipeline::memory`]; issues nothing. Peaks that are counted from now on
    /// ([`Program::forget_memory_peak`]) are those of steps.
    ///
    /// # Errors
    ///
    /// As [`Pipeline::memory`], and where the parameters have failed. Where there is less memory
    /// than that, as much of it is mapped as there is.
    #[track_caller]
    pub fn map_memory(
        &self,
        program: &Program,
        schedule: &Schedule,
        microbatch: &MicrobatchShapes<In>,
        beside: &[MpmdArray],
    ) -> Result<()> {
        let at = Location::caller();
        let mut classes = BTreeSet::new();
        let microbatches = std::slice::from_ref(microbatch);
        let plan = self.plan(program, schedule, microbatches, beside, &mut |bytes| {
            classes.insert(bytes);
            bytes
        });
        plan.map_err(|why| refused(why, at, "Pipeline::map_memory", None))?;
        let params = self.net.stages.iter().flat_map(|stage| stage.params());
        for array in params.chain(beside.iter().cloned()) {
            array.block_until_ready()?;
        }
        let mut blocks: BTreeMap<DeviceId, Vec<u64>> = BTreeMap::new();
        for class in classes {
            let plan = self.plan(program, schedule, microbatches, beside, &mut |bytes| {
                if bytes == class { bytes } else { 0 }
            })?;
            for (device, memory) in plan.devices() {
                let more = memory.at_most.saturating_sub(memory.kept) / class;
                blocks.entry(device).or_default().extend((0..more).map(|_| class));
            }
        }
        program.map_blocks(&blocks);
        Ok(())
    }

    /// Runs the forward and backward passes of one step, in the order of `schedule`.
    ///
    /// Before the first step with a schedule the processes compare it: where one has read another,
    /// each gets an error with the first rank whose order differs.
    ///
    /// Returns at once, as all issuing does. The gradients are sums over the microbatches; divide
    /// them by the total weight.
    ///
    /// # Errors
    ///
    /// Where the schedule is for another number of stages or microbatches, where side inputs do not
    /// fit, and as the `jit` and `device_put` calls that it makes.
    #[track_caller]
    pub fn train_step(
        &mut self,
        program: &mut Program,
        schedule: &Schedule,
        microbatches: Vec<Microbatch<In>>,
    ) -> Result<StepOutput> {
        let parts: Vec<_> = microbatches.into_iter().map(Microbatch::into_parts).collect();
        let (kept, compared) = (&mut self.kept, &mut self.compared);
        // Within a step that is recorded as a whole there is nothing to record by itself.
        let replays = self.replays && program.recording.is_none();
        issue(
            (&mut self.net, program),
            Location::caller(),
            "Pipeline::train_step",
            |net, program| {
                run::check_sides(net, &parts)?;
                run::compare(compared, (net, parts.len()), program, schedule)?;
                if replays {
                    return replay::train_step(kept, net, program, schedule, parts);
                }
                run::train_step(net, program, schedule, parts)
            },
        )
    }
}

/// Has what `f` issues come from the user's line, and be labelled by the runner. An error says the
/// line, `call`, and the stage and microbatch that the runner was at.
fn issue<T>(
    (net, program): (&mut Net, &mut Program),
    at: &'static Location<'static>,
    call: &str,
    f: impl FnOnce(&mut Net, &mut Program) -> Result<T>,
) -> Result<T> {
    let before = (program.set_label(None), program.caller(at));
    let caller = program.set_caller(Some(before.1));
    let result = f(net, program);
    let place = program.set_label(before.0).map(|label| place(net, label));
    program.set_caller(caller);
    result.map_err(|why| refused(why, before.1, call, place.as_deref()))
}

/// Returns a label in words, with the stage's name.
fn place(net: &Net, label: Label) -> String {
    let stage = net.named(label.stage as usize);
    let microbatch =
        label.microbatch.map_or_else(String::new, |number| format!(", microbatch {number}"));
    format!("{stage}{microbatch}, {}", label.role.name())
}

/// Returns the error with the user's line, `call` and `place`. What is not the caller's fault stays
/// as it is.
fn refused(why: Error, at: &'static Location<'static>, call: &str, place: Option<&str>) -> Error {
    let call = place.map_or_else(|| call.to_owned(), |place| format!("{call}: {place}"));
    match why {
        Error::Issue(mut issue) => {
            (issue.at, issue.call) = (at, format!("{call}: {}", issue.call));
            Error::Issue(issue)
        }
        Error::Kernel(_)
        | Error::Tree(_)
        | Error::Schedule(_)
        | Error::Sharding(_)
        | Error::Aval(_) => IssueProblem::Pipeline(Box::new(why)).at(at, call),
        other => other,
    }
}
