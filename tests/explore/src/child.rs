//! Worker processes, as the main process sees them.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use anyhow::Context as _;

use crate::Arguments;
use crate::worker::Line;

/// Time limit for a job, in real time. A job that exceeds it is in an endless loop.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs a worker until it ends, until a job takes longer than `LIMIT`, or until `on_line` returns
/// false. If its last job crashed it or ran too long, returns the reason with the worker's error
/// output, else `None`.
pub(crate) fn run_worker(
    arguments: &Arguments,
    core: usize,
    mut on_line: impl FnMut(Line) -> bool,
) -> anyhow::Result<Option<String>> {
    let mut child = Worker::start(arguments, core)?;
    let (lines, received) = channel();
    let stdout = BufReader::new(child.0.stdout.take().context("a pipe")?);
    let mut stderr = child.0.stderr.take().context("a pipe")?;
    let reader = std::thread::spawn(move || {
        let lines = |text: String| Line::parse(&text).is_none_or(|line| lines.send(line).is_ok());
        stdout.lines().map_while(Result::ok).all(lines)
    });
    let errors = std::thread::spawn(move || {
        let mut text = String::new();
        stderr.read_to_string(&mut text).map(|_| text)
    });
    let mut is_done = true;
    let why = loop {
        match received.recv_timeout(LIMIT) {
            Ok(line) => {
                is_done = !matches!(line, Line::Start(_));
                if !on_line(line) {
                    break None;
                }
            }
            Err(RecvTimeoutError::Timeout) => break Some(format!("it ran for {LIMIT:?}")),
            Err(RecvTimeoutError::Disconnected) => {
                let status = child.0.wait()?;
                break (!is_done || !status.success()).then(|| status.to_string());
            }
        }
    };
    drop(child);
    _ = reader.join();
    let errors = errors.join().ok().and_then(Result::ok).unwrap_or_default();
    Ok(why.map(|why| format!("{why}\n{}", errors.trim_end())))
}

/// A worker process. Dropping this kills it.
struct Worker(Child);

impl Worker {
    fn start(arguments: &Arguments, core: usize) -> anyhow::Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        let joined = |numbers: &[usize]| {
            numbers
                .iter()
                .map(usize::to_string)
                .collect::<Vec<_>>()
                .join(",")
        };
        command.arg(format!("--worker={core}"));
        command.arg(format!("--from={}", arguments.from));
        command.arg(format!("--seeds={}", arguments.seeds));
        for (name, is_set) in [
            ("--twice", arguments.twice),
            ("--recovery", arguments.recovery),
            ("--elastic", arguments.elastic),
        ] {
            if is_set {
                command.arg(name);
            }
        }
        if let Some(file) = &arguments.log {
            command.arg("--log").arg(file);
        }
        for (name, numbers) in [
            ("without", &arguments.without),
            ("without-faults", &arguments.without_faults),
        ] {
            if !numbers.is_empty() {
                command.arg(format!("--{name}={}", joined(numbers)));
            }
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        Ok(Self(command.spawn().context("cannot start a worker")?))
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        _ = self.0.kill();
        _ = self.0.wait();
    }
}
