//! Measures arrays between a pair of processes, beside a plain copy. This process starts the others
//! and shows their results.

mod array;
mod handover;
mod memory;
mod p2p_case;
mod pace;
mod samples;
mod table;
mod wake;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use mpmd_launch::{JobEnv, JobOutcome, Launch, OutputMode, stop_name};
use mpmd_layout::topology::DeviceKind;

use crate::case::quantile;
use crate::direct;
use crate::memcpy;
use crate::options::{Carrier, DeviceOption, Size};
use p2p_case::{P2pCase, spin_word};
use pace::SamplePace;
use samples::{P2pTest, Samples};
use table::{P2pRow, RunSetting};

/// Environment variable with the spin time of transport engines.
const SPIN: &str = "MPMD_SPIN";

/// The default number and length of samples.
const USUAL: SamplePace = SamplePace {
    repeats: 15,
    sample: Duration::from_millis(10),
};

#[derive(Args, Clone, Debug)]
pub(crate) struct P2pArgs {
    /// Print one line of JSON for each case instead of a table.
    #[arg(long)]
    json: bool,
    /// Number of measurements of each case, fewer for large sizes; by default 15.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    repeats: Option<u32>,
    /// The transport of the arrays.
    #[arg(long, value_enum, default_value = "shm")]
    transport: Carrier,
    #[command(flatten)]
    on: DeviceOption,
    /// The cases to measure for each size.
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "latency,bandwidth,handover"
    )]
    case: Vec<P2pCase>,
    /// Sizes in bytes, also as 4Ki, 16Mi, 1Gi.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "8,64,512,4Ki,32Ki,256Ki,1Mi,4Mi,16Mi,64Mi,256Mi"
    )]
    sizes: Vec<Size>,
    /// The time that the transport's engine looks for work before it sleeps: auto, never, always,
    /// or a number of microseconds. Some transports always sleep, and ignore this.
    #[arg(long, default_value = "auto", value_parser = spin_word)]
    spin: String,
    /// The length of a sample in microseconds, set by the launcher of the pair.
    #[arg(long, hide = true)]
    sample_us: Option<u64>,
    /// The file for samples, set by the launcher of the pair.
    #[arg(long, hide = true)]
    samples_to: Option<PathBuf>,
}

impl P2pArgs {
    fn pace(&self) -> SamplePace {
        SamplePace {
            repeats: self
                .repeats
                .map_or(USUAL.repeats, |repeats| repeats as usize),
            sample: self.sample_us.map_or(USUAL.sample, Duration::from_micros),
        }
    }

    fn setting(&self) -> RunSetting {
        RunSetting {
            transport: self.transport.name(),
            spin: self.spin.clone(),
        }
    }
}

/// Measures a pair of processes and prints the results. Starts the pair, or works as one of its
/// processes if a launcher has started this process.
pub(super) fn p2p(args: &P2pArgs) -> Result<ExitCode> {
    match JobEnv::from_env()? {
        Some(env) => in_job(args, &env)?,
        None => measure(args)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Does the work of one process of the pair. The first process prints the results, or writes them
/// to `--samples-to`.
fn in_job(args: &P2pArgs, env: &JobEnv) -> Result<()> {
    let processes = env.processes;
    ensure!(
        processes == 2,
        "a pair is measured, and this job has {processes} processes"
    );

    let first = env.process.index() == 0;
    let found = array::in_job(
        args.transport,
        args.on.device,
        &args.sizes,
        &args.case,
        &args.pace(),
    )?;
    match &args.samples_to {
        _ if !first => Ok(()),
        Some(path) => samples::hand_over(&found, path),
        None => {
            let mut rows = P2pRows::default();
            rows.take(found);
            table::show(&rows.0, &args.setting(), args.json);
            Ok(())
        }
    }
}

/// Starts pairs for all requested cases, one after another, and prints their results: lines of JSON
/// after each size, or a table at the end.
fn measure(args: &P2pArgs) -> Result<()> {
    let on_gpu = args.on.device == DeviceKind::Cuda;
    let pace = args.pace();
    let mut all = Vec::new();
    for size in args.sizes.iter().copied() {
        let mut rows = P2pRows::default();
        rows.take(ours(args, size, &pace)?);

        let bytes = size.0;
        let repeats = pace.repeats_at(bytes);
        let copied = match on_gpu {
            true => on_device(bytes, repeats)?,
            false => {
                let samples = memcpy::plain(bytes, 1, repeats).samples;
                Samples {
                    test: P2pTest::Memcpy,
                    bytes,
                    samples,
                }
            }
        };

        rows.take([copied]);
        rows.compare();
        if args.json {
            table::show(&rows.0, &args.setting(), true);
        }
        all.extend(rows.0);
    }

    if !args.json {
        table::show(&all, &args.setting(), false);
    }
    Ok(())
}

/// Measures the driver's own copies of `bytes` bytes within a device's memory.
fn on_device(bytes: usize, repeats: usize) -> Result<Samples> {
    let mut found = Samples::new(P2pTest::DeviceCopy, bytes);
    for time in direct::copies(direct::Way::OnDevice, bytes, repeats)? {
        found.add(1, time);
    }
    Ok(found)
}

/// Measures a pair of processes, or of threads for `inproc`. Blocks until all cases are measured.
fn ours(args: &P2pArgs, size: Size, pace: &SamplePace) -> Result<Vec<Samples>> {
    if args.transport == Carrier::Inproc {
        return Ok(array::in_threads(
            args.on.device,
            &[size],
            &args.case,
            pace,
        )?);
    }
    let samples = tempfile::NamedTempFile::new().context("making a file for samples")?;
    let cases: Vec<&str> = args.case.iter().map(|case| case.name()).collect();

    let words = [
        ("--transport", args.transport.name().to_owned()),
        ("--device", args.on.device.name().to_owned()),
        ("--case", cases.join(",")),
        ("--sizes", size.to_string()),
        ("--spin", args.spin.clone()),
        ("--repeats", pace.repeats.to_string()),
        ("--sample-us", pace.sample.as_micros().to_string()),
    ];

    let this = std::env::current_exe().context("finding this program, to start it again")?;
    let outcome = Launch::new(2, this)
        .args(["bench", "p2p"])
        .args(
            words
                .iter()
                .flat_map(|(name, value)| [*name, value.as_str()]),
        )
        .args(["--samples-to".as_ref(), samples.path().as_os_str()])
        .transport(Some(args.transport.name().to_owned()))
        .env(SPIN, &args.spin)
        .output(OutputMode::Quiet0)
        .run()?;

    check_measured(&outcome)?;
    samples::take_over(samples.path())
}

/// Fails unless all processes of a measurement have run to its end.
fn check_measured(outcome: &JobOutcome) -> Result<()> {
    if let Some(failure) = &outcome.first_failure {
        bail!("the processes were not measured: {failure}");
    }
    if let Some(signal) = outcome.stopped_by {
        bail!(
            "the processes were not measured: stopped by {}",
            stop_name(signal)
        );
    }
    Ok(())
}

/// The rows of the results, in the order in which they first appeared.
#[derive(Default)]
struct P2pRows(Vec<P2pRow>);

impl P2pRows {
    fn take(&mut self, found: impl IntoIterator<Item = Samples>) {
        for Samples {
            test,
            bytes,
            samples,
        } in found
        {
            self.row(test, bytes).ours.extend(samples);
        }
    }

    /// Sets the reference of each row whose test has one.
    fn compare(&mut self) {
        let medians: Vec<(P2pTest, usize, f64)> = self
            .0
            .iter()
            .map(|row| (row.test, row.bytes, quantile(&row.ours, 0.5)))
            .collect();

        for row in &mut self.0 {
            let is_reference = |test: P2pTest| match row.test {
                P2pTest::Handover => test == P2pTest::BareIpc,
                ours => ours.unit() == "GB/s" && !ours.is_plain() && test.is_plain(),
            };
            let mut beside = medians
                .iter()
                .filter(|(test, bytes, _)| *bytes == row.bytes && is_reference(*test));
            row.beside = beside.next().map(|(test, _, median)| (*test, *median));
        }
    }

    /// Returns the row of this test and size. Adds the row if it is missing.
    fn row(&mut self, test: P2pTest, bytes: usize) -> &mut P2pRow {
        let same = |row: &P2pRow| (row.test, row.bytes) == (test, bytes);
        let at = self.0.iter().position(same).unwrap_or_else(|| {
            self.0.push(P2pRow {
                test,
                bytes,
                ours: Vec::new(),
                beside: None,
            });
            self.0.len() - 1
        });
        &mut self.0[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stopped_measurement_is_an_error() {
        let ended = |stopped_by| JobOutcome {
            first_failure: None,
            stopped_by,
            codes: vec![130; 2],
        };
        assert!(check_measured(&ended(None)).is_ok());
        let error = check_measured(&ended(Some(2))).unwrap_err().to_string();
        assert_eq!(error, "the processes were not measured: stopped by Ctrl-C");
    }
}
