//! The state of a job, with its members and pending requests: the server without its sockets.
//!
//! Pure: it is given the clients' requests and the time, and answers with [`Action`]s.
//!
//! A job begins in epoch 1. After the loss of a process the others may return: the first of them to
//! join epoch `n + 1` begins it. The places of processes that do not return go to spares, which
//! wait for one. A process that was given up has no place in a later epoch, unless its old one is
//! still free.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use mpmd_ids::block::Instant;

use super::protocol::{Answer, MAX_KEY_BYTES, MAX_VALUE_BYTES, ProcessStatus, Reply, Request};
use super::{Member, RendezvousError, Report};
pub(super) use crate::deadline::after;
pub(super) use crate::strangers::Link;
use crate::wire::ProcessId;

/// An action that the server must carry out.
#[derive(Debug, PartialEq)]
pub(super) enum Action {
    Say(Link, Reply),
    /// Close the connection once all replies are sent.
    Close(Link),
}

/// The phase of a job.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Phase {
    Gathering,
    Running,
    Failed(RendezvousError),
}

pub(super) struct Job {
    /// The identity of this run of the job.
    run: u128,
    peer_timeout: Duration,
    ping: Duration,
    phase: Phase,
    gather_until: Instant,
    /// The time by which processes that have left an epoch return. Set at each loss.
    returns_by: Option<Instant>,
    /// The epoch that gathers, runs or has failed.
    epoch: u64,
    seats: Vec<Option<Seat>>,
    /// By process, while a later epoch gathers: true if a spare may have the process's place.
    vacant: Vec<bool>,
    /// Clients that wait for a place, in order of arrival.
    spares: Vec<Seat>,
    links: BTreeMap<Link, Client>,
    values: HashMap<String, Vec<u8>>,
    gets: Vec<Get>,
    barriers: BTreeMap<String, Vec<Arrival>>,
    looks: Vec<Look>,
    /// Number of looks so far.
    looked: u64,
    /// (Process, its failure), in order of arrival, at most one from each process.
    reports: Vec<(ProcessId, Report)>,
    ticked: Instant,
    actions: Vec<Action>,
}

/// A process that has joined.
struct Seat {
    link: Link,
    member: Member,
    waits: Wait,
    /// True if the process was in an earlier epoch, so that it may have copies of its state.
    has_been: bool,
    /// `None` while the process is in the job.
    ended: Option<End>,
}

/// The end of a process's part in an epoch.
struct End {
    why: String,
    how: HowEnded,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum HowEnded {
    Died,
    /// It has left in order.
    Left,
    /// It has left, to join the next epoch.
    Returns,
}

/// A client's wish to join a job.
struct Wish {
    process: ProcessId,
    processes: usize,
    epoch: u64,
    run: Option<u128>,
    waits: bool,
}

struct Client {
    process: Option<ProcessId>,
    heard: Instant,
    ping_at: Instant,
    join_by: Instant,
}

/// A pending request and its deadline.
#[derive(Clone, Copy)]
struct Wait {
    ask: u64,
    until: Instant,
    peer_timeout: Duration,
}

struct Get {
    link: Link,
    key: String,
    wait: Wait,
}

struct Arrival {
    process: ProcessId,
    link: Link,
    wait: Wait,
}

/// A look at the job for which the status of some processes is still missing.
struct Look {
    number: u64,
    link: Link,
    ask: u64,
    missing: BTreeSet<ProcessId>,
    until: Instant,
}

/// The longest time that an observer waits for the status of a process.
const LOOK_WITHIN: Duration = Duration::from_secs(1);

impl Job {
    /// Creates the job of the run with this identity, which differs from that of every other run.
    pub(super) fn new(processes: usize, peer_timeout: Duration, run: u128, now: Instant) -> Self {
        Self {
            run,
            peer_timeout,
            ping: ping_interval(peer_timeout),
            phase: Phase::Gathering,
            gather_until: after(now, peer_timeout),
            returns_by: None,
            epoch: 1,
            seats: (0..processes).map(|_| None).collect(),
            vacant: vec![false; processes],
            spares: Vec::new(),
            links: BTreeMap::new(),
            values: HashMap::new(),
            gets: Vec::new(),
            barriers: BTreeMap::new(),
            looks: Vec::new(),
            looked: 0,
            reports: Vec::new(),
            ticked: now,
            actions: Vec::new(),
        }
    }

    /// True once all processes have joined the first epoch.
    pub(super) fn has_begun(&self) -> bool {
        self.epoch > 1 || self.phase == Phase::Running
    }

    pub(super) fn phase(&self) -> &Phase {
        &self.phase
    }

    /// Number of processes that joined and have neither left nor ended.
    pub(super) fn present(&self) -> usize {
        self.seats.iter().flatten().filter(|seat| seat.ended.is_none()).count()
    }

    /// Returns the number of places that need a new process: places of processes that are gone,
    /// less the number of waiting spares.
    pub(super) fn wanted(&self) -> usize {
        let is_free = |process: usize| match (&self.phase, &self.seats[process]) {
            (Phase::Gathering, None) => self.vacant[process],
            (Phase::Running, Some(Seat { ended: Some(end), .. })) => end.how == HowEnded::Died,
            _ => false,
        };
        let free = (0..self.seats.len()).filter(|process| is_free(*process)).count();
        free.saturating_sub(self.spares.len())
    }

    /// The failures that processes of the job have reported in this epoch, as (process, report), in
    /// order of arrival.
    pub(super) fn reports(&self) -> &[(ProcessId, Report)] {
        &self.reports
    }

    /// Takes the actions that the server must carry out, added since the last call.
    pub(super) fn actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Adds a client that has shown the right token. It must join within the peer timeout.
    pub(super) fn opened(&mut self, link: Link, now: Instant) {
        let join_by = after(now, self.peer_timeout);
        self.links.insert(
            link,
            Client { process: None, heard: now, ping_at: after(now, self.ping), join_by },
        );
    }

    /// Handles the end of a client's connection: drops its requests. If it had joined, its process
    /// counts as died.
    pub(super) fn closed(&mut self, link: Link, why: &str) {
        if let Some(process) = self.forget(link) {
            self.end(link, process, why, HowEnded::Died);
        }
    }

    pub(super) fn said(&mut self, link: Link, request: Request, now: Instant) {
        let Some(client) = self.links.get_mut(&link) else { return };
        client.heard = now;
        let process = client.process;
        match request {
            // The connection answers clock requests itself, without the delay of this queue.
            Request::Pong | Request::Clock { .. } => {}
            Request::Join { ask, process, processes, epoch, run, waits, peer_timeout, member } => {
                let wait = Wait { ask, until: after(now, peer_timeout), peer_timeout };
                let wish = Wish { process, processes: processes as usize, epoch, run, waits };
                if let Err(refusal) = self.join(link, &wish, member, wait, now) {
                    self.answer(link, ask, Err(refusal));
                }
            }
            Request::Set { ask, key, value } => {
                let result = self.set(key, value);
                self.answer(link, ask, result);
            }
            Request::Get { ask, key, peer_timeout } => {
                let wait = Wait { ask, until: after(now, peer_timeout), peer_timeout };
                match (check_name("a key", &key), self.values.get(&key)) {
                    // No process can set such a key, and an answer that contains it would not fit a
                    // message.
                    (Err(refusal), _) => self.answer(link, ask, Err(refusal)),
                    (Ok(()), Some(value)) => {
                        let value = value.clone();
                        self.answer(link, ask, Ok(Answer::Value(value)));
                    }
                    (Ok(()), None) => match self.lost().filter(|_| process.is_some()) {
                        Some((process, why)) => {
                            let error = RendezvousError::NeverSet { key, process, why };
                            self.answer(link, ask, Err(error));
                        }
                        None => self.gets.push(Get { link, key, wait }),
                    },
                }
            }
            Request::Barrier { ask, name, peer_timeout } => {
                let wait = Wait { ask, until: after(now, peer_timeout), peer_timeout };
                if let Err(refusal) = self.barrier(link, process, name, wait) {
                    self.answer(link, ask, Err(refusal));
                }
            }
            Request::Report { ask, report } => {
                let result = self.report(process, report);
                self.answer(link, ask, result);
            }
            Request::Look { ask } => {
                if let Err(refusal) = self.look(link, ask, now) {
                    self.answer(link, ask, Err(refusal));
                }
            }
            Request::Status { look, status } => {
                if let Some(process) = process {
                    let status = passed_on(status);
                    self.seen(process, &status, |one| one.number == look);
                }
            }
            Request::Leave { ask, returns } => {
                self.answer(link, ask, Ok(Answer::Done));
                self.forget(link);
                self.actions.push(Action::Close(link));
                if let Some(process) = process {
                    let how = if returns { HowEnded::Returns } else { HowEnded::Left };
                    self.end(link, process, "it has left the job", how);
                }
            }
        }
    }

    /// Sends due pings, drops silent clients and fails expired requests. Returns the time by which
    /// it must be called again.
    pub(super) fn tick(&mut self, now: Instant) -> Instant {
        self.watch(now);
        if self.phase == Phase::Gathering && now >= self.gather_until {
            self.is_late(now);
        }
        self.stop_waiting_for_returns(now);
        self.expire(now);
        let waits = self.gets.iter().map(|get| get.wait.until);
        let arrivals = self.barriers.values().flatten().map(|arrival| arrival.wait.until);
        let joins = self
            .seats
            .iter()
            .flatten()
            .map(|seat| seat.waits.until)
            .chain([self.gather_until])
            .filter(|_| self.phase == Phase::Gathering);
        let looks = self.looks.iter().map(|look| look.until).chain(self.returns_by);
        // Often enough for pings even if nothing else is due, and to notice that the server was
        // stopped.
        waits.chain(arrivals).chain(joins).chain(looks).fold(after(now, self.ping), Instant::min)
    }

    /// Sends pings, and drops clients that no longer answer.
    fn watch(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(self.ticked);
        self.ticked = now;
        if passed > self.ping.saturating_mul(2) {
            self.put_off(passed, now);
        }
        let mut silent = Vec::new();
        for (&link, client) in &mut self.links {
            if now.saturating_duration_since(client.heard) > self.peer_timeout {
                silent.push((link, format!("it has been silent for {:?}", self.peer_timeout)));
            } else if client.process.is_none() && now >= client.join_by {
                silent.push((link, format!("it has not joined within {:?}", self.peer_timeout)));
            } else if now >= client.ping_at {
                client.ping_at = after(now, self.ping);
                self.actions.push(Action::Say(link, Reply::Ping));
            }
        }
        for (link, why) in silent {
            self.actions.push(Action::Say(link, Reply::Dropped { why: why.clone() }));
            self.actions.push(Action::Close(link));
            self.closed(link, &why);
        }
    }

    /// Extends all deadlines by the time in which the server itself was stopped (a suspended
    /// machine, Ctrl-Z). Most likely its clients were stopped too, so none of them is silent or
    /// late.
    fn put_off(&mut self, stopped: Duration, now: Instant) {
        self.gather_until = after(self.gather_until, stopped);
        for client in self.links.values_mut() {
            client.heard = now;
            client.join_by = after(client.join_by, stopped);
        }
        let seats = self.seats.iter_mut().flatten().map(|seat| &mut seat.waits);
        let gets = self.gets.iter_mut().map(|get| &mut get.wait);
        let arrivals = self.barriers.values_mut().flatten().map(|arrival| &mut arrival.wait);
        for wait in seats.chain(gets).chain(arrivals) {
            wait.until = after(wait.until, stopped);
        }
        for look in &mut self.looks {
            look.until = after(look.until, stopped);
        }
    }

    /// Handles the end of the time in which an epoch should have gathered. Processes that have not
    /// come to a later epoch, or to the first if there are spares, lose their places. New processes
    /// get the time once more.
    fn is_late(&mut self, now: Instant) {
        let goes_on = self.epoch > 1 || !self.spares.is_empty();
        let is_awaited = |(seat, vacant): (&Option<Seat>, &bool)| seat.is_none() && !vacant;
        if goes_on && self.seats.iter().zip(&self.vacant).any(is_awaited) {
            self.gather_until = after(now, self.peer_timeout);
            self.vacant.fill(true);
            self.place_spares();
        } else {
            let error = self.missing(self.peer_timeout);
            self.fail(error);
        }
    }

    fn expire(&mut self, now: Instant) {
        if self.phase == Phase::Gathering {
            let late: Vec<(Link, Wait)> = self
                .seats
                .iter()
                .flatten()
                .filter(|seat| now >= seat.waits.until)
                .map(|seat| (seat.link, seat.waits))
                .collect();
            // Computed before any of them is removed: a process that times out at the same moment
            // is not missing to the others.
            let errors: Vec<_> =
                late.iter().map(|(_, wait)| self.missing(wait.peer_timeout)).collect();
            for ((link, wait), error) in late.into_iter().zip(errors) {
                self.answer(link, wait.ask, Err(error));
                if let Some(process) =
                    self.links.get_mut(&link).and_then(|client| client.process.take())
                {
                    self.seats[process.index()] = None;
                }
            }
        }
        let (late, waiting) = self.gets.drain(..).partition(|get| now >= get.wait.until);
        self.gets = waiting;
        for Get { link, key, wait } in late {
            self.answer(
                link,
                wait.ask,
                Err(RendezvousError::Unset { key, peer_timeout: wait.peer_timeout }),
            );
        }
        let mut answers = Vec::new();
        for (name, arrivals) in &mut self.barriers {
            if !arrivals.iter().any(|arrival| now >= arrival.wait.until) {
                continue;
            }
            let missing: Vec<ProcessId> = processes(self.seats.len())
                .filter(|&process| arrivals.iter().all(|arrival| arrival.process != process))
                .collect();
            arrivals.retain(|arrival| {
                let wait = arrival.wait;
                if now < wait.until {
                    return true;
                }
                let error = RendezvousError::Barrier {
                    name: name.clone(),
                    missing: missing.clone(),
                    processes: self.seats.len(),
                    peer_timeout: wait.peer_timeout,
                };
                answers.push((arrival.link, wait.ask, error));
                false
            });
        }
        self.barriers.retain(|_, arrivals| !arrivals.is_empty());
        for (link, ask, error) in answers {
            self.answer(link, ask, Err(error));
        }
        let late = self.looks.iter().filter(|look| now >= look.until);
        let silent: BTreeSet<_> = late.flat_map(|look| look.missing.iter().copied()).collect();
        for process in silent {
            let status = Err(format!("no answer within {LOOK_WITHIN:?}"));
            self.seen(process, &status, |look| now >= look.until);
        }
    }

    fn join(
        &mut self,
        link: Link,
        wish: &Wish,
        member: Member,
        waits: Wait,
        now: Instant,
    ) -> Result<(), RendezvousError> {
        let Wish { process, processes: believes, epoch, run, .. } = *wish;
        // Error messages contain these texts, up to two of them.
        check_name("the name of a host", &member.host)?;
        check_name("the fingerprint of a program", &member.program)?;
        let processes = self.seats.len();
        if believes != processes {
            return Err(RendezvousError::Count { process, believes, job: processes });
        }
        if run.is_some_and(|run| run != self.run) {
            return Err(RendezvousError::OtherRun { process });
        }
        if self.phase == Phase::Running && epoch == self.epoch + 1 && process.index() < processes {
            self.begin_next_epoch(now);
        }
        let is_place =
            self.phase == Phase::Gathering && epoch == self.epoch && process.index() < processes;
        if let Phase::Failed(error) = &self.phase
            && wish.waits
        {
            return Err(error.clone());
        }
        // While it could not be heard, another process may have got its place.
        let is_taken = self.seats.get(process.index()).is_some_and(|seat| {
            let held = seat.as_ref().filter(|held| held.ended.is_none());
            held.is_some_and(|held| !is_same(held, &member))
        });
        if wish.waits && (!is_place || is_taken) {
            return self.wait_for_place(link, wish, member, waits, now);
        }
        let Some(seat) = self.seats.get(process.index()) else {
            return Err(RendezvousError::NoSuchProcess { process, processes });
        };
        let mut before = None;
        if let Some(held) = seat
            && held.ended.is_none()
        {
            if !is_same(held, &member) || held.link == link || !is_place {
                let Member { host, pid, .. } = held.member.clone();
                return Err(RendezvousError::Duplicate { process, host, pid });
            }
            // Its connection was cut and it tries again. The end of its first connection has not
            // been seen yet.
            before = Some(held.link);
        }
        match &self.phase {
            Phase::Failed(error) => return Err(error.clone()),
            _ if !is_place => return Err(RendezvousError::Complete { process, processes }),
            _ => {}
        }
        let Some(client) = self.links.get_mut(&link) else { return Ok(()) };
        if client.process.is_some() || self.spares.iter().any(|spare| spare.link == link) {
            return Err(RendezvousError::OutOfTurn { what: "joining".into(), when: "once".into() });
        }
        client.process = Some(process);
        if let Some(before) = before {
            self.forget(before);
            self.actions.push(Action::Close(before));
        }
        let differs = self.differs(process, &member);
        // One that waits for a place has no time limit of its own.
        let until = if wish.waits { after(now, Duration::MAX) } else { waits.until };
        let waits = Wait { until, ..waits };
        self.seats[process.index()] =
            Some(Seat { link, member, waits, has_been: epoch > 1, ended: None });
        match differs {
            // Waiting cannot help. All processes had better hear of it now than of a missing
            // process later.
            Some(error) => self.fail(error),
            None => self.place_spares(),
        }
        Ok(())
    }

    /// Begins the next epoch, in which every place is free again.
    fn begin_next_epoch(&mut self, now: Instant) {
        self.epoch += 1;
        self.phase = Phase::Gathering;
        self.returns_by = None;
        self.gather_until = after(now, self.peer_timeout);
        self.vacant = self.seats.iter().map(is_gone).collect();
        self.seats.fill_with(|| None);
        self.reports.clear();
        for (name, arrivals) in std::mem::take(&mut self.barriers) {
            for Arrival { link, wait, .. } in arrivals {
                let what = format!("barrier {name:?}");
                let when = "in an epoch that goes on".into();
                self.answer(link, wait.ask, Err(RendezvousError::OutOfTurn { what, when }));
            }
        }
    }

    /// Keeps a client until there is a place for it, or until the job has ended.
    fn wait_for_place(
        &mut self,
        link: Link,
        wish: &Wish,
        member: Member,
        waits: Wait,
        now: Instant,
    ) -> Result<(), RendezvousError> {
        let has_been = wish.epoch > 1;
        if let Some(error) = self.differs(wish.process, &member) {
            return Err(error);
        }
        let Some(client) = self.links.get_mut(&link) else { return Ok(()) };
        if client.process.is_some() || self.spares.iter().any(|spare| spare.link == link) {
            return Err(RendezvousError::OutOfTurn { what: "joining".into(), when: "once".into() });
        }
        client.join_by = after(now, Duration::MAX);
        let waits = Wait { until: after(now, Duration::MAX), ..waits };
        self.spares.push(Seat { link, member, waits, has_been, ended: None });
        self.place_spares();
        self.dismiss_spares();
        Ok(())
    }

    /// Gives the free places of an epoch that gathers to waiting spares. Starts the epoch if it is
    /// complete.
    fn place_spares(&mut self) {
        if self.phase != Phase::Gathering {
            return;
        }
        for process in processes(self.seats.len()) {
            while self.seats[process.index()].is_none()
                && self.vacant[process.index()]
                && !self.spares.is_empty()
            {
                // One that was stopped and woke in time has copies that a new process lacks.
                let has_been = self.spares.iter().position(|spare| spare.has_been);
                let spare = self.spares.remove(has_been.unwrap_or(0));
                if let Some(error) = self.differs(process, &spare.member) {
                    self.answer(spare.link, spare.waits.ask, Err(error));
                    continue;
                }
                if let Some(client) = self.links.get_mut(&spare.link) {
                    client.process = Some(process);
                }
                self.seats[process.index()] = Some(spare);
            }
        }
        if self.seats.iter().any(Option::is_none) {
            return;
        }
        self.phase = Phase::Running;
        let members: Arc<[Member]> =
            self.seats.iter().flatten().map(|seat| seat.member.clone()).collect();
        let seats = processes(self.seats.len()).zip(self.seats.iter().flatten());
        let told: Vec<_> =
            seats.map(|(process, seat)| (process, seat.link, seat.waits.ask)).collect();
        for (process, link, ask) in told {
            let (members, epoch, run) = (members.clone(), self.epoch, self.run);
            let answer = Answer::Members { process, epoch, run, members, more: false };
            self.answer(link, ask, Ok(answer));
        }
    }

    /// Returns an error if the program of a new member differs from that of one that has joined.
    fn differs(&self, process: ProcessId, member: &Member) -> Option<RendezvousError> {
        self.seats.iter().enumerate().find_map(|(other, seat)| {
            let other_member = &seat.as_ref()?.member;
            (other_member.program != member.program).then(|| RendezvousError::Program {
                process,
                host: member.host.clone(),
                program: member.program.clone(),
                other: ProcessId(other as u32),
                other_host: other_member.host.clone(),
                other_program: other_member.program.clone(),
            })
        })
    }

    fn set(&mut self, key: String, value: Vec<u8>) -> Result<Answer, RendezvousError> {
        check_name("a key", &key)?;
        if value.len() > MAX_VALUE_BYTES {
            let what = format!("the value of {key:?}");
            return Err(RendezvousError::TooLong {
                what,
                bytes: value.len(),
                limit: MAX_VALUE_BYTES,
            });
        }
        let (met, waiting) = self.gets.drain(..).partition(|get| get.key == key);
        self.gets = waiting;
        for Get { link, wait, .. } in met {
            self.answer(link, wait.ask, Ok(Answer::Value(value.clone())));
        }
        self.values.insert(key, value);
        Ok(Answer::Done)
    }

    fn barrier(
        &mut self,
        link: Link,
        process: Option<ProcessId>,
        name: String,
        wait: Wait,
    ) -> Result<(), RendezvousError> {
        check_name("the name of a barrier", &name)?;
        let (Some(process), Phase::Running) = (process, &self.phase) else {
            let what = format!("barrier {name:?}");
            return Err(RendezvousError::OutOfTurn {
                what,
                when: "once the job is complete".into(),
            });
        };
        for (other, seat) in processes(self.seats.len()).zip(&self.seats) {
            if let Some(end) = seat.as_ref().and_then(|seat| seat.ended.as_ref()) {
                let why = end.why.clone();
                return Err(RendezvousError::BarrierBroken { name, process: other, why });
            }
        }
        let arrivals = self.barriers.entry(name.clone()).or_default();
        if arrivals.iter().any(|arrival| arrival.process == process) {
            let what = format!("waiting at barrier {name:?}");
            return Err(RendezvousError::OutOfTurn { what, when: "once at a time".into() });
        }
        arrivals.push(Arrival { process, link, wait });
        if arrivals.len() == self.seats.len() {
            for arrival in self.barriers.remove(&name).into_iter().flatten() {
                self.answer(arrival.link, arrival.wait.ask, Ok(Answer::Done));
            }
        }
        Ok(())
    }

    /// Asks every process of a running job for its status, for the client of `link`. Of others it
    /// says at once why they have none.
    fn look(&mut self, link: Link, ask: u64, now: Instant) -> Result<(), RendezvousError> {
        if let Phase::Failed(error) = &self.phase {
            return Err(error.clone());
        }
        if self.looks.iter().any(|look| look.link == link) {
            let (what, when) = ("looking at the job".into(), "once at a time".into());
            return Err(RendezvousError::OutOfTurn { what, when });
        }
        if let Some(client) = self.links.get_mut(&link) {
            // It may look for as long as the job runs and need not join.
            client.join_by = after(now, Duration::MAX);
        }
        self.looked += 1;
        let mut missing = BTreeSet::new();
        for (process, seat) in processes(self.seats.len()).zip(&self.seats) {
            let why = match seat {
                None => "it has not joined yet".to_owned(),
                Some(Seat { ended: Some(end), .. }) => end.why.clone(),
                Some(_) if self.phase == Phase::Gathering => "it waits for others to join".into(),
                Some(seat) => {
                    missing.insert(process);
                    self.actions.push(Action::Say(seat.link, Reply::Look { look: self.looked }));
                    continue;
                }
            };
            self.actions.push(Action::Say(link, Reply::Status { ask, process, status: Err(why) }));
        }
        match missing.is_empty() {
            true => self.answer(link, ask, Ok(Answer::Done)),
            false => {
                let until = after(now, LOOK_WITHIN);
                self.looks.push(Look { number: self.looked, link, ask, missing, until });
            }
        }
        Ok(())
    }

    /// Passes on the status of `process` to the looks that miss it and for which `is_for` returns
    /// true, and ends those that miss no other.
    fn seen(&mut self, process: ProcessId, status: &ProcessStatus, is_for: impl Fn(&Look) -> bool) {
        for look in &mut self.looks {
            if is_for(look) && look.missing.remove(&process) {
                let (ask, status) = (look.ask, status.clone());
                self.actions.push(Action::Say(look.link, Reply::Status { ask, process, status }));
            }
        }
        let (complete, open) =
            self.looks.drain(..).partition(|look: &Look| look.missing.is_empty());
        self.looks = open;
        for Look { link, ask, .. } in complete {
            self.answer(link, ask, Ok(Answer::Done));
        }
    }

    fn report(
        &mut self,
        process: Option<ProcessId>,
        report: Report,
    ) -> Result<Answer, RendezvousError> {
        let Some(process) = process else {
            return Err(RendezvousError::OutOfTurn {
                what: "reporting".into(),
                when: "after joining".into(),
            });
        };
        if self.reports.iter().all(|(before, _)| *before != process) {
            self.reports.push((process, report));
        }
        Ok(Answer::Done)
    }

    /// Removes a client and its pending requests. Returns its process, if it had joined.
    fn forget(&mut self, link: Link) -> Option<ProcessId> {
        self.gets.retain(|get| get.link != link);
        for arrivals in self.barriers.values_mut() {
            arrivals.retain(|arrival| arrival.link != link);
        }
        self.barriers.retain(|_, arrivals| !arrivals.is_empty());
        self.looks.retain(|look| look.link != link);
        self.spares.retain(|spare| spare.link != link);
        self.links.remove(&link)?.process
    }

    /// Marks a process as ended and fails all pending barriers. If it died, tells the others.
    /// Before the job is complete, only frees the process's number. `link` is the process's
    /// connection: it may be of an earlier epoch.
    fn end(&mut self, link: Link, process: ProcessId, why: &str, how: HowEnded) {
        let seat = &mut self.seats[process.index()];
        if seat.as_ref().is_some_and(|seat| seat.link != link) {
            return;
        }
        if self.phase != Phase::Running {
            // The others do not know it yet: another process may take its number.
            *seat = None;
            if how != HowEnded::Returns {
                self.vacant[process.index()] = true;
                self.place_spares();
            }
            return;
        }
        if let Some(seat) = seat {
            seat.ended = Some(End { why: why.to_owned(), how });
        }
        self.seen(process, &Err(why.to_owned()), |_| true);
        if how == HowEnded::Died {
            let others: Vec<Link> = self
                .links
                .iter()
                .filter(|(_, c)| c.process.is_some())
                .map(|(&link, _)| link)
                .collect();
            for link in others {
                self.actions.push(Action::Say(link, Reply::Down { process, why: why.to_owned() }));
            }
        }
        if how != HowEnded::Left {
            self.returns_by = Some(after(self.ticked, self.peer_timeout));
            self.fail_gets(process, why);
        }
        for (name, arrivals) in std::mem::take(&mut self.barriers) {
            for Arrival { link, wait, .. } in arrivals {
                let error = RendezvousError::BarrierBroken {
                    name: name.clone(),
                    process,
                    why: why.to_owned(),
                };
                self.answer(link, wait.ask, Err(error));
            }
        }
        self.dismiss_spares();
    }

    /// Fails the requests of this epoch's processes for values that nobody may set any more.
    fn fail_gets(&mut self, process: ProcessId, why: &str) {
        let is_of_epoch =
            |get: &Get| self.links.get(&get.link).is_some_and(|c| c.process.is_some());
        let (failed, waiting) = std::mem::take(&mut self.gets).into_iter().partition(is_of_epoch);
        self.gets = waiting;
        let failed: Vec<Get> = failed;
        for Get { link, key, wait } in failed {
            let error = RendezvousError::NeverSet { key, process, why: why.to_owned() };
            self.answer(link, wait.ask, Err(error));
        }
    }

    /// Returns the first process of a running epoch that was lost, or that has left it as failed,
    /// and the reason.
    fn lost(&self) -> Option<(ProcessId, String)> {
        if self.phase != Phase::Running {
            return None;
        }
        processes(self.seats.len()).zip(&self.seats).find_map(|(process, seat)| {
            let end = seat.as_ref()?.ended.as_ref()?;
            (end.how != HowEnded::Left).then(|| (process, end.why.clone()))
        })
    }

    /// Tells the spares that the job has ended, if it has: no process is left, and none returns.
    fn dismiss_spares(&mut self) {
        if self.phase == Phase::Running && self.seats.iter().all(is_gone) {
            let has_left =
                |seat: &Seat| seat.ended.as_ref().is_some_and(|e| e.how == HowEnded::Left);
            let result = match self.seats.iter().flatten().any(has_left) {
                true => Ok(Answer::Done),
                false => Err(RendezvousError::AllLost { processes: self.seats.len() }),
            };
            for Seat { link, waits, .. } in std::mem::take(&mut self.spares) {
                self.answer(link, waits.ask, result.clone());
            }
        }
    }

    /// Counts processes as died that should have returned by now, if no other one can begin the
    /// next epoch.
    fn stop_waiting_for_returns(&mut self, now: Instant) {
        let is_due = self.returns_by.is_some_and(|until| now >= until);
        if !is_due {
            return;
        }
        self.returns_by = None;
        if self.phase != Phase::Running || self.present() > 0 {
            return;
        }
        for end in self.seats.iter_mut().flatten().filter_map(|seat| seat.ended.as_mut()) {
            if end.how == HowEnded::Returns {
                end.how = HowEnded::Died;
            }
        }
        self.dismiss_spares();
    }

    /// Fails a job that can never be complete, and answers all processes that joined with `error`.
    fn fail(&mut self, error: RendezvousError) {
        let spares = std::mem::take(&mut self.spares);
        let told: Vec<_> = self
            .seats
            .iter()
            .flatten()
            .chain(&spares)
            .map(|seat| (seat.link, seat.waits.ask))
            .collect();
        for (link, ask) in told {
            self.answer(link, ask, Err(error.clone()));
        }
        for client in self.links.values_mut() {
            client.process = None;
        }
        self.seats.fill_with(|| None);
        self.phase = Phase::Failed(error);
    }

    fn missing(&self, peer_timeout: Duration) -> RendezvousError {
        let missing =
            processes(self.seats.len()).zip(&self.seats).filter(|(_, seat)| seat.is_none());
        RendezvousError::Missing {
            missing: missing.map(|(process, _)| process).collect(),
            processes: self.seats.len(),
            peer_timeout,
        }
    }

    fn answer(&mut self, link: Link, ask: u64, result: Result<Answer, RendezvousError>) {
        self.actions.push(Action::Say(link, Reply::Answer { ask, result }));
    }
}

/// True if this is the process that has the place, by another connection.
fn is_same(held: &Seat, member: &Member) -> bool {
    (&held.member.host, held.member.pid) == (&member.host, member.pid)
}

/// True if the process of a place is gone and does not return.
fn is_gone(seat: &Option<Seat>) -> bool {
    let end = seat.as_ref().and_then(|seat| seat.ended.as_ref());
    end.is_some_and(|end| end.how != HowEnded::Returns)
}

/// Interval of pings to clients: several within `peer_timeout`, and at least one a second.
pub(super) fn ping_interval(peer_timeout: Duration) -> Duration {
    (peer_timeout / 4).clamp(Duration::from_millis(10), Duration::from_secs(1))
}

fn processes(count: usize) -> impl Iterator<Item = ProcessId> {
    (0..count).map(|process| ProcessId(process as u32))
}

/// Returns a status that fits a message.
fn passed_on(status: ProcessStatus) -> ProcessStatus {
    let (bytes, most) = match &status {
        Ok(status) => (status.len(), MAX_VALUE_BYTES),
        Err(why) => (why.len(), MAX_KEY_BYTES),
    };
    if bytes <= most { status } else { Err(format!("its status has {bytes} bytes")) }
}

fn check_name(what: &str, name: &str) -> Result<(), RendezvousError> {
    if name.len() <= MAX_KEY_BYTES {
        return Ok(());
    }
    Err(RendezvousError::TooLong { what: what.to_owned(), bytes: name.len(), limit: MAX_KEY_BYTES })
}

#[cfg(test)]
mod epochs;
#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
