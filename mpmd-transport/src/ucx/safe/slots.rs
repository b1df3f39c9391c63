//! The memory of operations under way: it stays where it is until UCX has said that it is done with
//! it.

use super::{EndpointId, HEADER_MAX};
use crate::memory::{OwnedBuffer, SharedBuffer};

/// Names an operation until its [`Event::Ended`](super::Event::Ended).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(in super::super) struct OpId(pub(super) usize);

impl OpId {
    /// The number as an index: small, and used again after the operation's end.
    pub(in super::super) fn index(self) -> usize {
        self.0
    }
}

/// What an operation reads from or writes into.
pub(in super::super) enum Held {
    Nothing,
    Sent(SharedBuffer),
    Fetched(OwnedBuffer),
}

/// An operation under way.
pub(super) struct Slot {
    pub(super) endpoint: EndpointId,
    pub(super) header: [u8; HEADER_MAX],
    pub(super) held: Held,
}

/// All operations under way, by number. A number is used again only after whoever asks for events
/// was told of its operation's end: between the two it still names that one.
#[derive(Default)]
pub(super) struct Slots {
    // Boxed: a header must not move when the list grows.
    #[allow(clippy::vec_box, reason = "UCX holds pointers into the slots")]
    slots: Vec<Box<Slot>>,
    in_use: Vec<bool>,
    free: Vec<usize>,
    /// Ended since the last [`Slots::recycle`].
    ended: Vec<usize>,
}

impl Slots {
    pub(super) fn insert(&mut self, endpoint: EndpointId, header: &[u8], held: Held) -> OpId {
        let number = match self.free.pop() {
            Some(number) => number,
            None => {
                self.slots.push(Box::new(Slot {
                    endpoint,
                    header: [0; HEADER_MAX],
                    held: Held::Nothing,
                }));
                self.in_use.push(false);
                self.slots.len() - 1
            }
        };
        let slot = &mut self.slots[number];
        slot.endpoint = endpoint;
        slot.header[..header.len()].copy_from_slice(header);
        slot.held = held;
        self.in_use[number] = true;
        OpId(number)
    }

    pub(super) fn get(&mut self, op: OpId) -> &mut Slot {
        &mut self.slots[op.0]
    }

    /// Everything that has not ended.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = (EndpointId, Held)> {
        let slots =
            std::mem::take(&mut self.slots).into_iter().zip(std::mem::take(&mut self.in_use));
        slots.filter_map(|(slot, in_use)| in_use.then_some((slot.endpoint, slot.held)))
    }

    /// The ends so far were told: their numbers are free.
    pub(super) fn recycle(&mut self) {
        self.free.append(&mut self.ended);
    }

    /// Ends the operation; `None` where there is none of that number.
    pub(super) fn remove(&mut self, number: usize) -> Option<(EndpointId, Held)> {
        if !self.in_use.get_mut(number).is_some_and(std::mem::take) {
            return None;
        }
        self.ended.push(number);
        let slot = &mut self.slots[number];
        Some((slot.endpoint, std::mem::replace(&mut slot.held, Held::Nothing)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_stay_in_place_while_others_come_and_go() {
        let mut slots = Slots::default();
        let first = slots.insert(EndpointId(0), &[7; 8], Held::Nothing);
        let place = slots.get(first).header.as_ptr();
        let others: Vec<_> =
            (0..100).map(|_| slots.insert(EndpointId(1), &[1; 8], Held::Nothing)).collect();
        assert_eq!(slots.get(first).header.as_ptr(), place);
        assert_eq!(slots.get(first).header[..8], [7; 8]);
        for other in &others {
            assert_eq!(slots.remove(other.0).map(|(endpoint, _)| endpoint), Some(EndpointId(1)));
            assert!(slots.remove(other.0).is_none(), "an operation ends once");
        }
        let early = slots.insert(EndpointId(2), &[2; 8], Held::Nothing);
        assert!(
            !others.contains(&early) && early != first,
            "nobody was told of the others' ends yet"
        );
        slots.recycle();
        let again = slots.insert(EndpointId(2), &[2; 8], Held::Nothing);
        assert!(others.contains(&again));
    }
}
