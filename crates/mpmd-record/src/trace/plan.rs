//! The plan of a traced run: its schedule, simulated with the costs that were measured in the run.

use super::measure::CostsError;
use super::merge::TracedRun;
use mpmd_schedule::check::Channel;
use mpmd_schedule::flow::Leaves;
use mpmd_schedule::simulate::{SimulateError, simulate_schedule};
use mpmd_schedule::timeline::Timeline;
use mpmd_schedule::{Dialect, ScheduleError, ScheduleText, TextError};

/// The reason that a run has no plan to compare with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoPlan {
    /// The run has no pipeline.
    #[error("the run has no schedule")]
    NoSchedule,
    /// The schedule in the trace is not in torch's text format.
    #[error("the schedule in the trace is not in torch's text format: {0}")]
    Text(#[from] TextError),
    /// The text is not a valid schedule.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The costs of the stages cannot be computed from the run.
    #[error(transparent)]
    Costs(#[from] CostsError),
    /// Schedule and costs do not fit together.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
}

impl TracedRun {
    /// Simulates one step of the run's first schedule with the run's own [costs](Self::costs). In
    /// the simulated step, every pass and move takes its median time and nothing else causes
    /// delays.
    ///
    /// # Errors
    ///
    /// If the run has no pipeline, or the traces lack data for its costs.
    pub fn plan(&self) -> Result<Timeline, NoPlan> {
        let (name, rows) = self.schedules.first().ok_or(NoPlan::NoSchedule)?;
        let schedule =
            ScheduleText::parse(rows, Some(Dialect::ComputeOnly))?.schedule(name.as_str())?;
        let costs = self.costs()?;
        let simulated = simulate_schedule(&schedule, &costs, Leaves::AtOnce, Channel::Tags)?;
        Ok(simulated.timeline(name, &costs.unit))
    }

    /// Returns the run's timeline with the planned times, or without them if there is no plan.
    pub fn timeline_with_plan(&self) -> Timeline {
        match self.plan() {
            Ok(plan) => self.timeline_beside(&plan),
            Err(_) => self.timeline(),
        }
    }
}
