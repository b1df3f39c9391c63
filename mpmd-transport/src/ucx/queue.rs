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
    /// UCX's own description of the lanes to each peer.
    pub(super) lanes: Vec<String>,
    /// True if memory of CUDA devices can be sent without a copy: UCX on both ends supports it.
    pub(super) moves_cuda: Vec<bool>,
}

/// A request to the engine.
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
    /// Shuts out the peer, because another part of the program knows that it is gone.
    GiveUp {
        peer: ProcessId,
        why: String,
    },
    /// Closes in order within the time limit, and notifies the sender at the end.
    Close(Duration, mpsc::Sender<()>),
    /// Closes at once: the transport was dropped.
    Abandon,
}

/// Commands on their way to the engine.
pub(super) struct CommandQueue {
    list: Mutex<CommandList>,
    /// True if there may be commands in the list.
    some: AtomicBool,
    /// True if the engine sleeps, or is about to.
    asleep: AtomicBool,
    signal: Signal,
}

/// The commands of all threads but the engine's.
struct CommandList {
    commands: Vec<EngineCommand>,
    /// True once the engine takes no more commands.
    ended: bool,
}

/// The commands that an engine's thread gives to its own engine.
struct OwnCommands {
    /// The address of the engine's queue; null if no engine runs on this thread.
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

    /// Makes this thread the engine's: its own commands need no lock from here on.
    pub(super) fn adopt_thread(&self) {
        OWN.with_borrow_mut(|own| own.queue = self);
    }

    /// Runs `act` on the list of this thread if it is the engine's. Otherwise returns `None`.
    fn on_own<T>(&self, act: impl FnOnce(&mut Vec<EngineCommand>) -> T) -> Option<T> {
        // A thread that is ending has lost its list, and is not the engine's.
        let done = OWN.try_with(|own| {
            let mut own = own.borrow_mut();
            std::ptr::eq(own.queue, self).then(|| act(&mut own.commands))
        });
        done.ok().flatten()
    }

    /// Queues a command and wakes the engine. After the engine's end, returns the command as an
    /// error.
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

    /// Moves all commands to `into`, which is empty. Called on the engine's thread.
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

    /// Announces that the engine is about to sleep. Returns false, and announces nothing, if there
    /// are commands.
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

    /// Returns all commands. If there are none, ends the queue and returns `None`.
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

    /// Ends the queue; returns the commands that were not carried out.
    pub(super) fn end(&self) -> Vec<EngineCommand> {
        let mut commands = self.leave_thread();
        let mut list = self.list.lock();
        list.ended = true;
        commands.append(&mut list.commands);
        commands
    }

    /// Ends the work of [`CommandQueue::adopt_thread`]; returns the commands of this thread.
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

/// A handle to the payload of a received message, which still lies with its sender. A fetch copies
/// it here. Dropping the handle without a fetch discards the payload.
pub(super) struct RemotePayload {
    pub(super) queue: Arc<CommandQueue>,
    pub(super) payload: u64,
    pub(super) from: ProcessId,
    pub(super) bytes: u64,
    /// True once it was fetched; then `drop` discards nothing.
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
