//! The places of a job and their processes, over its epochs.
//!
//! A job begins in epoch 1, in which a process has the place of its number. After the loss of a
//! process the others may return: the first of them to join epoch `n + 1` begins it. Nobody else
//! can. A process is known by the secret key of its [`Identity`], and gets the place that it had.
//! The places of processes that do not return go to spares, which wait for one. A process that was
//! given up has no place in a later epoch, unless its old one is still free. A process that still
//! runs code of its own is awaited as long as its old connection stands.

use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::Instant;

use super::super::protocol::{Answer, Reply};
use super::super::{Identity, Member, Part, RendezvousError};
use super::{Action, Arrival, Job, Link, Phase, Wait, after, check_name, processes};
use mpmd_proto::wire::ProcessId;

/// A process that has joined.
pub(super) struct Seat {
    pub(super) link: Link,
    pub(super) key: u128,
    pub(super) member: Member,
    pub(super) waits: Wait,
    /// `None` while the process is in the job.
    pub(super) ended: Option<End>,
}

/// The end of a process's part in an epoch.
pub(super) struct End {
    pub(super) why: String,
    pub(super) how: HowEnded,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum HowEnded {
    Died,
    /// It has left in order.
    Left,
    /// It has left, to join the next epoch.
    Returns,
}

/// The holder of a place in the epoch before the one that gathers.
pub(super) struct Former {
    key: u128,
    link: Link,
}

/// A process over the epochs of the job.
pub(super) struct Known {
    /// The process number with which it joined first.
    number: ProcessId,
    part: Part,
    /// True if it had a place in an epoch that has begun, so that it may have copies of its state.
    has_been: bool,
}

/// A client's wish to join a job.
pub(super) struct Wish {
    pub(super) process: ProcessId,
    pub(super) processes: usize,
    pub(super) epoch: u64,
    pub(super) identity: Identity,
    pub(super) waits: bool,
}

impl Job {
    /// Number of processes that joined and have neither left nor ended.
    pub(in crate::rendezvous) fn present(&self) -> usize {
        self.seats.iter().flatten().filter(|seat| seat.ended.is_none()).count()
    }

    /// Returns the number of places that need a new process: places of processes that are gone,
    /// less the number of waiting spares. 0 if the job is over.
    pub(in crate::rendezvous) fn wanted(&self) -> usize {
        if self.is_over() {
            return 0;
        }
        let is_free = |process: usize| match (&self.phase, &self.seats[process]) {
            (Phase::Gathering, None) => self.vacant[process],
            (Phase::Running, Some(Seat { ended: Some(end), .. })) => end.how == HowEnded::Died,
            _ => false,
        };
        let free = (0..self.seats.len()).filter(|process| is_free(*process)).count();
        free.saturating_sub(self.spares.len())
    }

    /// True if all processes of an epoch are gone and none returns.
    pub(in crate::rendezvous) fn is_over(&self) -> bool {
        self.phase == Phase::Running && self.seats.iter().all(is_gone)
    }

    /// Returns the part of each known process, with the number with which it joined first.
    pub(in crate::rendezvous) fn parts(&self) -> Vec<(ProcessId, Part)> {
        self.known.values().map(|known| (known.number, known.part)).collect()
    }

    /// Returns the place of a client in the current epoch.
    pub(super) fn place_of(&self, link: Link) -> Option<ProcessId> {
        let process = self.links.get(&link)?.process?;
        let seat = self.seats[process.index()].as_ref()?;
        (seat.link == link).then_some(process)
    }

    /// True if the holder of a place in the last epoch has not left that one, but is alive: its
    /// program runs code of its own.
    pub(super) fn is_busy(&self, process: ProcessId) -> bool {
        let stands = |former: &Former| self.links.contains_key(&former.link);
        self.seats[process.index()].is_none()
            && self.before[process.index()].as_ref().is_some_and(stands)
    }

    /// Handles the end of the time in which an epoch should have gathered. Processes that have not
    /// come to a later epoch, or to the first if there are spares, lose their places, unless they
    /// are busy. New processes get the time once more.
    pub(super) fn is_late(&mut self, now: Instant) {
        let goes_on = self.epoch > 1 || !self.spares.is_empty();
        let is_awaited = |process: &ProcessId| {
            self.seats[process.index()].is_none() && !self.vacant[process.index()]
        };
        let awaited = processes(self.seats.len()).filter(|process| goes_on && is_awaited(process));
        let (busy, late): (Vec<_>, Vec<_>) = awaited.partition(|process| self.is_busy(*process));
        let is_free = |(seat, vacant): (&Option<Seat>, &bool)| seat.is_none() && *vacant;
        let has_free = self.seats.iter().zip(&self.vacant).any(is_free);
        if late.is_empty() && (busy.is_empty() || has_free) {
            let error = self.missing(self.peer_timeout);
            return self.fail(error);
        }
        self.gather_until = after(now, self.peer_timeout);
        for process in late {
            self.vacant[process.index()] = true;
            if let Some(former) = &self.before[process.index()] {
                self.has_part(former.key, Part::Out);
            }
        }
        if let (Some(seat), false) = (self.seats.iter().flatten().next(), busy.is_empty()) {
            let waited = now.saturating_duration_since(self.gathers_since);
            let busy = Reply::Busy { epoch: self.epoch, processes: busy, waited };
            self.actions.push(Action::Say(seat.link, busy));
        }
        self.place_spares();
    }

    pub(super) fn join(
        &mut self,
        link: Link,
        wish: &Wish,
        member: Member,
        waits: Wait,
        now: Instant,
    ) -> Result<(), RendezvousError> {
        let Wish { process, processes: believes, identity: Identity { key, run }, .. } = *wish;
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
        if wish.epoch == self.epoch + 1
            && let Some(own) = self.place_in_epoch(key)
        {
            self.begin_next_epoch(own, now);
        }
        if let Phase::Failed(error) = &self.phase
            && wish.waits
        {
            return Err(error.clone());
        }
        let Some(process) = self.place_for(wish) else {
            return match wish.waits {
                true => self.wait_for_place(link, wish, member, waits, now),
                false => Err(self.refusal(process)),
            };
        };
        self.client_to_join(link)?.process = Some(process);
        if let Some(held) = &self.seats[process.index()] {
            // Its connection was cut and it tries again. The end of its first connection has not
            // been seen yet.
            let before = held.link;
            self.forget(before);
            self.actions.push(Action::Close(before));
        }
        let differs = self.differs(process, &member);
        // One that waits for a place has no time limit of its own.
        let until = if wish.waits { after(now, Duration::MAX) } else { waits.until };
        let waits = Wait { until, ..waits };
        self.knows(wish, Part::Holds(process));
        self.seats[process.index()] = Some(Seat { link, key, member, waits, ended: None });
        match differs {
            // Waiting cannot help. All processes had better hear of it now than of a missing
            // process later.
            Some(error) => self.fail(error),
            None => self.place_spares(),
        }
        Ok(())
    }

    /// Returns the place of the process with this key in the epoch that runs, unless it has left
    /// that one in order.
    fn place_in_epoch(&self, key: u128) -> Option<ProcessId> {
        let has_left = |seat: &Seat| seat.ended.as_ref().is_some_and(|e| e.how == HowEnded::Left);
        let is_it = |seat: &Seat| seat.key == key && !has_left(seat);
        let seats = processes(self.seats.len()).zip(&self.seats);
        let mut own = seats.filter(|(_, seat)| seat.as_ref().is_some_and(is_it));
        own.next().map(|(process, _)| process).filter(|_| self.phase == Phase::Running)
    }

    /// Returns the place that a process may have at once: by its number in the first epoch, and in
    /// later ones the place that it had before. `None` if there is none or another has it.
    fn place_for(&self, wish: &Wish) -> Option<ProcessId> {
        if self.phase != Phase::Gathering || wish.epoch != self.epoch {
            return None;
        }
        let key = wish.identity.key;
        let had_it = |process: &ProcessId| {
            self.before[process.index()].as_ref().is_some_and(|former| former.key == key)
        };
        let own = match self.epoch {
            1 => Some(wish.process).filter(|process| process.index() < self.seats.len()),
            _ => processes(self.seats.len()).find(had_it),
        };
        let is_free = |process: &ProcessId| {
            self.seats[process.index()].as_ref().is_none_or(|held| held.key == key)
        };
        own.filter(is_free)
    }

    /// Returns the reason why a process that does not wait has no place.
    fn refusal(&self, process: ProcessId) -> RendezvousError {
        let processes = self.seats.len();
        match (self.seats.get(process.index()), &self.phase) {
            (None, _) => RendezvousError::NoSuchProcess { process, processes },
            (Some(Some(Seat { member: Member { host, pid, .. }, ended: None, .. })), _) => {
                RendezvousError::Duplicate { process, host: host.clone(), pid: *pid }
            }
            (_, Phase::Failed(error)) => error.clone(),
            _ => RendezvousError::Complete { process, processes },
        }
    }

    /// Returns a client that has not joined yet.
    fn client_to_join(&mut self, link: Link) -> Result<&mut super::Client, RendezvousError> {
        let waits = self.spares.iter().any(|spare| spare.link == link);
        let client = self.links.get_mut(&link).filter(|client| client.process.is_none() && !waits);
        client.ok_or(RendezvousError::OutOfTurn { what: "joining".into(), when: "once".into() })
    }

    /// Begins the next epoch for the process of a place. In it every other place is free again, for
    /// the process that had it.
    fn begin_next_epoch(&mut self, first: ProcessId, now: Instant) {
        self.fail_gets(first, "it has gone on to the next epoch");
        self.epoch += 1;
        self.phase = Phase::Gathering;
        self.returns_by = None;
        self.gathers_since = now;
        self.gather_until = after(now, self.peer_timeout);
        self.vacant = self.seats.iter().map(is_gone).collect();
        let former = |seat: Seat| Former { key: seat.key, link: seat.link };
        self.before = self.seats.iter_mut().map(|seat| seat.take().map(former)).collect();
        // A process that has left with a failure has failed the job, however late that is seen.
        let has_left = |place| self.known.values().any(|known| known.part == Part::Left(place));
        self.reports.retain(|(by, _)| has_left(*by));
        for known in self.known.values_mut() {
            if let Part::Left(place) = known.part
                && self.reports.iter().all(|(by, _)| *by != place)
            {
                known.part = Part::Out;
            }
        }
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
        if let Some(error) = self.differs(wish.process, &member) {
            return Err(error);
        }
        self.client_to_join(link)?.join_by = after(now, Duration::MAX);
        let waits = Wait { until: after(now, Duration::MAX), ..waits };
        self.knows(wish, Part::Waits);
        self.spares.push(Seat { link, key: wish.identity.key, member, waits, ended: None });
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
                let has_been = self.spares.iter().position(|spare| self.has_been(spare.key));
                let spare = self.spares.remove(has_been.unwrap_or(0));
                if let Some(error) = self.differs(process, &spare.member) {
                    self.answer(spare.link, spare.waits.ask, Err(error));
                    self.is_away(spare.key);
                    continue;
                }
                if let Some(client) = self.links.get_mut(&spare.link) {
                    client.process = Some(process);
                }
                self.has_part(spare.key, Part::Holds(process));
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
            seats.map(|(process, seat)| (process, seat.link, seat.key, seat.waits.ask)).collect();
        for (process, link, key, ask) in told {
            if let Some(known) = self.known.get_mut(&key) {
                known.has_been = true;
            }
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

    /// Marks a process as ended and fails all pending barriers. If it died, tells the others.
    /// Before the job is complete, only frees the process's number. `link` is the process's
    /// connection: it may be of an earlier epoch.
    pub(super) fn end(&mut self, link: Link, process: ProcessId, why: &str, how: HowEnded) {
        let seat = &mut self.seats[process.index()];
        let holder = match seat {
            Some(seat) => Some((seat.key, seat.link)),
            None => self.before[process.index()].as_ref().map(|former| (former.key, former.link)),
        };
        let Some((key, _)) = holder.filter(|(_, held)| *held == link) else { return };
        if self.phase != Phase::Running {
            // The others do not know it yet: another process may take its number.
            *seat = None;
            if self.epoch > 1 {
                // It, or another in its place, has the time to come.
                let until = after(self.ticked, self.peer_timeout);
                self.gather_until = self.gather_until.max(until);
            }
            if how != HowEnded::Returns {
                self.is_away(key);
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
        if how == HowEnded::Left {
            self.has_part(key, Part::Left(process));
        } else {
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

    /// Tells the spares that the job has ended, if it has: no process is left, and none returns.
    fn dismiss_spares(&mut self) {
        if !self.is_over() {
            return;
        }
        let has_left = |seat: &Seat| seat.ended.as_ref().is_some_and(|e| e.how == HowEnded::Left);
        let result = match self.seats.iter().flatten().any(has_left) {
            true => Ok(Answer::Done),
            false => Err(RendezvousError::AllLost { processes: self.seats.len() }),
        };
        for Seat { link, key, waits, .. } in std::mem::take(&mut self.spares) {
            self.answer(link, waits.ask, result.clone());
            self.is_away(key);
        }
    }

    /// Counts processes as died that should have returned by now, if no other one can begin the
    /// next epoch.
    pub(super) fn stop_waiting_for_returns(&mut self, now: Instant) {
        let is_due = self.returns_by.is_some_and(|until| now >= until);
        if !is_due {
            return;
        }
        self.returns_by = None;
        if self.phase != Phase::Running || self.present() > 0 {
            return;
        }
        let mut late = Vec::new();
        for seat in self.seats.iter_mut().flatten() {
            if let Some(end) = seat.ended.as_mut().filter(|end| end.how == HowEnded::Returns) {
                end.how = HowEnded::Died;
                late.push(seat.key);
            }
        }
        late.into_iter().for_each(|key| self.has_part(key, Part::Out));
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
        let seats = self.seats.iter_mut().filter_map(Option::take);
        let gone: Vec<_> = seats.chain(spares).map(|seat| seat.key).collect();
        gone.into_iter().for_each(|key| self.is_away(key));
        self.phase = Phase::Failed(error);
    }

    pub(super) fn missing(&self, peer_timeout: Duration) -> RendezvousError {
        let missing =
            processes(self.seats.len()).zip(&self.seats).filter(|(_, seat)| seat.is_none());
        RendezvousError::Missing {
            missing: missing.map(|(process, _)| process).collect(),
            processes: self.seats.len(),
            peer_timeout,
        }
    }

    /// Notes that the process of a client is given up, which may still live.
    pub(super) fn gives_up(&mut self, link: Link) {
        let seats = self.seats.iter().flatten().map(|seat| (seat.link, seat.key));
        let former = self.before.iter().flatten().map(|former| (former.link, former.key));
        let key = seats.chain(former).find(|(held, _)| *held == link).map(|(_, key)| key);
        key.into_iter().for_each(|key| self.has_part(key, Part::Out));
    }

    /// Forgets a process that has gone, unless it had a place in an epoch that has begun.
    pub(super) fn is_away(&mut self, key: u128) {
        if self.seats.iter().flatten().chain(&self.spares).any(|seat| seat.key == key) {
            return;
        }
        match self.known.get_mut(&key) {
            Some(known) if !known.has_been => drop(self.known.remove(&key)),
            Some(known) if known.part == Part::Waits => known.part = Part::Out,
            _ => {}
        }
    }

    fn knows(&mut self, wish: &Wish, part: Part) {
        let new = Known { number: wish.process, part, has_been: false };
        self.known.entry(wish.identity.key).or_insert(new).part = part;
    }

    fn has_part(&mut self, key: u128, part: Part) {
        self.known.get_mut(&key).into_iter().for_each(|known| known.part = part);
    }

    fn has_been(&self, key: u128) -> bool {
        self.known.get(&key).is_some_and(|known| known.has_been)
    }
}

/// True if the process of a place is gone and does not return.
fn is_gone(seat: &Option<Seat>) -> bool {
    let end = seat.as_ref().and_then(|seat| seat.ended.as_ref());
    end.is_some_and(|end| end.how != HowEnded::Returns)
}
