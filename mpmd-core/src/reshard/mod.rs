//! Resharding: which piece of an array goes from which device to which, and the copying of one piece.

mod copy;
mod plan;

pub use copy::{contiguous_bytes, copy_region};
pub use plan::{Piece, Plan, ReshardError, plan};
