//! Small things that every crate needs: numbers of processes and devices, the one module through
//! which the framework blocks, deadlines, environment variables, widths of vectors. Also counts of
//! bytes and of things as text, output files that a user names, and the meaning of a repeated
//! signal.
//!
//! Every other crate of the workspace may depend on this one. It depends on none of them.

#![forbid(unsafe_code)]

pub mod block;
mod bytes;
mod counted;
pub mod deadline;
mod output_file;
mod seconds;
mod stop;
pub mod variables;
mod vector_width;

use std::fmt;

pub use bytes::{ByteCountError, bytes_text, parse_bytes};
pub use counted::counted;
pub use output_file::{open_in_place, open_output};
pub use seconds::seconds_text;
use serde::{Deserialize, Serialize};
pub use stop::{StopRequest, StopRequests};
pub use vector_width::VectorWidth;

/// The number of a process in the job, counted from 0.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct ProcessId(pub u32);

impl ProcessId {
    /// Returns the number as an index into lists with one element per process.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for ProcessId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// The id of a device, unique in the whole job. A device has memory and an in-order queue, and
/// belongs to one process.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}
