//! Start of CUDA tests: runs the test again in a process with a driver, in software or a real one.

use mpmd_core::topology::DeviceKind;

pub(crate) const CUDA: DeviceKind = DeviceKind::Cuda;
pub(crate) const CPU: DeviceKind = DeviceKind::Cpu;

/// True if the calling process must return: the test has run in another process with the driver, or
/// it is skipped. The arguments are settings, as in `softcuda::again!`.
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
