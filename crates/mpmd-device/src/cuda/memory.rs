//! Allocation of device memory with `cuMemAlloc`, and its descriptions for other processes.

use std::io;
use std::sync::{Arc, Once, OnceLock};

use cudarc::driver::sys;
use mpmd_memory::{DeviceAllocator, DeviceMemory};

use super::calls::{self, DriverError};
use super::context::{DeviceContext, cuda};
use super::device_room::{DriverPoolText, make_room};
use super::error::CudaError;
use super::ipc_tables::{HANDLE, ShownRange, Words, parts};
use super::spare_blocks::SpareBlocks;

/// Size in bytes of the blocks that CUDA drivers map. Smaller allocations may share a block, and
/// another process that opens one of them would map the whole block.
const BLOCK: usize = 2 << 20;

/// An allocator of segments of a device's memory.
///
/// It uses `cuMemAlloc`, because memory of the stream-ordered allocator cannot be shared with other
/// processes through CUDA IPC.
pub(super) struct Allocator {
    context: Arc<DeviceContext>,
    spare: Arc<SpareBlocks>,
}

/// One allocation of device memory, freed when dropped.
pub(super) struct SegmentMemory {
    context: Arc<DeviceContext>,
    address: sys::CUdeviceptr,
    bytes: usize,
    /// The IPC description for other processes, created at first use. The inner `None` means that
    /// the memory cannot be shared.
    words: OnceLock<Option<Words>>,
}

impl Allocator {
    pub(super) fn new(context: Arc<DeviceContext>, spare: Arc<SpareBlocks>) -> Self {
        Self { context, spare }
    }

    /// Allocates device memory and returns its address.
    fn allocate_once(&self, bytes: usize) -> Result<sys::CUdeviceptr, DriverError> {
        let mut address = 0;
        // SAFETY: there is room for the address. The memory is read only by work that runs after
        // work that has written it.
        unsafe { calls::cuMemAlloc_v2(&raw mut address, bytes) }
            .result()
            .map(|()| address)
    }
}

impl DeviceAllocator for Allocator {
    fn allocate(&self, bytes: usize) -> io::Result<Box<dyn DeviceMemory>> {
        let _visit = self.context.visit().map_err(io::Error::other)?;
        let whole = bytes.checked_next_multiple_of(BLOCK).unwrap_or(bytes);
        let is_out = |error: &DriverError| error.is(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY);

        let allocated = self.allocate_once(whole).or_else(|error| {
            if !is_out(&error) {
                return Err(error);
            }
            make_room(&self.context, &self.spare);
            self.allocate_once(whole)
        });

        let address = allocated.map_err(|error| {
            let held = match is_out(&error) {
                true => format!("; {}", DriverPoolText(&self.context)),
                false => String::new(),
            };
            let error = cuda(format!("allocating {bytes} bytes on a CUDA device"), error);
            io::Error::other(format!("{error}{held}"))
        })?;

        Ok(Box::new(SegmentMemory {
            context: self.context.clone(),
            address,
            bytes,
            words: OnceLock::new(),
        }))
    }
}

impl DeviceMemory for SegmentMemory {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn device(&self) -> u32 {
        self.context.ordinal()
    }

    fn export(&self) -> Option<&[u8]> {
        self.words
            .get_or_init(|| export(&self.context, self.address, self.bytes))
            .as_ref()
            .map(|words| &words[..])
    }
}

impl Drop for SegmentMemory {
    fn drop(&mut self) {
        if let Some(Some(words)) = self.words.get() {
            forget(&self.context, words);
        }
        let Ok(_visit) = self.context.visit() else {
            return;
        };
        // SAFETY: allocated in `allocate`, freed once. Blocks return to their pool only when work
        // on them is over, and pools free only segments without blocks in use.
        if let Err(error) = unsafe { calls::cuMemFree_v2(self.address) }.result() {
            tracing::debug!(%error, "freeing memory of a CUDA device");
        }
    }
}

/// Returns the IPC description by which other processes open this memory, and adds the memory to
/// the table of exported memory. Returns `None` if the driver refuses.
pub(super) fn export(
    context: &DeviceContext,
    address: sys::CUdeviceptr,
    bytes: usize,
) -> Option<Words> {
    let show = || {
        let _visit = context.visit()?;
        let mut handle = sys::CUipcMemHandle {
            reserved: [0; HANDLE],
        };
        // SAFETY: the address is that of an allocation, of the context that is bound; there is room
        // for the handle.
        unsafe { calls::cuIpcGetMemHandle(&raw mut handle, address) }
            .result()
            .map_err(|error| cuda("showing memory of a CUDA device to other processes", error))?;
        Ok::<_, CudaError>(handle.reserved.map(|byte| byte.to_ne_bytes()[0]))
    };

    match show() {
        Ok(handle) => {
            let shown = context.shown();
            shown
                .memory
                .lock()
                .insert(handle, ShownRange { address, bytes });
            let words = [&handle[..], context.uuid(), &shown.context.to_le_bytes()];
            let words = [words.concat(), address.to_le_bytes().to_vec()].concat();
            words.try_into().ok()
        }
        Err(error) => {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                tracing::warn!(
                    %error,
                    "cannot lend memory of a CUDA device to other processes: what they need of it \
                     is copied through host memory, at a fraction of the speed"
                );
            });
            tracing::debug!(%error, "memory that is not shared");
            None
        }
    }
}

/// Removes freed memory from the table of exported memory.
pub(super) fn forget(context: &DeviceContext, words: &Words) {
    if let Ok(description) = parts(words) {
        context.shown().memory.lock().remove(&description.handle);
    }
}

#[cfg(test)]
mod tests {
    use crate::cuda::Gpu;

    #[test]
    fn allocations_share_no_block_of_the_driver() {
        if softcuda::again!("SOFTCUDA_BLOCK" = "2097152") {
            return;
        }
        let allocator = Gpu::open(0).unwrap().allocator();
        let sizes = [1, 640 << 10, 1, (2 << 20) + 1, 1];
        let made = sizes.map(|bytes| allocator.allocate(bytes).unwrap());
        let mut blocks = made
            .each_ref()
            .map(|memory| memory.address() / super::BLOCK as u64);
        blocks.sort_unstable();
        assert!(
            blocks.windows(2).all(|pair| pair[0] != pair[1]),
            "{blocks:?}"
        );
        assert_eq!(made.map(|memory| memory.bytes()), sizes);
    }
}
