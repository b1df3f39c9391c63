//! Simulates a [`Flow`]: computes the times of all its nodes and transfers over a [`Channel`].
//!
//! Everything happens as early as the rules of the [check](super::check) allow. Lanes run one node
//! at a time. The channel limits the number of concurrent transfers, and these do not slow each
//! other down.

mod path;
mod schedule;
mod show;

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

pub use path::LanePause;
pub use schedule::{SimulateError, SimulatedSchedule, simulate_lowered, simulate_schedule};

use super::check::{Causes, Channel, Deadlock, FlowEngine, ReadyItem, verdict};
use super::flow::Flow;

/// The durations of nodes and transfers of a [`Flow`], indexed by their numbers. They are in any
/// one unit, finite and not negative.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ItemTimes {
    /// Duration of each node's computation.
    pub nodes: Vec<f64>,
    /// Duration of each transfer from the sending to the receiving process.
    pub transfers: Vec<f64>,
}

/// A time interval, in the unit of [`ItemTimes`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct TimeSpan {
    /// Start time.
    pub start: f64,
    /// End time; for a transfer, the time at which the receiver takes it.
    pub end: f64,
}

/// The result of simulating a flow. All times are in the unit of [`ItemTimes`] and begin at 0.
#[derive(Clone, Debug)]
pub struct Simulated {
    /// The channel over which the flow was simulated.
    pub channel: Channel,
    /// The interval of each node, indexed by its number.
    pub nodes: Vec<TimeSpan>,
    /// The interval of each transfer, indexed by its number.
    pub transfers: Vec<TimeSpan>,
    /// The use of each lane's time, indexed by lane.
    pub lanes: Vec<LaneTime>,
    /// The time at which the last node or transfer ends.
    pub makespan: f64,
    causes: Causes,
}

/// The use of one lane's time, in the unit of [`ItemTimes`].
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaneTime {
    /// Start time of the lane's first node; 0 for a lane without nodes.
    pub first: f64,
    /// End time of the lane's last node; 0 for a lane without nodes.
    pub last: f64,
    /// The sum of the compute times of the lane's nodes.
    pub busy: f64,
}

impl LaneTime {
    /// Returns the time in which the lane computes nothing between its first and its last node.
    pub fn idle(&self) -> f64 {
        (self.last - self.first - self.busy).max(0.0)
    }
}

/// Simulates a flow over a channel.
///
/// # Errors
///
/// If the flow deadlocks over the channel.
///
/// # Panics
///
/// If `times` has not one duration for each node and transfer, and in the cases of
/// [`check`](super::check::check).
pub fn simulate(flow: &Flow, times: &ItemTimes, channel: Channel) -> Result<Simulated, Deadlock> {
    assert_eq!(times.nodes.len(), flow.nodes.len(), "times of nodes");
    assert_eq!(
        times.transfers.len(),
        flow.transfers.len(),
        "times of transfers"
    );

    let mut engine = FlowEngine::new(flow, channel, true);
    let mut nodes = vec![TimeSpan::default(); flow.nodes.len()];
    let mut transfers = vec![TimeSpan::default(); flow.transfers.len()];
    let mut lanes = vec![
        LaneTime {
            first: f64::INFINITY,
            ..LaneTime::default()
        };
        flow.lanes.len()
    ];

    // Running items, by their end. At equal times nodes go first, each kind in the order of
    // numbers.
    let mut under_way = BinaryHeap::new();
    // Items of zero duration need no sorting.
    let mut at_once = Vec::new();
    let count = flow.nodes.len() as u32;
    let mut now = 0.0;

    loop {
        while let Some(begin) = engine.begins.pop() {
            let (item, takes) = match begin {
                ReadyItem::Node(node) => {
                    nodes[node as usize].start = now;
                    (node, times.nodes[node as usize])
                }
                ReadyItem::Transfer(transfer) => {
                    transfers[transfer as usize].start = now;
                    (count + transfer, times.transfers[transfer as usize])
                }
            };
            if takes == 0.0 {
                at_once.push(item);
            } else {
                under_way.push(Reverse((Moment(now + takes), item)));
            }
        }

        let item = match at_once.pop() {
            Some(item) => item,
            None => {
                let Some(Reverse((Moment(at), item))) = under_way.pop() else {
                    break;
                };
                now = at;
                item
            }
        };

        if item < count {
            let span = &mut nodes[item as usize];
            span.end = now;
            let lane = &mut lanes[flow.nodes[item as usize].lane as usize];
            lane.first = lane.first.min(span.start);
            lane.last = now;
            lane.busy += times.nodes[item as usize];
            engine.end_node(item);
        } else {
            transfers[(item - count) as usize].end = now;
            engine.end_transfer(item - count);
        }
    }

    verdict(&engine, channel)?;
    for lane in &mut lanes {
        lane.first = lane.first.min(lane.last);
    }

    let causes = engine.causes.take().unwrap_or_default();
    Ok(Simulated {
        channel,
        nodes,
        transfers,
        lanes,
        makespan: now,
        causes,
    })
}

impl Simulated {
    /// Returns the makespan minus the compute time of the busiest lane.
    pub fn bubble(&self) -> f64 {
        let busiest = self.lanes.iter().map(|lane| lane.busy).fold(0.0, f64::max);
        self.makespan - busiest
    }

    /// Returns the fraction of time in which lanes compute nothing, from 0 to 1, over all lanes. It
    /// is 0 if the makespan is 0.
    pub fn bubble_share(&self) -> f64 {
        let busy: f64 = self.lanes.iter().map(|lane| lane.busy).sum();
        let whole = self.makespan * self.lanes.len() as f64;
        if whole > 0.0 { 1.0 - busy / whole } else { 0.0 }
    }
}

/// Simulates a flow over each channel. Returns (channel, makespan) for each, or the deadlock
/// instead of the makespan.
pub fn channel_costs(flow: &Flow, times: &ItemTimes) -> Vec<(Channel, Result<f64, Deadlock>)> {
    Channel::ALL
        .map(|channel| {
            (
                channel,
                simulate(flow, times, channel).map(|simulated| simulated.makespan),
            )
        })
        .into()
}

/// A time with a total order, for priority queues.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Moment(f64);

impl Eq for Moment {}

impl PartialOrd for Moment {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Moment {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}
