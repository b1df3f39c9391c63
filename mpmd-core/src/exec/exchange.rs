//! The messages of collectives: between devices, wherever they are.
//!
//! A collective is a few [rounds](Round); in each of them devices of a [`Group`] give bytes to
//! others, by a [`Flow`] that all of them know. What a device gives is a piece of the kernel's
//! operation, numbered by the collective's index, the round and the devices. Between devices of one
//! process it goes through the mailbox, between processes through the router. Where several devices
//! of a process get the same bytes they cross to it once: the first that wants them asks the
//! router, the others find them in the mailbox.

use std::sync::Arc;

use mpmd_ids::ProcessId;
use mpmd_transport::SharedBuffer;
use mpmd_transport::router::{Failure, FailureKind};

use super::mailbox::Key;
use super::slot::{Outcome, Slot};
use super::{OpGuard, Outgoing, Runtime, Waiter};
use mpmd_layout::topology::DeviceId;

/// Set in the piece numbers of collectives, never in those of transfers.
const COLLECTIVE: u64 = 1 << 63;

/// Number of bits that a piece number has for the place of a device in its mesh.
const DEVICE_BITS: u32 = 22;

/// Most devices of a mesh with collectives: as many places as a piece number can tell apart.
pub(crate) const MOST_DEVICES: usize = 1 << DEVICE_BITS;

/// A collective has three rounds at most.
const ROUND_BITS: u32 = 2;

/// A kernel has at most as many collectives as a piece number can tell apart.
pub(crate) const MOST_COLLECTIVES: usize = 1 << (63 - ROUND_BITS - 2 * DEVICE_BITS);

/// The devices that a collective spans, seen from one of them.
#[derive(Debug)]
pub(crate) struct Group {
    /// In the axis' order.
    pub(crate) devices: Vec<DeviceId>,
    /// Their places in the kernel's mesh, which are below [`MOST_DEVICES`] as the devices' own
    /// numbers may not be.
    pub(crate) places: Vec<usize>,
    /// Their processes.
    pub(crate) processes: Vec<ProcessId>,
    /// The place among them of the one that sees it so.
    pub(crate) rank: usize,
    /// Whether they work together by NCCL: then the first round is what they agree in, and the
    /// others are of the host's values alone.
    pub(crate) joined: bool,
    /// Bytes of the longest message that one device gives to another.
    pub(crate) most: u64,
    /// What goes where, round by round; none in a group of one.
    pub(crate) rounds: Vec<Flow>,
}

/// What goes from which device to which in one round of a collective. Devices are ranks of the
/// group.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Flow {
    pub(crate) pattern: Pattern,
    /// Whether a device gives the same bytes to all whom it gives to.
    pub(crate) shared: bool,
}

/// Who gives to whom; nobody to itself.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Pattern {
    /// Each device to each other.
    Everyone,
    /// This one to each other.
    From(usize),
    /// Each device to each other but this one.
    ButTo(usize),
    /// From the first to the second.
    Pairs(Vec<(usize, usize)>),
}

impl Flow {
    pub(crate) fn goes(&self, from: usize, to: usize) -> bool {
        from != to
            && match &self.pattern {
                Pattern::Everyone => true,
                Pattern::From(root) => from == *root,
                Pattern::ButTo(root) => to != *root,
                Pattern::Pairs(pairs) => pairs.contains(&(from, to)),
            }
    }
}

/// One round of one collective of a running kernel.
pub(crate) struct Round<'a> {
    pub(crate) op: u64,
    /// The collective's place among those that the signature declares.
    pub(crate) index: usize,
    /// The round's place among those of the collective.
    pub(crate) round: usize,
    pub(crate) group: &'a Group,
}

/// A message that a round has for or from this device.
struct Message {
    key: Key,
    /// The other device's rank; for shared bytes one of several.
    rank: usize,
    /// The other device's process.
    process: ProcessId,
    /// How many devices of the receiving process take it.
    takers: usize,
}

impl Round<'_> {
    /// What this device gives, one message for each that leaves it.
    fn outgoing(&self) -> Vec<Message> {
        let me = self.group.rank;
        let mut messages: Vec<Message> = Vec::new();
        for to in self.receivers(me) {
            let process = self.group.processes[to];
            let mut before = messages.iter_mut().filter(|_| self.flow().shared);
            match before.find(|message| message.process == process) {
                Some(message) => message.takers += 1,
                None => {
                    messages.push(Message { key: self.key(me, to), rank: to, process, takers: 1 })
                }
            }
        }
        messages
    }

    /// What this device gets, in the order of the givers.
    fn incoming(&self) -> impl Iterator<Item = Message> {
        let me = self.group.rank;
        (0..self.group.devices.len()).filter(move |from| self.flow().goes(*from, me)).map(
            move |from| {
                let here = |to: &usize| self.group.processes[*to] == self.group.processes[me];
                let takers =
                    if self.flow().shared { self.receivers(from).filter(here).count() } else { 1 };
                Message {
                    key: self.key(from, me),
                    rank: from,
                    process: self.group.processes[from],
                    takers,
                }
            },
        )
    }

    fn receivers(&self, from: usize) -> impl Iterator<Item = usize> {
        (0..self.group.devices.len()).filter(move |to| self.flow().goes(from, *to))
    }

    fn flow(&self) -> &Flow {
        &self.group.rounds[self.round]
    }

    /// A message for several devices bears the place of its sender, which sends none to itself.
    fn key(&self, from: usize, to: usize) -> Key {
        let to = if self.flow().shared { from } else { to };
        let [from, to] = [from, to].map(|rank| self.group.places[rank] as u64);
        let step = (self.index as u64) << ROUND_BITS | self.round as u64;
        (self.op, COLLECTIVE | step << (2 * DEVICE_BITS) | from << DEVICE_BITS | to)
    }
}

impl Runtime {
    /// Drops what devices gave to a call that has ended on every device here, and nobody took.
    pub(crate) fn forget(self: &Arc<Self>, op: u64) {
        self.mailbox.forget(op);
        self.with_router(|router| router.forget(op));
    }
}

/// One kernel call's access to the other devices of its mesh.
pub(crate) struct Exchange {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) guard: OpGuard,
}

impl Exchange {
    /// A copy of `bytes` that may leave the kernel.
    pub(crate) fn copy_in(&self, bytes: &[u8]) -> Outcome {
        let mut buffer = self.runtime.staging.allocate(bytes.len()).map_err(|error| {
            Arc::new(Failure::new(FailureKind::Memory, self.runtime.me, 0, error.to_string()))
        })?;
        buffer.copy_from_slice(bytes);
        Ok(buffer.freeze())
    }

    /// Gives to every device that this one has something for: `bytes(rank)`. Never blocks.
    pub(crate) fn give(&self, round: &Round<'_>, bytes: impl Fn(usize) -> SharedBuffer) {
        for message in round.outgoing() {
            let buffer = bytes(message.rank);
            if message.process == self.runtime.me {
                self.runtime.mailbox.post(message.key, message.takers, Ok(buffer));
            } else {
                let size = buffer.len() as u64;
                let outgoing = Outgoing { buffer, bytes: size, guard: self.guard.clone() };
                // Announced: a kernel that calls with another length on another device must get an
                // error.
                let (hash, runtime) = (self.guard.hash(), &self.runtime);
                runtime.with_router(|router| {
                    router.announce(message.process, message.key, hash, size, outgoing);
                });
            }
        }
    }

    /// Tells every device that this one owes something that it will not come.
    pub(crate) fn poison(&self, round: &Round<'_>, failure: &Arc<Failure>) {
        for message in round.outgoing() {
            if message.process == self.runtime.me {
                self.runtime.mailbox.post(message.key, message.takers, Err(failure.clone()));
            } else {
                self.runtime
                    .with_router(|router| router.poison(message.process, message.key, failure));
            }
        }
    }

    /// Has what the others give to this device in a round that it has left taken all the same, so
    /// that no process waits to send it.
    pub(crate) fn decline(&self, round: &Round<'_>) {
        for message in round.incoming() {
            if message.process == self.runtime.me {
                // It waits for nobody; this device's share in it goes.
                drop(self.runtime.mailbox.take(message.key, message.takers));
            } else if message.takers == 1 {
                let waiter = Waiter::Nobody(self.guard.clone());
                let hash = self.guard.hash();
                self.runtime.with_router(|router| {
                    router.decline(message.process, message.key, hash, waiter, self.runtime.now());
                });
            } else if let Some(slot) = self.ask(round, &message) {
                // Other devices here may want it, or may not: until it has come the operation goes
                // on.
                let guard = self.guard.clone();
                slot.on_end(move |_| drop(guard));
            }
        }
    }

    /// What each device has for this one, by rank, as far as there is something; blocks until all
    /// is here.
    ///
    /// `likely(rank)` bytes are expected; what comes may be longer or shorter.
    pub(crate) fn take(
        &self,
        round: &Round<'_>,
        likely: impl Fn(usize) -> usize,
    ) -> Result<Vec<Option<SharedBuffer>>, Arc<Failure>> {
        let slots: Vec<(usize, Slot)> = round
            .incoming()
            .map(|message| {
                let slot = if message.process == self.runtime.me {
                    self.runtime.mailbox.take(message.key, message.takers)
                } else {
                    self.want(round, &message, likely(message.rank) as u64)
                };
                (message.rank, slot)
            })
            .collect();
        // Ends: every wait is for a kernel of a lower place in some device's queue, for this very
        // operation on another device, or for a peer that the router watches. All are waited for
        // before the first failure is told: what this device was to take, it has taken.
        let waits = &self.runtime.waits;
        let outcomes: Vec<(usize, Outcome)> = slots
            .into_iter()
            .map(|(rank, slot)| (rank, waits.wait(&slot, None).expect("no deadline was set")))
            .collect();
        let mut parts = vec![None; round.group.devices.len()];
        for (rank, outcome) in outcomes {
            parts[rank] = Some(outcome?);
        }
        Ok(parts)
    }

    /// The slot of a message from another process; it is expected from the router where nobody does
    /// yet.
    fn want(&self, round: &Round<'_>, message: &Message, likely: u64) -> Slot {
        let (slot, promise) = if message.takers == 1 {
            let (promise, slot) = Slot::new();
            (slot, Some(promise))
        } else {
            self.runtime.mailbox.take_from_afar(message.key, message.takers)
        };
        if let Some(promise) = promise {
            self.expect(round, message, likely, promise);
        }
        slot
    }

    /// As [`want`](Self::want), for a device that has no use for it; `None` where somebody has
    /// asked.
    fn ask(&self, round: &Round<'_>, message: &Message) -> Option<Slot> {
        let (slot, promise) = self.runtime.mailbox.take_from_afar(message.key, message.takers);
        self.expect(round, message, u64::MAX, promise?);
        Some(slot)
    }

    fn expect(&self, round: &Round<'_>, message: &Message, likely: u64, promise: super::Promise) {
        let (op, from, sizes) = (round.op, message.process, (likely, round.group.most));
        let waiter = Waiter::Bytes { promise, from, op, piece: message.key.1 };
        let (hash, now) = (self.guard.hash(), self.runtime.now());
        self.runtime.with_router(|router| {
            router.expect_any_size(from, message.key, hash, sizes, waiter, now);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn group(rank: usize, processes: &[u32], flow: Flow) -> Group {
        let processes: Vec<ProcessId> = processes.iter().copied().map(ProcessId).collect();
        let places: Vec<usize> = (0..processes.len()).collect();
        let devices = places.iter().map(|place| DeviceId(*place as u32)).collect();
        Group { devices, places, processes, rank, joined: false, most: 0, rounds: vec![flow] }
    }

    /// What rank `rank` sends, as `(first taker, process, takers)`, and gets, as `(giver, takers)`.
    fn messages(rank: usize, processes: &[u32], flow: &Flow) -> (Vec<[usize; 3]>, Vec<[usize; 2]>) {
        let group = group(rank, processes, flow.clone());
        let round = Round { op: 1, index: 0, round: 0, group: &group };
        let outgoing =
            round.outgoing().iter().map(|m| [m.rank, m.process.index(), m.takers]).collect();
        (outgoing, round.incoming().map(|m| [m.rank, m.takers]).collect())
    }

    #[test]
    fn shared_bytes_cross_once_to_each_process_and_others_once_to_each_device() {
        let shared = Flow { pattern: Pattern::Everyone, shared: true };
        let (sends, gets) = messages(1, &[0, 0, 1, 1], &shared);
        assert_eq!(sends, [[0, 0, 1], [2, 1, 2]]);
        assert_eq!(gets, [[0, 1], [2, 2], [3, 2]]);
        let own = Flow { pattern: Pattern::Everyone, shared: false };
        let (sends, gets) = messages(1, &[0, 0, 1, 1], &own);
        assert_eq!(sends, [[0, 0, 1], [2, 1, 1], [3, 1, 1]]);
        assert_eq!(gets, [[0, 1], [2, 1], [3, 1]]);
        let from = Flow { pattern: Pattern::From(2), shared: true };
        assert_eq!(messages(2, &[0, 1, 2, 1, 1], &from), (vec![[0, 0, 1], [1, 1, 3]], vec![]));
        assert_eq!(messages(3, &[0, 1, 2, 1, 1], &from), (vec![], vec![[2, 3]]));
        let but = Flow { pattern: Pattern::ButTo(0), shared: true };
        assert_eq!(messages(2, &[0, 0, 1], &but), (vec![[1, 0, 1]], vec![[0, 1], [1, 1]]));
        assert_eq!(messages(0, &[0, 0, 1], &but).1, Vec::<[usize; 2]>::new());
        let pairs = Flow { pattern: Pattern::Pairs(vec![(0, 1), (1, 1)]), shared: false };
        assert_eq!(messages(1, &[0, 0, 1], &pairs), (vec![], vec![[0, 1]]));
    }

    #[test]
    fn no_two_messages_of_an_operation_have_one_number() {
        let mut seen = HashSet::new();
        for index in [0, 1, MOST_COLLECTIVES - 1] {
            for rank in 0..3 {
                let mut group =
                    group(rank, &[0, 1, 2], Flow { pattern: Pattern::Everyone, shared: false });
                group.rounds.push(Flow { pattern: Pattern::Everyone, shared: true });
                group.places[2] = MOST_DEVICES - 1;
                // Devices may have any numbers.
                group.devices[2] = DeviceId(MOST_DEVICES as u32);
                group.rounds.push(Flow { pattern: Pattern::Everyone, shared: true });
                for round in 0..3 {
                    let round = Round { op: 1, index, round, group: &group };
                    let keys: HashSet<Key> =
                        round.outgoing().iter().map(|message| message.key).collect();
                    for key in keys {
                        assert!(
                            key.1 & COLLECTIVE != 0 && seen.insert(key),
                            "{index} {rank}: {key:x?}"
                        );
                    }
                }
            }
        }
        // Each to two others, in the later rounds to each process under one number.
        assert_eq!(seen.len(), 3 * 3 * (2 + 1 + 1));
    }
}
