//! The results of a pair of processes, and the file in which they pass them to their launcher.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// A quantity that is measured for each array size.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum P2pTest {
    /// Half the time of a round trip, in microseconds.
    Latency,
    /// Bytes over the time until the receiver has them all, in GB/s.
    Bandwidth,
    /// The time from one process's `device_put` until the other process can use the array, in
    /// microseconds.
    Handover,
    /// The time of a hand-over in memory that is new to one of the processes, in microseconds.
    HandoverWarmUp,
    /// The time from one process's futex wake-up until the other process runs, in microseconds. It
    /// is measured without the framework, in turns with the hand-overs.
    Wake,
    /// The time from one process's record of a CUDA event until the other process's GPU has passed
    /// it, in microseconds. It is measured with the driver alone, in turns with the hand-overs.
    BareIpc,
    /// The time of `BareIpc`, with a copy of the other process's memory behind the event.
    BareIpcCopy,
    /// Bandwidth in GB/s of arrays in two parts, which the receiver joins: it copies each byte
    /// once.
    OneCopy,
    /// Rate of a plain copy within one process, in GB/s.
    Memcpy,
    /// Rate of the driver's copy within a device's memory, in GB/s.
    DeviceCopy,
}

impl P2pTest {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Bandwidth => "bandwidth",
            Self::Handover => "handover",
            Self::HandoverWarmUp => "handover warm-up",
            Self::Wake => "futex wake",
            Self::BareIpc => "bare ipc",
            Self::BareIpcCopy => "bare ipc copy",
            Self::OneCopy => "one copy",
            Self::Memcpy => "memcpy",
            Self::DeviceCopy => "device copy",
        }
    }

    /// True for tests of plain copies without the framework, which serve as references.
    pub(super) fn is_plain(self) -> bool {
        matches!(self, Self::Memcpy | Self::DeviceCopy)
    }

    /// Returns the number of processes that the test needs.
    pub(super) fn processes(self) -> usize {
        if self.is_plain() { 1 } else { 2 }
    }

    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Latency | Self::Handover | Self::HandoverWarmUp => "us",
            Self::Wake | Self::BareIpc | Self::BareIpcCopy => "us",
            _ => "GB/s",
        }
    }
}

/// Samples of one test with arrays of `bytes` bytes, in the test's unit.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct Samples {
    pub(super) test: P2pTest,
    pub(super) bytes: usize,
    pub(super) samples: Vec<f64>,
}

impl Samples {
    pub(super) fn new(test: P2pTest, bytes: usize) -> Self {
        Self {
            test,
            bytes,
            samples: Vec::new(),
        }
    }

    /// Adds a sample, converted to the test's unit. `time` is the total time of `count` round
    /// trips, arrays or copies.
    pub(super) fn add(&mut self, count: u64, time: Duration) {
        let seconds = time.as_secs_f64().max(1e-9) / count as f64;
        self.samples.push(match self.test {
            P2pTest::Latency => seconds * 1e6 / 2.0,
            test if test.unit() == "us" => seconds * 1e6,
            _ => self.bytes as f64 / seconds / 1e9,
        });
    }
}

/// Writes the samples as JSON to the file that the launcher of the pair reads.
pub(super) fn hand_over(found: &[Samples], to: &Path) -> Result<()> {
    std::fs::write(to, serde_json::to_vec(found)?)
        .with_context(|| format!("writing {}", to.display()))
}

/// Reads the samples that [`hand_over`] wrote to this file.
pub(super) fn take_over(from: &Path) -> Result<Vec<Samples>> {
    let bytes = std::fs::read(from).with_context(|| format!("reading {}", from.display()))?;
    serde_json::from_slice(&bytes).context("the pair of processes left no samples")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_half_round_trips_and_gigabytes_per_second() {
        let mut latency = Samples::new(P2pTest::Latency, 8);
        latency.add(10, Duration::from_micros(100));
        assert!((latency.samples[0] - 5.0).abs() < 1e-9);
        let mut bandwidth = Samples::new(P2pTest::Bandwidth, 500_000_000);
        bandwidth.add(2, Duration::from_millis(500));
        assert!((bandwidth.samples[0] - 2.0).abs() < 1e-9);
    }
}
