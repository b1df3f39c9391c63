//! A word of memory that two processes map, to measure the time of a bare futex wake-up.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::time::Duration;

use super::doorbell::Futex;
use super::futex::SystemFutex;
use super::shared_mapping::SharedMapping;
use super::shared_words::SharedWords;
use super::sync::{AtomicU32, Ordering};

/// A counter in memory that another process of the same user can map. One process increments it and
/// wakes the other, which sleeps. It measures the least cost of waking another process.
pub struct BareWord {
    memory: Arc<SharedMapping>,
    words: SharedWords<AtomicU32>,
}

impl BareWord {
    /// Creates a counter with value 0.
    ///
    /// # Errors
    ///
    /// If the system does not support memory that others can map.
    pub fn create() -> io::Result<Self> {
        SharedMapping::new(size_of::<u32>()).map(Self::of)
    }

    /// Opens the counter that another process has created, by its [path](Self::path).
    ///
    /// # Errors
    ///
    /// If that process has ended or belongs to another user, or if the path leads elsewhere.
    pub fn open(path: &str) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        SharedMapping::of(file.into(), size_of::<u32>()).map(Self::of)
    }

    fn of(memory: SharedMapping) -> Self {
        let memory = Arc::new(memory);
        let first = memory.at(0, size_of::<u32>());
        // SAFETY: the mapping has these 4 bytes until `memory` is dropped, which `SharedWords`
        // keeps. Both processes access them through this type alone: as one atomic.
        let words = unsafe { SharedWords::at(first, 1, memory.clone()) };

        Self { memory, words }
    }

    /// Returns the path by which another process of this host can [open](Self::open) the counter,
    /// as long as this process lives.
    pub fn path(&self) -> String {
        format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            self.memory.as_fd().as_raw_fd()
        )
    }

    /// Returns the value of the counter.
    pub fn value(&self) -> u32 {
        self.words[0].load(Ordering::Acquire)
    }

    /// Increments the counter and wakes the other process if it [waits](Self::wait).
    pub fn count(&self) {
        self.words[0].fetch_add(1, Ordering::Release);
        SystemFutex.wake(&self.words[0], false);
    }

    /// Sleeps until the counter differs from `value`, but not longer than `timeout`. May return
    /// early.
    pub fn wait(&self, value: u32, timeout: Duration) {
        SystemFutex.wait(&self.words[0], value, Some(timeout));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn count_wakes_a_sleeper_in_another_mapping() {
        let here = BareWord::create().unwrap();
        let there = BareWord::open(&here.path()).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while there.value() < 3 {
                    there.wait(there.value(), Duration::from_secs(20));
                }
                there.count();
            });
            (0..3).for_each(|_| here.count());
            while here.value() < 4 {
                here.wait(here.value(), Duration::from_secs(20));
            }
        });
        assert_eq!(there.value(), 4);
        assert!(BareWord::open("/proc/self/status").is_err());
    }
}
