//! One peer: the records sent to it and received from it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};

use super::devices::DeviceLoans;
use super::doorbell::Doorbell;
use super::foreign_memory::{DeviceGiven, DeviceSegmentError, ForeignMemory};
use super::futex::SystemFutex;
use super::mappings::{HostGiven, Mappings};
use super::record::ANNOUNCED;
use super::returns::ReturnPath;
use super::ring::{Consumer, Producer};
use super::socket::Socket;
use crate::transport::TransportError;
use mpmd_memory::{Landing, MOST_WORDS, Segment};
use mpmd_proto::wire::ProcessId;

/// Prefix of a packet that gives the peer a host memory segment. The segment's number and its
/// length follow; the packet carries its descriptor.
const GIVE: [u8; 4] = *b"GIVE";
const GIVE_BYTES: usize = 16;
/// Prefix of a packet that gives the peer a segment of device memory. The segment's number, its
/// length, the id of the owner process, and the description that opens it follow. The packet
/// carries no descriptor.
const GIVE_DEVICE: [u8; 4] = *b"GIVD";
const GIVE_DEVICE_BYTES: usize = 20;

/// Limits on the segments announced to a peer that no message has used yet, in number and in bytes.
/// Each costs the peer a descriptor and page tables.
const MOST_ANNOUNCED: usize = 32;
const MOST_ANNOUNCED_BYTES: usize = 1 << 30;

/// A connected peer: the part of its state that all threads use.
pub(super) struct ShmPeer {
    pub(super) outbound: Mutex<Outbound>,
    /// The ring through which this process returns memory that it has borrowed from the peer.
    pub(super) returns: Arc<ReturnPath>,
    pub(super) door: Doorbell,
    pub(super) socket: Socket,
    /// The peer's pidfd, which becomes readable when the peer's process exits.
    pub(super) exit: OwnedFd,
    /// This process's id.
    pub(super) own: ProcessId,
    /// True if records in the outbox wait for space in the ring or the socket.
    pub(super) is_waiting: AtomicBool,
    /// True if the two processes lend each other device memory.
    pub(super) shares_devices: AtomicBool,
    /// True once this process has sent the peer at least one payload.
    pub(super) gets_payloads: AtomicBool,
}

/// The sending half of the connection to a peer.
pub(super) struct Outbound {
    ring: Producer,
    /// Records that could not be sent at once, in the order in which they were posted.
    outbox: VecDeque<LateRecord>,
    /// Numbers of the segments that the peer was given.
    given: HashSet<u32>,
    /// Sizes in bytes of the segments that were announced and that no message has used yet, by
    /// number.
    announced: HashMap<u32, usize>,
    /// The number of the next loan to the peer. Loans are sent in the order of their numbers.
    pub(super) next_loan: u64,
    /// The reason why the first record in the outbox cannot be sent yet.
    obstacle: Option<Obstacle>,
    /// The reason why nothing can be sent any more; `None` while the connection is open.
    pub(super) closed: Option<TransportError>,
}

/// The reason why a record cannot be sent now.
#[derive(Clone, Copy)]
enum Obstacle {
    /// The ring has no space.
    Ring,
    /// The socket has no space for the packet that gives the record's segment.
    Socket,
}

/// A record that waits in the outbox.
struct LateRecord {
    kind: u32,
    bytes: Vec<u8>,
    segment: Option<NumberedSegment>,
}

/// A segment that a record refers to.
#[derive(Clone)]
pub(super) struct NumberedSegment {
    /// The number that identifies the segment to the peer.
    pub(super) number: u32,
    pub(super) segment: Arc<Segment>,
}

impl Outbound {
    /// Creates the sending half, which pushes records into `ring`.
    pub(super) fn new(ring: Producer) -> Self {
        Self {
            ring,
            outbox: VecDeque::new(),
            given: HashSet::new(),
            announced: HashMap::new(),
            next_loan: 1,
            obstacle: None,
            closed: None,
        }
    }
}

impl ShmPeer {
    /// Records that the two processes lend each other device memory.
    pub(super) fn share_devices(&self) {
        self.shares_devices.store(true, Ordering::Release);
    }

    /// Returns true if the two processes lend each other device memory.
    pub(super) fn shares_devices(&self) -> bool {
        self.shares_devices.load(Ordering::Acquire)
    }

    /// Locks the sending half of the connection. Fails if the connection is closed.
    pub(super) fn open(&self) -> Result<MutexGuard<'_, Outbound>, TransportError> {
        let out = self.outbound.lock();
        out.closed.clone().map_or(Ok(out), Err)
    }

    /// Sends a record, or keeps it in the outbox until the ring has space. Never blocks. If the
    /// record refers to a segment, the peer is given the segment first.
    pub(super) fn send(
        &self,
        out: &mut Outbound,
        kind: u32,
        parts: &[&[u8]],
        segment: Option<&NumberedSegment>,
    ) {
        if let Some(segment) = segment {
            out.announced.remove(&segment.number);
        }

        if out.outbox.is_empty() {
            match self.try_send(&mut out.ring, &mut out.given, kind, parts, segment) {
                None => return,
                obstacle => out.obstacle = obstacle,
            }
        }

        out.outbox.push_back(LateRecord {
            kind,
            bytes: parts.concat(),
            segment: segment.cloned(),
        });
        self.is_waiting.store(true, Ordering::Release);
    }

    /// Announces a new segment, so that the peer can map it before a message lends memory in it.
    /// Does nothing if it would have to wait, or if the peer has enough announced segments.
    pub(super) fn announce(&self, segment: &NumberedSegment) {
        let Some(mut out) = self.outbound.try_lock() else {
            return;
        };
        let Outbound {
            ring,
            outbox,
            given,
            announced,
            closed,
            ..
        } = &mut *out;

        let size = segment.segment.bytes();
        let bytes = announced.values().sum::<usize>().saturating_add(size);
        let has_enough = announced.len() >= MOST_ANNOUNCED || bytes > MOST_ANNOUNCED_BYTES;
        if closed.is_some() || !outbox.is_empty() || has_enough {
            return;
        }

        let record = segment.number.to_le_bytes();
        if self
            .try_send(ring, given, ANNOUNCED, &[&record], Some(segment))
            .is_none()
        {
            announced.insert(segment.number, size);
            drop(out);
            self.door.ring(&SystemFutex);
        }
    }

    /// Sends records from the outbox. Returns true if at least one was sent.
    pub(super) fn flush(&self) -> bool {
        if !self.is_waiting.load(Ordering::Acquire) {
            return false;
        }

        let mut out = self.outbound.lock();
        let Outbound {
            ring,
            outbox,
            given,
            obstacle,
            ..
        } = &mut *out;

        let mut any = false;
        while let Some(late) = outbox.front() {
            let segment = late.segment.as_ref();
            *obstacle = self.try_send(ring, given, late.kind, &[&late.bytes], segment);
            if obstacle.is_some() {
                break;
            }
            outbox.pop_front();
            any = true;
        }

        if outbox.is_empty() {
            self.is_waiting.store(false, Ordering::Release);
        }
        any
    }

    /// Sends a record and returns `None`. If it cannot be sent now, returns the reason.
    fn try_send(
        &self,
        ring: &mut Producer,
        given: &mut HashSet<u32>,
        kind: u32,
        parts: &[&[u8]],
        segment: Option<&NumberedSegment>,
    ) -> Option<Obstacle> {
        if !segment.is_none_or(|segment| self.give(given, segment)) {
            return Some(Obstacle::Socket);
        }

        // The consumer must know that its room is waited for, even if this process does not look
        // again.
        while !ring.push(kind, parts) {
            if ring.wants_room() {
                return Some(Obstacle::Ring);
            }
        }
        None
    }

    /// Returns true if the outbox must go on waiting. If it waits for the ring, the peer then rings
    /// this process's doorbell when the ring has space. A full socket is retried regularly.
    pub(super) fn waits_for_room(&self) -> bool {
        if !self.is_waiting.load(Ordering::Acquire) {
            return false;
        }
        let mut out = self.outbound.lock();
        match out.obstacle {
            Some(Obstacle::Socket) => true,
            _ => out.ring.wants_room(),
        }
    }

    /// Closes the sending half, for the reason `why`, and drops the records in the outbox.
    pub(super) fn close(&self, why: &TransportError) {
        let mut out = self.outbound.lock();
        out.closed.get_or_insert_with(|| why.clone());
        out.outbox.clear();
        self.is_waiting.store(false, Ordering::Release);
    }

    /// Gives the peer a segment through the socket, unless `given` contains it. Returns false if
    /// the socket has no space now.
    fn give(&self, given: &mut HashSet<u32>, segment: &NumberedSegment) -> bool {
        let NumberedSegment { number, segment } = segment;
        if given.contains(number) {
            return true;
        }

        let number_bytes = number.to_le_bytes();
        let bytes = (segment.bytes() as u64).to_le_bytes();
        let sent = match (
            segment.descriptor(),
            segment.device().and_then(|memory| memory.export()),
        ) {
            (Some(descriptor), _) => self
                .socket
                .send(&[&GIVE[..], &number_bytes, &bytes].concat(), &[descriptor]),
            (None, Some(words)) => {
                let owner = ForeignMemory::owner(segment)
                    .unwrap_or(self.own)
                    .0
                    .to_le_bytes();
                self.socket.send(
                    &[&GIVE_DEVICE[..], &number_bytes, &bytes, &owner, words].concat(),
                    &[],
                )
            }
            (None, None) => return false,
        };

        // The thread that watches the socket notices if it is broken.
        let sent = sent.unwrap_or(false);
        if sent {
            given.insert(*number);
        }
        sent
    }
}

impl Outbound {
    /// Removes freed segments, by their numbers. Returns the numbers of those that the peer was
    /// given.
    pub(super) fn retire(&mut self, numbers: &[u32]) -> Vec<u32> {
        self.announced.retain(|number, _| !numbers.contains(number));
        numbers
            .iter()
            .copied()
            .filter(|number| self.given.remove(number))
            .collect()
    }
}

/// The receiving half of the connection to a peer. Only the thread that reads the rings uses it.
pub(super) struct Inbound {
    pub(super) ring: Consumer,
    segments: HashMap<u32, GivenSegment>,
    /// Loans of device memory that has not been written yet, by loan number. The value is `None` if
    /// no buffer in this process waits for the loan.
    landing: HashMap<u64, Option<Arc<Landing>>>,
    /// The number of the last loan that was borrowed from the peer; 0 if there was none.
    pub(super) last_loan: u64,
    /// True once no more records are read from the peer.
    pub(super) has_ended: bool,
}

/// A segment that the peer has given this process.
enum GivenSegment {
    Host(HostGiven),
    Device(DeviceGiven),
}

/// The reason why a segment that a record refers to cannot be used.
pub(super) enum NoSegment {
    /// The peer sent an invalid packet, or this process lacks resources; the error tells which.
    Fault(io::Error),
    /// The segment is device memory that cannot be opened, with the reason.
    Closed(DeviceSegmentError),
}

impl Inbound {
    pub(super) fn new(ring: Consumer) -> Self {
        Self {
            ring,
            segments: HashMap::new(),
            landing: HashMap::new(),
            last_loan: 0,
            has_ended: false,
        }
    }

    /// Returns the segment `number`, which the peer must have given before. The segment is opened
    /// at its first use.
    pub(super) fn segment(
        &mut self,
        number: u32,
        peer: &ShmPeer,
        mappings: &Mappings,
        devices: &DeviceLoans,
    ) -> Result<Arc<Segment>, NoSegment> {
        loop {
            match self.segments.get_mut(&number) {
                Some(GivenSegment::Device(given)) => {
                    let opened = given.segment(number, &peer.returns, mappings, devices);
                    return opened.map_err(NoSegment::Closed);
                }
                Some(GivenSegment::Host(given)) => {
                    return given.segment(mappings).map_err(NoSegment::Fault);
                }
                None => {
                    self.hear_of_one(number, peer, mappings, true)
                        .map_err(NoSegment::Fault)?;
                }
            }
        }
    }

    /// Maps the segment `number`, which the peer has announced and must have given before. Returns
    /// the segment if it is new here and should be [populated](Segment::populate).
    pub(super) fn hear_of(
        &mut self,
        number: u32,
        peer: &ShmPeer,
        mappings: &Mappings,
    ) -> io::Result<Option<Arc<Segment>>> {
        if self.segments.contains_key(&number) {
            return Ok(None);
        }
        loop {
            self.hear_of_one(number, peer, mappings, false)?;
            match self.segments.get(&number) {
                Some(GivenSegment::Host(HostGiven::First(segment))) => {
                    return Ok(Some(segment.clone()));
                }
                Some(GivenSegment::Host(HostGiven::Again { .. }) | GivenSegment::Device(_)) => {
                    return Ok(None);
                }
                None => {}
            }
        }
    }

    /// Receives the next packet that gives a segment from the peer's socket, while searching for
    /// the segment `wanted`. Populates the segment if `is_needed` is true. Fails if no packet has
    /// arrived.
    fn hear_of_one(
        &mut self,
        wanted: u32,
        peer: &ShmPeer,
        mappings: &Mappings,
        is_needed: bool,
    ) -> io::Result<()> {
        let Some(packet) = peer.socket.receive()? else {
            return Err(io::Error::other(format!(
                "segment {wanted} was never given"
            )));
        };

        if packet.bytes.starts_with(&GIVE_DEVICE) {
            return self.hear_of_device(&packet.bytes, peer);
        }

        let descriptor = packet.descriptors.into_iter().next();
        let (Some(descriptor), Some(packet)) =
            (descriptor, packet.bytes.first_chunk::<GIVE_BYTES>())
        else {
            return Err(io::Error::other("a packet that gives no segment"));
        };
        if packet[..4] != GIVE {
            return Err(io::Error::other("a packet of another kind"));
        }

        let number = u32::from_le_bytes([packet[4], packet[5], packet[6], packet[7]]);
        let bytes = packet[8..]
            .iter()
            .rev()
            .fold(0, |sum: u64, byte| sum << 8 | u64::from(*byte));
        if self.segments.contains_key(&number) {
            return Err(io::Error::other(format!(
                "segment {number} was given before"
            )));
        }

        let given = mappings.given(descriptor, bytes)?;
        if let HostGiven::First(segment) = &given
            && is_needed
        {
            segment.populate();
        }
        self.segments.insert(number, GivenSegment::Host(given));
        Ok(())
    }

    /// Handles a packet in which the peer gives this process a segment of device memory.
    fn hear_of_device(&mut self, packet: &[u8], peer: &ShmPeer) -> io::Result<()> {
        let Some((fields, words)) = packet.split_first_chunk::<GIVE_DEVICE_BYTES>() else {
            return Err(io::Error::other(
                "a packet that gives no memory of a device",
            ));
        };

        if !peer.shares_devices() {
            return Err(io::Error::other(
                "a packet gives memory of a device, but device sharing was not agreed",
            ));
        }

        let word = |at: usize| {
            u32::from_le_bytes([fields[at], fields[at + 1], fields[at + 2], fields[at + 3]])
        };
        let number = word(4);
        let bytes = u64::from(word(8)) | u64::from(word(12)) << 32;
        let owner = ProcessId(word(16));
        if words.is_empty() || words.len() > MOST_WORDS || bytes == 0 {
            return Err(io::Error::other(
                "a packet that gives no memory of a device",
            ));
        }
        if self.segments.contains_key(&number) {
            return Err(io::Error::other(format!(
                "segment {number} was given before"
            )));
        }

        let given = DeviceGiven::new(words.to_vec(), bytes, owner);
        self.segments.insert(number, GivenSegment::Device(given));
        Ok(())
    }

    /// Returns true if loan `loan` is of device memory that has not been written yet.
    pub(super) fn is_landing(&self, loan: u64) -> bool {
        self.landing.contains_key(&loan)
    }

    /// Records a loan of device memory that is not written yet, with the fence that waits for it.
    pub(super) fn note_landing(&mut self, loan: u64, arriving: Option<Arc<Landing>>) {
        self.landing.insert(loan, arriving);
    }

    /// Handles the peer's report that a loan's memory is written, or that the write failed. Returns
    /// false if no such report was expected.
    pub(super) fn land(&mut self, loan: u64, failure: Option<String>) -> bool {
        let Some(arriving) = self.landing.remove(&loan) else {
            return false;
        };
        if let Some(arriving) = arriving {
            arriving.pass(failure);
        }
        true
    }

    /// Stops receiving, and drops the peer's segments. Borrowed memory stays mapped until it is
    /// returned. Returns the fences of loans that will never be written.
    pub(super) fn end(&mut self) -> Vec<Arc<Landing>> {
        self.has_ended = true;
        self.segments.clear();
        std::mem::take(&mut self.landing)
            .into_values()
            .flatten()
            .collect()
    }

    /// Drops the segments `numbers`, which the peer has freed. Borrowed memory stays mapped until
    /// it is returned.
    pub(super) fn retire(&mut self, numbers: &[u32], peer: &ShmPeer) {
        for number in numbers {
            if let Some(GivenSegment::Device(given)) = self.segments.remove(number) {
                given.retire(*number, &peer.returns);
            }
        }
    }
}

impl AsFd for ShmPeer {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
