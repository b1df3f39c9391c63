//! The turn of one stage: its programs, each with its output in files, and none left behind.

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::symlink;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use super::kit::Kit;
use crate::candle_cuda::LIBRARIES;
use crate::commands::shown;
use crate::program_output;

/// Names of the result files, which are all in one folder: `LOG`, `FIGURES`, `TESTS` and `SUMMARY`.
/// A machine with a GPU may hand back only a few files.
pub(super) const LOG: &str = "log.txt";
pub(super) const FIGURES: &str = "figures.jsonl";
pub(super) const TESTS: &str = "tests.txt";
pub(super) const SUMMARY: &str = "summary.txt";

/// Maximum bytes of one command's output in the log: half from its beginning, half from its end.
const MOST: u64 = 1 << 20;

/// File name of NCCL's library, in every version of CUDA.
const NCCL: &str = "libnccl.so.2";

/// Environment variable that marks the processes of a command, so that those that are left can be
/// found. Each command has its own value.
const MARK: &str = "XTASK_GPU_RUN";

/// The kit and the folders of a run.
pub(super) struct StagePlace<'a> {
    pub(super) kit: &'a Kit,
    /// True if programs run on the driver in software.
    pub(super) software: bool,
    /// Folder for results.
    pub(super) out: PathBuf,
    /// Working folder of all programs, which is deleted at the end.
    pub(super) scratch: PathBuf,
    /// Ends the run when it becomes true.
    stop: Arc<AtomicBool>,
}

impl<'a> StagePlace<'a> {
    /// Makes the folders of a run, and deletes the results of an earlier one.
    pub(super) fn new(kit: &'a Kit, software: bool, stop: Arc<AtomicBool>) -> anyhow::Result<Self> {
        let out = std::env::var_os("OUT").filter(|out| !out.is_empty());
        let out = out.map_or_else(|| kit.folder.join("out"), PathBuf::from);
        let scratch = kit.folder.join("scratch");

        let _ = fs::remove_dir_all(&scratch);
        for folder in [&out, &scratch] {
            fs::create_dir_all(folder).with_context(|| format!("making {}", folder.display()))?;
        }
        let out = out.canonicalize().context("the folder for results")?;
        for name in [LOG, FIGURES, TESTS, SUMMARY] {
            File::create(out.join(name)).with_context(|| format!("making {name}"))?;
        }

        if software {
            let library = kit.folder.join("libsoftcuda_driver.so");
            let folder = scratch.join("cuda");
            fs::create_dir_all(&folder).context("making the driver's folder")?;
            for name in LIBRARIES.iter().chain([&NCCL]) {
                symlink(&library, folder.join(name)).with_context(|| format!("linking {name}"))?;
            }
        }

        Ok(Self {
            kit,
            software,
            out,
            scratch,
            stop,
        })
    }

    /// Sets the environment of a command so that it loads the driver in software.
    pub(super) fn give_software(&self, command: &mut Command) {
        command.env("LD_LIBRARY_PATH", self.scratch.join("cuda"));
        command.env("SOFTCUDA_CACHE", self.kit.folder.join("softcuda-kernels"));
    }

    /// True if a signal has requested the end of the run.
    pub(super) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Opens a result file for appending. Writes are not buffered.
    pub(super) fn file(&self, name: &str) -> std::io::Result<File> {
        File::options()
            .append(true)
            .create(true)
            .read(true)
            .open(self.out.join(name))
    }
}

impl Drop for StagePlace<'_> {
    fn drop(&mut self) {
        // It is in nobody's way.
        let _ = fs::remove_dir_all(&self.scratch);
    }
}

/// A failed command or test, with the last part of its output.
pub(super) struct StageFailure {
    pub(super) what: String,
    pub(super) output: String,
}

/// The run of a stage and its results.
pub(super) struct StageTurn<'a> {
    pub(super) place: &'a StagePlace<'a>,
    pub(super) begin: Instant,
    pub(super) until: Instant,
    pub(super) failures: Vec<StageFailure>,
    /// The result in a few words.
    pub(super) detail: String,
    /// The reason why the stage did not run, if it did not.
    pub(super) not_run: Option<String>,
    /// True if a part of the stage did not run because the time was over.
    pub(super) is_cut: bool,
}

/// The way in which a command ended.
pub(super) enum CommandEnd {
    Status(ExitStatus),
    /// The command was killed at its time limit, or because the run was interrupted.
    Killed,
    /// The command could not be started.
    NotStarted(std::io::Error),
}

impl<'a> StageTurn<'a> {
    pub(super) fn new(place: &'a StagePlace<'a>, until: Instant) -> Self {
        Self {
            place,
            begin: Instant::now(),
            until,
            failures: Vec::new(),
            detail: String::new(),
            not_run: None,
            is_cut: false,
        }
    }

    /// Returns `large`, or `small` on the driver in software.
    pub(super) fn sized<T>(&self, large: T, small: T) -> T {
        if self.place.software { small } else { large }
    }

    /// Records that the stage did not run, with the reason.
    pub(super) fn not_run(&mut self, why: &str) {
        self.not_run = Some(why.to_owned());
    }

    /// Records that the stage did not run for lack of time.
    pub(super) fn cut(&mut self, why: &str) {
        self.not_run(why);
        self.is_cut = true;
    }

    /// Records a failure, with the output that shows it.
    pub(super) fn failed(&mut self, what: &str, output: &str) {
        self.failures.push(StageFailure {
            what: what.to_owned(),
            output: output.to_owned(),
        });
    }

    /// Returns a command that starts `program` with the CUDA driver of this run: the machine's own,
    /// or the driver in software.
    pub(super) fn command(&self, program: impl AsRef<Path>, arguments: &[&str]) -> Command {
        let mut command = Command::new(program.as_ref());
        command.args(arguments);
        if self.place.software {
            self.place.give_software(&mut command);
        }
        command
    }

    /// Returns a command for `mpmd bench …` on CUDA devices, with the arguments `small` on the
    /// driver in software.
    pub(super) fn bench(&self, arguments: &[&str], small: &[&str]) -> Command {
        let small = self.sized(&[][..], small);
        let arguments = [
            &["bench"],
            arguments,
            small,
            &["--device", "cuda", "--json"],
        ]
        .concat();
        self.command(self.place.kit.folder.join("mpmd"), &arguments)
    }

    /// Runs a program of the kit and returns its output. Records a failure.
    pub(super) fn program(&mut self, name: &str, arguments: &[&str]) -> String {
        self.run(self.command(self.place.kit.folder.join(name), arguments))
    }

    /// Runs a command and returns its output, which is also written to the log. Records a failure.
    pub(super) fn run(&mut self, command: Command) -> String {
        self.logged(command, None)
    }

    /// Runs a command that prints figures, and writes its standard output to `FIGURES`.
    pub(super) fn run_measuring(&mut self, command: Command) {
        let line = shown(&command);
        let figures = self.place.file(FIGURES).and_then(|mut file| {
            // The lines that follow are of this command.
            writeln!(file, "{}", serde_json::json!({"command": line})).map(|()| file)
        });
        match figures {
            Ok(file) => drop(self.logged(command, Some(file))),
            Err(error) => self.failed(&line, &format!("{FIGURES}: {error}")),
        }
    }

    fn logged(&mut self, mut command: Command, figures: Option<File>) -> String {
        let line = shown(&command);
        let begin = Instant::now();

        let log = self.place.file(LOG).and_then(|mut log| {
            writeln!(log, "\n$ {line}")?;
            let start = log.metadata()?.len();
            let outputs = (log.try_clone()?, log.try_clone()?);
            Ok((log, start, outputs))
        });
        let (log, start, (stdout, stderr)) = match log {
            Ok(log) => log,
            Err(error) => {
                self.failed(&line, &format!("{LOG}: {error}"));
                return String::new();
            }
        };

        command.stdout(figures.unwrap_or(stdout)).stderr(stderr);
        let end = self.place.ended(&mut command, self.until);
        let said = shortened(log, start, begin.elapsed()).unwrap_or_default();
        if let Some(how) = end.failure() {
            self.failed(&format!("{line}: {how}"), &said);
        }
        said
    }
}

impl StagePlace<'_> {
    /// Runs a command in its own process group. Kills it at the time `until`, and all processes
    /// that it has left behind in any case.
    pub(super) fn ended(&self, command: &mut Command, until: Instant) -> CommandEnd {
        static RUNS: AtomicU64 = AtomicU64::new(0);
        let mark = format!(
            "{}-{}",
            std::process::id(),
            RUNS.fetch_add(1, Ordering::Relaxed)
        );

        // Without a real driver, tests install the one in software themselves.
        if self.software {
            command.env_remove("MPMD_TEST_GPU");
        } else {
            command.env("MPMD_TEST_GPU", "1");
        }
        command
            .current_dir(&self.scratch)
            .stdin(Stdio::null())
            .process_group(0);
        command.env(MARK, &mark);

        let mut child = match command.spawn() {
            Ok(child) => child,
            Err(error) => return CommandEnd::NotStarted(error),
        };

        let end = program_output::ended(&mut child, until, &self.stop);
        sweep(&child, &mark);
        match end {
            Ok(Some(status)) => CommandEnd::Status(status),
            Ok(None) => CommandEnd::Killed,
            Err(error) => CommandEnd::NotStarted(error),
        }
    }
}

impl CommandEnd {
    /// Returns a description of the command's failure. `None` if it succeeded.
    pub(super) fn failure(&self) -> Option<String> {
        match self {
            Self::Status(status) if status.success() => None,
            Self::Status(status) => Some(format!("ended with {status}")),
            Self::Killed => Some("TIMEOUT, killed".to_owned()),
            Self::NotStarted(error) => Some(format!("cannot be started: {error}")),
        }
    }
}

/// Shortens a command's output in the log, which begins at `start`, to its first and last part.
/// Appends the time that the command took, and returns the shortened output.
fn shortened(mut log: File, start: u64, took: Duration) -> std::io::Result<String> {
    let length = log.metadata()?.len() - start;
    if length > MOST {
        let mut end = Vec::new();
        log.seek(SeekFrom::End(-((MOST / 2) as i64)))?;
        log.read_to_end(&mut end)?;
        log.set_len(start + MOST / 2)?;
        writeln!(log, "\n… {} bytes are left out …", length - MOST)?;
        log.write_all(&end)?;
    }
    let mut said = Vec::new();
    log.seek(SeekFrom::Start(start))?;
    log.read_to_end(&mut said)?;
    writeln!(log, "  ({:.1} s)", took.as_secs_f64())?;
    Ok(String::from_utf8_lossy(&said).into_owned())
}

/// Kills the processes that a command has left behind: all of its process group, and all with the
/// value `mark` of `MARK`.
fn sweep(child: &Child, mark: &str) {
    if let Some(group) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        // Most groups are empty.
        let _ = kill_process_group(group, Signal::KILL);
    }
    let wanted = format!("{MARK}={mark}\0");
    // One that is about to be killed may start another.
    for _ in 0..50 {
        let left = marked(wanted.as_bytes());
        if left.is_empty() {
            return;
        }
        for process in left {
            let _ = kill_process(process, Signal::KILL);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the processes whose environment contains `wanted`. Processes that have ended do not
/// count.
fn marked(wanted: &[u8]) -> Vec<Pid> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_it = |pid: &i32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment
            .windows(wanted.len())
            .any(|bytes| bytes == wanted)
    };
    pids.filter(is_it).filter_map(Pid::from_raw).collect()
}

#[cfg(test)]
mod places {
    use super::*;
    use crate::gpu::kit::tests::TestFolder;

    #[test]
    fn late_command_is_killed_with_processes_that_left_its_group() {
        let folder = TestFolder::new("late");
        let kit = folder.kit("");
        let place = StagePlace::new(&kit, false, Arc::default()).unwrap();
        let mut turn = StageTurn::new(&place, Instant::now() + Duration::from_millis(500));
        // The first one has its own session, and its parent is gone at once.
        let script = "(setsid sleep 71 &); sleep 72 & echo started; sleep 73";
        let said = turn.run(turn.command("/bin/sh", &["-c", script]));
        assert_eq!(said, "started\n");
        assert!(
            turn.failures[0].what.ends_with("TIMEOUT, killed"),
            "{}",
            turn.failures[0].what
        );
        let mark = format!("{MARK}={}-", std::process::id());
        assert_eq!(marked(mark.as_bytes()), []);
        let missing = turn.run(turn.command("/no/such/program", &[]));
        assert_eq!((missing.as_str(), turn.failures.len()), ("", 2));
        assert!(
            turn.failures[1].what.contains("cannot be started"),
            "{}",
            turn.failures[1].what
        );
    }

    #[test]
    fn long_output_keeps_its_beginning_and_its_end() {
        let folder = TestFolder::new("long");
        let kit = folder.kit("");
        let place = StagePlace::new(&kit, false, Arc::default()).unwrap();
        let mut turn = StageTurn::new(&place, Instant::now() + Duration::from_secs(60));
        let script = "echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last; exit 3";
        let said = turn.run(turn.command("/bin/sh", &["-c", script]));
        assert!(said.starts_with("first\nxxx") && said.ends_with("xxx\nlast\n"));
        assert!(said.contains("bytes are left out") && (said.len() as u64) < MOST + 100);
        assert!(turn.failures[0].what.ends_with("ended with exit status: 3"));
        let log = fs::read_to_string(place.out.join(LOG)).unwrap();
        assert!(log.contains(&said) && log.ends_with(" s)\n"));
    }
}
