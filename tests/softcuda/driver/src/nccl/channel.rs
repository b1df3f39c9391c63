//! The shared memory of an NCCL group. All ranks map it; they are threads of one process or of
//! several.
//!
//! The process that creates the group holds the file open. The group's id names the file, as
//! handles of memory do. Each ordered pair of ranks has a ring of bytes.

use std::cell::UnsafeCell;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::device::ipc::{Kind, Ticket};
use crate::device::memory::memory_file;
use crate::error::Result;
use crate::mapped::{self, Mapped};

/// Maximum number of ranks of a group. NCCL calls with more ranks are refused.
pub(crate) const MOST_RANKS: usize = 16;
/// Size of a ring in bytes, which limits the bytes in transit from one rank to another.
const RING: usize = 64 << 10;
/// Sleep between two looks at the shared memory, after a look that finds no progress.
pub(crate) const LOOK: Duration = Duration::from_micros(200);

/// Memory files of the groups that this process has created, which other processes open. They stay
/// open until the process ends.
static MADE: Mutex<Vec<OwnedFd>> = Mutex::new(Vec::new());

/// The layout of a group's shared memory. All zeros mean a group without ranks.
#[repr(C)]
struct Page {
    ranks: [Rank; MOST_RANKS],
    /// A ring of bytes for each ordered pair of ranks, as `rings[sender][receiver]`.
    rings: [[Ring; MOST_RANKS]; MOST_RANKS],
}

#[repr(C)]
struct Rank {
    /// Number of ranks of the group, as passed to this rank's call. 0 before the rank has joined.
    of: AtomicU32,
    uuid: [AtomicU32; 4],
    device: AtomicU32,
}

#[repr(C)]
struct Ring {
    written: AtomicU64,
    read: AtomicU64,
    bytes: UnsafeCell<[u8; RING]>,
}

// SAFETY: all of it is atomics, or bytes that only one side uses at a time, as the atomics ensure.
unsafe impl mapped::Page for Page {}

/// The id of a group, in NCCL's 128 bytes. Ranks in any process of the machine can open it.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Id {
    ticket: Ticket,
    spare: [u64; 8],
}

const _: () = assert!(size_of::<Id>() == 128);

/// The shared memory of a group, mapped into this process.
pub(crate) struct Shared {
    page: Mapped<Page>,
}

impl Id {
    /// Creates a group without ranks. Its shared memory lives until this process ends.
    pub(crate) fn new() -> Result<Id> {
        let file = memory_file(size_of::<Page>() as u64)?;
        let ticket = Ticket::new(Kind::Group, &file, 0)?;
        MADE.lock().push(file);
        Ok(Id {
            ticket,
            spare: [0; 8],
        })
    }

    /// Maps the group's memory into this process. Fails with `CUDA_ERROR_INVALID_HANDLE` if the
    /// process that created the group has ended.
    pub(crate) fn open(&self) -> Result<Shared> {
        Ok(Shared {
            page: Mapped::of(&self.ticket.open_anywhere(Kind::Group)?)?,
        })
    }
}

impl Shared {
    /// Adds a rank to the group. Stores the number of ranks that was passed to its call, and the id
    /// and number of its device. Does not wait for other ranks.
    pub(crate) fn join(&self, rank: usize, ranks: usize, uuid: [u8; 16], device: u32) {
        let own = &self.page.ranks[rank];
        for (to, from) in own.uuid.iter().zip(uuid.as_chunks::<4>().0) {
            to.store(u32::from_ne_bytes(*from), Ordering::SeqCst);
        }
        own.device.store(device, Ordering::SeqCst);
        own.of.store(ranks as u32, Ordering::SeqCst);
    }

    /// Returns true if all `ranks` ranks have joined. Does not wait. Fails with a message if the
    /// ranks' calls have different numbers of ranks, or if ranks share a device.
    pub(crate) fn are_all_here(&self, ranks: usize) -> std::result::Result<bool, String> {
        let all = &self.page.ranks[..ranks];
        let of: Vec<usize> = all
            .iter()
            .map(|rank| rank.of.load(Ordering::SeqCst) as usize)
            .collect();
        if of.contains(&0) {
            return Ok(false);
        }

        if of.iter().any(|of| *of != ranks) {
            return Err(format!("ranks disagree about the number of ranks: {of:?}"));
        }

        let uuid = |rank: &Rank| rank.uuid.each_ref().map(|part| part.load(Ordering::SeqCst));
        for (at, one) in all.iter().enumerate() {
            if let Some(other) = all[..at].iter().position(|other| uuid(other) == uuid(one)) {
                let device = one.device.load(Ordering::SeqCst);
                return Err(format!(
                    "Duplicate GPU detected : rank {at} and rank {other} both on CUDA device \
                     {device}"
                ));
            }
        }
        Ok(true)
    }

    fn ring(&self, from: usize, to: usize) -> &Ring {
        &self.page.rings[from][to]
    }

    /// Writes bytes from rank `from` to rank `to`, up to the free space of the ring. Does not wait.
    /// Returns the number of bytes written. Only one thread of rank `from` may call this at a time.
    pub(crate) fn write(&self, from: usize, to: usize, bytes: &[u8]) -> usize {
        let ring = self.ring(from, to);
        let written = ring.written.load(Ordering::Relaxed);
        let room = RING - (written - ring.read.load(Ordering::Acquire)) as usize;
        let count = room.min(bytes.len());

        for (at, byte) in bytes[..count].iter().enumerate() {
            // SAFETY: the place is in the ring, and the reader has released it.
            unsafe {
                ring.bytes
                    .get()
                    .cast::<u8>()
                    .add((written as usize + at) % RING)
                    .write(*byte)
            };
        }

        ring.written
            .store(written + count as u64, Ordering::Release);
        count
    }

    /// Reads bytes that rank `from` has written for rank `to`, up to the length of `bytes`. Does
    /// not wait. Returns the number of bytes read. Only one thread of rank `to` may call this at a
    /// time.
    pub(crate) fn read(&self, from: usize, to: usize, bytes: &mut [u8]) -> usize {
        let ring = self.ring(from, to);
        let read = ring.read.load(Ordering::Relaxed);
        let there = (ring.written.load(Ordering::Acquire) - read) as usize;
        let count = there.min(bytes.len());

        for (at, byte) in bytes[..count].iter_mut().enumerate() {
            // SAFETY: the place is in the ring, and the writer has released it.
            *byte = unsafe {
                ring.bytes
                    .get()
                    .cast::<u8>()
                    .add((read as usize + at) % RING)
                    .read()
            };
        }

        ring.read.store(read + count as u64, Ordering::Release);
        count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ring_keeps_order_and_is_never_overfilled() {
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
        assert_eq!(
            one.write(2, 1, &sent),
            RING,
            "each way has a ring of its own"
        );
        assert_eq!(one.write(2, 1, &sent), 0);
    }

    #[test]
    fn two_ranks_on_one_device_are_refused() {
        let shared = Id::new().unwrap().open().unwrap();
        shared.join(0, 2, [1; 16], 0);
        assert_eq!(shared.are_all_here(2), Ok(false));
        shared.join(1, 2, [1; 16], 0);
        assert!(
            shared
                .are_all_here(2)
                .unwrap_err()
                .starts_with("Duplicate GPU detected")
        );
        shared.join(1, 2, [2; 16], 1);
        assert_eq!(shared.are_all_here(2), Ok(true));
    }
}
