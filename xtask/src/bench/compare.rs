//! The arithmetic of pairs: ratios, their spread, and its direction. Does no I/O.

use super::set::Better;

/// Returns the order of the two runs of pair `pair`; true is the run of the other commit. The order
/// alternates, so that a machine that becomes slower or faster favours neither side.
pub(super) fn order(pair: usize) -> [bool; 2] {
    if pair.is_multiple_of(2) {
        [true, false]
    } else {
        [false, true]
    }
}

/// The median, the 10th and the 90th percentile of some values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RatioSpread {
    pub(super) median: f64,
    pub(super) p10: f64,
    pub(super) p90: f64,
}

impl RatioSpread {
    /// Returns the spread of `values`, without interpolation. `None` if there are no values.
    pub(super) fn of(values: impl IntoIterator<Item = f64>) -> Option<Self> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        let at = |share: f64| {
            let index = (share * sorted.len().saturating_sub(1) as f64).round() as usize;
            sorted.get(index).copied()
        };
        Some(Self {
            median: at(0.5)?,
            p10: at(0.1)?,
            p90: at(0.9)?,
        })
    }

    /// Returns the direction of a ratio's spread: faster if all of it is below 1, slower if all of
    /// it is above 1.
    pub(super) fn mark(self) -> RatioMark {
        if self.p90 < 1.0 {
            RatioMark::Faster
        } else if self.p10 > 1.0 {
            RatioMark::Slower
        } else {
            RatioMark::Neither
        }
    }

    /// True if the whole spread of a ratio is above `limit`.
    pub(super) fn is_above(self, limit: f64) -> bool {
        self.p10 > limit
    }
}

/// The direction in which the working tree differs from the other commit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum RatioMark {
    Faster,
    Slower,
    /// Not known: the spread contains 1.
    Neither,
}

impl RatioMark {
    pub(super) fn word(self) -> &'static str {
        match self {
            Self::Faster => "faster",
            Self::Slower => "slower",
            Self::Neither => "",
        }
    }
}

/// Returns the ratio of each pair in which both sides have a value. For a time it is the working
/// tree over the other commit, for a rate the reverse. So a ratio below 1 is an improvement.
pub(super) fn ratios(tree: &[Option<f64>], against: &[Option<f64>], better: Better) -> Vec<f64> {
    let both = tree
        .iter()
        .zip(against)
        .filter_map(|(tree, against)| Some(((*tree)?, (*against)?)));
    let positive = both.filter(|(tree, against)| *tree > 0.0 && *against > 0.0);
    positive
        .map(|(tree, against)| match better {
            Better::Lower => tree / against,
            Better::Higher => against / tree,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sides_take_turns_to_begin() {
        let order: Vec<bool> = (0..4).flat_map(order).collect();
        assert_eq!(order, [true, false, false, true, true, false, false, true]);
    }

    #[test]
    fn ratio_below_one_is_better_for_times_and_rates() {
        let (tree, against) = ([Some(1.0), Some(3.0)], [Some(2.0), Some(2.0)]);
        assert_eq!(ratios(&tree, &against, Better::Lower), [0.5, 1.5]);
        assert_eq!(ratios(&tree, &against, Better::Higher), [2.0, 2.0 / 3.0]);
    }

    #[test]
    fn pair_with_one_value_has_no_ratio() {
        let tree = [Some(1.0), None, Some(4.0), Some(0.0)];
        let against = [None, Some(1.0), Some(2.0), Some(1.0)];
        assert_eq!(ratios(&tree, &against, Better::Lower), [2.0]);
        assert_eq!(ratios(&tree, &[], Better::Lower), [0.0; 0]);
    }

    #[test]
    fn spread_of_seven_leaves_out_both_extremes() {
        let spread = RatioSpread::of([1.3, 0.5, 1.2, 1.1, 9.0, 1.25, 1.4]).unwrap();
        assert_eq!(
            spread,
            RatioSpread {
                median: 1.25,
                p10: 1.1,
                p90: 1.4
            }
        );
        assert_eq!(RatioSpread::of([]), None);
        assert_eq!(
            (spread.mark(), spread.is_above(1.09)),
            (RatioMark::Slower, true)
        );
        assert!(!spread.is_above(1.1));
    }

    #[test]
    fn mark_needs_the_whole_spread_on_one_side() {
        let mark = |p10, p90| {
            RatioSpread {
                median: 0.9,
                p10,
                p90,
            }
            .mark()
        };
        assert_eq!(
            [mark(0.8, 0.99), mark(0.8, 1.0)],
            [RatioMark::Faster, RatioMark::Neither]
        );
        assert_eq!(
            [mark(1.01, 1.2), mark(1.0, 1.2)],
            [RatioMark::Slower, RatioMark::Neither]
        );
    }
}
