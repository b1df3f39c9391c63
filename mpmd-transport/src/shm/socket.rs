//! Sockets by which processes of one host connect and exchange descriptors. They carry packets,
//! each with a few descriptors at most.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, Shutdown, SocketAddrUnix, SocketFlags,
    SocketType, UCred, accept_with, bind, connect, listen, recvmsg, sendmsg, shutdown, socket_with,
    sockopt,
};

/// Limit on the descriptors in one packet.
const MOST_DESCRIPTORS: usize = 2;
/// Limit on the bytes in one packet.
pub(super) const MOST_BYTES: usize = 128;
/// Limit on the connections that wait to be accepted. No host runs so many processes.
const BACKLOG: i32 = 4096;
/// Pause between two attempts to connect to a listener whose queue of connections is full.
const FULL: Duration = Duration::from_millis(1);

/// One end of a connection between two processes of a host. Only methods with a deadline block.
#[derive(Debug)]
pub(super) struct Socket(OwnedFd);

/// A listening socket with a name in the abstract namespace. The name vanishes when the listener is
/// closed, and leaves no file behind.
#[derive(Debug)]
pub(super) struct LocalListener(OwnedFd);

/// A received packet.
pub(super) struct Packet {
    pub(super) bytes: Vec<u8>,
    pub(super) descriptors: Vec<OwnedFd>,
}

impl LocalListener {
    pub(super) fn bind(name: &[u8]) -> io::Result<Self> {
        let socket = new_socket()?;
        bind(&socket, &SocketAddrUnix::new_abstract_name(name)?)?;
        listen(&socket, BACKLOG)?;
        Ok(Self(socket))
    }

    /// Returns the next connection, or `None` if none waits. Does not block.
    pub(super) fn accept(&self) -> io::Result<Option<Socket>> {
        loop {
            match accept_with(&self.0, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(socket) => return Ok(Some(Socket(socket))),
                Err(Errno::AGAIN) => return Ok(None),
                // The other end gave up meanwhile.
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

impl AsFd for LocalListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Socket {
    /// Connects to the listener with this name. While the listener's queue is full, retries until
    /// `deadline`; any other error is returned at once.
    pub(super) fn connect(name: &[u8], deadline: Instant) -> io::Result<Self> {
        let socket = new_socket()?;
        let name = SocketAddrUnix::new_abstract_name(name)?;
        loop {
            match connect(&socket, &name) {
                Ok(()) => return Ok(Self(socket)),
                Err(Errno::INTR) => {}
                // No event tells when the queue has room.
                Err(Errno::AGAIN) if Instant::now() < deadline => std::thread::sleep(FULL),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Creates two connected sockets.
    #[cfg(test)]
    pub(super) fn pair() -> io::Result<[Self; 2]> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (one, other) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        Ok([Self(one), Self(other)])
    }

    /// Returns the user id and the process id of the other end, as the kernel reports them.
    pub(super) fn peer(&self) -> io::Result<UCred> {
        Ok(sockopt::socket_peercred(&self.0)?)
    }

    /// Sends a packet with descriptors. Returns false, and sends nothing, if the socket has no
    /// space now.
    pub(super) fn send(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<bool> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::Error::other("too many descriptors for a packet"));
        }

        loop {
            return match sendmsg(
                &self.0,
                &[IoSlice::new(bytes)],
                &mut control,
                SendFlags::NOSIGNAL,
            ) {
                Ok(_) => Ok(true),
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => Ok(false),
                Err(Errno::INTR) => continue,
                Err(error) => Err(error.into()),
            };
        }
    }

    /// Returns the next packet, or `None` if none has arrived. Fails with `UnexpectedEof` if the
    /// other end has closed.
    pub(super) fn receive(&self) -> io::Result<Option<Packet>> {
        let mut bytes = [0; MOST_BYTES];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);

        let mut was_reset = false;
        let received = loop {
            match recvmsg(
                &self.0,
                &mut [IoSliceMut::new(&mut bytes)],
                &mut control,
                RecvFlags::CMSG_CLOEXEC,
            ) {
                Ok(received) => break received,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                // Reported once if the other end closed before it had read everything. Its own
                // packets are still here.
                Err(Errno::CONNRESET) if !was_reset => was_reset = true,
                Err(error) => return Err(error.into()),
            }
        };

        let mut descriptors = Vec::new();
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(given) = message {
                descriptors.extend(given);
            }
        }

        if received.bytes == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if received.flags.contains(ReturnFlags::TRUNC) {
            return Err(io::Error::other("a packet is too long"));
        }
        if received.flags.contains(ReturnFlags::CTRUNC) {
            return Err(io::Error::other(
                "descriptors that came with a packet are lost: there are too many, or this \
                 process may not have more (RLIMIT_NOFILE)",
            ));
        }

        Ok(Some(Packet {
            bytes: bytes[..received.bytes].to_vec(),
            descriptors,
        }))
    }

    /// Blocks until a packet arrives, and returns it. Fails with `TimedOut` at `deadline`, and with
    /// `UnexpectedEof` if the other end has closed.
    pub(super) fn receive_until(&self, deadline: Instant) -> io::Result<Packet> {
        loop {
            if let Some(packet) = self.receive()? {
                return Ok(packet);
            }
            if !wait(&[self.0.as_fd()], PollFlags::IN, deadline)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
    }

    /// Sends a packet, and blocks while the socket has no space. Fails with `TimedOut` at
    /// `deadline`.
    pub(super) fn send_until(
        &self,
        bytes: &[u8],
        descriptors: &[BorrowedFd<'_>],
        deadline: Instant,
    ) -> io::Result<()> {
        while !self.send(bytes, descriptors)? {
            if !wait(&[self.0.as_fd()], PollFlags::OUT, deadline)? {
                return Err(io::ErrorKind::TimedOut.into());
            }
        }
        Ok(())
    }

    /// Closes the connection for both ends. Packets that were sent before can still be received.
    pub(super) fn close(&self) {
        // Fails if the other end closed first.
        let _ = shutdown(&self.0, Shutdown::Both);
    }
}

#[cfg(test)]
impl Socket {
    /// Connects to a listener from another process, which has ended when this function returns.
    pub(super) fn connected_by_the_dead(name: &[u8]) -> io::Result<Self> {
        use std::os::unix::process::CommandExt;
        use std::process::Command;

        let (socket, name) = (new_socket()?, SocketAddrUnix::new_abstract_name(name)?);
        let inherited = socket.try_clone()?;
        let mut process = Command::new("true");
        // SAFETY: between fork and exec the closure makes one system call, on values created
        // before.
        unsafe { process.pre_exec(move || Ok(connect(&inherited, &name)?)) };
        process.status()?;
        Ok(Self(socket))
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        flags,
        None,
    )?)
}

/// Blocks until one of the descriptors `fds` is readable, and returns true. Returns false at
/// `deadline`.
pub(super) fn something_comes(fds: &[BorrowedFd<'_>], deadline: Instant) -> io::Result<bool> {
    wait(fds, PollFlags::IN, deadline)
}

/// Blocks until one of the descriptors `fds` has one of the events `what`, and returns true.
/// Returns false at `deadline`.
fn wait(fds: &[BorrowedFd<'_>], what: PollFlags, deadline: Instant) -> io::Result<bool> {
    let mut looks: Vec<_> = fds
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(*fd, what))
        .collect();
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        match poll(&mut looks, Some(&timespec(left))) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::INTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns true for each descriptor whose connection is closed or whose process has exited. Does
/// not wait.
pub(super) fn ended(descriptors: &[BorrowedFd<'_>]) -> io::Result<Vec<bool>> {
    let mut looks: Vec<_> = descriptors
        .iter()
        .map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN | PollFlags::RDHUP))
        .collect();

    match poll(&mut looks, Some(&timespec(Duration::ZERO))) {
        Ok(_) => {}
        Err(Errno::INTR) => return Ok(vec![false; descriptors.len()]),
        Err(error) => return Err(error.into()),
    }

    let over = PollFlags::HUP | PollFlags::RDHUP | PollFlags::ERR;
    Ok(looks
        .iter()
        .map(|look| look.revents().intersects(over))
        .collect())
}

/// Returns true if the process of a pidfd has exited. Only an exit proves that the process no
/// longer reads any memory.
pub(super) fn has_exited(pidfd: BorrowedFd<'_>) -> bool {
    let mut look = [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)];
    matches!(poll(&mut look, Some(&timespec(Duration::ZERO))), Ok(count) if count > 0)
        && look[0].revents().contains(PollFlags::IN)
}

fn timespec(duration: Duration) -> Timespec {
    Timespec::try_from(duration).unwrap_or(Timespec {
        tv_sec: i64::MAX,
        tv_nsec: 0,
    })
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(5)
    }

    #[test]
    fn packets_and_descriptors_cross_and_ends_are_seen() {
        let name = format!("mpmd-test-socket-{}", std::process::id());
        let listener = LocalListener::bind(name.as_bytes()).unwrap();
        assert!(listener.accept().unwrap().is_none());
        assert!(!something_comes(&[listener.as_fd()], Instant::now()).unwrap());
        let here = Socket::connect(name.as_bytes(), soon()).unwrap();
        assert!(something_comes(&[listener.as_fd()], soon()).unwrap());
        let there = listener.accept().unwrap().unwrap();
        let user = there.peer().unwrap();
        assert_eq!(
            (user.uid, user.pid),
            (rustix::process::getuid(), rustix::process::getpid())
        );
        assert!(there.receive().unwrap().is_none());
        let file = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        here.send_until(b"take it", &[file.as_fd()], soon())
            .unwrap();
        let packet = there.receive_until(soon()).unwrap();
        assert_eq!(
            (&packet.bytes[..], packet.descriptors.len()),
            (&b"take it"[..], 1)
        );
        assert_eq!(
            ended(&[here.as_fd(), there.as_fd()]).unwrap(),
            [false, false]
        );
        here.send_until(b"the last", &[], soon()).unwrap();
        here.close();
        assert_eq!(ended(&[there.as_fd()]).unwrap(), [true]);
        assert_eq!(there.receive().unwrap().unwrap().bytes, b"the last");
        assert_eq!(
            there.receive().map(drop).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn packets_arrive_after_sender_closed_with_unread_data() {
        let name = format!("mpmd-test-reset-{}", std::process::id());
        let listener = LocalListener::bind(name.as_bytes()).unwrap();
        let here = Socket::connect(name.as_bytes(), soon()).unwrap();
        let there = listener.accept().unwrap().unwrap();
        here.send_until(b"never read", &[], soon()).unwrap();
        there.send_until(b"the last", &[], soon()).unwrap();
        drop(there);
        assert_eq!(here.receive().unwrap().unwrap().bytes, b"the last");
        assert_eq!(
            here.receive().map(drop).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
    }

    #[test]
    fn full_socket_and_deadlines_are_reported() {
        let name = format!("mpmd-test-full-{}", std::process::id());
        let listener = LocalListener::bind(name.as_bytes()).unwrap();
        let here = Socket::connect(name.as_bytes(), soon()).unwrap();
        let _there = listener.accept().unwrap().unwrap();
        let full = (0..1_000_000).any(|_| !here.send(&[7; MOST_BYTES], &[]).unwrap());
        assert!(full);
        let late = here.send_until(b"x", &[], Instant::now()).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
        let late = here.receive_until(Instant::now()).map(drop).unwrap_err();
        assert_eq!(late.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn has_exited_is_true_only_after_exit() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .unwrap();
        let pid = Pid::from_raw(child.id() as i32).unwrap();
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
        assert!(!has_exited(pidfd.as_fd()));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(has_exited(pidfd.as_fd()));
    }
}
