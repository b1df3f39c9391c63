//! Failures that only sockets have: strangers, misfits, garbage, broken connections.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use mpmd_proto::wire::VERSION;
use mpmd_proto::{Header, MessageKind};
use mpmd_transport::tcp::{PeerListener, Tcp, TcpConfig};
use mpmd_transport::{Transport, TransportError};

use crate::cluster::{Cluster, EPOCH, TOKEN, config, id, is_gone, listen};
use crate::handshake::{End, Reply};
use crate::recorder::Manner;
use crate::within;

const LIMIT: Duration = Duration::from_secs(60);

type Connecting = JoinHandle<Result<Arc<Tcp>, TransportError>>;

fn connecting(listener: PeerListener, config: TcpConfig) -> Connecting {
    std::thread::spawn(move || listener.connect(config))
}

/// A connection of a process that a test plays; a test changes some fields.
#[derive(Clone, Copy)]
struct Call {
    version: u16,
    token: [u8; 32],
    epoch: u64,
    from: u32,
    to: u32,
    channel: u32,
}

const CALL: Call = Call {
    version: VERSION,
    token: TOKEN,
    epoch: EPOCH,
    from: 1,
    to: 0,
    channel: 0,
};

impl Call {
    fn end(self) -> End {
        End {
            magic: b"MPMDTCP\0",
            version: self.version,
            token: self.token,
        }
    }

    /// Returns the facts about this process in a job of `processes`.
    fn facts(self, processes: u32) -> Vec<u8> {
        let epoch = self.epoch.to_le_bytes();
        let [from, processes, to, channel] =
            [self.from, processes, self.to, self.channel].map(u32::to_le_bytes);
        [&from[..], &processes, &epoch, &to, &channel].concat()
    }

    /// Connects to `address` and says hello. Returns the socket.
    fn say(self, address: SocketAddr) -> TcpStream {
        let mut stream = dial(address);
        stream.write_all(&self.end().hello(&self.facts(2))).unwrap();
        stream
    }

    /// Runs the handshake with a process of a job of `processes` at `address`. Returns the socket.
    fn meet_in(self, processes: u32, address: SocketAddr) -> TcpStream {
        let mut stream = dial(address);
        let facts = self
            .end()
            .call(&mut stream, &self.facts(processes), 16)
            .unwrap();
        assert_eq!(
            facts[..4],
            self.to.to_le_bytes(),
            "the answer has the id of this process"
        );
        stream
    }

    fn meet(self, address: SocketAddr) -> TcpStream {
        self.meet_in(2, address)
    }
}

fn dial(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    stream
}

/// Waits for the other side. Returns true if it has closed without an answer.
fn is_turned_away(mut stream: TcpStream) -> bool {
    // Closing with unread bytes gives a reset.
    !matches!(stream.read(&mut [0; 1]), Ok(1))
}

/// Returns a started process 0, and two bare sockets in place of its peer 1: (control, bulk).
fn against_bare_sockets(manner: Manner) -> (Cluster, [TcpStream; 2]) {
    let listener = listen();
    let address = listener.address();
    let zero = connecting(listener, config(0, vec![address; 2]));
    let sockets = [0, 1].map(|channel| Call { channel, ..CALL }.meet(address));
    let zero = zero.join().unwrap().unwrap();
    // There is no recorder for process 1: bare sockets stand for it.
    let cluster = Cluster::of(None, [zero as Arc<dyn Transport>], manner);
    cluster.start(0);
    (cluster, sockets)
}

fn heartbeat(op: u64) -> [u8; 64] {
    Header {
        op,
        ..Header::new(MessageKind::Heartbeat)
    }
    .encode()
}

fn assert_protocol(error: &TransportError, peer: usize, says: &str) {
    assert!(
        matches!(error, TransportError::Protocol { peer: named, .. } if *named == id(peer)),
        "{error}"
    );
    assert!(error.to_string().contains(says), "{error}");
}

/// Sends a bad header from process 2 of three over `channel`. Asserts that only process 2 is lost,
/// with an error that contains `says`.
fn a_bad_header(channel: usize, bytes: [u8; 64], says: &'static str) {
    within(LIMIT, move || {
        let listeners = [listen(), listen()];
        let addresses: Vec<_> = listeners.iter().map(PeerListener::address).collect();
        let peers = vec![addresses[0], addresses[1], addresses[0]];
        let processes = listeners.into_iter().enumerate();
        let processes = processes
            .map(|(process, listener)| connecting(listener, config(process, peers.clone())));
        let processes: Vec<Connecting> = processes.collect();
        let mut bare: Vec<Vec<TcpStream>> = Vec::new();
        for (to, address) in (0..).zip(&addresses) {
            bare.push(
                [0, 1]
                    .map(|channel| {
                        Call {
                            from: 2,
                            to,
                            channel,
                            ..CALL
                        }
                        .meet_in(3, *address)
                    })
                    .into(),
            );
        }
        let transports = processes
            .into_iter()
            .map(|thread| thread.join().unwrap().unwrap() as Arc<dyn Transport>);
        let mut cluster = Cluster::of(None, transports, Manner::Fetch);
        cluster.start(0);
        cluster.start(1);

        bare[0][0].write_all(&heartbeat(5)).unwrap();
        cluster.recorders[0].wait_complete(1);
        bare[0][channel].write_all(&bytes).unwrap();
        assert_protocol(&cluster.recorders[0].wait_down(id(2)), 2, says);
        for socket in bare.remove(0) {
            assert!(is_turned_away(socket), "both connections are closed");
        }
        let late = cluster.post(0, 1, MessageKind::Data, 100_000);
        cluster.recorders[1].wait_complete(1);
        assert_eq!(cluster.recorders[0].wait_done(late), Ok(()));
        bare[0][0].write_all(&heartbeat(6)).unwrap();
        cluster.recorders[1].wait_complete(2);
        drop(bare);
        cluster.finish();
    });
}

#[test]
fn garbage_for_a_header_ends_its_sender_alone() {
    a_bad_header(0, [b'x'; 64], "not an mpmd message");
    a_bad_header(1, [b'x'; 64], "not an mpmd message");
}

#[test]
fn a_header_of_another_version_ends_its_sender_alone() {
    let mut other = heartbeat(1);
    other[4] = 77;
    a_bad_header(0, other, "speaks wire version 77");
}

#[test]
fn oversized_control_message_ends_its_sender_alone() {
    let long = Header {
        bytes: 1 << 40,
        ..Header::new(MessageKind::Eager)
    };
    a_bad_header(0, long.encode(), "announces 1099511627776 bytes");
}

#[test]
fn a_message_on_the_wrong_connection_ends_its_sender_alone() {
    let data = Header {
        bytes: 10,
        ..Header::new(MessageKind::Data)
    };
    a_bad_header(0, data.encode(), "wrong connection");
    a_bad_header(1, heartbeat(1), "wrong connection");
}

#[test]
fn complete_control_messages_before_the_end_are_delivered() {
    within(LIMIT, || {
        let (cluster, [mut control, bulk]) = against_bare_sockets(Manner::Fetch);
        let mut bytes: Vec<u8> = (0..1000).flat_map(heartbeat).collect();
        bytes.extend(&heartbeat(1000)[..30]);
        // The other connection ends first.
        drop(bulk);
        control.write_all(&bytes).unwrap();
        drop(control);
        let why = cluster.recorders[0].wait_down(id(1));
        assert!(is_gone(&why, 1), "{why}");
        cluster.recorders[0].wait_complete(1000);
        cluster.finish();
    });
}

#[test]
fn one_broken_connection_ends_the_peer() {
    within(LIMIT, || {
        for broken in [0, 1] {
            let (cluster, sockets) = against_bare_sockets(Manner::Fetch);
            sockets[broken].shutdown(std::net::Shutdown::Both).unwrap();
            let why = cluster.recorders[0].wait_down(id(1));
            assert!(is_gone(&why, 1), "{why}");
            drop(sockets);
            cluster.finish();
        }
    });
}

#[test]
fn a_fetch_that_is_cut_off_ends_before_its_peer_does() {
    within(LIMIT, || {
        let (cluster, [control, mut bulk]) = against_bare_sockets(Manner::Fetch);
        let header = Header {
            bytes: 1 << 20,
            ..Header::new(MessageKind::Data)
        };
        bulk.write_all(&header.encode()).unwrap();
        bulk.write_all(&[7; 1000]).unwrap();
        // The payload is being read once it has a buffer.
        while cluster.recorders[0].pool.stats().live == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        drop((control, bulk));
        cluster.recorders[0].wait_down(id(1));
        cluster.recorders[0].read(|seen| {
            assert_eq!(seen.log, ["lost", "down"]);
            assert!(is_gone(&seen.lost[0], 1), "{}", seen.lost[0]);
        });
        assert_eq!(cluster.recorders[0].pool.stats().live, 0);
        cluster.finish();
    });
}

#[test]
fn strangers_are_turned_away_and_do_not_delay_peers() {
    within(LIMIT, || {
        let listeners = [listen(), listen()];
        let peers: Vec<_> = listeners.iter().map(PeerListener::address).collect();
        let [zero, one] = listeners;
        let zero = connecting(zero, config(0, peers.clone()));
        let silent: Vec<_> = (0..20).map(|_| dial(peers[0])).collect();
        let mut short = dial(peers[0]);
        short.write_all(b"MPMDTCP\0").unwrap();
        let mut wrong = CALL.say(peers[0]);
        let mut garbage = dial(peers[0]);
        garbage.write_all(&[b'G'; 4096]).unwrap();
        // Any answer but the right proof.
        let mut answer = [0; 92];
        wrong.read_exact(&mut answer).unwrap();
        wrong.write_all(&answer[60..]).unwrap();
        assert!(is_turned_away(wrong));
        assert!(is_turned_away(garbage));
        let one = one.connect(config(1, peers.clone())).unwrap();
        let zero = zero.join().unwrap().unwrap();
        let mut cluster = Cluster::of(None, [zero as Arc<dyn Transport>, one], Manner::Fetch);
        cluster.start(0);
        cluster.start(1);
        cluster.post(0, 1, MessageKind::Eager, 9);
        cluster.recorders[1].wait_complete(1);
        for stranger in silent.into_iter().chain([short]) {
            assert!(
                is_turned_away(stranger),
                "nobody is left waiting once all peers are there"
            );
        }
        cluster.finish_fine();
    });
}

/// Connects a pair; `bend` changes the configuration of process 1 so that the two do not fit.
/// Asserts both sides' errors.
fn misfits(bend: impl FnOnce(&mut TcpConfig), zero_hears: [&str; 2], one_hears: &str) {
    let listeners = [listen(), listen()];
    let peers: Vec<_> = listeners.iter().map(PeerListener::address).collect();
    let [zero, one] = listeners;
    let zero = connecting(zero, config(0, peers.clone()));
    let mut bent = config(1, peers);
    bend(&mut bent);
    assert_protocol(&one.connect(bent).unwrap_err(), 0, one_hears);
    let error = zero.join().unwrap().unwrap_err();
    for says in zero_hears {
        assert_protocol(&error, 1, says);
    }
}

#[test]
fn another_epoch_is_reported_on_both_sides() {
    within(LIMIT, || {
        misfits(
            |config| config.epoch = 9,
            ["belongs to epoch 9", "this process to 3"],
            "belongs to epoch 3",
        );
    });
}

#[test]
fn another_version_is_reported_on_both_sides() {
    within(LIMIT, || {
        let listener = listen();
        let address = listener.address();
        let peer_timeout = Duration::from_secs(2);
        let zero = connecting(
            listener,
            TcpConfig {
                peer_timeout,
                ..config(0, vec![address; 2])
            },
        );
        let mut other = Call {
            version: 55,
            ..CALL
        }
        .say(address);
        let mut told = Vec::new();
        other.read_to_end(&mut told).unwrap();
        let expected = [&b"MPMDTCP\0\x01\0"[..], &VERSION.to_le_bytes(), &[0; 4]].concat();
        assert_eq!(told, expected, "without a proof");
        drop(other);
        // Anybody can say a version. So it only adds to the error.
        let error = zero.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("waiting for process 1 of 2"), "{error}");
        assert!(error.contains("it speaks version 55"), "{error}");

        // The other way round: a process that listens where the peer should.
        let (listener, peer) = (listen(), TcpListener::bind("127.0.0.1:0").unwrap());
        let peers = vec![peer.local_addr().unwrap(), listener.address()];
        let one = connecting(listener, config(1, peers));
        let (mut stream, _) = peer.accept().unwrap();
        stream.read_exact(&mut [0; 66]).unwrap();
        stream.write_all(b"MPMDTCP\0\x01\0\x37\0\0\0\0\0").unwrap();
        assert_protocol(&one.join().unwrap().unwrap_err(), 0, "it speaks version 55");
    });
}

#[test]
fn squatter_learns_nothing_that_lets_it_in() {
    within(LIMIT, || {
        // The answer of process 0 to an earlier hello.
        let zero = listen();
        let address = zero.address();
        let zero = connecting(zero, config(0, vec![address; 2]));
        let mut earlier = vec![0; 92];
        CALL.say(address).read_exact(&mut earlier).unwrap();
        let reply: [Reply<'_>; 4] = [
            &|_| earlier.clone(),
            &|hello| hello.to_vec(),
            &|_| [&earlier[..60], &[0; 32]].concat(),
            &|_| Vec::new(),
        ];
        for reply in reply {
            let (listener, squatter) = (listen(), TcpListener::bind("127.0.0.1:0").unwrap());
            let peers = vec![squatter.local_addr().unwrap(), listener.address()];
            let of_one = TcpConfig {
                peer_timeout: Duration::from_secs(1),
                ..config(1, peers)
            };
            let one = connecting(listener, of_one);
            let (mut stream, _) = squatter.accept().unwrap();
            let mut heard = vec![0; 66];
            stream.read_exact(&mut heard).unwrap();
            stream.write_all(&reply(&heard)).unwrap();
            let error = one.join().unwrap().unwrap_err().to_string();
            assert!(error.contains("waiting for process 0"), "{error}");
            let _ = stream.read_to_end(&mut heard);
            assert_eq!(heard.len(), 66, "it proves nothing to a stranger");
            assert!(!heard.windows(4).any(|part| part == &TOKEN[..4]));
            // The bytes that it has heard do not let it in where the real process listens.
            let mut stream = dial(address);
            stream.write_all(&heard).unwrap();
            let mut answer = [0; 92];
            stream.read_exact(&mut answer).unwrap();
            stream.write_all(&answer[60..]).unwrap();
            assert!(is_turned_away(stream));
        }
        for channel in [0, 1] {
            std::mem::forget(Call { channel, ..CALL }.meet(address));
        }
        zero.join().unwrap().unwrap();
    });
}

#[test]
fn another_list_of_addresses_is_reported() {
    within(LIMIT, || {
        let listener = listen();
        let address = listener.address();
        let zero = connecting(listener, config(0, vec![address; 2]));
        let call = Call {
            from: 1,
            to: 1,
            ..CALL
        };
        let mut lost = dial(address);
        call.end().call(&mut lost, &call.facts(2), 16).unwrap();
        assert_protocol(
            &zero.join().unwrap().unwrap_err(),
            1,
            "expects process 1 here",
        );
    });
}

#[test]
fn two_processes_with_one_id_are_reported() {
    within(LIMIT, || {
        let listener = listen();
        let address = listener.address();
        let zero = connecting(listener, config(0, vec![address; 2]));
        let _first = CALL.meet(address);
        let _second = CALL.meet(address);
        assert_protocol(&zero.join().unwrap().unwrap_err(), 1, "two processes claim");
    });
}

#[test]
fn peer_with_a_broken_connection_may_connect_again() {
    within(LIMIT, || {
        let (listener, other) = (listen(), listen());
        let peers = vec![listener.address(), other.address()];
        let zero = connecting(listener, config(0, peers.clone()));
        // Answered and counted, but the answer is lost on its way back.
        drop(CALL.meet(peers[0]));
        let one = connecting(other, config(1, peers));
        zero.join().unwrap().unwrap();
        one.join().unwrap().unwrap();
    });
}

#[test]
fn missing_processes_are_named_after_peer_timeout() {
    within(LIMIT, || {
        let listener = listen();
        let gone = listen().address();
        let peers = vec![
            gone,
            listener.address(),
            listener.address(),
            listener.address(),
        ];
        let waits = TcpConfig {
            peer_timeout: Duration::from_secs(1),
            ..config(1, peers.clone())
        };
        let waits = connecting(listener, waits);
        // Process 2 opens only one of its two connections.
        let _half = Call {
            from: 2,
            to: 1,
            ..CALL
        }
        .meet_in(4, peers[1]);
        let error = waits.join().unwrap().unwrap_err();
        assert!(matches!(error, TransportError::TimedOut { .. }), "{error}");
        let said = error.to_string();
        assert!(said.contains("process 0 (127.0.0.1:"), "{said}");
        assert!(
            said.contains("process 2 and process 3 of 4 to connect took longer than 1s"),
            "{said}"
        );
    });
}

#[test]
fn wrong_token_is_suggested_as_the_cause() {
    within(LIMIT, || {
        let listeners = [listen(), listen()];
        let peers: Vec<_> = listeners.iter().map(PeerListener::address).collect();
        let [zero, one] = listeners;
        let peer_timeout = Duration::from_secs(2);
        let zero = connecting(
            zero,
            TcpConfig {
                peer_timeout,
                ..config(0, peers.clone())
            },
        );
        // Gives up first, while process 0 still refuses its connections.
        let wrong = TcpConfig {
            token: [9; 32],
            peer_timeout: peer_timeout / 2,
            ..config(1, peers)
        };
        let error = one.connect(wrong).unwrap_err().to_string();
        assert!(
            error.contains("process 0") && error.contains("token"),
            "{error}"
        );
        let error = zero.join().unwrap().unwrap_err().to_string();
        assert!(error.contains("waiting for process 1 of 2"), "{error}");
    });
}

#[test]
fn a_dropped_transport_closes_without_blocking() {
    within(LIMIT, || {
        let (cluster, sockets) = against_bare_sockets(Manner::Fetch);
        let zero = cluster.transport(0).clone();
        let open = mpmd_transport::Ticket(77);
        let header = Header {
            bytes: 64 << 20,
            ..Header::new(MessageKind::Data)
        };
        let payload = mpmd_memory::SharedBuffer::from(vec![0; 64 << 20]);
        zero.post(id(1), header, Some(payload), open);
        drop(zero);
        let recorder = cluster.recorders[0].clone();
        let mut cluster = cluster;
        cluster.kill(0);
        assert_eq!(recorder.wait_done(open), Err(TransportError::Closed));
        let [mut control, mut bulk] = sockets;
        assert!(matches!(control.read(&mut [0; 1]), Ok(0) | Err(_)));
        assert!(matches!(bulk.read_to_end(&mut Vec::new()), Ok(_) | Err(_)));
    });
}

#[test]
fn job_of_one_process_connects_to_no_peer() {
    within(LIMIT, || {
        let listener = listen();
        let address = listener.address();
        let alone = listener.connect(config(0, vec![address])).unwrap();
        let cluster = Cluster::of(None, [alone as Arc<dyn Transport>], Manner::Fetch);
        cluster.start(0);
        cluster.finish_fine();
    });
}
