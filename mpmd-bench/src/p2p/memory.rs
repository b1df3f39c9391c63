//! Measures the memory of this host: a plain copy of as many bytes, and the available memory.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use super::found::{Samples, Test};
use super::pace::Pace;

/// Measures one thread's copies of `bytes` bytes between two warm buffers.
pub(super) fn memcpy(bytes: usize, repeats: usize, pace: &Pace) -> Samples {
    let source = vec![7u8; bytes];
    let mut target = vec![1u8; bytes];
    let mut copy = |times: u64| -> Duration {
        let start = Instant::now();
        for _ in 0..times {
            // The compiler must assume that the buffers are used elsewhere, so it keeps every copy.
            std::hint::black_box(&mut target).copy_from_slice(std::hint::black_box(&source));
        }
        start.elapsed()
    };
    let Ok(one) = Pace::warm(bytes, 1, |times| Ok::<_, Infallible>((times, copy(times))));
    let times = pace.rounds(one);
    let mut found = Samples::new(Test::Memcpy, bytes);
    for _ in 0..repeats {
        found.add(times, copy(times));
    }
    found
}

/// Returns the bytes of host memory that are available without swapping, by the kernel's estimate.
/// `None` if it gives none.
pub(super) fn available() -> Option<u64> {
    available_of(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn available_of(meminfo: &str) -> Option<u64> {
    let kib = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    kib.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_meminfo() {
        let meminfo = "MemTotal:       24630148 kB\nMemFree:  1 kB\nMemAvailable:   20480 kB\n";
        assert_eq!(available_of(meminfo), Some(20 << 20));
        assert_eq!(available_of("MemTotal: 1 kB\n"), None);
    }
}
