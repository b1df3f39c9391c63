//! Tests with two processes if processes of this machine may read each other's memory.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use mpmd_transport::probe;
use rustix::process::{PTracer, set_ptracer};
use serde::Serialize;

/// The hidden subcommand by which `doctor` starts this program again, as the other process.
pub(crate) const READ_MEMORY: &str = "__read-memory";

/// The time limit for the other process.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// The result of an attempt to read another process's memory.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Attempt {
    /// The bytes were read.
    Read,
    /// The kernel refused, with this error.
    Refused(String),
    /// It could not be tried.
    Untried(String),
}

/// The attempts in both directions between a process and its child.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub(super) struct Both {
    /// The parent reads the child's memory. Yama's scope 1 always allows that.
    pub(super) child: Attempt,
    /// The child reads the parent's memory. Processes of one launcher depend on this permission.
    pub(super) parent: Attempt,
}

impl Both {
    /// Tries both directions. Blocks for up to 10 seconds.
    pub(super) fn attempt() -> Self {
        match attempt() {
            Ok(both) => both,
            Err(error) => {
                let untried = Attempt::Untried(format!("{error:#}"));
                Self { child: untried.clone(), parent: untried }
            }
        }
    }
}

fn attempt() -> Result<Both> {
    let mark = Mark::new();
    let this = std::env::current_exe().context("finding this program")?;
    let child = Command::new(this)
        .args([READ_MEMORY, &std::process::id().to_string(), &mark.address().to_string()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .context("starting this program again")?;
    let mut other = Other(child);
    let stdout = other.0.stdout.take().context("the other process has no output")?;
    let said = line(stdout)?;
    let (address, how) =
        said.trim_end().split_once(' ').context("the other process says nothing")?;
    let address = address.parse().context("the other process says no address")?;
    let parent = if how == "read" { Attempt::Read } else { Attempt::Refused(how.to_owned()) };
    Ok(Both { child: read(other.0.id(), address), parent })
}

/// Does the work of the other process: reads the parent's mark, and prints the result and its own
/// mark's address. Then waits until the parent closes its standard input.
pub(crate) fn answer_reader(pid: u32, address: u64) -> Result<ExitCode> {
    let mark = Mark::new();
    let how = match read(pid, address) {
        Attempt::Read => "read".to_owned(),
        Attempt::Refused(why) | Attempt::Untried(why) => why,
    };
    let mut out = std::io::stdout();
    writeln!(out, "{} {how}", mark.address()).and_then(|()| out.flush()).context("answering")?;
    std::io::stdin().read_to_end(&mut Vec::new()).context("waiting for the starter")?;
    Ok(ExitCode::SUCCESS)
}

/// Bytes that are unique to this process and that another process may read.
struct Mark(Box<[u8]>);

impl Mark {
    fn new() -> Self {
        // As UCX does at Yama's scope 1. Without Yama this fails, and is not needed.
        let _ = set_ptracer(PTracer::Any);
        Self(Self::of(std::process::id()))
    }

    fn of(pid: u32) -> Box<[u8]> {
        format!("mpmd doctor was here as process {pid:010}").into_bytes().into()
    }

    fn address(&self) -> u64 {
        self.0.as_ptr().expose_provenance() as u64
    }
}

fn read(pid: u32, address: u64) -> Attempt {
    let expected = Mark::of(pid);
    let mut bytes = vec![0; expected.len()];
    match probe::read_memory_of(pid, address, &mut bytes) {
        Ok(_) if *bytes == *expected => Attempt::Read,
        Ok(_) => Attempt::Refused("other bytes came than are there".to_owned()),
        Err(error) => Attempt::Refused(error.to_string()),
    }
}

/// Returns the first line of the other process's output.
fn line(stdout: ChildStdout) -> Result<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line).map(|_| line);
        // The receiver is gone if the time limit has passed.
        let _ = sender.send(read);
    });
    let read = receiver.recv_timeout(TIME_LIMIT).context("the other process does not answer")?;
    read.context("reading the other process's answer")
}

/// The child process. It is killed when dropped.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
