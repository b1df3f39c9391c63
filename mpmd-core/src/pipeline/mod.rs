//! Pipelines: stages wired by type, schedules as data, and a runner that issues both as plain `jit`
//! and `device_put` operations.
//!
//! A [`Pipeline`] is a sequence of [`Stage`]s, each on a mesh; several stages may share a mesh. It
//! compiles only if the input type of a stage matches the outputs that it is wired to. A
//! [`Schedule`] gives the order of computation on each rank. The runner issues all operations in
//! one global order that keeps each rank's order. No second description of a run exists. The runner
//! drops each buffer after the last action that needs it.

mod bound_stage;
mod closures;
mod context;
mod erased;
mod erased_tree;
mod graph;
mod kernel_set;
mod kernels;
mod links;
mod microbatch;
mod param_sharding;
mod prepare;
mod replay;
mod run;
mod shapes;
mod stage;

use std::marker::PhantomData;
use std::panic::Location;
use std::sync::Arc;

use bound_stage::BoundStage;
pub use closures::{ClosureStage, LossInputs, LossStage, loss_stage, stage};
pub use context::StageContext;
use erased_tree::ErasedTree;
use graph::StageGraph;
pub use links::{StageOutput, StageOutputs};
pub use microbatch::Microbatch;
pub use mpmd_schedule::*;
pub use param_sharding::ParamSharding;
use replay::Captures;
pub use run::{Gradients, StepOutput};
pub use shapes::MicrobatchShapes;
pub use stage::{
    Loss, Passes, PlacedShape, SideInput, SideShapes, Stage, StageProbe, StageSignature,
};

use crate::api::object::MpmdObject;
use crate::api::program::Program;
use crate::error::{Error, IssueProblem, Result};
use crate::exec::array::MpmdArray;
use mpmd_layout::aval::DType;
use mpmd_layout::topology::{DeviceKind, Mesh};
use mpmd_layout::tree::Tree;
use mpmd_record::trace::Label;

/// A sequence of stages. The first stage takes `In`, the last one returns `Out`.
pub struct Pipeline<In, Out> {
    graph: StageGraph,
    replays: bool,
    captures: Captures,
    /// The schedule that the processes last compared with each other; `None` before the first
    /// comparison.
    compared: Option<Schedule>,
    types: PhantomData<fn(In) -> Out>,
}

impl<In: Tree<Leaf = MpmdArray>, Out: Tree<Leaf = MpmdArray>> Pipeline<In, Out> {
    /// Creates a pipeline of one stage on the devices of `mesh`, with the parameters `params`.
    ///
    /// # Errors
    ///
    /// If a parameter is not on all devices of the mesh.
    #[track_caller]
    pub fn first<S: Stage<In = In, Out = Out>>(
        stage: S,
        mesh: &Mesh,
        params: S::Params,
    ) -> Result<Self> {
        let at = Location::caller();
        let named = graph::named(0, stage.name());
        let stage = BoundStage::new(stage, mesh, params);
        let stage = stage.map_err(|why| refused(why, at, "Pipeline::first", Some(&named)))?;
        Ok(Self {
            graph: StageGraph::new(stage),
            replays: true,
            captures: Captures::default(),
            compared: None,
            types: PhantomData,
        })
    }

    /// Appends a stage that takes the outputs of the last stage.
    ///
    /// ```compile_fail
    /// # use mpmd_core::pipeline::{Pipeline, Stage};
    /// # use mpmd_core::prelude::*;
    /// fn wire<A, B>(
    ///     p: Pipeline<MpmdArray, (MpmdArray, MpmdArray)>, stage: B, mesh: &Mesh, w: B::Params,
    /// ) where
    ///     B: Stage<In = MpmdArray>, // takes one array, the pipeline gives two
    /// {
    ///     p.then(stage, mesh, w);
    /// }
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`Pipeline::first`].
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

    /// Returns a pipeline of the same stages and current parameters, with `last` instead of the
    /// last stage. For instance, `last` returns scores where the trained stage returns the loss.
    ///
    /// `last` takes the parameters, inputs and side inputs of the last stage, and runs on its mesh.
    /// All its parameters are frozen. The new pipeline runs forward passes only.
    ///
    /// Use the new pipeline before the next update of the parameters, or make another one after it.
    /// An update donates the arrays that both pipelines share.
    ///
    /// # Errors
    ///
    /// If a sharding that `last` computes with does not fit its parameter. If `last` takes other
    /// parameters or inputs, the error comes when the pipeline is probed or run.
    #[track_caller]
    pub fn with_last<S: Stage>(&self, last: S) -> Result<Pipeline<In, S::Out>> {
        let at = Location::caller();
        let graph = self.graph.with_last(Arc::new(last));
        let graph = graph.map_err(|why| refused(why, at, "Pipeline::with_last", None))?;
        Ok(Pipeline {
            graph,
            replays: self.replays,
            captures: Captures::default(),
            compared: None,
            types: PhantomData,
        })
    }

    /// Returns a handle to the outputs of the last stage that was added. Pass it to
    /// [`Pipeline::then_from`] to feed them to a later stage.
    pub fn output(&self) -> StageOutput<Out> {
        StageOutput::new(self.graph.stages.len() - 1, self.graph.identity.clone())
    }

    /// Appends a stage that takes outputs of any earlier stages, for skip connections.
    ///
    /// Each output is sent to its reader as soon as it is computed, and stays there until the stage
    /// reads it. If several stages read an output, their gradients are added up in the order of
    /// these stages. The sum is ready before the input gradient of the producing stage runs.
    ///
    /// An output that no stage reads has no gradient. So every output of every stage but the last
    /// must be read by a later stage. This is checked at the first microbatch.
    ///
    /// ```
    /// # use mpmd_core::pipeline::{Pipeline, Stage};
    /// # use mpmd_core::prelude::*;
    /// # type Images = MpmdArray;
    /// /// The last of three stages also reads the outputs of the first.
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
    /// As for [`Pipeline::first`], and if an output belongs to another pipeline.
    #[track_caller]
    pub fn then_from<S: Stage<In = X::In>, X: StageOutputs>(
        mut self,
        stage: S,
        mesh: &Mesh,
        params: S::Params,
        from: &X,
    ) -> Result<Pipeline<In, S::Out>> {
        let at = Location::caller();
        let named = graph::named(self.stages(), stage.name());
        let refuse = |why| refused(why, at, "Pipeline::then", Some(&named));
        let feed = from.feed().checked(&self.graph.identity);
        let feed = feed.map_err(refuse)?;
        let stage = BoundStage::new(stage, mesh, params).map_err(refuse)?;

        self.graph.push(stage, feed);
        Ok(Pipeline {
            graph: self.graph,
            replays: self.replays,
            captures: Captures::default(),
            compared: None,
            types: PhantomData,
        })
    }

    /// Ties weights: the stage `user` uses a parameter of the stage `owner` instead of its own.
    /// Both parameters are given as (stage, path).
    ///
    /// `owner` still stores the parameter. `user` no longer has its own, neither in
    /// [`Pipeline::params`] nor among the gradients. Each step transfers the owner's values to the
    /// sharding of the user's kernels. It adds the user's gradients to the owner's after all of the
    /// owner's own gradients. Several users are added in the order of their stages.
    ///
    /// # Errors
    ///
    /// - If the stage or the parameter does not exist, or both parameters belong to one stage.
    /// - If shapes or dtypes differ.
    /// - If a parameter is tied already, so that values would pass through two ties.
    #[track_caller]
    pub fn tie(&mut self, owner: (usize, &str), user: (usize, &str)) -> Result<()> {
        let at = Location::caller();
        self.captures.clear();
        self.graph
            .tie(owner, user)
            .map_err(|why| refused(why, at, "Pipeline::tie", None))
    }

    /// Sets an object as the state of a stage. Each pass of the stage accesses it by
    /// [`StageContext::state`].
    ///
    /// The object stays on its devices, and is not copied. A device runs the passes one at a time,
    /// in the order in which they are issued.
    ///
    /// If a pass fails, the state is lost, so later passes of the stage fail, too. Set a new state
    /// to continue.
    ///
    /// # Errors
    ///
    /// If the stage does not exist, or the object is not on all devices of the stage's mesh.
    #[track_caller]
    pub fn state<T>(&mut self, stage: usize, state: &MpmdObject<T>) -> Result<()> {
        let at = Location::caller();
        self.captures.clear();
        let set = self
            .graph
            .change(stage, |stage| stage.set_state(state.array()));
        set.map_err(|why| refused(why, at, "Pipeline::state", None))
    }

    /// Turns recomputation of a stage on or off; off by default.
    ///
    /// With recomputation the stage keeps its input instead of its declared residuals. It runs the
    /// forward pass again right before the input gradient. Results have the same bits. Memory then
    /// holds the input of each microbatch between its passes, and residuals of only one microbatch
    /// at a time. A stage without declared residuals keeps its input anyway, and recomputes
    /// nothing.
    ///
    /// # Panics
    ///
    /// If the stage does not exist.
    #[track_caller]
    pub fn recompute(&mut self, stage: usize, yes: bool) {
        self.graph.stage(stage);
        self.graph.recomputes[stage] = yes;
        self.captures.clear();
    }

    /// Makes all stages compute in `dtype`, although their parameters are f32. `DType::Bf16` is
    /// useful on devices with tensor cores. Parameters and gradients stay f32; each stage converts
    /// its parameters once after each update. The model of a stage chooses the dtype of the
    /// outputs, so transfers between stages may become half as large.
    ///
    /// # Errors
    ///
    /// If a stage cannot compute in this dtype: see [`Stage::compute_in`].
    #[track_caller]
    pub fn compute_in(&mut self, dtype: DType) -> Result<()> {
        let at = Location::caller();
        self.captures.clear();
        for stage in 0..self.graph.stages.len() {
            let set = self.graph.change(stage, |stage| stage.compute_in(dtype));
            set.map_err(|why| refused(why, at, "Pipeline::compute_in", None))?;
        }
        Ok(())
    }

    /// Returns the kind of the processors that compute stage `stage`: [`DeviceKind::Cpu`] if the
    /// stage [computes on the host](Stage::computes_on_host), else the kind of its mesh's devices.
    ///
    /// # Panics
    ///
    /// If the stage does not exist.
    #[track_caller]
    pub fn computed_by(&self, program: &Program, stage: usize) -> DeviceKind {
        let stage = self.graph.stage(stage);
        let first = stage.mesh().devices().first();
        let kind = first.and_then(|device| program.topology().kind_of(*device));
        kind.filter(|_| !stage.computes_on_host())
            .unwrap_or(DeviceKind::Cpu)
    }

    /// Returns one line of text that names the devices, or the host, on which the stages compute.
    pub fn describe_devices(&self, program: &Program) -> String {
        let stages = self.graph.stages.len();
        let is_on_cuda = |stage: &usize| {
            let devices = self.graph.stage(*stage).mesh().devices();
            devices
                .iter()
                .any(|id| program.topology().kind_of(*id) == Some(DeviceKind::Cuda))
        };
        let on_cuda: Vec<usize> = (0..stages).filter(is_on_cuda).collect();

        let computed = on_cuda
            .iter()
            .filter(|stage| self.computed_by(program, **stage) == DeviceKind::Cuda);
        match (computed.count(), on_cuda.len()) {
            (_, 0) => "CPUs compute all passes".to_owned(),
            (computed, _) if computed == stages => "CUDA devices compute all passes".to_owned(),
            (computed, _) => format!(
                "CUDA devices compute the passes of {computed} of {stages} stages; the others \
                 compute on the host, and those with CUDA devices copy their values there and back"
            ),
        }
    }

    /// With `yes`, adds weight gradients in ascending order of microbatches even if the schedule
    /// has another order; off by default.
    ///
    /// A weight gradient that comes too early waits, with its weight residuals, for the microbatch
    /// before it. Gradients then have the same bits as under a schedule with ascending order.
    pub fn buffer_gradients(&mut self, yes: bool) {
        self.graph.ascending = yes;
        self.captures.clear();
    }

    /// Turns the replay of training steps and forward passes on or off; on by default. A replaying
    /// process spends no time on operations of other processes. Discards earlier captures.
    ///
    /// The first run with a schedule and with given shapes and shardings is
    /// [captured](Program::capture); the parameters and microbatches count. Later runs of the same
    /// form are [replayed](crate::Captured::replay). A pipeline keeps up to 16 captures of training
    /// steps and 16 of forward passes. A further capture replaces the least recently used one,
    /// first among captures that were never replayed. Runs in which a stage
    /// [prepares](Stage::prepare) its parameters need captures of their own. A run in which a stage
    /// prepares for the first time is not captured.
    ///
    /// Turn it off if nearly every step has another form: each capture then costs time and memory
    /// without use. All processes must pass the same value, or they diverge.
    pub fn replay(&mut self, yes: bool) {
        self.replays = yes;
        self.captures.clear();
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.graph.stages.len()
    }

    /// Returns the mesh of stage `stage`. Stages count from 0.
    ///
    /// # Panics
    ///
    /// If the stage does not exist.
    #[track_caller]
    pub fn mesh(&self, stage: usize) -> &Mesh {
        self.graph.stage(stage).mesh()
    }

    /// Sets the shardings in which a stage computes with its parameters; the stored shardings stay
    /// as they are. See [`ParamSharding`]. Gradients are returned in the stored shardings.
    ///
    /// # Errors
    ///
    /// - If the stage does not exist.
    /// - If the number of shardings differs from the number of parameters.
    /// - If a sharding is not on the devices of the stage's mesh, or does not divide its parameter.
    #[track_caller]
    pub fn store(&mut self, stage: usize, storage: ParamSharding) -> Result<()> {
        let at = Location::caller();
        self.captures.clear();
        self.graph
            .change(stage, |stage| stage.store(storage))
            .map_err(|why| refused(why, at, "Pipeline::store", None))
    }

    /// Returns (path, array) of each parameter that a stage stores, in leaf order and in the stored
    /// shardings.
    ///
    /// # Panics
    ///
    /// If the stage does not exist.
    #[track_caller]
    pub fn params(&self, stage: usize) -> Vec<(String, MpmdArray)> {
        let stage = self.graph.stage(stage);
        let paths = stage.paths();
        let own = stage.own().into_iter().map(|place| paths[place].clone());
        own.zip(stage.params()).collect()
    }

    /// Returns, for each parameter in the order of [`Pipeline::params`], true if it is trained, and
    /// false if it is [frozen](Stage::is_frozen).
    ///
    /// # Panics
    ///
    /// If the stage does not exist.
    #[track_caller]
    pub fn trainable(&self, stage: usize) -> Vec<bool> {
        let stage = self.graph.stage(stage);
        stage
            .own()
            .into_iter()
            .map(|place| !stage.frozen()[place])
            .collect()
    }

    /// Calls [`Stage::probe`] and then [`Stage::infer`] of each stage in order, with the shapes
    /// that a microbatch of these `shapes` has at that stage.
    ///
    /// All processes must call it. It is needed before the first step with microbatches of these
    /// shapes if a stage finds its shapes by a trial run.
    ///
    /// # Errors
    ///
    /// If shapes or side inputs do not fit, or a stage refuses them.
    #[track_caller]
    pub fn probe(&mut self, program: &mut Program, shapes: &MicrobatchShapes<In>) -> Result<()> {
        issue(
            &mut self.graph,
            program,
            Location::caller(),
            "Pipeline::probe",
            |graph, program| {
                let graph = &*graph;
                let probe = |index: usize, x: &ErasedTree<_>, side: &ErasedTree<_>| {
                    graph.stages[index].probe(program, index, x, side)
                };
                shapes::infer_all(graph, shapes, probe)
            },
        )
    }

    /// Replaces the parameters that a stage stores, for instance by those that an optimiser has
    /// computed. `params` are in leaf order.
    ///
    /// # Errors
    ///
    /// If the stage does not exist, if the number of arrays is wrong, or if an array is not on the
    /// stage's mesh.
    #[track_caller]
    pub fn set_params(&mut self, stage: usize, params: Vec<MpmdArray>) -> Result<()> {
        let at = Location::caller();
        let set = self.graph.set_params(stage, params);
        set.map_err(|why| refused(why, at, "Pipeline::set_params", None))
    }

    /// Runs one microbatch forward through all stages, and keeps no residuals for a backward pass.
    /// Issues the operations and returns the outputs of the last stage without waiting for them.
    ///
    /// # Errors
    ///
    /// If side inputs do not fit. Also the errors of the `jit` and `device_put` calls that it
    /// makes.
    #[track_caller]
    pub fn forward(&mut self, program: &mut Program, microbatch: Microbatch<In>) -> Result<Out> {
        let captures = self.replays.then(|| self.captures.forwards());
        issue(
            &mut self.graph,
            program,
            Location::caller(),
            "Pipeline::forward",
            |graph, program| {
                let parts = vec![microbatch.into_parts()];
                microbatch::check_sides(graph, &parts)?;
                let outputs = replay::run(captures, graph, program, None, parts, run::forward)?;

                let none = || Error::kernel("a forward pass without outputs");
                outputs
                    .into_iter()
                    .next()
                    .ok_or_else(none)?
                    .into_tree("output")
            },
        )
    }

    /// Runs the forward passes of a schedule in its order, and returns the outputs of the last
    /// stage for each microbatch.
    ///
    /// Backward passes in the schedule are left out, and nothing is kept for them. Only issues the
    /// operations, and returns without waiting for them.
    ///
    /// # Errors
    ///
    /// If the number of stages or microbatches differs from the schedule's, or if side inputs do
    /// not fit. Also the errors of the `jit` and `device_put` calls that it makes.
    #[track_caller]
    pub fn forward_all(
        &mut self,
        program: &mut Program,
        schedule: &Schedule,
        microbatches: Vec<Microbatch<In>>,
    ) -> Result<Vec<Out>> {
        let parts: Vec<_> = microbatches
            .into_iter()
            .map(Microbatch::into_parts)
            .collect();
        let captures = self.replays.then(|| self.captures.forwards());
        issue(
            &mut self.graph,
            program,
            Location::caller(),
            "Pipeline::forward_all",
            |graph, program| {
                run::check(graph, schedule, parts.len())?;
                microbatch::check_sides(graph, &parts)?;

                let all = |graph: &mut StageGraph, program: &mut Program, parts| {
                    run::forward_all(graph, program, schedule, parts)
                };
                let outputs = replay::run(captures, graph, program, Some(schedule), parts, all)?;
                outputs
                    .into_iter()
                    .map(|output| output.into_tree("output"))
                    .collect()
            },
        )
    }
}

impl<In: Tree<Leaf = MpmdArray>> Pipeline<In, Loss<MpmdArray>> {
    /// Runs the forward and backward passes of one training step in the order of `schedule`, with
    /// one entry of `microbatches` for each of its microbatches.
    ///
    /// Before the first step with a schedule, the processes compare it. If one process has another
    /// schedule, each process returns an error with the first rank that differs.
    ///
    /// Only issues the operations, and returns without waiting for them. The gradients are sums
    /// over the microbatches; divide them by the total weight.
    ///
    /// # Errors
    ///
    /// If the number of stages or microbatches differs from the schedule's, or if side inputs do
    /// not fit. If a stage draws random numbers and a microbatch has no key. Also the errors of the
    /// `jit` and `device_put` calls that it makes.
    #[track_caller]
    pub fn train_step(
        &mut self,
        program: &mut Program,
        schedule: &Schedule,
        microbatches: Vec<Microbatch<In>>,
    ) -> Result<StepOutput> {
        let mut parts: Vec<_> = microbatches
            .into_iter()
            .map(Microbatch::into_parts)
            .collect();
        let compared = &mut self.compared;
        let captures = self.replays.then(|| self.captures.steps());
        issue(
            &mut self.graph,
            program,
            Location::caller(),
            "Pipeline::train_step",
            |graph, program| {
                microbatch::check_sides(graph, &parts)?;
                microbatch::fold_keys(graph, &mut parts)?;
                run::compare(compared, graph, program, schedule, parts.len())?;

                // A trace may begin while the steps are replayed.
                if program.runtime.trace.is_on()
                    && let Ok(schedule) = run::effective(graph, schedule)
                {
                    program.runtime.trace.schedule(&schedule);
                }

                let step = |graph: &mut StageGraph, program: &mut Program, parts| {
                    run::train_step(graph, program, schedule, parts)
                };
                replay::run(captures, graph, program, Some(schedule), parts, step)
            },
        )
    }
}

/// Calls `f`, and records `at` as the source location of all operations that it issues. An error
/// gets the location, `call`, and the current stage and microbatch.
fn issue<T>(
    graph: &mut StageGraph,
    program: &mut Program,
    at: &'static Location<'static>,
    call: &str,
    f: impl FnOnce(&mut StageGraph, &mut Program) -> Result<T>,
) -> Result<T> {
    // A call within another one keeps the source location of the outer call.
    let label_before = program.set_label(None);
    let at = program.caller(at);
    let caller_before = program.set_caller(Some(at));

    let result = f(graph, program);

    let place = program
        .set_label(label_before)
        .map(|label| place(graph, label));
    program.set_caller(caller_before);
    result.map_err(|why| refused(why, at, call, place.as_deref()))
}

/// Describes a label as text, with the name of the stage.
fn place(graph: &StageGraph, label: Label) -> String {
    let stage = graph.named(label.stage as usize);
    let microbatch = label
        .microbatch
        .map_or_else(String::new, |number| format!(", microbatch {number}"));
    format!("{stage}{microbatch}, {}", label.role.name())
}

/// Adds the source location `at`, `call` and `place` to an error that the caller has caused. Other
/// errors stay unchanged.
fn refused(why: Error, at: &'static Location<'static>, call: &str, place: Option<&str>) -> Error {
    let call = place.map_or_else(|| call.to_owned(), |place| format!("{call}: {place}"));
    match why {
        Error::Issue(mut issue) => {
            issue.at = at;
            issue.call = format!("{call}: {}", issue.call);
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
