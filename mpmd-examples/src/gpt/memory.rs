//! The memory of a training, by process: what its plan says before it runs, and what it took.

use mpmd::pipeline::StepDeviceMemory;
use mpmd::prelude::*;
use mpmd::{MemoryUse, ProcessId};

/// What all processes expect, in their order.
#[derive(Clone, Debug)]
pub struct Expected(Vec<Memory>);

/// Bytes.
#[derive(Clone, Copy, Debug)]
struct Memory {
    expected: u64,
    at_most: u64,
}

/// What a process took.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// At most at a time, in its devices' memory and on the way between processes.
    pub peak: u64,
    /// What was mapped after the steps that warm it up.
    pub mapped_later: u64,
}

impl Expected {
    /// What `mine` is to each process: the same on all of them.
    ///
    /// # Errors
    ///
    /// Where the job fails.
    pub fn agree(p: &mut Program, mine: StepDeviceMemory) -> Result<Self> {
        let all = (0..p.processes() as u32).map(|process| {
            let mine = (mine.expected, mine.at_most);
            let (expected, at_most) = p.broadcast_value(ProcessId(process), mine, || Ok(mine))?;
            Ok(Memory { expected, at_most })
        });
        Ok(Self(all.collect::<Result<_>>()?))
    }

    /// A line for before the run.
    pub fn line(&self) -> String {
        let all: Vec<String> = self.0.iter().map(|one| mib(one.expected)).collect();
        let most = self.0.iter().map(|one| one.at_most).max().unwrap_or_default();
        format!("memory: {} MiB expected by process, {} MiB at most", all.join(", "), mib(most))
    }

    /// A line for each process, with what it took: the same on all of them.
    ///
    /// # Errors
    ///
    /// Where the job fails.
    pub fn beside(&self, p: &mut Program, mine: Taken) -> Result<String> {
        let mut lines = String::new();
        for (process, Memory { expected, .. }) in self.0.iter().enumerate() {
            let mine = (mine.peak, mine.mapped_later);
            let (peak, mapped) = p.broadcast_value(ProcessId(process as u32), mine, || Ok(mine))?;
            lines += &format!(
                "memory of process {process}: {} MiB expected, {} MiB at most ({:.2}); {} MiB \
                 more after step {}\n",
                mib(*expected),
                mib(peak),
                peak as f64 / (*expected).max(1) as f64,
                mib(mapped),
                Taken::WARM_UP,
            );
        }
        Ok(lines)
    }
}

impl Taken {
    /// The steps that may ask the system for memory.
    pub const WARM_UP: u64 = 3;

    /// From what was in use after those steps, and at the end.
    pub fn new(warm: MemoryUse, end: MemoryUse) -> Self {
        Self {
            peak: end.recent_peak + end.staging_recent_peak,
            mapped_later: end.mapped - warm.mapped,
        }
    }
}

/// With a digit behind the point.
fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}
