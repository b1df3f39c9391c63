//! Proves, before anything runs, that a [`Flow`] has no deadlock over a [`Channel`].
//!
//! The proof executes every event that can happen. `engine.rs` explains why one execution is
//! enough.

mod budget;
mod channel;
mod cycle;
mod engine;
mod lists;
mod names;
mod peak;
mod report;

#[cfg(test)]
mod tests;

pub use budget::Budget;
pub use channel::{Channel, NoChannel};
pub use cycle::{CycleWait, Deadlock, Item, Missing, TransferEnd, Why};
pub(super) use engine::{Causes, FlowEngine, ReadyItem};
pub use names::Names;
pub use peak::RankPeak;
pub(super) use peak::{MemoryLedger, Unit};
pub use report::{
    CheckLimits, LinkTraffic, Problem, ScheduleReport, check_lowered, check_schedule,
};

use super::flow::Flow;

/// The proof that a flow ends without a deadlock over a channel, for any order of events and any
/// delays.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Proof {
    /// The channel over which the flow ends.
    pub channel: Channel,
    /// The number of computed nodes.
    pub nodes: usize,
    /// The number of completed transfers.
    pub transfers: usize,
}

/// Proves that a flow ends without a deadlock over a channel.
///
/// The model: a process posts its sends and receives in order, without waiting. A lane computes its
/// nodes in order. A send waits for the node that computes its data. A node waits for the nodes
/// that it needs and the transfers that it takes. The channel defines all other waits of sends and
/// receives.
///
/// # Errors
///
/// If the flow deadlocks. The error has the cycle of waits, or the transfers whose send or receive
/// is missing.
///
/// # Panics
///
/// If numbers in the flow are out of range, or a send or receive is posted twice.
pub fn check(flow: &Flow, channel: Channel) -> Result<Proof, Deadlock> {
    let mut engine = FlowEngine::new(flow, channel, false);
    while let Some(begin) = engine.begins.pop() {
        match begin {
            ReadyItem::Node(node) => engine.end_node(node),
            ReadyItem::Transfer(transfer) => engine.end_transfer(transfer),
        }
    }
    verdict(&engine, channel)
}

/// Returns the proof if all nodes and transfers are done, else the deadlock. Called when nothing
/// more can begin in `engine`.
pub(super) fn verdict(engine: &FlowEngine, channel: Channel) -> Result<Proof, Deadlock> {
    let undone = (engine.nodes_left, engine.transfers_left);
    let missing = cycle::missing(engine);

    if !missing.is_empty() {
        return Err(Deadlock {
            channel,
            cycle: Vec::new(),
            missing,
            undone,
        });
    }

    if undone != (0, 0) {
        return Err(Deadlock {
            channel,
            cycle: cycle::shortest(engine),
            missing,
            undone,
        });
    }

    Ok(Proof {
        channel,
        nodes: engine.flow.nodes.len(),
        transfers: engine.flow.transfers.len(),
    })
}
