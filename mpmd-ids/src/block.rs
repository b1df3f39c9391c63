//! The one module through which the framework blocks: threads, locks, condition variables,
//! channels, time, and the policy for spinning before sleeping.
//!
//! In production these are plain re-exports. Core, router, the in-process transport and the state
//! of the rendezvous take them from here and from nowhere else, so that a simulation can replace
//! them in one place. `cargo xtask tidy` checks this.

use std::time::Duration;

pub use std::time::{Instant, SystemTime, UNIX_EPOCH};

pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

/// Channels.
pub mod mpsc {
    pub use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
}

/// Threads.
pub mod thread {
    pub use std::thread::{
        Builder, JoinHandle, ThreadId, available_parallelism, current, panicking, scope, sleep,
        spawn, yield_now,
    };
}

/// How long the engine looks for work before it sleeps.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Spin {
    /// Adapts to the last gaps between works, up to 50 microseconds. Never polls if the job has
    /// more processes on this host than there are cores.
    #[default]
    Auto,
    /// Sleeps at once.
    Never,
    /// Polls for this long in every gap, although that takes the core from other threads.
    For(Duration),
}
