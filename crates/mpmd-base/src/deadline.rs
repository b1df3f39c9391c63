//! Deadlines for waits that may be endless.

use std::time::Duration;

use crate::block::Instant;

/// Returns `now` plus `wait`, or `now` plus a year if `wait` is longer than that.
///
/// Never panics, unlike a plain sum of an instant and [`Duration::MAX`].
pub fn after(now: Instant, wait: Duration) -> Instant {
    const LONGEST: Duration = Duration::from_secs(365 * 24 * 3600);
    now + wait.min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endless_wait_is_capped_at_a_year() {
        let now = Instant::now();
        assert_eq!(
            after(now, Duration::from_secs(7)),
            now + Duration::from_secs(7)
        );
        for wait in [Duration::MAX, Duration::from_secs_f64(1e19)] {
            assert!(after(now, wait) > now + Duration::from_secs(364 * 24 * 3600));
        }
    }
}
