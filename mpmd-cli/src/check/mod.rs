//! `mpmd check`: proves that a schedule or program ends, and adds up its costs, before it runs.

mod others;
mod program;
mod report;
mod schedule;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;
use mpmd_core::pipeline::check::{Budget, Channel};
use program::ProgramArgs;
use schedule::ScheduleArgs;

/// The exit code if there is nothing to check.
const NOTHING: u8 = 2;

/// Arguments of `mpmd check`.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    schedule: ScheduleArgs,
    #[command(flatten)]
    program: ProgramArgs,
    /// The memory limit of a device: bytes, also with KiB, MiB or GiB; for a schedule also
    /// activations, as in 4activations
    #[arg(long, value_name = "BYTES", value_parser = budget)]
    budget: Option<Budget>,
    /// A channel over which the schedule must end: tags, tags:K, direction, pair or single, each
    /// also with ,eager or ,eager:N; may be repeated. By default tags, direction, pair and single
    #[arg(long, value_name = "CHANNEL")]
    channel: Vec<Channel>,
    /// The program and its arguments
    #[arg(last = true, value_name = "PROGRAM")]
    what: Vec<OsString>,
}

/// Checks a schedule or a program. The exit code is 0 if it is proved, 1 if it is refuted, and 2 if
/// there is nothing to check.
pub(crate) fn check(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    checked(args).or_else(|error| {
        eprintln!("mpmd: {error:#}");
        Ok(ExitCode::from(NOTHING))
    })
}

fn checked(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let channels = if args.channel.is_empty() { &Channel::RENDEZVOUS } else { &args.channel[..] };
    if let Some(subject) = &args.schedule.subject {
        anyhow::ensure!(args.what.is_empty(), "a schedule and a program are not checked at once");
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

/// Parses a number of bytes or of activations.
pub(crate) fn budget(text: &str) -> Result<Budget, String> {
    match text.strip_suffix("activations") {
        Some(number) => {
            number.trim().parse().map(Budget::Activations).map_err(|_| {
                format!("not a number of activations: {text:?}; there is 4activations")
            })
        }
        None => bytes(text).map(Budget::Bytes),
    }
}

/// Parses bytes with an optional unit.
fn bytes(text: &str) -> Result<u64, String> {
    let units = [("KiB", 1u64 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let found = units.into_iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)));
    let (number, unit) = found.unwrap_or((text, 1));
    let wrong =
        || format!("not a number of bytes: {text:?}; there are 1048576, 1024KiB, 1MiB, 0.5GiB");
    if let Ok(number) = number.trim().parse::<u64>() {
        return number.checked_mul(unit).ok_or_else(wrong);
    }
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    let product = number * unit as f64;
    // Larger `f64` values are not exact numbers of bytes.
    if (0.0..9e15).contains(&product) { Ok(product as u64) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::{Budget, budget, bytes};

    #[test]
    fn bytes_have_units() {
        assert_eq!(bytes("1000"), Ok(1000));
        assert_eq!(bytes("2MiB"), Ok(2 << 20));
        assert_eq!(bytes("0.5 GiB"), Ok(1 << 29));
        assert_eq!(budget("1KiB"), Ok(Budget::Bytes(1024)));
        assert_eq!(budget("4 activations"), Ok(Budget::Activations(4)));
        assert!(budget("activations").is_err());
        for wrong in ["", "MiB", "-1", "1MB", "NaN", "1e300GiB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
