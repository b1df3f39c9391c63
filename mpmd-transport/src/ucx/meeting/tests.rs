//! Strangers among the peers, played by a bare worker.

use std::sync::Arc;
use std::thread::JoinHandle;

use super::*;
use crate::transport::Transport;
use crate::ucx::engine::worker;
use crate::ucx::result::SendProtocol;
use crate::ucx::safe::{EndpointId, SendOutcome, UcxWorker, WorkerEvent};
use crate::ucx::{OpenedUcx, Spin, Ucx};
use mpmd_memory::Pool;

const TOKEN: [u8; 32] = [5; 32];

fn config(process: u32, peers: &[String], peer_timeout: u64) -> UcxConfig {
    UcxConfig {
        process: ProcessId(process),
        peers: peers.to_vec(),
        token: TOKEN,
        epoch: 3,
        peer_timeout: Duration::from_secs(peer_timeout),
        pool: Pool::new("ucx", None),
        spin: Spin::Auto,
        neighbours: 2,
    }
}

/// A worker without the token.
struct Stranger {
    worker: UcxWorker,
    /// Messages heard: (id, header, payload).
    heard: Vec<(u32, Vec<u8>, Vec<u8>)>,
}

impl Stranger {
    fn new() -> (Self, String) {
        let worker = worker(2).unwrap();
        let address = UcxAddress::format(&worker.address().unwrap(), &UcxAddress::common(), false);
        (
            Self {
                worker,
                heard: Vec::new(),
            },
            address,
        )
    }

    fn reach(&mut self, address: &str) -> EndpointId {
        let address = UcxAddress::parse(address, ProcessId(0)).unwrap();
        self.worker.connect(&address.worker).unwrap()
    }

    /// Sends a part of a handshake in the name of process `from`.
    fn say(&mut self, to: EndpointId, from: u32, bytes: &[u8]) {
        let payload = Some(bytes.to_vec().into());
        let op = self.worker.store(to, &from.to_le_bytes(), payload);
        if let SendOutcome::Gone | SendOutcome::Closed =
            self.worker.send(op, id::MEET, SendProtocol::Eager)
        {
            drop(self.worker.take_back(op));
        }
    }

    fn listen(&mut self) {
        let mut events = Vec::new();
        self.worker.progress();
        self.worker.collect(&mut events);
        for event in events {
            match event {
                WorkerEvent::Message { id, header, body } => {
                    let payload = match body {
                        MessageBody::Here(bytes) => bytes.to_vec(),
                        _ => Vec::new(),
                    };
                    self.heard.push((id, header.used().to_vec(), payload));
                }
                WorkerEvent::Failed(endpoint, _) => self.worker.close(endpoint, true),
                WorkerEvent::Ended(..) => {}
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

type Connecting = JoinHandle<Result<Arc<Ucx>, TransportError>>;

fn connecting(opened: OpenedUcx, config: UcxConfig) -> Connecting {
    std::thread::spawn(move || opened.connect(config))
}

/// Returns a hello of process 1 and answers of process 0, by ends without the token.
fn without_token(nonce: u8) -> [Vec<u8>; 2] {
    let end = |process| Party::new((MAGIC, VERSION), ProcessId(process), 2, 3, [6; 32]);
    let mut calls = end(1).call(ProcessId(0), 0, [nonce; 32]);
    let hello = calls.say();
    let answer = end(0).answer([nonce; 32]).take_packet(&hello).unwrap();
    [hello, answer]
}

#[test]
fn squatter_learns_nothing_that_lets_it_in() {
    let (mut squatter, address) = Stranger::new();
    let opened = OpenedUcx::open(2).unwrap();
    let own = opened.address().to_owned();
    let to = squatter.reach(&own);
    let one = connecting(opened, config(1, &[address, own], 2));
    let mut replied = false;
    while !one.is_finished() {
        squatter.listen();
        if let (false, Some((_, _, hello))) = (replied, squatter.heard.first().cloned()) {
            replied = true;
            for bytes in [
                &without_token(7)[1],
                &hello,
                &[&hello[..], &[0; 26]].concat(),
            ] {
                squatter.say(to, 0, bytes);
            }
        }
    }
    let error = one.join().unwrap().map(drop).unwrap_err().to_string();
    assert!(error.contains("process 0 of 2"), "{error}");
    assert!(replied);
    let [(id::MEET, header, hello)] = &squatter.heard[..] else {
        panic!("it proves nothing to a stranger: {:?}", squatter.heard);
    };
    assert_eq!((header.len(), hello.len()), (4, HELLO_BYTES));
    assert!(!hello.windows(4).any(|part| part == &TOKEN[..4]));
}

#[test]
fn strangers_in_the_name_of_peers_disturb_nobody() {
    let (mut stranger, _) = Stranger::new();
    let [zero, one] = [OpenedUcx::open(2).unwrap(), OpenedUcx::open(2).unwrap()];
    let peers = [zero.address().to_owned(), one.address().to_owned()];
    let [to_zero, to_one] = [0, 1].map(|process| stranger.reach(&peers[process]));
    let zero = connecting(zero, config(0, &peers, 20));
    let mut one = Some(one);
    let mut connected = None;
    for round in 0..40 {
        let [hello, answer] = without_token(round);
        stranger.say(to_zero, 1, &hello);
        stranger.say(to_zero, 1, &[&hello[..], &[round; 32]].concat());
        stranger.say(to_zero, 0, &hello);
        stranger.say(to_zero, 77, b"MPMDUCX\0\x09\0");
        stranger.say(to_one, 0, &answer);
        stranger.say(to_one, 0, &[round; 32]);
        stranger.listen();
        if round == 20 {
            connected = one.take().map(|one| connecting(one, config(1, &peers, 20)));
        }
    }
    let ends = [zero, connected.unwrap()].map(|end| end.join().unwrap().unwrap());
    std::thread::scope(|scope| {
        for end in &ends {
            scope.spawn(|| end.shutdown(Duration::from_secs(10)));
        }
    });
}

#[test]
fn name_missing_lists_silent_peers() {
    let ids = [ProcessId(1), ProcessId(2), ProcessId(5)];
    assert_eq!(
        name_missing(&ids, 8),
        "waiting for process 1, process 2 and process 5 of 8 to connect over UCX"
    );
    assert_eq!(
        name_missing(&ids[..1], 2),
        "waiting for process 1 of 2 to connect over UCX"
    );
}
