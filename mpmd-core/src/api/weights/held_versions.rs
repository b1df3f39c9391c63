//! The publisher's part of a link: the versions that it holds, their bits and notes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use mpmd_device::copy::{contiguous_bytes, copy_region};
use mpmd_layout::region::Region;
use mpmd_memory::SharedBuffer;

use super::bits::{ChangedPlaces, changes_bytes, hash, write_changes};
use super::layouts::LeafPiece;
use super::link::{Offering, PublisherLink};
use super::publisher::PublicationShared;
use super::store::{HashedRegion, OwnShard, PublicationEnd, StoredVersion};
use crate::error::{Error, Result};

/// The versions that a publisher's link keeps alive while it sends one of them.
pub(super) struct HeldVersions<'a> {
    shared: &'a PublicationShared,
    versions: Vec<Arc<StoredVersion>>,
    /// The number of the version that the store keeps for this link, now or once it is made.
    pin: Option<u64>,
    /// The elements that changed since the subscriber's version, for each shard of the store.
    /// `None` if unknown.
    changes: Option<Vec<ChangedPlaces>>,
    /// The regions that the store hashes in each new version for this link.
    hashed: HashSet<HashedRegion>,
}

/// A shard of the store, with its values in the chosen version.
struct OwnBits<'a> {
    /// Index of the shard in the store.
    index: usize,
    shard: &'a OwnShard,
    bits: &'a SharedBuffer,
}

impl Drop for HeldVersions<'_> {
    fn drop(&mut self) {
        self.pin(None);
        for region in self.hashed.drain() {
            self.shared.store.unhash(region);
        }
    }
}

impl<'a> HeldVersions<'a> {
    pub(super) fn new(shared: &'a PublicationShared) -> Self {
        Self {
            shared,
            versions: Vec::new(),
            pin: None,
            changes: None,
            hashed: HashSet::new(),
        }
    }

    /// Returns the shard of the store that contains the region `common` of a piece, with its values
    /// in the chosen version.
    fn own(&self, piece: &LeafPiece, common: &Region) -> Option<OwnBits<'_>> {
        let shards = &self.shared.store.shards;
        let version = self.versions.last()?;
        let common = piece.in_source(common);
        let index = shards
            .iter()
            .position(|own| own.leaf == piece.from && own.region.contains(&common))?;
        Some(OwnBits {
            index,
            shard: &shards[index],
            bits: &version.bits[index],
        })
    }
}

impl PublisherLink for HeldVersions<'_> {
    fn offered(&self) -> Offering {
        Offering {
            id: self.shared.id.clone(),
            leaves: self.shared.leaves.clone(),
        }
    }

    fn wait(
        &mut self,
        above: Option<u64>,
        timeout: Duration,
    ) -> std::result::Result<Vec<u64>, PublicationEnd> {
        let store = &self.shared.store;
        let numbers = store.wait(above, self.pin, timeout)?;
        self.versions = numbers
            .iter()
            .filter_map(|number| store.get(*number))
            .collect();
        Ok(self.versions.iter().map(|version| version.number).collect())
    }

    fn is_short(&self) -> bool {
        self.shared.store.is_short()
    }

    fn pin(&mut self, number: Option<u64>) {
        if let Some(number) = number {
            let held = self
                .versions
                .iter()
                .find(|version| version.number == number);
            self.shared.store.pin(number, held.cloned());
        }
        if let Some(before) = std::mem::replace(&mut self.pin, number) {
            self.shared.store.unpin(before);
        }
    }

    fn choose(&mut self, number: u64) {
        self.pin(None);
        self.versions.retain(|version| version.number == number);
        self.changes = None;
    }

    fn change_bytes(&mut self, pieces: &[LeafPiece], base: u64, number: u64) -> Vec<Option<u64>> {
        self.changes = self.shared.store.changes(base, number);
        let Some(changes) = &self.changes else {
            return vec![None; pieces.len()];
        };

        let bytes = |piece: &LeafPiece| {
            let own = self.shared.store.shards.iter().zip(changes);
            let own = own.filter(|(own, _)| own.leaf == piece.from);
            own.map(|(own, places)| changes_bytes(places, own.dtypes[1].size()) as u64)
                .sum()
        };
        pieces.iter().map(|piece| Some(bytes(piece))).collect()
    }

    fn bits(&mut self, piece: &LeafPiece, region: &Region) -> Result<SharedBuffer> {
        let gone = || Error::kernel("a region of a published version is gone");
        let OwnBits { shard, bits, .. } = self.own(piece, region).ok_or_else(gone)?;
        #[cfg(test)]
        let bits = &super::tests::on_the_way(&self.shared.name, self.versions[0].number, bits);

        let region = piece.in_source(region);
        let item = shard.dtypes[1].size();
        if let Some(range) = contiguous_bytes(&shard.region, &region, item) {
            return Ok(bits.slice(range));
        }
        let mut part = vec![0; region.elements() * item];
        copy_region(bits, &shard.region, &mut part, &region, &region, item);
        Ok(part.into())
    }

    fn note(&mut self, piece: &LeafPiece, common: &Region, changes: bool, to: &mut Vec<u8>) {
        let Some(OwnBits { index, shard, bits }) = self.own(piece, common) else {
            return;
        };
        let common = piece.in_source(common);
        let item = shard.dtypes[1].size();
        let known = self
            .versions
            .last()
            .and_then(|one| one.hashes[index].get(&common).copied());
        let hash =
            known.unwrap_or_else(|| hash(bits, &shard.region, &common, &piece.from_shape, item));
        to.extend(hash.to_le_bytes());

        // The length goes in front of the changes, and is known after them.
        if changes {
            let at = to.len();
            to.extend(0u64.to_le_bytes());
            if let Some(places) = self.changes.as_ref().map(|changes| &changes[index]) {
                if common == shard.region {
                    write_changes(places, bits, item, to);
                } else {
                    let places_within = within(places, shard, &common);
                    let mut values = vec![0; common.elements() * item];
                    copy_region(bits, &shard.region, &mut values, &common, &common, item);
                    write_changes(&places_within, &values, item, to);
                }
            }
            let len = (to.len() - at - 8) as u64;
            to[at..at + 8].copy_from_slice(&len.to_le_bytes());
        }

        // Next time it is computed while the bits are in the cache.
        let hashed = HashedRegion {
            shard: index,
            region: common,
        };
        if known.is_none() && self.hashed.insert(hashed.clone()) {
            self.shared.store.hash(hashed);
        }
    }

    fn sent(&mut self, number: u64, refused: Option<&str>) {
        let mut metrics = self.shared.metrics.lock();
        match refused {
            None => metrics.taken += 1,
            Some(why) => {
                metrics.refused += 1;
                tracing::warn!(
                    name = self.shared.name,
                    number,
                    "a subscriber refuses it: {why}"
                );
            }
        }
    }
}

/// Selects the changed elements of a shard that lie in `common`, and returns their indices in
/// `common`.
fn within(places: &ChangedPlaces, shard: &OwnShard, common: &Region) -> ChangedPlaces {
    let shape = shard.region.shape();
    let mut found = ChangedPlaces::default();
    for place in places.iter() {
        // The place as indices, from the last dimension to the first.
        let mut left = place;
        let mut at = 0;
        let mut step = 1;
        let mut is_in = true;
        for dim in (0..shape.len()).rev() {
            let index = shard.region.range(dim).start + left % shape[dim];
            let range = common.range(dim);
            left /= shape[dim];
            is_in &= range.contains(&index);
            at += index.saturating_sub(range.start) * step;
            step *= range.len();
        }

        if is_in {
            found.push(at);
        }
    }
    found
}
