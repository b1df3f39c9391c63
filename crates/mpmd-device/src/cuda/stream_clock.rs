//! Begin and end times of device work, converted to the host's clock.

use std::sync::Arc;

use cudarc::driver::sys;
use mpmd_base::block::Mutex;

use super::WorkTimes;
use super::error::CudaError;
use super::stream::{Stream, StreamEvent, WorkBegin, create_event};

/// The most attempts to measure the initial offset. An attempt with an error below the second
/// constant, in nanoseconds, ends them.
const TRIES: usize = 5;
const LITTLE_DOUBT: u64 = 20_000;

/// Converts a stream's event times to the host's clock.
///
/// A device reports only the time between two events. So the clock starts with an event that is
/// recorded while the device is idle, and measures its host time. Each later end is computed from
/// the preceding one, which keeps the measured spans short. Because the two clocks drift, results
/// are clamped: no work begins before it was issued or ends after its end was observed.
pub(super) struct StreamClock {
    now: Box<dyn Fn() -> u64 + Send + Sync>,
    known: Mutex<KnownTime>,
}

/// The last event with a known time, and its time in nanoseconds of the host's clock.
struct KnownTime {
    event: Arc<StreamEvent>,
    nanos: f64,
}

impl StreamClock {
    /// Creates a clock for a stream to which nothing was issued yet. `now` returns the host's time
    /// in nanoseconds. Waits for the device.
    pub(super) fn new(
        line: &Stream,
        now: Box<dyn Fn() -> u64 + Send + Sync>,
    ) -> Result<Self, CudaError> {
        line.stream.context.bind()?;
        let event = create_event(sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32)?;

        let mut before = 0;
        let mut after = 0;
        for _ in 0..TRIES {
            before = now();
            event.record(&line.stream)?;
            event.wait()?;
            after = now();
            if after - before < LITTLE_DOUBT {
                break;
            }
        }

        let event = StreamEvent::new(line, Some(event), WorkBegin::default(), 0);
        Ok(Self {
            now,
            known: Mutex::new(KnownTime {
                event: Arc::new(event),
                nanos: (before + after) as f64 / 2.0,
            }),
        })
    }

    /// Returns the host's time in nanoseconds since an arbitrary origin.
    pub(super) fn now(&self) -> u64 {
        (self.now)()
    }

    /// Returns the begin and end times of the work that ended at `event`, which the device has just
    /// passed. Returns `None` if the event records no times. The waiter thread must call this once
    /// per event, in order.
    pub(super) fn times(&self, event: &Arc<StreamEvent>) -> Option<WorkTimes> {
        let mut known = self.known.lock();
        let before = known.nanos;
        let [begin, end] = known.event.until(event)?.map(|nanos| before + nanos);
        // In whole nanoseconds, so that an end never equals the next begin, however coarse the
        // device's clock is.
        let earliest = (event.issued_at as f64).max(before.floor() + 1.0);
        let (begin, end) = on_host(begin, end, earliest, self.now() as f64);

        *known = KnownTime {
            event: event.clone(),
            nanos: end,
        };
        Some(WorkTimes {
            before: before as u64,
            begin: begin as u64,
            end: end as u64,
        })
    }
}

/// Shifts the span from `begin` to `end` into the interval from `earliest` to `seen`, and shortens
/// it if it is longer. All times are in nanoseconds of the host's clock. If `seen` is before
/// `earliest`, the result is at `earliest`.
fn on_host(begin: f64, end: f64, earliest: f64, seen: f64) -> (f64, f64) {
    let shift = if begin < earliest {
        earliest - begin
    } else if end > seen {
        (seen - end).max(earliest - begin)
    } else {
        0.0
    };
    let end = (end + shift).min(seen).max(earliest);
    ((begin + shift).min(end), end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_clamped_between_issue_and_observed_end() {
        assert_eq!(on_host(5.0, 7.0, 4.0, 8.0), (5.0, 7.0));
        assert_eq!(
            on_host(3.0, 5.0, 4.0, 8.0),
            (4.0, 6.0),
            "late clocks are put right"
        );
        assert_eq!(on_host(7.0, 9.0, 4.0, 8.0), (6.0, 8.0), "and early ones");
        assert_eq!(
            on_host(1.0, 9.0, 4.0, 8.0),
            (4.0, 8.0),
            "a span longer than the interval"
        );
        assert_eq!(on_host(1.0, 2.0, 4.0, 3.0), (4.0, 4.0), "an empty interval");
    }
}
