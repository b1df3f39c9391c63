//! What kernels announce is made ready before they run: by threads of its own, and by the device's
//! thread where that comes first.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::OnceLock;

use mpmd_transport::memory::Pool;
use parking_lot::{Condvar, Mutex};

use super::error::CudaError;
use super::gpu::Gpu;
use crate::device::cuda::source::Kind;
use crate::device::cuda::source::Source;

/// Threads that compile at a time; more would take processors from the program.
const THREADS: usize = 2;

/// What one kernel needs on one device. Dropping it waits for what is being compiled for it, since
/// a process must not end meanwhile, and leaves the rest.
pub(crate) struct WarmUp {
    needs: Arc<Needs>,
    ready: OnceLock<Result<(), CudaError>>,
}

struct Needs {
    gpu: Arc<Gpu>,
    pool: Pool,
    sources: Vec<&'static Source>,
    state: Mutex<State>,
    /// Notified when a source was made ready.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// How many of the sources somebody has begun with.
    begun: usize,
    /// How many are being made ready by the threads.
    under_way: usize,
}

impl Gpu {
    /// Starts to make these sources ready. `pool` is the device's.
    pub(crate) fn warm_up(self: &Arc<Self>, pool: &Pool, sources: Vec<&'static Source>) -> WarmUp {
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
    /// Waits until all is ready; makes ready itself what nobody has begun with. Costs a look at one
    /// word once it is.
    ///
    /// # Errors
    ///
    /// The first source's that cannot be had; the same again at every call.
    pub(crate) fn wait(&self) -> Result<(), CudaError> {
        let needs = &*self.needs;
        let made = self.ready.get_or_init(|| {
            // Others wait for whoever is about one; those that are ready cost nothing.
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
    /// Makes the next source ready. Errors are for who waits, and come again.
    fn next(&self) {
        let mut state = self.state.lock();
        let Some(source) = self.sources.get(state.begun) else { return };
        state.begun += 1;
        state.under_way += 1;
        drop(state);
        if let Err(error) = self.gpu.make_ready(source, &self.pool) {
            tracing::debug!(source = source.name(), %error, "a kernel's source cannot be had");
        }
        self.state.lock().under_way -= 1;
        self.changed.notify_all();
    }
}

/// What is to be made ready in this process.
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
    // Without threads whoever waits does it.
    if std::thread::Builder::new().name("cuda-warm-up".to_owned()).spawn(work).is_ok() {
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
