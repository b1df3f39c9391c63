//! Start of CUDA tests: runs the test again in a process with a driver, in software or a real one.

use mpmd_core::topology::DeviceKind;

pub(crate) const CUDA: DeviceKind = DeviceKind::Cuda;
pub(crate) const CPU: DeviceKind = DeviceKind::Cpu;

/// True if the calling process is done with the test: another process has run it, or it is skipped.
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
