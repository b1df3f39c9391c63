//! A thread for calls that may take long: it maps the pages of new segments, and calls a device's
//! driver.
//!
//! Freeing device memory, or closing another process's, may wait until the device is idle. That may
//! never happen, if a kernel does not end. So such memory is released on this
//! thread: the code that reports dead processes must not wait for it.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;

type Job = Box<dyn FnOnce() + Send>;

/// Runs jobs in order on a background thread. The thread starts with the first job. It ends when
/// the reaper is dropped and all jobs are done; nothing joins it.
#[derive(Default)]
pub(super) struct Reaper(Mutex<Option<Sender<Job>>>);

impl Reaper {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Queues `job` for the background thread, or runs it at once if the thread cannot be started.
    pub(super) fn later(&self, job: impl FnOnce() + Send + 'static) {
        let mut queue = self.0.lock();
        if queue.is_none() {
            let (sender, jobs) = channel::<Job>();
            let started = std::thread::Builder::new()
                .name("mpmd-shm-reaper".to_owned())
                .spawn(move || jobs.into_iter().for_each(|job| job()));
            *queue = started.ok().map(|_| sender);
        }

        let job: Job = Box::new(job);
        let left = match &*queue {
            Some(sender) => sender.send(job).err().map(|error| error.0),
            None => Some(job),
        };

        drop(queue);
        if let Some(job) = left {
            job();
        }
    }

    /// Blocks until all jobs queued so far are done, but not longer than `most`.
    pub(super) fn settle(&self, most: Duration) {
        if self.0.lock().is_none() {
            return;
        }
        let (done, wait) = channel::<()>();
        self.later(move || drop(done));
        // Nothing is ever sent: either the sender is dropped, or the time is over.
        let _ = wait.recv_timeout(most);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn slow_jobs_block_nobody_and_run_in_order() {
        let reaper = Reaper::new();
        reaper.settle(Duration::from_secs(10));
        let (go, gate) = channel::<()>();
        let order = Arc::new(Mutex::new(Vec::new()));
        let first = order.clone();
        reaper.later(move || {
            let _ = gate.recv_timeout(Duration::from_secs(10));
            first.lock().push(1);
        });
        let second = order.clone();
        reaper.later(move || second.lock().push(2));
        let begin = Instant::now();
        reaper.settle(Duration::from_millis(20));
        assert!(begin.elapsed() < Duration::from_secs(5) && order.lock().is_empty());
        go.send(()).unwrap();
        reaper.settle(Duration::from_secs(10));
        assert_eq!(*order.lock(), [1, 2]);
    }
}
