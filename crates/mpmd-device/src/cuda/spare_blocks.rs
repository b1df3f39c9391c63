//! Scratch memory of calls that were issued, kept for calls to come.

use std::sync::Arc;

use mpmd_base::block::Mutex;
use mpmd_memory::OwnedBuffer;
use mpmd_memory::{DevicePlace, Fence};

/// Returns the device memory of a buffer: its device, address and bytes. A host buffer gives 0
/// bytes.
pub fn place(buffer: &OwnedBuffer) -> DevicePlace {
    // A pool of a CUDA device returns memory of that device.
    buffer.device().unwrap_or(DevicePlace {
        device: 0,
        address: 0,
        bytes: 0,
    })
}

/// Removes and returns the last block of exactly `bytes` bytes from a list. Returns `None` if there
/// is no such block.
pub fn take(blocks: &mut Vec<OwnedBuffer>, bytes: usize) -> Option<OwnedBuffer> {
    let index = blocks
        .iter()
        .rposition(|block| place(block).bytes == bytes)?;
    Some(blocks.remove(index))
}

/// Scratch blocks of earlier calls, for reuse by later calls. One stream runs all calls in order,
/// so a later call need not wait for an earlier one to end. The blocks count as used device memory.
#[derive(Debug, Default)]
pub struct SpareBlocks(Mutex<KeptBlocks>);

#[derive(Debug, Default)]
struct KeptBlocks {
    /// The blocks, least recently used first.
    blocks: Vec<OwnedBuffer>,
    bytes: usize,
    /// The most scratch bytes that one call has used so far.
    most: usize,
}

impl SpareBlocks {
    /// Stores the scratch blocks of a call for later calls. `used` is the call's scratch memory in
    /// bytes, and `fence` is the end of its work. Keeps at most twice the memory of the largest
    /// call, and drops the least recently used blocks beyond that.
    pub fn keep(&self, blocks: Vec<OwnedBuffer>, used: usize, fence: &Arc<dyn Fence>) {
        let mut kept = self.0.lock();
        kept.most = kept.most.max(used);
        for mut block in blocks {
            // The newest fence of the stream is behind all earlier ones.
            block.clear_fences();
            block.add_fence(fence.clone());
            kept.bytes += place(&block).bytes;
            kept.blocks.push(block);
        }

        // Drops the least recently used blocks, so that at most twice the largest call's memory is
        // kept.
        let most = kept.most.saturating_mul(2);
        let mut drop_first = 0;
        while kept.bytes > most && drop_first < kept.blocks.len() {
            kept.bytes -= place(&kept.blocks[drop_first]).bytes;
            drop_first += 1;
        }
        kept.blocks.drain(..drop_first);
    }

    /// Takes a stored block of exactly `bytes` bytes, if there is one.
    pub fn take(&self, bytes: usize) -> Option<OwnedBuffer> {
        let mut kept = self.0.lock();
        let block = take(&mut kept.blocks, bytes)?;
        kept.bytes -= place(&block).bytes;
        Some(block)
    }

    /// Returns all blocks to their pool. The pool can reuse a block after the work that uses it has
    /// ended.
    pub fn clear(&self) {
        drop(self.take_all());
    }

    /// Removes and returns all blocks.
    pub(super) fn take_all(&self) -> Vec<OwnedBuffer> {
        let mut kept = self.0.lock();
        kept.bytes = 0;
        std::mem::take(&mut kept.blocks)
    }
}
