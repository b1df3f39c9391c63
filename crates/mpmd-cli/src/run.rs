//! `mpmd run`: a job of several processes on this machine.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::{Args, CommandFactory};
use mpmd_core::transports;
use mpmd_launch::{EXEC, Launch, adopt, device_kinds, variables};

use crate::Cli;

/// Name of the hidden subcommand for the job's guard. The guard is a process that ends the job's
/// processes if the launcher dies.
pub(crate) const GUARD: &str = "__guard";

/// Exit code of a shell for a program that does not exist. `NOT_RUN` is for a program that it
/// cannot start.
const NO_SUCH_PROGRAM: u8 = 127;
const NOT_RUN: u8 = 126;

/// Arguments of `mpmd run`.
#[derive(Args, Debug)]
pub(crate) struct RunArgs {
    /// Number of processes
    #[arg(
        short = 'n',
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..),
        required_unless_present = "add"
    )]
    processes: Option<u32>,
    /// Add so many processes to a job that runs on this machine, in place of a new job. They must
    /// run its program with its arguments. It takes them in after one of its next commits, if it
    /// can grow: see `OnLoss::Shrink`
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..),
        conflicts_with_all = ["processes", "spares", "restart", "chaos"]
    )]
    add: Option<u32>,
    /// The id of a process of that job or of its launcher; without it, the only job of this user
    #[arg(long, value_name = "PID", requires = "add")]
    job: Option<u32>,
    /// Number of spares: further processes, each of which takes the place of a process that dies.
    /// The program must recover: see `Builder::spares`
    #[arg(long, value_name = "N", default_value = "0")]
    spares: u32,
    /// Start up to this many new processes in place of lost ones, and of processes that leave in
    /// order where the program needs all its places
    #[arg(long, value_name = "N", default_value = "0")]
    restart: u32,
    /// Kill a random process again and again, on average after this time, to try how the program
    /// recovers. At most as many as --restart says
    #[arg(long, value_name = "SECONDS", value_parser = above_zero)]
    chaos: Option<Duration>,
    /// The transport between the processes. By default that of MPMD_TRANSPORT, else auto: shared
    /// memory (shm) between processes of one host where possible, else tcp. `mpmd doctor` shows the
    /// requirements of shm and ucx
    #[arg(long, value_name = "NAME", value_parser = transports::NAMES)]
    transport: Option<String>,
    /// Number of devices of each process; by default the program's choice
    #[arg(long, value_name = "D", value_parser = clap::value_parser!(u32).range(1..))]
    devices_per_process: Option<u32>,
    /// The kind of the devices: cpu, or cuda for graphics processors; or one kind for each process
    /// in order, such as cpu,cuda. The last kind counts for all further processes. By default that
    /// of MPMD_DEVICE, else the program's choice
    #[arg(long, value_name = "KIND[,KIND...]", value_parser = kinds)]
    device: Option<String>,
    /// The peer timeout: the longest time that a process waits for another. By default that of
    /// MPMD_PEER_TIMEOUT, else 60
    #[arg(long, value_name = "SECONDS", value_parser = above_zero)]
    peer_timeout: Option<Duration>,
    /// The time that processes have to end after one has failed, 6 by default; and after SIGTERM or
    /// Ctrl-C, which they all get, 60 by default
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    grace: Option<Duration>,
    /// Have each process record its operations in a file in this folder, for `mpmd trace`
    #[arg(long, value_name = "DIR")]
    trace: Option<PathBuf>,
    /// Print lines as they are, without the rank of the process that wrote them
    #[arg(long)]
    no_prefix: bool,
    /// The program and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

impl RunArgs {
    /// Starts the job, and blocks until all its processes have ended. Returns the exit code of the
    /// first process to fail, 0 if none failed, 127 if the program does not exist, and 126 if it
    /// cannot be executed.
    ///
    /// With `--add`, adds processes to a running job instead. `process_of_job` finds that job: from
    /// the value of `--job` it returns one of the job's processes.
    pub(crate) fn run(
        self,
        process_of_job: impl FnOnce(Option<u32>) -> anyhow::Result<u32>,
    ) -> anyhow::Result<ExitCode> {
        let Some((program, args)) = self.program.split_first() else {
            anyhow::bail!("no program is given");
        };

        // Looked up here, so that the error is printed once and not by every process.
        let found = match find(program) {
            Ok(found) => found,
            Err((code, why)) => {
                crate::files::complain(&why);
                return Ok(ExitCode::from(code));
            }
        };

        if let Some(count) = self.add {
            let job = process_of_job(self.job)?;
            return crate::add::add(count, job, &found, args);
        }

        let this = std::env::current_exe().context("finding this program, to start it again")?;
        let processes = self.processes.unwrap_or(1) as usize;
        let mut launch = Launch::new(processes, &this);
        if let Some(folder) = &self.trace {
            // Made absolute: the program may change its working directory.
            let folder = std::path::absolute(folder).context("finding the folder for the trace")?;
            launch = launch.env(variables::TRACE, folder);
        }
        if let Some(peer_timeout) = self.peer_timeout {
            launch = launch.peer_timeout(peer_timeout);
        }
        if let Some(grace) = self.grace {
            launch = launch.grace(grace);
        }

        let outcome = launch
            .args([OsStr::new(EXEC), OsStr::new("--"), found.as_os_str()])
            .args(args)
            .guarded_by(this, [GUARD])
            .spares(self.spares as usize)
            .restarts(self.restart as usize)
            .chaos(self.chaos)
            .transport(self.transport)
            .devices_per_process(self.devices_per_process.map(|devices| devices as usize))
            .device(self.device)
            .prefix(!self.no_prefix)
            .run()?;

        if let Some(failure) = &outcome.first_failure {
            crate::files::complain(failure);
        }

        // Exit codes are one byte.
        Ok(ExitCode::from(outcome.code().to_le_bytes()[0]))
    }
}

/// Arguments of `mpmd __exec`.
#[derive(Args, Debug)]
pub(crate) struct Exec {
    #[arg(required = true, trailing_var_arg = true)]
    program: Vec<OsString>,
}

impl Exec {
    /// Replaces this process by the program; returns only if that fails. The settings that
    /// [`adopt`] makes in the operating system survive the `exec`. So programs that do not use this
    /// library also end with the launcher.
    pub(crate) fn run(self) -> anyhow::Result<ExitCode> {
        let Some((program, args)) = self.program.split_first() else {
            anyhow::bail!("no program is given");
        };

        adopt()?;
        let error = Command::new(program).args(args).exec();
        // In the words of all programs, so that the launcher shows it once.
        eprintln!("error: {} cannot be started: {error}", program.display());
        Ok(ExitCode::from(NOT_RUN))
    }
}

/// Returns the path at which a shell would find `program`. The error is (exit code of a shell,
/// reason why the program cannot be started).
pub(crate) fn find(program: &OsStr) -> Result<PathBuf, (u8, String)> {
    let mut missing = (
        NO_SUCH_PROGRAM,
        format!(
            "there is no program {}{}",
            program.display(),
            beside(program)
        ),
    );
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places: Vec<PathBuf> = match program.as_bytes().contains(&b'/') {
        true => vec![program.into()],
        false => std::env::split_paths(&path)
            .map(|folder| folder.join(program))
            .collect(),
    };

    for place in places {
        let Ok(data) = place.metadata() else { continue };
        if data.is_file() && data.permissions().mode() & 0o111 != 0 {
            return Ok(place);
        }
        // A name that is looked up means no folder.
        let name = place.display();
        if data.is_dir() && Path::new(program) == place {
            missing = (NOT_RUN, format!("{name} is a folder, not a program"));
        } else if !data.is_dir() {
            missing = (
                NOT_RUN,
                format!("{name} is no program: it may not be executed"),
            );
        }
    }
    Err(missing)
}

/// Returns the part of a message that names the program beside `mpmd` itself: one that is built or
/// installed with it may be in no folder of `PATH`. Empty if there is none.
fn beside(program: &OsStr) -> String {
    let here = std::env::current_exe().unwrap_or_default();
    let path = here.with_file_name(program);
    if !program.as_bytes().contains(&b'/') && path.is_file() {
        return format!(" in PATH, and there is {}: give that path", path.display());
    }
    let cli = Cli::command();
    let mut commands = cli.get_subcommands().map(clap::Command::get_name);
    match commands.find(|name| OsStr::new(name) == program) {
        Some(name) => format!(" in PATH. If `mpmd {name}` is meant, write `-- mpmd {name}`"),
        None => String::new(),
    }
}

/// Checks a list of device kinds for [`variables::DEVICE`]. Returns the list without surrounding
/// blanks.
pub(crate) fn kinds(text: &str) -> anyhow::Result<String> {
    device_kinds(text.trim())?;
    Ok(text.trim().to_owned())
}

/// Parses a time that is longer than zero.
pub(crate) fn above_zero(text: &str) -> anyhow::Result<Duration> {
    let time = seconds(text)?;
    ensure!(!time.is_zero(), "it must be above 0");
    Ok(time)
}

/// Parses a time in seconds, such as `5` or `5s`.
pub(crate) fn seconds(text: &str) -> anyhow::Result<Duration> {
    let number = text.strip_suffix('s').unwrap_or(text);
    let number = number.parse::<f64>().ok();
    let seconds = number.context("not a number of seconds")?;
    Ok(Duration::try_from_secs_f64(seconds)?)
}
