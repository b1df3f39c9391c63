//! Memory of a process, and who holds what of whose.

use std::fmt;

use mpmd_ids::ProcessId;

use super::Program;

/// Memory of a process, in bytes: that of its devices, and what arrays take in the host's.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct MemoryUse {
    /// In use now.
    pub live: u64,
    /// Kept for reuse: taken from the system and in nobody's use.
    pub cached: u64,
    /// In use or set aside, at most so far.
    pub peak: u64,
    /// In use, at most so far: what was really used, however far ahead memory was set aside. Over
    /// several devices the sum of what each had at most, be it at different times.
    pub peak_live: u64,
    /// In use at most since [`Program::forget_memory_peak`], or so far: the sum over the devices,
    /// each at its own time. What is set aside for later does not count.
    pub recent_peak: u64,
    /// The same of what is on its way: pieces that are packed, or wait for their places.
    pub staging_recent_peak: u64,
    /// Taken from the system so far: for the devices, the host's arrays and what is on its way.
    pub mapped: u64,
    /// In use now by arrays in the host's memory, which no device's limit counts.
    pub host_live: u64,
    /// In use or set aside there, at most so far.
    pub host_peak: u64,
    /// Handed over to other processes, which have not given it back; what several of them have
    /// counts once for each. It stays in use here as long as any of them has it.
    pub lent: u64,
}

/// Who holds what of whose memory, as one process knows it, in bytes. Shown as a line for people.
///
/// Memory that was handed over counts where it is, with its owner: what is borrowed is no part of
/// [`Holdings::memory`]. What is lent counts from when it is sent, and what has come back is known
/// at once where processes share memory.
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
    /// Whose holdings these are.
    pub process: ProcessId,
    /// What is in use, kept and taken here.
    pub memory: MemoryUse,
    /// What each process of the job has of this one's memory, or is about to take: messages that it
    /// has not come to yet count too.
    pub lent_to: Vec<u64>,
    /// What this process has of each other's memory, by process, counted likewise.
    pub borrowed_from: Vec<u64>,
}

impl Program {
    /// Bytes of memory of this process: in use now, and at most so far, over all its devices; and
    /// the same of arrays in the host's memory. Memory that another process has handed over is that
    /// process's: it is not counted here. Whose that is and who has what of this process's,
    /// [`Program::metrics`] says.
    pub fn memory(&self) -> MemoryUse {
        let stats = self.runtime.devices.iter().map(|device| device.pool.stats());
        let host = self.runtime.host_memory.stats();
        let lent = self.runtime.in_flight.counts().lent;
        let staging = self.runtime.staging.stats();
        let host = MemoryUse {
            host_live: host.live,
            host_peak: host.peak,
            lent,
            staging_recent_peak: staging.recent_peak,
            mapped: staging.mapped + host.mapped,
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
        // First: looking brings back what others are done with.
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
            (Bytes(live), Bytes(cached), Bytes(peak_live), Bytes(mapped));
        write!(f, "memory of process {}: {live} live, {cached} cached, ", self.process)?;
        let (lent, borrowed) = (Shares(&self.lent_to, "to"), Shares(&self.borrowed_from, "from"));
        write!(f, "{lent} lent{lent:#}, {borrowed} borrowed{borrowed:#}, ")?;
        write!(f, "{peak} at most, {mapped} mapped")?;
        if host_live > 0 {
            write!(f, "; {} live in the host's", Bytes(host_live))?;
        }
        Ok(())
    }
}

/// By process: the sum, or with `#` what each has of it.
struct Shares<'a>(&'a [u64], &'static str);

impl fmt::Display for Shares<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(bytes, word) = self;
        let each = bytes.iter().enumerate().filter(|(_, bytes)| **bytes > 0);
        if !f.alternate() {
            return match bytes.iter().sum() {
                0 => f.write_str("nothing"),
                sum => write!(f, "{}", Bytes(sum)),
            };
        }
        let each: Vec<String> =
            each.map(|(peer, bytes)| format!("{word} {peer}: {}", Bytes(*bytes))).collect();
        if each.is_empty() { Ok(()) } else { write!(f, " ({})", each.join(", ")) }
    }
}

/// `512 B`, `4.0 KiB`, `1.5 GiB`.
struct Bytes(u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut value = self.0 as f64;
        let mut unit = "B";
        for larger in ["KiB", "MiB", "GiB", "TiB"] {
            // So that 1023.96 KiB are 1.0 MiB.
            if value < 1023.95 {
                break;
            }
            (value, unit) = (value / 1024.0, larger);
        }
        if unit == "B" { write!(f, "{} B", self.0) } else { write!(f, "{value:.1} {unit}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holdings_are_a_line_that_names_who_has_how_much() {
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
