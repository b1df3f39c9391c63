//! `mpmd check -n N -- program args`: the plan of a program, and what can be said of it before it runs.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use mpmd_core::launch::variables;
use mpmd_core::pipeline::check::Channel;
use mpmd_core::plan::Plan;
use mpmd_transport::deadline::after;
use rustix::process::{Pid, Signal, kill_process_group};

use super::report::Report;
use crate::run::{find, seconds};

/// How often the program is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// Arguments of `mpmd check` on a program.
#[derive(Args, Debug)]
pub(crate) struct ProgramArgs {
    /// Number of processes that the program is to run as
    #[arg(short = 'n', long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) processes: Option<u32>,
    /// Number of devices of each process; by default the program's choice
    #[arg(long, value_name = "D", requires = "processes", value_parser = clap::value_parser!(u32).range(1..))]
    devices_per_process: Option<u32>,
    /// Record at most so many steps; by default until two in succession are equal, or 16
    #[arg(long, value_name = "K", requires = "processes", value_parser = clap::value_parser!(u64).range(1..))]
    steps: Option<u64>,
    /// How long the program may take to issue them
    #[arg(long, value_name = "SECONDS", default_value = "120", value_parser = seconds)]
    patience: Duration,
    /// Keep the plan in this file
    #[arg(long, value_name = "FILE", requires = "processes")]
    out: Option<PathBuf>,
}

impl ProgramArgs {
    /// Runs the program once as a process that owns nothing, and reports on the plan that it writes.
    pub(crate) fn check(
        &self,
        processes: u32,
        program: &[OsString],
        budget: Option<u64>,
        channels: &[Channel],
    ) -> anyhow::Result<ExitCode> {
        let folder = tempfile::tempdir().context("making a folder for the plan")?;
        let file = match &self.out {
            // The program may run in a folder of its own one day.
            Some(out) => std::path::absolute(out)?,
            None => folder.path().join("plan.json"),
        };
        let Some(plan) = self.plan(processes, program, &file, folder.path())? else {
            return Ok(ExitCode::from(super::NOTHING));
        };
        let report = Report::new(&plan, budget, channels);
        crate::say(&report.to_string())?;
        Ok(if report.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    /// The plan of a program; `None` where it has none, which is said.
    fn plan(
        &self,
        processes: u32,
        program: &[OsString],
        file: &Path,
        folder: &Path,
    ) -> anyhow::Result<Option<Plan>> {
        let (name, args) = program.split_first().context("no program is given")?;
        let Some(found) = find(name) else {
            eprintln!("mpmd: there is no program {}", name.display());
            return Ok(None);
        };
        // An old one must not pass for the program's.
        if file.exists() {
            std::fs::remove_file(file).with_context(|| format!("replacing {}", file.display()))?;
        }
        let said = folder.join("stderr");
        let mut command = Command::new(found);
        command
            .args(args)
            .env(variables::PLAN, file)
            .env(variables::PLAN_PROCESSES, processes.to_string())
            // Ends with this process, and what it starts with it.
            .env(variables::LAUNCHER_PID, std::process::id().to_string())
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&said).context("making a file for what the program says")?);
        if let Some(devices) = self.devices_per_process {
            command.env(variables::DEVICES_PER_PROCESS, devices.to_string());
        }
        if let Some(steps) = self.steps {
            command.env(variables::PLAN_STEPS, steps.to_string());
        }
        let mut child = command.spawn().with_context(|| format!("starting {}", name.display()))?;
        let deadline = after(Instant::now(), self.patience);
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
            Some(status) if status.success() && file.exists() => return Ok(Some(Plan::read(file)?)),
            Some(status) if status.success() => {
                "ended without a plan: is it a program of mpmd that calls Program::from_env and finish?"
                    .to_owned()
            }
            Some(status) => format!("failed while it was planned ({status})"),
            None => format!("has not ended a plan after {:?}", self.patience),
        };
        eprintln!("mpmd: {} {how}", name.display());
        let said = std::fs::read(&said).unwrap_or_default();
        eprint!("{}", String::from_utf8_lossy(&said));
        Ok(None)
    }
}

/// Ends a program with all that it has started in its group.
fn end(child: &mut Child) -> anyhow::Result<()> {
    // It may have ended since.
    let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
    child.wait()?;
    Ok(())
}
