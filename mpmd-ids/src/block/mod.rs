//! The one module through which the framework blocks: threads, locks, condition variables,
//! channels, time, and the policy for spinning before sleeping.
//!
//! In production these are plain re-exports. Core, router, the in-process transport and the state
//! of the rendezvous take them from here only. So a simulation can replace them in one place.
//! `cargo xtask tidy` checks this.

pub use std::time::{Instant, SystemTime, UNIX_EPOCH};

pub use parking_lot::{Condvar, Mutex, MutexGuard, RwLock};

mod cores;
mod spin;

pub use cores::{CORES, host_cores};
pub use spin::{CoreBudget, Gap, Idle, Pace, Spin, SpinPolicy};

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
