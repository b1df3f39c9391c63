//! The model of the best evaluation of a training, which `--save-best` keeps in a folder.

use std::path::{Path, PathBuf};

use mpmd::job::say;
use mpmd::pipeline::{Loss, Pipeline};
use mpmd::train::BestEvaluation;
use mpmd::train::tensors::{read_regular, replace};
use mpmd::{Error, MpmdArray, ProcessId, Program, Result};
use mpmd_models::{Folder, Lora, merged, save, save_adapter};
use serde::{Deserialize, Serialize};

/// Name of the file with the step of the model in the folder.
const STEP_FILE: &str = "best.json";
/// Largest size of this file, in bytes.
const LARGEST_FILE: u64 = 4096;

/// The folder of the best model.
#[derive(Clone, Debug)]
pub(super) struct BestFolder {
    folder: PathBuf,
    source: Folder,
    lora: Option<Lora>,
}

/// The content of [`STEP_FILE`].
#[derive(Deserialize, Serialize)]
struct SavedStep {
    /// Number of updates of the model.
    step: u64,
}

impl BestFolder {
    pub(super) fn new(folder: &Path, source: &Folder, lora: Option<Lora>) -> Self {
        Self {
            folder: folder.to_owned(),
            source: source.clone(),
            lora,
        }
    }

    /// Saves the parameters after `step` updates: LoRA's matrices as an adapter, or else the model.
    /// Blocks until the folder is complete. Every process must call it.
    pub(super) fn save(
        &self,
        p: &mut Program,
        step: u64,
        pipeline: &Pipeline<MpmdArray, Loss<MpmdArray>>,
    ) -> Result<()> {
        let Self {
            folder,
            source,
            lora,
        } = self;
        match lora {
            Some(lora) => save_adapter(p, source, pipeline, *lora, folder)?,
            None => {
                let params = merged(p, pipeline, None)?;
                save(p, source, &params, folder)?;
            }
        }
        p.broadcast_value(ProcessId(0), (), || {
            let text = serde_json::to_string(&SavedStep { step });
            let text = text.map_err(|why| Error::Environment(why.to_string()))?;
            replace(&folder.join(STEP_FILE), format!("{text}\n").as_bytes())
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
        let read = || {
            let text = read_regular(&self.folder.join(STEP_FILE), LARGEST_FILE).ok()?;
            serde_json::from_slice::<SavedStep>(&text).ok()
        };
        read().is_some_and(|saved| saved.step == best.step)
    }
}
