//! Copies one piece between two row-major buffers.
//!
//! Both buffers have their dimensions in the same order, so the copy walks forward through both,
//! row by row. Caches and prefetchers see sequential streams. There is no transpose, so copying in
//! blocks would gain nothing.

#[cfg(test)]
pub(crate) mod tests;

use std::ops::Range;

use crate::cpu::stream::{AHEAD, SHORTEST_RUN, SMALLEST_PIECE, STREAM_BYTES, StreamingStores};
use mpmd_layout::region::Region;

/// Copies the elements of region `piece` from buffer `src`, which holds `src_region`, to buffer
/// `dst`, which holds `dst_region`.
///
/// Both buffers are row-major over their regions, with `item_bytes` bytes for each element. Runs
/// that are contiguous in both buffers are copied in one go. Bytes of `dst` outside the piece do
/// not change.
///
/// # Panics
///
/// If a buffer's length does not match its region, or `piece` is not within both regions.
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

/// Copies the elements of `piece` as [`copy_region`] does. `written` is the number of bytes that
/// this and simultaneous copies write. If these bytes do not fit into the caches, the copy bypasses
/// the caches.
///
/// # Panics
///
/// If a buffer's length does not match its region, or `piece` is not within both regions.
pub fn copy_part(
    src: &[u8],
    src_region: &Region,
    dst: &mut [u8],
    dst_region: &Region,
    piece: &Region,
    item_bytes: usize,
    written: usize,
) {
    let Some(loops) = Loops::checked(
        src.len(),
        dst.len(),
        src_region,
        dst_region,
        piece,
        item_bytes,
    ) else {
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

/// Calls `each` with every run of bytes that is contiguous in both buffers: (bytes in `dst`, bytes
/// in `src`). Copies nothing itself.
///
/// # Panics
///
/// If a buffer's length does not match its region, or `piece` is not within both regions.
pub(super) fn runs(
    src: &[u8],
    src_region: &Region,
    dst: &mut [u8],
    dst_region: &Region,
    piece: &Region,
    item_bytes: usize,
    each: &mut dyn FnMut(&mut [u8], &[u8]),
) {
    let Some(loops) = Loops::checked(
        src.len(),
        dst.len(),
        src_region,
        dst_region,
        piece,
        item_bytes,
    ) else {
        return;
    };

    let run = loops.run;
    loops.each(|s, d| each(&mut dst[d..d + run], &src[s..s + run]));
}

/// Returns the byte range of `piece` in a buffer that holds region `within`, if the range is
/// contiguous.
///
/// Returns `None` if the piece consists of several runs or is not within the region. Returns the
/// empty range at 0 for an empty piece.
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
    loops
        .dims
        .is_empty()
        .then(|| loops.src..loops.src + loops.run)
}

#[inline(always)]
fn fixed<const N: usize>(src: &[u8], dst: &mut [u8], s: usize, d: usize) {
    dst[d..d + N].copy_from_slice(&src[s..s + N]);
}

/// The contiguous runs of a piece, as nested loops. All offsets and lengths are in bytes.
pub(crate) struct Loops {
    /// Byte offset of the first run in the source buffer. `dst` is the offset in the destination
    /// buffer.
    pub src: usize,
    pub dst: usize,
    /// Length in bytes of each run.
    pub run: usize,
    /// The loops, outermost first. Each has several iterations and cannot be merged with its
    /// neighbour.
    pub dims: Vec<Loop>,
}

/// A loop over runs or inner loops: the number of iterations, and its step in bytes in each buffer.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) struct Loop {
    pub(crate) count: usize,
    pub(crate) src_step: usize,
    pub(crate) dst_step: usize,
}

impl Loops {
    /// Returns the runs of `piece` that are contiguous in both buffers, or `None` for an empty
    /// piece. `src_bytes` and `dst_bytes` are the lengths of the buffers.
    ///
    /// # Panics
    ///
    /// If a length does not match its region, or `piece` is not within both regions.
    pub(crate) fn checked(
        src_bytes: usize,
        dst_bytes: usize,
        src_region: &Region,
        dst_region: &Region,
        piece: &Region,
        item_bytes: usize,
    ) -> Option<Self> {
        let buffers = [
            ("source", src_bytes, src_region),
            ("destination", dst_bytes, dst_region),
        ];
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
        let mut loops = Self {
            src: 0,
            dst: 0,
            run: item_bytes,
            dims: Vec::new(),
        };

        // From the innermost dimension outwards. A dimension that continues the run or the loop
        // inside it is merged into it.
        let mut src_step = item_bytes;
        let mut dst_step = item_bytes;

        for dim in (0..piece.ndim()).rev() {
            let range = piece.range(dim);
            let outer_src = src_region.range(dim);
            let outer_dst = dst_region.range(dim);
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
                    _ => loops.dims.push(Loop {
                        count,
                        src_step,
                        dst_step,
                    }),
                }
            }
            src_step *= outer_src.len();
            dst_step *= outer_dst.len();
        }

        loops.dims.reverse();
        loops
    }

    /// Calls `copy` once per run, with (byte offset in the source, byte offset in the destination).
    #[inline(always)]
    fn each(&self, mut copy: impl FnMut(usize, usize)) {
        let Some((inner, outer)) = self.dims.split_last() else {
            return copy(self.src, self.dst);
        };

        let mut counters = vec![0; outer.len()];
        let mut src = self.src;
        let mut dst = self.dst;

        loop {
            let mut s = src;
            let mut d = dst;
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
                let Loop {
                    count,
                    src_step,
                    dst_step,
                } = outer[dim];
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
