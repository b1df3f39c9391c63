//! Data for training, as pure functions of a key, a step and a microbatch.
//!
//! Each process makes only the regions that its devices hold, with
//! [`Program::array_from_fn`]. So the data do not depend on the number of processes.

mod blocks;
mod content;
mod packed_sequences;
mod rows;
mod text;
mod tokens;
mod windows;

use mpmd_core::pipeline::Microbatch;
use mpmd_core::{Error, Program, Result};
use mpmd_layout::random::Key;
use mpmd_layout::topology::Mesh;

pub use blocks::{BLOCK, HELD_OUT_EVERY};
pub use content::hash_files;
pub use packed_sequences::{PackedSequences, Sequence};
pub use text::{LARGEST_FILE, SEPARATOR, TextBytes};
pub use tokens::TokenSource;
pub use windows::Windows;

/// The place of a training microbatch, and its random key.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MicrobatchPlace {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Index of the microbatch in its step.
    pub microbatch: usize,
    /// Number of training microbatches before this one, in all steps.
    pub before: u64,
    /// The seed of the training.
    pub seed: u64,
    /// Random key of (seed, step, microbatch).
    pub key: Key,
}

impl MicrobatchPlace {
    /// Creates the place of a microbatch in a training with this seed and `count` microbatches a
    /// step.
    pub fn new(seed: u64, step: u64, microbatch: usize, count: usize) -> Self {
        let key = Key(seed).fold_in(step).fold_in(microbatch as u64);
        let before = step.saturating_sub(1) * count as u64 + microbatch as u64;
        Self {
            step,
            microbatch,
            before,
            seed,
            key,
        }
    }
}

/// The source of a training's microbatches, with input `In` of the first stage.
///
/// Every process calls the methods in the same order with the same arguments, and must issue the
/// same operations. `meshes` are those of the stages, in order.
pub trait Data<In> {
    /// Makes the processes compare the data that they have read, such as a text. Default: does
    /// nothing.
    ///
    /// # Errors
    ///
    /// If the job is known to have failed.
    fn compare(&self, p: &mut Program) -> Result<()> {
        let _ = p;
        Ok(())
    }

    /// Issues the making of a training microbatch. Returns without waiting.
    ///
    /// # Errors
    ///
    /// As [`Program::array_from_fn`].
    fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        at: MicrobatchPlace,
    ) -> Result<Microbatch<In>>;

    /// Returns the number of held-out microbatches, for evaluation. Default: none.
    fn held_out_len(&self) -> usize {
        0
    }

    /// Issues the making of the held-out microbatch `index`. Returns without waiting. Default: an
    /// error.
    ///
    /// # Errors
    ///
    /// As [`Program::array_from_fn`]. If there is no such microbatch.
    fn held_out(&self, p: &mut Program, meshes: &[Mesh], index: usize) -> Result<Microbatch<In>> {
        let _ = (p, meshes);
        Err(Error::kernel(format!(
            "there is no held-out microbatch {index}"
        )))
    }
}
