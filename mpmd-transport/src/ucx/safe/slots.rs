//! The memory of operations in flight. It does not move until UCX has reported the operation's end.

use super::{EndpointId, HEADER_MAX};
use mpmd_memory::{OwnedBuffer, SharedBuffer};

/// Identifies an operation of a worker until its [`WorkerEvent::Ended`](super::WorkerEvent::Ended).
#[derive(Clone, Copy, Debug, Eq, Hash, PartialEq)]
pub(in super::super) struct OpId(pub(super) usize);

impl OpId {
    /// Returns the id as a small index. It is reused after the operation's end.
    pub(in super::super) fn index(self) -> usize {
        self.0
    }
}

/// The buffer that an operation reads from or writes into.
pub(in super::super) enum OperationMemory {
    Nothing,
    Sent(SharedBuffer),
    Fetched(OwnedBuffer),
}

/// The endpoint and the memory of an operation.
pub(super) struct OperationSlot {
    pub(super) endpoint: EndpointId,
    pub(super) header: [u8; HEADER_MAX],
    /// Number of bytes of the header in `header`.
    pub(super) header_bytes: usize,
    pub(super) held: OperationMemory,
    /// True while UCX may access the memory.
    pub(super) under_way: bool,
}

/// The memory of an operation that has ended or was cut off, and the endpoint that it used.
pub(super) struct EndedSlot {
    pub(super) endpoint: EndpointId,
    pub(super) held: OperationMemory,
}

/// All operations of a worker, by id. An id is reused only after the caller has been told that its
/// operation has ended.
#[derive(Default)]
pub(super) struct OperationSlots {
    // Boxed: a header must not move when the vector grows.
    #[allow(clippy::vec_box, reason = "UCX holds pointers into the slots")]
    slots: Vec<Box<OperationSlot>>,
    in_use: Vec<bool>,
    free: Vec<usize>,
    /// Ids of operations that have ended since the last [`OperationSlots::recycle`].
    ended: Vec<usize>,
}

impl OperationSlots {
    /// Stores an operation's header and memory, and returns its id.
    pub(super) fn insert(
        &mut self,
        endpoint: EndpointId,
        header: &[u8],
        held: OperationMemory,
    ) -> OpId {
        let number = match self.free.pop() {
            Some(number) => number,
            None => {
                self.slots.push(Box::new(OperationSlot {
                    endpoint,
                    header: [0; HEADER_MAX],
                    header_bytes: 0,
                    held: OperationMemory::Nothing,
                    under_way: false,
                }));
                self.in_use.push(false);
                self.slots.len() - 1
            }
        };

        let slot = &mut self.slots[number];
        slot.endpoint = endpoint;
        slot.header[..header.len()].copy_from_slice(header);
        slot.header_bytes = header.len();
        slot.under_way = false;
        slot.held = held;
        self.in_use[number] = true;
        OpId(number)
    }

    pub(super) fn get(&mut self, op: OpId) -> &mut OperationSlot {
        &mut self.slots[op.0]
    }

    /// Removes all operations that have not ended, and returns their memory.
    pub(super) fn drain(&mut self) -> impl Iterator<Item = EndedSlot> {
        let slots = std::mem::take(&mut self.slots)
            .into_iter()
            .zip(std::mem::take(&mut self.in_use));
        slots.filter_map(|(slot, in_use)| {
            in_use.then_some(EndedSlot {
                endpoint: slot.endpoint,
                held: slot.held,
            })
        })
    }

    /// Removes an operation that is not in progress, and returns its memory. The id can be reused
    /// at once.
    ///
    /// # Panics
    ///
    /// If the operation is in progress, or has ended.
    pub(super) fn take_back(&mut self, op: OpId) -> OperationMemory {
        let is_at_rest = self.in_use[op.0] && !self.slots[op.0].under_way;
        assert!(is_at_rest, "UCX uses the memory of operation {}", op.0);
        self.in_use[op.0] = false;
        self.free.push(op.0);
        std::mem::replace(&mut self.slots[op.0].held, OperationMemory::Nothing)
    }

    /// Frees the ids of operations whose ends the caller has been told.
    pub(super) fn recycle(&mut self) {
        self.free.append(&mut self.ended);
    }

    /// Removes the operation `number`, of which UCX has reported the end. Returns its endpoint and
    /// its memory, or `None` if there is no such operation.
    pub(super) fn remove(&mut self, number: usize) -> Option<EndedSlot> {
        if !self.in_use.get_mut(number).is_some_and(std::mem::take) {
            return None;
        }
        self.ended.push(number);
        let slot = &mut self.slots[number];
        Some(EndedSlot {
            endpoint: slot.endpoint,
            held: std::mem::replace(&mut slot.held, OperationMemory::Nothing),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_do_not_move_and_ids_are_reused_late() {
        let mut slots = OperationSlots::default();
        let first = slots.insert(EndpointId(0), &[7; 8], OperationMemory::Nothing);
        let place = slots.get(first).header.as_ptr();
        let others: Vec<_> = (0..100)
            .map(|_| slots.insert(EndpointId(1), &[1; 8], OperationMemory::Nothing))
            .collect();
        assert_eq!(slots.get(first).header.as_ptr(), place);
        assert_eq!(slots.get(first).header[..8], [7; 8]);
        for other in &others {
            assert_eq!(
                slots.remove(other.0).map(|ended| ended.endpoint),
                Some(EndpointId(1))
            );
            assert!(slots.remove(other.0).is_none(), "an operation ends once");
        }
        let early = slots.insert(EndpointId(2), &[2; 8], OperationMemory::Nothing);
        assert!(
            !others.contains(&early) && early != first,
            "nobody was told of the others' ends yet"
        );
        slots.recycle();
        let again = slots.insert(EndpointId(2), &[2; 8], OperationMemory::Nothing);
        assert!(others.contains(&again));
        let held = slots.insert(EndpointId(2), &[], OperationMemory::Sent(vec![7].into()));
        assert!(matches!(slots.take_back(held), OperationMemory::Sent(bytes) if bytes[..] == [7]));
        assert_eq!(
            slots.insert(EndpointId(2), &[], OperationMemory::Nothing),
            held,
            "it is free at once"
        );
    }

    #[test]
    #[should_panic = "UCX uses the memory of operation 0"]
    fn operation_under_way_is_not_taken_back() {
        let mut slots = OperationSlots::default();
        let op = slots.insert(EndpointId(0), &[], OperationMemory::Sent(vec![7].into()));
        slots.get(op).under_way = true;
        slots.take_back(op);
    }
}
