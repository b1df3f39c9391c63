//! A schedule as JSON.

use anyhow::Result;
use mpmd_schedule::simulate::SimulatedSchedule;
use mpmd_schedule::{Dialect, ScheduleText};
use serde::Serialize;

use super::source::ScheduleSource;

/// The JSON form of a schedule. Times are in `unit`; lists are by rank.
#[derive(Serialize)]
struct ScheduleJson<'a> {
    schedule: &'a str,
    ranks: usize,
    microbatches: usize,
    stages: usize,
    /// The placement of stages on ranks: `loop`, `V` or `custom`.
    placement: &'a str,
    rank_of_stage: &'a [usize],
    /// The cells of torch's text, such as `0F1`, by rank.
    rows: Vec<Vec<String>>,
    /// The hash of the computations as text, in hexadecimal.
    hash: String,
    unit: String,
    makespan: f64,
    /// The makespan minus the compute time of the busiest rank.
    bubble: f64,
    /// The share (0 to 1) of all ranks' time in which they compute nothing.
    bubble_share: f64,
    /// The peak number of microbatches between forward and backward pass, by rank.
    activations: Vec<usize>,
    /// The peak memory of activations in bytes, by rank; left out if the costs have no bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<Vec<f64>>,
    /// The time without computation between a rank's first and last action, by rank.
    idle: Vec<f64>,
}

pub(super) fn json(source: &ScheduleSource, simulated: &SimulatedSchedule) -> Result<String> {
    let schedule = &source.schedule;
    let peak = |curve: &Vec<mpmd_schedule::timeline::MemoryPoint>| {
        curve.iter().map(|at| at.used).fold(0.0, f64::max)
    };

    let shown = ScheduleJson {
        schedule: schedule.name(),
        ranks: schedule.ranks(),
        microbatches: schedule.microbatches(),
        stages: schedule.stages(),
        placement: schedule.placement().name(),
        rank_of_stage: schedule.ranks_of_stages(),
        rows: (0..schedule.ranks())
            .map(|rank| schedule.cells(rank))
            .collect(),
        hash: format!(
            "{:016x}",
            ScheduleText::of(schedule, Dialect::ComputeOnly)?.hash()
        ),
        unit: source.costs().unit,
        makespan: simulated.simulated.makespan,
        bubble: simulated.simulated.bubble(),
        bubble_share: simulated.simulated.bubble_share(),
        activations: super::activations(schedule),
        memory_bytes: simulated
            .memory_is_bytes
            .then(|| simulated.memory.iter().map(peak).collect()),
        idle: simulated
            .simulated
            .lanes
            .iter()
            .map(|lane| lane.idle())
            .collect(),
    };
    Ok(serde_json::to_string(&shown)? + "\n")
}
