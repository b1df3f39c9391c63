//! Contributions to collectives between the devices of one process.

use std::collections::BTreeMap;

use mpmd_base::block::Mutex;

use crate::exec::waits::async_buffer::{AsyncBuffer, Outcome, Resolver};

/// Key of a contribution: (operation, piece number), like the key of a piece.
pub(crate) type Key = (u64, u64);

/// Contributions to collectives on this process, posted or awaited.
///
/// The first poster or taker creates an entry. The entry is removed once the contribution was
/// posted and all its takers have called, also takers that do not need it.
#[derive(Default)]
pub(crate) struct Mailbox(Mutex<BTreeMap<Key, Letter>>);

struct Letter {
    /// The writing side of `slot`. `None` once the contribution is posted, or a taker fetches it
    /// from another process.
    resolver: Option<Resolver>,
    slot: AsyncBuffer,
    /// Number of devices of this process that have not taken the contribution yet.
    takers: usize,
}

impl Letter {
    fn new(takers: usize) -> Self {
        let (resolver, slot) = AsyncBuffer::new();
        Self {
            resolver: Some(resolver),
            slot,
            takers,
        }
    }

    fn is_done(&self) -> bool {
        self.takers == 0 && self.resolver.is_none()
    }
}

impl Mailbox {
    /// Posts a contribution, or a failure instead. `takers` is the number of devices of this
    /// process that will take it.
    pub(crate) fn post(&self, key: Key, takers: usize, outcome: Outcome) {
        let resolver = self.with(key, takers, |letter| letter.resolver.take());
        if let Some(resolver) = resolver {
            resolver.keep(outcome);
        }
    }

    /// Returns the async buffer of a contribution from a device of this process. Counts the caller
    /// as one of its `takers`.
    pub(crate) fn take(&self, key: Key, takers: usize) -> AsyncBuffer {
        self.with(key, takers, |letter| {
            letter.takers = letter.takers.saturating_sub(1);
            letter.slot.clone()
        })
    }

    /// Returns the async buffer of a contribution from another process. Counts the caller as one of
    /// its `takers`. The first taker also gets the resolver, and must fill the buffer for all
    /// takers.
    pub(crate) fn take_from_afar(
        &self,
        key: Key,
        takers: usize,
    ) -> (AsyncBuffer, Option<Resolver>) {
        self.with(key, takers, |letter| {
            letter.takers = letter.takers.saturating_sub(1);
            (letter.slot.clone(), letter.resolver.take())
        })
    }

    /// Drops all entries of an operation. Contributions that were not posted fail.
    pub(crate) fn forget(&self, op: u64) {
        let left: Vec<Letter> = {
            let mut mail = self.0.lock();
            let keys: Vec<Key> = mail
                .range((op, 0)..=(op, u64::MAX))
                .map(|(key, _)| *key)
                .collect();
            keys.iter().filter_map(|key| mail.remove(key)).collect()
        };
        // Dropped resolvers fail their buffers and run callbacks, so they are dropped outside the
        // lock.
        drop(left);
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.0.lock().len()
    }

    fn with<R>(&self, key: Key, takers: usize, then: impl FnOnce(&mut Letter) -> R) -> R {
        let mut mail = self.0.lock();
        let letter = mail.entry(key).or_insert_with(|| Letter::new(takers));
        let result = then(letter);
        if letter.is_done() {
            mail.remove(&key);
        }
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entry_is_removed_with_its_last_taker() {
        let mailbox = Mailbox::default();
        let bytes = |slot: AsyncBuffer| slot.peek().unwrap().unwrap().to_vec();
        mailbox.post((1, 7), 2, Ok(vec![3].into()));
        assert_eq!(bytes(mailbox.take((1, 7), 2)), [3]);
        assert_eq!(mailbox.len(), 1);
        assert_eq!(bytes(mailbox.take((1, 7), 2)), [3]);
        assert_eq!(mailbox.len(), 0);
        let early = [mailbox.take((1, 8), 2), mailbox.take((1, 8), 2)];
        assert_eq!(mailbox.len(), 1, "the entry waits for its poster");
        mailbox.post((1, 8), 2, Ok(vec![4].into()));
        assert_eq!(mailbox.len(), 0);
        early
            .into_iter()
            .for_each(|slot| assert_eq!(bytes(slot), [4]));
    }

    #[test]
    fn first_taker_of_a_remote_message_fetches_for_all() {
        let mailbox = Mailbox::default();
        let (first, resolver) = mailbox.take_from_afar((1, 7), 3);
        let (second, none) = mailbox.take_from_afar((1, 7), 3);
        assert!(none.is_none());
        resolver.expect("for the first").keep(Ok(vec![5].into()));
        let (third, none) = mailbox.take_from_afar((1, 7), 3);
        assert!(none.is_none());
        assert_eq!(mailbox.len(), 0);
        for slot in [first, second, third] {
            assert_eq!(slot.peek().unwrap().unwrap().to_vec(), [5]);
        }
    }

    #[test]
    fn forget_removes_entries_and_fails_waiters() {
        let mailbox = Mailbox::default();
        mailbox.post((1, 7), 1, Ok(vec![1].into()));
        mailbox.post((2, 7), 1, Ok(vec![2].into()));
        let waiting = mailbox.take((1, 8), 1);
        mailbox.forget(1);
        assert_eq!(mailbox.len(), 1);
        assert!(
            waiting.peek().unwrap().is_err(),
            "no device will post it any more"
        );
    }
}
