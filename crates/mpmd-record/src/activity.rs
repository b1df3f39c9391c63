//! The current activity of a running process, for `mpmd top` and hang reports.

use std::fmt;

use mpmd_base::VectorWidth;
use serde::{Deserialize, Serialize};

/// The current activity of one process of a job.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct Activity {
    /// The process id in the operating system.
    pub pid: u32,
    /// The name of the process's host.
    #[serde(default)]
    pub host: String,
    /// The vectors that all processes of the job compute with. `None` of an older process.
    #[serde(default)]
    pub vectors: Option<VectorWidth>,
    /// Number of steps whose operations have all ended on this process.
    pub steps: u64,
    /// Seconds between the ends of the last two steps. `None` before the second end. The ends are
    /// looked for at intervals: a mean if several steps ended in one.
    #[serde(default)]
    pub step_seconds: Option<f64>,
    /// Number of times that the process has looked at its devices: see
    /// [`busy_samples`](DeviceActivity::busy_samples).
    #[serde(default)]
    pub samples: u64,
    /// Number of operations that the program has issued.
    pub issued: u64,
    /// Number of operations in which this process takes part and that have not ended.
    pub in_flight: usize,
    /// Bytes of memory reserved for the results of the operations in flight.
    pub in_flight_bytes: u64,
    /// Description of the program thread's current activity.
    pub program: String,
    /// The activity of each device of the process.
    pub devices: Vec<DeviceActivity>,
    /// Description of the oldest operation that waits for another process, with that process.
    /// `None` if there is no such wait.
    pub wait: Option<String>,
    /// The memory of the process, in bytes.
    pub memory: MemoryActivity,
    /// Payload bytes of arrays and collectives sent so far, indexed by receiving process.
    pub bytes_sent: Vec<u64>,
    /// Number of messages with payload sent so far, indexed by receiving process.
    pub messages_sent: Vec<u64>,
}

/// The current activity of one device.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Serialize)]
pub struct DeviceActivity {
    /// The name of the device.
    pub device: String,
    /// The operation on which the device works, with its label and line. `None` if it is idle.
    pub operation: Option<String>,
    /// Seconds for which the device has worked on `operation`. Measured at intervals, so it is
    /// `None` for an operation that began a moment ago.
    pub seconds: Option<f32>,
    /// Number of later operations that are queued on the device.
    pub behind: usize,
    /// Number of the process's [`samples`](Activity::samples) in which the device had an operation
    /// that did not wait in a collective. A device that runs asynchronously never waits.
    #[serde(default)]
    pub busy_samples: u64,
    /// The stages of pipelines whose operations the device has had, ascending.
    #[serde(default)]
    pub stages: Vec<u32>,
}

/// The memory of a process, in bytes.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub struct MemoryActivity {
    /// Device memory in use now.
    pub live: u64,
    /// Largest device memory in use so far.
    pub peak: u64,
    /// Sum of the memory limits of the process's devices. `None` if they have no limits.
    pub limit: Option<u64>,
    /// Host memory in use by arrays now.
    pub host: u64,
    /// Memory that is lent to other processes now.
    pub lent: u64,
}

impl fmt::Display for DeviceActivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            device,
            operation,
            seconds,
            behind,
            ..
        } = self;
        let Some(operation) = operation else {
            return write!(f, "{device} is idle");
        };

        write!(f, "{device} is at {operation}")?;
        if let Some(seconds) = seconds {
            write!(f, ", for {seconds:.1} s")?;
        }
        if *behind > 0 {
            write!(f, " ({behind} more issued to it)")?;
        }
        Ok(())
    }
}
