//! The client's end of a connection, and how a server notices that the client has left.
//!
//! A client that closes its connection and one that only sends nothing more (a half-closed
//! connection) look the same until something is written: only the first answers by a reset. So a
//! client that has become silent is asked, by bytes that the other kind skips: before the answer
//! `100 Continue`, which every client of HTTP/1.1 must expect, and within a stream of events a
//! comment.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::http::Version;
use tokio::io::{Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::sleep;

/// Time from a client's silence until bytes are sent to test whether it has left.
const ASK: Duration = Duration::from_millis(50);
const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// The TCP socket of a client's connection.
pub(super) struct PeerSocket {
    pub(super) stream: TcpStream,
    /// True if all bytes of replies have been written to the socket.
    is_flushed: AtomicBool,
    /// True if a request was refused before all of its body was read.
    has_unread: AtomicBool,
}

impl PeerSocket {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            is_flushed: AtomicBool::new(true),
            has_unread: AtomicBool::new(false),
        }
    }

    /// Reads bytes from the client. Pending until there are some; reads none at the end of the
    /// connection.
    pub(super) fn poll_read(
        &self,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            match self.stream.try_read_buf(to) {
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done.map(drop)),
            }
        }
    }

    /// Calls `write` when the socket can take bytes. Pending until then.
    pub(super) fn poll_write(
        &self,
        cx: &mut Context<'_>,
        write: impl Fn(&TcpStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        self.is_flushed.store(false, Ordering::Relaxed);
        loop {
            ready!(self.stream.poll_write_ready(cx))?;
            match write(&self.stream) {
                Err(why) if why.kind() == io::ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }

    /// Records that all bytes have been written to the socket.
    pub(super) fn flush(&self) {
        self.is_flushed.store(true, Ordering::Relaxed);
    }

    /// Records that the client may still send a body that is not read.
    pub(super) fn leave_unread(&self) {
        self.has_unread.store(true, Ordering::Relaxed);
    }

    pub(super) fn has_unread(&self) -> bool {
        self.has_unread.load(Ordering::Relaxed)
    }

    /// Waits until the client has closed its sending side, even if some of its bytes are unread.
    pub(super) async fn silence(&self) {
        // This interest is satisfied by the end alone, not by bytes: none are sent as urgent.
        _ = self.stream.ready(Interest::PRIORITY).await;
    }

    /// Waits until the connection has failed.
    pub(super) async fn failure(&self) {
        _ = self.stream.ready(Interest::ERROR).await;
    }

    /// Waits until the client of a request has left. No byte of the answer may have been sent.
    ///
    /// Sends `100 Continue` to a silent client of HTTP/1.1 to test the connection. A client of
    /// HTTP/1.0 counts as having left once it is silent.
    pub(super) async fn leaving(&self, version: Version) {
        self.silence().await;
        sleep(ASK).await;
        if version < Version::HTTP_11 {
            return;
        }

        // Else bytes of the answer before are on their way, which ask the client as well.
        if self.is_flushed.load(Ordering::Relaxed)
            && self
                .stream
                .try_write(CONTINUE)
                .is_ok_and(|written| written < CONTINUE.len())
        {
            return;
        }
        self.failure().await;
    }
}
