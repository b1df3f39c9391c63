//! The queue of commands to the engine.
//!
//! Most commands come from a handler's call, so from the engine's own thread. They need no lock and
//! wake nobody: they wait in a list of this thread.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use parking_lot::Mutex;

use super::UcxConfig;
use super::safe::Signal;
use crate::transport::{Fetch, FetchDone, Handler, Ticket, TransportError};
use mpmd_memory::{OwnedBuffer, SharedBuffer};
use mpmd_proto::wire::{Header, ProcessId};

/// The result of connecting to all peers. Both lists are indexed by process.
pub(super) struct ConnectedPeers {
    /// UCX's own description of the connections (lanes) to each peer.
    pub(super) lanes: Vec<String>,
    /// True for each process to which memory of CUDA devices is sent without a copy through the
    /// host. Both processes' UCX must support it.
    pub(super) moves_cuda: Vec<bool>,
}

/// A command from another thread to the engine.
pub(super) enum EngineCommand {
    Connect(
        Box<UcxConfig>,
        mpsc::Sender<Result<ConnectedPeers, TransportError>>,
    ),
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
    /// Treats the peer as gone, because another part of the program has found it dead.
    GiveUp {
        peer: ProcessId,
        why: String,
    },
    /// Closes the transport in order within the time limit, then notifies the sender.
    Close(Duration, mpsc::Sender<()>),
    /// Closes the transport at once, because it was dropped.
    Abandon,
}

/// The queue of commands from other threads to the engine.
pub(super) struct CommandQueue {
    list: Mutex<CommandList>,
    /// True if the list may contain commands.
    some: AtomicBool,
    /// True if the engine sleeps or is about to.
    asleep: AtomicBool,
    signal: Signal,
}

/// Commands that were queued by threads other than the engine's.
struct CommandList {
    commands: Vec<EngineCommand>,
    /// True once the engine accepts no more commands.
    ended: bool,
}

/// Commands that the engine's own thread queues for its engine, for example from a handler.
struct OwnCommands {
    /// The address of the engine's queue; null if this thread does not run an engine.
    queue: *const CommandQueue,
    commands: Vec<EngineCommand>,
}

thread_local! {
    static OWN: RefCell<OwnCommands> =
        const { RefCell::new(OwnCommands { queue: std::ptr::null(), commands: Vec::new() }) };
}

impl CommandQueue {
    pub(super) fn new(signal: Signal) -> Self {
        let list = Mutex::new(CommandList {
            commands: Vec::new(),
            ended: false,
        });
        Self {
            list,
            some: AtomicBool::new(false),
            asleep: AtomicBool::new(false),
            signal,
        }
    }

    /// Registers this thread as the engine's. Commands that it queues itself then need no lock.
    pub(super) fn adopt_thread(&self) {
        OWN.with_borrow_mut(|own| own.queue = self);
    }

    /// Calls `act` with this thread's own list of commands. Returns `None` if the thread does not
    /// run this queue's engine.
    fn on_own<T>(&self, act: impl FnOnce(&mut Vec<EngineCommand>) -> T) -> Option<T> {
        // A thread that is ending has lost its list, and is not the engine's.
        let done = OWN.try_with(|own| {
            let mut own = own.borrow_mut();
            std::ptr::eq(own.queue, self).then(|| act(&mut own.commands))
        });
        done.ok().flatten()
    }

    /// Queues a command and wakes the engine. After the engine has ended, returns the command as
    /// the error.
    pub(super) fn push(&self, command: EngineCommand) -> Result<(), EngineCommand> {
        let mut command = Some(command);
        self.on_own(|commands| commands.extend(command.take()));
        let Some(command) = command else {
            return Ok(());
        };

        let mut list = self.list.lock();
        if list.ended {
            return Err(command);
        }
        list.commands.push(command);
        drop(list);

        // Sequentially consistent with the accesses in `rest`: either the engine sees the command
        // before it sleeps, or this thread sees that it is asleep.
        self.some.store(true, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) && self.asleep.swap(false, Ordering::SeqCst) {
            self.signal.wake();
        }
        Ok(())
    }

    /// Moves all queued commands to `into`, which must be empty. Called on the engine's thread.
    pub(super) fn take(&self, into: &mut Vec<EngineCommand>) {
        self.on_own(|commands| std::mem::swap(commands, into));
        if self.some.load(Ordering::Relaxed) && self.some.swap(false, Ordering::SeqCst) {
            let mut list = self.list.lock();
            if into.is_empty() {
                std::mem::swap(&mut list.commands, into);
            } else {
                into.append(&mut list.commands);
            }
        }
    }

    /// Announces that the engine is about to sleep. If commands are queued, announces nothing and
    /// returns false.
    pub(super) fn rest(&self) -> bool {
        if self
            .on_own(|commands| !commands.is_empty())
            .unwrap_or(false)
        {
            return false;
        }
        self.asleep.store(true, Ordering::SeqCst);
        if self.some.load(Ordering::SeqCst) {
            self.rise();
            return false;
        }
        true
    }

    /// Announces that the engine is awake.
    pub(super) fn rise(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Returns all queued commands. If there are none, closes the queue and returns `None`.
    pub(super) fn take_or_end(&self) -> Option<Vec<EngineCommand>> {
        let mut commands = self.on_own(std::mem::take).unwrap_or_default();
        let mut list = self.list.lock();
        commands.append(&mut list.commands);
        list.ended = commands.is_empty();
        drop(list);
        if commands.is_empty() {
            self.leave_thread();
            return None;
        }
        Some(commands)
    }

    /// Closes the queue and returns the commands that were not handled.
    pub(super) fn end(&self) -> Vec<EngineCommand> {
        let mut commands = self.leave_thread();
        let mut list = self.list.lock();
        list.ended = true;
        commands.append(&mut list.commands);
        commands
    }

    /// Undoes [`CommandQueue::adopt_thread`]. Returns the commands that this thread has queued.
    fn leave_thread(&self) -> Vec<EngineCommand> {
        let left = OWN.try_with(|own| {
            let mut own = own.borrow_mut();
            if !std::ptr::eq(own.queue, self) {
                return Vec::new();
            }
            own.queue = std::ptr::null();
            std::mem::take(&mut own.commands)
        });
        left.unwrap_or_default()
    }
}

/// A handle to a received payload that is still in the sender's memory. A fetch copies it to this
/// process. Dropping the handle without a fetch discards the payload.
pub(super) struct RemotePayload {
    pub(super) queue: Arc<CommandQueue>,
    pub(super) payload: u64,
    pub(super) from: ProcessId,
    pub(super) bytes: u64,
    /// True once the payload was fetched; then dropping the handle discards nothing.
    pub(super) taken: bool,
}

impl Fetch for RemotePayload {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fetch(mut self: Box<Self>, into: OwnedBuffer, then: FetchDone) {
        assert_eq!(
            into.len() as u64,
            self.bytes,
            "the place for a payload has its length"
        );

        self.taken = true;
        let command = EngineCommand::Fetch {
            payload: self.payload,
            from: self.from,
            into,
            then,
        };
        if let Err(EngineCommand::Fetch { then, .. }) = self.queue.push(command) {
            then(Err(TransportError::Closed));
        }
    }
}

impl Drop for RemotePayload {
    fn drop(&mut self) {
        if !self.taken {
            // After the engine's end there is nothing left to discard.
            let _ = self.queue.push(EngineCommand::Discard {
                payload: self.payload,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn discard(queue: &CommandQueue, payload: u64) -> bool {
        queue.push(EngineCommand::Discard { payload }).is_ok()
    }

    fn payloads(commands: &[EngineCommand]) -> Vec<u64> {
        let payload = |command: &EngineCommand| match command {
            EngineCommand::Discard { payload } => *payload,
            _ => u64::MAX,
        };
        commands.iter().map(payload).collect()
    }

    #[test]
    fn commands_of_the_engines_thread_need_no_lock() {
        let queue = CommandQueue::new(Signal::default());
        assert!(discard(&queue, 1));
        assert_eq!(
            queue.list.lock().commands.len(),
            1,
            "no engine runs on this thread yet"
        );
        queue.adopt_thread();
        assert!(discard(&queue, 2));
        let other = CommandQueue::new(Signal::default());
        assert!(discard(&other, 3));
        assert_eq!(
            (
                queue.list.lock().commands.len(),
                other.list.lock().commands.len()
            ),
            (1, 1)
        );
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(discard(&queue, 4)));
        });
        let mut commands = Vec::new();
        queue.take(&mut commands);
        assert_eq!(payloads(&commands), [2, 1, 4]);
        commands.clear();
        queue.take(&mut commands);
        assert!(commands.is_empty());
        queue.end();
    }

    #[test]
    fn engine_does_not_rest_with_its_own_commands() {
        let queue = CommandQueue::new(Signal::default());
        queue.adopt_thread();
        assert!(discard(&queue, 1));
        assert!(!queue.rest());
        queue.take(&mut Vec::new());
        assert!(queue.rest());
        queue.rise();
        queue.end();
    }

    #[test]
    fn ended_queue_returns_commands_on_every_thread() {
        for by_force in [true, false] {
            let queue = CommandQueue::new(Signal::default());
            queue.adopt_thread();
            assert!(discard(&queue, 1));
            if by_force {
                assert_eq!(payloads(&queue.end()), [1]);
            } else {
                assert_eq!(
                    queue.take_or_end().map(|commands| payloads(&commands)),
                    Some(vec![1])
                );
                assert!(queue.take_or_end().is_none());
            }
            assert!(!discard(&queue, 2));
            std::thread::scope(|scope| {
                scope.spawn(|| assert!(!discard(&queue, 3)));
            });
        }
    }
}
