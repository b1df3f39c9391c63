//! The state of a job, with its members and pending requests: the server without its sockets.
//!
//! Pure: it is given the clients' requests and the time, and answers with [`Action`]s.
//!
//! - `places`: which process has which place, over the epochs of the job.
//! - `looks`: looks of observers.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use mpmd_base::block::Instant;

use self::looks::{LOOK_WITHIN, Look, passed_on};
use self::places::{Former, HowEnded, Known, Seat, Wish};
use super::protocol::{Answer, MAX_KEY_BYTES, MAX_VALUE_BYTES, Reply, Request};
use super::{RendezvousError, Report};
pub(super) use crate::deadline::after;
pub(super) use crate::strangers::Link;
use mpmd_proto::wire::ProcessId;

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
    /// When the epoch that gathers began to do so.
    gathers_since: Instant,
    gather_until: Instant,
    /// The time by which processes that have left an epoch return. Set at each loss.
    returns_by: Option<Instant>,
    /// The epoch that gathers, runs or has failed.
    epoch: u64,
    seats: Vec<Option<Seat>>,
    /// By process, while a later epoch gathers: the holder of the place in the epoch before.
    before: Vec<Option<Former>>,
    /// By process, while an epoch gathers: true if a spare may have the process's place.
    vacant: Vec<bool>,
    /// Clients that wait for a place, in order of arrival.
    spares: Vec<Seat>,
    /// By key: the processes that are here, and those that had a place in an epoch that has begun.
    known: BTreeMap<u128, Known>,
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

struct Client {
    /// Its place in the newest epoch that it has joined.
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

impl Job {
    /// Creates the job of the run with this identity, which differs from that of every other run.
    pub(super) fn new(processes: usize, peer_timeout: Duration, run: u128, now: Instant) -> Self {
        Self {
            run,
            peer_timeout,
            ping: ping_interval(peer_timeout),
            phase: Phase::Gathering,
            gathers_since: now,
            gather_until: after(now, peer_timeout),
            returns_by: None,
            epoch: 1,
            seats: (0..processes).map(|_| None).collect(),
            before: (0..processes).map(|_| None).collect(),
            vacant: vec![false; processes],
            spares: Vec::new(),
            known: BTreeMap::new(),
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

    /// The failures that processes of the job have reported in this epoch, as (process, report), in
    /// order of arrival.
    pub(super) fn reports(&self) -> &[(ProcessId, Report)] {
        &self.reports
    }

    /// Takes the actions that the server must carry out, added since the last call.
    pub(super) fn actions(&mut self) -> Vec<Action> {
        std::mem::take(&mut self.actions)
    }

    /// Adds a client that has proved to know the token. It must join within the peer timeout.
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
        match request {
            // The connection answers clock requests itself, without the delay of this queue.
            Request::Pong | Request::Clock { .. } => {}
            Request::Join {
                ask,
                process,
                processes,
                epoch,
                identity,
                waits,
                peer_timeout,
                member,
            } => {
                let wait = Wait { ask, until: after(now, peer_timeout), peer_timeout };
                let wish = Wish { process, processes: processes as usize, epoch, identity, waits };
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
                    (Ok(()), None) => match self.lost_for(link) {
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
                if let Err(refusal) = self.barrier(link, name, wait) {
                    self.answer(link, ask, Err(refusal));
                }
            }
            Request::Report { ask, report } => {
                let result = self.report(link, report);
                self.answer(link, ask, result);
            }
            Request::Look { ask } => {
                if let Err(refusal) = self.look(link, ask, now) {
                    self.answer(link, ask, Err(refusal));
                }
            }
            Request::Status { look, status } => {
                if let Some(process) = self.place_of(link) {
                    let status = passed_on(status);
                    self.seen(process, &status, |one| one.number == look);
                }
            }
            Request::Leave { ask, returns } => {
                self.answer(link, ask, Ok(Answer::Done));
                self.actions.push(Action::Close(link));
                if let Some(process) = self.forget(link) {
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
            self.gives_up(link);
            self.closed(link, &why);
        }
    }

    /// Extends all deadlines by the time in which the server itself was stopped (a suspended
    /// machine, Ctrl-Z). Most likely its clients were stopped too, so none of them is silent or
    /// late.
    fn put_off(&mut self, stopped: Duration, now: Instant) {
        self.gather_until = after(self.gather_until, stopped);
        self.returns_by = self.returns_by.map(|until| after(until, stopped));
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
                    && let Some(seat) = self.seats[process.index()].take()
                {
                    self.is_away(seat.key);
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

    fn barrier(&mut self, link: Link, name: String, wait: Wait) -> Result<(), RendezvousError> {
        check_name("the name of a barrier", &name)?;
        let (Some(process), Phase::Running) = (self.place_of(link), &self.phase) else {
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

    fn report(&mut self, link: Link, report: Report) -> Result<Answer, RendezvousError> {
        let Some(process) = self.place_of(link) else {
            return Err(RendezvousError::OutOfTurn {
                what: "reporting".into(),
                when: "after joining, in an epoch that goes on".into(),
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
        if let Some(at) = self.spares.iter().position(|spare| spare.link == link) {
            let spare = self.spares.remove(at);
            self.is_away(spare.key);
        }
        self.links.remove(&link)?.process
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

    /// Returns the process because of which a value will never come for the client of `link`, and
    /// the reason: one of its epoch is lost, or its epoch has ended.
    fn lost_for(&self, link: Link) -> Option<(ProcessId, String)> {
        let process = self.links.get(&link)?.process?;
        match self.place_of(link) {
            Some(_) => self.lost(),
            None => Some((process, "its epoch of the job has ended".to_owned())),
        }
    }

    fn answer(&mut self, link: Link, ask: u64, result: Result<Answer, RendezvousError>) {
        self.actions.push(Action::Say(link, Reply::Answer { ask, result }));
    }
}

/// Interval of pings to clients: several within `peer_timeout`, and at least one a second.
pub(super) fn ping_interval(peer_timeout: Duration) -> Duration {
    (peer_timeout / 4).clamp(Duration::from_millis(10), Duration::from_secs(1))
}

fn processes(count: usize) -> impl Iterator<Item = ProcessId> {
    (0..count).map(|process| ProcessId(process as u32))
}

fn check_name(what: &str, name: &str) -> Result<(), RendezvousError> {
    if name.len() <= MAX_KEY_BYTES {
        return Ok(());
    }
    Err(RendezvousError::TooLong { what: what.to_owned(), bytes: name.len(), limit: MAX_KEY_BYTES })
}

mod looks;
mod places;

#[cfg(test)]
mod epochs;
#[cfg(test)]
mod fuzz;
#[cfg(test)]
mod tests;
