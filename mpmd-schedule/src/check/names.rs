//! What tags and processes of a flow are called.

use crate::flow::StepNames;
use crate::timeline::{Bar, Kind};
use crate::{ActionKind, StepKind};

/// What tags and processes are called: steps of a schedule, or operations and lines of a program.
pub trait Names {
    /// A node, as `2F0`.
    fn node(&self, tag: u32) -> String;

    /// A transfer, as `2SEND_F0`.
    fn transfer(&self, tag: u32) -> String;

    /// A process.
    fn process(&self, process: u32) -> String {
        format!("process {process}")
    }

    /// A lane, where it is not its process.
    fn lane(&self, lane: u32, process: u32) -> String {
        let _ = lane;
        self.process(process)
    }

    /// A node in a picture: all but its times.
    fn bar(&self, tag: u32) -> Bar {
        Bar { name: self.node(tag), ..Bar::default() }
    }

    /// A transfer in a picture: all but its times and bytes.
    fn moved(&self, tag: u32) -> Bar {
        Bar { kind: Kind::Move, name: self.transfer(tag), ..Bar::default() }
    }

    /// Whether a node is the rest of the node before it in its lane: one thing for people.
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
            StepKind::Compute(ActionKind::Forward) => Kind::Forward,
            StepKind::Compute(ActionKind::BackwardInput) => Kind::BackwardInput,
            StepKind::Compute(ActionKind::BackwardWeight) => Kind::BackwardWeight,
            StepKind::Compute(ActionKind::Backward) => Kind::Backward,
            _ => Kind::Move,
        };
        let (stage, microbatch) = (Some(step.stage), Some(step.microbatch));
        Bar { kind, name: step.to_string(), stage, microbatch, ..Bar::default() }
    }

    fn moved(&self, tag: u32) -> Bar {
        self.bar(tag)
    }

    fn is_rest(&self, tag: u32) -> bool {
        self.is_second_half(tag)
    }
}
