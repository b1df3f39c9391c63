//! A connection with a time limit for a peer that does not read.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep, sleep};

/// A connection that fails once its peer has taken no byte for a while, although there are some.
pub(super) struct Paced {
    stream: TcpStream,
    longest: Duration,
    /// The end of the wait for the peer.
    end: Pin<Box<Sleep>>,
    waits: bool,
}

impl Paced {
    pub(super) fn new(stream: TcpStream, longest: Duration) -> Self {
        Self { stream, longest, end: Box::pin(sleep(longest)), waits: false }
    }

    /// Returns the result of a write, or an error once the wait has been too long.
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
            self.end.as_mut().reset(Instant::now() + self.longest);
        }
        ready!(self.end.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")))
    }
}

impl AsyncRead for Paced {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        to: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, to)
    }
}

impl AsyncWrite for Paced {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[u8],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(cx, from);
        self.pace(result, cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        from: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(cx, from);
        self.pace(result, cx)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn only_a_reader_that_takes_no_byte_is_too_slow() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (mut client, server) = (client.unwrap(), accepted.unwrap().0);
        let mut paced = Paced::new(server, Duration::from_millis(300));
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
