//! Programs that are run for what they say, with a deadline.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::steps::shown;

/// Time between two looks at a program.
const LOOK: Duration = Duration::from_millis(20);

/// What a program has said.
#[derive(Debug)]
pub(super) struct Said {
    /// Its exit code; `None` where a signal ended it.
    pub(super) code: Option<i32>,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Said {
    /// How it ended, with the last line that it wrote to say why.
    pub(super) fn last_words(&self) -> String {
        let words = [&self.stderr, &self.stdout]
            .into_iter()
            .find_map(|text| text.lines().rev().map(str::trim).find(|line| !line.is_empty()));
        let code = self.code.map_or_else(|| "a signal".to_owned(), |code| format!("status {code}"));
        format!("ended with {code}: {}", words.unwrap_or("without a word"))
    }
}

/// Runs a command to its end, shows what it writes for errors, and returns all it says.
///
/// # Errors
///
/// Fails where it cannot be started, or takes longer than `limit`; then it is ended.
pub(super) fn captured(command: &mut Command, limit: Duration) -> anyhow::Result<Said> {
    let line = shown(command);
    println!("   $ {line}");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("`{line}` cannot be started"))?;
    let (stdout, stderr) = (reader(child.stdout.take()), reader(child.stderr.take()));
    let until = Instant::now() + limit;
    let status = loop {
        if let Some(status) = child.try_wait().with_context(|| format!("waiting for `{line}`"))? {
            break status;
        }
        if Instant::now() > until {
            end(&mut child);
            bail!("`{line}` takes longer than {} s", limit.as_secs_f64());
        }
        std::thread::sleep(LOOK);
    };
    let text = |reader: JoinHandle<String>| reader.join().unwrap_or_default();
    let said = Said { code: status.code(), stdout: text(stdout), stderr: text(stderr) };
    eprint!("{}", said.stderr);
    Ok(said)
}

/// All that comes, as it comes, so that the writer never waits.
fn reader(from: Option<impl Read + Send + 'static>) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(mut from) = from {
            // What came before it broke off is all that there is.
            let _ = from.read_to_end(&mut bytes);
        }
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// Ends it and what it has started: who watches another program does not take that along.
fn end(child: &mut Child) {
    let all = descendants(child.id());
    let _ = child.kill();
    let _ = child.wait();
    if !all.is_empty() {
        // Those that have ended meanwhile are no failure.
        let _ = Command::new("kill").arg("-KILL").args(all.iter().map(u32::to_string)).status();
    }
}

/// The processes that this one has started, and they in turn.
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
    fn what_a_program_says_comes_back_with_its_status() {
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
    fn who_takes_too_long_is_ended_and_who_is_not_there_named() {
        let late =
            captured(Command::new("sleep").arg("60"), Duration::from_millis(50)).unwrap_err();
        assert!(late.to_string().contains("`sleep 60` takes longer than 0.05 s"), "{late}");
        // And what it has started: there is no such process, or nobody has asked yet how it ended.
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
        let missing = captured(&mut Command::new("no-such-program-anywhere"), LONG).unwrap_err();
        assert!(missing.to_string().contains("cannot be started"), "{missing}");
    }

    const LONG: Duration = Duration::from_secs(60);
}
