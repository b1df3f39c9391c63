//! Memory of devices, lent between processes of one host.
//!
//! It is lent as the host's is: a segment is given once, by the words by which another process
//! opens it, and a message says where in it the payload is. Three things differ. Whether two
//! processes can do so at all, is tried before the first message ([`Shared::share_devices`]). What
//! a device makes may be lent before it is made: the message says what of the lender's the taker's
//! devices come after, and the lender says when it has seen that ([`LANDED`]). And nobody may free
//! what others have open: a segment that is no more stays until all who were given it have closed
//! it ([`CLOSED`]).

use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;
use zerocopy::IntoBytes;

use super::futex::SystemFutex;
use super::loans::Returns;
use super::mappings::Mappings;
use super::peer::Peer;
use super::reaper::Reaper;
use super::record::{BROKEN, COPY, LANDED, LATER, LENT, Lent, MOST_TOKENS, put_tokens};
use super::shared::{IsLent, Shared};
use crate::memory::{
    Arriving, DeviceMemory, DeviceSharing, Fence, Fences, Leaving, OwnedBuffer, Retired, Segment,
    SharedBuffer,
};
use crate::transport::{Fetch, FetchDone, Payload, Ticket, TransportError};
use crate::wire::{Header, ProcessId};

/// Bytes of what is told of a failure.
const MOST_TEXT: usize = 400;

/// What a process keeps for memory of devices.
pub(super) struct Devices {
    pub(super) sharing: OnceLock<Arc<dyn DeviceSharing>>,
    /// By process, whether it is proved to be no more.
    gone: Arc<[AtomicBool]>,
    /// Messages that cannot be told of yet.
    held: Mutex<Vec<Held>>,
    /// Segments that are no more, as long as others have them open.
    partings: Mutex<Vec<Parting>>,
    pub(super) reaper: Arc<Reaper>,
    shared: Weak<Shared>,
}

/// A message that waits for a fence which its taker's devices cannot wait for, or for room.
struct Held {
    to: ProcessId,
    header: Header,
    bytes: SharedBuffer,
    ticket: Ticket,
}

/// Memory that is freed when nobody has it open any more.
struct Parting {
    number: u32,
    /// Taken by who frees it.
    memory: Option<Leaving>,
    /// The processes that may have it open.
    awaited: Vec<usize>,
}

impl Devices {
    pub(super) fn new(processes: usize, shared: Weak<Shared>) -> Self {
        let gone = (0..processes).map(|_| AtomicBool::new(false)).collect();
        let (sharing, held, partings) = Default::default();
        Self { sharing, gone, held, partings, reaper: Reaper::new(), shared }
    }

    /// A process is proved to be no more: what its devices held is lost.
    pub(super) fn note_exit(&self, process: ProcessId) {
        self.gone[process.index()].store(true, Ordering::Release);
    }

    /// Whether no message is held back.
    pub(super) fn is_flushed(&self) -> bool {
        self.held.lock().is_empty()
    }

    /// What those wait for that are held back: they never leave.
    pub(super) fn take_tickets(&self) -> Vec<Ticket> {
        let held = std::mem::take(&mut *self.held.lock());
        held.into_iter().map(|held| held.ticket).collect()
    }

    /// Keeps what a segment was made of until those of the `awaited` processes that live have
    /// closed it.
    pub(super) fn part(&self, segment: Retired, awaited: Vec<usize>) {
        let Retired { number, memory } = segment;
        if memory.is_some() {
            self.partings.lock().push(Parting { number, memory, awaited });
        }
    }

    /// A process has closed segments that it was given.
    pub(super) fn note_closed(&self, process: usize, numbers: &[u32]) {
        for parting in
            self.partings.lock().iter_mut().filter(|parting| numbers.contains(&parting.number))
        {
            parting.awaited.retain(|awaited| *awaited != process);
        }
    }

    /// Frees what nobody has open any more.
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
        // Somebody may have it open, and nobody hears when that is over: the end of this process
        // frees it.
        std::mem::forget(self.memory.take());
    }
}

impl Shared {
    /// Lends bytes that are in the memory of a device of this process, or that one has open.
    pub(super) fn lend_device(
        &self,
        to: ProcessId,
        peer: &Peer,
        header: &Header,
        bytes: SharedBuffer,
        ticket: Ticket,
    ) -> Result<IsLent, TransportError> {
        if let Some(why) = &peer.outbound.lock().closed {
            return Err(why.clone());
        }
        let place = match bytes.place().filter(|_| peer.shares_devices()) {
            Some(place) => Ok(place),
            None => Err("memory of this device is not shared with it".to_owned()),
        };
        let place = match place {
            Ok(place) => place,
            Err(why) => {
                self.break_off(peer, header, &why);
                let doing = format!("lending memory of a device to process {to}");
                return Err(TransportError::Environment { doing, why });
            }
        };
        let ready = bytes.ready().clone();
        // Where the owner cannot be told now that a third reads it, it is told later.
        let Some(tokens) = self.tokens(&ready).filter(|_| bytes.pass_on()) else {
            self.hold_back(Held { to, header: *header, bytes, ticket }, ready);
            return Ok(IsLent(true));
        };
        let is_copied = bytes.is_limited();
        let made = bytes.clone();
        let is_later = !tokens.is_empty() || !made.is_made();
        let flags = if is_copied { COPY } else { 0 } | if is_later { LATER } else { 0 };
        let number = place.segment.number(&self.arena);
        let mut out = peer.outbound.lock();
        if let Some(why) = &out.closed {
            return Err(why.clone());
        }
        let size = bytes.len() as u64;
        let loan = peer.book.lock().lend(bytes, ticket, is_copied);
        let lent = Lent {
            loan: loan.into(),
            offset: (place.offset as u64).into(),
            bytes: size.into(),
            segment: number.into(),
            flags: flags.into(),
        };
        let parts = [&header.encode()[..], lent.as_bytes(), &put_tokens(&tokens)];
        peer.send(&mut out, LENT, &parts, Some((number, &place.segment)));
        drop(out);
        peer.door.ring(&SystemFutex);
        if is_later {
            let shared = self.devices.shared.clone();
            made.on_made(Box::new(move |failure| {
                if let Some(shared) = shared.upgrade() {
                    shared.say_landed(to, loan, failure);
                }
            }));
        }
        Ok(IsLent(true))
    }

    /// What a peer is told of fences that are not over; `None` where it cannot be told of one of
    /// them.
    fn tokens(&self, ready: &Fences) -> Option<Vec<Vec<u8>>> {
        let open: Vec<_> = ready.iter().filter(|fence| !fence.is_over()).collect();
        let sharing = self.devices.sharing.get()?;
        open.iter()
            .map(|fence| sharing.tell(&***fence))
            .collect::<Option<Vec<_>>>()
            .filter(|tokens| tokens.len() <= MOST_TOKENS)
    }

    fn hold_back(&self, held: Held, until: Fences) {
        self.devices.held.lock().push(held);
        if until.are_over() {
            // What it waits for is told by nobody: it is tried again from time to time.
            return;
        }
        let shared = self.devices.shared.clone();
        until.on_over(Box::new(move || {
            if let Some(shared) = shared.upgrade() {
                shared.post_held();
            }
        }));
    }

    /// Posts what was held back and need not be any more.
    pub(super) fn post_held(&self) {
        let is_due = |held: &mut Held| held.bytes.ready().are_over();
        let due: Vec<_> = self.devices.held.lock().extract_if(.., is_due).collect();
        for Held { to, header, bytes, ticket } in due {
            self.post(to, &header, Some(bytes), ticket);
        }
    }

    /// Tells a peer that what it was lent is there now, or never will be.
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

    /// Tells a peer that a payload will not come, so that it does not wait.
    fn break_off(&self, peer: &Peer, header: &Header, why: &str) {
        let mut out = peer.outbound.lock();
        if out.closed.is_none() {
            peer.send(&mut out, BROKEN, &[&header.encode(), cut(why).as_bytes()], None);
        }
        drop(out);
        peer.door.ring(&SystemFutex);
    }

    /// By what process `from` said, a fence for a loan.
    pub(super) fn hear(&self, tokens: &[Vec<u8>]) -> Result<Arc<dyn Arriving>, String> {
        let sharing =
            self.devices.sharing.get().ok_or("this process has no devices that share memory")?;
        let tokens: Vec<&[u8]> = tokens.iter().map(Vec::as_slice).collect();
        sharing.hear(&tokens).map_err(|error| error.to_string())
    }
}

/// A segment of a device's memory that a peer has given.
pub(super) struct DeviceGiven {
    pub(super) words: Vec<u8>,
    pub(super) bytes: u64,
    /// Whose memory it is: the peer may have it open itself.
    pub(super) owner: ProcessId,
    open: Open,
}

enum Open {
    No,
    /// It came by this way when nobody here had it open: it stays so until the peer says that it is
    /// no more.
    First(Arc<Segment>),
    /// It came by other ways before; see [`Given`](super::mappings::Given).
    Again(Weak<Segment>),
}

impl DeviceGiven {
    pub(super) fn new(words: Vec<u8>, bytes: u64, owner: ProcessId) -> Self {
        Self { words, bytes, owner, open: Open::No }
    }

    /// The segment, opened, which its giver knows by `number`; or why it cannot be opened, for
    /// people.
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

    /// The peer says that it is no more: it hears when it is closed here.
    pub(super) fn retire(self, number: u32, returns: &Arc<Returns>) {
        let again = match self.open {
            // Said when it is closed, which is when the last loan of it has gone back.
            Open::First(segment) => return drop(segment),
            Open::Again(segment) => segment.upgrade(),
            Open::No => None,
        };
        match again.as_deref().and_then(Foreign::of) {
            // Who gave it first may be no more by then: each hears of it for itself.
            Some(foreign) => foreign.givers.lock().push((returns.clone(), number)),
            None => returns.say_closed(number),
        }
    }
}

/// Memory of another process's device that is open here. Who gave it hears when it is closed.
pub(super) struct Foreign {
    /// `None` while it is dropped.
    memory: Option<Box<dyn DeviceMemory>>,
    words: Vec<u8>,
    owner: ProcessId,
    gone: Arc<[AtomicBool]>,
    /// Who is to hear of it, and by which number they know it.
    givers: Mutex<Vec<(Arc<Returns>, u32)>>,
    reaper: Arc<Reaper>,
}

impl Foreign {
    /// The process whose memory a segment is, where that is another than this one.
    pub(super) fn owner(segment: &Segment) -> Option<ProcessId> {
        Self::of(segment).map(|foreign| foreign.owner)
    }

    /// What says later that what a segment holds means nothing any more, if that comes to pass.
    pub(super) fn life(segment: &Segment) -> Option<Arc<dyn Fence>> {
        let Self { owner, gone, .. } = Self::of(segment)?;
        Some(Arc::new(Life { owner: *owner, gone: gone.clone() }))
    }

    fn of(segment: &Segment) -> Option<&Self> {
        (segment.device()? as &dyn Any).downcast_ref()
    }
}

/// Nothing to wait for, but what fails once the process is no more: memory of a device does not
/// outlive its owner.
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
        // A third opens it by the owner's own words.
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

/// A payload that cannot be had.
pub(super) struct Unreadable {
    pub(super) bytes: u64,
    pub(super) why: TransportError,
}

impl Unreadable {
    /// Of a message of `from`, because of `why`.
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

/// As much of a text as is told.
fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(MOST_TEXT)).rev().find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}
