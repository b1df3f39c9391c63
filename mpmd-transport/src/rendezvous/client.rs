//! A process's side of the rendezvous: its connection to the server.

use std::collections::HashMap;
use std::fmt;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connect::meet;
use super::protocol::{self, Answer, Frames, Reply, Request};
use super::server::clock;
use super::{Down, Member, RendezvousError, Report, Token};
use crate::wire::ProcessId;

/// This process's connection to the job's [`Server`](super::Server). Any thread may call its
/// methods. Those that ask the server block, for a bounded time.
///
/// If it is dropped without [`leave`](Self::leave), the process counts as died, and the others are
/// told.
pub struct Rendezvous {
    link: Arc<Connection>,
    config: JoinConfig,
    local: SocketAddr,
    clock_offset: i64,
}

/// The difference between a process's clock and the server's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ClockOffset {
    /// Nanoseconds to add to this process's clock (time since 1970) to get the server's.
    pub offset: i64,
    /// The largest possible error of `offset` in nanoseconds: half of the round trip.
    pub bound: u64,
}

/// The server to join, and this process's identity in the job.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// The server, as `host:port`.
    pub server: String,
    /// This process's id in the job.
    pub process: ProcessId,
    /// Number of processes in the job, as far as this process knows.
    pub processes: usize,
    /// The job's secret.
    pub token: Token,
    /// The peer timeout: the longest wait for the server, for the other processes, and for a sign
    /// of life.
    pub peer_timeout: Duration,
}

impl Rendezvous {
    /// Connects to the server, which may start later, and compares clocks with it. Starts a thread
    /// that reads the connection.
    ///
    /// # Errors
    ///
    /// - [`Unreachable`](RendezvousError::Unreachable) after `peer_timeout`.
    /// - [`Token`](RendezvousError::Token), [`Version`](RendezvousError::Version) or
    ///   [`Stranger`](RendezvousError::Stranger) by the server's answer to the preamble.
    /// - [`NoSuchProcess`](RendezvousError::NoSuchProcess) if `process` is not below `processes`.
    /// - [`ServerGone`](RendezvousError::ServerGone) or
    ///   [`Environment`](RendezvousError::Environment) if the connection fails.
    pub fn connect(config: JoinConfig) -> Result<Self, RendezvousError> {
        if config.process.index() >= config.processes {
            let JoinConfig { process, processes, .. } = config;
            return Err(RendezvousError::NoSuchProcess { process, processes });
        }
        let (stream, ping) = meet(&config)?;
        let environment = |doing: &str, e: std::io::Error| RendezvousError::Environment {
            doing: format!("{doing} the connection to the rendezvous service"),
            why: e.to_string(),
        };
        let local = stream.local_addr().map_err(|e| environment("asking for the address of", e))?;
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
        let link = Arc::new(Connection {
            server: config.server.clone(),
            processes: config.processes,
            stream,
            writing: Mutex::new(()),
            state: Mutex::new(State::default()),
        });
        let listener = link.clone();
        std::thread::Builder::new()
            .name("mpmd-rendezvous".into())
            .spawn(move || listener.listen(read, silence))
            .map_err(|e| environment("starting a thread for", e))?;
        let mut this = Self { link, config, local, clock_offset: 0 };
        this.clock_offset = this.compare_clocks()?.offset;
        Ok(this)
    }

    /// The IP address of this end of the connection. It belongs to an interface by which at least
    /// the server, and most likely the job's other hosts, can reach this process.
    pub fn local_ip(&self) -> IpAddr {
        self.local.ip()
    }

    /// Nanoseconds to add to this process's clock (time since 1970) to get the server's.
    ///
    /// Measured by [`connect`](Self::connect), from the quickest of a few round trips.
    pub fn clock_offset(&self) -> i64 {
        self.clock_offset
    }

    /// Joins the job and waits for all others, at most the config's `peer_timeout` plus two
    /// seconds. Returns the descriptions of all processes, by process number.
    ///
    /// # Errors
    ///
    /// [`Missing`](RendezvousError::Missing) if other processes do not join in time.
    /// [`Duplicate`](RendezvousError::Duplicate), [`Count`](RendezvousError::Count),
    /// [`Complete`](RendezvousError::Complete) or [`Program`](RendezvousError::Program), each with
    /// the processes concerned. [`ServerGone`](RendezvousError::ServerGone) if the connection has
    /// ended.
    pub fn join(&self, member: Member) -> Result<Vec<Member>, RendezvousError> {
        let JoinConfig { process, processes, peer_timeout, .. } = self.config;
        let processes = processes as u64;
        let join = |ask| Request::Join { ask, process, processes, peer_timeout, member };
        match self.link.ask(peer_timeout, join)?.1 {
            Answer::Members { members, .. } if members.len() as u64 == processes => {
                Ok(members.to_vec())
            }
            other => Err(self.link.senseless(&other)),
        }
    }

    /// Sets a value that all processes can [`get`](Self::get), replacing the earlier one of `key`.
    /// Blocks until the server answers.
    ///
    /// # Errors
    ///
    /// [`TooLong`](RendezvousError::TooLong) if the value is longer than
    /// [`MAX_VALUE_BYTES`](super::MAX_VALUE_BYTES), or the key than 1024 bytes;
    /// [`ServerGone`](RendezvousError::ServerGone) if the connection has ended or the server is
    /// silent.
    pub fn set(&self, key: impl Into<String>, value: Vec<u8>) -> Result<(), RendezvousError> {
        let key = key.into();
        if value.len() > protocol::MAX_VALUE_BYTES {
            let (what, limit) = (format!("the value of {key:?}"), protocol::MAX_VALUE_BYTES);
            return Err(RendezvousError::TooLong { what, bytes: value.len(), limit });
        }
        self.link.ask(self.config.peer_timeout, |ask| Request::Set { ask, key, value }).map(drop)
    }

    /// Returns the value under `key`. Blocks until a process sets one, at most `peer_timeout` plus
    /// two seconds.
    ///
    /// # Errors
    ///
    /// [`Unset`](RendezvousError::Unset) if no process sets one within `peer_timeout`;
    /// [`TooLong`](RendezvousError::TooLong) for a key above 1024 bytes;
    /// [`ServerGone`](RendezvousError::ServerGone) if the server does not answer.
    pub fn get(
        &self,
        key: impl Into<String>,
        peer_timeout: Duration,
    ) -> Result<Vec<u8>, RendezvousError> {
        let key = key.into();
        match self.link.ask(peer_timeout, |ask| Request::Get { ask, key, peer_timeout })?.1 {
            Answer::Value(value) => Ok(value),
            other => Err(self.link.senseless(&other)),
        }
    }

    /// Blocks until all processes of the job wait here, at most `peer_timeout` plus two seconds. A
    /// name can be used again.
    ///
    /// # Errors
    ///
    /// - [`Barrier`](RendezvousError::Barrier), with the processes that did not come in time.
    /// - [`BarrierBroken`](RendezvousError::BarrierBroken) as soon as a process can no longer come.
    /// - [`OutOfTurn`](RendezvousError::OutOfTurn) before [`join`](Self::join), or if this process
    ///   already waits under this name.
    /// - [`TooLong`](RendezvousError::TooLong) for a name above 1024 bytes.
    /// - [`ServerGone`](RendezvousError::ServerGone) if the connection has ended.
    pub fn barrier(
        &self,
        name: impl Into<String>,
        peer_timeout: Duration,
    ) -> Result<(), RendezvousError> {
        let name = name.into();
        self.link.ask(peer_timeout, |ask| Request::Barrier { ask, name, peer_timeout }).map(drop)
    }

    /// Sets the function that is called for every process, and for the server, if it goes without
    /// leaving in order. Events from before this call are reported at once.
    ///
    /// `tell` runs on the thread that also answers the server's pings, so it must not block.
    pub fn on_down(&self, tell: Box<dyn Fn(Down) + Send + Sync>) {
        let tell: Arc<dyn Fn(Down) + Send + Sync> = Arc::from(tell);
        let mut state = self.link.state.lock();
        state.tell = Some(tell.clone());
        let earlier = std::mem::take(&mut state.untold);
        drop(state);
        for down in earlier {
            tell(down);
        }
    }

    /// Reports the failure that this process ends with to the server's owner. Only the first report
    /// of a process counts.
    ///
    /// Blocks until the answer comes, and waits for it at most four seconds. After success the
    /// owner knows the failure, however this process ends.
    ///
    /// # Errors
    ///
    /// [`OutOfTurn`](RendezvousError::OutOfTurn) before [`join`](Self::join);
    /// [`ServerGone`](RendezvousError::ServerGone) if no answer comes.
    pub fn report(&self, report: Report) -> Result<(), RendezvousError> {
        self.link.ask(REPORT_WITHIN, |ask| Request::Report { ask, report }).map(drop)
    }

    /// Leaves the job in order: the others will not be told that this process is down. Waits for
    /// the server's answer, at most five seconds. Does not wait if the server is known to be
    /// silent. Closes the connection.
    ///
    /// # Errors
    ///
    /// [`ServerGone`](RendezvousError::ServerGone) if no answer comes, or
    /// [`Left`](RendezvousError::Left) if this process has left before.
    pub fn leave(&self) -> Result<(), RendezvousError> {
        self.link.state.lock().leaving = true;
        let peer_timeout = self.config.peer_timeout.min(LEAVE_WITHIN);
        let left = self.link.ask(peer_timeout, |ask| Request::Leave { ask }).map(drop);
        if left.is_ok() {
            // The server closes after its answer, and the listening thread may already have
            // recorded that.
            self.link.state.lock().ended = Some(RendezvousError::Left);
        }
        self.link.end(RendezvousError::Left);
        left
    }

    /// Compares clocks with the server: makes eight round trips and uses the quickest.
    ///
    /// # Errors
    ///
    /// [`ServerGone`](RendezvousError::ServerGone) if the server does not answer.
    pub fn compare_clocks(&self) -> Result<ClockOffset, RendezvousError> {
        const TRIPS: usize = 8;
        let mut trips = Vec::with_capacity(TRIPS);
        for _ in 0..TRIPS {
            let asked = clock();
            match self.link.ask(self.config.peer_timeout, |ask| Request::Clock { ask })? {
                (answered, Answer::Clock(server)) => trips.push((asked, server, answered)),
                (_, other) => return Err(self.link.senseless(&other)),
            }
        }
        Ok(quickest(&trips))
    }
}

/// Returns the clock offset by the quickest of some round trips, which has the smallest error. Each
/// trip is (time asked, server's clock, time answered), in nanoseconds. Without a usable trip, the
/// offset is 0 and its bound huge.
fn quickest(trips: &[(i64, i64, i64)]) -> ClockOffset {
    // A clock that was set back meanwhile makes the trip useless.
    let found = trips.iter().filter(|(asked, _, answered)| answered >= asked).map(
        |(asked, server, answered)| {
            let trip = answered.saturating_sub(*asked);
            (trip, server.saturating_sub(asked.saturating_add(trip / 2)))
        },
    );
    let (trip, offset) = found.min().unwrap_or((i64::MAX, 0));
    ClockOffset { offset, bound: (trip / 2 + 1).unsigned_abs() }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        // The listening thread sees the end of the connection and ends too. There is nothing to
        // wait for.
        self.link.end(RendezvousError::Left);
    }
}

impl fmt::Debug for Rendezvous {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let JoinConfig { process, processes, server, .. } = &self.config;
        write!(f, "Rendezvous(process {process} of {processes} at {server})")
    }
}

struct Connection {
    server: String,
    /// Number of processes in the job, as far as this process knows.
    processes: usize,
    stream: TcpStream,
    /// Held while a whole message is written. Closing the connection does not need it.
    writing: Mutex<()>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    asked: u64,
    asks: HashMap<u64, mpsc::Sender<Answered>>,
    /// The members received so far: the answer to `join` may come in parts.
    members: Vec<Member>,
    /// The reason why no more requests can be made; `None` while the connection stands.
    ended: Option<RendezvousError>,
    /// True once the job is complete. From then on this process can do without the server.
    joined: bool,
    /// The reason why no answer is expected at the moment: the server of a running job is silent.
    /// `None` while it is heard.
    silent: Option<RendezvousError>,
    /// True once the loss of the server has been reported, which is done once.
    loss_told: bool,
    leaving: bool,
    tell: Option<Arc<dyn Fn(Down) + Send + Sync>>,
    untold: Vec<Down>,
}

/// (Time of the answer in nanoseconds since 1970 by this process's clock, answer).
type Answered = (i64, Result<Answer, RendezvousError>);

/// Time to wait for an answer beyond the peer timeout: the server's error, which names the late
/// processes, should come first.
const SLACK: Duration = Duration::from_secs(2);

/// Time that the server has to take a report, without the slack. Short, as a failing process must
/// not hang here.
const REPORT_WITHIN: Duration = Duration::from_secs(2);

/// Time limit for the answer when leaving, without the slack. The request has been sent in any
/// case.
const LEAVE_WITHIN: Duration = Duration::from_secs(3);

impl Connection {
    /// Sends a request and blocks until its answer comes, at most `peer_timeout` plus [`SLACK`].
    /// Returns (time of the answer in nanoseconds since 1970, answer). If the server is silent, the
    /// request is still sent, but fails at once.
    fn ask(
        &self,
        peer_timeout: Duration,
        request: impl FnOnce(u64) -> Request,
    ) -> Result<(i64, Answer), RendezvousError> {
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
        if let Err(error) = protocol::frame(&request(ask)).and_then(|frame| self.write(&frame)) {
            self.state.lock().asks.remove(&ask);
            return Err(error);
        }
        if let Some(silent) = self.silence_of(ask) {
            return Err(silent);
        }
        let answered = wait_awake(&answer, peer_timeout.saturating_add(SLACK));
        self.state.lock().asks.remove(&ask);
        match answered {
            Ok((when, result)) => result.map(|answer| (when, answer)),
            Err(RecvTimeoutError::Timeout) => Err(self
                .gone(format!("it has not answered for {:?}", peer_timeout.saturating_add(SLACK)))),
            Err(RecvTimeoutError::Disconnected) => Err(self.gone("the connection ended".into())),
        }
    }

    /// If the server is silent, withdraws request `ask` and returns the error. Otherwise returns
    /// `None`.
    fn silence_of(&self, ask: u64) -> Option<RendezvousError> {
        let mut state = self.state.lock();
        let silent = state.silent.clone()?;
        state.asks.remove(&ask);
        Some(silent)
    }

    fn write(&self, frame: &[u8]) -> Result<(), RendezvousError> {
        let _writing = self.writing.lock();
        (&self.stream).write_all(frame).map_err(|e| {
            // Part of a message may have been sent: no other message can follow it.
            let _ = self.stream.shutdown(Shutdown::Both);
            let ended = self.state.lock().ended.clone();
            ended.unwrap_or_else(|| self.gone(e.to_string()))
        })
    }

    /// Reads until the connection ends, and answers pings. If the server is silent, the connection
    /// ends unless this process has joined. A running job goes on, as the server may come back.
    fn listen(&self, mut stream: TcpStream, silence: Duration) {
        let mut frames = Frames::default();
        let mut bytes = vec![0; 16 * 1024];
        let (mut heard, mut looked) = (Instant::now(), Instant::now());
        let why = 'connected: loop {
            let read = stream.read(&mut bytes);
            let now = Instant::now();
            // If this process itself was stopped, it cannot call the server silent.
            if now.duration_since(looked) > silence / 2 {
                heard = now;
            }
            looked = now;
            match read {
                Ok(0) => break "the connection was closed".to_owned(),
                Ok(n) => {
                    heard = now;
                    self.state.lock().silent = None;
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
            loop {
                match frames.next::<Reply>() {
                    Ok(Some(reply)) => {
                        if let Err(why) = self.hear(reply) {
                            break 'connected why;
                        }
                    }
                    Ok(None) => break,
                    Err(why) => break 'connected format!("it said something senseless: {why}"),
                }
            }
        };
        let is_loss = self.state.lock().ended.is_none();
        self.end(self.gone(why.clone()));
        if is_loss {
            self.tell_loss(why);
        }
    }

    /// If this process has joined: records that the server is silent, fails all pending requests
    /// and returns true. Otherwise has no effect and returns false.
    fn goes_on_without(&self, why: &str) -> bool {
        let mut state = self.state.lock();
        if !state.joined {
            return false;
        }
        let error = state.silent.get_or_insert_with(|| self.gone(why.to_owned())).clone();
        let waiting = std::mem::take(&mut state.asks);
        drop(state);
        for asker in waiting.into_values() {
            let _ = asker.send((0, Err(error.clone())));
        }
        self.tell_loss(why.to_owned());
        true
    }

    /// Reports to the function of `on_down`, once, that the server is lost to this process. Reports
    /// nothing while this process leaves.
    fn tell_loss(&self, why: String) {
        let mut state = self.state.lock();
        if state.leaving || std::mem::replace(&mut state.loss_told, true) {
            return;
        }
        drop(state);
        self.tell(Down::Server(why));
    }

    fn hear(&self, reply: Reply) -> Result<(), String> {
        match reply {
            Reply::Ping => {
                let pong = protocol::frame(&Request::Pong).map_err(|e| e.to_string())?;
                self.write(&pong).map_err(|e| e.to_string())?;
            }
            Reply::Answer { ask, mut result } => {
                let mut state = self.state.lock();
                if let Ok(Answer::Members { members, more }) = &mut result {
                    state.members.extend_from_slice(members);
                    if state.members.len() > self.processes {
                        return Err(format!(
                            "it names more members than the job has, {}",
                            self.processes
                        ));
                    }
                    if *more {
                        return Ok(());
                    }
                    *members = std::mem::take(&mut state.members).into();
                    state.joined = true;
                }
                let asker = state.asks.remove(&ask);
                drop(state);
                if let Some(asker) = asker {
                    // A request that has timed out has no receiver any more.
                    let _ = asker.send((clock(), result));
                }
            }
            Reply::Down { process, .. } if process.index() >= self.processes => {
                return Err(format!(
                    "it says that process {process} is down, of {}",
                    self.processes
                ));
            }
            Reply::Down { process, why } => self.tell(Down::Process(process, why)),
            Reply::Dropped { why } => return Err(format!("it has given this process up: {why}")),
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
            // Each process goes down once. A server that reports more than that is faulty.
            None if state.untold.len() > self.processes => {}
            None => state.untold.push(down),
        }
    }

    /// Closes the connection. All pending requests fail with `why`, or with the earlier reason if
    /// it had ended before.
    fn end(&self, why: RendezvousError) {
        let mut state = self.state.lock();
        let why = state.ended.get_or_insert(why).clone();
        let waiting = std::mem::take(&mut state.asks);
        drop(state);
        for asker in waiting.into_values() {
            let _ = asker.send((0, Err(why.clone())));
        }
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    fn gone(&self, why: String) -> RendezvousError {
        RendezvousError::ServerGone { server: self.server.clone(), why }
    }

    fn senseless(&self, answer: &Answer) -> RendezvousError {
        let kind = match answer {
            Answer::Done => "done",
            Answer::Members { .. } => "members",
            Answer::Value(_) => "a value",
            Answer::Clock(_) => "a time",
        };
        self.gone(format!("it answered with {kind}, which was not asked for"))
    }
}

/// Waits at most `peer_timeout` for an answer. Time in which this process was stopped hardly
/// counts: the whole job may have been stopped.
fn wait_awake(
    answer: &mpsc::Receiver<Answered>,
    peer_timeout: Duration,
) -> Result<Answered, RecvTimeoutError> {
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
