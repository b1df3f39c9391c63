//! The figures of steps and evaluations, which every process reads while later steps run.
//!
//! The figures move to one device of each process. Each process adds its status: its row of an
//! array that all processes get whole. So all processes read the same values, and decide alike.

use std::time::Instant;

use mpmd_core::aval::{DType, ShapedArray, f64s};
use mpmd_core::kernel::{Context, Kernel, Signature, View, ViewMut};
use mpmd_core::pipeline::Loss;
use mpmd_core::{Error, Jit, MpmdArray, ProcessId, Program, Result};
use mpmd_layout::region::Region;
use mpmd_layout::sharding::Sharding;
use mpmd_layout::spec;
use mpmd_layout::topology::{DeviceId, Mesh};

use crate::checkpoint::{Phase, SaveStatus};
use crate::optimizer::{FIGURES, double};
use crate::stop::StopFlag;

/// The mesh axis over the processes.
const PROCESS: &str = "process";
/// Number of words of a [`Status`].
const WORDS: usize = 4;

/// Brings the figures of steps and evaluations to all processes, with their statuses.
#[derive(Debug)]
pub(super) struct Reporter {
    /// One device of each process.
    everywhere: Mesh,
    sum: Jit<SumLosses>,
}

/// The figures of a step. They are the same on every process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepReport {
    /// Number of this update, counted from 1.
    pub step: u64,
    /// Mean loss before the update. It is 0 if the weight is 0.
    pub loss: f64,
    /// Weight of the step: its number of items, such as tokens.
    pub weight: f64,
    /// Norm of the mean gradient, before clipping.
    pub norm: f64,
    /// The learning rate.
    pub rate: f64,
    /// Seconds since the trainer was created, by the clock of process 0, when the step ended.
    pub seconds: f64,
    /// The signal that asked a process to stop before or in this step, if any.
    pub stop: Option<i32>,
}

/// The figures of an evaluation. They are the same on every process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EvaluationReport {
    /// Sum of the losses.
    pub sum: f64,
    /// Weight of all microbatches: their number of items, such as tokens.
    pub weight: f64,
    /// The signal that asked a process to stop before or in the evaluation, if any.
    pub stop: Option<i32>,
}

impl EvaluationReport {
    /// Returns the mean loss. It is NaN if the weight is 0.
    pub fn loss(&self) -> f64 {
        self.sum / self.weight
    }
}

/// The figures of an issued step, which may still be running. Dropping it does not block.
#[derive(Debug)]
#[must_use = "a step's failure is seen by reading its report"]
pub struct StepHandle {
    pub(super) step: u64,
    pub(super) rate: f64,
    pub(super) figures: Figures,
}

/// The figures of an issued evaluation, which may still be running. Dropping it does not block.
#[derive(Debug)]
#[must_use = "an evaluation's result is read from its report"]
pub struct EvaluationHandle {
    pub(super) figures: Figures,
}

/// Figures and statuses on one device of each process.
#[derive(Debug)]
pub(super) struct Figures {
    values: MpmdArray,
    /// `i64`s, `[processes, WORDS]`: for each process the words of its [`Status`]. `None` for
    /// figures of an earlier epoch.
    statuses: Option<MpmdArray>,
}

/// The part of a process in every report.
#[derive(Clone, Debug)]
pub(super) struct Status {
    pub(super) stop: StopFlag,
    /// The time when the trainer was created.
    pub(super) start: Instant,
    pub(super) save: SaveStatus,
}

impl Default for Status {
    /// Creates the status of a trainer that is created now.
    fn default() -> Self {
        let (stop, save) = (StopFlag::default(), SaveStatus::default());
        Self { stop, start: Instant::now(), save }
    }
}

impl Status {
    /// Returns the signal that this process got, or zero; the nanoseconds since the start; and the
    /// words of the last save.
    fn words(&self) -> [i64; WORDS] {
        let nanos = i64::try_from(self.start.elapsed().as_nanos()).unwrap_or(i64::MAX);
        let [step, phase] = self.save.words();
        [self.stop.signal().unwrap_or(0).into(), nanos, step, phase]
    }
}

/// The statuses of all processes in a report.
struct Statuses {
    stop: Option<i32>,
    /// Seconds since the start, by the clock of process 0.
    seconds: f64,
    /// The last save of each process, and its phase.
    saves: Vec<(u64, Phase)>,
}

/// A step's figures, the last stage with a gradient that is not finite, and the last save of each
/// process with its phase.
pub(super) type AllOfReport = (StepReport, Option<usize>, Vec<(u64, Phase)>);

impl StepHandle {
    /// Blocks until the step has finished, and returns its figures. In a dry run, returns at once;
    /// the figures are then NaN.
    ///
    /// # Errors
    ///
    /// If an operation of the step failed.
    pub fn read(self) -> Result<StepReport> {
        Ok(self.read_all()?.0)
    }

    /// As [`StepHandle::read`], with what the trainer alone looks at.
    pub(super) fn read_all(self) -> Result<AllOfReport> {
        let (step, rate) = (self.step, self.rate);
        let (figures, Statuses { stop, seconds, saves }) = self.figures.read::<FIGURES>()?;
        let [loss, weight, norm, stage] = figures;
        let stage = (stage >= 0.0).then_some(stage as usize);
        Ok((StepReport { step, loss, weight, norm, rate, seconds, stop }, stage, saves))
    }
}

impl EvaluationHandle {
    /// Blocks until the evaluation has finished, and returns its figures. In a dry run, returns at
    /// once; the figures are then NaN.
    ///
    /// # Errors
    ///
    /// If an operation of the evaluation failed.
    pub fn read(self) -> Result<EvaluationReport> {
        let ([sum, weight], statuses) = self.figures.read()?;
        Ok(EvaluationReport { sum, weight, stop: statuses.stop })
    }
}

impl Figures {
    /// Returns figures that a commit had. Nobody stops by them, and they have no time.
    pub(super) fn of_recent(values: MpmdArray) -> Self {
        Self { values, statuses: None }
    }

    /// The figures on one device of each process.
    pub(super) fn values(&self) -> &MpmdArray {
        &self.values
    }

    fn read<const N: usize>(self) -> Result<([f64; N], Statuses)> {
        let none = Statuses { stop: None, seconds: f64::NAN, saves: Vec::new() };
        let Some(values) = self.values.to_host()? else { return Ok(([f64::NAN; N], none)) };
        let values = values.as_slice::<f64>()?;
        let other = |_| Error::kernel(format!("{} figures in place of {N}", values.len()));
        let statuses = self.statuses.map(|statuses| statuses.to_host()).transpose()?.flatten();
        let Some(statuses) = statuses else { return Ok((values.try_into().map_err(other)?, none)) };
        let (statuses, _) = statuses.as_slice::<i64>()?.as_chunks::<WORDS>();
        let signal = statuses.iter().map(|[signal, ..]| *signal as i32).max();
        let seconds = statuses.first().map_or(f64::NAN, |[_, nanos, ..]| *nanos as f64 * 1e-9);
        let saves = statuses.iter().map(|[.., step, phase]| SaveStatus::read([*step, *phase]));
        let stop = signal.filter(|signal| *signal != 0);
        Ok((values.try_into().map_err(other)?, Statuses { stop, seconds, saves: saves.collect() }))
    }
}

impl Reporter {
    /// Creates a reporter. `last` is the mesh of the losses.
    pub(super) fn new(p: &Program, last: &Mesh) -> Result<Self> {
        let devices: Vec<DeviceId> = (0..p.processes() as u32)
            .filter_map(|process| p.topology().devices_of(ProcessId(process)).first().copied())
            .collect();
        if devices.len() != p.processes() {
            let problem = "a process without a device cannot read the reports of a training";
            return Err(Error::Environment(problem.to_owned()));
        }
        let everywhere = p.mesh_of(&[(PROCESS, devices.len())], &devices)?;
        let sum = p.jit(SumLosses).on(last).outputs(last.replicated()).build()?;
        Ok(Self { everywhere, sum })
    }

    /// Returns the sharding that gives an array to one device of each process.
    pub(super) fn everywhere(&self) -> Sharding {
        self.everywhere.replicated()
    }

    /// Issues the moves of `figures` and of the processes' statuses to every process.
    pub(super) fn report(
        &self,
        p: &mut Program,
        figures: &MpmdArray,
        status: &Status,
    ) -> Result<Figures> {
        let values = p.device_put(figures, self.everywhere.replicated())?;
        let status = status.clone();
        let processes = ShapedArray::new(&[p.processes(), WORDS], DType::I64);
        let own = self.everywhere.sharding(spec![PROCESS]);
        let statuses = p.array_from_fn(processes, &own, move |_, mut words| {
            words.as_mut_slice::<i64>()?.copy_from_slice(&status.words());
            Ok(())
        })?;
        let statuses = p.device_put(&statuses, self.everywhere.replicated())?;
        Ok(Figures { values, statuses: Some(statuses) })
    }

    /// Returns the place of a step's figures on every process.
    pub(super) fn no_figures(&self, p: &mut Program) -> Result<MpmdArray> {
        let zeros = |_: &Region, mut values: ViewMut<'_>| Ok(values.fill(0.0f64)?);
        p.array_from_fn(f64s([FIGURES]), &self.everywhere.replicated(), zeros)
    }

    /// Issues the sum of the losses of an evaluation, in order. Returns the sums of losses and
    /// weights, `[2]`.
    pub(super) fn sum(&self, p: &mut Program, losses: Vec<Loss<MpmdArray>>) -> Result<MpmdArray> {
        self.sum.call(p, losses)
    }
}

/// Kernel that adds losses and their weights.
struct SumLosses;

impl Kernel for SumLosses {
    type In = Vec<Loss<MpmdArray>>;
    type Out = MpmdArray;

    fn infer(&self, _: &Vec<Loss<ShapedArray>>) -> Result<Signature<ShapedArray>> {
        Ok(Signature::new(f64s([2])))
    }

    fn run(
        &self,
        cx: &mut Context<'_>,
        losses: Vec<Loss<View<'_>>>,
        sums: ViewMut<'_>,
    ) -> Result<()> {
        cx.on_host::<Self::In, Self::Out>(losses, sums, |_, losses, mut sums| {
            let (mut sum, mut weight) = (0.0, 0.0);
            for loss in &losses {
                sum += double(&loss.sum)?;
                weight += double(&loss.weight)?;
            }
            sums.as_mut_slice()?.copy_from_slice(&[sum, weight]);
            Ok(())
        })
    }
}
