//! Names for the tags and processes of a flow.

use crate::flow::StepNames;
use crate::timeline::{Bar, BarKind};
use crate::{ActionKind, StepKind};

/// Names for the tags and processes of a flow: steps of a schedule, or operations and lines of a
/// program.
pub trait Names {
    /// Returns the name of a node, such as `2F0`.
    fn node(&self, tag: u32) -> String;

    /// Returns the name of a transfer, such as `2SEND_F0`.
    fn transfer(&self, tag: u32) -> String;

    /// Returns the name of a process.
    fn process(&self, process: u32) -> String {
        format!("process {process}")
    }

    /// Returns the name of a lane. Default: the name of its process.
    fn lane(&self, lane: u32, process: u32) -> String {
        let _ = lane;
        self.process(process)
    }

    /// Returns the bar of a node in a timeline, without times.
    fn bar(&self, tag: u32) -> Bar {
        Bar {
            name: self.node(tag),
            ..Bar::default()
        }
    }

    /// Returns the bar of a transfer in a timeline, without times and bytes.
    fn moved(&self, tag: u32) -> Bar {
        Bar {
            kind: BarKind::Move,
            name: self.transfer(tag),
            ..Bar::default()
        }
    }

    /// Returns true if a node continues the previous node of its lane. Timelines show both as one
    /// bar.
    fn is_rest(&self, tag: u32) -> bool {
        let _ = tag;
        false
    }
}

impl Names for StepNames {
    fn node(&self, tag: u32) -> String {
        self.step(tag).to_string()
    }

    fn transfer(&self, tag: u32) -> String {
        self.step(tag).to_string()
    }

    fn process(&self, process: u32) -> String {
        format!("rank {process}")
    }

    fn bar(&self, tag: u32) -> Bar {
        let step = self.step(tag);
        let kind = match step.kind {
            StepKind::Compute(ActionKind::Forward) => BarKind::Forward,
            StepKind::Compute(ActionKind::BackwardInput) => BarKind::BackwardInput,
            StepKind::Compute(ActionKind::BackwardWeight) => BarKind::BackwardWeight,
            StepKind::Compute(ActionKind::Backward) => BarKind::Backward,
            _ => BarKind::Move,
        };

        let stage = Some(step.stage);
        let microbatch = Some(step.microbatch);
        Bar {
            kind,
            name: step.to_string(),
            stage,
            microbatch,
            ..Bar::default()
        }
    }

    fn moved(&self, tag: u32) -> Bar {
        self.bar(tag)
    }

    fn is_rest(&self, tag: u32) -> bool {
        self.is_second_half(tag)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_have_the_names_of_their_nodes_and_transfers() {
        struct Numbers;
        impl Names for Numbers {
            fn node(&self, tag: u32) -> String {
                format!("n{tag}")
            }

            fn transfer(&self, tag: u32) -> String {
                format!("t{tag}")
            }
        }
        let bars = [Numbers.bar(3), Numbers.moved(4)];
        assert_eq!(bars.each_ref().map(|bar| bar.name.as_str()), ["n3", "t4"]);
        assert_eq!(bars.map(|bar| bar.kind == BarKind::Move), [false, true]);
        assert_eq!(Numbers.lane(7, 2), "process 2");
        assert!(!Numbers.is_rest(3));
    }
}
