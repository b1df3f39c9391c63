//! Strangers: connections before the other end has proved that it knows the token.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::task::AbortHandle;

/// The number of a connection, given by its listener.
pub type Link = u64;

/// The tasks of connections whose other end has not proved yet that it knows the token (strangers).
/// Above the limit `most`, the oldest task is aborted.
pub struct Strangers {
    most: usize,
    waiting: Mutex<VecDeque<WaitingStranger>>,
}

/// A connection whose other end has not proved yet that it knows the token.
struct WaitingStranger {
    link: Link,
    task: AbortHandle,
}

impl Strangers {
    /// Creates an empty list for at most `most` strangers.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            waiting: Mutex::new(VecDeque::new()),
        }
    }

    /// Adds the connection of a stranger, which `task` serves. Aborts the oldest task if there are
    /// too many. Must be called before `task` runs for the first time.
    pub fn add(&self, link: Link, task: AbortHandle) {
        let mut waiting = self.waiting.lock();
        waiting.push_back(WaitingStranger { link, task });
        if waiting.len() > self.most
            && let Some(oldest) = waiting.pop_front()
        {
            oldest.task.abort();
        }
    }

    /// Removes a connection whose other end has proved itself or that is closed. Returns false if
    /// its task was aborted before as the oldest.
    pub fn remove(&self, link: Link) -> bool {
        let mut waiting = self.waiting.lock();
        let at = waiting.iter().position(|stranger| stranger.link == link);
        at.and_then(|at| waiting.remove(at)).is_some()
    }

    /// Aborts the tasks of all strangers.
    pub fn clear(&self) {
        for stranger in self.waiting.lock().drain(..) {
            stranger.task.abort();
        }
    }
}
