//! Tests of faulty servers.

use super::super::CommitStanding;
use super::*;

const PEER_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns a client's connection in a job of two, and the server's end, which the test plays.
fn connection() -> (ServerConnection, TcpStream) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let wire = ServerWire::Tcp {
        stream,
        writing: Mutex::new(()),
    };
    let (server, changed) = ("test".to_owned(), Condvar::new());
    let state = Mutex::new(ConnectionState::new(PEER_TIMEOUT));
    (
        ServerConnection {
            server,
            wire,
            state,
            changed,
        },
        listener.accept().unwrap().0,
    )
}

#[test]
fn too_many_statuses_or_downs_are_refused() {
    let (connection, _server) = connection();
    let members = {
        let members = vec![JobMember::default(); 2].into();
        let process = ProcessId(0);
        ServerReply::Answer {
            ask: 1,
            result: Ok(RequestAnswer::Members {
                process,
                epoch: 1,
                run: 1,
                members,
                standing: CommitStanding::default(),
                more: false,
            }),
        }
    };
    assert_eq!(connection.hear(members), Ok(()));
    let down = |process| ServerReply::Down {
        process: ProcessId(process),
        why: String::new(),
    };
    assert!(
        connection
            .hear(down(2))
            .unwrap_err()
            .to_string()
            .contains("process 2 is down, of 2")
    );
    let status = |ask| ServerReply::Status {
        ask,
        process: ProcessId(1),
        status: Ok(vec![7]),
    };
    (0..2).for_each(|_| connection.hear(status(5)).unwrap());
    assert!(
        connection.state.lock().statuses.is_empty(),
        "the look has timed out"
    );
    connection.state.lock().asks.insert(5, mpsc::channel().0);
    assert_eq!(connection.hear(status(5)), Ok(()));
    assert!(
        connection
            .hear(status(5))
            .unwrap_err()
            .to_string()
            .contains("status of process 1 twice")
    );
    (0..100).for_each(|_| connection.hear(down(1)).unwrap());
    assert!(connection.state.lock().untold.len() <= 3);
}

#[test]
fn fuzz_rendezvous_replies() {
    let (connection, mut server) = connection();
    server.set_nonblocking(true).unwrap();
    mpmd_fuzz::cases("rendezvous-replies", |rng| {
        *connection.state.lock() = ConnectionState::new(PEER_TIMEOUT);
        let (mut answers, mut largest) = (Vec::new(), 0);
        for _ in 0..rng.u32(..20) {
            let ask = rng.u64(..4);
            let result = match rng.u8(..6) {
                0 => Ok(RequestAnswer::Done),
                1 => Ok(RequestAnswer::Value(vec![1; rng.usize(..9)])),
                2 => Ok(RequestAnswer::Clock(mpmd_fuzz::integer(rng) as i64)),
                3 => Err(RendezvousError::Stopped),
                _ => {
                    let members = vec![JobMember::default(); rng.usize(..3)].into();
                    let (process, epoch) = (ProcessId(rng.u32(..3)), rng.u64(..3));
                    let (standing, more) = (CommitStanding::default(), rng.bool());
                    Ok(RequestAnswer::Members {
                        process,
                        epoch,
                        run: 1,
                        members,
                        standing,
                        more,
                    })
                }
            };
            let (process, why) = (ProcessId(rng.u32(..3)), "it is gone".to_owned());
            let reply = match rng.u8(..16) {
                0 => ServerReply::Ping,
                1 => ServerReply::Dropped { why },
                6 => ServerReply::Busy {
                    epoch: ask,
                    processes: vec![process],
                    waited: Duration::ZERO,
                },
                2..5 => ServerReply::Down { process, why },
                8 => ServerReply::Look {
                    look: ask,
                    words: why.into_bytes(),
                },
                9 => ServerReply::Status {
                    ask,
                    process,
                    status: Ok(why.into_bytes()),
                },
                5..8 => {
                    let (sender, answer) = mpsc::channel();
                    connection.state.lock().asks.insert(ask, sender);
                    answers.push(answer);
                    continue;
                }
                _ => ServerReply::Answer { ask, result },
            };
            if connection.hear(reply).is_err() {
                break;
            }
            let state = connection.state.lock();
            largest = state.processes.max(largest);
            assert!(state.untold.len() <= 1 + largest);
        }
        assert!(
            answers.iter().all(|answer| answer.try_iter().count() <= 1),
            "answered once"
        );
        // Drains the pongs.
        while matches!(server.read(&mut [0; 256]), Ok(1..)) {}
    });
}
