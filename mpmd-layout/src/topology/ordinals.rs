//! Which of a host's graphics processors a process's devices are.

use super::{DeviceKind, ProcessId, Topology};

impl Topology {
    /// The graphics processors of a process's devices of kind [`Cuda`](DeviceKind::Cuda), in the
    /// devices' order, as numbers that the driver gives them, where it shows that process `gpus` of
    /// them. None where there are no devices of that kind, or no processors.
    ///
    /// Those of a host go to its processes in order, each its own as long as there are enough; else
    /// they are shared in turn. A process that is shown fewer than its neighbours (a launcher has
    /// set `CUDA_VISIBLE_DEVICES` for each) begins again at the first one sooner.
    pub fn ordinals(&self, process: ProcessId, gpus: u32) -> Vec<u32> {
        if gpus == 0 {
            return Vec::new();
        }
        let of = |process: ProcessId| {
            let kinds = self.devices_of(process).iter().map(|device| self.kind_of(*device));
            kinds.filter(|kind| *kind == Some(DeviceKind::Cuda)).count()
        };
        let neighbours = (0..process.0)
            .map(ProcessId)
            .filter(|other| self.host_of(*other) == self.host_of(process));
        let first: usize = neighbours.map(of).sum();
        // Below `gpus`, which is one of them.
        (first..first + of(process)).map(|at| (at % gpus as usize) as u32).collect()
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
    fn processes_have_processors_of_their_own_where_there_are_enough() {
        let job = Topology::even(2, 2).of_kinds(&[Cuda]).unwrap();
        assert_eq!(all(&job, 8), [[0, 1], [2, 3]]);
        assert_eq!(all(&job, 4), [[0, 1], [2, 3]]);
    }

    #[test]
    fn processors_are_shared_in_turn_where_there_are_not() {
        let job = Topology::even(2, 2).of_kinds(&[Cuda]).unwrap();
        assert_eq!(all(&job, 3), [[0, 1], [2, 0]]);
        assert_eq!(all(&job, 1), [[0, 0], [0, 0]]);
        // Also where each process is shown its own ones alone.
        assert_eq!(all(&job, 2), [[0, 1], [0, 1]]);
    }

    #[test]
    fn who_has_no_such_devices_takes_none_and_each_host_begins_anew() {
        let job = Topology::even(4, 1).of_kinds(&[Cpu, Cuda, Cuda, Cuda]).unwrap();
        assert_eq!(all(&job, 8), [vec![], vec![0], vec![1], vec![2]]);
        let apart = job.on_hosts(&["a", "b", "a", "b"]).unwrap();
        assert_eq!(all(&apart, 8), [vec![], vec![0], vec![0], vec![1]]);
        assert_eq!(all(&apart, 0), [const { Vec::<u32>::new() }; 4]);
        assert!(apart.ordinals(ProcessId(9), 8).is_empty());
    }
}
