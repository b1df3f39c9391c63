//! Resharding: which piece of an array goes from which device to which, and the copying of one piece.

mod copy;
mod plan;
mod spread;
#[cfg(test)]
mod tests;
mod tiling;

pub use copy::{contiguous_bytes, copy_region};
pub use plan::{Delivery, Origin, Part, Piece, Plan, ReshardError, Summary, plan};
