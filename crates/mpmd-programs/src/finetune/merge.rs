//! `finetune --merge`: a model with an adapter, as a model without one.

use std::path::Path;
use std::process::ExitCode;

use mpmd::ProcessId;
use mpmd::job::{JobArgs, say};
use mpmd_models::{Adapter, Folder, HeldBytes, merged, save};

use super::saved_folders::{SavedFolder, SavedFolders};
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
    let saved = SavedFolders {
        models: vec![SavedFolder {
            option: "--merge",
            path: to,
            bytes: source.saved_bytes(),
        }],
        checkpoints: None,
    };
    saved.create(source, adapter)?;

    let job = compared(job, source, &[]);
    mpmd::job::run(&job, stages, devices, |p| {
        let _claims = saved.claim(p)?;
        let pipeline = model.losses(p, &meshes)?;
        let params = merged(p, &pipeline, None)?;
        save(p, source, &params, to)?;
        if p.process() == ProcessId(0) && !p.is_dry_run() {
            say(&format!("saved to {}", to.display()));
        }
        anyhow::Ok(())
    })
}
