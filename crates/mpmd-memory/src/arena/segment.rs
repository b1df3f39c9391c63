//! Segments: the page-aligned mappings that blocks are carved from, and the mappings of segments
//! that other processes lend.

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

use mpmd_base::block::Mutex;

use super::{Arena, ArenaInner};
use crate::DeviceMemory;
use crate::map::{map, unmap};

/// Smallest segment, in bytes, for which pages of 2 MiB are requested.
const HUGE: usize = 2 << 20;

/// Number of bytes whose pages are mapped in one system call; a multiple of any page size. Other
/// threads that change mappings wait until the call ends.
const POPULATED: usize = 4 << 20;

/// The seals of a segment's file that other processes map. Without GROW and SHRINK the owner could
/// remove pages while a process reads them, which would kill that process. Without FUTURE_WRITE a
/// reader could reopen the descriptor for writing. Without SEAL more seals could be added, such as
/// one that forbids the owner's own writes.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::FUTURE_WRITE)
    .union(SealFlags::SEAL);

/// The identity of a segment's file: its device and its inode number.
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub struct File {
    device: u64,
    number: u64,
}

/// A mapping of host memory, or an allocation of device memory. Dropping it frees the memory.
pub struct Segment {
    /// Address of the first byte. For device memory it is the device's address and must not be
    /// dereferenced.
    start: NonNull<u8>,
    bytes: usize,
    /// The guard that keeps the pages pinned for devices, if any. Dropped before the memory is
    /// unmapped.
    pin: OnceLock<Box<dyn Any + Send + Sync>>,
    /// The device memory; `None` for host memory.
    device: Option<Box<dyn DeviceMemory>>,
    /// The file of the segment; `None` if other processes cannot map the segment.
    descriptor: Option<OwnedFd>,
    /// The name of the segment in the first arena that lends it. Set when a peer first gets the
    /// segment.
    known: OnceLock<SegmentName>,
    /// The names of the segment in further arenas.
    known_too: Mutex<Vec<SegmentName>>,
}

/// The name by which the peers of one arena know a segment.
struct SegmentName {
    /// The number by which peers know the segment.
    number: u32,
    /// The arena to tell when the segment is freed.
    arena: Weak<ArenaInner>,
}

// SAFETY: a segment is only an address range that it owns; nothing in it belongs to a thread.
unsafe impl Send for Segment {}
// SAFETY: shared access to a segment gives its address and length, and reads of ranges that are not
// written meanwhile (the contract of `Segment::lent`).
unsafe impl Sync for Segment {}

impl Segment {
    /// Maps `bytes` (more than 0) zero bytes that only this process can access. Pages are allocated
    /// at their first access.
    pub(super) fn private(bytes: usize) -> io::Result<Self> {
        assert!(bytes > 0, "a segment has at least one byte");
        let start = map(bytes, ProtFlags::READ | ProtFlags::WRITE, None)?;
        Ok(Self::at(start, bytes, None))
    }

    /// Maps `bytes` (more than 0) zero bytes that other processes can map for reading, and
    /// allocates all pages.
    ///
    /// A missing page could not be reported later: a write to a page that the system cannot provide
    /// kills the process.
    pub(super) fn shared(bytes: usize) -> io::Result<Self> {
        assert!(bytes > 0, "a segment has at least one byte");
        let descriptor = memory_file("mpmd", bytes)?;
        // The file belongs to this function and has `bytes` bytes, and it is sealed below: no
        // process can shorten it then.
        let start = map(
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            Some(descriptor.as_fd()),
        )?;

        let segment = Self::at(start, bytes, Some(descriptor));
        if bytes >= HUGE {
            // If the kernel does not allow huge pages it returns an error, and small pages will do.
            segment.advise(Advice::LinuxHugepage).ok();
        }

        match segment.advise(Advice::LinuxPopulateWrite) {
            // Kernels before 5.14: allocates the file's pages, which this process then maps at the
            // first access.
            Err(Errno::INVAL) => {
                take_pages(segment.fd()?, bytes)?;
            }
            result => result?,
        }
        fcntl_add_seals(segment.fd()?, SEALS)?;
        Ok(segment)
    }

    /// Maps another process's segment for reading. `bytes` is its length according to the owner.
    /// The pages are mapped at their first access, or by [`populate`](Self::populate).
    ///
    /// # Errors
    ///
    /// If the length is wrong, or if the file is not sealed: the owner could then remove pages,
    /// which would kill this process.
    pub fn foreign(descriptor: OwnedFd, bytes: u64) -> io::Result<Self> {
        let found = fstat(&descriptor)?;
        let length = u64::try_from(found.st_size).unwrap_or(0);
        let bytes = usize::try_from(bytes)
            .ok()
            .filter(|bytes| *bytes > 0 && length == *bytes as u64);

        let Some(bytes) = bytes else {
            return Err(io::Error::other(format!(
                "a segment has {length} bytes, but another length was announced"
            )));
        };
        if !fcntl_get_seals(&descriptor)?.contains(SealFlags::SHRINK | SealFlags::SEAL) {
            return Err(io::Error::other("a segment is not sealed"));
        }

        // The file cannot become shorter: its seal was checked above.
        let start = map(bytes, ProtFlags::READ, Some(descriptor.as_fd()))?;
        Ok(Self::at(start, bytes, Some(descriptor)))
    }

    /// Maps all pages of another process's segment that are not mapped yet. Takes some hundred
    /// microseconds per MiB.
    pub fn populate(&self) {
        let has_pages = self.fd().and_then(|fd| Ok(fstat(fd)?)).is_ok_and(|found| {
            u64::try_from(found.st_blocks)
                .unwrap_or(0)
                .saturating_mul(512)
                >= self.bytes as u64
        });

        // On a file without pages this would allocate as many as the peer claims.
        for at in (0..self.bytes).step_by(POPULATED).filter(|_| has_pages) {
            let bytes = POPULATED.min(self.bytes - at);
            // SAFETY: the range lies within this segment's own mapping. The advice changes no
            // content.
            let done = unsafe {
                madvise(
                    self.start.as_ptr().add(at).cast(),
                    bytes,
                    Advice::LinuxPopulateRead,
                )
            };
            // Older kernels lack it. Pages are then mapped at their first access.
            if done.is_err() {
                return;
            }
        }
    }

    /// Returns the identity of a descriptor's file. It is unique as long as the file is open or
    /// mapped somewhere.
    pub fn file(descriptor: BorrowedFd<'_>) -> io::Result<File> {
        let found = fstat(descriptor)?;
        Ok(File {
            device: found.st_dev,
            number: found.st_ino,
        })
    }

    /// Wraps a mapping of host memory as a segment.
    fn at(start: NonNull<u8>, bytes: usize, descriptor: Option<OwnedFd>) -> Self {
        Self {
            start,
            bytes,
            pin: OnceLock::new(),
            device: None,
            descriptor,
            known: OnceLock::new(),
            known_too: Mutex::default(),
        }
    }

    /// Wraps device memory as a segment. Fails if its address is 0.
    pub fn of_device(memory: Box<dyn DeviceMemory>) -> io::Result<Self> {
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
            known_too: Mutex::default(),
        })
    }

    /// Returns the device memory; `None` for host memory.
    pub fn device(&self) -> Option<&dyn DeviceMemory> {
        self.device.as_deref()
    }

    /// Stores `pin`, the guard of pinned pages, until just before the memory is unmapped. Only the
    /// first call counts.
    pub(super) fn keep_pin(&self, pin: Box<dyn Any + Send + Sync>) {
        // A second pin is not needed.
        let _ = self.pin.set(pin);
    }

    /// Returns true if the segment's pages are pinned for devices.
    pub(crate) fn is_pinned(&self) -> bool {
        self.pin.get().is_some()
    }

    /// Returns the address of the first byte. Host memory is aligned to a page. For device memory
    /// it is the device's address and must not be dereferenced.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Returns the segment's length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns a range of bytes of a segment that another process owns and has lent. `None` if the
    /// segment has no such range, or is device memory.
    ///
    /// The owner promises not to change the bytes while they are lent. If it breaks the promise, by
    /// a bug, readers see other values, but never access unmapped memory.
    pub fn lent(&self, range: Range<usize>) -> Option<&[u8]> {
        if !self.has(&range) || self.device.is_some() {
            return None;
        }
        // SAFETY: the check above shows that the range lies within the mapping, which `self` keeps.
        // All of it is initialised, as the pages of files are. This process cannot write it, since
        // it is mapped for reading only. Its owner does not write it while it is lent, see above.
        Some(unsafe {
            std::slice::from_raw_parts(self.start.as_ptr().add(range.start), range.len())
        })
    }

    /// Returns the descriptor by which other processes map the segment; `None` if they cannot map
    /// it.
    pub fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.descriptor.as_ref().map(AsFd::as_fd)
    }

    /// Returns true if other processes can map the segment, or open its device memory.
    pub fn is_shareable(&self) -> bool {
        self.descriptor.is_some()
            || self
                .device()
                .is_some_and(|memory| memory.export().is_some())
    }

    /// Returns true if `range`, in bytes, is within the segment.
    pub fn has(&self, range: &Range<usize>) -> bool {
        range.start <= range.end && range.end <= self.bytes
    }

    /// Returns the number by which peers know this segment. The first call takes a new number of
    /// `arena`, which no other segment of that arena ever gets.
    pub fn number(&self, arena: &Arena) -> u32 {
        let new = || SegmentName {
            number: arena.next_number(),
            arena: arena.downgrade(),
        };
        let first = self.known.get_or_init(new);
        if arena.is(&first.arena) {
            return first.number;
        }

        // Memory of one job that another job of this process lends.
        let mut known = self.known_too.lock();
        if let Some(name) = known.iter().find(|name| arena.is(&name.arena)) {
            return name.number;
        }
        known.retain(|name| name.arena.strong_count() > 0);
        let name = new();
        let number = name.number;
        known.push(name);
        number
    }

    fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        self.descriptor()
            .ok_or_else(|| io::Error::other("a segment without a descriptor"))
    }

    fn advise(&self, advice: Advice) -> Result<(), Errno> {
        // SAFETY: the range is this segment's own mapping. No advice used in this file changes its
        // content.
        unsafe { madvise(self.start.as_ptr().cast(), self.bytes, advice) }
    }
}

/// Creates a file in memory of `bytes` zero bytes that can be sealed.
///
/// # Errors
///
/// If the system does not support such files, or if the process's file size limit is lower than
/// `bytes`. Exceeding the limit would kill the process by a signal (SIGXFSZ).
pub fn memory_file(name: &str, bytes: usize) -> io::Result<OwnedFd> {
    check_file_limit(bytes as u64)?;
    let descriptor = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&descriptor, bytes as u64)?;
    Ok(descriptor)
}

/// Allocates the pages of the first `bytes` bytes of a file in memory at once.
pub fn take_pages(file: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    in_pieces(bytes as u64, |at, bytes| {
        fallocate(file, FallocateFlags::empty(), at, bytes)
    })
}

/// Calls `take` with (offset, length in bytes) until the calls together have covered `bytes` bytes.
/// After a call that a signal interrupts, and that has done nothing, the next call covers half as
/// much. So repeated signals cannot interrupt the same work for ever.
fn in_pieces(bytes: u64, mut take: impl FnMut(u64, u64) -> Result<(), Errno>) -> io::Result<()> {
    let mut at = 0;
    let mut piece = bytes;
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

/// Fails if this process's file size limit is below `bytes` bytes.
pub(super) fn check_file_limit(bytes: u64) -> io::Result<()> {
    match getrlimit(Resource::Fsize).current {
        Some(limit) if limit < bytes => Err(io::Error::other(format!(
            "this process may not have files of {bytes} bytes (ulimit -f), which holds for memory \
             that others can map too"
        ))),
        _ => Ok(()),
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        drop(self.pin.take());
        if self.device.is_none() {
            // SAFETY: a constructor mapped the range with this length, and it is unmapped only
            // here. Every block inside it and every loan of it holds an `Arc` of the segment, so
            // none is left.
            unsafe { unmap(self.start, self.bytes) };
        }

        if let Some(name) = self.known.get()
            && let Some(arena) = name.arena.upgrade()
        {
            // Peers may have a device's memory open: it stays until they have closed it.
            arena.retire(name.number, self.device.take());
        }
        for name in self.known_too.get_mut().drain(..) {
            if let Some(arena) = name.arena.upgrade() {
                arena.retire(name.number, None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn shared_segment_is_readable_by_all_writable_by_owner() {
        let segment = Segment::shared(8192).unwrap();
        // SAFETY: no other code has the segment yet.
        unsafe { segment.start().as_ptr().add(5000).write(7) };
        let descriptor = segment.fd().unwrap().try_clone_to_owned().unwrap();
        let foreign = Segment::foreign(descriptor, 8192).unwrap();
        assert_eq!(foreign.lent(4999..5001).unwrap(), [0, 7]);
        for range in [
            0..8193,
            8193..8193,
            usize::MAX - 1..usize::MAX,
            Range { start: 2, end: 1 },
        ] {
            assert!(foreign.lent(range).is_none());
        }
        // Writing fails in every way: by the descriptor, by reopening it, by truncation, and by a
        // writable mapping.
        let fd = segment.fd().unwrap();
        assert!(ftruncate(fd, 4096).is_err() && ftruncate(fd, 16384).is_err());
        assert!(fcntl_add_seals(fd, SealFlags::WRITE).is_err());
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&fd));
        let again = std::fs::OpenOptions::new().write(true).open(path);
        assert!(again.is_err() || again.unwrap().write(&[1]).is_err());
        let writable = map(8192, ProtFlags::WRITE, Some(fd));
        assert_eq!(
            writable.unwrap_err().kind(),
            io::ErrorKind::PermissionDenied
        );
        // The owner continues to write, and readers see it. SAFETY: `lent` returned no slice that
        // is still alive.
        unsafe { segment.start().as_ptr().write(9) };
        assert_eq!(foreign.lent(0..1).unwrap(), [9]);
        drop(segment);
        assert_eq!(
            foreign.lent(0..1).unwrap(),
            [9],
            "it outlives its owner's mapping"
        );
    }

    #[test]
    fn foreign_segment_needs_seals_and_exact_length() {
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
