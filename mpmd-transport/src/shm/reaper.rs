//! A thread for what a device's driver may take its time over.
//!
//! To free memory of a device, or to close another process's, may wait until the device has nothing
//! more to do; and that may be never, where it waits for a process which is no more. So who lets go
//! of such memory leaves it to this thread: whoever tells of the death of processes must not wait
//! for it.

use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use parking_lot::Mutex;

type Job = Box<dyn FnOnce() + Send>;

/// Does what it is given, in order, on a thread that begins with the first and ends after the last.
/// Nobody waits for that thread.
#[derive(Default)]
pub(super) struct Reaper(Mutex<Option<Sender<Job>>>);

impl Reaper {
    pub(super) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Has `job` done on the thread; here where there can be none.
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

    /// Waits until what it was given so far is done, but no longer than `most`.
    pub(super) fn settle(&self, most: Duration) {
        if self.0.lock().is_none() {
            return;
        }
        let (done, wait) = channel::<()>();
        self.later(move || drop(done));
        // Nothing is ever sent: either the sender goes, or time is over.
        let _ = wait.recv_timeout(most);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn nobody_waits_for_what_takes_its_time_and_all_is_done_in_order() {
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
