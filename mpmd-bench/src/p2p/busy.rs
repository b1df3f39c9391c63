//! Background load, so that the measured pair does not have the cores to itself.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// The time after which the threads stop even if [`Busy`] is not dropped.
const LONGEST: Duration = Duration::from_secs(1800);

/// The number of counts between two looks at the clock and at the order to stop.
const STRIDE: u64 = 100_000;

/// Threads that each keep a core busy. Dropping this stops the threads and waits for them.
#[derive(Debug)]
pub(super) struct Busy {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Busy {
    /// Starts `count` threads that keep cores busy; returns at once.
    pub(super) fn start(count: usize) -> Result<Self> {
        let mut busy = Self { stop: Arc::default(), threads: Vec::new() };
        for number in 0..count {
            let stop = busy.stop.clone();
            let thread = std::thread::Builder::new()
                .name(format!("busy-{number}"))
                .spawn(move || keep_busy(&stop))
                .context("starting a thread that keeps a core busy")?;
            busy.threads.push(thread);
        }
        Ok(busy)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // The thread has no way to fail.
            let _ = thread.join();
        }
    }
}

fn keep_busy(stop: &AtomicBool) {
    let until = Instant::now() + LONGEST;
    let mut count = 0u64;
    while !stop.load(Ordering::Relaxed) && Instant::now() < until {
        for _ in 0..STRIDE {
            count = black_box(count.wrapping_add(1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_end_when_dropped() {
        let busy = Busy::start(2).unwrap();
        assert_eq!(busy.threads.len(), 2);
        let stop = busy.stop.clone();
        drop(busy);
        assert_eq!(Arc::strong_count(&stop), 1, "both threads are gone");
    }
}
