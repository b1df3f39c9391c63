//! Measures plain copies: the memory bandwidth, an upper bound for any move of arrays.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use clap::Args;

use crate::case::{Case, Output};
use crate::options::{Options, Size};

/// The minimum number of bytes that a thread copies for one sample, so that reading the clock
/// hardly counts. An allocation of this size comes from the system and not from previously freed
/// memory.
const SAMPLE_BYTES: usize = 64 << 20;

#[derive(Args, Clone, Debug)]
pub(crate) struct MemcpyArgs {
    #[command(flatten)]
    options: Options,
    /// Bytes of each copy, divided among the threads, also as 4Ki, 16Mi, 1Gi.
    #[arg(long, value_delimiter = ',', default_value = "1Mi,16Mi,64Mi,256Mi")]
    sizes: Vec<Size>,
    /// Numbers of threads that copy at the same time.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    threads: Vec<usize>,
}

/// The state of the memory that a copy writes to.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Target {
    /// Memory that was written before.
    Warm,
    /// New memory. The system provides its pages at the first write.
    Fresh,
}

/// Measures copies of each size, into warm and fresh memory, by each number of threads. Prints the
/// results.
pub(super) fn memcpy(args: &MemcpyArgs) -> Result<()> {
    for Size(bytes) in args.sizes.iter().copied() {
        for threads in args.threads.iter().copied() {
            ensure!((1..=256).contains(&threads), "--threads is from 1 to 256, not {threads}");
            ensure!(bytes >= threads, "{bytes} bytes are too few for {threads} threads");
        }
    }
    let mut cases = Output::new(args.options.json);
    for size in args.sizes.iter().copied() {
        for threads in args.threads.iter().copied() {
            for target in [Target::Warm, Target::Fresh] {
                // The remainder of the division is not copied.
                let bytes = size.0 / threads * threads;
                let parameters = parameters(size.0, threads, target);
                let times = times(bytes, threads, target, args.options.repeats.max(1));
                cases.push(Case::bandwidth("memcpy", parameters, bytes, times));
            }
        }
    }
    cases.end();
    Ok(())
}

/// Measures copies of `bytes` bytes by `threads` threads into warm memory, as a reference for moves
/// of as many bytes.
pub(super) fn plain(bytes: usize, threads: usize, repeats: usize) -> Case {
    let parameters = parameters(bytes, threads, Target::Warm);
    Case::bandwidth("memcpy", parameters, bytes, times(bytes, threads, Target::Warm, repeats))
}

fn parameters(bytes: usize, threads: usize, target: Target) -> String {
    let target = match target {
        Target::Warm => "warm",
        Target::Fresh => "fresh",
    };
    let plural = if threads == 1 { "" } else { "s" };
    format!("{}, {target}, {threads} thread{plural}", Size(bytes))
}

/// Returns the mean time of one copy of `bytes` bytes in each sample. `threads` threads each copy
/// an equal part of them.
fn times(bytes: usize, threads: usize, target: Target, repeats: usize) -> Vec<Duration> {
    let (share, start) = (bytes / threads, Barrier::new(threads));
    let rounds = SAMPLE_BYTES.div_ceil(share);
    let one = || {
        let source = vec![7u8; share];
        let mut warm = if target == Target::Warm { vec![1u8; share] } else { Vec::new() };
        let mut spans = Vec::with_capacity(repeats);
        for repeat in 0..=repeats {
            let mut fresh = match target {
                Target::Warm => Vec::new(),
                Target::Fresh => Vec::with_capacity(share * rounds),
            };
            start.wait();
            let begin = Instant::now();
            for _ in 0..rounds {
                // The compiler must assume that the buffers are used elsewhere, so it keeps every
                // copy.
                let source = std::hint::black_box(source.as_slice());
                match target {
                    Target::Warm => std::hint::black_box(&mut warm).copy_from_slice(source),
                    Target::Fresh => std::hint::black_box(&mut fresh).extend_from_slice(source),
                }
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
        joined.map(|spans| spans.unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    });
    let whole = |repeat: usize| {
        let of = spans.iter().map(|spans| spans[repeat]);
        let (begins, ends): (Vec<_>, Vec<_>) = of.unzip();
        let (begin, end) = (begins.into_iter().min(), ends.into_iter().max());
        begin.zip(end).map(|(begin, end)| (end - begin) / rounds as u32)
    };
    (0..repeats).filter_map(whole).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_repeat_has_a_time() {
        for target in [Target::Warm, Target::Fresh] {
            for threads in [1, 3] {
                let times = times(3 << 16, threads, target, 2);
                assert!(
                    times.len() == 2 && times.iter().all(|time| *time > Duration::ZERO),
                    "{times:?}"
                );
            }
        }
    }
}
