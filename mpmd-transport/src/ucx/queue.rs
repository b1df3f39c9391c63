//! What other threads ask of the engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use parking_lot::Mutex;

use super::UcxConfig;
use super::safe::Signal;
use crate::memory::{OwnedBuffer, SharedBuffer};
use crate::transport::{Fetch, FetchDone, Handler, Ticket, TransportError};
use crate::wire::{Header, ProcessId};

/// What came of meeting the peers, by process.
pub(super) struct Met {
    /// What carries messages to it, in UCX's own words.
    pub(super) lanes: Vec<String>,
    /// Whether memory of CUDA devices goes there as it is: where both ends' UCX move it.
    pub(super) moves_cuda: Vec<bool>,
}

/// Asked of the engine.
pub(super) enum Command {
    Connect(Box<UcxConfig>, mpsc::Sender<Result<Met, TransportError>>),
    Start(Arc<dyn Handler>),
    Post {
        to: ProcessId,
        header: Header,
        payload: Option<SharedBuffer>,
        ticket: Ticket,
    },
    Fetch {
        payload: u64,
        from: ProcessId,
        into: OwnedBuffer,
        then: FetchDone,
    },
    Discard {
        payload: u64,
    },
    /// Somebody knows that the peer is gone.
    GiveUp {
        peer: ProcessId,
        why: String,
    },
    /// Close in order within this time, then say so.
    Close(Duration, mpsc::Sender<()>),
    /// The transport was dropped.
    Abandon,
}

/// Commands on their way to the engine.
pub(super) struct Queue {
    list: Mutex<List>,
    /// Whether there may be commands.
    some: AtomicBool,
    /// Whether the engine sleeps, or is about to.
    asleep: AtomicBool,
    signal: Signal,
}

struct List {
    commands: Vec<Command>,
    /// Nobody takes commands any more.
    ended: bool,
}

impl Queue {
    pub(super) fn new(signal: Signal) -> Self {
        let list = Mutex::new(List { commands: Vec::new(), ended: false });
        Self { list, some: AtomicBool::new(false), asleep: AtomicBool::new(false), signal }
    }

    /// Asks; gives the command back after the engine's end.
    pub(super) fn push(&self, command: Command) -> Result<(), Command> {
        let mut list = self.list.lock();
        if list.ended {
            return Err(command);
        }
        list.commands.push(command);
        drop(list);
        // In one order with `rest`: either the engine sees the command before it sleeps, or this
        // sees it asleep.
        self.some.store(true, Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.signal.wake();
        }
        Ok(())
    }

    /// Moves all commands to `into`, which is empty.
    pub(super) fn take(&self, into: &mut Vec<Command>) {
        if self.some.load(Ordering::Relaxed) && self.some.swap(false, Ordering::SeqCst) {
            std::mem::swap(&mut self.list.lock().commands, into);
        }
    }

    /// Says that the engine is about to sleep; false where there are commands.
    pub(super) fn rest(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.some.load(Ordering::SeqCst) {
            self.rise();
            return false;
        }
        true
    }

    /// The engine is awake.
    pub(super) fn rise(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// All commands; where there are none, there will be no more, and this is `None`.
    pub(super) fn take_or_end(&self) -> Option<Vec<Command>> {
        let mut list = self.list.lock();
        list.ended = list.commands.is_empty();
        (!list.ended).then(|| std::mem::take(&mut list.commands))
    }

    /// No more commands; those that nobody took.
    pub(super) fn end(&self) -> Vec<Command> {
        let mut list = self.list.lock();
        list.ended = true;
        std::mem::take(&mut list.commands)
    }
}

/// The bytes of a message that lie with their sender.
pub(super) struct Waiting {
    pub(super) queue: Arc<Queue>,
    pub(super) payload: u64,
    pub(super) from: ProcessId,
    pub(super) bytes: u64,
    /// Fetched, so that dropping it gives up nothing.
    pub(super) taken: bool,
}

impl Fetch for Waiting {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fetch(mut self: Box<Self>, into: OwnedBuffer, then: FetchDone) {
        assert_eq!(into.len() as u64, self.bytes, "the place for a payload has its length");
        self.taken = true;
        let command = Command::Fetch { payload: self.payload, from: self.from, into, then };
        if let Err(Command::Fetch { then, .. }) = self.queue.push(command) {
            then(Err(TransportError::Closed));
        }
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if !self.taken {
            // After the engine's end there is nothing left to discard.
            let _ = self.queue.push(Command::Discard { payload: self.payload });
        }
    }
}
