//! The trainer: a pipeline with its optimiser, learning rate and random seed.

mod contents;
mod metrics;
mod not_finite;
mod progress;
mod recovery;
mod report;
mod run;
mod saves;

use std::collections::VecDeque;
use std::path::PathBuf;

use mpmd_base::counted;
use mpmd_core::aval::DType;
use mpmd_core::pipeline::{Loss, Microbatch, MicrobatchShapes, Pipeline, Schedule, Stage};
use mpmd_core::tree::Tree;
use mpmd_core::{Commits, MpmdArray, Program, Recovery, Result};
use mpmd_layout::topology::Mesh;

pub use report::{EvaluationHandle, EvaluationReport, StepHandle, StepReport};
pub use run::{ReportAnswer, Run, RunOutcome};

use crate::best::BestEvaluation;
use crate::data::{Data, MicrobatchPlace};
use crate::optimizer::{Optimizer, OptimizerSettings};
use crate::rate::Rate;
use crate::stop::StopFlag;
use recovery::Recent;
use report::{MetricNames, ProcessReport, Reporter};

/// A pipeline under training: parameters, optimiser, schedule and learning rate.
///
/// [`Trainer::run`] is the complete training loop. For a custom loop, call [`Trainer::step`] and
/// [`Trainer::evaluate`].
pub struct Trainer<In> {
    pipeline: Pipeline<In, Loss<MpmdArray>>,
    schedule: Schedule,
    optimizer: Optimizer,
    reporter: Reporter,
    rate: Rate,
    seed: u64,
    status: ProcessReport,
    watches: bool,
    /// The shapes of microbatches for which the stages have been probed.
    probed: Vec<MicrobatchShapes<In>>,
    /// The folder and the step of the checkpoint that was last saved or restored.
    saved: Option<(PathBuf, u64)>,
    /// The figures of the last steps, if the training may resume; else empty.
    recent: VecDeque<Recent>,
    /// The job's commits, if the training may resume from them.
    commits: Option<Commits>,
    /// True from the restoring of a commit until the training loop continues from it.
    is_resumed: bool,
    /// The metric names of the loss of the last step or evaluation.
    metrics: MetricNames,
    /// The last recovery, if the loop has not written it to the metrics yet.
    recovery: Option<Recovery>,
    best: Option<BestEvaluation>,
    after_step: Option<AfterStep<In>>,
    after_best: Option<AfterBest<In>>,
}

/// A function of the caller that is called with the number of updates and the pipeline.
type AfterStep<In> =
    Box<dyn FnMut(&mut Program, u64, &Pipeline<In, Loss<MpmdArray>>) -> Result<()> + Send>;

/// A function of the caller that is called with the best evaluation and the pipeline.
type AfterBest<In> = Box<
    dyn FnMut(&mut Program, BestEvaluation, &Pipeline<In, Loss<MpmdArray>>) -> Result<()> + Send,
>;

impl<In: Tree<Leaf = MpmdArray>> Trainer<In> {
    /// Creates a trainer that runs `pipeline` by `schedule`. `settings` configures the optimiser:
    /// for instance `AdamW::default()`, or an [`OptimizerSettings`].
    ///
    /// The learning rate is 0.001 until [`Trainer::rate`] sets it, and the seed is 0.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Optimizer::new`]. If a process of the job has no device.
    pub fn new(
        p: &mut Program,
        pipeline: Pipeline<In, Loss<MpmdArray>>,
        schedule: Schedule,
        settings: impl Into<OptimizerSettings>,
    ) -> Result<Self> {
        let optimizer = Optimizer::new(p, &pipeline, settings)?;
        let reporter = Reporter::new(p, pipeline.mesh(pipeline.stages() - 1))?;
        Ok(Self {
            pipeline,
            schedule,
            optimizer,
            reporter,
            rate: Rate::Constant(1e-3),
            seed: 0,
            status: ProcessReport::default(),
            watches: false,
            probed: Vec::new(),
            saved: None,
            recent: VecDeque::new(),
            commits: None,
            is_resumed: false,
            metrics: MetricNames::default(),
            recovery: None,
            best: None,
            after_step: None,
            after_best: None,
        })
    }

    /// Sets the learning rate.
    #[must_use]
    pub fn rate(mut self, rate: Rate) -> Self {
        self.rate = rate;
        self
    }

    /// Sets the limit of the norm of the mean gradient over all parameters. Gradients with a larger
    /// norm are scaled down to the limit.
    #[must_use]
    pub fn clip(mut self, limit: f64) -> Self {
        self.optimizer.set_clip(Some(limit));
        self
    }

    /// Computes the stages in `dtype`, such as `DType::Bf16`. Parameters, their gradients, the
    /// optimiser's state, losses and norms stay f32. See [`Pipeline::compute_in`].
    ///
    /// # Errors
    ///
    /// If a stage cannot compute in this dtype.
    pub fn compute(mut self, dtype: DType) -> Result<Self> {
        self.pipeline.compute_in(dtype)?;
        Ok(self)
    }

    /// Sets the seed from which the random keys of all microbatches are derived.
    #[must_use]
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// Enables or disables the replay of steps and evaluations. Enabled by default. See
    /// [`Pipeline::replay`].
    #[must_use]
    pub fn replay(mut self, yes: bool) -> Self {
        self.pipeline.replay(yes);
        self
    }

    /// Makes [`Trainer::run`] call `f` on every process after each step is issued, with the number
    /// of updates and the pipeline. `f` may for instance [publish](mpmd_core::weights::Publisher)
    /// the parameters. An error of `f` ends the training.
    #[must_use]
    pub fn after_step<F>(mut self, f: F) -> Self
    where
        F: FnMut(&mut Program, u64, &Pipeline<In, Loss<MpmdArray>>) -> Result<()> + Send + 'static,
    {
        self.after_step = Some(Box::new(f));
        self
    }

    /// Makes [`Trainer::run`] call `f` on every process after each evaluation that is the best so
    /// far, with this evaluation and the pipeline. `f` may for instance save the parameters.
    /// After [`Trainer::resume`] the call for the last evaluation may be repeated. An error of `f`
    /// ends the training.
    #[must_use]
    pub fn after_best<F>(mut self, f: F) -> Self
    where
        F: FnMut(&mut Program, BestEvaluation, &Pipeline<In, Loss<MpmdArray>>) -> Result<()>
            + Send
            + 'static,
    {
        self.after_best = Some(Box::new(f));
        self
    }

    /// Sets the flag that asks this process to stop. It replaces the flag of [`StopFlag::install`],
    /// which Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 set.
    #[must_use]
    pub fn stop_on(mut self, stop: &StopFlag) -> Self {
        self.status.stop = stop.clone();
        self.watches = true;
        self
    }

    /// Returns a line of text with the number of parameters, of stages, and of the devices and
    /// processes of the job.
    pub fn model_size(&self, p: &Program) -> String {
        let mut parameters = 0;
        let mut trained = 0;
        for stage in 0..self.pipeline.stages() {
            let params = self.pipeline.params(stage);
            for ((_, array), is_trained) in params.into_iter().zip(self.pipeline.trainable(stage)) {
                let elements = array.aval().elements();
                parameters += elements;
                trained += if is_trained { elements } else { 0 };
            }
        }
        let trained = match trained == parameters {
            true => String::new(),
            false => format!(", of which {trained} are trained,"),
        };
        format!(
            "{}{trained} in {}, on {} of {}",
            counted(parameters, "parameter"),
            counted(self.pipeline.stages(), "stage"),
            counted(p.topology().devices().len(), "device"),
            counted(p.processes(), "process")
        )
    }

    /// Returns a line of text that names the devices, or the host, on which the stages compute.
    pub fn computed_by(&self, p: &Program) -> String {
        self.pipeline.describe_devices(p)
    }

    /// Returns the number of updates so far.
    pub fn steps(&self) -> u64 {
        self.optimizer.updates()
    }

    /// Returns the evaluation with the lowest loss in the runs of this trainer, and in those before
    /// the checkpoint or commit that it has restored. `None` if no evaluation has ended yet. It is
    /// the same on every process.
    pub fn best(&self) -> Option<BestEvaluation> {
        self.best
    }

    /// Returns the pipeline, for instance to read its parameters.
    pub fn pipeline(&self) -> &Pipeline<In, Loss<MpmdArray>> {
        &self.pipeline
    }

    /// Returns the pipeline, for instance to replace its parameters.
    pub fn pipeline_mut(&mut self) -> &mut Pipeline<In, Loss<MpmdArray>> {
        &mut self.pipeline
    }

    /// Returns the optimiser, for instance to read its state.
    pub fn optimizer(&self) -> &Optimizer {
        &self.optimizer
    }

    /// Returns the optimiser, for instance to replace its state.
    pub fn optimizer_mut(&mut self) -> &mut Optimizer {
        &mut self.optimizer
    }

    /// Returns the schedule.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the meshes of the stages, in order.
    pub fn meshes(&self) -> Vec<Mesh> {
        (0..self.pipeline.stages())
            .map(|stage| self.pipeline.mesh(stage).clone())
            .collect()
    }

    /// Issues one training step: the passes of all microbatches, the update, and the transfer of
    /// the step's figures to every process. Ends the program's step. Returns without waiting.
    /// Microbatches of new shapes are [probed](Pipeline::probe) first, which blocks.
    ///
    /// Gradients and losses are divided by the total weight of the microbatches, whose weights may
    /// differ.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Pipeline::train_step`], [`Optimizer::step`] and
    /// [`Program::step_end`].
    #[track_caller]
    pub fn step(
        &mut self,
        p: &mut Program,
        microbatches: Vec<Microbatch<In>>,
    ) -> Result<StepHandle> {
        let rate = self.rate.at(self.steps() + 1);
        self.step_at(p, microbatches, rate)
    }

    /// Does the same as [`Trainer::step`] with the learning rate `rate`.
    #[track_caller]
    fn step_at(
        &mut self,
        p: &mut Program,
        microbatches: Vec<Microbatch<In>>,
        rate: f64,
    ) -> Result<StepHandle> {
        let step = self.steps() + 1;
        self.probe(p, &microbatches)?;
        let output = self.pipeline.train_step(p, &self.schedule, microbatches)?;
        let names = self.metric_names(&output.loss);
        let figures = self.optimizer.step(p, &mut self.pipeline, output, rate)?;
        let figures = self.reporter.report(p, &figures, &self.status)?;
        p.step_end()?;
        let step = StepHandle {
            step,
            rate,
            names,
            figures,
        };
        self.keep_recent(&step);
        Ok(step)
    }

    /// Issues the forward passes of some microbatches, and the transfer of their summed loss to
    /// every process. Returns without waiting, unless microbatches have new shapes: see
    /// [`Trainer::step`].
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Pipeline::forward`].
    #[track_caller]
    pub fn evaluate(
        &mut self,
        p: &mut Program,
        microbatches: Vec<Microbatch<In>>,
    ) -> Result<EvaluationHandle> {
        self.probe(p, &microbatches)?;
        let mut losses = Vec::with_capacity(microbatches.len());
        for microbatch in microbatches {
            losses.push(self.pipeline.forward(p, microbatch)?);
        }
        let names = losses
            .first()
            .map(|loss| self.metric_names(loss))
            .unwrap_or_default();
        let sums = self.reporter.sum(p, losses)?;
        let figures = self.reporter.report(p, &sums, &self.status)?;
        Ok(EvaluationHandle {
            step: self.steps(),
            names,
            figures,
        })
    }

    /// Issues forward passes of all held-out microbatches of `data`, with the stage `last` instead
    /// of the last stage. Returns the outputs of `last`, on the last stage's mesh. `last` takes the
    /// last stage's parameters: it may be the same model that returns scores instead of the loss.
    /// Returns without waiting, except for [probes](Pipeline::probe).
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Pipeline::with_last`], [`Pipeline::probe`] and
    /// [`Pipeline::forward`].
    #[track_caller]
    pub fn predict<S: Stage, D: Data<In> + ?Sized>(
        &self,
        p: &mut Program,
        last: S,
        data: &D,
    ) -> Result<Vec<S::Out>> {
        data.compare(p)?;
        let meshes = self.meshes();
        let mut probed = Vec::new();
        let mut pipeline = self.pipeline.with_last(last)?;
        let mut predictions = Vec::with_capacity(data.held_out_len());
        for index in 0..data.held_out_len() {
            let microbatch = data.held_out(p, &meshes, index)?;
            let shapes = microbatch.shapes();
            if !probed.contains(&shapes) {
                pipeline.probe(p, &shapes)?;
                probed.push(shapes);
            }
            predictions.push(pipeline.forward(p, microbatch)?);
        }
        Ok(predictions)
    }

    /// Returns the metric names of a loss. Shares the previous list if it has the same names.
    fn metric_names(&mut self, loss: &Loss<MpmdArray>) -> MetricNames {
        if !loss.metrics.keys().eq(self.metrics.iter()) {
            self.metrics = loss.metrics.keys().cloned().collect();
        }
        self.metrics.clone()
    }

    /// Probes the stages for microbatches of shapes that were not probed before.
    #[track_caller]
    fn probe(&mut self, p: &mut Program, microbatches: &[Microbatch<In>]) -> Result<()> {
        for microbatch in microbatches {
            let shapes = microbatch.shapes();
            if !self.probed.contains(&shapes) {
                self.pipeline.probe(p, &shapes)?;
                self.probed.push(shapes);
            }
        }
        Ok(())
    }

    /// Issues the creation of the next step's microbatches.
    fn training(
        &self,
        p: &mut Program,
        data: &(impl Data<In> + ?Sized),
    ) -> Result<Vec<Microbatch<In>>> {
        let meshes = self.meshes();
        let count = self.schedule.microbatches();
        let one = |microbatch| {
            let at = MicrobatchPlace::new(self.seed, self.steps() + 1, microbatch, count);
            Ok(data.training(p, &meshes, at)?.key(at.key))
        };
        (0..count).map(one).collect()
    }
}
