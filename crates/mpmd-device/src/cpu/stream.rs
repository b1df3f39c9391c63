//! Memory copies with streaming (non-temporal) stores, which bypass the caches.
//!
//! An ordinary store first reads the cache line that it writes. For gigabytes of data this adds
//! half as much traffic to the memory bus, which is the limit. Streaming stores avoid the read.
//! They pay only if the written data is too large to stay in the caches anyway.
//!
//! The hardware fetches ahead only within a page of the source, so the beginning of each short run
//! would be waited for. These copies fetch the bytes ahead themselves.

#[cfg(target_arch = "x86_64")]
use super::{VectorWidth, width};

/// Size in bytes of a destination from which on streaming stores are faster. Other destinations are
/// usually written at the same time, and together they do not fit into the caches.
pub(crate) const STREAM_BYTES: usize = 8 << 20;

/// Size in bytes of the smallest piece for which streaming stores repay their fence.
pub(crate) const SMALLEST_PIECE: usize = 64 << 10;

/// Length in bytes of the shortest run that gains from streaming stores. Its unaligned ends are
/// copied normally.
pub(crate) const SHORTEST_RUN: usize = 256;

/// Distance in bytes by which prefetches run ahead of loads.
pub(crate) const AHEAD: usize = 4 << 10;

/// A series of copies by streaming stores, which bypass the caches. Dropping it issues the fence,
/// after which other threads may read the written data.
#[derive(Debug)]
pub(crate) struct StreamingStores(());

impl StreamingStores {
    /// Begins a series of copies. Returns `None` if the width in force has no streaming
    /// stores.
    pub(crate) fn new() -> Option<Self> {
        #[cfg(target_arch = "x86_64")]
        let has = width() >= VectorWidth::Avx2;
        #[cfg(not(target_arch = "x86_64"))]
        let has = false;
        has.then(|| Self(()))
    }

    /// Copies `src` to `dst` with streaming stores, except at unaligned ends. Prefetches bytes
    /// `AHEAD` bytes further on, which may be the first bytes of `next`.
    ///
    /// # Panics
    ///
    /// If the lengths of `dst` and `src` differ.
    pub(crate) fn copy(&mut self, dst: &mut [u8], src: &[u8], next: &[u8]) {
        assert_eq!(dst.len(), src.len(), "a copy has two sides of one length");
        #[cfg(target_arch = "x86_64")]
        // SAFETY: `new` found AVX, which AVX2 includes, or there would be no `self`.
        unsafe {
            x86::copy(dst, src, next)
        };
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = next;
            dst.copy_from_slice(src);
        }
    }
}

impl Drop for StreamingStores {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        x86::fence();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{
        __m256i, _MM_HINT_T0, _mm_prefetch, _mm_sfence, _mm256_loadu_si256, _mm256_stream_si256,
    };

    use super::AHEAD;

    /// Size in bytes of a cache line. Two consecutive stores write a whole line.
    const LINE: usize = 2 * size_of::<__m256i>();

    #[target_feature(enable = "avx")]
    pub(super) fn copy(dst: &mut [u8], src: &[u8], next: &[u8]) {
        let head = dst.as_ptr().align_offset(LINE).min(dst.len());
        let (first, dst) = dst.split_at_mut(head);
        let (begin, src) = src.split_at(head);
        first.copy_from_slice(begin);

        let whole = dst.len() / LINE * LINE;
        let (dst, last) = dst.split_at_mut(whole);
        let (src, end) = src.split_at(whole);
        last.copy_from_slice(end);

        // Bytes for which the line that is fetched lies in `src` too.
        let own = src.len().saturating_sub(AHEAD);
        let lines = dst
            .chunks_exact_mut(LINE)
            .zip(src.chunks_exact(LINE))
            .enumerate();

        for (line, (to, from)) in lines {
            let at = line * LINE;
            let soon = match at.checked_sub(own) {
                None => from.as_ptr().wrapping_add(AHEAD),
                Some(past) => next.as_ptr().wrapping_add(past),
            };
            let to = to.as_mut_ptr().cast::<__m256i>();
            let from = from.as_ptr().cast::<__m256i>();
            // SAFETY: both chunks are two vectors long, so both loads and both stores lie in them.
            // Loads take any address. `to` is aligned to a line, because `head` bytes were left out
            // for that and each chunk is a line long. The borrows keep others from the memory. A
            // prefetch may name any address: it accesses no memory that the program could observe,
            // and does not fault.
            unsafe {
                _mm_prefetch::<_MM_HINT_T0>(soon.cast());
                let a = _mm256_loadu_si256(from);
                let b = _mm256_loadu_si256(from.add(1));
                _mm256_stream_si256(to, a);
                _mm256_stream_si256(to.add(1), b);
            }
        }
    }

    pub(super) fn fence() {
        // SAFETY: SSE is part of every x86_64, and a fence touches no memory.
        unsafe { _mm_sfence() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives_at_any_offset_and_length() {
        let src: Vec<u8> = (0..700).map(|i| (i * 7 % 251) as u8).collect();
        for offset in 0..70 {
            for length in [0, 1, 15, 16, 63, 64, 65, 127, 128, 400, 500] {
                let mut dst = vec![0xee; 700];
                let Some(mut stream) = StreamingStores::new() else {
                    return;
                };
                stream.copy(
                    &mut dst[offset..offset + length],
                    &src[3..3 + length],
                    &src[600..],
                );
                drop(stream);
                assert_eq!(dst[offset..offset + length], src[3..3 + length]);
                assert!(
                    dst[..offset]
                        .iter()
                        .chain(&dst[offset + length..])
                        .all(|byte| *byte == 0xee)
                );
            }
        }
    }

    #[test]
    fn runs_longer_than_the_distance_ahead_arrive() {
        let src: Vec<u8> = (0..3 * AHEAD).map(|i| (i % 251) as u8).collect();
        let mut dst = vec![0; src.len()];
        let Some(mut stream) = StreamingStores::new() else {
            return;
        };
        stream.copy(&mut dst, &src, &[]);
        drop(stream);
        assert_eq!(dst, src);
    }

    #[test]
    #[should_panic(expected = "one length")]
    fn different_lengths_panic() {
        StreamingStores(()).copy(&mut [0; 3], &[0; 4], &[]);
    }
}
