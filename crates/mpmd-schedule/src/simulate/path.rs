//! Explains the times of a simulation: the cause of each pause of a lane.

use super::Simulated;
use crate::check::{Item, Names};
use crate::flow::Flow;

const NONE: u32 = u32::MAX;

/// An interval in which a lane computes nothing, with its cause.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LanePause {
    /// Start time, in the unit of the simulated times.
    pub start: f64,
    /// End time, in the unit of the simulated times.
    pub end: f64,
    /// The number of the node that begins at the end of the pause. `None` for the pause after the
    /// lane's last node.
    pub node: Option<u32>,
    /// The last item that the node waited for: a node, or a transfer that it
    /// [receives](Item::Receive). `None` for the pause after the lane's last node.
    pub waits_for: Option<Item>,
}

impl Simulated {
    /// Returns the pauses of each lane between 0 and the makespan, in order. `flow` must be the
    /// flow that was simulated.
    pub fn pauses(&self, flow: &Flow) -> Vec<Vec<LanePause>> {
        let mut until = vec![0.0; flow.lanes.len()];
        let mut pauses: Vec<Vec<LanePause>> = vec![Vec::new(); flow.lanes.len()];
        let count = flow.nodes.len() as u32;

        for (number, (node, span)) in flow.nodes.iter().zip(&self.nodes).enumerate() {
            let lane = node.lane as usize;
            if span.start > until[lane] {
                let cause = self.causes.node[number];
                let waits_for = match cause {
                    NONE => None,
                    node if node < count => Some(Item::Node(node)),
                    transfer => Some(Item::Receive(transfer - count)),
                };
                let start = until[lane];
                let end = span.start;
                pauses[lane].push(LanePause {
                    start,
                    end,
                    node: Some(number as u32),
                    waits_for,
                });
            }
            until[lane] = span.end;
        }

        for (pauses, until) in pauses.iter_mut().zip(until) {
            if self.makespan > until {
                pauses.push(LanePause {
                    start: until,
                    end: self.makespan,
                    node: None,
                    waits_for: None,
                });
            }
        }
        pauses
    }

    /// Describes the cause of a pause in words: the node that computed the received data, or the
    /// operation that delayed the transfer.
    pub fn waited_for(&self, flow: &Flow, pause: &LanePause, names: &dyn Names) -> String {
        let count = flow.nodes.len() as u32;
        let item = |item: u32| {
            if item < count {
                let process = names.process(flow.process_of(item));
                return format!("{} of {process}", names.node(flow.nodes[item as usize].tag));
            }
            let transfer = flow.transfers[(item - count) as usize];
            format!(
                "{} of {}",
                names.transfer(transfer.tag),
                names.process(transfer.from)
            )
        };

        match (pause.node, pause.waits_for) {
            (None, _) => "nothing more to do".to_owned(),
            (_, None) => "nothing".to_owned(),
            (_, Some(Item::Node(node))) => item(node),
            (_, Some(Item::Send(transfer) | Item::Receive(transfer))) => {
                let cause = self.causes.transfer[transfer as usize];
                let sent = item(count + transfer);
                match cause {
                    NONE => sent,
                    cause if cause == flow.transfers[transfer as usize].after => item(cause),
                    cause => format!("{sent}, held up by {}", item(cause)),
                }
            }
        }
    }
}
