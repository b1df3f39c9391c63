//! The log of the command line and of programs that want one: `tracing` events on standard error.

use std::io::{IsTerminal, stderr};

use tracing_subscriber::EnvFilter;

/// The filter without `RUST_LOG`: warnings, except those that the runtime prints itself.
const WARNINGS: &str = "warn,mpmd::warning=off,mpmd::hang=off";

/// Writes `tracing` events to standard error, filtered by the variable `RUST_LOG`. Without it,
/// writes warnings and errors. Does nothing if the process has a subscriber already.
pub fn log_to_stderr() {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(WARNINGS));
    let log = tracing_subscriber::fmt().with_env_filter(filter).with_writer(stderr);
    // Fails if the caller has installed a subscriber.
    let _ = log.with_ansi(stderr().is_terminal()).try_init();
}
