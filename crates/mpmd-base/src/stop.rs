//! Tells a user's second request to stop from a second signal of the same request.

use std::time::{Duration, Instant};

/// Time after a request's first signal in which more signals count as the same request. A request
/// may cause several signals: `timeout` and systemd signal a launcher and its processes, and the
/// launcher passes its signal on.
const SAME_REQUEST: Duration = Duration::from_secs(2);

/// Groups the stop signals that this process receives into a user's requests to stop.
#[derive(Clone, Copy, Debug, Default)]
pub struct StopRequests {
    /// The time of the first signal of the latest request.
    began: Option<Instant>,
}

/// The meaning of a signal that asks to stop.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum StopRequest {
    /// The first request: the process should end in order.
    First,
    /// Another signal of the latest request: there is nothing to do.
    Same,
    /// A second or later request: the process should end at once.
    Again,
}

impl StopRequests {
    /// Returns the meaning of a signal received at `now`. A signal within two seconds of a
    /// request's first signal belongs to that request.
    pub fn take(&mut self, now: Instant) -> StopRequest {
        let request = match self.began {
            None => StopRequest::First,
            Some(began) if now.saturating_duration_since(began) < SAME_REQUEST => {
                return StopRequest::Same;
            }
            Some(_) => StopRequest::Again,
        };
        self.began = Some(now);
        request
    }
}

#[cfg(test)]
mod tests {
    use StopRequest::{Again, First, Same};

    use super::*;

    /// Returns the meanings of signals at these times in milliseconds.
    fn taken<const N: usize>(times: [u64; N]) -> [StopRequest; N] {
        let start = Instant::now();
        let mut requests = StopRequests::default();
        times.map(|time| requests.take(start + Duration::from_millis(time)))
    }

    #[test]
    fn signals_within_two_seconds_are_one_request() {
        assert_eq!(taken([0, 0, 1, 1_999]), [First, Same, Same, Same]);
        assert_eq!(taken([0, 2_000, 2_001, 4_001]), [First, Again, Same, Again]);
        // A user who does not stop asking is heard.
        assert_eq!(taken([0, 1_500, 3_000, 4_500]), [First, Same, Again, Same]);
        // Two threads may take the time in either order.
        assert_eq!(taken([5, 4]), [First, Same]);
    }
}
