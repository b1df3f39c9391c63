//! The threads that read requests: bodies as JSON, conversations as prompts, texts as tokens.
//!
//! A thread cannot be stopped. A request that takes too long fails, and another one gets its turn,
//! but its thread works on. The number of such threads is bounded: beyond it requests that may take
//! long are refused at once. Requests that are read fast have turns of their own, so that they wait
//! for no others.

use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::failure::HttpFailure;

/// Size of a body, in bytes, above which it counts as long. Reading a long body takes a thread for
/// some time, and its sender must not be slow.
pub(super) const LONG_BODY: usize = 64 << 10;
/// Number of requests of each kind that are read at a time.
const TURNS: usize = 2;
/// Number of threads of each kind that may work beyond their time.
const SPARE: usize = 6;
/// Number of threads that read requests.
pub(super) const READER_THREADS: usize = 2 * (TURNS + SPARE);
/// Time limit for reading a request, from its turn on.
const LONGEST: Duration = Duration::from_secs(10);
/// Time after which a client may try again where no thread is left.
const RETRY: Duration = Duration::from_secs(10);

/// The work that a body asks for, apart from its length.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ReadingCost {
    /// JSON, and a text that becomes tokens.
    Short,
    /// A conversation. The chat template is a program of the model's folder.
    Template,
}

/// Reads requests on a bounded number of threads.
pub(super) struct RequestReaders {
    fast: ReaderTurns,
    slow: ReaderTurns,
    /// The turn of a long body. Only one is read at a time, so that other conversations need not
    /// wait for it.
    long_body: Arc<Semaphore>,
    longest: Duration,
}

impl Default for RequestReaders {
    fn default() -> Self {
        Self {
            fast: ReaderTurns::default(),
            slow: ReaderTurns::default(),
            long_body: Arc::new(Semaphore::new(1)),
            longest: LONGEST,
        }
    }
}

/// The turns of one kind of requests, and their threads.
struct ReaderTurns {
    turns: Arc<Semaphore>,
    /// A permit for each thread that does not work. A thread keeps its permit beyond its turn.
    threads: Arc<Semaphore>,
}

impl Default for ReaderTurns {
    fn default() -> Self {
        Self {
            turns: Arc::new(Semaphore::new(TURNS)),
            threads: Arc::new(Semaphore::new(TURNS + SPARE)),
        }
    }
}

impl RequestReaders {
    /// Calls `read` on a thread, in its turn. `bytes` is the length of the body. If the client
    /// leaves, the thread works on in its turn.
    pub(super) async fn read<T: Send + 'static>(
        &self,
        cost: ReadingCost,
        bytes: usize,
        read: impl FnOnce() -> Result<T, HttpFailure> + Send + 'static,
    ) -> Result<T, HttpFailure> {
        let is_long = bytes > LONG_BODY;
        let kind = match is_long || cost == ReadingCost::Template {
            true => &self.slow,
            false => &self.fast,
        };
        if kind.is_stuck() {
            return Err(stuck());
        }

        // The semaphores are never closed.
        let long_turn = match is_long {
            true => self.long_body.clone().acquire_owned().await.ok(),
            false => None,
        };
        let turn = kind.turns.clone().acquire_owned().await.ok();
        let thread = kind.threads.clone().try_acquire_owned();
        let thread = thread.map_err(|_| stuck())?;
        let longest = self.longest;
        let watched = tokio::spawn(async move {
            let work = spawn_blocking(move || {
                let result = read();
                drop(thread);
                result
            });
            let result = timeout(longest, work).await;
            drop((turn, long_turn));
            result
        });

        match watched.await {
            Ok(Ok(Ok(result))) => result,
            Ok(Err(_)) => {
                let seconds = longest.as_secs();
                let why = format!(
                    "the request was not read within {seconds} seconds: a shorter one may be"
                );
                Err(HttpFailure::invalid(why).code("reading_timeout"))
            }
            Ok(Ok(Err(why))) | Err(why) => {
                Err(HttpFailure::internal("the request could not be read", why))
            }
        }
    }

    /// True if requests are refused, since all threads of a kind work beyond their time.
    pub(super) fn is_stuck(&self) -> bool {
        self.fast.is_stuck() || self.slow.is_stuck()
    }
}

impl ReaderTurns {
    fn is_stuck(&self) -> bool {
        self.threads.available_permits() == 0
    }
}

/// Returns the error for a request for which no thread is left.
fn stuck() -> HttpFailure {
    let why = "the threads that read requests are all at work on earlier ones";
    HttpFailure::new(StatusCode::SERVICE_UNAVAILABLE, why)
        .code("unavailable")
        .retry(RETRY)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use axum::response::IntoResponse as _;

    use super::*;

    /// The time limit of a test.
    const LONG: Duration = Duration::from_secs(60);

    fn readers() -> RequestReaders {
        RequestReaders {
            longest: Duration::from_millis(500),
            ..RequestReaders::default()
        }
    }

    fn status<T>(result: Result<T, HttpFailure>) -> Result<T, StatusCode> {
        result.map_err(|failure| failure.into_response().status())
    }

    #[tokio::test]
    async fn lost_threads_keep_no_turn_and_are_bounded() {
        let readers = readers();
        let mut ends = Vec::new();
        for _ in 0..TURNS + SPARE {
            assert!(!readers.is_stuck());
            let (end, ended) = mpsc::channel::<()>();
            ends.push(end);
            let slow = move || {
                _ = ended.recv();
                Ok(())
            };
            let found = timeout(LONG, readers.read(ReadingCost::Template, 9, slow)).await;
            assert_eq!(status(found.unwrap()), Err(StatusCode::BAD_REQUEST));
            // Others are read meanwhile.
            let found = readers.read(ReadingCost::Short, 9, || Ok(7)).await;
            assert_eq!(status(found), Ok(7));
        }

        assert!(readers.is_stuck());
        for bytes in [9, LONG_BODY + 1] {
            let found = readers.read(ReadingCost::Template, bytes, || Ok(7)).await;
            assert_eq!(status(found), Err(StatusCode::SERVICE_UNAVAILABLE));
        }
        drop(ends);
        while readers.is_stuck() {
            tokio::task::yield_now().await;
        }
        let found = readers.read(ReadingCost::Template, 9, || Ok(7)).await;
        assert_eq!(status(found), Ok(7));
    }

    #[tokio::test]
    async fn client_that_leaves_gives_no_turn_away() {
        let readers = Arc::new(RequestReaders::default());
        let mut ends = Vec::new();
        for _ in 0..TURNS {
            let (end, ended) = mpsc::channel::<()>();
            let (begin, begun) = tokio::sync::oneshot::channel();
            let of_client = readers.clone();
            let client = tokio::spawn(async move {
                let slow = move || {
                    _ = begin.send(());
                    _ = ended.recv();
                    Ok(())
                };
                of_client.read(ReadingCost::Template, 9, slow).await.is_ok()
            });
            begun.await.unwrap();
            client.abort();
            ends.push(end);
        }
        let next = readers.read(ReadingCost::Template, 9, || Ok(7));
        let found = timeout(Duration::from_millis(50), next).await;
        assert!(found.is_err(), "both turns are taken");
        drop(ends);
        let next = readers.read(ReadingCost::Template, 9, || Ok(7));
        assert_eq!(status(timeout(LONG, next).await.unwrap()), Ok(7));
    }
}
