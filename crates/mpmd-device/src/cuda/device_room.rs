//! Room on a device that is out of memory.
//!
//! Two allocators take memory from a device: the pools of this framework by `cuMemAlloc`, and the
//! driver's pool, which other libraries use in the order of a stream. Each keeps freed memory for
//! itself. After an allocation that fails, the caller waits for the device, both allocators give
//! back their unused memory, and the allocation is tried once more.

use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::sys;
use mpmd_base::block::{now, thread};
use mpmd_base::bytes_text;
use mpmd_memory::Pool;

use super::calls;
use super::context::DeviceContext;
use super::spare_blocks::SpareBlocks;

/// Time limit for scratch blocks to become free after the device has ended its work.
const FREE_WITHIN: Duration = Duration::from_millis(500);
const FREE_LOOK: Duration = Duration::from_millis(1);

/// The allocators of a device: they free unused memory for another library that allocates from the
/// driver's pool.
#[derive(Clone)]
pub struct DeviceRoom {
    context: Arc<DeviceContext>,
    spare: Arc<SpareBlocks>,
    pool: Pool,
}

impl DeviceRoom {
    pub(super) fn new(context: &Arc<DeviceContext>, spare: &Arc<SpareBlocks>, pool: &Pool) -> Self {
        Self {
            context: context.clone(),
            spare: spare.clone(),
            pool: pool.clone(),
        }
    }

    /// Returns unused memory of all allocators to the device. Blocks until the device has ended all
    /// work that was issued to it.
    pub fn make(&self) {
        make_room(&self.context, &self.spare);
        self.pool.trim();
    }

    /// Allocates memory as `cuMemAllocAsync` does. If the device is out of memory and `room` is
    /// given, frees unused memory and tries once more. Returns the driver's status.
    ///
    /// # Safety
    ///
    /// As for `cuMemAllocAsync`: `address` points to memory for an address. `stream` is a stream of
    /// the calling thread's current context, which is the context of `room`.
    pub unsafe fn allocate_in_order(
        room: Option<&Self>,
        address: *mut u64,
        bytes: usize,
        stream: *mut c_void,
    ) -> u32 {
        // SAFETY: the caller keeps to the driver's documentation.
        let allocate = || unsafe { calls::cuMemAllocAsync(address, bytes, stream.cast()) };
        let answer = allocate();
        match room.filter(|_| answer.is(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) {
            None => answer.0,
            Some(room) => {
                tracing::debug!(bytes, %room, "no memory for another library: making room");
                room.make();
                allocate().0
            }
        }
    }
}

/// Displays the bytes that both allocators hold.
impl fmt::Display for DeviceRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = self.pool.stats();
        let [live, cached] = [stats.live, stats.cached].map(bytes_text);
        write!(
            f,
            "arrays and scratch hold {live} and keep {cached} more; {}",
            DriverPoolText(&self.context)
        )
    }
}

/// Displays the bytes in the driver's pool of a device, and the device's free bytes.
pub(super) struct DriverPoolText<'a>(pub(super) &'a DeviceContext);

impl fmt::Display for DriverPoolText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pool = self.0.driver_pool().unwrap_or_default();
        let [used, reserved] = [pool.used, pool.reserved].map(bytes_text);
        write!(
            f,
            "the driver's pool, from which candle allocates, has {reserved}, {used} in use"
        )?;

        match self.0.free_and_total() {
            Ok([free, total]) => {
                write!(
                    f,
                    "; {} of the device's {} are free",
                    bytes_text(free),
                    bytes_text(total)
                )
            }
            Err(_) => Ok(()),
        }
    }
}

/// Returns scratch blocks to their pool, and unused memory of the driver's pool to the device.
/// Blocks until the device has ended all work that was issued to it.
pub(super) fn make_room(context: &DeviceContext, spare: &SpareBlocks) {
    let blocks = spare.take_all();
    // A device that has failed has nothing more to give.
    if let Err(error) = context
        .synchronize()
        .and_then(|()| context.trim_driver_pool())
    {
        tracing::debug!(%error, "making room on a CUDA device");
    }

    // The stream's thread reports the end of work a moment after it.
    let until = now() + FREE_WITHIN;
    while now() < until && blocks.iter().any(|block| !block.fences().are_over()) {
        thread::sleep(FREE_LOOK);
    }
}

#[cfg(test)]
mod tests {
    use mpmd_memory::Arena;

    use super::*;
    use crate::cuda::Gpu;
    use crate::cuda::library::DRIVER;

    const MIB: usize = 1 << 20;

    /// A device of 256 MiB and its pool. Its stream of copies stands for another library's.
    struct Site {
        gpu: Arc<Gpu>,
        pool: Pool,
    }

    impl Site {
        fn new() -> Self {
            let gpu = Gpu::open(0).unwrap();
            let pool = Pool::in_arena("device", None, &Arena::device(gpu.allocator()));
            Self { gpu, pool }
        }

        fn stream(&self) -> *mut c_void {
            self.gpu.inward().stream().handle()
        }

        /// Allocates `mib` MiB from the driver's pool. With `room`, an allocation that runs out of
        /// memory frees unused memory and is tried once more. Returns the driver's status and the
        /// address.
        fn allocate(&self, room: Option<&DeviceRoom>, mib: usize) -> (u32, u64) {
            let mut address = 0;
            // SAFETY: there is room for the address, and the stream is of the current context.
            let status = unsafe {
                DeviceRoom::allocate_in_order(room, &raw mut address, mib * MIB, self.stream())
            };
            (status, address)
        }

        /// Frees memory of the driver's pool, which keeps it.
        fn free(&self, address: u64) {
            type Set = unsafe extern "C" fn(sys::CUmemoryPool, u32, *mut u64) -> u32;
            type Free = unsafe extern "C" fn(u64, *mut c_void) -> u32;
            let (mut pool, mut most) = (std::ptr::null_mut(), u64::MAX);
            // SAFETY: these are the types of the driver's functions. There is room for the pool,
            // the attribute 4 is 64 bits, and the address is of `allocate`.
            unsafe {
                assert!(calls::cuDeviceGetDefaultMemPool(&raw mut pool, 0).is_success());
                let set = DRIVER.function::<Set>("cuMemPoolSetAttribute").unwrap();
                assert_eq!(set(pool, 4, &raw mut most), 0);
                let free = DRIVER.function::<Free>("cuMemFreeAsync").unwrap();
                assert_eq!(free(address, self.stream()), 0);
            }
        }
    }

    #[test]
    fn memory_that_one_allocator_keeps_is_there_for_the_other() {
        if softcuda::again!("SOFTCUDA_MEMORY" = "268435456") {
            return;
        }
        let site = Site::new();
        let room = site.gpu.room(&site.pool);
        drop(site.pool.allocate(150 * MIB).unwrap());
        assert_eq!(
            site.allocate(None, 150).0,
            2,
            "the pool keeps what was freed"
        );
        let (status, address) = site.allocate(Some(&room), 150);
        assert_eq!(status, 0);

        site.free(address);
        site.pool
            .allocate(150 * MIB)
            .expect("the driver's pool gives back what was freed");
        assert_eq!(site.allocate(Some(&room), 150).0, 0);
    }

    #[test]
    fn shortage_names_the_holdings_of_both_allocators() {
        if softcuda::again!("SOFTCUDA_MEMORY" = "268435456") {
            return;
        }
        let site = Site::new();
        let room = site.gpu.room(&site.pool);
        let _array = site.pool.allocate(112 * MIB).unwrap();
        assert_eq!(site.allocate(Some(&room), 50).0, 0);
        assert_eq!(site.allocate(Some(&room), 150).0, 2);
        let held = "the driver's pool, from which candle allocates, has 50.0 MiB, 50.0 MiB in use; \
                    94.0 MiB of the device's 256.0 MiB are free";
        let of_both = format!("arrays and scratch hold 112.0 MiB and keep 0 B more; {held}");
        assert_eq!(room.to_string(), of_both);
        let said = site.pool.allocate(150 * MIB).unwrap_err().to_string();
        assert!(
            said.contains("112.0 MiB in use") && said.contains(held),
            "{said}"
        );
    }
}
