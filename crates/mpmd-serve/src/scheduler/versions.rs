//! The versions of the weights: that of each sequence, and how one ends.

use super::Scheduler;

/// The versions in use: at most two.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ActiveVersions {
    /// That of sequences that begin.
    pub(super) newest: u64,
    /// The one before, until it has retired.
    pub(super) old: Option<u64>,
}

impl ActiveVersions {
    /// Returns the versions in the order in which a lane tries them: `last` is that of its last
    /// pass.
    pub(super) fn after(self, last: u64) -> impl Iterator<Item = u64> {
        let newest = Some(self.newest);
        let old = self.old;
        let order = if last == self.newest {
            [old, newest]
        } else {
            [newest, old]
        };
        order.into_iter().flatten()
    }
}

impl Scheduler {
    /// Returns the version of sequences that begin.
    pub fn newest(&self) -> u64 {
        self.versions.newest
    }

    /// Returns the older version, until it has [retired](Self::retired).
    pub fn old(&self) -> Option<u64> {
        self.versions.old
    }

    /// Returns the version of a request. `None` before it has begun.
    pub fn version(&self, id: u64) -> Option<u64> {
        self.sequences.get(&id)?.version
    }

    /// Returns the number of requests that have begun with a version, and have not ended.
    pub fn count(&self, version: u64) -> usize {
        self.sequences
            .values()
            .filter(|sequence| sequence.version == Some(version))
            .count()
    }

    /// Computes sequences that begin from now on by another version.
    ///
    /// # Panics
    ///
    /// If there is an [older version](Self::old).
    pub fn begin(&mut self, version: u64) {
        if version == self.versions.newest {
            return;
        }
        let old = self.versions.old;
        assert!(
            old.is_none(),
            "version {version} begins while version {old:?} is in use"
        );
        self.versions.old = Some(std::mem::replace(&mut self.versions.newest, version));
    }

    /// Returns the older version once no sequence and no open pass uses it. Returns it once.
    pub fn retired(&mut self) -> Option<u64> {
        let old = self.versions.old?;
        if self.count(old) > 0 || self.open.iter().any(|pass| pass.version == old) {
            return None;
        }
        self.blocks.forget(old);
        self.versions.old.take()
    }

    /// Computes the sequences of the older version again on the newest, from their tokens so far.
    /// Returns them.
    pub fn upgrade(&mut self) -> Vec<u64> {
        let Some(old) = self.versions.old else {
            return Vec::new();
        };
        let ids = self
            .sequences
            .iter()
            .filter(|(_, one)| one.version == Some(old));
        let ids: Vec<u64> = ids.map(|(id, _)| *id).collect();

        for id in ids.iter().rev() {
            let Some(sequence) = self.sequences.get_mut(id) else {
                continue;
            };
            sequence.version = Some(self.versions.newest);
            if sequence.place.is_some() {
                self.give_up_place(*id);
                self.waiting.push_front(*id);
            }
        }
        ids
    }

    /// Says if only requests that have begun get places. Others wait.
    pub fn close(&mut self, is_closed: bool) {
        self.is_closed = is_closed;
    }
}
