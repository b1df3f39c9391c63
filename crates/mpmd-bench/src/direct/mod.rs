//! CUDA without the framework: the reference for the framework's figures, and a probe of the
//! driver.

mod driver;
mod facts;
mod peer;
mod probe;

use std::time::Duration;

use mpmd_core::Result;

pub(crate) use driver::{Copies, Exchange, Launches};
pub(crate) use probe::{ProbeArgs, probe};

use crate::case::Case;
use crate::options::Size;

/// Bytes that all copies of one sample move together, within the limits on their number. Large, so
/// that reading the clock costs next to nothing.
const SAMPLE_BYTES: usize = 1 << 30;

/// The largest number of copies in one sample.
const MOST_COPIES: usize = 1000;

/// The kind of a copy, by its source and target.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Way {
    /// Within the device's memory.
    OnDevice,
    /// From pinned memory of the host to the device.
    In,
    /// From the device to pinned memory of the host.
    Out,
}

/// Returns `repeats` samples of the mean time of one copy of `bytes` bytes on the first GPU. Fails
/// without CUDA.
pub(crate) fn copies(way: Way, bytes: usize, repeats: usize) -> Result<Vec<Duration>> {
    let rounds = (SAMPLE_BYTES / bytes).clamp(1, MOST_COPIES);
    let copies = Copies::new(way, bytes)?;
    // The first sample is not counted.
    (0..=repeats).map(|_| copies.time(rounds)).skip(1).collect()
}

/// Returns the bandwidth case of copies of `bytes` bytes. `times` has the mean time of a copy in
/// each sample.
pub(crate) fn case(way: Way, bytes: usize, times: Vec<Duration>) -> Case {
    let name = match way {
        Way::OnDevice => "device copy",
        Way::In => "pinned in",
        Way::Out => "pinned out",
    };
    Case::bandwidth(name, Size(bytes).to_string(), bytes, times)
}

#[cfg(test)]
mod tests {
    use mpmd_device::cuda;

    use super::*;

    #[test]
    fn copies_have_figures_or_name_the_missing_cuda() {
        match (copies(Way::OnDevice, 1 << 16, 2), cuda::found()) {
            (Ok(times), Ok(_)) => {
                assert!(times.len() == 2 && times.iter().all(|time| *time > Duration::ZERO))
            }
            (Err(error), Err(why)) => {
                assert!(error.to_string().contains(&why.to_string()), "{error}")
            }
            (times, found) => panic!("{times:?}, {:?}", found.err()),
        }
    }
}
