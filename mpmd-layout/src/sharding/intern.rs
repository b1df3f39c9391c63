//! The table in which equal shardings become one object, so that comparing two costs a pointer.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Weak};

use parking_lot::Mutex;

use super::{Layout, ShardingKind};
use crate::topology::DeviceId;

/// The interner looks for dead entries only above this many.
const SWEEP_ABOVE: usize = 256;

/// All that equal shardings share.
pub(super) struct Inner {
    pub(super) kind: ShardingKind,
    pub(super) fingerprint: u64,
    /// The devices of listed shards, in the order of the list; of other kinds none.
    pub(super) listed: Vec<DeviceId>,
    pub(super) layouts: Mutex<HashMap<Box<[usize]>, Arc<Layout>>>,
}

/// The one object of this value.
pub(super) fn intern(kind: ShardingKind) -> Arc<Inner> {
    let fingerprint = kind.fingerprint();
    let mut interner = INTERNER.lock();
    let bucket = interner.by_fingerprint.entry(fingerprint).or_default();
    // Upgraded first and compared after: dropping a last holder in here is harmless.
    let found = bucket.iter().filter_map(Weak::upgrade).find(|inner| inner.kind == kind);
    if let Some(inner) = found {
        return inner;
    }
    let listed = match &kind {
        ShardingKind::Enumerated { shards, .. } => {
            shards.iter().map(|(device, _)| *device).collect()
        }
        _ => Vec::new(),
    };
    let inner = Arc::new(Inner { kind, fingerprint, listed, layouts: Mutex::default() });
    bucket.retain(|weak| weak.strong_count() > 0);
    bucket.push(Arc::downgrade(&inner));
    interner.sweep();
    inner
}

/// All shardings that somebody holds. It decides nothing: it only makes equal values one object.
static INTERNER: LazyLock<Mutex<Interner>> = LazyLock::new(Mutex::default);

#[derive(Default)]
struct Interner {
    by_fingerprint: HashMap<u64, Vec<Weak<Inner>>>,
    /// The next sweep comes when there are more entries than this.
    sweep_above: usize,
}

impl Interner {
    /// Forgets what nobody holds any more, often enough that it stays proportional to what is held.
    fn sweep(&mut self) {
        if self.by_fingerprint.len() <= self.sweep_above.max(SWEEP_ABOVE) {
            return;
        }
        self.by_fingerprint.retain(|_, bucket| bucket.iter().any(|weak| weak.strong_count() > 0));
        self.sweep_above = 2 * self.by_fingerprint.len();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sharding::Sharding;

    #[test]
    fn the_interner_forgets_what_nobody_holds() {
        let device = |i: u32| Sharding::single_device(DeviceId(1_000_000 + i));
        let kept = device(0);
        (1..5000).for_each(|i| drop(device(i)));
        assert!(INTERNER.lock().by_fingerprint.len() < 2500);
        assert_eq!(device(0), kept);
    }
}
