//! Posts messages, and lends the memory of their payloads.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use zerocopy::IntoBytes;

use super::futex::SystemFutex;
use super::loans::BorrowedMemory;
use super::note::LoanId;
use super::peer::{NumberedSegment, Outbound, ShmPeer};
use super::record::{COPY, INLINE, LARGEST_INLINE, LATER, LENT, LoanRecord, TO_OWNER, ToOwner};
use super::state::{FinishedTicket, ShmState};
use crate::transport::{Ticket, TransportError};
use mpmd_memory::{Segment, SharedBuffer};
use mpmd_proto::wire::{Header, ProcessId};

/// Smallest size in bytes of a segment that is announced to peers before it is used. A smaller
/// segment is mapped quickly.
const WORTH_ANNOUNCING: usize = 1 << 20;

/// True if a message's ticket ends only when its payload is returned; false if the ticket can end
/// now.
pub(super) struct IsLent(pub(super) bool);

/// A message whose payload is lent to the receiver instead of being copied.
pub(super) struct LentMessage<'a> {
    pub(super) to: ProcessId,
    pub(super) header: &'a Header,
    pub(super) ticket: Ticket,
    /// True if the payload is device memory that may still be written by unfinished device work.
    pub(super) is_later: bool,
}

/// The owner of a lent payload, with the loan's number.
#[derive(Clone, Copy)]
pub(super) enum Lending {
    /// This process owns the payload. The value is the number of its loan to the receiver.
    Own(u64),
    /// Another process owns the payload, and this process lends it on. The value is the number of
    /// the new loan to the receiver. The owner waits for its return.
    Borrowed(u64),
    /// The payload is the receiver's own memory.
    ToOwner,
}

impl Lending {
    /// Returns whether the message's ticket ends only when the receiver returns the payload. This
    /// is so only for memory that this process owns. Otherwise the ticket can end now.
    pub(super) fn is_lent(self) -> IsLent {
        IsLent(matches!(self, Self::Own(_)))
    }
}

impl ShmState {
    /// Sends a message. Reports the end of its ticket, unless the ticket ends when the payload
    /// returns.
    pub(super) fn post(
        &self,
        to: ProcessId,
        header: &Header,
        payload: Option<SharedBuffer>,
        ticket: Ticket,
    ) {
        match self.send(to, header, payload, ticket) {
            Ok(IsLent(true)) => {}
            Ok(IsLent(false)) => self.note_done([FinishedTicket::new(ticket, Ok(()))]),
            Err(error) => self.note_done([FinishedTicket::new(ticket, Err(error))]),
        }
    }

    /// Sends a message with its payload copied after the header, or lent.
    fn send(
        &self,
        to: ProcessId,
        header: &Header,
        payload: Option<SharedBuffer>,
        ticket: Ticket,
    ) -> Result<IsLent, TransportError> {
        let Some(Some(peer)) = self.peers.get(to.index()) else {
            return Err(gone(to, "it shares no memory"));
        };
        if self.is_closing() {
            return Err(TransportError::Closed);
        }
        if payload.is_some() && !peer.gets_payloads.load(Ordering::Relaxed) {
            peer.gets_payloads.store(true, Ordering::Relaxed);
        }

        let is_lent = match payload {
            Some(bytes) if bytes.device().is_some() => {
                return self.lend_device(to, peer, header, bytes, ticket);
            }
            Some(bytes) if bytes.len() > LARGEST_INLINE => self.lend_host(
                peer,
                &LentMessage {
                    to,
                    header,
                    ticket,
                    is_later: false,
                },
                bytes,
            )?,
            payload => {
                let bytes = payload.as_deref().unwrap_or_default();
                peer.send(
                    &mut *peer.open()?,
                    INLINE,
                    &[&header.encode()[..], bytes],
                    None,
                );
                IsLent(false)
            }
        };

        peer.door.ring(&SystemFutex);
        Ok(is_lent)
    }

    /// Lends a peer bytes in host memory. Lends a copy if the bytes are not in a segment.
    fn lend_host(
        &self,
        peer: &ShmPeer,
        message: &LentMessage<'_>,
        bytes: SharedBuffer,
    ) -> Result<IsLent, TransportError> {
        let lent = self.lend(peer, &mut *peer.open()?, message, bytes);
        let lent = match lent {
            Ok(lent) => Ok(lent),
            // Memory that cannot be lent where it is can be lent as a copy.
            Err(bytes) => {
                let copy = self.lendable(&bytes)?;
                self.lend(peer, &mut *peer.open()?, message, copy)
            }
        };

        lent.map(Lending::is_lent).map_err(|_| {
            gone(
                message.to,
                "memory that was made for lending cannot be lent",
            )
        })
    }

    /// Sends a message without copying its payload. The payload is this process's memory, borrowed
    /// memory, or the receiver's own. Does not ring the peer's doorbell. Returns the payload as the
    /// error if it is in no segment, or if its owner cannot be told now.
    pub(super) fn lend(
        &self,
        peer: &ShmPeer,
        out: &mut Outbound,
        message: &LentMessage<'_>,
        bytes: SharedBuffer,
    ) -> Result<Lending, SharedBuffer> {
        let LentMessage {
            to,
            header,
            ticket,
            is_later,
        } = message;
        let Some(place) = bytes.place() else {
            return Err(bytes);
        };

        let borrowed = match bytes.loan() {
            None => None,
            Some(loan) => match self.borrowed(loan) {
                None => return Err(bytes),
                borrowed => borrowed,
            },
        };

        let offset = place.offset as u64;
        let size = bytes.len() as u64;
        if let Some(borrowed) = borrowed.filter(|borrowed| borrowed.owner() == *to) {
            send_to_owner(peer, out, header, borrowed, offset..offset + size);
            return Ok(Lending::ToOwner);
        }

        let number = out.next_loan;
        let range = place.offset..place.offset + bytes.len();
        // The owner is told before the borrower can give the memory back.
        if borrowed.is_some_and(|borrowed| !borrowed.pass_on(*to, number, &range)) {
            return Err(bytes);
        }
        out.next_loan += 1;

        let owner = borrowed.map(BorrowedMemory::owner);
        let is_copied = bytes.is_limited();
        let segment = NumberedSegment {
            number: place.segment.number(&self.arena),
            segment: place.segment,
        };
        let lent = LoanRecord {
            loan: number.into(),
            offset: offset.into(),
            bytes: size.into(),
            segment: segment.number.into(),
            flags: (if is_copied { COPY } else { 0 } | if *is_later { LATER } else { 0 }).into(),
            owner: owner.unwrap_or(self.process).0.into(),
        };

        let is_due = owner.is_none() && {
            let loan = LoanId {
                lender: self.process,
                number,
            };
            self.ledger
                .lock()
                .lend(*to, loan, bytes, *ticket, is_copied)
        };

        let parts = [&header.encode()[..], lent.as_bytes()];
        peer.send(out, LENT, &parts, Some(&segment));

        if is_due {
            self.reclaim();
        }
        Ok(owner.map_or(Lending::Own(number), |_| Lending::Borrowed(number)))
    }

    /// Announces a new segment to all peers that have received payloads, so that they can map it
    /// before the first message that lends memory in it. Does not wait.
    pub(super) fn announce(&self, segment: &Arc<Segment>) {
        if segment.bytes() < WORTH_ANNOUNCING || self.is_closing() {
            return;
        }
        let expected = |peer: &&ShmPeer| peer.gets_payloads.load(Ordering::Relaxed);
        for peer in self.peers.iter().flatten().filter(expected) {
            peer.announce(&NumberedSegment {
                number: segment.number(&self.arena),
                segment: segment.clone(),
            });
        }
    }

    /// Returns `loan` as borrowed memory if this process borrowed it from a peer of this transport.
    pub(super) fn borrowed<'a>(
        &self,
        loan: &'a dyn mpmd_memory::Loan,
    ) -> Option<&'a BorrowedMemory> {
        let borrowed = (loan as &dyn Any).downcast_ref::<BorrowedMemory>()?;
        let owner = self.peers.get(borrowed.owner().index())?.as_ref()?;
        borrowed.goes_back_by(&owner.returns).then_some(borrowed)
    }

    /// Copies bytes that cannot be lent, such as those of a `Vec`, to a buffer of the transport's
    /// pool.
    fn lendable(&self, bytes: &[u8]) -> Result<SharedBuffer, TransportError> {
        let mut copy =
            self.pool
                .allocate(bytes.len())
                .map_err(|error| TransportError::Environment {
                    doing: format!("lending {} bytes", bytes.len()),
                    why: error.to_string(),
                })?;
        copy.copy_from_slice(bytes);
        Ok(copy.freeze())
    }
}

/// Sends a message whose payload is the receiver's own memory, at `range` of its segment.
fn send_to_owner(
    peer: &ShmPeer,
    out: &mut Outbound,
    header: &Header,
    borrowed: &BorrowedMemory,
    range: Range<u64>,
) {
    let LoanId { lender, number } = borrowed.loan();
    borrowed.count_to_owner();
    let part = ToOwner {
        loan: number.into(),
        offset: range.start.into(),
        bytes: (range.end - range.start).into(),
        lender: lender.0.into(),
    };
    peer.send(
        out,
        TO_OWNER,
        &[&header.encode()[..], part.as_bytes()],
        None,
    );
}

fn gone(peer: ProcessId, why: &str) -> TransportError {
    TransportError::PeerGone {
        peer,
        why: why.to_owned(),
    }
}
