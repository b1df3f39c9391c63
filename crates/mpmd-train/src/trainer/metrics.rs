//! The metrics of a training, as lines of JSON in a file.

use std::fs::{File, TryLockError};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use mpmd_base::{open_in_place, open_output};
use mpmd_core::{Error, Recovery, Result};
use serde_json::json;

use super::progress::say;
use super::report::{EvaluationReport, StepReport};

/// Largest length of a line that is read to recognise a file of metrics, in bytes.
const LONGEST_LINE: u64 = 1 << 20;
/// Number of times that a file is opened to get one that still has its name. Only a file system
/// whose files have several numbers needs more.
const MOST_OPENINGS: usize = 16;

/// A file with one line of JSON for each step, evaluation and recovery. A line that cannot be
/// written is skipped, so that the training continues.
pub(super) struct MetricsFile {
    /// Positioned at its end, or opened to append. A regular file is locked.
    file: File,
    path: PathBuf,
    /// True for a pipe, a device, or the process's own output: others write there too.
    is_in_place: bool,
    /// True after a warning about missing lines.
    has_warned: bool,
    /// Seconds of earlier runs, whose lines are in the file.
    before: f64,
}

impl MetricsFile {
    /// Opens the file. If `append` is true, keeps its lines. Otherwise a file with lines gets
    /// another name, since they are those of another training. Appends to a pipe, a device, and the
    /// file of the process's own output.
    ///
    /// Returns an error if another training writes to the file, or if it has something else than
    /// metrics.
    pub(super) fn open(path: &Path, append: bool) -> Result<Self> {
        if let Some(in_place) = Self::in_place(path)? {
            return Ok(in_place);
        }
        let mut file = open_locked(path)?;
        let has_lines = check_content(path)?;
        if has_lines && !append {
            move_away(path).map_err(|error| unwritable(path, &error))?;
            file = open_locked(path)?;
        }
        let text = match append {
            true => std::fs::read_to_string(path).unwrap_or_default(),
            false => String::new(),
        };
        Ok(Self::of(file, path, &text))
    }

    /// Opens a pipe, a device, or the process's own output. Returns `None` for another path.
    fn in_place(path: &Path) -> Result<Option<Self>> {
        let file = open_in_place(path).map_err(|error| unwritable(path, &error))?;
        Ok(file.map(|file| Self {
            is_in_place: true,
            ..Self::of(file, path, "")
        }))
    }

    /// Continues the metrics of `file`, which contains `text`.
    fn of(file: File, path: &Path, text: &str) -> Self {
        Self {
            file,
            path: path.to_owned(),
            is_in_place: false,
            has_warned: false,
            before: last_seconds(text),
        }
    }

    /// Opens the file in a later epoch of a job, which repeats steps from `step` on and evaluations
    /// from `evaluation` on. Keeps the complete lines before those, and the lines of recoveries.
    ///
    /// Replaces a regular file by a new one. A stopped process that still has the old file open
    /// cannot write to the new one, and its lock has no effect.
    pub(super) fn resume(path: &Path, step: u64, evaluation: u64) -> Result<Self> {
        if let Some(in_place) = Self::in_place(path)? {
            return Ok(in_place);
        }
        let refused = |error: &std::io::Error| unwritable(path, error);
        let text = match check_content(path)? {
            true => std::fs::read_to_string(path).map_err(|error| refused(&error))?,
            false => String::new(),
        };
        let is_kept = |line: &&str| {
            let line = line
                .strip_suffix('\n')
                .map(serde_json::from_str::<serde_json::Value>);
            let Some(Ok(line)) = line else { return false };
            if line.get("recovery").is_some() {
                return true;
            }
            let end = if line.get("evaluation").is_some() {
                evaluation
            } else {
                step
            };
            line.get("step")
                .and_then(|step| step.as_u64())
                .is_some_and(|step| step < end)
        };

        let kept: String = text.split_inclusive('\n').filter(is_kept).collect();
        let begin = |file: &mut File| {
            // Nobody else knows the new file; some file systems have no locks.
            _ = file.try_lock();
            file.write_all(kept.as_bytes())
        };
        let file = open_output(path, begin).map_err(|error| refused(&error))?;
        Ok(Self::of(file, path, &kept))
    }

    /// Writes the figures of a step. `seconds` is the time since the start of the run. The field
    /// `tokens` is the step's weight.
    pub(super) fn step(&mut self, report: &StepReport, seconds: f64) {
        let StepReport {
            step,
            loss,
            weight,
            norm,
            rate,
            ..
        } = report;
        let mut line = json!({
            "step": step, "loss": loss, "norm": norm, "rate": rate,
            "seconds": self.before + seconds, "tokens": weight,
        });
        if !report.metrics.is_empty() {
            line["metrics"] = json!(report.metrics);
        }
        self.line(&line);
    }

    /// Writes the mean loss and metrics of an evaluation.
    pub(super) fn evaluation(&mut self, report: &EvaluationReport, seconds: f64) {
        let seconds = self.before + seconds;
        let mut line =
            json!({ "step": report.step, "evaluation": report.loss(), "seconds": seconds });
        if !report.metrics.is_empty() {
            line["metrics"] = json!(report.metrics);
        }
        self.line(&line);
    }

    /// Writes a recovery, after which the training continues from `step` updates.
    pub(super) fn recovery(&mut self, step: u64, recovery: &Recovery) {
        let Recovery {
            epoch,
            reached,
            seconds,
            useful,
            new,
            failure,
            ..
        } = recovery;
        let new: Vec<u32> = new.iter().map(|(process, _)| process.0).collect();
        self.line(&json!({
            "step": step, "recovery": epoch, "reached": reached, "seconds": seconds,
            "useful": useful, "new": new, "failure": failure,
        }));
    }

    /// Writes a line at once, so that a killed process leaves complete lines. Warns once if a write
    /// fails.
    fn line(&mut self, value: &serde_json::Value) {
        let whole = self.file.metadata().map(|file| file.len());
        let Err(error) = self.file.write_all(format!("{value}\n").as_bytes()) else {
            return;
        };

        // A part of the line may be there.
        if let Ok(whole) = whole
            && !self.is_in_place
        {
            _ = self.file.set_len(whole);
            _ = self.file.seek(SeekFrom::End(0));
        }
        if !std::mem::replace(&mut self.has_warned, true) {
            let why = unwritable(&self.path, &error);
            say(&format!(
                "warning: {why}. The training goes on, and lines are missing there"
            ));
        }
    }
}

/// Opens the regular file at `path` to append to it, and locks it until it is closed. Creates it if
/// necessary. Returns an error if another training has locked it.
fn open_locked(path: &Path) -> Result<File> {
    let mut file = open_to_append(path)?;
    for _ in 0..MOST_OPENINGS {
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                return Err(Error::Environment(format!(
                    "cannot write the metrics to {}: another training writes to it. Give each \
                     training a file of its own, or wait until the other has ended",
                    path.display()
                )));
            }
            // Some file systems have no locks.
            Err(TryLockError::Error(_)) => break,
            Ok(()) if is_named(&file, path) => break,
            // Another training has renamed it meanwhile.
            Ok(()) => file = open_to_append(path)?,
        }
    }
    Ok(file)
}

fn open_to_append(path: &Path) -> Result<File> {
    let file = File::options().create(true).append(true).open(path);
    file.map_err(|error| unwritable(path, &error))
}

/// Returns true if `path`, links followed, still names the open file `file`.
fn is_named(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(open), Ok(named)) => (open.dev(), open.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

/// Returns true if a file has lines of metrics. Returns an error if it begins with something else.
fn check_content(path: &Path) -> Result<bool> {
    let is_file = std::fs::metadata(path).is_ok_and(|file| file.is_file() && file.len() > 0);
    if !is_file {
        // There is none, or it is a pipe.
        return Ok(false);
    }
    let mut start = Vec::new();
    let file = File::open(path).map_err(|error| unwritable(path, &error))?;
    file.take(LONGEST_LINE)
        .read_to_end(&mut start)
        .map_err(|error| unwritable(path, &error))?;
    let first = start
        .split(|byte| *byte == b'\n')
        .next()
        .unwrap_or_default();
    let line: Option<serde_json::Value> = serde_json::from_slice(first).ok();
    match line.is_some_and(|line| line.get("step").is_some()) {
        true => Ok(true),
        false => Err(Error::Environment(format!(
            "cannot write the metrics to {}: it has something else than metrics",
            path.display()
        ))),
    }
}

/// Renames the file at `path`, links followed, to the first free one of `FILE.1`, `FILE.2` and so
/// on.
fn move_away(path: &Path) -> std::io::Result<()> {
    let path = path.canonicalize()?;
    let numbered = |number: u64| {
        let mut name = path.clone().into_os_string();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    };
    let free = (1..).map(numbered).find(|name| !name.exists());
    let Some(free) = free else { return Ok(()) };
    std::fs::rename(&path, &free)?;
    say(&format!(
        "metrics: {} has the lines of an earlier training",
        free.display()
    ));
    Ok(())
}

/// Returns the field `seconds` of the last step or evaluation in the file's text, or 0.
fn last_seconds(text: &str) -> f64 {
    let lines = text
        .lines()
        .rev()
        .filter_map(|line| serde_json::from_str(line).ok());
    let mut of_runs = lines.filter(|line: &serde_json::Value| line.get("recovery").is_none());
    of_runs
        .find_map(|line| line.get("seconds")?.as_f64())
        .unwrap_or(0.0)
}

fn unwritable(path: &Path, error: &std::io::Error) -> Error {
    Error::Environment(format!(
        "cannot write the metrics to {}: {error}",
        path.display()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_files_are_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text.txt");
        for text in [
            "A text to train on.\n",
            "{\"prompt\": \"a\"}\n",
            "{\"step\": 1",
        ] {
            std::fs::write(&path, text).unwrap();
            let opened = [
                MetricsFile::open(&path, false),
                MetricsFile::open(&path, true),
            ];
            let resumed = MetricsFile::resume(&path, 2, 2);
            for metrics in opened.into_iter().chain([resumed]) {
                let said = metrics.err().map(|why| why.to_string()).unwrap();
                assert!(
                    said.ends_with("it has something else than metrics"),
                    "{said}"
                );
            }
            assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
        }
        std::fs::write(&path, "").unwrap();
        assert!(MetricsFile::open(&path, false).is_ok());
    }

    #[test]
    fn lines_of_another_training_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let text = |name: &str| std::fs::read_to_string(folder.path().join(name)).unwrap();
        for step in 1..=3 {
            MetricsFile::open(&path, false)
                .unwrap()
                .line(&json!({ "step": step }));
        }
        assert_eq!(text("metrics.jsonl"), "{\"step\":3}\n");
        assert_eq!(text("metrics.jsonl.1"), "{\"step\":1}\n");
        assert_eq!(text("metrics.jsonl.2"), "{\"step\":2}\n");

        MetricsFile::open(&path, true)
            .unwrap()
            .line(&json!({ "step": 4 }));
        assert_eq!(text("metrics.jsonl"), "{\"step\":3}\n{\"step\":4}\n");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn file_of_a_running_training_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut first = MetricsFile::open(&path, false).unwrap();
        first.line(&json!({ "step": 1 }));
        for append in [false, true] {
            let refused = MetricsFile::open(&path, append).err().unwrap();
            let expected = format!("{}: another training writes to it", path.display());
            assert!(refused.to_string().contains(&expected), "{refused}");
        }
        first.line(&json!({ "step": 2 }));
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "{\"step\":1}\n{\"step\":2}\n");

        // A later epoch of the same training takes the file over.
        let mut later = MetricsFile::resume(&path, 2, 2).unwrap();
        later.line(&json!({ "step": 2 }));
        drop(first);
        assert!(MetricsFile::open(&path, true).is_err());
        drop(later);
        assert!(MetricsFile::open(&path, true).is_ok());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    #[ignore = "a process of the next test"]
    fn metrics_to_the_own_output() {
        let path = Path::new("/dev/stdout");
        MetricsFile::open(path, false)
            .unwrap()
            .line(&json!({ "step": 1 }));
        MetricsFile::resume(path, 1, 1)
            .unwrap()
            .line(&json!({ "step": 2 }));
    }

    #[test]
    fn own_output_is_neither_renamed_nor_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        for (before, append) in [("older\n", true), ("{\"step\":0}\n", true), ("", false)] {
            std::fs::write(&path, before).unwrap();
            let log = File::options().write(true).append(append).open(&path);
            let test = "trainer::metrics::tests::metrics_to_the_own_output";
            let ended = std::process::Command::new(std::env::current_exe().unwrap())
                .args([test, "--exact", "--ignored"])
                .stdout(log.unwrap())
                .status();
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(ended.unwrap().success(), "{text}");
            assert!(text.starts_with(before), "{text}");
            // The harness of the test writes there too.
            for line in [
                "{\"step\":1}\n",
                "{\"step\":2}\n",
                "running 1 test",
                "1 passed",
            ] {
                assert_eq!(text.matches(line).count(), 1, "{line}: {text}");
            }
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn line_that_cannot_be_written_is_left_out_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut metrics = MetricsFile::open(&path, false).unwrap();
        metrics.line(&json!({ "step": 1 }));
        // A handle for reading alone stands for a full disk.
        let writable = std::mem::replace(&mut metrics.file, File::open(&path).unwrap());
        metrics.line(&json!({ "step": 2 }));
        assert!(metrics.has_warned);
        metrics.file = writable;
        metrics.line(&json!({ "step": 3 }));
        let expected = "{\"step\":1}\n{\"step\":3}\n";
        assert_eq!(std::fs::read_to_string(&path).unwrap(), expected);
        let gone = MetricsFile::open(&folder.path().join("none/metrics.jsonl"), false);
        assert_eq!(
            gone.err().map(|why| why.to_string().contains("none")),
            Some(true)
        );
    }
}
