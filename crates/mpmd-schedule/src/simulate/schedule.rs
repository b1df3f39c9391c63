//! Simulates a schedule with the costs of its stages.

use super::{ItemTimes, Simulated, channel_costs, simulate};
use crate::check::{Channel, Deadlock, MemoryLedger, Unit};
use crate::flow::{Flow, FlowError, Leaves, StepNames};
use crate::timeline::{MemoryPoint, Timeline};
use crate::{ActionKind, Costs, Lowered, Schedule, StepKind};

/// An error of a schedule's simulation. The caller is at fault.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SimulateError {
    /// The rows of the schedule do not give a valid flow.
    #[error(transparent)]
    Flow(#[from] FlowError),
    /// The costs are for another number of stages than the schedule has.
    #[error("the costs are of {found} stages, the schedule has {expected}")]
    Stages {
        /// Number of stages of the schedule.
        expected: usize,
        /// Number of stages of the costs.
        found: usize,
    },
    /// A cost is negative, infinite or not a number.
    #[error("the cost {cost} of stage {stage} is not a finite, non-negative time")]
    Cost {
        /// The stage with the invalid cost, from 0.
        stage: usize,
        /// The invalid cost.
        cost: f64,
    },
    /// The schedule deadlocks over the channel.
    #[error("the schedule deadlocks over channel {}: {}", .0.channel, lines(.0))]
    Deadlock(Deadlock),
}

fn lines(deadlock: &Deadlock) -> String {
    format!(
        "{} wait for each other, {} are missing",
        deadlock.cycle.len(),
        deadlock.missing.len()
    )
}

/// A simulated schedule, with the flow and times that it was simulated from.
#[derive(Clone, Debug)]
pub struct SimulatedSchedule {
    /// The flow of the schedule.
    pub flow: Flow,
    /// The decoder of the flow's tags, which names the step of each node and transfer.
    pub names: StepNames,
    /// The durations of the flow's nodes and transfers.
    pub times: ItemTimes,
    /// The times that the simulation gives.
    pub simulated: Simulated,
    /// For each rank, the memory that it keeps between forward and backward passes. Each point
    /// holds until the next.
    pub memory: Vec<Vec<MemoryPoint>>,
    /// True if `memory` is in bytes. False if it counts activations: forward passes whose weight
    /// gradient has not ended.
    pub memory_is_bytes: bool,
}

/// Simulates a schedule with its transfers in the order of [`lower()`](crate::lower()).
///
/// A `B` takes the time of an `I`, then that of a `W`. `leaves` defines the moment at which a rank
/// can send its results. A transfer takes the time for sending in `costs`; by default none. Does no
/// I/O.
///
/// # Errors
///
/// If the schedule is too large, if the costs are for another number of stages or invalid, or if
/// the schedule deadlocks over the channel.
pub fn simulate_schedule(
    schedule: &Schedule,
    costs: &Costs,
    leaves: Leaves,
    channel: Channel,
) -> Result<SimulatedSchedule, SimulateError> {
    let rows = crate::lower::lower(schedule).map_err(FlowError::from)?;
    simulate_lowered(&rows, costs, leaves, channel)
}

/// Simulates rows that contain their own sends and receives, otherwise like [`simulate_schedule`].
///
/// # Errors
///
/// The errors of [`simulate_schedule`], and an error if the steps are not a valid flow.
pub fn simulate_lowered(
    rows: &Lowered,
    costs: &Costs,
    leaves: Leaves,
    channel: Channel,
) -> Result<SimulatedSchedule, SimulateError> {
    let expected = rows
        .steps
        .iter()
        .flatten()
        .map(|step| step.stage as usize + 1)
        .max()
        .unwrap_or(0);
    if costs.stage.len() != expected {
        return Err(SimulateError::Stages {
            expected,
            found: costs.stage.len(),
        });
    }

    for (stage, cost) in costs.stage.iter().enumerate() {
        let all = [
            cost.forward,
            cost.backward_input,
            cost.backward_weight,
            cost.send_forward,
            cost.send_backward,
        ];
        if let Some(cost) = all
            .into_iter()
            .find(|cost| !cost.is_finite() || *cost < 0.0)
        {
            return Err(SimulateError::Cost { stage, cost });
        }
    }

    let mut flow = Flow::of_lowered(rows, leaves)?;
    let names = StepNames::of_lowered(&rows.steps);
    names.weigh(&mut flow, costs);
    let times = times(&flow, names, costs);
    let simulated = simulate(&flow, &times, channel).map_err(SimulateError::Deadlock)?;

    let ledger = MemoryLedger::new(&flow, names, Some(costs));
    let memory_is_bytes = ledger.unit() == Unit::Bytes;
    let memory = memory(&flow, &ledger, &simulated);
    Ok(SimulatedSchedule {
        flow,
        names,
        times,
        simulated,
        memory,
        memory_is_bytes,
    })
}

impl SimulatedSchedule {
    /// Simulates the same schedule over each channel. Returns (channel, makespan) for each, or the
    /// deadlock instead of the makespan.
    pub fn channel_costs(&self) -> Vec<(Channel, Result<f64, Deadlock>)> {
        channel_costs(&self.flow, &self.times)
    }

    /// Converts the simulation to a timeline with bars, transfers, gaps and memory. `unit` is the
    /// unit of the costs: `s` or `unit`.
    pub fn timeline(&self, title: &str, unit: &str) -> Timeline {
        let mut timeline = self
            .simulated
            .timeline(&self.flow, &self.names, title, unit);
        timeline.memory_unit = if self.memory_is_bytes {
            "B"
        } else {
            "activations"
        }
        .to_owned();

        for (row, memory) in timeline.rows.iter_mut().zip(&self.memory) {
            row.memory.clone_from(memory);
        }

        timeline
    }
}

fn times(flow: &Flow, names: StepNames, costs: &Costs) -> ItemTimes {
    let node = |tag| {
        let step = names.step(tag);
        let stage = costs.stage[step.stage as usize];
        match step.kind {
            StepKind::Compute(ActionKind::Forward) => stage.forward,
            StepKind::Compute(ActionKind::BackwardWeight) => stage.backward_weight,
            _ if names.is_second_half(tag) => stage.backward_weight,
            _ => stage.backward_input,
        }
    };

    let transfer = |tag| {
        let step = names.step(tag);
        let stage = costs.stage[step.stage as usize];
        if step.kind == StepKind::SendForward {
            stage.send_forward
        } else {
            stage.send_backward
        }
    };

    ItemTimes {
        nodes: flow.nodes.iter().map(|of| node(of.tag)).collect(),
        transfers: flow.transfers.iter().map(|of| transfer(of.tag)).collect(),
    }
}

fn memory(flow: &Flow, ledger: &MemoryLedger, simulated: &Simulated) -> Vec<Vec<MemoryPoint>> {
    let unit = ledger.unit();
    let mut curves: Vec<Vec<MemoryPoint>> = vec![vec![MemoryPoint::default()]; flow.lanes.len()];
    let mut kept = vec![0_i64; flow.lanes.len()];

    for (node, span) in flow.nodes.iter().zip(&simulated.nodes) {
        let lane = node.lane as usize;
        let change = ledger.change(node.tag, unit);
        for (at, change) in [(span.start, change.at_start), (span.end, change.at_end)] {
            if change != 0 {
                // The costs may come from a file and have any values.
                kept[lane] = kept[lane].saturating_add(change);
                curves[lane].push(MemoryPoint {
                    at,
                    used: kept[lane] as f64,
                });
            }
        }
    }
    curves
}
