//! The copies of committed state that this process has: see `api/recover`.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;
use std::sync::Arc;

use mpmd_base::ProcessId;
use mpmd_base::block::{Instant, Mutex, now};
use mpmd_layout::region::Region;
use mpmd_memory::{Pool, SharedBuffer};
use mpmd_proto::router::Failure;
use serde::{Deserialize, Serialize};

use crate::exec::Rolling;
use crate::exec::array::MpmdArray;
use crate::exec::job::job_time::JobTime;
use crate::exec::process_paces::ProcessPaces;

/// Maximum number of unconfirmed commits, which are not known to be whole on every process. Each
/// commit holds copies of the state on two processes, and in transit between them.
const MOST_UNCONFIRMED: usize = 2;

/// The identity of a commit. Ids of later epochs are newer: each epoch begins with the state of an
/// earlier commit. Within an epoch the calls of `commit` are numbered from 1, since a program may
/// commit a step more than once. The default id stands for no commit.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize,
)]
pub(crate) struct CommitId {
    /// The identity of the job's run.
    pub(crate) run: u128,
    pub(crate) epoch: u64,
    pub(crate) number: u64,
    /// The step number that the program passed to `commit`.
    pub(crate) step: u64,
    /// The hash of the [`CommitContents`].
    pub(crate) hash: u128,
}

/// The committed state without the bytes of its arrays. Contains no shardings, which differ from
/// epoch to epoch.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(crate) struct CommitContents {
    pub(crate) arrays: Vec<ArrayOfCommit>,
    /// The values of the state that are not arrays, as bytes.
    pub(crate) values: Vec<u8>,
}

/// The description of a committed array.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub(crate) struct ArrayOfCommit {
    pub(crate) name: String,
    /// The dtype and the global shape.
    pub(crate) aval: String,
    pub(crate) elements: usize,
}

impl fmt::Display for ArrayOfCommit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name, self.aval)
    }
}

/// The first difference between a commit and the state into which it is to be restored.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum StateMismatch {
    /// The commit and the state have different numbers of arrays.
    #[error("it has {in_commit} arrays, and the state has {in_state}")]
    Count { in_commit: usize, in_state: usize },
    /// An array has a different name, dtype or shape in the commit and in the state.
    #[error("it has {in_commit}, and the state has {in_state}")]
    Array {
        in_commit: Box<ArrayOfCommit>,
        in_state: Box<ArrayOfCommit>,
    },
}

/// This process's copies of commits, oldest first, and the state of recovery.
#[derive(Debug)]
pub(crate) struct RecoveryStore {
    /// Commit interval: only steps that are multiples of it are committed.
    pub(crate) every: u64,
    /// Commits of the running epoch.
    pub(crate) issued: VecDeque<IssuedCommit>,
    /// Commits of earlier epochs.
    pub(crate) earlier: BTreeMap<CommitId, CommitCopies>,
    /// The newest commit known to be whole on every process.
    pub(crate) known: CommitId,
    /// The time and the failure of the first process loss since the last restore.
    pub(crate) lost: Option<(Instant, Arc<Failure>)>,
    pub(crate) time: JobTime,
    /// The commit from which the running epoch began, and the number of successive epochs that
    /// began from this commit.
    pub(crate) stuck: (CommitId, u32),
    /// The memory pool of the copies. It outlives the epochs, whose other memory ends with them.
    pub(crate) memory: Pool,
    /// The run of the job to which the commits belong. `None` before the first epoch.
    run: Option<u128>,
    /// The number of commits in the running epoch.
    number: u64,
    /// The last commit of the program in the running epoch. `None` before the first commit.
    last: Option<LastCommit>,
    /// True once the program has restored a commit in the running epoch, or has found no commit.
    pub(crate) is_restored: bool,
    /// The words of all processes at the last two commits: requests for a change of the job. See
    /// `recover/change`.
    pub(crate) words: VecDeque<MpmdArray>,
    /// True if this process asks to leave the job.
    pub(crate) asks_to_leave: bool,
    /// True if this process was found to be slow or to compute wrong bits, and leaves the job.
    pub(crate) is_dropped: bool,
    /// True if this process was found to compute wrong bits.
    pub(crate) is_wrong: bool,
    /// Processes about which this one has warned, in the running epoch, that they stay because the
    /// program does not continue with fewer processes. The bool is true if the process itself asked
    /// to leave.
    pub(crate) told_to_stay: BTreeSet<(ProcessId, bool)>,
    /// True if all processes of the job ask to leave it.
    pub(crate) all_ask_to_leave: bool,
    /// Number of processes of the running epoch.
    pub(crate) processes: usize,
    /// True if the job may have more or fewer processes in a later epoch.
    pub(crate) may_change: bool,
    /// The times of the processes' kernels. `None` if slow processes are not dropped.
    pub(crate) paces: Option<ProcessPaces>,
}

/// A step that the program has committed, and the identity of its state.
#[derive(Clone, Copy, Debug)]
struct LastCommit {
    step: u64,
    identity: u128,
}

/// A commit that was issued in the running epoch.
#[derive(Debug)]
pub(crate) struct IssuedCommit {
    pub(crate) id: CommitId,
    pub(crate) contents: Arc<CommitContents>,
    /// This process's copies, as far as they are made.
    pub(crate) made: Arc<Mutex<Vec<RegionCopy>>>,
    /// An array that completes once every process has made its copies.
    pub(crate) whole: MpmdArray,
}

/// The copies of a commit on this process.
#[derive(Clone, Debug, Default)]
pub(crate) struct CommitCopies {
    pub(crate) contents: Arc<CommitContents>,
    pub(crate) regions: Vec<RegionCopy>,
}

/// A copy of a region of an array, in host memory.
#[derive(Clone, Debug)]
pub(crate) struct RegionCopy {
    /// The index of the array in its commit.
    pub(crate) array: usize,
    /// True if a device of this process owned the region, false if this process holds the second
    /// copy as buddy.
    pub(crate) is_own: bool,
    pub(crate) region: Region,
    pub(crate) bytes: SharedBuffer,
    /// The hash of the bytes, taken when the copy was made.
    pub(crate) hash: u128,
}

impl CommitContents {
    /// Describes the arrays and values that a commit keeps. `names` may be shorter than `arrays`,
    /// and names may be empty.
    pub(crate) fn of(arrays: &[MpmdArray], names: Vec<String>, values: Vec<u8>) -> Self {
        let mut names = names.into_iter();
        let arrays = arrays.iter().enumerate().map(|(number, array)| {
            let name = names.next().filter(|name| !name.is_empty());
            ArrayOfCommit {
                name: name.unwrap_or_else(|| format!("array {number}")),
                aval: array.aval().to_string(),
                elements: array.aval().elements(),
            }
        });
        Self {
            arrays: arrays.collect(),
            values,
        }
    }

    pub(crate) fn hash(&self) -> u128 {
        let hash = Rolling::default()
            .mix(self.arrays.len() as u64)
            .mix_bytes(&self.values);
        let mix = |hash: Rolling, array: &ArrayOfCommit| {
            hash.mix_bytes(array.name.as_bytes())
                .mix_bytes(array.aval.as_bytes())
        };
        self.arrays.iter().fold(hash, mix).value()
    }

    /// Returns, for each array of a state, its index in this commit. Arrays are matched by name, or
    /// by index if names repeat.
    ///
    /// # Errors
    ///
    /// The first difference, if the commit cannot be restored into the state.
    pub(crate) fn places(&self, state: &Self) -> Result<Vec<usize>, StateMismatch> {
        let here = self.arrays.len();
        let there = state.arrays.len();
        if here != there {
            return Err(StateMismatch::Count {
                in_commit: here,
                in_state: there,
            });
        }

        let names = |of: &Self| -> HashMap<String, usize> {
            (0..)
                .zip(&of.arrays)
                .map(|(index, array)| (array.name.clone(), index))
                .collect()
        };
        let by_name = names(self);
        let is_unique = by_name.len() == here && names(state).len() == here;

        let mut places = Vec::with_capacity(there);
        for (index, asked) in state.arrays.iter().enumerate() {
            let place = match is_unique {
                true => by_name.get(&asked.name).copied().unwrap_or(index),
                false => index,
            };
            let found = &self.arrays[place];
            if found != asked {
                return Err(StateMismatch::Array {
                    in_commit: Box::new(found.clone()),
                    in_state: Box::new(asked.clone()),
                });
            }
            places.push(place);
        }
        Ok(places)
    }
}

impl RegionCopy {
    /// Returns true if the bytes are unchanged since the copy was made. Reads all bytes.
    pub(crate) fn is_intact(&self) -> bool {
        hash(&self.bytes) == self.hash
    }
}

impl RecoveryStore {
    pub(crate) fn new(every: u64) -> Self {
        Self {
            every,
            issued: VecDeque::new(),
            earlier: BTreeMap::new(),
            known: CommitId::default(),
            lost: None,
            time: JobTime::begin(),
            stuck: (CommitId::default(), 0),
            memory: Pool::new("copies of commits", None),
            run: None,
            number: 0,
            last: None,
            is_restored: false,
            words: VecDeque::new(),
            asks_to_leave: false,
            is_dropped: false,
            is_wrong: false,
            told_to_stay: BTreeSet::new(),
            all_ask_to_leave: false,
            processes: 0,
            may_change: false,
            paces: None,
        }
    }

    /// Begins an epoch of a run. Drops commits of another run.
    pub(crate) fn begin_epoch(&mut self, run: u128) {
        if self.run.is_some_and(|own| own != run) {
            let asks_to_leave = self.asks_to_leave;
            *self = Self {
                asks_to_leave,
                ..Self::new(self.every)
            };
        }
        self.run = Some(run);
        self.number = 0;
        self.last = None;
        self.is_restored = false;
    }

    /// Notes that the program has come to a step. Returns true if the step is to be committed.
    pub(crate) fn reach(&mut self, step: u64) -> bool {
        self.time.reach(step);
        step.is_multiple_of(self.every)
    }

    /// Returns true if the program has neither restored nor committed a state in the running epoch.
    pub(crate) fn may_restore(&self) -> bool {
        !self.is_restored && self.last.is_none()
    }

    /// Notes that the program commits a state with this identity. Returns false if it has already
    /// committed the same step with another state.
    pub(crate) fn is_new_or_same(&mut self, step: u64, identity: u128) -> bool {
        let is_other = |last: LastCommit| last.step == step && last.identity != identity;
        if self.last.is_some_and(is_other) {
            return false;
        }
        self.last = Some(LastCommit { step, identity });
        true
    }

    /// Creates and returns the id of the next commit.
    pub(crate) fn next_id(&mut self, epoch: u64, step: u64, contents: &CommitContents) -> CommitId {
        self.number += 1;
        let Self { run, number, .. } = *self;
        CommitId {
            run: run.unwrap_or_default(),
            epoch,
            number,
            step,
            hash: contents.hash(),
        }
    }

    /// Drops the commits before the newest commit that is known to be whole on every process.
    pub(crate) fn forget_old(&mut self) {
        let known = self
            .issued
            .iter()
            .rev()
            .find(|issued| issued.is_confirmed());
        let Some(known) = known.map(|issued| issued.id) else {
            return;
        };
        self.known = known;
        self.issued.retain(|issued| issued.id >= known);
        self.earlier.retain(|id, _| *id >= known);
    }

    /// Drops old commits. If there are then too many unconfirmed commits to issue another, returns
    /// the array that confirms the oldest of them.
    pub(crate) fn first_awaited(&mut self) -> Option<MpmdArray> {
        self.forget_old();
        let mut unconfirmed = self.issued.iter().filter(|issued| !issued.is_confirmed());
        let first = unconfirmed.next()?.whole.clone();
        (1 + unconfirmed.count() >= MOST_UNCONFIRMED).then_some(first)
    }

    /// Drops all commits of earlier epochs, after no commit could be restored.
    pub(crate) fn forget_all(&mut self) {
        self.earlier.clear();
        self.known = CommitId::default();
    }

    /// Takes over the copies of an epoch that ended with `failure`. Also keeps copies of commits
    /// that are not whole here: other processes may have the rest.
    pub(crate) fn end_epoch(&mut self, failure: Arc<Failure>) {
        self.forget_old();
        self.words.clear();
        self.told_to_stay.clear();
        self.lost.get_or_insert((now(), failure));
        self.time.lose();

        for IssuedCommit {
            id, contents, made, ..
        } in std::mem::take(&mut self.issued)
        {
            let regions = std::mem::take(&mut *made.lock());
            self.earlier.insert(id, CommitCopies { contents, regions });
        }
    }
}

impl IssuedCommit {
    /// Returns true if this process knows that every process has made its copies. Always false in a
    /// dry run.
    fn is_confirmed(&self) -> bool {
        let shards = self.whole.shards();
        !shards.is_empty()
            && shards
                .iter()
                .all(|shard| shard.slot.peek().is_some_and(|outcome| outcome.is_ok()))
    }
}

/// Returns the hash of a copy's bytes.
pub(crate) fn hash(bytes: &[u8]) -> u128 {
    twox_hash::XxHash3_128::oneshot(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_another_run_are_dropped() {
        let mut kept = RecoveryStore::new(2);
        kept.begin_epoch(7);
        let id = |kept: &mut RecoveryStore| kept.next_id(1, 4, &CommitContents::default());
        let first = id(&mut kept);
        assert!(id(&mut kept) > first);
        kept.earlier.insert(first, CommitCopies::default());
        kept.known = first;
        kept.begin_epoch(7);
        assert_eq!((kept.earlier.len(), kept.known), (1, first));
        kept.begin_epoch(8);
        assert_eq!(
            (kept.earlier.len(), kept.known, kept.every),
            (0, CommitId::default(), 2)
        );
    }
}
