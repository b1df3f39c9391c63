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

/// The time limit for the first line of the other process's output.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// The result of an attempt to read another process's memory.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Attempt {
    /// The bytes were read, and they were right.
    Read,
    /// Reading failed with this error, or gave other bytes.
    Refused(String),
    /// Reading could not be tried, for this reason.
    Untried(String),
}

/// The results of reading memory in both directions between a process and its child.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub(super) struct Both {
    /// The result of the parent that reads the child's memory. Yama's scope 1 always allows that.
    pub(super) child: Attempt,
    /// The result of the child that reads the parent's memory. Processes of one launcher depend on
    /// this permission.
    pub(super) parent: Attempt,
}

impl Both {
    /// Tries both directions. Starts this program again as a child process, and waits up to 10
    /// seconds for its answer.
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

/// Does the work of the child process. Reads the parent's mark at `address`, and prints the address
/// of its own mark and the result. Then blocks until the parent closes this process's standard
/// input.
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

/// Bytes that are unique to this process. Creating them allows other processes to read this one's
/// memory.
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

/// Returns the first line of the other process's output. Waits up to `TIME_LIMIT`, else fails.
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
