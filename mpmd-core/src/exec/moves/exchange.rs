//! The messages of collectives, between devices of one process or of several.
//!
//! A collective has a few [rounds](Round). In each round, devices of a [`CollectiveGroup`] send
//! bytes to others, by a [`RoundFlow`] that all of them know. A message is a piece of the kernel's
//! operation. Its number encodes the collective's index, the round and the devices. Between devices
//! of one process it goes through the mailbox, between processes through the router. Bytes for
//! several devices of a process are sent to it once: the first device that needs them asks the
//! router, the others find them in the mailbox.

use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_memory::SharedBuffer;
use mpmd_proto::router::{Failure, PieceSize};

use crate::exec::moves::mailbox::Key;
use crate::exec::waits::async_buffer::{AsyncBuffer, Outcome, Resolver};
use crate::exec::{OpGuard, Outgoing, Runtime, Waiter};
use mpmd_layout::topology::DeviceId;

/// Bit that is set in the piece numbers of collectives, and never in those of transfers.
const COLLECTIVE: u64 = 1 << 63;

/// Number of bits in a piece number for a device's index in its mesh.
const DEVICE_BITS: u32 = 22;

/// Maximum number of devices of a mesh with collectives, given by [`DEVICE_BITS`].
pub(crate) const MOST_DEVICES: usize = 1 << DEVICE_BITS;

/// Number of bits in a piece number for the round. A collective has at most three rounds.
const ROUND_BITS: u32 = 2;

/// Maximum number of collectives of a kernel, given by the bits that are left in a piece number.
pub(crate) const MOST_COLLECTIVES: usize = 1 << (63 - ROUND_BITS - 2 * DEVICE_BITS);

/// The devices that a collective spans, as seen by one of them.
#[derive(Debug)]
pub(crate) struct CollectiveGroup {
    /// The devices of the group, in the order of the axis.
    pub(crate) devices: Vec<DeviceId>,
    /// Index of each device in the kernel's mesh, below [`MOST_DEVICES`]. Device ids may be larger.
    pub(crate) places: Vec<usize>,
    /// The owner process of each device.
    pub(crate) processes: Vec<ProcessId>,
    /// Rank of the device whose view this is: its index in `devices`.
    pub(crate) rank: usize,
    /// True if the devices use NCCL. Then the first round compares the calls, and the other rounds
    /// carry only host values.
    pub(crate) joined: bool,
    /// Maximum bytes of a message from one device to another.
    pub(crate) most: u64,
    /// The flow of each round; empty in a group of one device.
    pub(crate) rounds: Vec<RoundFlow>,
}

/// The flow of one round of a collective: its pairs of sender and receiver. Devices are given by
/// their ranks in the group.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct RoundFlow {
    pub(crate) pattern: Pattern,
    /// True if a device sends the same bytes to all its receivers.
    pub(crate) shared: bool,
}

/// Pairs of sender and receiver ranks. No device sends to itself.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Pattern {
    /// Every device sends to every other.
    Everyone,
    /// The first rank of each pair sends to the second.
    Pairs(Vec<(usize, usize)>),
}

impl RoundFlow {
    /// Returns true if the device of rank `from` sends to the device of rank `to`.
    pub(crate) fn goes(&self, from: usize, to: usize) -> bool {
        from != to
            && match &self.pattern {
                Pattern::Everyone => true,
                Pattern::Pairs(pairs) => pairs.contains(&(from, to)),
            }
    }
}

/// One round of one collective of a running kernel.
pub(crate) struct Round<'a> {
    pub(crate) op: u64,
    /// The collective's index in the signature.
    pub(crate) index: usize,
    /// The round's index within the collective.
    pub(crate) round: usize,
    pub(crate) group: &'a CollectiveGroup,
}

/// A message that this device sends or receives in a round.
struct RoundMessage {
    key: Key,
    /// Rank of the other device. If several devices receive the same bytes, rank of one of them.
    rank: usize,
    /// The process of the other device.
    process: ProcessId,
    /// Number of devices of the receiving process that use the message.
    takers: usize,
}

impl Round<'_> {
    /// Returns the messages that this device sends. Shared bytes are one message for each process.
    fn outgoing(&self) -> Vec<RoundMessage> {
        let me = self.group.rank;
        let mut messages: Vec<RoundMessage> = Vec::new();
        for to in self.receivers(me) {
            let process = self.group.processes[to];
            let mut before = messages.iter_mut().filter(|_| self.flow().shared);
            match before.find(|message| message.process == process) {
                Some(message) => message.takers += 1,
                None => messages.push(RoundMessage {
                    key: self.key(me, to),
                    rank: to,
                    process,
                    takers: 1,
                }),
            }
        }
        messages
    }

    /// Returns the messages that this device receives, in order of the senders' ranks.
    fn incoming(&self) -> impl Iterator<Item = RoundMessage> {
        let me = self.group.rank;
        (0..self.group.devices.len())
            .filter(move |from| self.flow().goes(*from, me))
            .map(move |from| {
                let here = |to: &usize| self.group.processes[*to] == self.group.processes[me];
                let takers = if self.flow().shared {
                    self.receivers(from).filter(here).count()
                } else {
                    1
                };
                RoundMessage {
                    key: self.key(from, me),
                    rank: from,
                    process: self.group.processes[from],
                    takers,
                }
            })
    }

    fn receivers(&self, from: usize) -> impl Iterator<Item = usize> {
        (0..self.group.devices.len()).filter(move |to| self.flow().goes(from, *to))
    }

    fn flow(&self) -> &RoundFlow {
        &self.group.rounds[self.round]
    }

    /// Returns (operation, piece number) of a message. In a round with shared bytes, the sender's
    /// index also stands for the receiver: no device sends to itself.
    fn key(&self, from: usize, to: usize) -> Key {
        let to = if self.flow().shared { from } else { to };
        let [from, to] = [from, to].map(|rank| self.group.places[rank] as u64);
        let step = (self.index as u64) << ROUND_BITS | self.round as u64;
        (
            self.op,
            COLLECTIVE | step << (2 * DEVICE_BITS) | from << DEVICE_BITS | to,
        )
    }
}

impl Runtime {
    /// Drops the messages of operation `op` that no device of this process took. Call it after the
    /// operation has ended on every device of this process.
    pub(crate) fn forget(self: &Arc<Self>, op: u64) {
        self.mailbox.forget(op);
        self.with_router(|router| router.forget(op));
    }
}

/// Access of one kernel call to the other devices of its mesh.
pub(crate) struct KernelExchange {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) guard: OpGuard,
    /// The local index of the device whose thread runs the kernel. `None` if the device runs
    /// asynchronously: it may compute while the kernel's thread waits.
    pub(crate) on_thread_of: Option<usize>,
}

impl KernelExchange {
    /// Copies `bytes` to a staging buffer that may outlive the kernel call. Fails if there is no
    /// memory.
    pub(crate) fn copy_in(&self, bytes: &[u8]) -> Outcome {
        let failed = |error| self.runtime.out_of_memory(self.guard.op(), &error);
        let mut buffer = self.runtime.staging.allocate(bytes.len()).map_err(failed)?;
        buffer.copy_from_slice(bytes);
        Ok(buffer.freeze())
    }

    /// Sends `bytes(rank)` to every device that receives from this device in the round. In a round
    /// with shared bytes, sends them once to each process. Never blocks.
    pub(crate) fn give(&self, round: &Round<'_>, bytes: impl Fn(usize) -> SharedBuffer) {
        for message in round.outgoing() {
            let buffer = bytes(message.rank);
            if message.process == self.runtime.me {
                self.runtime
                    .mailbox
                    .post(message.key, message.takers, Ok(buffer));
            } else {
                let size = buffer.len() as u64;
                let outgoing = Outgoing {
                    buffer,
                    bytes: size,
                    guard: self.guard.clone(),
                };
                // Announced with its length: a kernel that uses another length on another device
                // must get an error.
                let hash = self.guard.hash();
                self.runtime.with_router(|router| {
                    router.announce(message.process, message.key, hash, size, outgoing);
                });
            }
        }
    }

    /// Sends the failure to every device that expects a message from this device in the round.
    pub(crate) fn poison(&self, round: &Round<'_>, failure: &Arc<Failure>) {
        for message in round.outgoing() {
            if message.process == self.runtime.me {
                self.runtime
                    .mailbox
                    .post(message.key, message.takers, Err(failure.clone()));
            } else {
                let (op, piece) = message.key;
                self.runtime
                    .with_router(|router| router.poison(message.process, op, piece, failure));
            }
        }
    }

    /// Takes and drops the messages to this device in a round that this device does not finish, so
    /// that no sender waits.
    pub(crate) fn decline(&self, round: &Round<'_>) {
        for message in round.incoming() {
            if message.process == self.runtime.me {
                // No wait here: this only gives up the device's share.
                drop(self.runtime.mailbox.take(message.key, message.takers));
            } else if message.takers == 1 {
                let waiter = Waiter::Nobody(self.guard.clone());
                let hash = self.guard.hash();
                self.runtime.with_router(|router| {
                    router.decline(
                        message.process,
                        message.key,
                        hash,
                        waiter,
                        self.runtime.now(),
                    );
                });
            } else if let Some(slot) = self.ask(round, &message) {
                // Other devices of this process may need the message. The operation stays in flight
                // until it has come.
                let guard = self.guard.clone();
                slot.on_end(move |_| drop(guard));
            }
        }
    }

    /// Returns the messages to this device in the round, by the sender's rank; `None` for ranks
    /// that send none. Blocks until all messages or failures have arrived.
    ///
    /// `likely(rank)` is the expected number of bytes; a message may be longer or shorter.
    ///
    /// # Errors
    ///
    /// The first failure among the messages.
    pub(crate) fn take(
        &self,
        round: &Round<'_>,
        likely: impl Fn(usize) -> usize,
    ) -> Result<Vec<Option<SharedBuffer>>, Arc<Failure>> {
        let slots: Vec<(usize, AsyncBuffer)> = round
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

        // This ends: each wait is for a kernel earlier in a device's queue, for this operation on
        // another device, or for a peer that the router watches. All messages are taken before the
        // first failure is returned.
        let parker = &self.runtime.parker;
        let waiting = self
            .on_thread_of
            .map(|device| self.runtime.wait_in_collective(device, round.op));
        let outcomes: Vec<(usize, Outcome)> = slots
            .into_iter()
            .map(|(rank, slot)| (rank, parker.wait(&slot, None).expect("no deadline was set")))
            .collect();
        drop(waiting);

        let mut parts = vec![None; round.group.devices.len()];
        for (rank, outcome) in outcomes {
            parts[rank] = Some(outcome?);
        }
        Ok(parts)
    }

    /// Returns the async buffer of a message from another process. Requests the message from the
    /// router unless another device has done so. `likely` is the expected size in bytes.
    fn want(&self, round: &Round<'_>, message: &RoundMessage, likely: u64) -> AsyncBuffer {
        let (slot, resolver) = if message.takers == 1 {
            let (resolver, slot) = AsyncBuffer::new();
            (slot, Some(resolver))
        } else {
            self.runtime
                .mailbox
                .take_from_afar(message.key, message.takers)
        };
        if let Some(resolver) = resolver {
            self.expect(round, message, likely, resolver);
        }
        slot
    }

    /// Requests from the router a message that this device does not need, but other devices of this
    /// process may. Returns its async buffer, or `None` if another device has requested it already.
    fn ask(&self, round: &Round<'_>, message: &RoundMessage) -> Option<AsyncBuffer> {
        let (slot, resolver) = self
            .runtime
            .mailbox
            .take_from_afar(message.key, message.takers);
        self.expect(round, message, u64::MAX, resolver?);
        Some(slot)
    }

    fn expect(&self, round: &Round<'_>, message: &RoundMessage, likely: u64, resolver: Resolver) {
        let from = message.process;
        let waiter = Waiter::Bytes {
            resolver,
            from,
            op: round.op,
            piece: message.key.1,
        };
        let size = PieceSize {
            likely,
            most: round.group.most,
        };
        let hash = self.guard.hash();
        let now = self.runtime.now();
        self.runtime.with_router(|router| {
            router.expect_any_size(from, message.key, hash, size, waiter, now);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn group(rank: usize, processes: &[u32], flow: RoundFlow) -> CollectiveGroup {
        let processes: Vec<ProcessId> = processes.iter().copied().map(ProcessId).collect();
        let places: Vec<usize> = (0..processes.len()).collect();
        let devices = places.iter().map(|place| DeviceId(*place as u32)).collect();
        CollectiveGroup {
            devices,
            places,
            processes,
            rank,
            joined: false,
            most: 0,
            rounds: vec![flow],
        }
    }

    /// Returns the messages that `rank` sends, as `(first taker, process, takers)`, and receives,
    /// as `(sender, takers)`.
    fn messages(
        rank: usize,
        processes: &[u32],
        flow: &RoundFlow,
    ) -> (Vec<[usize; 3]>, Vec<[usize; 2]>) {
        let group = group(rank, processes, flow.clone());
        let round = Round {
            op: 1,
            index: 0,
            round: 0,
            group: &group,
        };
        let outgoing = round
            .outgoing()
            .iter()
            .map(|m| [m.rank, m.process.index(), m.takers])
            .collect();
        (
            outgoing,
            round.incoming().map(|m| [m.rank, m.takers]).collect(),
        )
    }

    #[test]
    fn shared_bytes_are_sent_once_per_process_others_per_device() {
        let shared = RoundFlow {
            pattern: Pattern::Everyone,
            shared: true,
        };
        let (sends, gets) = messages(1, &[0, 0, 1, 1], &shared);
        assert_eq!(sends, [[0, 0, 1], [2, 1, 2]]);
        assert_eq!(gets, [[0, 1], [2, 2], [3, 2]]);
        let own = RoundFlow {
            pattern: Pattern::Everyone,
            shared: false,
        };
        let (sends, gets) = messages(1, &[0, 0, 1, 1], &own);
        assert_eq!(sends, [[0, 0, 1], [2, 1, 1], [3, 1, 1]]);
        assert_eq!(gets, [[0, 1], [2, 1], [3, 1]]);
        let pairs = RoundFlow {
            pattern: Pattern::Pairs(vec![(0, 1), (1, 1)]),
            shared: false,
        };
        assert_eq!(messages(1, &[0, 0, 1], &pairs), (vec![], vec![[0, 1]]));
    }

    #[test]
    fn message_numbers_of_an_operation_are_unique() {
        let mut seen = HashSet::new();
        for index in [0, 1, MOST_COLLECTIVES - 1] {
            for rank in 0..3 {
                let mut group = group(
                    rank,
                    &[0, 1, 2],
                    RoundFlow {
                        pattern: Pattern::Everyone,
                        shared: false,
                    },
                );
                group.rounds.push(RoundFlow {
                    pattern: Pattern::Everyone,
                    shared: true,
                });
                group.places[2] = MOST_DEVICES - 1;
                // Device ids may be any numbers.
                group.devices[2] = DeviceId(MOST_DEVICES as u32);
                group.rounds.push(RoundFlow {
                    pattern: Pattern::Everyone,
                    shared: true,
                });
                for round in 0..3 {
                    let round = Round {
                        op: 1,
                        index,
                        round,
                        group: &group,
                    };
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
        // Each rank sends to two others. In the later rounds it sends to each process under one
        // number.
        assert_eq!(seen.len(), 3 * 3 * (2 + 1 + 1));
    }
}
