//! Preparation of the sources that kernels announce: compiling, loading, initialising cuBLAS.
//!
//! Two threads per process do this in the background. A device's thread that needs a source earlier
//! prepares it itself.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::OnceLock;

use mpmd_ids::block::{Condvar, Mutex, thread};
use mpmd_transport::memory::Pool;

use super::error::CudaError;
use super::gpu::Gpu;
use crate::cuda::source::Kind;
use crate::cuda::source::Source;

/// The number of threads that compile. More would take processors from the program.
const THREADS: usize = 2;

/// The preparation of one kernel's sources on one device. Dropping it cancels sources not yet begun
/// and waits for those under way, because the process must not exit during a compilation.
pub struct WarmUp {
    needs: Arc<Needs>,
    ready: OnceLock<Result<(), CudaError>>,
}

struct Needs {
    gpu: Arc<Gpu>,
    pool: Pool,
    sources: Vec<&'static Source>,
    state: Mutex<State>,
    /// Notified when the preparation of a source ends.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The number of sources begun.
    begun: usize,
    /// The number of sources that the threads are preparing.
    under_way: usize,
}

impl Gpu {
    /// Queues these sources for preparation and returns at once. `pool` is that of the device's
    /// memory.
    pub fn warm_up(self: &Arc<Self>, pool: &Pool, sources: Vec<&'static Source>) -> WarmUp {
        for source in &sources {
            if source.kind != Kind::Cublas {
                self.modules().announce(source);
            }
        }
        let needs = Arc::new(Needs {
            gpu: self.clone(),
            pool: pool.clone(),
            sources,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        for _ in &needs.sources {
            soon(needs.clone());
        }
        WarmUp { needs, ready: OnceLock::new() }
    }

    fn make_ready(&self, source: &'static Source, pool: &Pool) -> Result<(), CudaError> {
        match source.kind {
            Kind::Cublas => self.blas(pool).map(|_| ()),
            Kind::Cuda { .. } | Kind::Ptx => self.modules().make_ready(source),
        }
    }
}

impl WarmUp {
    /// Blocks until all sources are ready, or one cannot be prepared. Prepares those that no thread
    /// has begun. Costs one atomic load once they are ready.
    ///
    /// # Errors
    ///
    /// The error of the first source that cannot be prepared; the same at every call.
    pub fn wait(&self) -> Result<(), CudaError> {
        let needs = &*self.needs;
        let made = self.ready.get_or_init(|| {
            // Waits if another thread is preparing a source; ready sources cost nothing.
            needs.sources.iter().try_for_each(|source| needs.gpu.make_ready(source, &needs.pool))
        });
        made.clone()
    }
}

impl Drop for WarmUp {
    fn drop(&mut self) {
        let mut state = self.needs.state.lock();
        state.begun = self.needs.sources.len();
        while state.under_way > 0 {
            self.needs.changed.wait(&mut state);
        }
    }
}

impl Needs {
    /// Prepares the next source that is not begun, if any. An error is only logged: `WarmUp::wait`
    /// reports it again.
    fn next(&self) {
        let mut state = self.state.lock();
        let Some(source) = self.sources.get(state.begun) else { return };
        state.begun += 1;
        state.under_way += 1;
        drop(state);
        if let Err(error) = self.gpu.make_ready(source, &self.pool) {
            tracing::debug!(source = source.name(), %error, "cannot prepare a kernel's source");
        }
        self.state.lock().under_way -= 1;
        self.changed.notify_all();
    }
}

/// The sources to prepare in this process, one entry per source of each `WarmUp`, and the number of
/// threads that prepare them.
struct Queue {
    waiting: VecDeque<Arc<Needs>>,
    threads: usize,
}

static QUEUE: Mutex<Queue> = Mutex::new(Queue { waiting: VecDeque::new(), threads: 0 });

fn soon(needs: Arc<Needs>) {
    let mut queue = QUEUE.lock();
    queue.waiting.push_back(needs);
    if queue.threads == THREADS {
        return;
    }
    // Without threads, `WarmUp::wait` prepares the sources.
    if thread::Builder::new().name("cuda-warm-up".to_owned()).spawn(work).is_ok() {
        queue.threads += 1;
    } else {
        queue.waiting.clear();
    }
}

fn work() {
    loop {
        let mut queue = QUEUE.lock();
        let Some(needs) = queue.waiting.pop_front() else {
            queue.threads -= 1;
            return;
        };
        drop(queue);
        needs.next();
    }
}
