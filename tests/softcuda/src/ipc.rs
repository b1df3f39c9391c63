//! Memory and events that other processes of the machine are given.
//!
//! A handle says which file of which process it is: the other opens it as
//! `/proc/<process>/fd/<number>`. So nothing has a name that could stay behind, and nothing can be
//! opened of a process that is gone.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use crate::device::current;
use crate::entry::{Out, api};
use crate::error::{Code, Result};
use crate::memory::{Allocation, Origin, space};

/// The only flag that `cuIpcOpenMemHandle` takes, and has to be given.
const LAZY_PEER_ACCESS: u32 = 1;

/// What is open of other processes, by the file it is and the device that opened it.
static OPEN: Mutex<BTreeMap<(u64, u32), Opened>> = Mutex::new(BTreeMap::new());

struct Opened {
    allocation: Arc<Allocation>,
    times: u32,
}

/// A handle, as it goes from process to process in CUDA's 64 bytes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Ticket {
    mark: [u8; 8],
    process: u32,
    file: RawFd,
    /// When the process started, as its number may be another's by now.
    started: u64,
    /// The file's own number, as its descriptor may be another file's by now.
    inode: u64,
    bytes: u64,
    inside: u32,
    device: u32,
    number: u64,
    spare: u64,
}

const _: () = assert!(size_of::<Ticket>() == 64);

/// What a ticket is for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Memory,
    Event,
    /// Of ranks of NCCL.
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
    /// A ticket for a file of this process.
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
            spare: 0,
        })
    }

    /// The file that a ticket of another process stands for.
    ///
    /// # Errors
    ///
    /// `CUDA_ERROR_INVALID_VALUE` for what is no such ticket, `CUDA_ERROR_INVALID_CONTEXT` for one
    /// of this process, as CUDA does, and `CUDA_ERROR_INVALID_HANDLE` where the process or the file
    /// is gone.
    pub(crate) fn open(&self, kind: Kind) -> Result<OwnedFd> {
        if self.mark == kind.mark() && self.process == std::process::id() {
            return Err(Code::INVALID_CONTEXT);
        }
        self.open_anywhere(kind)
    }

    /// As [`open`](Self::open), also in the process whose file it is.
    pub(crate) fn open_anywhere(&self, kind: Kind) -> Result<OwnedFd> {
        if self.mark != kind.mark() {
            return Err(Code::INVALID_VALUE);
        }
        let gone = |why: &str| {
            eprintln!("softcuda: what process {} exported cannot be opened: {why}", self.process);
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

/// When a process started, in ticks since the machine did; none where there is no such process, or
/// only what is left of it until its parent asks.
pub(crate) fn started(process: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name before may hold anything, so counting begins behind its last parenthesis.
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    if state == "Z" || state == "X" {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

fn inode(file: RawFd) -> Result<u64> {
    let found = std::fs::metadata(format!("/proc/self/fd/{file}"));
    found.map(|found| found.ino()).map_err(|_| Code::OPERATING_SYSTEM)
}

api! {
    /// A handle for memory that other processes may open.
    fn cuIpcGetMemHandle(handle: Out<Ticket>, address: u64) {
        current()?.check()?;
        handle.required()?;
        let found = space().begins(address).ok_or(Code::INVALID_VALUE)?;
        // Neither memory of a stream's order nor memory that is itself another process's.
        let file = found.file.as_ref().filter(|_| found.origin == Origin::Alloc).ok_or(Code::INVALID_VALUE)?;
        let mut ticket = Ticket::new(Kind::Memory, file, found.device)?;
        ticket.bytes = found.bytes;
        ticket.inside = found.inside() as u32;
        ticket.number = found.number;
        found.exported.store(true, Ordering::Relaxed);
        handle.set(ticket)
    }
}

api! {
    /// Maps memory of another process. What is open already is given again, at the same address,
    /// and counted.
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
            opened.times += 1;
            return address.set(opened.allocation.address);
        }
        let allocation = space().import(context.device, file, u64::from(ticket.inside), ticket.bytes);
        let allocation = allocation.map_err(|_| Code::MAP_FAILED)?;
        let at = allocation.address;
        open.insert((ticket.inode, context.device), Opened { allocation, times: 1 });
        address.set(at)
    }
}

api! {
    /// Lets go of memory of another process, as often as it was opened; the last time unmaps it.
    fn cuIpcCloseMemHandle(address: u64) {
        current()?.check()?;
        let mut open = OPEN.lock();
        let key = open.iter().find(|(_, opened)| opened.allocation.address == address).map(|(key, _)| *key);
        let key = key.ok_or(Code::INVALID_VALUE)?;
        if let Some(opened) = open.get_mut(&key) {
            opened.times -= 1;
            if opened.times == 0 {
                open.remove(&key);
                space().free(address)?;
            }
        }
        Ok(())
    }
}

/// Forgets what a device's context had open, as it ends.
pub(crate) fn end_all(device: u32) {
    OPEN.lock().retain(|(_, opened_by), _| *opened_by != device);
}
