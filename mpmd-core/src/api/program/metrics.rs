//! Counters of a program, and its memory use.

use std::sync::atomic::{AtomicU64, Ordering};

use super::{PlanCacheMetrics, Program};

/// Counters of this process's program since its start.
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct ProgramMetrics {
    /// Counters of the cache of `device_put` plans.
    pub plan_cache: PlanCacheMetrics,
    /// Payload bytes of arrays and collectives given to the transport, indexed by destination
    /// process.
    pub bytes_sent: Vec<u64>,
    /// Number of messages that carried `bytes_sent`, indexed by destination process. Small arrays
    /// that are sent together are one message.
    pub messages_sent: Vec<u64>,
    /// Bytes of this process's memory that each peer has borrowed, indexed by process. Memory
    /// counts from the time of sending, even before the peer has processed the message. Between
    /// processes that share memory, a return is visible at once.
    pub lent_to: Vec<u64>,
    /// Bytes of each peer's memory that this process has borrowed, indexed by process. Memory in
    /// messages that are not processed yet counts too. Borrowed memory is not part of
    /// [`Program::memory`].
    pub borrowed_from: Vec<u64>,
}

/// The memory use of a process in bytes: memory of its devices, and host memory of its arrays.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct MemoryUse {
    /// Bytes of device memory in use now.
    pub live: u64,
    /// Bytes of device memory that are mapped but unused, and kept for reuse.
    pub cached: u64,
    /// Largest sum of used and reserved device memory so far, in bytes. With several devices, the
    /// sum of the devices' peaks.
    pub peak: u64,
    /// Largest used device memory so far, in bytes, without reservations. With several devices, the
    /// sum of the devices' peaks, which may lie at different times.
    pub peak_live: u64,
    /// Largest used device memory, in bytes, since [`Program::forget_memory_peak`], or since the
    /// start. With several devices, the sum of the devices' peaks. Without reservations.
    pub recent_peak: u64,
    /// Largest used staging memory, in bytes, since [`Program::forget_memory_peak`], or since the
    /// start. Staging memory holds packed pieces, and received pieces that wait for their
    /// destination.
    pub staging_recent_peak: u64,
    /// Total bytes mapped from the system so far: for devices, arrays in host memory, and staging.
    /// Never decreases.
    pub mapped: u64,
    /// Bytes of host memory that arrays and copies of commits use now. They do not count against
    /// the limit of any device.
    pub host_live: u64,
    /// Peak of used and reserved host memory of arrays so far, plus the peak of the copies of
    /// commits, in bytes.
    pub host_peak: u64,
    /// Bytes that are lent to other processes and not returned yet. Memory lent to several
    /// processes counts once for each. This process uses the memory until all of them have returned
    /// it.
    pub lent: u64,
}

impl Program {
    /// Returns the current values of this process's counters.
    pub fn metrics(&self) -> ProgramMetrics {
        let values = |counters: &[AtomicU64]| {
            counters
                .iter()
                .map(|counter| counter.load(Ordering::Relaxed))
                .collect()
        };

        ProgramMetrics {
            plan_cache: self.put_plans.metrics(),
            bytes_sent: values(&self.runtime.bytes_sent),
            messages_sent: values(&self.runtime.messages_sent),
            lent_to: self.runtime.lent_to(),
            borrowed_from: self.runtime.borrowed_from(),
        }
    }

    /// Returns this process's memory use: of all its devices, and of arrays in host memory. Memory
    /// that is borrowed from a peer is not included; [`Program::metrics`] reports lent and borrowed
    /// memory by peer.
    pub fn memory(&self) -> MemoryUse {
        let stats = self
            .runtime
            .devices
            .iter()
            .map(|device| device.pool.stats());
        let host = self.runtime.host_memory.stats();
        let lent = self.runtime.in_flight.counts().lent;
        let staging = self.runtime.staging.stats();
        let commits = self
            .kept
            .as_ref()
            .map(|kept| kept.lock().memory.stats())
            .unwrap_or_default();

        let host = MemoryUse {
            host_live: host.live + commits.live,
            host_peak: host.peak + commits.peak,
            lent,
            staging_recent_peak: staging.recent_peak,
            mapped: staging.mapped + host.mapped + commits.mapped,
            ..MemoryUse::default()
        };

        stats.fold(host, |sum, stats| MemoryUse {
            live: sum.live + stats.live,
            cached: sum.cached + stats.cached,
            peak: sum.peak + stats.peak,
            peak_live: sum.peak_live + stats.peak_live,
            recent_peak: sum.recent_peak + stats.recent_peak,
            mapped: sum.mapped + stats.mapped,
            ..sum
        })
    }
}
