//! A connection with a time limit for a peer that does not read.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use rustix::net::{Shutdown, shutdown};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use super::peer_socket::PeerSocket;

/// Longest time for which bytes of a refused body are read and dropped. Closing a connection with
/// unread bytes resets it, and the client may lose the error reply.
const LINGER: Duration = Duration::from_secs(1);

/// A connection that fails if bytes wait to be written and the peer takes none for some time.
pub(super) struct PacedConnection {
    peer: Arc<PeerSocket>,
    longest: Duration,
    /// Timer for the end of the current wait for the peer.
    end: Pin<Box<Sleep>>,
    waits: bool,
    is_shut: bool,
}

impl PacedConnection {
    pub(super) fn new(peer: Arc<PeerSocket>, longest: Duration) -> Self {
        Self {
            peer,
            longest,
            end: Box::pin(sleep(longest)),
            waits: false,
            is_shut: false,
        }
    }

    /// Returns the result of a write, or an error if the peer has taken no byte for too long.
    fn pace<T>(
        &mut self,
        result: Poll<io::Result<T>>,
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if result.is_ready() {
            self.waits = false;
            return result;
        }
        if !std::mem::replace(&mut self.waits, true) {
            self.end.set(sleep(self.longest));
        }
        ready!(self.end.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client does not read",
        )))
    }
}

impl AsyncRead for PacedConnection {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.peer.poll_read(cx, to)
    }
}

impl AsyncWrite for PacedConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = self.peer.poll_write(cx, |stream| stream.try_write(from));
        self.pace(result, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = self
            .peer
            .poll_write(cx, |stream| stream.try_write_vectored(from));
        self.pace(result, cx)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        // The system has all that was written.
        self.peer.flush();
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if !std::mem::replace(&mut this.is_shut, true) {
            shutdown(&this.peer.stream, Shutdown::Write)?;
            this.end.as_mut().reset(Instant::now() + LINGER);
        }
        if !this.peer.has_unread() {
            return Poll::Ready(Ok(()));
        }

        let mut dropped = [0; 4096];
        while this.end.as_mut().poll(cx).is_pending() {
            let mut dropped = ReadBuf::new(&mut dropped);
            ready!(this.peer.poll_read(cx, &mut dropped))?;
            if dropped.filled().is_empty() {
                break;
            }
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;

    #[tokio::test]
    async fn only_a_reader_that_takes_no_byte_is_too_slow() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (mut client, server) = (client.unwrap(), accepted.unwrap().0);
        let peer = Arc::new(PeerSocket::new(server));
        let mut paced = PacedConnection::new(peer, Duration::from_secs(3));
        let bytes = vec![7; 1 << 24];
        let mut taken = vec![0; 1 << 24];
        let (written, read) = tokio::join!(paced.write_all(&bytes), client.read_exact(&mut taken));
        assert!(written.is_ok() && read.is_ok());
        let written = paced.write_all(&bytes);
        let written = tokio::time::timeout(Duration::from_secs(60), written).await;
        let error = written.expect("the write ends").unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
