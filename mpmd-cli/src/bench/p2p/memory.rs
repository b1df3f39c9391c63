//! A plain copy of as many bytes, for comparison.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use super::found::{Found, Test};
use super::pace::Pace;

/// One thread's copies between two buffers whose pages are there.
pub(super) fn memcpy(bytes: usize, repeats: usize, pace: &Pace) -> Found {
    let source = vec![7u8; bytes];
    let mut target = vec![1u8; bytes];
    let mut copy = |times: u64| -> Duration {
        let start = Instant::now();
        for _ in 0..times {
            // The buffers may be used elsewhere for all that the compiler knows, so every copy is made.
            std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&source));
        }
        start.elapsed()
    };
    let Ok(one) = Pace::warm(bytes, 1, |times| Ok::<_, Infallible>((times, copy(times))));
    let times = pace.rounds(one);
    let mut found = Found::new(Test::Memcpy, bytes);
    for _ in 0..repeats {
        found.add(times, copy(times));
    }
    found
}
