//! [`Driver`]: the CUDA driver of this machine and its devices, or the reason why there is none.
//!
//! The libraries are loaded at their first use, so one executable runs with and without them.
//! [`found`] checks first that the driver has all functions that `DRIVER` in `calls` lists. So code
//! that has a [`Driver`] may call them.

mod query;

use std::fmt;

use serde::{Serialize, Serializer};

use super::no_cuda::CudaVersion;
pub use query::{cublas, found, nccl, nvrtc};

/// The CUDA driver as this process sees it. These facts do not change while the process runs.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct Driver {
    /// The newest CUDA version that the driver supports.
    pub version: CudaVersion,
    /// The visible devices, in the order of their ordinals; at least one. The variable
    /// `CUDA_VISIBLE_DEVICES` can hide devices and renumber the others.
    pub gpus: Vec<GpuInfo>,
}

/// Facts about a CUDA device.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub struct GpuInfo {
    /// The driver's number of the device in this process.
    pub ordinal: u32,
    /// The product name.
    pub name: String,
    /// The UUID of the device, the same in every process.
    pub uuid: Uuid,
    /// Total memory in bytes, used or not.
    pub memory_bytes: u64,
    /// The compute capability of the device, such as 9.0.
    pub capability: CudaVersion,
    /// Further properties of the device.
    pub attributes: Attributes,
}

/// Properties of a CUDA device.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Attributes {
    /// The number of streaming multiprocessors.
    pub processors: u32,
    /// The number of engines that copy while kernels run. With two, copies run in both directions
    /// at once.
    pub copy_engines: u32,
    /// True if the host and all devices share one address range, so that an address alone
    /// identifies its device.
    pub unified_addressing: bool,
    /// True if other processes can open the device's memory and events (CUDA IPC).
    pub ipc: bool,
    /// True if only one process may use the device, as set by `nvidia-smi -c EXCLUSIVE_PROCESS`.
    pub exclusive: bool,
    /// True if no process may compute on the device.
    pub prohibited: bool,
    /// True if the device uses the host's memory. Such devices cannot share memory by IPC.
    pub integrated: bool,
    /// The most shared memory, in bytes, that a thread block can request (opt-in limit).
    pub shared_memory_bytes: u32,
}

/// The UUID of a CUDA device, the same in all processes.
#[derive(Clone, Copy, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct Uuid(pub [u8; 16]);

/// Formats the UUID as `nvidia-smi -L` does: `GPU-` and groups of hexadecimal digits.
impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("GPU")?;
        let mut bytes = self.0.iter();
        for length in [4, 2, 2, 2, 6] {
            f.write_str("-")?;
            bytes
                .by_ref()
                .take(length)
                .try_for_each(|byte| write!(f, "{byte:02x}"))?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Serialised as text, as `nvidia-smi -L` writes it.
impl Serialize for Uuid {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::super::no_cuda::OLDEST;
    use super::*;

    #[test]
    fn versions_and_uuids_are_written_as_cuda_does() {
        assert_eq!(CudaVersion::of_number(12080).to_string(), "12.8");
        assert_eq!(CudaVersion::of_number(13000).to_string(), "13.0");
        assert!(CudaVersion::of_number(11080) < OLDEST && CudaVersion::of_number(12000) >= OLDEST);
        let uuid = Uuid([
            0x12, 0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde, 0xf0, 1, 2, 3, 4, 5, 6, 7, 0xff,
        ]);
        assert_eq!(uuid.to_string(), "GPU-12345678-9abc-def0-0102-0304050607ff");
    }

    #[test]
    fn found_is_repeatable_and_never_panics() {
        assert_eq!(found(), found());
        match found() {
            Ok(driver) => {
                assert!(
                    driver
                        .gpus
                        .iter()
                        .enumerate()
                        .all(|(i, gpu)| gpu.ordinal as usize == i)
                )
            }
            Err(error) => assert!(error.to_string().contains("CUDA driver"), "{error}"),
        }
        for library in [nvrtc(), cublas(), nccl()] {
            assert!(
                library.is_ok_and(|version| !version.is_empty())
                    || nvrtc().is_err()
                    || found().is_err()
            );
        }
    }
}
