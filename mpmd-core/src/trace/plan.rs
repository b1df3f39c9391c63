//! What the schedule of a traced run would have taken by the costs that were measured in it.

use super::measure::CostsError;
use super::merge::Run;
use mpmd_schedule::check::Channel;
use mpmd_schedule::flow::Leaves;
use mpmd_schedule::simulate::{SimulateError, simulate_schedule};
use mpmd_schedule::timeline::Timeline;
use mpmd_schedule::{Flavour, ScheduleError, Text, TextError};

/// Why there is no plan to compare a run with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// It ran no pipeline.
    #[error("the run has no schedule")]
    NoSchedule,
    /// What was written of its schedule is no text of one.
    #[error("the schedule in the trace is not in torch's text format: {0}")]
    Text(#[from] TextError),
    /// It is the text of something else.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// There are no costs.
    #[error(transparent)]
    Costs(#[from] CostsError),
    /// Schedule and costs do not go together.
    #[error(transparent)]
    Simulate(#[from] SimulateError),
}

impl Run {
    /// One step of the run's first schedule by the run's own [costs](Self::costs): what passes and
    /// moves of the medians' length would take if nothing else did.
    ///
    /// # Errors
    ///
    /// Where the run has no pipeline, or too little of it is in the traces.
    pub fn plan(&self) -> Result<Timeline, PlanError> {
        let (name, rows) = self.schedules.first().ok_or(PlanError::NoSchedule)?;
        let schedule = Text::parse(rows, Some(Flavour::ComputeOnly))?.schedule(name.as_str())?;
        let costs = self.costs()?;
        let simulated = simulate_schedule(&schedule, &costs, Leaves::AtOnce, Channel::TAGS)?;
        Ok(simulated.timeline(name, &costs.unit))
    }

    /// The timeline, with the plan beside it where there is one.
    pub fn timeline_with_plan(&self) -> Timeline {
        match self.plan() {
            Ok(plan) => self.timeline_beside(&plan),
            Err(_) => self.timeline(),
        }
    }
}
