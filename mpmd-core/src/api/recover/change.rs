//! Changes of a job that all its processes make together: others are taken in, or some leave.
//!
//! Each commit carries a word of every process to all. At a commit each process reads the words of
//! the commit before the last, which all have by then. So all come to the same change at the same
//! commit, without a wait. They leave the epoch once that commit is whole, so no step is lost.

use std::panic::Location;

use mpmd_base::ProcessId;
use mpmd_base::block::Mutex;

use super::Commits;
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::kept::Kept;

/// Bits of a word: more processes could take part; this process asks to leave.
const COULD_GROW: u32 = 1;
const ASKS_TO_LEAVE: u32 = 2;

/// The number of commits after which the words of one are read. At most as many are on their way.
const DELAY: usize = 2;

/// A change that the processes of an epoch have agreed on.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) struct Change {
    /// The processes that leave the job, ascending.
    leave: Vec<ProcessId>,
}

impl Commits {
    /// Asks the job to go on without this process, such as before its machine is taken away. It
    /// leaves in order after one of the next commits: there [`Program::commit`] returns
    /// [`Error::EpochOver`] on every process, and
    /// [`RecoveringBuilder::run`](crate::RecoveringBuilder::run) returns `None` here. The others go
    /// on with a spare in its place or, in a job that [shrinks](crate::OnLoss::Shrink), without it.
    ///
    /// If all processes ask, nothing happens but that [`Commits::all_ask_to_leave`] becomes true.
    /// Can be called at any time, also from another thread. It cannot be taken back.
    pub fn ask_to_leave(&self) {
        self.kept.lock().asks_to_leave = true;
    }

    /// True once all processes of the job have [asked](Commits::ask_to_leave) to leave it. It
    /// changes at a commit, the same on every process. The program should then end.
    pub fn all_ask_to_leave(&self) -> bool {
        self.kept.lock().all_ask_to_leave
    }
}

impl Change {
    /// True if `process` leaves the job.
    pub(crate) fn is_end_of(&self, process: ProcessId) -> bool {
        self.leave.contains(&process)
    }

    pub(crate) fn why(&self) -> String {
        let leave: Vec<String> = self.leave.iter().map(ToString::to_string).collect();
        match leave.as_slice() {
            [] => "others are taken in".to_owned(),
            [one] => format!("process {one} has asked to leave"),
            several => format!("processes {} have asked to leave", several.join(", ")),
        }
    }
}

impl Program {
    /// Returns the word of this process for its next commit.
    pub(super) fn word(&self, kept: &Mutex<Kept>) -> u32 {
        let could_grow = self.could_have() > self.processes();
        let asks = kept.lock().asks_to_leave;
        COULD_GROW * u32::from(could_grow) + ASKS_TO_LEAVE * u32::from(asks)
    }

    /// Returns the change on which the processes have agreed by the commit before the last, if any.
    /// It is the same on every process.
    pub(super) fn agreed_change(
        &self,
        kept: &Mutex<Kept>,
        at: &'static Location<'static>,
    ) -> Result<Option<Change>> {
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
            all.extend_from_slice(shard.data.as_slice::<u32>()?);
        }
        let asks = |(process, word): (u32, &u32)| {
            (word & ASKS_TO_LEAVE != 0).then_some(ProcessId(process))
        };
        let leave: Vec<ProcessId> = (0..).zip(&all).filter_map(asks).collect();
        let could_grow = all.iter().any(|word| word & COULD_GROW != 0);
        if leave.len() == all.len() {
            kept.lock().all_ask_to_leave = true;
            return Ok(None);
        }
        Ok((could_grow || !leave.is_empty()).then_some(Change { leave }))
    }

    /// Waits until the commit that was just issued is whole on every process, and ends the epoch.
    pub(super) fn end_by(
        &mut self,
        change: Change,
        kept: &Mutex<Kept>,
        at: &'static Location<'static>,
    ) -> Result<()> {
        let whole = kept.lock().words.back().cloned();
        whole.map(|whole| whole.shards_here(at)).transpose()?;
        let why = change.why();
        self.change = Some(change);
        Err(Error::EpochOver { why })
    }
}
