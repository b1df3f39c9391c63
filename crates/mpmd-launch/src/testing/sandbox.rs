//! [`Sandbox`]: a test's folder. It finds and kills all processes of the test, also those that
//! other processes have started.

use std::ffi::{OsStr, OsString};
use std::fs::DirBuilder;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use mpmd_rendezvous::Token;
use rustix::process::{Pid, Signal, kill_process};

use super::{END_WITHIN, POLL_INTERVAL, Watched};
use crate::LaunchError;

/// The environment variable for the folder of temporary files. It marks the processes of a sandbox.
const TEMPORARY: &str = "TMPDIR";

/// A temporary folder of one test. A process belongs to the folder if it works there, has one of
/// its files open, or has the folder as the value of an environment variable.
///
/// Dropping it kills these processes and deletes the folder. A daemon still belongs to the folder
/// after it has left its process group, session and parent.
pub struct Sandbox {
    folder: PathBuf,
}

impl Sandbox {
    /// Creates an empty folder in the system's folder of temporary files. Only this user can open
    /// it.
    ///
    /// # Errors
    ///
    /// If the folder cannot be created.
    pub fn new() -> Result<Self, LaunchError> {
        let among = std::env::temp_dir();
        let failed = |e: &dyn std::fmt::Display| {
            let doing = format!("creating a folder for the test in {}", among.display());
            LaunchError::environment(doing, e)
        };

        // The system shows the folders of processes without symbolic links.
        let among = among.canonicalize().map_err(|e| failed(&e))?;
        let random = Token::random().map_err(|e| failed(&e))?.to_hex();
        let folder = among.join(format!("mpmd-test-{}", &random[..16]));
        DirBuilder::new()
            .mode(0o700)
            .create(&folder)
            .map_err(|e| failed(&e))?;
        Ok(Self { folder })
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        &self.folder
    }

    /// Returns a command that runs `program` in the folder. The folder is also its `TMPDIR`.
    ///
    /// The process inherits no variables of launchers and no settings (`MPMD_*`, `UCX_TLS`).
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        self.enclose(&mut command);
        command
    }

    /// Starts a command. The output goes to files in the folder; `name` is the name of the process
    /// in messages.
    ///
    /// # Errors
    ///
    /// If the command cannot be started.
    pub fn start(&self, command: Command, name: &str) -> Result<Watched, LaunchError> {
        Watched::start(command, self.path(), name)
    }

    /// Returns the pids of living processes that belong to this folder, except the test itself.
    pub fn processes(&self) -> Vec<u32> {
        let Ok(all) = std::fs::read_dir("/proc") else {
            return Vec::new();
        };
        let pids = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| *pid != std::process::id() && self.is_home_of(*pid) && is_alive(*pid))
            .collect()
    }

    /// Makes a command work in the folder. Keeps the variables that the caller has set on the
    /// command.
    pub(super) fn enclose(&self, command: &mut Command) {
        disinherit(command);
        if !command.get_envs().any(|(name, _)| name == TEMPORARY) {
            command.env(TEMPORARY, self.path());
        }
        command.current_dir(self.path());
    }

    /// Kills the processes that belong to this folder, until none is left or a short time has
    /// passed. Returns the pids of the processes that are left.
    pub(super) fn kill(&self) -> Vec<u32> {
        let until = Instant::now() + END_WITHIN;
        let mut left = Vec::new();
        loop {
            // An ending process closes its files a little before it has ended.
            left.retain(|pid| is_alive(*pid));
            left.extend(self.processes());
            left.sort_unstable();
            left.dedup();

            if left.is_empty() || Instant::now() > until {
                return left;
            }
            for pid in &left {
                if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
                    // It may have ended since.
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn is_home_of(&self, pid: u32) -> bool {
        let here = |link: PathBuf| {
            std::fs::read_link(link).is_ok_and(|file| file.starts_with(self.path()))
        };

        let process = PathBuf::from(format!("/proc/{pid}"));
        // Processes of other users cannot be read, and do not belong to this folder.
        let files = std::fs::read_dir(process.join("fd"))
            .into_iter()
            .flatten()
            .flatten();
        here(process.join("cwd")) || files.map(|file| file.path()).any(here) || self.marks(&process)
    }

    fn marks(&self, process: &Path) -> bool {
        let variables = std::fs::read(process.join("environ")).unwrap_or_default();
        let ending = [b"=", self.path().as_os_str().as_bytes()].concat();
        variables
            .split(|byte| *byte == 0)
            .any(|variable| variable.ends_with(&ending))
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let left = self.kill();
        if !left.is_empty() {
            tracing::warn!(
                "processes {left:?} of {} cannot be ended",
                self.path().display()
            );
        }
        // The folder may be gone already; a file that is left harms no later test.
        let _ = std::fs::remove_dir_all(self.path());
    }
}

/// Returns a command for `program` that inherits no variables of launchers and no settings of the
/// framework. It works in the current folder.
pub fn bare_command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    disinherit(&mut command);
    command
}

/// Removes the variables of launchers and the settings that a command would inherit. Keeps the
/// variables that the caller has set on the command.
fn disinherit(command: &mut Command) {
    let set: Vec<OsString> = command
        .get_envs()
        .map(|(name, _)| name.to_owned())
        .collect();
    let inherited = std::env::vars_os().map(|(name, _)| name);
    for name in inherited.filter(|name| is_of_a_launcher(name) && !set.contains(name)) {
        command.env_remove(name);
    }
}

/// Returns true if `name` is a variable by which launchers describe their jobs, or a setting of the
/// framework's programs.
fn is_of_a_launcher(name: &OsStr) -> bool {
    const NAMES: [&str; 5] = [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "JOB_COMPLETION_INDEX",
        "UCX_TLS",
    ];
    const PREFIXES: [&str; 7] = [
        "MPMD_",
        "OMPI_",
        "PMIX_",
        "PMI_",
        "SLURM_",
        "MASTER_",
        "TORCHELASTIC_",
    ];
    let name = name.to_string_lossy();
    NAMES.contains(&&*name) || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// Returns true if a process is running or stopped. Returns false for a zombie.
pub(super) fn is_alive(pid: u32) -> bool {
    // The state follows the name, which is in parentheses.
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
    stat.is_ok_and(|stat| {
        stat.rsplit_once(')')
            .is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
    })
}
