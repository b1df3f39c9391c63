//! The loop of a training: steps, evaluations, metrics, and an end at any time.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use mpmd_core::pipeline::Microbatch;
use mpmd_core::tree::Tree;
use mpmd_core::{Commits, Error, MpmdArray, ProcessId, Program, Result};

use super::Trainer;
use super::metrics::MetricsFile;
use super::not_finite::{NotFinite, UNKNOWN};
use super::progress::{Progress, say};
use super::report::{EvaluationHandle, EvaluationReport, StepHandle, StepReport, Sums};
use super::saves::Saves;
use crate::best::BestEvaluation;
use crate::checkpoint::Checkpoints;
use crate::data::Data;
use crate::stop::{StopFlag, stop_name};
use signal_hook::consts::SIGTERM;

/// Number of steps, or groups of an evaluation, that are issued before an earlier report is read.
/// So the pipeline does not run empty while the report is read.
const PENDING: usize = 2;

/// Number of steps in a dry run. All steps are equal, so a few are enough.
const DRY_RUN_STEPS: u64 = 8;

/// The answer of a caller's function to a report. `()` stands for [`ReportAnswer::Continue`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum ReportAnswer {
    /// Continue the training.
    #[default]
    Continue,
    /// End the training.
    Stop,
}

impl From<()> for ReportAnswer {
    fn from((): ()) -> Self {
        Self::Continue
    }
}

/// A function of the caller that receives reports.
type OnReport<'a, R> = Box<dyn FnMut(&R) -> ReportAnswer + 'a>;

/// Options of [`Trainer::run`].
#[must_use = "options do nothing until `Trainer::run` takes them"]
pub struct Run<'a> {
    steps: u64,
    seconds: Option<f64>,
    evaluate_every: Option<u64>,
    patience: Option<u64>,
    metrics: Option<PathBuf>,
    progress: bool,
    on_step: OnReport<'a, StepReport>,
    on_evaluation: OnReport<'a, EvaluationReport>,
    checkpoints: Option<Checkpoints>,
    save_every: Option<u64>,
}

impl<'a> Run<'a> {
    /// Creates options for a training that ends when the model has had `steps` updates, including
    /// those of earlier runs. By default, shows the progress and evaluates only at the end.
    pub fn steps(steps: u64) -> Self {
        Self {
            steps,
            seconds: None,
            evaluate_every: None,
            patience: None,
            metrics: None,
            progress: true,
            on_step: Box::new(|_| ReportAnswer::Continue),
            on_evaluation: Box::new(|_| ReportAnswer::Continue),
            checkpoints: None,
            save_every: None,
        }
    }

    /// Also ends the training after `seconds` seconds, by the clock of process 0. The learning rate
    /// then follows the elapsed share of the time instead of the step. So losses differ from run to
    /// run.
    ///
    /// Up to three further steps run after the limit, since they are issued before a step's time is
    /// known.
    pub fn seconds(mut self, seconds: f64) -> Self {
        self.seconds = Some(seconds);
        self
    }

    /// Evaluates the held-out data each time the number of updates is a multiple of `steps`, and at
    /// the end. A run begins with such an evaluation if the earlier run, for instance stopped by a
    /// signal, has left it out.
    pub fn evaluate_every(mut self, steps: u64) -> Self {
        self.evaluate_every = Some(steps.max(1));
        self
    }

    /// Also ends the training when `evaluations` evaluations in a row had no lower loss than the
    /// [best](Trainer::best) one. No step follows the last of them. Evaluations of earlier runs
    /// count, as the restored checkpoint or commit has them.
    pub fn patience(mut self, evaluations: u64) -> Self {
        self.patience = Some(evaluations.max(1));
        self
    }

    /// Makes process 0 write a line of JSON for each step and evaluation to `file`. If the model is
    /// new, begins a new file, and an older one is renamed to `FILE.1`, or the next free number.
    /// Otherwise appends to the file. After [`Trainer::resume`], removes the lines of steps that
    /// are repeated. If a line cannot be written later, as on a full disk, it is skipped, with one
    /// warning.
    ///
    /// The file is locked: a second training with the same file fails. A pipe, a device, and the
    /// file of the process's own output, such as `/dev/stdout`, are appended to.
    ///
    /// A step has the fields `step`, `loss`, `norm`, `rate`, `seconds` and `tokens`. `seconds` is
    /// the time of all runs in the file, and `tokens` is the step's weight. An evaluation has
    /// `step`, `evaluation` (the mean loss) and `seconds`. Both have `metrics` if the loss has
    /// metrics.
    ///
    /// A later epoch of the job begins with a line for its recovery. The line has `recovery`, the
    /// number of the epoch, the `step` from which the training continues, and the fields of a
    /// [`Recovery`](mpmd_core::Recovery).
    pub fn metrics(mut self, file: impl Into<PathBuf>) -> Self {
        self.metrics = Some(file.into());
        self
    }

    /// Enables or disables the display of progress on process 0's stderr. Enabled by default.
    pub fn progress(mut self, yes: bool) -> Self {
        self.progress = yes;
        self
    }

    /// Calls `f` with the report of each step, in order, on every process. Never calls it in a dry
    /// run. After [`Trainer::resume`], the reports of the last steps before it are repeated.
    ///
    /// `f` returns nothing, or a [`ReportAnswer`]. If it returns [`ReportAnswer::Stop`], the
    /// training ends after up to two further steps, which are already issued. Reports are the same
    /// on every process. `f` must decide only by them, so that all processes end after the same
    /// step.
    pub fn on_step<N: Into<ReportAnswer>>(
        mut self,
        mut f: impl FnMut(&StepReport) -> N + 'a,
    ) -> Self {
        self.on_step = Box::new(move |report| f(report).into());
        self
    }

    /// Calls `f` with the report of each evaluation of all held-out data, under the rules of
    /// [`Run::on_step`]. If `f` returns [`ReportAnswer::Stop`], no step follows: the model is the
    /// one that was evaluated.
    ///
    /// ```
    /// use mpmd_train::{ReportAnswer, Run};
    ///
    /// // Ends when the model is good enough.
    /// let run = Run::steps(1000).evaluate_every(50).on_evaluation(|report| {
    ///     if report.loss() > 0.5 { ReportAnswer::Continue } else { ReportAnswer::Stop }
    /// });
    /// ```
    ///
    /// [`Run::patience`] ends a training when its loss no longer falls.
    pub fn on_evaluation<N: Into<ReportAnswer>>(
        mut self,
        mut f: impl FnMut(&EvaluationReport) -> N + 'a,
    ) -> Self {
        self.on_evaluation = Box::new(move |report| f(report).into());
        self
    }

    /// Saves a checkpoint after the last step, also if the run was stopped. [`Trainer::restore`]
    /// continues from the checkpoint. It is saved after the last evaluation, and only if the
    /// evaluation's loss is finite.
    pub fn checkpoints(mut self, to: Checkpoints) -> Self {
        self.checkpoints = Some(to);
        self
    }

    /// Also saves a checkpoint each time the number of updates is a multiple of `steps`, while the
    /// training continues. Needs [`Run::checkpoints`].
    ///
    /// Each save takes host memory for a copy of the process's regions. Before a save begins, the
    /// training waits for the reports of all steps so far, and for the previous save. So a model
    /// with values that are not finite replaces no good checkpoint. An evaluation after the same
    /// step comes first, also that at the end. So the checkpoint contains it if it is the best one.
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
            .field("patience", &self.patience)
            .field("metrics", &self.metrics)
            .field("checkpoints", &self.checkpoints)
            .field("save_every", &self.save_every)
            .finish_non_exhaustive()
    }
}

/// The result of [`Trainer::run`]. It is the same on every process.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct RunOutcome {
    /// Number of updates of the model, including those of earlier runs.
    pub steps: u64,
    /// The report of the last step; `None` if the run had no step.
    pub last: Option<StepReport>,
    /// The signal that stopped the run, if any.
    pub stopped: Option<i32>,
    /// Mean loss of the last complete evaluation of held-out data. `None` if there was none, or the
    /// held-out data are only padding.
    pub evaluation: Option<f64>,
    /// Mean of each metric in the last complete evaluation, by name.
    pub metrics: BTreeMap<String, f64>,
}

impl<In: Tree<Leaf = MpmdArray>> Trainer<In> {
    /// Trains, evaluates and saves as `run` says. Blocks until the last report is read.
    ///
    /// Two further steps are issued before the report of a step is read. If any process gets
    /// Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2, all processes stop after the same step, also
    /// during an evaluation. A second Ctrl-C or SIGTERM, at least two seconds later, ends its
    /// process at once.
    ///
    /// After [`Trainer::resume`] in a job that [shrinks](mpmd_core::OnLoss::Shrink), SIGTERM,
    /// SIGUSR1 and SIGUSR2 end only the process that gets them, two commits later. The other
    /// processes continue: schedulers send these signals before they take a machine away. If all
    /// processes get such a signal, the training stops.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Trainer::step`] and [`Trainer::evaluate`]. If a loss or a norm is
    /// not finite: the error names the step and the stage, and the parameters that gave it are not
    /// saved. If a checkpoint cannot be written.
    ///
    /// Before the first step: if the file of metrics cannot be opened or another training writes to
    /// it, or a process cannot write to the folder of checkpoints. Also if the folder's disk has no
    /// space for a checkpoint, another job saves to the folder, or it has a checkpoint of a later
    /// step than this trainer's.
    #[track_caller]
    pub fn run<D: Data<In> + ?Sized>(
        &mut self,
        p: &mut Program,
        mut run: Run<'_>,
        data: &D,
    ) -> Result<RunOutcome> {
        data.compare(p)?;
        let is_saved = run.checkpoints.is_some();
        let is_shown = run.progress && p.process() == ProcessId(0) && !p.is_dry_run();
        let evaluate_every = run.evaluate_every;
        let mut steps = run.steps;
        let saves = Saves::new(p, run.checkpoints.take(), run.save_every, self)?;
        if p.is_dry_run() {
            steps = steps.min(self.steps() + DRY_RUN_STEPS);
        } else {
            self.watch_signals()?;
        }

        let mut observer = self.observer(p, run, saves, steps)?;
        if let (Some(recovery), Some(metrics)) = (self.recovery.take(), &mut observer.metrics) {
            metrics.recovery(self.steps(), &recovery);
        }
        let plan = StepPlan {
            steps,
            evaluate_every,
        };
        let is_resumed = std::mem::take(&mut self.is_resumed);
        if is_resumed {
            self.repeat_reports(p, &mut observer)?;
        }
        // A process may have died in this evaluation, or a signal may have cut it off.
        self.evaluate_if_due(p, plan, data, &mut observer)?;
        if is_resumed {
            // A process may have died before this save.
            self.save_if_due(p, plan, &mut VecDeque::new(), &mut observer)?;
        }

        self.train(p, plan, data, &mut observer)?;
        self.check_trained(p, &mut observer)?;
        let is_evaluated = |report: &EvaluationReport| report.step == self.steps();
        if observer.stopped.is_none() && !observer.evaluation.as_ref().is_some_and(is_evaluated) {
            self.evaluate_held_out(p, data, &mut observer)?;
        }
        observer.saves.begin(p, self)?;
        observer.saves.finish(p)?;
        // Its end draws it once more.
        drop(observer.progress.take());
        if let Some(signal) = observer.stopped {
            p.set_stopped_by(signal);
        }
        if let Some(signal) = observer.stopped.filter(|_| is_shown) {
            let saved = if is_saved { ", saved" } else { "" };
            say(&format!(
                "stopped by {} after step {}{saved}",
                stop_name(signal),
                self.steps()
            ));
        }
        Ok(observer.outcome(self.steps()))
    }

    /// Installs the handlers of stop signals, unless that was done before.
    fn watch_signals(&mut self) -> Result<()> {
        if self.watches {
            return Ok(());
        }
        let refused = |error| Error::Environment(format!("cannot watch for Ctrl-C: {error}"));
        self.status.stop = StopFlag::install().map_err(refused)?;
        self.watches = true;
        Ok(())
    }

    /// Creates the observer of a run that ends after `steps` updates of the model. Starts its
    /// clock, and opens its metrics and progress display.
    #[track_caller]
    fn observer<'a>(
        &self,
        p: &mut Program,
        run: Run<'a>,
        saves: Saves,
        steps: u64,
    ) -> Result<RunObserver<'a>> {
        let start = Instant::now();
        // All processes take the time from the reports, which have the clock of process 0.
        let now = self.status.start.elapsed().as_secs_f64();
        let limit = match run.seconds {
            Some(seconds) => Some(TimeLimit {
                began: p.broadcast_value(ProcessId(0), 0.0, || Ok(now))?,
                seconds,
            }),
            None => None,
        };

        let is_first = p.process() == ProcessId(0) && !p.is_dry_run();
        let metrics = match &run.metrics {
            Some(path) if is_first => self.open_metrics(p, path, steps)?,
            _ => None,
        };
        let progress = (is_first && run.progress)
            .then(|| Progress::new((self.steps(), steps), run.seconds, start));
        Ok(RunObserver {
            is_dry_run: p.is_dry_run(),
            saves,
            start,
            limit,
            metrics,
            progress,
            on_step: run.on_step,
            on_evaluation: run.on_evaluation,
            // An earlier run may have ended by it.
            next: out_of_patience(run.patience, self.best),
            patience: run.patience,
            last: None,
            stopped: None,
            evaluation: None,
        })
    }

    /// Opens the file of metrics for a run that ends after `steps` updates of the model. Returns
    /// `None` if a resumed training continues without the file.
    fn open_metrics(&self, p: &Program, path: &Path, steps: u64) -> Result<Option<MetricsFile>> {
        let done = self.steps();
        let repeated = self
            .recent
            .iter()
            .map(|recent| recent.step)
            .filter(|step| *step > 0);
        let resumed = match (self.is_resumed, p.epoch() > 1) {
            (true, _) => MetricsFile::resume(path, repeated.min().unwrap_or(done + 1), done),
            (false, true) => MetricsFile::resume(path, done + 1, steps.min(done + 1)),
            (false, false) => return MetricsFile::open(path, done > 0).map(Some),
        };

        // The training has begun before, so it goes on.
        let unwritten = |why: &Error| {
            say(&format!(
                "warning: {why}. The training goes on without them"
            ))
        };
        Ok(resumed.inspect_err(unwritten).ok())
    }

    /// Repeats the reports of the steps that the restored commit contains, since a lost process may
    /// not have passed them on.
    fn repeat_reports(&mut self, p: &mut Program, observer: &mut RunObserver<'_>) -> Result<()> {
        // It counts from the steps that are done.
        let progress = observer.progress.take();
        for recent in self.recent.clone().iter().filter(|recent| recent.step > 0) {
            let handle = StepHandle {
                step: recent.step,
                rate: recent.rate,
                names: self.metrics.clone(),
                figures: recent.figures(),
            };
            let mut reading = handle.read_all()?;
            reading.report.seconds = 0.0;
            self.observe(p, observer, reading.report, reading.gradients)?;
        }
        observer.progress = progress;
        Ok(())
    }

    /// Trains until the model has had the updates of `plan`, or the training is asked to stop.
    /// Evaluates held-out data between steps.
    #[track_caller]
    fn train<D: Data<In> + ?Sized>(
        &mut self,
        p: &mut Program,
        plan: StepPlan,
        data: &D,
        observer: &mut RunObserver<'_>,
    ) -> Result<()> {
        self.status.leaves = self.commits.as_ref().is_some_and(Commits::may_change);
        let trained = self.train_steps(p, plan, data, observer);
        self.status.leaves = false;
        trained
    }

    #[track_caller]
    fn train_steps<D: Data<In> + ?Sized>(
        &mut self,
        p: &mut Program,
        plan: StepPlan,
        data: &D,
        observer: &mut RunObserver<'_>,
    ) -> Result<()> {
        let mut pending: VecDeque<StepHandle> = VecDeque::new();
        while self.continues(plan, observer) {
            let microbatches = self.training(p, data)?;
            let rate = match observer.share() {
                None => self.rate.at(self.steps() + 1),
                Some(share) => self.rate.at_share(share),
            };
            pending.push_back(self.step_at(p, microbatches, rate)?);
            if let Some(mut after) = self.after_step.take() {
                after(p, self.steps(), &self.pipeline)?;
                self.after_step = Some(after);
            }

            if let Some(commits) = self
                .commits
                .as_ref()
                .filter(|_| self.status.asks_to_leave())
            {
                commits.ask_to_leave();
            }
            // Does nothing unless the program recovers.
            p.commit(self.steps(), self)?;
            if self.commits.as_ref().is_some_and(Commits::all_ask_to_leave) {
                observer.stopped = Some(SIGTERM);
            }

            if pending.len() > PENDING
                && let Some(step) = pending.pop_front()
            {
                self.read(p, observer, step)?;
            }
            self.evaluate_if_due(p, plan, data, observer)?;
            self.save_if_due(p, plan, &mut pending, observer)?;
        }
        pending
            .into_iter()
            .try_for_each(|step| self.read(p, observer, step))
    }

    /// Returns true if a step follows, by the reports that are read.
    fn continues(&self, plan: StepPlan, observer: &RunObserver<'_>) -> bool {
        self.steps() < plan.steps && observer.goes_on() && observer.share() < Some(1.0)
    }

    /// Evaluates the held-out data if that is due after the last step, unless the model is
    /// evaluated already, or a function of the caller or a signal ends the training.
    #[track_caller]
    fn evaluate_if_due<D: Data<In> + ?Sized>(
        &mut self,
        p: &mut Program,
        plan: StepPlan,
        data: &D,
        observer: &mut RunObserver<'_>,
    ) -> Result<()> {
        let step = self.steps();
        let is_evaluated = self.best.is_some_and(|best| best.last == step);
        if plan.is_evaluated_after(step) && !is_evaluated && observer.goes_on() {
            self.evaluate_held_out(p, data, observer)?;
        }
        Ok(())
    }

    /// Reads the pending reports and begins to save the model, if a save is due after the last
    /// step and a step follows. The save of a run's last step waits for the last evaluation. Fails
    /// if a trained parameter is not finite.
    fn save_if_due(
        &mut self,
        p: &mut Program,
        plan: StepPlan,
        pending: &mut VecDeque<StepHandle>,
        observer: &mut RunObserver<'_>,
    ) -> Result<()> {
        if !observer.saves.is_due(self.steps()) {
            return Ok(());
        }
        // They show if the save before, which is complete then, has a model of use.
        pending
            .drain(..)
            .try_for_each(|step| self.read(p, observer, step))?;
        if !self.continues(plan, observer) {
            return Ok(());
        }
        self.check_trained(p, observer)?;
        observer.saves.begin(p, self)
    }

    /// Fails if a trained parameter is not finite.
    fn check_trained(&mut self, p: &mut Program, observer: &mut RunObserver<'_>) -> Result<()> {
        if let Some(parameter) = self.spoiled(p)? {
            let what = format!("the model after step {} cannot be used", self.steps());
            let figure = NotFinite {
                trained: Some(parameter),
                ..UNKNOWN
            };
            return self.fail(p, observer, &what, figure);
        }
        Ok(())
    }

    /// Ends the saves, and returns the error of a figure that is not finite. `what` names the
    /// figure and the step.
    fn fail(
        &mut self,
        p: &mut Program,
        observer: &mut RunObserver<'_>,
        what: &str,
        figure: NotFinite,
    ) -> Result<()> {
        // A finite evaluation shows the same of its model as a finite loss of the next step would.
        let evaluated = observer
            .evaluation
            .as_ref()
            .map_or(0, |report| report.step + 1);
        let last = observer.last.as_ref().map_or(0, |last| last.step);
        observer.saves.end(p, self, last.max(evaluated));
        Err(self.not_finite(p, what, figure)?)
    }

    /// Evaluates all held-out data, until a process is asked to stop. A group has as many
    /// microbatches as a step.
    #[track_caller]
    fn evaluate_held_out<D: Data<In> + ?Sized>(
        &mut self,
        p: &mut Program,
        data: &D,
        observer: &mut RunObserver<'_>,
    ) -> Result<()> {
        let group = self.schedule.microbatches();
        // All groups of a dry run are equal.
        let count = data
            .held_out_len()
            .min(if p.is_dry_run() { group } else { usize::MAX });
        if count == 0 {
            return Ok(());
        }

        let meshes = self.meshes();
        let mut total = Sums::default();
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
                total.add(&observer.group(group)?);
                observer.evaluating(next, count);
            }
        }
        for group in pending {
            total.add(&observer.group(group)?);
        }

        // Padding alone has no loss.
        if next < count || p.is_dry_run() || (total.sum == 0.0 && total.weight == 0.0) {
            return Ok(());
        }
        let report = total.report(self.steps(), observer.stopped);
        let loss = report.loss();
        let weight = report.weight;
        if !loss.is_finite() {
            let what = format!("the evaluation after step {} has loss {loss}", self.steps());
            return self.fail(p, observer, &what, NotFinite { weight, ..UNKNOWN });
        }
        self.note_evaluation(p, observer, report)
    }

    /// Passes the report of an evaluation to the observer, and the model to the caller's function
    /// if it is the best one.
    fn note_evaluation(
        &mut self,
        p: &mut Program,
        observer: &mut RunObserver<'_>,
        report: EvaluationReport,
    ) -> Result<()> {
        let before = self.best.map(|best| best.step);
        let best = BestEvaluation::updated(self.best, report.step, report.loss());
        self.best = Some(best);
        observer.evaluated(report, best);

        if before != Some(best.step)
            && let Some(mut after) = self.after_best.take()
        {
            after(p, best, &self.pipeline)?;
            self.after_best = Some(after);
        }
        Ok(())
    }

    /// Reads a step's report. Passes it to the observer and to the save in progress.
    fn read(
        &mut self,
        p: &mut Program,
        observer: &mut RunObserver<'_>,
        step: StepHandle,
    ) -> Result<()> {
        let reading = step.read_all()?;
        self.observe(p, observer, reading.report, reading.gradients)?;
        observer.saves.report(p, &reading.saves)
    }

    /// Passes a step's report to the observer. Fails if a figure is not finite. `gradients` is the
    /// last stage whose gradients are not finite.
    fn observe(
        &mut self,
        p: &mut Program,
        observer: &mut RunObserver<'_>,
        report: StepReport,
        gradients: Option<usize>,
    ) -> Result<()> {
        let StepReport {
            step,
            loss,
            weight,
            norm,
            ..
        } = report;
        if observer.is_dry_run || (loss.is_finite() && norm.is_finite()) {
            observer.step(report);
            return Ok(());
        }

        let what =
            format!("step {step} of the training has loss {loss} and gradients of norm {norm}");
        // A loss that is not finite has no finite gradients.
        let gradients = gradients.filter(|_| loss.is_finite());
        let figure = NotFinite {
            gradients,
            weight,
            ..UNKNOWN
        };
        self.fail(p, observer, &what, figure)
    }
}

/// The number of steps of a run, and the interval of its evaluations.
#[derive(Clone, Copy)]
struct StepPlan {
    /// Number of updates that the model has had at the end of the run.
    steps: u64,
    /// Number of updates from one evaluation to the next.
    evaluate_every: Option<u64>,
}

impl StepPlan {
    /// Returns true if an evaluation is due after `steps` updates, and the training continues after
    /// it.
    fn is_evaluated_after(self, steps: u64) -> bool {
        let is_due = self
            .evaluate_every
            .is_some_and(|every| steps.is_multiple_of(every));
        is_due && steps > 0 && steps < self.steps
    }
}

/// Returns [`ReportAnswer::Stop`] if `patience` evaluations or more have followed the best one.
fn out_of_patience(patience: Option<u64>, best: Option<BestEvaluation>) -> ReportAnswer {
    let ends = patience
        .zip(best)
        .is_some_and(|(patience, best)| best.later >= patience);
    match ends {
        true => ReportAnswer::Stop,
        false => ReportAnswer::Continue,
    }
}

/// The time limit of a run.
#[derive(Clone, Copy)]
struct TimeLimit {
    /// Start of the run in seconds, by the clock of the reports.
    began: f64,
    /// Seconds that the run may take.
    seconds: f64,
}

/// Passes reports of a run to the metrics, the progress display and the caller, and remembers the
/// last ones.
struct RunObserver<'a> {
    /// True in a dry run, in which all figures are NaN.
    is_dry_run: bool,
    saves: Saves,
    start: Instant,
    limit: Option<TimeLimit>,
    metrics: Option<MetricsFile>,
    progress: Option<Progress>,
    on_step: OnReport<'a, StepReport>,
    on_evaluation: OnReport<'a, EvaluationReport>,
    /// [`ReportAnswer::Stop`] after a function of the caller has returned it.
    next: ReportAnswer,
    /// Number of evaluations without a lower loss that end the training.
    patience: Option<u64>,
    last: Option<StepReport>,
    stopped: Option<i32>,
    evaluation: Option<EvaluationReport>,
}

impl RunObserver<'_> {
    /// Returns the elapsed share of the time limit at the last report; `None` without a limit. The
    /// result is the same on every process.
    fn share(&self) -> Option<f64> {
        let limit = self.limit?;
        let last = self.last.as_ref();
        let seconds = last.map_or(0.0, |last| last.seconds - limit.began);
        // A dry run has no time.
        Some(if seconds.is_nan() {
            0.0
        } else {
            seconds / limit.seconds
        })
    }

    /// Returns true unless a process was asked to stop, or a function of the caller has ended the
    /// training.
    fn goes_on(&self) -> bool {
        self.stopped.is_none() && self.next == ReportAnswer::Continue
    }

    /// Returns the outcome of the run. `steps` is the number of updates of the model.
    fn outcome(self, steps: u64) -> RunOutcome {
        let (evaluation, metrics) = self
            .evaluation
            .map(|report| (report.loss(), report.metrics))
            .unzip();
        RunOutcome {
            steps,
            last: self.last,
            stopped: self.stopped,
            evaluation,
            metrics: metrics.unwrap_or_default(),
        }
    }

    /// Reads the sums of a group of an evaluation's microbatches, and notes a signal to stop.
    fn group(&mut self, group: EvaluationHandle) -> Result<Sums> {
        let (sums, stop) = group.read_sums()?;
        self.stopped = self.stopped.or(stop);
        Ok(sums)
    }

    fn step(&mut self, report: StepReport) {
        self.stopped = self.stopped.or(report.stop);
        if self.is_dry_run {
            self.last = Some(report);
            return;
        }

        if let Some(metrics) = &mut self.metrics {
            metrics.step(&report, self.start.elapsed().as_secs_f64());
        }
        if let Some(progress) = &mut self.progress {
            progress.step(&report);
        }
        if (self.on_step)(&report) == ReportAnswer::Stop {
            self.next = ReportAnswer::Stop;
        }
        self.last = Some(report);
    }

    fn evaluating(&self, done: usize, all: usize) {
        if let Some(progress) = &self.progress {
            progress.evaluating(done, all);
        }
    }

    /// Passes on the report of an evaluation. `best` is the best one so far.
    fn evaluated(&mut self, report: EvaluationReport, best: BestEvaluation) {
        if let Some(metrics) = &mut self.metrics {
            metrics.evaluation(&report, self.start.elapsed().as_secs_f64());
        }
        if let Some(progress) = &self.progress {
            progress.evaluated(&report);
        }
        let ends = out_of_patience(self.patience, Some(best)) == ReportAnswer::Stop;
        if (self.on_evaluation)(&report) == ReportAnswer::Stop || ends {
            self.next = ReportAnswer::Stop;
        }
        self.evaluation = Some(report);
    }
}
