//! The runs of bytes that a region takes in a file.

use std::ops::Range;

use mpmd_layout::region::Region;

/// Returns the contiguous ranges of bytes that `region` occupies in an array of this global shape,
/// in order. Ranges count from the array's first byte. `item` is the size of an element in bytes.
///
/// Together the ranges have the region's elements in row-major order. An empty region has no
/// ranges.
pub fn runs(
    shape: &[usize],
    region: &Region,
    item: usize,
) -> impl Iterator<Item = Range<u64>> + use<> {
    // Dimensions that the region covers completely join one run with the dimension before them.
    let mut inner = shape.len();
    while inner > 0 && region.range(inner - 1) == (0..shape[inner - 1]) {
        inner -= 1;
    }
    let split = inner.saturating_sub(1);
    let stride = |dim: usize| shape[dim + 1..].iter().product::<usize>();
    let outer: Vec<(Range<usize>, usize)> = (0..split)
        .map(|dim| (region.range(dim), stride(dim)))
        .collect();
    let len: usize = (split..shape.len())
        .map(|dim| region.range(dim).len())
        .product();
    let first = if shape.is_empty() {
        0
    } else {
        region.range(split).start * stride(split)
    };
    let count = if len == 0 {
        0
    } else {
        outer.iter().map(|(range, _)| range.len()).product()
    };
    (0..count).map(move |index| {
        // The position of the run's first element, from the last outer dimension to the first.
        let mut rest = index;
        let mut start = first;
        for (range, stride) in outer.iter().rev() {
            start += (range.start + rest % range.len()) * stride;
            rest /= range.len();
        }
        (start * item) as u64..((start + len) * item) as u64
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_the_elements_of_the_region_in_order() {
        let shape = [3, 4, 5];
        for ranges in [
            vec![0..3, 0..4, 0..5],
            vec![1..3, 0..4, 0..5],
            vec![0..3, 1..3, 0..5],
            vec![1..2, 2..4, 3..5],
            vec![0..3, 0..0, 0..5],
        ] {
            let region = Region::new(ranges);
            let elements: Vec<u64> = runs(&shape, &region, 1).flatten().collect();
            let expected: Vec<u64> = region.indices(&shape).collect();
            assert_eq!(elements, expected, "{region:?}");
        }
        assert!(runs(&shape, &Region::full(&shape), 4).eq(std::iter::once(0..240)));
        assert!(runs(&[], &Region::full(&[]), 8).eq(std::iter::once(0..8)));
    }
}
