//! How much memory a rank needs for what lies between forward and backward passes.

use crate::flow::{Flow, StepNames};
use crate::{ActionKind, Costs, StepKind};

/// The most that a rank keeps at a time.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct Peak {
    /// Forward passes that have begun and whose weight gradient has not ended.
    pub activations: u64,
    /// Bytes of activations and of what weight gradients need; 0 where costs do not say.
    pub bytes: u64,
    /// The tag of the node at which the most activations, and the most bytes, are there first.
    pub at: (u32, u32),
}

/// As a number that can go down.
fn bytes(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// What is counted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Unit {
    Activations,
    Bytes,
}

/// What nodes of a schedule keep and give back.
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
        Self { names, costs, has_backward }
    }

    /// Bytes where the costs say any, else activations.
    pub(crate) fn unit(&self) -> Unit {
        let says = |costs: &Costs| costs.says_bytes();
        if self.costs.is_some_and(says) { Unit::Bytes } else { Unit::Activations }
    }

    /// What is kept more when a node begins, and when it ends.
    pub(crate) fn change(&self, tag: u32, unit: Unit) -> (i64, i64) {
        let step = self.names.step(tag);
        let stage = self.costs.and_then(|costs| costs.stage.get(step.stage as usize));
        let (activation, residual) = match unit {
            Unit::Activations => (1, 0),
            Unit::Bytes => stage.map_or((0, 0), |stage| {
                (bytes(stage.activation_bytes), bytes(stage.weight_residual_bytes))
            }),
        };
        let is_rest = self.names.is_second_half(tag);
        match step.kind {
            StepKind::Compute(ActionKind::Forward) if self.has_backward => (activation, 0),
            StepKind::Compute(ActionKind::Forward) => (activation, -activation),
            // An activation counts until the weight gradient has ended, its bytes until the input
            // gradient has.
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

    /// The most that each lane keeps.
    pub(crate) fn peaks(&self, flow: &Flow) -> Vec<Peak> {
        let mut peaks = vec![Peak::default(); flow.lanes.len()];
        let mut kept = vec![(0i64, 0i64); flow.lanes.len()];
        for node in &flow.nodes {
            let lane = node.lane as usize;
            let (peak, kept) = (&mut peaks[lane], &mut kept[lane]);
            let (activations, bytes) =
                (self.change(node.tag, Unit::Activations), self.change(node.tag, Unit::Bytes));
            *kept = (kept.0 + activations.0, kept.1.saturating_add(bytes.0));
            let now = (u64::try_from(kept.0).unwrap_or(0), u64::try_from(kept.1).unwrap_or(0));
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
