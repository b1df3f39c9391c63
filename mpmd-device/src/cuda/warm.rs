//! Preparation of the sources that kernels announce: compiling, loading, initialising cuBLAS and a
//! first product of each dtype.
//!
//! Two threads per process do this in the background. A device's thread that needs a source earlier
//! prepares it itself.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::OnceLock;

use mpmd_base::block::{Condvar, Mutex, thread};
use mpmd_layout::aval::DType;
use mpmd_transport::memory::{DevicePlace, Pool};

use super::asked::{Operand, Product};
use super::blas::Blas;
use super::error::CudaError;
use super::gpu::Gpu;
use crate::cuda::source::Kind;
use crate::cuda::source::Source;
use crate::cuda::spare::place;
use crate::cuda::work::{Math, Types};

/// The number of threads that compile. More would take processors from the program.
const THREADS: usize = 2;

/// The dtypes of the first products, their rows and columns, and the bytes of a matrix.
const FIRST_DTYPES: [DType; 4] = [DType::F32, DType::F64, DType::F16, DType::Bf16];
const FIRST_SIDE: u8 = 16;
const FIRST_BYTES: usize = FIRST_SIDE as usize * FIRST_SIDE as usize * 8;

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
            Kind::Cublas => {
                let blas = self.blas(pool)?;
                self.products().get_or_init(|| self.first_products(blas, pool));
                Ok(())
            }
            Kind::Cuda { .. } | Kind::Ptx => self.modules().make_ready(source),
        }
    }

    /// Issues a small product of each dtype, because cuBLAS loads its kernels at their first use.
    /// Does not wait for the device. A device that lacks a dtype is no error: another kernel may
    /// not need it.
    pub(super) fn first_products(&self, blas: &Blas, pool: &Pool) {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::debug!(%error, "cannot compute a first product with cuBLAS");
        };
        let mut memory = match pool.allocate(3 * FIRST_BYTES) {
            Ok(memory) => memory,
            Err(error) => return failed(&error),
        };
        let at = place(&memory);
        let places = [0, 1, 2].map(|index: u64| DevicePlace {
            address: at.address + index * FIRST_BYTES as u64,
            bytes: FIRST_BYTES,
            ..at
        });
        let side = i32::from(FIRST_SIDE);
        let matrix = Operand { transposed: false, leading: side, stride: 0 };
        let work = |_: &_| {
            for dtype in FIRST_DTYPES {
                let types = Types { factors: dtype, result: dtype, math: Math::F32 };
                let product = Product {
                    m: side,
                    n: side,
                    k: side,
                    first: matrix,
                    second: matrix,
                    result: matrix,
                    batch: 1,
                    alpha: 1.0,
                    beta: 0.0,
                    types,
                };
                if let Err(error) = blas.product(&product, places) {
                    failed(&error);
                }
            }
            Ok(())
        };
        // A failure of the device is the error of all later work.
        let fence = self.compute().submit(&[memory.fences()], work, Box::new(|_| ()));
        memory.add_fence(fence);
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
