//! Comparison of the dry runs of two processes: the first operation at which they diverge.

use std::collections::HashMap;

use super::{Array, DryRun, DryRunEnd, OpDescriptor, OpKind, TakenArray};

/// The first operation at which two dry runs of one job diverge.
#[derive(Clone, Debug, Eq, Hash, PartialEq)]
#[non_exhaustive]
pub struct RunParting {
    /// The number of the operation.
    pub operation: u64,
    /// Descriptions of the operation with its source line, in the first and in the second dry run.
    /// If a dry run lacks the operation, its text says so.
    pub issued: [String; 2],
    /// The difference between the two operations, if their descriptions do not show it.
    pub why: Option<String>,
}

impl DryRun {
    /// Returns the first operation at which this dry run and `other` diverge, or `None` if they
    /// agree. Both must be dry runs of one job, taken as different processes of the job.
    ///
    /// Compares the properties that the processes of a job compare. These are the operation's
    /// effect, its input arrays, its host values, and the number of steps that ended before it.
    /// Lines and labels may differ. A dry run that ends [steady](DryRunEnd::Steady) repeats its
    /// last step forever, so it also matches a longer dry run.
    pub fn parting(&self, other: &Self) -> Option<RunParting> {
        let mut descriptors: HashMap<(u32, u32), bool> = HashMap::new();
        let both = self.operations.len().min(other.operations.len());

        for index in 0..both {
            let one = &self.operations[index];
            let two = &other.operations[index];
            let same_form = *descriptors
                .entry((one.descriptor, two.descriptor))
                .or_insert_with(|| {
                    match (
                        self.descriptors.get(one.descriptor as usize),
                        other.descriptors.get(two.descriptor as usize),
                    ) {
                        (Some(one), Some(two)) => one.does_the_same(two),
                        _ => false,
                    }
                });

            let same_hash = match (self.hashes.get(index), other.hashes.get(index)) {
                (Some(one), Some(two)) => one == two,
                // A dry run of an earlier version has no hashes.
                _ => true,
            };

            if !same_form || one.takes != two.takes || !same_hash {
                let operation = index as u64 + 1;
                let issued = [self.describe(operation), other.describe(operation)];
                // The two descriptions would differ only in their lines, so the difference is given
                // too.
                let why = same_form.then(|| self.difference(other, operation));
                return Some(RunParting {
                    operation,
                    issued,
                    why,
                });
            }
        }

        let (operation, longer) = match self.operations.len() > both {
            true => (self.departs_after(other)?, 0),
            false => (other.departs_after(self)?, 1),
        };

        let ended = |dry_run: &Self| match dry_run.end {
            DryRunEnd::Finished => format!("nothing: it finishes after operation {both}"),
            DryRunEnd::Steady => {
                "the next operation of a step that is like the one before it".to_owned()
            }
            DryRunEnd::Steps | DryRunEnd::Open => {
                format!("the end of step {}", dry_run.steps.len())
            }
        };

        let mut issued = [ended(self), ended(other)];
        issued[longer] = [self, other][longer].describe(operation);
        Some(RunParting {
            operation,
            issued,
            why: None,
        })
    }

    /// Returns the first operation of this dry run that `shorter` lacks, or `None` if it lacks
    /// none. The dry runs must be equal up to the end of `shorter`. If `shorter` is steady,
    /// repetitions of its last step count as part of it.
    fn departs_after(&self, shorter: &Self) -> Option<u64> {
        let end = shorter.operations.len();

        let length = match shorter
            .steps
            .len()
            .checked_sub(1)
            .and_then(|last| shorter.step(last))
        {
            Some(step) if shorter.end == DryRunEnd::Steady => (step.end - step.start) as usize,
            _ => 0,
        };

        let differs = |index: &usize| {
            let Some(before) = (*index - end).checked_rem(length) else {
                return true;
            };
            let before = end - length + before;
            !self.operations[before].is_again(&self.operations[*index], (*index - before) as u64)
        };
        (end..self.operations.len())
            .find(differs)
            .map(|index| index as u64 + 1)
    }

    /// Describes how operation number `operation` differs between this dry run and `other`, if its
    /// descriptor is the same in both. Names the first input that differs, else the numbers of
    /// steps that ended before the operation. If these are equal too, says that the difference is
    /// in host values or in settings of the kernel.
    fn difference(&self, other: &Self, operation: u64) -> String {
        let index = operation as usize - 1;
        let one = &self.operations[index].takes;
        let two = &other.operations[index].takes;

        let names = |taken: &TakenArray| {
            let array = taken
                .array
                .map_or("host values".to_owned(), |array: Array| array.to_string());
            if taken.donated {
                array + ", donated"
            } else {
                array
            }
        };

        if let Some(place) = one.iter().zip(two).position(|(one, two)| one != two) {
            return format!(
                "input {place} is {}, and {}",
                names(&one[place]),
                names(&two[place])
            );
        }

        let ended = |dry_run: &Self| {
            dry_run
                .steps
                .iter()
                .filter(|step| step.operation < operation)
                .count()
        };
        match (ended(self), ended(other)) {
            (one, two) if one != two => format!("steps that end before it: {one}, and {two}"),
            _ => "in host values that it takes, or in settings of its kernel".to_owned(),
        }
    }
}

impl OpDescriptor {
    /// True if operations with these descriptors have the same effect on all processes.
    fn does_the_same(&self, other: &Self) -> bool {
        match (&self.kind, &other.kind) {
            // Each process may use its own value for the dry run.
            (
                OpKind::BroadcastValue { from, .. },
                OpKind::BroadcastValue {
                    from: other_from, ..
                },
            ) => from == other_from && self.what == other.what,
            _ => self == other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::small;
    use super::super::{DryRun, DryRunEnd};

    fn hashed() -> DryRun {
        DryRun {
            hashes: vec![1, 2, 3, 4, 5],
            end: DryRunEnd::Finished,
            ..small()
        }
    }

    fn parted(change: impl Fn(&mut DryRun)) -> (u64, [String; 2], Option<String>) {
        let mut other = hashed();
        change(&mut other);
        let found = hashed().parting(&other).unwrap();
        let mirrored = other.parting(&hashed()).unwrap();
        assert_eq!(mirrored.operation, found.operation);
        assert_eq!(
            [&mirrored.issued[1], &mirrored.issued[0]],
            [&found.issued[0], &found.issued[1]]
        );
        (found.operation, found.issued, found.why)
    }

    #[test]
    fn lines_do_not_count_as_a_difference() {
        let mut other = hashed();
        other.lines = vec!["other.rs:7:9".into()];
        other.descriptors.insert(0, other.descriptors[2].clone());
        other
            .operations
            .iter_mut()
            .for_each(|operation| operation.descriptor += 1);
        assert_eq!(hashed().parting(&other), None);
        assert_eq!(
            hashed().parting(&DryRun {
                hashes: Vec::new(),
                ..hashed()
            }),
            None
        );
    }

    #[test]
    fn differing_operations_are_both_described() {
        let (operation, issued, why) = parted(|dry_run| dry_run.operations[3].descriptor = 2);
        assert_eq!((operation, why), (4, None));
        let shown = [
            "operation 4 (put) at train.rs:1:2",
            "operation 4 (jit k) at train.rs:1:2",
        ];
        assert_eq!(issued, shown);
    }

    #[test]
    fn inputs_steps_and_values_are_compared() {
        let why = |change: fn(&mut DryRun)| parted(change).2.unwrap();
        assert_eq!(
            why(|dry_run| dry_run.operations[4].takes[0].array = None),
            "input 0 is result 0 of operation 4, and host values"
        );
        assert_eq!(
            why(|dry_run| dry_run.hashes[1] = 9),
            "in host values that it takes, or in settings of its kernel"
        );
        let ended = |dry_run: &mut DryRun| {
            dry_run.hashes[1] = 9;
            dry_run.steps.remove(0);
        };
        assert_eq!(why(ended), "steps that end before it: 1, and 0");
    }

    #[test]
    fn shorter_dry_run_differs_unless_steady() {
        let shorter = |end: DryRunEnd| {
            let mut dry_run = hashed();
            (dry_run.end, dry_run.operations, dry_run.hashes) = (
                end,
                dry_run.operations[..3].to_vec(),
                dry_run.hashes[..3].to_vec(),
            );
            dry_run.steps.truncate(2);
            dry_run
        };
        assert_eq!(
            hashed().parting(&shorter(DryRunEnd::Steady)),
            None,
            "the third step is the second again"
        );
        let found = hashed().parting(&shorter(DryRunEnd::Finished)).unwrap();
        assert_eq!(found.issued[1], "nothing: it finishes after operation 3");
        let mut other = hashed();
        other.operations[4].takes[0].donated = true;
        let found = shorter(DryRunEnd::Steady).parting(&other).unwrap();
        assert_eq!(found.operation, 5);
        assert!(
            found.issued[1].starts_with("operation 5 (jit k)"),
            "{found:?}"
        );
    }
}
