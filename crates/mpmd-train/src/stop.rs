//! Ends a training on Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 after its current step.

use std::io::{Write as _, stderr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use mpmd_base::{StopRequest, StopRequests};
pub use mpmd_core::launch::stop_name;
use mpmd_core::launch::{JobEnv, stop_signals};
use mpmd_core::{ProcessId, Program, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::register_usize;
use signal_hook::iterator::Signals;

/// A flag with the last signal that asked this process to stop. Clones share the flag.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicUsize>);

impl StopFlag {
    /// Returns the flag of this process's signals. The first call installs handlers for the whole
    /// process: from then on Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 sets the flag. A second
    /// Ctrl-C or SIGTERM, at least two seconds after the first, ends the process at once.
    /// Schedulers send SIGUSR1 or SIGUSR2 before the end of a job's time. SIGHUP stays ignored
    /// under `nohup`.
    ///
    /// All calls return the same flag. So a signal in an epoch of a job that
    /// [recovers](mpmd_core::RecoveringBuilder) stops the training in the next one too.
    ///
    /// # Errors
    ///
    /// If the system rejects the handlers.
    pub fn install() -> std::io::Result<Self> {
        // Signals come to the process, so their flag is the process's.
        static INSTALLED: Mutex<Option<StopFlag>> = Mutex::new(None);
        let mut installed = INSTALLED.lock().unwrap_or_else(PoisonError::into_inner);
        if installed.is_none() {
            let flag = Self::default();
            flag.watch()?;
            *installed = Some(flag);
        }
        Ok(installed.clone().unwrap_or_default())
    }

    /// Installs signal handlers that set this flag. Starts a thread that ends the process on a
    /// second Ctrl-C or SIGTERM.
    fn watch(&self) -> std::io::Result<()> {
        // Not the others: a closed terminal sends SIGHUP twice, and the save takes time.
        let ending = Signals::new([SIGINT, SIGTERM])?;
        std::thread::Builder::new()
            .name("mpmd-stop".to_owned())
            .spawn(move || end_on_second_request(ending))?;
        // A shell without job control starts its background jobs with an ignored SIGINT.
        for signal in stop_signals() {
            register_usize(signal, self.0.clone(), signal.unsigned_abs() as usize)?;
        }
        Ok(())
    }

    /// Sets the flag as if this process had received `signal`.
    pub fn set(&self, signal: i32) {
        self.0
            .store(signal.unsigned_abs() as usize, Ordering::Relaxed);
    }

    /// Returns true if this process has received a signal. Other processes may not have received
    /// it, so a program must decide by [`StopFlag::agree`].
    pub fn is_set(&self) -> bool {
        self.signal().is_some()
    }

    /// Returns the signal that this process has received, or `None`.
    pub fn signal(&self) -> Option<i32> {
        let signal = i32::try_from(self.0.load(Ordering::Relaxed)).unwrap_or(SIGTERM);
        (signal != 0).then_some(signal)
    }

    /// Returns the signal that process 0 has received, or `None`. The result is the same on every
    /// process. Every process must call it; it blocks until the value has arrived.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`Program::broadcast_value`].
    pub fn agree(&self, p: &mut Program) -> Result<Option<i32>> {
        p.broadcast_value(ProcessId(0), None, || Ok(self.signal()))
    }
}

/// Makes this process ignore the [signals that ask it to end](stop_signals) from now on. Process 0
/// of the job handles them and informs the other processes. A launcher passes such a signal on to
/// all processes, and later kills processes that have not ended.
///
/// # Errors
///
/// If the system rejects the handlers.
pub fn leave_signals_to_process_0() -> std::io::Result<()> {
    for signal in stop_signals() {
        register_usize(signal, Arc::default(), 0)?;
    }
    Ok(())
}

/// Waits for Ctrl-C and SIGTERM. Ends the process at once on the second request to stop. Process 0
/// of the job says so at each request.
fn end_on_second_request(mut signals: Signals) {
    let mut requests = StopRequests::default();
    for signal in signals.forever() {
        let name = stop_name(signal);
        match requests.take(Instant::now()) {
            StopRequest::Same => {}
            StopRequest::First => tell(&format!(
                "{name}: ends after this step; once more ends at once"
            )),
            StopRequest::Again => {
                tell(&format!("{name} once more: ends at once"));
                signal_hook::low_level::exit(i32::from(exit_code(signal)));
            }
        }
    }
}

/// Prints a line to standard error, if this process was started as process 0 of its job.
fn tell(line: &str) {
    let job = JobEnv::from_env().ok().flatten();
    if job.is_none_or(|job| job.process == ProcessId(0)) {
        // Unlike `eprintln!`, does not panic if standard error is closed.
        let _ = stderr().write_all(format!("{line}\n").as_bytes());
    }
}

/// Returns the exit code that shells report for a program ended by `signal`: 128 plus the signal's
/// number.
pub fn exit_code(signal: i32) -> u8 {
    u8::try_from(signal).map_or(u8::MAX, |signal| signal.saturating_add(128))
}

#[cfg(test)]
mod tests {
    use signal_hook::consts::{SIGHUP, SIGUSR1, SIGUSR2};
    use signal_hook::low_level::raise;

    use super::*;

    #[test]
    fn repeated_hang_ups_and_one_request_do_not_exit() {
        let flag = StopFlag::install().unwrap();
        let mut program = Program::builder().alone().unwrap();
        assert!(!flag.is_set() && flag.agree(&mut program).unwrap().is_none());
        // The handler has run when `raise` returns.
        for signal in [
            SIGHUP, SIGHUP, SIGUSR1, SIGUSR1, SIGUSR2, SIGTERM, SIGTERM, SIGHUP, SIGUSR1,
        ] {
            raise(signal).unwrap();
            assert_eq!(flag.signal(), Some(signal));
        }
        flag.set(SIGTERM);
        assert_eq!(flag.agree(&mut program).unwrap(), Some(SIGTERM));
        program.finish().unwrap();
        // As in the next epoch of the job.
        assert_eq!(StopFlag::install().unwrap().signal(), Some(SIGTERM));
    }

    #[test]
    fn exit_codes_match_those_of_a_shell() {
        assert_eq!(
            [SIGHUP, SIGINT, SIGUSR1, SIGTERM].map(exit_code),
            [129, 130, 138, 143]
        );
    }
}
