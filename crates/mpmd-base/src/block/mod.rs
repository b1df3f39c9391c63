//! The one module through which the framework blocks: threads, locks, condition variables,
//! channels, time, and the policy for spinning before sleeping.
//!
//! In production these are thin layers over `parking_lot` and the standard library. Core, router,
//! the in-process transport and the state of the rendezvous take them from here only. So a
//! [simulated world](simulated) can replace them in one place: then a seed decides the order of the
//! threads, and time passes only when all of them wait. `cargo xtask tidy` checks this.

use std::time::Duration;

pub use std::time::{Instant, SystemTime, UNIX_EPOCH};

pub use parking_lot::RwLock;

mod cores;
mod future;
mod lock;
pub mod mpsc;
mod spin;
pub mod thread;
mod world;

pub use cores::{CORES, host_cores};
pub use future::block_on;
pub use lock::{Condvar, Mutex, MutexGuard, WaitTimeoutResult};
pub use spin::{CoreBudget, Idle, PollGap, Spin, SpinPace, SpinPolicy};
pub use world::{WorldReport, WorldSettings, join_group, note, simulated, stop_group};

/// Returns the current time, which is simulated in a simulated world.
#[inline]
pub fn now() -> Instant {
    world::me().map_or_else(Instant::now, |me| me.now())
}

/// Returns the time that has passed since `then`; zero if `then` is in the future.
#[inline]
pub fn since(then: Instant) -> Duration {
    now().saturating_duration_since(then)
}

/// Returns true in a simulated world, where no thread polls.
#[inline]
pub(crate) fn is_simulated() -> bool {
    world::me().is_some()
}
