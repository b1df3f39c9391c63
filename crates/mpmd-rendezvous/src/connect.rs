//! Connects a process to the rendezvous service, with retries.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use super::protocol::{HANDSHAKE, VERSION, decode_ping};
use super::{JoinConfig, RendezvousError};
use mpmd_base::deadline::after;
use mpmd_handshake::token::random_bytes;
use mpmd_handshake::{Handshake, Refusal};

/// Limit on attempts at a handshake with a server that closes the connection without an answer.
const TRIES: usize = 3;
const BETWEEN_TRIES: Duration = Duration::from_millis(50);

/// The error of a host name that the resolver knows without an address.
const NO_ADDRESS: &str = "the name has no address";

/// Time limit for finding out if a process listens at an address.
const PROBE_WITHIN: Duration = Duration::from_secs(1);

/// Connects to the server. Both sides prove that they know the token. Unless `is_started` is true,
/// the server may start later. Returns the stream and the interval of the server's pings. Gives up
/// after about the peer timeout.
pub(super) fn meet(
    config: &JoinConfig,
    is_started: bool,
) -> Result<(TcpStream, Duration), RendezvousError> {
    let until = after(Instant::now(), config.peer_timeout);
    let mut tries = 0;
    loop {
        let mut stream = reach(&config.server, config.peer_timeout, until, is_started)?;
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

/// Connects, and retries at growing intervals until `until`. If `is_started` is true, does not
/// retry after the server's host has refused the connection.
fn reach(
    server: &str,
    peer_timeout: Duration,
    until: Instant,
    is_started: bool,
) -> Result<TcpStream, RendezvousError> {
    let mut pause = Duration::from_millis(10);
    loop {
        let error = match attempt(server, until) {
            Ok(stream) => return Ok(stream),
            Err(e) => e,
        };

        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() || (is_started && error.kind() == ErrorKind::ConnectionRefused) {
            let why = error.to_string();
            return Err(RendezvousError::Unreachable {
                server: server.into(),
                peer_timeout,
                why,
            });
        }

        std::thread::sleep(pause.min(left));
        pause = (pause * 2).min(Duration::from_millis(500));
    }
}

/// Tries to connect to each address of the server once. Fails with the error of the last attempt.
fn attempt(server: &str, until: Instant) -> std::io::Result<TcpStream> {
    let mut last = std::io::Error::new(ErrorKind::NotFound, NO_ADDRESS);
    for address in addresses(server)? {
        let left = until.saturating_duration_since(Instant::now());
        let wait = left.clamp(Duration::from_millis(10), Duration::from_secs(5));
        match connect(&address, wait) {
            Ok(stream) => {
                stream.set_nodelay(true)?;
                return Ok(stream);
            }
            Err(e) => last = e,
        }
    }
    Err(last)
}

fn connect(address: &SocketAddr, within: Duration) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect_timeout(address, within)?;
    // If no process listens on a port of the dynamic range, a socket can connect to itself.
    match stream.local_addr()? == stream.peer_addr()? {
        true => Err(ErrorKind::ConnectionRefused.into()),
        false => Ok(stream),
    }
}

/// The result of testing if a process listens at an address.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ListenerProbe {
    /// A process listens at the address. It may not accept connections at the moment.
    Listens,
    /// The host answers, and no process listens at the address.
    Refused,
    Silent,
}

/// Tests if a process listens at an address. Gives up at about `until`, and after a second at most.
pub(super) fn probe(server: &str, until: Instant) -> ListenerProbe {
    let mut said = ListenerProbe::Silent;
    for address in addresses(server).unwrap_or_default() {
        let left = until.saturating_duration_since(Instant::now());
        let wait = left.clamp(Duration::from_millis(10), Duration::from_secs(1));
        match connect(&address, wait).map_err(|e| e.kind()) {
            Ok(_) => return ListenerProbe::Listens,
            Err(ErrorKind::ConnectionRefused) => said = ListenerProbe::Refused,
            Err(ErrorKind::TimedOut) => return ListenerProbe::Silent,
            // Such as an address of IPv6 on a host that has none.
            Err(_) => {}
        }
    }
    said
}

/// Returns true if the server's host answers that no process listens at the server's address.
pub(super) fn is_gone(server: &str) -> bool {
    probe(server, after(Instant::now(), PROBE_WITHIN)) == ListenerProbe::Refused
}

/// Returns true if no process listens at a server's address any more. Waits a moment, because a
/// process that dies may close its listener after its connections.
pub(super) fn is_gone_soon(server: &str) -> bool {
    const TRIES: u32 = 10;
    const BETWEEN: Duration = Duration::from_millis(20);

    for _ in 0..TRIES {
        if is_gone(server) {
            return true;
        }
        std::thread::sleep(BETWEEN);
    }
    false
}

/// Returns true if a process listens at a server's address, even if it does not answer yet.
pub(super) fn is_heard(server: &str) -> bool {
    probe(server, after(Instant::now(), PROBE_WITHIN)) == ListenerProbe::Listens
}

/// Returns the addresses of a server, IPv4 first. The transports listen at the interface through
/// which a process has reached the server, and some hosts of the job may be unable to use IPv6.
fn addresses(server: &str) -> std::io::Result<Vec<SocketAddr>> {
    let (host, port) = split_address(server)
        .ok_or_else(|| std::io::Error::new(ErrorKind::InvalidInput, "it is not host:port"))?;

    // Without brackets the system's resolver accepts a zone by its name: fe80::1%eth0.
    let found = (host, port).to_socket_addrs().map(in_order);
    if host != "localhost" {
        return found;
    }

    // The service listens there, even if the name has another address.
    let here = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    Ok(in_order(
        found.unwrap_or_default().into_iter().chain([here]),
    ))
}

/// Checks that the host of an address `host:port` has an address at present.
///
/// # Errors
///
/// The error of the system's resolver, or that the address is not `host:port`.
pub fn check_resolves(address: &str) -> std::io::Result<()> {
    match addresses(address)?.is_empty() {
        true => Err(std::io::Error::new(ErrorKind::NotFound, NO_ADDRESS)),
        false => Ok(()),
    }
}

fn in_order(addresses: impl Iterator<Item = SocketAddr>) -> Vec<SocketAddr> {
    let mut addresses: Vec<SocketAddr> = addresses.collect();
    addresses.sort_by_key(|address| !address.is_ipv4());
    addresses
}

/// Splits an address into host (without brackets) and port. Returns `None` unless it is
/// `host:port`.
pub fn split_address(address: &str) -> Option<(&str, u16)> {
    let (host, port) = address.rsplit_once(':')?;
    let host = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host);
    (!host.is_empty()).then_some((host, port.parse().ok()?))
}

/// Runs the handshake with the server, until about `until`. Returns the interval of the server's
/// pings.
fn greet(
    stream: &mut TcpStream,
    config: &JoinConfig,
    until: Instant,
) -> Result<Duration, RendezvousError> {
    let server = || config.server.clone();
    let failed = |e: std::io::Error| match e.kind() {
        ErrorKind::UnexpectedEof
        | ErrorKind::ConnectionReset
        | ErrorKind::ConnectionAborted
        | ErrorKind::BrokenPipe => RendezvousError::Token { server: server() },
        ErrorKind::WouldBlock | ErrorKind::TimedOut => RendezvousError::Unreachable {
            server: server(),
            peer_timeout: config.peer_timeout,
            why: "a program accepts connections there, but does not answer".into(),
        },
        _ => RendezvousError::ServerGone {
            server: server(),
            why: e.to_string(),
        },
    };

    let refused = |refusal| match refusal {
        Refusal::Stranger => RendezvousError::Stranger { server: server() },
        Refusal::WrongProof => RendezvousError::Token { server: server() },
        Refusal::OtherVersion { theirs } => RendezvousError::Version {
            server: server(),
            theirs,
            ours: VERSION,
        },
    };

    let nonce = random_bytes().map_err(failed)?;
    let mut handshake = Handshake::call(HANDSHAKE, config.token.clone(), nonce, &[]);
    let mut bytes = [0; 128];
    loop {
        let left = until
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(10));
        stream.set_read_timeout(Some(left)).map_err(failed)?;
        stream.set_write_timeout(Some(left)).map_err(failed)?;
        stream.write_all(&handshake.say()).map_err(failed)?;

        let wants = handshake.wants().min(bytes.len());
        if wants == 0 {
            break;
        }
        match stream.read(&mut bytes[..wants]) {
            Ok(0) => return Err(failed(ErrorKind::UnexpectedEof.into())),
            Ok(count) => handshake.take(&bytes[..count]).map_err(refused)?,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(failed(e)),
        }
    }

    let ping = handshake.proved_facts().and_then(decode_ping);
    ping.ok_or_else(|| refused(Refusal::Stranger))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_all_hosts_can_use_come_first() {
        let found = [
            "[fe80::1%2]:7",
            "[2001:db8::1]:7",
            "10.0.0.2:7",
            "10.0.0.1:7",
        ];
        let sorted = in_order(found.map(|address| address.parse().unwrap()).into_iter());
        let expected = [
            "10.0.0.2:7",
            "10.0.0.1:7",
            "[fe80::1%2]:7",
            "[2001:db8::1]:7",
        ];
        assert_eq!(
            sorted.iter().map(ToString::to_string).collect::<Vec<_>>(),
            expected
        );
        let here = addresses("localhost:7").unwrap();
        assert!(
            here.is_sorted_by_key(|address| !address.is_ipv4()),
            "{here:?}"
        );
        assert!(here.contains(&"127.0.0.1:7".parse().unwrap()), "{here:?}");
    }
}
