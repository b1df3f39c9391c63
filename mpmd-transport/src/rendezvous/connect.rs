//! Connects a process to the rendezvous service, with retries, and shows the token.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::job::after;
use super::protocol::{self, ANSWER_BYTES, Greeting, VERSION};
use super::{JoinConfig, RendezvousError};

/// Limit on the times that the token is shown to a server that closes the connection unanswered.
const TRIES: usize = 3;
const BETWEEN_TRIES: Duration = Duration::from_millis(50);

/// Connects to the server, which may start later, and shows the token. Returns the stream and the
/// interval of the server's pings. Gives up after about the peer timeout.
pub(super) fn meet(config: &JoinConfig) -> Result<(TcpStream, Duration), RendezvousError> {
    let until = after(Instant::now(), config.peer_timeout);
    let mut tries = 0;
    loop {
        let mut stream = reach(&config.server, config.peer_timeout, until)?;
        tries += 1;
        match greet(&mut stream, config, until) {
            // The server may also have closed its oldest stranger, or have found this process too
            // slow.
            Err(RendezvousError::Token { .. }) if tries < TRIES => {
                std::thread::sleep(BETWEEN_TRIES)
            }
            greeted => return Ok((stream, greeted?)),
        }
    }
}

/// Connects, with retries at growing intervals until `until`.
fn reach(
    server: &str,
    peer_timeout: Duration,
    until: Instant,
) -> Result<TcpStream, RendezvousError> {
    let mut pause = Duration::from_millis(10);
    loop {
        let why = match attempt(server, until) {
            Ok(stream) => return Ok(stream),
            Err(e) => e.to_string(),
        };
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(RendezvousError::Unreachable { server: server.into(), peer_timeout, why });
        }
        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Tries every address of the server once. Fails with the error of the last one.
fn attempt(server: &str, until: Instant) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(ErrorKind::NotFound, "the name has no address");
    for address in server.to_socket_addrs()? {
        let left = until.saturating_duration_since(Instant::now());
        let wait = left.clamp(Duration::from_millis(10), Duration::from_secs(5));
        match TcpStream::connect_timeout(&address, wait) {
            // If no process listens on a port of the dynamic range, a socket can connect to itself.
            Ok(stream) if stream.local_addr()? == stream.peer_addr()? => {
                last = ErrorKind::ConnectionRefused.into();
            }
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Sends the preamble with the token and waits for the answer, until about `until`. Returns the
/// interval of the server's pings.
fn greet(
    stream: &mut TcpStream,
    config: &JoinConfig,
    until: Instant,
) -> Result<Duration, RendezvousError> {
    let server = config.server.clone();
    let refused = |e: std::io::Error| match e.kind() {
        ErrorKind::UnexpectedEof
        | ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::BrokenPipe => RendezvousError::Token { server: config.server.clone() },
        ErrorKind::WouldBlock | ErrorKind::TimedOut => RendezvousError::Unreachable {
            server: config.server.clone(),
            peer_timeout: config.peer_timeout,
            why: "a program accepts connections there, but does not answer".into(),
        },
        _ => RendezvousError::ServerGone { server: config.server.clone(), why: e.to_string() },
    };
    let left = until.saturating_duration_since(Instant::now()).max(Duration::from_millis(10));
    stream.set_read_timeout(Some(left)).map_err(refused)?;
    stream.set_write_timeout(Some(left)).map_err(refused)?;
    stream.write_all(&protocol::preamble(&config.token)).map_err(refused)?;
    let mut answer = [0; ANSWER_BYTES];
    stream.read_exact(&mut answer).map_err(refused)?;
    match Greeting::decode(&answer) {
        Some(Greeting::Welcome { ping }) => Ok(ping),
        Some(Greeting::OtherVersion { server: theirs }) => {
            Err(RendezvousError::Version { server, theirs, ours: VERSION })
        }
        None => Err(RendezvousError::Stranger { server }),
    }
}
