//! Predicates on the owners of devices: of a mesh, a sharding, or any list.

use super::Program;
use mpmd_layout::topology::DeviceId;

impl Program {
    /// True if this process owns the device. Always false in a [dry run](Self::is_dry_run), and for
    /// a device that the job does not have.
    pub fn is_local_device(&self, device: DeviceId) -> bool {
        self.runtime.local_index(device).is_some()
    }

    /// True if this process owns none of the devices. They may come from a mesh
    /// ([`Mesh::devices`](crate::topology::Mesh::devices)), a sharding
    /// ([`Sharding::devices`](crate::sharding::Sharding::devices)), or any list.
    pub fn is_fully_remote(&self, devices: &[DeviceId]) -> bool {
        self.count_local(devices) == 0
    }

    /// True if this process owns all of the devices and the list is not empty.
    pub fn is_fully_local(&self, devices: &[DeviceId]) -> bool {
        !devices.is_empty() && self.count_local(devices) == devices.len()
    }

    /// True if this process owns some of the devices but not all.
    pub fn is_partially_local(&self, devices: &[DeviceId]) -> bool {
        !self.is_fully_remote(devices) && !self.is_fully_local(devices)
    }

    fn count_local(&self, devices: &[DeviceId]) -> usize {
        devices
            .iter()
            .filter(|device| self.is_local_device(**device))
            .count()
    }
}

#[cfg(test)]
mod tests {
    use crate::api::program::Simulation;
    use crate::prelude::*;
    use mpmd_layout::topology::DeviceId;

    /// Returns (fully remote, partially local, fully local) for a list of devices.
    fn of_devices(p: &Program, devices: &[DeviceId]) -> [bool; 3] {
        [
            p.is_fully_remote(devices),
            p.is_partially_local(devices),
            p.is_fully_local(devices),
        ]
    }

    fn of_array(x: &MpmdArray) -> [bool; 3] {
        [
            x.is_fully_remote(),
            x.is_partially_local(),
            x.is_fully_local(),
        ]
    }

    const REMOTE: [bool; 3] = [true, false, false];
    const PARTIAL: [bool; 3] = [false, true, false];
    const LOCAL: [bool; 3] = [false, false, true];

    #[test]
    fn arrays_and_shardings_agree_in_every_case() {
        let results = Simulation::new(3, 6).run(|p| {
            let here = p.process().index();
            let x = MpmdArray::from_slice(&[4], &[1.0f32, 2.0, 3.0, 4.0])?;
            // Uncommitted: on no device.
            assert_eq!(of_array(&x), [false; 3]);
            // Devices 0 and 1 belong to process 0, and so on.
            let cases: [(&[u32], [[bool; 3]; 3]); 4] = [
                (&[0], [LOCAL, REMOTE, REMOTE]),
                (&[2, 3], [REMOTE, LOCAL, REMOTE]),
                (&[1, 2], [PARTIAL, PARTIAL, REMOTE]),
                (&[1, 2, 3, 4], [PARTIAL; 3]),
            ];
            for (devices, expected) in cases {
                let ids: Vec<DeviceId> = devices.iter().copied().map(DeviceId).collect();
                let mesh = p.mesh_of(&[("x", ids.len())], &ids)?;
                let expected = expected[here];
                let sharding = mesh.replicated();
                assert_eq!(
                    of_devices(p, mesh.devices()),
                    expected,
                    "{devices:?} on {here}"
                );
                assert_eq!(
                    of_devices(p, sharding.devices()),
                    expected,
                    "{devices:?} on {here}"
                );
                let y = p.device_put(&x, &sharding)?;
                assert_eq!(of_array(&y), expected, "{devices:?} on {here}");
            }
            assert_eq!(of_devices(p, &[]), REMOTE);
            assert!(!p.is_local_device(DeviceId(6)), "the job has six devices");
            Ok(())
        });
        results.into_iter().for_each(|result| result.unwrap());
    }
}
