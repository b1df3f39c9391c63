//! Memory copies with streaming (non-temporal) stores, which bypass the caches.
//!
//! An ordinary store first reads the cache line that it writes. For gigabytes of data this adds
//! half as much traffic to the memory bus, which is the limit. Streaming stores avoid the read.
//! They pay only if the written data is too large to stay in the caches anyway.

/// The total size in bytes of a copy from which streaming stores are faster. More than the part of
/// the second-level cache that would survive until the data is read.
pub(crate) const STREAM_BYTES: usize = 2 << 20;

/// The shortest run in bytes that gains from streaming stores: unaligned ends are copied normally.
pub(crate) const SHORTEST_RUN: usize = 256;

/// A series of streaming copies. Other threads may read the written data only after this is
/// dropped, which issues the fence.
#[derive(Debug)]
pub(crate) struct StreamingStores(());

impl StreamingStores {
    /// Begins a series of copies.
    pub(crate) fn new() -> Self {
        Self(())
    }

    /// Copies `src` to `dst`, on x86_64 with streaming stores except at unaligned ends.
    ///
    /// # Panics
    ///
    /// If the lengths differ.
    #[inline]
    pub(crate) fn copy(&mut self, dst: &mut [u8], src: &[u8]) {
        assert_eq!(dst.len(), src.len(), "a copy has two sides of one length");
        #[cfg(target_arch = "x86_64")]
        x86::copy(dst, src);
        #[cfg(not(target_arch = "x86_64"))]
        dst.copy_from_slice(src);
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
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

    /// The size in bytes of one store, and the alignment of its address.
    const LANE: usize = size_of::<__m128i>();

    /// The number of stores per cache line. They follow each other, so that the line is written as
    /// a whole.
    const LANES: usize = 4;

    pub(super) fn copy(dst: &mut [u8], src: &[u8]) {
        let head = dst.as_ptr().align_offset(LANE * LANES).min(dst.len());
        let (first, dst) = dst.split_at_mut(head);
        let (begin, src) = src.split_at(head);
        first.copy_from_slice(begin);
        let whole = dst.len() / (LANE * LANES) * (LANE * LANES);
        let (dst, last) = dst.split_at_mut(whole);
        let (src, end) = src.split_at(whole);
        last.copy_from_slice(end);
        for (to, from) in dst.chunks_exact_mut(LANE * LANES).zip(src.chunks_exact(LANE * LANES)) {
            let (to, from) = (to.as_mut_ptr().cast::<__m128i>(), from.as_ptr().cast::<__m128i>());
            // SAFETY: both chunks are LANES lanes long, so every lane of the loads and stores lies
            // in them. Loads take any address. `to` is aligned to a lane, because `head` bytes were
            // left out for that and a chunk is a whole number of lanes. The borrows keep others
            // from the memory. SSE2 is part of every x86_64.
            unsafe {
                let a = _mm_loadu_si128(from);
                let b = _mm_loadu_si128(from.add(1));
                let c = _mm_loadu_si128(from.add(2));
                let d = _mm_loadu_si128(from.add(3));
                _mm_stream_si128(to, a);
                _mm_stream_si128(to.add(1), b);
                _mm_stream_si128(to.add(2), c);
                _mm_stream_si128(to.add(3), d);
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
                let mut stream = StreamingStores::new();
                stream.copy(&mut dst[offset..offset + length], &src[3..3 + length]);
                drop(stream);
                assert_eq!(dst[offset..offset + length], src[3..3 + length]);
                assert!(
                    dst[..offset].iter().chain(&dst[offset + length..]).all(|byte| *byte == 0xee)
                );
            }
        }
    }

    #[test]
    #[should_panic(expected = "one length")]
    fn different_lengths_panic() {
        StreamingStores::new().copy(&mut [0; 3], &[0; 4]);
    }
}
