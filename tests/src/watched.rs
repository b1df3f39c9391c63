//! A process under supervision: its output goes to files, each wait has a deadline, and its end is
//! certain.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};

/// Time between two checks of a process.
const LOOK: Duration = Duration::from_millis(5);

/// A running process. Dropping it kills the process and its whole process group.
pub struct Watched {
    name: String,
    child: Child,
    stdout: PathBuf,
    stderr: PathBuf,
    ended: Option<(i32, Instant)>,
}

/// The result of a process that has ended.
#[derive(Clone, Debug)]
pub struct Ended {
    /// The exit code, or 128 plus the signal's number if a signal ended it.
    pub code: i32,
    /// The standard output of the process.
    pub stdout: String,
    /// The standard error of the process.
    pub stderr: String,
    /// Time at which the end of the process was noticed.
    pub at: Instant,
}

impl Watched {
    /// Starts a process in a group of its own. Its output goes to files in `folder` with names that
    /// begin with `name`.
    ///
    /// # Panics
    ///
    /// If it cannot be started.
    pub fn start(mut command: Command, folder: &Path, name: &str) -> Self {
        let (stdout, stderr) =
            (folder.join(format!("{name}.out")), folder.join(format!("{name}.err")));
        let file = |path: &PathBuf| File::create(path).expect("a file in the test's own folder");
        command.stdin(Stdio::null()).stdout(file(&stdout)).stderr(file(&stderr)).process_group(0);
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => panic!("{} cannot be started: {error}", command.get_program().display()),
        };
        Self { name: name.to_owned(), child, stdout, stderr, ended: None }
    }

    /// Returns the pid of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends the process a signal; does nothing if it has ended.
    ///
    /// # Panics
    ///
    /// If the system refuses.
    pub fn signal(&mut self, signal: Signal) {
        if !self.has_ended() {
            kill_process(Pid::from_child(&self.child), signal)
                .expect("a child that was not waited for");
        }
    }

    /// Returns true if the process has ended. Its pid stays reserved until this value is dropped,
    /// so that no signal can reach another process.
    ///
    /// # Panics
    ///
    /// If the system does not know the process, which cannot happen.
    pub fn has_ended(&mut self) -> bool {
        if self.ended.is_none() {
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            let status = waitid(WaitId::Pid(Pid::from_child(&self.child)), look);
            self.ended = status.expect("a child of this process").map(|status| {
                let signal = || status.terminating_signal().map_or(-1, |signal| 128 + signal);
                (status.exit_status().unwrap_or_else(signal), Instant::now())
            });
        }
        self.ended.is_some()
    }

    /// Returns the standard output of the process so far.
    pub fn output(&self) -> String {
        read(&self.stdout)
    }

    /// Waits until the process has printed `text` to its standard output.
    ///
    /// # Panics
    ///
    /// If the process ends without printing `text`, or does not print it by `deadline`.
    pub fn wait_for_output(&mut self, text: &str, deadline: Instant) {
        while !self.output().contains(text) {
            let ended = self.has_ended();
            // Its last output may have come between the two checks.
            assert!(
                !ended || self.output().contains(text),
                "ended without {text:?}:\n{}",
                self.report()
            );
            assert!(Instant::now() < deadline, "no {text:?} in time:\n{}", self.report());
            std::thread::sleep(LOOK);
        }
    }

    /// Waits for the end of the process.
    ///
    /// # Panics
    ///
    /// If the process does not end by `deadline`.
    pub fn wait(&mut self, deadline: Instant) -> Ended {
        loop {
            if self.has_ended()
                && let Some((code, at)) = self.ended
            {
                return Ended { code, stdout: read(&self.stdout), stderr: read(&self.stderr), at };
            }
            assert!(Instant::now() < deadline, "still running at the deadline:\n{}", self.report());
            std::thread::sleep(LOOK);
        }
    }

    /// Returns the state and the output of the process, for the message of a failed test.
    pub fn report(&self) -> String {
        let state = match &self.ended {
            Some((code, _)) => format!("exit code {code}"),
            None => "running".to_owned(),
        };
        format!(
            "--- {} (pid {}, {state})\n{}--- {}, errors\n{}",
            self.name,
            self.pid(),
            read(&self.stdout),
            self.name,
            read(&self.stderr)
        )
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // Also kills processes that it has started and that may have outlived it.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}

/// Returns the living processes that have an environment variable with this value, except this
/// process.
pub fn processes_of(value: &str) -> Vec<u32> {
    let Ok(all) = std::fs::read_dir("/proc") else { return Vec::new() };
    let pids = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let ending = format!("={value}");
    pids.filter(|pid| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let has = environment
            .split(|byte| *byte == 0)
            .any(|variable| variable.ends_with(ending.as_bytes()));
        has && *pid != std::process::id() && alive(*pid)
    })
    .collect()
}

/// Returns true if a process runs. A zombie does not.
pub fn alive(pid: u32) -> bool {
    // The state follows the name, which is in parentheses.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| {
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
    })
}

/// Returns the file of a program of another package of the workspace. Cargo builds only the tests'
/// own programs, so a missing one is built now.
///
/// # Panics
///
/// If it cannot be built.
pub fn package_program(package: &str, program: &str) -> PathBuf {
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    // A failed test in here does not break the others.
    let _alone = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let this = std::env::current_exe().expect("a test knows its own file");
    // …/target/debug/deps/test-0123
    let folder = this.ancestors().nth(2).expect("a test lies in the target folder");
    let path = folder.join(program);
    if !path.exists() {
        let mut build = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        build.current_dir(env!("CARGO_MANIFEST_DIR")).args([
            "build",
            "--package",
            package,
            "--bins",
        ]);
        for (is_on, feature) in [(cfg!(feature = "ucx"), "ucx"), (cfg!(feature = "cuda"), "cuda")] {
            if is_on {
                build.args(["--features", feature]);
            }
        }
        if folder.ends_with("release") {
            build.arg("--release");
        }
        if let Some(target) = folder.parent() {
            build.arg("--target-dir").arg(target);
        }
        let built = build.stdin(Stdio::null()).output().expect("cargo can be started");
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(folder: &Path, script: &str) -> Watched {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("MPMD_TESTS_MARK", folder);
        Watched::start(command, folder, "sh")
    }

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn drop_kills_processes_that_outlived_their_parent() {
        let folder = tempfile::tempdir().unwrap();
        let mark = folder.path().display().to_string();
        let mut process = sh(folder.path(), "sleep 60 & echo started");
        assert_eq!(process.wait(soon()).code, 0);
        assert_eq!(processes_of(&mark).len(), 1, "the guard must see the process that is left");
        drop(process);
        let end = soon();
        while !processes_of(&mark).is_empty() {
            assert!(Instant::now() < end);
            std::thread::sleep(LOOK);
        }
    }

    #[test]
    fn exit_codes_are_those_of_a_shell() {
        let folder = tempfile::tempdir().unwrap();
        let end = sh(folder.path(), "echo out; echo err >&2; exit 3").wait(soon());
        assert_eq!((end.code, end.stdout.as_str(), end.stderr.as_str()), (3, "out\n", "err\n"));
        assert_eq!(sh(folder.path(), "kill -9 $$").wait(soon()).code, 137);
    }

    #[test]
    #[should_panic(expected = "ended without \"more\"")]
    fn waiting_for_output_fails_when_the_process_ends() {
        let folder = tempfile::tempdir().unwrap();
        sh(folder.path(), "echo this").wait_for_output("more", soon());
    }
}
