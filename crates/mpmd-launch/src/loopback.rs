//! The test whether this host reaches itself over TCP, as processes of a job have to.

use std::io::{self, Read as _, Write as _};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

/// Time limit for the connection, and for reading one byte from it.
const PATIENCE: Duration = Duration::from_secs(5);

/// Sends a byte over TCP from this host to itself at 127.0.0.1, and receives it. Blocks for at most
/// ten seconds.
///
/// # Errors
///
/// The error of the system, as on a host whose loopback interface is down.
#[doc(hidden)]
pub fn reach_loopback() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut there = TcpStream::connect_timeout(&listener.local_addr()?, PATIENCE)?;
    // The connection is established, so `accept` does not block.
    let (mut here, _) = listener.accept()?;

    here.set_read_timeout(Some(PATIENCE))?;
    there.write_all(&[1])?;
    here.read_exact(&mut [0])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_host_reaches_itself() {
        reach_loopback().expect("a host reaches itself");
    }
}
