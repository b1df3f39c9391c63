//! The fabric's state: the processes, the messages under way and the open tickets.
//!
//! A message's payload stays with its sender, in [`FabricProcess::open`], until the receiver has
//! taken or discarded it. Queues hold only its number. So a ticket ends exactly once: when its
//! entry is removed.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BinaryHeap};
use std::time::Duration;

use mpmd_base::block::{Condvar, Instant, Mutex, MutexGuard, note, now, thread};

use crate::transport::{FetchDone, Ticket, TransportError};
use mpmd_base::deadline::after;
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::wire::{Header, MessageKind, ProcessId};

use super::FabricFaults;

/// Time of one part of a shutdown's wait for receivers. A pause of the whole OS process counts as
/// at most one part.
const FLUSH_SLICE: Duration = Duration::from_millis(100);

/// Time that a shutdown waits beyond its deadline for a handler call that has not returned.
const LAST_CALL: Duration = Duration::from_secs(1);

/// State shared by all endpoints of a fabric, under one lock. The lock is not held while a handler
/// runs. It is not held while a payload is dropped either: the payload may be a loan of another
/// process of this fabric.
pub(super) struct Core {
    faults: FabricFaults,
    state: Mutex<FabricState>,
    /// One condition variable per process. It is notified when the process's event queue, open
    /// messages or delivery thread change.
    changed: Vec<Condvar>,
}

/// The part of [`Core`] that is under its lock.
pub(super) struct FabricState {
    pub(super) nodes: Vec<FabricProcess>,
    /// The next number for a message or a queued event. Of two events due at the same time, the one
    /// with the lower number comes first.
    next: u64,
}

/// The state of one process in a fabric.
pub(super) struct FabricProcess {
    life: ProcessLife,
    queue: BinaryHeap<QueuedEvent>,
    /// Messages that this process has posted and that have not ended yet, by message number.
    open: BTreeMap<u64, OpenMessage>,
    /// Number of messages that this process has posted to each process, by the receiver's index.
    posted: Vec<u64>,
    /// Time until which [`Fabric::hold`](super::Fabric::hold) delays messages to each process, by
    /// the receiver's index.
    held: Vec<Option<Instant>>,
    thread: DeliveryThread,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
/// The stages of a process's life in the fabric.
enum ProcessLife {
    Alive,
    Closing,
    Closed,
    Killed,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
/// The state of a process's delivery thread.
enum DeliveryThread {
    NotStarted,
    Running {
        stop: bool,
        id: Option<thread::ThreadId>,
    },
    Ended,
}

/// A message that was posted and has not ended.
struct OpenMessage {
    to: ProcessId,
    ticket: Ticket,
    payload: Option<SharedBuffer>,
    /// True if the message carries data. Its payload is lent if both processes are on one host.
    is_data: bool,
    /// True once the payload was passed to the receiver's handler.
    delivered: bool,
    /// True once the receiver's handler has returned and still holds the lent payload. A shutdown
    /// of the sender does not wait for such a message.
    kept: bool,
    /// True while the payload is being dropped. The message is removed right after that.
    ending: bool,
}

/// A message that ends without success because its sender or its receiver has left the job.
struct LostMessage {
    sender: ProcessId,
    message: u64,
    payload: Option<SharedBuffer>,
    error: TransportError,
}

/// An event that a delivery thread reports to its handler, or a copy that the thread makes.
pub(super) enum DeliveryEvent {
    Arrival {
        from: ProcessId,
        message: u64,
        header: Header,
    },
    Copy {
        from: ProcessId,
        message: u64,
        into: OwnedBuffer,
        then: FetchDone,
    },
    Done(Ticket, Result<(), TransportError>),
    Down(ProcessId, TransportError),
}

/// An event in a process's queue, with the time at which it is due.
struct QueuedEvent {
    due: Instant,
    number: u64,
    event: DeliveryEvent,
}

impl Core {
    pub(super) fn new(processes: usize, faults: FabricFaults) -> Self {
        let node = |_| FabricProcess {
            life: ProcessLife::Alive,
            queue: BinaryHeap::new(),
            open: BTreeMap::new(),
            posted: vec![0; processes],
            held: vec![None; processes],
            thread: DeliveryThread::NotStarted,
        };
        let state = FabricState {
            nodes: (0..processes).map(node).collect(),
            next: 0,
        };

        let changed = (0..processes).map(|_| Condvar::new()).collect();

        Self {
            faults,
            state: Mutex::new(state),
            changed,
        }
    }

    pub(super) fn processes(&self) -> usize {
        self.changed.len()
    }

    /// Returns true if two processes pass data without a copy: they are different processes on one
    /// host of [`FabricFaults::hosts`].
    pub(super) fn zero_copy(&self, one: ProcessId, other: ProcessId) -> bool {
        let host = |process: ProcessId| self.faults.hosts.get(process.index());
        one != other && host(one).is_some() && host(one) == host(other)
    }

    /// Returns the number of bytes that `to` has borrowed from `from`, including messages that have
    /// not arrived. 0 if the two processes do not lend each other payloads.
    pub(super) fn lent(&self, from: ProcessId, to: ProcessId) -> u64 {
        if !self.zero_copy(from, to) {
            return 0;
        }

        let state = self.state.lock();
        let open = state
            .nodes
            .get(from.index())
            .into_iter()
            .flat_map(|node| node.open.values());
        open.filter(|open| open.to == to && open.is_data)
            .filter_map(|open| open.payload.as_ref())
            .map(|payload| payload.len() as u64)
            .sum()
    }

    /// Queues a message from one process to another, delayed by a time that [`FabricFaults`]
    /// determines.
    pub(super) fn post(
        &self,
        from: ProcessId,
        to: ProcessId,
        header: Header,
        payload: Option<SharedBuffer>,
        ticket: Ticket,
    ) {
        let Header {
            kind, op, piece, ..
        } = header;
        note(format_args!(
            "{from} posts to {to}: {kind:?} of operation {op}, piece {piece}"
        ));

        let mut state = self.state.lock();
        let refused = match (state.node(from).life, state.node(to).life) {
            (ProcessLife::Closing | ProcessLife::Closed, _) => Some(TransportError::Closed),
            (ProcessLife::Killed, _) => Some(gone(to, "this process was killed")),
            (ProcessLife::Alive, ProcessLife::Killed) => Some(gone(to, "killed")),
            (ProcessLife::Alive, ProcessLife::Closed) => Some(gone(to, "closed")),
            (ProcessLife::Alive, ProcessLife::Alive | ProcessLife::Closing) => None,
        };
        if let Some(error) = refused {
            // The ticket stays open until the payload is dropped.
            let message = state.next;
            state.next += 1;
            let open = OpenMessage {
                to,
                ticket,
                payload: None,
                is_data: false,
                delivered: false,
                kept: false,
                ending: true,
            };
            state.node(from).open.insert(message, open);
            drop(state);
            drop(payload);
            self.remove(&mut self.state.lock(), from, message, Err(error));
            return;
        }

        let node = state.node(from);
        let sequence = node.posted[to.index()];
        node.posted[to.index()] += 1;
        let sent = node.held[to.index()].map_or_else(now, |until| until.max(now()));
        let due = sent + self.faults.delay_of(from, to, sequence);

        let message = state.next;
        let is_data = header.kind == MessageKind::Data;
        let open = OpenMessage {
            to,
            ticket,
            payload,
            is_data,
            delivered: false,
            kept: false,
            ending: false,
        };
        state.node(from).open.insert(message, open);
        self.push(
            &mut state,
            to,
            due,
            DeliveryEvent::Arrival {
                from,
                message,
                header,
            },
        );
    }

    /// Returns the payload of `from`'s message, or `None` if it carries none. Fails if the message
    /// has ended.
    pub(super) fn payload_of(
        &self,
        from: ProcessId,
        message: u64,
    ) -> Result<Option<SharedBuffer>, TransportError> {
        let mut state = self.state.lock();
        match state.node(from).open.get(&message) {
            Some(open) if !open.ending => Ok(open.payload.clone()),
            _ => Err(gone(
                from,
                "the process ended before its payload was fetched",
            )),
        }
    }

    /// Marks a message as delivered, just before the receiver's handler gets it. Returns its
    /// payload as `payload_of` does.
    pub(super) fn deliver(
        &self,
        from: ProcessId,
        message: u64,
    ) -> Result<Option<SharedBuffer>, TransportError> {
        if let Some(open) = self.state.lock().node(from).open.get_mut(&message) {
            open.delivered = true;
        }
        self.payload_of(from, message)
    }

    /// Records that the receiver's handler has returned and still holds the message's loan. Does
    /// nothing if the message has ended.
    pub(super) fn kept(&self, from: ProcessId, message: u64) {
        if let Some(open) = self.state.lock().node(from).open.get_mut(&message) {
            open.kept = true;
            // A shutdown does not wait for it.
            self.changed[from.index()].notify_all();
        }
    }

    /// Ends a message: drops its payload and reports to the sender that it was sent. Does nothing
    /// if the message has already ended.
    pub(super) fn end(&self, from: ProcessId, message: u64) {
        let payload = match self.state.lock().node(from).open.get_mut(&message) {
            Some(open) if !open.ending => {
                open.ending = true;
                open.payload.take()
            }
            _ => return,
        };
        // Dropped first: a sender that hears of the end may rely on being the only holder.
        drop(payload);
        self.remove(&mut self.state.lock(), from, message, Ok(()));
    }

    /// Queues `event`, a [`DeliveryEvent::Copy`], for the delivery thread of process `on`. Returns
    /// the event as the error if that thread has ended.
    pub(super) fn copy_later(
        &self,
        on: ProcessId,
        event: DeliveryEvent,
    ) -> Result<(), DeliveryEvent> {
        let mut state = self.state.lock();
        if state.node(on).thread == DeliveryThread::Ended {
            return Err(event);
        }
        let now = now();
        self.push(&mut state, on, now, event);
        Ok(())
    }

    pub(super) fn hold(&self, from: ProcessId, to: ProcessId, time: Duration) {
        self.state.lock().node(from).held[to.index()] = Some(after(now(), time));
    }

    pub(super) fn under_way(&self) -> usize {
        self.state
            .lock()
            .nodes
            .iter()
            .map(|node| node.open.len())
            .sum()
    }

    pub(super) fn kill(&self, process: ProcessId) {
        self.retire(self.state.lock(), process, ProcessLife::Killed);
    }

    /// Shuts a process down after its messages are taken, as
    /// [`Transport::shutdown`](crate::Transport::shutdown) does.
    pub(super) fn shutdown(&self, process: ProcessId, deadline: Duration) {
        let until = after(now(), deadline);
        let mut state = self.state.lock();
        match state.node(process).life {
            ProcessLife::Alive => state.node(process).life = ProcessLife::Closing,
            ProcessLife::Killed => {}
            ProcessLife::Closing | ProcessLife::Closed => return,
        }

        let changed = &self.changed[process.index()];
        // Only time in which this process runs counts, as far as possible: the bytes in a real
        // network outlast a stop of the whole job.
        let mut left = deadline;
        while !left.is_zero()
            && state
                .node(process)
                .open
                .values()
                .any(|open| !open.kept || open.ending)
        {
            let slice = left.min(FLUSH_SLICE);
            if changed
                .wait_until(&mut state, after(now(), slice))
                .timed_out()
            {
                left -= slice;
            }
        }

        self.retire(state, process, ProcessLife::Closed);
        let mut state = self.state.lock();
        self.stop(&mut state, process);
        let until = until.max(now() + LAST_CALL);
        while let DeliveryThread::Running { id, .. } = state.node(process).thread {
            let own = id == Some(thread::current().id());
            if own || changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }
    }

    /// Handles the drop of an endpoint: kills its process and tells the delivery thread to stop.
    /// Does not wait.
    pub(super) fn abandon(&self, process: ProcessId) {
        self.kill(process);
        self.stop(&mut self.state.lock(), process);
    }

    /// Removes a process from the job: ends all messages from it and to it, and their tickets.
    /// Reports to the other processes that it is down. Does nothing if the process was removed
    /// before.
    fn retire(
        &self,
        mut state: MutexGuard<'_, FabricState>,
        process: ProcessId,
        life: ProcessLife,
    ) {
        let before = state.node(process).life;
        if matches!(before, ProcessLife::Closed | ProcessLife::Killed) {
            return;
        }

        state.node(process).life = life;
        let (why, own) = match life {
            ProcessLife::Killed => ("killed", None),
            _ => ("closed", Some(TransportError::Closed)),
        };

        let mut ended = Vec::new();
        for other in (0..self.processes()).map(|other| ProcessId(other as u32)) {
            let node = state.node(other);
            if other == process {
                ended.extend(node.end_own(process, own.as_ref()));
                continue;
            }

            // In an orderly end, delivered messages stay valid: their tickets end when the handler
            // returns.
            let keeps_delivered = life == ProcessLife::Closed;
            ended.extend(node.end_towards(other, process, keeps_delivered, why));
            if matches!(node.life, ProcessLife::Alive | ProcessLife::Closing) {
                self.push_now(
                    &mut state,
                    other,
                    DeliveryEvent::Down(process, gone(process, why)),
                );
            }
        }

        drop(state);
        for lost in ended {
            drop(lost.payload);
            let mut state = self.state.lock();
            self.remove(&mut state, lost.sender, lost.message, Err(lost.error));
        }
    }

    /// Removes a message whose payload was dropped, and ends its ticket with `result`.
    fn remove(
        &self,
        state: &mut FabricState,
        from: ProcessId,
        message: u64,
        result: Result<(), TransportError>,
    ) {
        if let Some(OpenMessage { ticket, .. }) = state.node(from).open.remove(&message) {
            self.say_done(state, from, ticket, result);
            self.changed[from.index()].notify_all();
        }
    }

    /// Tells the delivery thread of a process to stop.
    fn stop(&self, state: &mut FabricState, process: ProcessId) {
        let thread = &mut state.node(process).thread;
        match thread {
            DeliveryThread::NotStarted => *thread = DeliveryThread::Ended,
            DeliveryThread::Running { stop, .. } => *stop = true,
            DeliveryThread::Ended => {}
        }
        self.changed[process.index()].notify_all();
    }

    fn say_done(
        &self,
        state: &mut FabricState,
        to: ProcessId,
        ticket: Ticket,
        result: Result<(), TransportError>,
    ) {
        if ticket != Ticket::NONE {
            self.push_now(state, to, DeliveryEvent::Done(ticket, result));
        }
    }

    fn push_now(&self, state: &mut FabricState, to: ProcessId, event: DeliveryEvent) {
        self.push(state, to, now(), event);
    }

    /// Queues `event` for process `to`, to be handled at the time `due`. Drops a report for a
    /// handler whose thread has ended.
    fn push(&self, state: &mut FabricState, to: ProcessId, due: Instant, event: DeliveryEvent) {
        let number = state.next;
        state.next += 1;
        let node = state.node(to);
        if node.thread == DeliveryThread::Ended
            && matches!(event, DeliveryEvent::Done(..) | DeliveryEvent::Down(..))
        {
            return;
        }
        node.queue.push(QueuedEvent { due, number, event });
        self.changed[to.index()].notify_all();
    }

    /// Marks a process's delivery thread as running. Returns false if it was started before.
    pub(super) fn begin(&self, process: ProcessId) -> bool {
        let mut state = self.state.lock();
        let node = state.node(process);

        let first = node.thread == DeliveryThread::NotStarted;
        if first {
            node.thread = DeliveryThread::Running {
                stop: false,
                id: None,
            };
        }
        first
    }

    /// Records the calling thread as the delivery thread of `process`, before its first event. A
    /// shutdown from within a handler then does not wait for the thread that it runs on.
    pub(super) fn introduce(&self, process: ProcessId) {
        if let DeliveryThread::Running { id, .. } = &mut self.state.lock().node(process).thread {
            *id = Some(thread::current().id());
        }
    }

    /// Marks the delivery thread of `process` as ended, and fails the copies that are still queued.
    /// It is the thread's last access to the fabric.
    pub(super) fn ended(&self, process: ProcessId) {
        let mut state = self.state.lock();
        let node = state.node(process);
        node.thread = DeliveryThread::Ended;

        // Copies requested at the last moment: dropping them tells their owners of the end.
        let left = std::mem::take(&mut node.queue);
        self.changed[process.index()].notify_all();
        drop(state);

        for queued in left {
            if let DeliveryEvent::Copy { from, then, .. } = queued.event {
                then(Err(gone(from, "the transport is shut down")));
            }
        }
    }

    /// Blocks until the time of the next event of `process`, and returns the event. Returns `None`
    /// if the thread must stop and no event is left to handle now.
    pub(super) fn next(&self, process: ProcessId) -> Option<DeliveryEvent> {
        let changed = &self.changed[process.index()];
        let mut state = self.state.lock();
        loop {
            let node = state.node(process);
            let due = node.queue.peek().map(|queued| queued.due);
            match due {
                Some(due) if due <= now() => {
                    return node.queue.pop().map(|queued| queued.event);
                }
                _ if matches!(node.thread, DeliveryThread::Running { stop: true, .. }) => {
                    return None;
                }
                Some(due) => _ = changed.wait_until(&mut state, due),
                None => changed.wait(&mut state),
            }
        }
    }
}

impl FabricProcess {
    /// Ends all messages that this process, `own`, has posted, because it leaves the job. Their
    /// error is `error`, or [`PeerGone`](TransportError::PeerGone) if `error` is `None`.
    fn end_own(&mut self, own: ProcessId, error: Option<&TransportError>) -> Vec<LostMessage> {
        self.queue.retain(|queued| {
            !matches!(
                queued.event,
                DeliveryEvent::Arrival { .. } | DeliveryEvent::Down(..)
            )
        });

        let lost = self.open.iter_mut().map(|(message, open)| {
            open.ending = true;
            LostMessage {
                sender: own,
                message: *message,
                payload: open.payload.take(),
                error: error
                    .cloned()
                    .unwrap_or_else(|| gone(open.to, "this process was killed")),
            }
        });
        lost.collect()
    }

    /// Ends the messages that this process, `own`, has posted to `process`, which has left the job.
    /// Their error contains `why`. With `keeps_delivered`, delivered messages do not end. Also
    /// drops queued messages from `process`.
    fn end_towards(
        &mut self,
        own: ProcessId,
        process: ProcessId,
        keeps_delivered: bool,
        why: &str,
    ) -> Vec<LostMessage> {
        self.queue.retain(|queued| match &queued.event {
            DeliveryEvent::Arrival { from, .. } => *from != process,
            _ => true,
        });

        let lost = self.open.iter_mut().filter(|(_, open)| {
            open.to == process && !open.ending && !(keeps_delivered && open.delivered)
        });
        let lost = lost.map(|(message, open)| {
            open.ending = true;
            LostMessage {
                sender: own,
                message: *message,
                payload: open.payload.take(),
                error: gone(process, why),
            }
        });
        lost.collect()
    }
}

impl FabricState {
    fn node(&mut self, process: ProcessId) -> &mut FabricProcess {
        &mut self.nodes[process.index()]
    }
}

impl FabricFaults {
    /// Returns the time by which message number `sequence` from `from` to `to` is delayed.
    fn delay_of(&self, from: ProcessId, to: ProcessId, sequence: u64) -> Duration {
        let Some(range) = &self.delay else {
            return Duration::ZERO;
        };

        let width = range.end().saturating_sub(*range.start()).as_nanos() as u64;
        let pair = (u64::from(from.0) << 32) | u64::from(to.0);
        let drawn = mix(mix(mix(self.seed) ^ pair) ^ sequence);
        *range.start()
            + Duration::from_nanos(if width == u64::MAX {
                drawn
            } else {
                drawn % (width + 1)
            })
    }
}

/// Mixes the bits of `x` with the last steps of the SplitMix64 generator: every bit of the result
/// depends on every bit of `x`.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

pub(super) fn gone(peer: ProcessId, why: &str) -> TransportError {
    TransportError::PeerGone {
        peer,
        why: why.to_owned(),
    }
}

/// Orders events so that a [`BinaryHeap`] returns the earliest first. Among events of equal time,
/// the lower number is first.
impl Ord for QueuedEvent {
    fn cmp(&self, other: &Self) -> Ordering {
        (other.due, other.number).cmp(&(self.due, self.number))
    }
}

impl PartialOrd for QueuedEvent {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for QueuedEvent {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Ordering::Equal
    }
}

impl Eq for QueuedEvent {}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(seed: u64) -> FabricFaults {
        let delay = Some(Duration::from_millis(1)..=Duration::from_millis(3));
        FabricFaults {
            seed,
            delay,
            ..FabricFaults::default()
        }
    }

    #[test]
    fn delays_depend_on_seed_pair_and_number() {
        let delays = |seed, from, to| -> Vec<Duration> {
            (0..100)
                .map(|n| faults(seed).delay_of(ProcessId(from), ProcessId(to), n))
                .collect()
        };
        assert_eq!(delays(7, 0, 1), delays(7, 0, 1));
        assert_ne!(delays(7, 0, 1), delays(8, 0, 1));
        assert_ne!(delays(7, 0, 1), delays(7, 1, 0));
        assert!(
            delays(7, 0, 1)
                .iter()
                .all(|delay| (1..=3).contains(&delay.as_millis()))
        );
        assert!(
            !delays(7, 0, 1).is_sorted(),
            "some message overtakes another"
        );
    }

    #[test]
    fn default_faults_add_no_delay() {
        assert_eq!(
            FabricFaults::default().delay_of(ProcessId(0), ProcessId(1), 9),
            Duration::ZERO
        );
    }
}
