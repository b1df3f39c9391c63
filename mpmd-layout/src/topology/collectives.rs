//! Which way collectives of CUDA devices go, decided from what all processes know.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{DeviceId, DeviceKind, ProcessId, Topology};

/// Which way collectives of CUDA devices' values go inside kernels: one setting for a whole job.
#[derive(Clone, Copy, Debug, Default, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum CudaCollectives {
    /// By way of the host's pinned memory and the job's transports: the same bits as on CPU
    /// devices.
    #[default]
    Host,
    /// By NCCL, on the devices' own streams, in groups of CUDA devices of which no two are one
    /// graphics processor, for the dtypes that NCCL has (all but `bool`, `i16`, `u16` and complex
    /// numbers); by way of the host elsewhere.
    ///
    /// NCCL adds in an order of its own, so sums may be rounded otherwise than on CPU devices, and
    /// with another number of devices. What the largest of values is where some are NaN is up to
    /// NCCL too.
    Nccl,
}

/// What a graphics processor is known by in all processes.
#[doc(hidden)]
pub type GpuId = [u8; 16];

impl CudaCollectives {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Host, Self::Nccl];

    /// Its name for users: `host`, `nccl`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Nccl => "nccl",
        }
    }

    /// The way of that name, if there is one.
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
    /// The same job with collectives of CUDA devices that go this way. Without it they go by way of
    /// the host.
    #[must_use]
    pub fn with_cuda_collectives(&self, way: CudaCollectives) -> Self {
        self.with(|inner| inner.collectives = way)
    }

    /// Which way collectives of CUDA devices go, where they can.
    pub fn cuda_collectives(&self) -> CudaCollectives {
        self.inner.collectives
    }

    /// The same job where this is known of the graphics processors of a process's devices of kind
    /// [`Cuda`](DeviceKind::Cuda), in the devices' order. Those of which nothing is known count as
    /// all different.
    #[must_use]
    #[doc(hidden)]
    pub fn with_gpus_of(&self, process: ProcessId, gpus: &[GpuId]) -> Self {
        let devices = self.devices_of(process).iter().copied();
        let devices = devices.filter(|device| self.kind_of(*device) == Some(DeviceKind::Cuda));
        let known: Vec<_> = devices.zip(gpus.iter().copied()).collect();
        self.with(|inner| inner.gpus.extend(known))
    }

    /// Whether anything is known of the graphics processors of a process.
    #[doc(hidden)]
    pub fn knows_gpus_of(&self, process: ProcessId) -> bool {
        self.devices_of(process).iter().any(|device| self.inner.gpus.contains_key(device))
    }

    /// Whether these devices work together by NCCL, as far as they are concerned. The same on all
    /// processes that own some of them.
    #[doc(hidden)]
    pub fn are_joined(&self, devices: &[DeviceId]) -> bool {
        if self.inner.collectives != CudaCollectives::Nccl || devices.len() < 2 {
            return false;
        }
        // NCCL refuses two ranks on one processor.
        let mut gpus: Vec<_> =
            devices.iter().filter_map(|device| self.inner.gpus.get(device)).collect();
        let known = gpus.len();
        gpus.sort_unstable();
        gpus.dedup();
        gpus.len() == known
            && devices.iter().all(|device| self.kind_of(*device) == Some(DeviceKind::Cuda))
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceKind::{Cpu, Cuda};
    use super::*;

    #[test]
    fn ways_have_one_name_everywhere() {
        for way in CudaCollectives::ALL {
            assert_eq!(CudaCollectives::named(way.name()), Some(way));
            assert_eq!(serde_json::to_value(way).unwrap(), way.to_string());
        }
        assert_eq!(CudaCollectives::named("NCCL"), None);
    }

    #[test]
    fn devices_are_joined_where_all_are_graphics_processors_of_their_own() {
        let ids = |ids: &[u32]| -> Vec<DeviceId> { ids.iter().copied().map(DeviceId).collect() };
        let job = Topology::even(3, 2).of_kinds(&[Cuda, Cuda, Cpu]).unwrap();
        assert!(!job.are_joined(&ids(&[0, 1])), "nobody asked for it");
        let job = job.with_cuda_collectives(CudaCollectives::Nccl);
        assert!(job.are_joined(&ids(&[0, 1, 2, 3])), "nothing is known of them");
        assert!(!job.are_joined(&ids(&[0])) && !job.are_joined(&ids(&[3, 4])));
        let gpu = |number: u8| [number; 16];
        let job = job.with_gpus_of(ProcessId(0), &[gpu(0), gpu(1)]);
        let shared = job.with_gpus_of(ProcessId(1), &[gpu(1), gpu(2)]);
        assert!(shared.are_joined(&ids(&[0, 2, 3])) && shared.are_joined(&ids(&[1, 0, 3])));
        assert!(!shared.are_joined(&ids(&[0, 1, 2])));
        assert!(shared.knows_gpus_of(ProcessId(1)) && !job.knows_gpus_of(ProcessId(1)));
    }
}
