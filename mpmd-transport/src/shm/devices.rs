//! Device memory, lent between processes of one host.
//!
//! It is lent as host memory is: a segment is given once, as the description by which another
//! process opens it. A message then names the payload's place in it. Three things differ:
//!
//! - Two processes test before the first message if they can lend each other device memory
//!   ([`Shared::share_devices`]).
//! - Memory is lent once the devices' work that writes it has ended: a device that waits for the
//!   device of another process may wait for ever if that process dies. A message is held back until
//!   then. The lender may not know yet if the content is valid, and reports that ([`LANDED`]).
//! - Memory must not be freed while others have it open. A freed segment stays until all processes
//!   that were given it have closed it ([`CLOSED`]).

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::futex::SystemFutex;
use super::lending::{IsLent, Lending, Message};
use super::loans::Returns;
use super::mappings::Mappings;
use super::peer::Peer;
use super::reaper::Reaper;
use super::record::{BROKEN, LANDED};
use super::shared::Shared;
use crate::memory::{
    DeviceMemory, DeviceSharing, Fence, Fences, Leaving, OwnedBuffer, Retired, Segment,
    SharedBuffer,
};
use crate::transport::{Fetch, FetchDone, Payload, Ticket, TransportError};
use mpmd_proto::wire::{Header, ProcessId};

/// The longest failure text sent to a peer, in bytes.
const MOST_TEXT: usize = 400;

/// A process's state for device memory.
pub(super) struct Devices {
    pub(super) sharing: OnceLock<Arc<dyn DeviceSharing>>,
    /// True, by process, once the process has provably exited.
    gone: Arc<[AtomicBool]>,
    /// Messages that cannot be sent yet.
    held: Mutex<Vec<Held>>,
    /// Freed segments that others still have open.
    partings: Mutex<Vec<Parting>>,
    pub(super) reaper: Arc<Reaper>,
    shared: Weak<Shared>,
}

/// A message that is held back. The work that writes its payload is not over, or the owner of
/// re-lent bytes could not be told yet.
struct Held {
    to: ProcessId,
    header: Header,
    bytes: SharedBuffer,
    ticket: Ticket,
}

/// Freed memory that some processes still have open.
struct Parting {
    number: u32,
    /// The memory; `None` once it is taken out to be freed.
    memory: Option<Leaving>,
    /// Indices of the processes that may have the memory open.
    awaited: Vec<usize>,
}

impl Devices {
    pub(super) fn new(processes: usize, shared: Weak<Shared>) -> Self {
        let gone = (0..processes).map(|_| AtomicBool::new(false)).collect();
        let (sharing, held, partings) = Default::default();
        Self { sharing, gone, held, partings, reaper: Reaper::new(), shared }
    }

    /// Records that a process has provably exited: the memory of its devices is lost.
    pub(super) fn note_exit(&self, process: ProcessId) {
        self.gone[process.index()].store(true, Ordering::Release);
    }

    /// True if no message is held back.
    pub(super) fn is_flushed(&self) -> bool {
        self.held.lock().is_empty()
    }

    /// Drops the messages that are held back and returns their tickets: they will never be sent.
    pub(super) fn take_tickets(&self) -> Vec<Ticket> {
        let held = std::mem::take(&mut *self.held.lock());
        held.into_iter().map(|held| held.ticket).collect()
    }

    /// Keeps a freed segment's memory until all living processes in `awaited` have closed it.
    pub(super) fn part(&self, segment: Retired, awaited: Vec<usize>) {
        let Retired { number, memory } = segment;
        if memory.is_some() {
            self.partings.lock().push(Parting { number, memory, awaited });
        }
    }

    /// Records that a process has closed segments that it was given.
    pub(super) fn note_closed(&self, process: usize, numbers: &[u32]) {
        for parting in
            self.partings.lock().iter_mut().filter(|parting| numbers.contains(&parting.number))
        {
            parting.awaited.retain(|awaited| *awaited != process);
        }
    }

    /// Frees, on the reaper's thread, the memory that no process has open any more.
    pub(super) fn free(&self) {
        let over = {
            let mut partings = self.partings.lock();
            for parting in partings.iter_mut() {
                parting.awaited.retain(|awaited| !self.gone[*awaited].load(Ordering::Acquire));
            }
            partings.extract_if(.., |parting| parting.awaited.is_empty()).collect::<Vec<_>>()
        };
        for mut parting in over {
            let memory = parting.memory.take();
            self.reaper.later(move || drop(memory));
        }
    }
}

impl Drop for Parting {
    fn drop(&mut self) {
        // Another process may have it open, and this process will not hear when it is closed. The
        // end of this process frees it.
        std::mem::forget(self.memory.take());
    }
}

impl Shared {
    /// Lends a peer bytes in the memory of a device of this process, or of a foreign device that it
    /// has open. If the message cannot be sent yet, holds it back. Fails if the two do not share
    /// device memory.
    pub(super) fn lend_device(
        &self,
        to: ProcessId,
        peer: &Peer,
        header: &Header,
        bytes: SharedBuffer,
        ticket: Ticket,
    ) -> Result<IsLent, TransportError> {
        drop(peer.open()?);
        if bytes.place().is_none() || !peer.shares_devices() {
            let why = "memory of this device is not shared with it".to_owned();
            self.break_off(peer, header, &why);
            let doing = format!("lending memory of a device to process {to}");
            return Err(TransportError::Environment { doing, why });
        }
        let ready = bytes.ready().clone();
        // The owner itself has the fences of its memory, and knows if it is valid.
        let borrowed = bytes.loan().and_then(|loan| self.borrowed(loan));
        let is_owner = borrowed.is_some_and(|borrowed| borrowed.owner() == to);
        if !is_owner && !ready.are_over() {
            self.hold_back(Held { to, header: *header, bytes, ticket }, Some(ready));
            return Ok(IsLent(true));
        }
        let made = bytes.clone();
        let is_later = !is_owner && !made.is_made();
        let message = Message { to, header, ticket, is_later };
        let lent = self.lend(peer, &mut *peer.open()?, &message, bytes);
        let lent = match lent {
            Ok(lent) => lent,
            // The owner cannot be told now that another process reads it, so it is sent later.
            Err(bytes) => {
                self.hold_back(Held { to, header: *header, bytes, ticket }, None);
                return Ok(IsLent(true));
            }
        };
        peer.door.ring(&SystemFutex);
        if let Lending::Own(loan) | Lending::Borrowed(loan) = lent
            && is_later
        {
            let shared = self.devices.shared.clone();
            made.on_made(Box::new(move |failure| {
                if let Some(shared) = shared.upgrade() {
                    shared.say_landed(to, loan, failure);
                }
            }));
        }
        Ok(lent.is_lent())
    }

    /// Keeps a message until the fences `until` are over. Without them no event tells when to send
    /// it, so it is retried regularly.
    fn hold_back(&self, held: Held, until: Option<Fences>) {
        self.devices.held.lock().push(held);
        let Some(until) = until else { return };
        let shared = self.devices.shared.clone();
        until.on_over(Box::new(move || {
            if let Some(shared) = shared.upgrade() {
                shared.post_held();
            }
        }));
    }

    /// Posts the messages held back for fences that are over now.
    pub(super) fn post_held(&self) {
        let is_due = |held: &mut Held| held.bytes.ready().are_over();
        let due: Vec<_> = self.devices.held.lock().extract_if(.., is_due).collect();
        for Held { to, header, bytes, ticket } in due {
            self.post(to, &header, Some(bytes), ticket);
        }
    }

    /// Tells the borrower of loan `loan` that its memory is valid, or why it is not.
    fn say_landed(&self, to: ProcessId, loan: u64, failure: Option<String>) {
        let Some(Some(peer)) = self.peers.get(to.index()) else { return };
        let mut out = peer.outbound.lock();
        if out.closed.is_none() {
            let text = cut(failure.as_deref().unwrap_or_default());
            peer.send(&mut out, LANDED, &[&loan.to_le_bytes(), text.as_bytes()], None);
        }
        drop(out);
        peer.door.ring(&SystemFutex);
    }

    /// Tells a peer that the payload of a message will not come, so that the peer does not wait.
    fn break_off(&self, peer: &Peer, header: &Header, why: &str) {
        let mut out = peer.outbound.lock();
        if out.closed.is_none() {
            peer.send(&mut out, BROKEN, &[&header.encode(), cut(why).as_bytes()], None);
        }
        drop(out);
        peer.door.ring(&SystemFutex);
    }
}

/// A segment of device memory that a peer has given.
pub(super) struct DeviceGiven {
    pub(super) words: Vec<u8>,
    pub(super) bytes: u64,
    /// The process that owns the memory: the peer may have opened it itself.
    pub(super) owner: ProcessId,
    open: Open,
}

enum Open {
    No,
    /// The segment was not open here when this peer gave it. It stays open until the peer says that
    /// it is freed.
    First(Arc<Segment>),
    /// Another peer had given the segment before; see [`Given`](super::mappings::Given).
    Again(Weak<Segment>),
}

impl DeviceGiven {
    pub(super) fn new(words: Vec<u8>, bytes: u64, owner: ProcessId) -> Self {
        Self { words, bytes, owner, open: Open::No }
    }

    /// Returns the segment, which its giver knows by `number`, and opens it if it is not open. The
    /// error is a message for users.
    pub(super) fn segment(
        &mut self,
        number: u32,
        returns: &Arc<Returns>,
        mappings: &Mappings,
        devices: &Devices,
    ) -> Result<Arc<Segment>, String> {
        let open = match &self.open {
            Open::First(segment) => Some(segment.clone()),
            Open::Again(segment) => segment.upgrade(),
            Open::No => None,
        };
        if let Some(open) = open {
            return Ok(open);
        }
        let bytes = usize::try_from(self.bytes).map_err(|error| error.to_string())?;
        let gone = |process: ProcessId| {
            devices.gone.get(process.index()).is_some_and(|it| it.load(Ordering::Acquire))
        };
        if gone(self.owner) {
            return Err(lost(self.owner));
        }
        let sharing =
            devices.sharing.get().ok_or("this process has no devices that share memory")?;
        let make = || {
            let memory = sharing.open(&self.words, bytes)?;
            let foreign = Foreign {
                memory: Some(memory),
                words: self.words.clone(),
                owner: self.owner,
                gone: devices.gone.clone(),
                givers: Mutex::new(vec![(returns.clone(), number)]),
                reaper: devices.reaper.clone(),
            };
            Segment::of_device(Box::new(foreign)).map(Arc::new)
        };
        let (segment, is_new) =
            mappings.opened(&self.words, make).map_err(|error| error.to_string())?;
        if segment.bytes() != bytes {
            return Err(format!("it has {} bytes and is announced with {bytes}", segment.bytes()));
        }
        let is_first = is_new && matches!(self.open, Open::No);
        self.open = if is_first {
            Open::First(segment.clone())
        } else {
            Open::Again(Arc::downgrade(&segment))
        };
        Ok(segment)
    }

    /// Handles the peer's notice that the segment is freed. Once it is closed here, each peer that
    /// gave it is told.
    pub(super) fn retire(self, number: u32, returns: &Arc<Returns>) {
        let again = match self.open {
            // The peer is told once it is closed, which is when the last loan of it has gone back.
            Open::First(segment) => return drop(segment),
            Open::Again(segment) => segment.upgrade(),
            Open::No => None,
        };
        match again.as_deref().and_then(Foreign::of) {
            // The first giver may be gone by then, so each giver is told separately.
            Some(foreign) => foreign.givers.lock().push((returns.clone(), number)),
            None => returns.say_closed(number),
        }
    }
}

/// Memory of another process's device, open here. When it is closed, the peers that gave it are
/// told.
pub(super) struct Foreign {
    /// `None` while it is dropped.
    memory: Option<Box<dyn DeviceMemory>>,
    words: Vec<u8>,
    owner: ProcessId,
    gone: Arc<[AtomicBool]>,
    /// (Peer to tell, number by which it knows the segment).
    givers: Mutex<Vec<(Arc<Returns>, u32)>>,
    reaper: Arc<Reaper>,
}

impl Foreign {
    /// Returns the process that owns a segment of foreign device memory; `None` for any other
    /// segment.
    pub(super) fn owner(segment: &Segment) -> Option<ProcessId> {
        Self::of(segment).map(|foreign| foreign.owner)
    }

    /// Returns a fence that fails once the content of a foreign device segment is lost; `None` for
    /// any other segment.
    pub(super) fn life(segment: &Segment) -> Option<Arc<dyn Fence>> {
        let Self { owner, gone, .. } = Self::of(segment)?;
        Some(Arc::new(Life { owner: *owner, gone: gone.clone() }))
    }

    fn of(segment: &Segment) -> Option<&Self> {
        (segment.device()? as &dyn Any).downcast_ref()
    }
}

/// A fence that is always over, but fails once the owner is gone: device memory does not outlive
/// its process.
struct Life {
    owner: ProcessId,
    gone: Arc<[AtomicBool]>,
}

impl Fence for Life {
    fn is_over(&self) -> bool {
        true
    }

    fn on_over(&self, then: Box<dyn FnOnce() + Send>) {
        then();
    }

    fn failure(&self) -> Option<String> {
        let is_gone = self.gone.get(self.owner.index())?.load(Ordering::Acquire);
        is_gone.then(|| lost(self.owner))
    }
}

fn lost(owner: ProcessId) -> String {
    format!("it is in the memory of a device of process {owner}, which has ended")
}

impl DeviceMemory for Foreign {
    fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, |memory| memory.address())
    }

    fn bytes(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.bytes())
    }

    fn device(&self) -> u32 {
        self.memory.as_ref().map_or(u32::MAX, |memory| memory.device())
    }

    fn export(&self) -> Option<&[u8]> {
        // A third process opens it by the owner's own description.
        Some(&self.words)
    }

    fn bind(&self) -> std::io::Result<()> {
        self.memory.as_ref().map_or(Ok(()), |memory| memory.bind())
    }

    fn is_far(&self) -> bool {
        self.memory.as_ref().is_some_and(|memory| memory.is_far())
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let (memory, givers) = (self.memory.take(), std::mem::take(self.givers.get_mut()));
        self.reaper.later(move || {
            drop(memory);
            givers.into_iter().for_each(|(returns, number)| returns.say_closed(number));
        });
    }
}

/// A payload that cannot be read.
pub(super) struct Unreadable {
    pub(super) bytes: u64,
    pub(super) why: TransportError,
}

impl Unreadable {
    /// Returns the unreadable payload of a message from `from`, with the reason `why`.
    pub(super) fn payload(from: ProcessId, header: &Header, why: String) -> Payload {
        let doing = format!("taking memory of a device of process {from}");
        let why = TransportError::Environment { doing, why };
        Payload::Waiting(Box::new(Self { bytes: header.bytes, why }))
    }
}

impl Fetch for Unreadable {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fetch(self: Box<Self>, into: OwnedBuffer, then: FetchDone) {
        drop(into);
        then(Err(self.why));
    }
}

/// Cuts a text to [`MOST_TEXT`] bytes, or a little less to keep its last character whole.
fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(MOST_TEXT)).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}
