//! Inputs that stay the same from call to call, such as the parameters of a stage within a step.
//!
//! A call compares the addresses of its leading inputs with those of the call before. As far as
//! they are equal, these inputs need no further look: their shapes fit the plan, and the hash of
//! their identities is known. So such an input costs one comparison.
//!
//! The hash of a call is the same whether its inputs were known or not: processes with different
//! parts in a call must agree on it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::plan::CallPlan;
use crate::error::IssueProblem;
use crate::exec::array::{MpmdArray, Repr, WeakHandle};
use crate::exec::{Rolling, Runtime};

/// Minimum number of inputs that are noted as unchanged.
const FEWEST: usize = 4;

/// The leading inputs that the last calls of a plan had in common.
#[derive(Default)]
pub(super) struct Unchanged {
    /// Handles that keep no memory of a device alive. Their addresses are not reused.
    leaves: Vec<WeakHandle>,
    /// Hash of the words of `leaves`.
    hash: Rolling,
    /// The runtime's count of watched donations when `leaves` were last found usable.
    donations: u64,
    /// Words of the other inputs of the last call.
    others: Vec<u64>,
    /// An empty list, kept for its capacity.
    words: Vec<u64>,
}

impl Unchanged {
    /// Returns the number of leading inputs that are the same as before. They fit the plan.
    pub(super) fn count(&self, leaves: &[&MpmdArray]) -> usize {
        let same = |(known, leaf): &(&WeakHandle, &&MpmdArray)| {
            matches!(&leaf.repr, Repr::Placed(placed) if known.is(placed))
        };
        self.leaves.iter().zip(leaves).take_while(same).count()
    }

    /// Returns the hash of the inputs' words, and notes the inputs for the next call.
    ///
    /// Returns an error if an input was donated or belongs to another program.
    pub(super) fn check(
        &mut self,
        plan: &CallPlan,
        runtime: &Arc<Runtime>,
        leaves: &[&MpmdArray],
    ) -> Result<Rolling, IssueProblem> {
        let known = self.count(leaves);
        let donations = runtime.watched_donations.load(Ordering::Relaxed);
        if self.donations != donations {
            for (i, leaf) in leaves[..known].iter().enumerate() {
                leaf.check_usable(plan.input_path(i))?;
            }
        }
        self.words.clear();
        for (i, leaf) in leaves.iter().enumerate().skip(known) {
            if let Repr::Placed(placed) = &leaf.repr {
                if placed.is_donated() {
                    placed.check_usable(plan.input_path(i))?;
                }
                if !Arc::ptr_eq(&placed.made.runtime, runtime) {
                    return Err(IssueProblem::Foreign { path: plan.input_path(i).to_owned() });
                }
            }
            self.words.push(leaf.word());
        }
        self.donations = donations;
        self.note(leaves, known);
        Ok(self.others.iter().copied().fold(self.hash, Rolling::mix))
    }

    /// Notes the inputs of a call, of which `known` are unchanged. `words` are those of the others.
    fn note(&mut self, leaves: &[&MpmdArray], known: usize) {
        let Self { words, others, .. } = &*self;
        let same = match known == self.leaves.len() {
            true => words.iter().zip(others).take_while(|(word, last)| word == last).count(),
            // `others` begin elsewhere.
            false => 0,
        };
        let kept = if known < FEWEST { 0 } else { known };
        if kept < self.leaves.len() {
            self.leaves.truncate(kept);
            let words = leaves[..kept].iter().map(|leaf| leaf.word());
            self.hash = words.fold(Rolling::default(), Rolling::mix);
            let dropped = leaves[kept..known].iter().map(|leaf| leaf.word());
            self.words.splice(..0, dropped);
        }
        let placed = |leaf: &&&MpmdArray| matches!(leaf.repr, Repr::Placed(_));
        let more = leaves[known..known + same].iter().take_while(placed).count();
        let more = if more < FEWEST { 0 } else { more };
        for leaf in &leaves[known..known + more] {
            let Repr::Placed(placed) = &leaf.repr else { break };
            placed.watch();
            self.leaves.push(placed.downgrade());
            self.hash = self.hash.mix(leaf.word());
        }
        self.words.drain(..more);
        std::mem::swap(&mut self.words, &mut self.others);
    }
}
