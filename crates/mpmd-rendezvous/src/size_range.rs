//! Numbers of processes, as ranges.

use serde::{Deserialize, Serialize};

/// Consecutive numbers of processes with which a program can run.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct SizeRange {
    /// The smallest number of processes.
    pub first: u32,
    /// The largest number of processes.
    pub last: u32,
}

impl SizeRange {
    /// Combines ascending numbers into ranges.
    pub fn of(sizes: impl IntoIterator<Item = u32>) -> Vec<Self> {
        let mut ranges: Vec<Self> = Vec::new();
        for size in sizes {
            match ranges.last_mut() {
                Some(range) if range.last.checked_add(1) == Some(size) => range.last = size,
                _ => ranges.push(Self {
                    first: size,
                    last: size,
                }),
            }
        }
        ranges
    }

    /// Returns the largest number in the range that is at most `most`. `None` if all are larger.
    pub(super) fn largest_up_to(self, most: usize) -> Option<usize> {
        let largest = most.min(self.last as usize);
        (self.first as usize..=largest)
            .contains(&largest)
            .then_some(largest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_numbers_are_one_range() {
        let range = |first, last| SizeRange { first, last };
        assert_eq!(SizeRange::of([]), []);
        assert_eq!(SizeRange::of(1..=4000), [range(1, 4000)]);
        assert_eq!(
            SizeRange::of([1, 2, 4, 5, 6, 9]),
            [range(1, 2), range(4, 6), range(9, 9)]
        );
        let last = range(u32::MAX - 1, u32::MAX);
        assert_eq!(SizeRange::of([u32::MAX - 1, u32::MAX]), [last]);
    }

    #[test]
    fn largest_number_is_within_range_and_limit() {
        let range = SizeRange { first: 3, last: 5 };
        let found = [2, 3, 4, 5, 9].map(|most| range.largest_up_to(most));
        assert_eq!(found, [None, Some(3), Some(4), Some(5), Some(5)]);
        let empty = SizeRange { first: 5, last: 3 };
        assert_eq!(empty.largest_up_to(9), None);
    }
}
