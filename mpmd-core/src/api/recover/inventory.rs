//! The commits of which the processes have copies, and the choice of one among them.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::Location;
use std::time::Duration;

use mpmd_base::ProcessId;
use mpmd_base::block::{mpsc, since};
use mpmd_layout::region::Region;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Commits;
use crate::api::program::Program;
use crate::error::{Error, Result};
use crate::exec::Doing;
use crate::exec::recovery_store::{CommitCopies, CommitId, RegionCopy};
use crate::warning::warn_user;

/// Maximum number of lost commits that an error names. [`MOST_NAMES`] limits the lost arrays of
/// each.
const MOST_COMMITS: usize = 3;
const MOST_NAMES: usize = 4;

/// Bytes of a large value that [`tell`] sends in one message.
const PIECE: usize = 256 << 10;

/// The list of the commits of which a process has copies, and further facts about the process.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct Inventory {
    pub(super) commits: Vec<(CommitId, CommitEntry)>,
    /// The newest commit that is known to be whole on every process.
    known: CommitId,
    pub(super) stuck: (CommitId, u32),
    /// The newest step for which this process has called `Program::commit`.
    pub(super) reached: u64,
    /// The age of the job, and the time of it that was lost by failures.
    pub(super) time: (Duration, Duration),
    /// The time since the loss of a process, and its failure. `None` on a process that is new in
    /// the job.
    pub(super) lost: Option<(Duration, String)>,
    pub(super) pid: u32,
    /// The number of processes in the epoch before; 0 on a process that is new in the job.
    pub(super) processes: usize,
}

/// The copies that a process has of one commit.
#[derive(Clone, Debug, Default, Deserialize, Serialize)]
pub(super) struct CommitEntry {
    /// The number of elements of each array of the commit.
    elements: Vec<usize>,
    copies: Vec<CopyEntry>,
}

/// A copy of a region. Its `ranges` are (start, end) of each dimension.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct CopyEntry {
    array: usize,
    /// True on the process that owned the region, false on its buddy.
    is_own: bool,
    ranges: Vec<(usize, usize)>,
    hash: u128,
}

/// A region of an array, the process that sends it, and the hash of its bytes.
#[derive(Clone, Debug)]
pub(super) struct RegionSource {
    pub(super) region: Region,
    pub(super) holder: ProcessId,
    pub(super) hash: u128,
}

/// The commit that the job restores, and for each array the sources of its regions.
pub(super) struct ChosenCommit {
    pub(super) id: CommitId,
    pub(super) sources: Vec<Vec<RegionSource>>,
}

impl Commits {
    /// Exchanges the inventories of all processes. Each process first checks the hashes of its
    /// copies.
    pub(super) fn tell_inventories(
        &self,
        p: &mut Program,
        at: &'static Location<'static>,
    ) -> Result<Vec<Inventory>> {
        self.drop_damaged(p, at);
        let processes = (0..p.processes() as u32).map(ProcessId);
        processes
            .map(|from| tell(p, from, || self.inventory()))
            .collect()
    }

    /// Drops the copies whose bytes have changed since they were made, because the other holder may
    /// have an intact copy. Copy workers read all copies. Blocks until they have finished.
    fn drop_damaged(&self, p: &Program, at: &'static Location<'static>) {
        let runtime = &p.runtime;
        let (found, damaged) = mpsc::channel();
        let mut kept = self.kept.lock();
        kept.earlier
            .retain(|id, CommitCopies { contents, .. }| contents.hash() == id.hash);
        for (id, copies) in &kept.earlier {
            for (index, copy) in copies.regions.iter().enumerate() {
                let id = *id;
                let copy = copy.clone();
                let found = found.clone();
                runtime.move_data(Box::new(move || {
                    if !copy.is_intact() {
                        let _ = found.send((id, index));
                    }
                }));
            }
        }
        // The end of the last job is the signal.
        drop((found, kept));

        let _doing = runtime
            .status
            .enter(Doing::Waiting("a check of its copies", at));
        let mut wrong = BTreeSet::new();
        loop {
            match damaged.recv_timeout(runtime.config.peer_timeout) {
                Ok(one) => _ = wrong.insert(one),
                Err(mpsc::RecvTimeoutError::Disconnected) => break,
                Err(mpsc::RecvTimeoutError::Timeout) => {
                    let text = format!("process {}: {at} checks copies", runtime.me);
                    runtime.report_hang(&text);
                }
            }
        }

        let mut kept = self.kept.lock();
        for (id, index) in wrong.into_iter().rev() {
            let Some(copies) = kept.earlier.get_mut(&id) else {
                continue;
            };
            let RegionCopy { array, region, .. } = copies.regions.swap_remove(index);
            warn_user(&format!(
                "process {}: its copy of region {region} of {}, of the commit of step {}, has \
                 changed in memory, and is not used",
                runtime.me, copies.contents.arrays[array].name, id.step
            ));
        }
    }

    fn inventory(&self) -> Inventory {
        let kept = self.kept.lock();
        let copy = |copy: &RegionCopy| {
            let ranges = copy
                .region
                .ranges()
                .map(|range| (range.start, range.end))
                .collect();
            CopyEntry {
                array: copy.array,
                is_own: copy.is_own,
                ranges,
                hash: copy.hash,
            }
        };

        let commits = kept
            .earlier
            .iter()
            .map(|(id, CommitCopies { contents, regions })| {
                let elements = contents.arrays.iter().map(|array| array.elements).collect();
                (
                    *id,
                    CommitEntry {
                        elements,
                        copies: regions.iter().map(copy).collect(),
                    },
                )
            });

        let lost = kept
            .lost
            .as_ref()
            .map(|(when, why)| (since(*when), why.to_string()));

        Inventory {
            commits: commits.collect(),
            known: kept.known,
            stuck: kept.stuck,
            reached: kept.time.reached,
            time: (kept.time.age(), kept.time.lost()),
            lost,
            pid: std::process::id(),
            processes: kept.processes,
        }
    }
}

/// Broadcasts a value of any size from process `from`, and returns it on every process.
pub(crate) fn tell<T: Serialize + DeserializeOwned>(
    p: &mut Program,
    from: ProcessId,
    value: impl FnOnce() -> T,
) -> Result<T> {
    let wrong = |error: serde_json::Error| Error::kernel(error.to_string());
    let own = (p.process() == from).then(|| serde_json::to_vec(&value()).map_err(wrong));
    let mut own = own.unwrap_or_else(|| Ok(Vec::new()));
    let mut all = Vec::new();

    loop {
        let (piece, is_last) = p.broadcast_value(from, (Vec::new(), true), || {
            let left = own.as_mut().map_err(|error| error.clone())?;
            let rest = left.split_off(left.len().min(PIECE));
            let piece = std::mem::replace(left, rest);
            Ok((piece, left.is_empty()))
        })?;
        all.extend(piece);
        if is_last {
            return serde_json::from_slice(&all).map_err(wrong);
        }
    }
}

/// Chooses the newest whole commit. Returns `None` if no commit was ever known to be whole, and
/// fails if a known whole commit is lost. `name` returns the name of an array of a commit, for
/// messages.
pub(super) fn choose(
    inventories: &[Inventory],
    name: &dyn Fn(CommitId, usize) -> Option<String>,
) -> Result<Option<ChosenCommit>> {
    let commits: BTreeSet<_> = inventories
        .iter()
        .flat_map(|one| one.commits.iter().map(|(id, _)| *id))
        .collect();

    let mut lost = Vec::new();
    for id in commits.iter().rev() {
        let entries = || inventories.iter().flat_map(|one| &one.commits);
        let entry = entries().find(|(kept, _)| kept == id);
        let elements = entry.map_or(&[][..], |(_, entry)| &entry.elements);
        let sources: Vec<_> = (0..elements.len())
            .map(|array| sources(inventories, *id, array))
            .collect();
        let has = |array: usize| -> usize {
            sources[array]
                .iter()
                .map(|source: &RegionSource| source.region.elements())
                .sum()
        };
        let missing: Vec<usize> = (0..elements.len())
            .filter(|array| has(*array) != elements[*array])
            .collect();
        if missing.is_empty() {
            return Ok(Some(ChosenCommit { id: *id, sources }));
        }

        if lost.len() < MOST_COMMITS {
            let named =
                |array: &usize| name(*id, *array).unwrap_or_else(|| format!("array {array}"));
            let mut named: Vec<_> = missing.iter().take(MOST_NAMES).map(named).collect();
            if missing.len() > MOST_NAMES {
                named.push(format!("{} others", missing.len() - MOST_NAMES));
            }
            lost.push(format!("step {}: {}", id.step, named.join(", ")));
        }
    }

    match commits.len().saturating_sub(MOST_COMMITS) {
        0 => {}
        1 => lost.push("an older commit".to_owned()),
        older => lost.push(format!("{older} older commits")),
    }

    let known = inventories
        .iter()
        .map(|one| one.known)
        .max()
        .unwrap_or_default();
    match known == CommitId::default() {
        true => Ok(None),
        false => Err(Error::CommitsLost { lost }),
    }
}

/// Returns the regions of an array in a commit, each with a process that has a copy: the owner if
/// it is still there. Leaves out regions whose copies differ.
fn sources(inventories: &[Inventory], id: CommitId, array: usize) -> Vec<RegionSource> {
    let mut found: BTreeMap<_, Vec<(ProcessId, &CopyEntry)>> = BTreeMap::new();
    for (process, inventory) in (0..).map(ProcessId).zip(inventories) {
        let entries = inventory.commits.iter().filter(|(kept, _)| *kept == id);
        let copies = entries.flat_map(|(_, entry)| &entry.copies);
        for copy in copies.filter(|copy| copy.array == array) {
            found.entry(&copy.ranges).or_default().push((process, copy));
        }
    }

    let source = |(ranges, holders): (&Vec<_>, Vec<(ProcessId, &CopyEntry)>)| {
        let own = holders.iter().find(|(_, copy)| copy.is_own);
        let (holder, CopyEntry { hash, .. }) = *own.or(holders.first())?;
        let region = ranges
            .iter()
            .map(|(start, end): &(usize, usize)| (*start, *end))
            .collect();
        let is_same = holders.iter().all(|(_, other)| other.hash == *hash);
        is_same.then_some(RegionSource {
            region,
            holder,
            hash: *hash,
        })
    };
    found.into_iter().filter_map(source).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: CommitId = CommitId {
        run: 0,
        epoch: 1,
        number: 1,
        step: 7,
        hash: 0,
    };

    /// Returns the inventory of a process with these regions of one array, (index, hash), the
    /// first of which is its own.
    fn has(copies: &[(u32, u128)]) -> Inventory {
        let copy = |(place, (index, hash)): (usize, &(u32, u128))| {
            let ranges = vec![(*index as usize, *index as usize + 1)];
            CopyEntry {
                array: 0,
                is_own: place == 0,
                ranges,
                hash: *hash,
            }
        };
        let copies = copies.iter().enumerate().map(copy).collect();
        let entry = CommitEntry {
            elements: vec![2],
            copies,
        };
        Inventory {
            commits: vec![(ID, entry)],
            ..Inventory::default()
        }
    }

    /// A commit, with (index, holder) of each region; or the error's text.
    type Chosen = Result<Option<(CommitId, Vec<(u32, u32)>)>, String>;

    fn chosen(inventories: &[Inventory]) -> Chosen {
        let chosen = choose(inventories, &|_, _| Some("w".to_owned()));
        let chosen = chosen.map_err(|error| error.to_string())?;
        Ok(chosen.map(|ChosenCommit { id, sources }| {
            let source =
                |source: &RegionSource| (source.region.range(0).start as u32, source.holder.0);
            (id, sources[0].iter().map(source).collect())
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
        let known = [
            has(&[(0, 5)]),
            Inventory {
                known: ID,
                ..Inventory::default()
            },
        ];
        let error = Error::CommitsLost {
            lost: vec!["step 7: w".to_owned()],
        };
        assert_eq!(chosen(&known), Err(error.to_string()));
        let damaged = [has(&[(0, 5), (1, 6)]), has(&[(0, 9), (1, 6)])];
        assert_eq!(chosen(&damaged), Ok(None));
    }

    #[test]
    fn whole_commit_is_preferred_to_a_newer_one_in_parts() {
        let mut both = has(&[(0, 5), (1, 6)]);
        let newer = CommitId { number: 2, ..ID };
        both.commits
            .push((newer, has(&[(0, 5)]).commits[0].1.clone()));
        assert_eq!(chosen(&[both]).unwrap().map(|(id, _)| id), Some(ID));
    }

    #[test]
    fn commits_of_one_step_are_not_mixed() {
        // The owner of the second region has the first commit of the step, its buddy the second.
        let of = |number, copies: &[(u32, u128)]| {
            let (_, entry) = has(copies).commits.remove(0);
            (CommitId { number, ..ID }, entry)
        };
        let commits = [
            vec![of(1, &[(0, 5)]), of(2, &[(0, 7)])],
            vec![of(1, &[(1, 6)])],
        ];
        let inventories = commits.map(|commits| Inventory {
            commits,
            ..Inventory::default()
        });
        assert_eq!(chosen(&inventories), Ok(Some((ID, vec![(0, 0), (1, 1)]))));
    }

    #[test]
    fn lost_commits_beyond_the_newest_are_counted() {
        let commits = (1..=30).map(|number| {
            let (_, entry) = has(&[(0, 5)]).commits.remove(0);
            (
                CommitId {
                    number,
                    step: number,
                    ..ID
                },
                entry,
            )
        });
        let inventory = Inventory {
            commits: commits.collect(),
            known: ID,
            ..Inventory::default()
        };
        let found = chosen(&[inventory]).unwrap_err();
        let expected = "Lost of step 30: w; of step 29: w; of step 28: w; of 27 older commits";
        assert!(found.ends_with(expected), "{found}");
    }
}
