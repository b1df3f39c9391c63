//! Runs a handshake over a stream.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{Handshake, Refusal};

/// Time limit for an end of another version to read the last reply and close the connection.
const FAREWELL: Duration = Duration::from_secs(1);

/// Runs a handshake to its end over a TCP stream. Reads no byte beyond it. Has no deadline. Not
/// cancel safe: a cancelled handshake leaves the connection unusable.
///
/// # Errors
///
/// If the connection fails or ends. The inner error is a refusal of the other end.
pub async fn shake_hands(
    stream: &mut TcpStream,
    handshake: &mut Handshake,
) -> io::Result<Result<(), Refusal>> {
    let mut bytes = [0; 128];
    loop {
        stream.write_all(&handshake.say()).await?;
        let wants = handshake.wants().min(bytes.len());
        if wants == 0 {
            return Ok(Ok(()));
        }

        let count = stream.read(&mut bytes[..wants]).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Err(refusal) = handshake.take(&bytes[..count]) {
            let last = handshake.say();
            if !last.is_empty() {
                let _ = timeout(FAREWELL, say_goodbye(stream, &last)).await;
            }
            return Ok(Err(refusal));
        }
    }
}

/// Sends the last bytes, then reads until the other end closes. Closing while unread bytes are left
/// could destroy the bytes that were sent.
async fn say_goodbye(stream: &mut TcpStream, last: &[u8]) -> io::Result<()> {
    stream.write_all(last).await?;
    stream.shutdown().await?;
    while stream.read(&mut [0; 64]).await? > 0 {}
    Ok(())
}
