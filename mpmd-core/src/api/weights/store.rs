//! The versions that a process of a publisher has: their bits, and the elements that have changed
//! from each version to the next.

use std::collections::btree_map::{BTreeMap, Entry};
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use mpmd_base::block::{Condvar, Mutex, now};
use mpmd_base::deadline::after;
use mpmd_device::cpu::bits::each_changed;
use mpmd_layout::aval::DType;
use mpmd_layout::region::Region;
use mpmd_memory::{Arena, OutOfMemory};
use mpmd_memory::{Pool, SharedBuffer};
use mpmd_proto::Failure;

use super::bits::{ChangedPlaces, cast, hash};

/// Number of versions whose values are kept: the processes of a publisher may be one version apart.
const VERSIONS: usize = 2;
/// Limit, in versions, of the memory that the store and its readers hold. Above it, readers copy.
const LENT: u64 = 6;
/// Divisor of a version's bytes that limits the bytes of stored changes.
const CHANGES_PART: usize = 4;
/// Largest number of versions whose changes are stored. Those of an unchanged version have no
/// bytes.
const CHANGES: usize = 1024;
/// Bytes of values that are cast and compared at a time. They fit into a core's cache.
const SLICE: usize = 256 << 10;

/// A shard that this process publishes, because its first device in the sharding belongs to this
/// process.
#[derive(Clone, Debug)]
pub(super) struct OwnShard {
    pub(super) leaf: usize,
    /// The shape of the whole leaf.
    pub(super) shape: Vec<usize>,
    pub(super) region: Region,
    /// The dtype of the array, and the dtype in which it is published.
    pub(super) dtypes: [DType; 2],
}

/// The reason why a version could not be copied to the store.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum CopyError {
    /// The operation that makes an array of the version has failed.
    #[error("{0}")]
    Values(Arc<Failure>),
    /// There is no memory for the copy.
    #[error(transparent)]
    Memory(#[from] OutOfMemory),
    /// The program ended before all values of the version were available.
    #[error("the program has ended")]
    ProgramEnded,
    /// The copying code has panicked, with this message.
    #[error("{0}")]
    Panicked(String),
}

/// The reason why a publication has no further version.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum PublicationEnd {
    /// The publisher was dropped.
    #[error("the publisher has ended")]
    Dropped,
    /// A version could not be copied to the store.
    #[error("version {version} could not be published: {why}")]
    NotCopied { version: u64, why: CopyError },
}

/// The values of a version on this process, for each shard of the store.
pub(super) struct StoredVersion {
    pub(super) number: u64,
    /// The number of the previous version.
    before: Option<u64>,
    pub(super) bits: Vec<SharedBuffer>,
    /// For each shard of the store, the hashes of the regions that links have requested.
    pub(super) hashes: Vec<HashMap<Region, u64>>,
}

/// A region of a shard whose hash is computed in each new version.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) struct HashedRegion {
    /// Index of the shard in the store.
    pub(super) shard: usize,
    pub(super) region: Region,
}

/// The elements that changed from one version to the next, for each shard of the store.
struct ChangeStep {
    from: u64,
    to: u64,
    places: Vec<ChangedPlaces>,
    bytes: usize,
}

/// The values of a shard in a new version.
struct CopiedShard {
    bits: SharedBuffer,
    /// The indices of the elements that differ from the previous version.
    changed: ChangedPlaces,
}

/// The versions that this process publishes, shared by its links.
pub(super) struct Store {
    pub(super) shards: Vec<OwnShard>,
    memory: Pool,
    tracks_changes: bool,
    state: Mutex<StoreState>,
    changed: Condvar,
}

#[derive(Default)]
struct StoreState {
    versions: VecDeque<Arc<StoredVersion>>,
    /// Version numbers that links have pinned: for each, the store keeps the first version at or
    /// above it.
    pins: Vec<u64>,
    pinned: Vec<Arc<StoredVersion>>,
    /// The regions to hash in each new version, with the number of links that need each.
    hashed: BTreeMap<HashedRegion, usize>,
    steps: VecDeque<ChangeStep>,
    /// The reason why no further version will come; `None` while the publication lasts.
    ended: Option<PublicationEnd>,
}

impl StoredVersion {
    /// Returns true if this is the first version at or above one of the numbers in `pins`.
    fn is_pinned(&self, pins: &[u64]) -> bool {
        pins.iter()
            .any(|pin| self.before < Some(*pin) && *pin <= self.number)
    }
}

impl Store {
    /// Creates a store without versions. With `tracks_changes`, it finds the elements that change
    /// between versions.
    pub(super) fn new(shards: Vec<OwnShard>, tracks_changes: bool) -> Self {
        // Other processes of this host read the bits where they are.
        let arena = Arena::shared().unwrap_or_else(|_| Arena::private());
        let memory = Pool::in_arena("published versions", None, &arena);
        Self {
            shards,
            memory,
            tracks_changes,
            state: Mutex::default(),
            changed: Condvar::default(),
        }
    }

    /// Adds a version: copies the values that `next` returns for each shard, cast to the published
    /// dtype. If changes are tracked, also compares them with the last version. Must be called by
    /// one thread at a time.
    ///
    /// # Errors
    ///
    /// If `next` fails or there is no memory. The store then has no such version.
    pub(super) fn add(
        &self,
        number: u64,
        mut next: impl FnMut(usize) -> Result<SharedBuffer, CopyError>,
    ) -> Result<(), CopyError> {
        let (last, hashed) = {
            let state = self.state.lock();
            (state.versions.back().cloned(), state.hashed.clone())
        };
        let last = last.filter(|_| self.tracks_changes);

        let mut bits = Vec::new();
        let mut places = Vec::new();
        let mut hashes = Vec::new();
        for (index, shard) in self.shards.iter().enumerate() {
            let values = next(index)?;
            let old = last.as_ref().map(|last| &*last.bits[index]);
            let hashed = hashed.keys().filter(|hashed| hashed.shard == index);
            let mut own = hashed.map(|hashed| (hashed.region.clone(), 0)).collect();
            let copied = self.copy(shard, &values, old, &mut own)?;
            hashes.push(own);
            bits.push(copied.bits);
            places.push(copied.changed);
        }

        let mut state = self.state.lock();
        if let Some(last) = last {
            let bytes = places.iter().map(ChangedPlaces::bytes).sum();
            state.steps.push_back(ChangeStep {
                from: last.number,
                to: number,
                places,
                bytes,
            });
            let most = bits.iter().map(|bits| bits.len()).sum::<usize>() / CHANGES_PART;
            while state.steps.len() > CHANGES
                || state.steps.iter().map(|step| step.bytes).sum::<usize>() > most
            {
                state.steps.pop_front();
            }
        }

        let before = state.versions.back().map(|version| version.number);
        state.versions.push_back(Arc::new(StoredVersion {
            number,
            before,
            bits,
            hashes,
        }));
        if state.versions.len() > VERSIONS
            && let Some(gone) = state.versions.pop_front()
            && gone.is_pinned(&state.pins)
        {
            state.pinned.push(gone);
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// Returns a shard's values in the published dtype, and the indices that differ from `old`.
    /// Adds the regions' hashes to `hashes`.
    fn copy(
        &self,
        OwnShard {
            shape,
            region,
            dtypes: [from, to],
            ..
        }: &OwnShard,
        values: &[u8],
        old: Option<&[u8]>,
        hashes: &mut HashMap<Region, u64>,
    ) -> Result<CopiedShard, OutOfMemory> {
        let from_item = from.size();
        let item = to.size();
        let mut new = self.memory.allocate(values.len() / from_item * item)?;

        // Some rows of the first dimension at once.
        let rows = region.shape().first().copied().unwrap_or(1);
        let row = region.elements() / rows.max(1);
        let each = (SLICE / (from_item * row.max(1))).clamp(1, rows.max(1));
        let slices = values.chunks((each * row * from_item).max(1));
        let mut places = ChangedPlaces::default();
        let news = new.chunks_mut((each * row * item).max(1));
        for (i, (values, new)) in slices.zip(news).enumerate() {
            cast(*from, values, *to, new);
            let first = i * each;
            if !hashes.is_empty() {
                let slice = rows_of(region, first..(first + each).min(rows));
                for (hashed, sum) in hashes.iter_mut() {
                    let common = hashed.intersect(&slice);
                    let own = common.map(|common| hash(new, &slice, &common, shape, item));
                    *sum = sum.wrapping_add(own.unwrap_or(0));
                }
            }
            if let Some(old) = old {
                let old = &old[first * row * item..][..new.len()];
                each_changed(old, new, item, |place| places.push(first * row + place));
            }
        }
        Ok(CopiedShard {
            bits: new.freeze(),
            changed: places,
        })
    }

    /// Requests the hash of a region in each new version, until [`unhash`](Self::unhash).
    pub(super) fn hash(&self, region: HashedRegion) {
        *self.state.lock().hashed.entry(region).or_default() += 1;
    }

    /// Withdraws one request for the hash of a region.
    pub(super) fn unhash(&self, region: HashedRegion) {
        if let Entry::Occupied(mut links) = self.state.lock().hashed.entry(region) {
            *links.get_mut() -= 1;
            if *links.get() == 0 {
                links.remove();
            }
        }
    }

    /// Returns true if the store and its readers hold more memory than [`LENT`] versions.
    pub(super) fn is_short(&self) -> bool {
        let state = self.state.lock();
        let Some(newest) = state.versions.back() else {
            return false;
        };
        let bits = newest.bits.iter().map(|bits| Pool::rounded(bits.len()));
        self.memory.stats().live > LENT * bits.sum::<u64>()
    }

    /// Waits for a version above `above`, at most for `timeout`. If `pin` is set, waits for a
    /// version at or above `pin`. Returns the numbers of all stored versions above `above`.
    ///
    /// # Errors
    ///
    /// If no further version will come: the publisher has ended, or could not make a version.
    pub(super) fn wait(
        &self,
        above: Option<u64>,
        pin: Option<u64>,
        timeout: Duration,
    ) -> Result<Vec<u64>, PublicationEnd> {
        let until = after(now(), timeout);
        let mut state = self.state.lock();
        loop {
            let numbers = state
                .pinned
                .iter()
                .chain(&state.versions)
                .map(|version| version.number);
            let newer: Vec<u64> = numbers.filter(|number| Some(*number) > above).collect();
            let has_all = newer.iter().any(|number| Some(*number) >= pin);
            match &state.ended {
                _ if has_all => return Ok(newer),
                Some(why) if newer.is_empty() => return Err(why.clone()),
                Some(_) => return Ok(newer),
                None => {}
            }

            if self.changed.wait_until(&mut state, until).timed_out() {
                return Ok(newer);
            }
        }
    }

    /// Keeps the first version at or above `number` until [`unpin`](Self::unpin). This is a version
    /// to come, a stored one, or `held`.
    pub(super) fn pin(&self, number: u64, held: Option<Arc<StoredVersion>>) {
        let mut state = self.state.lock();
        state.pins.push(number);
        let mut known = state.pinned.iter().chain(&state.versions);
        if let Some(held) = held
            && known.all(|version| version.number != held.number)
        {
            state.pinned.push(held);
        }
    }

    /// Withdraws one pin of `number`.
    pub(super) fn unpin(&self, number: u64) {
        let state = &mut *self.state.lock();
        if let Some(place) = state.pins.iter().position(|pin| *pin == number) {
            state.pins.swap_remove(place);
        }
        state
            .pinned
            .retain(|version| version.is_pinned(&state.pins));
    }

    /// Returns a version, or `None` if it is no longer stored.
    pub(super) fn get(&self, number: u64) -> Option<Arc<StoredVersion>> {
        let state = self.state.lock();
        let mut all = state.pinned.iter().chain(&state.versions);
        all.find(|version| version.number == number).cloned()
    }

    /// Returns, for each shard, the indices of the elements that changed between two versions.
    /// `None` if the changes are no longer stored.
    pub(super) fn changes(&self, base: u64, number: u64) -> Option<Vec<ChangedPlaces>> {
        let state = self.state.lock();
        let mut steps = state.steps.iter().skip_while(|step| step.from != base);
        let first = steps.next()?;
        let mut to = first.to;
        let mut places = first.places.clone();
        for step in steps.take_while(|step| step.to <= number) {
            places
                .iter_mut()
                .zip(&step.places)
                .for_each(|(all, more)| *all = all.or(more));
            to = step.to;
        }
        (to == number).then_some(places)
    }

    /// Returns the bytes of memory that the store's pool has mapped: versions, and memory for the
    /// next one.
    pub(super) fn bytes(&self) -> u64 {
        self.memory.stats().mapped
    }

    /// Returns the number of entries that links have in the store: pinned versions, their numbers,
    /// and regions to hash.
    #[cfg(test)]
    pub(super) fn link_entries(&self) -> usize {
        let state = self.state.lock();
        state.pins.len() + state.pinned.len() + state.hashed.len()
    }

    /// Ends the publication with the reason `why`. Links end after they have sent the last version.
    pub(super) fn end(&self, why: PublicationEnd) {
        self.state.lock().ended.get_or_insert(why);
        self.changed.notify_all();
    }
}

/// Returns the part of a region that has these rows of its first dimension.
fn rows_of(region: &Region, rows: Range<usize>) -> Region {
    let ranges = region.ranges().enumerate().map(|(dim, range)| match dim {
        0 => range.start + rows.start..range.start + rows.end,
        _ => range,
    });
    Region::new(ranges.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn store() -> Store {
        let dtypes = [DType::F32, DType::Bf16];
        let (region, shape) = (Region::full(&[3]), vec![3]);
        let shard = OwnShard {
            leaf: 0,
            shape,
            region,
            dtypes,
        };
        Store::new(vec![shard], true)
    }

    fn add(store: &Store, number: u64, values: [f32; 3]) {
        let bytes: Vec<u8> = values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect();
        store.add(number, |_| Ok(bytes.clone().into())).unwrap();
    }

    #[test]
    fn versions_without_changes_do_not_add_up() {
        let store = store();
        let last = 2 * CHANGES as u64;
        for number in 0..=last {
            add(&store, number, [1.0, 2.0, 3.0]);
        }
        assert_eq!(store.state.lock().steps.len(), CHANGES);
        let oldest = last - CHANGES as u64;
        assert!(store.changes(oldest, last).is_some());
        assert!(store.changes(oldest - 1, last).is_none());
    }

    #[test]
    fn changes_of_missed_versions_are_merged_while_they_are_known() {
        let store = store();
        add(&store, 1, [1.0, 2.0, 3.0]);
        // No bit of bf16 changes.
        add(&store, 3, [1.0001, 2.0, 3.0]);
        add(&store, 4, [1.0, 9.0, 3.0]);
        let of = |base, number| {
            let changes = store.changes(base, number)?;
            Some(changes[0].iter().collect::<Vec<_>>())
        };
        assert_eq!(
            (of(1, 3), of(3, 4), of(1, 4)),
            (Some(vec![]), Some(vec![1]), Some(vec![1]))
        );
        assert_eq!((of(2, 4), of(4, 5), of(1, 5)), (None, None, None));
        assert_eq!(store.wait(None, None, SECOND), Ok(vec![3, 4]));
        assert_eq!(store.wait(Some(3), None, SECOND), Ok(vec![4]));
        assert_eq!(store.wait(Some(4), None, Duration::ZERO), Ok(vec![]));
        assert_eq!(
            &*store.get(4).unwrap().bits[0],
            [0x80, 0x3f, 0x10, 0x41, 0x40, 0x40]
        );
        assert!(store.get(1).is_none());
        // More changes than a quarter of the bits are not worth their memory.
        add(&store, 5, [7.0, 7.0, 7.0]);
        assert_eq!((of(3, 4), of(4, 5)), (None, None));
        store.end(PublicationEnd::Dropped);
        assert_eq!(store.wait(Some(4), None, SECOND), Ok(vec![5]));
        assert_eq!(
            store.wait(Some(5), None, SECOND),
            Err(PublicationEnd::Dropped)
        );
    }

    #[test]
    fn pinned_version_stays_until_its_last_pin_goes() {
        let store = store();
        (0..2).for_each(|_| store.pin(15, None));
        assert_eq!(store.wait(None, Some(15), Duration::ZERO), Ok(vec![]));
        for number in (10..=50).step_by(10) {
            add(&store, number, [number as f32; 3]);
        }
        assert_eq!(store.wait(None, Some(15), SECOND), Ok(vec![20, 40, 50]));
        store.unpin(15);
        assert_eq!(store.get(20).unwrap().number, 20);
        store.unpin(15);
        assert!(store.get(20).is_none());
    }

    #[test]
    fn version_that_a_link_holds_stays_for_its_pin() {
        let store = store();
        (1..=2).for_each(|number| add(&store, number, [number as f32; 3]));
        let held = store.get(1);
        (3..=5).for_each(|number| add(&store, number, [number as f32; 3]));
        store.pin(1, held);
        assert_eq!(store.wait(None, Some(1), SECOND), Ok(vec![1, 4, 5]));
        store.unpin(1);
        assert_eq!(store.wait(None, None, SECOND), Ok(vec![4, 5]));
    }

    #[test]
    fn memory_that_readers_keep_is_short() {
        let store = store();
        let mut kept = Vec::new();
        for number in 0..20 {
            add(&store, number, [number as f32; 3]);
            assert_eq!(store.is_short(), number >= LENT, "{number}");
            kept.push(store.get(number).unwrap().bits[0].clone());
        }
        kept.clear();
        assert!(!store.is_short());
    }

    #[test]
    fn hash_is_computed_until_the_last_link_ends() {
        let store = store();
        let part = Region::full(&[2]);
        let hashed_part = HashedRegion {
            shard: 0,
            region: part,
        };
        (0..2).for_each(|_| store.hash(hashed_part.clone()));
        for (number, hashed) in [(1, 1), (2, 1), (3, 0)] {
            add(&store, number, [1.0; 3]);
            assert_eq!(
                store.get(number).unwrap().hashes[0].len(),
                hashed,
                "{number}"
            );
            store.unhash(hashed_part.clone());
        }
        assert!(store.state.lock().hashed.is_empty());
    }

    #[test]
    fn hashes_are_those_of_the_bits() {
        let (region, shape) = (Region::new(vec![1..401, 0..700]), vec![402, 700]);
        let part = Region::new(vec![130..399, 3..650]);
        let dtypes = [DType::F32, DType::Bf16];
        let shard = OwnShard {
            leaf: 0,
            shape: shape.clone(),
            region: region.clone(),
            dtypes,
        };
        let store = Store::new(vec![shard], true);
        store.hash(HashedRegion {
            shard: 0,
            region: part.clone(),
        });
        let bytes: Vec<u8> = (0..400 * 700u32)
            .flat_map(|i| (i as f32).to_le_bytes())
            .collect();
        store.add(1, |_| Ok(bytes.clone().into())).unwrap();
        let version = store.get(1).unwrap();
        let expected = hash(&version.bits[0], &region, &part, &shape, 2);
        assert_eq!(version.hashes[0][&part], expected);
    }

    #[test]
    fn version_without_values_is_none() {
        let store = store();
        add(&store, 1, [0.0; 3]);
        assert_eq!(
            store.add(2, |_| Err(CopyError::ProgramEnded)),
            Err(CopyError::ProgramEnded)
        );
        assert_eq!(store.wait(Some(1), None, Duration::ZERO), Ok(vec![]));
    }
}
