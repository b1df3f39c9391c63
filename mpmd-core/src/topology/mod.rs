//! Devices, the processes that own them, and meshes of them.

pub(crate) mod mesh;

use std::fmt;
use std::sync::Arc;

pub use mesh::Mesh;
pub use mpmd_transport::ProcessId;
use serde::{Deserialize, Serialize};

use crate::tree::Leaf;

/// A place with memory and an in-order queue, owned by one process. Numbered over the whole job.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
pub struct DeviceId(pub u32);

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl Leaf for DeviceId {}

/// What a device is.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DeviceKind {
    /// A thread of its own on the host's processors.
    Cpu,
    /// A CUDA graphics processor.
    Cuda,
}

/// A device of the job.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Device {
    /// Its number.
    pub id: DeviceId,
    /// Who owns it.
    pub process: ProcessId,
    /// What it is.
    pub kind: DeviceKind,
}

/// All devices and processes of a job; the same on every process. Cheap to clone.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Topology {
    inner: Arc<Inner>,
}

#[derive(Debug, Eq, PartialEq)]
struct Inner {
    /// Ascending by id.
    devices: Vec<Device>,
    ids: Vec<DeviceId>,
    /// By process.
    owned: Vec<Vec<DeviceId>>,
}

/// Why devices are no topology or mesh, or a mesh has no such part. Always the caller's fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A device is listed more than once.
    #[error("device {device} is listed twice")]
    DuplicateDevice {
        /// The device.
        device: DeviceId,
    },
    /// A device belongs to a process that the job does not have.
    #[error("device {device} belongs to process {process}, but the job has {processes} processes")]
    UnknownProcess {
        /// The device.
        device: DeviceId,
        /// Its owner.
        process: ProcessId,
        /// How many processes there are.
        processes: usize,
    },
    /// The mesh, or the job, has no such device.
    #[error("there is no device {device} in {within}")]
    UnknownDevice {
        /// The device.
        device: DeviceId,
        /// Where it was looked for.
        within: String,
    },
    /// The sizes of the axes do not multiply to the number of devices.
    #[error("a mesh {mesh} takes {expected} devices, found {found}")]
    DeviceCount {
        /// The axes and their sizes.
        mesh: String,
        /// Product of the sizes; saturates.
        expected: usize,
        /// Devices given.
        found: usize,
    },
    /// Two axes have one name.
    #[error("axis `{axis}` is named twice in {mesh}")]
    DuplicateAxis {
        /// The name.
        axis: String,
        /// The axes and their sizes.
        mesh: String,
    },
    /// An axis has no name, or no size.
    #[error("axis `{axis}` of size {size} in {mesh}: an axis has a name and at least one index")]
    EmptyAxis {
        /// The name.
        axis: String,
        /// The size.
        size: usize,
        /// The axes and their sizes.
        mesh: String,
    },
    /// The mesh has no axis of that name.
    #[error("there is no axis `{axis}` in {mesh}")]
    UnknownAxis {
        /// The name.
        axis: String,
        /// The mesh's axes and their sizes.
        mesh: String,
    },
    /// The range is empty or runs past the axis.
    #[error("{start}..{end} is no part of axis `{axis}` in {mesh}")]
    Range {
        /// The axis.
        axis: String,
        /// First index asked for.
        start: usize,
        /// One past the last index asked for.
        end: usize,
        /// The mesh's axes and their sizes.
        mesh: String,
    },
}

impl Topology {
    /// The job with these devices, and as many processes as the highest owner says.
    ///
    /// # Errors
    ///
    /// Fails where a device is listed twice.
    pub fn new(devices: Vec<Device>) -> Result<Self, MeshError> {
        let processes = devices.iter().map(|device| device.process.index() + 1).max().unwrap_or(0);
        Self::with_processes(processes, devices)
    }

    /// The job with these devices and `processes` processes, some of which may own none.
    ///
    /// # Errors
    ///
    /// Fails where a device is listed twice or belongs to none of the processes.
    pub fn with_processes(processes: usize, mut devices: Vec<Device>) -> Result<Self, MeshError> {
        devices.sort_by_key(|device| device.id);
        if let Some(pair) = devices.windows(2).find(|pair| pair[0].id == pair[1].id) {
            return Err(MeshError::DuplicateDevice { device: pair[0].id });
        }
        let mut owned = vec![Vec::new(); processes];
        for Device { id, process, .. } in &devices {
            let Some(own) = owned.get_mut(process.index()) else {
                return Err(MeshError::UnknownProcess { device: *id, process: *process, processes });
            };
            own.push(*id);
        }
        let ids = devices.iter().map(|device| device.id).collect();
        Ok(Self { inner: Arc::new(Inner { devices, ids, owned }) })
    }

    /// Processes with `devices_per_process` CPU devices each: process 0 owns the first ones.
    ///
    /// # Panics
    ///
    /// Where there would be more than `u32::MAX` devices or processes.
    pub fn even(processes: usize, devices_per_process: usize) -> Self {
        let count = processes.checked_mul(devices_per_process).and_then(|count| u32::try_from(count).ok());
        let (Some(count), Ok(_)) = (count, u32::try_from(processes)) else {
            panic!("{processes} processes with {devices_per_process} devices each are too many to number");
        };
        let device = |id: u32| Device {
            id: DeviceId(id),
            process: ProcessId((id as usize / devices_per_process) as u32),
            kind: DeviceKind::Cpu,
        };
        Self::with_processes(processes, (0..count).map(device).collect())
            .expect("numbered ascending, each within the processes")
    }

    /// Number of processes.
    pub fn processes(&self) -> usize {
        self.inner.owned.len()
    }

    /// All devices, ascending by number.
    pub fn devices(&self) -> &[Device] {
        &self.inner.devices
    }

    /// The numbers of all devices, ascending.
    pub fn device_ids(&self) -> &[DeviceId] {
        &self.inner.ids
    }

    /// The device with that number.
    pub fn device(&self, device: DeviceId) -> Option<&Device> {
        // Almost always numbered 0, 1, 2…
        let guess = self.inner.devices.get(device.0 as usize).filter(|found| found.id == device);
        guess.or_else(|| {
            let at = self.inner.ids.binary_search(&device).ok()?;
            self.inner.devices.get(at)
        })
    }

    /// Who owns a device; `None` where the job has no such device.
    pub fn process_of(&self, device: DeviceId) -> Option<ProcessId> {
        self.device(device).map(|device| device.process)
    }

    /// The devices of a process, ascending; none for an unknown process.
    pub fn devices_of(&self, process: ProcessId) -> &[DeviceId] {
        self.inner.owned.get(process.index()).map_or(&[], Vec::as_slice)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(id: u32, process: u32) -> Device {
        Device { id: DeviceId(id), process: ProcessId(process), kind: DeviceKind::Cpu }
    }

    #[test]
    fn even_topologies_give_each_process_its_run_of_devices() {
        let topology = Topology::even(3, 2);
        assert_eq!(topology.processes(), 3);
        assert_eq!(topology.devices_of(ProcessId(1)), [DeviceId(2), DeviceId(3)]);
        assert_eq!(topology.process_of(DeviceId(5)), Some(ProcessId(2)));
        assert_eq!(topology.process_of(DeviceId(6)), None);
        assert!(topology.devices_of(ProcessId(9)).is_empty());
        assert_eq!(Topology::even(4, 0).processes(), 4);
    }

    #[test]
    fn numbers_need_not_be_dense_nor_sorted() {
        let topology = Topology::new(vec![cpu(7, 1), cpu(0, 1), cpu(3, 0)]).unwrap();
        assert_eq!(topology.device_ids(), [DeviceId(0), DeviceId(3), DeviceId(7)]);
        assert_eq!(topology.devices_of(ProcessId(1)), [DeviceId(0), DeviceId(7)]);
        assert_eq!(topology.process_of(DeviceId(3)), Some(ProcessId(0)));
        assert_eq!(topology.process_of(DeviceId(1)), None);
    }

    #[test]
    fn duplicates_and_unknown_owners_are_refused() {
        assert_eq!(
            Topology::new(vec![cpu(1, 0), cpu(1, 1)]),
            Err(MeshError::DuplicateDevice { device: DeviceId(1) })
        );
        let error = Topology::with_processes(2, vec![cpu(0, 2)]).unwrap_err();
        assert_eq!(error.to_string(), "device 0 belongs to process 2, but the job has 2 processes");
    }
}
