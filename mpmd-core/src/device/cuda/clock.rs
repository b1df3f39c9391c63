//! When a device's work began and ended, on the clock of the host.

use std::sync::Arc;

use cudarc::driver::sys;
use parking_lot::Mutex;

use super::Times;
use super::error::CudaError;
use super::line::{Event, Line, create_event};

/// How often a pair of times is tried for one with little doubt, and what little is, in
/// nanoseconds.
const TRIES: usize = 5;
const LITTLE_DOUBT: u64 = 20_000;

/// Puts a line's events on the host's clock.
///
/// A device tells how long it was from one event to another, not when. So one event is known by
/// both clocks: it was waited for on an idle device. From there each end is known by the one
/// before, which keeps the spans short that the device rounds; and as clocks drift, no work is said
/// to begin before it was issued or to end after that was seen.
pub(super) struct Clock {
    now: Box<dyn Fn() -> u64 + Send + Sync>,
    /// The last end that is known, and its time.
    known: Mutex<(Arc<Event>, f64)>,
}

impl Clock {
    /// A clock for a line on which nothing was issued yet.
    pub(super) fn new(
        line: &Line,
        now: Box<dyn Fn() -> u64 + Send + Sync>,
    ) -> Result<Self, CudaError> {
        line.stream.context.bind()?;
        let event = create_event(sys::CUevent_flags_enum::CU_EVENT_BLOCKING_SYNC as u32)?;
        let (mut before, mut after) = (0, 0);
        for _ in 0..TRIES {
            before = now();
            event.record(&line.stream)?;
            event.wait()?;
            after = now();
            if after - before < LITTLE_DOUBT {
                break;
            }
        }
        let event = Event::new(line, Some(event), (None, 0), 0);
        Ok(Self { now, known: Mutex::new((Arc::new(event), (before + after) as f64 / 2.0)) })
    }

    /// Nanoseconds from some beginning.
    pub(super) fn now(&self) -> u64 {
        (self.now)()
    }

    /// When the work before `event`, which has just been passed, began and ended. For the line's
    /// thread, in order.
    pub(super) fn times(&self, event: &Arc<Event>) -> Option<Times> {
        let mut known = self.known.lock();
        let before = known.1;
        let [begin, end] = known.0.until(event)?.map(|nanos| before + nanos);
        // Whole nanoseconds: an end and the next beginning are never the same, whatever the
        // device's clock counts by.
        let earliest = (event.issued_at as f64).max(before.floor() + 1.0);
        let (begin, end) = on_host((begin, end), earliest, self.now() as f64);
        *known = (event.clone(), end);
        Some(Times { before: before as u64, begin: begin as u64, end: end as u64 })
    }
}

/// The same span where it is possible on the host's clock: after `earliest`, when it was issued and
/// what is before it had ended, and before its end was seen. Where both leave no room, after
/// `earliest`.
fn on_host((begin, end): (f64, f64), earliest: f64, seen: f64) -> (f64, f64) {
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
    fn no_work_begins_before_it_was_issued_nor_ends_after_that_was_seen() {
        assert_eq!(on_host((5.0, 7.0), 4.0, 8.0), (5.0, 7.0));
        assert_eq!(on_host((3.0, 5.0), 4.0, 8.0), (4.0, 6.0), "late clocks are put right");
        assert_eq!(on_host((7.0, 9.0), 4.0, 8.0), (6.0, 8.0), "and early ones");
        assert_eq!(on_host((1.0, 9.0), 4.0, 8.0), (4.0, 8.0), "more than there was room for");
        assert_eq!(on_host((1.0, 2.0), 4.0, 3.0), (4.0, 4.0), "no room at all");
    }
}
