//! What runs kernels on a device: one module for each kind of device.

pub mod cpu;
pub mod cuda;
