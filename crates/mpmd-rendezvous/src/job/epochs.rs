//! The epochs of a job, and its places in them.
//!
//! A job begins in epoch 1, in which a process has the place of its number. After the loss of a
//! process the others may return: the first of them to join epoch `n + 1` begins it. Nobody else
//! can. A process is known by the mark of its [`Identity`], and gets the place that it had.
//! The places of processes that do not return go to spares, which wait for one. A process that was
//! given up has no place in a later epoch, unless its old one is still free. A process that still
//! runs code of its own is awaited as long as its old connection stands. Where the program allows
//! it, a later epoch has more or fewer places: see `sizes`.

use std::collections::BTreeMap;
use std::time::Duration;

use mpmd_base::block::Instant;

use self::leavers::Leavers;
use self::places::{FormerHolder, KnownProcess, Seat, SeatEnd};
use self::returners::Returners;
use self::sizes::check_sizes;
use super::super::facts::MAX_FACT_BYTES;
use super::super::protocol::{RequestAnswer, ServerReply};
use super::super::{Fact, FailureReport, Identity, JobMember, ProcessPart, RendezvousError};
use super::actions::{JobActions, RequestWait, check_name, processes};
use super::looks::{StatusAbsence, StatusSource};
use mpmd_base::deadline::after;
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

pub(crate) use self::places::EndedProcess;
pub(super) use self::places::{EndKind, JobEntry, JoinWish};

/// The phase of the current epoch.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum EpochPhase {
    Gathering,
    Running,
    /// The processes can never all join, for this reason.
    Failed(RendezvousError),
}

/// Time from the first process that joins a job until those that have not joined are named.
const LATE: Duration = Duration::from_secs(10);

/// The processes of a job and their places (process numbers) in its epochs.
pub(crate) struct Epochs {
    /// The identity of this run of the job.
    run: u128,
    peer_timeout: Duration,
    /// Number of processes with which the job was started.
    launched: usize,
    /// Number of processes that the server's owner may still start for free places.
    owner_starts: usize,
    /// The processes that ended before the first epoch began and whose places are free for spares,
    /// with the way in which they ended.
    ended_early: Vec<(ProcessId, String)>,
    /// A process that ended after the first epoch had begun, with the way in which it ended, if the
    /// owner starts no other in its place.
    not_replaced: Option<(ProcessId, String)>,
    phase: EpochPhase,
    /// True once a process of the running epoch has left because the job has ended well.
    has_ended_well: bool,
    /// True once the processes of the running epoch were told that it is over.
    is_told_over: bool,
    /// Time at which the current epoch began to wait for its processes.
    gathers_since: Instant,
    gather_until: Instant,
    /// Time at which the first process joined the first epoch. `None` before, and once the late
    /// processes were named to it.
    first_joined: Option<Instant>,
    /// The deadline for processes that have left a failed epoch to join the next one. Set at each
    /// loss.
    returns_by: Option<Instant>,
    /// The current epoch, which waits for its processes, runs or has failed.
    epoch: u64,
    seats: Vec<Option<Seat>>,
    /// The holder of each place in the previous epoch, by process, while a later epoch waits for
    /// its processes.
    before: Vec<Option<FormerHolder>>,
    /// True for each place that a spare may take, by process, while an epoch waits for its
    /// processes.
    vacant: Vec<bool>,
    /// Processes that wait for a place, in order of arrival.
    spares: Vec<Seat>,
    leavers: Leavers,
    returners: Returners,
    /// The place of each client in the newest epoch that it has joined.
    joined: BTreeMap<Link, ProcessId>,
    /// Processes that are connected or had a place in an epoch that has begun, by the key of their
    /// identity.
    known: BTreeMap<u128, KnownProcess>,
    /// The reported failures with the processes that reported them, in order of arrival. At most
    /// one per process.
    reports: Vec<(ProcessId, FailureReport)>,
    /// The program and the facts that all processes must have, and the vectors that they compute
    /// with. `None` before the first epoch.
    agreed: Option<JobMember>,
    /// Processes that waited for a place and were refused, with the reason. A process is named by
    /// the number with which it first joined.
    refused: Vec<(ProcessId, String)>,
    /// The addresses of processes that can take over the service, as of the last epoch that has
    /// begun.
    heirs: Vec<String>,
}

impl Epochs {
    pub(super) fn new(processes: usize, peer_timeout: Duration, run: u128, now: Instant) -> Self {
        Self {
            run,
            peer_timeout,
            launched: processes,
            owner_starts: 0,
            ended_early: Vec::new(),
            not_replaced: None,
            phase: EpochPhase::Gathering,
            has_ended_well: false,
            is_told_over: false,
            gathers_since: now,
            gather_until: after(now, peer_timeout),
            first_joined: None,
            returns_by: None,
            epoch: 1,
            seats: (0..processes).map(|_| None).collect(),
            before: (0..processes).map(|_| None).collect(),
            vacant: vec![false; processes],
            spares: Vec::new(),
            leavers: Leavers::default(),
            returners: Returners::default(),
            joined: BTreeMap::new(),
            known: BTreeMap::new(),
            reports: Vec::new(),
            agreed: None,
            refused: Vec::new(),
            heirs: Vec::new(),
        }
    }

    /// Returns true once all processes have joined the first epoch.
    pub(crate) fn has_begun(&self) -> bool {
        self.epoch > 1 || self.phase == EpochPhase::Running
    }

    pub(crate) fn phase(&self) -> &EpochPhase {
        &self.phase
    }

    /// Returns the failures that processes have reported in this epoch, each with the process that
    /// reported it, in order of arrival.
    pub(crate) fn reports(&self) -> &[(ProcessId, FailureReport)] {
        &self.reports
    }

    /// Returns the processes that waited for a place and were refused, with the reason. A process
    /// is named by the number with which it first joined.
    pub(crate) fn refused(&self) -> &[(ProcessId, String)] {
        &self.refused
    }

    /// Returns the number of processes that have joined and have neither left nor died.
    pub(crate) fn present(&self) -> usize {
        self.seats
            .iter()
            .flatten()
            .filter(|seat| seat.ended.is_none())
            .count()
    }

    /// Returns the number of additional processes that the job needs. It counts places whose
    /// process is gone and places that the job has lost since its start, and subtracts the waiting
    /// spares. 0 if the job is over.
    pub(crate) fn wanted(&self) -> usize {
        if self.is_over() {
            return 0;
        }

        let is_free = |process: usize| match (&self.phase, &self.seats[process]) {
            (EpochPhase::Gathering, None) => self.vacant[process],
            (
                EpochPhase::Running,
                Some(Seat {
                    ended: Some(end), ..
                }),
            ) => end.how == EndKind::Died,
            _ => false,
        };

        let free = (0..self.seats.len())
            .filter(|process| is_free(*process))
            .count();
        let gone = self.launched.saturating_sub(self.seats.len());
        (free + gone).saturating_sub(self.spares.len())
    }

    /// Returns true if all processes of the running epoch are gone and none will return.
    pub(crate) fn is_over(&self) -> bool {
        self.phase == EpochPhase::Running && self.seats.iter().all(is_gone)
    }

    /// Returns the role of each known process, with the number with which it first joined.
    pub(crate) fn parts(&self) -> Vec<(ProcessId, ProcessPart)> {
        self.known
            .values()
            .map(|known| (known.number, known.part))
            .collect()
    }

    /// Returns the number of places of the current epoch.
    pub(crate) fn places(&self) -> usize {
        self.seats.len()
    }

    /// Returns the clients that have a place in the newest epoch that they have joined.
    pub(super) fn joined(&self) -> impl Iterator<Item = Link> {
        self.joined.keys().copied()
    }

    pub(super) fn has_joined(&self, link: Link) -> bool {
        self.joined.contains_key(&link)
    }

    /// Removes a client. Returns its place, if it had joined.
    pub(super) fn forget(&mut self, link: Link, actions: &mut JobActions) -> Option<ProcessId> {
        self.forget_leaver(link);
        if let Some(at) = self.spares.iter().position(|spare| spare.link == link) {
            let spare = self.spares.remove(at);
            self.forget_if_gone(spare.key);
            self.tell_size(actions);
        }
        self.joined.remove(&link)
    }

    /// Returns the key of a client whose process has joined some epoch.
    fn key_of(&self, link: Link) -> Option<u128> {
        let seats = self.seats.iter().flatten();
        let seats = seats.map(|seat| (seat.link, seat.key));
        let former = self.before.iter().flatten();
        let former = former.map(|former| (former.link, former.key));
        seats
            .chain(former)
            .find_map(|(held, key)| (held == link).then_some(key))
    }

    /// Returns the place of a client in the current epoch.
    pub(super) fn place_of(&self, link: Link) -> Option<ProcessId> {
        let process = *self.joined.get(&link)?;
        // A connection of an earlier epoch may have a number beyond those of this one.
        let seat = self.seats.get(process.index())?.as_ref()?;
        (seat.link == link).then_some(process)
    }

    /// Returns true if the process that held a place in the previous epoch is alive and has not
    /// left that epoch. Its program is still running its own code.
    fn is_busy(&self, process: ProcessId) -> bool {
        let stands = |former: &FormerHolder| self.has_joined(former.link);
        self.seats[process.index()].is_none()
            && self.before[process.index()].as_ref().is_some_and(stands)
    }

    /// Returns for each process how to get its status. Fails if the job can never be complete.
    pub(super) fn statuses(&self) -> Result<impl Iterator<Item = StatusSource>, RendezvousError> {
        if let EpochPhase::Failed(error) = &self.phase {
            return Err(error.clone());
        }

        let seats = processes(self.seats.len()).zip(&self.seats);
        Ok(seats.map(|(process, seat)| {
            let link = match seat {
                None if self.is_busy(process) => Err(StatusAbsence::Busy),
                None => Err(StatusAbsence::NotJoined),
                Some(Seat {
                    ended: Some(end), ..
                }) => Err(StatusAbsence::Ended(end.why.clone())),
                Some(_) if self.phase == EpochPhase::Gathering => Err(StatusAbsence::Waits),
                Some(seat) => Ok(seat.link),
            };
            StatusSource { process, link }
        }))
    }

    /// Returns the place of a client that arrives at a barrier.
    ///
    /// # Errors
    ///
    /// If the client's epoch is not running, or one of its processes has ended.
    pub(super) fn place_at_barrier(
        &self,
        link: Link,
        name: &str,
    ) -> Result<ProcessId, RendezvousError> {
        let place = self
            .place_of(link)
            .filter(|_| self.phase == EpochPhase::Running);
        let Some(place) = place else {
            return Err(RendezvousError::OutOfTurn {
                what: format!("barrier {name:?}"),
                when: "once the job is complete".into(),
            });
        };

        let mut seats = processes(self.seats.len()).zip(&self.seats);
        let ended =
            seats.find_map(|(process, seat)| Some((process, seat.as_ref()?.ended.as_ref()?)));
        match ended {
            Some((process, SeatEnd { why, .. })) => Err(RendezvousError::BarrierBroken {
                name: name.to_owned(),
                process,
                why: why.clone(),
            }),
            None => Ok(place),
        }
    }

    /// Checks that a process that wants to join belongs to this job.
    pub(super) fn check(&self, wish: &JoinWish, member: &JobMember) -> Result<(), RendezvousError> {
        let JoinWish {
            process,
            processes: believes,
            identity: Identity { run, .. },
            ..
        } = *wish;

        // Error messages contain these texts, up to two of them.
        check_name("the name of a host", &member.host)?;
        check_name("the fingerprint of a program", &member.program)?;
        check_facts(&member.facts)?;
        check_sizes(&member.sizes)?;
        if let Some(heir) = &member.heir {
            check_name("the address of a process", &heir.address)?;
        }

        if believes != self.launched {
            return Err(RendezvousError::Count {
                process,
                believes,
                job: self.launched,
            });
        }
        if run.is_some_and(|run| run != self.run) {
            return Err(RendezvousError::OtherRun { process });
        }
        Ok(())
    }

    /// Records that the job has ended well, as reported by a client of the newest epoch that has
    /// begun. If a process that lost its connection at the end has begun another epoch, that epoch
    /// is over too.
    pub(super) fn ends_well(&mut self, link: Link, now: Instant, actions: &mut JobActions) {
        if self.phase == EpochPhase::Running && self.place_of(link).is_some() {
            self.has_ended_well = true;
            return;
        }

        let mut before = processes(self.before.len()).zip(&self.before);
        let former = before.find_map(|(place, former)| {
            let former = former.as_ref().filter(|former| former.link == link)?;
            Some((place, former.key))
        });
        let Some((place, key)) = former else { return };
        self.set_part(key, ProcessPart::Left(place));
        if self.phase == EpochPhase::Gathering {
            self.has_ended_well = true;
            self.phase = EpochPhase::Running;
            let seats = std::mem::take(&mut self.seats);
            self.spares.extend(seats.into_iter().flatten());
            self.spares
                .iter()
                .for_each(|spare| _ = self.joined.remove(&spare.link));
            self.dismiss_spares(now, actions);
        }
    }

    /// Returns the place of a process that begins the next epoch by joining: it must have a place
    /// in the running epoch and not have left in order. Returns `None` if the job has ended well:
    /// then a process that lost its connection at the end has no work left.
    pub(super) fn begins_next(&self, wish: &JoinWish) -> Option<ProcessId> {
        let is_next = wish.epoch == self.epoch + 1 && self.phase == EpochPhase::Running;
        if !is_next || wish.leaves || self.has_ended_well {
            return None;
        }

        let has_left = |seat: &Seat| seat.ended.as_ref().is_some_and(|e| e.how == EndKind::Left);
        let is_it = |seat: &Seat| seat.key == wish.identity.key && !has_left(seat);
        let mut seats = processes(self.seats.len()).zip(&self.seats);
        let own = seats.find(|(_, seat)| seat.as_ref().is_some_and(is_it));
        own.map(|(process, _)| process)
    }

    /// Tells the remaining processes of the running epoch, once, that it is over, since process
    /// `by` has left it in order to join the next one. They wait for each other, and perhaps for
    /// `by`, which need not have connected to them. So they cannot rely on the news from their
    /// peers.
    pub(super) fn tell_over(&mut self, by: ProcessId, actions: &mut JobActions) {
        if self.phase != EpochPhase::Running || self.is_told_over {
            return;
        }
        self.is_told_over = true;
        for (process, seat) in processes(self.seats.len()).zip(&self.seats) {
            if let Some(seat) = seat
                && seat.ended.is_none()
                && process != by
            {
                actions.say(seat.link, ServerReply::EpochOver { by });
            }
        }
    }

    /// Begins the next epoch. Every place is free again, and reserved for the process that had it.
    pub(super) fn begin_next(&mut self, now: Instant) {
        self.epoch += 1;
        self.phase = EpochPhase::Gathering;
        self.returns_by = None;
        self.gathers_since = now;
        self.gather_until = after(now, self.peer_timeout);
        self.vacant = self.seats.iter().map(is_gone).collect();

        let former = |seat: Seat| FormerHolder {
            key: seat.key,
            link: seat.link,
        };
        self.before = self
            .seats
            .iter_mut()
            .map(|seat| seat.take().map(former))
            .collect();

        // A process that has left with a failure has failed the job, however late that is seen.
        let has_left = |place| {
            self.known
                .values()
                .any(|known| known.part == ProcessPart::Left(place))
        };
        self.reports.retain(|(by, _)| has_left(*by));

        for known in self.known.values_mut() {
            if let ProcessPart::Left(place) = known.part
                && self.reports.iter().all(|(by, _)| *by != place)
            {
                known.part = ProcessPart::Out;
            }
        }
    }

    /// Handles deadlines that have passed.
    pub(super) fn tick(&mut self, now: Instant, actions: &mut JobActions) {
        if self.phase == EpochPhase::Gathering && now >= self.gather_until {
            self.end_gathering(now, actions);
        }
        self.stop_waiting_for_returns(now, actions);
        self.expire(now, actions);
        self.tell_late(now, actions);
    }

    /// Returns the time at which the late processes of the first epoch are named.
    fn tell_late_at(&self) -> Option<Instant> {
        let joined = self.first_joined?;
        (self.epoch == 1).then(|| after(joined, LATE))
    }

    /// Names the processes that have not joined the first epoch in time, once, to the first process
    /// that has.
    fn tell_late(&mut self, now: Instant, actions: &mut JobActions) {
        let is_due = self.tell_late_at().is_some_and(|at| now >= at);
        if self.phase != EpochPhase::Gathering || !is_due {
            return;
        }

        let joined = self.first_joined.take().unwrap_or(now);
        let seats = || processes(self.seats.len()).zip(&self.seats);
        let late: Vec<_> = seats()
            .filter(|(_, seat)| seat.is_none())
            .map(|(process, _)| process)
            .collect();
        if let Some(seat) = self.seats.iter().flatten().next()
            && !late.is_empty()
        {
            let late = ServerReply::Busy {
                epoch: self.epoch,
                processes: late,
                waited: now.saturating_duration_since(joined),
            };
            actions.say(seat.link, late);
        }
    }

    /// Returns the times at which [`tick`](Self::tick) has work to do.
    pub(super) fn due(&self) -> impl Iterator<Item = Instant> {
        let joins = self.seats.iter().flatten().map(|seat| seat.waits.until);
        let joins = joins.chain([self.gather_until]).chain(self.tell_late_at());
        joins
            .filter(|_| self.phase == EpochPhase::Gathering)
            .chain(self.returns_by)
    }

    pub(super) fn put_off(&mut self, stopped: Duration) {
        self.gather_until = after(self.gather_until, stopped);
        self.first_joined = self.first_joined.map(|at| after(at, stopped));
        self.returns_by = self.returns_by.map(|until| after(until, stopped));
        self.seats
            .iter_mut()
            .flatten()
            .for_each(|seat| seat.waits.put_off(stopped));
    }

    /// Handles the deadline of an epoch that waits for its processes. In a later epoch, or in the
    /// first if there are spares, late processes lose their places unless they are busy. The
    /// processes that replace them get the full time again.
    fn end_gathering(&mut self, now: Instant, actions: &mut JobActions) {
        if self.leavers.awaited > 0 {
            self.leavers.awaited = 0;
            self.gather_until = after(now, self.peer_timeout);
            return self.place_spares(actions);
        }

        let goes_on = self.epoch > 1 || !self.spares.is_empty();
        let is_awaited = |process: &ProcessId| {
            self.seats[process.index()].is_none() && !self.vacant[process.index()]
        };
        let awaited = processes(self.seats.len()).filter(|process| goes_on && is_awaited(process));
        let (busy, late) = awaited.partition::<Vec<_>, _>(|process| self.is_busy(*process));

        let mut places = self.seats.iter().zip(&self.vacant);
        let has_free = places.any(|(seat, vacant)| seat.is_none() && *vacant);
        // It may go on without the free places, once the busy processes come.
        let here = self.seats.iter().flatten().count();
        let has_free = has_free && !self.may_have(here + busy.len());
        if late.is_empty() && (busy.is_empty() || has_free) {
            // No process has come that the server's owner may have started.
            if self.shrinks() {
                return self.begin(actions);
            }
            // Nor has one that should replace a process that leaves.
            if !self.leavers.waiting.is_empty() && !self.leavers.are_needed {
                self.leavers.are_needed = true;
                self.gather_until = after(now, self.peer_timeout);
                return self.place_spares(actions);
            }
            let missing = self.missing(self.peer_timeout);
            let error = match self.refused.last() {
                Some((_, refused)) if self.epoch > 1 => RendezvousError::NoReplacement {
                    missing: missing.to_string(),
                    refused: refused.clone(),
                },
                _ => missing,
            };
            return self.fail(error, actions);
        }

        self.gather_until = after(now, self.peer_timeout);
        self.leavers.are_needed |= !late.is_empty();
        for process in late {
            self.vacant[process.index()] = true;
            if let Some(former) = &self.before[process.index()] {
                self.set_part(former.key, ProcessPart::Out);
            }
        }

        if !busy.is_empty()
            && let Some(seat) = self.seats.iter().flatten().next()
        {
            let waited = now.saturating_duration_since(self.gathers_since);
            let busy = ServerReply::Busy {
                epoch: self.epoch,
                processes: busy,
                waited,
            };
            actions.say(seat.link, busy);
        }

        self.place_spares(actions);
    }

    fn expire(&mut self, now: Instant, actions: &mut JobActions) {
        if self.phase != EpochPhase::Gathering {
            return;
        }

        let late: Vec<(Link, RequestWait)> = self
            .seats
            .iter()
            .flatten()
            .filter(|seat| now >= seat.waits.until)
            .map(|seat| (seat.link, seat.waits))
            .collect();

        // Computed before any of them is removed: a process that times out at the same moment
        // is not missing to the others.
        let errors: Vec<_> = late
            .iter()
            .map(|(_, wait)| self.missing(wait.peer_timeout))
            .collect();

        for ((link, wait), error) in late.into_iter().zip(errors) {
            actions.answer(link, wait.ask, Err(error));
            if let Some(process) = self.joined.remove(&link)
                && let Some(seat) = self.seats[process.index()].take()
            {
                self.forget_if_gone(seat.key);
            }
        }
    }

    /// Marks a process as ended. Returns true if its epoch is running. Before an epoch is complete,
    /// only frees the process's place. `link` is the process's connection, perhaps of an earlier
    /// epoch. `now` is the time of the last tick: all deadlines are extended by a stop of the
    /// server since then.
    pub(super) fn end(
        &mut self,
        link: Link,
        process: ProcessId,
        why: &str,
        how: EndKind,
        now: Instant,
        actions: &mut JobActions,
    ) -> bool {
        // A connection of an earlier epoch may have a number beyond those of this one.
        let Some(seat) = self.seats.get_mut(process.index()) else {
            return false;
        };
        let holder = match seat {
            Some(seat) => Some(FormerHolder {
                key: seat.key,
                link: seat.link,
            }),
            None => self.before[process.index()],
        };
        let Some(FormerHolder { key, .. }) = holder.filter(|holder| holder.link == link) else {
            return false;
        };

        let has_ended = self.known.get(&key).is_some_and(|known| known.has_ended);
        let how = match how {
            EndKind::Returns if has_ended => EndKind::Died,
            how => how,
        };
        let until = after(now, self.peer_timeout);
        self.leavers.are_needed |= how == EndKind::Died;
        if self.phase != EpochPhase::Running {
            // The others do not know it yet: another process may take its number.
            *seat = None;
            if self.epoch > 1 {
                // It, or another in its place, has the time to come.
                self.gather_until = self.gather_until.max(until);
            }
            if how != EndKind::Returns {
                if how == EndKind::Left {
                    self.set_part(key, ProcessPart::Out);
                }
                self.forget_if_gone(key);
                self.vacant[process.index()] = true;
                self.place_spares(actions);
            }
            return false;
        }

        if let Some(seat) = seat {
            seat.ended = Some(SeatEnd {
                why: why.to_owned(),
                how,
            });
        }
        match how {
            EndKind::Left => self.set_part(key, ProcessPart::Left(process)),
            EndKind::Died | EndKind::Returns => self.returns_by = Some(until),
            EndKind::Leaves => {}
        }
        true
    }

    /// If the job is over, tells the spares: no process is left, and none will return. If all
    /// processes were lost, processes that are leaving may continue the job.
    pub(super) fn dismiss_spares(&mut self, now: Instant, actions: &mut JobActions) {
        if !self.is_over() {
            return;
        }

        let has_left = |seat: &Seat| seat.ended.as_ref().is_some_and(|e| e.how == EndKind::Left);
        let ends_well = self.has_ended_well || self.seats.iter().flatten().any(has_left);
        if !ends_well && self.leavers.go_on() {
            self.begin_next(now);
            return self.place_spares(actions);
        }

        let result = match ends_well {
            true => Ok(RequestAnswer::Done),
            false => Err(RendezvousError::AllLost {
                processes: self.seats.len(),
            }),
        };

        self.release_leavers(actions);
        for Seat {
            link, key, waits, ..
        } in std::mem::take(&mut self.spares)
        {
            actions.answer(link, waits.ask, result.clone());
            self.forget_if_gone(key);
        }
    }

    /// Records that the process at a place has ended in the way `why`, and that the owner starts no
    /// other in its place. Fails a job that was never complete. A running epoch goes on, but those
    /// that leave it begin no other without this place.
    pub(super) fn is_not_replaced(
        &mut self,
        process: ProcessId,
        why: String,
        actions: &mut JobActions,
    ) {
        if self.epoch == 1 && self.phase == EpochPhase::Gathering {
            self.fail(RendezvousError::NeverJoins { process, why }, actions);
            return;
        }
        self.not_replaced = Some((process, why));
        self.place_spares(actions);
    }

    /// Frees the place of a process that has ended while no connection of it could tell so: before
    /// the first epoch began, or between two epochs. A spare takes the place. If none can come to
    /// the first epoch, the job fails.
    pub(super) fn place_is_free(
        &mut self,
        ended: EndedProcess,
        now: Instant,
        actions: &mut JobActions,
    ) {
        let EndedProcess { number, place, why } = ended;
        if self.epoch == 1 && self.phase == EpochPhase::Gathering {
            if let Some(vacant) = self.vacant.get_mut(place.index()) {
                *vacant = true;
                self.ended_early.push((place, why));
                self.place_spares(actions);
            }
            return;
        }

        let own = |known: &&mut KnownProcess| known.number == number;
        let Some((key, known)) = self.known.iter_mut().find(|(_, known)| own(known)) else {
            return;
        };
        known.has_ended = true;
        let key = *key;
        self.returns_no_more(key, now, actions);
    }

    /// Fails an epoch that waits for its processes if one that has ended leaves a place free and no
    /// spare can come. Does nothing before a process has joined: the program may not use mpmd. The
    /// waiting spares have their places already.
    fn fail_if_place_stays_free(&mut self, actions: &mut JobActions) {
        let is_waited_for = self.seats.iter().any(Option::is_some);
        if self.owner_starts > 0 || !is_waited_for {
            return;
        }
        let is_free = |(process, _): &&(ProcessId, String)| {
            self.seats.get(process.index()).is_some_and(Option::is_none)
        };
        let error = match self.epoch {
            1 => {
                let ended = self.ended_early.iter().find(is_free).cloned();
                ended.map(|(process, why)| RendezvousError::NeverJoins { process, why })
            }
            _ => {
                let ended = self.not_replaced.as_ref().filter(is_free).cloned();
                ended.map(|(process, why)| RendezvousError::NotReplaced { process, why })
            }
        };
        if let Some(error) = error {
            self.fail(error, actions);
        }
    }

    /// Fails a job that can never be complete, and answers all processes that have joined with
    /// `error`.
    fn fail(&mut self, error: RendezvousError, actions: &mut JobActions) {
        let spares = std::mem::take(&mut self.spares);
        let leavers = self.leavers.take();

        let told: Vec<_> = self
            .seats
            .iter()
            .flatten()
            .chain(&spares)
            .chain(&leavers)
            .map(|seat| (seat.link, seat.waits.ask))
            .collect();
        for (link, ask) in told {
            actions.answer(link, ask, Err(error.clone()));
        }

        self.joined.clear();
        let seats = self.seats.iter_mut().filter_map(Option::take);
        let gone: Vec<_> = seats
            .chain(spares)
            .chain(leavers)
            .map(|seat| seat.key)
            .collect();
        gone.into_iter().for_each(|key| self.forget_if_gone(key));

        self.phase = EpochPhase::Failed(error);
    }

    fn missing(&self, peer_timeout: Duration) -> RendezvousError {
        let missing = processes(self.seats.len())
            .zip(&self.seats)
            .filter(|(_, seat)| seat.is_none());
        RendezvousError::Missing {
            missing: missing.map(|(process, _)| process).collect(),
            processes: self.seats.len(),
            peer_timeout,
        }
    }

    /// Returns the first process of the running epoch that died or left the epoch as failed, with
    /// the reason.
    fn lost(&self) -> Option<(ProcessId, String)> {
        if self.phase != EpochPhase::Running {
            return None;
        }
        processes(self.seats.len())
            .zip(&self.seats)
            .find_map(|(process, seat)| {
                let end = seat.as_ref()?.ended.as_ref()?;
                let is_lost = !matches!(end.how, EndKind::Left | EndKind::Leaves);
                is_lost.then(|| (process, end.why.clone()))
            })
    }

    /// Returns the process, with the reason, because of which a value will never be set for the
    /// client of `link`. That process was lost, or the client's epoch has ended.
    pub(super) fn lost_for(&self, link: Link) -> Option<(ProcessId, String)> {
        let process = *self.joined.get(&link)?;
        match self.place_of(link) {
            Some(_) => self.lost(),
            None => Some((process, "its epoch of the job has ended".to_owned())),
        }
    }

    /// Records the failure that a process reports. Only the first report of a process counts.
    pub(super) fn report(
        &mut self,
        link: Link,
        report: FailureReport,
    ) -> Result<RequestAnswer, RendezvousError> {
        let Some(process) = self.place_of(link) else {
            return Err(RendezvousError::OutOfTurn {
                what: "reporting".into(),
                when: "after joining, in an epoch that goes on".into(),
            });
        };
        if self.reports.iter().all(|(before, _)| *before != process) {
            self.reports.push((process, report));
        }
        Ok(RequestAnswer::Done)
    }
}

/// Checks the total length of a process's facts, because error messages contain some of them.
fn check_facts(facts: &[Fact]) -> Result<(), RendezvousError> {
    let bytes = |fact: &Fact| {
        fact.name.len() + fact.value.as_ref().map_or(0, String::len) + fact.note.len()
    };
    match facts.iter().map(bytes).sum::<usize>() {
        bytes if bytes > MAX_FACT_BYTES => {
            let what = "the list of options and files of a program".to_owned();
            Err(RendezvousError::TooLong {
                what,
                bytes,
                limit: MAX_FACT_BYTES,
            })
        }
        _ => Ok(()),
    }
}

/// Returns true if a place's process is gone and will not return.
fn is_gone(seat: &Option<Seat>) -> bool {
    let end = seat.as_ref().and_then(|seat| seat.ended.as_ref());
    end.is_some_and(|end| end.how != EndKind::Returns)
}

mod leavers;
mod places;
mod resumed;
mod returners;
mod sizes;

#[cfg(test)]
mod tests;
