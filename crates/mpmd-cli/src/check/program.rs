//! `mpmd check -n N -- program args`: reports on the dry run of a program.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use mpmd_base::deadline::after;
use mpmd_launch::variables;
use mpmd_record::dry_run::DryRun;
use mpmd_schedule::check::Channel;
use rustix::process::{Pid, Signal, kill_process_group};

use super::other_processes::OtherProcesses;
use super::report::ProgramReport;
use crate::run::{above_zero, find};

/// Interval between two looks whether the program has ended.
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
    /// Run this many steps, or to the program's end if it has fewer; by default until two
    /// successive steps are equal, or 16. The program's end runs too: see "Dry run" in
    /// docs/guide/testing.md if it writes or removes files
    #[arg(long, value_name = "K", requires = "processes")]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// The time limit for one dry run of the program; after this time no dry run is started for a
    /// further process
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = above_zero)]
    peer_timeout: Duration,
    /// Keep the dry run of process 0 in this file
    #[arg(long, value_name = "FILE", requires = "processes")]
    out: Option<PathBuf>,
}

impl ProgramArgs {
    /// Runs the program once as each process of the job, as dry runs. Blocks until all have ended,
    /// and prints a report on the dry runs that they write. Returns failure if the report has
    /// faults.
    pub(crate) fn check(
        &self,
        processes: u32,
        program: &[OsString],
        budget: Option<u64>,
        channels: &[Channel],
    ) -> anyhow::Result<ExitCode> {
        let folder = tempfile::tempdir().context("making a folder for the dry runs")?;
        let (name, args) = program.split_first().context("no program is given")?;
        let program = find(name).map_err(|(_, why)| anyhow::anyhow!(why))?;

        let file = match &self.out {
            // Made absolute in case the program runs in another folder.
            Some(out) => std::path::absolute(out)?,
            None => folder.path().join("dry-run.json"),
        };

        let dry_runs = DryRuns {
            settings: self,
            processes,
            name,
            program,
            args,
            folder: folder.path(),
        };

        let dry_run = dry_runs.run(0, &file)?;
        let others = OtherProcesses::compare(&dry_run, self.peer_timeout, |process| {
            let file = folder.path().join(format!("dry-run-{process}.json"));
            let dry_run = dry_runs.run(process, &file)?;
            // Removed at once: the dry runs of all processes may take much space.
            std::fs::remove_file(&file).context("removing the file of a dry run")?;
            Ok(dry_run)
        })?;

        let report = ProgramReport::new(&dry_run, &others, budget, channels);
        crate::files::say(&report.to_string())?;
        Ok(if report.is_good() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

/// The settings for dry runs of a program, as each of the processes of its job.
struct DryRuns<'a> {
    settings: &'a ProgramArgs,
    processes: u32,
    name: &'a OsStr,
    program: PathBuf,
    args: &'a [OsString],
    folder: &'a Path,
}

impl DryRuns<'_> {
    /// Runs the program as process `process`, and blocks until it ends. Kills it when
    /// `--peer-timeout` is over. Returns the dry run that the program has written to `file`.
    ///
    /// # Errors
    ///
    /// If the program fails, is killed, or writes no dry run. The error contains its error output.
    fn run(&self, process: u32, file: &Path) -> anyhow::Result<DryRun> {
        // An old file must not pass for the program's dry run.
        if file.exists() {
            std::fs::remove_file(file).with_context(|| format!("replacing {}", file.display()))?;
        }

        let said = self.folder.join(format!("stderr-{process}"));
        let name = self.name.display();
        let mut child = self
            .command(process, file, &said)?
            .spawn()
            .with_context(|| format!("starting {name}"))?;
        let peer_timeout = self.settings.peer_timeout;
        let how = match wait(&mut child, peer_timeout)? {
            Some(status) if status.success() && file.exists() => return Ok(DryRun::read(file)?),
            Some(status) if status.success() => {
                "ended without writing a dry run: is it a program of mpmd that calls \
                 Program::from_env and finish?"
                    .to_owned()
            }
            Some(status) => format!("failed in its dry run ({status})"),
            None => format!("has not ended its dry run after {peer_timeout:?}"),
        };

        let said = std::fs::read(&said).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let said = said.trim_end();
        match process {
            0 => anyhow::bail!("{name} {how}\n{said}"),
            _ => anyhow::bail!(
                "{name} {how} as process {process}; as process 0 its dry run ended. The work of a \
                 single process, such as reading values or writing files, must be skipped if \
                 Program::is_dry_run returns true\n{said}"
            ),
        }
    }

    /// Returns the command that runs the program as a dry run of process `process`. The program
    /// writes the dry run to `file`, and its error output to `said`.
    fn command(&self, process: u32, file: &Path, said: &Path) -> anyhow::Result<Command> {
        let mut command = Command::new(&self.program);
        command
            .args(self.args)
            .env(variables::DRY_RUN, file)
            .env(variables::DRY_RUN_PROCESSES, self.processes.to_string())
            .env(variables::DRY_RUN_PROCESS, process.to_string())
            // The program and its child processes end with this process.
            .env(variables::LAUNCHER_PID, std::process::id().to_string())
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(said).context("creating a file for the program's error output")?);
        if let Some(devices) = self.settings.devices_per_process {
            command.env(variables::DEVICES_PER_PROCESS, devices.to_string());
        }
        if let Some(steps) = self.settings.steps {
            command.env(variables::DRY_RUN_STEPS, steps.to_string());
        }
        Ok(command)
    }
}

/// Waits for a program to end. After `peer_timeout`, kills it and returns `None`.
fn wait(child: &mut Child, peer_timeout: Duration) -> anyhow::Result<Option<ExitStatus>> {
    let deadline = after(Instant::now(), peer_timeout);
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(Some(status)),
            None if Instant::now() < deadline => std::thread::sleep(LOOK),
            None => {
                end(child)?;
                return Ok(None);
            }
        }
    }
}

/// Kills a program and all processes of its group, and waits for the program's end.
fn end(child: &mut Child) -> anyhow::Result<()> {
    // The group may be gone already.
    let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    child.wait()?;
    Ok(())
}
