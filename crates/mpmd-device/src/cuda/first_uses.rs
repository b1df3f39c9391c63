//! Times of a device's first uses, which are slow. For `mpmd doctor`.

use std::any::Any;
use std::sync::Arc;

use mpmd_base::block::{Instant, Mutex, now, since};
use mpmd_memory::{Arena, OutOfMemory, Pool};

use super::compile;
use super::context::Pinned;
use super::error::CudaError;
use super::gpu::Gpu;
use super::kernels::ADD;

/// Number of bytes of host memory that are pinned.
const PINNED_BYTES: usize = 1 << 20;

/// The durations of the first uses of a CUDA device, or the reasons why they failed.
#[derive(Clone, Debug, serde::Serialize)]
pub struct FirstUses {
    /// Milliseconds to open the device: its context and streams.
    pub open_ms: f64,
    /// Milliseconds of the first allocation of device memory.
    pub allocation_ms: Result<f64, FirstUseError>,
    /// Milliseconds to compile a small source with NVRTC.
    pub compilation_ms: Result<f64, FirstUseError>,
    /// Milliseconds to initialise cuBLAS and to compute a small product of each dtype.
    pub product_ms: Result<f64, FirstUseError>,
    /// Milliseconds to pin 1 MiB of host memory that other processes can map.
    pub pinning_ms: Result<f64, FirstUseError>,
}

/// The reason why a first use of a device failed. Its serialized form is its text.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FirstUseError {
    /// A library or the device failed.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// There is no memory left.
    #[error(transparent)]
    OutOfMemory(#[from] OutOfMemory),
    /// The system has no memory that other processes can map.
    #[error(transparent)]
    SharedMemory(Arc<std::io::Error>),
    /// The pool allocated without mapping new memory, so nothing was pinned.
    #[error("no memory was mapped")]
    NotMapped,
}

impl serde::Serialize for FirstUseError {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Opens the device with driver number `ordinal`, and measures its first allocation, compilation,
/// matrix product and pinning. The measurements are valid only if this process has not used the
/// device before. May block for seconds.
///
/// # Errors
///
/// If the device cannot be opened.
///
/// # Panics
///
/// If there is no driver: call [`found`](super::found) first.
pub fn first_uses(ordinal: u32) -> Result<FirstUses, CudaError> {
    let begin = now();
    let gpu = Gpu::open(ordinal)?;
    let open_ms = millis(begin);
    let pool = Pool::in_arena("doctor", None, &Arena::device(gpu.allocator()));

    Ok(FirstUses {
        open_ms,
        allocation_ms: timed(|| pool.allocate(1).map(drop)),
        compilation_ms: timed(|| compile::image(&ADD, gpu.architecture()).map(drop)),
        product_ms: timed(|| {
            gpu.first_products(gpu.blas(&pool)?, &pool);
            gpu.compute().turn().wait()
        }),
        pinning_ms: pinning(&gpu),
    })
}

fn pinning(gpu: &Arc<Gpu>) -> Result<f64, FirstUseError> {
    let arena = Arena::shared().map_err(|error| FirstUseError::SharedMemory(Arc::new(error)))?;
    let took = Arc::new(Mutex::new(None));
    let context = gpu.context().clone();
    let result = took.clone();

    arena.on_map(Box::new(move |address, bytes| {
        let begin = now();
        let pinned = Pinned::new(context.clone(), address, bytes);
        let told = pinned
            .as_ref()
            .map(|_| millis(begin))
            .map_err(|error| FirstUseError::from(error.clone()));
        *result.lock() = Some(told);
        pinned
            .ok()
            .map(|pinned| Box::new(pinned) as Box<dyn Any + Send + Sync>)
    }));

    let pool = Pool::in_arena("doctor", None, &arena);
    drop(pool.allocate(PINNED_BYTES)?);
    let took = took.lock().take();
    took.unwrap_or(Err(FirstUseError::NotMapped))
}

fn timed<E: Into<FirstUseError>>(
    work: impl FnOnce() -> Result<(), E>,
) -> Result<f64, FirstUseError> {
    let begin = now();
    work().map(|()| millis(begin)).map_err(Into::into)
}

fn millis(begin: Instant) -> f64 {
    since(begin).as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_uses_are_timed() {
        if softcuda::again!() {
            return;
        }
        let FirstUses {
            open_ms,
            allocation_ms,
            compilation_ms,
            product_ms,
            pinning_ms,
        } = first_uses(0).unwrap();
        assert!(open_ms > 0.0);
        for took_ms in [allocation_ms, compilation_ms, product_ms, pinning_ms] {
            assert!(
                took_ms.as_ref().is_ok_and(|millis| *millis > 0.0),
                "{took_ms:?}"
            );
        }
    }

    #[test]
    fn refused_pinning_is_the_only_failed_first_use() {
        if softcuda::again!("SOFTCUDA_PIN" = "refuse") {
            return;
        }
        let uses = first_uses(0).unwrap();
        assert!(
            uses.product_ms.is_ok() && uses.compilation_ms.is_ok(),
            "{uses:?}"
        );
        let refused = uses
            .pinning_ms
            .as_ref()
            .is_err_and(|error| error.to_string().contains("pinning memory"));
        assert!(softcuda::real() || refused, "{uses:?}");
    }
}
