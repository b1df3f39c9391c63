//! The sending half of a connection: a queue, and a turn to write that one task or thread has at a
//! time.
//!
//! The socket's write half lies in the connection's state. The connection's writer task, or a
//! thread that posts a small message, takes it and so has the [`WriteTurn`]. With it, it takes the
//! queue, and it puts back the messages that it did not write. So bytes never mix, and no thread
//! waits for the lock during a write.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::net::tcp::OwnedWriteHalf;
use tokio::sync::Notify;

use crate::transport::{FetchDone, Ticket, TransportError};
use mpmd_memory::SharedBuffer;
use mpmd_proto::wire::{HEADER_BYTES, Header};

/// Largest message, in bytes with its header, that the thread which posts it may write to the
/// socket itself.
const DIRECT_BYTES: usize = 16 << 10;
/// Largest number of bytes in one system call that writes. Everything else on the transport's only
/// thread waits for the copy that the call makes.
const WRITE_BYTES: usize = 512 << 10;
/// Largest number of slices of memory in one system call that writes.
const WRITE_PIECES: usize = 64;

/// The sending half of one TCP connection.
pub(super) struct ConnectionSender {
    state: Mutex<SendState>,
    /// Notified about changes that the writer task must handle.
    wake: Notify,
    /// Number of system calls that have written bytes.
    progress: AtomicU64,
}

/// The queue of a connection's unsent messages, and the state of its socket.
struct SendState {
    /// The socket's write half. `None` while a [`WriteTurn`] has it, and after the connection has
    /// ended.
    half: Option<OwnedWriteHalf>,
    /// True while a [`WriteTurn`] exists: only its thread or task may write to the socket. After a
    /// failure, true until the tickets of the turn's messages have ended.
    turn: bool,
    queue: VecDeque<QueuedMessage>,
    end: SendingEnd,
}

/// The state of a connection's sending half.
enum SendingEnd {
    /// Messages can be queued.
    Open,
    /// No more messages can be queued. The queued ones are sent, then the socket's write side is
    /// closed. Contains the error for later messages.
    Last(TransportError),
    /// Nothing more is sent. Contains the error for later messages.
    Now(TransportError),
}

/// A message with the number of its bytes that are already written.
struct QueuedMessage {
    header: [u8; HEADER_BYTES],
    payload: Option<SharedBuffer>,
    ticket: Ticket,
    written: usize,
}

impl ConnectionSender {
    pub(super) fn new(half: OwnedWriteHalf) -> Self {
        let state = SendState {
            half: Some(half),
            turn: false,
            queue: VecDeque::new(),
            end: SendingEnd::Open,
        };
        Self {
            state: Mutex::new(state),
            wake: Notify::new(),
            progress: AtomicU64::new(0),
        }
    }

    /// Queues a message. Writes it on this thread if `direct` is true, the message is small, and
    /// the queue is empty. After the connection has ended, `ticket` ends with an error.
    pub(super) fn post(
        &self,
        header: &Header,
        payload: Option<SharedBuffer>,
        ticket: Ticket,
        direct: bool,
        endings: &Endings,
    ) {
        let message = QueuedMessage {
            header: header.encode(),
            payload,
            ticket,
            written: 0,
        };
        let direct = direct && message.len() <= DIRECT_BYTES;

        let mut state = self.state.lock();
        if let SendingEnd::Last(error) | SendingEnd::Now(error) = &state.end {
            let error = error.clone();
            drop(state);
            endings.ticket(ticket, Err(error));
            return;
        }

        let first = state.queue.is_empty();
        state.queue.push_back(message);
        match state.half.take() {
            Some(half) if direct && first => {
                let queue = std::mem::take(&mut state.queue);
                state.turn = true;
                drop(state);
                // Anything left over is for the writer task, which the end of the turn wakes.
                let _ = WriteTurn {
                    line: self,
                    half: Some(half),
                    queue,
                    endings,
                }
                .write();
            }
            half => {
                // If a turn is taken, its end sees the message.
                let idle = half.is_some();
                state.half = half;
                drop(state);
                if idle {
                    self.wake.notify_one();
                }
            }
        }
    }

    /// Closes the connection after the queued messages have been sent. Later messages end with
    /// `error`.
    pub(super) fn finish(&self, error: TransportError) {
        let mut state = self.state.lock();
        if matches!(state.end, SendingEnd::Open) {
            state.end = SendingEnd::Last(error);
        }
        drop(state);
        self.wake.notify_one();
    }

    /// Closes the connection's write side at once, and ends all queued messages with `error`.
    pub(super) fn fail(&self, error: TransportError, endings: &Endings) {
        let mut state = self.state.lock();
        let queue = std::mem::take(&mut state.queue);
        let half = state.half.take();
        if !matches!(state.end, SendingEnd::Now(_)) {
            state.end = SendingEnd::Now(error.clone());
        }

        drop(state);
        drop(half);
        for message in queue {
            message.end(Err(error.clone()), endings);
        }
        self.wake.notify_one();
    }

    /// Returns true if a [`WriteTurn`] exists. Its tickets may still end.
    pub(super) fn is_in_use(&self) -> bool {
        self.state.lock().turn
    }

    /// Returns true if nothing more will be sent.
    fn is_ended(&self) -> bool {
        matches!(self.state.lock().end, SendingEnd::Now(_))
    }

    /// Waits until the connection has sent its last message, or has written nothing for
    /// `peer_timeout`.
    pub(super) async fn drained(&self, peer_timeout: Duration) {
        let mut seen = self.progress.load(Ordering::Relaxed);
        let mut still = Duration::ZERO;
        let step = peer_timeout / 20;

        while !self.is_ended() && still < peer_timeout {
            tokio::time::sleep(step).await;
            let now = self.progress.load(Ordering::Relaxed);
            still = if now == seen {
                still + step
            } else {
                Duration::ZERO
            };
            seen = now;
        }
    }

    /// Runs the writer task, which writes queued messages until the connection ends. If the socket
    /// fails, ends all messages with the error that `gone` makes of the socket's error.
    pub(super) async fn write(
        &self,
        endings: &Endings,
        gone: impl Fn(io::Error) -> TransportError,
    ) {
        loop {
            match self.turn(endings) {
                WriterStep::Write(turn) => {
                    if let Err(error) = turn.write_all().await {
                        self.fail(gone(error), endings);
                        return;
                    }
                }
                WriterStep::Wait => self.wake.notified().await,
                WriterStep::End => return,
            }
        }
    }

    /// Returns a [`WriteTurn`] if there are messages to write and no turn exists.
    fn turn<'a>(&'a self, endings: &'a Endings) -> WriterStep<'a> {
        let mut state = self.state.lock();
        if matches!(state.end, SendingEnd::Now(_)) {
            return WriterStep::End;
        }
        let Some(half) = state.half.take() else {
            return WriterStep::Wait;
        };

        if !state.queue.is_empty() {
            let queue = std::mem::take(&mut state.queue);
            state.turn = true;
            return WriterStep::Write(WriteTurn {
                line: self,
                half: Some(half),
                queue,
                endings,
            });
        }

        if let SendingEnd::Last(error) = &state.end {
            state.end = SendingEnd::Now(error.clone());
            // Dropping the half closes the write side.
            return WriterStep::End;
        }
        state.half = Some(half);
        WriterStep::Wait
    }
}

/// The next step of the task that writes a connection's messages.
enum WriterStep<'a> {
    Write(WriteTurn<'a>),
    Wait,
    End,
}

/// The right of one thread or task to write to the socket, with the messages to write first.
struct WriteTurn<'a> {
    line: &'a ConnectionSender,
    /// The socket's write half; `None` only when the turn is dropped.
    half: Option<OwnedWriteHalf>,
    queue: VecDeque<QueuedMessage>,
    endings: &'a Endings,
}

impl WriteTurn<'_> {
    /// Writes all messages of this turn. Stops early if the connection ends meanwhile.
    async fn write_all(mut self) -> io::Result<()> {
        while !self.queue.is_empty() {
            match self.write() {
                Ok(written) if written >= WRITE_BYTES / 2 => tokio::task::yield_now().await,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let Some(half) = &self.half else {
                        return Ok(());
                    };
                    tokio::select! {
                        ready = half.writable() => ready?,
                        () = self.line.wake.notified() => {}
                    }
                }
                Err(error) => return Err(error),
            }

            if matches!(self.line.state.lock().end, SendingEnd::Now(_)) {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Writes as many bytes as the socket accepts without waiting, and ends the messages that are
    /// complete. Returns the number of bytes. Fails with `WouldBlock` if the socket accepts none.
    fn write(&mut self) -> io::Result<usize> {
        let Some(half) = &self.half else { return Ok(0) };
        let mut pieces = [IoSlice::new(&[]); WRITE_PIECES];
        let mut count = 0;
        let mut room = WRITE_BYTES;
        for message in &self.queue {
            for piece in message.left() {
                if !piece.is_empty() && count < WRITE_PIECES && room > 0 {
                    let piece = &piece[..piece.len().min(room)];
                    pieces[count] = IoSlice::new(piece);
                    count += 1;
                    room -= piece.len();
                }
            }
            if count == WRITE_PIECES || room == 0 {
                break;
            }
        }

        let written = half.try_write_vectored(&pieces[..count])?;
        self.line.progress.fetch_add(1, Ordering::Relaxed);
        self.advance(written);
        Ok(written)
    }

    /// Records that `written` more bytes are sent, and ends the messages that this completes.
    fn advance(&mut self, mut written: usize) {
        while let Some(message) = self.queue.front_mut() {
            let taken = written.min(message.len() - message.written);
            message.written += taken;
            written -= taken;
            if message.written < message.len() {
                return;
            }
            if let Some(message) = self.queue.pop_front() {
                message.end(Ok(()), self.endings);
            }
        }
    }
}

impl Drop for WriteTurn<'_> {
    fn drop(&mut self) {
        let mut state = self.line.state.lock();
        if let SendingEnd::Now(error) = &state.end {
            let error = error.clone();
            drop(state);
            for message in self.queue.drain(..) {
                message.end(Err(error.clone()), self.endings);
            }
            // Reset last: a thread that waits for the end of the turn relies on the tickets being
            // ended.
            self.line.state.lock().turn = false;
            return;
        }

        // The messages that are left go ahead of those queued meanwhile.
        self.queue.append(&mut state.queue);
        std::mem::swap(&mut self.queue, &mut state.queue);
        state.half = self.half.take();
        state.turn = false;
        let work = !state.queue.is_empty() || !matches!(state.end, SendingEnd::Open);
        drop(state);
        if work {
            self.line.wake.notify_one();
        }
    }
}

impl QueuedMessage {
    fn len(&self) -> usize {
        HEADER_BYTES + self.payload.as_ref().map_or(0, |payload| payload.len())
    }

    /// Returns the unwritten bytes of the header and of the payload.
    fn left(&self) -> [&[u8]; 2] {
        let payload = self.payload.as_deref().unwrap_or(&[]);
        match self.written.checked_sub(HEADER_BYTES) {
            Some(written) => [&[], &payload[written..]],
            None => [&self.header[self.written..], payload],
        }
    }

    /// Drops the payload, then reports `result` for the message's ticket.
    fn end(self, result: Result<(), TransportError>, endings: &Endings) {
        drop(self.payload);
        endings.ticket(self.ticket, result);
    }
}

/// Collects ended tickets and failed fetches from all threads. The transport's thread reports them
/// to the handler.
pub(super) struct Endings {
    /// Ends that are not reported yet; `None` once the transport's thread reports no more.
    waiting: Mutex<Option<Vec<TransferEnd>>>,
    wake: Notify,
}

/// The end of a posted message, or a failed fetch of a payload.
pub(super) enum TransferEnd {
    Ticket(Ticket, Result<(), TransportError>),
    Fetch(FetchDone, TransportError),
}

impl Endings {
    pub(super) fn new() -> Self {
        Self {
            waiting: Mutex::new(Some(Vec::new())),
            wake: Notify::new(),
        }
    }

    pub(super) fn ticket(&self, ticket: Ticket, result: Result<(), TransportError>) {
        if ticket != Ticket::NONE {
            // After the end no ticket is waited for.
            let _ = self.push(TransferEnd::Ticket(ticket, result));
        }
    }

    /// Queues a failed fetch for the transport's thread, which calls `then`. If that thread has
    /// ended, calls `then` on this thread.
    pub(super) fn fetch(&self, then: FetchDone, error: TransportError) {
        if let Err(TransferEnd::Fetch(then, error)) = self.push(TransferEnd::Fetch(then, error)) {
            then(Err(error));
        }
    }

    /// Queues an end. Returns it as the error if the transport's thread reports no more.
    fn push(&self, ending: TransferEnd) -> Result<(), TransferEnd> {
        let mut waiting = self.waiting.lock();
        let Some(list) = waiting.as_mut() else {
            return Err(ending);
        };
        list.push(ending);

        let first = list.len() == 1;
        drop(waiting);
        if first {
            self.wake.notify_one();
        }
        Ok(())
    }

    /// Waits until the end of a transfer is added to the empty list. May return although the list
    /// is empty.
    pub(super) async fn some(&self) {
        self.wake.notified().await;
    }

    /// Removes and returns all collected ends of transfers, in order. If `last` is true and there
    /// are none, later ends are refused.
    pub(super) fn take(&self, last: bool) -> Vec<TransferEnd> {
        let mut waiting = self.waiting.lock();
        let list = waiting.as_mut().map(std::mem::take).unwrap_or_default();
        if last && list.is_empty() {
            *waiting = None;
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mpmd_proto::wire::MessageKind;

    #[test]
    fn unwritten_parts_are_right_at_every_offset() {
        let payload = SharedBuffer::from(vec![5; 10]);
        let header = Header {
            bytes: 10,
            ..Header::new(MessageKind::Eager)
        }
        .encode();
        let whole: Vec<u8> = header.iter().chain(payload.iter()).copied().collect();
        let mut message = QueuedMessage {
            header,
            payload: Some(payload),
            ticket: Ticket::NONE,
            written: 0,
        };
        for written in 0..=whole.len() {
            message.written = written;
            assert_eq!(message.left().concat(), whole[written..]);
        }
    }

    #[test]
    fn ends_are_refused_after_the_last_are_taken() {
        let endings = Endings::new();
        endings.ticket(Ticket::NONE, Ok(()));
        endings.ticket(Ticket(1), Ok(()));
        assert_eq!(endings.take(true).len(), 1, "nobody wants to hear of NONE");
        endings.ticket(Ticket(2), Ok(()));
        assert_eq!(
            endings.take(true).len(),
            1,
            "not refused before all are taken"
        );
        assert!(endings.take(true).is_empty());
        let (told, hears) = std::sync::mpsc::channel();
        endings.fetch(
            Box::new(move |result| told.send(result.is_err()).unwrap()),
            TransportError::Closed,
        );
        assert!(hears.try_recv().unwrap());
    }
}
