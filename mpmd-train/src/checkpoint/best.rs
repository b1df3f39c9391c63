//! The best checkpoint of a folder, by a metric of its evaluation: `step-best.json` names it.

use std::path::Path;

use mpmd_core::{Result, read_regular};
use serde::{Deserialize, Serialize};

use crate::tensors::disk::replace;
use crate::tensors::failed;

/// Name of the file.
const NAME: &str = "step-best.json";
/// Limit of the size of the file that is read, in bytes.
const LARGEST: u64 = 1 << 16;

/// Which values of a metric are better.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Goal {
    /// Lower ones, as of a loss.
    Lowest,
    /// Higher ones, as of an accuracy.
    Highest,
}

/// The best value of a metric so far.
#[derive(Clone, Debug)]
pub(crate) struct Best {
    pub(crate) metric: String,
    pub(crate) goal: Goal,
    pub(crate) value: Option<f64>,
    /// The step of that value.
    pub(crate) step: u64,
}

impl Best {
    /// Returns true if the value of a step is finite and better than the best so far, and takes it.
    pub(crate) fn take(&mut self, step: u64, value: f64) -> bool {
        let is_better = self.value.is_none_or(|best| match self.goal {
            Goal::Lowest => value < best,
            Goal::Highest => value > best,
        });
        let is_taken = is_better && value.is_finite();
        if is_taken {
            (self.step, self.value) = (step, Some(value));
        }
        is_taken
    }
}

/// The content of the file.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(crate) struct BestEntry {
    /// The step of the checkpoint.
    pub(crate) step: u64,
    pub(crate) metric: String,
    pub(crate) value: f64,
}

/// Reads which checkpoint of a folder is the best. `None` if the folder does not say.
pub(crate) fn read(folder: &Path) -> Result<Option<BestEntry>> {
    let path = folder.join(NAME);
    match read_regular(&path, LARGEST) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        bytes => {
            let bytes = bytes.map_err(|error| failed(&path, &error))?;
            let unknown = |error| failed(&path, &format!("{error}: remove it"));
            serde_json::from_slice(&bytes).map(Some).map_err(unknown)
        }
    }
}

/// Names another checkpoint as the best. It must be complete.
pub(crate) fn write(folder: &Path, best: &BestEntry) -> Result<()> {
    let path = folder.join(NAME);
    let text = serde_json::to_vec(best).map_err(|error| failed(&path, &error))?;
    replace(&path, &text)
}
