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

/// The position of a microbatch in a training, and its random key.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct MicrobatchPlace {
    /// Number of the step, counted from 1.
    pub step: u64,
    /// Index of the microbatch in its step.
    pub microbatch: usize,
    /// Number of training microbatches before this one, over all steps.
    pub before: u64,
    /// The seed of the training.
    pub seed: u64,
    /// Random key that is derived from the seed, the step and the microbatch.
    pub key: Key,
}

impl MicrobatchPlace {
    /// Creates the position of a microbatch in a training with seed `seed` and `count` microbatches
    /// per step.
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

/// The source of a training's microbatches. `In` is the input of the first stage.
///
/// Every process calls the methods in the same order with the same arguments, and must issue the
/// same operations. The argument `meshes` has the stages' meshes, in order.
pub trait Data<In> {
    /// Checks that all processes have read the same data, such as a text. Default: does nothing.
    ///
    /// # Errors
    ///
    /// If the job is known to have failed.
    fn compare(&self, p: &mut Program) -> Result<()> {
        let _ = p;
        Ok(())
    }

    /// Issues the operations that create a training microbatch. Returns without waiting.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Program::array_from_fn`].
    fn training(
        &self,
        p: &mut Program,
        meshes: &[Mesh],
        at: MicrobatchPlace,
    ) -> Result<Microbatch<In>>;

    /// Returns the number of held-out microbatches, for evaluation. Default: 0.
    fn held_out_len(&self) -> usize {
        0
    }

    /// Issues the operations that create held-out microbatch `index`. Returns without waiting.
    /// Default: an error.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Program::array_from_fn`]. If there is no such microbatch.
    fn held_out(&self, p: &mut Program, meshes: &[Mesh], index: usize) -> Result<Microbatch<In>> {
        let _ = (p, meshes);
        Err(Error::kernel(format!(
            "there is no held-out microbatch {index}"
        )))
    }
}
