//! Something that happens once, and who is to hear of it.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

/// Called once, and soon over.
type Then = Box<dyn FnOnce() + Send>;

/// What [fences](super::Fence) are made of: passed once, which costs a look at one word to see;
/// whoever wants to hear of it is called, by who passes it or, where that has been, by who asks.
#[derive(Default)]
pub struct Latch {
    is_passed: AtomicBool,
    waiting: Mutex<Vec<Then>>,
}

impl Latch {
    /// Whether it was passed. What was written before that is seen.
    pub fn is_passed(&self) -> bool {
        self.is_passed.load(Ordering::Acquire)
    }

    /// Calls `then` once it is passed: now, or on the thread that calls those whom [`Latch::pass`]
    /// returns.
    pub fn on_pass(&self, then: Box<dyn FnOnce() + Send>) {
        let mut waiting = self.waiting.lock();
        if self.is_passed() {
            drop(waiting);
            return then();
        }
        waiting.push(then);
    }

    /// Passes it. Returns who waits, to be called by the caller, in order, without any lock of its
    /// own; nobody the second time.
    #[must_use = "who waits is to be called"]
    pub fn pass(&self) -> Vec<Box<dyn FnOnce() + Send>> {
        let mut waiting = self.waiting.lock();
        self.is_passed.store(true, Ordering::Release);
        std::mem::take(&mut *waiting)
    }
}

impl fmt::Debug for Latch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Latch({})", if self.is_passed() { "passed" } else { "not passed" })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn each_is_called_once_in_order_before_or_after() {
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
        assert!(latch.is_passed() && called.lock().is_empty(), "it is for the caller to tell them");
        latch.on_pass(call(3));
        waiting.into_iter().for_each(|then| then());
        assert_eq!(*called.lock(), [3, 1, 2]);
        assert!(latch.pass().is_empty());
    }

    #[test]
    fn nobody_is_forgotten_who_asks_while_it_is_passed() {
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
