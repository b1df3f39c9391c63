//! A network of simulated hosts, and jobs on it that publish and subscribe while their processes
//! stop and die.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{
    Mutex, WorldSettings, join_group, note, now, simulated, since, stop_group, thread,
};
use mpmd_layout::aval::{DType, ShapedArray};
use mpmd_layout::sharding::Sharding;
use mpmd_layout::topology::DeviceId;
use mpmd_rendezvous::{
    JobObserver, JoinConfig, LocalLink, LocalServer, Rendezvous, RendezvousError, ServerConfig,
    Token,
};
use mpmd_transport::Transport;
use mpmd_transport::inproc::{Fabric, FabricFaults};

use super::net::Net;
use super::*;
use crate::error::Result;
use crate::{Builder, MpmdArray, Program};

/// A network without sockets.
struct Network {
    seed: u64,
    state: Mutex<NetworkState>,
}

#[derive(Default)]
struct NetworkState {
    port: u16,
    services: BTreeMap<SocketAddr, Served>,
    /// The processes that were killed.
    dead: BTreeSet<u32>,
    /// All places that processes have had in jobs.
    places: Vec<Place>,
}

#[derive(Clone)]
struct Served {
    by: u32,
    server: Arc<LocalServer>,
    fabric: Fabric,
}

struct Place {
    of: u32,
    server: Weak<LocalServer>,
    link: LocalLink,
    fabric: Fabric,
    process: ProcessId,
}

/// The network as a simulated process sees it.
#[derive(Clone)]
pub(super) struct Host {
    network: Arc<Network>,
    process: u32,
}

/// A service that a simulated process runs.
pub(super) struct LocalService {
    pub(super) address: SocketAddr,
    pub(super) server: Arc<LocalServer>,
    network: Arc<Network>,
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Host({})", self.process)
    }
}

impl Drop for LocalService {
    fn drop(&mut self) {
        let mut state = self.network.state.lock();
        let is_this = |served: &Served| Arc::ptr_eq(&served.server, &self.server);
        if state.services.get(&self.address).is_some_and(is_this) {
            state.services.remove(&self.address);
        }
        drop(state);
        self.server.stop();
    }
}

impl Host {
    pub(super) fn bind(
        &self,
        address: SocketAddr,
        config: &ServerConfig,
    ) -> std::result::Result<LocalService, RendezvousError> {
        let ServerConfig {
            processes,
            peer_timeout,
            ..
        } = *config;
        let server = LocalServer::start(processes, peer_timeout, 1).unwrap();
        let server = Arc::new(server);
        let mut state = self.network.state.lock();
        state.port += 1;
        let port = if address.port() == 0 {
            state.port
        } else {
            address.port()
        };
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let seed = self.network.seed + u64::from(state.port);
        let delay = Some(Duration::ZERO..=Duration::from_millis(2));
        let fabric = Fabric::new(
            processes,
            FabricFaults {
                seed,
                delay,
                hosts: Vec::new(),
            },
        );
        if !state.dead.contains(&self.process) {
            let served = Served {
                by: self.process,
                server: server.clone(),
                fabric,
            };
            state.services.insert(address, served);
        }
        drop(state);
        Ok(LocalService {
            address,
            server,
            network: self.network.clone(),
        })
    }

    fn served(&self, address: &str) -> std::result::Result<Served, RendezvousError> {
        let state = self.network.state.lock();
        let served = state.services.get(&address.parse().unwrap()).cloned();
        served
            .filter(|_| !state.dead.contains(&self.process))
            .ok_or_else(|| RendezvousError::Unreachable {
                server: address.to_owned(),
                peer_timeout: Duration::ZERO,
                why: "Connection refused".to_owned(),
            })
    }

    pub(super) fn join(
        &self,
        config: &JoinConfig,
    ) -> std::result::Result<(Rendezvous, Arc<dyn Transport>), RendezvousError> {
        let Served { server, fabric, .. } = self.served(&config.server)?;
        let process = config.process;
        let (rendezvous, link) = server.connect(process).unwrap();
        let place = Place {
            of: self.process,
            server: Arc::downgrade(&server),
            link,
            fabric: fabric.clone(),
            process,
        };
        self.network.state.lock().places.push(place);
        Ok((rendezvous, fabric.endpoint(process)))
    }

    pub(super) fn observe(
        &self,
        address: &str,
    ) -> std::result::Result<JobObserver, RendezvousError> {
        Ok(self.served(address)?.server.observe().unwrap())
    }
}

impl Network {
    /// Kills a process: its services and connections end.
    fn kill(&self, process: u32) {
        let mut state = self.state.lock();
        state.dead.insert(process);
        let own = |_: &SocketAddr, served: &mut Served| served.by == process;
        let services: Vec<_> = state.services.extract_if(.., own).collect();
        let places: Vec<_> = state
            .places
            .extract_if(.., |place| place.of == process)
            .collect();
        drop(state);
        for Place {
            server,
            link,
            fabric,
            process,
            ..
        } in places
        {
            fabric.kill(process);
            server
                .upgrade()
                .into_iter()
                .for_each(|server| server.cut(link));
        }
        services
            .into_iter()
            .for_each(|(_, served)| served.server.stop());
    }
}

/// The processes of a publisher's job have numbers from here on, times ten, for each new one.
const PUBLISHER: u32 = 10;
const ADDRESS: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 50_000);
const STEP: Duration = Duration::from_millis(100);
const PEER_TIMEOUT: Duration = Duration::from_secs(60);

fn token() -> Token {
    Token::new([7; 32])
}

/// A job of a simulation: its processes, their transport and their end.
struct Job {
    network: Arc<Network>,
    fabric: Fabric,
    /// The number of its first process in the network.
    first: u32,
    is_over: AtomicBool,
    /// The newest version that process 0 has published or taken.
    newest: AtomicU64,
    /// The events of the intake of each process.
    events: Vec<Mutex<Vec<Event>>>,
    /// False while the intake of the last process has no room.
    has_room: AtomicBool,
}

/// An event of an intake.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Event {
    Taken(u64),
    Whole(u64),
    Forgotten(u64),
}

impl Job {
    fn new(network: &Arc<Network>, first: u32, processes: usize) -> Arc<Self> {
        let seed = network.seed + u64::from(first);
        let delay = Some(Duration::ZERO..=Duration::from_millis(2));
        Arc::new(Self {
            network: network.clone(),
            fabric: Fabric::new(
                processes,
                FabricFaults {
                    seed,
                    delay,
                    hosts: Vec::new(),
                },
            ),
            first,
            is_over: AtomicBool::new(false),
            newest: AtomicU64::new(0),
            events: (0..processes).map(|_| Mutex::default()).collect(),
            has_room: AtomicBool::new(true),
        })
    }

    fn processes(&self) -> u32 {
        self.events.len() as u32
    }

    /// Starts a process, in a group of its own.
    fn start(
        self: &Arc<Self>,
        process: u32,
        program: impl FnOnce(&Self, &mut Program, Net) -> Result<()> + Send + 'static,
    ) -> thread::JoinHandle<()> {
        let job = self.clone();
        thread::spawn(move || {
            let number = job.first + process;
            join_group(number);
            let devices = job.processes() as usize;
            let builder = Builder::default().devices(devices);
            let builder = builder.peer_timeout(PEER_TIMEOUT);
            let mut p = builder
                .over(job.fabric.endpoint(ProcessId(process)))
                .unwrap();
            let net = Net::Simulated(Host {
                network: job.network.clone(),
                process: number,
            });
            let result = program(&job, &mut p, net);
            note(format_args!("process {number}: {result:?}"));
            let result = p.conclude(result);
            // Those that were killed end with an error.
            assert!(
                result.is_ok() || job.is_dead(number),
                "process {number}: {result:?}"
            );
        })
    }

    /// True if a process was killed. `number` is its number in the network.
    fn is_dead(&self, number: u32) -> bool {
        self.network.state.lock().dead.contains(&number)
    }

    /// True on all processes once the job is to end. All wait for all.
    fn ends(&self, p: &mut Program) -> Result<bool> {
        for process in 1..self.processes() {
            p.broadcast_value(ProcessId(process), (), || Ok(()))?;
        }
        p.broadcast_value(ProcessId(0), false, || {
            Ok(self.is_over.load(Ordering::SeqCst))
        })
    }

    /// Kills all processes.
    fn kill(&self) {
        (self.first..self.first + self.processes()).for_each(|process| self.network.kill(process));
        (0..self.processes()).for_each(|process| self.fabric.kill(ProcessId(process)));
    }

    /// Kills a process.
    fn kill_one(&self, process: u32) {
        self.network.kill(self.first + process);
        self.fabric.kill(ProcessId(process));
    }

    fn publish(&self, p: &mut Program, net: Net, first: u64) -> Result<()> {
        let last = DeviceId(self.processes() - 1);
        let tree = |p: &mut Program, version: u64| -> Result<Vec<MpmdArray>> {
            let mut leaves = Vec::new();
            for (length, device) in [(16, DeviceId(0)), (64, last)] {
                let aval = ShapedArray::new(&[length], DType::F32);
                let on = Sharding::single_device(device);
                let fill = move |_: &_, mut view: crate::kernel::ViewMut<'_>| {
                    Ok(view.fill(version as f32)?)
                };
                leaves.push(p.array_from_fn(aval, on, fill)?);
            }
            Ok(leaves)
        };
        let leaves = tree(p, 0)?;
        let mut publication = Publication::new("sim", token()).listen(ADDRESS.into());
        publication.net = net;
        let mut publisher = p.publisher(publication, &leaves)?;
        for version in first.. {
            let leaves = tree(p, version)?;
            publisher.publish(version, &leaves)?;
            self.newest.store(version, Ordering::SeqCst);
            thread::sleep(STEP);
            if self.ends(p)? {
                break;
            }
        }
        Ok(())
    }

    /// Wants a leaf on all processes, and another one on the last.
    fn wanted(&self, p: &Program) -> Result<Vec<WantedLeaf>> {
        let last = Sharding::single_device(DeviceId(self.processes() - 1));
        let all = p.mesh(&[("x", -1)])?.replicated();
        let f32s = |length: usize| ShapedArray::new(&[length], DType::F32);
        Ok(vec![
            WantedLeaf::new("0", f32s(16), all),
            WantedLeaf::new("1", f32s(64), last),
        ])
    }

    fn subscribing(net: Net, changes: bool) -> Subscribing {
        let address = SocketAddr::from(ADDRESS).to_string();
        let mut subscribing = Subscribing::new("sim", address, token()).changes(changes);
        subscribing.net = net;
        subscribing
    }

    /// Takes versions as arrays, and compares them.
    fn subscribe(&self, p: &mut Program, net: Net) -> Result<()> {
        let wanted = self.wanted(p)?;
        let mut subscription = p.subscribe(Self::subscribing(net, false), wanted)?;
        while !self.ends(p)? {
            if let Some((version, arrays)) = subscription.next(p)? {
                for array in arrays.iter().filter(|array| !array.is_fully_remote()) {
                    for shard in array.addressable_shards()? {
                        let values = shard.data.to_vec::<f32>()?;
                        assert!(
                            values.iter().all(|value| *value == version as f32),
                            "{version}"
                        );
                    }
                }
                self.newest.store(version, Ordering::SeqCst);
            }
            thread::sleep(STEP / 5);
        }
        Ok(())
    }

    /// Takes versions by an intake that records the events.
    fn record(self: &Arc<Self>, p: &mut Program, net: Net) -> Result<()> {
        let intake = Recorded {
            job: self.clone(),
            process: p.process().index(),
        };
        let subscribing = Self::subscribing(net, true);
        let wanted = self.wanted(p)?;
        let _subscription = p.subscribe_with(subscribing, wanted, Box::new(intake))?;
        while !self.ends(p)? {
            thread::sleep(STEP);
        }
        Ok(())
    }

    /// Waits until process 0 has a version above `version`, at most for `time`.
    fn wait_above(&self, version: u64, time: Duration) {
        let start = now();
        while self.newest.load(Ordering::SeqCst) <= version {
            let newest = self.newest.load(Ordering::SeqCst);
            let seed = self.network.seed;
            assert!(
                since(start) < time,
                "seed {seed}: {newest} after {time:?}, not {version}"
            );
            thread::sleep(STEP);
        }
    }

    /// Waits until a process has taken a version whose end it has not heard, at most for a few of
    /// the publisher's steps.
    fn wait_taken(&self) {
        let is_open =
            |events: &Mutex<Vec<Event>>| matches!(events.lock().last(), Some(Event::Taken(_)));
        let start = now();
        while !self.events.iter().any(is_open) && since(start) < STEP * 3 {
            thread::sleep(Duration::from_micros(100));
        }
    }

    /// Asserts that every version that was taken has ended once, and on all processes alike.
    fn check_events(&self) {
        let whole = |events: &[Event]| -> Vec<u64> {
            let whole = events.iter().filter_map(|event| match event {
                Event::Whole(version) => Some(*version),
                _ => None,
            });
            whole.collect()
        };
        let all: Vec<Vec<Event>> = self
            .events
            .iter()
            .map(|events| events.lock().clone())
            .collect();
        for events in &all {
            let mut open = None;
            for event in events {
                match (event, open) {
                    (Event::Taken(version), None) => open = Some(*version),
                    (Event::Whole(version), Some(taken)) if *version == taken => open = None,
                    (Event::Forgotten(_), _) => open = None,
                    (event, open) => panic!("seed {}: {event:?} {open:?}", self.network.seed),
                }
            }
            assert_eq!(whole(events), whole(&all[0]), "seed {}", self.network.seed);
        }
    }
}

struct Recorded {
    job: Arc<Job>,
    process: usize,
}

impl Recorded {
    fn note(&self, event: Event) {
        note(format_args!("process {}: {event:?}", self.process));
        self.job.events[self.process].lock().push(event);
    }
}

impl Intake for Recorded {
    fn has_room(&mut self) -> bool {
        self.process + 1 < self.job.events.len() || self.job.has_room.load(Ordering::SeqCst)
    }

    fn take(&mut self, received: &Received) -> std::result::Result<(), String> {
        self.note(Event::Taken(received.version));
        Ok(())
    }

    fn end(&mut self, version: u64, refused: Option<&str>) {
        self.note(match refused {
            None => Event::Whole(version),
            Some(_) => Event::Forgotten(version),
        });
        if refused.is_none() && self.process == 0 {
            self.job.newest.store(version, Ordering::SeqCst);
        }
    }
}

/// Runs a publisher of two processes and a subscriber of `subscribers` in a simulated world, while
/// `faults` is called.
fn run(seed: u64, subscribers: usize, records: bool, faults: impl FnOnce(&mut Jobs)) {
    let settings = WorldSettings {
        seed,
        longest: Duration::from_secs(7200),
        log: false,
    };
    let ((), _report) = simulated(settings, || {
        let network = Arc::new(Network {
            seed,
            state: Mutex::default(),
        });
        let subscriber = Job::new(&network, 0, subscribers);
        let mut threads = Vec::new();
        for process in 0..subscriber.processes() {
            let job = subscriber.clone();
            threads.push(subscriber.start(process, move |_, p, net| match records {
                true => job.record(p, net),
                false => job.subscribe(p, net),
            }));
        }
        let publisher = Job::new(&network, PUBLISHER, 2);
        let random = fastrand::Rng::with_seed(seed);
        let mut jobs = Jobs {
            subscriber,
            publisher,
            threads,
            random,
        };
        jobs.start_publisher(1);
        faults(&mut jobs);
        for job in [&jobs.subscriber, &jobs.publisher] {
            job.is_over.store(true, Ordering::SeqCst);
        }
        jobs.threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
        jobs.subscriber.check_events();
    });
}

struct Jobs {
    subscriber: Arc<Job>,
    publisher: Arc<Job>,
    threads: Vec<thread::JoinHandle<()>>,
    random: fastrand::Rng,
}

impl Jobs {
    fn start_publisher(&mut self, first: u64) {
        for process in 0..self.publisher.processes() {
            let publish = move |job: &Job, p: &mut Program, net: Net| job.publish(p, net, first);
            self.threads.push(self.publisher.start(process, publish));
        }
    }

    fn random_time(&mut self, from: f64, to: f64) -> Duration {
        Duration::from_secs_f64(from + self.random.f64() * (to - from))
    }

    /// Stops a process for a time, and expects versions five seconds after it at the latest.
    fn pause(&mut self) {
        let time = self.random_time(0.2, 20.0);
        let subscribers = self.subscriber.processes();
        let process = match self.random.u32(0..subscribers + 2) {
            process if process < subscribers => process,
            process => PUBLISHER + process - subscribers,
        };
        note(format_args!("process {process} stops for {time:?}"));
        stop_group(process, time);
        thread::sleep(time);
        let newest = self.publisher.newest.load(Ordering::SeqCst);
        self.subscriber.wait_above(newest, Duration::from_secs(5));
        let run = self.random_time(0.0, 3.0);
        thread::sleep(run);
    }
}

/// Returns the seeds of a test: as many as `MPMD_SEEDS` says, else a few, since each takes long.
fn seeds() -> std::ops::Range<u64> {
    let asked = std::env::var("MPMD_SEEDS")
        .ok()
        .and_then(|asked| asked.parse().ok());
    0..asked.unwrap_or(20)
}

#[test]
fn paused_processes_link_again_within_seconds() {
    for seed in seeds() {
        run(seed, 2 + seed as usize % 2, seed % 3 == 0, |jobs| {
            // The first one is while the ends find each other.
            let begun = jobs.random_time(0.0, 0.3);
            thread::sleep(begun);
            (0..2).for_each(|_| jobs.pause());
        });
    }
}

#[test]
fn killed_publishers_leave_no_version_without_an_end() {
    for seed in seeds() {
        run(seed, 2 + seed as usize % 2, seed % 3 > 0, |jobs| {
            let mut first = 0;
            for kill in 1..3 {
                jobs.subscriber.wait_above(first, Duration::from_secs(20));
                // Most often between the first process that takes a version, and the last that
                // hears of its end.
                jobs.subscriber.wait_taken();
                let lives = jobs.random_time(0.0, 0.001);
                thread::sleep(lives);
                jobs.publisher.kill();
                first = kill * 1_000_000;
                let network = jobs.subscriber.network.clone();
                jobs.publisher = Job::new(&network, PUBLISHER * (kill as u32 + 1), 2);
                jobs.start_publisher(first + 1);
            }
            jobs.subscriber.wait_above(first, Duration::from_secs(20));
        });
    }
}

/// The rendezvous of the publisher's processes waits longer than the program, and knows no loss.
#[test]
fn publisher_waits_for_no_lost_process() {
    let settings = WorldSettings {
        seed: 1,
        longest: Duration::from_secs(7200),
        log: false,
    };
    let (end, _) = simulated(settings, || {
        let network = Arc::new(Network {
            seed: 1,
            state: Mutex::default(),
        });
        let job = Job::new(&network, PUBLISHER, 2);
        let lost = job.start(1, |job, _, _| {
            job.kill_one(1);
            Ok(())
        });
        let end = Arc::new(Mutex::new(None));
        let told = end.clone();
        let waits = job.start(0, move |job, p, net| {
            let begun = now();
            let published = job.publish(p, net, 1);
            *told.lock() = Some((published, since(begun)));
            job.kill_one(0);
            Ok(())
        });
        for process in [lost, waits] {
            process.join().unwrap();
        }
        end.lock().take()
    });
    let (published, waited) = end.unwrap();
    let said = published.expect_err("a process is lost").to_string();
    assert!(said.contains("process 1 is gone"), "{said}");
    assert!(waited < PEER_TIMEOUT, "{waited:?} of the simulation");
}

#[test]
fn version_waits_for_room_on_every_process() {
    run(1, 3, true, |jobs| {
        let subscriber = jobs.subscriber.clone();
        subscriber.wait_above(3, Duration::from_secs(5));
        subscriber.has_room.store(false, Ordering::SeqCst);
        // One may be on its way.
        thread::sleep(STEP * 3);
        let newest = subscriber.newest.load(Ordering::SeqCst);
        thread::sleep(STEP * 100);
        assert_eq!(subscriber.newest.load(Ordering::SeqCst), newest);
        subscriber.has_room.store(true, Ordering::SeqCst);
        subscriber.wait_above(newest + 50, Duration::from_secs(2));
    });
}
