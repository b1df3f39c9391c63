//! The engine: the thread that owns every object of UCX. It carries out commands, lets UCX work,
//! and sleeps.
//!
//! One turn of the loop lets UCX progress, reports the events, and carries out the commands. If a
//! handler posts a message during a call, the message is sent in the next turn. After a turn
//! without work, [`SpinPolicy`] decides whether to poll again or to sleep on the worker's
//! descriptor. A command wakes the engine.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use mpmd_base::block::{CoreBudget, Gap, Pace, SpinPolicy, host_cores};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::address::Address;
use super::leaving::Leaving;
use super::meeting::Meeting;
use super::queue::{Command, Queue};
use super::roll_call::RollCall;
use super::safe::{Descriptor, EndpointId, Event, OpId, Worker};
use super::traffic::{Operation, Said, Stored};
use super::{Spin, UcxConfig, settings, sys};
use crate::handshake::Handshake;
use crate::transport::{Handler, TransportError};
use mpmd_proto::wire::ProcessId;

/// Ids of the kinds of messages.
pub(super) mod id {
    /// Id of a part of a handshake, which is the payload. The header is the id that the sender
    /// claims.
    pub(in super::super) const MEET: u32 = 1;
    /// Id of a message for the handler. The header is the sender's id, the pass that the receiver
    /// expects and a `Header` of this library; the payload is that header's.
    pub(in super::super) const MESSAGE: u32 = 2;
    /// Id of a goodbye: the sender neither receives nor sends messages any more. The header is the
    /// sender's id and the pass that the receiver expects.
    pub(in super::super) const BYE: u32 = 3;
    /// Id of the answer to a goodbye: the sender no longer reads the memory of the leaving process.
    /// Header as for `BYE`.
    pub(in super::super) const HEARD: u32 = 4;
    /// Id of a ping, which asks for an answer. Header as for `BYE`.
    pub(in super::super) const PING: u32 = 5;
    /// Id of the answer to a ping. Header as for `BYE`.
    pub(in super::super) const PONG: u32 = 6;
    pub(in super::super) const ALL: [u32; 6] = [MEET, MESSAGE, BYE, HEARD, PING, PONG];
}

const PACE: Pace = Pace {
    first: Duration::from_micros(50),
    longest: Duration::from_micros(50),
    worth: Duration::from_micros(100),
    looks: 4,
    yields: 16,
    alone: Duration::from_micros(2),
    most_skipped: 0,
};
/// Limit of a sleep, in case UCX does not wake the engine.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);
/// Limit of a sleep while a deadline is pending.
const SHORT_SLEEP: Duration = Duration::from_millis(5);

/// A peer and the state of its connection.
pub(super) struct Peer {
    pub(super) endpoint: Option<EndpointId>,
    /// True if the peer's UCX can move memory of CUDA devices.
    pub(super) moves_cuda: bool,
    /// This process's end of the handshake with the peer.
    pub(super) handshake: Option<Handshake>,
    /// The pass (a secret number) that the peer must send with each message; known from the
    /// handshake.
    pub(super) expected: Option<u32>,
    /// The pass that the peer expects with each message.
    pub(super) pass: Option<u32>,
    /// The reason why the peer is gone; `None` until then.
    pub(super) down: Option<TransportError>,
    /// Number of messages in flight to the peer. `fetching` is the number of payloads being fetched
    /// from it.
    pub(super) sending: usize,
    pub(super) fetching: usize,
    pub(super) heard_bye: bool,
    /// True once this process has answered the peer's goodbye.
    pub(super) answered: bool,
    /// True once the peer has answered this process's goodbye.
    pub(super) has_heard: bool,
    /// True if the peer has answered since the last death of another peer, or if no peer has died.
    pub(super) in_reach: bool,
}

pub(super) struct Engine {
    pub(super) worker: Worker,
    /// True if UCX of this process can move memory of CUDA devices.
    pub(super) moves_cuda: bool,
    pub(super) queue: Arc<Queue>,
    pub(super) me: ProcessId,
    /// The peers by process. This process's own entry is not used.
    pub(super) peers: Vec<Peer>,
    /// The peer process of each endpoint.
    pub(super) processes: HashMap<EndpointId, ProcessId>,
    /// Operations that UCX has not ended yet, by id.
    pub(super) operations: Vec<Option<Operation>>,
    /// Payloads that still lie with their senders, by number: (sender, descriptor, bytes).
    pub(super) payloads: HashMap<u64, (ProcessId, Descriptor, usize)>,
    pub(super) next_payload: u64,
    pub(super) handler: Option<Arc<dyn Handler>>,
    /// Messages that were posted in this turn and are not sent yet.
    pub(super) stored: Vec<Stored>,
    /// Calls for the handler from before a handler was set.
    pub(super) early: Vec<Said>,
    pub(super) leaving: Option<Leaving>,
    pub(super) roll_call: Option<RollCall>,
    pub(super) meeting: Option<Meeting>,
    /// Hellos that arrived before this process started to connect: (sender, bytes).
    pub(super) hellos: Vec<(ProcessId, Vec<u8>)>,
    policy: SpinPolicy,
    /// The time since the last work, if the last poll found nothing.
    gap: Option<Gap>,
}

/// Starts the engine's thread and waits until UCX is open. Returns the address for peers, and the
/// queue for commands.
pub(super) fn start(processes: usize) -> Result<(String, Arc<Queue>), TransportError> {
    let (tell, told) = mpsc::channel();
    let run = move || match Engine::open(processes) {
        Ok((engine, address)) => {
            let queue = engine.queue.clone();
            if tell.send(Ok((address, queue))).is_ok() {
                engine.run();
            }
        }
        Err(error) => {
            let _ = tell.send(Err(error));
        }
    };
    std::thread::Builder::new().name("mpmd-ucx".to_owned()).spawn(run).map_err(|error| {
        TransportError::Environment {
            doing: "starting UCX's thread".to_owned(),
            why: error.to_string(),
        }
    })?;
    told.recv().unwrap_or(Err(TransportError::Closed))
}

/// Creates the worker for a job of `processes` processes. Fails if there is no library or UCX
/// cannot be opened. The engine and `examine` use it.
pub(super) fn worker(processes: usize) -> Result<Worker, TransportError> {
    let library = sys::library().map_err(|why| TransportError::Unavailable {
        transport: super::NAME,
        why: why.to_owned(),
    })?;
    let settings = settings::unless_set(library.version, |variable| std::env::var(variable).ok());
    Worker::new(processes, &settings, id::ALL).map_err(|error| error.environment("opening UCX"))
}

impl Engine {
    fn open(processes: usize) -> Result<(Self, String), TransportError> {
        let worker = worker(processes)?;
        let wrong = |error: super::result::UcxError| error.environment("opening UCX");
        worker.descriptor().map_err(wrong)?;
        let moves_cuda = worker.moves_cuda();
        let address =
            Address::format(&worker.address().map_err(wrong)?, &Address::common(), moves_cuda);
        let engine = Self {
            queue: Arc::new(Queue::new(worker.signal())),
            worker,
            moves_cuda,
            me: ProcessId(0),
            peers: Vec::new(),
            processes: HashMap::new(),
            operations: Vec::new(),
            payloads: HashMap::new(),
            next_payload: 0,
            handler: None,
            stored: Vec::new(),
            early: Vec::new(),
            leaving: None,
            roll_call: None,
            meeting: None,
            hellos: Vec::new(),
            policy: SpinPolicy::new(PACE, Spin::Never),
            gap: None,
        };
        Ok((engine, address))
    }

    fn run(mut self) {
        self.queue.adopt_thread();
        let (mut commands, mut events) = (Vec::new(), Vec::new());
        loop {
            // Events come before commands: so a goodbye that has arrived is handled before anything
            // more is fetched from the leaving peer.
            let mut worked = self.worker.progress();
            self.worker.collect(&mut events);
            worked |= !events.is_empty();
            for event in events.drain(..) {
                self.happened(event);
            }
            self.queue.take(&mut commands);
            worked |= !commands.is_empty();
            for command in commands.drain(..) {
                self.carry_out(command);
            }
            self.send_stored();
            if self.meeting.is_some() {
                self.meet();
            }
            if self.roll_call.is_some() {
                self.call_the_roll();
            }
            if self.leaving.is_some() && self.leave() {
                break;
            }
            if worked {
                if let Some(gap) = self.gap.take() {
                    self.policy.end(&gap, Instant::now());
                }
                continue;
            }
            let gap = self.gap.get_or_insert_with(|| self.policy.begin(Instant::now()));
            if !gap.wait() {
                self.sleep();
            }
        }
        self.end();
    }

    fn sleep(&self) {
        if !self.queue.rest() {
            return;
        }
        let armed = self.worker.arm();
        match (&armed, self.worker.descriptor()) {
            (Ok(false), _) => {}
            (Ok(true), Ok(descriptor)) => {
                let hurry =
                    self.meeting.is_some() || self.leaving.is_some() || self.roll_call.is_some();
                let sleep = if hurry { SHORT_SLEEP } else { LONGEST_SLEEP };
                let sleep = Timespec { tv_sec: 0, tv_nsec: i64::from(sleep.subsec_nanos()) };
                // Interrupted or not, the next turn polls.
                let _ = poll(&mut [PollFd::new(&descriptor, PollFlags::IN)], Some(&sleep));
            }
            _ => {
                // Without the descriptor, the engine can only poll now and then.
                tracing::debug!(?armed, "UCX cannot wake this thread");
                std::thread::sleep(Duration::from_micros(200));
            }
        }
        self.queue.rise();
    }

    /// Carries out a command; of a post, only stores the message.
    fn carry_out(&mut self, command: Command) {
        if !matches!(command, Command::Post { .. }) {
            self.send_stored();
        }
        match command {
            Command::Connect(config, reply) => self.connect(*config, reply),
            Command::Start(handler) => self.start_handler(handler),
            Command::Post { to, header, payload, ticket } => {
                self.post(to, &header, payload, ticket)
            }
            Command::Fetch { payload, from, into, then } => self.fetch(payload, from, into, then),
            Command::Discard { payload } => self.discard(payload),
            Command::GiveUp { peer, why } => {
                self.shut_out(peer, TransportError::PeerGone { peer, why })
            }
            Command::Close(deadline, closed) => self.begin_to_leave(deadline, Some(closed)),
            Command::Abandon => self.begin_to_leave(Duration::ZERO, None),
        }
    }

    fn happened(&mut self, event: Event) {
        match event {
            Event::Message { id: id::MEET, header: (header, bytes), body } => {
                self.greeted(&header[..bytes], body);
            }
            Event::Message { id, header: (header, bytes), body } => {
                self.arrived(id, &header[..bytes], body)
            }
            Event::Ended(op, result, held) => self.ended(op, result, held),
            Event::Failed(endpoint, why) => {
                if let Some(peer) = self.processes.get(&endpoint).copied() {
                    self.lost(peer, &why.to_string());
                }
            }
        }
    }

    /// Sets how long the engine polls before it sleeps.
    pub(super) fn set_spin(&mut self, config: &UcxConfig) {
        let budget = CoreBudget::of(config.neighbours, config.neighbours, host_cores());
        let polls = budget.under(config.spin) != CoreBudget::None;
        self.policy = SpinPolicy::new(PACE, if polls { config.spin } else { Spin::Never });
        self.gap = None;
    }

    /// Records the purpose of an operation in flight, until the operation ends.
    pub(super) fn note(&mut self, op: OpId, operation: Operation) {
        let number = op.index();
        if self.operations.len() <= number {
            self.operations.resize_with(number + 1, || None);
        }
        self.operations[number] = Some(operation);
    }
}

/// Returns the instant that is `time` from now.
pub(super) fn after(time: Duration) -> Instant {
    crate::deadline::after(Instant::now(), time)
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A handler's panic ends the engine. Callers that wait for a fetch still get an error.
        if std::thread::panicking() {
            for command in self.queue.end() {
                if let Command::Fetch { then, .. } = command {
                    then(Err(TransportError::Closed));
                }
            }
            let waiting = self.operations.iter_mut().flatten().filter_map(Operation::take_fetch);
            for then in waiting.collect::<Vec<_>>() {
                then(Err(TransportError::Closed));
            }
        }
    }
}
