//! A one-time event with callbacks.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use mpmd_base::block::Mutex;

/// A callback that is called once and must return quickly.
type Then = Box<dyn FnOnce() + Send>;

/// An event that happens once, for implementations of [`Fence`](super::Fence). Checking it reads
/// one atomic. Callbacks run on the thread that passes the latch. If it is already passed, they run
/// on the thread that registers them.
#[derive(Default)]
pub struct Latch {
    is_passed: AtomicBool,
    waiting: Mutex<Vec<Then>>,
}

impl Latch {
    /// Returns true if the latch has been passed. Writes made before [`pass`](Self::pass) are then
    /// visible.
    pub fn is_passed(&self) -> bool {
        self.is_passed.load(Ordering::Acquire)
    }

    /// Calls `then` once the latch is passed: at once, or on the thread that runs the callbacks
    /// returned by [`Latch::pass`].
    pub fn on_pass(&self, then: Box<dyn FnOnce() + Send>) {
        let mut waiting = self.waiting.lock();
        if self.is_passed() {
            drop(waiting);
            return then();
        }
        waiting.push(then);
    }

    /// Passes the latch and returns its callbacks. The caller must call them in order, without
    /// holding a lock. A second call returns no callbacks.
    #[must_use = "the callbacks must be called"]
    pub fn pass(&self) -> Vec<Box<dyn FnOnce() + Send>> {
        let mut waiting = self.waiting.lock();
        self.is_passed.store(true, Ordering::Release);
        std::mem::take(&mut *waiting)
    }
}

impl fmt::Debug for Latch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Latch({})",
            if self.is_passed() {
                "passed"
            } else {
                "not passed"
            }
        )
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn callbacks_run_once_before_or_after_pass() {
        let latch = Latch::default();
        let called = Arc::new(Mutex::new(Vec::new()));
        let call = |number: u32| -> Then {
            let called = called.clone();
            Box::new(move || called.lock().push(number))
        };
        latch.on_pass(call(1));
        latch.on_pass(call(2));
        assert!(!latch.is_passed() && called.lock().is_empty());
        let waiting = latch.pass();
        assert!(
            latch.is_passed() && called.lock().is_empty(),
            "the caller runs the callbacks"
        );
        latch.on_pass(call(3));
        waiting.into_iter().for_each(|then| then());
        assert_eq!(*called.lock(), [3, 1, 2]);
        assert!(latch.pass().is_empty());
    }

    #[test]
    fn callback_added_during_pass_is_called() {
        for _ in 0..200 {
            let (latch, called) = (Arc::new(Latch::default()), Arc::new(Mutex::new(0)));
            let (there, count) = (latch.clone(), called.clone());
            let asks = std::thread::spawn(move || {
                for _ in 0..8 {
                    let count = count.clone();
                    there.on_pass(Box::new(move || *count.lock() += 1));
                }
            });
            latch.pass().into_iter().for_each(|then| then());
            asks.join().unwrap();
            assert_eq!(*called.lock(), 8);
        }
    }
}
