//! The peak memory of a rank between forward and backward passes.

use crate::flow::{Flow, StepNames};
use crate::{ActionKind, Costs, StepKind};

/// The peak memory of a rank between forward and backward passes.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct RankPeak {
    /// The largest number of forward passes that have begun and wait for the end of their weight
    /// gradient.
    pub activations: u64,
    /// The largest number of bytes of activations and weight residuals; 0 if the costs have none.
    pub bytes: u64,
    /// The tags of the nodes that first reach the peaks: (activations, bytes).
    pub at: (u32, u32),
}

/// Converts a size in bytes to a signed number; sizes above `i64::MAX` become `i64::MAX`.
fn bytes(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// The unit in which memory is counted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Unit {
    Activations,
    Bytes,
}

/// The memory that the nodes of a schedule allocate and free.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ledger<'a> {
    names: StepNames,
    costs: Option<&'a Costs>,
    has_backward: bool,
}

impl<'a> Ledger<'a> {
    pub(crate) fn new(flow: &Flow, names: StepNames, costs: Option<&'a Costs>) -> Self {
        let is_backward = |tag| names.step(tag).kind != StepKind::Compute(ActionKind::Forward);
        let has_backward = flow.nodes.iter().any(|node| is_backward(node.tag));
        Self {
            names,
            costs,
            has_backward,
        }
    }

    /// Returns bytes if the costs have any, else activations.
    pub(crate) fn unit(&self) -> Unit {
        let says = |costs: &Costs| costs.says_bytes();
        if self.costs.is_some_and(says) {
            Unit::Bytes
        } else {
            Unit::Activations
        }
    }

    /// Returns (change at the start, change at the end) of a rank's memory through the node with
    /// this tag.
    pub(crate) fn change(&self, tag: u32, unit: Unit) -> (i64, i64) {
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
        match step.kind {
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
        }
    }

    /// Returns the peak of each lane, indexed by lane.
    pub(crate) fn peaks(&self, flow: &Flow) -> Vec<RankPeak> {
        let mut peaks = vec![RankPeak::default(); flow.lanes.len()];
        let mut kept = vec![(0i64, 0i64); flow.lanes.len()];
        for node in &flow.nodes {
            let lane = node.lane as usize;
            let (peak, kept) = (&mut peaks[lane], &mut kept[lane]);
            let (activations, bytes) = (
                self.change(node.tag, Unit::Activations),
                self.change(node.tag, Unit::Bytes),
            );
            *kept = (kept.0 + activations.0, kept.1.saturating_add(bytes.0));
            let now = (
                u64::try_from(kept.0).unwrap_or(0),
                u64::try_from(kept.1).unwrap_or(0),
            );
            if now.0 > peak.activations {
                (peak.activations, peak.at.0) = (now.0, node.tag);
            }
            if now.1 > peak.bytes {
                (peak.bytes, peak.at.1) = (now.1, node.tag);
            }
            *kept = (kept.0 + activations.1, kept.1.saturating_add(bytes.1));
        }
        peaks
    }
}
