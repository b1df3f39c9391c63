//! Tests of copies, and regions with pieces for other tests.

use proptest::prelude::*;

use super::*;

fn region<const N: usize>(bounds: [(usize, usize); N]) -> Region {
    bounds.into_iter().collect()
}

/// Returns the byte offset of an element in the buffer of a region.
fn offset(region: &Region, index: &[usize], item_bytes: usize) -> usize {
    let step = |at: usize, (range, i): (Range<usize>, &usize)| at * range.len() + (i - range.start);
    region.ranges().zip(index).fold(0, step) * item_bytes
}

fn indices(region: &Region) -> Vec<Vec<usize>> {
    region.ranges().fold(vec![vec![]], |outer, range| {
        let extend = |index: &Vec<usize>| {
            let index = index.clone();
            range
                .clone()
                .map(move |i| index.iter().copied().chain([i]).collect::<Vec<usize>>())
        };
        outer.iter().flat_map(extend).collect()
    })
}

fn naive(
    src: &[u8],
    from: &Region,
    dst: &mut [u8],
    to: &Region,
    piece: &Region,
    item_bytes: usize,
) {
    for index in indices(piece) {
        let (s, d) = (
            offset(from, &index, item_bytes),
            offset(to, &index, item_bytes),
        );
        dst[d..d + item_bytes].copy_from_slice(&src[s..s + item_bytes]);
    }
}

proptest! {
    #[test]
    fn copy_equals_elementwise_loop(
        (piece, from, to) in nested(4, 3),
        item_bytes in prop::sample::select(vec![1usize, 2, 3, 4, 8, 16]),
    ) {
        let src: Vec<u8> = (0..from.elements() * item_bytes).map(|i| (i % 251) as u8).collect();
        let mut expected = vec![255; to.elements() * item_bytes];
        let mut found = expected.clone();
        naive(&src, &from, &mut expected, &to, &piece, item_bytes);
        copy_region(&src, &from, &mut found, &to, &piece, item_bytes);
        prop_assert_eq!(found, expected);
    }

    #[test]
    fn contiguous_bytes_finds_exactly_single_runs((piece, within, _) in nested(4, 3)) {
        let mut offsets: Vec<usize> =
            indices(&piece).iter().map(|i| offset(&within, i, 1)).collect();
        offsets.sort_unstable();
        let run = offsets.windows(2).all(|pair| pair[1] == pair[0] + 1);
        let count = offsets.len();
        let expected = run.then(|| offsets.first().map_or(0..0, |first| *first..first + count));
        prop_assert_eq!(contiguous_bytes(&within, &piece, 1), expected);
    }
}

#[test]
fn scalars_rows_and_columns() {
    let scalar = Region::full(&[]);
    assert_eq!(contiguous_bytes(&scalar, &scalar, 8), Some(0..8));
    let mut dst = [0];
    copy_region(&[7], &scalar, &mut dst, &scalar, &scalar, 1);
    assert_eq!(dst, [7]);
    let whole = region([(2, 6), (0, 8)]);
    assert_eq!(
        contiguous_bytes(&whole, &region([(3, 5), (0, 8)]), 4),
        Some(32..96)
    );
    assert_eq!(
        contiguous_bytes(&whole, &region([(3, 4), (2, 5)]), 4),
        Some(40..52)
    );
    assert_eq!(contiguous_bytes(&whole, &region([(3, 5), (0, 4)]), 4), None);
    assert_eq!(
        contiguous_bytes(&whole, &region([(0, 2), (0, 8)]), 4),
        None,
        "not within"
    );
}

#[test]
fn pieces_larger_than_caches_are_copied() {
    // Columns of an odd width, so that runs start at any alignment.
    let (from, to) = (
        region([(0, 9500), (0, 1001)]),
        region([(0, 9500), (100, 1001)]),
    );
    let src: Vec<u8> = (0..from.elements()).map(|i| (i % 251) as u8).collect();
    let mut found = vec![255; to.elements()];
    assert!(to.elements() > STREAM_BYTES);
    copy_region(&src, &from, &mut found, &to, &to, 1);
    for (row, found) in found.chunks(901).enumerate() {
        assert_eq!(found, &src[row * 1001 + 100..(row + 1) * 1001], "row {row}");
    }
}

#[test]
fn contiguous_pieces_are_one_copy() {
    let whole = region([(0, 4), (0, 5), (0, 6)]);
    let loops = Loops::new(&whole, &whole, &whole, 4);
    assert_eq!((loops.dims.len(), loops.run), (0, 480));
    let rows = Loops::new(&whole, &whole, &region([(0, 4), (0, 5), (1, 3)]), 4);
    assert_eq!(
        (rows.dims.len(), rows.run),
        (1, 8),
        "both outer dimensions are one loop"
    );
}

#[test]
#[should_panic(expected = "bytes of the destination buffer")]
fn wrong_buffer_length_panics() {
    let whole = Region::full(&[4]);
    copy_region(&[0; 4], &whole, &mut [0; 3], &whole, &whole, 1);
}

#[test]
#[should_panic(expected = "not within")]
fn piece_outside_region_panics() {
    let (whole, half) = (Region::full(&[4]), Region::full(&[2]));
    copy_region(&[0; 4], &whole, &mut [0; 2], &half, &whole, 1);
}

/// Generates a region of up to `dims` dimensions with up to `elements` indices each, and two
/// regions that contain it.
pub(crate) fn nested(
    dims: usize,
    elements: usize,
) -> impl Strategy<Value = (Region, Region, Region)> {
    let dim = (
        0..3usize,
        0..3usize,
        0..=elements,
        0..3usize,
        0..3usize,
        any::<[bool; 2]>(),
    );
    proptest::collection::vec(dim, 0..=dims).prop_map(|dims| {
        let mut regions = [Vec::new(), Vec::new(), Vec::new()];
        for (a, b, size, c, d, tight) in dims {
            let (start, end) = (3, 3 + size);
            regions[0].push((start, end));
            // Often the same extent as the inner region, so that contiguous runs merge.
            regions[1].push(if tight[0] {
                (start, end)
            } else {
                (start - a, end + b)
            });
            regions[2].push(if tight[1] {
                (start, end)
            } else {
                (start - c, end + d)
            });
        }
        let [piece, from, to] = regions.map(Region::from_iter);
        (piece, from, to)
    })
}
