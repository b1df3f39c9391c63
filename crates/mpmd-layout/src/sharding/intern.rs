//! Interns shardings: equal shardings become one object, so comparing two is a pointer comparison.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;

use super::{Layout, ShardingKind};
use crate::topology::DeviceId;

/// Minimum number of entries at which [`Interner::sweep`] removes dead entries.
const SWEEP_ABOVE: usize = 256;

/// The data of a sharding, shared by all equal shardings of the process.
pub(super) struct InternedSharding {
    pub(super) kind: ShardingKind,
    pub(super) fingerprint: u64,
    /// The devices of an enumerated sharding, in the order of its list of shards. Empty for other
    /// kinds.
    pub(super) listed: Vec<DeviceId>,
    pub(super) layouts: Mutex<HashMap<Box<[usize]>, Arc<Layout>>>,
}

/// Returns the one object of this process for a sharding of kind `kind`, and creates it if needed.
/// Takes the interner's lock.
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

/// The table of all live shardings of this process. It makes equal shardings one object; results do
/// not depend on it.
static INTERNER: LazyLock<Mutex<Interner>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Interner {
    by_fingerprint: HashMap<u64, Vec<Weak<InternedSharding>>>,
    /// Number of entries that must be exceeded before the next sweep.
    sweep_above: usize,
}

impl Interner {
    /// Removes dead entries if the table has doubled since the last sweep. So its size stays
    /// proportional to the number of live shardings.
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
