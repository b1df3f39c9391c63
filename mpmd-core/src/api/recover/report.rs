//! The report of a recovery: a line, an event of the trace, and a [`Recovery`].

use std::fmt;
use std::panic::Location;

use mpmd_base::ProcessId;

use super::Commits;
use super::inventory::Inventory;
use crate::api::program::Program;
use crate::warning::tell_user;

/// The start of a later epoch, after the loss of a process or a change of the job. The same on
/// every process. See [`Commits::last_recovery`].
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Recovery {
    /// The number of the new epoch.
    pub epoch: u64,
    /// The step of the commit from which the job continues; 0 if no commit is whole.
    pub step: u64,
    /// The newest step for which [`Program::commit`] was called before the new epoch. The job
    /// repeats the steps after `step` up to this one.
    pub reached: u64,
    /// The number of processes in the epoch before, and in the new one.
    pub processes: (usize, usize),
    /// Seconds from the end of the earlier epoch until all processes had met in the new one.
    pub seconds: f64,
    /// The useful share of the job's time so far, from 0 to 1. The rest passed between each loss
    /// and the time at which the job had repeated the lost steps.
    pub useful: f64,
    /// (process, system id) of each process that is new in the job.
    pub new: Vec<(ProcessId, u32)>,
    /// The reason why the epoch before ended, such as the loss of a process.
    pub failure: String,
}

impl Commits {
    /// Returns the recovery at the start of the current epoch, once [`Commits::restore`] was
    /// called. `None` in the first epoch.
    pub fn last_recovery(&self) -> Option<Recovery> {
        self.recovery.lock().clone()
    }

    /// Records that the job continues from the commit of `step`. Process 0 tells the user.
    pub(super) fn report(
        &self,
        p: &Program,
        inventories: &[Inventory],
        step: u64,
        at: &'static Location<'static>,
    ) {
        let loss = inventories.iter().filter_map(|one| one.lost.as_ref()).max();
        let Some((time, failure)) = loss else { return };
        // A spare may have waited for longer than the job has run.
        let old = || inventories.iter().filter(|one| one.lost.is_some());
        let reached = old().map(|one| one.reached).max().unwrap_or(0);
        let (age, lost) = old().map(|one| one.time).max().unwrap_or_default();
        let new = (0..)
            .map(ProcessId)
            .zip(inventories)
            .filter(|(_, one)| one.lost.is_none());
        {
            let mut kept = self.kept.lock();
            kept.lost = None;
            kept.time.learn(age, lost, reached);
            kept.time.reach(step);
        }

        let before = old().map(|one| one.processes).max().unwrap_or_default();
        let recovery = Recovery {
            epoch: p.epoch(),
            step,
            reached,
            processes: (before, p.processes()),
            seconds: time.as_secs_f64(),
            useful: 1.0 - lost.as_secs_f64() / age.as_secs_f64().max(f64::MIN_POSITIVE),
            new: new.map(|(process, one)| (process, one.pid)).collect(),
            failure: failure.clone(),
        };

        let text = recovery.to_string();
        p.runtime.trace.waited(0, &text, at);
        if p.process() == ProcessId(0) {
            tell_user(&text);
        }
        *self.recovery.lock() = Some(recovery);
    }
}

impl fmt::Display for Recovery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            epoch,
            step,
            reached,
            processes,
            seconds,
            useful,
            new,
            failure,
        } = self;
        match (step, reached.saturating_sub(*step)) {
            (0, _) => write!(f, "epoch {epoch} begins without a commit")?,
            (_, 0) => write!(f, "epoch {epoch} goes on after step {step}")?,
            (_, 1) => write!(
                f,
                "epoch {epoch} goes on after step {step}, and repeats one"
            )?,
            (_, more) => write!(
                f,
                "epoch {epoch} goes on after step {step}, and repeats {more}"
            )?,
        }

        write!(f, ", {seconds:.2} s after the end of the epoch before")?;
        match processes {
            (before, now) if before == now => {}
            (before, now) => write!(f, "; it has {now} processes, and had {before}")?,
        }

        let new: Vec<_> = new
            .iter()
            .map(|(process, pid)| format!("{process} (pid {pid})"))
            .collect();
        if !new.is_empty() {
            write!(f, "; new is process {}", new.join(", "))?;
        }

        write!(
            f,
            "; {:.1} % of the job's time counted so far; {failure}",
            100.0 * useful
        )
    }
}
