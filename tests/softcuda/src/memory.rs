//! Device memory: addresses that the host cannot touch, and the alias through which the driver
//! does.
//!
//! One range of addresses is reserved without access; its first half are the device addresses that
//! programs see. An allocation gets a place there, and its bytes are mapped at the same place of
//! the second half, the alias. A host access to a device address faults, as it does with a GPU;
//! what lies between allocations is not mapped in the alias either, so that a kernel's stray access
//! faults too and can be told to the program.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::{Mutex, RwLock};

use crate::error::{Code, Result};
use crate::settings::settings;

/// Bytes of device addresses. The upper halves of addresses are then among few odd numbers, so that
/// a pair of 32-bit integers in a kernel's argument is not taken for an address.
const LENGTH: u64 = 1 << 40;
const WISHED_BASE: u64 = 0x5B31 << 32;
const PAGE: u64 = 4096;
/// What device addresses are multiples of, as CUDA promises; no more, though more is usual.
const ALIGNMENT: u64 = 256;
/// Addresses left free behind each allocation.
const GAP: u64 = 64 << 10;

/// What memory holds that nobody wrote, and what it holds once freed.
const FRESH: u8 = 0xCD;
const FREED: u8 = 0xDD;

/// Where an allocation came from, which decides what may be done with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// `cuMemAlloc`: may be given to other processes.
    Alloc,
    /// `cuMemAllocAsync`: may not.
    Pool,
    /// Another process, through IPC.
    Import,
}

/// The address range of this process, and what lives in it.
pub(crate) struct Space {
    base: u64,
    live: RwLock<BTreeMap<u64, Arc<Allocation>>>,
    next: Mutex<u64>,
    used: Mutex<BTreeMap<u32, u64>>,
}

/// The bytes of one allocation; unmapped when the last who uses them lets go.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) device: u32,
    pub(crate) origin: Origin,
    /// Counts allocations of this process.
    pub(crate) number: u64,
    /// The memory as a file, where another process may map it.
    pub(crate) file: Option<OwnedFd>,
    /// Whether another process may have it mapped.
    pub(crate) exported: AtomicBool,
    /// Set by `cuMemFreeAsync`, whose work comes later.
    pub(crate) leaving: AtomicBool,
    start: u64,
    mapped: u64,
}

/// Bytes of an allocation that stay mapped while this is held.
#[derive(Debug)]
pub(crate) struct Span {
    pointer: *mut u8,
    _allocation: Arc<Allocation>,
}

// SAFETY: the pointer is into a shared mapping that the allocation keeps; who reads and writes
// there at the same time is the program's business, as on a GPU, and all accesses are through raw
// pointers.
unsafe impl Send for Span {}

impl Span {
    /// Where the driver reads and writes the bytes.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.pointer
    }
}

/// The space of this process.
pub(crate) fn space() -> &'static Space {
    static SPACE: LazyLock<Space> = LazyLock::new(Space::reserve);
    &SPACE
}

impl Space {
    fn reserve() -> Space {
        let reserve = |address: u64, flags| {
            // SAFETY: without MAP_FIXED (NOREPLACE only fails) the kernel gives addresses that
            // nothing lies at.
            unsafe {
                libc::mmap(
                    address as *mut _,
                    2 * LENGTH as usize,
                    libc::PROT_NONE,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | flags,
                    -1,
                    0,
                )
            }
        };
        let mut base = reserve(WISHED_BASE, libc::MAP_FIXED_NOREPLACE);
        if base == libc::MAP_FAILED {
            base = reserve(0, 0);
        }
        assert!(base != libc::MAP_FAILED, "no {LENGTH} bytes of addresses for device memory");
        // Processes differ in their addresses, so that one's pointer is not by chance good in
        // another.
        let shift = (u64::from(std::process::id()) * 0x9E37_79B9 % 512) << 30;
        Space {
            base: base as u64,
            live: RwLock::default(),
            next: Mutex::new(base as u64 + shift),
            used: Mutex::default(),
        }
    }

    /// Whether an address is one of device memory, live or not.
    pub(crate) fn covers(&self, address: u64) -> bool {
        address >= self.base && address < self.base + LENGTH
    }

    /// How far the driver's addresses are from those that programs see.
    pub(crate) fn distance(&self) -> u64 {
        LENGTH
    }

    /// First and last address (exclusive) of the range.
    pub(crate) fn range(&self) -> (u64, u64) {
        (self.base, self.base + LENGTH)
    }

    /// New memory, full of garbage.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_INVALID_VALUE` for no bytes, `CUDA_ERROR_OUT_OF_MEMORY` where the device has no
    /// more.
    pub(crate) fn allocate(
        &self,
        device: u32,
        bytes: u64,
        origin: Origin,
    ) -> Result<Arc<Allocation>> {
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let mapped = bytes.checked_next_multiple_of(PAGE).ok_or(Code::OUT_OF_MEMORY)?;
        {
            let mut used = self.used.lock();
            let used = used.entry(device).or_default();
            if used.checked_add(mapped).is_none_or(|sum| sum > settings().memory) {
                return Err(Code::OUT_OF_MEMORY);
            }
            *used += mapped;
        }
        let made = (|| {
            let file = match origin {
                Origin::Alloc => Some(memory_file(mapped)?),
                Origin::Pool | Origin::Import => None,
            };
            let start = self.place(mapped)?;
            self.map(start, mapped, file.as_ref().map(|file| file.as_raw_fd()))?;
            // At the end of its pages, so that what goes beyond the end soon meets the gap.
            let inside = mapped - bytes.next_multiple_of(ALIGNMENT).min(mapped);
            Ok(self.keep(start, inside, mapped, bytes, device, origin, file))
        })();
        let made: Arc<Allocation> =
            made.inspect_err(|_| *self.used.lock().entry(device).or_default() -= mapped)?;
        made.fill(FRESH);
        Ok(made)
    }

    /// Maps memory of another process. `inside` is how far from the start of its first page it
    /// begins.
    pub(crate) fn import(
        &self,
        device: u32,
        file: OwnedFd,
        inside: u64,
        bytes: u64,
    ) -> Result<Arc<Allocation>> {
        let mapped = (inside + bytes).next_multiple_of(PAGE);
        let start = self.place(mapped)?;
        self.map(start, mapped, Some(file.as_raw_fd()))?;
        Ok(self.keep(start, inside, mapped, bytes, device, Origin::Import, None))
    }

    #[allow(clippy::too_many_arguments)]
    fn keep(
        &self,
        start: u64,
        inside: u64,
        mapped: u64,
        bytes: u64,
        device: u32,
        origin: Origin,
        file: Option<OwnedFd>,
    ) -> Arc<Allocation> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let allocation = Arc::new(Allocation {
            address: start + inside,
            bytes,
            device,
            origin,
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            file,
            exported: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            start,
            mapped,
        });
        self.live.write().insert(allocation.address, allocation.clone());
        allocation
    }

    /// Addresses for `mapped` bytes. They are used again only when the range has been gone through
    /// once.
    fn place(&self, mapped: u64) -> Result<u64> {
        let end = self.base + LENGTH;
        let mut next = self.next.lock();
        let live = self.live.read();
        for start in [*next, self.base] {
            let mut start = start;
            // Skip what lies in the way; the map is ordered, so each step goes on.
            while let Some((_, other)) = live.range(..(start + mapped + GAP).min(end)).next_back() {
                if other.start + other.mapped + GAP <= start {
                    break;
                }
                start = (other.start + other.mapped + GAP).next_multiple_of(GAP);
            }
            if start + mapped + GAP <= end {
                *next = (start + mapped + GAP).next_multiple_of(GAP);
                return Ok(start);
            }
        }
        Err(Code::OUT_OF_MEMORY)
    }

    fn map(&self, start: u64, mapped: u64, file: Option<RawFd>) -> Result {
        let kind =
            if file.is_some() { libc::MAP_SHARED } else { libc::MAP_PRIVATE | libc::MAP_ANONYMOUS };
        // SAFETY: the addresses are of the alias half of our own reservation, and `place` gave them
        // to nobody else.
        let at = unsafe {
            libc::mmap(
                (start + self.distance()) as *mut _,
                mapped as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                kind | libc::MAP_FIXED,
                file.unwrap_or(-1),
                0,
            )
        };
        if at == libc::MAP_FAILED { Err(Code::OUT_OF_MEMORY) } else { Ok(()) }
    }

    /// The live allocation that an address lies in.
    pub(crate) fn find(&self, address: u64) -> Option<Arc<Allocation>> {
        let live = self.live.read();
        let (_, found) = live.range(..=address).next_back()?;
        (address < found.address + found.bytes).then(|| found.clone())
    }

    /// The live allocation that begins at an address.
    pub(crate) fn begins(&self, address: u64) -> Option<Arc<Allocation>> {
        self.live.read().get(&address).cloned()
    }

    /// Bytes for the driver to read and write.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_ILLEGAL_ADDRESS` if they are not all of one live allocation.
    pub(crate) fn span(&self, address: u64, bytes: u64) -> Result<Span> {
        let found = self.find(address).ok_or(Code::ILLEGAL_ADDRESS)?;
        if bytes > found.address + found.bytes - address {
            return Err(Code::ILLEGAL_ADDRESS);
        }
        Ok(Span { pointer: (address + self.distance()) as *mut u8, _allocation: found })
    }

    /// Takes an allocation out; its bytes go when the last who uses them lets go.
    pub(crate) fn free(&self, address: u64) -> Result<Arc<Allocation>> {
        let freed = self.live.write().remove(&address).ok_or(Code::INVALID_VALUE)?;
        if freed.origin != Origin::Import {
            *self.used.lock().entry(freed.device).or_default() -= freed.mapped;
        }
        if freed.exported.load(Ordering::Relaxed) {
            // Who still has it open sees that it is gone: what CUDA calls undefined, here is
            // garbage.
            freed.fill(FREED);
        }
        Ok(freed)
    }

    /// Frees all that a device holds, as its context ends.
    pub(crate) fn free_all(&self, device: u32) {
        let all: Vec<u64> = self
            .live
            .read()
            .values()
            .filter(|one| one.device == device)
            .map(|one| one.address)
            .collect();
        for address in all {
            let _ = self.free(address);
        }
    }

    /// Bytes of a device that are not allocated by this process, and all there are.
    pub(crate) fn free_and_total(&self, device: u32) -> (u64, u64) {
        let used = self.used.lock().get(&device).copied().unwrap_or(0);
        (settings().memory - used, settings().memory)
    }
}

impl Allocation {
    /// How far from the start of its first page it begins.
    pub(crate) fn inside(&self) -> u64 {
        self.address - self.start
    }

    fn fill(&self, byte: u8) {
        // SAFETY: these pages of the alias are this allocation's and mapped until it is dropped.
        unsafe {
            ((self.start + space().distance()) as *mut u8).write_bytes(byte, self.mapped as usize);
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        crate::races::forget(self.number);
        // SAFETY: the pages are this allocation's; nobody has a span of it any more, as spans hold
        // it. They go back to what they were at the start, reserved and without access.
        unsafe {
            libc::mmap(
                (self.start + space().distance()) as *mut _,
                self.mapped as usize,
                libc::PROT_NONE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                -1,
                0,
            );
        }
    }
}

/// A file in memory, without a name that could stay behind.
pub(crate) fn memory_file(bytes: u64) -> Result<OwnedFd> {
    // SAFETY: the name is a text that a zero ends; the descriptor is new and only ours.
    let file = unsafe {
        let fd = libc::memfd_create(c"softcuda".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return Err(Code::OUT_OF_MEMORY);
        }
        OwnedFd::from_raw_fd(fd)
    };
    // SAFETY: a plain call on a descriptor that is open.
    if unsafe { libc::ftruncate(file.as_raw_fd(), bytes as libc::off_t) } != 0 {
        return Err(Code::OUT_OF_MEMORY);
    }
    Ok(file)
}
