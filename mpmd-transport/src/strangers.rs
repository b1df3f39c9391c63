//! Connections whose other end has not shown a token yet.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::task::AbortHandle;

/// Number of a connection at its listener.
pub(crate) type Link = u64;

/// Tasks that serve strangers: too many of them push out the oldest.
pub(crate) struct Strangers {
    most: usize,
    waiting: Mutex<VecDeque<(Link, AbortHandle)>>,
}

impl Strangers {
    pub(crate) fn new(most: usize) -> Self {
        Self { most, waiting: Mutex::new(VecDeque::new()) }
    }

    /// Counts a stranger. Must come before `task` runs for the first time.
    pub(crate) fn add(&self, link: Link, task: AbortHandle) {
        let mut waiting = self.waiting.lock();
        waiting.push_back((link, task));
        if waiting.len() > self.most
            && let Some((_, oldest)) = waiting.pop_front()
        {
            oldest.abort();
        }
    }

    /// Ends the count of a connection, which has shown the token or is closed. Returns false where
    /// it was pushed out.
    pub(crate) fn remove(&self, link: Link) -> bool {
        let mut waiting = self.waiting.lock();
        let at = waiting.iter().position(|(other, _)| *other == link);
        at.and_then(|at| waiting.remove(at)).is_some()
    }

    /// Ends the tasks of all strangers.
    pub(crate) fn clear(&self) {
        for (_, task) in self.waiting.lock().drain(..) {
            task.abort();
        }
    }
}
