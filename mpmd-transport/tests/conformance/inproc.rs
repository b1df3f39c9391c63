//! Checks that only `inproc` allows: delays by seed, and killed processes.

use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use mpmd_memory::SharedBuffer;
use mpmd_proto::{Header, MessageKind, ProcessId};
use mpmd_transport::inproc::{Fabric, FabricFaults};
use mpmd_transport::{Handler, Payload, Ticket, Transport, TransportError};
use parking_lot::{Condvar, Mutex};

use crate::cluster::{Cluster, id, is_gone};
use crate::recorder::Manner;
use crate::within;

const LIMIT: Duration = Duration::from_secs(60);

/// Returns faults with delays so far apart that they decide the order, not the machine's speed.
fn faults(seed: u64) -> FabricFaults {
    let delay = Some(Duration::from_millis(100)..=Duration::from_secs(1));
    FabricFaults {
        seed,
        delay,
        ..FabricFaults::default()
    }
}

/// Posts three messages and returns the order in which they arrive, as their indices.
fn order(seed: u64) -> Vec<usize> {
    let mut cluster = Cluster::inproc(2, faults(seed), Manner::Fetch);
    let posted: Vec<_> = (0..3)
        .map(|_| cluster.post(0, 1, MessageKind::Eager, 3))
        .collect();
    cluster.start(0);
    cluster.start(1);
    let arrived = cluster.recorders[1].wait_complete(3);
    cluster.finish_fine();
    let place = |op| posted.iter().position(|ticket| ticket.0 == op).unwrap();
    arrived
        .iter()
        .map(|message| place(message.header.op))
        .collect()
}

#[test]
fn delayed_messages_overtake_each_other_by_seed() {
    within(LIMIT, || {
        let orders: Vec<_> = std::thread::scope(|scope| {
            let runs: Vec<_> = (0..8)
                .map(|seed| scope.spawn(move || order(seed)))
                .collect();
            runs.into_iter().map(|run| run.join().unwrap()).collect()
        });
        assert!(orders.iter().any(|order| *order != [0, 1, 2]), "{orders:?}");
        assert!(
            orders.iter().any(|order| *order != orders[0]),
            "the seed decides: {orders:?}"
        );
    });
}

#[test]
fn killed_process_loses_messages_in_flight() {
    within(LIMIT, || {
        let delay = Some(Duration::from_secs(20)..=Duration::from_secs(20));
        let faults = FabricFaults {
            seed: 1,
            delay,
            ..FabricFaults::default()
        };
        let mut cluster = Cluster::inproc(3, faults, Manner::Fetch);
        for process in 0..3 {
            cluster.start(process);
        }
        let own = cluster.post(0, 1, MessageKind::Eager, 10);
        let towards = cluster.post(2, 0, MessageKind::Data, 100_000);
        cluster.kill(0);
        assert!(is_gone(
            &cluster.recorders[0].wait_done(own).unwrap_err(),
            1
        ));
        assert!(is_gone(
            &cluster.recorders[2].wait_done(towards).unwrap_err(),
            0
        ));
        for survivor in [1, 2] {
            assert!(is_gone(&cluster.recorders[survivor].wait_down(id(0)), 0));
            assert!(cluster.recorders[survivor].read(|seen| seen.complete.is_empty()));
        }
        assert!(
            cluster.recorders[0].read(|seen| seen.down.is_empty()),
            "the dead hear of nobody"
        );
        cluster.finish();
    });
}

#[test]
fn handlers_are_never_called_on_the_posters_thread() {
    within(LIMIT, || {
        let fabric = Fabric::new(2, FabricFaults::default());
        let (told, hears) = channel();
        for process in 0..2 {
            let handler = Names { told: told.clone() };
            fabric.endpoint(ProcessId(process)).start(Arc::new(handler));
        }
        let header = Header::new(MessageKind::Heartbeat);
        let endpoint = fabric.endpoint(ProcessId(0));
        endpoint.post(ProcessId(1), header, None, Ticket(1));
        let mut heard: Vec<String> = (0..2)
            .map(|_| hears.recv_timeout(Duration::from_secs(20)).unwrap())
            .collect();
        heard.sort();
        assert_eq!(heard, ["mpmd-inproc-0", "mpmd-inproc-1"]);
    });
}

#[test]
fn relent_memory_returns_after_the_last_borrowers_drop() {
    within(LIMIT, || {
        for order in [[1, 2], [2, 1]] {
            let fabric = Fabric::new(
                3,
                FabricFaults {
                    hosts: vec![0; 3],
                    ..FabricFaults::default()
                },
            );
            let ends: Vec<_> = (0..3).map(|_| Arc::new(Borrower::default())).collect();
            for (process, end) in ends.iter().enumerate() {
                fabric.endpoint(id(process)).start(end.clone());
            }
            assert!(
                fabric.endpoint(id(0)).zero_copy(id(1)) && !fabric.endpoint(id(1)).zero_copy(id(1))
            );
            let payload = SharedBuffer::from(vec![7; 100_000]);
            let place = payload.as_ptr();
            let header = Header {
                bytes: 100_000,
                ..Header::new(MessageKind::Data)
            };
            fabric
                .endpoint(id(0))
                .post(id(1), header, Some(payload), Ticket(1));
            let lent = ends[1].borrowed();
            fabric
                .endpoint(id(1))
                .post(id(2), header, Some(lent.clone()), Ticket(2));
            let mut held = [None, Some(lent), Some(ends[2].borrowed())];
            for lent in held.iter().flatten() {
                assert!(
                    lent.is_lent() && lent.as_ptr() == place,
                    "nothing was copied"
                );
            }
            held[order[0]] = None;
            if order[0] == 2 {
                assert_eq!(ends[1].done(), Ticket(2));
            }
            assert!(ends[0].told.lock().is_empty(), "somebody still has it");
            assert_eq!(
                held[order[1]].as_deref().map(|bytes| bytes[99_999]),
                Some(7)
            );
            held[order[1]] = None;
            assert_eq!(ends[0].done(), Ticket(1));
        }
    });
}

/// A handler that keeps lent payloads, and records the tickets that have ended.
#[derive(Default)]
struct Borrower {
    lent: Mutex<Vec<SharedBuffer>>,
    told: Mutex<Vec<Ticket>>,
    changed: Condvar,
}

impl Borrower {
    fn borrowed(&self) -> SharedBuffer {
        self.next(&self.lent)
    }

    fn done(&self) -> Ticket {
        self.next(&self.told)
    }

    fn next<T>(&self, of: &Mutex<Vec<T>>) -> T {
        let mut of = of.lock();
        loop {
            match of.pop() {
                Some(next) => return next,
                None => _ = self.changed.wait_for(&mut of, Duration::from_millis(5)),
            }
        }
    }
}

impl Handler for Borrower {
    fn arrived(&self, _: ProcessId, _: Header, payload: Payload) {
        let Payload::Lent(bytes) = payload else {
            panic!("data is lent")
        };
        self.lent.lock().push(bytes);
        self.changed.notify_all();
    }

    fn done(&self, ticket: Ticket, result: Result<(), TransportError>) {
        assert_eq!(result, Ok(()));
        self.told.lock().push(ticket);
        self.changed.notify_all();
    }

    fn peer_down(&self, _: ProcessId, _: TransportError) {}
}

/// A handler that reports the name of the thread it is called on.
struct Names {
    told: std::sync::mpsc::Sender<String>,
}

impl Names {
    fn tell(&self) {
        let _ = self
            .told
            .send(std::thread::current().name().unwrap_or_default().to_owned());
    }
}

impl Handler for Names {
    fn arrived(&self, _: ProcessId, _: Header, _: Payload) {
        self.tell();
    }

    fn done(&self, _: Ticket, _: Result<(), TransportError>) {
        self.tell();
    }

    fn peer_down(&self, _: ProcessId, _: TransportError) {}
}
