//! The versions of the weights: that of each sequence, and how one ends.

use super::Scheduler;

/// The weight versions in use: at most two.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ActiveVersions {
    /// The version of sequences that begin from now on.
    pub(super) newest: u64,
    /// The version before the newest, until it has retired.
    pub(super) old: Option<u64>,
}

impl ActiveVersions {
    /// Returns the versions in the order in which a lane tries them. `last` is the version of the
    /// lane's last pass, and comes second.
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
    /// Returns the version of sequences that begin from now on.
    pub fn newest(&self) -> u64 {
        self.versions.newest
    }

    /// Returns the version before the newest, or `None` after it has [retired](Self::retired).
    pub fn old(&self) -> Option<u64> {
        self.versions.old
    }

    /// Returns the version of a request. `None` before it has begun.
    pub fn version(&self, id: u64) -> Option<u64> {
        self.sequences.get(&id)?.version
    }

    /// Returns the number of requests that use a version and have not ended.
    pub fn count(&self, version: u64) -> usize {
        self.sequences
            .values()
            .filter(|sequence| sequence.version == Some(version))
            .count()
    }

    /// Sets the version of sequences that begin from now on.
    ///
    /// # Panics
    ///
    /// If an [older version](Self::old) is still in use.
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

    /// Retires the older version once no sequence and no open pass uses it. Returns it at that one
    /// time, otherwise `None`.
    pub fn retired(&mut self) -> Option<u64> {
        let old = self.versions.old?;
        if self.count(old) > 0 || self.open.iter().any(|pass| pass.version == old) {
            return None;
        }
        self.blocks.forget(old);
        self.versions.old.take()
    }

    /// Moves all sequences of the older version to the newest, which computes them again from their
    /// tokens so far. Returns their ids.
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

    /// Sets whether new sequences must wait. Sequences that have begun still get slots.
    pub fn close(&mut self, is_closed: bool) {
        self.is_closed = is_closed;
    }
}
