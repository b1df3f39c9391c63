//! What only `inproc` can do: delay by seed, and kill.

use std::sync::mpsc::channel;
use std::time::Duration;

use mpmd_transport::inproc::Faults;
use mpmd_transport::{Kind as MessageKind, ProcessId};

use crate::cluster::{Cluster, id, is_gone};
use crate::recorder::Manner;
use crate::within;

const LIMIT: Duration = Duration::from_secs(60);

/// Delays far enough apart that the order on the way decides, not the machine.
fn faults(seed: u64) -> Faults {
    Faults { seed, delay: Some(Duration::from_millis(100)..=Duration::from_secs(1)) }
}

/// Three messages in the order in which they arrive.
fn order(seed: u64) -> Vec<usize> {
    let mut cluster = Cluster::inproc(2, faults(seed), Manner::Fetch);
    let posted: Vec<_> = (0..3).map(|_| cluster.post(0, 1, MessageKind::Eager, 3)).collect();
    cluster.start(0);
    cluster.start(1);
    let arrived = cluster.recorders[1].wait_complete(3);
    cluster.finish_fine();
    let place = |op| posted.iter().position(|ticket| ticket.0 == op).unwrap();
    arrived.iter().map(|message| place(message.header.op)).collect()
}

#[test]
fn delayed_messages_overtake_each_other_by_seed() {
    within(LIMIT, || {
        let orders: Vec<_> = std::thread::scope(|scope| {
            let runs: Vec<_> = (0..8).map(|seed| scope.spawn(move || order(seed))).collect();
            runs.into_iter().map(|run| run.join().unwrap()).collect()
        });
        assert!(orders.iter().any(|order| *order != [0, 1, 2]), "{orders:?}");
        assert!(orders.iter().any(|order| *order != orders[0]), "the seed decides: {orders:?}");
    });
}

#[test]
fn a_killed_process_loses_what_is_under_way() {
    within(LIMIT, || {
        let faults = Faults { seed: 1, delay: Some(Duration::from_secs(20)..=Duration::from_secs(20)) };
        let mut cluster = Cluster::inproc(3, faults, Manner::Fetch);
        for process in 0..3 {
            cluster.start(process);
        }
        let own = cluster.post(0, 1, MessageKind::Eager, 10);
        let towards = cluster.post(2, 0, MessageKind::Data, 100_000);
        cluster.kill(0);
        assert!(is_gone(&cluster.recorders[0].wait_done(own).unwrap_err(), 1));
        assert!(is_gone(&cluster.recorders[2].wait_done(towards).unwrap_err(), 0));
        for survivor in [1, 2] {
            assert!(is_gone(&cluster.recorders[survivor].wait_down(id(0)), 0));
            assert!(cluster.recorders[survivor].read(|seen| seen.complete.is_empty()));
        }
        assert!(cluster.recorders[0].read(|seen| seen.down.is_empty()), "the dead hear of nobody");
        cluster.finish();
    });
}

#[test]
fn handlers_are_never_called_on_the_posters_thread() {
    within(LIMIT, || {
        let fabric = mpmd_transport::inproc::Fabric::new(2, Faults::default());
        let (told, hears) = channel();
        for process in 0..2 {
            let handler = Names { told: told.clone() };
            mpmd_transport::Transport::start(
                &*fabric.endpoint(ProcessId(process)),
                std::sync::Arc::new(handler),
            );
        }
        let header = mpmd_transport::Header::new(MessageKind::Heartbeat);
        let endpoint = fabric.endpoint(ProcessId(0));
        mpmd_transport::Transport::post(&*endpoint, ProcessId(1), header, None, mpmd_transport::Ticket(1));
        let mut heard: Vec<String> =
            (0..2).map(|_| hears.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
        heard.sort();
        assert_eq!(heard, ["mpmd-inproc-0", "mpmd-inproc-1"]);
    });
}

/// Tells the name of the thread it is called on.
struct Names {
    told: std::sync::mpsc::Sender<String>,
}

impl Names {
    fn tell(&self) {
        let _ = self.told.send(std::thread::current().name().unwrap_or_default().to_owned());
    }
}

impl mpmd_transport::Handler for Names {
    fn arrived(&self, _: ProcessId, _: mpmd_transport::Header, _: mpmd_transport::Payload) {
        self.tell();
    }

    fn done(&self, _: mpmd_transport::Ticket, _: Result<(), mpmd_transport::TransportError>) {
        self.tell();
    }

    fn peer_down(&self, _: ProcessId, _: mpmd_transport::TransportError) {}
}
