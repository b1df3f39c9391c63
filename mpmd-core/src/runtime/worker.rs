//! A thread that does jobs in the order they come.

use std::sync::mpsc::{Sender, channel};

/// A job for a [`Worker`].
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// A named thread with an in-order queue. Dropping it lets the thread finish its queue and end.
pub(crate) struct Worker {
    jobs: Sender<Job>,
}

impl Worker {
    /// Starts the thread.
    pub(crate) fn start(name: String) -> std::io::Result<Self> {
        let (jobs, queue) = channel::<Job>();
        std::thread::Builder::new().name(name).spawn(move || {
            for job in queue {
                // A panic in a job has been turned into a failure by whoever made the job; one that
                // gets here must not end the thread with jobs behind it.
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            }
        })?;
        Ok(Self { jobs })
    }

    /// Queues a job.
    pub(crate) fn push(&self, job: Job) {
        // The thread ends only after every sender is gone, so this cannot fail while `self` is alive.
        let _ = self.jobs.send(job);
    }
}
