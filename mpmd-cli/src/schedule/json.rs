//! A schedule as JSON.

use anyhow::Result;
use mpmd_core::pipeline::simulate::SimulatedSchedule;
use mpmd_core::pipeline::{Flavour, Text};
use serde::Serialize;

use super::source::Source;

/// All that is known of a schedule. Times are in `unit`, lists are by rank.
#[derive(Serialize)]
struct Shown<'a> {
    schedule: &'a str,
    ranks: usize,
    microbatches: usize,
    stages: usize,
    /// `loop`, `V` or `custom`.
    placement: &'a str,
    rank_of_stage: &'a [usize],
    /// As in torch's text.
    rows: Vec<Vec<String>>,
    /// As in a sidecar.
    hash: String,
    unit: String,
    makespan: f64,
    /// The time beyond what the busiest rank computes.
    bubble: f64,
    /// The share of all ranks' time in which they compute nothing.
    bubble_share: f64,
    /// Forward passes begun whose gradients are not all computed, at most.
    activations: Vec<usize>,
    /// The same in bytes, where costs say how many.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory_bytes: Option<Vec<f64>>,
    /// Time between a rank's first and last action in which it computes nothing.
    idle: Vec<f64>,
}

pub(super) fn json(source: &Source, simulated: &SimulatedSchedule) -> Result<String> {
    let schedule = &source.schedule;
    let peak = |curve: &Vec<mpmd_core::trace::MemoryPoint>| {
        curve.iter().map(|at| at.used).fold(0.0, f64::max)
    };
    let shown = Shown {
        schedule: schedule.name(),
        ranks: schedule.ranks(),
        microbatches: schedule.microbatches(),
        stages: schedule.stages(),
        placement: schedule.placement().name(),
        rank_of_stage: schedule.ranks_of_stages(),
        rows: (0..schedule.ranks()).map(|rank| schedule.cells(rank)).collect(),
        hash: format!("{:016x}", Text::of(schedule, Flavour::ComputeOnly)?.hash()),
        unit: source.costs().unit,
        makespan: simulated.simulated.makespan,
        bubble: simulated.simulated.bubble(),
        bubble_share: simulated.simulated.bubble_share(),
        activations: super::activations(schedule),
        memory_bytes: simulated
            .memory_is_bytes
            .then(|| simulated.memory.iter().map(peak).collect()),
        idle: simulated.simulated.lanes.iter().map(|lane| lane.idle()).collect(),
    };
    Ok(serde_json::to_string(&shown)? + "\n")
}
