//! The copies of committed state that this process has: see `api/recover`.

use std::collections::{BTreeMap, HashMap, VecDeque};

use mpmd_layout::region::Region;
use mpmd_layout::topology::DeviceId;

use super::array::{MpmdArray, Shard};
use super::host_array::HostArray;

/// The commits of which this process has copies, oldest first.
#[derive(Debug)]
pub(crate) struct Kept {
    /// Only multiples of this step are committed.
    pub(crate) every: u64,
    /// Commits of the running epoch.
    pub(crate) issued: VecDeque<Issued>,
    /// Commits of earlier epochs, by step.
    pub(crate) earlier: BTreeMap<u64, Copies>,
    /// The newest commit at the start of this epoch and of those before, and their number: epochs
    /// without a newer commit.
    pub(crate) stuck: (Option<u64>, u32),
}

/// A commit whose copies were issued in the running epoch.
#[derive(Debug)]
pub(crate) struct Issued {
    pub(crate) step: u64,
    pub(crate) values: Vec<u8>,
    /// For each array: its copies at its owners and at their buddies.
    pub(crate) arrays: Vec<[MpmdArray; 2]>,
    /// `i64`s, one for each process: the newest step that is whole there.
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
        Self { every, issued, earlier, stuck: (None, 0) }
    }

    /// Returns the newest step of which all copies of this process are there. 0 for none.
    pub(crate) fn newest_whole(&self) -> u64 {
        let is_whole = |issued: &&Issued| issued.is_complete();
        let issued = self.issued.iter().rev().find(is_whole).map(|issued| issued.step);
        issued.or_else(|| self.earlier.keys().next_back().copied()).unwrap_or(0)
    }

    /// Drops the commits before the newest that is known to be whole on every process.
    pub(crate) fn forget_old(&mut self) {
        let known = self.issued.iter().rev().find_map(Issued::whole_everywhere);
        let Some(known) = known else { return };
        self.issued.retain(|issued| issued.step >= known);
        self.earlier.retain(|step, _| *step >= known);
    }

    /// Takes the copies out of the arrays of an epoch that has ended. Keeps those that are there,
    /// also of commits that are not whole: other processes may have the rest.
    pub(crate) fn end_epoch(&mut self) {
        for Issued { step, values, arrays, .. } in std::mem::take(&mut self.issued) {
            let arrays = arrays.iter().map(copies_here).collect();
            self.earlier.insert(step, Copies { values, arrays });
        }
    }
}

impl Issued {
    /// True if all copies of this process are there. False if one has failed.
    fn is_complete(&self) -> bool {
        let is_here = |array: &MpmdArray| array.is_complete() && array.block_until_ready().is_ok();
        self.arrays.iter().flatten().all(is_here)
    }

    /// Returns the newest step that is whole on every process, as far as this commit's message says
    /// and has arrived. `None` if it says of none.
    fn whole_everywhere(&self) -> Option<u64> {
        if !self.whole.is_complete() {
            return None;
        }
        let whole = self.whole.to_host().ok()??;
        let steps = whole.as_slice::<i64>().ok()?;
        steps.iter().min().map(|step| step.cast_unsigned()).filter(|step| *step > 0)
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
