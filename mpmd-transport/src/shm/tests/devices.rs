//! Tests of device memory with simulated devices, which log opens, closes and frees.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::Mutex;

use super::ear::{Ear, TIME_LIMIT, config, later};
use crate::shm::{OpenedShm, Shm};
use crate::transport::{Payload, Ticket, Transport, TransportError};
use mpmd_memory::{
    DeviceAllocator, DeviceMemory, DevicePlace, DeviceSharing, Fence, Latch, Pool, SharedBuffer,
};
use mpmd_proto::wire::{Header, MessageKind, ProcessId};

/// All simulated devices of a test, and a log of their use.
#[derive(Default)]
pub(super) struct World {
    next: AtomicU64,
    /// (Address, length in bytes) of existing memory, by its description.
    known: Mutex<HashMap<Vec<u8>, (u64, usize)>>,
    pub(super) log: Mutex<Vec<String>>,
    pub(super) opens: AtomicUsize,
}

/// The simulated devices of one process.
pub(super) struct Site {
    pub(super) world: Arc<World>,
    pub(super) process: u32,
    /// The reason why the process has no samples; `None` if it has some.
    pub(super) without: Option<String>,
    /// True if the process cannot open memory of others.
    pub(super) blind: bool,
}

struct Memory {
    world: Arc<World>,
    what: String,
    device: u32,
    address: u64,
    bytes: usize,
    words: Vec<u8>,
}

/// A fence that a test passes.
#[derive(Default)]
pub(super) struct ByHand {
    ended: Mutex<Option<Result<(), String>>>,
    over: Latch,
}

impl World {
    fn note(&self, what: String) {
        self.log.lock().push(what);
    }

    fn has(&self, what: &str) -> bool {
        self.log.lock().iter().any(|line| line == what)
    }
}

impl DeviceAllocator for Site {
    fn allocate(&self, bytes: usize) -> io::Result<Box<dyn DeviceMemory>> {
        let number = 1 + self.world.next.fetch_add(1, Ordering::Relaxed);
        let (address, words) = (number << 40, format!("memory {number}").into_bytes());
        self.world
            .known
            .lock()
            .insert(words.clone(), (address, bytes));
        let what = format!("free {number}");
        Ok(Box::new(Memory {
            world: self.world.clone(),
            what,
            device: self.process,
            address,
            bytes,
            words,
        }))
    }
}

impl DeviceMemory for Memory {
    fn address(&self) -> u64 {
        self.address
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn device(&self) -> u32 {
        self.device
    }

    fn export(&self) -> Option<&[u8]> {
        Some(&self.words)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.world.note(std::mem::take(&mut self.what));
    }
}

impl DeviceSharing for Site {
    fn samples(&self) -> io::Result<Vec<Vec<u8>>> {
        match &self.without {
            None => Ok(vec![b"sample".to_vec(); 3]),
            Some(why) => Err(io::Error::other(why.clone())),
        }
    }

    fn try_sample(&self, sample: &[u8]) -> io::Result<()> {
        assert_eq!(sample, b"sample");
        if self.blind {
            Err(io::Error::other(format!(
                "process {} sees nothing",
                self.process
            )))
        } else {
            Ok(())
        }
    }

    fn open(&self, words: &[u8], bytes: usize) -> io::Result<Box<dyn DeviceMemory>> {
        let known = self.world.known.lock().get(words).copied();
        let Some((address, size)) = known else {
            return Err(io::Error::other("the words mean nothing"));
        };
        assert!(bytes <= size);
        self.world.opens.fetch_add(1, Ordering::Relaxed);
        let (me, number) = (self.process, address >> 40);
        let what = format!("{me} closes {number}");
        let words = words.to_vec();
        Ok(Box::new(Memory {
            world: self.world.clone(),
            what,
            device: 10 + me,
            address,
            bytes,
            words,
        }))
    }
}

impl ByHand {
    fn end(&self, result: Result<(), String>) {
        *self.ended.lock() = Some(result);
        self.over.pass().into_iter().for_each(|then| then());
    }
}

impl Fence for ByHand {
    fn is_over(&self) -> bool {
        self.over.is_passed()
    }

    fn on_over(&self, then: Box<dyn FnOnce() + Send>) {
        self.over.on_pass(then);
    }

    fn failure(&self) -> Option<String> {
        self.ended.lock().clone()?.err()
    }
}

/// Connected processes with their handlers and devices.
struct Team<const N: usize> {
    world: Arc<World>,
    shm: [Arc<Shm>; N],
    ears: [Arc<Ear>; N],
    sites: [Arc<Site>; N],
}

impl<const N: usize> Team<N> {
    fn new() -> Self {
        Self::with(|_| {})
    }

    fn with(change: impl Fn(&mut Site)) -> Self {
        let world = Arc::<World>::default();
        let opened: Vec<OpenedShm> = (0..N).map(|_| OpenedShm::open().unwrap()).collect();
        let addresses: Vec<String> = opened.iter().map(OpenedShm::address).collect();
        let sites: [Arc<Site>; N] = std::array::from_fn(|process| {
            let mut site = Site {
                world: world.clone(),
                process: process as u32,
                without: None,
                blind: false,
            };
            change(&mut site);
            Arc::new(site)
        });
        let joining: Vec<_> = opened
            .into_iter()
            .enumerate()
            .map(|(process, opened)| {
                let peers: Vec<&str> = addresses.iter().map(String::as_str).collect();
                let (config, site) = (config(process as u32, &peers), sites[process].clone());
                later(move || {
                    let shm = opened.connect(&config).unwrap();
                    shm.share_devices(site, &[true; N], TIME_LIMIT).unwrap();
                    shm
                })
            })
            .collect();
        let shm: Vec<_> = joining
            .into_iter()
            .map(|joining| joining.join().unwrap())
            .collect();
        let ears: [Arc<Ear>; N] = std::array::from_fn(|_| Arc::default());
        for (shm, ear) in shm.iter().zip(&ears) {
            shm.start(ear.clone());
        }
        Self {
            world,
            shm: shm.try_into().unwrap(),
            ears,
            sites,
        }
    }

    fn pool(&self, process: usize, limit: Option<u64>) -> Pool {
        let arena = self.shm[process]
            .arena()
            .unwrap()
            .device_beside(self.sites[process].clone());
        Pool::in_arena("device", limit, &arena)
    }

    fn post(&self, from: usize, to: u32, bytes: &SharedBuffer, ticket: u64) {
        let header = Header {
            bytes: bytes.len() as u64,
            ..Header::new(MessageKind::Data)
        };
        self.shm[from].post(ProcessId(to), header, Some(bytes.clone()), Ticket(ticket));
    }

    fn take(&self, at: usize, from: u32) -> SharedBuffer {
        match self.ears[at].next_from(from) {
            Payload::Lent(bytes) | Payload::Inline(bytes) => bytes,
            _ => panic!("it is lent"),
        }
    }

    /// Fetches the next payload that process `at` gets from `from`, which cannot be read. Returns
    /// the error.
    fn refused(&self, at: usize, from: u32) -> TransportError {
        let Payload::Waiting(fetch) = self.ears[at].next_from(from) else {
            panic!("it is lent")
        };
        let into = vec![0; fetch.bytes() as usize].into();
        let (said, hears) = std::sync::mpsc::channel();
        fetch.fetch(
            into,
            Box::new(move |result| said.send(result.map(drop)).unwrap()),
        );
        hears.recv_timeout(TIME_LIMIT).unwrap().unwrap_err()
    }

    fn done(&self, at: usize, ticket: u64) -> Result<(), TransportError> {
        self.ears[at].wait("the end of a ticket", |heard| {
            heard
                .done
                .iter()
                .find(|done| done.0 == Ticket(ticket))
                .map(|done| done.1.clone())
        })
    }

    fn finish(self) {
        let leaving = self.shm.map(|shm| later(move || shm.shutdown(TIME_LIMIT)));
        leaving
            .into_iter()
            .for_each(|leaving| leaving.join().unwrap());
    }
}

fn until(state: &str, mut is_so: impl FnMut() -> bool) {
    let until = Instant::now() + TIME_LIMIT;
    while !is_so() {
        assert!(Instant::now() < until, "not in time: {state}");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn device_memory_is_lent_in_place_and_opened_once() {
    let team = Team::<2>::new();
    assert!(
        team.shm[0].carries_device_memory(ProcessId(1))
            && team.shm[1].carries_device_memory(ProcessId(0))
    );
    assert!(!team.shm[0].carries_device_memory(ProcessId(7)));
    let pool = team.pool(0, None);
    for round in 0..100 {
        // Also with sizes that would be sent inline in host memory.
        let own = pool.allocate(100 + 7000 * (round % 2)).unwrap().freeze();
        let place = own.device().unwrap();
        team.post(0, 1, &own, 1 + round as u64);
        drop(own);
        let there = team.take(1, 0);
        assert_eq!(
            there.device(),
            Some(DevicePlace {
                device: 11,
                ..place
            }),
            "round {round}"
        );
        assert!(
            there.is_lent()
                && there.ready().are_over()
                && there.ready().failure().is_none()
                && !there.is_limited()
        );
        assert_eq!(team.shm[1].borrowed_from(ProcessId(0)), place.bytes as u64);
        drop(there);
        assert_eq!(team.shm[0].lent_to(ProcessId(1)), 0);
    }
    (1..=100).for_each(|ticket| assert_eq!(team.done(0, ticket), Ok(())));
    assert_eq!(
        (team.world.opens.load(Ordering::Relaxed), pool.stats().live),
        (1, 0)
    );
    team.finish();
}

#[test]
fn failed_work_is_reported_to_the_borrower() {
    let team = Team::<2>::new();
    let pool = team.pool(0, None);
    for (number, end) in [(1, Ok(())), (2, Err("the device fell over".to_owned()))] {
        let fence = Arc::<ByHand>::default();
        let mut own = pool.allocate(4096).unwrap();
        own.add_fence(fence.clone());
        team.post(0, 1, &own.freeze(), number);
        fence.end(end.clone());
        let there = team.take(1, 0);
        until("the end of a fence", || there.ready().are_over());
        assert_eq!(there.ready().failure(), end.err());
    }
    // A fence that failed before the post reports its failure too.
    let fence = Arc::<ByHand>::default();
    let mut own = pool.allocate(4096).unwrap();
    own.add_fence(fence.clone());
    let own = own.freeze();
    fence.end(Err("too late".to_owned()));
    team.post(0, 1, &own, 3);
    let there = team.take(1, 0);
    until("the end of a fence", || there.ready().are_over());
    assert_eq!(there.ready().failure().as_deref(), Some("too late"));
    drop((own, there));
    until("all to be back", || {
        team.shm[0].lent_to(ProcessId(1)) == 0 && pool.stats().live == 0
    });
    team.finish();
}

#[test]
fn failed_verdict_is_reported_though_work_succeeded() {
    let team = Team::<2>::new();
    let pool = team.pool(0, None);
    for (number, end) in [(1, Ok(())), (2, Err("it was made of nothing".to_owned()))] {
        let work = Arc::<ByHand>::default();
        let verdict = Arc::new(ByHand::default());
        let mut own = pool.allocate(4096).unwrap();
        own.add_fence(work.clone());
        let own = own.freeze().with_verdict(verdict.clone()).slice(0..1024);
        assert!(!own.is_made());
        team.post(0, 1, &own, number);
        work.end(Ok(()));
        let there = team.take(1, 0);
        assert!(
            !own.is_made() && !there.ready().are_over(),
            "its work is over, but its validity is not known"
        );
        verdict.end(end.clone());
        until("the verdict", || there.ready().are_over());
        assert_eq!(
            (there.is_made(), there.ready().failure()),
            (end.is_ok(), end.clone().err())
        );
        // The same holds if the verdict was known before the post.
        team.post(0, 1, &own, 10 + number);
        let there = team.take(1, 0);
        until("the verdict", || there.ready().are_over());
        assert_eq!(
            (own.is_made(), there.ready().failure()),
            (end.is_ok(), end.err())
        );
    }
    until("all to be back", || {
        team.shm[0].lent_to(ProcessId(1)) == 0 && pool.stats().live == 0
    });
    team.finish();
}

#[test]
fn device_memory_in_a_control_message_is_refused() {
    let team = Team::<2>::new();
    let own = team.pool(0, None).allocate(64).unwrap().freeze();
    let header = Header {
        bytes: own.len() as u64,
        ..Header::new(MessageKind::Poison)
    };
    team.shm[0].post(ProcessId(1), header, Some(own), Ticket(1));
    let why = team.ears[1].wait("the end of a peer", |heard| {
        heard.down.first().map(|down| down.1.to_string())
    });
    assert!(
        why.contains("a message of kind Poison in a device's memory"),
        "{why}"
    );
    team.finish();
}

#[test]
fn message_waits_until_its_memory_is_written() {
    let team = Team::<2>::new();
    let pool = team.pool(0, None);
    let fence = Arc::<ByHand>::default();
    let mut own = pool.allocate(4096).unwrap();
    own.add_fence(fence.clone());
    let own = own.freeze();
    team.post(0, 1, &own, 1);
    // Messages posted after it are not held back.
    team.post(0, 1, &pool.allocate(64).unwrap().freeze(), 2);
    assert_eq!(team.take(1, 0).len(), 64);
    fence.end(Ok(()));
    let there = team.take(1, 0);
    assert!(there.len() == 4096 && there.ready().are_over());
    // A message with a fence that never ends is never sent; a shutdown reports that.
    let mut own = pool.allocate(4096).unwrap();
    own.add_fence(Arc::<ByHand>::default());
    team.post(0, 1, &own.freeze(), 3);
    drop(there);
    team.shm[0].shutdown(std::time::Duration::from_millis(10));
    assert_eq!(team.done(0, 3), Err(TransportError::Closed));
    team.finish();
}

#[test]
fn device_memory_is_freed_after_all_have_closed_it() {
    let team = Team::<3>::new();
    let pool = team.pool(0, None);
    // Large enough for a segment of its own, which trimming frees.
    let own = pool.allocate(5 << 20).unwrap().freeze();
    team.post(0, 1, &own, 0);
    let part = own.slice(128..192).device();
    drop(own);
    let at_one = team.take(1, 0);
    team.post(1, 2, &at_one.slice(64..4096), 0);
    let at_two = team.take(2, 1);
    // And back to its owner, which gets its own memory.
    team.post(2, 0, &at_two.slice(64..128), 0);
    let at_zero = team.take(0, 2);
    assert_eq!((at_zero.device(), at_zero.is_lent()), (part, false));
    drop(at_one);
    pool.trim();
    drop(at_two);
    assert_eq!(team.world.log.lock().len(), 0, "process 0 still reads it");
    drop(at_zero);
    until("all to be back", || {
        let lent = |shm: &Arc<Shm>| (0..3).map(|peer| shm.lent_to(ProcessId(peer))).sum::<u64>();
        team.shm.iter().map(lent).sum::<u64>() == 0 && pool.stats().live == 0
    });
    pool.trim();
    until("it to be freed", || team.world.has("free 1"));
    let log = team.world.log.lock().clone();
    assert_eq!(
        log,
        ["2 closes 1", "1 closes 1", "free 1"],
        "the last borrower closes it first"
    );
    team.finish();
}

#[test]
fn unopenable_device_memory_fails_only_its_message() {
    let team = Team::<2>::new();
    let pool = team.pool(0, None);
    let own = pool.allocate(5 << 20).unwrap().freeze();
    let known = std::mem::take(&mut *team.world.known.lock());
    team.post(0, 1, &own, 1);
    let why = team.refused(1, 0).to_string();
    assert!(
        why.contains("device of process 0") && why.contains("the words mean nothing"),
        "{why}"
    );
    assert_eq!(team.done(0, 1), Ok(()), "it has it back");
    *team.world.known.lock() = known;
    team.post(0, 1, &own, 3);
    assert_eq!(team.take(1, 0).len(), 5 << 20, "later it can be");
    assert!(team.ears.iter().all(|ear| ear.heard.lock().down.is_empty()));
    team.finish();
}

#[test]
fn both_sides_know_if_devices_are_not_shared() {
    for (blind, without) in [(true, None), (false, Some("its driver is too old"))] {
        let team = Team::<3>::with(|site| {
            if site.process == 1 {
                site.blind = blind;
                site.without = without.map(str::to_owned);
            }
        });
        let carries = |from: usize, to| team.shm[from].carries_device_memory(ProcessId(to));
        assert!(carries(0, 2) && carries(2, 0));
        assert!(!carries(0, 1) && !carries(1, 0) && !carries(1, 2) && !carries(2, 1));
        let own = team.pool(0, None).allocate(4096).unwrap().freeze();
        team.post(0, 1, &own, 1);
        assert!(
            team.refused(1, 0)
                .to_string()
                .contains("is not shared with it")
        );
        assert!(matches!(
            team.done(0, 1),
            Err(TransportError::Environment { .. })
        ));
        team.finish();
    }
}

#[test]
fn limited_device_memory_comes_back_when_short() {
    let team = Team::<2>::new();
    let pool = team.pool(0, Some(1 << 20));
    let own = pool.allocate(1 << 20).unwrap().freeze();
    team.post(0, 1, &own, 1);
    drop(own);
    let there = team.take(1, 0);
    assert!(there.is_limited() && pool.allocate(64).is_err());
    drop(there);
    pool.allocate(1 << 20)
        .expect("the loan comes back when memory is short");
    assert_eq!(team.done(0, 1), Ok(()));
    team.finish();
}

#[test]
fn device_memory_fails_when_its_lender_leaves() {
    let team = Team::<2>::new();
    let pool = team.pool(0, None);
    team.post(0, 1, &pool.allocate(4096).unwrap().freeze(), 2);
    let written = team.take(1, 0);
    assert!(written.ready().are_over() && written.ready().failure().is_none());
    let own = pool
        .allocate(4096)
        .unwrap()
        .freeze()
        .with_verdict(Arc::<ByHand>::default());
    team.post(0, 1, &own, 1);
    let there = team.take(1, 0);
    team.shm[0].shutdown(TIME_LIMIT);
    team.ears[1].down(0);
    until("the end of a fence", || there.ready().are_over());
    assert!(there.ready().failure().unwrap().contains("it has left"));
    assert!(
        written.ready().failure().is_none(),
        "the process may go on without its transport"
    );
    team.shm[1].shared.devices.note_exit(ProcessId(0));
    assert!(
        written
            .ready()
            .failure()
            .unwrap()
            .contains("process 0, which has ended")
    );
    team.finish();
}
