//! A key of clients: its name, its limits, and their use by open requests.
//!
//! The limits hold before the waiting line, on this side of the scheduler: a request that a limit
//! refuses takes no place that another client could have.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use mpmd_base::block::{Instant, Mutex, now};

use super::failure::HttpFailure;
use super::key_file::{KeyEntry, KeyLimits};
use crate::metrics::KeyCounters;
use crate::queue::RequestQueue;

/// A key of clients, with the requests that are open and the tokens that are left.
pub(super) struct ClientKey {
    pub(super) key: String,
    pub(super) name: Option<String>,
    limits: KeyLimits,
    used: Mutex<KeyUse>,
    /// The counters of a key with a name. Unset in keys that only control.
    counters: OnceLock<KeyCounters>,
}

impl ClientKey {
    pub(super) fn new(entry: KeyEntry) -> Self {
        let KeyEntry { key, name, limits } = entry;
        Self {
            key,
            name,
            limits,
            used: Mutex::new(KeyUse::new(limits, now())),
            counters: OnceLock::new(),
        }
    }

    /// Counts the key's use in the metrics of `queue`, by its name. A key without a name is not
    /// counted.
    pub(super) fn count_in(&self, queue: &RequestQueue) {
        if let Some(name) = &self.name {
            self.counters.get_or_init(|| queue.key_counters(name));
        }
    }

    /// Returns the largest number of requests at once.
    pub(super) fn most_requests(&self) -> usize {
        self.limits
            .requests
            .map_or(usize::MAX, |most| most.get() as usize)
    }

    /// Admits a request, before its prompts are read.
    ///
    /// # Errors
    ///
    /// If the key has as many open requests as it may, or has no tokens left.
    pub(super) fn admit(self: &Arc<Self>, queue: &RequestQueue) -> Result<KeyPermit, HttpFailure> {
        let admitted = self.used.lock().admit(self.limits, now());
        self.check(admitted, queue)?;
        Ok(KeyPermit { key: self.clone() })
    }

    /// Counts a refusal, and returns its error. Otherwise counts the open requests.
    fn check(
        &self,
        admitted: Result<(), LimitExceeded>,
        queue: &RequestQueue,
    ) -> Result<(), HttpFailure> {
        let Err(exceeded) = admitted else {
            self.report_open();
            return Ok(());
        };
        queue.refuse(exceeded.label());
        if let Some(counters) = self.counters.get() {
            counters.refuse(exceeded.label());
        }
        Err(self.failure(exceeded))
    }

    fn report_open(&self) {
        if let Some(counters) = self.counters.get() {
            let used = self.used.lock();
            counters
                .open
                .set(i64::try_from(used.open).unwrap_or(i64::MAX));
        }
    }

    /// Returns the error for a request beyond a limit, with the limit's name as the file of keys
    /// has it.
    fn failure(&self, exceeded: LimitExceeded) -> HttpFailure {
        let holder = match &self.name {
            Some(name) => format!("the key {name}"),
            None => "this key".to_owned(),
        };
        match exceeded {
            LimitExceeded::Requests { open } => {
                let most = self.most_requests();
                HttpFailure::busy(format!(
                    "requests={most}: {holder} has {open} of at most {most} requests open"
                ))
            }
            LimitExceeded::Tokens { retry } => {
                let most = self.limits.tokens_per_minute.map_or(0, u32::from);
                let why = format!(
                    "tokens-per-minute={most}: {holder} has used its tokens, and has new ones in \
                     {} s",
                    retry.as_secs()
                );
                HttpFailure::busy(why).retry(retry)
            }
        }
    }
}

/// The place of a request among those of its key. It is free again once this is dropped.
pub(super) struct KeyPermit {
    key: Arc<ClientKey>,
}

impl KeyPermit {
    /// Returns a permit for each of the request's `prompts` prompts, which have `tokens` tokens
    /// together.
    ///
    /// # Errors
    ///
    /// If the key may not have so many requests at once.
    pub(super) fn begin(
        self,
        prompts: usize,
        tokens: usize,
        queue: &RequestQueue,
    ) -> Result<Vec<Self>, HttpFailure> {
        let key = self.key.clone();
        let more = prompts.saturating_sub(1);
        let added = key.used.lock().add(key.limits, more);
        key.check(added, queue)?;
        let mut permits = vec![self];
        permits.extend((0..more).map(|_| Self { key: key.clone() }));

        key.used.lock().spend(tokens);
        if let Some(counters) = key.counters.get() {
            counters.requests.inc_by(prompts as u64);
            counters.prompt_tokens.inc_by(tokens as u64);
        }
        Ok(permits)
    }

    /// Counts a new token of the reply.
    pub(super) fn token(&self) {
        self.key.used.lock().spend(1);
        if let Some(counters) = self.key.counters.get() {
            counters.new_tokens.inc();
        }
    }
}

impl Drop for KeyPermit {
    fn drop(&mut self) {
        self.key.used.lock().open -= 1;
        self.key.report_open();
    }
}

/// The use of a key's limits.
#[derive(Debug)]
struct KeyUse {
    /// Number of open requests.
    open: usize,
    /// Number of tokens that are left. Negative after a request that took more: others wait until
    /// the minutes have paid for it.
    tokens: f64,
    /// The time as of which `tokens` is known.
    known: Instant,
}

/// A limit that a request exceeds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum LimitExceeded {
    Requests {
        open: usize,
    },
    /// No tokens are left until `retry` is over.
    Tokens {
        retry: Duration,
    },
}

impl LimitExceeded {
    /// Returns the label of this refusal in metrics.
    fn label(self) -> &'static str {
        match self {
            Self::Requests { .. } => "key_requests",
            Self::Tokens { .. } => "key_tokens",
        }
    }
}

impl KeyUse {
    /// Begins with the tokens of a whole minute.
    fn new(limits: KeyLimits, now: Instant) -> Self {
        Self {
            open: 0,
            tokens: limits
                .tokens_per_minute
                .map_or(0.0, |most| most.get().into()),
            known: now,
        }
    }

    /// Counts a new request as open, unless it is one too many or no tokens are left.
    fn admit(&mut self, limits: KeyLimits, now: Instant) -> Result<(), LimitExceeded> {
        if let Some(most) = limits.tokens_per_minute {
            self.refill(most.get().into(), now);
            self.check_tokens(most.get().into())?;
        }
        self.add(limits, 1)
    }

    /// Counts `added` requests as open, unless they are too many.
    fn add(&mut self, limits: KeyLimits, added: usize) -> Result<(), LimitExceeded> {
        let most = limits
            .requests
            .map_or(usize::MAX, |most| most.get() as usize);
        if added > 0 && self.open + added > most {
            return Err(LimitExceeded::Requests { open: self.open });
        }
        self.open += added;
        Ok(())
    }

    /// Adds the tokens of the time since the last call, up to those of a minute.
    fn refill(&mut self, most: f64, now: Instant) {
        let passed = now.saturating_duration_since(self.known).as_secs_f64();
        self.tokens = (self.tokens + passed * most / 60.0).min(most);
        self.known = now;
    }

    fn check_tokens(&self, most: f64) -> Result<(), LimitExceeded> {
        if self.tokens >= 1.0 {
            return Ok(());
        }
        let seconds = (1.0 - self.tokens) * 60.0 / most;
        let retry = Duration::from_secs_f64(seconds.ceil());
        Err(LimitExceeded::Tokens { retry })
    }

    /// Takes tokens of a request that was admitted, also if there are fewer.
    fn spend(&mut self, tokens: usize) {
        self.tokens -= tokens as f64;
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    fn limits(requests: u32, tokens: u32) -> KeyLimits {
        KeyLimits {
            requests: NonZeroU32::new(requests),
            tokens_per_minute: NonZeroU32::new(tokens),
        }
    }

    #[test]
    fn requests_at_once_are_limited() {
        let start = now();
        let mut used = KeyUse::new(limits(3, 0), start);
        assert_eq!(used.admit(limits(3, 0), start), Ok(()));
        assert_eq!(used.add(limits(3, 0), 0), Ok(()));
        let over = Err(LimitExceeded::Requests { open: 1 });
        assert_eq!(used.add(limits(3, 0), 3), over);
        assert_eq!(used.add(limits(3, 0), 2), Ok(()));
        let over = Err(LimitExceeded::Requests { open: 3 });
        assert_eq!(used.admit(limits(3, 0), start), over);
        used.open -= 1;
        assert_eq!(used.admit(limits(3, 0), start), Ok(()));
    }

    #[test]
    fn tokens_come_back_within_minutes() {
        let start = now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let limits = limits(0, 600);
        let mut used = KeyUse::new(limits, start);
        assert_eq!(used.admit(limits, at(0)), Ok(()));
        used.spend(599);
        assert_eq!(used.admit(limits, at(0)), Ok(()));
        // More than are left: it is answered, and the next ones wait.
        used.spend(301);
        let over = |seconds| {
            let retry = Duration::from_secs(seconds);
            Err(LimitExceeded::Tokens { retry })
        };
        assert_eq!(used.admit(limits, at(0)), over(31));
        assert_eq!(used.admit(limits, at(10)), over(21));
        assert_eq!(used.admit(limits, at(31)), Ok(()));
        // No more gather than those of a minute.
        assert_eq!(used.admit(limits, at(10_000)), Ok(()));
        used.spend(600);
        assert_eq!(used.admit(limits, at(10_000)), over(1));
        assert_eq!(used.open, 4);
    }

    #[test]
    fn key_without_limits_admits_all() {
        let start = now();
        let mut used = KeyUse::new(KeyLimits::default(), start);
        for _ in 0..1000 {
            assert_eq!(used.admit(KeyLimits::default(), start), Ok(()));
            used.spend(1 << 20);
        }
    }
}
