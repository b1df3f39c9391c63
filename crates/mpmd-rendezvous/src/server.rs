//! The rendezvous service: runs a [`JobState`] over sockets, on a thread of its own.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::io::Errno;
use rustix::net::sockopt::set_ipv6_v6only;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::OwnedReadHalf;
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::runtime;
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{sleep_until, timeout};

use super::clock_offset::clock;
use super::config::random;
use super::job::{EndedProcess, EpochPhase, JobAction, JobState, ping_interval};
use super::protocol::{
    self, ClientRequest, FrameBuffer, HANDSHAKE, RequestAnswer, ServerReply, encode_ping,
};
use super::succession::Deputy;
use super::{FailureReport, ProcessPart, RendezvousError, Succession, Token};
use mpmd_base::deadline::after;
use mpmd_handshake::Handshake;
use mpmd_handshake::strangers::{Link, Strangers};
use mpmd_handshake::stream::shake_hands;
use mpmd_handshake::token::random_bytes;
use mpmd_proto::wire::ProcessId;

/// The rendezvous service of one job, at which its processes meet. Dropping a `RendezvousServer`
/// stops the service.
///
/// Runs in the background on one thread. Every process is a client, including the process that owns
/// the server: see [`Rendezvous`](super::Rendezvous).
#[derive(Debug)]
pub struct RendezvousServer {
    address: SocketAddr,
    view: Arc<OwnerView>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The configuration of a [`RendezvousServer`].
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Number of processes in the job.
    pub processes: usize,
    /// The job's secret token.
    pub token: Token,
    /// The peer timeout. It is the longest silence of a process, and the time limit for all
    /// processes to join, counted from [`RendezvousServer::bind`].
    pub peer_timeout: Duration,
}

impl RendezvousServer {
    /// Starts the service at `address`, on a new thread. Port 0 selects a free port, see
    /// [`address`](Self::address). At `[::]`, IPv6 and IPv4 both reach it; on a host without IPv6,
    /// only IPv4.
    ///
    /// # Errors
    ///
    /// [`RendezvousError::Bind`] if the address is in use or is not an address of this host.
    /// [`RendezvousError::Environment`] if the thread cannot be started, or if the system gives no
    /// random numbers.
    pub fn bind(address: SocketAddr, config: ServerConfig) -> Result<Self, RendezvousError> {
        let ServerConfig {
            processes,
            peer_timeout,
            ..
        } = config;
        let job = JobState::new(processes, peer_timeout, random()?, Instant::now());
        Self::start(address, config, job, || bind(address))
    }

    /// Takes over the service of a job after the loss of the process that ran it. Listens where
    /// `deputy` does. All processes of the epoch of `succession` join the next epoch here, except
    /// those that are gone. The process that ran the service comes too if `host_lives`. `config` is
    /// the configuration from the start of the job. Blocks for at most two seconds, to find out
    /// which processes are gone.
    pub(super) fn resume(
        deputy: Deputy,
        succession: &Succession,
        host_lives: bool,
        config: ServerConfig,
    ) -> Result<Self, RendezvousError> {
        let past = succession
            .past
            .as_ref()
            .ok_or_else(|| RendezvousError::OutOfTurn {
                what: "going on with the rendezvous service".into(),
                when: "for a process that had a place".into(),
            })?;

        let lives = deputy.lives(past, host_lives);
        let Deputy { listener, address } = deputy;
        tracing::info!(%address, past.epoch, ?lives, "goes on with the rendezvous service");

        let job = JobState::resumed(
            config.processes,
            config.peer_timeout,
            past,
            &lives,
            Instant::now(),
        );
        Self::start(address, config, job, || {
            listener.set_nonblocking(true)?;
            TcpListener::from_std(listener)
        })
    }

    fn start(
        address: SocketAddr,
        config: ServerConfig,
        job: JobState,
        listen: impl FnOnce() -> std::io::Result<TcpListener>,
    ) -> Result<Self, RendezvousError> {
        let failed = |e: std::io::Error| RendezvousError::Bind {
            address: address.to_string(),
            why: e.to_string(),
        };
        let environment = |doing: &str, e: std::io::Error| RendezvousError::Environment {
            doing: doing.into(),
            why: e.to_string(),
        };

        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|e| environment("starting the rendezvous service", e))?;
        let listener = runtime.block_on(async { listen() }).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;

        let view = Arc::new(OwnerView::default());
        let (stop, stopped) = oneshot::channel();
        let hub = ServerHub::new(config, job, view.clone());
        let thread = std::thread::Builder::new()
            .name("mpmd-rendezvous-server".into())
            .spawn(move || runtime.block_on(hub.run(listener, stopped)))
            .map_err(|e| environment("starting the rendezvous service's thread", e))?;

        Ok(Self {
            address,
            view,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// Returns the address at which the service listens, with its actual port.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Blocks until all processes have joined, for at most `peer_timeout`.
    ///
    /// # Errors
    ///
    /// [`Missing`](RendezvousError::Missing) or [`Program`](RendezvousError::Program) if the job
    /// can never be complete; the processes get the same error.
    /// [`OutOfTurn`](RendezvousError::OutOfTurn) if `peer_timeout` ended first.
    pub fn wait_complete(&self, peer_timeout: Duration) -> Result<(), RendezvousError> {
        let until = after(Instant::now(), peer_timeout);
        let mut state = self.view.state.lock();

        loop {
            if let Some(error) = &state.failed {
                return Err(error.clone());
            }
            if state.complete {
                return Ok(());
            }
            if self.view.changed.wait_until(&mut state, until).timed_out() && !state.complete {
                return Err(state.failed.clone().unwrap_or(RendezvousError::OutOfTurn {
                    what: "going on".into(),
                    when: "when all processes have joined".into(),
                }));
            }
        }
    }

    /// Returns true once all processes have joined the job.
    pub fn is_complete(&self) -> bool {
        self.view.state.lock().complete
    }

    /// Returns the reason why the job can never be complete; `None` if it still can.
    pub fn failure(&self) -> Option<RendezvousError> {
        self.view.state.lock().failed.clone()
    }

    /// Returns the failures that processes have [reported](super::Rendezvous::report), each with
    /// the process that reported it, in order of arrival.
    pub fn reports(&self) -> Vec<(ProcessId, FailureReport)> {
        self.view.state.lock().reports.clone()
    }

    /// Returns the number of additional processes that the job needs: places of processes that are
    /// gone, and places that the job has lost since its start, less the number of waiting spares. 0
    /// if the job is over.
    pub fn wanted(&self) -> usize {
        self.view.state.lock().wanted
    }

    /// Returns the number of processes in the newest epoch of the job, including those that are
    /// gone.
    pub fn places(&self) -> usize {
        self.view.state.lock().places
    }

    /// Returns true if the job's program can run with fewer processes after a loss.
    pub fn may_shrink(&self) -> bool {
        self.view.state.lock().may_shrink
    }

    /// Tells the service how many processes the owner may still start for the places of lost ones,
    /// including those that it has started and that have not joined yet. While there are any, such
    /// a place is kept free for the peer timeout. As many processes may leave the job in order,
    /// even if its program needs all places. 0 at first.
    pub fn may_start(&self, count: usize) {
        if self.view.owner_starts.swap(count, Ordering::Relaxed) != count {
            self.view.wakes.notify_one();
        }
    }

    /// Tells the service that a process has ended, in the way `why`, and that the owner starts no
    /// other in its place. If the job was never complete, all processes that have joined or will
    /// join fail at once with [`NeverJoins`](RendezvousError::NeverJoins). Otherwise those that
    /// begin the next epoch do, with [`NotReplaced`](RendezvousError::NotReplaced).
    pub fn is_not_replaced(&self, process: ProcessId, why: String) {
        self.tell_end(SeenEnd::Fails { process, why });
    }

    /// Tells the service that a process has ended, in the way `why`, and that its job may go on
    /// with another in its place. `number` is the process number with which it first joined, or
    /// would have joined, and `place` the place that it had last.
    ///
    /// If the job was never complete, a spare takes the place at once. If no spare waits, and the
    /// owner [may start](Self::may_start) none, all processes that have joined or will join fail as
    /// in [`is_not_replaced`](Self::is_not_replaced). In a later epoch the place is no longer kept
    /// for the process, if it had left the epoch before in order to join the next one.
    pub fn place_is_free(&self, number: ProcessId, place: ProcessId, why: String) {
        self.tell_end(SeenEnd::FreesPlace(EndedProcess { number, place, why }));
    }

    fn tell_end(&self, end: SeenEnd) {
        self.view.seen_ends.lock().push(end);
        self.view.wakes.notify_one();
    }

    /// Returns true if all processes of an epoch have ended or left, and none of them returns.
    pub fn is_over(&self) -> bool {
        self.view.state.lock().is_over
    }

    /// Returns the role of each process of the job and of each spare, with the process number with
    /// which it first joined. Includes processes that are gone if they had a place in an epoch that
    /// has begun.
    pub fn parts(&self) -> Vec<(ProcessId, ProcessPart)> {
        self.view.state.lock().parts.clone()
    }

    /// Returns the reason why a spare was refused; `None` if it was not. `number` is the process
    /// number with which the spare first joined.
    pub fn refusal(&self, number: ProcessId) -> Option<String> {
        let state = self.view.state.lock();
        let mut refused = state.refused.iter().rev();
        refused
            .find(|(process, _)| *process == number)
            .map(|(_, why)| why.clone())
    }

    /// Blocks until the job is over, or for at most `time`, after which the result is `None`. The
    /// job is over once it was complete and no process is left in it.
    ///
    /// # Errors
    ///
    /// The reason why the job can never be complete.
    pub fn wait_end(&self, time: Duration) -> Option<Result<(), RendezvousError>> {
        let until = after(Instant::now(), time);
        let mut state = self.view.state.lock();

        loop {
            if let Some(error) = &state.failed {
                return Some(Err(error.clone()));
            }
            if state.complete && state.present == 0 {
                return Some(Ok(()));
            }
            if self.view.changed.wait_until(&mut state, until).timed_out() {
                return None;
            }
        }
    }

    /// Blocks until no process is left in the job, for at most `peer_timeout`. Returns true if none
    /// is left, also if none has joined yet.
    ///
    /// For the process that owns the server and wants to end while others still need the server.
    pub fn wait_empty(&self, peer_timeout: Duration) -> bool {
        let until = after(Instant::now(), peer_timeout);
        let mut state = self.view.state.lock();
        while state.present > 0 {
            if self.view.changed.wait_until(&mut state, until).timed_out() {
                break;
            }
        }

        state.present == 0
    }
}

/// Listens at `address`, even if connections of an earlier job still use it.
fn bind(address: SocketAddr) -> std::io::Result<TcpListener> {
    if address.is_ipv4() {
        return listen_on(TcpSocket::new_v4()?, address);
    }

    match bind_ipv6(address) {
        Err(error) if address.ip().is_unspecified() && is_ipv6_missing(&error) => {
            let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, address.port()));
            listen_on(TcpSocket::new_v4()?, address)
        }
        done => done,
    }
}

/// Listens at an IPv6 address. The unspecified address `[::]` accepts IPv4 connections too.
fn bind_ipv6(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = TcpSocket::new_v6()?;
    if address.ip().is_unspecified() {
        set_ipv6_v6only(&socket, false)?;
    }
    listen_on(socket, address)
}

fn listen_on(socket: TcpSocket, address: SocketAddr) -> std::io::Result<TcpListener> {
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Returns true if an error of the system means that this host has no IPv6.
fn is_ipv6_missing(error: &std::io::Error) -> bool {
    let of_ipv6 = [Errno::AFNOSUPPORT, Errno::ADDRNOTAVAIL].map(Errno::raw_os_error);
    error
        .raw_os_error()
        .is_some_and(|error| of_ipv6.contains(&error))
}

impl Drop for RendezvousServer {
    /// Sends the queued replies, then closes all connections. Blocks for about a second at most.
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the rendezvous service's thread panicked");
        }
    }
}

/// A copy of the job's state for the server's owner.
#[derive(Debug, Default)]
struct OwnerView {
    state: Mutex<OwnerViewState>,
    changed: Condvar,
    owner_starts: AtomicUsize,
    /// Ends of processes that the owner has seen, until the service has heard of them.
    seen_ends: Mutex<Vec<SeenEnd>>,
    /// Wakes the service's thread after a change of `owner_starts` or `seen_ends`.
    wakes: Notify,
}

/// The end of a process that the owner started. `why` is the way in which it ended.
#[derive(Debug)]
enum SeenEnd {
    /// If the job was never complete, it fails with the process.
    Fails { process: ProcessId, why: String },
    /// A spare may take the place of the process.
    FreesPlace(EndedProcess),
}

#[derive(Debug, Default)]
struct OwnerViewState {
    complete: bool,
    failed: Option<RendezvousError>,
    present: usize,
    wanted: usize,
    places: usize,
    may_shrink: bool,
    is_over: bool,
    parts: Vec<(ProcessId, ProcessPart)>,
    reports: Vec<(ProcessId, FailureReport)>,
    refused: Vec<(ProcessId, String)>,
}

/// An event of a client's connection, sent to the server's main task.
enum ServerEvent {
    Opened(Link, mpsc::UnboundedSender<ServerReply>),
    Said(Link, Box<ClientRequest>),
    Closed(Link, String),
}

/// Time limit for the handshake with a client, counted from the start of its connection.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

/// Limit on the connections that wait to be accepted; the system may impose a lower one.
const BACKLOG: u32 = 4096;

/// Time limit for sending the last replies when the server stops.
const FAREWELL: Duration = Duration::from_secs(1);

struct ServerHub {
    config: ServerConfig,
    view: Arc<OwnerView>,
    job: JobState,
    says: HashMap<Link, mpsc::UnboundedSender<ServerReply>>,
    tasks: JoinSet<()>,
}

impl ServerHub {
    fn new(config: ServerConfig, job: JobState, view: Arc<OwnerView>) -> Self {
        Self {
            config,
            view,
            job,
            says: HashMap::new(),
            tasks: JoinSet::new(),
        }
    }

    async fn run(mut self, listener: TcpListener, mut stopped: oneshot::Receiver<()>) {
        // Bounded: a client that sends much waits instead of filling memory.
        let (events, mut happened) = mpsc::channel(256);
        // True after an error of accepting, which is logged once.
        let mut is_full = false;
        let strangers = Arc::new(Strangers::new(64 + 2 * self.config.processes));
        let mut next_link: Link = 0;

        loop {
            // Before the number of processes that may start: it counts a replacement by then.
            let seen_ends = std::mem::take(&mut *self.view.seen_ends.lock());
            self.job
                .owner_starts(self.view.owner_starts.load(Ordering::Relaxed));
            for end in seen_ends {
                match end {
                    SeenEnd::Fails { process, why } => self.job.is_not_replaced(process, why),
                    SeenEnd::FreesPlace(ended) => self.job.place_is_free(ended),
                }
            }
            let due = self.job.tick(Instant::now());
            self.act();
            tokio::select! {
                _ = &mut stopped => break,
                () = self.view.wakes.notified() => {}
                Some(event) = happened.recv() => self.handle(event),
                accepted = listener.accept() => match accepted {
                    Ok((stream, _)) => {
                        is_full = false;
                        next_link += 1;
                        self.welcome(stream, next_link, &strangers, &events);
                    }
                    Err(error) => {
                        // Most likely out of file descriptors; some may be closed soon.
                        if !std::mem::replace(&mut is_full, true) {
                            tracing::warn!("the rendezvous service cannot accept: {error}");
                        }
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                },
                Some(_) = self.tasks.join_next() => {}
                () = sleep_until(due.into()) => {}
            }
        }

        strangers.clear();
        drop(listener);
        // Without its sender a connection sends its queued replies and ends.
        self.says.clear();
        drop(happened);
        let farewell = async { while self.tasks.join_next().await.is_some() {} };
        let _ = timeout(FAREWELL, farewell).await;

        let mut state = self.view.state.lock();
        state.failed.get_or_insert(RendezvousError::Stopped);
        state.present = 0;
        self.view.changed.notify_all();
    }

    /// Starts the task that serves a new client: first its handshake, then its requests.
    fn welcome(
        &mut self,
        stream: TcpStream,
        link: Link,
        strangers: &Arc<Strangers>,
        events: &mpsc::Sender<ServerEvent>,
    ) {
        let ping = ping_interval(self.config.peer_timeout);
        let token = self.config.token.clone();
        let greeted = strangers.clone();
        let events = events.clone();
        let task = self.tasks.spawn(async move {
            let met = greet(stream, &token, ping, link, &greeted).await;
            if let Some(stream) = met {
                serve(stream, link, &events).await;
            }
        });
        strangers.add(link, task);
    }

    fn handle(&mut self, event: ServerEvent) {
        match event {
            ServerEvent::Opened(link, says) => {
                self.says.insert(link, says);
                self.job.opened(link, Instant::now());
            }
            ServerEvent::Said(link, request) => self.job.said(link, *request, Instant::now()),
            ServerEvent::Closed(link, why) => {
                self.says.remove(&link);
                self.job.closed(link, &why);
            }
        }
    }

    fn act(&mut self) {
        for action in self.job.actions() {
            match action {
                JobAction::Say(link, reply) => {
                    if let Some(says) = self.says.get(&link) {
                        // A connection that has just ended reports that itself.
                        let _ = says.send(reply);
                    }
                }
                JobAction::Close(link) => {
                    self.says.remove(&link);
                }
            }
        }
        self.update_owner_view();
    }

    /// Updates the owner's copy of the job's state, if the state has changed.
    fn update_owner_view(&self) {
        let epochs = self.job.epochs();
        let complete = epochs.has_begun();
        let failed = match epochs.phase() {
            EpochPhase::Gathering | EpochPhase::Running => None,
            EpochPhase::Failed(error) => Some(error),
        };
        let present = epochs.present();
        let wanted = epochs.wanted();
        let places = epochs.places();
        let is_over = epochs.is_over();
        let parts = epochs.parts();
        let reports = epochs.reports();
        let refused = epochs.refused();
        // Known as soon as the job is complete, and from then on.
        let may_shrink = complete && epochs.may_shrink();

        let mut state = self.view.state.lock();
        let is_unchanged = state.complete == complete
            && state.failed.as_ref() == failed
            && state.present == present
            && state.wanted == wanted
            && state.places == places
            && state.is_over == is_over
            && state.parts == parts
            && state.reports.len() == reports.len()
            && state.refused.len() == refused.len();
        if is_unchanged {
            return;
        }

        *state = OwnerViewState {
            complete,
            failed: failed.cloned(),
            present,
            wanted,
            places,
            may_shrink: state.may_shrink || may_shrink,
            is_over,
            parts,
            refused: refused.to_vec(),
            reports: reports.to_vec(),
        };
        self.view.changed.notify_all();
    }
}

/// Runs the handshake with a client. Returns the connection if the client proves that it knows the
/// token. Until then the client counts as a stranger.
async fn greet(
    mut stream: TcpStream,
    token: &Token,
    ping: Duration,
    link: Link,
    strangers: &Strangers,
) -> Option<TcpStream> {
    let meet = async {
        stream.set_nodelay(true)?;
        let token = token.clone();
        let nonce = random_bytes()?;
        let mut handshake = Handshake::answer(HANDSHAKE, token, nonce, &encode_ping(ping));
        shake_hands(&mut stream, &mut handshake).await
    };

    let met = timeout(HANDSHAKE_TIMEOUT, meet).await;
    let stays = strangers.remove(link);
    (stays && matches!(met, Ok(Ok(Ok(()))))).then_some(stream)
}

/// Carries messages between a client and the hub (the server's main task) until either ends the
/// connection.
async fn serve(stream: TcpStream, link: Link, events: &mpsc::Sender<ServerEvent>) {
    let (says, mut to_say) = mpsc::unbounded_channel();
    // Clock requests are answered here. The sender is weak, so that the hub alone decides how long
    // the connection lasts.
    let clock_says = says.downgrade();
    if events.send(ServerEvent::Opened(link, says)).await.is_err() {
        return;
    }

    let (mut read, mut write) = stream.into_split();
    let speak = async {
        while let Some(reply) = to_say.recv().await {
            for part in protocol::parts(reply) {
                let frame = match protocol::frame(&part) {
                    Ok(frame) => frame,
                    Err(error) => return error.to_string(),
                };
                if let Err(error) = write.write_all(&frame).await {
                    return error.to_string();
                }
            }
        }
        let _ = write.shutdown().await;
        "the rendezvous service closed the connection".to_owned()
    };

    let listen = listen(&mut read, link, events, &clock_says);
    let speak = pin!(speak);
    let listen = pin!(listen);
    let why = tokio::select! {
        why = speak => why,
        why = listen => why,
    };

    let _ = events.send(ServerEvent::Closed(link, why)).await;
}

/// Reads a client's requests until its connection ends. Returns the reason for the end.
async fn listen(
    read: &mut OwnedReadHalf,
    link: Link,
    events: &mpsc::Sender<ServerEvent>,
    clock_says: &mpsc::WeakUnboundedSender<ServerReply>,
) -> String {
    let mut frames = FrameBuffer::default();
    let mut bytes = vec![0; 16 * 1024];

    loop {
        match read.read(&mut bytes).await {
            Ok(0) => return "its connection was closed".into(),
            Ok(n) => frames.push(&bytes[..n]),
            Err(error) => return format!("its connection ended: {error}"),
        }

        loop {
            match frames.next::<ClientRequest>() {
                Ok(Some(request)) => {
                    if let ClientRequest::Clock { ask } = request
                        && let Some(says) = clock_says.upgrade()
                    {
                        let _ = says.send(ServerReply::Answer {
                            ask,
                            result: Ok(RequestAnswer::Clock(clock())),
                        });
                    }
                    if events
                        .send(ServerEvent::Said(link, Box::new(request)))
                        .await
                        .is_err()
                    {
                        return "the rendezvous service has ended".into();
                    }
                }
                Ok(None) => break,
                Err(why) => return format!("it said something senseless: {why}"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_version_stays_a_stranger_until_closed() {
        let runtime = runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let mut client = TcpStream::connect(listener.local_addr().unwrap())
                .await
                .unwrap();
            let (stream, _) = listener.accept().await.unwrap();
            let strangers = Arc::new(Strangers::new(1));
            let (greeted, token) = (strangers.clone(), Token::new([42; 32]));
            let task = tokio::spawn(async move {
                greet(stream, &token, Duration::from_secs(1), 7, &greeted).await
            });
            strangers.add(7, task.abort_handle());
            let mut head = b"MPMDMEET".to_vec();
            head.extend((HANDSHAKE.version + 1).to_le_bytes());
            client.write_all(&head).await.unwrap();
            // Reads to the end of the server's output. The server then waits for the client to
            // close.
            client.read_to_end(&mut Vec::new()).await.unwrap();
            assert!(strangers.remove(7), "it is still counted");
            drop(client);
            assert!(task.await.unwrap().is_none());
        });
    }
}
