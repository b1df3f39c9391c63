//! The peak memory of a rank between forward and backward passes.

use crate::flow::{Flow, StepNames};
use crate::{ActionKind, Costs, StepKind};

/// The peak memory of a rank between forward and backward passes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RankPeak {
    /// Largest number of forward passes at a time that have begun and whose weight gradient has not
    /// ended.
    pub activations: u64,
    /// Largest number of bytes of activations and weight residuals at a time; 0 if the costs have
    /// no bytes.
    pub bytes: u64,
    /// The tag of the node at which activations first reach their peak.
    pub activations_at: u32,
    /// The tag of the node at which bytes first reach their peak.
    pub bytes_at: u32,
}

/// The changes of a rank's memory at the start and the end of one node.
#[derive(Clone, Copy)]
pub(crate) struct KeptChange {
    pub(crate) at_start: i64,
    pub(crate) at_end: i64,
}

/// The memory that a rank keeps between passes.
#[derive(Clone, Copy, Default)]
struct KeptMemory {
    activations: i64,
    bytes: i64,
}

impl KeptMemory {
    fn change(&mut self, activations: i64, bytes: i64) {
        self.activations += activations;
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

/// Converts a size in bytes to a signed number; sizes above `i64::MAX` become `i64::MAX`.
fn bytes(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// The unit in which the memory of a rank is counted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Unit {
    Activations,
    Bytes,
}

/// The memory that the nodes of a schedule allocate and free.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemoryLedger<'a> {
    names: StepNames,
    costs: Option<&'a Costs>,
    has_backward: bool,
}

impl<'a> MemoryLedger<'a> {
    pub(crate) fn new(flow: &Flow, names: StepNames, costs: Option<&'a Costs>) -> Self {
        let is_backward = |tag| names.step(tag).kind != StepKind::Compute(ActionKind::Forward);
        let has_backward = flow.nodes.iter().any(|node| is_backward(node.tag));
        Self {
            names,
            costs,
            has_backward,
        }
    }

    /// Returns [`Unit::Bytes`] if the costs have any bytes, else [`Unit::Activations`].
    pub(crate) fn unit(&self) -> Unit {
        let says = |costs: &Costs| costs.says_bytes();
        if self.costs.is_some_and(says) {
            Unit::Bytes
        } else {
            Unit::Activations
        }
    }

    /// Returns the changes of a rank's memory at start and end of the node with this tag.
    pub(crate) fn change(&self, tag: u32, unit: Unit) -> KeptChange {
        let step = self.names.step(tag);
        let stage = self
            .costs
            .and_then(|costs| costs.stage.get(step.stage as usize));
        let (activation, residual) = match unit {
            Unit::Activations => (1, 0),
            Unit::Bytes => stage.map_or((0, 0), |stage| {
                (
                    bytes(stage.activation_bytes),
                    bytes(stage.weight_residual_bytes),
                )
            }),
        };

        let is_rest = self.names.is_second_half(tag);
        let (at_start, at_end) = match step.kind {
            StepKind::Compute(ActionKind::Forward) if self.has_backward => (activation, 0),
            StepKind::Compute(ActionKind::Forward) => (activation, -activation),
            // An activation counts until the weight gradient has ended, but its bytes only until
            // the input gradient has ended.
            _ if unit == Unit::Activations => match step.kind {
                StepKind::Compute(ActionKind::BackwardWeight) => (0, -1),
                _ if is_rest => (0, -1),
                _ => (0, 0),
            },
            StepKind::Compute(ActionKind::BackwardWeight) => (0, -residual),
            _ if is_rest => (0, -residual),
            _ => (residual, -activation),
        };
        KeptChange { at_start, at_end }
    }

    /// Returns the peak memory of each lane, indexed by lane.
    pub(crate) fn peaks(&self, flow: &Flow) -> Vec<RankPeak> {
        let mut peaks = vec![RankPeak::default(); flow.lanes.len()];
        let mut kept = vec![KeptMemory::default(); flow.lanes.len()];
        for node in &flow.nodes {
            let lane = node.lane as usize;
            let peak = &mut peaks[lane];
            let kept = &mut kept[lane];
            let activations = self.change(node.tag, Unit::Activations);
            let bytes = self.change(node.tag, Unit::Bytes);

            kept.change(activations.at_start, bytes.at_start);
            let activations_now = u64::try_from(kept.activations).unwrap_or(0);
            let bytes_now = u64::try_from(kept.bytes).unwrap_or(0);
            if activations_now > peak.activations {
                peak.activations = activations_now;
                peak.activations_at = node.tag;
            }
            if bytes_now > peak.bytes {
                peak.bytes = bytes_now;
                peak.bytes_at = node.tag;
            }

            kept.change(activations.at_end, bytes.at_end);
        }
        peaks
    }
}
