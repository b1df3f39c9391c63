//! The places of an epoch: their owners, and the processes that wait for one.

use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::Instant;

use super::super::super::protocol::RequestAnswer;
use super::super::super::succession::in_order;
use super::super::super::{
    Difference, Identity, JobMember, ProcessPart, RendezvousError, narrowest,
};
use super::super::actions::{JobActions, RequestWait, processes};
use super::{EpochPhase, Epochs};
use mpmd_base::deadline::after;
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

/// Largest number of refusals that are stored.
const MOST_REFUSALS: usize = 256;

/// A process that has joined or waits for a place.
pub(super) struct Seat {
    pub(super) link: Link,
    pub(super) key: u128,
    pub(super) member: JobMember,
    pub(super) waits: RequestWait,
    /// The end of the process's part in the epoch; `None` while it takes part.
    pub(super) ended: Option<SeatEnd>,
}

/// The end of a process's part in an epoch, with the reason.
pub(super) struct SeatEnd {
    pub(super) why: String,
    pub(super) how: EndKind,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(in super::super) enum EndKind {
    Died,
    /// The process has left in order.
    Left,
    /// The process has left a failed epoch and will join the next one.
    Returns,
    /// The process leaves the job, and waits until its copies are no longer needed: see `leavers`.
    Leaves,
}

/// The process that held a place in the epoch before the current one.
#[derive(Clone, Copy)]
pub(super) struct FormerHolder {
    pub(super) key: u128,
    pub(super) link: Link,
}

/// A process that the service recognises in every epoch by its key.
pub(super) struct KnownProcess {
    /// The process number with which it first joined.
    pub(super) number: ProcessId,
    pub(super) part: ProcessPart,
    /// The first epoch that began with this process, or 0. A process may have copies of the job's
    /// state from that epoch on.
    pub(super) since: u64,
    /// True if the server's owner has seen its end. It joins no more, whatever it said before.
    pub(super) has_ended: bool,
}

/// A process that the server's owner has seen end.
#[derive(Debug)]
pub(crate) struct EndedProcess {
    /// The process number with which it first joined, or would have joined.
    pub(crate) number: ProcessId,
    /// The place that it had last.
    pub(crate) place: ProcessId,
    /// The way in which it ended.
    pub(crate) why: String,
}

#[cfg(test)]
impl EndedProcess {
    pub(super) fn at(number: u32, place: u32) -> Self {
        Self {
            number: ProcessId(number),
            place: ProcessId(place),
            why: "it ended".to_owned(),
        }
    }
}

/// A client's request to join a job.
pub(in super::super) struct JoinWish {
    pub(in super::super) process: ProcessId,
    pub(in super::super) processes: usize,
    pub(in super::super) epoch: u64,
    pub(in super::super) identity: Identity,
    pub(in super::super) waits: bool,
    /// True if the process is leaving the job: see `leavers`.
    pub(in super::super) leaves: bool,
}

/// The result of a request to join.
pub(in super::super) enum JobEntry {
    /// The process has a place. `instead_of` is its earlier connection, if it had one.
    HasPlace { instead_of: Option<Link> },
    /// The process waits for a place as a spare.
    Waits,
}

impl Epochs {
    /// Gives a process a place, or lets it wait for one. The caller has [checked](Epochs::check)
    /// its request.
    pub(in super::super) fn join(
        &mut self,
        link: Link,
        wish: &JoinWish,
        member: JobMember,
        waits: RequestWait,
        now: Instant,
        actions: &mut JobActions,
    ) -> Result<JobEntry, RendezvousError> {
        let JoinWish {
            process,
            identity: Identity { key, .. },
            ..
        } = *wish;

        if let EpochPhase::Failed(error) = &self.phase
            && wish.waits
        {
            return Err(error.clone());
        }

        let Some(process) = self.place_for(wish) else {
            return match wish.waits {
                true => self.wait_for_place(link, wish, member, waits, now, actions),
                false => Err(self.refusal(process)),
            };
        };

        self.check_is_new(link)?;
        if wish.leaves && !self.leavers.are_needed {
            self.vacant[process.index()] = true;
            self.hold(link, wish, member, waits, now, actions);
            return Ok(JobEntry::Waits);
        }

        self.joined.insert(link, process);
        // Its connection was cut and it tries again. The end of its first connection has not been
        // seen yet.
        let instead_of = self.seats[process.index()].as_ref().map(|held| held.link);
        if let Some(before) = instead_of {
            self.joined.remove(&before);
        }

        let differs = self.differs(process, &member);
        // One that waits for a place has no time limit of its own.
        let until = if wish.waits {
            after(now, Duration::MAX)
        } else {
            waits.until
        };
        let waits = RequestWait { until, ..waits };

        self.note_process(wish, ProcessPart::Holds(process));
        if self.seats.iter().all(Option::is_none) {
            self.first_joined = Some(now);
        }
        self.seats[process.index()] = Some(Seat {
            link,
            key,
            member,
            waits,
            ended: None,
        });

        match differs {
            // Waiting cannot help. All processes had better hear of it now than of a missing
            // process later.
            Some(error) => self.fail(error, actions),
            None => self.place_spares(actions),
        }
        Ok(JobEntry::HasPlace { instead_of })
    }

    /// Returns the place that a process can have at once. In the first epoch it is the process's
    /// number, later its place in the previous epoch. `None` if it has none or another process
    /// holds it.
    fn place_for(&self, wish: &JoinWish) -> Option<ProcessId> {
        // In a later epoch its key tells enough. It may not know which one gathers: if a service is
        // lost, some of its clients have heard of the last epoch and some have not.
        if self.phase != EpochPhase::Gathering || (self.epoch == 1 && wish.epoch > 1) {
            return None;
        }

        let key = wish.identity.key;
        let had_it = |process: &ProcessId| match &self.before[process.index()] {
            Some(former) => former.key == key,
            // The process that ran the service before: no other process knows its mark.
            None => wish.leaves && wish.process == *process && !self.vacant[process.index()],
        };

        let own = match self.epoch {
            1 => Some(wish.process).filter(|process| process.index() < self.seats.len()),
            _ => processes(self.seats.len()).find(had_it),
        };

        let is_free = |process: &ProcessId| {
            self.seats[process.index()]
                .as_ref()
                .is_none_or(|held| held.key == key)
        };
        own.filter(is_free)
    }

    /// Returns the reason why a process gets no place and does not wait for one.
    fn refusal(&self, process: ProcessId) -> RendezvousError {
        let processes = self.seats.len();
        match (self.seats.get(process.index()), &self.phase) {
            (None, _) => RendezvousError::NoSuchProcess { process, processes },
            (
                Some(Some(Seat {
                    member: JobMember { host, pid, .. },
                    ended: None,
                    ..
                })),
                _,
            ) => RendezvousError::Duplicate {
                process,
                host: host.clone(),
                pid: *pid,
            },
            (_, EpochPhase::Failed(error)) => error.clone(),
            _ => RendezvousError::Complete { process, processes },
        }
    }

    /// Checks that a client has not joined already.
    fn check_is_new(&self, link: Link) -> Result<(), RendezvousError> {
        let waits = self
            .spares
            .iter()
            .chain(&self.leavers.waiting)
            .any(|it| it.link == link);
        if waits || self.has_joined(link) {
            return Err(RendezvousError::OutOfTurn {
                what: "joining".into(),
                when: "once".into(),
            });
        }
        Ok(())
    }

    /// Lets a client wait until a place is free for it or the job has ended.
    fn wait_for_place(
        &mut self,
        link: Link,
        wish: &JoinWish,
        member: JobMember,
        waits: RequestWait,
        now: Instant,
        actions: &mut JobActions,
    ) -> Result<JobEntry, RendezvousError> {
        if let Some(error) = self.differs(wish.process, &member) {
            self.add_refusal(wish.process, error.to_string());
            return Err(error);
        }
        self.check_is_new(link)?;

        if wish.leaves {
            self.hold(link, wish, member, waits, now, actions);
            return Ok(JobEntry::Waits);
        }

        let waits = RequestWait {
            until: after(now, Duration::MAX),
            ..waits
        };
        self.note_process(wish, ProcessPart::Waits);
        self.tell_heirs(link, actions);
        self.spares.push(Seat {
            link,
            key: wish.identity.key,
            member,
            waits,
            ended: None,
        });

        self.place_spares(actions);
        self.tell_size(actions);
        self.dismiss_spares(now, actions);
        Ok(JobEntry::Waits)
    }

    /// Gives the free places of the current epoch to waiting spares. Begins the epoch if it is
    /// complete, or if the program accepts fewer processes.
    pub(super) fn place_spares(&mut self, actions: &mut JobActions) {
        if self.phase != EpochPhase::Gathering {
            return;
        }

        self.refuse_others(actions);
        self.call_leavers_back();
        for process in processes(self.seats.len()) {
            if self.seats[process.index()].is_none() && self.vacant[process.index()] {
                let spare = self.take_spare(|_| true);
                if let Some(spare) = &spare {
                    self.joined.insert(spare.link, process);
                    self.set_part(spare.key, ProcessPart::Holds(process));
                }
                self.seats[process.index()] = spare;
            }
        }

        let is_complete = self.seats.iter().all(Option::is_some);
        let shrinks = self.owner_starts == 0 && self.shrinks();
        if self.leavers.awaited == 0 && (is_complete || shrinks) {
            self.begin(actions);
        } else {
            self.fail_if_place_stays_free(actions);
        }
    }

    /// Removes and returns a waiting spare for which `is_fit` is true. Prefers a process that was
    /// stopped and came back in time, because it has copies of the job's state.
    pub(super) fn take_spare(&mut self, is_fit: impl Fn(&Seat) -> bool) -> Option<Seat> {
        let fit = || {
            self.spares
                .iter()
                .enumerate()
                .filter(|(_, spare)| is_fit(spare))
        };
        let has_been = fit().find(|(_, spare)| self.has_been(spare.key));
        let at = has_been.or_else(|| fit().next())?.0;
        Some(self.spares.remove(at))
    }

    /// Refuses spares whose program, options or files differ from the job's.
    pub(super) fn refuse_others(&mut self, actions: &mut JobActions) {
        for spare in std::mem::take(&mut self.spares) {
            let number = self
                .known
                .get(&spare.key)
                .map_or(ProcessId(0), |known| known.number);
            match self.differs(number, &spare.member) {
                None => self.spares.push(spare),
                Some(why) => {
                    self.add_refusal(number, why.to_string());
                    actions.answer(spare.link, spare.waits.ask, Err(why));
                    self.forget_if_gone(spare.key);
                }
            }
        }
    }

    /// Records the reason `why` for which a client's process does not take its place.
    pub(in super::super) fn note_refusal(&mut self, link: Link, why: String) {
        let seat = self.seats.iter().flatten().find(|seat| seat.link == link);
        if let Some(number) = seat.and_then(|seat| Some(self.known.get(&seat.key)?.number)) {
            self.add_refusal(number, why);
        }
    }

    fn add_refusal(&mut self, number: ProcessId, why: String) {
        if self.refused.len() < MOST_REFUSALS {
            self.refused.push((number, why));
        }
    }

    /// Begins the current epoch with the processes that have a place. Gives spares additional
    /// places if the program allows it.
    pub(super) fn begin(&mut self, actions: &mut JobActions) {
        self.seats.retain(Option::is_some);
        self.agree();
        self.refuse_others(actions);
        self.grow();
        self.note_since();
        self.phase = EpochPhase::Running;
        self.is_told_over = false;
        self.vacant = vec![false; self.seats.len()];

        let mut members: Vec<JobMember> = self
            .seats
            .iter()
            .flatten()
            .map(|seat| seat.member.clone())
            .collect();
        for member in members.iter_mut().skip(1) {
            // They are equal.
            member.facts = Box::default();
            member.sizes = Vec::new();
        }

        let members: Arc<[JobMember]> = members.into();

        self.heirs = in_order(&members);
        let waiting = self.spares.iter().chain(&self.leavers.waiting);
        waiting.for_each(|one| self.tell_heirs(one.link, actions));

        let seats = processes(self.seats.len()).zip(self.seats.iter().flatten());
        let told: Vec<_> = seats
            .map(|(process, seat)| (process, seat.link, seat.key, seat.waits.ask))
            .collect();

        for known in self.known.values_mut() {
            if let ProcessPart::Holds(place) = known.part {
                known.part = ProcessPart::Died(place);
            }
        }

        let standing = self.leavers.standing();
        for (process, link, key, ask) in told {
            self.joined.insert(link, process);
            if let Some(known) = self.known.get_mut(&key) {
                known.part = ProcessPart::Holds(process);
            }
            let answer = RequestAnswer::Members {
                process,
                epoch: self.epoch,
                run: self.run,
                members: members.clone(),
                standing,
                more: false,
            };
            actions.answer(link, ask, Ok(answer));
        }
        if self.replacements() > 0 {
            self.tell_size(actions);
        }
    }

    /// Notes in the first epoch what later processes must have: the program, the options and the
    /// files of process 0, and vectors as wide as the narrowest ones of all processes.
    fn agree(&mut self) {
        let mut members = self.seats.iter().flatten().map(|seat| &seat.member);
        if self.agreed.is_none()
            && let Some(first) = members.clone().next()
        {
            self.agreed = Some(JobMember {
                vectors: narrowest(&mut members),
                ..first.clone()
            });
        }
    }

    /// Returns an error if the program, options or files of a new member differ from the job's, or
    /// from those of another process that has joined, or if its vectors are narrower than the
    /// job's.
    pub(super) fn differs(
        &self,
        process: ProcessId,
        member: &JobMember,
    ) -> Option<RendezvousError> {
        let job = self.agreed.as_ref().map(|member| member.vectors);
        if let Some(job) = job.filter(|job| member.vectors < *job) {
            return Some(RendezvousError::Narrower {
                process,
                host: member.host.clone(),
                vectors: member.vectors,
                job,
            });
        }

        let agreed = self.agreed.iter().map(|member| (ProcessId(0), member));
        let seats = processes(self.seats.len()).zip(&self.seats);
        let seats = seats.filter_map(|(other, seat)| Some((other, &seat.as_ref()?.member)));

        agreed.chain(seats).find_map(|(other, other_member)| {
            let mut facts = Difference::between(&member.facts, &other_member.facts);
            let host = member.host.clone();
            let other_host = other_member.host.clone();
            let program = member.program.clone();
            let other_program = other_member.program.clone();

            match (facts.is_empty(), program == other_program) {
                (true, true) => None,
                (true, false) => Some(RendezvousError::Program {
                    process,
                    host,
                    program,
                    other,
                    other_host,
                    other_program,
                }),
                (false, is_same) => {
                    // An option is the usual reason why the devices differ.
                    if !is_same {
                        let name = "fingerprint of the program".to_owned();
                        facts.push(Difference {
                            name,
                            first: program,
                            second: other_program,
                        });
                    }
                    Some(RendezvousError::Differs {
                        process,
                        host,
                        other,
                        other_host,
                        facts,
                    })
                }
            }
        })
    }

    /// Records that a client's process, which may still live, has lost its place.
    pub(in super::super) fn gives_up(&mut self, link: Link) {
        let key = self.key_of(link);
        key.into_iter()
            .for_each(|key| self.set_part(key, ProcessPart::Out));
    }

    /// Removes a process that is gone, unless it had a place in an epoch that has begun.
    pub(super) fn forget_if_gone(&mut self, key: u128) {
        let spares = self.spares.iter().chain(&self.leavers.waiting);
        if self
            .seats
            .iter()
            .flatten()
            .chain(spares)
            .any(|seat| seat.key == key)
        {
            return;
        }

        match self.known.get_mut(&key) {
            Some(known) if known.since == 0 => drop(self.known.remove(&key)),
            Some(known) if known.part == ProcessPart::Waits => known.part = ProcessPart::Out,
            _ => {}
        }
    }

    pub(super) fn note_process(&mut self, wish: &JoinWish, part: ProcessPart) {
        let new = KnownProcess {
            number: wish.process,
            part,
            since: 0,
            has_ended: false,
        };
        self.known.entry(wish.identity.key).or_insert(new).part = part;
    }

    pub(super) fn set_part(&mut self, key: u128, part: ProcessPart) {
        self.known
            .get_mut(&key)
            .into_iter()
            .for_each(|known| known.part = part);
    }

    fn has_been(&self, key: u128) -> bool {
        self.known.get(&key).is_some_and(|known| known.since > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::super::protocol::{ClientRequest, ServerReply};
    use super::super::super::tests::{TIME_LIMIT, Table, errors};
    use super::*;

    #[test]
    fn all_get_the_members_when_the_last_has_joined() {
        let mut table = Table::new(3);
        table.join(2, "p");
        table.join(0, "p");
        assert!(table.said().is_empty());
        table.join(1, "p");
        let said = table.said();
        assert_eq!(
            said.iter().map(|(link, _)| *link).collect::<Vec<_>>(),
            [10, 11, 12]
        );
        for (_, reply) in said {
            let ServerReply::Answer {
                ask: 1,
                result:
                    Ok(RequestAnswer::Members {
                        members,
                        more: false,
                        ..
                    }),
            } = reply
            else {
                panic!("{reply:?}")
            };
            assert_eq!(
                members.iter().map(|m| m.pid).collect::<Vec<_>>(),
                [100, 101, 102]
            );
        }
    }

    #[test]
    fn missing_processes_are_named_also_to_late_comers() {
        let mut table = Table::new(4);
        table.join(0, "");
        table.join(3, "");
        table.pass(TIME_LIMIT, &[10, 13]);
        let missing = RendezvousError::Missing {
            missing: vec![ProcessId(1), ProcessId(2)],
            processes: 4,
            peer_timeout: TIME_LIMIT,
        };
        assert_eq!(
            errors(table.said()),
            [(10, missing.clone()), (13, missing.clone())]
        );
        assert_eq!(
            table.job.epochs.phase(),
            &EpochPhase::Failed(missing.clone())
        );
        table.join(1, "");
        assert_eq!(errors(table.said()), [(11, missing)]);
    }

    #[test]
    fn process_that_ends_before_it_joins_is_told_to_those_that_wait() {
        let mut table = Table::new(3);
        table.join(0, "");
        table
            .job
            .is_not_replaced(ProcessId(2), "it ended".to_owned());
        let ended = RendezvousError::NeverJoins {
            process: ProcessId(2),
            why: "it ended".to_owned(),
        };
        assert_eq!(errors(table.said()), [(10, ended.clone())]);
        table.join(1, "");
        assert_eq!(errors(table.said()), [(11, ended)]);

        let mut table = Table::running(2);
        table
            .job
            .is_not_replaced(ProcessId(1), "it ended".to_owned());
        table.job.place_is_free(EndedProcess::at(1, 1));
        assert_eq!(table.job.epochs.phase(), &EpochPhase::Running);
    }

    #[test]
    fn place_that_stays_free_fails_those_that_wait_at_once() {
        let ended = |process| RendezvousError::NeverJoins {
            process: ProcessId(process),
            why: "it ended".to_owned(),
        };

        // Nobody waits yet: the program may not use mpmd.
        let mut table = Table::new(3);
        table.job.place_is_free(EndedProcess::at(2, 2));
        assert_eq!(table.job.epochs.phase(), &EpochPhase::Gathering);
        table.join(0, "");
        assert_eq!(errors(table.said()), [(10, ended(2))]);
        table.join(1, "");
        assert_eq!(errors(table.said()), [(11, ended(2))]);

        // The owner knows of the end before the service has seen that of the connection.
        let mut table = Table::new(3);
        table.join(0, "");
        table.join(1, "");
        table.job.place_is_free(EndedProcess::at(0, 0));
        assert_eq!(errors(table.said()), []);
        table.job.closed(10, "its connection was closed");
        assert_eq!(errors(table.said()), [(11, ended(0))]);

        // A spare may come until the owner starts no more.
        let mut table = Table::new(2);
        table.join(1, "");
        table.job.owner_starts(1);
        table.job.place_is_free(EndedProcess::at(0, 0));
        assert_eq!(errors(table.said()), []);
        table.job.owner_starts(0);
        assert_eq!(errors(table.said()), [(11, ended(0))]);
    }

    #[test]
    fn duplicate_is_refused_and_the_job_goes_on() {
        let mut table = Table::new(2);
        table.join(1, "");
        table.job.opened(50, table.now);
        let peer_timeout = Duration::from_secs(3600);
        let member = JobMember {
            pid: 7,
            ..JobMember::default()
        };
        let join = ClientRequest::Join {
            ask: 1,
            process: ProcessId(1),
            processes: 2,
            epoch: 1,
            identity: Identity { key: 7, run: None },
            waits: false,
            peer_timeout,
            member: Box::new(member),
        };
        table.job.said(50, join, table.now);
        let held = RendezvousError::Duplicate {
            process: ProcessId(1),
            host: String::new(),
            pid: 101,
        };
        assert_eq!(errors(table.said()), [(50, held)]);
        table.join(0, "");
        assert_eq!(table.job.epochs.phase(), &EpochPhase::Running);
        table.job.closed(50, "closed");
        assert_eq!(table.job.epochs.present(), 2);
    }

    #[test]
    fn reconnecting_process_keeps_its_number() {
        let mut table = Table::new(2);
        table.join(1, "");
        // The end of its first connection has not been seen yet.
        table.open_and_join(50, 1, "");
        table.join(0, "");
        let heard: Vec<Link> = table.said().into_iter().map(|(link, _)| link).collect();
        assert_eq!(heard, [10, 50]);
        table.job.closed(11, "connection reset");
        assert_eq!((table.job.epochs.present(), table.said()), (2, vec![]));
    }

    #[test]
    fn process_may_rejoin_before_job_is_complete() {
        let mut table = Table::new(2);
        table.join(1, "");
        table.job.closed(11, "connection closed");
        table.open_and_join(50, 1, "");
        table.join(0, "");
        assert_eq!(table.job.epochs.phase(), &EpochPhase::Running);
        assert!(errors(table.said()).is_empty());
    }

    #[test]
    fn nobody_joins_a_complete_job() {
        let mut table = Table::running(2);
        table.job.closed(11, "connection closed");
        table.said();
        table.open_and_join(50, 1, "");
        let error = RendezvousError::Complete {
            process: ProcessId(1),
            processes: 2,
        };
        assert_eq!(errors(table.said()), [(50, error)]);
    }

    #[test]
    fn different_programs_fail_the_job_for_all() {
        let mut table = Table::new(3);
        table.join(0, "a");
        table.join(2, "b");
        let said = errors(table.said());
        assert_eq!(
            said.iter().map(|(link, _)| *link).collect::<Vec<_>>(),
            [10, 12]
        );
        for (_, error) in said {
            assert!(
                matches!(
                    &error,
                    RendezvousError::Program {
                        process: ProcessId(2),
                        other: ProcessId(0),
                        ..
                    }
                ),
                "{error}"
            );
        }
        assert!(matches!(
            table.job.epochs.phase(),
            EpochPhase::Failed(RendezvousError::Program { .. })
        ));
    }
}
