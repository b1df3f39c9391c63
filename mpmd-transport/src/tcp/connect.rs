//! Connects the sockets between all pairs of processes.
//!
//! In each pair, the process with the higher id connects to the other's listener, once for each
//! channel, 0 for control and 1 for bulk. Each connection begins with a
//! [handshake](mpmd_handshake). A stranger, which does not know the job's token, is closed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::party::Party;
use crate::transport::TransportError;
use mpmd_base::deadline::after;
use mpmd_handshake::Refusal;
use mpmd_handshake::strangers::{Link, Strangers};
use mpmd_handshake::stream::shake_hands;
use mpmd_handshake::token::random_bytes;
use mpmd_proto::wire::{ProcessId, VERSION};

use super::drive::{Drive, Pair};
use super::{Tcp, TcpConfig};

const MAGIC: [u8; 8] = *b"MPMDTCP\0";
/// Number of connections between two processes: one for control messages and one for bulk data.
const CHANNELS: u32 = 2;
/// Time limit for the handshake of an accepted connection. In tests it exceeds the duration of any
/// test.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 3600 } else { 5 });
/// Number of connections with an unfinished handshake that are allowed beyond one per peer
/// connection. Beyond that, the oldest is closed.
const MOST_STRANGERS: usize = 256;
/// Limit on the connections that wait to be accepted; the system may impose a lower one. The system
/// drops further attempts, which are repeated only after a second or more.
const BACKLOG: i32 = 4096;
/// Pause after the first failed attempt to connect to a peer. `LAST_RETRY` is the longest pause.
const FIRST_RETRY: Duration = Duration::from_millis(10);
const LAST_RETRY: Duration = Duration::from_millis(500);

/// A listening socket to which the peers of a transport connect.
#[derive(Debug)]
pub struct PeerListener {
    socket: std::net::TcpListener,
    address: SocketAddr,
}

impl PeerListener {
    /// Listens on a free port of the IP address of `at`. The port of `at` is ignored. A link-local
    /// IPv6 address also selects its network interface.
    ///
    /// # Errors
    ///
    /// If the system has no such address or no free port.
    pub fn bind(mut at: SocketAddr) -> Result<Self, TransportError> {
        at.set_port(0);
        let doing = || format!("listening on {}", at.ip());
        let socket = std::net::TcpListener::bind(at).map_err(|e| environment(doing(), &e))?;
        rustix::net::listen(&socket, BACKLOG).map_err(|e| environment(doing(), &e))?;
        socket
            .set_nonblocking(true)
            .map_err(|e| environment(doing(), &e))?;

        let address = socket.local_addr().map_err(|e| environment(doing(), &e))?;
        Ok(Self { socket, address })
    }

    /// Returns the address that peers connect to.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Connects to all peers. Blocks until all are connected, for at most
    /// [`TcpConfig::peer_timeout`].
    ///
    /// May be called from any thread. A thread that runs an async runtime is blocked meanwhile.
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
    /// If `config.peers` has no element for `config.process`.
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

/// Runs the transport's thread: connects to the peers, then moves messages until the transport
/// closes.
fn drive(
    listener: PeerListener,
    config: TcpConfig,
    connected: &std::sync::mpsc::Sender<Result<Arc<Tcp>, TransportError>>,
) {
    let runtime = match tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        .build()
    {
        Ok(runtime) => runtime,
        Err(e) => {
            let _ = connected.send(Err(environment(
                "starting the transport's runtime".to_owned(),
                &e,
            )));
            return;
        }
    };

    runtime.block_on(async {
        let process = config.process;
        let pool = config.pool.clone();
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

/// The result of one attempt to establish a connection.
enum ConnectOutcome {
    Peer {
        peer: ProcessId,
        channel: u32,
        stream: TcpStream,
    },
    /// The other end does not belong to the job, or has closed the connection. Contains the reason.
    Stranger(String),
    /// The other end belongs to the job, but cannot work with this process. Contains the error.
    Misfit(TransportError),
}

/// Returns a peer's address with the scope id that is valid on this host. A link-local IPv6 address
/// needs the number of the local network interface, which is that of `own`.
fn in_zone_of(own: SocketAddr, mut peer: SocketAddr) -> SocketAddr {
    if let (SocketAddr::V6(own), SocketAddr::V6(peer)) = (own, &mut peer)
        && peer.ip().is_unicast_link_local()
    {
        peer.set_scope_id(own.scope_id());
    }
    peer
}

/// Connects to all peers and returns the connections to each peer, by process.
async fn connect_all(
    listener: PeerListener,
    config: TcpConfig,
) -> Result<Vec<Option<Pair>>, TransportError> {
    let deadline: Instant = after(std::time::Instant::now(), config.peer_timeout).into();
    let TcpConfig {
        process,
        peers,
        token,
        epoch,
        peer_timeout,
        ..
    } = config;

    let party = Party::new((MAGIC, VERSION), process, peers.len(), epoch, token);
    let own = listener.address;
    let listener = tokio::net::TcpListener::from_std(listener.socket)
        .map_err(|e| environment(format!("listening on {own}"), &e))?;

    let mut meetings = JoinSet::new();
    let strangers = Arc::new(Strangers::new(MOST_STRANGERS + 2 * peers.len()));
    let mut next_link: Link = 0;

    // The last error with each lower process that has not answered yet.
    let words = Arc::new(Mutex::new(vec![String::new(); peers.len()]));
    for (&address, lower) in peers.iter().zip((0..process.0).map(ProcessId)) {
        for channel in 0..CHANNELS {
            let address = in_zone_of(own, address);
            meetings.spawn(call(party.clone(), lower, address, channel, words.clone()));
        }
    }

    // The last reason why a connection was refused here.
    let mut refused = String::new();
    let mut found: Vec<[Option<TcpStream>; 2]> = peers.iter().map(|_| [None, None]).collect();
    loop {
        let mut missing = missing(&found, process);
        let all_have_met = missing.is_empty();
        if all_have_met {
            missing = halves(&found, process);
            if missing.is_empty() {
                break;
            }
        }

        let expects = missing.iter().any(|peer| *peer > process);
        tokio::select! {
            () = sleep_until(deadline) => return Err(TransportError::TimedOut {
                event: name_missing(&missing, peers.len(), &words.lock(), &refused),
                peer_timeout,
            }),
            // Such a peer may also end before it connects again.
            () = sleep(FIRST_RETRY), if all_have_met => {}
            accepted = listener.accept(), if expects => match accepted {
                Ok((stream, _)) => {
                    next_link += 1;
                    let greeting = greet(party.clone(), stream, next_link, strangers.clone());
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
                Ok(outcome) => take_outcome(outcome, own, &mut found, &mut refused)?,
                Err(error) if error.is_cancelled() => {
                    tracing::warn!("a silent connection was closed at {own}");
                }
                Err(error) => return Err(environment("meeting the peers".to_owned(), &error)),
            },
        }
    }

    let pairs = found
        .into_iter()
        .map(|[control, bulk]| Some([control?, bulk?]));
    Ok(pairs.collect())
}

/// Stores a new connection in `found`, or the reason why it was refused in `refused`. `own` is the
/// address at which this process listens. Fails if a peer does not fit, so that connecting cannot
/// succeed.
fn take_outcome(
    outcome: ConnectOutcome,
    own: SocketAddr,
    found: &mut [[Option<TcpStream>; 2]],
    refused: &mut String,
) -> Result<(), TransportError> {
    match outcome {
        ConnectOutcome::Peer {
            peer,
            channel,
            stream,
        } => {
            let place = &mut found[peer.index()][channel as usize];
            // A peer that lost the answer connects again, and has closed its first connection.
            let is_open = |before: &TcpStream| line_state(before) != LineState::Closed;
            if place.replace(stream).is_some_and(|before| is_open(&before)) {
                let why = "two processes claim this number".to_owned();
                return Err(TransportError::Protocol { peer, why });
            }
        }
        ConnectOutcome::Stranger(why) => {
            tracing::warn!("a connection was refused at {own}: {why}");
            *refused = why;
        }
        ConnectOutcome::Misfit(error) => return Err(error),
    }
    Ok(())
}

/// Connects to a process with a lower id. Repeats failed attempts without a deadline, until the
/// process answers or does not fit. `words` gets the last error of each process, by process.
async fn call(
    party: Party,
    peer: ProcessId,
    address: SocketAddr,
    channel: u32,
    words: Arc<Mutex<Vec<String>>>,
) -> ConnectOutcome {
    let mut pause = FIRST_RETRY;
    loop {
        match call_once(&party, peer, address, channel).await {
            ConnectOutcome::Stranger(why) => {
                words.lock()[peer.index()] = format!("{address}: {why}")
            }
            met => return met,
        }

        sleep(pause).await;
        pause = (pause * 2).min(LAST_RETRY);
    }
}

/// Makes one attempt to connect to a process with a lower id.
async fn call_once(
    party: &Party,
    peer: ProcessId,
    address: SocketAddr,
    channel: u32,
) -> ConnectOutcome {
    let meet = async {
        let mut stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        let mut handshake = party.call(peer, channel, random_bytes()?);

        let shaken = shake_hands(&mut stream, &mut handshake).await;

        // A process that finds a misfit may close without a welcome.
        if let Some(Err(misfit)) = handshake
            .proved_facts()
            .map(|facts| party.check_answerer(facts, peer))
        {
            return Ok::<_, io::Error>(ConnectOutcome::Misfit(misfit));
        }

        Ok(match shaken? {
            Ok(()) => ConnectOutcome::Peer {
                peer,
                channel,
                stream,
            },
            // It listens where the job says that the peer does.
            Err(refusal @ Refusal::OtherVersion { .. }) => {
                ConnectOutcome::Misfit(TransportError::Protocol {
                    peer,
                    why: party.why(refusal),
                })
            }
            Err(refusal) => ConnectOutcome::Stranger(party.why(refusal)),
        })
    };
    meet.await
        .unwrap_or_else(|error| ConnectOutcome::Stranger(word(&error)))
}

/// Returns a text with the reason why a handshake ended.
fn word(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => {
            "it closed the connection within the handshake, as it does where the job token is wrong"
                .to_owned()
        }
        _ => error.to_string(),
    }
}

/// Runs the handshake of a connection that this process has accepted.
async fn greet(
    party: Party,
    mut stream: TcpStream,
    link: Link,
    strangers: Arc<Strangers>,
) -> ConnectOutcome {
    let meet = async {
        stream.set_nodelay(true)?;
        let mut handshake = party.answer(random_bytes()?);
        let shaken = shake_hands(&mut stream, &mut handshake).await?;
        Ok::<_, io::Error>(shaken.map(|()| handshake))
    };

    let met = timeout(HANDSHAKE_TIMEOUT, meet).await;
    let stays = strangers.remove(link);

    let why = match met {
        Ok(Ok(Ok(handshake))) if stays => {
            // The other process learns from the facts of this one why it does not fit.
            let caller = handshake
                .proved_facts()
                .map(|facts| party.check_caller(facts, CHANNELS));
            match caller {
                Some(Ok((peer, channel))) => {
                    return ConnectOutcome::Peer {
                        peer,
                        channel,
                        stream,
                    };
                }
                Some(Err(misfit)) => return ConnectOutcome::Misfit(misfit),
                None => String::new(),
            }
        }
        Ok(Ok(Err(refusal))) => party.why(refusal),
        Ok(Err(error)) => word(&error),
        Ok(Ok(Ok(_))) | Err(_) => "it was silent for too long".to_owned(),
    };
    ConnectOutcome::Stranger(why)
}

/// The state of a connection whose handshake is done, as this end sees it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum LineState {
    /// The other end has not closed the connection, and has sent nothing yet.
    Silent,
    /// The other end has sent messages. It may have closed the connection since.
    HasMessages,
    Closed,
}

/// Returns the state of a connection. Reads nothing from it.
fn line_state(stream: &TcpStream) -> LineState {
    match recv(stream, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Ok((_, 1..)) => LineState::HasMessages,
        Err(Errno::AGAIN | Errno::INTR) => LineState::Silent,
        _ => LineState::Closed,
    }
}

/// Returns the peers with higher ids that will connect again: one of their two connections is
/// closed and the other is open. Such a peer did not receive the answer of a handshake.
///
/// A peer that has sent messages has both connections. It may have failed and left already.
fn halves(found: &[[Option<TcpStream>; 2]], process: ProcessId) -> Vec<ProcessId> {
    let is_half = |pair: &[Option<TcpStream>; 2]| {
        let state =
            |place: &Option<TcpStream>| place.as_ref().map_or(LineState::Closed, line_state);
        let states = pair.each_ref().map(state);
        states.contains(&LineState::Silent) && states.contains(&LineState::Closed)
    };
    let peers = (0..).map(ProcessId).zip(found);
    peers
        .filter(|(peer, pair)| *peer > process && is_half(pair))
        .map(|(peer, _)| peer)
        .collect()
}

/// Returns the peers to which at least one connection is missing.
fn missing(found: &[[Option<TcpStream>; 2]], own: ProcessId) -> Vec<ProcessId> {
    let ids = (0..).map(ProcessId);
    let pairs = ids
        .zip(found)
        .filter(|(id, pair)| *id != own && pair.iter().any(Option::is_none));
    pairs.map(|(id, _)| id).collect()
}

/// Returns a text such as "waiting for process 2 (why) and process 5 of 8 to connect". `refused` is
/// the reason why another connection was refused, or empty.
fn name_missing(
    missing: &[ProcessId],
    processes: usize,
    words: &[String],
    refused: &str,
) -> String {
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

    let refused = match refused {
        "" => String::new(),
        why => format!(" (a connection was refused: {why})"),
    };
    format!("waiting for {names} of {processes} to connect{refused}")
}

fn environment(doing: String, error: &dyn std::error::Error) -> TransportError {
    TransportError::Environment {
        doing,
        why: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::AsyncWriteExt;

    use super::*;
    use crate::transport::Transport;

    #[test]
    fn link_local_peers_are_reached_by_the_own_interface() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        for (own, peer, expected) in [
            ("[fe80::1%3]:7", "[fe80::2%2]:9", "[fe80::2%3]:9"),
            ("[fe80::1%3]:7", "[fd00::2]:9", "[fd00::2]:9"),
            ("10.0.0.1:7", "10.0.0.2:9", "10.0.0.2:9"),
        ] {
            assert_eq!(in_zone_of(address(own), address(peer)), address(expected));
        }
    }

    #[test]
    fn timeout_names_missing_peers_with_their_last_error() {
        let words = vec![
            String::new(),
            "refused".to_owned(),
            String::new(),
            String::new(),
        ];
        let named = |missing: &[u32]| {
            let missing: Vec<_> = missing.iter().map(|id| ProcessId(*id)).collect();
            name_missing(&missing, 4, &words, "")
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
        let bind = || PeerListener::bind(SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
        let listeners = [bind(), bind()];
        let peers: Vec<_> = listeners.iter().map(PeerListener::address).collect();
        let config = |process| TcpConfig {
            process: ProcessId(process),
            peers: peers.clone(),
            token: [7; 32],
            epoch: 1,
            peer_timeout,
            pool: mpmd_memory::Pool::new("tcp", None),
        };
        let (configs, [zero, one]) = ([config(0), config(1)], listeners);
        let [zero_config, one_config] = configs;
        let zero = std::thread::spawn(move || zero.connect(zero_config));
        let dial = |_| std::net::TcpStream::connect(peers[0]).unwrap();
        let _silent: Vec<_> = (0..strangers).map(dial).collect();
        let one = one.connect(one_config).unwrap();
        (zero.join().unwrap().unwrap(), one)
    }

    /// The other end of a connection in a test.
    #[derive(Clone, Copy)]
    struct OtherEnd {
        says: &'static str,
        closes: bool,
    }

    impl OtherEnd {
        /// Opens the connection. Returns its accepting end, and the other one unless it closes.
        async fn open(self) -> (TcpStream, Option<TcpStream>) {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let mut other = TcpStream::connect(address).await.unwrap();
            let (here, _) = listener.accept().await.unwrap();
            other.write_all(self.says.as_bytes()).await.unwrap();
            let other = (!self.closes).then_some(other);

            let expected = match (self.says, self.closes) {
                ("", false) => LineState::Silent,
                ("", true) => LineState::Closed,
                _ => LineState::HasMessages,
            };
            while line_state(&here) != expected {
                here.readable().await.unwrap();
            }
            (here, other)
        }
    }

    #[tokio::test]
    async fn peer_that_has_spoken_and_left_is_not_awaited() {
        let end = |says, closes| OtherEnd { says, closes };
        for (control, bulk, is_awaited) in [
            (end("", false), end("", false), false),
            (end("", true), end("", true), false),
            // It did not hear the answer on one of them.
            (end("", true), end("", false), true),
            (end("", false), end("", true), true),
            // It has failed and taken leave on the connection for control messages.
            (end("goodbye", true), end("", true), false),
            (end("goodbye", false), end("", true), false),
            (end("goodbye", true), end("", false), false),
        ] {
            let (control, _other) = control.open().await;
            let (bulk, _another) = bulk.open().await;
            let found = [[None, None], [Some(control), Some(bulk)]];
            assert_eq!(!halves(&found, ProcessId(0)).is_empty(), is_awaited);
        }
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
