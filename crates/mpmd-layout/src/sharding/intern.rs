//! Interns shardings: equal shardings become one object, so comparing two is a pointer comparison.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;

use super::{Layout, ShardingKind};
use crate::topology::DeviceId;

/// Number of entries above which the interner removes dead entries.
const SWEEP_ABOVE: usize = 256;

/// The data that equal shardings share.
pub(super) struct InternedSharding {
    pub(super) kind: ShardingKind,
    pub(super) fingerprint: u64,
    /// The devices of listed shards, in the order of the list. Empty for other kinds.
    pub(super) listed: Vec<DeviceId>,
    pub(super) layouts: Mutex<HashMap<Box<[usize]>, Arc<Layout>>>,
}

/// Returns the one object with this value; creates it if there is none. Takes the interner's lock.
pub(super) fn intern(kind: ShardingKind) -> Arc<InternedSharding> {
    let fingerprint = kind.fingerprint();

    let mut interner = INTERNER.lock();
    let bucket = interner.by_fingerprint.entry(fingerprint).or_default();
    // Upgraded first and compared after: dropping the last strong reference here is harmless.
    let found = bucket
        .iter()
        .filter_map(Weak::upgrade)
        .find(|inner| inner.kind == kind);

    if let Some(inner) = found {
        return inner;
    }

    let listed = match &kind {
        ShardingKind::Enumerated { shards, .. } => {
            shards.iter().map(|(device, _)| *device).collect()
        }
        _ => Vec::new(),
    };
    let inner = Arc::new(InternedSharding {
        kind,
        fingerprint,
        listed,
        layouts: Mutex::default(),
    });

    bucket.retain(|weak| weak.strong_count() > 0);
    bucket.push(Arc::downgrade(&inner));
    interner.sweep();
    inner
}

/// The table of all live shardings of this process. It only makes equal values one object and
/// changes no result.
static INTERNER: LazyLock<Mutex<Interner>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Interner {
    by_fingerprint: HashMap<u64, Vec<Weak<InternedSharding>>>,
    /// The number of entries above which the next sweep happens.
    sweep_above: usize,
}

impl Interner {
    /// Removes dead entries, often enough that the table stays proportional to the number of live
    /// shardings.
    fn sweep(&mut self) {
        if self.by_fingerprint.len() <= self.sweep_above.max(SWEEP_ABOVE) {
            return;
        }
        self.by_fingerprint
            .retain(|_, bucket| bucket.iter().any(|weak| weak.strong_count() > 0));
        self.sweep_above = 2 * self.by_fingerprint.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sharding::Sharding;

    #[test]
    fn interner_forgets_dropped_shardings() {
        let device = |i: u32| Sharding::single_device(DeviceId(1_000_000 + i));
        let kept = device(0);
        (1..5000).for_each(|i| drop(device(i)));
        assert!(INTERNER.lock().by_fingerprint.len() < 2500);
        assert_eq!(device(0), kept);
    }
}
