//! Programs that read folders from outside: of other models, or with damage.

pub(crate) mod folder_of_each_process;
pub(crate) mod key_that_nothing_handles;
pub(crate) mod number_of_python;
pub(crate) mod values_not_finite;
pub(crate) mod weights_of_another_model;

use std::path::{Path, PathBuf};

use mpmd::{Program, Result};
use mpmd_models::{Folder, Inference, Room, Stages};

/// Tokens of a sequence.
const POSITIONS: usize = 64;

/// Returns a folder of this package.
fn own(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/folders")).join(name)
}

/// Returns a folder with a tiny model in order.
fn model(name: &str) -> PathBuf {
    let folders = "../../crates/mpmd-models/tests/folders";
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(folders)
        .join(name)
}

/// Creates an inference over two stages, for two sequences.
fn inference(p: &mut Program, folder: &Path) -> Result<Inference> {
    let stages = Stages::new(&Folder::open(folder)?, 2, POSITIONS)?;
    let meshes = stages.meshes(|stage| stage)?;
    let room = Room {
        blocks: 8,
        sequences: 2,
    };
    stages.inference(p, &meshes, room, false)
}
