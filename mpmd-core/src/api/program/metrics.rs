//! Counters of a program.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{Holdings, PlanCacheMetrics, Program};

/// Counters of one process's program since its start.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Metrics {
    /// Counters of the cache of `device_put` plans.
    pub plan_cache: PlanCacheMetrics,
    /// Payload bytes of arrays and collectives given to the transport, indexed by destination
    /// process.
    pub bytes_sent: Vec<u64>,
    /// Number of messages with these bytes, indexed by destination process. Small arrays that leave
    /// together are one message.
    pub messages_sent: Vec<u64>,
    /// This process's memory use, and its lent and borrowed memory.
    pub holdings: Holdings,
}

impl Program {
    /// Returns the current values of this process's counters.
    pub fn metrics(&self) -> Metrics {
        let values = |counters: &[AtomicU64]| {
            counters.iter().map(|counter| counter.load(Ordering::Relaxed)).collect()
        };
        Metrics {
            plan_cache: self.put_plans.metrics(),
            bytes_sent: values(&self.runtime.bytes_sent),
            messages_sent: values(&self.runtime.messages_sent),
            holdings: self.holdings(),
        }
    }
}
