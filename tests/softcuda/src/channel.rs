//! What ranks of NCCL have between them: a piece of memory that all of them map, threads of one
//! process or of several.
//!
//! Whoever makes the group holds its file open, and the group's id says which it is, as handles of
//! memory do. From each rank to each there is a ring of bytes.

use std::cell::UnsafeCell;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::error::Result;
use crate::ipc::{Kind, Ticket};
use crate::mapped::{self, Mapped};
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
    device: AtomicU32,
}

#[repr(C)]
struct Ring {
    written: AtomicU64,
    read: AtomicU64,
    bytes: UnsafeCell<[u8; RING]>,
}

// SAFETY: all of it is atomics, or bytes that only one side uses at a time, which atomics say.
unsafe impl mapped::Page for Page {}

/// A group's id, in NCCL's 128 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Id {
    ticket: Ticket,
    spare: [u64; 8],
}

const _: () = assert!(size_of::<Id>() == 128);

/// A group's shared memory, mapped here.
pub(crate) struct Shared {
    page: Mapped<Page>,
}

impl Id {
    /// A new group.
    pub(crate) fn new() -> Result<Id> {
        let file = memory_file(size_of::<Page>() as u64)?;
        let ticket = Ticket::new(Kind::Group, &file, 0)?;
        MADE.lock().push(file);
        Ok(Id { ticket, spare: [0; 8] })
    }

    /// Maps the group's memory.
    pub(crate) fn open(&self) -> Result<Shared> {
        Ok(Shared { page: Mapped::of(&self.ticket.open_anywhere(Kind::Group)?)? })
    }
}

impl Shared {
    /// A rank has come.
    pub(crate) fn join(&self, rank: usize, ranks: usize, uuid: [u8; 16], device: u32) {
        let own = &self.page.ranks[rank];
        for (to, from) in own.uuid.iter().zip(uuid.as_chunks::<4>().0) {
            to.store(u32::from_ne_bytes(*from), Ordering::SeqCst);
        }
        own.device.store(device, Ordering::SeqCst);
        own.of.store(ranks as u32, Ordering::SeqCst);
    }

    /// Whether all have come; an error where they do not fit each other.
    pub(crate) fn are_all_here(&self, ranks: usize) -> std::result::Result<bool, String> {
        let all = &self.page.ranks[..ranks];
        let of: Vec<usize> =
            all.iter().map(|rank| rank.of.load(Ordering::SeqCst) as usize).collect();
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

    /// Writes as many of `bytes` for another rank as there is room for. By one thread of the rank
    /// at a time.
    pub(crate) fn write(&self, from: usize, to: usize, bytes: &[u8]) -> usize {
        let ring = self.ring(from, to);
        let written = ring.written.load(Ordering::Relaxed);
        let room = RING - (written - ring.read.load(Ordering::Acquire)) as usize;
        let count = room.min(bytes.len());
        for (at, byte) in bytes[..count].iter().enumerate() {
            // SAFETY: the place is in the ring, and the reader has said that it is done with it.
            unsafe {
                ring.bytes.get().cast::<u8>().add((written as usize + at) % RING).write(*byte)
            };
        }
        ring.written.store(written + count as u64, Ordering::Release);
        count
    }

    /// Reads as many bytes of another rank as there are and fit. By one thread of the rank at a
    /// time.
    pub(crate) fn read(&self, from: usize, to: usize, bytes: &mut [u8]) -> usize {
        let ring = self.ring(from, to);
        let read = ring.read.load(Ordering::Relaxed);
        let there = (ring.written.load(Ordering::Acquire) - read) as usize;
        let count = there.min(bytes.len());
        for (at, byte) in bytes[..count].iter_mut().enumerate() {
            // SAFETY: the place is in the ring, and the writer has said that it is done with it.
            *byte =
                unsafe { ring.bytes.get().cast::<u8>().add((read as usize + at) % RING).read() };
        }
        ring.read.store(read + count as u64, Ordering::Release);
        count
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
