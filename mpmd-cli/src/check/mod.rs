//! `mpmd check`: whether what is to run comes to its end, and what it takes, before it runs.

mod program;
mod report;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::Args;
use mpmd_core::pipeline::check::Channel;
use program::ProgramArgs;

/// Arguments of `mpmd check`.
#[derive(Args, Debug)]
pub(crate) struct CheckArgs {
    #[command(flatten)]
    program: ProgramArgs,
    /// The most memory that a device may take: bytes, or with KiB, MiB or GiB behind them
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    budget: Option<u64>,
    /// Over what it is to end: tags, tags:K, direction, pair or single, each also with ,eager or ,eager:N; more than
    /// one with blanks between them. By default tags, direction, pair and single
    #[arg(long, value_name = "CHANNEL", num_args = 1..)]
    channel: Vec<Channel>,
    /// The program and its arguments
    #[arg(last = true, value_name = "PROGRAM")]
    what: Vec<OsString>,
}

/// Checks; the exit code is 0 where it is proved, 1 where it is refuted, and 2 where there is nothing to check.
pub(crate) fn check(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let channels = if args.channel.is_empty() { &Channel::RENDEZVOUS } else { &args.channel[..] };
    let Some(processes) = args.program.processes else {
        anyhow::bail!("say how many processes the program is to run as: mpmd check -n N -- program");
    };
    args.program.check(processes, &args.what, args.budget, channels)
}

/// Bytes with their unit.
fn bytes(text: &str) -> Result<u64, String> {
    let units = [("KiB", 1u64 << 10), ("MiB", 1 << 20), ("GiB", 1 << 30)];
    let found = units.into_iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)));
    let (number, unit) = found.unwrap_or((text, 1));
    let wrong = || format!("not a number of bytes: {text:?}; there are 1048576, 1024KiB, 1MiB, 0.5GiB");
    if let Ok(number) = number.trim().parse::<u64>() {
        return number.checked_mul(unit).ok_or_else(wrong);
    }
    let number: f64 = number.trim().parse().map_err(|_| wrong())?;
    let product = number * unit as f64;
    // Larger ones are no whole numbers of bytes any more.
    if (0.0..9e15).contains(&product) { Ok(product as u64) } else { Err(wrong()) }
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn bytes_have_units() {
        assert_eq!(bytes("1000"), Ok(1000));
        assert_eq!(bytes("2MiB"), Ok(2 << 20));
        assert_eq!(bytes("0.5 GiB"), Ok(1 << 29));
        for wrong in ["", "MiB", "-1", "1MB", "NaN", "1e300GiB"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }
}
