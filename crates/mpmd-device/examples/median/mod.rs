//! The median time of some work.

use std::time::Instant;

/// Returns the median time of `work` in seconds, after one call that is not counted.
pub(crate) fn median(repeats: usize, mut work: impl FnMut()) -> f64 {
    work();
    let mut seconds: Vec<f64> = (0..repeats)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
