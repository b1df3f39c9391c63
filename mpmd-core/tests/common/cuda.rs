//! What tests of CUDA devices begin with: they run again where there is a driver, in software or a
//! real one.

use mpmd_core::topology::DeviceKind;

pub(crate) const CUDA: DeviceKind = DeviceKind::Cuda;
pub(crate) const CPU: DeviceKind = DeviceKind::Cpu;

/// Whether the test is over for the calling process: it has run in another, or there is nothing to
/// run.
macro_rules! elsewhere {
    ($($setting:tt)*) => {{
        if cfg!(feature = "cuda") {
            softcuda::again!($($setting)*)
        } else {
            println!("SKIPPED: built without the feature `cuda`");
            true
        }
    }};
}
