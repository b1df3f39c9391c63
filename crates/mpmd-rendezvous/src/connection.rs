//! A connection to the rendezvous server: requests and their answers, and the server's own
//! messages.

use std::collections::{BTreeMap, HashMap};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mpmd_base::block::mpsc::{self, RecvTimeoutError};
use mpmd_base::block::{Condvar, Mutex, now};

use super::clock_offset::clock;
use super::connect::{is_gone_soon, meet};
use super::contact::{ServiceContact, ServiceParting, system_time};
use super::hub::LocalLine;
use super::protocol::{
    self, ClientRequest, FrameBuffer, FrameError, ProcessStatus, RequestAnswer, ServerReply,
};
use super::{Down, JobMember, JoinConfig, RendezvousError, Succession};
use mpmd_base::deadline::after;
use mpmd_proto::wire::ProcessId;

/// The reason why a reply of the server makes this process close the connection.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum ConnectionEnd {
    /// An answer to the server's reply could not be sent.
    #[error(transparent)]
    Unsent(#[from] RendezvousError),
    #[error("it said something senseless: {0}")]
    Senseless(#[from] FrameError),
    /// The server reports the loss of a process that is not in the job.
    #[error("it says that process {process} is down, of {processes}")]
    NoSuchProcess {
        process: ProcessId,
        processes: usize,
    },
    /// The server sent several statuses of a process for one request, or more than a job has
    /// processes.
    #[error("it told the status of process {process} twice")]
    StatusTwice { process: ProcessId },
    #[error("it names more members than any job has")]
    TooManyMembers,
}

/// Connects to the server and starts a thread that reads the connection. Unless `is_started` is
/// true, the server may start later. Returns the connection and its local address.
pub(super) fn open(
    config: &JoinConfig,
    is_started: bool,
) -> Result<(Arc<ServerConnection>, SocketAddr), RendezvousError> {
    let (stream, ping) = meet(config, is_started)?;
    let environment = |doing: &str, e: std::io::Error| RendezvousError::Environment {
        doing: format!("{doing} the connection to the rendezvous service"),
        why: e.to_string(),
    };

    let local = stream
        .local_addr()
        .map_err(|e| environment("asking for the address of", e))?;

    // The server pings at an interval that follows its own peer timeout. A shorter one here
    // must not expire between two pings.
    let silence = config.peer_timeout.max(ping.saturating_mul(4));
    // Reads are short, so that the thread notices silence. A whole write may take the full
    // timeout.
    stream
        .set_read_timeout(Some(
            (silence / 4).clamp(Duration::from_millis(5), Duration::from_secs(1)),
        ))
        .and_then(|()| stream.set_write_timeout(Some(silence)))
        .map_err(|e| environment("setting up", e))?;

    let read = stream.try_clone().map_err(|e| environment("sharing", e))?;
    let link = Arc::new(ServerConnection {
        server: config.server.clone(),
        wire: ServerWire::Tcp {
            stream,
            writing: Mutex::new(()),
        },
        state: Mutex::new(ConnectionState::new(config.peer_timeout)),
        changed: Condvar::new(),
    });

    let listener = link.clone();
    std::thread::Builder::new()
        .name("mpmd-rendezvous".into())
        .spawn(move || listener.listen(read, silence))
        .map_err(|e| environment("starting a thread for", e))?;
    Ok((link, local))
}

/// A connection to the server. Any thread may send requests; one thread reads the answers.
pub(super) struct ServerConnection {
    pub(super) server: String,
    pub(super) wire: ServerWire,
    pub(super) state: Mutex<ConnectionState>,
    /// Notified when [`ConnectionState::contact`] is complete after the loss of the connection.
    pub(super) changed: Condvar,
}

/// The channel that carries messages to the server.
pub(super) enum ServerWire {
    Tcp {
        stream: TcpStream,
        /// Locked while a whole message is written. Closing the connection does not need the lock.
        writing: Mutex<()>,
    },
    /// A channel to a [`LocalServer`](super::LocalServer) of this process.
    Local(LocalLine),
}

pub(super) struct ConnectionState {
    pub(super) contact: ServiceContact,
    /// True from the loss of the connection until `contact` records it.
    pub(super) notes_loss: bool,
    pub(super) asked: u64,
    pub(super) asks: HashMap<u64, mpsc::Sender<TimedResult>>,
    /// The members received so far: the answer to a join request may come in several messages.
    pub(super) members: Vec<JobMember>,
    /// The reason why no more requests can be made; `None` while the connection is open.
    pub(super) ended: Option<RendezvousError>,
    /// True once all processes have joined. From then on this process can run without the server.
    pub(super) joined: bool,
    /// The reason why no answer is expected at present: the server of a running job is silent.
    /// `None` while the server sends signs of life.
    pub(super) silent: Option<RendezvousError>,
    /// True once the loss of the server has been reported. It is reported only once.
    pub(super) loss_told: bool,
    pub(super) leaving: bool,
    /// True once this process knows that all processes have completed a commit of its epoch.
    pub(super) is_whole: bool,
    /// The processes that can take over the service. The service tells them to a process that waits
    /// for a place.
    pub(super) succession: Option<Succession>,
    /// Number of processes in the epoch that this process has joined.
    pub(super) processes: usize,
    /// Number of processes that the next epoch could have: more than this epoch if others wait for
    /// a place.
    pub(super) next_processes: usize,
    /// Number of processes that could replace processes of this epoch.
    pub(super) replacements: usize,
    pub(super) tell: Option<Arc<dyn Fn(Down) + Send + Sync>>,
    pub(super) untold: Vec<Down>,
    pub(super) tell_busy: Option<Arc<TellBusy>>,
    /// The function that returns this process's status; `None` while the process starts.
    pub(super) describe: Option<Arc<Describe>>,
    /// The statuses received so far for a request of an observer.
    pub(super) statuses: BTreeMap<ProcessId, ProcessStatus>,
}

impl ConnectionState {
    pub(super) fn new(peer_timeout: Duration) -> Self {
        Self {
            contact: ServiceContact::new(peer_timeout, system_time()),
            notes_loss: false,
            asked: 0,
            asks: HashMap::new(),
            members: Vec::new(),
            ended: None,
            joined: false,
            silent: None,
            loss_told: false,
            leaving: false,
            is_whole: false,
            succession: None,
            processes: 0,
            next_processes: 0,
            replacements: 0,
            tell: None,
            untold: Vec::new(),
            tell_busy: None,
            describe: None,
            statuses: BTreeMap::new(),
        }
    }
}

/// The type of the function of [`Rendezvous::on_look`](super::Rendezvous::on_look).
pub(super) type Describe = dyn Fn(&[u8]) -> Vec<u8> + Send + Sync;

/// The type of the function of [`Rendezvous::on_busy`](super::Rendezvous::on_busy).
pub(super) type TellBusy = dyn Fn(u64, &[ProcessId], Duration) + Send + Sync;

/// The result of a request, with the time of the answer.
pub(super) struct TimedResult {
    /// Time of the answer in nanoseconds since 1970 by this process's clock. 0 without an answer.
    at: i64,
    result: Result<RequestAnswer, RendezvousError>,
}

/// The answer to a successful request, with its time.
pub(super) struct TimedAnswer {
    /// Time of the answer in nanoseconds since 1970 by this process's clock.
    pub(super) at: i64,
    pub(super) answer: RequestAnswer,
}

/// Time to wait for an answer beyond the peer timeout. The server's own error should arrive before,
/// because it names the late processes.
const SLACK: Duration = Duration::from_secs(2);

/// Time limit for recording a loss, see [`parting`](ServerConnection::parting). It should take a
/// second at most.
const PARTING_WITHIN: Duration = Duration::from_secs(5);

/// Largest number of statuses or members that are stored: the number of processes of the largest
/// job.
const MOST_STATUSES: usize = 1 << 20;

impl ServerConnection {
    /// Sends a request and blocks until its answer comes, for at most `peer_timeout` plus
    /// [`SLACK`]. If the server is silent, sends the request and fails at once.
    pub(super) fn ask(
        &self,
        peer_timeout: Duration,
        request: impl FnOnce(u64) -> ClientRequest,
    ) -> Result<TimedAnswer, RendezvousError> {
        let (sender, answer) = mpsc::channel();
        let ask = {
            let mut state = self.state.lock();
            if let Some(error) = &state.ended {
                return Err(error.clone());
            }
            state.asked += 1;
            let ask = state.asked;
            state.asks.insert(ask, sender);
            ask
        };

        if let Err(error) = self.send(request(ask)) {
            self.state.lock().asks.remove(&ask);
            return Err(error);
        }
        if let Some(silent) = self.silence_of(ask) {
            return Err(silent);
        }

        let answered = wait_awake(&answer, peer_timeout.saturating_add(SLACK));
        self.state.lock().asks.remove(&ask);
        match answered {
            Ok(TimedResult { at, result }) => result.map(|answer| TimedAnswer { at, answer }),
            Err(RecvTimeoutError::Timeout) => Err(self.gone(format!(
                "it has not answered for {:?}",
                peer_timeout.saturating_add(SLACK)
            ))),
            Err(RecvTimeoutError::Disconnected) => Err(self.gone("the connection ended".into())),
        }
    }

    /// Withdraws request `ask` and returns the error if the server is silent. Otherwise returns
    /// `None`.
    fn silence_of(&self, ask: u64) -> Option<RendezvousError> {
        let mut state = self.state.lock();
        let silent = state.silent.clone()?;
        state.asks.remove(&ask);
        Some(silent)
    }

    pub(super) fn send(&self, message: ClientRequest) -> Result<(), RendezvousError> {
        match &self.wire {
            ServerWire::Local(line) => {
                line.say(message);
                Ok(())
            }
            ServerWire::Tcp { stream, writing } => {
                let frame = protocol::frame(&message)?;
                let _writing = writing.lock();
                (&*stream).write_all(&frame).map_err(|e| {
                    // Part of a message may have been sent: no other message can follow it.
                    let _ = stream.shutdown(Shutdown::Both);
                    let ended = self.state.lock().ended.clone();
                    ended.unwrap_or_else(|| self.gone(e.to_string()))
                })
            }
        }
    }

    /// Handles the replies of a [`LocalServer`](super::LocalServer) until the connection ends.
    pub(super) fn listen_to(&self, replies: &mpsc::Receiver<ServerReply>) {
        let ended = replies.iter().find_map(|reply| self.hear(reply).err());
        let why = ended.map(|end| end.to_string());
        self.is_over(why.unwrap_or_else(|| "the connection was closed".to_owned()));
    }

    /// Reads replies and answers pings until the connection ends. If the server is silent, closes
    /// the connection unless this process has joined. A running job goes on, because the server may
    /// come back.
    fn listen(&self, mut stream: TcpStream, silence: Duration) {
        let mut frames = FrameBuffer::default();
        let mut bytes = vec![0; 16 * 1024];
        let mut heard = Instant::now();
        let mut looked = Instant::now();
        let why = loop {
            let read = stream.read(&mut bytes);
            let now = Instant::now();
            self.state.lock().contact.runs(system_time());
            // If this process itself was stopped, it cannot call the server silent.
            if now.duration_since(looked) > silence / 2 {
                heard = now;
            }
            looked = now;

            match read {
                Ok(0) => break "the connection was closed".to_owned(),
                Ok(n) => {
                    heard = now;
                    let mut state = self.state.lock();
                    state.silent = None;
                    state.contact.hears(system_time());
                    drop(state);
                    frames.push(&bytes[..n]);
                }
                Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    if now.duration_since(heard) > silence {
                        let why = format!("it has been silent for {silence:?}");
                        if !self.goes_on_without(&why) {
                            break why;
                        }
                    }
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => break e.to_string(),
            }

            if let Err(end) = self.hear_all(&mut frames) {
                break end.to_string();
            }
        };
        self.is_over(why);
    }

    /// Handles all messages that have arrived completely. Fails if a message is invalid or must end
    /// the connection.
    fn hear_all(&self, frames: &mut FrameBuffer) -> Result<(), ConnectionEnd> {
        loop {
            match frames.next::<ServerReply>()? {
                Some(reply) => self.hear(reply)?,
                None => return Ok(()),
            }
        }
    }

    /// Handles the end of the connection, for the reason `why`.
    fn is_over(&self, why: String) {
        let lost_at = system_time();
        let mut state = self.state.lock();
        let is_loss = state.ended.is_none();
        state.notes_loss = is_loss;
        drop(state);

        self.end(self.gone(why.clone()));
        if is_loss {
            self.tell_loss(why);

            let is_refused = match &self.wire {
                ServerWire::Tcp { .. } => is_gone_soon(&self.server),
                ServerWire::Local(_) => false,
            };

            let mut state = self.state.lock();
            state.contact.is_cut(lost_at, is_refused);
            state.notes_loss = false;
            self.changed.notify_all();
        }
    }

    /// Describes how this process's contact with the server ended. Right after the loss of the
    /// connection, waits for about a second at most.
    pub(super) fn parting(&self) -> ServiceParting {
        let until = after(now(), PARTING_WITHIN);
        let mut state = self.state.lock();
        while state.notes_loss {
            if self.changed.wait_until(&mut state, until).timed_out() {
                state.contact.is_cut(system_time(), false);
                break;
            }
        }
        ServiceParting::new(state.contact.clone())
    }

    /// Lets a process that has joined go on without the silent server: records the silence, fails
    /// all pending requests, and returns true. Returns false, and does nothing, if this process has
    /// not joined.
    fn goes_on_without(&self, why: &str) -> bool {
        let mut state = self.state.lock();
        if !state.joined {
            return false;
        }
        let error = state
            .silent
            .get_or_insert_with(|| self.gone(why.to_owned()))
            .clone();

        let waiting = std::mem::take(&mut state.asks);
        drop(state);
        for asker in waiting.into_values() {
            let _ = asker.send(TimedResult {
                at: 0,
                result: Err(error.clone()),
            });
        }

        self.tell_loss(why.to_owned());
        true
    }

    /// Reports the loss of the server to the function of `on_down`, once. Reports nothing while
    /// this process leaves the job.
    fn tell_loss(&self, why: String) {
        let mut state = self.state.lock();
        if state.leaving || std::mem::replace(&mut state.loss_told, true) {
            return;
        }
        drop(state);
        self.tell(Down::Server(why));
    }

    pub(super) fn hear(&self, reply: ServerReply) -> Result<(), ConnectionEnd> {
        match reply {
            ServerReply::Ping => self.send(ClientRequest::Pong)?,
            ServerReply::Look { look, words } => {
                let describe = self.state.lock().describe.clone();
                let status = describe.map(|describe| describe(&words));
                let status = status.ok_or("it is starting".to_owned());
                self.send(ClientRequest::Status { look, status })?;
            }
            ServerReply::Busy {
                epoch,
                processes,
                waited,
            } => {
                let tell = self.state.lock().tell_busy.clone();
                tell.iter().for_each(|tell| tell(epoch, &processes, waited));
            }
            ServerReply::Status {
                ask,
                process,
                status,
            } => self.hear_status(ask, process, status)?,
            ServerReply::Answer { ask, result } => self.hear_answer(ask, result)?,
            ServerReply::Down { process, why } => {
                let processes = self.state.lock().processes;
                if process.index() >= processes {
                    return Err(ConnectionEnd::NoSuchProcess { process, processes });
                }
                self.tell(Down::Process(process, why));
            }
            ServerReply::Place => self.state.lock().contact.has_place(),
            ServerReply::EpochOver { by } => {
                let processes = self.state.lock().processes;
                if by.index() >= processes {
                    return Err(ConnectionEnd::NoSuchProcess {
                        process: by,
                        processes,
                    });
                }
                self.tell(Down::Epoch(by));
            }
            ServerReply::CouldHave {
                processes,
                replacements,
            } => {
                let mut state = self.state.lock();
                state.next_processes = processes as usize;
                state.replacements = replacements as usize;
            }
            ServerReply::Heirs { run, addresses } => {
                self.state.lock().succession = Some(Succession::told(run, addresses));
            }
            ServerReply::Dropped { why } => {
                self.state.lock().contact.is_given_up(&why);
                let given_up = RendezvousError::GivenUp {
                    server: self.server.clone(),
                    why,
                };
                self.end(given_up.clone());
                self.tell_loss(given_up.to_string());
            }
        }
        Ok(())
    }

    /// Stores the status of a process that an observer's request `ask` asked for.
    fn hear_status(
        &self,
        ask: u64,
        process: ProcessId,
        status: ProcessStatus,
    ) -> Result<(), ConnectionEnd> {
        let mut state = self.state.lock();
        // A look that has timed out is no longer open.
        if state.asks.contains_key(&ask)
            && (state.statuses.len() >= MOST_STATUSES
                || state.statuses.insert(process, status).is_some())
        {
            return Err(ConnectionEnd::StatusTwice { process });
        }
        Ok(())
    }

    /// Passes an answer to the thread that waits for it. If more members will follow, stores those
    /// of this message.
    fn hear_answer(
        &self,
        ask: u64,
        mut result: Result<RequestAnswer, RendezvousError>,
    ) -> Result<(), ConnectionEnd> {
        let mut state = self.state.lock();
        if let Ok(RequestAnswer::Members { members, more, .. }) = &mut result {
            state.members.extend_from_slice(members);
            if state.members.len() > MOST_STATUSES {
                return Err(ConnectionEnd::TooManyMembers);
            }
            if *more {
                return Ok(());
            }

            state.processes = state.members.len();
            state.next_processes = state.members.len();
            state.replacements = 0;
            *members = std::mem::take(&mut state.members).into();
            state.contact.has_place();
            state.joined = true;
        }
        let asker = state.asks.remove(&ask);
        drop(state);

        if let Some(asker) = asker {
            // A request that has timed out has no receiver any more.
            let _ = asker.send(TimedResult {
                at: clock(),
                result,
            });
        }
        Ok(())
    }

    fn tell(&self, down: Down) {
        let mut state = self.state.lock();
        match state.tell.clone() {
            Some(tell) => {
                drop(state);
                tell(down);
            }
            // Each process goes down once, and so does the epoch. A server that reports more than
            // that is faulty.
            None if state.untold.len() > state.processes => {}
            None => state.untold.push(down),
        }
    }

    /// Returns true if a new connection to the server can be made, within about a second.
    pub(super) fn reaches_server(&self, config: &JoinConfig) -> bool {
        match &self.wire {
            ServerWire::Local(_) => true,
            ServerWire::Tcp { .. } => {
                let peer_timeout = Duration::from_secs(1);
                meet(
                    &JoinConfig {
                        peer_timeout,
                        ..config.clone()
                    },
                    true,
                )
                .is_ok()
            }
        }
    }

    /// Closes the connection. All pending requests fail with `why`, or with the earlier reason if
    /// it was closed before.
    pub(super) fn end(&self, why: RendezvousError) {
        let mut state = self.state.lock();
        let why = state.ended.get_or_insert(why).clone();
        let waiting = std::mem::take(&mut state.asks);
        drop(state);

        for asker in waiting.into_values() {
            let _ = asker.send(TimedResult {
                at: 0,
                result: Err(why.clone()),
            });
        }

        match &self.wire {
            ServerWire::Tcp { stream, .. } => _ = stream.shutdown(Shutdown::Both),
            ServerWire::Local(line) => line.hang_up(),
        }
    }

    fn gone(&self, why: String) -> RendezvousError {
        RendezvousError::ServerGone {
            server: self.server.clone(),
            why,
        }
    }

    pub(super) fn senseless(&self, answer: &RequestAnswer) -> RendezvousError {
        let kind = match answer {
            RequestAnswer::Done => "done",
            RequestAnswer::Members { .. } => "members",
            RequestAnswer::Value(_) => "a value",
            RequestAnswer::Clock(_) => "a time",
        };
        self.gone(format!("it answered with {kind}, which was not asked for"))
    }
}

/// Waits for an answer, for at most `peer_timeout`. Time in which this process was stopped hardly
/// counts, because the whole job may have been stopped.
fn wait_awake(
    answer: &mpsc::Receiver<TimedResult>,
    peer_timeout: Duration,
) -> Result<TimedResult, RecvTimeoutError> {
    const SLICE: Duration = Duration::from_secs(1);
    let mut left = peer_timeout;
    loop {
        let slice = left.min(SLICE);
        match answer.recv_timeout(slice) {
            Err(RecvTimeoutError::Timeout) if left > slice => left -= slice,
            answered => return answered,
        }
    }
}

#[cfg(test)]
mod tests;
