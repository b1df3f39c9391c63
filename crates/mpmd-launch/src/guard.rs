//! The guard of a job: it ends the processes if the launcher dies.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};

use rustix::process::Pid;

use super::error::LaunchError;
use super::spawn::{GuardCommand, Launch};

/// A helper process that kills the job's processes if the launcher dies first.
pub(super) struct JobGuard(Option<Child>);

impl JobGuard {
    pub(super) fn start(launch: &Launch) -> Result<Self, LaunchError> {
        let Some(GuardCommand { program, args }) = &launch.guard else {
            return Ok(Self(None));
        };

        // In its own process group, so that signals to the launcher's group do not reach it.
        let guard = Command::new(program)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .process_group(0)
            .spawn();
        match guard {
            Ok(guard) => Ok(Self(Some(guard))),
            Err(e) => Err(LaunchError::environment("starting the job's guard", e)),
        }
    }

    pub(super) fn tell(&mut self, sign: char, group: Pid) {
        let stdin = self.0.as_mut().and_then(|guard| guard.stdin.as_mut());
        if let Some(stdin) = stdin
            && let Err(error) = writeln!(stdin, "{sign}{}", group.as_raw_nonzero())
        {
            tracing::warn!("the job's guard is gone: {error}");
        }
    }
}

impl Drop for JobGuard {
    fn drop(&mut self) {
        if let Some(mut guard) = self.0.take() {
            // It ends with its input; no process groups are left for it to kill.
            drop(guard.stdin.take());
            let _ = guard.wait();
        }
    }
}
