//! The operations that this process has issued and not ended: how far its program runs ahead.

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Counts operations that have a part here and have not ended.
#[derive(Default)]
pub(crate) struct InFlight {
    counts: Mutex<Counts>,
    changed: Condvar,
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) ops: usize,
    pub(crate) bytes: u64,
    /// Grows with every operation that ends.
    pub(crate) ended: u64,
}

/// Held by every part of an operation; the operation has ended when the last part drops it.
///
/// Drop it after the buffers it stands for: whoever waits for memory looks when operations end.
#[derive(Clone)]
pub(crate) struct OpGuard(#[expect(dead_code, reason = "held for its drop")] Arc<Ending>);

struct Ending {
    bytes: u64,
    in_flight: Arc<InFlight>,
}

impl InFlight {
    /// An operation begins that will fill `bytes` of new memory.
    pub(crate) fn begin(self: &Arc<Self>, bytes: u64) -> OpGuard {
        let mut counts = self.counts.lock();
        counts.ops += 1;
        counts.bytes += bytes;
        OpGuard(Arc::new(Ending { bytes, in_flight: self.clone() }))
    }

    pub(crate) fn counts(&self) -> Counts {
        *self.counts.lock()
    }

    /// Waits until `enough` of them have ended; false where `deadline` came first.
    pub(crate) fn wait_until(&self, deadline: Instant, enough: impl Fn(&Counts) -> bool) -> bool {
        let mut counts = self.counts.lock();
        while !enough(&counts) {
            if self.changed.wait_until(&mut counts, deadline).timed_out() {
                return enough(&counts);
            }
        }
        true
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let mut counts = self.in_flight.counts.lock();
        counts.ops -= 1;
        counts.bytes -= self.bytes;
        counts.ended += 1;
        self.in_flight.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_operation_ends_with_its_last_part() {
        let in_flight = Arc::new(InFlight::default());
        let guard = in_flight.begin(10);
        let other = guard.clone();
        drop(guard);
        let soon = || Instant::now() + Duration::from_millis(5);
        assert!(!in_flight.wait_until(soon(), |counts| counts.ops == 0));
        assert_eq!(in_flight.counts().bytes, 10);
        let thread = std::thread::spawn(move || drop(other));
        let deadline = Instant::now() + Duration::from_secs(10);
        assert!(in_flight.wait_until(deadline, |counts| counts.ops == 0));
        thread.join().unwrap();
        assert_eq!(in_flight.counts().ended, 1);
    }
}
