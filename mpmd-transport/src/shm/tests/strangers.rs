//! Strangers that connect during the meeting are refused, at a bounded cost.

use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Resource, Rlimit, getrlimit, getuid, setrlimit};

use super::ear::{TIME_LIMIT, config, later};
use crate::shm::address::ShmAddress;
use crate::shm::socket::Socket;
use crate::shm::{OpenedShm, ShmConfig};
use crate::transport::Transport;

/// Connects to the process at address `at` and sends nothing. Returns the socket.
fn silent(at: &str) -> Socket {
    let address: ShmAddress = at.parse().unwrap();
    Socket::connect(&address.socket_name(), Instant::now() + TIME_LIMIT).unwrap()
}

/// Connects to the process at address `at` as another user, and sends nothing. Needs the rights of
/// root.
fn silent_of_another_user(at: &str) -> Socket {
    let at = at.to_owned();
    let thread = later(move || {
        // SAFETY: the system call, unlike the C library's function of that name, changes only this
        // thread. The thread does nothing else with the rights that it still has.
        let result = unsafe { libc::syscall(libc::SYS_setresuid, -1, 65_534, -1) };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        silent(&at)
    });
    thread.join().unwrap()
}

#[test]
fn sockets_of_other_users_are_closed_at_once() {
    if !getuid().is_root() {
        println!("skipped: only root can be another user");
        return;
    }
    let (zero, one) = (OpenedShm::open().unwrap(), OpenedShm::open().unwrap());
    let addresses = [zero.address(), one.address()];
    let of = |process| config(process, &[&addresses[0], &addresses[1]]);
    let stranger = silent_of_another_user(&addresses[0]);
    let (zero_config, one_config) = (of(0), of(1));
    let zero = later(move || zero.connect(&zero_config));
    let ended = stranger
        .receive_until(Instant::now() + 2 * TIME_LIMIT)
        .map(drop)
        .unwrap_err();
    assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
    // The socket was closed at once, not because the meeting had ended.
    let one = one.connect(&one_config).unwrap();
    let zero = zero.join().unwrap().unwrap();
    one.shutdown(TIME_LIMIT);
    zero.shutdown(TIME_LIMIT);
}

const OTHER: &str = "MPMD_TEST_OTHER_PROCESS";
const MARK: &str = "address of the process short of descriptors: ";
/// Number of descriptors that the process may open in addition to those open before the meeting.
const SPARE: u64 = 16;

/// A child process that is killed when this is dropped.
struct Ending(Child);

impl Drop for Ending {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn strangers_with_all_descriptors_block_no_peer() {
    let one = OpenedShm::open().unwrap();
    let own = one.address();
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([
        "--exact",
        "shm::tests::strangers::short_of_descriptors",
        "--ignored",
        "--nocapture",
    ]);
    let piped = command
        .env(OTHER, &own)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = Ending(piped.spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    let address =
        lines.find_map(|line| line.split_once(MARK).map(|(_, address)| address.to_owned()));
    let address = address.expect("the other process says its address");
    let _silent: Vec<Socket> = (0..4 * SPARE).map(|_| silent(&address)).collect();
    let one = one.connect(&config(1, &[&address, &own])).unwrap();
    one.shutdown(TIME_LIMIT);
    let left = lines.count();
    assert!(
        child.0.wait().unwrap().success(),
        "the other process has failed, {left} lines after"
    );
}

#[test]
#[ignore = "half of a pair: the test of strangers that take all descriptors starts it"]
fn short_of_descriptors() {
    let other = std::env::var(OTHER).expect("started by another test");
    let zero = OpenedShm::open().unwrap();
    let own = zero.address();
    let open = std::fs::read_dir("/proc/self/fd").unwrap().count() as u64;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(
        Resource::Nofile,
        Rlimit {
            current: Some(open + SPARE),
            ..limit
        },
    )
    .unwrap();
    println!("{MARK}{own}");
    io::stdout().flush().unwrap();
    let zero = zero.connect(&config(0, &[&own, &other])).unwrap();
    zero.shutdown(TIME_LIMIT);
}

#[test]
fn endless_peer_timeout_does_not_panic() {
    let (zero, one) = (OpenedShm::open().unwrap(), OpenedShm::open().unwrap());
    let addresses = [zero.address(), one.address()];
    let of = |process| ShmConfig {
        peer_timeout: Duration::MAX,
        ..config(process, &[&addresses[0], &addresses[1]])
    };
    let (zero_config, one_config) = (of(0), of(1));
    let zero = later(move || zero.connect(&zero_config).unwrap());
    let one = one.connect(&one_config).unwrap();
    let zero = zero.join().unwrap();
    one.shutdown(Duration::MAX);
    zero.shutdown(Duration::MAX);
}
