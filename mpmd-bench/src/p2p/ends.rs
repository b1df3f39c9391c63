//! The two ends of a pair, and their reactions to arriving messages.
//!
//! All work between the first message of a measurement and the last happens inside the transport's
//! calls of the [`Handler`]. The measuring thread waits meanwhile, with a deadline. The `op` of a
//! message's header is its type, and `piece` says if its bytes are checked.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use mpmd_proto::{Header, Kind, ProcessId};
use mpmd_transport::{
    Handler, OwnedBuffer, Payload, Pool, SharedBuffer, Ticket, Transport, TransportError,
};

/// Message type of a ping. The receiver answers at once with a `PONG` of as many bytes.
const PING: u64 = 1;
/// Message type of the answer to a `PING`.
const PONG: u64 = 2;
/// Message type of one message of a stream, which measures bandwidth.
const STREAM: u64 = 3;
/// Message type that ends a stream. The header's `count` is the number of messages that were sent.
const END: u64 = 4;
/// Message type of the answer to `END`: the receiver has all messages of the stream.
const THERE: u64 = 5;
/// Message type without bytes: the sender has allocated its buffers, and the receiver may begin.
pub(super) const READY: u64 = 6;
/// Message type without bytes: the measurement of the current message size has ended.
pub(super) const NEXT: u64 = 7;

/// A value of the header's `piece`: the receiver checks that the bytes are those of `PATTERN`.
const CHECKED: u64 = 1;

/// The largest message, in bytes, that is posted as `Kind::Eager`. Larger ones are posted as
/// `Kind::Data`, which the receiver fetches.
const LARGEST_EAGER: usize = 16 << 10;

/// The time limit of each wait for the other process. A wait that exceeds it is an error.
const TIME_LIMIT: Duration = Duration::from_secs(60);

/// The time after which a sample begins no further round, so that it has fewer rounds. On a busy
/// machine two spinning engines can be a thousand times slower than in the warm-up.
const LONGEST_SAMPLE: Duration = Duration::from_secs(2);

/// Number of messages of a stream between two reads of the clock.
const LOOKS: u64 = 16;

/// The time that a waiting thread drives the transport before it checks its condition.
const MOMENT: Duration = Duration::from_micros(50);

/// The time limit for the transport's shutdown, in which the other process reads the last messages.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// This process's end of a measured pair of processes. Shuts the transport down when dropped.
pub(super) struct Ends {
    inner: Arc<Inner>,
}

struct Inner {
    transport: Arc<dyn Transport>,
    pool: Pool,
    me: ProcessId,
    other: ProcessId,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// The bytes of every message to send, of the measured size. `None` before `prepare`.
    source: Option<SharedBuffer>,
    /// The number of the current stream, counted from 1. The tickets of its messages contain it.
    stream: u32,
    /// Round trips of the current sample still to begin, or stream messages still to post.
    left: u64,
    /// Counted round trips begun in the current sample, or stream messages posted.
    begun: u64,
    /// The number of messages of the current stream that have arrived here.
    here: u64,
    /// The number of messages that the current stream has; `None` until its `END` has arrived.
    due: Option<u64>,
    began: Option<Instant>,
    ended: Option<Instant>,
    ready: bool,
    next: bool,
    failed: Option<String>,
}

impl Ends {
    /// Starts `transport`, which connects processes 0 and 1. Data that arrives as `Kind::Data` is
    /// fetched into buffers of `pool`.
    pub(super) fn start(transport: Arc<dyn Transport>, pool: Pool) -> Self {
        let me = transport.process();
        let other = ProcessId(1 - me.0.min(1));
        let inner = Arc::new(Inner {
            transport,
            pool,
            me,
            other,
            state: Mutex::default(),
            changed: Condvar::new(),
        });
        inner.transport.start(Arc::new(Hearing(inner.clone())));
        Self { inner }
    }

    /// Returns true if this is process 0, which measures.
    pub(super) fn is_first(&self) -> bool {
        self.inner.me.0 == 0
    }

    /// Allocates the source for messages of `bytes` bytes, and frees the buffers of earlier sizes.
    /// Also touches `at_once` buffers of the pool for arriving messages, so that no page fault
    /// happens later.
    pub(super) fn prepare(&self, bytes: usize, at_once: usize) -> Result<()> {
        let pool = &self.inner.pool;
        self.inner.state().source = None;
        pool.trim();
        let mut room = Vec::new();
        for _ in 0..at_once {
            let mut buffer = pool.allocate(bytes)?;
            buffer.fill(0);
            room.push(buffer);
        }
        let mut source = pool.allocate(bytes)?;
        fill(&mut source);
        self.inner.state().source = Some(source.freeze());
        Ok(())
    }

    /// Posts the message [`READY`] or [`NEXT`] to the other process, without waiting.
    pub(super) fn say(&self, word: u64) {
        self.inner.word(word, 0);
    }

    /// Blocks until the other process has sent `word`, which is [`READY`] or [`NEXT`]. Fails after
    /// `TIME_LIMIT`, or if the transport has failed.
    pub(super) fn hear(&self, word: u64) -> Result<()> {
        self.inner.wait("the other process's word", |state| {
            let said = if word == READY { &mut state.ready } else { &mut state.next };
            std::mem::take(said).then_some(())
        })
    }

    /// Measures `rounds` round trips, after one that does not count, and blocks until they have
    /// ended. Returns (number of round trips, their total time). The number is smaller if they take
    /// longer than `LONGEST_SAMPLE`. If `checked`, both processes check the received bytes.
    pub(super) fn ping(&self, rounds: u64, checked: bool) -> Result<(u64, Duration)> {
        let mut state = self.inner.state();
        (state.left, state.begun, state.began, state.ended) = (rounds, 0, None, None);
        drop(state);
        self.inner.send(PING, u64::from(checked), Ticket::NONE);
        self.inner.wait("an answer", State::result)
    }

    /// Sends a stream of `messages` messages, at most `window` of them in flight. Blocks until the
    /// other process has received all. Returns (number of messages, total time). The number is
    /// smaller if they take longer than `LONGEST_SAMPLE`. If `checked`, the receiver checks the
    /// first `window` messages.
    pub(super) fn stream(
        &self,
        messages: u64,
        window: usize,
        checked: bool,
    ) -> Result<(u64, Duration)> {
        let at_once = messages.min(window as u64);
        let mut state = self.inner.state();
        state.stream += 1;
        (state.left, state.begun) = (messages - at_once, at_once);
        (state.began, state.ended) = (Some(Instant::now()), None);
        let stream = state.stream;
        drop(state);
        for number in 0..at_once {
            self.inner.send(STREAM, u64::from(checked), ticket(stream, number));
        }
        if messages == at_once {
            self.inner.word(END, messages);
        }
        self.inner.wait("word that all is there", State::result)
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        // The transport and the handler refer to each other; this breaks the cycle.
        self.inner.transport.shutdown(CLOSE_WITHIN);
    }
}

/// Returns the ticket of message `number` of a stream. It is never [`Ticket::NONE`], as streams
/// count from 1.
fn ticket(stream: u32, number: u64) -> Ticket {
    Ticket((u64::from(stream) << 32) | number)
}

impl State {
    fn result(&mut self) -> Option<(u64, Duration)> {
        Some((self.begun, self.ended?.saturating_duration_since(self.began?)))
    }

    /// Moves one round from `left` to `begun` and returns true. If no round is left or
    /// `LONGEST_SAMPLE` is over, sets `left` to 0 and returns false.
    fn goes_on(&mut self, now: Instant) -> bool {
        let in_time =
            self.began.is_some_and(|began| now.saturating_duration_since(began) < LONGEST_SAMPLE);
        let goes_on = self.left > 0 && in_time;
        self.left = if goes_on { self.left - 1 } else { 0 };
        self.begun += u64::from(goes_on);
        goes_on
    }

    /// Returns true once all messages of a stream and its `END` have arrived, and then resets the
    /// counters for the next stream.
    fn is_whole(&mut self) -> bool {
        let whole = self.due == Some(self.here);
        if whole {
            (self.here, self.due) = (0, None);
        }
        whole
    }
}

impl Inner {
    fn state(&self) -> MutexGuard<'_, State> {
        // No code panics while it holds the lock, and the state is plain numbers.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a message with the source's bytes, without waiting. Records a failure if there is no
    /// source.
    fn send(&self, op: u64, piece: u64, ticket: Ticket) {
        let source = self.state().source.clone();
        self.post(source, op, piece, ticket);
    }

    /// Posts a message with the bytes of `source`, as [`send`](Self::send) does.
    fn post(&self, source: Option<SharedBuffer>, op: u64, piece: u64, ticket: Ticket) {
        let Some(source) = source else {
            return self.fail("a message came before its turn".to_owned());
        };
        let kind = if source.len() <= LARGEST_EAGER { Kind::Eager } else { Kind::Data };
        let header = Header { op, piece, bytes: source.len() as u64, ..Header::new(kind) };
        self.transport.post(self.other, header, Some(source), ticket);
    }

    /// Posts a message without bytes, without waiting. `count` is the header's field.
    fn word(&self, op: u64, count: u64) {
        self.transport.post(
            self.other,
            Header { op, count, ..Header::new(Kind::Eager) },
            None,
            Ticket::NONE,
        );
    }

    fn fail(&self, why: String) {
        self.state().failed.get_or_insert(why);
        self.changed.notify_all();
    }

    /// Blocks until `look` returns a value, and returns that value. Fails after `TIME_LIMIT`, or
    /// once a failure is recorded. The error names the awaited thing.
    fn wait<T>(&self, event: &str, mut look: impl FnMut(&mut State) -> Option<T>) -> Result<T> {
        let until = Instant::now() + TIME_LIMIT;
        let mut state = self.state();
        loop {
            // An arrival counts even if the other process has gone since.
            if let Some(found) = look(&mut state) {
                return Ok(found);
            }
            if let Some(why) = &state.failed {
                return Err(anyhow!("process {} waited for {event}: {why}", self.me));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(anyhow!("process {} waited for {event} for {TIME_LIMIT:?}", self.me));
            }
            if self.transport.parking().is_none() {
                state = self
                    .changed
                    .wait_timeout(state, left)
                    .unwrap_or_else(PoisonError::into_inner)
                    .0;
                continue;
            }
            drop(state);
            self.drive();
            state = self.state();
        }
    }

    /// Drives the transport on this thread for `MOMENT`. Returned loans wake no thread, so
    /// `lent_to` looks for them. Otherwise a stream would wait for the transport's next round.
    fn drive(&self) {
        let until = Instant::now() + MOMENT;
        self.transport.drive(&mut || {
            self.transport.lent_to(self.other);
            Instant::now() < until
        });
    }

    /// Handles a message that has arrived with all its bytes: checks them if the header says so,
    /// then answers or updates the state.
    fn came(&self, header: Header, bytes: &[u8]) {
        if header.piece == CHECKED && !is_right(bytes) {
            return self.fail(format!(
                "a message of {} bytes arrived with others than were sent",
                bytes.len()
            ));
        }
        match header.op {
            PING => self.send(PONG, header.piece, Ticket::NONE),
            PONG => {
                let now = Instant::now();
                let mut state = self.state();
                state.began.get_or_insert(now);
                if state.goes_on(now) {
                    drop(state);
                    self.send(PING, header.piece, Ticket::NONE);
                } else {
                    state.ended = Some(now);
                    drop(state);
                    self.changed.notify_all();
                }
            }
            STREAM | END => {
                let mut state = self.state();
                if header.op == STREAM {
                    state.here += 1;
                } else {
                    state.due = Some(header.count);
                }
                let whole = state.is_whole();
                drop(state);
                if whole {
                    self.word(THERE, 0);
                }
            }
            THERE => self.note(|state| state.ended = Some(Instant::now())),
            READY => self.note(|state| state.ready = true),
            NEXT => self.note(|state| state.next = true),
            other => self.fail(format!("a message says {other}, which means nothing")),
        }
    }

    fn note(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }
}

/// The transport's handler: it passes messages, completions and failures to `Inner`.
struct Hearing(Arc<Inner>);

impl Handler for Hearing {
    fn arrived(&self, _: ProcessId, header: Header, payload: Payload) {
        match payload {
            Payload::Empty => self.0.came(header, &[]),
            Payload::Inline(bytes) | Payload::Lent(bytes) => self.0.came(header, &bytes),
            Payload::Waiting(fetch) => {
                let inner = self.0.clone();
                let into =
                    match usize::try_from(fetch.bytes()).map(|bytes| inner.pool.allocate(bytes)) {
                        Ok(Ok(into)) => into,
                        Ok(Err(error)) => return inner.fail(error.to_string()),
                        Err(error) => return inner.fail(error.to_string()),
                    };
                let then = move |filled: Result<OwnedBuffer, TransportError>| match filled {
                    Ok(bytes) => inner.came(header, &bytes),
                    Err(error) => inner.fail(error.to_string()),
                };
                fetch.fetch(into, Box::new(then));
            }
        }
    }

    fn done(&self, ended: Ticket, result: Result<(), TransportError>) {
        if let Err(error) = result {
            return self.0.fail(error.to_string());
        }
        let mut state = self.0.state();
        // Completions of a stream's last messages may arrive after its end, when the next stream
        // has begun.
        if ended.0 >> 32 != u64::from(state.stream) || state.left == 0 {
            return;
        }
        let next = ticket(state.stream, state.begun);
        // The time is read now and then: it would take a good part of a message's.
        let now =
            if state.begun.is_multiple_of(LOOKS) { Some(Instant::now()) } else { state.began };
        let goes_on = now.is_some_and(|now| state.goes_on(now));
        let end = (state.left == 0).then_some(state.begun);
        let source = state.source.clone().filter(|_| goes_on);
        drop(state);
        if goes_on {
            self.0.post(source, STREAM, 0, next);
        }
        if let Some(count) = end {
            self.0.word(END, count);
        }
    }

    fn peer_down(&self, _: ProcessId, why: TransportError) {
        self.0.fail(why.to_string());
    }
}

/// The content of every message, repeated. No page or packet size is a multiple of its length.
const PATTERN: [u8; 251] = {
    let mut pattern = [0; 251];
    let mut at = 0;
    while at < pattern.len() {
        pattern[at] = at as u8;
        at += 1;
    }
    pattern
};

fn fill(bytes: &mut [u8]) {
    for piece in bytes.chunks_mut(PATTERN.len()) {
        piece.copy_from_slice(&PATTERN[..piece.len()]);
    }
}

fn is_right(bytes: &[u8]) -> bool {
    bytes.chunks(PATTERN.len()).all(|piece| piece == &PATTERN[..piece.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sample_ends_with_its_rounds_or_its_time() {
        let began = Instant::now();
        let mut state = State { left: 2, began: Some(began), ..State::default() };
        assert_eq!([began; 3].map(|now| state.goes_on(now)), [true, true, false]);
        assert_eq!((state.left, state.begun), (0, 2));
        let mut state = State { left: 1000, began: Some(began), ..State::default() };
        assert!(state.goes_on(began) && !state.goes_on(began + LONGEST_SAMPLE));
        assert_eq!((state.left, state.begun), (0, 1), "no round is left for a later call");
        state.ended = Some(began + LONGEST_SAMPLE);
        assert_eq!(state.result(), Some((1, LONGEST_SAMPLE)));
    }

    #[test]
    fn stream_is_whole_in_either_order_of_arrival() {
        let mut state = State { here: 3, ..State::default() };
        assert!(!state.is_whole());
        state.due = Some(3);
        assert!(state.is_whole() && !state.is_whole());
        state.due = Some(1);
        assert!(!state.is_whole());
        state.here = 1;
        assert!(state.is_whole());
    }

    #[test]
    fn other_bytes_are_not_right() {
        let mut bytes = vec![0; 1000];
        fill(&mut bytes);
        assert!(is_right(&bytes) && is_right(&bytes[..7]) && is_right(&[]));
        bytes[999] ^= 1;
        assert!(!is_right(&bytes));
    }
}
