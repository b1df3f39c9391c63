//! Lends the memory of devices: holds messages back until it is written, and reports later if it is
//! valid.

use super::devices::HeldMessage;
use super::futex::SystemFutex;
use super::lending::{IsLent, Lending, LentMessage};
use super::peer::ShmPeer;
use super::record::{BROKEN, LANDED};
use super::state::ShmState;
use crate::transport::{Ticket, TransportError};
use mpmd_memory::{Fences, SharedBuffer};
use mpmd_proto::wire::{Header, ProcessId};

/// Largest length in bytes of an error text that is sent to a peer.
const MOST_TEXT: usize = 400;

impl ShmState {
    /// Lends a peer bytes in the memory of a device of this process, or of another process's device
    /// that is open here. Keeps the message if it cannot be sent yet. Fails if the two processes do
    /// not share device memory.
    pub(super) fn lend_device(
        &self,
        to: ProcessId,
        peer: &ShmPeer,
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
            self.hold_back(
                HeldMessage {
                    to,
                    header: *header,
                    bytes,
                    ticket,
                },
                Some(ready),
            );
            return Ok(IsLent(true));
        }

        let made = bytes.clone();
        let is_later = !is_owner && !made.is_made();
        let message = LentMessage {
            to,
            header,
            ticket,
            is_later,
        };
        let lent = self.lend(peer, &mut *peer.open()?, &message, bytes);
        let lent = match lent {
            Ok(lent) => lent,
            // The owner cannot be told now that another process reads it, so it is sent later.
            Err(bytes) => {
                self.hold_back(
                    HeldMessage {
                        to,
                        header: *header,
                        bytes,
                        ticket,
                    },
                    None,
                );
                return Ok(IsLent(true));
            }
        };

        peer.door.ring(&SystemFutex);
        if let Lending::Own(loan) | Lending::Borrowed(loan) = lent
            && is_later
        {
            let shared = self.this.clone();
            made.on_made(Box::new(move |failure| {
                if let Some(shared) = shared.upgrade() {
                    shared.say_landed(to, loan, failure);
                }
            }));
        }
        Ok(lent.is_lent())
    }

    /// Keeps a message until the fences `until` have passed. Without fences, the message is retried
    /// regularly.
    fn hold_back(&self, held: HeldMessage, until: Option<Fences>) {
        self.devices.held.lock().push(held);
        let Some(until) = until else { return };

        let shared = self.this.clone();
        until.on_over(Box::new(move || {
            if let Some(shared) = shared.upgrade() {
                shared.post_held();
            }
        }));
    }

    /// Sends the kept messages whose fences have passed.
    pub(super) fn post_held(&self) {
        let is_due = |held: &mut HeldMessage| held.bytes.ready().are_over();
        let due: Vec<_> = self.devices.held.lock().extract_if(.., is_due).collect();
        for HeldMessage {
            to,
            header,
            bytes,
            ticket,
        } in due
        {
            self.post(to, &header, Some(bytes), ticket);
        }
    }

    /// Tells the borrower of loan `loan` that its memory has been written, or why the write failed.
    fn say_landed(&self, to: ProcessId, loan: u64, failure: Option<String>) {
        let Some(Some(peer)) = self.peers.get(to.index()) else {
            return;
        };

        let mut out = peer.outbound.lock();
        if out.closed.is_none() {
            let text = cut(failure.as_deref().unwrap_or_default());
            peer.send(
                &mut out,
                LANDED,
                &[&loan.to_le_bytes(), text.as_bytes()],
                None,
            );
        }
        drop(out);
        peer.door.ring(&SystemFutex);
    }

    /// Tells a peer that a message's payload will never arrive, and why. The peer then stops
    /// waiting.
    fn break_off(&self, peer: &ShmPeer, header: &Header, why: &str) {
        let mut out = peer.outbound.lock();
        if out.closed.is_none() {
            peer.send(
                &mut out,
                BROKEN,
                &[&header.encode(), cut(why).as_bytes()],
                None,
            );
        }
        drop(out);
        peer.door.ring(&SystemFutex);
    }
}

/// Cuts a text to at most [`MOST_TEXT`] bytes, without splitting a character.
fn cut(text: &str) -> &str {
    let end = (0..=text.len().min(MOST_TEXT))
        .rev()
        .find(|end| text.is_char_boundary(*end));
    &text[..end.unwrap_or(0)]
}
