//! `mpmd trace`: merges the files that the processes of a traced run have written.

use std::fs;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::Args;
use mpmd_base::seconds_text;
use mpmd_record::trace::{NoPlan, ProcessTrace, TracedRun};

use crate::trace_events::trace_events;

/// Arguments of `mpmd trace`.
#[derive(Args, Debug)]
pub(crate) struct TraceArgs {
    /// The folder of the trace: that of `mpmd run --trace` or MPMD_TRACE
    folder: PathBuf,
    /// Write the timeline as Trace Event JSON, which ui.perfetto.dev opens
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Write the measured times of each stage of a pipeline, in seconds, as TOML: costs for
    /// simulations of schedules
    #[arg(long, value_name = "FILE")]
    costs: Option<PathBuf>,
    /// Write the timeline as JSON, with everything that is known of it
    #[arg(long, value_name = "FILE")]
    timeline: Option<PathBuf>,
}

pub(crate) fn trace(args: &TraceArgs) -> Result<ExitCode> {
    let (traces, problems) = ProcessTrace::read_all(&args.folder)?;
    let run = TracedRun::merge(&traces, problems);
    drop(traces);

    if args.output.is_some() || args.timeline.is_some() {
        let timeline = run.timeline_with_plan();
        if let Some(path) = &args.timeline {
            write(path, |out| Ok(serde_json::to_writer(out, &timeline)?))?;
        }
        if let Some(path) = &args.output {
            let events = trace_events(&timeline);
            write(path, |out| Ok(serde_json::to_writer(out, &events)?))?;
        }
    }

    if let Some(path) = &args.costs {
        let costs = run.costs()?.to_toml();
        write(path, |out| Ok(out.write_all(costs.as_bytes())?))?;
    }

    let mut said = run.summary();
    match run.plan() {
        Ok(plan) => {
            said += &format!(
                "by its schedule alone a step would take {}\n",
                seconds_text(plan.end)
            )
        }
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
