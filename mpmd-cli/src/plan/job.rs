//! The job a case is about: which process owns which device, and which host it is on.

use std::collections::BTreeSet;

use mpmd_core::topology::{Device, DeviceId, DeviceKind, ProcessId, Topology};

use super::field::{Field, Malformed};
use super::refusal::Refusal;

/// `process_of` and `host_of`, as a case has them.
#[derive(Debug)]
pub(super) struct CaseJob {
    /// By device, ascending; all are of process 0 where it is not given.
    process_of: Option<Vec<(u32, u32)>>,
    /// By process, ascending; all are on host 0 where it is not given.
    host_of: Option<Vec<(u32, u32)>>,
}

/// A topology, and the numbers that the case has for its processes and hosts.
#[derive(Clone, Debug)]
pub(super) struct Job {
    topology: Topology,
    /// Number and host of each process of the topology, ascending.
    processes: Vec<(u32, u32)>,
}

impl CaseJob {
    /// Reads it.
    pub(super) fn read(field: &Field<'_>) -> Result<Self, Malformed> {
        let map = |name| field.find(name)?.map(|map| map.id_map()).transpose();
        Ok(Self { process_of: map("process_of")?, host_of: map("host_of")? })
    }

    /// The job, which has the devices of these two lists, named as in the case, and maybe others.
    pub(super) fn job(&self, devices: [(&str, &[DeviceId]); 2]) -> Result<Job, Refusal> {
        let used: BTreeSet<DeviceId> =
            devices.iter().flat_map(|(_, devices)| *devices).copied().collect();
        let owned: Vec<(DeviceId, u32)> = match &self.process_of {
            None => used.into_iter().map(|device| (device, 0)).collect(),
            Some(owned) => {
                owned.iter().map(|(device, process)| (DeviceId(*device), *process)).collect()
            }
        };
        let known =
            |device: &DeviceId| owned.binary_search_by_key(device, |(known, _)| *known).is_ok();
        for (name, devices) in devices {
            if let Some(device) = devices.iter().find(|device| !known(device)) {
                let message = format!("{name}: process_of has no device {device}");
                return Err(Refusal::new("unknown_device", message));
            }
        }
        let numbers: BTreeSet<u32> = owned.iter().map(|(_, process)| *process).collect();
        let host = |process: u32| match &self.host_of {
            None => Ok((process, 0)),
            Some(hosts) => match hosts.binary_search_by_key(&process, |(known, _)| *known) {
                Ok(at) => Ok(hosts[at]),
                Err(_) => Err(Refusal::new(
                    "unknown_process",
                    format!("host_of has no process {process}"),
                )),
            },
        };
        let processes = numbers.into_iter().map(host).collect::<Result<Vec<_>, Refusal>>()?;
        // Numbered without gaps here, so that a large number costs no memory.
        let place =
            |number: u32| processes.partition_point(|(earlier, _)| *earlier < number) as u32;
        let device = |(id, process): &(DeviceId, u32)| Device {
            id: *id,
            process: ProcessId(place(*process)),
            kind: DeviceKind::Cpu,
        };
        let hosts: Vec<u32> = processes.iter().map(|(_, host)| *host).collect();
        let topology = Topology::new(owned.iter().map(device).collect())?.on_hosts(&hosts)?;
        Ok(Job { topology, processes })
    }
}

impl Job {
    /// Its devices and processes; the numbers of processes are [`place`](Self::place)s.
    pub(super) fn topology(&self) -> &Topology {
        &self.topology
    }

    /// Number and host of each process, ascending.
    pub(super) fn processes(&self) -> &[(u32, u32)] {
        &self.processes
    }

    /// The place among the processes of the one that owns a device.
    pub(super) fn place(&self, device: DeviceId) -> usize {
        self.topology.process_of(device).map_or(0, |process| process.0 as usize)
    }

    /// The devices of the process at a place, ascending.
    pub(super) fn devices_at(&self, place: usize) -> &[DeviceId] {
        self.topology.devices_of(ProcessId(place as u32))
    }
}
