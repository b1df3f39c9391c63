//! Devices, the processes that own them, and meshes of them.

mod collectives;
mod kind;
mod links;
pub(crate) mod mesh;
mod ordinals;

use std::collections::BTreeMap;
use std::sync::Arc;

pub use collectives::CudaCollectives;
#[doc(hidden)]
pub use collectives::GpuId;
pub use kind::DeviceKind;
pub use links::{LinkClass, LinkSpeed, LinkSpeeds};
pub use mesh::Mesh;
pub use mpmd_base::{DeviceId, ProcessId};
use serde::{Deserialize, Serialize};

use crate::fingerprint::Fingerprint;
use crate::tree::Leaf;

impl Leaf for DeviceId {}

/// A device of the job.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, PartialEq, Serialize)]
pub struct Device {
    /// The device's id.
    pub id: DeviceId,
    /// The process that owns the device.
    pub process: ProcessId,
    /// The device's kind.
    pub kind: DeviceKind,
}

/// All devices and processes of a job; the same on every process. Cheap to clone.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Topology {
    inner: Arc<TopologyInner>,
}

#[derive(Clone, Debug, Eq, PartialEq)]
struct TopologyInner {
    /// All devices, ascending by id.
    devices: Vec<Device>,
    ids: Vec<DeviceId>,
    /// The devices of each process, indexed by process.
    owned: Vec<Vec<DeviceId>>,
    /// The host number of each process, indexed by process. Hosts are numbered by first appearance.
    hosts: Vec<u32>,
    links: LinkSpeeds,
    /// The setting for collectives between CUDA devices.
    collectives: CudaCollectives,
    /// The recorded GPUs of CUDA devices. `with_gpus_of` adds them.
    gpus: BTreeMap<DeviceId, GpuId>,
}

/// The reason that a topology or mesh cannot be made, or that a mesh lacks a requested device, axis
/// or range. Always the caller's fault.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum MeshError {
    /// A device is listed more than once.
    #[error("device {device} is listed twice")]
    DuplicateDevice {
        /// The device that is listed twice.
        device: DeviceId,
    },
    /// A device belongs to a process that the job does not have.
    #[error("device {device} belongs to process {process}, but the job has {processes} processes")]
    UnknownProcess {
        /// The device with the unknown owner.
        device: DeviceId,
        /// The process given as the owner of the device.
        process: ProcessId,
        /// Number of processes in the job.
        processes: usize,
    },
    /// The mesh, or the job, has no such device.
    #[error("there is no device {device} in {within}")]
    UnknownDevice {
        /// The requested device.
        device: DeviceId,
        /// The mesh or job that was searched, as text.
        within: String,
    },
    /// The number of hosts given is not the number of processes.
    #[error("{found} hosts are given for {processes} processes")]
    HostCount {
        /// Number of processes in the job.
        processes: usize,
        /// Length of the given list of hosts.
        found: usize,
    },
    /// The number of device kinds given is neither one nor the number of processes.
    #[error(
        "{found} kinds of devices are given for {processes} processes: one for all, or one for each"
    )]
    KindCount {
        /// Number of processes in the job.
        processes: usize,
        /// Number of device kinds given.
        found: usize,
    },
    /// An axis size is negative but not -1, two sizes are -1, or the other sizes do not divide the
    /// number of devices.
    #[error(
        "axis `{axis}` of mesh {mesh} cannot be what is left of {devices} devices: the sizes of \
         the other axes must divide that number, and one axis may be of size -1"
    )]
    Rest {
        /// The axis with the wrong size.
        axis: String,
        /// The axes and their sizes as text: `{x:-1, y:2}`.
        mesh: String,
        /// Number of devices given for the mesh.
        devices: usize,
    },
    /// The sizes of the axes do not multiply to the number of devices.
    #[error("a mesh {mesh} takes {expected} devices, found {found}")]
    DeviceCount {
        /// The axes and their sizes as text: `{x:2, y:2}`.
        mesh: String,
        /// Number of devices that the mesh needs: the product of the sizes. Saturates.
        expected: usize,
        /// Number of devices given.
        found: usize,
    },
    /// Two axes have the same name.
    #[error("axis `{axis}` is named twice in {mesh}")]
    DuplicateAxis {
        /// Name of the axis that is repeated.
        axis: String,
        /// The axes and their sizes as text: `{x:2, y:2}`.
        mesh: String,
    },
    /// An axis has an empty name or size 0.
    #[error("axis `{axis}` of size {size} in {mesh}: an axis has a name and at least one index")]
    EmptyAxis {
        /// The axis's name; may be empty.
        axis: String,
        /// The axis's size; may be 0.
        size: usize,
        /// The axes and their sizes as text: `{x:2, y:2}`.
        mesh: String,
    },
    /// The mesh has no axis with the requested name.
    #[error("there is no axis `{axis}` in {mesh}")]
    UnknownAxis {
        /// Name of the requested axis.
        axis: String,
        /// The mesh that was searched, as text.
        mesh: String,
    },
    /// The requested range of indices is empty or ends past the axis.
    #[error("{start}..{end} is no part of axis `{axis}` in {mesh}")]
    Range {
        /// The axis's name.
        axis: String,
        /// First index of the requested range.
        start: usize,
        /// One past the last requested index.
        end: usize,
        /// The mesh as text.
        mesh: String,
    },
}

impl Topology {
    /// Creates a job with these devices. The number of processes is one more than the highest
    /// owner's number. All processes are on one host.
    ///
    /// # Errors
    ///
    /// If a device is listed twice.
    pub fn new(devices: Vec<Device>) -> Result<Self, MeshError> {
        let processes = devices
            .iter()
            .map(|device| device.process.index() + 1)
            .max()
            .unwrap_or(0);
        Self::with_processes(processes, devices)
    }

    /// Creates a job with these devices and `processes` processes, on one host. A process may own
    /// no device.
    ///
    /// # Errors
    ///
    /// If a device is listed twice or belongs to none of the processes.
    fn with_processes(processes: usize, mut devices: Vec<Device>) -> Result<Self, MeshError> {
        devices.sort_by_key(|device| device.id);
        if let Some(pair) = devices.windows(2).find(|pair| pair[0].id == pair[1].id) {
            return Err(MeshError::DuplicateDevice { device: pair[0].id });
        }

        let mut owned = vec![Vec::new(); processes];
        for Device { id, process, .. } in &devices {
            let Some(own) = owned.get_mut(process.index()) else {
                return Err(MeshError::UnknownProcess {
                    device: *id,
                    process: *process,
                    processes,
                });
            };
            own.push(*id);
        }

        let ids = devices.iter().map(|device| device.id).collect();
        let hosts = vec![0; processes];
        let (links, collectives, gpus) = Default::default();
        Ok(Self {
            inner: Arc::new(TopologyInner {
                devices,
                ids,
                owned,
                hosts,
                links,
                collectives,
                gpus,
            }),
        })
    }

    /// Returns a copy of the topology in which process `i` runs on host `hosts[i]`. Equal values
    /// stand for the same host. By default all processes are on one host.
    ///
    /// # Errors
    ///
    /// If the number of hosts is not the number of processes.
    pub fn on_hosts<T: Ord>(&self, hosts: &[T]) -> Result<Self, MeshError> {
        if hosts.len() != self.processes() {
            return Err(MeshError::HostCount {
                processes: self.processes(),
                found: hosts.len(),
            });
        }

        let mut numbers = BTreeMap::new();
        let number = |host| {
            let next = numbers.len() as u32;
            *numbers.entry(host).or_insert(next)
        };
        let hosts = hosts.iter().map(number).collect();
        Ok(self.with(|inner| inner.hosts = hosts))
    }

    /// Returns a copy of the topology in which the devices have the given kinds: one kind for all
    /// processes, or one for each process in order. By default all devices are [`DeviceKind::Cpu`].
    ///
    /// # Errors
    ///
    /// If the number of kinds is neither one nor the number of processes.
    pub fn of_kinds(&self, kinds: &[DeviceKind]) -> Result<Self, MeshError> {
        let processes = self.processes();
        if kinds.len() != 1 && kinds.len() != processes {
            return Err(MeshError::KindCount {
                processes,
                found: kinds.len(),
            });
        }
        Ok(self.with(|inner| {
            for device in &mut inner.devices {
                // A single kind applies to all processes.
                device.kind = kinds
                    .get(device.process.index())
                    .copied()
                    .unwrap_or(kinds[0]);
            }
        }))
    }

    /// Returns a copy of the topology with other costs of links. Plans compare routes by these
    /// costs.
    #[must_use]
    pub fn with_links(&self, links: LinkSpeeds) -> Self {
        self.with(|inner| inner.links = links)
    }

    fn with(&self, change: impl FnOnce(&mut TopologyInner)) -> Self {
        let mut inner = (*self.inner).clone();
        change(&mut inner);
        Self {
            inner: Arc::new(inner),
        }
    }

    /// Creates a job of `processes` processes on one host, each with `devices_per_process` CPU
    /// devices. Ids ascend: process 0 owns the first devices.
    ///
    /// # Panics
    ///
    /// If there would be more than `u32::MAX` devices or processes.
    pub fn even(processes: usize, devices_per_process: usize) -> Self {
        Self::with_devices(&vec![devices_per_process; processes])
    }

    /// Creates a job of `processes` processes on one host. Divides `devices` CPU devices over them
    /// as evenly as possible, at least one for each process. Ids ascend: process 0 owns the first
    /// devices.
    ///
    /// # Panics
    ///
    /// If there would be more than `u32::MAX` devices or processes.
    pub fn spread(devices: usize, processes: usize) -> Self {
        let devices = devices.max(processes);
        let bound = |process: usize| process * devices / processes;
        let counts = (0..processes).map(|process| bound(process + 1) - bound(process));
        Self::with_devices(&counts.collect::<Vec<_>>())
    }

    /// Creates a job on one host in which process `i` owns `counts[i]` CPU devices, possibly none.
    /// Ids ascend: process 0 owns the first devices.
    ///
    /// # Panics
    ///
    /// If there would be more than `u32::MAX` devices or processes.
    pub fn with_devices(counts: &[usize]) -> Self {
        let all = counts
            .iter()
            .try_fold(0usize, |all, count| all.checked_add(*count));
        let all = all.and_then(|all| u32::try_from(all.max(counts.len())).ok());
        assert!(
            all.is_some(),
            "{} processes or their devices are too many",
            counts.len()
        );

        let owners = (0u32..)
            .zip(counts)
            .flat_map(|(p, count)| std::iter::repeat_n(p, *count));
        let device = |id: u32, process: u32| Device {
            id: DeviceId(id),
            process: ProcessId(process),
            kind: DeviceKind::Cpu,
        };

        let numbered = (0..).zip(owners);
        let devices = numbered.map(|(id, process)| device(id, process)).collect();
        Self::with_processes(counts.len(), devices)
            .expect("numbered ascending, each within the processes")
    }

    /// Returns the number of processes.
    pub fn processes(&self) -> usize {
        self.inner.owned.len()
    }

    /// Returns all devices, ascending by id.
    pub fn devices(&self) -> &[Device] {
        &self.inner.devices
    }

    /// Returns the ids of all devices, ascending.
    pub fn device_ids(&self) -> &[DeviceId] {
        &self.inner.ids
    }

    /// Returns the device with this id, or `None` if the job has no such device.
    pub fn device(&self, device: DeviceId) -> Option<&Device> {
        // Ids are almost always 0, 1, 2…
        let guess = self
            .inner
            .devices
            .get(device.0 as usize)
            .filter(|found| found.id == device);
        guess.or_else(|| {
            let at = self.inner.ids.binary_search(&device).ok()?;
            self.inner.devices.get(at)
        })
    }

    /// Returns the process that owns a device, or `None` if the job has no such device.
    pub fn process_of(&self, device: DeviceId) -> Option<ProcessId> {
        self.device(device).map(|device| device.process)
    }

    /// Returns the kind of a device, or `None` if the job has no such device.
    pub fn kind_of(&self, device: DeviceId) -> Option<DeviceKind> {
        self.device(device).map(|device| device.kind)
    }

    /// True if a process owns at least one device with memory that the host cannot read.
    pub fn has_accelerator(&self, process: ProcessId) -> bool {
        DeviceKind::ALL
            .into_iter()
            .any(|kind| kind.is_accelerator() && self.has_kind(process, kind))
    }

    /// True if a process owns at least one device of this kind.
    pub fn has_kind(&self, process: ProcessId, kind: DeviceKind) -> bool {
        self.devices_of(process)
            .iter()
            .any(|device| self.kind_of(*device) == Some(kind))
    }

    /// Returns the ids of a process's devices, ascending; none for an unknown process.
    pub fn devices_of(&self, process: ProcessId) -> &[DeviceId] {
        self.inner
            .owned
            .get(process.index())
            .map_or(&[], Vec::as_slice)
    }

    /// Returns the number of devices of each process.
    pub fn counts(&self) -> Vec<usize> {
        self.inner.owned.iter().map(Vec::len).collect()
    }

    /// Returns the number of the host on which a process runs. Hosts are numbered by first
    /// appearance in the order of processes. 0 for an unknown process.
    pub fn host_of(&self, process: ProcessId) -> u32 {
        self.inner.hosts.get(process.index()).copied().unwrap_or(0)
    }

    /// Returns the costs of the links between devices.
    pub fn links(&self) -> &LinkSpeeds {
        &self.inner.links
    }

    /// Returns a number that is the same for equal topologies, on every process and in every run.
    #[doc(hidden)]
    pub fn fingerprint(&self) -> u64 {
        let TopologyInner {
            devices,
            hosts,
            links,
            ..
        } = &*self.inner;

        let mut fingerprint = Fingerprint::new("topology");
        fingerprint.words(
            devices
                .iter()
                .map(|device| u64::from(device.id.0) << 32 | u64::from(device.process.0)),
        );
        fingerprint.words(devices.iter().map(|device| device.kind as u64));
        fingerprint.words(hosts.iter().map(|host| u64::from(*host)));

        for class in LinkClass::ALL {
            let LinkSpeed {
                latency_ns,
                bytes_per_us,
            } = links.of(class);
            fingerprint.word(latency_ns);
            fingerprint.word(bytes_per_us);
        }
        fingerprint.finish()
    }

    /// Returns the class of the link between two devices, or `None` if the job lacks one of them.
    pub fn link_between(&self, a: DeviceId, b: DeviceId) -> Option<LinkClass> {
        let of_a = self.process_of(a)?;
        let of_b = self.process_of(b)?;
        Some(if a == b {
            LinkClass::SameDevice
        } else if of_a == of_b {
            LinkClass::SameProcess
        } else if self.host_of(of_a) == self.host_of(of_b) {
            LinkClass::SameHost
        } else {
            LinkClass::Network
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(id: u32, process: u32) -> Device {
        Device {
            id: DeviceId(id),
            process: ProcessId(process),
            kind: DeviceKind::Cpu,
        }
    }

    #[test]
    fn even_topologies_give_each_process_its_run_of_devices() {
        let topology = Topology::even(3, 2);
        assert_eq!(topology.processes(), 3);
        assert_eq!(
            topology.devices_of(ProcessId(1)),
            [DeviceId(2), DeviceId(3)]
        );
        assert_eq!(topology.process_of(DeviceId(5)), Some(ProcessId(2)));
        assert_eq!(topology.process_of(DeviceId(6)), None);
        assert!(topology.devices_of(ProcessId(9)).is_empty());
        assert_eq!(Topology::even(4, 0).processes(), 4);
    }

    #[test]
    fn numbers_need_not_be_dense_nor_sorted() {
        let topology = Topology::new(vec![cpu(7, 1), cpu(0, 1), cpu(3, 0)]).unwrap();
        assert_eq!(
            topology.device_ids(),
            [DeviceId(0), DeviceId(3), DeviceId(7)]
        );
        assert_eq!(
            topology.devices_of(ProcessId(1)),
            [DeviceId(0), DeviceId(7)]
        );
        assert_eq!(topology.process_of(DeviceId(3)), Some(ProcessId(0)));
        assert_eq!(topology.process_of(DeviceId(1)), None);
    }

    #[test]
    fn hosts_are_numbered_as_they_come() {
        let topology = Topology::even(4, 2)
            .on_hosts(&["b", "a", "b", "c"])
            .unwrap();
        let hosts: Vec<u32> = (0..4)
            .map(|process| topology.host_of(ProcessId(process)))
            .collect();
        assert_eq!(hosts, [0, 1, 0, 2]);
        let class = |a, b| topology.link_between(DeviceId(a), DeviceId(b));
        assert_eq!(class(0, 0), Some(LinkClass::SameDevice));
        assert_eq!(class(0, 1), Some(LinkClass::SameProcess));
        assert_eq!(class(1, 4), Some(LinkClass::SameHost));
        assert_eq!(class(1, 2), Some(LinkClass::Network));
        assert_eq!(class(1, 8), None);
        assert_eq!(
            topology.on_hosts(&[0]).unwrap_err().to_string(),
            "1 hosts are given for 4 processes"
        );
        assert_ne!(topology, Topology::even(4, 2));
    }

    #[test]
    fn device_kinds_are_given_once_or_for_each_process() {
        use DeviceKind::{Cpu, Cuda};
        let topology = Topology::even(3, 2);
        let kinds = |topology: &Topology| {
            (0..6)
                .map(|id| topology.kind_of(DeviceId(id)))
                .collect::<Vec<_>>()
        };
        assert_eq!(kinds(&topology), [Some(Cpu); 6]);
        assert_eq!(kinds(&topology.of_kinds(&[Cuda]).unwrap()), [Some(Cuda); 6]);
        let mixed = topology.of_kinds(&[Cuda, Cpu, Cuda]).unwrap();
        assert_eq!(kinds(&mixed), [Cuda, Cuda, Cpu, Cpu, Cuda, Cuda].map(Some));
        assert_eq!(mixed.kind_of(DeviceId(6)), None);
        assert!(mixed.has_kind(ProcessId(0), Cuda) && !mixed.has_kind(ProcessId(1), Cuda));
        for wrong in [&[][..], &[Cpu, Cuda]] {
            let processes = 3;
            assert_eq!(
                topology.of_kinds(wrong),
                Err(MeshError::KindCount {
                    processes,
                    found: wrong.len()
                })
            );
        }
        assert_ne!(mixed.fingerprint(), topology.fingerprint());
        assert_ne!(
            mixed.fingerprint(),
            topology.of_kinds(&[Cuda]).unwrap().fingerprint()
        );
    }

    #[test]
    fn duplicates_and_unknown_owners_are_refused() {
        assert_eq!(
            Topology::new(vec![cpu(1, 0), cpu(1, 1)]),
            Err(MeshError::DuplicateDevice {
                device: DeviceId(1)
            })
        );
        let error = Topology::with_processes(2, vec![cpu(0, 2)]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "device 0 belongs to process 2, but the job has 2 processes"
        );
    }
}
