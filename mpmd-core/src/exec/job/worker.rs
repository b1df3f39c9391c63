//! Threads that run queued jobs in order.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mpmd_base::block::{Condvar, Mutex, Spin, SpinPace, SpinPolicy, thread};

/// Constants of the spin policy for short waits of workers and readers. After polls without
/// success, some waits are not polled.
pub(crate) const PACE: SpinPace = SpinPace {
    first: Duration::from_micros(20),
    longest: Duration::from_micros(20),
    worth: Duration::ZERO,
    looks: 32,
    yields: 32,
    alone: Duration::MAX,
    most_skipped: 64,
};

/// A job for a [`JobWorker`] or a [`Crew`].
pub(crate) type Job = Box<dyn Work>;

/// A job's work: a closure, or an object that reuses its own box.
pub(crate) trait Work: Send {
    fn run(self: Box<Self>);
}

impl<F: FnOnce() + Send> Work for F {
    fn run(self: Box<Self>) {
        (*self)();
    }
}

/// A named thread that runs queued jobs in order. Dropping the `JobWorker` lets the thread finish
/// its queue and end, without waiting for it.
pub(crate) struct JobWorker {
    queue: Arc<JobQueue>,
}

/// Threads that share a queue. Jobs start in order and may end in any order. Dropping the `Crew`
/// lets the threads finish the queue and end, without waiting for them.
pub(crate) struct Crew {
    queue: Arc<JobQueue>,
}

/// The queue of a worker or a crew.
#[derive(Default)]
struct JobQueue {
    state: Mutex<JobQueueState>,
    changed: Condvar,
    /// True if jobs are queued. Can be read without the lock.
    any: AtomicBool,
}

#[derive(Default)]
struct JobQueueState {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl JobWorker {
    /// Starts the thread. The thread polls for jobs as `spin` allows before it sleeps.
    pub(crate) fn start(name: String, spin: Spin) -> std::io::Result<Self> {
        let worker = Self {
            queue: Arc::default(),
        };

        let policy = SpinPolicy::new(PACE, spin);
        let queue = worker.queue.clone();
        let work = move || {
            let mut jobs = VecDeque::new();
            loop {
                // Does not see that the queue is closed: `take_all` does.
                policy.look(|| queue.any.load(Ordering::Acquire).then_some(()));
                if !queue.take_all(&mut jobs) {
                    return;
                }
                jobs.drain(..).for_each(run);
            }
        };

        thread::Builder::new().name(name).spawn(work)?;
        Ok(worker)
    }

    /// Queues a job and returns at once.
    pub(crate) fn push(&self, job: Job) {
        self.queue.push(job);
    }
}

impl Drop for JobWorker {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl Crew {
    /// Starts `threads` threads, which wait for jobs.
    pub(crate) fn start(name: &str, threads: usize) -> std::io::Result<Self> {
        let crew = Self {
            queue: Arc::default(),
        };
        for i in 0..threads {
            let queue = crew.queue.clone();
            let work = move || {
                while let Some(job) = queue.next() {
                    run(job);
                }
            };
            thread::Builder::new()
                .name(format!("{name}-{i}"))
                .spawn(work)?;
        }
        Ok(crew)
    }

    /// Queues a job and returns at once.
    pub(crate) fn push(&self, job: Job) {
        self.queue.push(job);
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.queue.close();
    }
}

impl JobQueue {
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

    /// Blocks until jobs are queued and moves all of them into `jobs`, which must be empty. Returns
    /// true, or false once the queue is closed and empty. Only for a queue with one thread.
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

    /// Blocks for the next job. Returns `None` once the queue is closed and empty.
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

/// Runs a job and catches its panic. A panic must not end the thread, because other jobs are
/// queued. Jobs turn the panics that matter into failures themselves.
fn run(job: Job) {
    let _ = catch_unwind(AssertUnwindSafe(|| job.run()));
}

#[cfg(test)]
mod tests {
    use mpmd_base::block::mpsc;

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
    fn worker_runs_all_jobs_in_order_despite_panics() {
        let worker = JobWorker::start("test".to_owned(), Spin::Auto).unwrap();
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
    fn crew_runs_all_jobs_despite_a_panic() {
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
