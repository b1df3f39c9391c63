//! A CUDA device of this process: its context, its streams and its libraries.

use std::any::Any;
use std::sync::{Arc, Once, OnceLock};

use cudarc::driver::sys;
use mpmd_memory::{DeviceAllocator, Pin, Pool};

use super::blas::Blas;
use super::compile::Architecture;
use super::context::{DeviceContext, Pinned};
use super::device_room::DeviceRoom;
use super::error::CudaError;
use super::memory::Allocator;
use super::module::Modules;
use super::stream::Stream;
use crate::cuda::spare_blocks::SpareBlocks;

/// A CUDA device, its context in this process, and its streams.
pub struct Gpu {
    context: Arc<DeviceContext>,
    /// cuBLAS for the compute stream, or the error of creating it. Created at first use. The field
    /// precedes the streams, so that it is dropped first.
    blas: OnceLock<Result<Blas, CudaError>>,
    /// Set after cuBLAS has loaded the kernels of small products.
    products: OnceLock<()>,
    /// Scratch memory of the compute stream, reused between calls.
    spare: Arc<SpareBlocks>,
    compute: Stream,
    inward: Stream,
    outward: Stream,
    modules: Modules,
    architecture: Architecture,
    processors: u32,
    /// The most bytes of shared memory that a thread block can request.
    shared_bytes: u32,
}

impl Gpu {
    /// Opens the device with driver number `ordinal`.
    ///
    /// # Errors
    ///
    /// If the driver has no such device, or cannot use it.
    ///
    /// # Panics
    ///
    /// If there is no driver: call [`found`](super::found) first.
    pub fn open(ordinal: u32) -> Result<Arc<Self>, CudaError> {
        let context = Arc::new(DeviceContext::open(ordinal)?);
        let line = |purpose: &str| Stream::start(&context, format!("cuda-{ordinal}-{purpose}"));
        let compute = line("compute")?;
        let inward = line("in")?;
        let outward = line("out")?;

        let figure = |attribute| context.figure(attribute);
        let architecture = Architecture::new(
            figure(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            figure(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );

        // The second one is older than blocks that ask for more than it.
        let shared_bytes =
            figure(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?
                .max(figure(
                    sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK,
                )?);

        Ok(Arc::new(Self {
            blas: OnceLock::new(),
            products: OnceLock::new(),
            spare: Arc::default(),
            compute,
            inward,
            outward,
            modules: Modules::new(context.clone(), architecture),
            architecture,
            processors: figure(sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes,
            context,
        }))
    }

    /// Returns the driver's number of the device, as in
    /// [`DevicePlace::device`](mpmd_memory::DevicePlace::device).
    pub fn ordinal(&self) -> u32 {
        self.context.ordinal()
    }

    /// Returns the device's context.
    pub(super) fn context(&self) -> &Arc<DeviceContext> {
        &self.context
    }

    /// Returns an allocator of segments of the device's memory.
    pub fn allocator(self: &Arc<Self>) -> Arc<dyn DeviceAllocator> {
        Arc::new(Allocator::new(self.context.clone(), self.spare.clone()))
    }

    /// Returns a function that pins host memory, so that devices can copy from and to it directly.
    /// It takes (address, bytes) and returns a guard that unpins when dropped, or `None` if pinning
    /// fails.
    pub fn pin(self: &Arc<Self>) -> Pin {
        let context = self.context.clone();
        Box::new(move |address, bytes| {
            let pinned = Pinned::new(context.clone(), address, bytes);
            let pinned = pinned.inspect_err(|error| {
                static ONCE: Once = Once::new();
                ONCE.call_once(|| {
                    tracing::warn!(
                        %error,
                        "cannot pin host memory: copies between it and CUDA devices go through \
                         staging buffers, at a fraction of the speed; `mpmd doctor --device cuda` \
                         says what to do"
                    );
                });
                tracing::debug!(%error, bytes, "host memory is not pinned");
            });

            pinned
                .ok()
                .map(|pinned| Box::new(pinned) as Box<dyn Any + Send + Sync>)
        })
    }

    /// Records begin and end times of work on the [`compute`](Self::compute) stream from now on.
    /// `now` returns nanoseconds since an arbitrary origin. Waits for the device. Call it before
    /// any work is issued.
    ///
    /// # Errors
    ///
    /// If the device cannot be used.
    pub fn keep_time(&self, now: Box<dyn Fn() -> u64 + Send + Sync>) -> Result<(), CudaError> {
        self.compute.keep_time(now)
    }

    /// Returns the stream that runs kernels, in the order in which they are issued.
    pub fn compute(&self) -> &Stream {
        &self.compute
    }

    /// Returns the stream for copies into the device's memory, from the host or from other devices.
    pub fn inward(&self) -> &Stream {
        &self.inward
    }

    /// Returns the stream for copies from the device's memory to the host.
    pub fn outward(&self) -> &Stream {
        &self.outward
    }

    /// Returns the scratch memory that the compute stream reuses between calls.
    pub fn spare(&self) -> &SpareBlocks {
        &self.spare
    }

    /// Returns the device's allocators, for another library that allocates on the device. `pool` is
    /// the framework's pool of the device's memory.
    pub fn room(&self, pool: &Pool) -> DeviceRoom {
        DeviceRoom::new(&self.context, &self.spare, pool)
    }

    /// Returns the number of streaming multiprocessors.
    pub fn processors(&self) -> u32 {
        self.processors
    }

    /// Returns the most bytes of shared memory that a thread block can request.
    pub fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// Returns the modules loaded on the device.
    pub(super) fn modules(&self) -> &Modules {
        &self.modules
    }

    /// Returns cuBLAS for the compute stream, and creates it at the first call. Waits if another
    /// thread is creating it. If the creation has failed, every call returns the same error.
    pub(super) fn blas(&self, pool: &Pool) -> Result<&Blas, CudaError> {
        self.blas
            .get_or_init(|| {
                Blas::new(
                    &self.context,
                    self.compute.stream(),
                    self.architecture,
                    pool,
                )
            })
            .as_ref()
            .map_err(CudaError::clone)
    }

    /// Returns the cell that is set after cuBLAS has loaded the kernels of small products.
    pub(super) fn products(&self) -> &OnceLock<()> {
        &self.products
    }

    /// Returns the architecture of the device.
    pub(super) fn architecture(&self) -> Architecture {
        self.architecture
    }

    /// Returns cuBLAS if it was created before; `None` if not, or if the creation failed.
    pub(super) fn blas_if_ready(&self) -> Option<&Blas> {
        self.blas.get()?.as_ref().ok()
    }
}

/// Enables direct access between the memories of these devices. Pairs of devices without a link
/// copy through the host. Failures are only logged.
pub fn reach_each_other(gpus: &[Arc<Gpu>]) {
    for from in gpus {
        for to in gpus.iter().filter(|to| to.ordinal() != from.ordinal()) {
            if let Err(error) = from.context.reach(&to.context) {
                let from = from.ordinal();
                let to = to.ordinal();
                tracing::debug!(%error, from, to, "no direct access between these devices");
            }
        }
    }
}
