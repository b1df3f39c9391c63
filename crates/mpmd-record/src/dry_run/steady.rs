//! Detection of a steady dry run: the last two steps are equal.

use super::{Array, Dropped, DryRun, IssuedOperation, Read, StepEnd};

/// The entries of a dry run between two ends of steps.
struct IssuedStep<'a> {
    before: u64,
    operations: &'a [IssuedOperation],
    drops: &'a [Dropped],
    reads: &'a [Read],
}

impl DryRun {
    /// True if the last two complete steps are equal, relative to their starts. That is, they have
    /// the same operations and labels on the same arrays, drop the same handles and wait for the
    /// same arrays. An array that was made before both steps must be one array in both. Source
    /// lines may differ.
    #[doc(hidden)]
    pub fn is_steady(&self) -> bool {
        let Some(last) = self.steps.len().checked_sub(2) else {
            return false;
        };
        match (self.step_at(last), self.step_at(last + 1)) {
            (Some(one), Some(other)) => !one.operations.is_empty() && one.is_like(&other),
            _ => false,
        }
    }

    fn step_at(&self, place: usize) -> Option<IssuedStep<'_>> {
        let end = self.steps.get(place)?;
        let start = place
            .checked_sub(1)
            .map_or(StepEnd::default(), |before| self.steps[before]);
        Some(IssuedStep {
            before: start.operation,
            operations: self
                .operations
                .get(start.operation as usize..end.operation as usize)?,
            drops: self.drops.get(start.drops as usize..end.drops as usize)?,
            reads: self.reads.get(start.reads as usize..end.reads as usize)?,
        })
    }
}

impl IssuedStep<'_> {
    fn is_like(&self, other: &Self) -> bool {
        // `other` is the later step, so the difference is not negative.
        let shift = other.before - self.before;
        let same = |a: Array, b: Array| same_array(a, b, shift);
        let then = |a: u64, b: u64| a + shift == b;
        same_length(self.operations, other.operations, |a, b| {
            a.is_again(b, shift)
        }) && same_length(self.drops, other.drops, |a, b| {
            same(a.array, b.array) && then(a.after, b.after)
        }) && same_length(self.reads, other.reads, |a, b| {
            same(a.array, b.array) && then(a.after, b.after) && a.values == b.values
        })
    }
}

impl IssuedOperation {
    /// True if `later` repeats this operation. `later` comes `shift` operations after it in the
    /// same dry run.
    pub(super) fn is_again(&self, later: &Self, shift: u64) -> bool {
        let same_input = |a: Option<Array>, b: Option<Array>| match (a, b) {
            (Some(a), Some(b)) => same_array(a, b, shift),
            (a, b) => a.is_none() && b.is_none(),
        };
        self.descriptor == later.descriptor
            && self.label == later.label
            && same_length(&self.takes, &later.takes, |a, b| {
                a.donated == b.donated && same_input(a.array, b.array)
            })
    }
}

/// True if `later` is `array` itself, or the array that was made `shift` operations after it.
fn same_array(array: Array, later: Array, shift: u64) -> bool {
    array.result == later.result
        && (array.operation == later.operation || array.operation + shift == later.operation)
}

fn same_length<T>(ours: &[T], theirs: &[T], alike: impl Fn(&T, &T) -> bool) -> bool {
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(a, b)| alike(a, b))
}

#[cfg(test)]
mod tests {
    use super::super::tests::small;

    #[test]
    fn equal_steps_on_their_own_arrays_are_steady() {
        let dry_run = small();
        assert!(dry_run.is_steady());
        let mut first_two = small();
        first_two.steps.truncate(2);
        assert!(!first_two.is_steady());
    }

    #[test]
    fn difference_relative_to_the_step_is_not_steady() {
        let mut other = small();
        other.operations[3].descriptor = 2;
        assert!(!other.is_steady());
        let mut other = small();
        other.operations[4].takes[0].donated = true;
        assert!(!other.is_steady());
        let mut other = small();
        other.drops[2].after = 4;
        assert!(!other.is_steady(), "a handle is let go earlier");
        let mut other = small();
        other.operations[4].takes[0]
            .array
            .as_mut()
            .unwrap()
            .operation = 3;
        assert!(!other.is_steady());
        let mut other = small();
        other.steps[1] = other.steps[2];
        assert!(!other.is_steady(), "nothing is no step");
    }
}
