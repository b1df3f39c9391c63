//! Connections that are none of the job: wrong tokens, other versions and senseless bytes.

use super::*;

/// A version of the protocol that does not exist yet.
const NEWER: u16 = VERSION + 1;

#[test]
fn a_wrong_token_and_another_version_are_told_apart() {
    let server = server(1, LONG);
    let mut wrong = config(&server, 0, 1);
    wrong.token = Token::new([41; 32]);
    let error = Rendezvous::connect(wrong).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("the job token is probably wrong"),
        "{error}"
    );
    // A server of another version refuses before it looks at the token.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let mut other = config(&server, 0, 1);
    other.server = listener.local_addr().unwrap().to_string();
    let newer = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.read_exact(&mut [0; 42]).unwrap();
        let version = NEWER.to_le_bytes();
        let refusal = [&b"MPMDMEET\x01\0"[..], &version, &[0; 4]].concat();
        stream.write_all(&refusal).unwrap();
    });
    let error = Rendezvous::connect(other).unwrap_err();
    newer.join().unwrap();
    assert!(
        matches!(
            error,
            RendezvousError::Version {
                theirs: NEWER,
                ours: VERSION,
                ..
            }
        ),
        "{error}"
    );
    meet(&server, 1);
}

#[test]
fn strangers_learn_nothing_and_hold_no_place() {
    let server = server(1, LONG);
    // Silent ones first: far more than may wait at once. Each would otherwise hold a place.
    let silent: Vec<_> = (0..200)
        .map(|_| TcpStream::connect(server.address()).unwrap())
        .collect();
    meet(&server, 1);
    drop(silent);
    for said in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        END.hello(&[])[..41].to_vec(),
    ] {
        assert_eq!(answer(&server, &said), b"", "{said:?}");
    }
    // A hello gets an answer, but no proof that follows from it lets a stranger in.
    let heard = answer(&server, &END.hello(&[]));
    assert_eq!((heard.len(), &heard[..10]), (80, &b"MPMDMEET\0\0"[..]));
    assert!(!heard.windows(4).any(|part| part == [42; 4]));
    for shown in [[0; 32], *heard.last_chunk().unwrap(), [42; 32]] {
        let said = [&END.hello(&[])[..], &shown].concat();
        assert_eq!(answer(&server, &said).len(), 80, "no welcome");
    }
    // Another version is answered with ours, with any token.
    let mut refusal = b"MPMDMEET\x01\0".to_vec();
    refusal.extend(VERSION.to_le_bytes());
    refusal.extend([0; 4]);
    let other = End {
        version: VERSION + 1,
        token: [0; 32],
        ..END
    };
    assert_eq!(answer(&server, &other.hello(&[])), refusal);
    // The first bytes of clients of the versions that showed the token.
    let old = [&b"MPMDMEET\x06\0"[..], &[42; 32]].concat();
    assert_eq!(answer(&server, &old), refusal);
}

#[test]
fn squatter_learns_nothing_that_lets_it_in() {
    let server = server(1, LONG);
    let earlier = answer(&server, &END.hello(&[]));
    let reply: [Reply<'_>; 4] = [
        &|_| earlier.clone(),
        &|hello| hello.to_vec(),
        &|_| [&earlier[..48], &[0; 32]].concat(),
        &|_| Vec::new(),
    ];
    for reply in reply {
        let squatter = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let mut config = config(&server, 0, 1);
        config.server = squatter.local_addr().unwrap().to_string();
        config.peer_timeout = SHORT;
        let joining = thread::spawn(move || Rendezvous::connect(config).map(drop));
        let (mut stream, _) = squatter.accept().unwrap();
        let mut heard = vec![0; 42];
        stream.read_exact(&mut heard).unwrap();
        stream.write_all(&reply(&heard)).unwrap();
        let _ = stream.read_to_end(&mut heard);
        drop(squatter);
        assert!(joining.join().unwrap().is_err());
        assert_eq!(heard.len(), 42, "it proves nothing to a stranger");
        assert!(!heard.windows(4).any(|part| part == [42; 4]));
        // The bytes that it has heard do not let it in at the real server.
        for shown in [&heard[10..42], &earlier[48..]] {
            assert_eq!(
                answer(&server, &[&heard[..], shown].concat()).len(),
                80,
                "no welcome"
            );
        }
    }
    meet(&server, 1);
}

#[test]
fn senseless_messages_end_the_connection_and_nothing_else() {
    let server = server(2, LONG);
    let all = meet(&server, 2);
    for said in [
        &[255, 255, 255, 255][..],
        &[0, 0, 0, 0],
        &[4, 0, 0, 0, 99, 99, 99, 99],
    ] {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.set_read_timeout(Some(LONG)).unwrap();
        END.call(&mut stream, &[], 4).unwrap();
        stream.write_all(said).unwrap();
        assert!(matches!(stream.read(&mut [0; 1]), Ok(0)), "it is closed");
    }
    all[0].set("still", vec![1]).unwrap();
    assert_eq!(all[1].get("still", LONG), Ok(vec![1]));
}

/// Sends `bytes` to the server. Returns all bytes that it answers until it closes.
fn answer(server: &RendezvousServer, bytes: &[u8]) -> Vec<u8> {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    stream.write_all(bytes).unwrap();
    // No longer connected if the server was faster to close.
    let shut = stream.shutdown(std::net::Shutdown::Write);
    assert!(shut.is_ok() || shut.is_err_and(|error| error.kind() == ErrorKind::NotConnected));
    let mut said = Vec::new();
    let mut chunk = [0; 256];
    loop {
        match stream.read(&mut chunk) {
            Ok(0) => return said,
            Ok(n) => said.extend(&chunk[..n]),
            // The server closed without reading all bytes.
            Err(e) if e.kind() == ErrorKind::ConnectionReset => return said,
            Err(e) => panic!("the server neither answers nor closes: {e}"),
        }
    }
}

/// It shows the token, but was never in the job.
#[test]
fn stranger_with_the_token_does_not_end_the_epoch() {
    let server = server(2, LONG);
    let all = join_first_epoch(&server, 2);
    let heard = downs(&all[0].0);
    let stranger = Rendezvous::connect(config(&server, 1, 2)).unwrap();
    let run = all[0].1.run;
    let identity = Identity {
        run,
        ..Identity::random().unwrap()
    };
    let stranger = thread::spawn(move || stranger.join_epoch(member(1), 2, identity));
    let waits = |(_, part): &(ProcessId, ProcessPart)| *part == ProcessPart::Waits;
    let until = Instant::now() + LONG;
    while !server.parts().iter().any(waits) {
        assert!(Instant::now() < until, "{:?}", server.parts());
        thread::sleep(Duration::from_millis(2));
    }
    // A barrier of an epoch that has ended fails.
    thread::scope(|scope| {
        let arrivals = all
            .iter()
            .map(|(one, _)| scope.spawn(|| one.barrier("end", LONG)));
        for arrival in arrivals.collect::<Vec<_>>() {
            assert_eq!(arrival.join().unwrap(), Ok(()));
        }
    });
    all.iter().for_each(|(one, _)| one.leave().unwrap());
    assert_eq!(heard.try_iter().count(), 0);
    assert_eq!(
        stranger.join().unwrap(),
        Ok(None),
        "the job has ended without it"
    );
}
