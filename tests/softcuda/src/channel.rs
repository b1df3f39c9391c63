//! What ranks of NCCL have between them: a piece of memory that all of them map, threads of one process or of several.
//!
//! Its file has no name: whoever makes the group holds it open, and others find it as `/proc/<process>/fd/<number>`, as it
//! says in the group's id. From each rank to each there is a ring of bytes.

use std::cell::UnsafeCell;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::ipc::started;
use crate::memory::memory_file;

/// The most ranks of a group.
pub(crate) const MOST_RANKS: usize = 16;
/// Bytes under way from one rank to another at most.
const RING: usize = 64 << 10;
/// How long who finds nothing to do sleeps.
pub(crate) const LOOK: Duration = Duration::from_micros(200);

/// The files of groups that this process has made, for others to open. They go with the process.
static MADE: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());

/// The shared memory; all zeros is a group that nobody has joined.
#[repr(C)]
struct Page {
    ranks: [Rank; MOST_RANKS],
    /// From, to.
    rings: [[Ring; MOST_RANKS]; MOST_RANKS],
}

#[repr(C)]
struct Rank {
    /// The number of ranks that it says there are; 0 before it has come.
    of: AtomicU32,
    uuid: [AtomicU32; 4],
    process: AtomicU32,
    device: AtomicU32,
}

#[repr(C)]
struct Ring {
    written: AtomicU64,
    read: AtomicU64,
    bytes: UnsafeCell<[u8; RING]>,
}

/// A group's id, in NCCL's 128 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Id {
    mark: [u8; 8],
    process: u32,
    file: RawFd,
    started: u64,
    inode: u64,
    spare: [u64; 12],
}

const _: () = assert!(size_of::<Id>() == 128);

/// A group's shared memory, mapped here.
pub(crate) struct Shared {
    page: NonNull<Page>,
}

// SAFETY: all of the page is atomics, or bytes that only one side uses at a time, which atomics say; for any process and so for
// any thread. The mapping lives as long as this.
unsafe impl Send for Shared {}
// SAFETY: see above.
unsafe impl Sync for Shared {}

impl Id {
    /// A new group.
    pub(crate) fn new() -> Result<Id, String> {
        let file = memory_file(size_of::<Page>() as u64)
            .map_err(|error| format!("no file for a group: {error:?}"))?;
        let process = std::process::id();
        let inode = std::fs::metadata(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let inode = inode.map_err(|error| error.to_string())?.ino();
        let started = started(process).ok_or("no such process as this")?;
        let id = Id { mark: *b"softncl1", process, file: file.as_raw_fd(), started, inode, spare: [0; 12] };
        MADE.lock().push(file);
        Ok(id)
    }

    /// Maps the group's memory.
    pub(crate) fn open(&self) -> Result<Shared, String> {
        if self.mark != *b"softncl1" {
            return Err("what was given is no id of a group".into());
        }
        if started(self.process) != Some(self.started) {
            return Err(format!("process {}, which made the group, has ended", self.process));
        }
        let path = format!("/proc/{}/fd/{}", self.process, self.file);
        let file =
            File::options().read(true).write(true).open(&path).map_err(|error| format!("{path}: {error}"))?;
        if file.metadata().map_err(|error| error.to_string())?.ino() != self.inode {
            return Err(format!("{path} is another file by now"));
        }
        // SAFETY: new addresses, for a file that is as long as the page.
        let at = unsafe {
            libc::mmap(
                ptr::null_mut(),
                size_of::<Page>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        match NonNull::new(at.cast()) {
            Some(page) if at != libc::MAP_FAILED => Ok(Shared { page }),
            _ => Err("a group's memory cannot be mapped".into()),
        }
    }
}

impl Shared {
    fn page(&self) -> &Page {
        // SAFETY: mapped as long as this is, and any bytes are valid for it.
        unsafe { self.page.as_ref() }
    }

    /// A rank has come.
    pub(crate) fn join(&self, rank: usize, ranks: usize, uuid: [u8; 16], device: u32) {
        let own = &self.page().ranks[rank];
        for (to, from) in own.uuid.iter().zip(uuid.as_chunks::<4>().0) {
            to.store(u32::from_ne_bytes(*from), Ordering::SeqCst);
        }
        own.process.store(std::process::id(), Ordering::SeqCst);
        own.device.store(device, Ordering::SeqCst);
        own.of.store(ranks as u32, Ordering::SeqCst);
    }

    /// Whether all have come; an error where they do not fit each other.
    pub(crate) fn are_all_here(&self, ranks: usize) -> Result<bool, String> {
        let all = &self.page().ranks[..ranks];
        let of: Vec<usize> = all.iter().map(|rank| rank.of.load(Ordering::SeqCst) as usize).collect();
        if of.contains(&0) {
            return Ok(false);
        }
        if of.iter().any(|of| *of != ranks) {
            return Err(format!("ranks say that there are {of:?} of them"));
        }
        let uuid = |rank: &Rank| rank.uuid.each_ref().map(|part| part.load(Ordering::SeqCst));
        for (at, one) in all.iter().enumerate() {
            if let Some(other) = all[..at].iter().position(|other| uuid(other) == uuid(one)) {
                let device = one.device.load(Ordering::SeqCst);
                return Err(format!(
                    "Duplicate GPU detected : rank {at} and rank {other} both on CUDA device {device}"
                ));
            }
        }
        Ok(true)
    }

    fn ring(&self, from: usize, to: usize) -> &Ring {
        &self.page().rings[from][to]
    }

    /// Writes as many of `bytes` for another rank as there is room for. By one thread of the rank at a time.
    pub(crate) fn write(&self, from: usize, to: usize, bytes: &[u8]) -> usize {
        let ring = self.ring(from, to);
        let written = ring.written.load(Ordering::Relaxed);
        let room = RING - (written - ring.read.load(Ordering::Acquire)) as usize;
        let count = room.min(bytes.len());
        for (at, byte) in bytes[..count].iter().enumerate() {
            // SAFETY: the place is in the ring, and the reader has said that it is done with it.
            unsafe { ring.bytes.get().cast::<u8>().add((written as usize + at) % RING).write(*byte) };
        }
        ring.written.store(written + count as u64, Ordering::Release);
        count
    }

    /// Reads as many bytes of another rank as there are and fit. By one thread of the rank at a time.
    pub(crate) fn read(&self, from: usize, to: usize, bytes: &mut [u8]) -> usize {
        let ring = self.ring(from, to);
        let read = ring.read.load(Ordering::Relaxed);
        let there = (ring.written.load(Ordering::Acquire) - read) as usize;
        let count = there.min(bytes.len());
        for (at, byte) in bytes[..count].iter_mut().enumerate() {
            // SAFETY: the place is in the ring, and the writer has said that it is done with it.
            *byte = unsafe { ring.bytes.get().cast::<u8>().add((read as usize + at) % RING).read() };
        }
        ring.read.store(read + count as u64, Ordering::Release);
        count
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: mapped by `open` with this length, and not used any more.
        unsafe { libc::munmap(self.page.as_ptr().cast(), size_of::<Page>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_in_order_and_never_more_than_there_is_room_for() {
        let id = Id::new().unwrap();
        let (one, other) = (id.open().unwrap(), id.open().unwrap());
        let sent: Vec<u8> = (0..3 * RING).map(|at| (at % 251) as u8).collect();
        let (mut written, mut got) = (0, Vec::new());
        while got.len() < sent.len() {
            let more = one.write(1, 2, &sent[written..]);
            assert!(more <= RING);
            written += more;
            let mut some = [0; 1000];
            let count = other.read(1, 2, &mut some);
            got.extend_from_slice(&some[..count]);
        }
        assert!(got == sent);
        assert_eq!(one.write(2, 1, &sent), RING, "each way has a ring of its own");
        assert_eq!(one.write(2, 1, &sent), 0);
    }

    #[test]
    fn two_ranks_on_one_device_are_found() {
        let shared = Id::new().unwrap().open().unwrap();
        shared.join(0, 2, [1; 16], 0);
        assert_eq!(shared.are_all_here(2), Ok(false));
        shared.join(1, 2, [1; 16], 0);
        assert!(shared.are_all_here(2).unwrap_err().starts_with("Duplicate GPU detected"));
        shared.join(1, 2, [2; 16], 1);
        assert_eq!(shared.are_all_here(2), Ok(true));
    }
}
