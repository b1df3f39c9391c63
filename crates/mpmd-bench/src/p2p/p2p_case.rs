//! The values of command-line options: cases and spin times.

use clap::ValueEnum;
use mpmd_launch::LaunchError;

/// A case that is measured for each size.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(super) enum P2pCase {
    /// Half the time of a round trip.
    Latency,
    /// A stream of arrays, until the last has arrived.
    Bandwidth,
    /// A freshly written array, until the receiver can use it.
    Handover,
}

impl P2pCase {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Latency => "latency",
            Self::Bandwidth => "bandwidth",
            Self::Handover => "handover",
        }
    }
}

/// Checks the text of a spin time: `auto`, `never`, `always`, or a number of microseconds. The spin
/// time is how long a transport's engine looks for work before it sleeps.
pub(super) fn spin_word(word: &str) -> Result<String, LaunchError> {
    mpmd_launch::spin(word).map(|_| word.to_owned())
}
