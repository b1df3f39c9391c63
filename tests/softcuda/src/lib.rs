//! A CUDA driver in software, for tests: not a GPU, and no timing of it means anything.

mod alloc;
mod compile;
mod copy;
mod counters;
mod device;
mod entry;
mod error;
mod event;
mod faults;
mod handles;
mod host;
mod ipc;
mod launch;
mod memory;
mod module;
mod nvrtc;
mod races;
mod settings;
mod shared_event;
mod source;
mod stream;

mod asked;
mod harness;

pub use asked::{bytes, calls};
pub use harness::{environment, install, library, real, run_again};
