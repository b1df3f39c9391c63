//! Pinned host memory: allocated by the driver, or registered by the program.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::RwLock;

use crate::device::current;
use crate::device::memory::space;
use crate::entry::{Out, api};
use crate::error::{Code, Result};
use crate::faults::meet;
use crate::settings::{CallKind, settings};

/// Valid flags of `cuMemHostAlloc`: portable, device map, write combined. `REGISTER_FLAGS` are
/// those of `cuMemHostRegister`: portable, device map, I/O memory, read only.
const ALLOC_FLAGS: u32 = 1 | 2 | 4;
const REGISTER_FLAGS: u32 = 1 | 2 | 4 | 8;

static PINNED: RwLock<BTreeMap<u64, Arc<HostBlock>>> = RwLock::new(BTreeMap::new());

/// A range of pinned host memory: first address, and length in bytes.
#[derive(Debug)]
pub(crate) struct HostBlock {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    flags: u32,
    /// True if the driver allocated the range and must unmap it. False for registered memory, which
    /// belongs to the program.
    owned: bool,
}

/// Returns the pinned block that contains all `bytes` bytes from `address` on. `None` if no block
/// does.
pub(crate) fn pinned(address: u64, bytes: u64) -> Option<Arc<HostBlock>> {
    let table = PINNED.read();
    let (_, block) = table.range(..=address).next_back()?;
    (address + bytes <= block.address + block.bytes && address < block.address + block.bytes)
        .then(|| block.clone())
}

impl Drop for HostBlock {
    fn drop(&mut self) {
        if self.owned {
            // SAFETY: mapped by `alloc` with this length. Work that uses it holds the block, so
            // none is left.
            unsafe { libc::munmap(self.address as *mut _, self.bytes as usize) };
        }
    }
}

fn alloc(bytes: usize, flags: u32) -> Result<u64> {
    current()?.check()?;
    meet(CallKind::AllocHost)?;
    if bytes == 0 || flags & !ALLOC_FLAGS != 0 {
        return Err(Code::INVALID_VALUE);
    }

    // SAFETY: new memory, at addresses that the kernel chooses.
    let at = unsafe {
        libc::mmap(
            std::ptr::null_mut(),
            bytes,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            -1,
            0,
        )
    };
    if at == libc::MAP_FAILED {
        return Err(Code::OUT_OF_MEMORY);
    }

    let block = HostBlock {
        address: at as u64,
        bytes: bytes as u64,
        flags,
        owned: true,
    };
    PINNED.write().insert(block.address, Arc::new(block));
    Ok(at as u64)
}

api! {
    /// Allocates `bytes` bytes of pinned host memory. The memory holds zeros, as CUDA's does in
    /// practice.
    fn cuMemHostAlloc(pointer: Out<u64>, bytes: usize, flags: u32) {
        pointer.required()?;
        pointer.set(alloc(bytes, flags)?)
    }
}

api! {
    /// Allocates `bytes` bytes of pinned host memory, as `cuMemHostAlloc` with flags 0.
    fn cuMemAllocHost_v2(pointer: Out<u64>, bytes: usize) {
        pointer.required()?;
        pointer.set(alloc(bytes, 0)?)
    }
}

api! {
    /// Frees memory of `cuMemHostAlloc` or `cuMemAllocHost`. Does not wait: copies already issued
    /// can still access it.
    fn cuMemFreeHost(pointer: u64) {
        current()?.check()?;
        let mut table = PINNED.write();
        if table.get(&pointer).is_none_or(|block| !block.owned) {
            return Err(Code::INVALID_VALUE);
        }
        table.remove(&pointer);
        Ok(())
    }
}

api! {
    /// Registers memory of the program as pinned; its pages are not really locked. Fails if a byte
    /// of the memory is already pinned, or if it begins in device memory.
    fn cuMemHostRegister_v2(pointer: u64, bytes: usize, flags: u32) {
        current()?.check()?;
        let is_nothing = pointer == 0 || bytes == 0;
        if !settings().pins {
            return Err(Code::OPERATING_SYSTEM);
        }
        if is_nothing || flags & !REGISTER_FLAGS != 0 || space().covers(pointer) {
            return Err(Code::INVALID_VALUE);
        }

        let mut table = PINNED.write();
        let end = pointer + bytes as u64;
        let before = table.range(..end).next_back();
        if before.is_some_and(|(_, last)| last.address + last.bytes > pointer) {
            return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
        }

        let block = HostBlock { address: pointer, bytes: bytes as u64, flags, owned: false };
        table.insert(pointer, Arc::new(block));
        Ok(())
    }
}

api! {
    /// Ends the pinning of registered memory, given its first address.
    fn cuMemHostUnregister(pointer: u64) {
        current()?.check()?;
        let mut table = PINNED.write();
        if table.get(&pointer).is_none_or(|block| block.owned) {
            return Err(Code::HOST_MEMORY_NOT_REGISTERED);
        }
        table.remove(&pointer);
        Ok(())
    }
}

api! {
    /// Returns the flags with which pinned memory was allocated or registered. `pointer` is any
    /// address in the memory.
    fn cuMemHostGetFlags(flags: Out<u32>, pointer: u64) {
        current()?.check()?;
        flags.set(pinned(pointer, 1).ok_or(Code::INVALID_VALUE)?.flags)
    }
}

api! {
    /// Returns the device address of pinned memory: `pointer` itself, as host and device share one
    /// address space.
    fn cuMemHostGetDevicePointer_v2(device: Out<u64>, pointer: u64, flags: u32) {
        current()?.check()?;
        if flags != 0 || pinned(pointer, 1).is_none() {
            return Err(Code::INVALID_VALUE);
        }
        device.set(pointer)
    }
}
