//! The job of a case: the process of each device, and the host of each process.

use std::collections::BTreeSet;

use mpmd_base::{DeviceId, ProcessId};
use mpmd_layout::topology::{Device, DeviceKind, Topology};

use super::field::{Field, Malformed};
use super::refusal::CaseRefusal;

/// The fields `process_of` and `host_of` of a case, read and not yet checked.
#[derive(Debug)]
pub(super) struct CaseJob {
    /// (device, process) pairs, ascending by device. If absent, all devices belong to process 0.
    process_of: Option<Vec<(u32, u32)>>,
    /// (process, host) pairs, ascending by process. If absent, all processes are on host 0.
    host_of: Option<Vec<(u32, u32)>>,
}

impl CaseJob {
    pub(super) fn read(field: &Field<'_>) -> Result<Self, Malformed> {
        let map = |name| field.find(name)?.map(|map| map.id_map()).transpose();
        Ok(Self {
            process_of: map("process_of")?,
            host_of: map("host_of")?,
        })
    }

    /// Returns the topology with all devices of the case. Its processes are numbered without gaps.
    /// `devices` are two lists of devices, each with a name for errors. Fails if `process_of` lacks
    /// one of the devices, or if `host_of` lacks a process.
    pub(super) fn job(&self, devices: [(&str, &[DeviceId]); 2]) -> Result<Topology, CaseRefusal> {
        let used: BTreeSet<DeviceId> = devices
            .iter()
            .flat_map(|(_, devices)| *devices)
            .copied()
            .collect();
        let owned: Vec<(DeviceId, u32)> = match &self.process_of {
            None => used.into_iter().map(|device| (device, 0)).collect(),
            Some(owned) => owned
                .iter()
                .map(|(device, process)| (DeviceId(*device), *process))
                .collect(),
        };

        let known = |device: &DeviceId| {
            owned
                .binary_search_by_key(device, |(known, _)| *known)
                .is_ok()
        };
        for (name, devices) in devices {
            if let Some(device) = devices.iter().find(|device| !known(device)) {
                let message = format!("{name}: process_of has no device {device}");
                return Err(CaseRefusal::new("unknown_device", message));
            }
        }

        let numbers: BTreeSet<u32> = owned.iter().map(|(_, process)| *process).collect();
        let host = |process: u32| match &self.host_of {
            None => Ok((process, 0)),
            Some(hosts) => match hosts.binary_search_by_key(&process, |(known, _)| *known) {
                Ok(at) => Ok(hosts[at]),
                Err(_) => Err(CaseRefusal::new(
                    "unknown_process",
                    format!("host_of has no process {process}"),
                )),
            },
        };
        let processes = numbers
            .into_iter()
            .map(host)
            .collect::<Result<Vec<_>, CaseRefusal>>()?;

        // Numbered without gaps, so that large numbers cost no memory.
        let place =
            |number: u32| processes.partition_point(|(earlier, _)| *earlier < number) as u32;
        let device = |(id, process): &(DeviceId, u32)| Device {
            id: *id,
            process: ProcessId(place(*process)),
            kind: DeviceKind::Cpu,
        };
        let hosts: Vec<u32> = processes.iter().map(|(_, host)| *host).collect();
        Ok(Topology::new(owned.iter().map(device).collect())?.on_hosts(&hosts)?)
    }
}
