//! Failures that only UCX has: other versions, other jobs, silent peers, and a slow transport
//! between two processes of a host.

#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use mpmd_memory::Arena;
use mpmd_memory::{Pool, SharedBuffer};
use mpmd_proto::{Header, MessageKind, ProcessId};
use mpmd_transport::ucx::{OpenedUcx, Spin, Ucx, UcxConfig};
use mpmd_transport::{Handler, Payload, Ticket, Transport, TransportError};

use crate::cluster::{Cluster, EPOCH, Kind, TOKEN, id, is_gone};
use crate::recorder::Manner;
use crate::within;

const LIMIT: Duration = Duration::from_secs(60);

fn config(process: usize, peers: Vec<String>) -> UcxConfig {
    let neighbours = peers.len();
    UcxConfig {
        process: id(process),
        peers,
        token: TOKEN,
        epoch: EPOCH,
        peer_timeout: Duration::from_secs(20),
        pool: Pool::new("ucx", None),
        spin: Spin::Auto,
        neighbours,
    }
}

/// Connects a pair; `bend` changes the configuration of the second process. Returns both results.
fn pair(bend: impl FnOnce(&mut UcxConfig)) -> [Result<Arc<Ucx>, TransportError>; 2] {
    let [zero, one] = [OpenedUcx::open(2).unwrap(), OpenedUcx::open(2).unwrap()];
    let peers = vec![zero.address().to_owned(), one.address().to_owned()];
    let first = config(0, peers.clone());
    let mut second = config(1, peers);
    bend(&mut second);
    let zero = std::thread::spawn(move || zero.connect(first));
    let one = one.connect(second);
    [zero.join().unwrap(), one]
}

fn said(result: &Result<Arc<Ucx>, TransportError>) -> String {
    result.as_ref().unwrap_err().to_string()
}

#[test]
fn another_epoch_is_said_to_both() {
    within(LIMIT, || {
        let ends = pair(|config| config.epoch = 9);
        assert!(
            said(&ends[0]).contains("process 1") && said(&ends[0]).contains("epoch 9"),
            "{:?}",
            ends[0]
        );
        assert!(
            said(&ends[1]).contains("process 0") && said(&ends[1]).contains("epoch 3"),
            "{:?}",
            ends[1]
        );
    });
}

#[test]
fn process_with_a_wrong_token_is_reported_missing() {
    within(LIMIT, || {
        let [zero, one] = [OpenedUcx::open(2).unwrap(), OpenedUcx::open(2).unwrap()];
        let peers = vec![zero.address().to_owned(), one.address().to_owned()];
        let peer_timeout = Duration::from_secs(1);
        let first = UcxConfig {
            peer_timeout,
            ..config(0, peers.clone())
        };
        let second = UcxConfig {
            peer_timeout,
            token: [1; 32],
            ..config(1, peers)
        };
        let zero = std::thread::spawn(move || zero.connect(first));
        let one = one.connect(second);
        for (end, missed) in [
            (zero.join().unwrap(), "process 1 of 2"),
            (one, "process 0 of 2"),
        ] {
            assert!(
                said(&end).contains(missed) && said(&end).contains("longer than 1s"),
                "{end:?}"
            );
        }
    });
}

#[test]
fn another_ucx_version_is_refused_before_connecting() {
    within(LIMIT, || {
        let opened = OpenedUcx::open(2).unwrap();
        let own = opened.address().to_owned();
        let (wire, rest) = own.split_once('/').unwrap();
        let (version, worker) = rest.split_once('/').unwrap();
        let other = format!("{wire}/1.99.0/{worker}");
        let said = opened
            .connect(config(0, vec![own.clone(), other]))
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("process 1") && said.contains("UCX 1.99.0"),
            "{said}"
        );
        assert!(
            said.contains(version) && said.contains("LD_LIBRARY_PATH"),
            "{said}"
        );
    });
}

#[test]
fn missing_processes_are_named_after_timeout() {
    within(LIMIT, || {
        let opened: Vec<_> = (0..3).map(|_| OpenedUcx::open(3).unwrap()).collect();
        let peers: Vec<_> = opened
            .iter()
            .map(|opened| opened.address().to_owned())
            .collect();
        let mut opened = opened.into_iter();
        let waits = opened.next().unwrap();
        let waits = waits.connect(UcxConfig {
            peer_timeout: Duration::from_secs(1),
            ..config(0, peers)
        });
        let error = waits.unwrap_err();
        assert!(matches!(error, TransportError::TimedOut { .. }), "{error}");
        assert!(
            error.to_string().contains("process 1 and process 2 of 3"),
            "{error}"
        );
    });
}

#[test]
fn a_job_of_one_needs_nobody() {
    within(LIMIT, || {
        let opened = OpenedUcx::open(1).unwrap();
        let peers = vec![opened.address().to_owned()];
        let alone = opened.connect(config(0, peers)).unwrap();
        assert_eq!(alone.lanes(id(0)), "");
        let cluster = Cluster::of(None, [alone as Arc<dyn Transport>], Manner::Fetch);
        cluster.start(0);
        cluster.finish_fine();
    });
}

#[test]
fn given_up_peer_fails_its_operations_at_once() {
    within(LIMIT, || {
        let mut cluster = Cluster::new(Kind::Ucx, 3, Manner::Hold);
        let open = cluster.post(0, 1, MessageKind::Data, 1 << 20);
        cluster.recorders[1].wait_held(1);
        cluster
            .transport(0)
            .give_up(id(1), "the rendezvous says so");
        let error = cluster.recorders[0].wait_done(open).unwrap_err();
        assert!(
            is_gone(&error, 1) && error.to_string().contains("the rendezvous says so"),
            "{error}"
        );
        assert!(is_gone(&cluster.recorders[0].wait_down(id(1)), 1));
        let late = cluster.post(0, 1, MessageKind::Eager, 10);
        assert!(cluster.recorders[0].wait_done(late).is_err());
        // The others live on.
        cluster.post(0, 2, MessageKind::Eager, 10);
        cluster.recorders[2].wait_complete(1);
        cluster.finish();
    });
}

/// A handler that sleeps for this time at the first message, as if no message came through.
struct StandsStill(Duration);

impl Handler for StandsStill {
    fn arrived(&self, _: ProcessId, _: Header, _: Payload) {
        std::thread::sleep(self.0);
    }

    fn done(&self, _: Ticket, _: Result<(), TransportError>) {}

    fn peer_down(&self, _: ProcessId, _: TransportError) {}
}

#[test]
fn silent_peer_is_lost_after_another_peers_death() {
    within(LIMIT, || {
        let mut cluster = Cluster::not_started(Kind::Ucx, 4, Manner::Hold);
        for process in [0, 1, 2] {
            cluster.start(process);
        }
        cluster
            .transport(3)
            .start(Arc::new(StandsStill(Duration::from_secs(5))));
        cluster.post(0, 3, MessageKind::Heartbeat, 0);
        std::thread::sleep(Duration::from_millis(200));
        cluster
            .transport(0)
            .give_up(id(1), "the rendezvous says so");
        let why = cluster.recorders[0].wait_down(id(3)).to_string();
        assert!(
            why.contains("process 1 is gone") && why.contains("process 3"),
            "{why}"
        );
        // A process that answers is still connected.
        cluster.post(0, 2, MessageKind::Eager, 10);
        cluster.recorders[2].wait_complete(1);
        cluster.recorders[0].read(|seen| assert!(seen.down.iter().all(|(peer, _)| *peer != id(2))));
        cluster.finish();
    });
}

#[test]
fn a_dropped_transport_ends_its_tickets_without_blocking() {
    within(LIMIT, || {
        let mut cluster = Cluster::new(Kind::Ucx, 2, Manner::Hold);
        let open = cluster.ticket(0);
        let header = Header {
            bytes: 64 << 20,
            ..Header::new(MessageKind::Data)
        };
        cluster.transport(0).post(
            id(1),
            header,
            Some(SharedBuffer::from(vec![0; 64 << 20])),
            open,
        );
        cluster.kill(0);
        assert_eq!(
            cluster.recorders[0].wait_done(open),
            Err(TransportError::Closed)
        );
        assert!(is_gone(&cluster.recorders[1].wait_down(id(0)), 0));
        cluster.finish();
    });
}

/// A child process that is killed when this is dropped, also if a test fails.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The variable with the address of the process that has started this one.
const PARENT: &str = "MPMD_TEST_PARENT";
const MARK: &str = "address of the other process: ";

/// Starts another process on this host and connects to it, with this value of `UCX_TLS`. Returns
/// UCX's description of the lanes between the two.
fn lanes_between_processes(ways: Option<&str>) -> String {
    let opened = OpenedUcx::open(2).unwrap();
    let own = opened.address().to_owned();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "ucx::the_other_process",
            "--ignored",
            "--nocapture",
        ])
        .env(PARENT, &own);
    if let Some(ways) = ways {
        command.env("UCX_TLS", ways);
    }
    let mut child = Ending(
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap(),
    );
    let mut lines = BufReader::new(child.0.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    let address =
        lines.find_map(|line| line.split_once(MARK).map(|(_, address)| address.to_owned()));
    let address = address.expect("the other process says its address");
    let transport = opened.connect(config(0, vec![own, address])).unwrap();
    let lanes = transport.lanes(id(1)).to_owned();
    drop(child.0.stdin.take());
    transport.shutdown(Duration::from_secs(10));
    let left = lines.count();
    assert!(
        child.0.wait().unwrap().success(),
        "the other process has failed, {left} lines after"
    );
    lanes
}

#[test]
#[ignore = "half of a pair: the tests of lanes start it"]
fn the_other_process() {
    let parent = std::env::var(PARENT).expect("started by a test of lanes");
    let opened = OpenedUcx::open(2).unwrap();
    let own = opened.address().to_owned();
    println!("{MARK}{own}");
    std::io::stdout().flush().unwrap();
    let transport = opened.connect(config(1, vec![parent, own])).unwrap();
    // A closed endpoint has no lanes: the parent ends its input once it has read them.
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
    transport.shutdown(Duration::from_secs(10));
}

#[test]
fn processes_of_one_host_do_not_use_tcp() {
    within(LIMIT, || {
        let lanes = lanes_between_processes(None);
        let used: Vec<_> = lanes
            .lines()
            .filter(|line| line.contains("lane["))
            .collect();
        assert!(
            used.iter()
                .any(|lane| lane.contains("posix/") || lane.contains("sysv/")),
            "{lanes}"
        );
        // Failure detection may use a socket; messages may not.
        for lane in used
            .iter()
            .filter(|lane| lane.contains("am ") || lane.contains("rma_bw"))
        {
            assert!(!lane.contains("tcp/"), "{lanes}");
        }
    });
}

/// An address, and the number of unmappings around it that UCX has noticed.
#[derive(Default)]
struct Watched {
    address: AtomicUsize,
    unmaps: AtomicUsize,
}

/// UCX's memory event: for an unmapping, the address and the length in bytes.
type MemoryEvent = [usize; 2];
type MemoryCallback = unsafe extern "C" fn(c_int, *const MemoryEvent, *mut c_void);

/// The event of an unmapping (`UCM_EVENT_VM_UNMAPPED` in `ucm/api/ucm.h`).
const VM_UNMAPPED: c_int = 1 << 17;

unsafe extern "C" fn note_unmapping(_: c_int, event: *const MemoryEvent, watched: *mut c_void) {
    // SAFETY: UCX passes an event of the kind that was asked for. The argument is the one given
    // with the callback, which outlives the callback.
    let ([start, bytes], watched) = unsafe { (&*event, &*watched.cast::<Watched>()) };
    if (*start..start + bytes).contains(&watched.address.load(Ordering::Relaxed)) {
        watched.unmaps.fetch_add(1, Ordering::Relaxed);
    }
}

/// UCX's cache of registered memory relies on these events. A missed event leaves a registration of
/// memory that may belong to another buffer by now.
#[test]
fn ucx_notices_the_unmapping_of_segments() {
    within(LIMIT, || {
        let _loaded = OpenedUcx::open(1).unwrap();
        // SAFETY: it is loaded already, as a part of the library that UCX was opened with.
        let ucm = unsafe { libloading::Library::new("libucm.so.0") }.unwrap();
        let watched = Watched::default();
        let argument = std::ptr::from_ref(&watched).cast_mut().cast::<c_void>();
        // SAFETY: the types are those of `ucm/api/ucm.h`, with the status as a byte. The callback
        // allocates nothing.
        let status = unsafe {
            let set = ucm
                .get::<unsafe extern "C" fn(c_int, c_int, MemoryCallback, *mut c_void) -> i8>(
                    b"ucm_set_event_handler",
                );
            set.unwrap()(VM_UNMAPPED, 0, note_unmapping, argument)
        };
        assert_eq!(status, 0, "UCX can install its hooks");
        let mut unmaps = Vec::new();
        for arena in [Arena::private(), Arena::shared().unwrap()] {
            let pool = Pool::in_arena("unmapped", None, &arena);
            let buffer = pool.allocate(64 << 20).unwrap();
            watched
                .address
                .store(buffer.as_ptr().addr(), Ordering::Relaxed);
            watched.unmaps.store(0, Ordering::Relaxed);
            drop(buffer);
            pool.trim();
            assert_eq!(pool.stats().cached, 0);
            unmaps.push(watched.unmaps.load(Ordering::Relaxed));
        }
        // SAFETY: the types are those of `ucm/api/ucm.h`. After this call UCX no longer uses the
        // callback.
        unsafe {
            let unset = ucm.get::<unsafe extern "C" fn(c_int, MemoryCallback, *mut c_void)>(
                b"ucm_unset_event_handler",
            );
            unset.unwrap()(VM_UNMAPPED, note_unmapping, argument);
        }
        assert_eq!(unmaps, [1, 1], "of a private segment and of a shared one");
    });
}
