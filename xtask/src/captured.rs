//! Runs programs with a deadline and captures their output.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::commands::shown;

/// Time between two checks of a program.
const LOOK: Duration = Duration::from_millis(20);

/// The output of a program that has ended.
#[derive(Debug)]
pub(crate) struct Said {
    /// The exit code of the program; `None` if a signal ended it.
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Said {
    /// Returns the first line that the program wrote to its standard error.
    pub(crate) fn first_words(&self) -> &str {
        self.stderr.lines().next().unwrap_or("without a word")
    }

    /// Returns the exit code of the program and the last line that it wrote, as a text.
    pub(crate) fn last_words(&self) -> String {
        let words = [&self.stderr, &self.stdout]
            .into_iter()
            .find_map(|text| text.lines().rev().map(str::trim).find(|line| !line.is_empty()));
        let code = self.code.map_or_else(|| "a signal".to_owned(), |code| format!("status {code}"));
        format!("ended with {code}: {}", words.unwrap_or("without a word"))
    }
}

/// Prints a command, runs it to its end, prints its standard error, and returns its output.
///
/// # Errors
///
/// If it cannot be started, or takes longer than `limit`; then it is killed.
pub(crate) fn captured(command: &mut Command, limit: Duration) -> anyhow::Result<Said> {
    println!("   $ {}", shown(command));
    let said = quiet(command, limit, &AtomicBool::new(false))?;
    eprint!("{}", said.stderr);
    Ok(said)
}

/// Runs a command to its end and returns its output. Prints nothing.
///
/// # Errors
///
/// If it cannot be started, takes longer than `limit`, or `stop` becomes true. In the last two
/// cases it is killed together with the processes that it has started.
pub(crate) fn quiet(
    command: &mut Command,
    limit: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<Said> {
    finished(command.stderr(Stdio::piped()), limit, stop)
}

/// Like [`quiet`], but the program's standard error is this program's.
pub(crate) fn watched(
    command: &mut Command,
    limit: Duration,
    stop: &AtomicBool,
) -> anyhow::Result<Said> {
    finished(command.stderr(Stdio::inherit()), limit, stop)
}

fn finished(command: &mut Command, limit: Duration, stop: &AtomicBool) -> anyhow::Result<Said> {
    let line = shown(command);
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("`{line}` cannot be started"))?;
    let (stdout, stderr) = (reader(child.stdout.take()), reader(child.stderr.take()));
    let until = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("waiting for `{line}`"))? {
            break status;
        }
        if stop.load(Ordering::Relaxed) {
            end(&mut child);
            bail!("`{line}` was interrupted");
        }
        if Instant::now() > until {
            end(&mut child);
            bail!("`{line}` takes longer than {} s", limit.as_secs_f64());
        }
        std::thread::sleep(LOOK);
    };
    let text = |reader: JoinHandle<String>| reader.join().unwrap_or_default();
    Ok(Said { code: status.code(), stdout: text(stdout), stderr: text(stderr) })
}

/// Reads all of a program's output on a thread, so that the program never waits. The thread ends
/// with the output and returns it.
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

/// Kills the program and all processes that it has started. A killed parent does not take its
/// children along.
fn end(child: &mut Child) {
    let all = descendants(child.id());
    let _ = child.kill();
    let _ = child.wait();
    if !all.is_empty() {
        // Some may have ended meanwhile; that is no failure.
        let _ = Command::new("kill").arg("-KILL").args(all.iter().map(u32::to_string)).status();
    }
}

/// Returns the pids of all descendants of a process.
fn descendants(process: u32) -> Vec<u32> {
    let children = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children"));
    let children = children.unwrap_or_default();
    let children = children.split_whitespace().filter_map(|number| number.parse().ok());
    children.flat_map(|child| std::iter::once(child).chain(descendants(child))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_and_status_are_returned() {
        let said =
            captured(Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"]), LONG)
                .unwrap();
        assert_eq!(
            (said.code, said.stdout.as_str(), said.stderr.as_str()),
            (Some(3), "one\n", "two\n")
        );
        assert_eq!(said.last_words(), "ended with status 3: two");
        let silent = captured(&mut Command::new("true"), LONG).unwrap();
        assert_eq!(silent.last_words(), "ended with status 0: without a word");
    }

    #[test]
    fn slow_program_is_killed_and_missing_one_is_named() {
        let late =
            captured(Command::new("sleep").arg("60"), Duration::from_millis(50)).unwrap_err();
        assert!(late.to_string().contains("`sleep 60` takes longer than 0.05 s"), "{late}");
        // Its children end too: they are gone, or zombies that nobody has waited for.
        let file = std::env::temp_dir().join(format!("mpmd-xtask-{}", std::process::id()));
        let shell = format!("sleep 61 & echo $! > {}; wait", file.display());
        captured(Command::new("sh").args(["-c", &shell]), Duration::from_secs(1)).unwrap_err();
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
        let stopped = quiet(Command::new("sleep").arg("62"), LONG, &AtomicBool::new(true));
        assert!(stopped.unwrap_err().to_string().contains("`sleep 62` was interrupted"));
        let missing = captured(&mut Command::new("no-such-program-anywhere"), LONG).unwrap_err();
        assert!(missing.to_string().contains("cannot be started"), "{missing}");
    }

    const LONG: Duration = Duration::from_secs(60);
}
