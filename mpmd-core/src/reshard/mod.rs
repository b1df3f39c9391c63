//! Resharding: which piece of an array goes from which device to which, and the copying of one
//! piece.

mod best;
pub(crate) mod copy;
mod group;
mod intermediate;
mod plan;
mod reduce;
mod spread;
mod sum;
#[cfg(test)]
mod tests;
mod tiling;

pub use best::{Detour, best_intermediate, estimate_ns};
pub use copy::{contiguous_bytes, copy_region};
pub use group::groups_by_devices;
pub use intermediate::{Intermediate, NoIntermediate, find_intermediate_sharding};
pub use plan::{Delivery, Origin, Part, Piece, Plan, ReshardError, Summary, plan};
pub(crate) use reduce::scattered;
pub use sum::add_region;
