//! Scratch memory of calls that were issued, kept for calls to come.

use std::sync::Arc;

use mpmd_transport::OwnedBuffer;
use mpmd_transport::memory::{DevicePlace, Fence};
use parking_lot::Mutex;

/// Where a block of a device's is.
pub(crate) fn place(buffer: &OwnedBuffer) -> DevicePlace {
    // Pools of CUDA devices give memory of these devices.
    buffer.device().unwrap_or(DevicePlace { device: 0, address: 0, bytes: 0 })
}

/// Takes a block of so many bytes out of a list: the one that came last.
pub(crate) fn take(blocks: &mut Vec<OwnedBuffer>, bytes: usize) -> Option<OwnedBuffer> {
    let index = blocks.iter().rposition(|block| place(block).bytes == bytes)?;
    Some(blocks.remove(index))
}

/// Scratch of calls that were issued, for calls to come: the work of one line runs in order, so
/// these need not wait until it is over. They count as used memory of the device's.
#[derive(Debug, Default)]
pub(crate) struct Spare(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    /// In the order in which they were last used.
    blocks: Vec<OwnedBuffer>,
    bytes: usize,
    /// Of the call that has used most.
    most: usize,
}

impl Spare {
    pub(crate) fn keep(&self, blocks: Vec<OwnedBuffer>, used: usize, fence: &Arc<dyn Fence>) {
        let mut kept = self.0.lock();
        kept.most = kept.most.max(used);
        for mut block in blocks {
            // The latest of the line's is behind all earlier ones.
            block.clear_fences();
            block.add_fence(fence.clone());
            kept.bytes += place(&block).bytes;
            kept.blocks.push(block);
        }
        // What sizes of calls bring that do not come again goes.
        let most = kept.most.saturating_mul(2);
        let mut drop_first = 0;
        while kept.bytes > most && drop_first < kept.blocks.len() {
            kept.bytes -= place(&kept.blocks[drop_first]).bytes;
            drop_first += 1;
        }
        kept.blocks.drain(..drop_first);
    }

    pub(crate) fn take(&self, bytes: usize) -> Option<OwnedBuffer> {
        let mut kept = self.0.lock();
        let block = take(&mut kept.blocks, bytes)?;
        kept.bytes -= place(&block).bytes;
        Some(block)
    }

    /// Gives all back to their pool, which has them once the work that was issued with them is
    /// over.
    pub(crate) fn clear(&self) {
        let mut kept = self.0.lock();
        kept.bytes = 0;
        kept.blocks.clear();
    }
}
