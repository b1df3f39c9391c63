//! A model under training, divided over the devices of a job that may lose and get processes.

use anyhow::ensure;
use mpmd::pipeline::Schedule;
use mpmd::topology::Mesh;
use mpmd_models::{Folder, HeldBytes, Stages};

use super::train::TrainArgs;
use crate::division::{DivisionArgs, named_option};

/// A model under training, divided over stages and devices.
pub(super) struct DividedModel {
    pub(super) model: Stages,
    pub(super) schedule: Schedule,
    /// Number of devices of each rank.
    pub(super) devices: Vec<usize>,
    /// The mesh of each stage.
    pub(super) meshes: Vec<Mesh>,
}

impl DividedModel {
    /// Divides a model over stages and devices as the arguments say.
    ///
    /// # Errors
    ///
    /// If the arguments do not fit the model or each other, or if `--memory` is too small.
    pub(super) fn new(
        source: &Folder,
        args: &TrainArgs,
        cut: &DivisionArgs,
    ) -> anyhow::Result<Self> {
        let stages = cut.stages();
        let schedule = args.schedule(stages)?;
        let held = if args.lora().is_some() {
            HeldBytes::FROZEN
        } else {
            HeldBytes::TRAINING
        };
        let model = cut.divide(cut.stages_of(source, args.time, "--time")?, held)?;
        let model = match &args.start {
            Some(adapter) => model.continue_adapter(adapter, args.seed)?,
            None => model.lora(args.lora(), args.seed),
        };
        Self::placed(model.packed(args.is_of_examples()), schedule)
    }

    /// Divides a model that is only evaluated, on rows of packed examples if `is_packed`.
    ///
    /// # Errors
    ///
    /// As for [`DividedModel::new`].
    pub(super) fn frozen(
        source: &Folder,
        args: &TrainArgs,
        cut: &DivisionArgs,
        is_packed: bool,
    ) -> anyhow::Result<Self> {
        let stages = cut.stages();
        let schedule = args.schedule(stages)?;
        let model = cut.divide(
            cut.stages_of(source, args.time, "--time")?,
            HeldBytes::FROZEN,
        )?;
        Self::placed(model.packed(is_packed), schedule)
    }

    /// Places the stages of a model on the devices of their ranks.
    fn placed(model: Stages, schedule: Schedule) -> anyhow::Result<Self> {
        let rank_of = |stage| schedule.rank_of(stage);
        let devices = model
            .devices(rank_of)
            .map_err(|invalid| named_option(&invalid))?;
        let meshes = model.meshes(rank_of)?;
        Ok(Self {
            model,
            schedule,
            devices,
            meshes,
        })
    }

    /// Divides a model over `processes` processes, after a job has lost or gained some.
    ///
    /// Without `--memory`, keeps the stages if each process can have equally many. Otherwise
    /// divides the layers anew, with one rank for each process. If that fails without `--memory`,
    /// some processes get more stages than others.
    ///
    /// # Errors
    ///
    /// As for [`DividedModel::new`].
    pub(super) fn over(
        source: &Folder,
        args: &TrainArgs,
        cut: &DivisionArgs,
        processes: usize,
    ) -> anyhow::Result<Self> {
        let first = Self::new(source, args, cut)?;
        let ranks = first.schedule.ranks();
        // A process with more stages than at the start may have too little memory.
        if processes == ranks || ranks.is_multiple_of(processes) && cut.memory.is_empty() {
            return Ok(first);
        }
        match first.anew(source, args, cut, processes) {
            Err(_) if cut.memory.is_empty() => Ok(first),
            anew => anew,
        }
    }

    /// Divides the layers anew, over `ranks` ranks.
    fn anew(
        &self,
        source: &Folder,
        args: &TrainArgs,
        cut: &DivisionArgs,
        ranks: usize,
    ) -> anyhow::Result<Self> {
        let mut pairs = self.devices.windows(2);
        ensure!(
            pairs.all(|pair| pair[0] == pair[1]) && cut.cut.is_empty(),
            "the layers cannot be divided anew: with --elastic and --memory, leave --cut out, and \
             give one number of devices for all stages"
        );
        let chunks = self.schedule.stages() / self.schedule.ranks();
        let most = source.config().num_hidden_layers / chunks;
        let stages = ranks.min(most.max(self.schedule.ranks())) * chunks;
        // A device that may come to have another stage has no more memory than before.
        let memory = cut
            .memory
            .iter()
            .min()
            .map_or(Vec::new(), |least| vec![*least; stages]);
        Self::new(
            source,
            args,
            &DivisionArgs {
                stages,
                memory,
                ..cut.clone()
            },
        )
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Args {
        #[command(flatten)]
        train: TrainArgs,
        #[command(flatten)]
        cut: DivisionArgs,
    }

    /// Divides a model of four layers on 1 to 5 processes, in a job with these arguments. Returns
    /// the number of ranks for each.
    fn ranks(args: &[&str]) -> Vec<anyhow::Result<usize>> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/mpmd-demo");
        let source = Folder::open(folder).unwrap();
        let Args { train, cut } = Args::parse_from([&["finetune"], args].concat());
        let over = |processes| DividedModel::over(&source, &train, &cut, processes);
        (1..=5)
            .map(|processes| Ok(over(processes)?.schedule.ranks()))
            .collect()
    }

    fn all(args: &[&str]) -> Vec<usize> {
        ranks(args).into_iter().map(Result::unwrap).collect()
    }

    #[test]
    fn layers_are_divided_anew_where_stages_do_not_divide() {
        assert_eq!(all(&["--stages", "4"]), [4, 4, 3, 4, 4]);
        // Each stage would have the same memory as before.
        assert_eq!(
            all(&["--stages", "4", "--memory", "1GiB,1GiB,1GiB,1GiB"]),
            [1, 2, 3, 4, 4]
        );
        assert_eq!(all(&["--cut", "0..1,1..2,2..4"]), [3; 5], "by hand: kept");
    }

    #[test]
    fn processes_that_need_too_much_memory_are_refused() {
        let found = ranks(&["--stages", "4", "--memory", "8MiB,8MiB,8MiB,8MiB"]);
        let said = found[0].as_ref().unwrap_err().to_string();
        assert!(said.contains("--memory: stage 0 needs"), "{said}");
        assert_eq!(*found[3].as_ref().unwrap(), 4);
    }
}
