//! Assigns a host's GPUs to the CUDA devices of its processes.

use super::{DeviceKind, ProcessId, Topology};

impl Topology {
    /// Returns the driver's GPU ordinals of a process's devices of kind [`Cuda`](DeviceKind::Cuda),
    /// in the devices' order. `gpus` is the number of GPUs that the driver shows to this process.
    /// Empty if the process has no such devices or `gpus` is 0.
    ///
    /// The GPUs of a host are given to its processes in order. While there are enough, each device
    /// has a GPU to itself. Otherwise the numbering starts again at 0 and devices share GPUs. If a
    /// launcher sets `CUDA_VISIBLE_DEVICES` for each process, a process may see fewer GPUs than its
    /// neighbours. Its numbering then starts again sooner.
    pub fn ordinals(&self, process: ProcessId, gpus: u32) -> Vec<u32> {
        if gpus == 0 {
            return Vec::new();
        }

        let of = |process: ProcessId| {
            let kinds = self
                .devices_of(process)
                .iter()
                .map(|device| self.kind_of(*device));
            kinds.filter(|kind| *kind == Some(DeviceKind::Cuda)).count()
        };

        let neighbours = (0..process.0)
            .map(ProcessId)
            .filter(|other| self.host_of(*other) == self.host_of(process));
        let first: usize = neighbours.map(of).sum();

        // Below `gpus`, which is a `u32`, so the cast is exact.
        (first..first + of(process))
            .map(|at| (at % gpus as usize) as u32)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::DeviceKind::{Cpu, Cuda};
    use super::*;

    fn all(topology: &Topology, gpus: u32) -> Vec<Vec<u32>> {
        (0..topology.processes() as u32)
            .map(|process| topology.ordinals(ProcessId(process), gpus))
            .collect()
    }

    #[test]
    fn processes_have_own_gpus_if_there_are_enough() {
        let job = Topology::even(2, 2).of_kinds(&[Cuda]).unwrap();
        assert_eq!(all(&job, 8), [[0, 1], [2, 3]]);
        assert_eq!(all(&job, 4), [[0, 1], [2, 3]]);
    }

    #[test]
    fn too_few_gpus_are_shared_in_turn() {
        let job = Topology::even(2, 2).of_kinds(&[Cuda]).unwrap();
        assert_eq!(all(&job, 3), [[0, 1], [2, 0]]);
        assert_eq!(all(&job, 1), [[0, 0], [0, 0]]);
        // Also if each process sees only its own GPUs.
        assert_eq!(all(&job, 2), [[0, 1], [0, 1]]);
    }

    #[test]
    fn cpu_processes_take_no_gpu_and_each_host_starts_at_zero() {
        let job = Topology::even(4, 1)
            .of_kinds(&[Cpu, Cuda, Cuda, Cuda])
            .unwrap();
        assert_eq!(all(&job, 8), [vec![], vec![0], vec![1], vec![2]]);
        let apart = job.on_hosts(&["a", "b", "a", "b"]).unwrap();
        assert_eq!(all(&apart, 8), [vec![], vec![0], vec![0], vec![1]]);
        assert_eq!(all(&apart, 0), [const { Vec::<u32>::new() }; 4]);
        assert!(apart.ordinals(ProcessId(9), 8).is_empty());
    }
}
