//! `mpmd schedule`: shows a schedule as torch's text, a table, JSON or Perfetto's JSON.

mod json;
mod source;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use mpmd_schedule::check::{Budget, Channel};
use mpmd_schedule::flow::Leaves;
use mpmd_schedule::simulate::{SimulatedSchedule, simulate_lowered};
use mpmd_schedule::{Dialect, Lowered, Schedule, ScheduleText};

use crate::files::{say, write, write_output};
use crate::trace_events::trace_events;
use source::ScheduleSource;
pub(crate) use source::{built_in, check_numbers, is_file, read_costs, read_text};
pub(crate) use table::{round, step_length, units};

/// The exit status for wrong arguments or files.
const WRONG: u8 = 2;

/// Show a schedule.
///
/// The built-in schedules are GPipe, GPipe-reversed, 1F1B, Eager1F1B, Interleaved1F1B, LoopedBFS,
/// ZB-H1, InterleavedZeroBubble (ZB1P), ZBVZeroBubble (ZBV), DualPipeV and ForwardOnly. Upper or
/// lower case, `-` and `_` make no difference. ByCost is the shortest order found for --costs
/// within --budget.
#[derive(Args, Debug)]
pub(crate) struct ScheduleArgs {
    /// The name of a built-in schedule, or a file with torch's text of one
    name: String,
    /// Number of ranks
    #[arg(long, short = 'p', value_name = "P")]
    ranks: Option<usize>,
    /// Number of microbatches
    #[arg(long, short = 'm', value_name = "M")]
    microbatches: Option<usize>,
    /// Number of stages on each rank; by default two if the schedule needs several, else one
    #[arg(long, short = 'v', value_name = "V")]
    chunks: Option<usize>,
    /// The output format
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// A file with the costs of each stage's passes, as TOML; by default one for each pass (two for
    /// B) and nothing for moves. B is I and then W, and its gradient is sent at its end
    #[arg(long, value_name = "FILE.toml")]
    costs: Option<PathBuf>,
    /// The memory limit of a rank, for ByCost: bytes of activations by the costs, or a number as in
    /// 4activations
    #[arg(long, value_name = "BYTES")]
    budget: Option<Budget>,
    /// The file to write; by default standard output. Text in a file is identical to torch's, with
    /// lines that end with `\r\n`
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Include sends, receives, gathers and reductions in the text (torch's `compute_comms`)
    #[arg(long)]
    comms: bool,
    /// The format of a file, one of torch's two, if it cannot be detected
    #[arg(long, value_enum)]
    flavour: Option<RequestedDialect>,
    /// The maximum width of a table, in characters
    #[arg(long, value_name = "N", default_value_t = 120)]
    width: usize,
}

/// The output format.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Format {
    /// Torch's text: a line for each rank, cells separated by commas
    Text,
    /// A table for a terminal: a line for each rank, time from left to right
    Table,
    /// All facts about the schedule as JSON
    Json,
    /// The timeline as Trace Event JSON, which ui.perfetto.dev opens
    Perfetto,
}

/// Torch's formats.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum RequestedDialect {
    #[value(name = "compute_only", alias = "compute-only")]
    ComputeOnly,
    #[value(name = "compute_comms", alias = "compute-comms")]
    ComputeComms,
}

/// Prints a schedule in the requested format, or writes it to `--output`. Prints an error itself,
/// and then returns the exit status 2.
pub(crate) fn schedule(args: &ScheduleArgs) -> Result<ExitCode> {
    match show(args) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            crate::files::complain(&error);
            Ok(ExitCode::from(WRONG))
        }
    }
}

fn show(args: &ScheduleArgs) -> Result<()> {
    if args.comms && args.format != Format::Text {
        bail!("--comms is for --format text: the others show moves by themselves");
    }

    let source = ScheduleSource::find(args)?;
    let shown = match args.format {
        Format::Text => return text(args, &source),
        Format::Json => json::json(&source, &simulated(&source)?)?,
        Format::Table => table::table(
            &source.schedule,
            &simulated(&source)?,
            &source.costs().unit,
            args.width,
        ),
        Format::Perfetto => format!("{}\n", trace_events(&timeline(&source)?)),
    };
    write_output(args.output.as_ref(), &shown)
}

fn text(args: &ScheduleArgs, source: &ScheduleSource) -> Result<()> {
    let text = match (&source.text, args.comms) {
        (Some(text), true) if text.flavour == Dialect::ComputeComms => text.clone(),
        (_, true) => ScheduleText::of(&source.schedule, Dialect::ComputeComms)?,
        (_, false) => ScheduleText::of(&source.schedule, Dialect::ComputeOnly)?,
    };

    let Some(path) = &args.output else {
        // With line ends that people and other programs expect.
        let lines = text.lines().into_iter().map(|line| line + "\n");
        return say(&lines.collect::<String>());
    };
    write(path, text.to_csv())
}

/// Returns the computations and moves of each rank. They come from the text if it has moves;
/// otherwise the moves that the schedule needs are added.
fn steps(source: &ScheduleSource) -> Result<Lowered> {
    match &source.text {
        Some(text) if text.flavour == Dialect::ComputeComms => Ok(Lowered::of_text(text)),
        _ => Ok(mpmd_schedule::lower(&source.schedule)?),
    }
}

fn simulated(source: &ScheduleSource) -> Result<SimulatedSchedule> {
    let steps = steps(source)?;
    let costs = source.costs();
    Ok(simulate_lowered(
        &steps,
        &costs,
        Leaves::InOrder,
        Channel::Tags,
    )?)
}

fn timeline(source: &ScheduleSource) -> Result<mpmd_schedule::timeline::Timeline> {
    let schedule = &source.schedule;
    let name = schedule.name();
    let ranks = schedule.ranks();
    let microbatches = schedule.microbatches();
    let title = format!("{name}, {ranks} ranks, {microbatches} microbatches");
    Ok(simulated(source)?.timeline(&title, &source.costs().unit))
}

/// Returns, for each rank, the peak number of microbatches between forward and backward pass. A
/// split backward pass ends with its weight gradient. 1 for schedules without backward passes.
fn activations(schedule: &Schedule) -> Vec<usize> {
    use mpmd_schedule::ActionKind::{Backward, BackwardWeight, Forward};
    let peak = |row: &Vec<mpmd_schedule::Action>| {
        let mut live = 0_usize;
        let mut most = 0;
        for action in row {
            match action.kind {
                // Inference keeps no activations.
                Forward if !schedule.has_backward() => most = 1,
                Forward => live += 1,
                Backward | BackwardWeight => live -= 1,
                _ => {}
            }
            most = most.max(live);
        }
        most
    };
    schedule.rows().iter().map(peak).collect()
}
