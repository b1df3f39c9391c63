//! The loop of a training: steps, evaluations, metrics, and an end at any time.

use std::collections::VecDeque;
use std::fmt;
use std::path::PathBuf;
use std::time::Instant;

use mpmd_core::pipeline::Microbatch;
use mpmd_core::tree::Tree;
use mpmd_core::{Error, MpmdArray, ProcessId, Program, Result};

use super::Trainer;
use super::metrics::Metrics;
use super::not_finite::{NotFinite, UNKNOWN};
use super::progress::{Progress, say};
use super::report::{EvaluationHandle, StepHandle, StepReport};
use super::saves::Saves;
#[cfg(feature = "tensorboard")]
use super::tensorboard::Events;
use crate::checkpoint::Checkpoints;
use crate::data::Data;
use crate::stop::{StopFlag, stop_name};

/// Number of steps, or groups of an evaluation, that are issued before the report of an earlier one
/// is read. So reading it does not drain the pipeline.
const PENDING: usize = 2;

/// Number of steps in a dry run: enough to see that all steps are equal.
const DRY_RUN_STEPS: u64 = 8;

/// Options of [`Trainer::run`].
#[must_use = "options do nothing until `Trainer::run` takes them"]
pub struct Run<'a> {
    steps: u64,
    seconds: Option<f64>,
    evaluate_every: Option<u64>,
    metrics: Option<PathBuf>,
    progress: bool,
    on_step: Box<dyn FnMut(&StepReport) + 'a>,
    checkpoints: Option<Checkpoints>,
    save_every: Option<u64>,
    #[cfg(feature = "tensorboard")]
    tensorboard: Option<PathBuf>,
}

impl<'a> Run<'a> {
    /// Creates options for a training until the model has had `steps` updates, those of earlier
    /// runs included. Shows the progress, and evaluates only at the end.
    pub fn steps(steps: u64) -> Self {
        Self {
            steps,
            seconds: None,
            evaluate_every: None,
            metrics: None,
            progress: true,
            on_step: Box::new(|_| {}),
            checkpoints: None,
            save_every: None,
            #[cfg(feature = "tensorboard")]
            tensorboard: None,
        }
    }

    /// Ends the training after this many seconds too, by the clock of process 0. The learning rate
    /// is then that of the same share of its total steps. So losses differ from run to run.
    ///
    /// Up to three steps end later, since the time of a step is known when further ones are issued.
    pub fn seconds(mut self, seconds: f64) -> Self {
        self.seconds = Some(seconds);
        self
    }

    /// Evaluates the held-out data each time this number of further updates is done. At the end
    /// they are evaluated in any case.
    pub fn evaluate_every(mut self, steps: u64) -> Self {
        self.evaluate_every = Some(steps.max(1));
        self
    }

    /// Makes process 0 write a line of JSON for each step and evaluation to this file. Overwrites
    /// the file if the model is new, and appends to it otherwise. After [`Trainer::resume`] removes
    /// the lines of steps that are repeated.
    ///
    /// A step has the fields `step`, `loss`, `norm`, `rate`, `seconds` since the start of the run,
    /// and `tokens`, the step's weight. An evaluation has `step`, `evaluation` and `seconds`. A
    /// later epoch of the job begins with a line with `recovery`, the number of the epoch, the
    /// `step` from which it goes on, and the fields of a [`Recovery`](mpmd_core::Recovery).
    pub fn metrics(mut self, file: impl Into<PathBuf>) -> Self {
        self.metrics = Some(file.into());
        self
    }

    /// Makes process 0 write scalars for TensorBoard to a new file in this folder. Needs the
    /// feature `tensorboard`.
    ///
    /// The scalars of a step are `loss/training`, `norm`, `rate`, and from the run's second step on
    /// `tokens_per_second`. That of an evaluation is `loss/evaluation`.
    #[cfg(feature = "tensorboard")]
    pub fn tensorboard(mut self, folder: impl Into<PathBuf>) -> Self {
        self.tensorboard = Some(folder.into());
        self
    }

    /// Turns the progress on process 0's stderr on or off. On by default.
    pub fn progress(mut self, yes: bool) -> Self {
        self.progress = yes;
        self
    }

    /// Calls `f` with the report of each step, in order, on every process. Not called in a dry run.
    /// After [`Trainer::resume`] the reports of the last steps before it come again.
    pub fn on_step(mut self, f: impl FnMut(&StepReport) + 'a) -> Self {
        self.on_step = Box::new(f);
        self
    }

    /// Saves a checkpoint after the last step, also after a stop. [`Trainer::restore`] continues
    /// from it. It is complete after the last evaluation, and only if that has a finite loss.
    pub fn checkpoints(mut self, to: Checkpoints) -> Self {
        self.checkpoints = Some(to);
        self
    }

    /// Saves a checkpoint also each time the number of updates is a multiple of `steps`, while the
    /// training goes on. It needs [`Run::checkpoints`].
    ///
    /// Each save takes host memory for a copy of the process's regions. Before it begins, the
    /// training waits for the reports of all steps so far, and for a save that is still under way.
    /// So a model that training has spoiled replaces no good checkpoint.
    pub fn save_every(mut self, steps: u64) -> Self {
        self.save_every = Some(steps.max(1));
        self
    }
}

impl fmt::Debug for Run<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run")
            .field("steps", &self.steps)
            .field("seconds", &self.seconds)
            .field("evaluate_every", &self.evaluate_every)
            .field("metrics", &self.metrics)
            .field("checkpoints", &self.checkpoints)
            .field("save_every", &self.save_every)
            .finish_non_exhaustive()
    }
}

/// The result of [`Trainer::run`]. It is the same on every process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// Number of updates of the model, those of earlier runs included.
    pub steps: u64,
    /// The report of the last step; `None` if there was no step.
    pub last: Option<StepReport>,
    /// The signal that ended the run, if any.
    pub stopped: Option<i32>,
    /// Mean loss of the last complete evaluation of held-out data, if any. `None` also if they are
    /// padding alone.
    pub evaluation: Option<f64>,
}

impl<In: Tree<Leaf = MpmdArray>> Trainer<In> {
    /// Trains, evaluates and saves as `run` says. Blocks until the last report is read.
    ///
    /// Two further steps are issued before the report of a step is read. If any process gets
    /// Ctrl-C, SIGTERM, SIGHUP or SIGUSR1, all processes stop after the same step, also during an
    /// evaluation. A second Ctrl-C or SIGTERM ends its process at once.
    ///
    /// # Errors
    ///
    /// Those of [`Trainer::step`] and [`Trainer::evaluate`]. If a loss or a norm is not finite: the
    /// error names the step and the stage, and the parameters that gave it are not saved. If the
    /// metrics or a checkpoint cannot be written. Before the first step, if a process cannot
    /// write to the folder of checkpoints, if another job saves there, or if it has a checkpoint of
    /// a later step than this trainer.
    #[track_caller]
    pub fn run<D: Data<In> + ?Sized>(
        &mut self,
        p: &mut Program,
        run: Run<'_>,
        data: &D,
    ) -> Result<Outcome> {
        let Run { mut steps, seconds, evaluate_every, metrics, progress, on_step, .. } = run;
        data.compare(p)?;
        let is_saved = run.checkpoints.is_some();
        let saves = Saves::new(p, run.checkpoints, run.save_every, self.steps())?;
        if p.is_dry_run() {
            steps = steps.min(self.steps() + DRY_RUN_STEPS);
        } else if !self.watches {
            let refused = |error| Error::Environment(format!("cannot watch for Ctrl-C: {error}"));
            self.status.stop = StopFlag::install().map_err(refused)?;
            self.watches = true;
        }
        let start = Instant::now();
        // All processes take the time from the reports, which have the clock of process 0.
        let now = self.status.start.elapsed().as_secs_f64();
        let began = match seconds {
            Some(_) => p.broadcast_value(ProcessId(0), 0.0, || Ok(now))?,
            None => 0.0,
        };
        let first = p.process() == ProcessId(0) && !p.is_dry_run();
        let open = |path: &PathBuf| {
            let done = self.steps();
            let repeated = self.recent.iter().map(|recent| recent.step).filter(|step| *step > 0);
            match (self.is_resumed, p.epoch() > 1) {
                (true, _) => Metrics::resume(path, repeated.min().unwrap_or(done + 1), done),
                (false, true) => Metrics::resume(path, done + 1, steps.min(done + 1)),
                (false, false) => Metrics::open(path, done > 0),
            }
        };
        let mut observer = Observer {
            is_dry_run: p.is_dry_run(),
            saves,
            start,
            metrics: metrics.as_ref().filter(|_| first).map(open).transpose()?,
            #[cfg(feature = "tensorboard")]
            events: run
                .tensorboard
                .filter(|_| first)
                .map(|path| Events::create(&path))
                .transpose()?,
            progress: (first && progress)
                .then(|| Progress::new((self.steps(), steps), seconds, start)),
            limit: seconds.map(|seconds| (began, seconds)),
            on_step,
            last: None,
            stopped: None,
            evaluation: None,
        };
        if let (Some(recovery), Some(metrics)) = (self.recovery.take(), &mut observer.metrics) {
            metrics.recovery(self.steps(), &recovery)?;
        }
        if std::mem::take(&mut self.is_resumed) {
            self.repeat_reports(p, &mut observer)?;
            // A process may have died in this evaluation.
            let is_due = evaluate_every.is_some_and(|every| self.steps().is_multiple_of(every));
            if is_due && self.steps() < steps {
                self.evaluate_held_out(p, data, &mut observer)?;
            }
        }
        self.train(p, (steps, evaluate_every), data, &mut observer)?;
        self.begin_save_if_finite(p, &mut observer)?;
        if observer.stopped.is_none() {
            self.evaluate_held_out(p, data, &mut observer)?;
        }
        let Observer { mut saves, progress: bar, last, stopped, evaluation, .. } = observer;
        saves.finish(p)?;
        // Its end draws it once more.
        drop(bar);
        if let Some(signal) = stopped.filter(|_| first && progress) {
            let saved = if is_saved { ", saved" } else { "" };
            say(&format!("stopped by {} after step {}{saved}", stop_name(signal), self.steps()));
        }
        Ok(Outcome { steps: self.steps(), last, stopped, evaluation })
    }

    /// Passes on the reports of the steps that a resumed training has in its commit: perhaps nobody
    /// has read them.
    fn repeat_reports(&mut self, p: &mut Program, observer: &mut Observer<'_>) -> Result<()> {
        // It counts from the steps that are done.
        let progress = observer.progress.take();
        for recent in self.recent.clone().iter().filter(|recent| recent.step > 0) {
            let (step, rate, figures) = (recent.step, recent.rate, recent.figures());
            let (report, gradients, _) = StepHandle { step, rate, figures }.read_all()?;
            self.observe(p, observer, StepReport { seconds: 0.0, ..report }, gradients)?;
        }
        observer.progress = progress;
        Ok(())
    }

    /// Trains until the model has had `steps` updates, or a process was asked to stop. Evaluates
    /// held-out data between steps.
    #[track_caller]
    fn train<D: Data<In> + ?Sized>(
        &mut self,
        p: &mut Program,
        (steps, evaluate_every): (u64, Option<u64>),
        data: &D,
        observer: &mut Observer<'_>,
    ) -> Result<()> {
        let mut pending: VecDeque<StepHandle> = VecDeque::new();
        while self.steps() < steps && observer.stopped.is_none() && observer.share() < Some(1.0) {
            let microbatches = self.training(p, data)?;
            let rate = match observer.share() {
                None => self.rate.at(self.steps() + 1),
                Some(share) => self.rate.at_share(share),
            };
            pending.push_back(self.step_at(p, microbatches, rate)?);
            if observer.saves.is_due(self.steps()) {
                // They show if the save before, which is complete then, has a model of use.
                pending.drain(..).try_for_each(|step| self.read(p, observer, step))?;
                self.begin_save_if_finite(p, observer)?;
            }
            // Does nothing unless the program recovers.
            p.commit(self.steps(), self)?;
            if pending.len() > PENDING
                && let Some(step) = pending.pop_front()
            {
                self.read(p, observer, step)?;
            }
            let now = evaluate_every.is_some_and(|every| self.steps().is_multiple_of(every));
            if now && self.steps() < steps && observer.stopped.is_none() {
                self.evaluate_held_out(p, data, observer)?;
            }
        }
        pending.into_iter().try_for_each(|step| self.read(p, observer, step))
    }

    /// Begins to save the last step, if there are checkpoints and that is not done. The reports of
    /// all steps must be read. Fails if a trained parameter is not finite.
    fn begin_save_if_finite(&mut self, p: &mut Program, observer: &mut Observer<'_>) -> Result<()> {
        if let Some(parameter) = self.spoiled(p)? {
            let what = format!("the model after step {} cannot be used", self.steps());
            let figure = NotFinite { trained: Some(parameter), ..UNKNOWN };
            return self.fail(p, observer, &what, figure);
        }
        observer.saves.begin(p, self)
    }

    /// Ends the saves, and returns the error of a figure that is not finite. `what` names the
    /// figure and its step.
    fn fail(
        &mut self,
        p: &mut Program,
        observer: &mut Observer<'_>,
        what: &str,
        figure: NotFinite,
    ) -> Result<()> {
        observer.saves.end(p, self, observer.last.map_or(0, |last| last.step));
        Err(self.not_finite(p, what, figure)?)
    }

    /// Evaluates all held-out data in groups of a step's microbatches, until a process was asked to
    /// stop.
    #[track_caller]
    fn evaluate_held_out<D: Data<In> + ?Sized>(
        &mut self,
        p: &mut Program,
        data: &D,
        observer: &mut Observer<'_>,
    ) -> Result<()> {
        let group = self.schedule.microbatches();
        // All groups of a dry run are equal.
        let count = data.held_out_len().min(if p.is_dry_run() { group } else { usize::MAX });
        if count == 0 {
            return Ok(());
        }
        let meshes = self.meshes();
        let mut total = Total::default();
        let mut pending: VecDeque<EvaluationHandle> = VecDeque::new();
        let mut next = 0;
        while next < count && observer.stopped.is_none() {
            let end = count.min(next + group);
            let microbatches = (next..end).map(|index| data.held_out(p, &meshes, index));
            let microbatches = microbatches.collect::<Result<Vec<Microbatch<In>>>>()?;
            pending.push_back(self.evaluate(p, microbatches)?);
            next = end;
            if pending.len() > PENDING
                && let Some(group) = pending.pop_front()
            {
                total.add(group, observer)?;
                observer.evaluating(next, count);
            }
        }
        for group in pending {
            total.add(group, observer)?;
        }
        let Total { sum, weight } = total;
        // Padding alone has no loss.
        if next < count || p.is_dry_run() || (sum == 0.0 && weight == 0.0) {
            return Ok(());
        }
        let loss = sum / weight;
        if !loss.is_finite() {
            let what = format!("the evaluation after step {} has loss {loss}", self.steps());
            return self.fail(p, observer, &what, NotFinite { weight, ..UNKNOWN });
        }
        observer.evaluated(self.steps(), loss)
    }

    /// Reads a step's report, and passes it to the observer and to the save under way.
    fn read(
        &mut self,
        p: &mut Program,
        observer: &mut Observer<'_>,
        step: StepHandle,
    ) -> Result<()> {
        let (report, gradients, phases) = step.read_all()?;
        self.observe(p, observer, report, gradients)?;
        observer.saves.report(p, &phases)
    }

    /// Passes a step's report to the observer. Fails if a figure is not finite. `gradients` is the
    /// last stage with gradients that are not finite.
    fn observe(
        &mut self,
        p: &mut Program,
        observer: &mut Observer<'_>,
        report: StepReport,
        gradients: Option<usize>,
    ) -> Result<()> {
        let StepReport { step, loss, weight, norm, .. } = report;
        if observer.is_dry_run || (loss.is_finite() && norm.is_finite()) {
            return observer.step(report);
        }
        let what =
            format!("step {step} of the training has loss {loss} and gradients of norm {norm}");
        // A loss that is not finite has no finite gradients.
        let gradients = gradients.filter(|_| loss.is_finite());
        self.fail(p, observer, &what, NotFinite { gradients, weight, ..UNKNOWN })
    }
}

/// Sums over the groups of an evaluation.
#[derive(Default)]
struct Total {
    sum: f64,
    weight: f64,
}

impl Total {
    fn add(&mut self, group: EvaluationHandle, observer: &mut Observer<'_>) -> Result<()> {
        let report = group.read()?;
        self.sum += report.sum;
        self.weight += report.weight;
        observer.stopped = observer.stopped.or(report.stop);
        Ok(())
    }
}

/// The reports so far, and where they go.
struct Observer<'a> {
    /// True in a dry run, in which all figures are NaN.
    is_dry_run: bool,
    saves: Saves,
    start: Instant,
    /// Seconds when the run began, by the clock of the reports, and the limit of its seconds.
    limit: Option<(f64, f64)>,
    metrics: Option<Metrics>,
    #[cfg(feature = "tensorboard")]
    events: Option<Events>,
    progress: Option<Progress>,
    on_step: Box<dyn FnMut(&StepReport) + 'a>,
    last: Option<StepReport>,
    stopped: Option<i32>,
    evaluation: Option<f64>,
}

impl Observer<'_> {
    /// Returns the share of the time that the last report shows to be over. `None` if there is no
    /// limit. It is the same on every process.
    fn share(&self) -> Option<f64> {
        let (began, limit) = self.limit?;
        let seconds = self.last.map_or(0.0, |last| last.seconds - began);
        // A dry run has no time.
        Some(if seconds.is_nan() { 0.0 } else { seconds / limit })
    }

    fn step(&mut self, report: StepReport) -> Result<()> {
        self.stopped = self.stopped.or(report.stop);
        self.last = Some(report);
        if self.is_dry_run {
            return Ok(());
        }
        if let Some(metrics) = &mut self.metrics {
            metrics.step(&report, self.start.elapsed().as_secs_f64())?;
        }
        #[cfg(feature = "tensorboard")]
        if let Some(events) = &mut self.events {
            events.step(&report)?;
        }
        if let Some(progress) = &mut self.progress {
            progress.step(&report);
        }
        (self.on_step)(&report);
        Ok(())
    }

    fn evaluating(&self, done: usize, all: usize) {
        self.progress.iter().for_each(|progress| progress.evaluating(done, all));
    }

    fn evaluated(&mut self, step: u64, loss: f64) -> Result<()> {
        self.evaluation = Some(loss);
        if let Some(metrics) = &mut self.metrics {
            metrics.evaluation(step, loss, self.start.elapsed().as_secs_f64())?;
        }
        #[cfg(feature = "tensorboard")]
        if let Some(events) = &mut self.events {
            events.evaluation(step, loss)?;
        }
        self.progress.iter().for_each(|progress| progress.evaluated(step, loss));
        Ok(())
    }
}
