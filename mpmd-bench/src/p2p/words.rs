//! The values of command-line options: levels, cases, spin times.

use std::fmt;
use std::str::FromStr;

use clap::ValueEnum;
use mpmd_base::block::Spin;
use mpmd_launch::LaunchError;
use serde::{Deserialize, Serialize};

/// The kind of data that is moved.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(super) enum Level {
    /// Messages, directly over the transport.
    Message,
    /// Arrays, by `device_put`.
    Array,
}

impl Level {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Message => "message",
            Self::Array => "array",
        }
    }
}

/// A case that is measured for each size.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum Case {
    /// Half the time of a round trip.
    Latency,
    /// A stream of messages or arrays, until the last has arrived.
    Bandwidth,
    /// A freshly written array, until the receiver can use it; only at level array.
    Handover,
    /// An array that goes around a ring of processes; only at level array.
    Ring,
    /// A tree of 64 arrays of this size, moved by one call and by 64; only at level array.
    Leaves,
}

impl Case {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Bandwidth => "bandwidth",
            Self::Handover => "handover",
            Self::Ring => "ring",
            Self::Leaves => "leaves",
        }
    }
}

/// The time that a transport's engine looks for work before it sleeps: `auto`, `never`, `always`,
/// or a number of microseconds.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(super) struct SpinWord {
    /// The text from the command line, for `MPMD_SPIN`.
    pub(super) word: String,
    pub(super) spin: Spin,
}

impl FromStr for SpinWord {
    type Err = LaunchError;

    fn from_str(word: &str) -> Result<Self, LaunchError> {
        Ok(Self { word: word.to_owned(), spin: mpmd_launch::spin(word)? })
    }
}

impl fmt::Display for SpinWord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.word)
    }
}
