//! The cache of `device_put` plans, and of the intermediate shardings of moves.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;

use crate::exec::PutPlan;
use mpmd_layout::aval::ShapedArray;
use mpmd_layout::reshard::Intermediate;
use mpmd_layout::sharding::Sharding;

/// Counters of the cache of `device_put` plans.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct PlanCacheMetrics {
    /// Number of lookups that found a plan.
    pub hits: u64,
    /// Number of lookups after which a plan had to be made.
    pub misses: u64,
    /// Number of plans removed because the cache was full. The least recently used plan goes first.
    pub evictions: u64,
    /// Number of plans in the cache now.
    pub entries: usize,
}

/// The key of a [`PutPlan`] or an [`Intermediate`] in the cache.
#[derive(Clone, Eq, Hash, PartialEq)]
pub(crate) struct PutKey {
    pub(crate) aval: ShapedArray,
    pub(crate) from: Option<Sharding>,
    pub(crate) to: Sharding,
}

/// A cache of `device_put` plans and of intermediate shardings. It evicts the least recently used
/// entry.
pub(crate) struct PlanCache {
    /// The plans by key; `None` if the capacity is 0.
    plans: Option<LruCache<PutKey, Arc<PutPlan>>>,
    /// The intermediate shardings by key, up to the same number as plans. A value is `None` if the
    /// move has none.
    intermediates: Option<LruCache<PutKey, Option<Intermediate>>>,
    metrics: PlanCacheMetrics,
}

impl PlanCache {
    /// Creates a cache of at most `entries` plans.
    pub(super) fn new(entries: usize) -> Self {
        let entries = NonZeroUsize::new(entries);
        Self {
            plans: entries.map(LruCache::new),
            intermediates: entries.map(LruCache::new),
            metrics: PlanCacheMetrics::default(),
        }
    }

    /// Returns the plan of `key`, or `None` if it is not in the cache. Counts a hit or a miss.
    pub(crate) fn get(&mut self, key: &PutKey) -> Option<Arc<PutPlan>> {
        let found = self
            .plans
            .as_mut()
            .and_then(|plans| plans.get(key))
            .cloned();
        match found {
            Some(_) => self.metrics.hits += 1,
            None => self.metrics.misses += 1,
        }
        found
    }

    /// Stores a plan. If the cache is full, evicts the least recently used one. Does nothing if the
    /// capacity is 0.
    pub(crate) fn insert(&mut self, key: PutKey, plan: Arc<PutPlan>) {
        let Some(plans) = &mut self.plans else { return };
        if plans.push(key, plan).is_some() {
            self.metrics.evictions += 1;
        }
    }

    /// Returns the intermediate sharding of a move, from the cache or by `find`. Does not change
    /// the counters, which are for plans only.
    pub(crate) fn intermediate(
        &mut self,
        key: PutKey,
        find: impl FnOnce() -> Option<Intermediate>,
    ) -> Option<Intermediate> {
        match &mut self.intermediates {
            Some(known) => known.get_or_insert(key, find).clone(),
            None => find(),
        }
    }

    /// Returns the counters.
    pub(super) fn metrics(&self) -> PlanCacheMetrics {
        PlanCacheMetrics {
            entries: self.plans.as_ref().map_or(0, LruCache::len),
            ..self.metrics
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prelude::*;

    fn counts(p: &Program) -> (u64, u64, u64, usize) {
        let PlanCacheMetrics {
            hits,
            misses,
            evictions,
            entries,
        } = p.metrics().plan_cache;
        (hits, misses, evictions, entries)
    }

    #[test]
    fn cache_key_is_shape_dtype_and_both_shardings() {
        let mut p = Program::builder().devices(2).alone().unwrap();
        let mesh = p.mesh(&[("x", 2)]).unwrap();
        let (rows, whole) = (mesh.sharding(spec!["x"]), mesh.replicated());
        let put = |p: &mut Program, x: &MpmdArray, to: &Sharding| p.device_put(x, to).unwrap();
        let host = MpmdArray::from_slice(&[4], &[1.0f32; 4]).unwrap();
        let x = put(&mut p, &host, &rows);
        assert_eq!(counts(&p), (0, 1, 0, 1));
        let other = MpmdArray::from_slice(&[4], &[2.0f32; 4]).unwrap();
        drop(put(&mut p, &other, &rows));
        assert_eq!(counts(&p), (1, 1, 0, 1), "values are no part of the key");
        drop(put(&mut p, &host, &whole));
        assert_eq!(counts(&p), (1, 2, 0, 2), "another target");
        drop(put(&mut p, &x, &whole));
        assert_eq!(counts(&p), (1, 3, 0, 3), "another source");
        let longer = MpmdArray::from_slice(&[6], &[1.0f32; 6]).unwrap();
        drop(put(&mut p, &longer, &rows));
        assert_eq!(counts(&p), (1, 4, 0, 4), "another shape");
        let integers = MpmdArray::from_slice(&[4], &[1i32; 4]).unwrap();
        drop(put(&mut p, &integers, &rows));
        assert_eq!(counts(&p), (1, 5, 0, 5), "another dtype");
        let again = p.mesh(&[("x", 2)]).unwrap().sharding(spec!["x"]);
        drop(put(&mut p, &host, &again));
        assert_eq!(counts(&p), (2, 5, 0, 5), "an equal sharding made anew");
        p.finish().unwrap();
    }

    #[test]
    fn least_recently_used_plan_is_evicted() {
        let mut p = Program::builder().plan_cache(2).alone().unwrap();
        let whole = p.mesh(&[("x", 1)]).unwrap().replicated();
        let mut put = |length: usize| {
            let host = MpmdArray::from_slice(&[length], &vec![0u8; length]).unwrap();
            drop(p.device_put(&host, &whole).unwrap());
            counts(&p)
        };
        put(1);
        put(2);
        assert_eq!(put(1), (1, 2, 0, 2));
        assert_eq!(put(3), (1, 3, 1, 2), "2 goes");
        assert_eq!(put(1), (2, 3, 1, 2));
        assert_eq!(put(2), (2, 4, 2, 2), "3 goes");
        p.finish().unwrap();
    }

    #[test]
    fn cache_of_capacity_0_stores_nothing() {
        let mut p = Program::builder().plan_cache(0).alone().unwrap();
        let whole = p.mesh(&[("x", 1)]).unwrap().replicated();
        for _ in 0..2 {
            drop(p.device_put(&MpmdArray::scalar(1.0f32), &whole).unwrap());
        }
        assert_eq!(counts(&p), (0, 2, 0, 0));
        p.finish().unwrap();
    }
}
