//! A place where a test runs other people's launchers, which start processes that are not the
//! test's.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, geteuid, kill_process};
use tempfile::TempDir;

use crate::job::bare_command;
use crate::watched::{Watched, alive};

/// How long the system may take to end what was killed.
const END_WITHIN: Duration = Duration::from_secs(10);

/// A folder of a test's own. Every process that works in it, or has a file of it open, belongs to
/// it.
///
/// Dropping it ends all of them: daemons and their children may have left every group and session,
/// and have blanked their environment, but not this.
pub struct Site {
    folder: TempDir,
}

impl Site {
    /// An empty folder.
    ///
    /// # Panics
    ///
    /// Where this machine has none to give.
    pub fn new() -> Self {
        // Sockets in it are for other users too, else their services complain.
        let open = Permissions::from_mode(0o755);
        let folder =
            tempfile::Builder::new().permissions(open).tempdir().expect("a folder for the test");
        Self { folder }
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// `program`, to be started in the folder by [`Site::start`].
    pub fn command(&self, program: &Path) -> Command {
        // A test may be killed, and then drops nothing.
        let mut command = bare_command(Path::new("setpriv"));
        command.args(["--pdeathsig", "KILL"]).arg(program);
        command.current_dir(self.path()).env("TMPDIR", self.path());
        command
    }

    /// Starts a command; its output goes to files that begin with `name`.
    ///
    /// # Panics
    ///
    /// Where it cannot be started.
    pub fn start(&self, command: Command, name: &str) -> Watched {
        Watched::start(command, self.path(), name)
    }

    /// The living processes that belong to this place, but not the test itself.
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
        // Those of other users cannot be read, and are none of ours.
        let files = std::fs::read_dir(process.join("fd")).into_iter().flatten().flatten();
        here(process.join("cwd")) || files.map(|file| file.path()).any(here)
    }
}

impl Default for Site {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        let end = Instant::now() + END_WITHIN;
        let mut left = Vec::new();
        loop {
            // What is ending has let go of its files and folders a little before it has ended.
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

/// The file of a program of the system; `None` where it is missing and who runs the tests cannot
/// install it, which is then said.
///
/// # Panics
///
/// Where it is missing and could be installed: names the package.
pub fn system_program(program: &str, package: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    // Where programs lie that are not for everybody's PATH.
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
    fn what_works_in_the_folder_ends_with_it_wherever_it_has_gone() {
        let site = Site::new();
        let deadline = Instant::now() + Duration::from_secs(20);
        // Has another session, another parent, another folder, and no environment.
        // Who ends a program ends its group, in which it is until then.
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
    fn programs_of_the_system_are_found_and_missing_ones_name_their_package() {
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
