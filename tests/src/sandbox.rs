//! A sandbox in which a test runs launchers of other projects. They start processes that are not
//! the test's children.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

use crate::job::bare_command;
use crate::watched::{Watched, alive};

/// Time limit for the system to end killed processes.
const END_WITHIN: Duration = Duration::from_secs(10);

/// A folder of one test. Every process that works in it, or has one of its files open, belongs to
/// it.
///
/// Dropping it kills all of them. Daemons and their children may have left every process group and
/// session, and may have cleared their environment. But they still use the folder.
pub struct Sandbox {
    folder: TempDir,
}

impl Sandbox {
    /// Creates an empty folder.
    ///
    /// # Panics
    ///
    /// If the folder cannot be created.
    pub fn new() -> Self {
        // Its sockets are for other users too; otherwise their services complain.
        let open = Permissions::from_mode(0o755);
        let folder =
            tempfile::Builder::new().permissions(open).tempdir().expect("a folder for the test");
        Self { folder }
    }

    /// Returns the folder's path.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Returns a command for `program`, to be started in the folder by [`Sandbox::start`].
    pub fn command(&self, program: &Path) -> Command {
        // A test may be killed, and then drops nothing.
        let mut command = bare_command(Path::new("setpriv"));
        command.args(["--pdeathsig", "KILL"]).arg(program);
        command.current_dir(self.path()).env("TMPDIR", self.path());
        command
    }

    /// Starts a command; its output goes to files with names that begin with `name`.
    ///
    /// # Panics
    ///
    /// If it cannot be started.
    pub fn start(&self, command: Command, name: &str) -> Watched {
        Watched::start(command, self.path(), name)
    }

    /// Returns the pids of living processes that belong to this folder, except the test itself.
    pub fn processes(&self) -> Vec<u32> {
        let Ok(all) = std::fs::read_dir("/proc") else { return Vec::new() };
        let pids = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| *pid != std::process::id() && self.is_home_of(*pid) && alive(*pid))
            .collect()
    }

    fn is_home_of(&self, pid: u32) -> bool {
        let here = |link: PathBuf| {
            std::fs::read_link(link).is_ok_and(|file| file.starts_with(self.path()))
        };
        let process = PathBuf::from(format!("/proc/{pid}"));
        // Processes of other users cannot be read, and do not belong to this folder.
        let files = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        here(process.join("cwd")) || files.map(|file| file.path()).any(here)
    }
}

impl Default for Sandbox {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        let end = Instant::now() + END_WITHIN;
        let mut left = Vec::new();
        loop {
            // An ending process closes its files a little before it has ended.
            left.retain(|pid| alive(*pid));
            left.extend(self.processes());
            left.sort_unstable();
            left.dedup();
            if left.is_empty() {
                return;
            }
            for pid in &left {
                if let Some(pid) = Pid::from_raw((*pid).cast_signed()) {
                    // It may have ended since.
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
            if Instant::now() > end {
                eprintln!("processes {left:?} of {} cannot be ended", self.path().display());
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Returns the file of a system program. If it is missing and the user cannot install it, prints
/// that and returns `None`.
///
/// # Panics
///
/// If it is missing and could be installed. The message names the package.
pub fn system_program(program: &str, package: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Folders that are not in every user's PATH.
    let more = ["/usr/sbin", "/usr/local/sbin", "/sbin"].map(PathBuf::from);
    let found = std::env::split_paths(&path).chain(more).map(|folder| folder.join(program));
    let found = found.into_iter().find(|file| file.is_file());
    if found.is_none() {
        let why = format!("{program} is not installed; Debian has it in the package {package}");
        assert!(!geteuid().is_root(), "{why}; `cargo xtask test` installs it");
        println!("skipped: {why}");
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drop_kills_processes_that_left_session_and_folder() {
        let site = Sandbox::new();
        let deadline = Instant::now() + Duration::from_secs(20);
        // A process with another session, parent and folder, and without an environment. Ending a
        // program kills its group, so the script waits until the process has left the group.
        let script = "env -i setsid sh -c ': > detached; cd / && sleep 60' & \
                      until [ -e detached ]; do sleep 0.01; done; echo started; exit 0";
        let mut command = site.command(Path::new("sh"));
        command.args(["-c", script]);
        assert_eq!(site.start(command, "sh").wait(deadline).code, 0);
        let left = loop {
            let left = site.processes();
            if left.iter().any(|pid| is_sleep(*pid)) {
                break left;
            }
            assert!(Instant::now() < deadline, "{left:?}");
        };
        drop(site);
        assert!(left.iter().all(|pid| !alive(*pid)), "{left:?}");
    }

    fn is_sleep(pid: u32) -> bool {
        std::fs::read_to_string(format!("/proc/{pid}/comm"))
            .is_ok_and(|name| name.trim() == "sleep")
    }

    #[test]
    fn missing_system_program_names_its_package() {
        assert!(system_program("sh", "dash").is_some_and(|file| file.is_absolute()));
        let missing =
            std::panic::catch_unwind(|| system_program("no-such-launcher", "some-package"));
        match missing {
            Ok(found) => assert_eq!(found, None),
            Err(panic) => {
                let said = panic.downcast_ref::<String>().expect("a message");
                assert!(
                    said.contains("no-such-launcher") && said.contains("some-package"),
                    "{said}"
                );
            }
        }
    }
}
