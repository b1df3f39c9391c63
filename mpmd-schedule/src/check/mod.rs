//! Whether a [`Flow`] comes to its end over a [`Channel`], proved before it runs.
//!
//! The proof is an execution in which whatever can happen does: why one decides is said in
//! `engine.rs`.

mod channel;
mod cycle;
mod engine;
mod names;
mod peak;
mod report;
mod windows;

#[cfg(test)]
mod tests;

pub use channel::{Channel, NoChannel, Protocol, Queues};
pub use cycle::{Deadlock, Item, Missing, Wait, Why};
pub(super) use engine::{Begin, Causes, Engine};
pub use names::Names;
pub use peak::Peak;
pub(super) use peak::{Ledger, Unit};
pub use report::{Budget, Limits, Link, Problem, Report, check_lowered, check_schedule};

use super::flow::Flow;

/// That a flow comes to its end over a channel, in whatever order things happen, with whatever
/// delays.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Proof {
    /// The channel.
    pub channel: Channel,
    /// How many nodes are computed.
    pub nodes: usize,
    /// How many transfers are made.
    pub transfers: usize,
}

/// Proves that a flow comes to its end over a channel.
///
/// The model: processes post their ends of transfers in order and never wait for that; a lane
/// computes its nodes in order; a send waits for the node that makes what it sends, a node for what
/// it needs and takes; the channel decides what else ends wait for.
///
/// # Errors
///
/// Where it does not: who waits for whom, or what has no other side.
///
/// # Panics
///
/// Where the flow's numbers are out of range, or an end of a transfer is posted twice.
pub fn check(flow: &Flow, channel: Channel) -> Result<Proof, Deadlock> {
    let mut engine = Engine::new(flow, channel, false);
    while let Some(begin) = engine.begins.pop() {
        match begin {
            Begin::Node(node) => engine.end_node(node),
            Begin::Transfer(transfer) => engine.end_transfer(transfer),
        }
    }
    verdict(&engine, channel)
}

/// What an execution in which nothing more can begin has shown.
pub(super) fn verdict(engine: &Engine, channel: Channel) -> Result<Proof, Deadlock> {
    let undone = (engine.nodes_left, engine.transfers_left);
    let missing = cycle::missing(engine);
    if !missing.is_empty() {
        return Err(Deadlock { channel, cycle: Vec::new(), missing, undone });
    }
    if undone != (0, 0) {
        return Err(Deadlock { channel, cycle: cycle::shortest(engine), missing, undone });
    }
    Ok(Proof { channel, nodes: engine.flow.nodes.len(), transfers: engine.flow.transfers.len() })
}
