//! Rendezvous over real sockets: processes that come, processes that are missing, and strangers.

mod strangers;

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

use mpmd_base::ProcessId;
use mpmd_proto::router::{Failure, FailureKind};
use mpmd_rendezvous::{
    Down, FailureReport, Identity, JobMember, JobObserver, JoinConfig, JoinedEpoch,
    MAX_VALUE_BYTES, ProcessPart, Rendezvous, RendezvousError, RendezvousServer, ServerConfig,
    Token, VERSION,
};

use crate::handshake::{End, Reply};

/// Time limit for a wait. Nothing here takes this long; it ends a test that would hang.
const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(400);

/// An end of a handshake that a test plays.
const END: End = End {
    magic: b"MPMDMEET",
    version: VERSION,
    token: [42; 32],
};

fn token() -> Token {
    Token::new([42; 32])
}

fn server(processes: usize, peer_timeout: Duration) -> RendezvousServer {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    RendezvousServer::bind(
        any,
        ServerConfig {
            processes,
            token: token(),
            peer_timeout,
        },
    )
    .unwrap()
}

fn config(server: &RendezvousServer, process: u32, processes: usize) -> JoinConfig {
    let server = server.address().to_string();
    JoinConfig {
        server,
        process: ProcessId(process),
        processes,
        token: token(),
        peer_timeout: LONG,
    }
}

fn member(process: u32) -> JobMember {
    JobMember {
        host: format!("host{process}"),
        pid: 1000 + process,
        devices: process + 1,
        addresses: vec![("tcp".into(), format!("127.0.0.1:{process}"))],
        program: "fingerprint".into(),
        trouble: (process == 3).then(|| "it has no network".to_owned()),
        ..JobMember::default()
    }
}

fn join(config: JoinConfig) -> Result<(Rendezvous, JoinedEpoch), RendezvousError> {
    let process = config.process.0;
    let rendezvous = Rendezvous::connect(config)?;
    let joined = rendezvous.join(member(process))?;
    Ok((rendezvous, joined))
}

/// Lets the given processes join at once, each on its own thread. Returns their results in the
/// given order.
fn join_all(
    server: &RendezvousServer,
    who: &[u32],
    processes: usize,
) -> Vec<Result<(Rendezvous, JoinedEpoch), RendezvousError>> {
    let threads: Vec<_> = who
        .iter()
        .map(|&process| {
            let config = config(server, process, processes);
            thread::spawn(move || join(config))
        })
        .collect();
    threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect()
}

fn meet(server: &RendezvousServer, processes: usize) -> Vec<Rendezvous> {
    let who: Vec<u32> = (0..processes as u32).collect();
    join_all(server, &who, processes)
        .into_iter()
        .map(|joined| joined.unwrap().0)
        .collect()
}

/// Lets all processes join the first epoch of a job that recovers.
fn join_first_epoch(server: &RendezvousServer, processes: usize) -> Vec<(Rendezvous, Identity)> {
    let threads = (0..processes).map(|process| {
        let config = config(server, process as u32, processes);
        thread::spawn(move || {
            let identity = Identity::random().unwrap();
            let rendezvous = Rendezvous::connect(config).unwrap();
            let joined = rendezvous
                .join_epoch(member(process as u32), 1, identity)
                .unwrap();
            let run = Some(joined.expect("there is a place").run);
            (rendezvous, Identity { run, ..identity })
        })
    });
    let threads: Vec<_> = threads.collect();
    threads
        .into_iter()
        .map(|thread| thread.join().unwrap())
        .collect()
}

fn downs(rendezvous: &Rendezvous) -> Receiver<Down> {
    let (sender, downs) = mpsc::channel();
    rendezvous.on_down(Box::new(move |down| drop(sender.send(down))));
    downs
}

#[test]
fn all_processes_get_the_same_list_of_members() {
    let server = server(4, LONG);
    let expected: Vec<JobMember> = (0..4).map(member).collect();
    let joined = join_all(&server, &[2, 0, 3, 1], 4);
    for result in &joined {
        let (rendezvous, joined) = result.as_ref().unwrap();
        assert_eq!(joined.members, expected);
        assert_eq!(
            rendezvous.local_address().ip(),
            IpAddr::V4(Ipv4Addr::LOCALHOST)
        );
        let offset = Duration::from_nanos(rendezvous.clock_offset().unsigned_abs());
        assert!(
            offset < LONG,
            "one host has one clock; it is off by {offset:?}"
        );
    }
    assert_eq!(server.wait_complete(LONG), Ok(()));
    assert!(!server.wait_empty(Duration::ZERO));
    for result in joined {
        result.unwrap().0.leave().unwrap();
    }
    assert!(server.wait_empty(LONG));
}

#[test]
fn service_at_all_addresses_is_reached_by_both_kinds() {
    let any = SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0));
    let service = ServerConfig {
        processes: 2,
        token: token(),
        peer_timeout: LONG,
    };
    let server = RendezvousServer::bind(any, service).unwrap();
    let port = server.address().port();
    let has_ipv6 = TcpListener::bind((Ipv6Addr::LOCALHOST, 0)).is_ok();
    let hosts = ["127.0.0.1", if has_ipv6 { "[::1]" } else { "localhost" }];
    let joins = hosts.into_iter().zip(0..).map(|(host, process)| {
        let config = JoinConfig {
            server: format!("{host}:{port}"),
            ..config(&server, process, 2)
        };
        thread::spawn(move || {
            let rendezvous = Rendezvous::connect(config).unwrap();
            let members = rendezvous.join(member(process)).unwrap().members.len();
            rendezvous.leave().unwrap();
            members
        })
    });
    let joins: Vec<_> = joins.collect();
    assert!(joins.into_iter().all(|join| join.join().unwrap() == 2));
}

#[test]
fn addresses_longer_than_one_message_reach_all() {
    let server = server(3, LONG);
    // As long as one process may send: no two of them fit into a message.
    let told = |process: u32| JobMember {
        addresses: vec![("ucx".into(), process.to_string().repeat(MAX_VALUE_BYTES))],
        ..member(process)
    };
    let expected: Vec<JobMember> = (0..3).map(told).collect();
    let threads: Vec<_> = (0..3)
        .map(|process| {
            let config = config(&server, process, 3);
            let told = told(process);
            thread::spawn(move || {
                let rendezvous = Rendezvous::connect(config).unwrap();
                let members = rendezvous.join(told).unwrap().members;
                rendezvous.leave().unwrap();
                members
            })
        })
        .collect();
    for thread in threads {
        // No `assert_eq`, which would print them.
        assert!(thread.join().unwrap() == expected);
    }
}

#[test]
fn the_server_may_come_up_later() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let late = JoinConfig {
        server: address.to_string(),
        process: ProcessId(0),
        processes: 1,
        token: token(),
        peer_timeout: LONG,
    };
    let joining = thread::spawn(move || join(late).map(drop));
    thread::sleep(Duration::from_millis(100));
    let _server = RendezvousServer::bind(
        address,
        ServerConfig {
            processes: 1,
            token: token(),
            peer_timeout: LONG,
        },
    )
    .unwrap();
    joining.join().unwrap().unwrap();
}

#[test]
fn values_are_shared_and_waited_for() {
    let server = server(2, LONG);
    let all = meet(&server, 2);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| all[1].get("weights", LONG));
        all[0].set("weights", vec![7; MAX_VALUE_BYTES]).unwrap();
        assert_eq!(waiting.join().unwrap(), Ok(vec![7; MAX_VALUE_BYTES]));
    });
    all[1].set("weights", vec![]).unwrap();
    assert_eq!(all[0].get("weights", LONG), Ok(vec![]));
    let unset = all[0].get("nobody sets this", SHORT).unwrap_err();
    assert_eq!(
        unset,
        RendezvousError::Unset {
            key: "nobody sets this".into(),
            peer_timeout: SHORT
        }
    );
    let long = all[0].set("long", vec![0; MAX_VALUE_BYTES + 1]);
    assert!(matches!(long, Err(RendezvousError::TooLong { .. })));
    assert_eq!(
        all[0].get("weights", LONG),
        Ok(vec![]),
        "an error of the caller harms nothing"
    );
}

#[test]
fn barrier_waits_for_all_and_names_the_missing() {
    let server = server(3, LONG);
    let all = meet(&server, 3);
    for _ in 0..3 {
        thread::scope(|scope| {
            let waiting: Vec<_> = all
                .iter()
                .map(|rendezvous| scope.spawn(|| rendezvous.barrier("step", LONG)))
                .collect();
            assert!(
                waiting
                    .into_iter()
                    .all(|thread| thread.join().unwrap() == Ok(()))
            );
        });
    }
    let error = all[1].barrier("alone", SHORT).unwrap_err();
    let missing = vec![ProcessId(0), ProcessId(2)];
    let name = "alone".to_owned();
    assert_eq!(
        error,
        RendezvousError::Barrier {
            name,
            missing,
            processes: 3,
            peer_timeout: SHORT
        }
    );
    assert!(
        error
            .to_string()
            .contains("processes 0 and 2 of 3 have not arrived"),
        "{error}"
    );
    thread::scope(|scope| {
        let waiting = scope.spawn(|| all[1].barrier("left", LONG));
        all[2].leave().unwrap();
        let broken = waiting.join().unwrap().unwrap_err();
        assert!(
            matches!(
                broken,
                RendezvousError::BarrierBroken {
                    process: ProcessId(2),
                    ..
                }
            ),
            "{broken}"
        );
    });
}

#[test]
fn death_is_reported_to_peers_and_leaving_is_not() {
    let server = server(3, LONG);
    let mut all = meet(&server, 3);
    let heard: Vec<_> = all.iter().map(downs).collect();
    drop(all.remove(1));
    for at in [0, 2] {
        match heard[at].recv_timeout(LONG).unwrap() {
            Down::Process(ProcessId(1), why) => assert!(why.contains("closed"), "{why}"),
            other => panic!("{other:?}"),
        }
    }
    all[1].leave().unwrap();
    assert_eq!(all[1].leave(), Err(RendezvousError::Left));
    all[0].set("round trip", vec![]).unwrap();
    assert!(heard[0].try_recv().is_err(), "process 2 left in order");
    drop(server);
    assert!(matches!(heard[0].recv_timeout(LONG), Ok(Down::Server(_))));
    assert!(matches!(
        all[0].get("x", LONG),
        Err(RendezvousError::ServerGone { .. })
    ));
    assert!(
        heard[2].try_recv().is_err(),
        "a process that has left is told nothing"
    );
}

#[test]
fn the_first_report_of_each_process_is_kept_for_the_owner() {
    let server = server(2, LONG);
    let all = meet(&server, 2);
    let report = |process, message: &str| {
        let failure = Failure::new(FailureKind::Kernel, ProcessId(process), 7, message);
        FailureReport {
            failure,
            hash: Some(3),
        }
    };
    assert!(server.reports().is_empty());
    all[1].report(report(0, "first")).unwrap();
    all[1].report(report(0, "second")).unwrap();
    all[0].report(report(0, "third")).unwrap();
    all[1].leave().unwrap();
    let expected = [
        (ProcessId(1), report(0, "first")),
        (ProcessId(0), report(0, "third")),
    ];
    assert_eq!(server.reports(), expected);
    let late = all[1].report(report(1, "late"));
    assert_eq!(late, Err(RendezvousError::Left));
}

#[test]
fn deaths_before_the_first_listener_are_kept() {
    let server = server(2, LONG);
    let mut all = meet(&server, 2);
    drop(all.pop());
    let broken = all[0].barrier("b", LONG).unwrap_err();
    assert!(
        matches!(
            broken,
            RendezvousError::BarrierBroken {
                process: ProcessId(1),
                ..
            }
        ),
        "{broken}"
    );
    let down = downs(&all[0]).recv_timeout(LONG).unwrap();
    assert!(matches!(down, Down::Process(ProcessId(1), _)));
}

#[test]
fn silent_client_is_given_up_and_a_pinging_one_is_not() {
    let peer_timeout = Duration::from_secs(2);
    let server = server(2, peer_timeout);
    // Joins by hand, then answers no ping, like a stopped process.
    let mut stopped = TcpStream::connect(server.address()).unwrap();
    stopped.set_read_timeout(Some(LONG)).unwrap();
    let facts = END.call(&mut stopped, &[], 4).unwrap();
    // It pings four times within its timeout.
    assert_eq!(facts, 500u32.to_le_bytes());
    // Join {ask 1, process 1, processes 2, epoch 1, identity {key 7, run None}, waits false,
    // peer_timeout 30 s, member of empty fields}, in bincode's standard form.
    stopped
        .write_all(&[
            22, 0, 0, 0, 0, 1, 1, 2, 1, 7, 0, 0, 30, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        ])
        .unwrap();
    let mut mine = config(&server, 0, 2);
    mine.peer_timeout = LONG;
    let rendezvous = Rendezvous::connect(mine).unwrap();
    rendezvous.join(JobMember::default()).unwrap();
    match downs(&rendezvous).recv_timeout(LONG).unwrap() {
        Down::Process(ProcessId(1), why) => assert!(why.contains("silent"), "{why}"),
        other => panic!("{other:?}"),
    }
    // One timeout later, the process that only answers pings is still in the job.
    thread::sleep(peer_timeout);
    rendezvous.set("alive", vec![]).unwrap();
}

#[test]
fn a_silent_server_is_noticed() {
    // Greets with a ping interval of 1 ms, and then only answers questions about its clock.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let server = listener.local_addr().unwrap().to_string();
    let (done, wait) = mpsc::channel::<()>();
    let silent = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        END.answer(&mut stream, &1u32.to_le_bytes()).unwrap();
        let mut request = [0; 6];
        while stream.read_exact(&mut request).is_ok() {
            // Answer {ask, Ok(Clock(0))}
            if stream
                .write_all(&[5, 0, 0, 0, 0, request[5], 0, 3, 0])
                .is_err()
            {
                break;
            }
        }
        drop(wait);
    });
    let (process, processes, token) = (ProcessId(0), 1, token());
    let rendezvous = Rendezvous::connect(JoinConfig {
        server,
        process,
        processes,
        token,
        peer_timeout: SHORT,
    })
    .unwrap();
    match downs(&rendezvous).recv_timeout(LONG).unwrap() {
        Down::Server(why) => assert!(why.contains("silent"), "{why}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(
        rendezvous.set("k", vec![]),
        Err(RendezvousError::ServerGone { .. })
    ));
    silent.join().unwrap();
    drop(done);
}

/// A connection between a client and the server that can be cut, or stand still.
struct Relay {
    address: SocketAddr,
    ends: Receiver<TcpStream>,
    still: Arc<AtomicBool>,
}

impl Relay {
    fn to(server: &RendezvousServer) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (address, server) = (listener.local_addr().unwrap(), server.address());
        let (sender, ends) = mpsc::channel();
        let still = Arc::<AtomicBool>::default();
        let is_still = still.clone();
        thread::spawn(move || {
            let (near, _) = listener.accept().unwrap();
            let far = TcpStream::connect(server).unwrap();
            for (mut from, mut to) in [
                (near.try_clone().unwrap(), far.try_clone().unwrap()),
                (far, near.try_clone().unwrap()),
            ] {
                let is_still = is_still.clone();
                thread::spawn(move || {
                    let mut bytes = [0; 4096];
                    while let Ok(n @ 1..) = from.read(&mut bytes) {
                        while is_still.load(Ordering::Relaxed) {
                            thread::sleep(Duration::from_millis(5));
                        }
                        if to.write_all(&bytes[..n]).is_err() {
                            break;
                        }
                    }
                });
            }
            sender.send(near).unwrap();
        });
        Self {
            address,
            ends,
            still,
        }
    }

    /// Holds back all bytes, or lets them through again.
    fn stand_still(&self, still: bool) {
        self.still.store(still, Ordering::Relaxed);
    }

    /// Cuts the client's end.
    fn cut(&self) {
        self.ends
            .recv_timeout(LONG)
            .unwrap()
            .shutdown(std::net::Shutdown::Both)
            .unwrap();
    }
}

/// Joins as the only process of a job, with a connection through a relay. Returns the client and
/// the relay.
fn alone_behind_relay(server: &RendezvousServer) -> (Rendezvous, Relay) {
    let relay = Relay::to(server);
    let server = relay.address.to_string();
    let (process, processes, token) = (ProcessId(0), 1, token());
    let config = JoinConfig {
        server,
        process,
        processes,
        token,
        peer_timeout: Duration::from_secs(1),
    };
    let rendezvous = Rendezvous::connect(config).unwrap();
    rendezvous.join(member(0)).unwrap();
    (rendezvous, relay)
}

#[test]
fn silent_server_is_reported_once_and_may_come_back() {
    // With a long timeout: the client is to notice first.
    let server = server(1, LONG);
    let (rendezvous, relay) = alone_behind_relay(&server);
    let heard = downs(&rendezvous);
    relay.stand_still(true);
    assert!(matches!(heard.recv_timeout(LONG), Ok(Down::Server(why)) if why.contains("silent")));
    let error = rendezvous.set("k", vec![1]).unwrap_err();
    assert!(
        matches!(error, RendezvousError::ServerGone { .. }),
        "{error}"
    );
    relay.stand_still(false);
    // Messages from the time of silence have arrived, too.
    while rendezvous.get("k", LONG) != Ok(vec![1]) {
        thread::sleep(Duration::from_millis(5));
    }
    relay.stand_still(true);
    while rendezvous.set("k", vec![2]).is_ok() {
        thread::sleep(Duration::from_millis(5));
    }
    assert!(heard.try_recv().is_err(), "told once");
    assert!(rendezvous.leave().is_err());
    relay.stand_still(false);
    assert!(server.wait_empty(LONG), "it has taken leave all the same");
}

#[test]
fn cut_connection_is_reported_and_leaving_is_quick() {
    let server = server(1, LONG);
    let (rendezvous, relay) = alone_behind_relay(&server);
    let heard = downs(&rendezvous);
    relay.cut();
    assert!(matches!(heard.recv_timeout(LONG), Ok(Down::Server(_))));
    assert!(matches!(
        rendezvous.leave(),
        Err(RendezvousError::ServerGone { .. })
    ));
}

#[test]
fn client_that_is_closed_without_a_word_tries_again() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let address = listener.local_addr().unwrap();
    let config = JoinConfig {
        server: address.to_string(),
        process: ProcessId(0),
        processes: 1,
        token: token(),
        peer_timeout: LONG,
    };
    let joining = thread::spawn(move || join(config).map(drop));
    // Like a server that closes the oldest silent connection to make room.
    drop(listener.accept().unwrap());
    drop(listener);
    let _server = RendezvousServer::bind(
        address,
        ServerConfig {
            processes: 1,
            token: token(),
            peer_timeout: LONG,
        },
    )
    .unwrap();
    joining.join().unwrap().unwrap();
}

#[test]
fn missing_processes_are_named_to_members_and_owner() {
    let server = server(4, SHORT);
    let results = join_all(&server, &[0, 3], 4);
    let missing = RendezvousError::Missing {
        missing: vec![ProcessId(1), ProcessId(2)],
        processes: 4,
        peer_timeout: SHORT,
    };
    for result in results {
        assert_eq!(result.unwrap_err(), missing);
    }
    assert_eq!(server.wait_complete(LONG), Err(missing.clone()));
    assert_eq!(server.failure(), Some(missing.clone()));
    assert_eq!(
        join(config(&server, 1, 4)).unwrap_err(),
        missing,
        "a late process gets the reason"
    );
}

#[test]
fn duplicate_is_refused_with_the_holder_and_job_goes_on() {
    let server = server(2, LONG);
    let first = Rendezvous::connect(config(&server, 1, 2)).unwrap();
    thread::scope(|scope| {
        let waiting = scope.spawn(|| first.join(member(1)));
        // The second of two equal claims is the duplicate: wait until the first has arrived.
        while server.wait_empty(Duration::ZERO) {
            thread::sleep(Duration::from_millis(2));
        }
        let other = Rendezvous::connect(config(&server, 1, 2)).unwrap();
        let error = other
            .join(JobMember {
                pid: 7,
                ..member(1)
            })
            .unwrap_err();
        let held = RendezvousError::Duplicate {
            process: ProcessId(1),
            host: "host1".into(),
            pid: 1001,
        };
        assert_eq!(error, held);
        let (_other, joined) = join(config(&server, 0, 2)).unwrap();
        let expected = JoinedEpoch {
            process: ProcessId(1),
            ..joined
        };
        assert_eq!(waiting.join().unwrap().unwrap(), expected);
    });
    let after = join(config(&server, 1, 2)).unwrap_err();
    assert!(
        matches!(after, RendezvousError::Duplicate { .. }),
        "no place changes hands later: {after}"
    );
}

#[test]
fn complete_job_accepts_no_process_even_after_a_death() {
    let server = server(2, LONG);
    let mut all = meet(&server, 2);
    let heard = downs(&all[0]);
    drop(all.pop());
    heard.recv_timeout(LONG).unwrap();
    let error = join(config(&server, 1, 2)).unwrap_err();
    assert_eq!(
        error,
        RendezvousError::Complete {
            process: ProcessId(1),
            processes: 2
        }
    );
}

#[test]
fn another_job_size_is_refused_with_both_sizes() {
    let server = server(2, LONG);
    let error = join(config(&server, 2, 3)).unwrap_err();
    assert_eq!(
        error,
        RendezvousError::Count {
            process: ProcessId(2),
            believes: 3,
            job: 2
        }
    );
    let error = join(config(&server, 3, 3)).unwrap_err();
    assert_eq!(
        error,
        RendezvousError::NoSuchProcess {
            process: ProcessId(3),
            processes: 3
        }
    );
    meet(&server, 2);
}

#[test]
fn different_programs_are_named_to_all() {
    let server = server(3, LONG);
    let threads = [(0, "one"), (1, "one"), (2, "two")].map(|(process, program)| {
        let config = config(&server, process, 3);
        thread::spawn(move || {
            let program = program.to_owned();
            Rendezvous::connect(config)
                .unwrap()
                .join(JobMember {
                    program,
                    ..member(process)
                })
                .unwrap_err()
        })
    });
    for thread in threads {
        let error = thread.join().unwrap();
        let said = error.to_string();
        assert!(matches!(error, RendezvousError::Program { .. }), "{said}");
        assert!(
            said.contains("\"one\"") && said.contains("\"two\"") && said.contains("host2"),
            "{said}"
        );
    }
    assert!(matches!(
        server.wait_complete(LONG),
        Err(RendezvousError::Program { .. })
    ));
}

#[test]
fn a_taken_port_and_an_unreachable_server_are_named() {
    let first = server(1, LONG);
    let address = first.address();
    let second = RendezvousServer::bind(
        address,
        ServerConfig {
            processes: 1,
            token: token(),
            peer_timeout: LONG,
        },
    );
    let taken = second.unwrap_err();
    assert!(
        matches!(&taken, RendezvousError::Bind { address: a, .. } if *a == address.to_string())
    );
    let mut nowhere = config(&first, 0, 1);
    nowhere.peer_timeout = SHORT;
    drop(first);
    match Rendezvous::connect(nowhere).unwrap_err() {
        RendezvousError::Unreachable {
            server,
            peer_timeout: SHORT,
            why,
        } => {
            assert_eq!(server, address.to_string());
            assert!(why.contains("refused"), "{why}");
        }
        other => panic!("{other}"),
    }
}

#[test]
fn observer_looks_at_a_running_job_and_sees_its_end() {
    let server = server(2, LONG);
    let address = server.address().to_string();
    let mut processes = meet(&server, 2);
    let wrong = JobObserver::connect(&address, Token::new([1; 32]), LONG);
    assert!(
        matches!(wrong, Err(RendezvousError::Token { .. })),
        "{wrong:?}"
    );
    let observer = JobObserver::connect(&address, token(), LONG).unwrap();
    processes[0].on_look(|words| [b"fine: ", words].concat());
    let seen = observer.look(b"how?", LONG).unwrap();
    assert_eq!(seen[&ProcessId(0)], Ok(b"fine: how?".to_vec()));
    assert_eq!(seen[&ProcessId(1)], Err("it is starting".to_owned()));
    drop(processes.pop());
    let gone = downs(&processes[0]).recv_timeout(LONG).unwrap();
    let Down::Process(ProcessId(1), why) = gone else {
        panic!("{gone:?}")
    };
    assert_eq!(observer.look(&[], LONG).unwrap()[&ProcessId(1)], Err(why));
    processes[0].leave().unwrap();
    drop(server);
    let ended = observer.look(&[], LONG);
    assert!(
        matches!(ended, Err(RendezvousError::ServerGone { .. })),
        "{ended:?}"
    );
}

#[test]
fn job_goes_on_with_a_spare_in_the_next_epoch() {
    let server = server(3, LONG);
    let (mut all, identities): (Vec<_>, Vec<_>) = join_first_epoch(&server, 3).into_iter().unzip();
    let join_epoch = |number: u32, epoch: u64, identity: Identity| {
        let config = config(&server, number, 3);
        thread::spawn(move || {
            let rendezvous = Rendezvous::connect(config).unwrap();
            rendezvous
                .join_epoch(member(number), epoch, identity)
                .map(|joined| (rendezvous, joined))
        })
    };
    let spares = [3, 4].map(|number| join_epoch(number, 1, Identity::random().unwrap()));
    let heard = downs(&all[0]);
    drop(all.remove(1));
    assert!(matches!(
        heard.recv_timeout(LONG),
        Ok(Down::Process(ProcessId(1), _))
    ));
    assert!(server.wanted() <= 1, "a spare may still be on its way");
    all.iter()
        .for_each(|survivor| survivor.leave_epoch().unwrap());
    let survivors = [0, 2].map(|number| join_epoch(number, 2, identities[number as usize]));
    let mut joined: Vec<_> = survivors.map(|one| one.join().unwrap().unwrap()).into();
    // Either spare may be the first; the other waits until all have left.
    let (sender, ends) = mpsc::channel();
    for spare in spares {
        let sender = sender.clone();
        thread::spawn(move || drop(sender.send(spare.join().unwrap().unwrap())));
    }
    joined.push(ends.recv_timeout(LONG).unwrap());
    let places: Vec<_> = joined
        .iter()
        .map(|(_, joined)| joined.as_ref().unwrap())
        .collect();
    let numbers: Vec<_> = places
        .iter()
        .map(|joined| (joined.process.0, joined.epoch))
        .collect();
    assert_eq!(numbers, [(0, 2), (2, 2), (1, 2)]);
    assert!(
        places
            .iter()
            .all(|joined| joined.members == places[0].members)
    );
    assert!(
        places
            .iter()
            .all(|joined| Some(joined.run) == identities[0].run)
    );
    assert!(places[0].members[1].host.starts_with("host"));
    assert_eq!(server.wanted(), 0);
    joined
        .iter()
        .for_each(|(rendezvous, _)| rendezvous.leave().unwrap());
    assert_eq!(
        ends.recv_timeout(LONG).unwrap().1,
        None,
        "the job ends without the other spare"
    );
    assert!(server.wait_empty(LONG));
}

/// As when process 0 hosts the service, and a launcher starts it again with the same token.
#[test]
fn survivor_of_a_run_is_refused_by_the_next() {
    let first = server(1, LONG);
    let (rendezvous, identity) = join_first_epoch(&first, 1).remove(0);
    rendezvous.leave_epoch().unwrap();
    drop(first);
    let second = server(1, LONG);
    let survivor = Rendezvous::connect(config(&second, 0, 1)).unwrap();
    let error = survivor.join_epoch(member(0), 2, identity).unwrap_err();
    assert_eq!(
        error,
        RendezvousError::OtherRun {
            process: ProcessId(0)
        }
    );
    let (_new, joined) = join(config(&second, 0, 1)).unwrap();
    assert_ne!(Some(joined.run), identity.run);
}
