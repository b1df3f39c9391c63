//! A key of clients: its name, its limits, and their use by open requests.
//!
//! The limits hold before the waiting line, on this side of the scheduler: a request that a limit
//! refuses takes no place that another client could have.

use std::num::NonZeroU32;
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
    /// If the key has as many open requests as it may, or has no requests or tokens left.
    pub(super) fn admit(self: &Arc<Self>, queue: &RequestQueue) -> Result<KeyPermit, HttpFailure> {
        let admitted = self.used.lock().admit(now());
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
            LimitExceeded::Rate { unit, most, retry } => {
                let seconds = retry.as_secs();
                let why = format!(
                    "{unit}-per-minute={most}: {holder} has used its {unit}, and has new ones in \
                     {seconds} s"
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
        let added = key.used.lock().add(more);
        key.check(added, queue)?;
        let mut permits = vec![self];
        permits.extend((0..more).map(|_| Self { key: key.clone() }));

        key.used.lock().tokens.spend(tokens);
        if let Some(counters) = key.counters.get() {
            counters.requests.inc_by(prompts as u64);
            counters.prompt_tokens.inc_by(tokens as u64);
        }
        Ok(permits)
    }

    /// Counts a new token of the reply.
    pub(super) fn token(&self) {
        self.key.used.lock().tokens.spend(1);
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
    /// Number of open requests, of at most `most_open`.
    open: usize,
    most_open: usize,
    requests: Allowance,
    tokens: Allowance,
}

/// The requests or tokens that a key has left.
#[derive(Debug)]
struct Allowance {
    unit: &'static str,
    /// Number per minute. `None` is no limit.
    most: Option<NonZeroU32>,
    /// The number that is left. Negative after a request that took more: others wait until the
    /// minutes have paid for it.
    left: f64,
    /// The time as of which `left` is known.
    known: Instant,
}

/// A limit that a request exceeds.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum LimitExceeded {
    Requests {
        open: usize,
    },
    /// No units are left until `retry` is over, of `most` per minute.
    Rate {
        unit: &'static str,
        most: NonZeroU32,
        retry: Duration,
    },
}

impl LimitExceeded {
    /// Returns the label of this refusal in metrics.
    fn label(self) -> &'static str {
        match self {
            Self::Requests { .. } => "key_requests",
            Self::Rate { unit: TOKENS, .. } => "key_tokens",
            Self::Rate { .. } => "key_request_rate",
        }
    }
}

const REQUESTS: &str = "requests";
const TOKENS: &str = "tokens";

impl KeyUse {
    /// Begins with the requests and tokens of a whole minute.
    fn new(limits: KeyLimits, now: Instant) -> Self {
        let most_open = limits.requests;
        Self {
            open: 0,
            most_open: most_open.map_or(usize::MAX, |most| most.get() as usize),
            requests: Allowance::new(REQUESTS, limits.requests_per_minute, now),
            tokens: Allowance::new(TOKENS, limits.tokens_per_minute, now),
        }
    }

    /// Counts a new request as open, unless it is one too many or the key has used its requests or
    /// tokens.
    fn admit(&mut self, now: Instant) -> Result<(), LimitExceeded> {
        self.requests.check(now)?;
        self.tokens.check(now)?;
        self.add(1)
    }

    /// Counts `added` requests as open, unless they are too many.
    fn add(&mut self, added: usize) -> Result<(), LimitExceeded> {
        if added > 0 && self.open + added > self.most_open {
            return Err(LimitExceeded::Requests { open: self.open });
        }
        self.open += added;
        self.requests.spend(added);
        Ok(())
    }
}

impl Allowance {
    fn new(unit: &'static str, most: Option<NonZeroU32>, now: Instant) -> Self {
        Self {
            unit,
            most,
            left: most.map_or(0.0, |most| most.get().into()),
            known: now,
        }
    }

    /// Adds the units of the time since the last call, up to those of a minute. Fails if none is
    /// left.
    fn check(&mut self, now: Instant) -> Result<(), LimitExceeded> {
        let Some(limit) = self.most else {
            return Ok(());
        };
        let most = f64::from(limit.get());
        let passed = now.saturating_duration_since(self.known).as_secs_f64();
        self.left = (self.left + passed * most / 60.0).min(most);
        self.known = now;
        if self.left >= 1.0 {
            return Ok(());
        }
        // Less than a microsecond is an error of rounding.
        let seconds = ((1.0 - self.left) * 60.0 / most - 1e-6).max(1.0);
        Err(LimitExceeded::Rate {
            unit: self.unit,
            most: limit,
            retry: Duration::from_secs_f64(seconds.ceil()),
        })
    }

    /// Takes units of a request that was admitted, also if there are fewer.
    fn spend(&mut self, units: usize) {
        self.left -= units as f64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(requests: u32, requests_per_minute: u32, tokens_per_minute: u32) -> KeyLimits {
        KeyLimits {
            requests: NonZeroU32::new(requests),
            requests_per_minute: NonZeroU32::new(requests_per_minute),
            tokens_per_minute: NonZeroU32::new(tokens_per_minute),
        }
    }

    /// The refusal of a key that has used its units.
    fn over(unit: &'static str, most: u32, seconds: u64) -> Result<(), LimitExceeded> {
        Err(LimitExceeded::Rate {
            unit,
            most: NonZeroU32::new(most).unwrap(),
            retry: Duration::from_secs(seconds),
        })
    }

    #[test]
    fn requests_at_once_are_limited() {
        let start = now();
        let mut used = KeyUse::new(limits(3, 0, 0), start);
        assert_eq!(used.admit(start), Ok(()));
        assert_eq!(used.add(0), Ok(()));
        let over = Err(LimitExceeded::Requests { open: 1 });
        assert_eq!(used.add(3), over);
        assert_eq!(used.add(2), Ok(()));
        let over = Err(LimitExceeded::Requests { open: 3 });
        assert_eq!(used.admit(start), over);
        used.open -= 1;
        assert_eq!(used.admit(start), Ok(()));
    }

    #[test]
    fn tokens_come_back_within_minutes() {
        let start = now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut used = KeyUse::new(limits(0, 0, 600), start);
        assert_eq!(used.admit(at(0)), Ok(()));
        used.tokens.spend(599);
        assert_eq!(used.admit(at(0)), Ok(()));
        // More than are left: it is answered, and the next ones wait.
        used.tokens.spend(301);
        assert_eq!(used.admit(at(0)), over(TOKENS, 600, 31));
        assert_eq!(used.admit(at(10)), over(TOKENS, 600, 21));
        assert_eq!(used.admit(at(31)), Ok(()));
        // No more gather than those of a minute.
        assert_eq!(used.admit(at(10_000)), Ok(()));
        used.tokens.spend(600);
        assert_eq!(used.admit(at(10_000)), over(TOKENS, 600, 1));
        assert_eq!(used.open, 4);
    }

    #[test]
    fn requests_come_back_within_minutes() {
        let start = now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut used = KeyUse::new(limits(0, 2, 0), start);
        assert_eq!(used.admit(at(0)), Ok(()));
        assert_eq!(used.admit(at(0)), Ok(()));
        assert_eq!(used.admit(at(0)), over(REQUESTS, 2, 30));
        assert_eq!(used.admit(at(20)), over(REQUESTS, 2, 10));
        assert_eq!(used.admit(at(30)), Ok(()));
        // Each prompt of a list is one.
        assert_eq!(used.admit(at(60)), Ok(()));
        assert_eq!(used.add(2), Ok(()));
        assert_eq!(used.admit(at(60)), over(REQUESTS, 2, 90));
    }

    #[test]
    fn key_without_limits_admits_all() {
        let start = now();
        let mut used = KeyUse::new(KeyLimits::default(), start);
        for _ in 0..1000 {
            assert_eq!(used.admit(start), Ok(()));
            used.tokens.spend(1 << 20);
        }
    }
}
