//! CUDA without the framework, on the first GPU: the reference for the framework's figures.

use std::time::Duration;

use anyhow::Result;

use crate::case::Case;
use crate::options::Size;

/// The kind of a copy, by its source and target.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Way {
    /// Within the device's memory.
    OnDevice,
    /// From pinned memory of the host to the device.
    In,
    /// From the device to pinned memory of the host.
    Out,
}

/// Measures the time to issue a launch of a kernel that does next to nothing, by `cudarc` alone.
/// Fails without CUDA.
pub(super) fn launch(repeats: usize) -> Result<Case> {
    Ok(Case::micros("launch", "by cudarc alone", by_hand::launches(repeats)?))
}

/// Measures copies of `bytes` bytes by the CUDA driver, while nothing else runs. Fails without
/// CUDA.
pub(super) fn copy(way: Way, bytes: usize, repeats: usize) -> Result<Case> {
    let name = match way {
        Way::OnDevice => "device copy",
        Way::In => "pinned in",
        Way::Out => "pinned out",
    };
    Ok(Case::bandwidth(name, Size(bytes).to_string(), bytes, copies(way, bytes, repeats)?))
}

/// Returns the times of `repeats` copies of `bytes` bytes by the CUDA driver. Fails without CUDA.
pub(super) fn copies(way: Way, bytes: usize, repeats: usize) -> Result<Vec<Duration>> {
    by_hand::copies(way, bytes, repeats)
}

#[cfg(feature = "cuda")]
mod by_hand {
    use std::time::Duration;

    use anyhow::Result;
    use mpmd_device::cuda::plain::{self, Plain};

    use super::Way;

    /// The driver's first GPU. A job's first process has the same.
    const FIRST: u32 = 0;

    pub(super) fn launches(repeats: usize) -> Result<Vec<Duration>> {
        Ok(Plain::open(FIRST)?.launches(repeats)?)
    }

    pub(super) fn copies(way: Way, bytes: usize, repeats: usize) -> Result<Vec<Duration>> {
        let way = match way {
            Way::OnDevice => plain::Way::OnDevice,
            Way::In => plain::Way::In,
            Way::Out => plain::Way::Out,
        };
        Ok(Plain::open(FIRST)?.copies(way, bytes, repeats)?)
    }
}

#[cfg(not(feature = "cuda"))]
mod by_hand {
    use std::time::Duration;

    use anyhow::Result;
    use mpmd_device::cuda::NoCuda;

    use super::Way;

    pub(super) fn launches(_: usize) -> Result<Vec<Duration>> {
        Err(NoCuda::NotBuilt.into())
    }

    pub(super) fn copies(_: Way, _: usize, _: usize) -> Result<Vec<Duration>> {
        Err(NoCuda::NotBuilt.into())
    }
}

#[cfg(test)]
mod tests {
    use mpmd_device::cuda;

    use super::*;

    #[test]
    fn copies_have_figures_or_name_the_missing_cuda() {
        match (copy(Way::OnDevice, 1 << 16, 2), cuda::found()) {
            (Ok(case), Ok(_)) => assert!(case.quantile(0.5) > 0.0),
            (Err(error), Err(why)) => {
                assert!(error.to_string().contains(&why.to_string()), "{error}")
            }
            (case, found) => panic!("{:?}, {:?}", case.map(|case| case.name), found.err()),
        }
    }
}
