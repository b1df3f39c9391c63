//! The copies of committed state that this process has: see `api/recover`.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use mpmd_ids::block::{Instant, now};
use mpmd_layout::region::Region;
use mpmd_layout::topology::DeviceId;
use mpmd_transport::router::Failure;
use serde::{Deserialize, Serialize};

use super::array::{MpmdArray, Shard};
use super::host_array::HostArray;
use super::job_time::JobTime;

/// The name of a commit. Later steps are newer. A step is committed once more in each epoch that
/// begins there, perhaps in other shardings. (0, 0) stands for none.
#[derive(
    Clone, Copy, Debug, Default, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize,
)]
pub(crate) struct CommitId {
    pub(crate) step: u64,
    pub(crate) epoch: u64,
}

/// The commits of which this process has copies, oldest first.
#[derive(Debug)]
pub(crate) struct Kept {
    /// Only multiples of this step are committed.
    pub(crate) every: u64,
    /// Commits of the running epoch.
    pub(crate) issued: VecDeque<Issued>,
    /// Commits of earlier epochs.
    pub(crate) earlier: BTreeMap<CommitId, Copies>,
    /// The newest commit that is known to be whole on every process.
    pub(crate) known: CommitId,
    /// When a process was first lost since the last restore, and how.
    pub(crate) lost: Option<(Instant, Arc<Failure>)>,
    pub(crate) time: JobTime,
    /// The newest commit at the start of this epoch and of those before, and their number: epochs
    /// without a newer commit.
    pub(crate) stuck: (Option<u64>, u32),
}

/// A commit whose copies were issued in the running epoch.
#[derive(Debug)]
pub(crate) struct Issued {
    pub(crate) id: CommitId,
    pub(crate) values: Vec<u8>,
    /// For each array: its copies at its owners and at their buddies.
    pub(crate) arrays: Vec<[MpmdArray; 2]>,
    /// `i64`s, two for each process: step and epoch of the newest commit that is whole there, with
    /// all older ones of the epoch.
    pub(crate) whole: MpmdArray,
}

/// The copies of a commit on this process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Copies {
    pub(crate) values: Vec<u8>,
    /// By array.
    pub(crate) arrays: Vec<Vec<Copy>>,
}

/// A region of an array in host memory.
#[derive(Clone, Debug)]
pub(crate) struct Copy {
    /// The device that owned the region.
    pub(crate) home: DeviceId,
    pub(crate) region: Region,
    pub(crate) data: HostArray,
}

impl Kept {
    pub(crate) fn new(every: u64) -> Self {
        let (issued, earlier) = (VecDeque::new(), BTreeMap::new());
        let (known, lost, time) = (CommitId::default(), None, JobTime::begin());
        Self { every, issued, earlier, known, lost, time, stuck: (None, 0) }
    }

    /// Notes that the program has come to a step. Returns true if that is to be committed.
    pub(crate) fn reach(&mut self, step: u64) -> bool {
        self.time.reach(step);
        step.is_multiple_of(self.every)
    }

    /// Returns the newest commit of this epoch of which all copies of this process are there, and
    /// those of the commits before it.
    pub(crate) fn newest_whole(&self) -> CommitId {
        let whole = self.issued.iter().take_while(|issued| issued.is_complete());
        whole.last().map(|issued| issued.id).unwrap_or_default()
    }

    /// Drops the commits before the newest that is known to be whole on every process.
    pub(crate) fn forget_old(&mut self) {
        let known = self.issued.iter().rev().find_map(Issued::whole_everywhere);
        let Some(known) = known else { return };
        self.known = known;
        self.issued.retain(|issued| issued.id >= known);
        self.earlier.retain(|id, _| *id >= known);
    }

    /// Drops all commits: they are lost, and the program goes on from elsewhere, if at all.
    pub(crate) fn forget_all(&mut self) {
        self.earlier.clear();
        self.known = CommitId::default();
    }

    /// Takes the copies out of the arrays of an epoch that has ended by `failure`. Keeps those that
    /// are there, also of commits that are not whole: other processes may have the rest.
    pub(crate) fn end_epoch(&mut self, failure: Arc<Failure>) {
        self.forget_old();
        self.lost.get_or_insert((now(), failure));
        self.time.lose();
        for Issued { id, values, arrays, .. } in std::mem::take(&mut self.issued) {
            let arrays = arrays.iter().map(copies_here).collect();
            self.earlier.insert(id, Copies { values, arrays });
        }
    }
}

impl Issued {
    /// True if all copies of this process are there. False if one has failed.
    fn is_complete(&self) -> bool {
        let is_here = |array: &MpmdArray| array.is_complete() && array.block_until_ready().is_ok();
        self.arrays.iter().flatten().all(is_here)
    }

    /// Returns the newest commit that is whole on every process, as far as this commit's message
    /// says and has arrived. `None` if it says of none.
    fn whole_everywhere(&self) -> Option<CommitId> {
        // A dry run, which has no part of it, reads nothing.
        if self.whole.is_fully_remote() || !self.whole.is_complete() {
            return None;
        }
        let whole = self.whole.to_host().ok()??;
        let (words, _) = whole.as_slice::<i64>().ok()?.as_chunks::<2>();
        let id = |[step, epoch]: &[i64; 2]| CommitId {
            step: step.cast_unsigned(),
            epoch: epoch.cast_unsigned(),
        };
        words.iter().map(id).min().filter(|id| *id > CommitId::default())
    }
}

/// Returns the copies of an array on this process: of its owners' and of their buddies'. Leaves out
/// those of failed moves.
fn copies_here([own, buddy]: &[MpmdArray; 2]) -> Vec<Copy> {
    let layout = own.sharding().and_then(|owners| owners.layout(own.shape()).ok());
    let homes: HashMap<Region, DeviceId> = layout
        .iter()
        .flat_map(|layout| layout.iter())
        .map(|(device, region)| (region.clone(), device))
        .collect();
    let shards =
        [own, buddy].into_iter().filter(|array| !array.is_fully_remote() && array.is_complete());
    let shards = shards.flat_map(|array| array.addressable_shards().unwrap_or_default());
    let copy = |shard: Shard| {
        let home = homes.get(&shard.region).copied()?;
        Some(Copy { home, region: shard.region, data: shard.data })
    };
    shards.filter_map(copy).collect()
}
