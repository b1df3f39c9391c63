//! `mpmd bench`: measures the costs of the framework itself on this machine.
//!
//! Every case is repeated. The median is the figure to quote; p10 and p90 show the noise of the
//! machine.

mod check;
mod dispatch;
mod host;
mod issue;
mod links;
mod memcpy;
mod p2p;
mod pipeline;
mod plain;
mod plan;
mod reshard;
mod schedules;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::{Args, Subcommand};
use mpmd_core::launch::{Launch, OutputMode};
use mpmd_core::prelude::Program;
use mpmd_core::topology::DeviceKind;
use serde_json::json;

/// Measure the costs of the framework.
#[derive(Args, Debug)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// The time to issue a `jit` call: empty, with 64 leaves, and on a process without a part in
    /// it.
    Dispatch(dispatch::DispatchArgs),
    /// Messages and arrays between two processes: latency and bandwidth, 8 bytes to 256 MiB.
    P2p(p2p::P2pArgs),
    /// Planning between shardings of up to thousands of devices, cold and from the cache.
    Plan(plan::PlanArgs),
    /// Proving and simulating schedules of many ranks and microbatches.
    Check(check::CheckArgs),
    /// `device_put` between shardings over four devices each, in one process and over several.
    Reshard(reshard::ReshardArgs),
    /// The costs of links between devices; `--out` writes the file for `MPMD_LINKS`.
    Links(links::LinksArgs),
    /// Training steps of a pipeline with one process for each stage, beside the time of their
    /// kernels alone.
    Pipeline(pipeline::PipelineArgs),
    /// Steps with passes that only wait, under each schedule, beside the simulation.
    Schedules(schedules::SchedulesArgs),
    /// The time in which one process of a large job issues a training step, call by call and
    /// replayed.
    Replay(issue::ReplayArgs),
    /// Training steps of jobs with more and more stages, as threads: the time per operation, which
    /// should stay constant.
    Stages(issue::StagesArgs),
    /// Plain copies, warm and into fresh memory, by one thread and two.
    Memcpy(memcpy::MemcpyArgs),
}

/// Options of every benchmark.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Options {
    /// Print one line of JSON for each case instead of a table.
    #[arg(long)]
    json: bool,
    /// Number of measurements of each case.
    #[arg(long, default_value_t = 30)]
    repeats: usize,
}

/// The option of benchmarks that also run on GPUs.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct DeviceOption {
    /// The kind of the devices: cpu, or cuda for graphics processors, one for each process as far
    /// as there are enough.
    #[arg(long, value_name = "KIND", default_value_t = DeviceKind::Cpu, value_parser = kind)]
    device: DeviceKind,
}

fn kind(name: &str) -> Result<DeviceKind, String> {
    DeviceKind::named(name).ok_or_else(|| {
        let names = DeviceKind::ALL.map(DeviceKind::name);
        format!("no kind of devices: there are {}", names.join(" and "))
    })
}

/// Runs a benchmark.
pub(crate) fn bench(args: &BenchArgs) -> Result<ExitCode> {
    match &args.what {
        What::Dispatch(args) => dispatch::dispatch(args),
        What::P2p(args) => p2p::p2p(args),
        What::Plan(args) => plan::plan(args).map(|()| ExitCode::SUCCESS),
        What::Check(args) => check::check_schedules(args).map(|()| ExitCode::SUCCESS),
        What::Reshard(args) => reshard::reshard(args),
        What::Links(args) => links::links(args),
        What::Pipeline(args) => pipeline::pipeline(args),
        What::Schedules(args) => schedules::schedules(args),
        What::Replay(args) => issue::replay(args),
        What::Stages(args) => issue::stages(args),
        What::Memcpy(args) => memcpy::memcpy(args).map(|()| ExitCode::SUCCESS),
    }
}

/// Runs this same command as a job of `processes` processes. Blocks until it ends; returns its exit
/// code.
fn run_as_job(processes: usize, transport: &str) -> Result<u8> {
    let outcome = Launch::new(processes, std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .transport(Some(transport.to_owned()))
        .output(OutputMode::Quiet0)
        .run()?;
    Ok(u8::try_from(outcome.code()).unwrap_or(1))
}

/// Checks that a job that another launcher has started uses the transport `said`.
///
/// # Errors
///
/// If it uses another transport: the figures would carry the wrong name.
fn check_transport(p: &Program, said: &str) -> Result<()> {
    let transport = p.transport();
    ensure!(transport == said, "the job's arrays go over {transport}, and --transport says {said}");
    Ok(())
}

/// A case and its samples.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    name: &'static str,
    parameters: String,
    unit: &'static str,
    samples: Vec<f64>,
    /// The reference of the median.
    beside: Option<Beside>,
}

/// The reference of a median: its name, and its value in the same unit.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Beside {
    /// A reference for a ratio: a goal that is an upper bound, or a plain copy. The answer has the
    /// median divided by this value.
    Ratio(&'static str, f64),
    /// A lower bound of the cost. The answer has the median minus this value.
    Over(&'static str, f64),
}

impl Case {
    /// Creates a case measured in microseconds.
    pub(crate) fn micros(
        name: &'static str,
        parameters: impl Into<String>,
        samples: impl IntoIterator<Item = Duration>,
    ) -> Self {
        let samples = samples.into_iter().map(|time| time.as_secs_f64() * 1e6).collect();
        Self { name, parameters: parameters.into(), unit: "us", samples, beside: None }
    }

    /// Creates a case measured in GB/s: `bytes` were moved in each of the times.
    pub(crate) fn bandwidth(
        name: &'static str,
        parameters: impl Into<String>,
        bytes: usize,
        times: impl IntoIterator<Item = Duration>,
    ) -> Self {
        let samples =
            times.into_iter().map(|time| bytes as f64 / time.as_secs_f64() / 1e9).collect();
        Self { name, parameters: parameters.into(), unit: "GB/s", samples, beside: None }
    }

    /// Creates a case that counts something.
    pub(crate) fn count(
        name: &'static str,
        parameters: impl Into<String>,
        samples: impl IntoIterator<Item = f64>,
    ) -> Self {
        let samples = samples.into_iter().collect();
        Self { name, parameters: parameters.into(), unit: "", samples, beside: None }
    }

    /// Compares the median with a goal, an upper bound. The answer has their ratio.
    pub(crate) fn within(mut self, goal: f64) -> Self {
        self.beside = Some(Beside::Ratio("goal", goal));
        self
    }

    /// Compares the median with a plain copy of as many bytes, measured in the same run. The answer
    /// has their ratio.
    pub(crate) fn beside(self, memcpy: &Case) -> Self {
        self.ratio_to("memcpy", memcpy)
    }

    /// Adds the ratio to the median of `other`, under the name `name`.
    pub(crate) fn ratio_to(mut self, name: &'static str, other: &Case) -> Self {
        self.beside = Some(Beside::Ratio(name, other.quantile(0.5)));
        self
    }

    /// Adds the difference to the median of `other`, under the name `name`.
    pub(crate) fn over(mut self, name: &'static str, other: &Case) -> Self {
        self.beside = Some(Beside::Over(name, other.quantile(0.5)));
        self
    }

    /// Returns a quantile of the samples; 0.5 is the median.
    fn quantile(&self, share: f64) -> f64 {
        quantile(&self.samples, share)
    }
}

/// Returns a quantile of `samples`; 0.5 is the median. NaN if there are no samples.
fn quantile(samples: &[f64], share: f64) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let index = (share * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(index).copied().unwrap_or(f64::NAN)
}

/// Prints cases as a table or as lines of JSON.
pub(crate) fn show(cases: &[Case], json: bool) {
    let wide = cases.iter().map(|case| case.parameters.len()).max().unwrap_or(0).max(26);
    let ratios = cases.iter().any(|case| case.beside.is_some());
    if !json {
        let (case, parameters) = ("case", "parameters");
        let ratio = if ratios { "           ratio" } else { "" };
        println!(
            "{case:<16} {parameters:<wide$} {:>10} {:>10} {:>10}  unit{ratio}",
            "median", "p10", "p90"
        );
    }
    for case in cases {
        let (median, p10, p90) = (case.quantile(0.5), case.quantile(0.1), case.quantile(0.9));
        if json {
            let mut line = json!({
                "name": case.name,
                "parameters": case.parameters,
                "median": median,
                "p10": p10,
                "p90": p90,
                "unit": case.unit,
                "repeats": case.samples.len(),
            });
            match case.beside {
                Some(Beside::Ratio(name, value)) => {
                    line[format!("of_{name}")] = json!(median / value)
                }
                Some(Beside::Over(name, value)) => {
                    line[format!("over_{name}_{}", case.unit)] = json!(median - value);
                }
                None => {}
            }
            println!("{line}");
        } else {
            let (name, parameters, unit) = (case.name, &case.parameters, case.unit);
            let ratio = case.beside.map(|beside| match beside {
                Beside::Ratio(name, value) => format!("  {:.2} of {name}", median / value),
                Beside::Over(name, value) => format!("  {:+.2} over {name}", median - value),
            });
            let ratio = ratio.unwrap_or_default();
            let line = format!(
                "{name:<16} {parameters:<wide$} {median:>10.3} {p10:>10.3} {p90:>10.3}  {unit:<4}"
            );
            println!("{}", format!("{line}{ratio}").trim_end());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_sorted_samples() {
        let case = Case::micros("x", "", [3, 1, 2, 5, 4].map(Duration::from_micros));
        assert_eq!((case.quantile(0.5), case.quantile(0.0), case.quantile(1.0)), (3.0, 1.0, 5.0));
    }

    #[test]
    fn bandwidth_counts_a_billion_bytes_as_one() {
        let case = Case::bandwidth("x", "", 500_000_000, [Duration::from_millis(250)]);
        assert!((case.quantile(0.5) - 2.0).abs() < 1e-9);
    }
}
