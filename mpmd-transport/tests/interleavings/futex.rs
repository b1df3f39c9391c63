//! A model of a futex, made of a lock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use loom::sync::{Condvar, Mutex};

use crate::doorbell::Futex;
use crate::sync::{AtomicU32, Ordering};

/// A simulated futex with the guarantees of the system's and no more. Panics if a timeout is given.
pub(crate) struct ModelFutex {
    /// One condition variable for each word that threads sleep on, by the word's address.
    sleepers: Mutex<BTreeMap<usize, Arc<Condvar>>>,
}

impl ModelFutex {
    pub(crate) fn new() -> Self {
        Self {
            sleepers: Mutex::new(BTreeMap::new()),
        }
    }
}

impl Futex for ModelFutex {
    fn wait(&self, word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
        assert_eq!(timeout, None, "a time-out hides a wake-up that is lost");
        let mut sleepers = self.sleepers.lock().unwrap();
        if word.load(Ordering::Relaxed) == expected {
            let place = std::ptr::from_ref(word).addr();
            let here = sleepers
                .entry(place)
                .or_insert_with(|| Arc::new(Condvar::new()))
                .clone();
            drop(here.wait(sleepers).unwrap());
        }
    }

    fn wake(&self, word: &AtomicU32, all: bool) {
        let sleepers = self.sleepers.lock().unwrap();
        match sleepers.get(&std::ptr::from_ref(word).addr()) {
            Some(here) if all => here.notify_all(),
            Some(here) => here.notify_one(),
            None => {}
        }
    }
}
