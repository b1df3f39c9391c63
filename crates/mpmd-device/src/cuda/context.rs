//! The context of a CUDA device in this process, and memory of the host pinned for it.

use std::sync::{Arc, OnceLock};

use cudarc::driver::sys;

use super::calls::{self, DriverError};
use super::error::CudaError;
use super::ipc_tables::{OpenedBlocks, ShownMemory};

/// The device's primary context, shared by all users of the device in this process.
pub(super) struct DeviceContext {
    raw: sys::CUcontext,
    device: sys::CUdevice,
    /// The driver's number of the device, which is also in the address of its memory. It is the
    /// same for every `Gpu` of this device.
    ordinal: u32,
    /// The UUID of the device, the same in all processes.
    uuid: [u8; 16],
    /// The first error of the device. After it, every operation on the device fails.
    broken: OnceLock<CudaError>,
    shown: ShownMemory,
    foreign: OpenedBlocks,
}

/// Figures of the driver's own memory pool of a device.
#[derive(Clone, Copy, Default)]
pub(super) struct DriverPool {
    /// Bytes of live allocations.
    pub(super) used: u64,
    /// Bytes that the pool holds of the device's memory.
    pub(super) reserved: u64,
}

// SAFETY: contexts, and what belongs to them, may be used by any thread that has made them its
// current one, which `DeviceContext::bind` does before each use; CUDA's calls are thread-safe.
unsafe impl Send for DeviceContext {}
// SAFETY: as above.
unsafe impl Sync for DeviceContext {}

impl DeviceContext {
    /// Opens the device with driver number `ordinal`.
    pub(super) fn open(ordinal: u32) -> Result<Self, CudaError> {
        let doing = || format!("opening CUDA device {ordinal}");
        let number = i32::try_from(ordinal)
            .map_err(|_| CudaError::new(doing(), "", "there is no such device"))?;

        let mut device = 0;
        let mut raw = std::ptr::null_mut();
        // SAFETY: there is room for the device and for the context, which is released once, when
        // this is dropped.
        unsafe {
            calls::cuInit(0)
                .result()
                .and_then(|()| calls::cuDeviceGet(&raw mut device, number).result())
                .and_then(|()| calls::cuDevicePrimaryCtxRetain(&raw mut raw, device).result())
        }
        .map_err(|error| cuda(doing(), error))?;

        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: it writes 16 bytes, for which there is room. Only this version of the call
        // distinguishes the parts of a divided device.
        unsafe { calls::cuDeviceGetUuid_v2(&raw mut uuid, device) }
            .result()
            .map_err(|error| cuda(doing(), error))?;
        let uuid = uuid.bytes.map(|byte| byte.to_ne_bytes()[0]);
        Ok(Self {
            raw,
            device,
            ordinal,
            uuid,
            broken: OnceLock::new(),
            shown: ShownMemory::default(),
            foreign: OpenedBlocks::default(),
        })
    }

    /// Makes this context current on the calling thread.
    ///
    /// # Errors
    ///
    /// If work on the device has failed. The error is always the device's first error.
    pub(super) fn bind(&self) -> Result<(), CudaError> {
        if let Some(error) = self.broken.get() {
            return Err(error.clone());
        }
        self.bind_failed()
    }

    /// Makes this context current on the calling thread, even if work on the device has failed.
    /// Used to finish work that was issued before the failure.
    pub(super) fn bind_failed(&self) -> Result<(), CudaError> {
        // SAFETY: the context was retained and lives as long as this.
        unsafe { calls::cuCtxSetCurrent(self.raw) }
            .result()
            .map_err(|error| cuda("using a CUDA device", error))
    }

    /// Makes this context current until the returned guard is dropped, which restores the previous
    /// context.
    ///
    /// Used by code that may run while this thread issues work to another device, such as
    /// allocating and freeing memory.
    ///
    /// # Errors
    ///
    /// If work on the device has failed.
    pub(super) fn visit(&self) -> Result<ContextGuard, CudaError> {
        let visit = ContextGuard::from_here();
        self.bind()?;
        Ok(visit)
    }

    /// Makes this context current for cleaning up, even if work on the device has failed.
    fn last_visit(&self) -> Option<ContextGuard> {
        let visit = ContextGuard::from_here();
        self.bind_failed().is_ok().then_some(visit)
    }

    /// Marks the device as failed with `error`, and returns its first error. From now on, every
    /// operation fails with the first error.
    pub(super) fn fails(&self, error: CudaError) -> CudaError {
        self.broken.get_or_init(|| error).clone()
    }

    /// Enables access from this device to the memory of another device, `other`. Fails if the
    /// machine has no link between the devices.
    pub(super) fn reach(&self, other: &Self) -> Result<(), CudaError> {
        const DOING: &str = "reaching another CUDA device";
        let _visit = self.visit()?;

        let mut can = 0;
        // SAFETY: both devices are the driver's own; there is room for the number.
        unsafe { calls::cuDeviceCanAccessPeer(&raw mut can, self.device, other.device) }
            .result()
            .map_err(|error| cuda(DOING, error))?;
        if can == 0 {
            return Err(CudaError::new(
                DOING,
                "",
                "the machine has no way between the two",
            ));
        }

        // SAFETY: both contexts are alive, and this one is current.
        let answer = unsafe { calls::cuCtxEnablePeerAccess(other.raw, 0) };
        // The primary context outlives a `Gpu`: an earlier one may have enabled it.
        if answer.is(sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED) {
            return Ok(());
        }
        answer.result().map_err(|error| cuda(DOING, error))
    }

    /// Blocks until the device has ended all work that was issued to it.
    pub(super) fn synchronize(&self) -> Result<(), CudaError> {
        let _visit = self.visit()?;
        // SAFETY: the context is current.
        unsafe { calls::cuCtxSynchronize() }
            .result()
            .map_err(|error| cuda("waiting for a CUDA device", error))
    }

    /// Returns figures of the driver's own memory pool of the device.
    pub(super) fn driver_pool(&self) -> Result<DriverPool, CudaError> {
        let pool = self.default_pool()?;
        let figure = |attribute| {
            let mut bytes = 0u64;
            // SAFETY: the pool is the driver's own, and both attributes are 64 bits.
            unsafe { calls::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) }
                .result()
                .map_err(|error| cuda("asking for the driver's pool of a CUDA device", error))?;
            Ok::<_, CudaError>(bytes)
        };

        use sys::CUmemPool_attribute_enum as Attribute;
        Ok(DriverPool {
            used: figure(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            reserved: figure(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
        })
    }

    /// Returns freed memory of the driver's own pool to the device. Work that uses this memory must
    /// have ended.
    pub(super) fn trim_driver_pool(&self) -> Result<(), CudaError> {
        let pool = self.default_pool()?;
        // SAFETY: the pool is the driver's own.
        unsafe { calls::cuMemPoolTrimTo(pool, 0) }
            .result()
            .map_err(|error| cuda("trimming the driver's pool of a CUDA device", error))
    }

    fn default_pool(&self) -> Result<sys::CUmemoryPool, CudaError> {
        let mut pool = std::ptr::null_mut();
        // SAFETY: the device is the driver's own, and there is room for the pool.
        unsafe { calls::cuDeviceGetDefaultMemPool(&raw mut pool, self.device) }
            .result()
            .map_err(|error| cuda("looking for the driver's pool of a CUDA device", error))?;
        Ok(pool)
    }

    /// Returns the number of free bytes and the total number of bytes of the device.
    pub(super) fn free_and_total(&self) -> Result<[u64; 2], CudaError> {
        let _visit = self.visit()?;
        let mut free = 0;
        let mut total = 0;
        // SAFETY: the context is current, and there is room for both numbers.
        unsafe { calls::cuMemGetInfo_v2(&raw mut free, &raw mut total) }
            .result()
            .map_err(|error| cuda("asking for the free memory of a CUDA device", error))?;
        Ok([free as u64, total as u64])
    }

    /// Returns an attribute of the device, or 0 if its value is negative.
    pub(super) fn figure(&self, attribute: sys::CUdevice_attribute) -> Result<u32, CudaError> {
        let mut figure = 0;
        // SAFETY: the device is the driver's own, and there is room for the number.
        unsafe { calls::cuDeviceGetAttribute(&raw mut figure, attribute, self.device) }
            .result()
            .map_err(|error| cuda("reading an attribute of a CUDA device", error))?;
        Ok(u32::try_from(figure).unwrap_or(0))
    }

    /// Returns the driver's number of the device.
    pub(super) fn ordinal(&self) -> u32 {
        self.ordinal
    }

    /// Returns the UUID of the device, the same in all processes.
    pub(super) fn uuid(&self) -> &[u8; 16] {
        &self.uuid
    }

    /// Returns the table of memory that this process has exported to other processes.
    pub(super) fn shown(&self) -> &ShownMemory {
        &self.shown
    }

    /// Returns the table of other processes' memory that is open in this context.
    pub(super) fn foreign(&self) -> &OpenedBlocks {
        &self.foreign
    }
}

impl Drop for DeviceContext {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`; everything that belongs to the context holds this, so
        // nothing of it is left.
        if let Err(error) = unsafe { calls::cuDevicePrimaryCtxRelease_v2(self.device) }.result() {
            tracing::debug!(%error, "closing a CUDA device");
        }
    }
}

/// Remembers the context that is current on this thread, and restores it when dropped.
pub(super) struct ContextGuard(sys::CUcontext);

impl ContextGuard {
    /// Creates a guard for this thread's current context. If there is none, or it cannot be read,
    /// dropping the guard leaves no current context.
    fn from_here() -> Self {
        let mut current = std::ptr::null_mut();
        // SAFETY: there is room for the context.
        let told = unsafe { calls::cuCtxGetCurrent(&raw mut current) }.is_success();
        Self(if told { current } else { std::ptr::null_mut() })
    }
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        // SAFETY: it was current on this thread and its user keeps it alive, or it is null, which
        // stands for no context.
        if let Err(error) = unsafe { calls::cuCtxSetCurrent(self.0) }.result() {
            tracing::debug!(%error, "going back to a CUDA device");
        }
    }
}

/// Pinned pages of host memory. Dropping it unpins them.
pub(super) struct Pinned {
    context: Arc<DeviceContext>,
    address: usize,
}

impl Pinned {
    pub(super) fn new(
        context: Arc<DeviceContext>,
        address: usize,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let _visit = context.visit()?;
        let at = std::ptr::with_exposed_provenance_mut(address);
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
        // SAFETY: the caller has just mapped these pages and lets them go only after this is
        // dropped. Pinning does not change their contents.
        unsafe { calls::cuMemHostRegister_v2(at, bytes, flags) }
            .result()
            .map_err(|error| cuda("pinning memory of the host", error))?;
        Ok(Self { context, address })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // Left pinned, the driver would take the next mapping at this address for pinned memory.
        let Some(_visit) = self.context.last_visit() else {
            return;
        };

        // SAFETY: pinned in `new`, and unpinned once. Work of devices on it is over: memory is
        // dropped only after that.
        let unpinned = unsafe {
            calls::cuMemHostUnregister(std::ptr::with_exposed_provenance_mut(self.address))
        };
        if let Err(error) = unpinned.result() {
            tracing::debug!(%error, "unpinning memory of the host");
        }
    }
}

/// Creates the error of a failed driver call, with the driver's name and description of the error.
pub(super) fn cuda(doing: impl Into<String>, error: DriverError) -> CudaError {
    CudaError::new(doing, error.name(), error.text())
}
