//! Changes of a job that all its processes make together: others are taken in, some ask to leave,
//! or one is dropped since it is slow or wrong.
//!
//! Each commit carries a word of every process to all. At a commit each process reads the words of
//! the commit before the last, which all have by then. So all come to the same change at the same
//! commit, without a wait. They leave the epoch once that commit is whole, so no step is lost.

use std::panic::Location;
use std::sync::atomic::Ordering;

use mpmd_base::ProcessId;
use mpmd_base::block::Mutex;

use super::Commits;
use super::commit::can_leave;
use crate::api::program::{Convicted, JobChange, Program};
use crate::error::{Error, Result};
use crate::exec::recovery_store::RecoveryStore;
use crate::warning::warn_user;

/// Bit of a process's status word: it knows of more processes that could join the job.
const COULD_GROW: u64 = 1;

/// Bit of a process's status word: it asks to leave the job.
const ASKS_TO_LEAVE: u64 = 2;

/// Bit of a process's status word: it was found to be slow or wrong, but stayed because its copies
/// were needed. Also set in later epochs.
const IS_DROPPED: u64 = 4;

/// Bit of a process's status word: it was found to compute wrong bits.
const IS_WRONG: u64 = 8;

/// Lowest bit of a field of a process's status word: the number of processes that can replace
/// others. The field ends below [`TIME_BITS`].
const REPLACEMENTS_BIT: u32 = 4;
const MOST_REPLACEMENTS: u64 = 15;

/// Lowest bit of the time field of a process's status word. The field has the microseconds for
/// which kernels have run on the process, or for which it could not run.
const TIME_BITS: u32 = 8;

/// Number of commits after which the status words of a commit are read. Also the maximum number of
/// unfinished commits.
const DELAY: usize = 2;

/// A process that should leave the job, and the reason.
struct Leaver {
    process: ProcessId,
    why: String,
    cause: LeaveCause,
}

/// The cause for which a process should leave. Smaller causes have priority.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
enum LeaveCause {
    Wrong,
    Slow,
    Asks,
}

/// Returns the process as one that should leave, if its status word says so.
fn leaver_of_word(process: ProcessId, word: u64) -> Option<Leaver> {
    let (cause, why) = if word & IS_DROPPED != 0 {
        let cause = match word & IS_WRONG {
            0 => LeaveCause::Slow,
            _ => LeaveCause::Wrong,
        };
        let why = "was slow or wrong, and has stayed only for its copies of the state";
        (cause, why)
    } else if word & ASKS_TO_LEAVE != 0 {
        (LeaveCause::Asks, "has asked to leave")
    } else {
        return None;
    };
    Some(Leaver {
        process,
        why: format!("process {process} {why}"),
        cause,
    })
}

/// Returns the number of processes that can replace others, from the status words of all processes.
fn replacements(words: &[u64]) -> usize {
    let counts = words.iter().map(|word| word >> REPLACEMENTS_BIT);
    let most = counts.map(|count| count & MOST_REPLACEMENTS).max();
    most.unwrap_or(0) as usize
}

impl Commits {
    /// Asks the job to go on without this process, for instance before its machine is taken away.
    /// The process leaves in order after one of the next commits. There [`Program::commit`] returns
    /// [`Error::EpochOver`] on every process, and
    /// [`RecoveringBuilder::run`](crate::RecoveringBuilder::run) returns `None` on this process.
    /// The others continue with a spare instead or, in a job that [shrinks](crate::OnLoss::Shrink),
    /// without it.
    ///
    /// This process has copies of the state, so it waits until the first commit of the others is
    /// whole. If another process is lost before, the program is called on this process once more,
    /// and leaves the job later. If both processes with copies of a region ask, one of them leaves
    /// first.
    ///
    /// If the program cannot continue with fewer processes ([`RecoveringBuilder::layout`]) and
    /// there is no replacement, this process stays and prints the reason once. Replacements are
    /// spares, and processes that `mpmd run --restart` may still start. It leaves when there is
    /// one. If a replacement is lost before it has the place, the program is called on this process
    /// once more.
    ///
    /// [`RecoveringBuilder::layout`]: crate::RecoveringBuilder::layout
    ///
    /// If all processes ask, no process leaves, but [`Commits::all_ask_to_leave`] becomes true. Can
    /// be called at any time, also from another thread. The request cannot be withdrawn.
    ///
    /// ```no_run
    /// # fn f(commits: &mpmd_core::Commits, is_preempted: bool) {
    /// if is_preempted && commits.may_change() {
    ///     commits.ask_to_leave();
    /// }
    /// # }
    /// ```
    pub fn ask_to_leave(&self) {
        self.kept.lock().asks_to_leave = true;
    }

    /// True if the job may change its number of processes: see
    /// [`OnLoss::Shrink`](crate::OnLoss::Shrink).
    pub fn may_change(&self) -> bool {
        self.kept.lock().may_change
    }

    /// True once all processes of the job have [asked](Commits::ask_to_leave) to leave it. The
    /// value changes only at a commit, on every process at the same one. The program should then
    /// end.
    pub fn all_ask_to_leave(&self) -> bool {
        self.kept.lock().all_ask_to_leave
    }
}

impl Program {
    /// Returns this process's status word for its next commit.
    pub(super) fn word(&self, kept: &Mutex<RecoveryStore>) -> u64 {
        let could_grow = self.could_have() > self.processes();
        let micros = self.runtime.kernel_nanos.load(Ordering::Relaxed) / 1000;
        let kept = kept.lock();
        let bits = COULD_GROW * u64::from(could_grow)
            + ASKS_TO_LEAVE * u64::from(kept.asks_to_leave)
            + IS_DROPPED * u64::from(kept.is_dropped)
            + IS_WRONG * u64::from(kept.is_wrong);
        let replacements = (self.replacements() as u64).min(MOST_REPLACEMENTS);
        bits | (replacements << REPLACEMENTS_BIT) | (micros << TIME_BITS)
    }

    /// Returns the change of the job, if any, that follows from the status words of the commit
    /// before the last. The same on every process.
    pub(super) fn agreed_change(
        &mut self,
        kept: &Mutex<RecoveryStore>,
        at: &'static Location<'static>,
    ) -> Result<Option<JobChange>> {
        let words = {
            let mut kept = kept.lock();
            if kept.words.len() < DELAY {
                return Ok(None);
            }
            kept.words.pop_front()
        };
        let Some(words) = words else { return Ok(None) };

        let mut all = Vec::with_capacity(self.processes());
        for shard in words.shards_here(at)?.into_iter().take(1) {
            all.extend_from_slice(shard.data.as_slice::<u64>()?);
        }

        let mut kept = kept.lock();
        if all.iter().all(|word| word & ASKS_TO_LEAVE != 0) {
            kept.all_ask_to_leave = true;
            return Ok(None);
        }
        let times: Vec<u64> = all.iter().map(|word| word >> TIME_BITS).collect();
        let wrong = self.convicted().map(|convicted| {
            let Convicted {
                process,
                why,
                first,
            } = convicted;
            let since = format!("it first differed in step {first}");
            let stays = "what it has computed since then stays in the state";
            Leaver {
                process,
                why: format!("process {process} {why}; {since}, and {stays}"),
                cause: LeaveCause::Wrong,
            }
        });
        let slow = kept
            .paces
            .as_mut()
            .and_then(|paces| paces.at_commit(&times));
        let slow = slow.map(|slow| Leaver {
            process: ProcessId(slow.process as u32),
            why: slow.why,
            cause: LeaveCause::Slow,
        });
        let found = wrong.into_iter().chain(slow).filter(|_| self.may_change);
        let mut leavers: Vec<Leaver> = found.collect();
        let is_here = |leaver: &&Leaver| leaver.process == self.process();
        let found_here = leavers.iter().find(is_here).map(|leaver| leaver.cause);
        if found_here == Some(LeaveCause::Wrong) {
            kept.is_dropped = true;
            kept.is_wrong = true;
        }
        let words = (0..).map(ProcessId).zip(&all);
        leavers.extend(words.filter_map(|(process, word)| leaver_of_word(process, *word)));
        leavers.sort_by_key(|leaver| leaver.cause);

        // Each leaves only if the others still have a copy of each region.
        let mut accepted: Vec<Leaver> = Vec::new();
        for leaver in leavers {
            let before: Vec<ProcessId> = accepted.iter().map(|leaver| leaver.process).collect();
            let is_new = !before.contains(&leaver.process);
            if is_new && can_leave(self.topology(), &before, leaver.process) {
                accepted.push(leaver);
            }
        }
        let stay = self.keep_needed(&mut accepted, replacements(&all), &mut kept)?;
        kept.is_dropped |= found_here.is_some() && !stay.contains(&self.process());

        let mut leave = Vec::new();
        let mut whys = Vec::new();
        for Leaver { process, why, .. } in accepted {
            leave.push(process);
            whys.push(why);
        }
        if leave.is_empty() && all.iter().any(|word| word & COULD_GROW != 0) {
            whys.push("others are taken in".to_owned());
        }
        Ok((!whys.is_empty()).then(|| JobChange {
            leave,
            why: whys.join("; ").into(),
        }))
    }

    /// Removes from the end of `leave` the processes without which the program cannot continue, and
    /// returns them. The user is told the reason once in an epoch.
    ///
    /// # Errors
    ///
    /// If one of these processes computes wrong bits: the job must not continue with it.
    fn keep_needed(
        &self,
        leave: &mut Vec<Leaver>,
        replacements: usize,
        kept: &mut RecoveryStore,
    ) -> Result<Vec<ProcessId>> {
        let why_not =
            |leave: usize| self.why_not(self.processes() - leave.saturating_sub(replacements));
        let most = (0..=leave.len())
            .rev()
            .find(|leave| why_not(*leave).is_none());
        let stay = leave.split_off(most.unwrap_or(0));
        let reason = why_not(leave.len() + 1).unwrap_or_default();

        for leaver in &stay {
            let stays = format!("{}; it stays, since {reason}", leaver.why);
            let asks = leaver.cause == LeaveCause::Asks;
            let is_teller = match leaver.cause {
                LeaveCause::Wrong => {
                    return Err(Error::Environment(format!(
                        "{}; the job ends, since {reason}",
                        leaver.why
                    )));
                }
                LeaveCause::Slow => self.process() == ProcessId(0),
                LeaveCause::Asks => self.process() == leaver.process,
            };
            if is_teller && kept.told_to_stay.insert((leaver.process, asks)) {
                warn_user(&stays);
            }
        }
        Ok(stay.into_iter().map(|leaver| leaver.process).collect())
    }

    /// Waits until the commit that was issued last is whole on every process, then ends the epoch
    /// by `change`.
    pub(super) fn end_by(
        &mut self,
        change: JobChange,
        kept: &Mutex<RecoveryStore>,
        at: &'static Location<'static>,
    ) -> Result<()> {
        let whole = kept.lock().words.back().cloned();
        whole.map(|whole| whole.shards_here(at)).transpose()?;
        let why = change.why.clone();
        self.change = Some(change);
        Err(Error::EpochOver { why })
    }
}
