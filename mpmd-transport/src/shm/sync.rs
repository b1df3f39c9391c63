//! The atomics used by the ring, the doorbell and their words.
//!
//! A module of its own, so that the model checker (`tests/interleavings`) can replace them by
//! atomics that try every interleaving.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
