//! One way to move bytes: copies of regions and sums of them, on devices of every kind.

pub mod copy;
pub mod sum;
