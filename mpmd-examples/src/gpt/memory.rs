//! The memory of a training by process: the planned amount, and the amount used.

use mpmd::pipeline::StepDeviceMemory;
use mpmd::prelude::*;
use mpmd::{MemoryUse, ProcessId};

/// The planned memory of every process, in process order: the expected peak, and an upper bound.
#[derive(Clone, Debug)]
pub struct Expected(Vec<Memory>);

/// Planned memory of one process, in bytes.
#[derive(Clone, Copy, Debug)]
struct Memory {
    expected: u64,
    at_most: u64,
}

/// Memory that a process used over a run, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct Taken {
    /// Peak use of the process's device memory, plus the peak use of staging buffers between
    /// processes.
    pub peak: u64,
    /// Memory mapped from the system after the warm-up steps.
    pub mapped_later: u64,
}

impl Expected {
    /// Collects `mine` from all processes. The result is the same on all of them. Every process
    /// must call it; it blocks until the values have arrived.
    ///
    /// # Errors
    ///
    /// If the job fails.
    pub fn agree(p: &mut Program, mine: StepDeviceMemory) -> Result<Self> {
        let all = (0..p.processes() as u32).map(|process| {
            let mine = (mine.expected, mine.at_most);
            let (expected, at_most) = p.broadcast_value(ProcessId(process), mine, || Ok(mine))?;
            Ok(Memory { expected, at_most })
        });
        Ok(Self(all.collect::<Result<_>>()?))
    }

    /// Returns a line to print before the run: the expected peak of each process, and the largest
    /// upper bound, in MiB.
    pub fn line(&self) -> String {
        let all: Vec<String> = self.0.iter().map(|one| mib(one.expected)).collect();
        let most = self.0.iter().map(|one| one.at_most).max().unwrap_or_default();
        format!("memory: {} MiB expected by process, {} MiB at most", all.join(", "), mib(most))
    }

    /// Returns a line for each process, with its planned and used memory. The text is the same on
    /// all processes. Every process must call it; it blocks until the values have arrived.
    ///
    /// # Errors
    ///
    /// If the job fails.
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
    /// Number of warm-up steps. Later steps should map no more memory.
    pub const WARM_UP: u64 = 3;

    /// Computes the memory used from the state after the warm-up steps and at the end.
    pub fn new(warm: MemoryUse, end: MemoryUse) -> Self {
        Self {
            peak: end.recent_peak + end.staging_recent_peak,
            mapped_later: end.mapped - warm.mapped,
        }
    }
}

/// Formats bytes as MiB with one decimal.
fn mib(bytes: u64) -> String {
    format!("{:.1}", bytes as f64 / f64::from(1 << 20))
}
