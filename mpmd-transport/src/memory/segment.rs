//! Segments: the page-aligned mappings that blocks are carved from.

use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// One anonymous, zero-filled, private mapping; unmapped when dropped.
pub(super) struct Segment {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: a segment is only an address range that it owns; nothing in it belongs to a thread.
unsafe impl Send for Segment {}
// SAFETY: shared access to a segment hands out nothing but its address and length.
unsafe impl Sync for Segment {}

impl Segment {
    /// Maps `bytes` (more than 0) of zeroes. Pages are taken when they are first touched.
    pub(super) fn map(bytes: usize) -> std::io::Result<Self> {
        assert!(bytes > 0, "a segment has at least one byte");
        // SAFETY: with a null hint and without MAP_FIXED the kernel picks a range that nothing else
        // uses, so no existing memory changes.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), bytes, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        }?;
        let start = NonNull::new(start.cast()).ok_or_else(|| std::io::Error::other("mmap returned null"))?;
        Ok(Self { start, bytes })
    }

    /// The address of the first byte, aligned to a page.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The segment's length.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `map` with this length, is unmapped only here, and every
        // block inside it holds an `Arc` of the segment, so none is left.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
        debug_assert!(unmapped.is_ok(), "a segment's own range can be unmapped");
    }
}
