//! The steps of a run of which only a part was traced.

use super::event::{Event, What};
use super::file::ProcessTrace;
use super::merge::RunStep;

/// The steps that lie within the traces of all processes as a whole, if these are of a part of a
/// run.
pub(super) struct Whole {
    /// The step in which the last trace began: the steps after it are whole at their start.
    after: u64,
    /// The last step that ended in all traces.
    until: u64,
    /// The first operation that had not ended when its trace did.
    open: u64,
}

impl Default for Whole {
    fn default() -> Self {
        Self { after: 0, until: u64::MAX, open: u64::MAX }
    }
}

impl Whole {
    /// Adds the trace of a part. `open` is its first operation that did not end.
    pub(super) fn meet(&mut self, trace: &ProcessTrace, open: Option<u64>) {
        let step = |event: &Event| match event.what {
            What::StepEnd { step, .. } => Some(step),
            _ => None,
        };
        let mut steps = trace.events.iter().filter_map(step);
        let first = steps.next().unwrap_or(u64::MAX);
        self.after = self.after.max(first);
        self.until = self.until.min(steps.next_back().unwrap_or(first));
        self.open = self.open.min(open.unwrap_or(u64::MAX));
    }

    pub(super) fn has(&self, step: &RunStep) -> bool {
        self.after < step.number && step.number <= self.until && step.ops.1 < self.open
    }
}
