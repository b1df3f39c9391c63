//! The two ends of a pair: what each does with a message that arrives.
//!
//! Everything between the first message of a measurement and the last happens within the
//! transport's calls of the [`Handler`]; the thread that measures waits meanwhile, under a
//! deadline. A message says in its header's operation what it is and in its piece whether its bytes
//! are looked at.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use mpmd_transport::{
    Handler, Header, Kind, OwnedBuffer, Payload, Pool, ProcessId, SharedBuffer, Ticket, Transport,
    TransportError,
};

/// To be answered at once, with as many bytes.
const PING: u64 = 1;
/// The answer.
const PONG: u64 = 2;
/// One of many messages.
const STREAM: u64 = 3;
/// There are as many of them as the header's count says.
const END: u64 = 4;
/// All of them are here.
const THERE: u64 = 5;
/// The other process may begin: its buffers and ours are there.
pub(super) const READY: u64 = 6;
/// This size is measured.
pub(super) const NEXT: u64 = 7;

/// In a header's piece: the receiver compares the bytes with what they should be.
const CHECKED: u64 = 1;

/// Messages up to this many bytes go as small pieces do, larger ones as granted data does.
const LARGEST_EAGER: usize = 16 << 10;

/// No wait is longer.
const PATIENCE: Duration = Duration::from_secs(60);

/// A sample ends after this time with the rounds it has by then: on a machine with other things to
/// do two engines that spin can be a thousand times slower than they were when warming up.
const LONGEST_SAMPLE: Duration = Duration::from_secs(2);

/// How long a thread that can drive the transport does so before it looks at what it waits for.
const MOMENT: Duration = Duration::from_micros(50);

/// How long the other process may take to read what was sent last.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);

/// This process's end. Dropped, it shuts the transport down.
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
    /// The bytes that are sent, of the size that is measured.
    source: Option<SharedBuffer>,
    /// Counts streams, for the tickets of their messages.
    stream: u32,
    /// Round trips still to begin, or messages still to post.
    left: u64,
    /// Those that began, or were posted.
    begun: u64,
    /// Of a stream, how many have arrived here.
    here: u64,
    /// How many there are, once that is known.
    due: Option<u64>,
    began: Option<Instant>,
    ended: Option<Instant>,
    ready: bool,
    next: bool,
    failed: Option<String>,
}

impl Ends {
    /// Starts the transport of a pair; what arrives is fetched into buffers of `pool`.
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

    /// Whether this is the process that measures.
    pub(super) fn is_first(&self) -> bool {
        self.inner.me.0 == 0
    }

    /// Makes the buffers for messages of `bytes`, and room for as many that arrive at once, so that
    /// no fresh page is met later.
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

    /// Says [`READY`] or [`NEXT`].
    pub(super) fn say(&self, word: u64) {
        self.inner.word(word, 0);
    }

    /// Waits until the other process has said [`READY`] or [`NEXT`].
    pub(super) fn hear(&self, word: u64) -> Result<()> {
        self.inner.wait("the other process's word", |state| {
            let said = if word == READY { &mut state.ready } else { &mut state.next };
            std::mem::take(said).then_some(())
        })
    }

    /// The time of so many round trips, or of fewer where that takes too long, after one that does
    /// not count; with how many there were.
    pub(super) fn ping(&self, rounds: u64, checked: bool) -> Result<(u64, Duration)> {
        let mut state = self.inner.state();
        (state.left, state.begun, state.began, state.ended) = (rounds, 0, None, None);
        drop(state);
        self.inner.send(PING, u64::from(checked), Ticket::NONE);
        self.inner.wait("an answer", State::result)
    }

    /// The time of so many messages, or of fewer where that takes too long, `window` of them under
    /// way at a time, until the other process has said that all are there; with how many there
    /// were.
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
        // The transport holds the handler, which holds the transport.
        self.inner.transport.shutdown(CLOSE_WITHIN);
    }
}

/// Streams count from 1, so it is never [`Ticket::NONE`].
fn ticket(stream: u32, number: u64) -> Ticket {
    Ticket((u64::from(stream) << 32) | number)
}

impl State {
    fn result(&mut self) -> Option<(u64, Duration)> {
        Some((self.begun, self.ended?.saturating_duration_since(self.began?)))
    }

    /// Whether one more may begin; then it has.
    fn goes_on(&mut self, now: Instant) -> bool {
        let in_time =
            self.began.is_some_and(|began| now.saturating_duration_since(began) < LONGEST_SAMPLE);
        let goes_on = self.left > 0 && in_time;
        self.left = if goes_on { self.left - 1 } else { 0 };
        self.begun += u64::from(goes_on);
        goes_on
    }

    /// Whether a stream is here to its end; then the next may come.
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
        // Nothing panics under it, and the state is plain numbers.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Posts a message with the bytes of the size that is measured.
    fn send(&self, op: u64, piece: u64, ticket: Ticket) {
        let Some(source) = self.state().source.clone() else {
            return self.fail("a message came before its turn".to_owned());
        };
        let kind = if source.len() <= LARGEST_EAGER { Kind::Eager } else { Kind::Data };
        let header = Header { op, piece, bytes: source.len() as u64, ..Header::new(kind) };
        self.transport.post(self.other, header, Some(source), ticket);
    }

    /// Posts a message without any.
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

    /// Waits until `look` finds what it looks for.
    fn wait<T>(&self, what: &str, mut look: impl FnMut(&mut State) -> Option<T>) -> Result<T> {
        let until = Instant::now() + PATIENCE;
        let mut state = self.state();
        loop {
            // What is here is here, even where the other process has gone since.
            if let Some(found) = look(&mut state) {
                return Ok(found);
            }
            if let Some(why) = &state.failed {
                return Err(anyhow!("process {} waited for {what}: {why}", self.me));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(anyhow!("process {} waited for {what} for {PATIENCE:?}", self.me));
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

    /// Lets messages in for a moment, where a thread that waits can. Who is done with what it was
    /// lent wakes nobody for that: it is looked for, or a stream would wait for the transport's
    /// next round.
    fn drive(&self) {
        let until = Instant::now() + MOMENT;
        self.transport.drive(&mut || {
            self.transport.lent_to(self.other);
            Instant::now() < until
        });
    }

    /// A message is here with all its bytes.
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

/// What the transport calls.
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
        // The last ones of a stream may be said to have left when the next has begun, and after its
        // end.
        if ended.0 >> 32 != u64::from(state.stream) || state.left == 0 {
            return;
        }
        let next = ticket(state.stream, state.begun);
        let goes_on = state.goes_on(Instant::now());
        let end = (state.left == 0).then_some(state.begun);
        drop(state);
        if goes_on {
            self.0.send(STREAM, 0, next);
        }
        if let Some(count) = end {
            self.0.word(END, count);
        }
    }

    fn peer_down(&self, _: ProcessId, why: TransportError) {
        self.0.fail(why.to_string());
    }
}

/// What every message consists of, over and over: of a length that no page or packet is a multiple
/// of.
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
        assert_eq!((state.left, state.begun), (0, 1), "none is left for whoever comes later");
        state.ended = Some(began + LONGEST_SAMPLE);
        assert_eq!(state.result(), Some((1, LONGEST_SAMPLE)));
    }

    #[test]
    fn a_stream_is_whole_whether_its_end_or_its_last_message_comes_first() {
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
