//! [`Watched`]: a process under test. Its output goes to files, every wait for it has a deadline,
//! and it is killed when the `Watched` is dropped.

use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid,
};

use super::{END_WITHIN, POLL_INTERVAL, ProcessEnd};
use crate::process_end::write_report;
use crate::{ExitKind, LaunchError};

/// The exit status of a process that has ended, and the time at which the test noticed it.
#[derive(Clone, Copy)]
struct NoticedEnd {
    how: ExitKind,
    at: Instant,
}

/// A process of a test. Dropping it kills the process and its whole process group.
pub struct Watched {
    name: String,
    child: Child,
    started: Instant,
    stdout: PathBuf,
    stderr: PathBuf,
    ended: Option<NoticedEnd>,
}

impl Watched {
    /// Starts a process in a process group of its own, with an empty standard input. Its output
    /// goes to files in `folder`.
    ///
    /// `name` is the name of the process in messages. Processes with the same folder need different
    /// names.
    ///
    /// # Errors
    ///
    /// If a file cannot be created, or the program cannot be started.
    pub fn start(mut command: Command, folder: &Path, name: &str) -> Result<Self, LaunchError> {
        let file = |ending: &str| {
            let path = folder.join(format!("{}.{ending}", name.replace(' ', "-")));
            let failed =
                |e| LaunchError::environment(format!("creating the file {}", path.display()), e);
            File::create(&path)
                .map_err(failed)
                .map(|file| (path.clone(), file))
        };
        let (stdout, to_stdout) = file("out")?;
        let (stderr, to_stderr) = file("err")?;

        command
            .stdin(Stdio::null())
            .stdout(to_stdout)
            .stderr(to_stderr)
            .process_group(0);

        let child = command.spawn().map_err(|e| {
            let program = command.get_program().to_string_lossy();
            LaunchError::not_started(&program, &e)
        })?;

        Ok(Self {
            name: name.to_owned(),
            child,
            started: Instant::now(),
            stdout,
            stderr,
            ended: None,
        })
    }

    /// Returns the pid of the process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the name of the process in messages.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Sends the process a signal. Does nothing if the process has ended.
    ///
    /// # Errors
    ///
    /// If the system refuses.
    pub fn signal(&mut self, signal: Signal) -> Result<(), LaunchError> {
        if self.has_ended() {
            return Ok(());
        }
        kill_process(Pid::from_child(&self.child), signal).map_err(|e| {
            LaunchError::environment(format!("sending {signal:?} to {}", self.name), e)
        })
    }

    /// Returns true if the process has ended. Its pid stays reserved until this value is dropped,
    /// so that no signal can reach another process.
    pub fn has_ended(&mut self) -> bool {
        if self.ended.is_none() {
            let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
            let how = match waitid(WaitId::Pid(Pid::from_child(&self.child)), look) {
                Ok(Some(status)) => {
                    Some(match (status.exit_status(), status.terminating_signal()) {
                        (Some(code), _) => ExitKind::Exit(code),
                        (None, signal) => ExitKind::Signal(signal.unwrap_or(0)),
                    })
                }
                Ok(None) | Err(rustix::io::Errno::INTR) => None,
                // Another part of the test has reaped the process, so its status is unknown.
                Err(_) => Some(ExitKind::Exit(1)),
            };
            self.ended = how.map(|how| NoticedEnd {
                how,
                at: Instant::now(),
            });
        }
        self.ended.is_some()
    }

    /// Returns the standard output of the process so far.
    pub fn output(&self) -> String {
        read(&self.stdout)
    }

    /// Returns the standard error of the process so far.
    pub fn error_output(&self) -> String {
        read(&self.stderr)
    }

    /// Waits until the process has printed `text` to its standard output. Blocks.
    ///
    /// # Errors
    ///
    /// [`LaunchError::NotPrinted`] if the process ends without printing `text`.
    /// [`LaunchError::Deadline`] if the process does not print `text` by `deadline`; then it is
    /// killed.
    pub fn wait_for_output(&mut self, text: &str, deadline: Instant) -> Result<(), LaunchError> {
        while !self.has_printed(text)? {
            if Instant::now() >= deadline {
                return Err(self.late(format!("{} to print {text:?}", self.name), deadline));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Waits for the end of the process. Blocks.
    ///
    /// # Errors
    ///
    /// [`LaunchError::Deadline`] if the process does not end by `deadline`; then it is killed.
    pub fn wait(&mut self, deadline: Instant) -> Result<ProcessEnd, LaunchError> {
        while !self.has_ended() {
            if Instant::now() >= deadline {
                return Err(self.late(format!("the end of {}", self.name), deadline));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        Ok(self.end())
    }

    /// Returns the state and the output of the process so far, for the message of a failed test.
    pub fn report(&self) -> String {
        let mut report = String::new();
        let name = format!("{} (pid {})", self.name, self.pid());
        let state: &dyn std::fmt::Display = match &self.ended {
            Some(NoticedEnd { how, .. }) => how,
            None => &"it is running",
        };
        // Writing to a string does not fail.
        let _ = write_report(
            &mut report,
            &name,
            state,
            &self.output(),
            &self.error_output(),
            usize::MAX,
        );
        report
    }

    /// Returns true if the process has printed `text`. Fails if the process has ended without
    /// printing it.
    pub(super) fn has_printed(&mut self, text: &str) -> Result<bool, LaunchError> {
        if self.output().contains(text) {
            return Ok(true);
        }
        // Its last output may have come between the two checks.
        if self.has_ended() && !self.output().contains(text) {
            return Err(LaunchError::NotPrinted {
                text: text.to_owned(),
                end: self.end(),
            });
        }
        Ok(false)
    }

    /// Kills the process and its process group, and waits a short time for the end of the process.
    pub(super) fn kill(&mut self) {
        self.kill_group();
        let until = Instant::now() + END_WITHIN;
        while !self.has_ended() && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    /// Kills the process and its process group. Does not wait until they have ended.
    pub(super) fn kill_group(&self) {
        // No group is left if all its processes have ended; the error is ignored.
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
    }

    /// Returns the end of the process. A process that was killed and has not ended yet counts as
    /// ended by SIGKILL.
    pub(super) fn end(&self) -> ProcessEnd {
        let killed = || NoticedEnd {
            how: ExitKind::Signal(Signal::KILL.as_raw()),
            at: Instant::now(),
        };
        let NoticedEnd { how, at } = self.ended.unwrap_or_else(killed);
        ProcessEnd {
            name: self.name.clone(),
            how,
            stdout: self.output(),
            stderr: self.error_output(),
            ended_at: at,
        }
    }

    fn late(&mut self, awaited: String, deadline: Instant) -> LaunchError {
        self.kill();
        let after = deadline.saturating_duration_since(self.started);
        LaunchError::Deadline {
            awaited,
            after,
            ends: vec![self.end()],
        }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // The group may have processes that outlived the one that started them.
        self.kill();
        // Reaps it. Does not block, unlike `wait`, if the system cannot end the process.
        let _ = self.child.try_wait();
    }
}

fn read(path: &Path) -> String {
    String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned()
}
