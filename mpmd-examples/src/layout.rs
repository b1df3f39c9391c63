//! The layouts in which a training goes on with fewer or more devices than at first.

use mpmd::pipeline::Schedule;
use mpmd_base::bytes_text;

use crate::training;

/// What decides on the layouts of a training.
#[derive(Clone, Debug)]
pub struct Layouts {
    /// The name of the schedule, or its file.
    pub schedule: String,
    /// Stages of each rank, if they are given.
    pub chunks: Option<usize>,
    /// The schedule with all devices.
    pub first: Schedule,
    /// Number of blocks of the model.
    pub layers: usize,
    /// Devices that share the sequences of a microbatch, with all devices.
    pub fsdp: usize,
    /// Devices over which a stage's matrices are sharded.
    pub tensor_parallel: usize,
    /// The bytes that a training needs for all parameters, their gradients and the optimiser's
    /// state.
    pub bytes: u64,
    /// Memory of a device for them, in bytes, if it is limited.
    pub memory: Option<u64>,
}

/// A layout of a training.
#[derive(Clone, Debug)]
pub struct Layout {
    /// The schedule.
    pub schedule: Schedule,
    /// By rank of the schedule: the group of devices that has its stages. Several ranks may have
    /// one group.
    pub groups: Vec<usize>,
    /// Devices of a group that share the sequences of a microbatch.
    pub fsdp: usize,
}

impl Layouts {
    /// Returns the layout with which a training on so many devices takes the least time, by the
    /// blocks of the device with most work; among equals the one with most devices for a
    /// microbatch, since losses keep their bits only with all of them.
    ///
    /// There are fewer stages, several ranks to a group, or fewer devices that share a microbatch.
    /// With more devices than at first there are more stages.
    ///
    /// # Errors
    ///
    /// With the reason, if there is none: too few devices, or too little memory.
    pub fn of(&self, devices: usize) -> Result<Layout, String> {
        let rows = (1..=self.fsdp).rev().filter(|rows| self.fsdp.is_multiple_of(*rows));
        let mut best: Option<(f64, Layout)> = None;
        let mut refused = None;
        for rows in rows {
            let each = rows * self.tensor_parallel;
            let most = devices / each;
            let layouts = [self.recut(most), self.folded(most)].into_iter().flatten();
            for (schedule, groups) in layouts {
                let layout = Layout { schedule, groups, fsdp: rows };
                let blocks = self.most_blocks(&layout);
                let needs = self.bytes * blocks as u64 / (self.layers * each) as u64;
                if let Some(memory) = self.memory.filter(|memory| needs > *memory) {
                    refused.get_or_insert(format!(
                        "a device needs {} for its parameters, gradients and the optimiser's \
                         state, and has {}",
                        bytes_text(needs),
                        bytes_text(memory)
                    ));
                    continue;
                }
                let time = blocks as f64 / rows as f64;
                if best.as_ref().is_none_or(|(least, _)| time < *least) {
                    best = Some((time, layout));
                }
            }
        }
        best.map(|(_, layout)| layout).ok_or_else(|| {
            refused.unwrap_or_else(|| {
                let least = self.tensor_parallel;
                format!("{devices} devices are too few: a stage needs {least} (--tensor-parallel)")
            })
        })
    }

    /// Cuts the model into stages for `groups` ranks, if the schedule can be made for them.
    fn recut(&self, groups: usize) -> Option<(Schedule, Vec<usize>)> {
        let chunks = self.first.stages() / self.first.ranks();
        let ranks = groups.min(self.first.ranks().max(self.layers / chunks));
        if ranks == self.first.ranks() {
            return Some((self.first.clone(), (0..ranks).collect()));
        }
        let (stages, microbatches) = (Some(ranks * chunks), Some(self.first.microbatches()));
        let schedule = training::schedule(&self.schedule, self.chunks, stages, microbatches);
        Some((schedule.ok().filter(|_| ranks > 0)?, (0..ranks).collect()))
    }

    /// Keeps the stages, and gives groups several ranks.
    fn folded(&self, groups: usize) -> Option<(Schedule, Vec<usize>)> {
        let ranks = self.first.ranks();
        let groups = groups.min(ranks);
        (groups > 0)
            .then(|| (self.first.clone(), (0..ranks).map(|rank| rank * groups / ranks).collect()))
    }

    /// Returns the number of blocks of the group with most of them, at least 1.
    fn most_blocks(&self, layout: &Layout) -> usize {
        let stages = layout.schedule.stages();
        let mut blocks = vec![0; layout.groups.iter().max().map_or(0, |last| last + 1)];
        for (stage, rank) in layout.schedule.ranks_of_stages().iter().enumerate() {
            let bound = |stage: usize| stage * self.layers / stages;
            blocks[layout.groups[*rank]] += bound(stage + 1) - bound(stage);
        }
        blocks.into_iter().max().unwrap_or(0).max(1)
    }
}
