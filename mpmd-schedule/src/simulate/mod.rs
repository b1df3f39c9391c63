//! When everything in a [`Flow`] happens, given what nodes and transfers take and over what
//! [`Channel`].
//!
//! Everything happens as early as the rules of the [check](super::check) let it; lanes run one node
//! at a time, transfers as many at a time as the channel lets through, and none slows another down.

mod path;
mod schedule;
mod show;

#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;

pub use path::Pause;
pub use schedule::{SimulateError, SimulatedSchedule, simulate_lowered, simulate_schedule};

use super::check::{Begin, Causes, Channel, Deadlock, Engine, Protocol, Queues, verdict};
use super::flow::Flow;

/// What nodes and transfers take, by number, in any one unit; finite and not negative.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Times {
    /// To compute a node.
    pub nodes: Vec<f64>,
    /// To carry a transfer from one process to the other.
    pub transfers: Vec<f64>,
}

/// From when until when.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Span {
    /// When it begins.
    pub start: f64,
    /// When it ends; of a transfer, when it is taken.
    pub end: f64,
}

/// When what happens. Times begin at 0.
#[derive(Clone, Debug)]
pub struct Simulated {
    /// Over what.
    pub channel: Channel,
    /// When each node is computed.
    pub nodes: Vec<Span>,
    /// When each transfer is carried.
    pub transfers: Vec<Span>,
    /// By lane.
    pub lanes: Vec<LaneTime>,
    /// When the last node or transfer ends.
    pub makespan: f64,
    causes: Causes,
}

/// How a lane spends its time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LaneTime {
    /// When its first node begins.
    pub first: f64,
    /// When its last node ends.
    pub last: f64,
    /// How long it computes.
    pub busy: f64,
}

impl LaneTime {
    /// How long it computes nothing between its first and its last node.
    pub fn idle(&self) -> f64 {
        (self.last - self.first - self.busy).max(0.0)
    }
}

/// When everything happens.
///
/// # Errors
///
/// Where the flow does not come to its end over the channel.
///
/// # Panics
///
/// Where there are not as many times as nodes and transfers, and as [`check`](super::check::check)
/// does.
pub fn simulate(flow: &Flow, times: &Times, channel: Channel) -> Result<Simulated, Deadlock> {
    assert_eq!(times.nodes.len(), flow.nodes.len(), "times of nodes");
    assert_eq!(times.transfers.len(), flow.transfers.len(), "times of transfers");
    let mut engine = Engine::new(flow, channel, true);
    let mut nodes = vec![Span::default(); flow.nodes.len()];
    let mut transfers = vec![Span::default(); flow.transfers.len()];
    let mut lanes =
        vec![LaneTime { first: f64::INFINITY, ..LaneTime::default() }; flow.lanes.len()];
    // What is under way, by when it ends. Of equal times the nodes go first, and each in the order
    // of numbers.
    let mut under_way = BinaryHeap::new();
    // What takes no time need not be sorted.
    let mut at_once = Vec::new();
    let count = flow.nodes.len() as u32;
    let mut now = 0.0;
    loop {
        while let Some(begin) = engine.begins.pop() {
            let (item, takes) = match begin {
                Begin::Node(node) => {
                    nodes[node as usize].start = now;
                    (node, times.nodes[node as usize])
                }
                Begin::Transfer(transfer) => {
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
                let Some(Reverse((Moment(at), item))) = under_way.pop() else { break };
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
            engine.end_transfer(item - count);
        }
        for transfer in engine.took.drain(..) {
            transfers[transfer as usize].end = now;
        }
    }
    verdict(&engine, channel)?;
    for lane in &mut lanes {
        lane.first = lane.first.min(lane.last);
    }
    let causes = engine.causes.take().unwrap_or_default();
    Ok(Simulated { channel, nodes, transfers, lanes, makespan: now, causes })
}

impl Simulated {
    /// The time beyond what the busiest lane computes.
    pub fn bubble(&self) -> f64 {
        let busiest = self.lanes.iter().map(|lane| lane.busy).fold(0.0, f64::max);
        self.makespan - busiest
    }

    /// The share of all lanes' time in which they compute nothing; 0 where there is no time.
    pub fn bubble_share(&self) -> f64 {
        let busy: f64 = self.lanes.iter().map(|lane| lane.busy).sum();
        let whole = self.makespan * self.lanes.len() as f64;
        if whole > 0.0 { 1.0 - busy / whole } else { 0.0 }
    }
}

/// The channels of [`channel_costs`]: from the richest to the poorest.
pub const COMPARED: [Channel; 6] = [
    Channel::TAGS,
    Channel::rendezvous(Queues::PerDirection),
    Channel::rendezvous(Queues::PerPair),
    Channel { queues: Queues::TagsBounded(4), protocol: Protocol::Rendezvous },
    Channel::eager(Queues::Single, 1),
    Channel::rendezvous(Queues::Single),
];

/// What a flow would take over each of [`COMPARED`].
pub fn channel_costs(flow: &Flow, times: &Times) -> Vec<(Channel, Result<f64, Deadlock>)> {
    COMPARED
        .map(|channel| {
            (channel, simulate(flow, times, channel).map(|simulated| simulated.makespan))
        })
        .into()
}

/// A time that has an order.
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
