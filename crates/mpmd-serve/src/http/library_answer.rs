//! The answers that the HTTP library gives by itself, in the form of all other errors.
//!
//! The library answers a head that it cannot parse before any endpoint sees it, with a status and
//! no body. It can be told from other answers when it is written, since no request is open then.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::http::StatusCode;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::failure::HttpFailure;
use super::idle_connections::ConnectionUse;
use super::origins::AllowedOrigins;
use super::paced_connection::PacedConnection;
use super::peer_socket::PeerSocket;
use crate::queue::RequestQueue;

/// Largest number of headers in a request.
pub(super) const MOST_HEADERS: usize = 64;
/// Largest size of a request's head, in bytes.
pub(super) const HEAD_BYTES: usize = 32 << 10;

/// A connection that gives the library's own answers a body in JSON, and counts them.
pub(super) struct LibraryAnswers {
    connection: PacedConnection,
    peer: Arc<PeerSocket>,
    connection_use: Arc<ConnectionUse>,
    /// Counts the answers.
    queue: RequestQueue,
    /// The origins whose pages may read the answers.
    origins: Arc<AllowedOrigins>,
    /// Bytes of an answer in place of the library's that are not yet written.
    unwritten: Vec<u8>,
}

impl LibraryAnswers {
    pub(super) fn new(
        connection: PacedConnection,
        peer: Arc<PeerSocket>,
        connection_use: Arc<ConnectionUse>,
        queue: RequestQueue,
        origins: Arc<AllowedOrigins>,
    ) -> Self {
        Self {
            connection,
            peer,
            connection_use,
            queue,
            origins,
            unwritten: Vec::new(),
        }
    }

    /// Returns the error in place of an answer of the library, which begins with `head`. `None` for
    /// bytes of the endpoints' answers.
    fn replacement(&self, head: &[u8]) -> Option<HttpFailure> {
        if self.connection_use.has_unflushed() {
            return None;
        }
        // Behind `HTTP/1.1 `.
        let status = StatusCode::from_bytes(head.get(9..12)?).ok()?;
        let why = match status {
            StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE | StatusCode::URI_TOO_LONG => format!(
                "expected a path and at most {MOST_HEADERS} headers of {HEAD_BYTES} bytes together"
            ),
            _ => "expected a valid head of a request of HTTP/1.1".to_owned(),
        };
        Some(HttpFailure::new(status, why))
    }

    /// Writes the rest of an answer in place of the library's.
    fn poll_unwritten(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.unwritten.is_empty() {
            let connection = Pin::new(&mut self.connection);
            let written = ready!(connection.poll_write(cx, &self.unwritten))?;
            self.unwritten.drain(..written);
        }
        Poll::Ready(Ok(()))
    }
}

/// Returns the bytes of an error's answer, after which the connection ends.
fn answer_bytes(failure: &HttpFailure, origins: &AllowedOrigins) -> Vec<u8> {
    let status = failure.status_code();
    let body = failure.body().to_string();
    let reason = status.canonical_reason().unwrap_or_default();
    let origin = origins.of_unreadable();
    let origin = origin.map_or_else(String::new, |(name, origin)| {
        format!("{name}: {origin}\r\n")
    });
    let head = format!(
        "HTTP/1.1 {} {reason}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\
         {origin}connection: close\r\n\r\n",
        status.as_u16(),
        body.len()
    );
    (head + &body).into_bytes()
}

impl AsyncRead for LibraryAnswers {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_read(cx, to)
    }
}

impl AsyncWrite for LibraryAnswers {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[io::IoSlice::new(from)])
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        ready!(this.poll_unwritten(cx))?;
        let head = from.iter().find(|bytes| !bytes.is_empty());
        let Some(failure) = head.and_then(|head| this.replacement(head)) else {
            return Pin::new(&mut this.connection).poll_write_vectored(cx, from);
        };

        this.queue.count_answer(failure.status_code());
        this.unwritten = answer_bytes(&failure, &this.origins);
        // The rest of the client's bytes is dropped, so that it gets the answer.
        this.peer.leave_unread();
        Poll::Ready(Ok(from.iter().map(|bytes| bytes.len()).sum()))
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        ready!(this.poll_unwritten(cx))?;
        ready!(Pin::new(&mut this.connection).poll_flush(cx))?;
        this.connection_use.flush();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        ready!(this.poll_unwritten(cx))?;
        Pin::new(&mut this.connection).poll_shutdown(cx)
    }
}
