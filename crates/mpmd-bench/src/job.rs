//! Benchmarks as jobs of several processes.

use anyhow::{Result, ensure};
use mpmd_core::prelude::Program;
use mpmd_launch::{Launch, OutputMode};
use rustix::time::{ClockId, clock_gettime};

/// Returns the nanoseconds of a clock that all processes of a host share.
pub(crate) fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Starts this program again with the same arguments, as a job of `processes` processes over
/// `transport`. Blocks until the job ends. Returns the job's exit code, or 1 if that is not from 0
/// to 255.
pub(crate) fn run_as_job(processes: usize, transport: &str) -> Result<u8> {
    let outcome = Launch::new(processes, std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .transport(Some(transport.to_owned()))
        .output(OutputMode::Quiet0)
        .run()?;
    Ok(u8::try_from(outcome.code()).unwrap_or(1))
}

/// Checks that a job which another launcher has started uses the transport `said`.
///
/// # Errors
///
/// If the job uses another transport: the figures would carry the wrong name.
pub(crate) fn check_transport(p: &Program, said: &str) -> Result<()> {
    let transport = p.transport();
    ensure!(
        transport == said,
        "the job's arrays go over {transport}, and --transport says {said}"
    );
    Ok(())
}
