//! The arguments that divide a model over stages and devices.

use std::ops::Range;

use anyhow::{Context as _, anyhow, ensure};
use mpmd::job::at_least;
use mpmd_base::parse_bytes;
use mpmd_models::{Division, DivisionError, Folder, HeldBytes, InvalidSetting, Stages};

/// Arguments that divide a model over stages and devices.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DivisionArgs {
    /// Number of stages over which the layers are divided, by their work; the output counts too
    #[arg(long, default_value_t = 1, value_parser = at_least(1), conflicts_with = "cut")]
    pub stages: usize,
    /// The layers of each stage, as in 0..9,9..22
    #[arg(long, value_name = "LAYERS,…", value_delimiter = ',', value_parser = range)]
    pub cut: Vec<Range<usize>>,
    /// Number of devices over which each stage's layers are divided: one for all stages, or one for
    /// each, as in 2,1
    #[arg(long, value_name = "T,…", value_delimiter = ',', value_parser = at_least(1))]
    pub tensor_parallel: Vec<usize>,
    /// Number of devices over which each stage's experts are divided: 1, 2, 4 and so on, one for
    /// all stages, or one for each; results do not depend on it
    #[arg(long, value_name = "E,…", value_delimiter = ',', value_parser = at_least(1))]
    pub expert_parallel: Vec<usize>,
    /// Print the division of each parameter over the devices of its stage, and end
    #[arg(long)]
    pub show_sharding: bool,
    /// Memory of a device of each stage for weights, gradients, the optimiser's state and caches,
    /// as in 8GiB,16GiB; activations come on top
    #[arg(long, value_name = "BYTES,…", value_delimiter = ',', value_parser = parse_bytes)]
    pub memory: Vec<u64>,
}

impl DivisionArgs {
    /// Returns the number of stages that the arguments request.
    pub(crate) fn stages(&self) -> usize {
        if self.cut.is_empty() {
            self.stages
        } else {
            self.cut.len()
        }
    }

    /// Returns the option that gives the number of stages.
    pub(crate) fn stages_option(&self) -> &'static str {
        if self.cut.is_empty() {
            "--stages"
        } else {
            "--cut"
        }
    }

    /// Cuts a model into the stages of these arguments, for sequences of up to `positions` tokens.
    /// The option `positions_option` gives that number.
    ///
    /// # Errors
    ///
    /// As for [`stages_of`].
    pub(crate) fn stages_of(
        &self,
        folder: &Folder,
        positions: usize,
        positions_option: &'static str,
    ) -> anyhow::Result<Stages> {
        let options = SizeOptions {
            stages: self.stages_option(),
            positions: positions_option,
        };
        stages_of(folder, self.stages(), positions, options)
    }

    /// Returns the division that the arguments request.
    pub(crate) fn division(&self) -> Division {
        Division {
            layers: self.cut.clone(),
            tensor_parallel: self.tensor_parallel.clone(),
            expert_parallel: self.expert_parallel.clone(),
            memory: self.memory.clone(),
        }
    }

    /// Divides a model over stages and devices. `held` is the memory that its parameters and layers
    /// take.
    ///
    /// # Errors
    ///
    /// If the arguments do not fit the model or each other. The message names the option.
    pub(crate) fn divide(&self, model: Stages, held: HeldBytes) -> anyhow::Result<Stages> {
        model.divide(&self.division(), held).map_err(named)
    }
}

/// The options with which a user gives the sizes of [`Stages::new`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct SizeOptions {
    pub stages: &'static str,
    pub positions: &'static str,
}

/// Divides the layers of a model over stages, for sequences of up to `positions` tokens.
///
/// # Errors
///
/// If the model has fewer layers or positions. The message names the option.
pub(crate) fn stages_of(
    folder: &Folder,
    stages: usize,
    positions: usize,
    options: SizeOptions,
) -> anyhow::Result<Stages> {
    Stages::new(folder, stages, positions).map_err(|error| match error {
        DivisionError::ModelSize { setting, why } => {
            let option = match setting {
                "stages" => options.stages,
                _ => options.positions,
            };
            anyhow!("{option}: {why}")
        }
        other => named(other),
    })
}

/// Returns the error with the option at fault named as users write it.
pub(crate) fn named(error: DivisionError) -> anyhow::Error {
    match error {
        DivisionError::Setting(invalid) => named_option(&invalid),
        DivisionError::Memory { .. } => anyhow!("--{error}"),
        DivisionError::ModelSize { why, .. } => (*why).into(),
        DivisionError::Model(error) => error.into(),
    }
}

/// Returns the error for an invalid setting that users give by an option.
pub(crate) fn named_option(invalid: &InvalidSetting) -> anyhow::Error {
    let InvalidSetting {
        setting,
        expected,
        found,
    } = invalid;
    let option = match *setting {
        // The library divides layers; the user cuts them.
        "layers" => "cut".to_owned(),
        setting => setting.replace('_', "-"),
    };
    anyhow!("--{option}: expected {expected}, found {found}")
}

fn range(text: &str) -> anyhow::Result<Range<usize>> {
    let (start, end) = text.split_once("..").context("no layers: there is 0..9")?;
    let range = start.trim().parse()?..end.trim().parse()?;
    ensure!(!range.is_empty(), "a stage needs a layer");
    Ok(range)
}
