//! Measures plain copies: the memory bandwidth, an upper bound for any move of arrays.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use crate::case::Case;
use crate::options::Size;

/// Minimum number of bytes that a thread copies for one sample, so that reading the clock hardly
/// counts.
const SAMPLE_BYTES: usize = 64 << 20;

/// Measures copies of `bytes` bytes by `threads` threads into memory that was written before. The
/// case is a reference for moves of the same number of bytes.
pub(super) fn plain(bytes: usize, threads: usize, repeats: usize) -> Case {
    let plural = if threads == 1 { "" } else { "s" };
    let parameters = format!("{}, {threads} thread{plural}", Size(bytes));
    Case::bandwidth("memcpy", parameters, bytes, times(bytes, threads, repeats))
}

/// Returns the mean time of one copy of `bytes` bytes for each sample. Each of `threads` threads
/// copies an equal part of the bytes.
fn times(bytes: usize, threads: usize, repeats: usize) -> Vec<Duration> {
    let (share, start) = (bytes / threads, Barrier::new(threads));
    let rounds = SAMPLE_BYTES.div_ceil(share);
    let one = || {
        let source = vec![7u8; share];
        let mut target = vec![1u8; share];
        let mut spans = Vec::with_capacity(repeats);
        for repeat in 0..=repeats {
            start.wait();
            let begin = Instant::now();
            for _ in 0..rounds {
                // The compiler must assume that the buffers are used elsewhere, so it keeps every
                // copy.
                let source = std::hint::black_box(source.as_slice());
                std::hint::black_box(&mut target).copy_from_slice(source);
            }
            if repeat > 0 {
                spans.push((begin, Instant::now()));
            }
        }
        spans
    };
    let spans: Vec<Vec<(Instant, Instant)>> = std::thread::scope(|scope| {
        let started: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
        let joined = started.into_iter().map(|thread| thread.join());
        joined
            .map(|spans| spans.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let whole = |repeat: usize| {
        let begin = spans.iter().map(|spans| spans[repeat].0).min()?;
        let end = spans.iter().map(|spans| spans[repeat].1).max()?;
        Some((end - begin) / rounds as u32)
    };
    (0..repeats).filter_map(whole).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_repeat_has_a_time() {
        for threads in [1, 3] {
            let times = times(3 << 16, threads, 2);
            assert!(
                times.len() == 2 && times.iter().all(|time| *time > Duration::ZERO),
                "{times:?}"
            );
        }
    }
}
