//! Resharding: the pieces of an array that go from device to device between two shardings.

mod best;
mod group;
mod intermediate;
mod plan;
mod reduce;
mod spread;
#[cfg(test)]
mod tests;
mod tiling;

pub use best::cheapest_intermediate;
pub use group::groups_by_devices;
pub use intermediate::{
    Intermediate, NoIntermediate, WhyNoIntermediate, find_intermediate_sharding,
};
pub use plan::{
    DeliveryOrigin, MOST_JOINED, PieceDelivery, ProcessPart, ReshardError, ReshardPiece,
    ReshardPlan, Summary, joined, plan,
};
#[doc(hidden)]
pub use reduce::scattered;
