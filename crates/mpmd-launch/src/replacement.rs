//! Decides what the end of a process means for a job that recovers, and when a new one is started.
//!
//! A job is judged by its places in its last epoch, which the rendezvous service knows. A process
//! that has no place, such as a spare, does not count.

use std::time::{Duration, Instant};

use mpmd_base::ProcessId;
use mpmd_base::deadline::after;
use mpmd_rendezvous::{FailureReport, ProcessPart, RendezvousServer};

use super::job_failure::ExitKind;
use super::spawn::Launch;

/// Interval at which the launcher looks for places (ranks) of the job that no process takes.
pub(super) const LOOK: Duration = Duration::from_millis(100);

/// The policy for replacing lost processes of a job: whether the job recovers, and how many
/// processes may still be started.
pub(super) struct ProcessReplacement {
    recovers: bool,
    /// Number of replacement processes that may still be started.
    left: usize,
    chaos: Option<ChaosKiller>,
}

impl ProcessReplacement {
    pub(super) fn new(launch: &Launch) -> Self {
        Self {
            recovers: launch.recovers(),
            left: launch.restarts,
            chaos: launch.chaos.map(ChaosKiller::new),
        }
    }

    /// Records that the job recovers if its program can go on with fewer processes.
    pub(super) fn learn(&mut self, may_shrink: bool) {
        self.recovers |= may_shrink;
    }

    /// True if the job can lose processes and go on.
    pub(super) fn recovers(&self) -> bool {
        self.recovers
    }

    /// True if the launcher must examine the job after each interval [`LOOK`].
    pub(super) fn must_look(&self) -> bool {
        self.recovers || self.chaos.is_some()
    }

    /// Returns the consequence for the job of the end of the process that was started as `number`.
    pub(super) fn judge(&self, number: usize, how: ExitKind, job: &JobStanding) -> EndMeaning {
        if !self.recovers {
            let place = ProcessId(number as u32);
            return match how == ExitKind::Exit(0) && !job.has_reported(place) {
                true => EndMeaning::Nothing,
                false => EndMeaning::Failed(place),
            };
        }

        match (job.last_place(number), how) {
            (Some(_), ExitKind::Exit(0)) if job.place(number).is_none() => EndMeaning::Nothing,
            (Some(place), ExitKind::Exit(0)) if !job.has_reported(place) => EndMeaning::Nothing,
            (Some(place), ExitKind::Signal(_) | ExitKind::MemoryFull | ExitKind::Killed)
                if !job.has_left(number) =>
            {
                EndMeaning::Lost(place)
            }
            (Some(place), _) if job.has_left(number) && !job.has_reported(place) => {
                EndMeaning::FailedAtExit(place)
            }
            (Some(place), _) => EndMeaning::Failed(place),
            (None, ExitKind::Exit(0)) => EndMeaning::Nothing,
            (None, _) => EndMeaning::NotNeeded,
        }
    }

    /// Returns the number of replacement processes that may still be started.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// Forbids further replacement processes, because the job would refuse them.
    pub(super) fn start_no_more(&mut self) {
        self.left = 0;
    }

    /// Counts one replacement process as started. Returns false if no more may be started.
    pub(super) fn take_one(&mut self) -> bool {
        let has_one = self.left > 0;
        self.left -= usize::from(has_one);
        has_one
    }

    /// Returns the process of `alive` that chaos kills now. `None` if it is not time yet, or if no
    /// replacement may be started.
    pub(super) fn victim(&mut self, alive: &[usize]) -> Option<usize> {
        if self.left == 0 {
            return None;
        }
        self.chaos.as_mut()?.victim(Instant::now(), alive)
    }
}

/// The consequence of a process's end for its job.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum EndMeaning {
    /// None: the process has ended successfully, or was not needed.
    Nothing,
    /// The process was killed before its program ended. The job goes on, and another process may
    /// take this place.
    Lost(ProcessId),
    /// The process at this place has failed, and the job fails with it.
    Failed(ProcessId),
    /// The process at this place has failed after the program had ended on all processes.
    FailedAtExit(ProcessId),
    /// The process has failed, but had no place in the job.
    NotNeeded,
}

/// The state of a job as its rendezvous service knows it.
pub(super) struct JobStanding {
    /// Number of places (ranks) in the job. It may change from epoch to epoch.
    pub(super) places: usize,
    is_complete: bool,
    /// True if the program has ended on all processes, or can no longer end on any.
    pub(super) is_over: bool,
    parts: Vec<(ProcessId, ProcessPart)>,
    reports: Vec<(ProcessId, FailureReport)>,
}

impl JobStanding {
    pub(super) fn of(server: &RendezvousServer, processes: usize) -> Self {
        let is_complete = server.is_complete();
        Self {
            places: if is_complete {
                server.places()
            } else {
                processes
            },
            is_complete,
            is_over: server.is_over() || server.failure().is_some(),
            parts: server.parts(),
            reports: server.reports(),
        }
    }

    fn parts(&self, number: usize) -> impl Iterator<Item = ProcessPart> {
        self.parts
            .iter()
            .filter(move |(of, _)| of.index() == number)
            .map(|(_, part)| *part)
    }

    /// True if the job has never formed, and no process has joined it or reported a failure.
    pub(super) fn has_no_member(&self) -> bool {
        !self.is_complete && self.parts.is_empty() && self.reports.is_empty()
    }

    /// True if the process that was started as `number` has joined the job.
    pub(super) fn is_known(&self, number: usize) -> bool {
        self.parts(number).next().is_some()
    }

    /// Returns the place that the process started as `number` holds, or held when it left. Before
    /// the job has formed, the place has the same number as the process.
    pub(super) fn place(&self, number: usize) -> Option<ProcessId> {
        let held = self.parts(number).find_map(|part| match part {
            ProcessPart::Holds(place) | ProcessPart::Left(place) => Some(place),
            ProcessPart::Waits | ProcessPart::Died(_) | ProcessPart::Out => None,
        });

        let is_first = number < self.places && !self.is_complete && !self.is_known(number);
        held.or_else(|| is_first.then_some(ProcessId(number as u32)))
    }

    /// Returns the [place](Self::place) of a process. If the process has died, returns the place
    /// that it held then, even in an earlier epoch.
    fn last_place(&self, number: usize) -> Option<ProcessId> {
        let died = self.parts(number).find_map(|part| match part {
            ProcessPart::Died(place) => Some(place),
            _ => None,
        });
        self.place(number).or(died)
    }

    /// True if the process that was started as `number` has left the job in order.
    pub(super) fn has_left(&self, number: usize) -> bool {
        self.parts(number)
            .any(|part| matches!(part, ProcessPart::Left(_)))
    }

    /// True if the process at a place has reported a failure. Such a process may still have ended
    /// with code 0.
    fn has_reported(&self, place: ProcessId) -> bool {
        self.reports.iter().any(|(by, _)| *by == place)
    }

    /// True if the launcher need not wait for the processes `alive`: the job is over or never
    /// formed, and none of them holds a place.
    pub(super) fn needs_none_of(&self, mut alive: impl Iterator<Item = usize>) -> bool {
        let is_over = self.is_over || !self.is_complete;
        is_over && alive.all(|number| self.place(number).is_none())
    }

    /// True if processes that another launcher added keep the job going. `ours` are the numbers of
    /// this launcher's processes.
    pub(super) fn goes_on_elsewhere(&self, ours: &[usize]) -> bool {
        let mut holders = self
            .parts
            .iter()
            .filter(|(_, part)| matches!(part, ProcessPart::Holds(_)));
        !self.is_over && holders.any(|(number, _)| !ours.contains(&number.index()))
    }

    /// True if a process that another launcher added has left the job in order at this place.
    /// `ours` are the numbers of this launcher's processes.
    pub(super) fn has_left_elsewhere(&self, place: ProcessId, ours: &[usize]) -> bool {
        let mut left = self
            .parts
            .iter()
            .filter(|(_, part)| *part == ProcessPart::Left(place));
        !self.has_reported(place) && left.any(|(number, _)| !ours.contains(&number.index()))
    }

    /// True if one of this launcher's processes has ended the program successfully at `place`.
    /// `ends` are (number, way in which the process ended).
    pub(super) fn is_done(
        &self,
        place: ProcessId,
        mut ends: impl Iterator<Item = (usize, ExitKind)>,
    ) -> bool {
        let is_end = |number| self.place(number) == Some(place);
        let has_left =
            |number| self.has_left(number) || !self.is_complete && !self.is_known(number);
        !self.has_reported(place)
            && ends
                .any(|(number, how)| how == ExitKind::Exit(0) && is_end(number) && has_left(number))
    }
}

/// Killer of random processes at random times, for tests of recovery.
struct ChaosKiller {
    every: Duration,
    next: Instant,
    random: fastrand::Rng,
}

impl ChaosKiller {
    fn new(every: Duration) -> Self {
        let mut random = fastrand::Rng::new();
        let next = after(Instant::now(), scaled(every, 2.0 * random.f64()));
        Self {
            every,
            next,
            random,
        }
    }

    /// Returns the process to kill, or `None` if it is not time yet. Kills are 0 to 2 times `every`
    /// apart.
    fn victim(&mut self, now: Instant, alive: &[usize]) -> Option<usize> {
        if now < self.next {
            return None;
        }
        self.next = after(now, scaled(self.every, 2.0 * self.random.f64()));
        self.random.choice(alive).copied()
    }
}

/// Returns `time` times `factor`, or the longest representable time if that overflows.
fn scaled(time: Duration, factor: f64) -> Duration {
    Duration::try_from_secs_f64(factor * time.as_secs_f64()).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A job of two in epoch 2: process 0 has left, 3 has the place of 1. 2 and 4 wait, and 5 was
    /// given up. 7 has died in epoch 1.
    fn standing() -> JobStanding {
        let [first, second] = [0, 1].map(ProcessId);
        let parts = [
            (0, ProcessPart::Left(first)),
            (1, ProcessPart::Holds(second)),
            (2, ProcessPart::Waits),
            (3, ProcessPart::Holds(second)),
            (4, ProcessPart::Waits),
            (5, ProcessPart::Out),
            (7, ProcessPart::Died(second)),
        ];
        let parts = parts
            .map(|(number, part)| (ProcessId(number), part))
            .to_vec();
        JobStanding {
            places: 2,
            is_complete: true,
            is_over: false,
            parts,
            reports: Vec::new(),
        }
    }

    #[test]
    fn ends_are_judged_by_places() {
        use ExitKind::{Exit, Signal};
        let job = standing();
        let judge = |restarts, number, how| {
            let replacing = ProcessReplacement::new(&Launch::new(2, "true").restarts(restarts));
            replacing.judge(number, how, &job)
        };
        let [first, second] = [0, 1].map(ProcessId);
        for (number, how, expected) in [
            (0, Exit(0), EndMeaning::Nothing),
            (0, Signal(11), EndMeaning::FailedAtExit(first)),
            (0, Exit(3), EndMeaning::FailedAtExit(first)),
            (3, Exit(0), EndMeaning::Nothing),
            (3, Signal(9), EndMeaning::Lost(second)),
            (3, Exit(101), EndMeaning::Failed(second)),
            (2, Exit(0), EndMeaning::Nothing),
            (4, Exit(1), EndMeaning::NotNeeded),
            (5, Signal(9), EndMeaning::NotNeeded),
            (6, Exit(1), EndMeaning::NotNeeded),
            (7, Signal(9), EndMeaning::Lost(second)),
            (7, Exit(1), EndMeaning::Failed(second)),
        ] {
            assert_eq!(judge(1, number, how), expected, "{number}: {how}");
        }
        assert_eq!(
            judge(0, 1, Signal(9)),
            EndMeaning::Failed(second),
            "it does not recover"
        );
    }

    #[test]
    fn success_is_shown_by_every_place() {
        let ended = |ends: &[(usize, i32)], place| {
            let ends = ends
                .iter()
                .map(|(number, code)| (*number, ExitKind::Exit(*code)));
            standing().is_done(ProcessId(place), ends)
        };
        assert!(ended(&[(0, 0)], 0));
        assert!(!ended(&[(0, 1)], 0));
        assert!(!ended(&[(3, 0)], 1), "it has not left in order");
        assert!(!ended(&[(2, 0), (5, 0)], 0), "they have no place");
        assert!(standing().goes_on_elsewhere(&[0, 1]), "3 is none of ours");
        assert!(!standing().goes_on_elsewhere(&[0, 1, 3]));
        assert!(
            standing().has_left_elsewhere(ProcessId(0), &[1, 3]),
            "it is none of ours"
        );
        assert!(!standing().has_left_elsewhere(ProcessId(0), &[0, 1, 3]));
        let program_without_mpmd = JobStanding {
            is_complete: false,
            parts: Vec::new(),
            ..standing()
        };
        let ends = || [(1, ExitKind::Exit(0)), (2, ExitKind::Exit(0))].into_iter();
        assert!(program_without_mpmd.is_done(ProcessId(1), ends()));
        assert!(!program_without_mpmd.is_done(ProcessId(0), ends()));
    }

    #[test]
    fn living_processes_with_places_are_waited_for() {
        let over = JobStanding {
            is_over: true,
            ..standing()
        };
        assert!(!over.needs_none_of([0, 2].into_iter()), "it still saves");
        assert!(over.needs_none_of([2, 4, 5, 6].into_iter()));
        assert!(
            !standing().needs_none_of([2, 4].into_iter()),
            "the job goes on"
        );
    }

    #[test]
    fn as_many_are_started_as_allowed() {
        let mut replacing = ProcessReplacement::new(&Launch::new(2, "true").restarts(1));
        assert!(replacing.must_look());
        assert_eq!([replacing.take_one(), replacing.take_one()], [true, false]);
        assert!(!ProcessReplacement::new(&Launch::new(2, "true")).must_look());
    }

    #[test]
    fn chaos_kills_one_of_the_living_in_each_interval() {
        let mut chaos = ChaosKiller::new(Duration::from_secs(1));
        let begin = Instant::now();
        let at = |tenths: u64| begin + Duration::from_millis(100 * tenths);
        let killed: Vec<_> = (0..1000)
            .filter_map(|i| chaos.victim(at(i), &[3, 5]))
            .collect();
        assert!((60..=150).contains(&killed.len()), "{}", killed.len());
        assert!(killed.contains(&3) && killed.contains(&5));
        assert_eq!(chaos.victim(at(5000), &[]), None);
    }
}
