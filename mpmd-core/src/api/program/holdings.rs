//! Memory use of a process, and the memory that it lends to and borrows from its peers.

use std::fmt;

use mpmd_base::ProcessId;
use mpmd_base::bytes_text;

use super::Program;

/// Memory of a process, in bytes: of its devices, and of its arrays in host memory.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct MemoryUse {
    /// Bytes of device memory in use now.
    pub live: u64,
    /// Bytes of device memory that are mapped but unused, and kept for reuse.
    pub cached: u64,
    /// Largest sum of used and reserved device memory so far, in bytes. With several devices it is
    /// the sum of the peaks of each.
    pub peak: u64,
    /// Largest used device memory so far, in bytes, without reservations. With several devices it
    /// is the sum of the peaks of each, which may lie at different times.
    pub peak_live: u64,
    /// Largest used device memory, in bytes, since [`Program::forget_memory_peak`], or since the
    /// start. It is the sum of the peaks of each device, without reservations.
    pub recent_peak: u64,
    /// Largest used staging memory, in bytes, since [`Program::forget_memory_peak`], or since the
    /// start. It holds packed pieces, and received pieces that wait for their destination.
    pub staging_recent_peak: u64,
    /// Bytes mapped from the system so far, for devices, arrays in host memory, and staging. Never
    /// falls.
    pub mapped: u64,
    /// Bytes of host memory that arrays and copies of commits use now. No device's limit includes
    /// them.
    pub host_live: u64,
    /// Largest sum of used and reserved host memory of arrays so far, in bytes, and of that of
    /// commits.
    pub host_peak: u64,
    /// Bytes that are lent to other processes and not returned yet. Memory lent to several
    /// processes counts once for each. It stays in use here until all of them have returned it.
    pub lent: u64,
}

/// One process's view of the memory that it uses, lends and borrows, in bytes. `Display` prints it
/// as one line.
///
/// Memory of a zero-copy transfer counts with its owner, so borrowed memory is no part of
/// [`Holdings::memory`]. Lent memory counts from the time of sending. Between processes that share
/// memory, a return is visible at once.
///
/// ```
/// let p = mpmd_core::Program::builder().alone()?;
/// let line = p.metrics().holdings.to_string();
/// assert!(line.starts_with("memory of process 0: 0 B live"), "{line}");
/// assert!(line.contains("nothing lent, nothing borrowed"), "{line}");
/// # p.finish()?;
/// # Ok::<(), mpmd_core::Error>(())
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
#[non_exhaustive]
pub struct Holdings {
    /// The process that uses, lends and borrows this memory.
    pub process: ProcessId,
    /// Memory that this process uses, caches and maps, in bytes.
    pub memory: MemoryUse,
    /// Bytes of this process's memory that each peer has borrowed, indexed by process. Messages
    /// that the peer has not processed yet count too.
    pub lent_to: Vec<u64>,
    /// Bytes of each peer's memory that this process has borrowed, indexed by process. Messages not
    /// processed yet count too.
    pub borrowed_from: Vec<u64>,
}

impl Program {
    /// Returns this process's memory use over all its devices, and that of arrays in host memory.
    /// Memory that is borrowed from a peer is not included; [`Program::metrics`] reports lent and
    /// borrowed memory by peer.
    pub fn memory(&self) -> MemoryUse {
        let stats = self.runtime.devices.iter().map(|device| device.pool.stats());
        let host = self.runtime.host_memory.stats();
        let lent = self.runtime.in_flight.counts().lent;
        let staging = self.runtime.staging.stats();
        let commits = self.kept.as_ref().map(|kept| kept.lock().memory.stats()).unwrap_or_default();
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

    pub(super) fn holdings(&self) -> Holdings {
        // Queried first: the query also takes back the memory that peers have released.
        let lent_to = self.runtime.lent_to();
        Holdings {
            process: self.process(),
            memory: self.memory(),
            lent_to,
            borrowed_from: self.runtime.borrowed_from(),
        }
    }
}

impl fmt::Display for Holdings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let MemoryUse { live, cached, peak_live, mapped, host_live, .. } = self.memory;
        let (live, cached, peak, mapped) =
            (bytes_text(live), bytes_text(cached), bytes_text(peak_live), bytes_text(mapped));
        write!(f, "memory of process {}: {live} live, {cached} cached, ", self.process)?;
        let (lent, borrowed) = (Shares(&self.lent_to, "to"), Shares(&self.borrowed_from, "from"));
        write!(f, "{lent} lent{lent:#}, {borrowed} borrowed{borrowed:#}, ")?;
        write!(f, "{peak} at most, {mapped} mapped")?;
        if host_live > 0 {
            write!(f, "; {} live in the host's", bytes_text(host_live))?;
        }
        Ok(())
    }
}

/// (bytes by process, preposition before each process number). Displays the sum of the bytes, or
/// with `#` those of each process.
struct Shares<'a>(&'a [u64], &'static str);

impl fmt::Display for Shares<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes, word) = self;
        let each = bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0);
        if !f.alternate() {
            return match bytes.iter().sum() {
                0 => f.write_str("nothing"),
                sum => write!(f, "{}", bytes_text(sum)),
            };
        }
        let each: Vec<String> =
            each.map(|(peer, bytes)| format!("{word} {peer}: {}", bytes_text(*bytes))).collect();
        if each.is_empty() { Ok(()) } else { write!(f, " ({})", each.join(", ")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holdings_display_as_one_line() {
        let memory = MemoryUse {
            live: 96 << 20,
            cached: 512,
            peak_live: 3 << 29,
            mapped: 2 << 30,
            ..MemoryUse::default()
        };
        let holdings = Holdings {
            process: ProcessId(1),
            memory,
            lent_to: vec![64 << 20, 0, 1536],
            borrowed_from: vec![0, 0, 1023],
        };
        assert_eq!(
            holdings.to_string(),
            "memory of process 1: 96.0 MiB live, 512 B cached, 64.0 MiB lent (to 0: 64.0 MiB, to \
             2: 1.5 KiB), \
             1023 B borrowed (from 2: 1023 B), 1.5 GiB at most, 2.0 GiB mapped"
        );
        let memory = MemoryUse { host_live: 4096, ..MemoryUse::default() };
        let (lent_to, borrowed_from) = (vec![0; 3], vec![0; 3]);
        let said = Holdings { process: ProcessId(0), memory, lent_to, borrowed_from }.to_string();
        assert!(said.contains("nothing lent, nothing borrowed,"), "{said}");
        assert!(said.ends_with("0 B mapped; 4.0 KiB live in the host's"), "{said}");
    }
}
