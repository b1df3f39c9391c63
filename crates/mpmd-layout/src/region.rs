//! Regions: boxes of an array's index space.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::tree::Leaf;

/// A box of array indices: a half-open range in every dimension. Cheap to clone. Regions are
/// ordered by the start of their first dimension, then by its end, then by the next dimension.
#[derive(Clone, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[serde(try_from = "Vec<(usize, usize)>", into = "Vec<(usize, usize)>")]
pub struct Region {
    /// (start, end) of each dimension, with start <= end.
    bounds: Arc<[(usize, usize)]>,
}

impl Region {
    /// Creates a region from one range of indices for each dimension.
    ///
    /// # Panics
    ///
    /// If a range ends before it starts.
    pub fn new(ranges: Vec<Range<usize>>) -> Self {
        ranges
            .into_iter()
            .map(|range| (range.start, range.end))
            .collect()
    }

    /// Returns the region of a whole array of `shape`.
    pub fn full(shape: &[usize]) -> Self {
        shape.iter().map(|dim| (0, *dim)).collect()
    }

    /// Returns the number of dimensions.
    pub fn ndim(&self) -> usize {
        self.bounds.len()
    }

    /// Returns the region's half-open range of indices in dimension `dim`, counted from 0.
    ///
    /// # Panics
    ///
    /// If the region has no dimension `dim`.
    pub fn range(&self, dim: usize) -> Range<usize> {
        let (start, end) = self.bounds[dim];
        start..end
    }

    /// Returns the half-open range of indices of each dimension, in order.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = Range<usize>> + DoubleEndedIterator + '_ {
        self.bounds.iter().map(|(start, end)| *start..*end)
    }

    /// Returns the number of indices in each dimension.
    pub fn shape(&self) -> Vec<usize> {
        self.ranges().map(|range| range.len()).collect()
    }

    /// Returns the number of elements. It is 1 for a region without dimensions.
    pub fn elements(&self) -> usize {
        self.ranges().map(|range| range.len()).product()
    }

    /// Returns the row-major index of each element in the whole array of shape `dims`, in the
    /// row-major order of the region.
    ///
    /// # Panics
    ///
    /// If the numbers of dimensions differ.
    pub fn indices(&self, dims: &[usize]) -> impl Iterator<Item = u64> + use<> {
        assert_eq!(
            dims.len(),
            self.ndim(),
            "dimensions of a region and of its array"
        );

        let shape = self.shape();
        let dims = dims.to_vec();
        let starts: Vec<usize> = self.ranges().map(|range| range.start).collect();

        (0..self.elements()).map(move |mut element| {
            let mut place = 0;
            let mut stride = 1;
            for dim in (0..dims.len()).rev() {
                place += (starts[dim] + element % shape[dim]) * stride;
                element /= shape[dim];
                stride *= dims[dim];
            }
            place as u64
        })
    }

    /// True if the region has no element: the range of some dimension is empty.
    pub fn is_empty(&self) -> bool {
        self.ranges().any(|range| range.is_empty())
    }

    /// Returns the elements that are in both regions, or `None` if there are none. Regions without
    /// dimensions share their one element.
    ///
    /// # Panics
    ///
    /// If the numbers of dimensions differ.
    pub fn intersect(&self, other: &Self) -> Option<Self> {
        self.same_ndim(other);
        let pairs = || {
            self.bounds
                .iter()
                .zip(&other.bounds[..])
                .map(|(a, b)| (a.0.max(b.0), a.1.min(b.1)))
        };
        pairs()
            .all(|(start, end)| start < end)
            .then(|| pairs().collect())
    }

    /// True if every element of `other` is in this region. An empty `other` is in every region.
    ///
    /// # Panics
    ///
    /// If the numbers of dimensions differ.
    pub fn contains(&self, other: &Self) -> bool {
        self.same_ndim(other);
        other.is_empty()
            || self
                .bounds
                .iter()
                .zip(&other.bounds[..])
                .all(|(a, b)| a.0 <= b.0 && b.1 <= a.1)
    }

    /// Returns the elements of this region that are not in `other`, as disjoint non-empty regions
    /// in ascending order. Empty if `other` contains this region. Panics if the numbers of
    /// dimensions differ.
    pub(crate) fn without(&self, other: &Self) -> Vec<Self> {
        let Some(common) = self.intersect(other) else {
            return if self.is_empty() {
                Vec::new()
            } else {
                vec![self.clone()]
            };
        };

        let mut rest = Vec::new();
        // For each dimension, cuts off the parts before and after the common part.
        let mut core = self.bounds.to_vec();
        for dim in 0..core.len() {
            let inner = common.bounds[dim];
            let outer = core[dim];
            for side in [(outer.0, inner.0), (inner.1, outer.1)] {
                if side.0 < side.1 {
                    core[dim] = side;
                    rest.push(core.iter().copied().collect());
                }
            }
            core[dim] = inner;
        }

        rest.sort_unstable();
        rest
    }

    fn same_ndim(&self, other: &Self) {
        assert_eq!(
            self.ndim(),
            other.ndim(),
            "regions of one array: {self} and {other}"
        );
    }
}

/// Builds a region from (start, end) pairs, one for each dimension. The end is exclusive.
///
/// # Panics
///
/// If an end is below its start.
impl FromIterator<(usize, usize)> for Region {
    fn from_iter<I: IntoIterator<Item = (usize, usize)>>(bounds: I) -> Self {
        let check = |bound: (usize, usize)| {
            assert!(
                bound.0 <= bound.1,
                "a range of a region ends before it starts: {}..{}",
                bound.0,
                bound.1
            );
            bound
        };
        Self {
            bounds: bounds.into_iter().map(check).collect(),
        }
    }
}

impl TryFrom<Vec<(usize, usize)>> for Region {
    type Error = &'static str;

    fn try_from(bounds: Vec<(usize, usize)>) -> Result<Self, Self::Error> {
        let valid = bounds.iter().all(|(start, end)| start <= end);
        valid
            .then(|| Self {
                bounds: bounds.into(),
            })
            .ok_or("a range of a region ends before it starts")
    }
}

impl From<Region> for Vec<(usize, usize)> {
    fn from(region: Region) -> Self {
        region.bounds.to_vec()
    }
}

impl fmt::Display for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.ranges()).finish()
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Leaf for Region {}

#[cfg(test)]
mod tests {

    use super::*;

    fn region<const N: usize>(bounds: [(usize, usize); N]) -> Region {
        bounds.into_iter().collect()
    }

    #[test]
    fn region_has_display_form_and_size() {
        let r = Region::new(vec![0..4, 2..8]);
        assert_eq!(r.to_string(), "[0..4, 2..8]");
        assert_eq!(
            (r.elements(), r.shape(), r.is_empty()),
            (24, vec![4, 6], false)
        );
        assert_eq!(
            (Region::full(&[]).elements(), Region::full(&[]).is_empty()),
            (1, false)
        );
        assert!(Region::full(&[3, 0]).is_empty());
    }

    #[test]
    fn intersections_without_elements_are_none() {
        let a = region([(0, 4), (2, 8)]);
        assert_eq!(
            a.intersect(&region([(3, 9), (0, 3)])),
            Some(region([(3, 4), (2, 3)]))
        );
        assert_eq!(a.intersect(&region([(4, 9), (0, 3)])), None);
        assert_eq!(a.intersect(&region([(1, 1), (0, 3)])), None);
        let scalar = Region::full(&[]);
        assert_eq!(scalar.intersect(&scalar), Some(scalar.clone()));
    }

    #[test]
    fn empty_regions_are_in_every_region() {
        let outer = region([(2, 6), (0, 8)]);
        let inner = region([(3, 4), (0, 2)]);
        assert!(outer.contains(&inner) && !inner.contains(&outer));
        assert!(
            inner.contains(&region([(9, 9), (0, 0)])),
            "nothing is in everything"
        );
    }

    #[test]
    fn without_is_disjoint_and_complete() {
        let whole = region([(0, 4), (0, 4), (0, 3)]);
        for hole in [
            region([(1, 2), (0, 4), (1, 2)]),
            region([(3, 9), (2, 3), (0, 3)]),
            whole.clone(),
        ] {
            let rest = whole.without(&hole);
            let common = whole.intersect(&hole).unwrap().elements();
            assert_eq!(
                rest.iter().map(Region::elements).sum::<usize>(),
                whole.elements() - common
            );
            for (i, a) in rest.iter().enumerate() {
                assert!(a.intersect(&hole).is_none() && whole.contains(a));
                assert!(rest[i + 1..].iter().all(|b| a.intersect(b).is_none()));
            }
        }
    }

    #[test]
    fn serde_is_a_list_of_pairs_and_refuses_backward_ranges() {
        let r = region([(0, 4), (2, 8)]);
        assert_eq!(serde_json::to_string(&r).unwrap(), "[[0,4],[2,8]]");
        assert_eq!(serde_json::from_str::<Region>("[[0,4],[2,8]]").unwrap(), r);
        assert!(serde_json::from_str::<Region>("[[4,0]]").is_err());
    }

    #[test]
    #[should_panic(expected = "ends before it starts")]
    fn backward_range_panics() {
        let _ = region([(2, 1)]);
    }

    #[test]
    fn elements_are_counted_over_the_whole_array() {
        let region = Region::new(vec![1..3, 0..1, 2..4]);
        assert_eq!(
            region.indices(&[3, 2, 4]).collect::<Vec<_>>(),
            [10, 11, 18, 19]
        );
        let all: Vec<u64> = Region::full(&[3, 2, 4]).indices(&[3, 2, 4]).collect();
        assert_eq!(all, (0..24).collect::<Vec<_>>());
    }
}
