//! `mpmd check`: proves that a schedule or program ends, and adds up its costs, before it runs.

mod other_processes;
mod program;
mod report;
mod schedule;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;
use mpmd_schedule::check::{Budget, Channel};
use program::ProgramArgs;
use schedule::CheckScheduleArgs;

/// The exit code if an error prevents the check.
const NOTHING: u8 = 2;

/// Arguments of `mpmd check`.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    schedule: CheckScheduleArgs,
    #[command(flatten)]
    program: ProgramArgs,
    /// The memory limit of a device: bytes, also with KiB, MiB or GiB; for a schedule also
    /// activations, as in 4activations
    #[arg(long, value_name = "BYTES")]
    budget: Option<Budget>,
    /// A channel over which the schedule must end: tags, direction, pair or single; may be
    /// repeated. By default all
    #[arg(long, value_name = "CHANNEL")]
    channel: Vec<Channel>,
    /// The program and its arguments
    #[arg(last = true, value_name = "PROGRAM")]
    what: Vec<OsString>,
}

/// Checks a schedule or a program and prints a report. The exit code is 0 if the check proves it
/// and 1 if the check refutes it. An error is printed, and gives 2.
pub(crate) fn check(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    checked(args).or_else(|error| {
        crate::files::complain(&error);
        Ok(ExitCode::from(NOTHING))
    })
}

fn checked(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let channels = if args.channel.is_empty() {
        &Channel::ALL
    } else {
        &args.channel[..]
    };

    if let Some(subject) = &args.schedule.subject {
        anyhow::ensure!(
            args.what.is_empty(),
            "a schedule and a program are not checked at once"
        );
        return args.schedule.check(subject, args.budget, channels);
    }

    let Some(processes) = args.program.processes else {
        anyhow::bail!(
            "say what to check: mpmd check FILE.csv, mpmd check NAME -p P -m M, mpmd check -n N \
             -- program"
        );
    };

    let budget = match args.budget {
        Some(Budget::Activations(_)) => anyhow::bail!("the budget of a program is in bytes"),
        Some(Budget::Bytes(bytes)) => Some(bytes),
        None => None,
    };
    args.program.check(processes, &args.what, budget, channels)
}
