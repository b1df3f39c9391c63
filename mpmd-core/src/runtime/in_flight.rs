//! The operations that this process has issued and not ended: how far its program runs ahead.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Counts operations that have a part here and have not ended.
#[derive(Default)]
pub(crate) struct InFlight {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    counts: Counts,
    /// The numbers of those operations.
    open: BTreeSet<u64>,
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
    op: u64,
    bytes: u64,
    in_flight: Arc<InFlight>,
}

impl InFlight {
    /// Operation `op` begins; it will fill `bytes` of new memory.
    pub(crate) fn begin(self: &Arc<Self>, op: u64, bytes: u64) -> OpGuard {
        let mut state = self.state.lock();
        state.counts.ops += 1;
        state.counts.bytes += bytes;
        state.open.insert(op);
        OpGuard(Arc::new(Ending { op, bytes, in_flight: self.clone() }))
    }

    pub(crate) fn counts(&self) -> Counts {
        self.state.lock().counts
    }

    /// The first operation that has not ended.
    pub(crate) fn first_open(&self) -> Option<u64> {
        self.state.lock().open.first().copied()
    }

    /// The counts, and whether any operation issued before `op` has not ended.
    pub(crate) fn counts_before(&self, op: u64) -> (Counts, bool) {
        let state = self.state.lock();
        (state.counts, state.open.first().is_some_and(|first| *first < op))
    }

    /// Waits until `enough` of them have ended; false where `deadline` came first.
    pub(crate) fn wait_until(&self, deadline: Instant, enough: impl Fn(&Counts) -> bool) -> bool {
        let mut state = self.state.lock();
        while !enough(&state.counts) {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return enough(&state.counts);
            }
        }
        true
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        let mut state = self.in_flight.state.lock();
        state.counts.ops -= 1;
        state.counts.bytes -= self.bytes;
        state.counts.ended += 1;
        state.open.remove(&self.op);
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
        let guard = in_flight.begin(7, 10);
        let other = guard.clone();
        drop(guard);
        assert!(in_flight.counts_before(8).1 && !in_flight.counts_before(7).1);
        let soon = || Instant::now() + Duration::from_millis(5);
        assert!(!in_flight.wait_until(soon(), |counts| counts.ops == 0));
        assert_eq!(in_flight.counts().bytes, 10);
        let thread = std::thread::spawn(move || drop(other));
        let deadline = Instant::now() + Duration::from_secs(10);
        assert!(in_flight.wait_until(deadline, |counts| counts.ops == 0));
        thread.join().unwrap();
        let (counts, before) = in_flight.counts_before(8);
        assert_eq!((counts.ended, before), (1, false));
    }
}
