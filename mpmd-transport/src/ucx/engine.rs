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

use mpmd_base::block::{CoreBudget, SpinPace, SpinPolicy, host_cores};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::address::UcxAddress;
use super::queue::{CommandQueue, EngineCommand};
use super::safe::{UcxWorker, WorkerEvent};
use super::state::{PendingOperation, UcxEngine, id};
use super::{Spin, UcxConfig, settings, sys};
use crate::transport::TransportError;
use mpmd_proto::wire::ProcessId;

/// The constants of the engine's spin policy: how long it polls before it sleeps.
const PACE: SpinPace = SpinPace {
    first: Duration::from_micros(50),
    longest: Duration::from_micros(50),
    worth: Duration::from_micros(100),
    looks: 4,
    yields: 16,
    alone: Duration::from_micros(2),
    most_skipped: 0,
};
/// Longest sleep of the engine, in case UCX fails to wake it.
const LONGEST_SLEEP: Duration = Duration::from_millis(100);
/// Longest sleep of the engine while one of its deadlines is pending.
const SHORT_SLEEP: Duration = Duration::from_millis(5);

/// An engine whose thread is running and has opened UCX.
pub(super) struct StartedEngine {
    /// The worker's address, which the process publishes to its peers.
    pub(super) address: String,
    pub(super) queue: Arc<CommandQueue>,
}

/// Starts the engine's thread and waits until UCX is open.
pub(super) fn start(processes: usize) -> Result<StartedEngine, TransportError> {
    let (tell, told) = mpsc::channel();
    let run = move || {
        let opened = UcxEngine::open(processes).and_then(|engine| Ok((engine.address()?, engine)));
        match opened {
            Ok((address, engine)) => {
                let queue = engine.queue.clone();
                if tell.send(Ok(StartedEngine { address, queue })).is_ok() {
                    engine.run();
                }
            }
            Err(error) => {
                let _ = tell.send(Err(error));
            }
        }
    };

    std::thread::Builder::new()
        .name("mpmd-ucx".to_owned())
        .spawn(run)
        .map_err(|error| TransportError::Environment {
            doing: "starting UCX's thread".to_owned(),
            why: error.to_string(),
        })?;
    told.recv().unwrap_or(Err(TransportError::Closed))
}

/// Creates the worker for a job of `processes` processes, for the engine or for `examine`. Fails if
/// there is no UCX library or if UCX cannot be opened.
pub(super) fn worker(processes: usize) -> Result<UcxWorker, TransportError> {
    let library = sys::library().map_err(|why| TransportError::Unavailable {
        transport: super::NAME,
        why: why.to_string(),
    })?;
    let settings = settings::unless_set(library.version, |variable| std::env::var(variable).ok());
    UcxWorker::new(processes, &settings, id::ALL).map_err(|error| error.environment("opening UCX"))
}

impl UcxEngine {
    /// Opens UCX for a job of `processes` processes. The engine must stay on the calling thread.
    fn open(processes: usize) -> Result<Self, TransportError> {
        let worker = worker(processes)?;
        worker
            .descriptor()
            .map_err(|error| error.environment("opening UCX"))?;

        Ok(Self {
            queue: Arc::new(CommandQueue::new(worker.signal())),
            moves_cuda: worker.moves_cuda(),
            worker,
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
        })
    }

    /// Returns the worker's address, which the process publishes to its peers.
    fn address(&self) -> Result<String, TransportError> {
        let worker = self.worker.address();
        let worker = worker.map_err(|error| error.environment("opening UCX"))?;
        Ok(UcxAddress::format(
            &worker,
            &UcxAddress::common(),
            self.moves_cuda,
        ))
    }

    /// Runs the engine's loop until the shutdown is done.
    fn run(mut self) {
        self.queue.adopt_thread();
        let mut commands = Vec::new();
        let mut events = Vec::new();
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

            let gap = self
                .gap
                .get_or_insert_with(|| self.policy.begin(Instant::now()));
            if !gap.wait() {
                self.sleep();
            }
        }
        self.end();
    }

    /// Sleeps until UCX reports work or another thread queues a command.
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
                let sleep = Timespec {
                    tv_sec: 0,
                    tv_nsec: i64::from(sleep.subsec_nanos()),
                };
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

    /// Handles a command from another thread. A message to post is only stored, to be sent later.
    fn carry_out(&mut self, command: EngineCommand) {
        if !matches!(command, EngineCommand::Post { .. }) {
            self.send_stored();
        }

        match command {
            EngineCommand::Connect(config, reply) => self.connect(*config, reply),
            EngineCommand::Start(handler) => self.start_handler(handler),
            EngineCommand::Post {
                to,
                header,
                payload,
                ticket,
            } => self.post(to, &header, payload, ticket),
            EngineCommand::Fetch {
                payload,
                from,
                into,
                then,
            } => self.fetch(payload, from, into, then),
            EngineCommand::Discard { payload } => self.discard(payload),
            EngineCommand::GiveUp { peer, why } => {
                self.shut_out(peer, TransportError::PeerGone { peer, why })
            }
            EngineCommand::Close(deadline, closed) => self.begin_to_leave(deadline, Some(closed)),
            EngineCommand::Abandon => self.begin_to_leave(Duration::ZERO, None),
        }
    }

    /// Handles an event of the worker.
    fn happened(&mut self, event: WorkerEvent) {
        match event {
            WorkerEvent::Message {
                id: id::MEET,
                header,
                body,
            } => {
                self.greeted(header.used(), body);
            }
            WorkerEvent::Message { id, header, body } => self.arrived(id, header.used(), body),
            WorkerEvent::Ended(op, result, held) => self.ended(op, result, held),
            WorkerEvent::Failed(endpoint, why) => {
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
}

impl Drop for UcxEngine {
    fn drop(&mut self) {
        // A handler's panic ends the engine. Callers that wait for a fetch still get an error.
        if std::thread::panicking() {
            for command in self.queue.end() {
                if let EngineCommand::Fetch { then, .. } = command {
                    then(Err(TransportError::Closed));
                }
            }

            let waiting = self
                .operations
                .iter_mut()
                .flatten()
                .filter_map(PendingOperation::take_fetch);
            for then in waiting.collect::<Vec<_>>() {
                then(Err(TransportError::Closed));
            }
        }
    }
}
