//! Deadlines of waits that users may want to be endless.

use std::time::{Duration, Instant};

/// Returns `now` plus `wait`, or plus a year where the wait is longer.
///
/// No panic: the sum of an instant and a wait such as [`Duration::MAX`] does not exist.
pub fn after(now: Instant, wait: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
    now + wait.min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_endless_wait_ends_in_a_year() {
        let now = Instant::now();
        assert_eq!(after(now, Duration::from_secs(7)), now + Duration::from_secs(7));
        for wait in [Duration::MAX, Duration::from_secs_f64(1e19)] {
            assert!(after(now, wait) > now + Duration::from_secs(364 * 24 * 3600));
        }
    }
}
