//! Connects the sockets between all pairs of processes.
//!
//! In each pair, the process with the higher id connects to the other's listener, once for each
//! channel. Both send a [preamble](super::preamble), the connecting side first. A stranger, which
//! does not know the job's token, gets no answer.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

use crate::deadline::after;
use crate::strangers::{Link, Strangers};
use crate::transport::TransportError;
use crate::wire::ProcessId;

use super::drive::{Drive, Pair};
use super::preamble::{Channel, Job, PREAMBLE_BYTES, Refusal};
use super::{Tcp, TcpConfig};

/// Time limit from a connection to its preamble. In tests it is longer than any test.
const PREAMBLE_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 3600 } else { 5 });
/// Limit on the connections without a preamble, in addition to those of peers. One more closes the
/// oldest.
const MOST_STRANGERS: usize = 256;
/// Limit on the connections that wait to be accepted, if the system allows as many. The system
/// drops more; their senders try again only after a second or more.
const BACKLOG: i32 = 4096;
const FIRST_RETRY: Duration = Duration::from_millis(10);
const LAST_RETRY: Duration = Duration::from_millis(500);

/// A listening socket for the peers of a transport that is not connected yet.
#[derive(Debug)]
pub struct Listener {
    socket: std::net::TcpListener,
    address: SocketAddr,
}

impl Listener {
    /// Listens on a free port of `ip`.
    ///
    /// # Errors
    ///
    /// If the system has no such address or no free port.
    pub fn bind(ip: IpAddr) -> Result<Self, TransportError> {
        let doing = || format!("listening on {ip}");
        let socket = std::net::TcpListener::bind((ip, 0)).map_err(|e| environment(doing(), &e))?;
        rustix::net::listen(&socket, BACKLOG).map_err(|e| environment(doing(), &e))?;
        socket.set_nonblocking(true).map_err(|e| environment(doing(), &e))?;
        let address = socket.local_addr().map_err(|e| environment(doing(), &e))?;
        Ok(Self { socket, address })
    }

    /// Returns the address that peers connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to all peers. Blocks until all are connected, at most for
    /// [`TcpConfig::peer_timeout`].
    ///
    /// May be called from any thread, also from one that runs an async runtime of its own (which it
    /// blocks).
    ///
    /// # Errors
    ///
    /// - [`TransportError::TimedOut`] names the peers that did not connect in time.
    /// - [`TransportError::Protocol`] names a peer with another version, epoch or list of
    ///   addresses.
    /// - [`TransportError::Environment`]: the system gave no thread or no sockets.
    ///
    /// # Panics
    ///
    /// If `config.peers` has no entry for `config.process`.
    pub fn connect(self, config: TcpConfig) -> Result<Arc<Tcp>, TransportError> {
        assert!(
            config.process.index() < config.peers.len(),
            "no process {} among {}",
            config.process,
            config.peers.len()
        );
        let (connected, wait) = std::sync::mpsc::channel();
        std::thread::Builder::new()
            .name(format!("mpmd-tcp-{}", config.process))
            .spawn(move || drive(self, config, &connected))
            .map_err(|e| environment("starting the transport's thread".to_owned(), &e))?;
        wait.recv().unwrap_or(Err(TransportError::Closed))
    }
}

/// The body of the transport's thread: connects, then moves messages until the end.
fn drive(
    listener: Listener,
    config: TcpConfig,
    connected: &std::sync::mpsc::Sender<Result<Arc<Tcp>, TransportError>>,
) {
    let runtime =
        match tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build() {
            Ok(runtime) => runtime,
            Err(e) => {
                let _ = connected
                    .send(Err(environment("starting the transport's runtime".to_owned(), &e)));
                return;
            }
        };
    runtime.block_on(async {
        let (process, pool) = (config.process, config.pool.clone());
        let pairs = match connect_all(listener, config).await {
            Ok(pairs) => pairs,
            Err(error) => {
                let _ = connected.send(Err(error));
                return;
            }
        };
        let drive = Drive::new(process, pool, pairs);
        let (start, started) = oneshot::channel();
        let (close, closed) = oneshot::channel();
        let tcp = Tcp {
            shared: drive.shared(),
            start: Mutex::new(Some(start)),
            close: Mutex::new(Some(close)),
        };
        // If the caller no longer waits, the transport is dropped, which ends the loop below at
        // once.
        let _ = connected.send(Ok(Arc::new(tcp)));
        drive.run(started, closed).await;
    });
}

/// The result of one attempt at one connection.
enum Met {
    Peer(ProcessId, Channel, TcpStream),
    /// The other end does not belong to the job.
    Stranger,
    Misfit(TransportError),
}

async fn connect_all(
    listener: Listener,
    config: TcpConfig,
) -> Result<Vec<Option<Pair>>, TransportError> {
    let deadline: Instant = after(std::time::Instant::now(), config.peer_timeout).into();
    let TcpConfig { process, peers, token, epoch, peer_timeout, .. } = config;
    let job = Job { process, processes: peers.len(), token, epoch };
    let own = listener.address;
    let listener = tokio::net::TcpListener::from_std(listener.socket)
        .map_err(|e| environment(format!("listening on {own}"), &e))?;

    let mut meetings = JoinSet::new();
    let strangers = Arc::new(Strangers::new(MOST_STRANGERS + 2 * peers.len()));
    let mut next_link: Link = 0;
    // The last error with each lower process that has not answered yet.
    let words = Arc::new(Mutex::new(vec![String::new(); peers.len()]));
    for (&address, lower) in peers.iter().zip((0..process.0).map(ProcessId)) {
        for channel in Channel::BOTH {
            meetings.spawn(call(job.clone(), lower, address, channel, words.clone()));
        }
    }
    let mut found: Vec<[Option<TcpStream>; 2]> = peers.iter().map(|_| [None, None]).collect();
    loop {
        let missing = missing(&found, process);
        if missing.is_empty() {
            break;
        }
        let expects = missing.iter().any(|peer| *peer > process);
        tokio::select! {
            () = sleep_until(deadline) => return Err(TransportError::TimedOut {
                event: name_missing(&missing, peers.len(), &words.lock()),
                peer_timeout,
            }),
            accepted = listener.accept(), if expects => match accepted {
                Ok((stream, _)) => {
                    next_link += 1;
                    let greeting = greet(job.clone(), stream, next_link, strangers.clone());
                    let task = meetings.spawn(greeting);
                    strangers.add(next_link, task);
                }
                Err(error) => {
                    // The connection was gone already, or there was no free descriptor for a
                    // moment.
                    tracing::warn!(%error, "a connection could not be accepted");
                    sleep(FIRST_RETRY).await;
                }
            },
            Some(met) = meetings.join_next() => match met {
                Ok(Met::Peer(peer, channel, stream)) => {
                    let place = &mut found[peer.index()][channel as usize];
                    // A peer that lost the answer connects again, and has closed its first
                    // connection.
                    if place.replace(stream).is_some_and(|before| is_open(&before)) {
                        let why = "two processes claim this number".to_owned();
                        return Err(TransportError::Protocol { peer, why });
                    }
                }
                Ok(Met::Stranger) => {
                    tracing::warn!("a connection from outside the job was refused at {own}");
                }
                Ok(Met::Misfit(error)) => return Err(error),
                Err(error) if error.is_cancelled() => {
                    tracing::warn!("a connection without a preamble was closed at {own}");
                }
                Err(error) => return Err(environment("meeting the peers".to_owned(), &error)),
            },
        }
    }
    let pairs = found.into_iter().map(|[control, bulk]| Some([control?, bulk?]));
    Ok(pairs.collect())
}

/// Connects to a process with a lower id. Tries again until it answers or does not fit; the caller
/// sets the deadline. `words` gets the last error by process.
async fn call(
    job: Job,
    peer: ProcessId,
    address: SocketAddr,
    channel: Channel,
    words: Arc<Mutex<Vec<String>>>,
) -> Met {
    let mut pause = FIRST_RETRY;
    loop {
        let word = match call_once(&job, peer, address, channel).await {
            Ok(Ok(stream)) => return Met::Peer(peer, channel, stream),
            Ok(Err(Refusal::Misfit(error))) => return Met::Misfit(error),
            Ok(Err(Refusal::Stranger)) => {
                "the process that listens there is not of this job".to_owned()
            }
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => {
                "it closed the connection without an answer, as it does where the job token is \
                 wrong"
                    .to_owned()
            }
            Err(error) => error.to_string(),
        };
        words.lock()[peer.index()] = format!("{address}: {word}");
        sleep(pause).await;
        pause = (pause * 2).min(LAST_RETRY);
    }
}

async fn call_once(
    job: &Job,
    peer: ProcessId,
    address: SocketAddr,
    channel: Channel,
) -> std::io::Result<Result<TcpStream, Refusal>> {
    let mut stream = TcpStream::connect(address).await?;
    stream.set_nodelay(true)?;
    stream.write_all(&job.preamble(peer, channel)).await?;
    let mut answer = [0; PREAMBLE_BYTES];
    stream.read_exact(&mut answer).await?;
    Ok(job.check(&answer).and_then(|who| {
        if who == (peer, channel) {
            return Ok(stream);
        }
        let why = format!("process {} listens at {address}; the lists of addresses differ", who.0);
        Err(Refusal::Misfit(TransportError::Protocol { peer, why }))
    }))
}

/// Reads the preamble of an accepted connection, and answers if it belongs to the job.
async fn greet(job: Job, mut stream: TcpStream, link: Link, strangers: Arc<Strangers>) -> Met {
    let mut preamble = [0; PREAMBLE_BYTES];
    let until = Instant::now() + PREAMBLE_TIMEOUT;
    let heard = timeout_at(until, stream.read_exact(&mut preamble)).await;
    let stays = strangers.remove(link);
    if !stays || !matches!(heard, Ok(Ok(_))) {
        return Met::Stranger;
    }
    let (from, channel, misfit) = match job.check(&preamble) {
        Ok((from, _)) if from < job.process => {
            let why = "the lower process of a pair does not connect to the higher".to_owned();
            (from, Channel::Control, Some(TransportError::Protocol { peer: from, why }))
        }
        Ok((from, channel)) => (from, channel, None),
        Err(Refusal::Stranger) => return Met::Stranger,
        Err(Refusal::Misfit(error)) => match &error {
            TransportError::Protocol { peer, .. } => (*peer, Channel::Control, Some(error)),
            _ => return Met::Stranger,
        },
    };
    // A process that does not fit is answered too: from the answer it learns the reason.
    let answer = job.preamble(from, channel);
    let answered = async {
        stream.set_nodelay(true)?;
        stream.write_all(&answer).await
    };
    match (misfit, timeout(PREAMBLE_TIMEOUT, answered).await) {
        (Some(error), _) => Met::Misfit(error),
        (None, Ok(Ok(()))) => Met::Peer(from, channel, stream),
        // The peer has gone away again. It connects again, or is reported as missing.
        (None, _) => Met::Stranger,
    }
}

/// Returns true if the other end has not closed the connection. Consumes nothing.
fn is_open(stream: &TcpStream) -> bool {
    let looked = recv(stream, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT);
    matches!(looked, Ok((_, 1..)) | Err(Errno::AGAIN | Errno::INTR))
}

fn missing(found: &[[Option<TcpStream>; 2]], own: ProcessId) -> Vec<ProcessId> {
    let ids = (0..).map(ProcessId);
    let pairs = ids.zip(found).filter(|(id, pair)| *id != own && pair.iter().any(Option::is_none));
    pairs.map(|(id, _)| id).collect()
}

/// Returns a text such as "waiting for process 2 (why) and process 5 of 8 to connect".
fn name_missing(missing: &[ProcessId], processes: usize, words: &[String]) -> String {
    let names: Vec<_> = missing
        .iter()
        .map(|peer| match words[peer.index()].as_str() {
            "" => format!("process {peer}"),
            word => format!("process {peer} ({word})"),
        })
        .collect();
    let names = match names.as_slice() {
        [rest @ .., last] if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        names => names.concat(),
    };
    format!("waiting for {names} of {processes} to connect")
}

fn environment(doing: String, error: &dyn std::error::Error) -> TransportError {
    TransportError::Environment { doing, why: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::Transport;

    #[test]
    fn timeout_names_missing_peers_with_their_last_error() {
        let words = vec![String::new(), "refused".to_owned(), String::new(), String::new()];
        let named = |missing: &[u32]| {
            let missing: Vec<_> = missing.iter().map(|id| ProcessId(*id)).collect();
            name_missing(&missing, 4, &words)
        };
        assert_eq!(named(&[3]), "waiting for process 3 of 4 to connect");
        assert_eq!(
            named(&[1, 2, 3]),
            "waiting for process 1 (refused), process 2 and process 3 of 4 to connect"
        );
    }
    /// Connects process 0 and process 1, while `strangers` silent connections to process 0 are
    /// open. Returns both transports.
    fn pair(peer_timeout: Duration, strangers: usize) -> (Arc<Tcp>, Arc<Tcp>) {
        let bind = || Listener::bind(IpAddr::from([127, 0, 0, 1])).unwrap();
        let listeners = [bind(), bind()];
        let peers: Vec<_> = listeners.iter().map(Listener::address).collect();
        let config = |process| TcpConfig {
            process: ProcessId(process),
            peers: peers.clone(),
            token: [7; 32],
            epoch: 1,
            peer_timeout,
            pool: crate::Pool::new("tcp", None),
        };
        let (configs, [zero, one]) = ([config(0), config(1)], listeners);
        let [zero_config, one_config] = configs;
        let zero = std::thread::spawn(move || zero.connect(zero_config));
        let dial = |_| std::net::TcpStream::connect(peers[0]).unwrap();
        let _silent: Vec<_> = (0..strangers).map(dial).collect();
        let one = one.connect(one_config).unwrap();
        (zero.join().unwrap().unwrap(), one)
    }

    #[test]
    fn silent_strangers_do_not_keep_peers_out() {
        pair(Duration::from_secs(60), MOST_STRANGERS + 20);
    }

    #[test]
    fn endless_peer_timeout_is_no_panic() {
        let (zero, one) = pair(Duration::MAX, 0);
        // Each waits for messages that the other may still send.
        let other = std::thread::spawn(move || one.shutdown(Duration::MAX));
        zero.shutdown(Duration::MAX);
        other.join().unwrap();
    }
}
