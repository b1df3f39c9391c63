//! Takes the messages that have come, and borrows the memory of their payloads.

use std::sync::Arc;

use rustix::io::Errno;

use super::futex::SystemFutex;
use super::loans::BorrowedMemory;
use super::note::LoanId;
use super::peer::{Inbound, NoSegment, ShmPeer};
use super::record::{COPY, LATER, LoanRecord, MessageRecord, ToOwner, read};
use super::state::ShmState;
use crate::transport::{CopyOut, Fetch, FetchDone, Handler, Payload, TransportError};
use mpmd_memory::{Fence, Fences, Landing, OwnedBuffer, SharedBuffer};
use mpmd_proto::wire::{Header, MessageKind, ProcessId};

impl ShmState {
    /// Takes at most `most` records from a peer's ring, and passes their messages to the handler.
    pub(super) fn take(
        &self,
        from: ProcessId,
        inbound: &mut Inbound,
        peer: &ShmPeer,
        handler: &Arc<dyn Handler>,
        most: usize,
    ) {
        for _ in 0..most {
            if inbound.has_ended {
                return;
            }
            // Inline payloads are copied to their buffer here; other payloads are only named.
            let mut record = None;
            let popped = inbound
                .ring
                .pop(|kind, bytes| record = Some(self.understand(kind, bytes)));

            let result = match (popped, record) {
                (Err(corrupt), _) => Err(RecordFault::Theirs(corrupt.to_string())),
                (Ok(_), None) => return,
                (Ok(_), Some(Err(fault))) => Err(fault),
                (Ok(_), Some(Ok(event))) => self.act(event, from, inbound, peer, handler),
            };

            if inbound.ring.take_wanted() {
                peer.door.ring(&SystemFutex);
            }

            match result {
                Ok(()) => {}
                Err(RecordFault::Theirs(why)) => {
                    self.end_by_nonsense(why, from, inbound, peer, handler)
                }
                Err(RecordFault::Ours(why)) => {
                    let doing = format!("taking a message of process {from}");
                    self.end(
                        TransportError::Environment { doing, why },
                        from,
                        inbound,
                        peer,
                        handler,
                    );
                    peer.socket.close();
                }
            }
        }
    }

    /// Decodes a record, and copies an inline payload to a buffer of its own.
    fn understand(&self, kind: u32, bytes: &[u8]) -> Result<ReceivedRecord, RecordFault> {
        let record = read(kind, bytes).map_err(|error| RecordFault::Theirs(error.to_string()))?;
        Ok(match record {
            MessageRecord::Inline(header, []) => ReceivedRecord::Message(header, Payload::Empty),
            MessageRecord::Inline(header, bytes) => {
                let buffer = self.pool.allocate(bytes.len());
                let mut buffer = buffer.map_err(|error| RecordFault::Ours(error.to_string()))?;
                buffer.copy_from_slice(bytes);
                ReceivedRecord::Message(header, Payload::Inline(buffer.freeze()))
            }
            MessageRecord::Lent(header, lent) => ReceivedRecord::Lent(header, lent),
            MessageRecord::ToOwner(header, part) => ReceivedRecord::ToOwner(header, part),
            MessageRecord::Landed(loan, failure) => ReceivedRecord::Landed(loan, failure),
            MessageRecord::Broken(header, why) => ReceivedRecord::Broken(header, why),
            MessageRecord::Retired(numbers) => ReceivedRecord::Retired(numbers),
            MessageRecord::Announced(number) => ReceivedRecord::Announced(number),
            MessageRecord::Goodbye => ReceivedRecord::Goodbye,
        })
    }

    /// Handles a peer's record: delivers its message, or updates the state of the connection.
    fn act(
        &self,
        event: ReceivedRecord,
        from: ProcessId,
        inbound: &mut Inbound,
        peer: &ShmPeer,
        handler: &Arc<dyn Handler>,
    ) -> Result<(), RecordFault> {
        match event {
            ReceivedRecord::Message(header, payload) => handler.arrived(from, header, payload),
            ReceivedRecord::Lent(header, lent) => {
                let payload = self.borrow(from, &header, lent, inbound, peer)?;
                handler.arrived(from, header, payload);
            }
            ReceivedRecord::ToOwner(header, part) => {
                let payload = self.take_part(from, &header, part)?;
                handler.arrived(from, header, payload);
            }

            ReceivedRecord::Landed(loan, failure) => {
                if !inbound.land(loan, failure) {
                    return Err(RecordFault::Theirs(format!(
                        "loan {loan} is there, which was never on its way"
                    )));
                }
            }
            ReceivedRecord::Broken(header, why) => {
                handler.arrived(from, header, UnreadablePayload::failing(from, &header, why));
            }

            ReceivedRecord::Retired(numbers) => inbound.retire(&numbers, peer),
            ReceivedRecord::Announced(number) => {
                if let Some(segment) = inbound
                    .hear_of(number, peer, &self.mappings)
                    .map_err(RecordFault::of)?
                {
                    self.devices.reaper.later(move || segment.populate());
                }
            }

            ReceivedRecord::Goodbye => {
                let why = TransportError::PeerGone {
                    peer: from,
                    why: "it has left".to_owned(),
                };
                self.end(why, from, inbound, peer, handler);
            }
        }
        Ok(())
    }

    /// Returns a payload that is this process's own memory, sent back by a borrower. Makes no loan
    /// and maps nothing.
    fn take_part(
        &self,
        from: ProcessId,
        header: &Header,
        part: ToOwner,
    ) -> Result<Payload, RecordFault> {
        let loan = LoanId {
            lender: ProcessId(part.lender.get()),
            number: part.loan.get(),
        };
        let offset = part.offset.get();
        let bytes = part.bytes.get();

        let taken = self.ledger.lock().take_part(from, loan, offset, bytes);
        self.note_ended(taken.ended);
        let found = taken.part.ok_or_else(|| {
            let LoanId { lender, number } = loan;
            RecordFault::Theirs(format!(
                "it has no {bytes} bytes at {offset} by loan {number} of process {lender}"
            ))
        })?;

        if found.device().is_some() {
            check_device_kind(header)?;
        }
        Ok(Payload::Inline(found))
    }

    /// Borrows the memory that a message lends, and returns it as the payload. The memory belongs
    /// to the peer or to a process from which the peer has borrowed it.
    fn borrow(
        &self,
        from: ProcessId,
        header: &Header,
        lent: LoanRecord,
        inbound: &mut Inbound,
        peer: &ShmPeer,
    ) -> Result<Payload, RecordFault> {
        let number = lent.segment.get();
        let owner = ProcessId(lent.owner.get());
        let loan = lent.loan.get();
        let is_copied = lent.flags.get() & COPY != 0;
        let is_later = lent.flags.get() & LATER != 0;
        if is_later && inbound.is_landing(loan) {
            return Err(twice(loan));
        }

        let returns = match self.peers.get(owner.index()) {
            _ if owner == from => &peer.returns,
            Some(Some(owner)) => &owner.returns,
            _ => {
                return Err(RecordFault::Theirs(format!(
                    "it lends memory of process {owner}, which shares no memory with this process"
                )));
            }
        };

        let segment = match inbound.segment(number, peer, &self.mappings, &self.devices) {
            Ok(segment) => segment,
            Err(NoSegment::Fault(error)) => return Err(RecordFault::of(error)),
            Err(NoSegment::Closed(why)) => {
                if is_later {
                    inbound.note_landing(loan, None);
                }
                let loan = LoanId {
                    lender: from,
                    number: loan,
                };
                returns.give_back(loan, 0, is_copied);
                return Ok(UnreadablePayload::failing(from, header, why.to_string()));
            }
        };

        let is_device = segment.device().is_some();
        if is_later && !is_device {
            return Err(RecordFault::Theirs(
                "a loan of the host's memory that is not there yet".to_owned(),
            ));
        }
        if is_device {
            check_device_kind(header)?;
        }

        let borrowed = BorrowedMemory::new(segment, from, &lent, returns).ok_or_else(|| {
            let offset = lent.offset.get();
            let bytes = lent.bytes.get();
            RecordFault::Theirs(format!(
                "{bytes} bytes at {offset} of segment {number} are not there"
            ))
        })?;
        inbound.last_loan = inbound.last_loan.max(loan);

        if !is_device {
            let bytes = SharedBuffer::lent(Box::new(borrowed));
            return Ok(match is_copied {
                // The lender's memory is limited: it gets the loan back as soon as it is fetched.
                true => Payload::Waiting(Box::new(CopyOut(bytes))),
                false => Payload::Lent(bytes),
            });
        }

        // Device memory is lost with its process, and may not be valid yet.
        let life = borrowed.life();
        let landing = is_later.then(Arc::<Landing>::default);
        if let Some(landing) = &landing {
            inbound.note_landing(loan, Some(landing.clone()));
        }
        let landing = landing.map(|landing| landing as Arc<dyn Fence>);
        Ok(Payload::Lent(SharedBuffer::lent_later(
            Box::new(borrowed),
            Fences::of(life.into_iter().chain(landing)),
        )))
    }
}

/// The reason why a record could not be handled, by the process at fault: the peer or this process.
enum RecordFault {
    Theirs(String),
    Ours(String),
}

impl RecordFault {
    /// Converts an error. A lack of resources is this process's fault; every other error is the
    /// peer's.
    fn of(error: std::io::Error) -> Self {
        let lacking = [Errno::NOMEM, Errno::MFILE, Errno::NFILE].map(Errno::raw_os_error);
        if error
            .raw_os_error()
            .is_some_and(|code| lacking.contains(&code))
        {
            Self::Ours(error.to_string())
        } else {
            Self::Theirs(error.to_string())
        }
    }
}

fn twice(loan: u64) -> RecordFault {
    RecordFault::Theirs(format!("loan {loan} is on its way already"))
}

/// Checks the kind of a message with a payload in device memory.
fn check_device_kind(header: &Header) -> Result<(), RecordFault> {
    match header.kind {
        MessageKind::Data | MessageKind::Eager => Ok(()),
        kind => Err(RecordFault::Theirs(format!(
            "a message of kind {kind:?} in a device's memory"
        ))),
    }
}

/// A decoded record. An inline payload was copied out of the ring.
enum ReceivedRecord {
    Message(Header, Payload),
    Lent(Header, LoanRecord),
    ToOwner(Header, ToOwner),
    Landed(u64, Option<String>),
    Broken(Header, String),
    Retired(Vec<u32>),
    Announced(u32),
    Goodbye,
}

/// A payload whose fetch always fails.
struct UnreadablePayload {
    bytes: u64,
    why: TransportError,
}

impl UnreadablePayload {
    /// Returns a payload for a message from `from`. Fetching it fails with the reason `why`.
    fn failing(from: ProcessId, header: &Header, why: String) -> Payload {
        let doing = format!("taking memory of a device of process {from}");
        let why = TransportError::Environment { doing, why };
        Payload::Waiting(Box::new(Self {
            bytes: header.bytes,
            why,
        }))
    }
}

impl Fetch for UnreadablePayload {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fetch(self: Box<Self>, into: OwnedBuffer, then: FetchDone) {
        drop(into);
        then(Err(self.why));
    }
}
