//! The receiving half of a peer: one task that reads both connections.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::net::tcp::OwnedReadHalf;
use tokio::sync::oneshot;

use crate::transport::{Fetch, FetchDone, Handler, Payload};
use mpmd_memory::{OwnedBuffer, Pool};
use mpmd_proto::wire::{HEADER_BYTES, Header, MessageKind, ProcessId};

use super::state::TcpState;

/// Time without received bytes after which a peer's second connection is closed once the first has
/// ended.
pub(super) const LINGER: Duration = Duration::from_secs(1);

/// Largest number of bytes in one system call that reads.
const READ_BYTES: usize = 512 << 10;
/// Largest number of bytes read beyond the current control message, which saves system calls.
const AHEAD_BYTES: usize = 16 << 10;
/// Number of control messages that are delivered before other tasks run on the transport's thread.
const MESSAGES_AT_A_TIME: u64 = 64;
/// Number of bytes read at a time from a payload that is discarded.
const DISCARD_BYTES: usize = 64 << 10;

/// The reason why nothing more is read from a connection.
#[derive(Debug)]
pub(super) enum ReadEnd {
    /// The connection has ended. Contains the reason.
    Closed(String),
    /// The peer sent an invalid message. Contains the fault.
    Protocol(String),
}

impl From<io::Error> for ReadEnd {
    fn from(error: io::Error) -> Self {
        Self::Closed(error.to_string())
    }
}

/// Reads both connections of a peer until the peer is gone. Returns the reason.
pub(super) async fn read(
    shared: &Arc<TcpState>,
    peer: ProcessId,
    handler: &Arc<dyn Handler>,
    control: OwnedReadHalf,
    bulk: OwnedReadHalf,
) -> ReadEnd {
    let reader = PeerReader {
        shared,
        peer,
        handler,
        progress: AtomicU64::new(0),
    };

    let mut control = std::pin::pin!(reader.control(control));
    let mut bulk = std::pin::pin!(reader.bulk(bulk));

    // Control goes first: it is small, and grants wait in it.
    let (first, second) = tokio::select! {
        biased;
        end = &mut control => match end {
            ReadEnd::Closed(_) => {
                let second = tokio::select! {
                    end = &mut bulk => Some(end),
                    () = reader.stands_still() => None,
                };
                (end, second)
            }
            ReadEnd::Protocol(_) => (end, None),
        },
        end = &mut bulk => match end {
            ReadEnd::Closed(_) => {
                let second = tokio::select! {
                    end = &mut control => Some(end),
                    () = reader.stands_still() => None,
                };
                (end, second)
            }
            ReadEnd::Protocol(_) => (end, None),
        },
    };

    match second {
        Some(end @ ReadEnd::Protocol(_)) => end,
        _ => first,
    }
    // Open fetches of this peer end here, with the futures that served them.
}

/// The receiving half of a connection.
trait ReceivingHalf {
    /// Reads the bytes that have arrived, without waiting. Returns 0 at the end of the stream;
    /// fails with `WouldBlock` if no byte has arrived.
    fn try_read(&self, into: &mut [u8]) -> io::Result<usize>;

    /// Waits until there may be bytes to read.
    async fn readable(&self) -> io::Result<()>;
}

impl ReceivingHalf for OwnedReadHalf {
    fn try_read(&self, into: &mut [u8]) -> io::Result<usize> {
        self.try_read(into)
    }

    async fn readable(&self) -> io::Result<()> {
        self.readable().await
    }
}

/// Reads the messages from one peer, on both connections.
struct PeerReader<'a> {
    shared: &'a Arc<TcpState>,
    peer: ProcessId,
    handler: &'a Arc<dyn Handler>,
    /// Number of system calls that have read bytes.
    progress: AtomicU64,
}

impl PeerReader<'_> {
    /// Waits until no byte was read for [`LINGER`].
    async fn stands_still(&self) {
        let mut seen = self.progress.load(Ordering::Relaxed);
        loop {
            tokio::time::sleep(LINGER).await;
            let now = self.progress.load(Ordering::Relaxed);
            if now == seen {
                return;
            }
            seen = now;
        }
    }

    /// Reads messages from the control connection until it ends.
    async fn control(&self, half: impl ReceivingHalf) -> ReadEnd {
        let mut ahead = ReadAhead {
            bytes: vec![0; AHEAD_BYTES],
            start: 0,
            end: 0,
        };
        for number in 1.. {
            if let Err(end) = self.control_message(&half, &mut ahead).await {
                return end;
            }
            if number % MESSAGES_AT_A_TIME == 0 {
                tokio::task::yield_now().await;
            }
        }
        ReadEnd::Closed("it sent more messages than can be counted".to_owned())
    }

    /// Reads one message from the control connection and delivers it.
    async fn control_message(
        &self,
        half: &impl ReceivingHalf,
        ahead: &mut ReadAhead,
    ) -> Result<(), ReadEnd> {
        let mut header = [0; HEADER_BYTES];
        while ahead.len() < HEADER_BYTES {
            let room = ahead.room();
            let read = self.some(half, room).await?;
            if read == 0 {
                return Err(ended(ahead.len()));
            }
            ahead.end += read;
        }
        ahead.take(&mut header);

        let header = self.decode(&header, false)?;
        let bytes = header.payload_bytes() as usize;
        let payload = if bytes == 0 {
            Payload::Empty
        } else {
            let mut buffer = control_buffer(&self.shared.pool, bytes);
            let there = ahead.len().min(bytes);
            ahead.take(&mut buffer[..there]);
            self.all(half, &mut buffer[there..]).await?;
            Payload::Inline(buffer.freeze())
        };

        self.handler.arrived(self.peer, header, payload);
        Ok(())
    }

    /// Reads messages from the bulk connection until it ends.
    async fn bulk(&self, half: impl ReceivingHalf) -> ReadEnd {
        loop {
            if let Err(end) = self.bulk_message(&half).await {
                return end;
            }
        }
    }

    /// Reads one message from the bulk connection and delivers it. Then waits until the receiver
    /// fetches or discards the payload.
    async fn bulk_message(&self, half: &impl ReceivingHalf) -> Result<(), ReadEnd> {
        let mut header = [0; HEADER_BYTES];
        let mut filled = 0;
        while filled < HEADER_BYTES {
            let read = self.some(half, &mut header[filled..]).await?;
            if read == 0 {
                return Err(ended(filled));
            }
            filled += read;
        }

        let header = self.decode(&header, true)?;
        if header.bytes == 0 {
            self.handler.arrived(self.peer, header, Payload::Empty);
            return Ok(());
        }

        let (asks, answer) = oneshot::channel();
        let waiting = SocketPayload {
            shared: self.shared.clone(),
            peer: self.peer,
            bytes: header.bytes,
            asks: Some(asks),
        };
        self.handler
            .arrived(self.peer, header, Payload::Waiting(Box::new(waiting)));

        match answer.await {
            Ok(mut place) => match place.target.take() {
                Some(FetchTarget { into, then }) => self.fill(half, into, then).await,
                None => self.discard(half, header.bytes).await,
            },
            Err(_) => self.discard(half, header.bytes).await,
        }
    }

    /// Reads a payload into the buffer `into`, and calls `then` with the result. Calls `then` also
    /// if the read fails or is cancelled.
    async fn fill(
        &self,
        half: &impl ReceivingHalf,
        mut into: OwnedBuffer,
        then: FetchDone,
    ) -> Result<(), ReadEnd> {
        let mut filling = FetchGuard {
            shared: self.shared,
            peer: self.peer,
            why: "",
            then: Some(then),
        };

        match self.all(half, &mut into).await {
            Ok(()) => {
                if let Some(then) = filling.then.take() {
                    then(Ok(into));
                }
                Ok(())
            }
            Err(end) => {
                filling.why = "its connection ended in the middle of a payload";
                Err(end)
            }
        }
    }

    /// Reads `bytes` bytes and drops them.
    async fn discard(&self, half: &impl ReceivingHalf, bytes: u64) -> Result<(), ReadEnd> {
        let mut bin = vec![0; DISCARD_BYTES.min(usize::try_from(bytes).unwrap_or(DISCARD_BYTES))];
        let mut left = bytes;
        while left > 0 {
            let piece = bin.len().min(usize::try_from(left).unwrap_or(bin.len()));
            self.all(half, &mut bin[..piece]).await?;
            left -= piece as u64;
        }
        Ok(())
    }

    /// Decodes a header. Checks that messages of its kind are sent on this connection (bulk or
    /// control).
    fn decode(&self, bytes: &[u8; HEADER_BYTES], bulk: bool) -> Result<Header, ReadEnd> {
        let header = Header::decode(bytes).map_err(|error| ReadEnd::Protocol(error.to_string()))?;
        if (header.kind == MessageKind::Data) != bulk {
            return Err(ReadEnd::Protocol(format!(
                "a {:?} message came over the wrong connection",
                header.kind
            )));
        }
        Ok(header)
    }

    /// Reads bytes until the buffer `into` is full.
    async fn all(&self, half: &impl ReceivingHalf, mut into: &mut [u8]) -> Result<(), ReadEnd> {
        while !into.is_empty() {
            let read = self.some(half, into).await?;
            if read == 0 {
                return Err(ended(1));
            }
            into = &mut into[read..];
            if read >= READ_BYTES / 2 {
                // More bytes are likely to follow at once; let control messages in.
                tokio::task::yield_now().await;
            }
        }
        Ok(())
    }

    /// Reads the bytes that have arrived, and waits for at least one. Returns 0 at the end of the
    /// stream.
    async fn some(&self, half: &impl ReceivingHalf, into: &mut [u8]) -> io::Result<usize> {
        let room = into.len().min(READ_BYTES);
        loop {
            match half.try_read(&mut into[..room]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => half.readable().await?,
                read => {
                    self.progress.fetch_add(1, Ordering::Relaxed);
                    return read;
                }
            }
        }
    }
}

/// Returns the reason for a connection that ended after `within` bytes of a message.
fn ended(within: usize) -> ReadEnd {
    let why = if within == 0 {
        "its connection was closed"
    } else {
        "its connection ended in the middle of a message"
    };
    ReadEnd::Closed(why.to_owned())
}

/// Allocates a buffer for a control payload. If the pool is exhausted, allocates the buffer outside
/// the pool, because control messages report that very exhaustion to peers. Each peer has at most
/// one such buffer at a time.
fn control_buffer(pool: &Pool, bytes: usize) -> OwnedBuffer {
    pool.allocate(bytes)
        .unwrap_or_else(|_| OwnedBuffer::from(vec![0; bytes]))
}

/// Bytes that were read beyond the current message.
struct ReadAhead {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl ReadAhead {
    fn len(&self) -> usize {
        self.end - self.start
    }

    /// Returns the free part of the buffer. Moves the unread bytes to the front first.
    fn room(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            let len = self.len();
            self.start = 0;
            self.end = len;
        }
        &mut self.bytes[self.end..]
    }

    fn take(&mut self, into: &mut [u8]) {
        into.copy_from_slice(&self.bytes[self.start..self.start + into.len()]);
        self.start += into.len();
    }
}

/// A bulk payload that has not been read from the socket yet.
struct SocketPayload {
    shared: Arc<TcpState>,
    peer: ProcessId,
    bytes: u64,
    /// Sends the buffer to the task that reads the payload; `None` once the payload was fetched.
    asks: Option<oneshot::Sender<PayloadTarget>>,
}

impl Fetch for SocketPayload {
    fn bytes(&self) -> u64 {
        self.bytes
    }

    fn fetch(mut self: Box<Self>, into: OwnedBuffer, then: FetchDone) {
        assert_eq!(
            into.len() as u64,
            self.bytes,
            "a payload is fetched into a buffer of its length"
        );
        let Some(asks) = self.asks.take() else { return };
        // If the reading task has ended, the place is dropped, and its `drop` reports the error.
        let _ = asks.send(PayloadTarget {
            shared: self.shared.clone(),
            peer: self.peer,
            target: Some(FetchTarget { into, then }),
        });
    }
}

/// The buffer for a payload, and the callback for its fetch.
struct FetchTarget {
    into: OwnedBuffer,
    then: FetchDone,
}

/// A [`FetchTarget`] on its way to the task that reads the payload. If that task ends first,
/// dropping this fails the fetch.
struct PayloadTarget {
    shared: Arc<TcpState>,
    peer: ProcessId,
    /// `None` once the reading task has taken the target.
    target: Option<FetchTarget>,
}

impl Drop for PayloadTarget {
    fn drop(&mut self) {
        if let Some(FetchTarget { into, then }) = self.target.take() {
            drop(into);
            let error = self.shared.lost(
                self.peer,
                "its connection ended before the payload was fetched",
            );
            self.shared.endings.fetch(then, error);
        }
    }
}

/// Fails a fetch when dropped, unless the fetch has completed.
struct FetchGuard<'a> {
    shared: &'a TcpState,
    peer: ProcessId,
    why: &'static str,
    then: Option<FetchDone>,
}

impl Drop for FetchGuard<'_> {
    fn drop(&mut self) {
        if let Some(then) = self.then.take() {
            let why = if self.why.is_empty() {
                "its connection stood still in a payload"
            } else {
                self.why
            };
            then(Err(self.shared.lost(self.peer, why)));
        }
    }
}

#[cfg(test)]
mod tests;
