//! `finetune --merge`: a model with an adapter, as a model without one.

use std::path::Path;
use std::process::ExitCode;

use mpmd::job::JobArgs;
use mpmd::train::tensors::check_folder;
use mpmd_models::{Adapter, Folder, HeldBytes, merged, save};

use super::train::create_saved_folders;
use crate::division::DivisionArgs;
use crate::inputs::compared;

/// Saves a model, with the adapter that `source` has, in the folder `to`. Each process reads and
/// writes the weights of its own stages. `adapter` is that adapter.
///
/// # Errors
///
/// If `to` is the folder of the model or the adapter, or cannot be created. If the arguments do not
/// fit the model, or the job could not be started.
pub(super) fn run(
    source: &Folder,
    adapter: Option<&Adapter>,
    to: &Path,
    cut: &DivisionArgs,
    job: &JobArgs,
) -> anyhow::Result<ExitCode> {
    let stages = cut.stages();
    let model = cut.divide(cut.stages_of(source, 1, "--time")?, HeldBytes::FROZEN)?;
    let devices = model.devices(|stage| stage)?;
    let meshes = model.meshes(|stage| stage)?;
    if cut.show_sharding {
        print!("{}", model.show_sharding()?);
        return Ok(ExitCode::SUCCESS);
    }
    create_saved_folders(source, adapter, &[("--merge", Some(to))])?;

    let job = compared(job, source, &[]);
    mpmd::job::run(&job, stages, devices, |p| {
        check_folder(p, to, source.saved_bytes())?;
        let pipeline = model.losses(p, &meshes)?;
        let params = merged(p, &pipeline, None)?;
        save(p, source, &params, to)?;
        anyhow::Ok(())
    })
}
