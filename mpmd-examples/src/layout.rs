//! The schedules with which a training goes on with fewer or more processes than at first.

use mpmd::ProcessId;
use mpmd::job::bytes_text;
use mpmd::pipeline::Schedule;
use mpmd::topology::Topology;

use crate::training;

/// The inputs from which a training chooses its schedule for a number of processes.
#[derive(Clone, Debug)]
pub struct Layouts {
    /// Name of a built-in schedule, or path of a schedule's file.
    pub schedule: String,
    /// Stages of each rank. `None` for the schedule's default.
    pub chunks: Option<usize>,
    /// The schedule with which the training starts.
    pub first: Schedule,
    /// Number of blocks of the model.
    pub layers: usize,
    /// Devices of each rank.
    pub devices: usize,
    /// Bytes of all parameters, their gradients and the optimiser's state together.
    pub bytes: u64,
    /// Limit on a process's share of `bytes`. `None` for no limit.
    pub memory: Option<u64>,
}

impl Layouts {
    /// Returns the schedule with the shortest step on `processes` processes, estimated by the
    /// blocks of the process with most work. Among equals it prefers `first`, then fewer ranks. A
    /// process may own the devices of several ranks. The losses have the same bits with every
    /// schedule.
    ///
    /// # Errors
    ///
    /// The reason, if a process needs more than `memory`.
    pub fn of(&self, processes: usize) -> Result<Schedule, String> {
        let chunks = self.first.stages() / self.first.ranks();
        let most = self.first.ranks().max(self.layers / chunks);
        let recut = (1..=most).filter_map(|ranks| {
            let stages = Some(ranks * chunks);
            let microbatches = Some(self.first.microbatches());
            training::schedule(&self.schedule, self.chunks, stages, microbatches).ok()
        });

        let all = std::iter::once(self.first.clone()).chain(recut);
        let all = all.map(|schedule| (self.most_blocks(&schedule, processes), schedule));
        let (blocks, best) = all.min_by_key(|(blocks, _)| *blocks).ok_or("no schedule")?;
        self.check(blocks).map(|()| best)
    }

    /// Checks that `processes` processes have the memory for the schedule with which the training
    /// starts.
    ///
    /// # Errors
    ///
    /// The reason, if a process needs more than `memory`.
    pub fn check_first(&self, processes: usize) -> Result<(), String> {
        self.check(self.most_blocks(&self.first, processes))
    }

    /// Returns an error if a process with the work `blocks` needs more than `memory`.
    fn check(&self, blocks: usize) -> Result<(), String> {
        let needs = self.bytes * blocks as u64 / (self.layers * self.devices) as u64;
        match self.memory.filter(|memory| needs > *memory) {
            None => Ok(()),
            Some(memory) => Err(format!(
                "a process needs {} for its parameters, gradients and the optimiser's state, and \
                 has {}",
                bytes_text(needs),
                bytes_text(memory)
            )),
        }
    }

    /// Returns the work of the process with most work under `schedule`, at least 1. The unit is the
    /// share of a block that one device computes, so each device of a process adds the number of
    /// blocks of its rank.
    fn most_blocks(&self, schedule: &Schedule, processes: usize) -> usize {
        let stages = schedule.stages();
        let mut of_ranks = vec![0; schedule.ranks()];
        let bound = |stage: usize| stage * self.layers / stages;
        for (stage, rank) in schedule.ranks_of_stages().iter().enumerate() {
            of_ranks[*rank] += bound(stage + 1) - bound(stage);
        }

        let topology = Topology::spread(of_ranks.len() * self.devices, processes);
        let work = |process: u32| -> usize {
            let ranks = topology.devices_of(ProcessId(process)).iter();
            ranks
                .filter_map(|device| of_ranks.get(device.0 as usize / self.devices))
                .sum()
        };
        (0..processes as u32).map(work).max().unwrap_or(0).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the ranks of the schedules for 1 to 8 processes. The pipeline starts with 4 ranks
    /// and has `layers` blocks.
    fn ranks(layers: usize, devices: usize, memory: Option<u64>) -> Vec<Result<usize, String>> {
        let first = training::schedule("1f1b", None, Some(4), Some(8)).unwrap();
        let (schedule, chunks, bytes) = ("1f1b".to_owned(), None, 8 << 30);
        let layouts = Layouts {
            schedule,
            chunks,
            first,
            layers,
            devices,
            bytes,
            memory,
        };
        let ranks = |processes| layouts.of(processes).map(|schedule| schedule.ranks());
        (1..=8).map(ranks).collect()
    }

    #[test]
    fn stages_are_cut_anew_where_that_takes_less_time() {
        let found = |layers, devices| -> Vec<usize> {
            ranks(layers, devices, None)
                .into_iter()
                .map(Result::unwrap)
                .collect()
        };
        assert_eq!(found(4, 1), [4; 8]);
        assert_eq!(found(8, 1), [4, 4, 3, 4, 4, 4, 4, 8]);
        // Two devices of a rank may be on different processes.
        assert_eq!(found(8, 2), [4, 4, 4, 4, 4, 3, 3, 4]);
    }

    #[test]
    fn schedule_that_needs_too_much_memory_is_refused() {
        let found = ranks(8, 1, Some(3 << 30));
        let said = "a process needs 4.0 GiB for its parameters, gradients and the optimiser's \
                    state, and has 3.0 GiB";
        assert_eq!(found[1], Err(said.to_owned()));
        assert_eq!(found[2], Ok(3));
    }
}
