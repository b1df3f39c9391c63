//! Threads that do jobs in the order they come.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

use super::spin::Spin;

/// A job for a [`Worker`] or a [`Crew`].
pub(crate) type Job = Box<dyn Work>;

/// What a job does: a closure, or something whose box is of further use.
pub(crate) trait Work: Send {
    /// Does it.
    fn run(self: Box<Self>);
}

impl<F: FnOnce() + Send> Work for F {
    fn run(self: Box<Self>) {
        (*self)();
    }
}

/// A named thread with an in-order queue. Dropping it lets the thread finish its queue and end.
pub(crate) struct Worker {
    queue: Arc<Queue>,
}

/// Threads that share a queue: jobs start in order, and end as they end. Dropping it lets the
/// threads finish the queue and end.
pub(crate) struct Crew {
    queue: Arc<Queue>,
}

#[derive(Default)]
struct Queue {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether there are jobs, for who looks without the lock.
    any: AtomicBool,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl Worker {
    /// Starts the thread, which looks for jobs as `spin` says before it sleeps.
    pub(crate) fn start(name: String, spin: Spin) -> std::io::Result<Self> {
        let worker = Self { queue: Arc::default() };
        let queue = worker.queue.clone();
        let work = move || {
            let mut jobs = VecDeque::new();
            loop {
                // That the queue is closed shows when it is waited for.
                spin.look(|| queue.any.load(Ordering::Acquire).then_some(()));
                if !queue.take_all(&mut jobs) {
                    return;
                }
                jobs.drain(..).for_each(run);
            }
        };
        std::thread::Builder::new().name(name).spawn(work)?;
        Ok(worker)
    }

    /// Queues a job.
    pub(crate) fn push(&self, job: Job) {
        self.queue.push(job);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.queue.close();
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
        self.queue.push(job);
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl Queue {
    fn push(&self, job: Job) {
        let mut state = self.state.lock();
        state.jobs.push_back(job);
        self.any.store(true, Ordering::Release);
        drop(state);
        self.changed.notify_one();
    }

    fn close(&self) {
        self.state.lock().closed = true;
        self.changed.notify_all();
    }

    /// All jobs that there are, once there are some, in exchange for an empty list; false once
    /// there will be no more. For the only thread of a queue.
    fn take_all(&self, jobs: &mut VecDeque<Job>) -> bool {
        let mut state = self.state.lock();
        while state.jobs.is_empty() {
            if state.closed {
                return false;
            }
            self.changed.wait(&mut state);
        }
        std::mem::swap(&mut state.jobs, jobs);
        self.any.store(false, Ordering::Relaxed);
        true
    }

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

/// A panic in a job has been turned into a failure by whoever made the job; one that gets here must
/// not end the thread with jobs behind it.
fn run(job: Job) {
    let _ = catch_unwind(AssertUnwindSafe(|| job.run()));
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
    fn a_worker_does_jobs_in_order_and_those_before_its_end_whatever_they_do() {
        let worker = Worker::start("test".to_owned(), Spin::new(true)).unwrap();
        let (done, all_done) = mpsc::channel();
        for i in 0..1000 {
            let done = done.clone();
            worker.push(Box::new(move || {
                done.send(i).unwrap();
                assert!(i % 100 != 7, "expected");
            }));
        }
        drop((worker, done));
        let found: Vec<i32> = std::iter::from_fn(|| all_done.recv_timeout(SOON).ok()).collect();
        assert_eq!(found, (0..1000).collect::<Vec<_>>());
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
