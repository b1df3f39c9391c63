//! A [`DryRun`]: the operations of all processes of a job, as a dry run issues them.
//!
//! A dry run (`Builder::dry_run`) runs the whole program and lists its operations here: the effect
//! of each operation on each device, messages between devices, input arrays, dropped handles, reads
//! of values, and ends of steps. It is the only description of a program. [`DryRun::flow`] is the
//! input of proofs and simulations, [`DryRun::memory`] computes the memory use, and
//! [`DryRun::links`] the traffic between processes.
//!
//! All functions here are pure functions of the dry run.

mod descriptor;
mod flow;
mod memory;
mod parting;
mod steady;
#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;
use std::ops::Range;
use std::path::Path;

pub use descriptor::{OpDescriptor, OpKind, OpMessage, ResultShard, ShardMemory};
pub use flow::{Computed, DryRunFlow, SentMessages};
pub use memory::{DeviceMemoryUse, DryRunMemory, MemoryPeak};
use mpmd_base::open_output;
pub use parting::RunParting;
use serde::{Deserialize, Serialize};

#[doc(hidden)]
pub use descriptor::shards;

use crate::trace::Label;

/// Version of the file format. Files of other versions are refused.
pub const VERSION: u32 = 1;

/// The operations of a program, and each process's part in them.
///
/// Operations are numbered from 1 in the order in which every process issues them.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[non_exhaustive]
pub struct DryRun {
    /// The format version, [`VERSION`].
    pub version: u32,
    /// Number of processes in the job.
    pub processes: u32,
    /// The owner process of each device, indexed by device id.
    pub devices: Vec<u32>,
    /// Source lines that issued operations or waited, as `file:line:column`, without repeats.
    /// Operations and reads refer to them by index.
    pub lines: Vec<String>,
    /// Descriptions of operations without their input arrays, without repeats. Operations refer to
    /// them by index.
    pub descriptors: Vec<OpDescriptor>,
    /// Operations in order; the first is operation 1.
    pub operations: Vec<IssuedOperation>,
    /// The program's rolling hash at each operation, which the processes of a job compare. It
    /// covers everything that must be equal on all processes, including host values. All operations
    /// of a replay have the hash from before the replay's first operation.
    #[serde(default)]
    pub hashes: Vec<u64>,
    /// Points at which the last handle of an array was dropped, in order.
    pub drops: Vec<Dropped>,
    /// Points at which the program waited for arrays, in order.
    pub reads: Vec<Read>,
    /// Ends of the program's steps, in order.
    pub steps: Vec<StepEnd>,
    /// The reason that the dry run ends.
    pub end: DryRunEnd,
}

/// The reason that a dry run ends.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DryRunEnd {
    /// The program was still running when the dry run was requested.
    #[default]
    Open,
    /// The program's last two steps are equal.
    Steady,
    /// The requested number of steps has been run, and the last two are not equal.
    Steps,
    /// The program ended by itself.
    Finished,
}

/// One operation that the program issued.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct IssuedOperation {
    /// Index of the operation's description in [`DryRun::descriptors`].
    pub descriptor: u32,
    /// Index in [`DryRun::lines`] of the line that issued the operation.
    pub line: u32,
    /// The operation's stage, microbatch and role in a pipeline; `None` outside of pipelines.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<Label>,
    /// The arrays that the operation takes as inputs.
    pub takes: Vec<TakenArray>,
}

/// An array, identified by the operation that made it.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct Array {
    /// Number of the operation that made the array, from 1.
    pub operation: u64,
    /// Index of the array among the operation's results.
    pub result: u32,
}

/// The key of an array's shard on a device.
#[derive(Clone, Copy, Eq, Hash, PartialEq)]
struct ShardKey {
    array: Array,
    device: u32,
}

impl Array {
    fn on(self, device: u32) -> ShardKey {
        ShardKey {
            array: self,
            device,
        }
    }
}

/// An input of an operation.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct TakenArray {
    /// The array; `None` for host values, which every process has.
    pub array: Option<Array>,
    /// True if the operation donates the array: every clone of the array becomes unusable.
    pub donated: bool,
}

/// The point at which the last handle of an array was dropped.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Dropped {
    /// The array that was dropped.
    pub array: Array,
    /// Number of the last operation that was issued before the drop.
    pub after: u64,
}

/// A point at which the program waited for an array. If the program reads the array's values, later
/// operations may depend on them.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
pub struct Read {
    /// The array that the program waited for.
    pub array: Array,
    /// Number of the last operation that was issued before the wait.
    pub after: u64,
    /// Index in [`DryRun::lines`] of the line that waited.
    pub line: u32,
    /// True if the program reads the array's values, false if it only waits.
    pub values: bool,
}

/// The end of a step.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct StepEnd {
    /// Number of the last operation that was issued before the step's end.
    pub operation: u64,
    /// Number of entries of [`DryRun::drops`] that come before the step's end.
    pub drops: u64,
    /// Number of entries of [`DryRun::reads`] that come before the step's end.
    pub reads: u64,
}

/// The totals of the messages from one process to another.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct MessageTotals {
    /// Number of messages with payload.
    pub messages: u64,
    /// Payload bytes of the messages. For collectives, the maximum that the kernel's declarations
    /// allow.
    pub bytes: u64,
}

/// The error that a dry run cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DryRunError {
    /// The file cannot be read or written.
    #[error("the dry run in {path}: {why}")]
    File {
        /// Path of the file.
        path: String,
        /// The system's error message.
        why: std::io::Error,
    },
    /// The file is not a dry run.
    #[error("{path} has no dry run: {why}")]
    Form {
        /// Path of the file.
        path: String,
        /// The reason that the file is not a dry run.
        why: DryRunFault,
    },
}

/// The reason that the content of a file is not a dry run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DryRunFault {
    /// The content is not JSON, or lacks fields.
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The dry run has another format version.
    #[error("it has version {found}, and this is for {VERSION}")]
    Version {
        /// The version of the dry run.
        found: u32,
    },
    /// The file refers to a device that does not exist.
    #[error("there is no device {device} among {devices}")]
    NoDevice {
        /// The device id in the file that does not exist.
        device: u32,
        /// Number of devices in the dry run.
        devices: usize,
    },
    /// The file refers to a process that does not exist.
    #[error("there is no process {process} among {processes}")]
    NoProcess {
        /// The process number in the file that does not exist.
        process: u32,
        /// Number of processes in the dry run.
        processes: u32,
    },
    /// An operation uses an array that no earlier operation returns.
    #[error("{array} is not made before it is used")]
    NotMade {
        /// The array that no earlier operation returns.
        array: Array,
    },
    /// An operation refers to a descriptor that does not exist.
    #[error("operation {operation} has no descriptor")]
    NoDescriptor {
        /// Number of the operation, from 1.
        operation: usize,
    },
    /// A result of an operation shares memory with an input that the operation lacks.
    #[error("operation {operation} shares memory with an array that it does not take")]
    SharesForeign {
        /// Number of the operation, from 1.
        operation: usize,
    },
    /// An operation or read refers to a source line that does not exist.
    #[error("there is no line {line}")]
    NoLine {
        /// The index, which is past the end of [`DryRun::lines`].
        line: u32,
    },
    /// The numbers of hashes and of operations differ.
    #[error("it has {hashes} hashes for {operations} operations")]
    HashCount {
        /// Number of hashes in the file.
        hashes: usize,
        /// Number of operations in the file.
        operations: u64,
    },
    /// The steps in the file do not end in ascending order.
    #[error("its steps are not in order")]
    StepOrder,
}

impl DryRun {
    /// Creates a dry run without operations. `devices[i]` is the process that owns device `i`.
    #[doc(hidden)]
    pub fn new(processes: u32, devices: Vec<u32>) -> Self {
        Self {
            version: VERSION,
            processes,
            devices,
            ..Self::default()
        }
    }

    /// Reads a dry run from a file.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is of another version, or is inconsistent.
    pub fn read(path: &Path) -> Result<Self, DryRunError> {
        let bytes = std::fs::read(path).map_err(|why| DryRunError::File {
            path: path.display().to_string(),
            why,
        })?;
        Self::from_json(&bytes).map_err(|why| DryRunError::Form {
            path: path.display().to_string(),
            why,
        })
    }

    /// Writes the dry run to a file. If this fails, a regular file is unchanged. Links are
    /// followed, and pipes and devices are written in place.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> Result<(), DryRunError> {
        let wrong = |why| DryRunError::File {
            path: path.display().to_string(),
            why,
        };

        let bytes = serde_json::to_vec(self).map_err(|error| wrong(error.into()))?;
        open_output(path, |file| file.write_all(&bytes))
            .map(drop)
            .map_err(wrong)
    }

    fn from_json(bytes: &[u8]) -> Result<Self, DryRunFault> {
        let dry_run: Self = serde_json::from_slice(bytes)?;
        dry_run.check()?;
        Ok(dry_run)
    }

    /// Fails unless the version is right, all indices are valid, and every array is made before it
    /// is used.
    fn check(&self) -> Result<(), DryRunFault> {
        let found = self.version;
        if found != VERSION {
            return Err(DryRunFault::Version { found });
        }

        let device = |device: u32| match self.devices.get(device as usize) {
            Some(_) => Ok(()),
            None => Err(DryRunFault::NoDevice {
                device,
                devices: self.devices.len(),
            }),
        };
        let no_process = |process: u32| DryRunFault::NoProcess {
            process,
            processes: self.processes,
        };
        if let Some(process) = self
            .devices
            .iter()
            .find(|process| **process >= self.processes)
        {
            return Err(no_process(*process));
        }

        for descriptor in &self.descriptors {
            descriptor.devices().try_for_each(device)?;
            if let OpKind::BroadcastValue { from, .. } = descriptor.kind
                && from >= self.processes
            {
                return Err(no_process(from));
            }
        }

        let made = |array: Array, before: u64| {
            let descriptor = (array.operation >= 1 && array.operation <= before)
                .then(|| self.descriptor_of(array.operation))
                .flatten();
            match descriptor {
                Some(descriptor) if (array.result as usize) < descriptor.results.len() => Ok(()),
                _ => Err(DryRunFault::NotMade { array }),
            }
        };

        for (index, operation) in self.operations.iter().enumerate() {
            let descriptor = self.descriptors.get(operation.descriptor as usize);
            let descriptor = descriptor.ok_or(DryRunFault::NoDescriptor {
                operation: index + 1,
            })?;
            for taken in operation.takes.iter().filter_map(|taken| taken.array) {
                made(taken, index as u64)?;
            }

            if descriptor
                .inputs()
                .any(|input| input as usize >= operation.takes.len())
            {
                return Err(DryRunFault::SharesForeign {
                    operation: index + 1,
                });
            }
            self.line(operation.line)?;
        }

        let count = self.operations.len() as u64;
        self.drops
            .iter()
            .try_for_each(|dropped| made(dropped.array, dropped.after.min(count)))?;
        for read in &self.reads {
            made(read.array, read.after.min(count))?;
            self.line(read.line)?;
        }

        if !self.hashes.is_empty() && self.hashes.len() as u64 != count {
            return Err(DryRunFault::HashCount {
                hashes: self.hashes.len(),
                operations: count,
            });
        }

        let most = StepEnd {
            operation: count,
            drops: self.drops.len() as u64,
            reads: self.reads.len() as u64,
        };
        let sorted = |a: &StepEnd, b: &StepEnd| {
            a.operation <= b.operation && a.drops <= b.drops && a.reads <= b.reads
        };
        let ends: Vec<StepEnd> = self.steps.iter().copied().chain([most]).collect();
        if !ends.is_sorted_by(sorted) {
            return Err(DryRunFault::StepOrder);
        }
        Ok(())
    }

    fn line(&self, line: u32) -> Result<&str, DryRunFault> {
        self.lines
            .get(line as usize)
            .map(String::as_str)
            .ok_or(DryRunFault::NoLine { line })
    }

    /// Returns the descriptor of operation number `operation`, or `None` if the dry run lacks the
    /// operation.
    pub fn descriptor_of(&self, operation: u64) -> Option<&OpDescriptor> {
        let index = usize::try_from(operation.checked_sub(1)?).ok()?;
        self.descriptors
            .get(self.operations.get(index)?.descriptor as usize)
    }

    /// Describes an operation for messages: number, label, effect and line.
    pub fn describe(&self, operation: u64) -> String {
        let index = (operation as usize).wrapping_sub(1);
        let Some(issued) = self.operations.get(index) else {
            return format!("operation {operation}");
        };

        let label = issued
            .label
            .map(|label| format!("{label}: "))
            .unwrap_or_default();
        let what = self
            .descriptor_of(operation)
            .map_or("", |descriptor| &descriptor.what);
        let line = self.line(issued.line).unwrap_or("nowhere");
        format!("operation {operation} ({label}{what}) at {line}")
    }

    /// Returns the numbers of the operations in step `step`, counted from 0. `None` if no such step
    /// has ended.
    pub fn step(&self, step: usize) -> Option<Range<u64>> {
        let last = self.steps.get(step)?.operation;
        let before = step
            .checked_sub(1)
            .map_or(0, |before| self.steps[before].operation);
        Some(before + 1..last + 1)
    }

    /// Returns the totals of messages in these operations, by (sending process, receiving process).
    pub fn links(&self, operations: Range<u64>) -> BTreeMap<(u32, u32), MessageTotals> {
        let mut links: BTreeMap<(u32, u32), MessageTotals> = BTreeMap::new();
        for descriptor in operations.filter_map(|operation| self.descriptor_of(operation)) {
            for crossing in self.crossings(descriptor) {
                let link = links.entry((crossing.from, crossing.to)).or_default();
                link.messages += 1;
                link.bytes += crossing.bytes;
            }
        }
        links
    }

    /// Returns the messages of a descriptor that cross between processes.
    fn crossings<'a>(
        &'a self,
        descriptor: &'a OpDescriptor,
    ) -> Box<dyn Iterator<Item = Crossing> + 'a> {
        if let OpKind::BroadcastValue { from, bytes } = descriptor.kind {
            let others = (0..self.processes).filter(move |to| *to != from);
            return Box::new(others.map(move |to| Crossing { from, to, bytes }));
        }

        let process = |device: u32| self.devices[device as usize];
        let messages = descriptor.messages.iter();
        Box::new(
            messages
                .map(move |message| Crossing {
                    from: process(message.from),
                    to: process(message.to),
                    bytes: message.bytes,
                })
                .filter(|crossing| crossing.from != crossing.to),
        )
    }
}

/// A message between two processes.
struct Crossing {
    from: u32,
    to: u32,
    bytes: u64,
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "result {} of operation {}", self.result, self.operation)
    }
}
