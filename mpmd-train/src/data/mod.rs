//! Data for training, as pure functions of a key, a step and a microbatch.

mod text;

pub use text::{BLOCK, HELD_OUT_EVERY, LARGEST_FILE, SEPARATOR, Text};
