//! The figures of steps and evaluations, which every process reads while later steps run.
//!
//! The figures move to one device of each process. Each process adds its stop flag: its element of
//! an array that all processes get whole. So all processes read the same values, and decide alike.

use mpmd_core::aval::{DType, ShapedArray, f64s};
use mpmd_core::kernel::{Context, Kernel, Signature, View, ViewMut};
use mpmd_core::pipeline::Loss;
use mpmd_core::{Error, Jit, MpmdArray, ProcessId, Program, Result};
use mpmd_layout::spec;
use mpmd_layout::topology::{DeviceId, Mesh};

use crate::optimizer::double;
use crate::stop::StopFlag;

/// The mesh axis over the processes.
const PROCESS: &str = "process";

/// Brings the figures of steps and evaluations to all processes, with their stop flags.
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
    /// Mean loss before the update.
    pub loss: f64,
    /// Weight of the step: its number of items, such as tokens.
    pub weight: f64,
    /// Norm of the mean gradient, before clipping.
    pub norm: f64,
    /// The learning rate.
    pub rate: f64,
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
    /// Returns the mean loss. It is NaN without microbatches.
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

/// Figures and stop flags on one device of each process.
#[derive(Debug)]
pub(super) struct Figures {
    values: MpmdArray,
    flags: MpmdArray,
}

impl StepHandle {
    /// Blocks until the step has finished, and returns its figures. In a dry run, returns at once;
    /// the figures are then NaN.
    ///
    /// # Errors
    ///
    /// If an operation of the step failed.
    pub fn read(self) -> Result<StepReport> {
        let ([loss, weight, norm], stop) = self.figures.read()?;
        Ok(StepReport { step: self.step, loss, weight, norm, rate: self.rate, stop })
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
        let ([sum, weight], stop) = self.figures.read()?;
        Ok(EvaluationReport { sum, weight, stop })
    }
}

impl Figures {
    fn read<const N: usize>(self) -> Result<([f64; N], Option<i32>)> {
        let (Some(values), Some(flags)) = (self.values.to_host()?, self.flags.to_host()?) else {
            return Ok(([f64::NAN; N], None));
        };
        let values = values.as_slice::<f64>()?;
        let other = |_| Error::kernel(format!("{} figures in place of {N}", values.len()));
        let signal = flags.as_slice::<i32>()?.iter().copied().max();
        Ok((values.try_into().map_err(other)?, signal.filter(|signal| *signal != 0)))
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

    /// Issues the moves of `figures` and of the processes' stop flags to every process.
    pub(super) fn report(
        &self,
        p: &mut Program,
        figures: &MpmdArray,
        stop: &StopFlag,
    ) -> Result<Figures> {
        let values = p.device_put(figures, self.everywhere.replicated())?;
        let stop = stop.clone();
        let processes = ShapedArray::new(&[p.processes()], DType::I32);
        let own = self.everywhere.sharding(spec![PROCESS]);
        let flags = p.array_from_fn(processes, &own, move |_, mut flag| {
            Ok(flag.fill(stop.signal().unwrap_or(0))?)
        })?;
        let flags = p.device_put(&flags, self.everywhere.replicated())?;
        Ok(Figures { values, flags })
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
        _: &mut Context<'_>,
        losses: Vec<Loss<View<'_>>>,
        mut sums: ViewMut<'_>,
    ) -> Result<()> {
        let (mut sum, mut weight) = (0.0, 0.0);
        for loss in &losses {
            sum += double(&loss.sum)?;
            weight += double(&loss.weight)?;
        }
        sums.as_mut_slice()?.copy_from_slice(&[sum, weight]);
        Ok(())
    }
}
