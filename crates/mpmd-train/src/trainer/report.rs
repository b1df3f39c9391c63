//! The figures of steps and evaluations, which every process reads while later steps run.
//!
//! The figures move to one device of each process. Each process adds its status: its row of an
//! array that all processes get whole. So all processes read the same values, and decide alike.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use mpmd_core::aval::{DType, ShapedArray, f64s};
use mpmd_core::kernel::{Context, Kernel, Signature, View, ViewMut};
use mpmd_core::pipeline::Loss;
use mpmd_core::{Error, Jit, MpmdArray, ProcessId, Program, Result};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::spec;
use mpmd_layout::topology::{DeviceId, Mesh};

use crate::checkpoint::{SaveProgress, SaveStatus};
use crate::optimizer::{MOST_METRICS, STEP_FIGURES, check_metrics, double};
use crate::stop::StopFlag;
use signal_hook::consts::{SIGTERM, SIGUSR1, SIGUSR2};

/// The names of a loss's metrics, in order.
pub(super) type MetricNames = Arc<[String]>;

/// Number of figures of an evaluation: the sum of losses, the sum of weights, and the sums of
/// metrics.
const SUMS: usize = 2 + MOST_METRICS;
/// The name of the mesh axis over the processes.
const PROCESS: &str = "process";
/// Number of words of a [`ProcessReport`].
const WORDS: usize = 4;

/// Sends the figures of steps and evaluations, and the statuses of all processes, to every process.
#[derive(Debug)]
pub(super) struct Reporter {
    /// A mesh with one device of each process.
    everywhere: Mesh,
    sum: Jit<SumLosses>,
}

/// The figures of a step. They are the same on every process.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Number of the step's update in the training, counted from 1.
    pub step: u64,
    /// Mean loss before the update. It is 0 if the weight is 0.
    pub loss: f64,
    /// Weight of the step: its number of counted items, such as tokens.
    pub weight: f64,
    /// Mean of each metric of the [`Loss`] before the update, by name. The means are 0 if the
    /// weight is 0.
    pub metrics: BTreeMap<String, f64>,
    /// Norm of the mean gradient, before clipping.
    pub norm: f64,
    /// The learning rate of the step.
    pub rate: f64,
    /// Seconds from the creation of the trainer to the end of the step, by the clock of process 0.
    pub seconds: f64,
    /// The signal that asked a process to stop before or during this step, if any.
    pub stop: Option<i32>,
}

/// The figures of an evaluation. They are the same on every process.
#[derive(Clone, Debug, PartialEq)]
pub struct EvaluationReport {
    /// Number of updates that the evaluated model has had.
    pub step: u64,
    /// Sum of the losses of all microbatches.
    pub sum: f64,
    /// Weight of all microbatches: their number of counted items, such as tokens.
    pub weight: f64,
    /// Mean of each metric of the [`Loss`], by name. The means are NaN if the weight is 0.
    pub metrics: BTreeMap<String, f64>,
    /// The signal that asked a process to stop before or during the evaluation, if any.
    pub stop: Option<i32>,
}

impl EvaluationReport {
    /// Returns the mean loss; NaN if the weight is 0.
    pub fn loss(&self) -> f64 {
        self.sum / self.weight
    }
}

/// A handle to the figures of an issued step, which may still be running. Dropping it does not
/// block.
#[derive(Debug)]
#[must_use = "a step's failure is seen by reading its report"]
pub struct StepHandle {
    pub(super) step: u64,
    pub(super) rate: f64,
    pub(super) names: MetricNames,
    pub(super) figures: ReportArrays,
}

/// A handle to the figures of an issued evaluation, which may still be running. Dropping it does
/// not block.
#[derive(Debug)]
#[must_use = "an evaluation's result is read from its report"]
pub struct EvaluationHandle {
    pub(super) step: u64,
    pub(super) names: MetricNames,
    pub(super) figures: ReportArrays,
}

/// Sums of losses, weights and metrics over microbatches of an evaluation.
#[derive(Clone, Debug, Default)]
pub(super) struct Sums {
    pub(super) sum: f64,
    pub(super) weight: f64,
    pub(super) metrics: BTreeMap<String, f64>,
}

impl Sums {
    /// Adds the sums of other microbatches.
    pub(super) fn add(&mut self, other: &Self) {
        self.sum += other.sum;
        self.weight += other.weight;
        for (name, sum) in &other.metrics {
            *self.metrics.entry(name.clone()).or_default() += sum;
        }
    }

    /// Returns the evaluation's report for the model after `step` updates.
    pub(super) fn report(self, step: u64, stop: Option<i32>) -> EvaluationReport {
        let Self {
            sum,
            weight,
            mut metrics,
        } = self;
        metrics.values_mut().for_each(|metric| *metric /= weight);
        EvaluationReport {
            step,
            sum,
            weight,
            metrics,
            stop,
        }
    }
}

/// Returns the figures of metrics by name.
fn by_name(names: &MetricNames, figures: &[f64]) -> BTreeMap<String, f64> {
    names.iter().cloned().zip(figures.iter().copied()).collect()
}

/// Figures and process statuses, replicated over one device of each process.
#[derive(Debug)]
pub(super) struct ReportArrays {
    values: MpmdArray,
    /// The words of each process's [`ProcessReport`]: `i64`s, `[processes, WORDS]`. `None` for
    /// figures from an earlier epoch.
    statuses: Option<MpmdArray>,
}

/// The status that a process adds to every report.
#[derive(Clone, Debug)]
pub(super) struct ProcessReport {
    pub(super) stop: StopFlag,
    /// True while SIGTERM, SIGUSR1 and SIGUSR2 ask only this process to leave the job, which may go
    /// on.
    pub(super) leaves: bool,
    /// The time when the trainer was created.
    pub(super) start: Instant,
    pub(super) save: SaveStatus,
}

impl Default for ProcessReport {
    /// Creates the status of a new trainer, whose clock starts now.
    fn default() -> Self {
        Self {
            stop: StopFlag::default(),
            leaves: false,
            start: Instant::now(),
            save: SaveStatus::default(),
        }
    }
}

impl ProcessReport {
    /// Encodes the status: the signal that this process received, or 0; the nanoseconds since the
    /// start; and the step and phase of the last save.
    fn words(&self) -> [i64; WORDS] {
        let signal = self.stop.signal().filter(|_| !self.asks_to_leave());
        let nanos = i64::try_from(self.start.elapsed().as_nanos()).unwrap_or(i64::MAX);
        let [step, phase] = self.save.words();
        [signal.unwrap_or(0).into(), nanos, step, phase]
    }

    /// Returns true if a signal asks only this process to end, while the job may go on.
    pub(super) fn asks_to_leave(&self) -> bool {
        self.leaves
            && self
                .stop
                .signal()
                .is_some_and(|signal| [SIGTERM, SIGUSR1, SIGUSR2].contains(&signal))
    }
}

/// The statuses of all processes, read from a report.
struct Statuses {
    stop: Option<i32>,
    /// Seconds since the trainer was created, by the clock of process 0.
    seconds: f64,
    /// The progress of each process with its last save.
    saves: Vec<SaveProgress>,
}

/// A step's report, and the facts that only the trainer uses.
pub(super) struct StepReading {
    pub(super) report: StepReport,
    /// The last stage whose gradients are not finite, if any.
    pub(super) gradients: Option<usize>,
    /// The progress of each process with its last save.
    pub(super) saves: Vec<SaveProgress>,
}

impl StepHandle {
    /// Calls `f` on a separate thread, once the figures of the step are on this process. Does
    /// nothing in a dry run.
    pub fn then(&self, f: impl FnOnce() + Send + 'static) {
        let statuses = self.figures.statuses.clone();
        self.figures.values.then(move |_| match statuses {
            Some(statuses) => statuses.then(move |_| f()),
            None => f(),
        });
    }

    /// Returns true if [`read`](Self::read) will not block.
    pub fn is_complete(&self) -> bool {
        let statuses = self.figures.statuses.as_ref();
        self.figures.values.is_complete() && statuses.is_none_or(MpmdArray::is_complete)
    }

    /// Blocks until the step has finished, and returns its figures. A dry run returns at once, with
    /// NaN for the figures.
    ///
    /// # Errors
    ///
    /// If an operation of the step failed. [`Error::Kernel`] if the loss or the norm of the
    /// gradients is not finite.
    pub fn read(self) -> Result<StepReport> {
        let is_dry_run = self.figures.values.to_host()?.is_none();
        let report = self.read_all()?.report;
        let StepReport {
            step, loss, norm, ..
        } = report;
        match is_dry_run || (loss.is_finite() && norm.is_finite()) {
            true => Ok(report),
            false => Err(Error::kernel(format!(
                "step {step} of the training has loss {loss} and gradients of norm {norm}: lower \
                 the learning rate, clip the gradients, or look at the data and at the weights \
                 that the training began with"
            ))),
        }
    }

    /// Reads the report as [`StepHandle::read`] does, with the facts that only the trainer uses.
    /// Succeeds even if the loss or the norm is not finite.
    pub(super) fn read_all(self) -> Result<StepReading> {
        let Self {
            step,
            rate,
            names,
            figures,
        } = self;
        let (figures, statuses) = figures.read::<STEP_FIGURES>()?;
        let [loss, weight, norm, stage, ref metrics @ ..] = figures;
        let report = StepReport {
            step,
            loss,
            weight,
            metrics: by_name(&names, metrics),
            norm,
            rate,
            seconds: statuses.seconds,
            stop: statuses.stop,
        };
        Ok(StepReading {
            report,
            gradients: (stage >= 0.0).then_some(stage as usize),
            saves: statuses.saves,
        })
    }
}

impl EvaluationHandle {
    /// Blocks until the evaluation has finished, and returns its figures. A dry run returns at
    /// once, with NaN for the figures.
    ///
    /// # Errors
    ///
    /// If an operation of the evaluation failed.
    pub fn read(self) -> Result<EvaluationReport> {
        let step = self.step;
        let (sums, stop) = self.read_sums()?;
        Ok(sums.report(step, stop))
    }

    /// Blocks until the evaluation has finished. Returns its sums, and the signal that asks to
    /// stop.
    pub(super) fn read_sums(self) -> Result<(Sums, Option<i32>)> {
        let ([sum, weight, metrics @ ..], statuses) = self.figures.read::<SUMS>()?;
        let sums = Sums {
            sum,
            weight,
            metrics: by_name(&self.names, &metrics),
        };
        Ok((sums, statuses.stop))
    }
}

impl ReportArrays {
    /// Creates a report from the figures in a commit. It has no stop signal and no time.
    pub(super) fn of_recent(values: MpmdArray) -> Self {
        Self {
            values,
            statuses: None,
        }
    }

    /// Returns the array of figures, replicated over one device of each process.
    pub(super) fn values(&self) -> &MpmdArray {
        &self.values
    }

    fn read<const N: usize>(self) -> Result<([f64; N], Statuses)> {
        let none = Statuses {
            stop: None,
            seconds: f64::NAN,
            saves: Vec::new(),
        };
        let Some(values) = self.values.to_host()? else {
            return Ok(([f64::NAN; N], none));
        };
        let values = values.as_slice::<f64>()?;
        let other = |_| Error::kernel(format!("{} figures in place of {N}", values.len()));

        let statuses = self
            .statuses
            .map(|statuses| statuses.to_host())
            .transpose()?
            .flatten();
        let Some(statuses) = statuses else {
            return Ok((values.try_into().map_err(other)?, none));
        };

        let (statuses, _) = statuses.as_slice::<i64>()?.as_chunks::<WORDS>();
        let signal = statuses.iter().map(|[signal, ..]| *signal as i32).max();
        let seconds = statuses
            .first()
            .map_or(f64::NAN, |[_, nanos, ..]| *nanos as f64 * 1e-9);
        let saves = statuses
            .iter()
            .map(|[.., step, phase]| SaveStatus::read([*step, *phase]));
        let stop = signal.filter(|signal| *signal != 0);
        let all = Statuses {
            stop,
            seconds,
            saves: saves.collect(),
        };
        Ok((values.try_into().map_err(other)?, all))
    }
}

impl Reporter {
    /// Creates a reporter. `last` is the mesh of the last stage, which has the losses.
    pub(super) fn new(p: &Program, last: &Mesh) -> Result<Self> {
        let devices: Vec<DeviceId> = (0..p.processes() as u32)
            .filter_map(|process| p.topology().devices_of(ProcessId(process)).first().copied())
            .collect();
        if devices.len() != p.processes() {
            let problem = "a process without a device cannot read the reports of a training";
            return Err(Error::Environment(problem.to_owned()));
        }

        let everywhere = p.mesh_of(&[(PROCESS, devices.len())], &devices)?;
        let sum = p
            .jit(SumLosses)
            .on(last)
            .outputs(last.replicated())
            .build()?;
        Ok(Self { everywhere, sum })
    }

    /// Returns a sharding that replicates an array over one device of each process.
    pub(super) fn everywhere(&self) -> Sharding {
        self.everywhere.replicated()
    }

    /// Issues the transfer of `figures` and of all processes' statuses to every process.
    pub(super) fn report(
        &self,
        p: &mut Program,
        figures: &MpmdArray,
        status: &ProcessReport,
    ) -> Result<ReportArrays> {
        let values = p.device_put(figures, self.everywhere.replicated())?;
        let status = status.clone();

        let processes = ShapedArray::new(&[p.processes(), WORDS], DType::I64);
        let own = self.everywhere.sharding(spec![PROCESS]);
        let statuses = p.array_from_fn(processes, &own, move |_, mut words| {
            words
                .as_mut_slice::<i64>()?
                .copy_from_slice(&status.words());
            Ok(())
        })?;
        let statuses = p.device_put(&statuses, self.everywhere.replicated())?;
        Ok(ReportArrays {
            values,
            statuses: Some(statuses),
        })
    }

    /// Returns zeros in the shape of a step's figures, on every process.
    pub(super) fn no_figures(&self, p: &mut Program) -> Result<MpmdArray> {
        let zeros = |_: &Region, mut values: ViewMut<'_>| Ok(values.fill(0.0f64)?);
        p.array_from_fn(f64s([STEP_FIGURES]), self.everywhere.replicated(), zeros)
    }

    /// Issues the sum of the losses of an evaluation, added in order. Returns the sums of losses,
    /// weights and metrics: `[SUMS]`.
    pub(super) fn sum(&self, p: &mut Program, losses: Vec<Loss<MpmdArray>>) -> Result<MpmdArray> {
        self.sum.call(p, losses)
    }
}

/// A kernel that adds up losses, their weights and their metrics.
struct SumLosses;

impl Kernel for SumLosses {
    type In = Vec<Loss<MpmdArray>>;
    type Out = MpmdArray;

    fn infer(&self, losses: &Vec<Loss<ShapedArray>>) -> Result<Signature<ShapedArray>> {
        losses.iter().try_for_each(check_metrics)?;
        let names = |loss: &Loss<ShapedArray>| loss.metrics.keys().cloned().collect::<Vec<_>>();
        if let Some(pair) = losses
            .windows(2)
            .find(|pair| names(&pair[0]) != names(&pair[1]))
        {
            let [one, other] = [names(&pair[0]), names(&pair[1])];
            let problem = format!("one microbatch has the metrics {one:?}, another {other:?}");
            return Err(Error::kernel(problem));
        }
        Ok(Signature::new(f64s([SUMS])))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        losses: Vec<Loss<View<'_>>>,
        sums: ViewMut<'_>,
    ) -> Result<()> {
        cx.on_host::<Self::In, Self::Out>(losses, sums, |_, losses, mut sums| {
            let sums = sums.as_mut_slice::<f64>()?;
            sums.fill(0.0);
            for loss in &losses {
                let figures = [&loss.sum, &loss.weight]
                    .into_iter()
                    .chain(loss.metrics.values());
                for (sum, figure) in sums.iter_mut().zip(figures) {
                    *sum += double(figure)?;
                }
            }
            Ok(())
        })
    }
}
