//! Memory and events shared with other processes of the machine.
//!
//! A handle names a file of a process, and the other process opens it as
//! `/proc/<process>/fd/<number>`. So no file has a name that could outlive its process. Nothing can
//! be opened of a process that has ended.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use crate::device::current;
use crate::device::memory::{Allocation, Origin, space};
use crate::entry::{Out, api};
use crate::error::{Code, Result};
use crate::settings::settings;

/// The only flag of `cuIpcOpenMemHandle`; it is required.
const LAZY_PEER_ACCESS: u32 = 1;

/// The opened memory of other processes, by (inode of its file, device for which it was opened).
static OPEN: Mutex<BTreeMap<(u64, u32), Opened>> = Mutex::new(BTreeMap::new());

struct Opened {
    allocation: Arc<Allocation>,
    /// Number of the allocation in the owner process. `address` is the address in this process.
    number: u64,
    address: u64,
    times: u32,
}

/// An IPC handle of memory, an event or an NCCL group, which processes exchange. It has the layout
/// of CUDA's handles, 64 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    mark: [u8; 8],
    process: u32,
    file: RawFd,
    /// Start time of the owner process in clock ticks since boot. It tells apart processes with the
    /// same id.
    started: u64,
    /// Inode of the file. It tells apart files with the same descriptor.
    inode: u64,
    bytes: u64,
    inside: u32,
    device: u32,
    number: u64,
    /// Bytes of the block that contains the memory and is opened as a whole. 0 if the memory has
    /// its own file.
    block: u64,
}

const _: () = assert!(size_of::<Ticket>() == 64);

/// The kind of object that a ticket opens.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    Event,
    /// The shared memory of an NCCL group.
    Group,
}

impl Kind {
    fn mark(self) -> [u8; 8] {
        match self {
            Kind::Memory => *b"softmem1",
            Kind::Event => *b"softevt1",
            Kind::Group => *b"softncl1",
        }
    }
}

impl Ticket {
    /// Creates a ticket for a file of this process, which must stay open while the ticket is used.
    pub(crate) fn new(kind: Kind, file: &OwnedFd, device: u32) -> Result<Ticket> {
        let process = std::process::id();
        Ok(Ticket {
            mark: kind.mark(),
            process,
            file: file.as_raw_fd(),
            started: started(process).ok_or(Code::OPERATING_SYSTEM)?,
            inode: inode(file.as_raw_fd())?,
            bytes: 0,
            inside: 0,
            device,
            number: 0,
            block: 0,
        })
    }

    /// Opens the file of a ticket from another process.
    ///
    /// # Errors
    ///
    /// - `CUDA_ERROR_INVALID_VALUE` if the ticket is not for an object of `kind`.
    /// - `CUDA_ERROR_INVALID_CONTEXT` for a ticket that this process made, as CUDA does.
    /// - `CUDA_ERROR_INVALID_HANDLE` if the process or the file no longer exists.
    pub(crate) fn open(&self, kind: Kind) -> Result<OwnedFd> {
        if self.mark == kind.mark() && self.process == std::process::id() {
            return Err(Code::INVALID_CONTEXT);
        }
        self.open_anywhere(kind)
    }

    /// Opens the file of a ticket from any process, including this one. The errors are those of
    /// [`open`](Self::open), without the error for this process's own tickets.
    pub(crate) fn open_anywhere(&self, kind: Kind) -> Result<OwnedFd> {
        if self.mark != kind.mark() {
            return Err(Code::INVALID_VALUE);
        }

        let gone = |why: &str| {
            eprintln!(
                "softcuda: cannot open the export of process {}: {why}",
                self.process
            );
            Code::INVALID_HANDLE
        };
        if started(self.process) != Some(self.started) {
            return Err(gone("the process has ended"));
        }

        let path = format!("/proc/{}/fd/{}", self.process, self.file);
        let file = File::options().read(true).write(true).open(path);
        let file = OwnedFd::from(file.map_err(|error| gone(&error.to_string()))?);
        if inode(file.as_raw_fd())? != self.inode {
            return Err(gone("it was freed"));
        }

        Ok(file)
    }
}

/// Returns the start time of a process in clock ticks since boot. `None` if it does not exist or is
/// a zombie.
pub(crate) fn started(process: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The process name may contain anything, so counting begins after its last parenthesis.
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if state == "Z" || state == "X" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn inode(file: RawFd) -> Result<u64> {
    let found = std::fs::metadata(format!("/proc/self/fd/{file}"));
    found
        .map(|found| found.ino())
        .map_err(|_| Code::OPERATING_SYSTEM)
}

api! {
    /// Returns a handle with which other processes can open memory of `cuMemAlloc`, given its first
    /// address. Other memory is refused with `CUDA_ERROR_INVALID_VALUE`.
    fn cuIpcGetMemHandle(handle: Out<Ticket>, address: u64) {
        current()?.check()?;
        handle.required()?;
        let found = space().begins(address).ok_or(Code::INVALID_VALUE)?;

        // Neither stream-ordered memory nor memory imported from another process can be exported.
        let file = found
            .file
            .as_ref()
            .filter(|_| found.origin == Origin::Alloc)
            .ok_or(Code::INVALID_VALUE)?;

        let mut ticket = Ticket::new(Kind::Memory, file, found.device)?;
        ticket.bytes = found.bytes;
        // Small allocations are parts of a block: see `SOFTCUDA_BLOCK`.
        ticket.block = if found.mapped < settings().block { settings().block } else { 0 };
        ticket.inside = (found.offset + found.inside()) as u32;
        ticket.number = found.number;

        found.exported.store(true, Ordering::Relaxed);
        handle.set(ticket)
    }
}

api! {
    /// Maps memory of another running process for the current device. If the memory is already
    /// open, returns the same address, which must be closed once more. Fails with
    /// `CUDA_ERROR_ALREADY_MAPPED` if other memory of the same block is open.
    fn cuIpcOpenMemHandle_v2(address: Out<u64>, ticket: Ticket, flags: u32) {
        let context = current()?;
        context.check()?;
        address.required()?;

        if flags != LAZY_PEER_ACCESS {
            return Err(Code::INVALID_VALUE);
        }
        let file = ticket.open(Kind::Memory)?;

        let mut open = OPEN.lock();
        if let Some(opened) = open.get_mut(&(ticket.inode, context.device)) {
            if opened.number != ticket.number {
                return Err(Code::ALREADY_MAPPED);
            }
            opened.times += 1;
            return address.set(opened.address);
        }

        let inside = u64::from(ticket.inside);
        let (first, bytes) =
            if ticket.block > 0 { (0, ticket.block) } else { (inside, ticket.bytes) };
        let allocation = space().import(context.device, file, first, bytes);
        let allocation = allocation.map_err(|_| Code::MAP_FAILED)?;
        let at = allocation.address + (inside - first);

        let opened = Opened { allocation, number: ticket.number, address: at, times: 1 };
        open.insert((ticket.inode, context.device), opened);
        address.set(at)
    }
}

api! {
    /// Closes memory of another process once, given its first address. Unmaps it after as many
    /// closes as opens.
    fn cuIpcCloseMemHandle(address: u64) {
        current()?.check()?;

        let mut open = OPEN.lock();
        let key = open
            .iter()
            .find(|(_, opened)| opened.address == address)
            .map(|(key, _)| *key);
        let key = key.ok_or(Code::INVALID_VALUE)?;

        if let Some(opened) = open.get_mut(&key) {
            opened.times -= 1;
            if opened.times == 0 {
                let start = opened.allocation.address;
                open.remove(&key);
                space().free(start)?;
            }
        }
        Ok(())
    }
}

/// Removes the opened memory of a device from the table, when the device's context ends.
pub(crate) fn end_all(device: u32) {
    OPEN.lock().retain(|(_, opened_by), _| *opened_by != device);
}
