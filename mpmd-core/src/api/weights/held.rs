//! The publisher's part of a link: the versions that it holds, their bits and notes.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use mpmd_device::copy::{contiguous_bytes, copy_region};
use mpmd_layout::region::Region;
use mpmd_memory::SharedBuffer;

use super::bits::{Places, changes_bytes, hash, write_changes};
use super::layouts::{Offered, Piece};
use super::link::Source;
use super::publisher::Shared;
use super::store::{OwnShard, Version};
use crate::error::{Error, Result};

/// The versions that a link holds while it moves one of them.
pub(super) struct Held<'a> {
    shared: &'a Shared,
    versions: Vec<Arc<Version>>,
    /// The version that is kept for this link once it comes.
    pin: Option<u64>,
    /// The changes since the subscriber's version, by own shard.
    changes: Option<Vec<Places>>,
    /// The regions of own shards whose hashes are computed with each version for this link.
    hashed: HashSet<(usize, Region)>,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.pin(None);
        for (shard, region) in self.hashed.drain() {
            self.shared.store.unhash(shard, region);
        }
    }
}

impl<'a> Held<'a> {
    pub(super) fn new(shared: &'a Shared) -> Self {
        let (versions, hashed) = Default::default();
        Self {
            shared,
            versions,
            pin: None,
            changes: None,
            hashed,
        }
    }

    /// Returns the number and the bits of an own shard in the chosen version.
    fn own(&self, piece: &Piece, common: &Region) -> Option<(usize, &OwnShard, &SharedBuffer)> {
        let (shards, version) = (&self.shared.store.shards, self.versions.last()?);
        let common = piece.in_source(common);
        let own = shards
            .iter()
            .position(|own| own.leaf == piece.from && own.region.contains(&common))?;
        Some((own, &shards[own], &version.bits[own]))
    }
}

impl Source for Held<'_> {
    fn offered(&self) -> (String, Vec<Offered>) {
        (self.shared.id.clone(), self.shared.leaves.clone())
    }

    fn wait(
        &mut self,
        above: Option<u64>,
        timeout: Duration,
    ) -> std::result::Result<Vec<u64>, String> {
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

    fn change_bytes(&mut self, pieces: &[Piece], base: u64, number: u64) -> Vec<Option<u64>> {
        self.changes = self.shared.store.changes(base, number);
        let Some(changes) = &self.changes else {
            return vec![None; pieces.len()];
        };
        let bytes = |piece: &Piece| {
            let own = self.shared.store.shards.iter().zip(changes);
            let own = own.filter(|(own, _)| own.leaf == piece.from);
            own.map(|(own, places)| changes_bytes(places, own.dtypes[1].size()) as u64)
                .sum()
        };
        pieces.iter().map(|piece| Some(bytes(piece))).collect()
    }

    fn bits(&mut self, piece: &Piece, region: &Region) -> Result<SharedBuffer> {
        let gone = || Error::kernel("a region of a published version is gone");
        let (_, own, bits) = self.own(piece, region).ok_or_else(gone)?;
        #[cfg(test)]
        let bits = &super::tests::on_the_way(&self.shared.name, self.versions[0].number, bits);
        let (region, item) = (piece.in_source(region), own.dtypes[1].size());
        if let Some(range) = contiguous_bytes(&own.region, &region, item) {
            return Ok(bits.slice(range));
        }
        let mut part = vec![0; region.elements() * item];
        copy_region(bits, &own.region, &mut part, &region, &region, item);
        Ok(part.into())
    }

    fn note(&mut self, piece: &Piece, common: &Region, changes: bool, to: &mut Vec<u8>) {
        let Some((index, own, bits)) = self.own(piece, common) else {
            return;
        };
        let (common, item) = (piece.in_source(common), own.dtypes[1].size());
        let known = self
            .versions
            .last()
            .and_then(|one| one.hashes[index].get(&common).copied());
        let hash =
            known.unwrap_or_else(|| hash(bits, &own.region, &common, &piece.from_shape, item));
        to.extend(hash.to_le_bytes());
        if changes {
            let at = to.len();
            to.extend(0u64.to_le_bytes());
            if let Some(places) = self.changes.as_ref().map(|changes| &changes[index]) {
                match common == own.region {
                    true => write_changes(places, bits, item, to),
                    false => {
                        let (places, values) = within(places, bits, own, &common);
                        write_changes(&places, &values, item, to);
                    }
                }
            }
            let len = (to.len() - at - 8) as u64;
            to[at..at + 8].copy_from_slice(&len.to_le_bytes());
        }

        // Next time it is computed while the bits are in the cache.
        if known.is_none() && self.hashed.insert((index, common.clone())) {
            self.shared.store.hash(index, common);
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

/// Returns the places in `common` of changes of a shard, and the values of `common`.
fn within(places: &Places, bits: &[u8], own: &OwnShard, common: &Region) -> (Places, Vec<u8>) {
    let item = own.dtypes[1].size();
    let mut values = vec![0; common.elements() * item];
    copy_region(bits, &own.region, &mut values, common, common, item);
    let (shape, mut found) = (own.region.shape(), Places::default());
    for place in places.iter() {
        let (mut left, mut at, mut step, mut is_in) = (place, 0, 1, true);
        for dim in (0..shape.len()).rev() {
            let (index, range) = (
                own.region.range(dim).start + left % shape[dim],
                common.range(dim),
            );
            left /= shape[dim];
            is_in &= range.contains(&index);
            at += index.saturating_sub(range.start) * step;
            step *= range.len();
        }
        if is_in {
            found.push(at);
        }
    }
    (found, values)
}
