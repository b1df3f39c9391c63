//! `mpmd check -n N -- program args`: reports on the dry run of a program.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use mpmd_launch::variables;
use mpmd_record::dry_run::DryRun;
use mpmd_schedule::check::Channel;
use mpmd_transport::deadline::after;
use rustix::process::{Pid, Signal, kill_process_group};

use super::report::Report;
use crate::run::{above_zero, find};

/// The interval at which the program's exit is polled.
const LOOK: Duration = Duration::from_millis(5);

/// Arguments of `mpmd check` on a program.
#[derive(Args, Debug)]
pub(crate) struct ProgramArgs {
    /// Number of processes that the program is to run as
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) processes: Option<u32>,
    /// Number of devices of each process; by default the program's choice
    #[arg(long, value_name = "D", requires = "processes")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    devices_per_process: Option<u32>,
    /// Run at most this many steps; by default until two successive steps are equal, or 16
    #[arg(long, value_name = "K", requires = "processes")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// The time limit for the dry run of the program
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = above_zero)]
    peer_timeout: Duration,
    /// Keep the dry run in this file
    #[arg(long, value_name = "FILE", requires = "processes")]
    out: Option<PathBuf>,
}

impl ProgramArgs {
    /// Runs the program once as process 0 of the job, as a dry run. Blocks until it has ended, and
    /// prints a report on the dry run that it writes. Returns failure if the report has faults.
    pub(crate) fn check(
        &self,
        processes: u32,
        program: &[OsString],
        budget: Option<u64>,
        channels: &[Channel],
    ) -> anyhow::Result<ExitCode> {
        let folder = tempfile::tempdir().context("making a folder for the dry run")?;
        let (name, args) = program.split_first().context("no program is given")?;
        let program = find(name).map_err(|(_, why)| anyhow::anyhow!(why))?;
        let file = match &self.out {
            // Made absolute in case the program runs in another folder.
            Some(out) => std::path::absolute(out)?,
            None => folder.path().join("dry-run.json"),
        };
        let mut command = Command::new(program);
        command.args(args).env(variables::DRY_RUN_PROCESSES, processes.to_string());
        let dry_run = self.dry_run(command, name, &file, &folder.path().join("stderr"))?;
        let report = Report::new(&dry_run, budget, channels);
        crate::files::say(&report.to_string())?;
        Ok(if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// Runs the program, and blocks until it ends or `--peer-timeout` is over. Then it is killed.
    /// Returns the dry run that it has written to `file`. Its error output goes to the file `said`.
    ///
    /// # Errors
    ///
    /// If the program fails, is killed, or writes no dry run. The error contains its error output.
    fn dry_run(
        &self,
        mut command: Command,
        name: &OsStr,
        file: &Path,
        said: &Path,
    ) -> anyhow::Result<DryRun> {
        // An old file must not pass for the program's dry run.
        if file.exists() {
            std::fs::remove_file(file).with_context(|| format!("replacing {}", file.display()))?;
        }
        command
            .env(variables::DRY_RUN, file)
            .env(variables::DRY_RUN_PROCESS, "0")
            // The program and its child processes end with this process.
            .env(variables::LAUNCHER_PID, std::process::id().to_string())
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(said).context("creating a file for the program's error output")?);
        if let Some(devices) = self.devices_per_process {
            command.env(variables::DEVICES_PER_PROCESS, devices.to_string());
        }
        if let Some(steps) = self.steps {
            command.env(variables::DRY_RUN_STEPS, steps.to_string());
        }
        let name = name.display();
        let mut child = command.spawn().with_context(|| format!("starting {name}"))?;
        let peer_timeout = self.peer_timeout;
        let deadline = after(Instant::now(), peer_timeout);
        let status = loop {
            match child.try_wait()? {
                Some(status) => break Some(status),
                None if Instant::now() < deadline => std::thread::sleep(LOOK),
                None => {
                    end(&mut child)?;
                    break None;
                }
            }
        };
        let how = match status {
            Some(status) if status.success() && file.exists() => return Ok(DryRun::read(file)?),
            Some(status) if status.success() => {
                "ended without writing a dry run: is it a program of mpmd that calls \
                 Program::from_env and finish?"
                    .to_owned()
            }
            Some(status) => format!("failed in its dry run ({status})"),
            None => format!("has not ended its dry run after {peer_timeout:?}"),
        };
        let said = std::fs::read(said).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        anyhow::bail!("{name} {how}\n{}", said.trim_end())
    }
}

/// Kills a program and all processes of its group, and waits for the program's end.
fn end(child: &mut Child) -> anyhow::Result<()> {
    // The group may be gone already.
    let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    child.wait()?;
    Ok(())
}
