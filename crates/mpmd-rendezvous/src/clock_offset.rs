//! The clocks of the server and of its clients, and their difference.

use std::time::{SystemTime, UNIX_EPOCH};

/// The difference between a process's clock and the server's.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ClockOffset {
    /// Nanoseconds to add to this process's clock (time since 1970) to get the server's time.
    pub offset: i64,
    /// The largest possible error of `offset` in nanoseconds: half of the round trip.
    pub bound: u64,
}

/// Returns the current time of this process's clock, in nanoseconds since 1970.
pub(super) fn clock() -> i64 {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    i64::try_from(now.as_nanos()).unwrap_or(i64::MAX)
}

/// One round trip to the server and back. Times are in nanoseconds since 1970.
#[derive(Clone, Copy)]
pub(super) struct ClockTrip {
    /// This process's clock when the request was sent.
    pub(super) asked: i64,
    /// The server's clock in its answer.
    pub(super) server: i64,
    /// This process's clock when the answer arrived.
    pub(super) answered: i64,
}

/// Returns the clock offset of the quickest of several round trips, which has the smallest error.
/// If no round trip is usable, the offset is 0 and its bound huge.
pub(super) fn quickest(trips: &[ClockTrip]) -> ClockOffset {
    // A clock that was set back meanwhile makes the trip useless.
    let usable = trips.iter().filter(|trip| trip.answered >= trip.asked);
    let offsets = usable.map(|trip| {
        let duration = trip.answered.saturating_sub(trip.asked);
        let middle = trip.asked.saturating_add(duration / 2);
        (duration, trip.server.saturating_sub(middle))
    });

    let (duration, offset) = offsets.min().unwrap_or((i64::MAX, 0));
    ClockOffset {
        offset,
        bound: (duration / 2 + 1).unsigned_abs(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_offset_comes_from_quickest_trip() {
        // The server's clock is a second ahead. Each direction takes its own time.
        let trip = |asked: i64, there: i64, back: i64| ClockTrip {
            asked,
            server: asked + there + 1_000_000_000,
            answered: asked + there + back,
        };
        let found = quickest(&[
            trip(0, 900, 100),
            trip(5_000, 40, 60),
            trip(9_000, 10, 4_000),
        ]);
        assert_eq!(
            found,
            ClockOffset {
                offset: 999_999_990,
                bound: 51
            }
        );
        // A trip during which the clock was set back is ignored.
        let set_back = ClockTrip {
            asked: 10,
            server: 7,
            answered: 4,
        };
        assert_eq!(
            quickest(&[set_back, trip(5_000, 40, 60)]),
            quickest(&[trip(5_000, 40, 60)])
        );
        assert!(quickest(&[set_back]).bound > 1 << 60);
    }
}
