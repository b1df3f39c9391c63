//! The tables of memory that this process shares with others by CUDA IPC, and the descriptions that
//! travel.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};

use cudarc::driver::sys;
use mpmd_base::block::Mutex;

use super::calls;
use super::error::CudaError;

/// Lengths in bytes: of a CUDA handle, of a device's UUID, and of an [`IpcOrigin`].
pub(super) const HANDLE: usize = 64;
const UUID: usize = 16;
const ORIGIN: usize = 16;

/// An IPC description: a CUDA handle, the UUID of its device, and the origin of the memory.
pub(super) type Words = [u8; HANDLE + UUID + ORIGIN];

/// The location of memory in its owner's context.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct IpcOrigin {
    /// A random number that identifies the owner's context.
    context: u64,
    /// The address of the memory in that context.
    address: u64,
}

/// Memory of this context that other processes can open, by its CUDA handle. This table is read
/// when another process sends a handle of this process back.
pub(super) struct ShownMemory {
    pub(super) memory: Mutex<HashMap<[u8; HANDLE], ShownRange>>,
    /// The random number that identifies this context in an [`IpcOrigin`].
    pub(super) context: u64,
}

/// The address and the length of exported memory.
#[derive(Clone, Copy)]
pub(super) struct ShownRange {
    pub(super) address: u64,
    pub(super) bytes: usize,
}

impl Default for ShownMemory {
    fn default() -> Self {
        // Each `RandomState` has keys of its own, which differ between processes.
        Self {
            memory: Mutex::default(),
            context: RandomState::new().hash_one(()),
        }
    }
}

/// Blocks of other processes' memory that are open in a context.
#[derive(Default)]
pub(super) struct OpenedBlocks(Mutex<Vec<OpenedBlock>>);

impl OpenedBlocks {
    /// Adds a user to the open block that contains `bytes` bytes from `origin` on. Returns `None`
    /// if no such block is open.
    pub(super) fn join(&self, origin: IpcOrigin, bytes: usize) -> Option<FoundBytes> {
        let mut blocks = self.0.lock();
        let mut found = blocks
            .iter_mut()
            .filter_map(|block| Some((block.find(origin, bytes)?, block)));
        let (address, block) = found.next()?;
        block.users += 1;
        Some(FoundBytes {
            address,
            block: block.address,
            range: block.range,
        })
    }

    /// Adds a user to the block that the driver has opened at `address`. The context must be
    /// current.
    pub(super) fn add(&self, address: u64, origin: IpcOrigin) -> FoundBytes {
        let mut blocks = self.0.lock();
        if let Some(block) = blocks.iter_mut().find(|block| block.address == address) {
            block.users += 1;
            let found = FoundBytes {
                address,
                block: address,
                range: block.range,
            };
            drop(blocks);
            // The driver counts how often a handle is opened, and a block is closed once.
            close(address);
            return found;
        }

        let range = range_of(address);
        blocks.push(OpenedBlock {
            address,
            origin,
            range,
            users: 1,
        });
        FoundBytes {
            address,
            block: address,
            range,
        }
    }

    /// Removes a user of the block at `address`. Returns true if it was the last user: the caller
    /// must then close the block.
    pub(super) fn leave(&self, address: u64) -> bool {
        let mut blocks = self.0.lock();
        let Some(at) = blocks.iter().position(|block| block.address == address) else {
            return false;
        };

        blocks[at].users -= 1;
        let is_last = blocks[at].users == 0;
        if is_last {
            blocks.swap_remove(at);
        }
        is_last
    }
}

/// The location of memory in an [`OpenedBlock`].
pub(super) struct FoundBytes {
    /// The address of the memory.
    pub(super) address: u64,
    /// The address of the block.
    pub(super) block: u64,
    /// The whole range that was opened with the block.
    pub(super) range: MemoryRange,
}

/// A range of device memory. Its length is 0 if the driver does not report the range.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemoryRange {
    pub(super) start: u64,
    pub(super) length: u64,
}

/// A block that the driver has opened: at least the allocation to which the handle belongs.
struct OpenedBlock {
    /// The address that the driver returned. `origin` is the origin of the memory at this address.
    address: u64,
    origin: IpcOrigin,
    /// The whole range that was opened.
    range: MemoryRange,
    /// The number of [`OpenedMemory`] values that use the block.
    users: usize,
}

impl OpenedBlock {
    /// Returns the address, in this process, of `bytes` bytes from `origin` on. Returns `None` if
    /// the block does not contain all of them.
    fn find(&self, origin: IpcOrigin, bytes: usize) -> Option<u64> {
        let IpcOrigin { context, address } = self.origin;
        let found = self
            .address
            .wrapping_add(origin.address.wrapping_sub(address));
        let MemoryRange { start, length } = self.range;
        let inside = found.wrapping_sub(start);
        let holds = inside < length && bytes as u64 <= length - inside;
        (context == origin.context && holds).then_some(found)
    }
}

/// The parts of an IPC description.
pub(super) struct Description<'a> {
    /// The CUDA handle.
    pub(super) handle: [u8; HANDLE],
    /// The UUID of the device.
    pub(super) uuid: &'a [u8],
    pub(super) origin: IpcOrigin,
}

/// Decodes an IPC description that another process has sent.
pub(super) fn parts(words: &[u8]) -> Result<Description<'_>, CudaError> {
    let read = || {
        let (handle, rest) = words.split_first_chunk::<HANDLE>()?;
        let (uuid, rest) = rest.split_at_checked(UUID)?;
        let (context, address) = rest.split_first_chunk()?;
        let context = u64::from_le_bytes(*context);
        let address = u64::from_le_bytes(address.try_into().ok()?);
        Some(Description {
            handle: *handle,
            uuid,
            origin: IpcOrigin { context, address },
        })
    };

    read().ok_or_else(|| {
        CudaError::new(
            "opening a CUDA IPC handle of another process",
            "",
            format!("a description of {} bytes is invalid", words.len()),
        )
    })
}

/// Returns the memory range that contains an address. Start and length are 0 if the driver does not
/// report the range. The context must be current.
fn range_of(address: u64) -> MemoryRange {
    use sys::CUpointer_attribute_enum as Attribute;
    let ask = |attribute| {
        let mut value = 0u64;
        // SAFETY: these attributes are numbers of the size of `value`; the address is that of open
        // memory.
        let asked =
            unsafe { calls::cuPointerGetAttribute((&raw mut value).cast(), attribute, address) };
        asked.result().ok().map(|()| value)
    };

    let start = ask(Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR);
    let length = ask(Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE);
    start
        .zip(length)
        .map(|(start, length)| MemoryRange { start, length })
        .filter(|range| address.wrapping_sub(range.start) < range.length)
        .unwrap_or_default()
}

/// Closes opened memory of another process once. The context must be current.
pub(super) fn close(address: u64) {
    // SAFETY: opened in `ipc.rs`, closed once for that; work on it is over, as the owner of
    // memory has made sure before it drops it.
    if let Err(error) = unsafe { calls::cuIpcCloseMemHandle(address) }.result() {
        tracing::debug!(%error, "closing memory of another process's CUDA device");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_block_are_found_by_their_origins() {
        let origin = |address| IpcOrigin {
            context: 5,
            address,
        };
        let block = OpenedBlock {
            address: 0x10_0100,
            origin: origin(0x100),
            range: MemoryRange {
                start: 0x10_0000,
                length: 0x800,
            },
            users: 1,
        };
        assert_eq!(block.find(origin(0x100), 0x700), Some(0x10_0100));
        assert_eq!(block.find(origin(0), 0x800), Some(0x10_0000));
        for (address, bytes) in [(0, 0x801), (0x800, 1), (0x7FF, 2), (u64::MAX, 1)] {
            assert_eq!(
                block.find(origin(address), bytes),
                None,
                "{bytes} at {address:#x}"
            );
        }
        assert_eq!(
            block.find(
                IpcOrigin {
                    context: 6,
                    address: 0x100
                },
                1
            ),
            None,
            "another process"
        );
        assert_eq!(
            OpenedBlock {
                range: MemoryRange::default(),
                ..block
            }
            .find(origin(0x100), 1),
            None
        );
    }
}
