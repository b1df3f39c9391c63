//! Runs programs with a deadline and captures their output.

use std::io::{self, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::commands::shown;

/// Interval between two looks whether a program has ended.
const LOOK: Duration = Duration::from_millis(20);

/// Time limit for a killed program to end.
const DEAD_WITHIN: Duration = Duration::from_secs(3);

/// The output of a program that has ended.
#[derive(Debug)]
pub(crate) struct ProgramOutput {
    /// The exit code of the program; `None` if a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl ProgramOutput {
    /// Returns the first line that the program wrote to its standard error.
    pub(crate) fn first_words(&self) -> &str {
        self.stderr.lines().next().unwrap_or("without a word")
    }

    /// Returns the exit code of the program and the last line that it wrote, as a text.
    pub(crate) fn last_words(&self) -> String {
        let words = [&self.stderr, &self.stdout].into_iter().find_map(|text| {
            text.lines()
                .rev()
                .map(str::trim)
                .find(|line| !line.is_empty())
        });
        let code = self
            .code
            .map_or_else(|| "a signal".to_owned(), |code| format!("status {code}"));
        format!("ended with {code}: {}", words.unwrap_or("without a word"))
    }
}

/// Runs a command to its end and returns its output. Prints nothing.
///
/// # Errors
///
/// If the command cannot be started, takes longer than `limit`, or `stop` becomes true. In the last
/// two cases it is killed together with the processes that it has started.
pub(crate) fn quiet(
    command: &mut Command,
    limit: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<ProgramOutput> {
    finished(command.stderr(Stdio::piped()), limit, stop)
}

/// Runs a command like [`quiet`], but lets it write to this program's standard error.
pub(crate) fn watched(
    command: &mut Command,
    limit: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<ProgramOutput> {
    finished(command.stderr(Stdio::inherit()), limit, stop)
}

fn finished(
    command: &mut Command,
    limit: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<ProgramOutput> {
    let line = shown(command);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command
        .spawn()
        .with_context(|| format!("`{line}` cannot be started"))?;

    let stdout = reader(child.stdout.take());
    let stderr = reader(child.stderr.take());
    let status = ended(&mut child, Instant::now() + limit, stop);
    let Some(status) = status.with_context(|| format!("waiting for `{line}`"))? else {
        if stop.load(Ordering::Relaxed) {
            bail!("`{line}` was interrupted");
        }
        bail!("`{line}` takes longer than {} s", limit.as_secs_f64());
    };

    let text = |reader: JoinHandle<String>| reader.join().unwrap_or_default();
    Ok(ProgramOutput {
        code: status.code(),
        stdout: text(stdout),
        stderr: text(stderr),
    })
}

/// Waits for a program to end. At the time `until`, or when `stop` becomes true, kills it with the
/// processes that it has started, and returns `None`.
///
/// # Errors
///
/// If the system does not report the program's state.
pub(crate) fn ended(
    child: &mut Child,
    until: Instant,
    stop: &AtomicBool,
) -> io::Result<Option<ExitStatus>> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if stop.load(Ordering::Relaxed) || Instant::now() > until {
            end(child);
            return Ok(None);
        }
        std::thread::sleep(LOOK);
    }
}

/// Starts a thread that reads all of a program's output, so that the program never waits for a
/// reader. The thread returns the output when it ends.
fn reader(from: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            // After a read error, the bytes so far are the output.
            let _ = from.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Kills the program and all processes that it has started, which a killed parent would leave
/// behind.
fn end(child: &mut Child) {
    let all = descendants(child.id());
    let _ = child.kill();
    for process in all {
        // It may have ended meanwhile; that is no failure.
        let _ = kill_process(process, Signal::KILL);
    }
    // A process inside a driver may outlive a kill. Then nothing more can be done about it.
    let until = Instant::now() + DEAD_WITHIN;
    while matches!(child.try_wait(), Ok(None)) && Instant::now() < until {
        std::thread::sleep(LOOK);
    }
}

/// Returns the pids of all descendants of a process.
fn descendants(process: u32) -> Vec<Pid> {
    let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
    let children = children.unwrap_or_default();
    let children = children
        .split_whitespace()
        .filter_map(|number| number.parse().ok());
    let with_own = |child: u32| {
        let pid = i32::try_from(child).ok().and_then(Pid::from_raw);
        pid.into_iter().chain(descendants(child))
    };
    children.flat_map(with_own).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_status_are_returned() {
        let said = run(
            Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"]),
            LONG,
        );
        let said = said.unwrap();
        assert_eq!(
            (said.code, said.stdout.as_str(), said.stderr.as_str()),
            (Some(3), "one\n", "two\n")
        );
        assert_eq!(said.last_words(), "ended with status 3: two");
        let silent = run(&mut Command::new("true"), LONG).unwrap();
        assert_eq!(silent.last_words(), "ended with status 0: without a word");
    }

    #[test]
    fn slow_program_is_killed_and_missing_one_is_named() {
        let late = run(Command::new("sleep").arg("60"), Duration::from_millis(50)).unwrap_err();
        assert!(
            late.to_string()
                .contains("`sleep 60` takes longer than 0.05 s"),
            "{late}"
        );
        // Its children end too: they are gone, or zombies that nobody has waited for.
        let file = std::env::temp_dir().join(format!("mpmd-xtask-{}", std::process::id()));
        let shell = format!("sleep 61 & echo $! > {}; wait", file.display());
        run(
            Command::new("sh").args(["-c", &shell]),
            Duration::from_secs(1),
        )
        .unwrap_err();
        let process = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let until = Instant::now() + LONG;
        let lives = || {
            let state = std::fs::read_to_string(format!("/proc/{}/stat", process.trim())).ok();
            state.is_some_and(|state| !state.contains(") Z "))
        };
        while lives() {
            assert!(Instant::now() < until, "{process} lives on");
            std::thread::sleep(LOOK);
        }
        let stopped = quiet(
            Command::new("sleep").arg("62"),
            LONG,
            &AtomicBool::new(true),
        );
        assert!(
            stopped
                .unwrap_err()
                .to_string()
                .contains("`sleep 62` was interrupted")
        );
        let missing = run(&mut Command::new("no-such-program-anywhere"), LONG).unwrap_err();
        assert!(
            missing.to_string().contains("cannot be started"),
            "{missing}"
        );
    }

    const LONG: Duration = Duration::from_secs(60);

    fn run(command: &mut Command, limit: Duration) -> anyhow::Result<ProgramOutput> {
        quiet(command, limit, &AtomicBool::new(false))
    }
}
