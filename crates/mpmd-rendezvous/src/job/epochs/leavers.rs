//! Processes that leave the job in order, but have copies of its state: the others have one copy of
//! some regions until their first commit of the next epoch is whole.
//!
//! Such a process waits without a place ([`JobMember::leaves`]). Once that commit is whole, the
//! service tells it that the job can do without it. It gets a place in the next epoch again, and
//! may ask to leave that one, in two cases:
//!
//! - Another process is lost before the commit is whole.
//! - The spare that should replace it is gone when the next epoch gathers, and the program does not
//!   go on without that place.

use std::time::Duration;

use mpmd_base::block::Instant;

use super::super::super::protocol::RequestAnswer;
use super::super::super::{CommitStanding, JobMember, ProcessPart};
use super::super::actions::{JobActions, RequestWait, processes};
use super::places::{EndKind, JoinWish, Seat};
use super::sizes::allows;
use super::{EpochPhase, Epochs, SeatEnd};
use mpmd_base::deadline::after;
use mpmd_handshake::strangers::Link;
use mpmd_proto::wire::ProcessId;

/// The processes that leave the job. They hold copies of its state until a commit is complete on
/// all other processes.
#[derive(Default)]
pub(super) struct Leavers {
    /// The leaving processes that wait until the job no longer needs their copies, in order of
    /// arrival.
    pub(super) waiting: Vec<Seat>,
    /// True if a process was lost since the last complete commit, so that the copies are needed.
    pub(super) are_needed: bool,
    /// The newest epoch of which all processes have completed a commit.
    whole: Option<u64>,
    /// Number of leaving processes that waited at the previous service and have not connected to
    /// this one yet.
    pub(super) awaited: u32,
}

impl Leavers {
    /// Creates the leavers of a job that continues at another service. `are_needed` is true if a
    /// process was lost.
    pub(super) fn resumed(past: CommitStanding, are_needed: bool) -> Self {
        let CommitStanding { whole, leavers } = past;
        let awaited = if are_needed { leavers } else { 0 };
        Self {
            waiting: Vec::new(),
            are_needed,
            whole,
            awaited,
        }
    }

    /// Returns the newest complete commit and the number of leaving processes, for the members of
    /// an epoch.
    pub(super) fn standing(&self) -> CommitStanding {
        CommitStanding {
            whole: self.whole,
            leavers: self.waiting.len() as u32,
        }
    }

    /// Returns true if the job must continue with the leaving processes.
    pub(super) fn go_on(&self) -> bool {
        self.are_needed && !self.waiting.is_empty()
    }

    pub(super) fn take(&mut self) -> Vec<Seat> {
        std::mem::take(&mut self.waiting)
    }
}

impl Epochs {
    /// Keeps a leaving process until the job no longer needs it.
    pub(super) fn hold(
        &mut self,
        link: Link,
        wish: &JoinWish,
        member: JobMember,
        waits: RequestWait,
        now: Instant,
        actions: &mut JobActions,
    ) {
        self.leavers.awaited = self.leavers.awaited.saturating_sub(1);
        self.note_process(wish, ProcessPart::Waits);

        // Nobody waits for it in the epoch that it has left.
        let key = wish.identity.key;
        let seats = processes(self.seats.len()).zip(self.seats.iter_mut().flatten());
        let own = seats
            .filter(|_| self.phase == EpochPhase::Running)
            .find(|(_, seat)| seat.key == key);

        if let Some((process, seat)) = own {
            seat.ended = Some(SeatEnd {
                why: "it has left the job".to_owned(),
                how: EndKind::Leaves,
            });
            self.set_part(key, ProcessPart::Left(process));
        }

        let waits = RequestWait {
            until: after(now, Duration::MAX),
            ..waits
        };
        self.tell_heirs(link, actions);
        self.leavers.waiting.push(Seat {
            link,
            key,
            member,
            waits,
            ended: None,
        });

        let is_late = self.phase == EpochPhase::Running && wish.epoch <= self.epoch;
        if is_late && self.leavers.whole == Some(self.epoch) {
            self.release_leavers(actions);
        }

        self.place_spares(actions);
        self.dismiss_spares(now, actions);
    }

    /// Handles a client's report that all processes have completed a commit of its epoch.
    pub(in super::super) fn is_whole(&mut self, link: Link, actions: &mut JobActions) {
        if self.phase == EpochPhase::Running && self.place_of(link).is_some() {
            self.leavers.are_needed = false;
            self.leavers.whole = Some(self.epoch);
            self.release_leavers(actions);
        }
    }

    /// Tells the leaving processes that the job no longer needs them.
    pub(super) fn release_leavers(&mut self, actions: &mut JobActions) {
        for Seat {
            link, key, waits, ..
        } in self.leavers.take()
        {
            actions.answer(link, waits.ask, Ok(RequestAnswer::Done));
            self.forget_if_gone(key);
        }
    }

    /// If leaving processes are needed, gives them places in the epoch that waits for its
    /// processes. Each gets its own place, another free one, or an additional one if the program
    /// allows it. Otherwise it gets the place of a process that came later and has no copies, which
    /// then waits as a spare.
    pub(super) fn call_leavers_back(&mut self) {
        let waiting = self.leavers.waiting.len();
        let needed = match self.leavers.go_on() {
            true => waiting,
            false => self.count_without_replacement(),
        };
        // Those that came last stay.
        let leavers = self.leavers.waiting.split_off(waiting - needed);
        let (first, others) = leavers
            .into_iter()
            .partition::<Vec<_>, _>(|leaver| self.own_place(leaver).is_some());

        for leaver in first.into_iter().chain(others) {
            let size = self.seats.len();
            let all = || processes(size);
            let is_free = |at: &ProcessId| self.is_free(*at) && self.vacant[at.index()];
            let place = self.own_place(&leaver).or_else(|| all().find(is_free));

            if let Some(place) = place {
                self.seat_leaver(place, leaver);
            } else if allows(&leaver, size + 1) {
                self.seats.push(None);
                self.before.push(None);
                self.vacant.push(false);
                self.seat_leaver(ProcessId(size as u32), leaver);
            } else if let Some(place) = all().find(|at| self.is_of_new(*at)) {
                self.seat_leaver(place, leaver);
            } else {
                self.leavers.waiting.push(leaver);
            }
        }
    }

    /// Returns the number of leaving processes whose places nobody takes, and without which the
    /// program does not go on.
    fn count_without_replacement(&self) -> usize {
        let Some(leaver) = self.leavers.waiting.first() else {
            return 0;
        };
        let size = self.seats.len();
        let free = processes(size)
            .filter(|at| self.is_free(*at) && self.vacant[at.index()])
            .count();
        let open = free.saturating_sub(self.replacements());

        let goes_on = |back: &usize| *back == open || allows(leaver, size - open + back);
        let most = open.min(self.leavers.waiting.len());
        (0..=most).find(goes_on).unwrap_or(0)
    }

    /// Returns the place that a process had in the previous epoch, if it is free.
    fn own_place(&self, leaver: &Seat) -> Option<ProcessId> {
        processes(self.seats.len()).find(|process| {
            let former = self.before[process.index()].as_ref();
            self.is_free(*process) && former.is_some_and(|former| former.key == leaver.key)
        })
    }

    fn is_free(&self, process: ProcessId) -> bool {
        self.seats[process.index()].is_none()
    }

    /// Returns true if a place belongs to a process that came after the last complete commit.
    fn is_of_new(&self, process: ProcessId) -> bool {
        let seat = self.seats[process.index()].as_ref().map(|seat| seat.key);
        let former = self.before[process.index()]
            .as_ref()
            .map(|former| former.key);

        let known = seat.or(former).and_then(|key| self.known.get(&key));
        let whole = self.leavers.whole;
        known.is_some_and(|known| whole.is_some_and(|whole| known.since > whole))
    }

    /// Gives a leaving process this place. A process that holds the place becomes a spare.
    fn seat_leaver(&mut self, process: ProcessId, leaver: Seat) {
        self.joined.insert(leaver.link, process);
        self.set_part(leaver.key, ProcessPart::Holds(process));
        if let Some(new) = self.seats[process.index()].replace(leaver) {
            self.joined.remove(&new.link);
            self.set_part(new.key, ProcessPart::Waits);
            self.spares.push(new);
        }
    }

    /// Removes a client from the leaving processes.
    pub(super) fn forget_leaver(&mut self, link: Link) {
        let at = self
            .leavers
            .waiting
            .iter()
            .position(|leaver| leaver.link == link);
        if let Some(at) = at {
            let leaver = self.leavers.waiting.remove(at);
            self.forget_if_gone(leaver.key);
        }
    }
}
