//! Ctrl-C that ends after the step.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag::{register, register_conditional_shutdown};

/// What a shell says of a program that Ctrl-C has ended.
const ENDED_BY_SIGINT: i32 = 130;

/// Whether the user has asked to stop.
#[derive(Clone, Debug)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// From now on the first Ctrl-C or SIGTERM sets the flag; a second one ends the process at once.
    ///
    /// # Errors
    ///
    /// Where the system refuses the handlers.
    pub fn install() -> std::io::Result<Self> {
        let flag = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            // In this order: the first signal finds the flag unset, and sets it.
            register_conditional_shutdown(signal, ENDED_BY_SIGINT, flag.clone())?;
            register(signal, flag.clone())?;
        }
        Ok(Self(flag))
    }

    /// Whether the flag is set. One process sees this, so a program must
    /// [agree](mpmd_core::Program::agree) on it.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use signal_hook::low_level::raise;

    use super::*;

    #[test]
    fn the_first_signal_sets_the_flag_and_the_process_goes_on() {
        let flag = StopFlag::install().unwrap();
        assert!(!flag.is_set());
        raise(SIGINT).unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        while !flag.is_set() {
            assert!(Instant::now() < deadline, "the flag is not set");
            std::thread::yield_now();
        }
    }
}
