//! Programs that decide on passes of inference by themselves.

pub(crate) mod alone_after_a_value;
pub(crate) mod block_filled_twice;
pub(crate) mod other_pass_on_each_process;
pub(crate) mod skipped_position;
pub(crate) mod slot_twice;
pub(crate) mod stops_by_itself;
pub(crate) mod token_without_a_row;
pub(crate) mod version_on_one_process;

use std::path::PathBuf;

use mpmd::{Program, Result};
use mpmd_models::{
    Folder, Inference, InferencePass, NewSequence, PassChunk, Room, Sampling, Stages,
};

/// Tokens of a sequence.
const POSITIONS: usize = 64;

/// Returns the folder of a tiny model.
fn folder() -> PathBuf {
    PathBuf::from(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../crates/mpmd-models/tests/folders/plain"
    ))
}

/// Creates an inference over two stages, for two sequences.
fn inference(p: &mut Program) -> Result<Inference> {
    let model = Stages::new(&Folder::open(folder())?, 2, POSITIONS)?;
    let meshes = model.meshes(|stage| stage)?;
    model.inference(
        p,
        &meshes,
        Room {
            blocks: 8,
            sequences: 2,
        },
        false,
    )
}

/// Returns a chunk with the first tokens of a sequence, after which a token is chosen.
fn prompt(slot: u32, tokens: &[u32]) -> PassChunk {
    let begin = NewSequence {
        sampling: Sampling::default(),
        prompt: tokens.len() as u32,
        top: None,
    };
    PassChunk {
        slot,
        start: 0,
        given: tokens.to_vec(),
        samples: true,
        blocks: vec![slot],
        new: Some(begin),
    }
}

/// Returns a chunk with the token that was chosen last, at a position.
fn next(slot: u32, start: u32) -> PassChunk {
    PassChunk {
        slot,
        start,
        given: Vec::new(),
        samples: true,
        blocks: vec![slot],
        new: None,
    }
}

/// Returns a pass of these chunks.
fn pass(chunks: Vec<PassChunk>) -> InferencePass {
    InferencePass { version: 0, chunks }
}
