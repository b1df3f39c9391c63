//! Copies one piece between two row-major buffers.
//!
//! Both buffers have their dimensions in the same order, so the copy walks forward through both,
//! row by row. Caches and prefetchers see sequential streams. There is no transpose, so copying in
//! blocks would gain nothing.

use std::ops::Range;

use crate::cpu::stream::{AHEAD, SHORTEST_RUN, SMALLEST_PIECE, STREAM_BYTES, StreamingStores};
use mpmd_layout::region::Region;

/// Copies the elements of `piece` from a buffer that holds `src_region` to one that holds
/// `dst_region`.
///
/// Both buffers are row-major over their regions, with `item_bytes` bytes for each element. Runs
/// that are contiguous in both buffers are copied in one go. Bytes of `dst` outside the piece do
/// not change.
///
/// # Panics
///
/// If a buffer's length is not that of its region, or `piece` is not within both regions.
pub fn copy_region(
    src: &[u8],
    src_region: &Region,
    dst: &mut [u8],
    dst_region: &Region,
    piece: &Region,
    item_bytes: usize,
) {
    let written = dst.len();
    copy_part(src, src_region, dst, dst_region, piece, item_bytes, written);
}

/// Copies the elements of `piece`, as [`copy_region`] does. `written` is the number of bytes that
/// this and other copies write at about the same time: if they do not stay in the caches, the copy
/// bypasses these.
///
/// # Panics
///
/// If a buffer's length is not that of its region, or `piece` is not within both regions.
pub fn copy_part(
    src: &[u8],
    src_region: &Region,
    dst: &mut [u8],
    dst_region: &Region,
    piece: &Region,
    item_bytes: usize,
    written: usize,
) {
    let lengths = (src.len(), dst.len());
    let Some(loops) = Loops::checked(lengths, src_region, dst_region, piece, item_bytes) else {
        return;
    };
    let run = loops.run;
    if run >= SHORTEST_RUN
        && written >= STREAM_BYTES
        && piece.elements() * item_bytes >= SMALLEST_PIECE
        && let Some(mut stream) = StreamingStores::new()
    {
        // The distance from a run to the one that is fetched while it is copied.
        let step = loops.dims.last().map_or(run, |inner| inner.src_step);
        let ahead = step * (AHEAD / 2 / run).max(1);
        return loops.each(|s, d| {
            let next = &src[(s + ahead).min(src.len())..];
            stream.copy(&mut dst[d..d + run], &src[s..s + run], next);
        });
    }
    // Copies of a few bytes are much faster if the compiler knows their size.
    match run {
        1 => loops.each(|s, d| dst[d] = src[s]),
        2 => loops.each(|s, d| fixed::<2>(src, dst, s, d)),
        4 => loops.each(|s, d| fixed::<4>(src, dst, s, d)),
        8 => loops.each(|s, d| fixed::<8>(src, dst, s, d)),
        16 => loops.each(|s, d| fixed::<16>(src, dst, s, d)),
        run => loops.each(|s, d| dst[d..d + run].copy_from_slice(&src[s..s + run])),
    }
}

/// Calls `each` with every run of a piece that is contiguous in both buffers: its bytes in `dst`,
/// then its bytes in `src`. Copies nothing itself.
///
/// # Panics
///
/// If a buffer's length is not that of its region, or `piece` is not within both regions.
pub(super) fn runs(
    src: &[u8],
    src_region: &Region,
    dst: &mut [u8],
    dst_region: &Region,
    piece: &Region,
    item_bytes: usize,
    each: &mut dyn FnMut(&mut [u8], &[u8]),
) {
    let lengths = (src.len(), dst.len());
    let Some(loops) = Loops::checked(lengths, src_region, dst_region, piece, item_bytes) else {
        return;
    };
    let run = loops.run;
    loops.each(|s, d| each(&mut dst[d..d + run], &src[s..s + run]));
}

/// Returns the byte range of `piece` inside the buffer of region `within` if the piece is
/// contiguous there.
///
/// Returns `None` if the piece consists of several runs or is not within the region. For an empty
/// piece returns the empty range at 0.
///
/// # Panics
///
/// If the regions differ in their number of dimensions.
pub fn contiguous_bytes(
    within: &Region,
    piece: &Region,
    item_bytes: usize,
) -> Option<Range<usize>> {
    if !within.contains(piece) {
        return None;
    }
    if piece.is_empty() {
        return Some(0..0);
    }
    let loops = Loops::new(within, within, piece, item_bytes);
    loops.dims.is_empty().then(|| loops.src..loops.src + loops.run)
}

#[inline(always)]
fn fixed<const N: usize>(src: &[u8], dst: &mut [u8], s: usize, d: usize) {
    dst[d..d + N].copy_from_slice(&src[s..s + N]);
}

/// The contiguous runs of a piece, as nested loops. All offsets and lengths are in bytes.
pub(crate) struct Loops {
    /// Byte offset of the first run in the source buffer. `dst` is that in the destination buffer.
    pub src: usize,
    pub dst: usize,
    /// Length in bytes of each run.
    pub run: usize,
    /// The loops, outermost first. None has a single iteration, and none could be merged with its
    /// neighbour.
    pub dims: Vec<Loop>,
}

/// A loop over runs or inner loops: the number of iterations, and the step in bytes in each buffer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Loop {
    pub(crate) count: usize,
    pub(crate) src_step: usize,
    pub(crate) dst_step: usize,
}

impl Loops {
    /// Returns the contiguous runs of `piece` in two buffers, or `None` for an empty piece.
    /// `lengths` are the buffers' lengths in bytes: (source, destination).
    ///
    /// # Panics
    ///
    /// If a length is not that of its region, or `piece` is not within both regions.
    pub(crate) fn checked(
        lengths: (usize, usize),
        src_region: &Region,
        dst_region: &Region,
        piece: &Region,
        item_bytes: usize,
    ) -> Option<Self> {
        let buffers = [("source", lengths.0, src_region), ("destination", lengths.1, dst_region)];
        for (name, found, region) in buffers {
            assert_eq!(
                found,
                region.elements() * item_bytes,
                "bytes of the {name} buffer of region {region}"
            );
            assert!(
                region.contains(piece),
                "piece {piece} is not within region {region} of the {name}"
            );
        }
        (!piece.is_empty()).then(|| Self::new(src_region, dst_region, piece, item_bytes))
    }

    /// Builds the loops. `piece` must be within both regions and not empty.
    fn new(src_region: &Region, dst_region: &Region, piece: &Region, item_bytes: usize) -> Self {
        let mut loops = Self { src: 0, dst: 0, run: item_bytes, dims: Vec::new() };
        // From the innermost dimension outwards. A dimension that continues the run or the loop
        // inside it is merged into it.
        let (mut src_step, mut dst_step) = (item_bytes, item_bytes);
        for dim in (0..piece.ndim()).rev() {
            let (range, outer_src, outer_dst) =
                (piece.range(dim), src_region.range(dim), dst_region.range(dim));
            loops.src += (range.start - outer_src.start) * src_step;
            loops.dst += (range.start - outer_dst.start) * dst_step;
            let count = range.len();
            if count > 1 {
                match loops.dims.last_mut() {
                    None if src_step == loops.run && dst_step == loops.run => loops.run *= count,
                    Some(inner)
                        if src_step == inner.count * inner.src_step
                            && dst_step == inner.count * inner.dst_step =>
                    {
                        inner.count *= count;
                    }
                    _ => loops.dims.push(Loop { count, src_step, dst_step }),
                }
            }
            src_step *= outer_src.len();
            dst_step *= outer_dst.len();
        }
        loops.dims.reverse();
        loops
    }

    /// Calls `copy` once per run, with its byte offsets (source, destination).
    #[inline(always)]
    fn each(&self, mut copy: impl FnMut(usize, usize)) {
        let Some((inner, outer)) = self.dims.split_last() else {
            return copy(self.src, self.dst);
        };
        let mut counters = vec![0; outer.len()];
        let (mut src, mut dst) = (self.src, self.dst);
        loop {
            let (mut s, mut d) = (src, dst);
            for _ in 0..inner.count {
                copy(s, d);
                s += inner.src_step;
                d += inner.dst_step;
            }
            // Advances the outer loops like an odometer.
            let mut dim = outer.len();
            loop {
                if dim == 0 {
                    return;
                }
                dim -= 1;
                let Loop { count, src_step, dst_step } = outer[dim];
                counters[dim] += 1;
                src += src_step;
                dst += dst_step;
                if counters[dim] < count {
                    break;
                }
                counters[dim] = 0;
                src -= count * src_step;
                dst -= count * dst_step;
            }
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    fn region<const N: usize>(bounds: [(usize, usize); N]) -> Region {
        bounds.into_iter().collect()
    }

    /// Returns the byte offset of an element in the buffer of a region.
    fn offset(region: &Region, index: &[usize], item_bytes: usize) -> usize {
        let step =
            |at: usize, (range, i): (Range<usize>, &usize)| at * range.len() + (i - range.start);
        region.ranges().zip(index).fold(0, step) * item_bytes
    }

    fn indices(region: &Region) -> Vec<Vec<usize>> {
        region.ranges().fold(vec![vec![]], |outer, range| {
            let extend = |index: &Vec<usize>| {
                let index = index.clone();
                range.clone().map(move |i| index.iter().copied().chain([i]).collect::<Vec<usize>>())
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
            let (s, d) = (offset(from, &index, item_bytes), offset(to, &index, item_bytes));
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
        assert_eq!(contiguous_bytes(&whole, &region([(3, 5), (0, 8)]), 4), Some(32..96));
        assert_eq!(contiguous_bytes(&whole, &region([(3, 4), (2, 5)]), 4), Some(40..52));
        assert_eq!(contiguous_bytes(&whole, &region([(3, 5), (0, 4)]), 4), None);
        assert_eq!(contiguous_bytes(&whole, &region([(0, 2), (0, 8)]), 4), None, "not within");
    }

    #[test]
    fn pieces_larger_than_caches_are_copied() {
        // Columns of an odd width, so that runs start at any alignment.
        let (from, to) = (region([(0, 9500), (0, 1001)]), region([(0, 9500), (100, 1001)]));
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
        assert_eq!((rows.dims.len(), rows.run), (1, 8), "both outer dimensions are one loop");
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
        let dim = (0..3usize, 0..3usize, 0..=elements, 0..3usize, 0..3usize, any::<[bool; 2]>());
        proptest::collection::vec(dim, 0..=dims).prop_map(|dims| {
            let mut regions = [Vec::new(), Vec::new(), Vec::new()];
            for (a, b, size, c, d, tight) in dims {
                let (start, end) = (3, 3 + size);
                regions[0].push((start, end));
                // Often the same extent as the inner region, so that contiguous runs merge.
                regions[1].push(if tight[0] { (start, end) } else { (start - a, end + b) });
                regions[2].push(if tight[1] { (start, end) } else { (start - c, end + d) });
            }
            let [piece, from, to] = regions.map(Region::from_iter);
            (piece, from, to)
        })
    }
}
