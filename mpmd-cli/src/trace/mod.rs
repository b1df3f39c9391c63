//! `mpmd trace`: merges the files that the processes of a traced run have written.

use std::fs;
use std::io::{BufWriter, Write as _};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;
use mpmd_record::trace::{NoPlan, ProcessTrace, Run};

use crate::draw;

/// Arguments of `mpmd trace`.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// The folder of the trace: that of `mpmd run --trace` or MPMD_TRACE
    folder: PathBuf,
    /// Write a page that shows the timeline and can be zoomed
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write the measured times of each stage of a pipeline, in seconds, as TOML: costs for
    /// simulations of schedules
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// Write the timeline as JSON, for `mpmd draw`
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
    /// These steps only, as 3 or 3..7, both ends included
    #[arg(long, value_name = "A..B", value_parser = steps)]
    steps: Option<RangeInclusive<u64>>,
}

pub(crate) fn trace(args: &TraceArgs) -> Result<ExitCode> {
    let (traces, problems) = ProcessTrace::read_all(&args.folder)?;
    let mut run = Run::merge(&traces, problems);
    drop(traces);
    if let Some(steps) = &args.steps {
        run = run.of_steps(steps.clone()).map_err(anyhow::Error::msg)?;
    }
    if args.output.is_some() || args.timeline.is_some() {
        let timeline = run.timeline_with_plan();
        if let Some(path) = &args.timeline {
            write(path, |out| Ok(serde_json::to_writer(out, &timeline)?))?;
        }
        if let Some(path) = &args.output {
            write(path, |out| Ok(out.write_all(draw::html(&timeline).as_bytes())?))?;
        }
    }
    if let Some(path) = &args.costs {
        let costs = run.costs()?.to_toml();
        write(path, |out| Ok(out.write_all(costs.as_bytes())?))?;
    }
    let mut said = run.summary();
    match run.plan() {
        Ok(plan) => said += &format!("by its schedule alone a step would take {:.6} s\n", plan.end),
        Err(NoPlan::NoSchedule) => {}
        Err(error) => said += &format!("note: there is no plan to compare with: {error}\n"),
    }
    crate::files::say(&said)?;
    Ok(ExitCode::SUCCESS)
}

fn write(path: &Path, content: impl FnOnce(&mut BufWriter<fs::File>) -> Result<()>) -> Result<()> {
    let writing = || format!("writing {}", path.display());
    let mut out = BufWriter::new(fs::File::create(path).with_context(writing)?);
    content(&mut out)?;
    out.flush().with_context(writing)
}

fn steps(text: &str) -> Result<RangeInclusive<u64>, String> {
    let number = |text: &str| {
        text.trim().parse::<u64>().map_err(|_| format!("{text:?} is not the number of a step"))
    };
    let (first, last) = text.split_once("..").unwrap_or((text, text));
    let (first, last) = (number(first)?, number(last.trim_start_matches('='))?);
    if first > last {
        return Err(format!("step {first} comes after step {last}"));
    }
    Ok(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_one_or_a_range() {
        assert_eq!(steps("3"), Ok(3..=3));
        assert_eq!(steps("3..7"), Ok(3..=7));
        assert_eq!(steps("3..=7"), Ok(3..=7));
        assert!(steps("7..3").unwrap_err().contains("comes after"));
        assert!(steps("a..3").unwrap_err().contains("not the number"));
    }
}
