//! The threads with which candle computes: each device has a pool of its own.
//!
//! The device's thread is one of the pool. So the passes of two devices never wait for each other,
//! and with one thread nothing is handed over to another. The results do not depend on the number.
//!
//! candle itself divides operations on 65536 or more elements over a pool of its own: one for the
//! process, which one device uses at a time, and whose idle threads spin. It is off unless the user
//! sets `CANDLE_NUM_THREADS`, or loads this code as a library into a process with several threads.

#![allow(unsafe_code)]

use std::cell::OnceCell;
use std::sync::atomic::{AtomicUsize, Ordering};

use mpmd_base::block::host_cores;
use mpmd_core::Program;
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Environment variable with the number of threads per device. candle and rayon read it too.
const VARIABLE: &str = "RAYON_NUM_THREADS";

/// The number of devices that share this host's cores, or zero if it is unknown.
static DEVICES: AtomicUsize = AtomicUsize::new(0);

/// Environment variable with the number of threads of candle's own pool.
const CANDLE_VARIABLE: &str = "CANDLE_NUM_THREADS";

/// Runs [`turn_off_candles_pool`] before `main`, or when this code is loaded as a library.
#[cfg(target_os = "linux")]
#[used]
// SAFETY: the section has pointers to functions that the C library calls before `main`, or while it
// loads a library, with arguments that a function without parameters ignores.
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = turn_off_candles_pool;

/// Turns candle's pool off by its environment variable, unless the user has set that. candle has no
/// function for this. Does nothing if the process has other threads.
#[cfg(target_os = "linux")]
extern "C" fn turn_off_candles_pool() {
    if std::env::var_os(CANDLE_VARIABLE).is_none() && is_alone() {
        // SAFETY: no other thread reads the environment, since there is none.
        unsafe { std::env::set_var(CANDLE_VARIABLE, "1") };
    }
}

/// Returns true if this process has one thread. Returns false if the number is unknown.
#[cfg(target_os = "linux")]
fn is_alone() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1)
}

thread_local! {
    static POOL: OnceCell<Option<ThreadPool>> = const { OnceCell::new() };
}

/// Stores the number of devices on this process's host.
pub(crate) fn share_cores(program: &Program) {
    let topology = program.topology();
    let host = topology.host_of(program.process());
    let devices = topology.devices().iter();
    let here = devices
        .filter(|device| topology.host_of(device.process) == host)
        .count();

    DEVICES.store(here, Ordering::Relaxed);
}

/// Makes the calling device thread the first thread of a rayon pool. Later calls do nothing.
pub(crate) fn enter_pool() {
    POOL.with(|pool| {
        // Without a pool of its own, the thread uses rayon's.
        pool.get_or_init(|| {
            ThreadPoolBuilder::new()
                .num_threads(count())
                .use_current_thread()
                .build()
                .ok()
        });
    });
}

/// Returns the number of threads per device: the user's setting, else the device's share of the
/// cores.
fn count() -> usize {
    let set = std::env::var(VARIABLE)
        .ok()
        .and_then(|text| text.parse().ok());
    set.filter(|count| *count > 0)
        .unwrap_or_else(|| (host_cores() / DEVICES.load(Ordering::Relaxed).max(1)).max(1))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn candles_pool_has_no_threads() {
        assert_eq!(candle_core::utils::barrier_pool().n_workers(), 0);
    }

    /// Calls the constructor as a loaded library does, in a process with two threads.
    #[test]
    fn other_threads_keep_the_environment() {
        const CHILD: &str = "MPMD_TEST_THREADS_CHILD";
        if std::env::var_os(CHILD).is_none() {
            let path = "threads::tests::other_threads_keep_the_environment";
            let mut child = Command::new(std::env::current_exe().unwrap());
            child.args(["--exact", path, "--nocapture"]).env(CHILD, "");
            let output = child.output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(
                output.status.success() && text.contains("1 passed"),
                "{text}"
            );
            return;
        }
        assert!(!is_alone());
        // SAFETY: the other thread waits for the end of this test.
        unsafe { std::env::remove_var(CANDLE_VARIABLE) };
        turn_off_candles_pool();
        assert_eq!(std::env::var_os(CANDLE_VARIABLE), None);
    }
}
