//! The atomics that the ring, the door and their words are made of.
//!
//! A module of its own so that the proof (`tests/interleavings`) puts others in their place, which
//! try every order of what happens.

pub(super) use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
