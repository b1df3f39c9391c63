//! Threads that do jobs in the order they come.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

use parking_lot::{Condvar, Mutex};

use super::spin::Spin;

/// A job for a [`Worker`] or a [`Crew`].
pub(crate) type Job = Box<dyn FnOnce() + Send>;

/// A named thread with an in-order queue. Dropping it lets the thread finish its queue and end.
pub(crate) struct Worker {
    jobs: Sender<Job>,
}

/// Threads that share a queue: jobs start in order, and end as they end. Dropping it lets the threads
/// finish the queue and end.
pub(crate) struct Crew {
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Worker {
    /// Starts the thread, which looks for jobs as `spin` says before it sleeps.
    pub(crate) fn start(name: String, spin: Spin) -> std::io::Result<Self> {
        let (jobs, queue) = channel::<Job>();
        let work = move || {
            // That the queue is closed shows when it is waited for.
            while let Some(job) = spin.look(|| queue.try_recv().ok()).or_else(|| queue.recv().ok()) {
                run(job);
            }
        };
        std::thread::Builder::new().name(name).spawn(work)?;
        Ok(Self { jobs })
    }

    /// Queues a job.
    pub(crate) fn push(&self, job: Job) {
        // The thread ends only after every sender is gone, so this cannot fail while `self` is alive.
        let _ = self.jobs.send(job);
    }
}

impl Crew {
    /// Starts the threads.
    pub(crate) fn start(name: &str, threads: usize) -> std::io::Result<Self> {
        let crew = Self { queue: Arc::default() };
        for i in 0..threads {
            let queue = crew.queue.clone();
            let work = move || {
                while let Some(job) = queue.next() {
                    run(job);
                }
            };
            std::thread::Builder::new().name(format!("{name}-{i}")).spawn(work)?;
        }
        Ok(crew)
    }

    /// Queues a job.
    pub(crate) fn push(&self, job: Job) {
        self.queue.state.lock().jobs.push_back(job);
        self.queue.changed.notify_one();
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.queue.state.lock().closed = true;
        self.queue.changed.notify_all();
    }
}

impl Queue {
    /// The next job; `None` once there will be no more.
    fn next(&self) -> Option<Job> {
        let mut state = self.state.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            if state.closed {
                return None;
            }
            self.changed.wait(&mut state);
        }
    }
}

/// A panic in a job has been turned into a failure by whoever made the job; one that gets here must not
/// end the thread with jobs behind it.
fn run(job: Job) {
    let _ = catch_unwind(AssertUnwindSafe(job));
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    #[test]
    fn a_crew_works_on_several_jobs_at_once() {
        let crew = Crew::start("test", 2).unwrap();
        let (there, here) = (mpsc::channel(), mpsc::channel());
        // Each waits for the other: one thread would never get to the second.
        crew.push(Box::new(move || {
            there.0.send(()).unwrap();
            here.1.recv_timeout(SOON).unwrap();
        }));
        let (done, all_done) = mpsc::channel();
        crew.push(Box::new(move || {
            there.1.recv_timeout(SOON).unwrap();
            here.0.send(()).unwrap();
            done.send(()).unwrap();
        }));
        all_done.recv_timeout(SOON).unwrap();
    }

    #[test]
    fn jobs_behind_a_panic_and_before_the_end_are_done() {
        let crew = Crew::start("test", 1).unwrap();
        let (done, all_done) = mpsc::channel();
        crew.push(Box::new(|| std::panic::resume_unwind(Box::new("expected"))));
        (0..10).for_each(|i| {
            let done = done.clone();
            crew.push(Box::new(move || done.send(i).unwrap()));
        });
        drop((crew, done));
        let found: Vec<i32> = std::iter::from_fn(|| all_done.recv_timeout(SOON).ok()).collect();
        assert_eq!(found, (0..10).collect::<Vec<_>>());
    }
}
