//! Device memory: addresses that the host cannot access, and an alias that the driver uses.
//!
//! One range of addresses is reserved without access. Its first half holds the device addresses
//! that programs see. An allocation gets a place there, and its bytes are mapped at the same place
//! of the second half, the alias. A host access to a device address faults, as with a GPU.
//! Addresses between allocations are not mapped in the alias either. So a kernel's stray access
//! faults too, and becomes an error of the driver.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::{Mutex, RwLock};

use crate::error::{Code, Result};
use crate::settings::settings;

/// Size of the range of device addresses. A small range leaves few upper halves of addresses, all
/// of them unusual. So a pair of 32-bit integers in a kernel's argument is not mistaken for an
/// address.
const LENGTH: u64 = 1 << 40;
const WISHED_BASE: u64 = 0x5B31 << 32;
const PAGE: u64 = 4096;
/// Alignment of device addresses in bytes, as CUDA guarantees it. Real drivers usually align more.
const ALIGNMENT: u64 = 256;
/// Size of the unmapped address range behind each allocation, so that an access beyond the
/// allocation faults.
const GAP: u64 = 64 << 10;

/// Fill byte of new memory. `FREED` is the fill byte of exported memory after it is freed.
const FRESH: u8 = 0xCD;
const FREED: u8 = 0xDD;

/// The origin of an allocation, which decides the operations allowed on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Origin {
    /// `cuMemAlloc`: can be exported to other processes.
    Alloc,
    /// `cuMemAllocAsync`: cannot be exported to other processes.
    Pool,
    /// Another process, through IPC.
    Import,
}

/// The range of device addresses of this process, and its live allocations on all devices.
pub(crate) struct Space {
    base: u64,
    live: RwLock<BTreeMap<u64, Arc<Allocation>>>,
    next: Mutex<u64>,
    usage: Mutex<BTreeMap<u32, Usage>>,
    /// For each device, the block from which small allocations are taken; see `SOFTCUDA_BLOCK`.
    blocks: Mutex<BTreeMap<u32, Block>>,
}

/// The memory of a device that this process uses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// Bytes of live allocations, including those of the default pool.
    live: u64,
    /// Bytes of live allocations of the default pool.
    pub(crate) in_pool: u64,
    /// Freed bytes that the default pool holds for its next allocations.
    pub(crate) kept: u64,
    /// Limit on the bytes of the default pool, live and freed together. Beyond it the pool returns
    /// freed memory: `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`.
    pub(crate) threshold: u64,
}

impl Usage {
    /// Adds an allocation of `mapped` bytes. Fails with `CUDA_ERROR_OUT_OF_MEMORY` if the device
    /// has less memory. Memory that the pool holds is available for allocations of the pool alone.
    fn add(&mut self, mapped: u64, origin: Origin) -> Result {
        let from_kept = if origin == Origin::Pool {
            self.kept.min(mapped)
        } else {
            0
        };
        let others = self.live + self.kept - from_kept;
        if others
            .checked_add(mapped)
            .is_none_or(|sum| sum > settings().memory)
        {
            return Err(Code::OUT_OF_MEMORY);
        }

        self.live += mapped;
        if origin == Origin::Pool {
            self.kept -= from_kept;
            self.in_pool += mapped;
        }
        Ok(())
    }

    /// Removes an allocation of `mapped` bytes from the counts.
    fn remove(&mut self, mapped: u64, origin: Origin) {
        self.live -= mapped;
        if origin == Origin::Pool {
            self.in_pool -= mapped;
            self.kept += mapped;
            self.trim(self.threshold);
        }
    }

    /// Returns freed memory of the pool to the device, until the pool has at most `least` bytes.
    pub(crate) fn trim(&mut self, least: u64) {
        self.kept = self.kept.min(least.saturating_sub(self.in_pool));
    }
}

/// A range of addresses and a file, both of `SOFTCUDA_BLOCK` bytes, which several allocations
/// share.
struct Block {
    start: u64,
    file: Arc<OwnedFd>,
    /// Number of bytes that were given to allocations. Freed bytes are not used again.
    used: u64,
}

/// An allocation of this process, or opened memory of another. Its bytes are unmapped when the last
/// holder drops it.
#[derive(Debug)]
pub(crate) struct Allocation {
    pub(crate) address: u64,
    pub(crate) bytes: u64,
    pub(crate) device: u32,
    pub(crate) origin: Origin,
    /// Number of the allocation, unique in this process.
    pub(crate) number: u64,
    /// The file that holds the memory. `None` for memory that other processes cannot map.
    pub(crate) file: Option<Arc<OwnedFd>>,
    /// Byte offset in the file of the allocation's first page.
    pub(crate) offset: u64,
    /// True if an IPC handle was made, with which other processes can map the memory.
    pub(crate) exported: AtomicBool,
    /// True after a call of `cuMemFreeAsync`. The memory is freed later, in the stream.
    pub(crate) leaving: AtomicBool,
    start: u64,
    pub(crate) mapped: u64,
}

/// A part of a file that holds device memory.
struct FilePart {
    file: Arc<OwnedFd>,
    offset: u64,
}

/// A part of a device's block, and its first address.
struct BlockPart {
    start: u64,
    part: FilePart,
}

/// An allocation whose pages are mapped.
struct NewAllocation {
    /// Address of the first page.
    start: u64,
    /// Byte offset of the memory in its first page.
    inside: u64,
    /// Number of bytes of all pages.
    mapped: u64,
    bytes: u64,
    device: u32,
    origin: Origin,
    /// The part of a file by which other processes can map the allocation. `None` if they cannot.
    part: Option<FilePart>,
}

/// An address range in an allocation. The allocation stays mapped while this is held.
#[derive(Debug)]
pub(crate) struct Span {
    pointer: *mut u8,
    _allocation: Arc<Allocation>,
}

// SAFETY: the pointer is into a shared mapping that the allocation keeps. As on a GPU, the program
// must order concurrent accesses to the bytes. All accesses are through raw pointers.
unsafe impl Send for Span {}

impl Span {
    /// Returns the driver's own address of the first byte. The driver accesses device memory
    /// through a second mapping, the alias.
    pub(crate) fn pointer(&self) -> *mut u8 {
        self.pointer
    }
}

/// Returns the address space of this process; the first call reserves it.
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
        assert!(
            base != libc::MAP_FAILED,
            "no {LENGTH} bytes of addresses for device memory"
        );

        // Each process uses other addresses, so that a pointer of one is unlikely to be valid in
        // another.
        let shift = (u64::from(std::process::id()) * 0x9E37_79B9 % 512) << 30;
        Space {
            base: base as u64,
            live: RwLock::default(),
            next: Mutex::new(base as u64 + shift),
            usage: Mutex::default(),
            blocks: Mutex::default(),
        }
    }

    /// True if an address is in the range of device addresses, whether it is allocated or not.
    pub(crate) fn covers(&self, address: u64) -> bool {
        address >= self.base && address < self.base + LENGTH
    }

    /// Returns the distance in bytes from a device address to the same byte in the alias, through
    /// which the driver accesses it.
    pub(crate) fn distance(&self) -> u64 {
        LENGTH
    }

    /// Returns the range of device addresses, as (first, first behind the range).
    pub(crate) fn range(&self) -> (u64, u64) {
        (self.base, self.base + LENGTH)
    }

    /// Allocates `bytes` bytes for a device, filled with `0xCD`, and adds them to the live
    /// allocations.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_INVALID_VALUE` for zero bytes. `CUDA_ERROR_OUT_OF_MEMORY` if this process has
    /// too little of the device's memory left, in whole pages.
    pub(crate) fn allocate(
        &self,
        device: u32,
        bytes: u64,
        origin: Origin,
    ) -> Result<Arc<Allocation>> {
        if bytes == 0 {
            return Err(Code::INVALID_VALUE);
        }

        let mapped = bytes
            .checked_next_multiple_of(PAGE)
            .ok_or(Code::OUT_OF_MEMORY)?;
        self.with_usage(device, |usage| usage.add(mapped, origin))?;

        let made = (|| {
            if origin == Origin::Alloc && mapped < settings().block {
                let BlockPart { start, part } = self.part_of_block(device, mapped)?;
                self.map(start, mapped, Some(&part))?;
                return Ok(self.keep(NewAllocation {
                    start,
                    inside: 0,
                    mapped,
                    bytes,
                    device,
                    origin,
                    part: Some(part),
                }));
            }

            let part = match origin {
                Origin::Alloc => Some(FilePart {
                    file: Arc::new(memory_file(mapped)?),
                    offset: 0,
                }),
                Origin::Pool | Origin::Import => None,
            };
            let start = self.place(mapped)?;
            self.map(start, mapped, part.as_ref())?;

            // At the end of its pages, so that an access beyond its end soon reaches the gap.
            let inside = mapped - bytes.next_multiple_of(ALIGNMENT).min(mapped);
            Ok(self.keep(NewAllocation {
                start,
                inside,
                mapped,
                bytes,
                device,
                origin,
                part,
            }))
        })();

        let made: Arc<Allocation> =
            made.inspect_err(|_| self.with_usage(device, |usage| usage.remove(mapped, origin)))?;
        made.fill(FRESH);
        Ok(made)
    }

    /// Takes `mapped` bytes from a device's current block, or from a new block. Fails with
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    fn part_of_block(&self, device: u32, mapped: u64) -> Result<BlockPart> {
        let bytes = settings().block;
        let mut blocks = self.blocks.lock();
        if blocks
            .get(&device)
            .is_none_or(|block| block.used + mapped > bytes)
        {
            let start = self.place(2 * bytes)?.next_multiple_of(bytes);
            let file = Arc::new(memory_file(bytes)?);
            blocks.insert(
                device,
                Block {
                    start,
                    file,
                    used: 0,
                },
            );
        }

        let block = blocks.get_mut(&device).ok_or(Code::OUT_OF_MEMORY)?;
        let offset = block.used;
        block.used += mapped;
        Ok(BlockPart {
            start: block.start + offset,
            part: FilePart {
                file: block.file.clone(),
                offset,
            },
        })
    }

    /// Maps a file of `bytes` bytes of another process, and adds them to the live allocations.
    /// `inside` is the offset of the memory in its first page, in bytes.
    pub(crate) fn import(
        &self,
        device: u32,
        file: OwnedFd,
        inside: u64,
        bytes: u64,
    ) -> Result<Arc<Allocation>> {
        let mapped = (inside + bytes).next_multiple_of(PAGE);
        let start = self.place(mapped)?;

        let part = FilePart {
            file: Arc::new(file),
            offset: 0,
        };
        self.map(start, mapped, Some(&part))?;

        Ok(self.keep(NewAllocation {
            start,
            inside,
            mapped,
            bytes,
            device,
            origin: Origin::Import,
            part: None,
        }))
    }

    /// Adds a new allocation to the live allocations.
    fn keep(&self, new: NewAllocation) -> Arc<Allocation> {
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        let (file, offset) = new.part.map(|part| (part.file, part.offset)).unzip();

        let allocation = Arc::new(Allocation {
            address: new.start + new.inside,
            bytes: new.bytes,
            device: new.device,
            origin: new.origin,
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
            file,
            offset: offset.unwrap_or(0),
            exported: AtomicBool::new(false),
            leaving: AtomicBool::new(false),
            start: new.start,
            mapped: new.mapped,
        });

        self.live
            .write()
            .insert(allocation.address, allocation.clone());
        allocation
    }

    /// Finds free addresses for `mapped` bytes and the gap behind them, and returns the first
    /// address. Reuses addresses only after the whole range was used once. Fails with
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    fn place(&self, mapped: u64) -> Result<u64> {
        let end = self.base + LENGTH;
        let mut next = self.next.lock();
        let live = self.live.read();
        for start in [*next, self.base] {
            let mut start = start;
            // Skip the allocations in the way; the map is ordered, so each step makes progress.
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

    /// Maps new pages at an address, or the pages of a part of a file.
    fn map(&self, start: u64, mapped: u64, part: Option<&FilePart>) -> Result {
        let kind = if part.is_some() {
            libc::MAP_SHARED
        } else {
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS
        };

        // SAFETY: the addresses are of the alias half of our own reservation, and `place` gave them
        // to nobody else.
        let at = unsafe {
            libc::mmap(
                (start + self.distance()) as *mut _,
                mapped as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                kind | libc::MAP_FIXED,
                part.map_or(-1, |part| part.file.as_raw_fd()),
                part.map_or(0, |part| part.offset as libc::off_t),
            )
        };

        if at == libc::MAP_FAILED {
            Err(Code::OUT_OF_MEMORY)
        } else {
            Ok(())
        }
    }

    /// Returns the live allocation that contains an address; `None` if there is none.
    pub(crate) fn find(&self, address: u64) -> Option<Arc<Allocation>> {
        let live = self.live.read();
        let (_, found) = live.range(..=address).next_back()?;
        (address < found.address + found.bytes).then(|| found.clone())
    }

    /// Returns the live allocation that begins at an address; `None` if there is none.
    pub(crate) fn begins(&self, address: u64) -> Option<Arc<Allocation>> {
        self.live.read().get(&address).cloned()
    }

    /// Returns the range of `bytes` bytes from a device address on. The bytes stay mapped while the
    /// span is held.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_ILLEGAL_ADDRESS` if the bytes are not all in one live allocation.
    pub(crate) fn span(&self, address: u64, bytes: u64) -> Result<Span> {
        let found = self.find(address).ok_or(Code::ILLEGAL_ADDRESS)?;
        if bytes > found.address + found.bytes - address {
            return Err(Code::ILLEGAL_ADDRESS);
        }
        Ok(Span {
            pointer: (address + self.distance()) as *mut u8,
            _allocation: found,
        })
    }

    /// Removes the live allocation that begins at an address, and returns it. Its bytes are
    /// unmapped when the last holder drops it; exported bytes are filled with `0xDD`. Fails with
    /// `CUDA_ERROR_INVALID_VALUE` if no allocation begins there.
    pub(crate) fn free(&self, address: u64) -> Result<Arc<Allocation>> {
        let freed = self
            .live
            .write()
            .remove(&address)
            .ok_or(Code::INVALID_VALUE)?;
        if freed.origin != Origin::Import {
            self.with_usage(freed.device, |usage| {
                usage.remove(freed.mapped, freed.origin)
            });
        }

        if freed.exported.load(Ordering::Relaxed) {
            // Processes that still have it open must notice: their accesses are undefined in CUDA,
            // and see garbage here.
            freed.fill(FREED);
        }
        Ok(freed)
    }

    /// Frees all memory of a device, imported memory included, when the device's context ends.
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

    /// Returns (bytes of a device that this process has not allocated, total bytes of the device).
    pub(crate) fn free_and_total(&self, device: u32) -> (u64, u64) {
        let used = self.with_usage(device, |usage| usage.live + usage.kept);
        (settings().memory - used, settings().memory)
    }

    /// Calls `f` with the memory use of a device.
    pub(crate) fn with_usage<R>(&self, device: u32, f: impl FnOnce(&mut Usage) -> R) -> R {
        f(self.usage.lock().entry(device).or_default())
    }
}

impl Allocation {
    /// Returns the offset of the memory in its first page, in bytes.
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
        crate::device::races::forget(self.number);
        // SAFETY: the pages are this allocation's. Spans hold the allocation, so none is left. The
        // pages become reserved and inaccessible again, as they were at the start.
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

/// Creates a memory file of `bytes` zero bytes. The file has no name that could outlive the
/// process. Fails with `CUDA_ERROR_OUT_OF_MEMORY`.
pub(crate) fn memory_file(bytes: u64) -> Result<OwnedFd> {
    // SAFETY: the name is a zero-terminated string; the descriptor is new and owned only here.
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
