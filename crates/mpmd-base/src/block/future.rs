//! Waiting for futures.

use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use super::{Condvar, Mutex};

/// Blocks until a future is ready, and returns its result. In a simulated world, unlike the
/// `block_on` of other crates, it lets other threads run meanwhile.
pub fn block_on<F: Future>(future: F) -> F::Output {
    let bell = Arc::new(FutureBell::default());
    let waker = Waker::from(bell.clone());
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(result) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return result;
        }

        let mut rang = bell.rang.lock();
        while !std::mem::take(&mut *rang) {
            bell.changed.wait(&mut rang);
        }
    }
}

/// A waker for the thread that waits for a future.
#[derive(Default)]
struct FutureBell {
    rang: Mutex<bool>,
    changed: Condvar,
}

impl Wake for FutureBell {
    fn wake(self: Arc<Self>) {
        *self.rang.lock() = true;
        self.changed.notify_one();
    }
}
