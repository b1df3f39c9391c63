//! A process with one peer, reduced to the parts that use the doorbell.

use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, Ordering};
use loom::sync::{Condvar, Mutex};
use loom::thread::{self, JoinHandle};

use crate::SMALL;
use crate::doorbell::Doorbell;
use crate::futex::ModelFutex;
use crate::ring::{Consumer, Producer, Ring};

/// An event that a thread waits for.
#[derive(Clone, Copy)]
pub(crate) enum Slot {
    /// The first message of the peer.
    Message,
    /// An event that another thread of the process causes.
    End,
}

/// The simulated process that receives messages, with its threads' shared state.
pub(crate) struct Process {
    door: Doorbell,
    futex: Arc<ModelFutex>,
    inbox: Mutex<Inbox>,
    more: Condvar,
    /// True for each [`Slot`] that is filled. Relaxed on purpose: the doorbell's ordering must
    /// suffice.
    slots: [AtomicBool; 2],
    stop: AtomicBool,
}

struct Inbox {
    ring: Consumer,
    arrived: u32,
}

/// The sending end of the simulated peer.
pub(crate) struct Peer {
    ring: Producer,
    door: Doorbell,
    futex: Arc<ModelFutex>,
}

impl Peer {
    /// Publishes message number `kind` and rings the process.
    pub(crate) fn send(&mut self, kind: u32) {
        assert!(self.ring.push(kind, &[]));
        self.door.ring(&*self.futex);
    }
}

impl Process {
    pub(crate) fn with_peer() -> (Arc<Self>, Peer) {
        let ring = Ring::alone(SMALL);
        let (door, futex) = (Doorbell::alone(), Arc::new(ModelFutex::new()));
        let peer = Peer {
            ring: ring.producer(),
            door: door.clone(),
            futex: futex.clone(),
        };
        let process = Self {
            door,
            futex,
            inbox: Mutex::new(Inbox {
                ring: ring.consumer(),
                arrived: 0,
            }),
            more: Condvar::new(),
            slots: [AtomicBool::new(false), AtomicBool::new(false)],
            stop: AtomicBool::new(false),
        };
        (Arc::new(process), peer)
    }

    /// Takes all messages that the peer has published. If there were any, wakes the waiting
    /// threads.
    fn drain(&self) {
        let mut inbox = self.inbox.lock().unwrap();
        let before = inbox.arrived;
        while let Some(kind) = inbox.ring.pop(|kind, _| kind).unwrap() {
            assert_eq!(kind, inbox.arrived);
            inbox.arrived += 1;
        }
        if inbox.arrived > before {
            self.slots[Slot::Message as usize].store(true, Ordering::Relaxed);
            self.more.notify_all();
            drop(inbox);
            self.door.wake(&*self.futex);
        }
    }

    fn anything(&self) -> bool {
        !self.inbox.lock().unwrap().ring.is_empty()
    }

    /// Returns the number of messages that have arrived.
    pub(crate) fn arrived(&self) -> u32 {
        self.inbox.lock().unwrap().arrived
    }

    /// Blocks until `count` messages have arrived, without taking messages itself.
    pub(crate) fn block_until_arrived(&self, count: u32) {
        let mut inbox = self.inbox.lock().unwrap();
        while inbox.arrived < count {
            inbox = self.more.wait(inbox).unwrap();
        }
    }

    /// Fills [`Slot::End`] and wakes the waiting threads, as a thread of the process that causes an
    /// event. The process goes on.
    pub(crate) fn end(&self) {
        self.slots[Slot::End as usize].store(true, Ordering::Relaxed);
        self.door.wake(&*self.futex);
    }

    /// Blocks until a slot is filled, as a thread of the process does: it parks, and drives while
    /// it waits.
    pub(crate) fn wait_for(&self, slot: Slot) {
        loop {
            let parking = self.door.parking();
            if self.slots[slot as usize].load(Ordering::Relaxed) {
                return;
            }
            let driver = self
                .door
                .park(&*self.futex, parking, None, || self.anything());
            self.drain();
            driver.leave(|| self.drain());
        }
    }

    /// Takes messages once, without waiting.
    pub(crate) fn drive(&self) {
        let driver = self.door.enter();
        self.drain();
        driver.leave(|| self.drain());
    }

    /// Runs the engine's loop on this thread until `done` returns true after a look.
    pub(crate) fn run_engine(&self, done: impl Fn() -> bool) {
        loop {
            self.drain();
            if done() {
                return;
            }
            self.door.sleep(&*self.futex, None, || {
                self.anything() || self.stop.load(Ordering::Relaxed)
            });
        }
    }

    /// Starts a thread that runs the engine's loop until [`stop`](Self::stop).
    pub(crate) fn engine(self: &Arc<Self>) -> JoinHandle<()> {
        let process = self.clone();
        thread::spawn(move || process.run_engine(|| process.stop.load(Ordering::Relaxed)))
    }

    /// Ends the engine, even if it sleeps.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
        self.door.rouse(&*self.futex);
    }
}
