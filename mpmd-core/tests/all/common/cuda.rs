//! The kinds of devices of CUDA tests.

use mpmd_core::topology::DeviceKind;

pub(crate) const CUDA: DeviceKind = DeviceKind::Cuda;
pub(crate) const CPU: DeviceKind = DeviceKind::Cpu;
