//! The state that all threads share: looks for work, and ends connections.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use zerocopy::IntoBytes;

use super::devices::DeviceLoans;
use super::doorbell::Doorbell;
use super::futex::SystemFutex;
use super::ledger::{BorrowerEnd, EndedLoan, LoanLedger};
use super::mappings::Mappings;
use super::meeting::MetPeer;
use super::note::LoanId;
use super::peer::{Inbound, ShmPeer};
use super::record::{GOODBYE, RETIRED};
use super::socket::{ended, has_exited};
use crate::transport::{Handler, Ticket, TransportError};
use mpmd_memory::{Arena, Pool};
use mpmd_proto::wire::ProcessId;

/// Limit on the records that are taken from one peer before the next peer's ring is read.
const IN_A_ROW: usize = 64;
/// Limit on the passes over the rings by a thread that stops reading them. It suffices to empty a
/// full ring.
const MOST_LOOKS: usize = 32;
/// Largest number of segment numbers in one record.
const MOST_NUMBERS: usize = 256;

/// The state of one process's shared memory transport, which all its threads use.
pub(super) struct ShmState {
    /// A weak reference to this state, for callbacks that must not keep it alive.
    pub(super) this: Weak<Self>,
    pub(super) process: ProcessId,
    /// The peers by process; `None` if this transport does not reach the process.
    pub(super) peers: Vec<Option<ShmPeer>>,
    pub(super) door: Doorbell,
    pub(super) arena: Arena,
    pub(super) devices: DeviceLoans,
    /// Loans of this process's memory to peers.
    pub(super) ledger: Mutex<LoanLedger>,
    /// The pool for received inline payloads, and for copies of payloads that cannot be lent.
    pub(super) pool: Pool,
    /// The receiving half of each connection. The thread that reads the rings holds the lock.
    duty: Mutex<Vec<Option<Inbound>>>,
    pub(super) mappings: Mappings,
    handler: OnceLock<Arc<dyn Handler>>,
    /// Tickets that have ended and are not reported to the handler yet.
    done: Mutex<Vec<FinishedTicket>>,
    has_done: AtomicBool,
    /// True once no message can be posted any more.
    is_closing: AtomicBool,
    /// True once the handler is not called any more.
    is_over: AtomicBool,
}

/// A ticket that has ended, with its result.
pub(super) struct FinishedTicket {
    ticket: Ticket,
    result: Result<(), TransportError>,
}

impl FinishedTicket {
    pub(super) fn new(ticket: Ticket, result: Result<(), TransportError>) -> Self {
        Self { ticket, result }
    }
}

impl ShmState {
    pub(super) fn new(
        process: ProcessId,
        met_peers: Vec<Option<MetPeer>>,
        door: Doorbell,
        arena: Arena,
    ) -> Arc<Self> {
        // Each part goes to its own place, in the order of the processes.
        let mut peers = Vec::with_capacity(met_peers.len());
        let mut inbounds = Vec::with_capacity(met_peers.len());
        let mut returns = Vec::with_capacity(met_peers.len());
        for met in met_peers {
            let (peer, inbound, ring) = match met {
                Some(met) => (Some(met.peer), Some(met.inbound), Some(met.returns)),
                None => (None, None, None),
            };
            peers.push(peer);
            inbounds.push(inbound);
            returns.push(ring);
        }

        Arc::new_cyclic(|this| Self {
            this: this.clone(),
            process,
            devices: DeviceLoans::new(peers.len()),
            peers,
            door,
            ledger: Mutex::new(LoanLedger::new(returns)),
            pool: Pool::in_arena(format!("messages of process {process}"), None, &arena),
            arena,
            duty: Mutex::new(inbounds),
            mappings: Mappings::default(),
            handler: OnceLock::new(),
            done: Mutex::default(),
            has_done: AtomicBool::new(false),
            is_closing: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        })
    }

    /// Starts deliveries to `handler`. Panics if called twice.
    pub(super) fn start(&self, handler: Arc<dyn Handler>) {
        assert!(self.handler.set(handler).is_ok(), "start is called once");
        self.door.rouse(&SystemFutex);
    }

    /// Returns true once no message can be posted any more.
    pub(super) fn is_closing(&self) -> bool {
        self.is_closing.load(Ordering::Acquire)
    }

    /// Queues ended tickets, which the next thread that reads the rings reports to the handler.
    /// Wakes no thread.
    pub(super) fn note_done(&self, ended: impl IntoIterator<Item = FinishedTicket>) {
        let mut ended = ended
            .into_iter()
            .filter(|ended| ended.ticket != Ticket::NONE)
            .peekable();

        if ended.peek().is_none() {
            return;
        }

        let mut done = self.done.lock();
        done.extend(ended);
        self.has_done.store(true, Ordering::Release);
    }

    /// Takes records that have arrived, unless another thread is reading the rings. Returns true if
    /// there was any work. Does not wait.
    pub(super) fn progress(&self) -> bool {
        self.duty.try_lock().is_some_and(|duty| self.look(duty))
    }

    /// Takes all records that have arrived. If another thread is reading the rings, waits for it
    /// first. Called by a thread that stops reading the rings.
    pub(super) fn progress_to_the_end(&self) {
        for _ in 0..MOST_LOOKS {
            if !self.look(self.duty.lock()) {
                return;
            }
        }
        // A peer that sends faster than this takes must not keep this thread here for ever.
        self.door.rouse(&SystemFutex);
    }

    /// Returns true if reading the rings would find work. Also makes sure that a peer rings this
    /// process's doorbell when it frees space for which a record waits.
    pub(super) fn has_work(&self) -> bool {
        let duty = self.duty.lock();
        if self.handler.get().is_none() || self.is_over.load(Ordering::Acquire) {
            return false;
        }

        self.has_done.load(Ordering::Acquire)
            || self.ledger.lock().has_news()
            || duty
                .iter()
                .flatten()
                .any(|inbound| !inbound.has_ended && !inbound.ring.is_empty())
            || self
                .peers
                .iter()
                .flatten()
                .any(|peer| peer.is_waiting.load(Ordering::Acquire) && !peer.waits_for_room())
    }

    /// Takes records from all peers, and sends records that waited for space. Returns true if there
    /// was any work.
    fn look(&self, mut duty: MutexGuard<'_, Vec<Option<Inbound>>>) -> bool {
        let Some(handler) = self.handler.get() else {
            return false;
        };
        if self.is_over.load(Ordering::Acquire) {
            return false;
        }

        let has_news = self.ledger.lock().has_news();
        if has_news {
            self.reclaim();
        }

        let mut any = self.tell_done(handler) || has_news;
        for (index, inbound) in duty.iter_mut().enumerate() {
            let (Some(inbound), Some(Some(peer))) = (inbound, self.peers.get(index)) else {
                continue;
            };
            any |= peer.flush();
            if !inbound.has_ended && !inbound.ring.is_empty() {
                any = true;
                self.take(ProcessId(index as u32), inbound, peer, handler, IN_A_ROW);
            }
        }

        self.tell_done(handler) || any
    }

    /// Closes the connection to a peer in both directions, for the reason `why`. Fails the tickets
    /// of its open messages, and reports the loss to the handler.
    pub(super) fn end(
        &self,
        why: TransportError,
        from: ProcessId,
        inbound: &mut Inbound,
        peer: &ShmPeer,
        handler: &Arc<dyn Handler>,
    ) {
        let landing = inbound.end();
        peer.close(&why);

        // Other owners may have entered loans of which the messages were lost.
        let last = LoanId {
            lender: from,
            number: inbound.last_loan,
        };
        for (index, other) in self.peers.iter().enumerate() {
            if let Some(other) = other
                && index != from.index()
            {
                other.returns.say_last(last);
            }
        }

        // Loans that it returned before its end have ended well.
        self.reclaim();
        let BorrowerEnd { ended, tickets } = self.ledger.lock().close_account(from);
        self.note_ended(ended);
        self.note_done(
            tickets
                .into_iter()
                .map(|ticket| FinishedTicket::new(ticket, Err(why.clone()))),
        );
        self.tell_done(handler);

        let failure = match &why {
            TransportError::PeerGone { why, .. } => why.clone(),
            other => other.to_string(),
        };
        handler.peer_down(from, why);
        // Their waiters may ask if the peer is gone, so this comes after `peer_down`.
        landing
            .into_iter()
            .for_each(|arriving| arriving.pass(Some(failure.clone())));
    }

    /// Closes the connection to a peer that sent an invalid record. The peer is not told the
    /// reason.
    pub(super) fn end_by_nonsense(
        &self,
        why: String,
        from: ProcessId,
        inbound: &mut Inbound,
        peer: &ShmPeer,
        handler: &Arc<dyn Handler>,
    ) {
        self.end(
            TransportError::Protocol { peer: from, why },
            from,
            inbound,
            peer,
            handler,
        );
        peer.socket.close();
    }

    /// Reports ended tickets to the handler. Returns true if there were any.
    fn tell_done(&self, handler: &Arc<dyn Handler>) -> bool {
        if !self.has_done.swap(false, Ordering::AcqRel) {
            return false;
        }
        let done = std::mem::take(&mut *self.done.lock());
        for FinishedTicket { ticket, result } in done {
            handler.done(ticket, result);
        }
        true
    }

    /// Does the engine's regular work without waiting. Ends returned loans, sends notes that waited
    /// for space in a return ring, and tells peers which segments are freed. Frees device memory
    /// that no peer has open any more, and posts messages whose device work has finished.
    pub(super) fn tidy(&self) {
        let retired = self.arena.take_retired();
        let numbers: Vec<u32> = retired.iter().map(|segment| segment.number).collect();
        let mut knowing: Vec<Vec<usize>> = numbers.iter().map(|_| Vec::new()).collect();

        self.reclaim();
        for (index, peer) in self.peers.iter().enumerate() {
            let Some(peer) = peer else { continue };
            let closed = self.ledger.lock().take_closed(ProcessId(index as u32));
            self.devices.note_closed(index, &closed);
            peer.returns.flush();
            if retired.is_empty() {
                continue;
            }

            let mut out = peer.outbound.lock();
            let known = out.retire(&numbers);
            for (knowing, number) in knowing.iter_mut().zip(&numbers) {
                if known.contains(number) {
                    knowing.push(index);
                }
            }

            for numbers in known.chunks(MOST_NUMBERS) {
                if out.closed.is_none() {
                    peer.send(&mut out, RETIRED, &[numbers.as_bytes()], None);
                }
            }
            // Not rung: no peer waits for it.
        }

        retired
            .into_iter()
            .zip(knowing)
            .for_each(|(segment, knowing)| self.devices.part(segment, knowing));
        self.devices.free();
        // Retries messages for which the owner could not be told of re-lending.
        self.post_held();
    }

    /// Ends loans that peers have returned. Called when memory is short, possibly by a thread that
    /// holds locks, but not a pool's lock.
    pub(super) fn reclaim(&self) {
        let ended = self.ledger.lock().collect();
        self.note_ended(ended);
    }

    /// Drops the memory of ended loans, and queues their tickets for the handler.
    pub(super) fn note_ended(&self, ended: Vec<EndedLoan>) {
        let mut tickets = Vec::with_capacity(ended.len());
        for loan in ended {
            drop(loan.buffer);
            tickets.push(loan.ticket);
        }
        self.note_done(
            tickets
                .into_iter()
                .map(|ticket| FinishedTicket::new(ticket, Ok(()))),
        );
    }

    /// Finds peers whose connection is closed or whose process has exited, and closes the
    /// connections to them. Messages that they sent before are delivered first.
    pub(super) fn watch(&self) {
        let Some(handler) = self.handler.get() else {
            return;
        };

        let mut duty = self.duty.lock();
        if self.is_over.load(Ordering::Acquire) {
            return;
        }

        let watched: Vec<_> = self
            .peers
            .iter()
            .enumerate()
            .filter_map(|(i, peer)| Some((i, peer.as_ref()?)))
            .collect();
        let sockets: Vec<_> = watched
            .iter()
            .map(|(_, peer)| std::os::fd::AsFd::as_fd(*peer))
            .collect();
        let Ok(closed) = ended(&sockets) else { return };

        for ((index, peer), closed) in watched.into_iter().zip(closed) {
            let Some(Some(inbound)) = duty.get_mut(index) else {
                continue;
            };
            self.watch_peer(ProcessId(index as u32), inbound, peer, closed, handler);
        }
    }

    /// Closes the connection to a peer if the peer has closed it, has exited, or has corrupted its
    /// return ring. `is_closed` is true if the peer's socket is closed.
    fn watch_peer(
        &self,
        from: ProcessId,
        inbound: &mut Inbound,
        peer: &ShmPeer,
        is_closed: bool,
        handler: &Arc<dyn Handler>,
    ) {
        // Checked before the ring: everything that it sent before its exit is then in the ring.
        let exited = has_exited(std::os::fd::AsFd::as_fd(&peer.exit));
        // A child of the process may still have the connection open.
        let is_closed = is_closed || exited;

        if is_closed && !inbound.has_ended {
            // Takes one ring's worth at most: a process that has closed may still write.
            let most = inbound.ring.most();
            self.take(from, inbound, peer, handler, most);
        }
        if is_closed && !inbound.has_ended {
            let why = if exited {
                "its process has ended"
            } else {
                "it has closed its connection"
            };
            let why = TransportError::PeerGone {
                peer: from,
                why: why.to_owned(),
            };
            self.end(why, from, inbound, peer, handler);
        }

        let nonsense = self.ledger.lock().corrupt(from).map(ToString::to_string);
        if let Some(why) = nonsense
            && !inbound.has_ended
        {
            self.end_by_nonsense(why, from, inbound, peer, handler);
        }

        if exited {
            self.devices.note_exit(from);
            let ended = self.ledger.lock().note_exit(from);
            self.note_ended(ended);
        }
    }

    /// Sends a goodbye to all peers, after which nothing can be posted. Waits for a handler call
    /// that has not returned.
    pub(super) fn say_goodbye(&self) {
        self.is_closing.store(true, Ordering::Release);

        // Waits for a handler call that is under way. Loans that it drops go back before the
        // goodbye; otherwise their owner would report them as lost.
        drop(self.duty.lock());

        for peer in self.peers.iter().flatten() {
            let mut out = peer.outbound.lock();
            if out.closed.is_none() {
                peer.send(&mut out, GOODBYE, &[], None);
                out.closed = Some(TransportError::Closed);
            }
            drop(out);
            peer.door.ring(&SystemFutex);
        }
    }

    /// Returns true if all posted messages have been sent, and all loans that peers must copy have
    /// been returned.
    pub(super) fn is_flushed(&self) -> bool {
        let has_left = |peer: &ShmPeer| !peer.is_waiting.load(Ordering::Acquire);
        self.devices.is_flushed()
            && self.peers.iter().flatten().all(has_left)
            && !self.ledger.lock().is_awaited()
    }

    /// Ends all open tickets, reports them to the handler, and closes all connections. The handler
    /// is not called after that.
    pub(super) fn finish(&self) {
        // In an orderly end, loans have been sent; their memory stays valid for readers.
        let in_order = self.is_closing.swap(true, Ordering::AcqRel);
        let end = if in_order {
            Ok(())
        } else {
            Err(TransportError::Closed)
        };

        let _duty = self.duty.lock();
        let held = self.devices.take_tickets();
        self.note_done(
            held.into_iter()
                .map(|ticket| FinishedTicket::new(ticket, Err(TransportError::Closed))),
        );

        for process in 0..self.peers.len() as u32 {
            let tickets = self.ledger.lock().take_tickets(ProcessId(process));
            self.note_done(
                tickets
                    .into_iter()
                    .map(|ticket| FinishedTicket::new(ticket, end.clone())),
            );
        }

        if let Some(handler) = self.handler.get() {
            self.tell_done(handler);
        }
        self.is_over.store(true, Ordering::Release);

        for peer in self.peers.iter().flatten() {
            peer.close(&TransportError::Closed);
            peer.returns.flush();
            peer.socket.close();
        }
    }

    /// Puts the engine to sleep until there is work that no other thread does, `stop` returns true,
    /// or `timeout` is over.
    pub(super) fn sleep(&self, timeout: Duration, stop: impl Fn() -> bool) {
        self.door
            .sleep(&SystemFutex, Some(timeout), || stop() || self.has_work());
    }
}

impl Drop for ShmState {
    fn drop(&mut self) {
        let ledger = self.ledger.get_mut();
        drop(ledger.collect());

        for (index, peer) in self.peers.iter().enumerate() {
            if peer
                .as_ref()
                .is_some_and(|peer| has_exited(std::os::fd::AsFd::as_fd(&peer.exit)))
            {
                drop(ledger.note_exit(ProcessId(index as u32)));
            }
        }

        // The other loans may still be read, so their pool must not reuse them.
        ledger.retire();
    }
}
