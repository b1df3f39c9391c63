//! Whether processes of this machine may read each other's memory: two of them try.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::process::{Child, ChildStdout, Command, ExitCode, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use anyhow::{Context as _, Result};
use mpmd_core::transports::probe;
use rustix::process::{PTracer, set_ptracer};
use serde::Serialize;

/// The name by which `doctor` starts this program again, to be read and to read.
pub(crate) const READ_MEMORY: &str = "__read-memory";

/// How long the other process may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// How reading another's memory went.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Attempt {
    /// The bytes came.
    Read,
    /// The kernel refused, with this error.
    Refused(String),
    /// It could not be tried.
    Untried(String),
}

/// Both ways between a process and one that it started.
#[derive(Clone, Debug, Eq, PartialEq, Serialize)]
pub(super) struct Both {
    /// The starter reads. Yama's scope 1 always allows that.
    pub(super) child: Attempt,
    /// The started one reads, as processes of a job that one launcher started would.
    pub(super) parent: Attempt,
}

impl Both {
    /// Tries both ways.
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

/// The work of the other process: reads the starter's mark, says how that went and where its own
/// is, and stays until the starter has read it or is gone.
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

/// Bytes that only this process has, where another may read them.
struct Mark(Box<[u8]>);

impl Mark {
    fn new() -> Self {
        // As UCX does at Yama's scope 1; where there is no Yama it is an error and not needed.
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

/// The first line of what the other process says.
fn line(stdout: ChildStdout) -> Result<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line).map(|_| line);
        // Nobody listens where it took too long.
        let _ = sender.send(read);
    });
    let read = receiver.recv_timeout(PATIENCE).context("the other process does not answer")?;
    read.context("reading what the other process says")
}

/// The process that was started; ended when dropped.
struct Other(Child);

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
