//! Jobs without a launcher, in virtual time: their processes are stopped, cut off and killed at any
//! time, and come back after the job has ended. The service is the real state of a job, and the
//! processes decide by the real rules. A job ends well once at most.

use std::collections::{BTreeSet, VecDeque};

use crate::contact::{ServiceContact, ServiceParting};
use crate::job::*;
use crate::protocol::LeaveKind;
use crate::succession::Succession;
use crate::{Heir, Identity, SizeRange};

const TIMEOUT: Duration = Duration::from_secs(10);

/// Virtual time between two looks at the processes.
const TICK: Duration = Duration::from_millis(100);

/// Number of ticks in which all processes of an epoch must run until the job has ended.
const STEPS: u64 = 150;

/// The time for which a host that has ended serves the others.
const LINGERS: Duration = Duration::from_secs(5);

/// The virtual time after which a job counts as hung.
const LONGEST: Duration = Duration::from_secs(600);

const RUN: u128 = 9 << 70;
const JOIN: u64 = 1;
const BARRIER: u64 = 2;

/// The address of the first service. That of a process's deputy is the process's number.
const FIRST: &str = "first";

enum FromClient {
    Opened,
    Said(ClientRequest),
    Closed,
}

enum FromService {
    Said(ServerReply),
    Closed,
}

struct Service {
    host: usize,
    address: String,
    job: JobState,
    inbox: VecDeque<(Link, FromClient)>,
    /// By link, the process of a client.
    clients: BTreeMap<Link, usize>,
    stands: bool,
}

#[derive(Clone, Debug, PartialEq)]
enum Doing {
    /// Looks for the service since a time.
    Seeks(Duration),
    Joins,
    Runs,
    /// Runs code of its own until a time, although its epoch is over.
    IsBusy(Duration),
    /// Waits for the others at the end of its epoch.
    WaitsAtEnd,
    /// Has ended, and serves the others until a time.
    Lingers(Duration),
    Ended(HowItEnded),
}

#[derive(Clone, Debug, PartialEq)]
enum HowItEnded {
    Well,
    NotNeeded,
    Failed(String),
    Killed,
}

struct Process {
    identity: Identity,
    doing: Doing,
    sleeps_until: Duration,
    done: u64,
    epoch: u64,
    members: usize,
    /// True once the processes have agreed that this one leaves the job in order.
    leaves: bool,
    address: String,
    /// The service and the link of its connection.
    link: Option<(usize, Link)>,
    /// The service and the link of the connection over which it has left its epoch, until it has
    /// joined the next one.
    left_over: Option<(usize, Link)>,
    inbox: VecDeque<FromService>,
    contact: ServiceContact,
    parting: Option<ServiceParting>,
    succession: Option<Succession>,
    /// The succession that it has heard of over this connection, while it waits for a place.
    told: Option<Succession>,
}

impl Process {
    fn parts(&mut self) {
        let parting = ServiceParting::new(self.contact.clone());
        self.parting = Some(parting.after(self.parting.take()));
    }
}

struct World {
    random: fastrand::Rng,
    start: Instant,
    now: Duration,
    links: Link,
    processes: Vec<Process>,
    services: Vec<Service>,
    /// The services and epochs in which processes have ended well.
    ends: BTreeSet<(usize, u64)>,
    busy: Duration,
    /// Number of processes that may still leave the job in order.
    leavers: u32,
}

/// The faults of a job.
#[derive(Clone, Copy)]
struct Faults {
    /// The longest time in which a process runs code of its own after the end of an epoch.
    busy: Duration,
    /// Number of processes that leave the job in order.
    leavers: u32,
    sleeps: u32,
    cuts: u32,
    kills: u32,
}

impl World {
    fn new(seed: u64, faults: Faults) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let start = Instant::now();
        let now = Duration::from_secs(1000);
        let count = random.usize(2..5);
        let process = |number: usize| Process {
            identity: Identity {
                key: number as u128 + 50,
                run: None,
            },
            doing: Doing::Seeks(now),
            sleeps_until: Duration::ZERO,
            done: 0,
            epoch: 1,
            members: 0,
            leaves: false,
            address: FIRST.to_owned(),
            link: None,
            left_over: None,
            inbox: VecDeque::new(),
            contact: ServiceContact::new(TIMEOUT, now),
            parting: None,
            succession: None,
            told: None,
        };
        let processes = (0..count).map(process).collect();
        let services = Vec::new();
        let ends = BTreeSet::new();
        let mut world = Self {
            random,
            start,
            now,
            links: 0,
            processes,
            services,
            ends,
            busy: faults.busy,
            leavers: faults.leavers,
        };
        let job = JobState::new(count, TIMEOUT, RUN, world.instant());
        world.serve(0, FIRST.to_owned(), job);
        world
    }

    fn instant(&self) -> Instant {
        self.start + self.now
    }

    fn serve(&mut self, host: usize, address: String, job: JobState) {
        let inbox = VecDeque::new();
        let clients = BTreeMap::new();
        self.services.push(Service {
            host,
            address,
            job,
            inbox,
            clients,
            stands: true,
        });
    }

    fn has_ended(&self, process: usize) -> bool {
        matches!(self.processes[process].doing, Doing::Ended(_))
    }

    fn is_awake(&self, process: usize) -> bool {
        !self.has_ended(process) && self.processes[process].sleeps_until <= self.now
    }

    /// True if the system of an address's host accepts connections there.
    fn listens(&self, address: &str) -> bool {
        let service = self
            .services
            .iter()
            .any(|service| service.stands && service.address == address);
        let deputy = address
            .parse()
            .ok()
            .filter(|process: &usize| !self.has_ended(*process));
        service || deputy.is_some()
    }

    /// Runs the job until all its processes have ended.
    fn run(&mut self, faults: Faults) {
        let Faults {
            mut sleeps,
            mut cuts,
            mut kills,
            ..
        } = faults;
        let end = self.now + LONGEST;
        while (0..self.processes.len()).any(|process| !self.has_ended(process)) {
            assert!(
                self.now < end,
                "{:?}",
                self.processes.iter().map(|p| &p.doing).collect::<Vec<_>>()
            );
            self.now += TICK;
            let victim = self.random.usize(..self.processes.len());
            let has_begun = self.services[0].job.epochs().has_begun();
            let is_time = has_begun && self.random.u32(..40) == 0 && !self.has_ended(victim);
            match self.random.u32(..3) {
                0 if is_time && sleeps > 0 && self.is_awake(victim) => {
                    sleeps -= 1;
                    // A shorter stop cannot be told from a wait for the socket.
                    let time = Duration::from_millis(self.random.u64(2_100..90_000));
                    self.processes[victim].sleeps_until = self.now + time;
                }
                1 if is_time && cuts > 0 => {
                    cuts -= 1;
                    let this = &mut self.processes[victim];
                    this.inbox.push_back(FromService::Closed);
                    let cut = this.link.or(this.left_over.take());
                    self.hang_up(cut);
                }
                // One is left, to end the job.
                2 if is_time && kills > 0 && self.living() > 1 => {
                    kills -= 1;
                    self.end(victim, HowItEnded::Killed);
                }
                _ => {}
            }
            self.tick();
        }
    }

    fn living(&self) -> usize {
        (0..self.processes.len())
            .filter(|process| !self.has_ended(*process))
            .count()
    }

    fn tick(&mut self) {
        for service in 0..self.services.len() {
            if self.services[service].stands && self.is_awake(self.services[service].host) {
                self.serves(service);
            }
        }
        let mut order: Vec<usize> = (0..self.processes.len()).collect();
        self.random.shuffle(&mut order);
        for process in order {
            if self.is_awake(process) {
                self.acts(process);
            }
        }
        self.steps();
    }

    /// Lets a service handle what its clients have said.
    fn serves(&mut self, at: usize) {
        let now = self.instant();
        let service = &mut self.services[at];
        for (link, said) in std::mem::take(&mut service.inbox) {
            match said {
                FromClient::Opened => service.job.opened(link, now),
                FromClient::Said(request) => service.job.said(link, request, now),
                FromClient::Closed => {
                    service.clients.remove(&link);
                    service.job.closed(link, "its connection was closed");
                }
            }
        }
        service.job.tick(now);
        for action in service.job.actions() {
            let (link, said) = match action {
                JobAction::Say(link, reply) => (link, FromService::Said(reply)),
                JobAction::Close(link) => (link, FromService::Closed),
            };
            let process = match said {
                FromService::Said(_) => service.clients.get(&link).copied(),
                FromService::Closed => service.clients.remove(&link),
            };
            let heard = process.map(|process| &mut self.processes[process]);
            if let Some(process) = heard.filter(|process| process.link == Some((at, link))) {
                process.inbox.push_back(said);
            }
        }
    }

    /// Closes a connection.
    fn hang_up(&mut self, connection: Option<(usize, Link)>) {
        if let Some((service, link)) = connection {
            self.services[service]
                .inbox
                .push_back((link, FromClient::Closed));
        }
    }

    fn say(&mut self, process: usize, request: ClientRequest) {
        if let Some((service, link)) = self.processes[process].link {
            self.services[service]
                .inbox
                .push_back((link, FromClient::Said(request)));
        }
    }

    /// Ends a process, and its service.
    fn end(&mut self, process: usize, how: HowItEnded) {
        let this = &mut self.processes[process];
        this.doing = Doing::Ended(how);
        let connections = [this.link.take(), this.left_over.take()];
        connections.into_iter().for_each(|one| self.hang_up(one));
        for (at, service) in self.services.iter_mut().enumerate() {
            if service.host != process || !service.stands {
                continue;
            }
            service.stands = false;
            for (link, client) in &service.clients {
                let client = &mut self.processes[*client];
                if client.link == Some((at, *link)) {
                    client.inbox.push_back(FromService::Closed);
                }
            }
        }
    }

    fn acts(&mut self, process: usize) {
        let now = self.now;
        if self.processes[process].link.is_some() {
            self.processes[process].contact.runs(now);
        }
        if let Some((service, link)) = self.processes[process].left_over {
            let answers = FromClient::Said(ClientRequest::Pong);
            self.services[service].inbox.push_back((link, answers));
        }
        for said in std::mem::take(&mut self.processes[process].inbox) {
            if self.processes[process].link.is_some() && !self.has_ended(process) {
                self.hears(process, said);
            }
        }
        match self.processes[process].doing.clone() {
            Doing::Seeks(since) => self.seeks(process, since),
            Doing::IsBusy(until) if now >= until => self.returns(process),
            Doing::Lingers(until) => {
                let serves = |service: &Service| {
                    service.stands && service.host == process && service.job.epochs().present() > 0
                };
                if now >= until || !self.services.iter().any(serves) {
                    self.end(process, HowItEnded::Well);
                }
            }
            _ => {}
        }
    }

    fn hears(&mut self, process: usize, said: FromService) {
        let now = self.now;
        let address = self.processes[process].address.clone();
        let listens = self.listens(&address);
        let this = &mut self.processes[process];
        let FromService::Said(reply) = said else {
            this.link = None;
            this.contact.is_cut(now, !listens);
            return self.loses(process);
        };
        this.contact.hears(now);
        match reply {
            ServerReply::Ping => self.say(process, ClientRequest::Pong),
            ServerReply::Answer {
                ask: JOIN,
                result:
                    Ok(RequestAnswer::Members {
                        process: place,
                        epoch,
                        run,
                        members,
                        standing,
                        ..
                    }),
            } => {
                let members = members.to_vec();
                let joined = JoinedEpoch {
                    process: place,
                    epoch,
                    run,
                    members,
                    standing,
                };
                this.identity.run = Some(run);
                this.epoch = epoch;
                this.members = joined.members.len();
                // It may have been called back.
                this.leaves = false;
                hear(&mut this.succession, Succession::of(&joined));
                this.contact.has_place();
                this.doing = Doing::Runs;
            }
            ServerReply::Answer {
                ask: JOIN,
                result: Ok(_),
            } => self.end(process, HowItEnded::NotNeeded),
            ServerReply::Answer {
                ask: JOIN,
                result: Err(error),
            } => {
                self.end(process, HowItEnded::Failed(error.to_string()));
            }
            ServerReply::Answer {
                ask: BARRIER,
                result: Ok(_),
            } => {
                let service = this.link.map_or(usize::MAX, |(service, _)| service);
                self.ends.insert((service, this.epoch));
                this.doing = Doing::Lingers(now + LINGERS);
                self.say(
                    process,
                    ClientRequest::Leave {
                        ask: 3,
                        how: LeaveKind::Ends,
                    },
                );
            }
            ServerReply::Answer {
                ask: BARRIER,
                result: Err(_),
            } => self.loses(process),
            ServerReply::Place => this.contact.has_place(),
            ServerReply::Down { .. } | ServerReply::EpochOver { .. } => self.loses(process),
            ServerReply::Heirs { run, addresses } => {
                this.told = Some(Succession::told(run, addresses))
            }
            ServerReply::Dropped { why } => this.contact.is_given_up(&why),
            _ => {}
        }
    }

    /// Handles a loss that a process hears of.
    fn loses(&mut self, process: usize) {
        let busy = match self.random.u32(..4) {
            0 => Duration::from_millis(self.random.u64(..self.busy.as_millis() as u64)),
            _ => Duration::ZERO,
        };
        let until = self.now + busy;
        let this = &mut self.processes[process];
        match this.doing {
            Doing::Runs | Doing::WaitsAtEnd => this.doing = Doing::IsBusy(until),
            Doing::Joins => {
                this.parts();
                let told = this.told.take();
                hear(&mut this.succession, told);
                this.doing = Doing::Seeks(self.now);
            }
            _ => {}
        }
    }

    /// Lets a process leave its epoch, to join the next one.
    fn returns(&mut self, process: usize) {
        self.say(
            process,
            ClientRequest::Leave {
                ask: 4,
                how: LeaveKind::Returns,
            },
        );
        let this = &mut self.processes[process];
        this.left_over = this.link.take();
        this.epoch += 1;
        this.parts();
        this.doing = Doing::Seeks(self.now);
    }

    /// Looks for the service, as a `ServiceSeeker` does.
    fn seeks(&mut self, process: usize, since: Duration) {
        let address = self.processes[process].address.clone();
        let at = self.services.iter().position(|service| {
            service.stands && (service.host == process || service.address == address)
        });
        let serving = at.filter(|at| self.is_awake(self.services[*at].host));
        if let Some(service) = serving {
            return self.joins(process, service);
        }
        let is_late = self.now.saturating_sub(since) > TIMEOUT;
        if self.listens(&address) || self.processes[process].succession.is_none() {
            if is_late {
                self.end(
                    process,
                    HowItEnded::Failed("the service does not answer".to_owned()),
                );
            }
            return;
        }
        self.finds(process);
    }

    fn finds(&mut self, process: usize) {
        let own = process.to_string();
        let this = &self.processes[process];
        let Some(succession) = this.succession.clone() else {
            return;
        };
        let mut living = succession
            .addresses
            .iter()
            .filter(|address| **address == own || self.listens(address));
        match living.next() {
            None => self.end(process, HowItEnded::Failed("all are gone".to_owned())),
            Some(address) if *address != own => {
                let address = address.clone();
                self.processes[process].address = address;
                self.processes[process].doing = Doing::Seeks(self.now);
            }
            Some(_) => {
                let is_first = succession.is_first(Some(&own));
                let parted = this
                    .parting
                    .as_ref()
                    .expect("it has joined")
                    .check(is_first, self.now);
                let past = match (parted, succession.past) {
                    (Err(doubt), _) => {
                        return self.end(process, HowItEnded::Failed(doubt.to_string()));
                    }
                    (_, None) => {
                        let why = "it had no place".to_owned();
                        return self.end(process, HowItEnded::Failed(why));
                    }
                    (Ok(()), Some(past)) => past,
                };
                let lives = |heir: &Heir| heir.address == own || self.listens(&heir.address);
                let lives: Vec<bool> = past
                    .members
                    .iter()
                    .map(|member| member.heir.as_ref().is_some_and(lives))
                    .collect();
                let launched = self.processes.len();
                let job = JobState::resumed(launched, TIMEOUT, &past, &lives, self.instant());
                self.serve(process, own.clone(), job);
                self.processes[process].address = own;
            }
        }
    }

    fn joins(&mut self, process: usize, service: usize) {
        self.links += 1;
        let link = self.links;
        let hosts = self.services[service].host == process;
        let count = self.processes.len();
        self.services[service].clients.insert(link, process);
        self.services[service]
            .inbox
            .push_back((link, FromClient::Opened));
        let address = self.services[service].address.clone();
        let this = &mut self.processes[process];
        let heir = Heir {
            address: process.to_string(),
            mark: this.identity.mark(),
            since: 0,
        };
        let member = JobMember {
            pid: process as u32,
            sizes: SizeRange::of(1..=count as u32),
            heir: (!hosts).then_some(heir),
            leaves: this.leaves,
            ..JobMember::default()
        };
        this.address = address;
        this.link = Some((service, link));
        this.inbox.clear();
        this.told = None;
        this.contact = ServiceContact::new(TIMEOUT, self.now);
        this.doing = Doing::Joins;
        let join = ClientRequest::Join {
            ask: JOIN,
            process: ProcessId(process as u32),
            processes: count as u64,
            epoch: this.epoch,
            identity: this.identity,
            waits: true,
            peer_timeout: TIMEOUT,
            member: Box::new(member),
        };
        self.say(process, join);
        let left_over = self.processes[process].left_over.take();
        self.hang_up(left_over);
    }

    /// Lets the processes of an epoch go on without one of them, which leaves in order. The process
    /// that runs the service stays.
    fn agree_on_leaver(&mut self, members: &[usize]) {
        let runs_service = |process: &&usize| {
            self.services
                .iter()
                .any(|service| service.host == **process)
        };
        let others: Vec<usize> = members
            .iter()
            .filter(|it| !runs_service(it))
            .copied()
            .collect();
        if others.len() < 2 {
            return;
        }
        let leaver = others[self.random.usize(..others.len())];
        self.processes[leaver].leaves = true;
        members.iter().for_each(|process| self.returns(*process));
    }

    /// Lets each epoch whose processes all run make a step.
    fn steps(&mut self) {
        for first in 0..self.processes.len() {
            let of = |process: &Process| (process.link.map(|(service, _)| service), process.epoch);
            let epoch = of(&self.processes[first]);
            let is_member = |process: &usize| {
                let this = &self.processes[*process];
                this.doing == Doing::Runs && of(this) == epoch
            };
            let members: Vec<usize> = (0..self.processes.len()).filter(is_member).collect();
            let all_run = members.iter().all(|process| self.is_awake(*process));
            if members.first() != Some(&first)
                || members.len() != self.processes[first].members
                || !all_run
            {
                continue;
            }
            let done = members
                .iter()
                .map(|process| self.processes[*process].done)
                .max();
            let done = done.unwrap_or(0) + 1;
            self.say(first, ClientRequest::Whole);
            if done < STEPS && self.leavers > 0 && self.random.u32(..20) == 0 {
                self.leavers -= 1;
                self.agree_on_leaver(&members);
                continue;
            }

            for process in members {
                self.processes[process].done = done;
                if done >= STEPS {
                    self.processes[process].doing = Doing::WaitsAtEnd;
                    let name = format!("end {}", epoch.1);
                    let barrier = ClientRequest::Barrier {
                        ask: BARRIER,
                        name,
                        peer_timeout: TIMEOUT,
                    };
                    self.say(process, barrier);
                }
            }
        }
    }
}

/// Notes a succession as [`ServiceSeeker::hear`](crate::ServiceSeeker::hear) does.
fn hear(known: &mut Option<Succession>, told: Option<Succession>) {
    match (known, told) {
        (Some(known), Some(told)) => known.hear(told),
        (known, told) => *known = told.or(known.take()),
    }
}

/// Numbers of jobs of some seeds.
#[derive(Debug, Default)]
struct JobCounts {
    /// Jobs that have ended well.
    well: usize,
    /// Jobs in which a process came back after the end, and ended without going on.
    outlived: usize,
    /// Jobs of which a process was released that had left in order.
    left: usize,
}

/// Runs the jobs of some seeds.
fn run(seeds: std::ops::Range<u64>, faults: Faults) -> JobCounts {
    let mut counts = JobCounts::default();
    for seed in seeds {
        let mut world = World::new(seed, faults);
        world.run(faults);
        let World {
            ends, processes, ..
        } = world;
        let doing: Vec<_> = processes.iter().map(|process| &process.doing).collect();
        assert!(
            ends.len() <= 1,
            "seed {seed}: it has ended in {ends:?}: {doing:?}"
        );
        counts.well += ends.len();
        let failed = |doing: &&&Doing| matches!(doing, Doing::Ended(HowItEnded::Failed(_)));
        counts.outlived += usize::from(!ends.is_empty() && doing.iter().any(|d| failed(&d)));
        let is_released =
            |this: &Process| this.leaves && this.doing == Doing::Ended(HowItEnded::NotNeeded);
        counts.left += usize::from(processes.iter().any(is_released));
    }
    counts
}

/// Returns the number of seeds: MPMD_TEST_SEEDS, or a number that takes a second.
fn seeds() -> u64 {
    let seeds = std::env::var("MPMD_TEST_SEEDS")
        .ok()
        .and_then(|text| text.parse().ok());
    seeds.unwrap_or(400)
}

#[test]
fn job_with_sleepers_and_deaths_ends_once_at_most() {
    let counts = run(
        0..seeds(),
        Faults {
            busy: 3 * TIMEOUT,
            leavers: 0,
            sleeps: 3,
            cuts: 1,
            kills: 1,
        },
    );
    println!("{counts:?} of {}", seeds());
    assert!(counts.well > 0 && counts.outlived > 0, "{counts:?}");
}

/// A process that has left in order, or was asleep at the end, knows nothing of the end. Nobody
/// keeps a record of it, since none of them goes on by itself.
#[test]
fn job_that_processes_leave_ends_once_at_most() {
    let counts = run(
        0..seeds(),
        Faults {
            busy: 3 * TIMEOUT,
            leavers: 2,
            sleeps: 3,
            cuts: 1,
            kills: 1,
        },
    );
    assert!(
        counts.well > 0 && counts.outlived > 0 && counts.left > 0,
        "{counts:?}"
    );
}

#[test]
fn job_with_deaths_alone_ends_once() {
    let counts = run(
        0..seeds(),
        Faults {
            busy: TIMEOUT / 2,
            leavers: 0,
            sleeps: 0,
            cuts: 0,
            kills: 3,
        },
    );
    assert_eq!(counts.well as u64, seeds());
}
