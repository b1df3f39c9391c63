//! `mpmd run --add`: further processes for a job that runs.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};

use anyhow::Context as _;
use mpmd_launch::{EXEC, JobEnv};

/// Starts `count` processes of `program`, the program of a running job, on this machine. They wait
/// until the job of process `job` takes them in. Blocks until all have ended. Returns the first
/// exit code that is not 0.
pub(crate) fn add(
    count: u32,
    job: u32,
    program: &Path,
    args: &[OsString],
) -> anyhow::Result<ExitCode> {
    let this = std::env::current_exe().context("finding this program, to start it again")?;
    let mut children = Children(Vec::new());
    for index in 0..count {
        let variables = JobEnv::for_added(job, index)?;
        let mut command = Command::new(&this);
        command
            .arg(EXEC)
            .arg("--")
            .arg(program)
            .args(args)
            .envs(variables);
        let child = command.stdin(Stdio::null()).spawn();
        children
            .0
            .push(child.context("starting a process for the job")?);
    }

    let mut first = None;
    for child in &mut children.0 {
        let status = child.wait().context("waiting for an added process")?;
        let code = status.code().unwrap_or(1);
        first = first.or(Some(code).filter(|code| *code != 0));
    }
    children.0.clear();
    Ok(ExitCode::from(
        first.map_or(0, |code| u8::try_from(code).unwrap_or(1)),
    ))
}

/// Child processes. Dropping this kills them and waits for them to end.
struct Children(Vec<Child>);

impl Drop for Children {
    fn drop(&mut self) {
        for child in &mut self.0 {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
