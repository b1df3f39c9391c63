//! Chooses between host and NCCL for collectives of CUDA devices, from data that all processes
//! share.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{DeviceId, DeviceKind, ProcessId, Topology};

/// The way in which CUDA devices exchange data in the collectives inside kernels. One setting
/// applies to the whole job.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CudaCollectives {
    /// Through the host's pinned memory and the job's transports. Results are bit for bit those of
    /// CPU devices.
    #[default]
    Host,
    /// By NCCL, on the devices' own streams, in groups of CUDA devices on distinct GPUs. Used for
    /// the dtypes that NCCL supports: all but `bool`, `i16`, `u16` and complex numbers. Other
    /// groups and dtypes go through the host.
    ///
    /// NCCL adds in its own order. Sums may therefore round differently than on CPU devices, and
    /// differently with another number of devices. The maximum of values that include NaN also
    /// depends on NCCL.
    Nccl,
}

/// Bytes that identify a GPU: the same in all processes, different for each GPU.
#[doc(hidden)]
pub type GpuId = [u8; 16];

impl CudaCollectives {
    /// All settings, in the order of declaration.
    pub const ALL: [Self; 2] = [Self::Host, Self::Nccl];

    /// Returns the setting's name for users: `host` or `nccl`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Nccl => "nccl",
        }
    }

    /// Returns the setting with this name, or `None` if no setting has it. Case matters.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|way| way.name() == name)
    }
}

impl fmt::Display for CudaCollectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Topology {
    /// Returns a copy of the topology in which collectives of CUDA devices use `way`. The default
    /// is [`Host`](CudaCollectives::Host).
    #[must_use]
    pub fn with_cuda_collectives(&self, way: CudaCollectives) -> Self {
        self.with(|inner| inner.collectives = way)
    }

    /// Returns the setting for collectives of CUDA devices. With [`Nccl`](CudaCollectives::Nccl),
    /// groups and dtypes that NCCL does not support still go through the host.
    pub fn cuda_collectives(&self) -> CudaCollectives {
        self.inner.collectives
    }

    /// Returns a copy of the topology that records the GPU of each [`Cuda`](DeviceKind::Cuda)
    /// device of `process`. `gpus` has one id for each such device, in order. Devices without a
    /// recorded GPU count as having different GPUs.
    #[must_use]
    #[doc(hidden)]
    pub fn with_gpus_of(&self, process: ProcessId, gpus: &[GpuId]) -> Self {
        let devices = self.devices_of(process).iter().copied();
        let devices = devices.filter(|device| self.kind_of(*device) == Some(DeviceKind::Cuda));
        let known: Vec<_> = devices.zip(gpus.iter().copied()).collect();
        self.with(|inner| inner.gpus.extend(known))
    }

    /// True if the topology records the GPU of at least one device of the process.
    #[doc(hidden)]
    pub fn knows_gpus_of(&self, process: ProcessId) -> bool {
        self.devices_of(process)
            .iter()
            .any(|device| self.inner.gpus.contains_key(device))
    }

    /// True if these devices run their collectives by NCCL: the setting is
    /// [`Nccl`](CudaCollectives::Nccl), and they are two or more CUDA devices. No two of them may
    /// be known to share a GPU. The result is the same on all processes that own some of them.
    #[doc(hidden)]
    pub fn are_joined(&self, devices: &[DeviceId]) -> bool {
        if self.inner.collectives != CudaCollectives::Nccl || devices.len() < 2 {
            return false;
        }

        // NCCL refuses two ranks on one GPU.
        let mut gpus: Vec<_> = devices
            .iter()
            .filter_map(|device| self.inner.gpus.get(device))
            .collect();
        let known = gpus.len();
        gpus.sort_unstable();
        gpus.dedup();

        gpus.len() == known
            && devices
                .iter()
                .all(|device| self.kind_of(*device) == Some(DeviceKind::Cuda))
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceKind::{Cpu, Cuda};
    use super::*;

    #[test]
    fn collectives_have_one_name_everywhere() {
        for way in CudaCollectives::ALL {
            assert_eq!(CudaCollectives::named(way.name()), Some(way));
            assert_eq!(serde_json::to_value(way).unwrap(), way.to_string());
        }
        assert_eq!(CudaCollectives::named("NCCL"), None);
    }

    #[test]
    fn devices_on_distinct_gpus_are_joined() {
        let ids = |ids: &[u32]| -> Vec<DeviceId> { ids.iter().copied().map(DeviceId).collect() };
        let job = Topology::even(3, 2).of_kinds(&[Cuda, Cuda, Cpu]).unwrap();
        assert!(!job.are_joined(&ids(&[0, 1])), "nobody asked for it");
        let job = job.with_cuda_collectives(CudaCollectives::Nccl);
        assert!(
            job.are_joined(&ids(&[0, 1, 2, 3])),
            "nothing is known of them"
        );
        assert!(!job.are_joined(&ids(&[0])) && !job.are_joined(&ids(&[3, 4])));
        let gpu = |number: u8| [number; 16];
        let job = job.with_gpus_of(ProcessId(0), &[gpu(0), gpu(1)]);
        let shared = job.with_gpus_of(ProcessId(1), &[gpu(1), gpu(2)]);
        assert!(shared.are_joined(&ids(&[0, 2, 3])) && shared.are_joined(&ids(&[1, 0, 3])));
        assert!(!shared.are_joined(&ids(&[0, 1, 2])));
        assert!(shared.knows_gpus_of(ProcessId(1)) && !job.knows_gpus_of(ProcessId(1)));
    }
}
