//! The model of the best evaluation of a training, which `--save-best` keeps in a folder.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use mpmd::job::say;
use mpmd::pipeline::{Loss, Pipeline};
use mpmd::train::BestEvaluation;
use mpmd::train::tensors::{read_regular, replace};
use mpmd::{Error, MpmdArray, ProcessId, Program, Result};
use mpmd_models::{Folder, Lora, merged, save, save_adapter};
use serde::Serialize;

/// Name of the file with the evaluation of the model in the folder.
const EVALUATION_FILE: &str = "best.json";
/// Largest size of this file, in bytes.
const LARGEST_FILE: u64 = 4096;

/// The folder of the best model.
#[derive(Clone, Debug)]
pub(super) struct BestFolder {
    folder: PathBuf,
    source: Folder,
    lora: Option<Lora>,
}

/// The evaluation with the lowest loss, in [`EVALUATION_FILE`] and in the line that a training
/// prints.
#[derive(Serialize)]
pub(super) struct BestRecord {
    /// Number of updates that the evaluated model has had.
    step: u64,
    held_out_loss: f64,
}

impl From<BestEvaluation> for BestRecord {
    fn from(best: BestEvaluation) -> Self {
        Self {
            step: best.step,
            held_out_loss: best.loss,
        }
    }
}

/// Returns the content of [`EVALUATION_FILE`] for an evaluation.
fn content(best: BestEvaluation) -> Result<String> {
    let text = serde_json::to_string(&BestRecord::from(best));
    let text = text.map_err(|why| Error::Environment(why.to_string()))?;
    Ok(format!("{text}\n"))
}

impl BestFolder {
    pub(super) fn new(folder: &Path, source: &Folder, lora: Option<Lora>) -> Self {
        Self {
            folder: folder.to_owned(),
            source: source.clone(),
            lora,
        }
    }

    /// Saves the parameters of the best evaluation: LoRA's matrices as an adapter, or else the
    /// model. Blocks until the folder is complete. Every process must call it.
    pub(super) fn save(
        &self,
        p: &mut Program,
        best: BestEvaluation,
        pipeline: &Pipeline<MpmdArray, Loss<MpmdArray>>,
    ) -> Result<()> {
        let Self {
            folder,
            source,
            lora,
        } = self;
        let file = folder.join(EVALUATION_FILE);
        // If a process is killed below, the folder may have this model or the one before.
        p.broadcast_value(ProcessId(0), (), || match fs::remove_file(&file) {
            Err(why) if why.kind() != ErrorKind::NotFound => {
                let file = file.display();
                Err(Error::Environment(format!("cannot remove {file}: {why}")))
            }
            _ => Ok(()),
        })?;

        match lora {
            Some(lora) => save_adapter(p, source, pipeline, *lora, folder)?,
            None => {
                let params = merged(p, pipeline, None)?;
                save(p, source, &params, folder)?;
            }
        }
        p.broadcast_value(ProcessId(0), (), || {
            replace(&file, content(best)?.as_bytes())
        })
    }

    /// Prints a warning if the folder lacks the model of the best evaluation of earlier runs.
    pub(super) fn warn_of_missing(&self, best: Option<BestEvaluation>) {
        if let Some(best) = best.filter(|best| !self.has(*best)) {
            say(&format!(
                "warning: the best evaluation is that after step {} of an earlier run, whose model \
                 is not in --save-best {}. A better one is saved there",
                best.step,
                self.folder.display()
            ));
        }
    }

    /// Prints the best evaluation, and whether its model is in the folder.
    pub(super) fn report(&self, best: BestEvaluation) {
        let BestEvaluation { step, loss, .. } = best;
        let folder = self.folder.display();
        let saved = if self.has(best) {
            format!("saved in {folder}")
        } else {
            format!("not saved in {folder}")
        };
        say(&format!(
            "best evaluation after step {step}: loss {loss:.4}, {saved}"
        ));
    }

    /// True if the folder has the model of an evaluation.
    fn has(&self, best: BestEvaluation) -> bool {
        let found = read_regular(&self.folder.join(EVALUATION_FILE), LARGEST_FILE);
        let expected = content(best);
        found.is_ok_and(|found| expected.is_ok_and(|text| text.as_bytes() == found))
    }
}
