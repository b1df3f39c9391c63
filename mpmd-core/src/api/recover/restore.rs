//! Restoring a commit: the processes tell each other what they have, and bring each region home.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::panic::Location;
use std::sync::Arc;
use std::time::Duration;

use mpmd_ids::ProcessId;
use mpmd_ids::block::since;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::region::Region;
use mpmd_layout::sharding::{MemoryKind, Sharding};
use mpmd_layout::topology::{DeviceId, Topology};
use serde::{Deserialize, Serialize};

use super::{Commits, Committed};
use crate::api::program::Program;
use crate::api::put::MoveOptions;
use crate::error::{Error, Result};
use crate::exec::array::MpmdArray;
use crate::exec::host_array::HostArray;
use crate::exec::kept::{CommitId, Copies, Copy};

/// The number of epochs that may begin at one commit. A job that loses processes again and again
/// without a newer commit ends.
const MOST_RESTARTS: u32 = 5;

/// The largest number of lost arrays that an error names for each commit.
const MOST_NAMES: usize = 4;

/// The commits of which a process has copies.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Inventory {
    commits: Vec<(CommitId, CommitEntry)>,
    /// The newest commit that is known to be whole on every process.
    known: CommitId,
    stuck: (Option<u64>, u32),
    /// The newest step that this process has come to.
    pub(super) reached: u64,
    /// The age of the job, and the part of it that was lost.
    pub(super) time: (Duration, Duration),
    /// Time since the loss of a process, and the failure. `None` on a process that is new in the
    /// job.
    pub(super) lost: Option<(Duration, String)>,
    pub(super) pid: u32,
}

#[derive(Clone, Debug, Default, Deserialize, Serialize)]
struct CommitEntry {
    /// Hash of the small values.
    values: u128,
    /// By array.
    arrays: Vec<Vec<CopyEntry>>,
}

/// A copy of a region.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct CopyEntry {
    place: RegionOfDevice,
    /// Hash of the bytes.
    hash: u128,
}

/// A region, and the device that owned it. The ranges are (start, end) by dimension.
#[derive(Clone, Debug, Deserialize, Eq, Ord, PartialEq, PartialOrd, Serialize)]
struct RegionOfDevice {
    home: u32,
    ranges: Vec<(usize, usize)>,
}

/// The process from which a region comes, and the hash of its bytes.
#[derive(Clone, Debug)]
struct Source {
    home: DeviceId,
    region: Region,
    holder: ProcessId,
    hash: u128,
}

impl Commits {
    /// Replaces `state` by that of the newest commit that is whole, and returns its step. Returns 0
    /// and changes nothing if nothing was committed. Every process must call it, in every epoch,
    /// before its first commit. Blocks until the state is there.
    ///
    /// A region comes from the process that owned it, else from that process's buddy, and moves to
    /// the shardings that `state` has now. The copies are compared with hashes of the process that
    /// had them.
    ///
    /// # Errors
    ///
    /// [`Error::CommitsLost`] if regions are lost with both of their processes, with the arrays
    /// that are concerned: a checkpoint file can help. If the arrays differ from those of the
    /// commit in number, shape or dtype. If several epochs began at this commit and none came to a
    /// newer one. Every process gets the same error.
    #[track_caller]
    pub fn restore(&self, p: &mut Program, state: &mut impl Committed) -> Result<u64> {
        let at = p.caller(Location::caller());
        let before = p.set_caller(Some(at));
        let restored = self.restore_at(p, state, at);
        p.set_caller(before);
        restored
    }

    fn restore_at(
        &self,
        p: &mut Program,
        state: &mut impl Committed,
        at: &'static Location<'static>,
    ) -> Result<u64> {
        if p.is_dry_run() || p.epoch() == 1 {
            return Ok(0);
        }
        let inventories = self.tell_inventories(p)?;
        let arrays = state.arrays();
        let chosen = choose(&inventories, &arrays, &state.names(), p.topology());
        let chosen = chosen.inspect_err(|_| {
            self.kept.lock().forget_all();
            self.report(p, &inventories, 0, at);
        })?;
        let Some((id, sources)) = chosen else {
            self.report(p, &inventories, 0, at);
            return Ok(0);
        };
        self.count_restart(&inventories, id.step)?;
        let copies = self.kept.lock().earlier.get(&id).cloned().unwrap_or_default();
        let values = self.values(p, id, &inventories, &copies)?;
        let mut restored = Vec::with_capacity(arrays.len());
        for (number, (array, sources)) in arrays.iter().zip(sources).enumerate() {
            let own = copies.arrays.get(number).cloned().unwrap_or_default();
            restored.push(bring_home(p, array, &sources, own)?);
        }
        for array in &restored {
            array.block_until_ready()?;
        }
        state.restore(restored, &values)?;
        self.kept.lock().earlier.retain(|kept, _| *kept <= id);
        self.report(p, &inventories, id.step, at);
        // Until the next commit, a further loss would find regions with one copy.
        p.issue_commit(id.step, state, &self.kept)?;
        Ok(id.step)
    }

    /// Returns what every process has, by process.
    fn tell_inventories(&self, p: &mut Program) -> Result<Vec<Inventory>> {
        let own = || Ok(self.inventory());
        let processes = (0..p.processes() as u32).map(ProcessId);
        processes.map(|from| p.broadcast_value(from, Inventory::default(), own)).collect()
    }

    fn inventory(&self) -> Inventory {
        let kept = self.kept.lock();
        let entry = |copy: &Copy| {
            let ranges = copy.region.ranges().map(|range| (range.start, range.end)).collect();
            let place = RegionOfDevice { home: copy.home.0, ranges };
            CopyEntry { place, hash: hash(copy.data.bytes()) }
        };
        let commits = kept.earlier.iter().map(|(id, copies)| {
            let arrays = copies.arrays.iter().map(|copies| copies.iter().map(entry).collect());
            (*id, CommitEntry { values: hash(&copies.values), arrays: arrays.collect() })
        });
        let lost = kept.lost.as_ref().map(|(when, why)| (since(*when), why.to_string()));
        Inventory {
            commits: commits.collect(),
            known: kept.known,
            stuck: kept.stuck,
            reached: kept.time.reached,
            time: (kept.time.age(), kept.time.lost()),
            lost,
            pid: std::process::id(),
        }
    }

    /// Counts an epoch that begins at `step`, and fails if there were too many.
    fn count_restart(&self, inventories: &[Inventory], step: u64) -> Result<()> {
        let before = inventories.iter().map(|inventory| inventory.stuck);
        let before = before.filter(|(at, _)| *at == Some(step)).map(|(_, count)| count).max();
        let count = before.unwrap_or(0) + 1;
        self.kept.lock().stuck = (Some(step), count);
        if count > MOST_RESTARTS {
            return Err(Error::Environment(format!(
                "{count} epochs of the job began at the commit of step {step}, and each lost a \
                 process before there was a newer one"
            )));
        }
        Ok(())
    }

    /// Returns the small values of a commit, from the first process that has them.
    fn values(
        &self,
        p: &mut Program,
        id: CommitId,
        inventories: &[Inventory],
        copies: &Copies,
    ) -> Result<Vec<u8>> {
        let has = |inventory: &Inventory| inventory.commits.iter().any(|(kept, _)| *kept == id);
        let from = inventories.iter().position(has).unwrap_or(0);
        p.broadcast_value(ProcessId(from as u32), Vec::new(), || Ok(copies.values.clone()))
    }
}

/// Returns the newest commit that is whole, and the sources of the regions of each array. `None` if
/// none is, and none is known to have been.
fn choose(
    inventories: &[Inventory],
    arrays: &[MpmdArray],
    names: &[String],
    topology: &Topology,
) -> Result<Option<(CommitId, Vec<Vec<Source>>)>> {
    let commits = inventories.iter().flat_map(|one| one.commits.iter().map(|(id, _)| *id));
    let mut lost = Vec::new();
    for id in commits.collect::<BTreeSet<_>>().into_iter().rev() {
        let sources: Vec<_> =
            (0..arrays.len()).map(|i| sources(inventories, id, i, topology)).collect();
        let is_lost = |(array, sources): (&MpmdArray, &Vec<Source>)| {
            let elements: usize = sources.iter().map(|source| source.region.elements()).sum();
            elements != array.aval().elements()
        };
        let missing: Vec<usize> =
            (0..arrays.len()).filter(|i| is_lost((&arrays[*i], &sources[*i]))).collect();
        if missing.is_empty() {
            return Ok(Some((id, sources)));
        }
        let named = |i: &usize| names.get(*i).cloned().unwrap_or_else(|| format!("array {i}"));
        let mut named: Vec<_> = missing.iter().take(MOST_NAMES).map(named).collect();
        if missing.len() > MOST_NAMES {
            named.push(format!("{} others", missing.len() - MOST_NAMES));
        }
        lost.push(format!("step {}: {}", id.step, named.join(", ")));
    }
    let known = inventories.iter().map(|one| one.known).max().unwrap_or_default();
    match known == CommitId::default() {
        true => Ok(None),
        false => Err(Error::CommitsLost { lost }),
    }
}

/// Returns the regions of an array in a commit, each with its home and the process that has it: the
/// owner of its home if that has it. Leaves out regions whose copies differ.
fn sources(
    inventories: &[Inventory],
    id: CommitId,
    array: usize,
    topology: &Topology,
) -> Vec<Source> {
    let mut found: BTreeMap<RegionOfDevice, Vec<(ProcessId, u128)>> = BTreeMap::new();
    for (process, inventory) in (0..).map(ProcessId).zip(inventories) {
        let entries = inventory.commits.iter().filter(|(kept, _)| *kept == id);
        for copy in entries.filter_map(|(_, entry)| entry.arrays.get(array)).flatten() {
            found.entry(copy.place.clone()).or_default().push((process, copy.hash));
        }
    }
    let source = |(place, holders): (RegionOfDevice, Vec<(ProcessId, u128)>)| {
        let owner = topology.device(DeviceId(place.home)).map(|device| device.process);
        let own = holders.iter().find(|(holder, _)| Some(*holder) == owner);
        let (holder, hash) = *own.or(holders.first())?;
        let region = Region::new(place.ranges.into_iter().map(|(start, end)| start..end).collect());
        let is_same = holders.iter().all(|(_, other)| *other == hash);
        is_same.then_some(Source { home: DeviceId(place.home), region, holder, hash })
    };
    found.into_iter().filter_map(source).collect()
}

/// Issues the moves of an array's regions to their homes, makes the array there, and moves it to
/// the sharding of `like`. Blocks until the regions are home.
fn bring_home(
    p: &mut Program,
    like: &MpmdArray,
    sources: &[Source],
    own: Vec<Copy>,
) -> Result<MpmdArray> {
    let once = MoveOptions::default().cache_plans(false).may_alias(false);
    let mut here: HashMap<Region, HostArray> =
        own.into_iter().map(|copy| (copy.region, copy.data)).collect();
    let mut coming = Vec::new();
    for Source { home, region, holder, .. } in sources {
        let owner = p.topology().device(*home).map(|device| device.process);
        if owner == Some(*holder) {
            continue;
        }
        let from = p.topology().devices_of(*holder)[0];
        let aval = ShapedArray::new(&region.shape(), like.dtype());
        let bytes = here.get(region).cloned();
        let on = |device| Sharding::single_device(device).with_memory_kind(MemoryKind::Host);
        let copied = p.array_from_fn(aval, &on(from), move |_, mut values| {
            let bytes = bytes.as_ref().ok_or_else(|| Error::kernel("the copy is gone"))?;
            values.as_bytes_mut().copy_from_slice(bytes.bytes());
            Ok(())
        })?;
        coming.push((region.clone(), p.device_put_with(&copied, on(*home), once)?));
    }
    for (region, array) in coming {
        if let Some(data) = array.to_host()? {
            here.insert(region, data);
        }
    }
    let damaged = sources.iter().find(|source| {
        let bytes = here.get(&source.region);
        bytes.is_some_and(|data| hash(data.bytes()) != source.hash)
    });
    let damaged = damaged.map(|source| source.region.clone());
    let here = Arc::new(here);
    let homes = sources.iter().map(|source| (source.home, source.region.clone())).collect();
    let homes = Sharding::enumerated(homes)?;
    let array = p.array_from_fn(like.aval().clone(), &homes, move |region, mut values| {
        if damaged.as_ref() == Some(region) {
            return Err(Error::kernel(format!("the copy of region {region} was damaged")));
        }
        let bytes = here.get(region).ok_or_else(|| Error::kernel("the copy is gone"))?;
        values.as_bytes_mut().copy_from_slice(bytes.bytes());
        Ok(())
    })?;
    let to = like.sharding().cloned();
    let to = to.unwrap_or_else(|| Sharding::single_device(p.topology().device_ids()[0]));
    p.device_put_with(&array, to, MoveOptions::default().donate(true).cache_plans(false))
}

/// Returns the hash of a copy.
fn hash(bytes: &[u8]) -> u128 {
    twox_hash::XxHash3_128::oneshot(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Builder;

    const ID: CommitId = CommitId { step: 7, epoch: 1 };

    /// Returns the inventory of a process with these regions of one array, (home, hash).
    fn has(copies: &[(u32, u128)]) -> Inventory {
        let entry = |(home, hash): &(u32, u128)| {
            let ranges = vec![(*home as usize, *home as usize + 1)];
            CopyEntry { place: RegionOfDevice { home: *home, ranges }, hash: *hash }
        };
        let arrays = vec![copies.iter().map(entry).collect()];
        Inventory { commits: vec![(ID, CommitEntry { values: 0, arrays })], ..Inventory::default() }
    }

    /// A commit, with (home, holder) of each region; or the error's text.
    type Chosen = Result<Option<(CommitId, Vec<(u32, u32)>)>, String>;

    fn chosen(inventories: &[Inventory]) -> Chosen {
        let topology = Builder::default().devices(2).topology(2, None).unwrap();
        let array = MpmdArray::from_slice(&[2], &[1.0f32, 2.0]).unwrap();
        let chosen = choose(inventories, &[array], &["w".to_owned()], &topology);
        let chosen = chosen.map_err(|error| error.to_string())?;
        Ok(chosen.map(|(id, sources)| {
            (id, sources[0].iter().map(|source| (source.home.0, source.holder.0)).collect())
        }))
    }

    #[test]
    fn region_comes_from_its_owner_else_from_the_buddy() {
        let all = [has(&[(0, 5), (1, 6)]), has(&[(1, 6), (0, 5)])];
        assert_eq!(chosen(&all), Ok(Some((ID, vec![(0, 0), (1, 1)]))));
        let replaced = [has(&[(0, 5), (1, 6)]), Inventory::default()];
        assert_eq!(chosen(&replaced), Ok(Some((ID, vec![(0, 0), (1, 0)]))));
    }

    #[test]
    fn commit_that_lacks_a_region_or_differs_is_not_used() {
        let lost = [has(&[(0, 5)]), Inventory::default()];
        assert_eq!(chosen(&lost), Ok(None), "it was never whole");
        let known = [has(&[(0, 5)]), Inventory { known: ID, ..Inventory::default() }];
        let error = Error::CommitsLost { lost: vec!["step 7: w".to_owned()] };
        assert_eq!(chosen(&known), Err(error.to_string()));
        let damaged = [has(&[(0, 5), (1, 6)]), has(&[(0, 9), (1, 6)])];
        assert_eq!(chosen(&damaged), Ok(None));
    }

    #[test]
    fn whole_commit_is_preferred_to_a_newer_one_in_parts() {
        let mut both = has(&[(0, 5), (1, 6)]);
        let newer = CommitId { step: 8, epoch: 1 };
        both.commits.push((newer, has(&[(0, 5)]).commits[0].1.clone()));
        assert_eq!(chosen(&[both]).unwrap().map(|(id, _)| id), Some(ID));
    }
}
