//! Segments: the page-aligned mappings that blocks are carved from, and those that other processes
//! lend.

use std::any::Any;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{OnceLock, Weak};

use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    ftruncate, memfd_create,
};
use rustix::io::Errno;
use rustix::mm::{Advice, ProtFlags, madvise};
use rustix::process::{Resource, getrlimit};

use super::arena::Inner;
use super::map::{map, unmap};
use super::{Arena, DeviceMemory};

/// From this size on pages of 2 MiB are worth asking for.
const HUGE: usize = 2 << 20;

/// What a segment that others map must be sealed with. Without GROW and SHRINK its owner could take
/// pages away from under a reader, which would kill it; without FUTURE_WRITE a reader could open
/// the descriptor again for writing; without SEAL more seals could be added, such as one that makes
/// the owner's own writes impossible.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// Which file a segment is.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(crate) struct File {
    device: u64,
    number: u64,
}

/// One mapping, or one allocation of a device's; given back when dropped.
pub struct Segment {
    /// On a device an address of its own: never to be read through.
    start: NonNull<u8>,
    bytes: usize,
    /// What keeps the pages in their place for devices, if anything does. Goes before the mapping
    /// does.
    pin: OnceLock<Box<dyn Any + Send + Sync>>,
    /// Where the memory is not the host's.
    device: Option<Box<dyn DeviceMemory>>,
    /// Where other processes can map it too.
    descriptor: Option<OwnedFd>,
    /// What others know it by, once they do, and whom to tell that it is no more.
    known: OnceLock<(u32, Weak<Inner>)>,
}

// SAFETY: a segment is only an address range that it owns; nothing in it belongs to a thread.
unsafe impl Send for Segment {}
// SAFETY: shared access to a segment hands out its address and length, and reads of ranges that
// nobody writes (the contract of `Segment::lent`).
unsafe impl Sync for Segment {}

impl Segment {
    /// Maps `bytes` (more than 0) of zeroes for this process alone. Pages are taken when they are
    /// first touched.
    pub(super) fn private(bytes: usize) -> io::Result<Self> {
        assert!(bytes > 0, "a segment has at least one byte");
        let start = map(bytes, ProtFlags::READ | ProtFlags::WRITE, None)?;
        Ok(Self::at(start, bytes, None))
    }

    /// Maps `bytes` (more than 0) of zeroes that other processes can map for reading, with all
    /// their pages.
    ///
    /// The pages are taken here because later nobody could be told that there are none: a write to
    /// a page that the system does not have kills the process.
    pub(super) fn shared(bytes: usize) -> io::Result<Self> {
        assert!(bytes > 0, "a segment has at least one byte");
        let descriptor = memory_file("mpmd", bytes)?;
        // The file is this function's own and has `bytes` bytes, which nobody can take from it once
        // it is sealed below.
        let start = map(bytes, ProtFlags::READ | ProtFlags::WRITE, Some(descriptor.as_fd()))?;
        let segment = Self::at(start, bytes, Some(descriptor));
        if bytes >= HUGE {
            // Where they are not allowed the kernel says so, and small ones do.
            segment.advise(Advice::LinuxHugepage).ok();
        }
        match segment.advise(Advice::LinuxPopulateWrite) {
            // Kernels before 5.14: the file gets its pages, which this process then finds at first
            // touch.
            Err(Errno::INVAL) => {
                take_pages(segment.fd()?, bytes)?;
            }
            result => result?,
        }
        fcntl_add_seals(segment.fd()?, SEALS)?;
        Ok(segment)
    }

    /// Maps a segment of another process, for reading, whose owner says that it has `bytes` bytes.
    ///
    /// # Errors
    ///
    /// Where it has not, or is not sealed: its owner could take pages away, which would kill this
    /// process.
    pub(crate) fn foreign(descriptor: OwnedFd, bytes: u64) -> io::Result<Self> {
        let found = fstat(&descriptor)?;
        let length = u64::try_from(found.st_size).unwrap_or(0);
        let bytes =
            usize::try_from(bytes).ok().filter(|bytes| *bytes > 0 && length == *bytes as u64);
        let Some(bytes) = bytes else {
            return Err(io::Error::other(format!(
                "a segment of {length} bytes is announced with others"
            )));
        };
        if !fcntl_get_seals(&descriptor)?.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return Err(io::Error::other("a segment is not sealed"));
        }
        // The file cannot become shorter: its seal was seen above.
        let start = map(bytes, ProtFlags::READ, Some(descriptor.as_fd()))?;
        let has_pages =
            u64::try_from(found.st_blocks).unwrap_or(0).saturating_mul(512) >= bytes as u64;
        let segment = Self::at(start, bytes, Some(descriptor));
        if has_pages {
            // One call instead of a fault for every few pages; older kernels do without. Where
            // there are none it would take new ones, as many as somebody says.
            segment.advise(Advice::LinuxPopulateRead).ok();
        }
        Ok(segment)
    }

    /// What tells the file of a descriptor from others, as long as somebody has it open or mapped.
    pub(crate) fn file(descriptor: BorrowedFd<'_>) -> io::Result<File> {
        let found = fstat(descriptor)?;
        Ok(File { device: found.st_dev, number: found.st_ino })
    }

    fn at(start: NonNull<u8>, bytes: usize, descriptor: Option<OwnedFd>) -> Self {
        Self {
            start,
            bytes,
            pin: OnceLock::new(),
            device: None,
            descriptor,
            known: OnceLock::new(),
        }
    }

    /// Memory of a device.
    pub(crate) fn of_device(memory: Box<dyn DeviceMemory>) -> io::Result<Self> {
        let start = usize::try_from(memory.address()).unwrap_or(0);
        let start = NonNull::new(std::ptr::without_provenance_mut(start))
            .ok_or_else(|| io::Error::other("a device gave memory at no address"))?;
        Ok(Self {
            start,
            bytes: memory.bytes(),
            pin: OnceLock::new(),
            device: Some(memory),
            descriptor: None,
            known: OnceLock::new(),
        })
    }

    /// The device's memory that this is, where it is not the host's.
    pub(crate) fn device(&self) -> Option<&dyn DeviceMemory> {
        self.device.as_deref()
    }

    /// Has `pin` dropped before the mapping goes.
    pub(super) fn keep_pin(&self, pin: Box<dyn Any + Send + Sync>) {
        // A second one has nothing to keep.
        let _ = self.pin.set(pin);
    }

    /// Whether its pages stay in their place for devices.
    pub(super) fn is_pinned(&self) -> bool {
        self.pin.get().is_some()
    }

    /// The address of the first byte, aligned to a page.
    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// The segment's length.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of a segment that another process owns and has lent; `None` where it has no such
    /// range.
    ///
    /// The owner promises that they do not change while they are lent. One that breaks its promise,
    /// by a bug, makes readers see other values; it cannot make them touch memory that is not
    /// there.
    pub(crate) fn lent(&self, range: Range<usize>) -> Option<&[u8]> {
        if !self.has(&range) || self.device.is_some() {
            return None;
        }
        // SAFETY: the range was just seen to lie within the mapping, which `self` keeps. All of it
        // is initialised, as the pages of files are. Nobody in this process can write it: it is
        // mapped for reading only; and its owner does not while it is lent, see above.
        Some(unsafe {
            std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.len())
        })
    }

    /// What other processes map it by; `None` where they cannot.
    pub(crate) fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(AsFd::as_fd)
    }

    /// Whether other processes can map it, or open it.
    pub(crate) fn is_shareable(&self) -> bool {
        self.descriptor.is_some() || self.device().is_some_and(|memory| memory.export().is_some())
    }

    /// Whether there is such a range in it.
    pub(crate) fn has(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.bytes
    }

    /// The number by which others know it, a new one of `arena` where nobody does yet. Never used
    /// for another segment of this process.
    pub(crate) fn number(&self, arena: &Arena) -> u32 {
        self.known.get_or_init(|| (arena.next_number(), arena.downgrade())).0
    }

    fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        self.descriptor().ok_or_else(|| io::Error::other("a segment without a descriptor"))
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is this segment's own mapping. None of the advice given here changes
        // what it holds.
        unsafe { madvise(self.start.as_ptr().cast(), self.bytes, advice) }
    }
}

/// A new file in memory, of so many zeroes, to be sealed.
///
/// # Errors
///
/// Where the system has no such thing, or where this process may not have files so long: to make
/// one all the same would end it by a signal (SIGXFSZ).
pub(crate) fn memory_file(name: &str, bytes: usize) -> io::Result<OwnedFd> {
    check_file_limit(bytes as u64)?;
    let descriptor = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&descriptor, bytes as u64)?;
    Ok(descriptor)
}

/// Has the system give all pages of a file in memory now.
pub(crate) fn take_pages(file: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    in_pieces(bytes as u64, |at, bytes| fallocate(file, FallocateFlags::empty(), at, bytes))
}

/// Calls `take` with offsets and lengths that together are `bytes` bytes.
///
/// A call that a signal interrupts has done nothing, and the next is for half as much: signals that
/// keep coming do not interrupt the same work for ever.
fn in_pieces(bytes: u64, mut take: impl FnMut(u64, u64) -> Result<(), Errno>) -> io::Result<()> {
    let (mut at, mut piece) = (0, bytes);
    while at < bytes {
        piece = piece.min(bytes - at);
        match take(at, piece) {
            Ok(()) => at += piece,
            Err(Errno::INTR) => piece = (piece / 2).max(1),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Whether this process may have files of so many bytes.
pub(super) fn check_file_limit(bytes: u64) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < bytes => Err(io::Error::other(format!(
            "this process may not have files of {bytes} bytes (ulimit -f), which holds for memory \
             that others can \
             map too"
        ))),
        _ => Ok(()),
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        drop(self.pin.take());
        if self.device.is_none() {
            // SAFETY: the range was mapped by a constructor with this length, is unmapped only
            // here, and every block inside it and every loan of it holds an `Arc` of the segment,
            // so none is left.
            unsafe { unmap(self.start, self.bytes) };
        }
        if let Some((number, arena)) = self.known.get()
            && let Some(arena) = arena.upgrade()
        {
            // Others may have a device's memory open: it stays until they have closed it.
            arena.retire(*number, self.device.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_shared_segment_can_be_read_by_who_has_its_descriptor_and_changed_by_nobody_else() {
        let segment = Segment::shared(8192).unwrap();
        // SAFETY: nobody else has the segment yet.
        unsafe { segment.start().as_ptr().add(5000).write(7) };
        let descriptor = segment.fd().unwrap().try_clone_to_owned().unwrap();
        let foreign = Segment::foreign(descriptor, 8192).unwrap();
        assert_eq!(foreign.lent(4999..5001).unwrap(), [0, 7]);
        for range in [0..8193, 8193..8193, usize::MAX - 1..usize::MAX, Range { start: 2, end: 1 }] {
            assert!(foreign.lent(range).is_none());
        }
        // By no way: not through the descriptor, nor opened again, nor shorter, nor mapped for
        // writing.
        let fd = segment.fd().unwrap();
        assert!(ftruncate(fd, 4096).is_err() && ftruncate(fd, 16384).is_err());
        assert!(fcntl_add_seals(fd, SealFlags::WRITE).is_err());
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let again = std::fs::OpenOptions::new().write(true).open(path);
        assert!(again.is_err() || again.unwrap().write(&[1]).is_err());
        let writable = map(8192, ProtFlags::WRITE, Some(fd));
        assert_eq!(writable.unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        // The owner goes on writing, and readers see it.
        // SAFETY: `lent` gave out no slice that is still alive.
        unsafe { segment.start().as_ptr().write(9) };
        assert_eq!(foreign.lent(0..1).unwrap(), [9]);
        drop(segment);
        assert_eq!(foreign.lent(0..1).unwrap(), [9], "it outlives its owner's mapping");
    }

    #[test]
    fn what_is_not_a_sealed_segment_of_that_size_is_refused() {
        let segment = Segment::shared(4096).unwrap();
        let fd = || segment.fd().unwrap().try_clone_to_owned().unwrap();
        assert!(Segment::foreign(fd(), 4096).is_ok());
        for bytes in [0, 4095, 8192, u64::MAX] {
            assert!(Segment::foreign(fd(), bytes).is_err());
        }
        let open = memfd_create("open", MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, 4096).unwrap();
        assert!(Segment::foreign(open, 4096).is_err());
    }
    #[test]
    fn interrupted_work_goes_on_with_smaller_pieces() {
        let (mut calls, mut taken) = (0, 0);
        let take = |at, bytes| {
            calls += 1;
            if calls <= 3 || calls == 5 {
                return Err(Errno::INTR);
            }
            assert_eq!(at, taken);
            taken += bytes;
            Ok(())
        };
        in_pieces(10 << 20, take).unwrap();
        assert_eq!(taken, 10 << 20);
        assert!(calls < 64, "{calls} calls");
        let full = in_pieces(4096, |_, _| Err(Errno::NOSPC)).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
    }
}
