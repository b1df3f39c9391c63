//! `mpmd schedule`: a schedule as torch's text, as a table in a terminal, as data, or as a picture.

mod by_cost;
mod json;
mod source;
mod table;

use std::fs;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use mpmd_core::pipeline::check::{Budget, Channel, check};
use mpmd_core::pipeline::flow::{Flow, Leaves};
use mpmd_core::pipeline::simulate::{SimulatedSchedule, simulate_lowered};
use mpmd_core::pipeline::{Flavour, Lowered, Schedule, Sidecar, Text};

pub(crate) use by_cost::{by_cost, is_by_cost};
use source::Source;
pub(crate) use source::{is_file, read, read_costs};

/// The exit status where arguments or files are wrong.
const WRONG: u8 = 2;

/// Show a schedule.
///
/// Built-in are GPipe, GPipe-reversed, 1F1B, Eager1F1B, Interleaved1F1B, LoopedBFS, ZB-H1,
/// InterleavedZeroBubble (ZB1P), ZBVZeroBubble (ZBV), DualPipeV and ForwardOnly, in upper or lower
/// case, with or without `-` and `_`. ByCost is the shortest order that is found for --costs within
/// --budget.
#[derive(Args, Debug)]
pub(crate) struct ScheduleArgs {
    /// The name of a built-in schedule, or a file with torch's text of one. What lies beside
    /// FILE.csv as FILE.toml is read, too, and must be of the same schedule
    name: String,
    /// How many ranks
    #[arg(long, short = 'p', value_name = "P")]
    ranks: Option<usize>,
    /// How many microbatches
    #[arg(long, short = 'm', value_name = "M")]
    microbatches: Option<usize>,
    /// How many stages on each rank; two where the schedule is about several, else one
    #[arg(long, short = 'v', value_name = "V")]
    chunks: Option<usize>,
    /// What to show it as
    #[arg(long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// A file with what the passes of each stage cost, as TOML; each takes one where there is none,
    /// and moves nothing. B is I and W, its gradient leaves at its end
    #[arg(long, value_name = "FILE.toml")]
    costs: Option<PathBuf>,
    /// The most that a rank may hold at a time, for ByCost: bytes of activations as the costs have
    /// them, or as in 4activations
    #[arg(long, value_name = "BYTES", value_parser = crate::check::budget)]
    budget: Option<Budget>,
    /// Where to; standard output where there is none. Text in a file is torch's to the byte, its
    /// lines end with `\r\n`
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// With sends, receives, gathers and reductions in the text (torch's `compute_comms`)
    #[arg(long)]
    comms: bool,
    /// Beside FILE.csv of --output write FILE.toml, with what the text cannot say
    #[arg(long, requires = "output")]
    sidecar: bool,
    /// Which of torch's two formats a file is in, where that is not to be found out
    #[arg(long, value_enum)]
    flavour: Option<Asked>,
    /// How many characters wide a table may be
    #[arg(long, value_name = "N", default_value_t = 120)]
    width: usize,
}

/// What a schedule is shown as.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Format {
    /// Torch's text: a line for each rank, cells with commas between them
    Text,
    /// For a terminal: a line for each rank, time from left to right
    Table,
    /// All that is known of it
    Json,
    /// A drawing for documents
    Svg,
    /// A page that can be zoomed and asked
    Html,
}

/// Torch's formats.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
enum Asked {
    #[value(name = "compute_only", alias = "compute-only")]
    ComputeOnly,
    #[value(name = "compute_comms", alias = "compute-comms")]
    ComputeComms,
}

/// Shows a schedule.
pub(crate) fn schedule(args: &ScheduleArgs) -> Result<ExitCode> {
    match show(args) {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error) => {
            eprintln!("mpmd: {error:#}");
            Ok(ExitCode::from(WRONG))
        }
    }
}

fn show(args: &ScheduleArgs) -> Result<()> {
    if args.sidecar && args.format != Format::Text {
        bail!("--sidecar lies beside a text, and --format is another");
    }
    if args.comms && args.format != Format::Text {
        bail!("--comms is for --format text: the others show moves by themselves");
    }
    let source = Source::find(args)?;
    let shown = match args.format {
        Format::Text => return text(args, &source),
        Format::Json => json::json(&source, &simulated(&source)?)?,
        Format::Table => {
            table::table(&source.schedule, &simulated(&source)?, &source.costs().unit, args.width)
        }
        Format::Svg => crate::draw::svg(&timeline(&source)?),
        Format::Html => crate::draw::html(&timeline(&source)?),
    };
    write(args, shown.as_bytes())
}

fn text(args: &ScheduleArgs, source: &Source) -> Result<()> {
    let text = match (&source.text, args.comms) {
        (Some(text), true) if text.flavour == Flavour::ComputeComms => text.clone(),
        (_, true) => Text::of(&source.schedule, Flavour::ComputeComms)?,
        (_, false) => Text::of(&source.schedule, Flavour::ComputeOnly)?,
    };
    if let Some(path) = args.output.as_ref().filter(|_| args.sidecar) {
        let same = path.extension().is_some_and(|extension| extension == "toml");
        anyhow::ensure!(!same, "{} would be text and sidecar at once", path.display());
    }
    let Some(path) = &args.output else {
        // Line ends as people and other programs have them.
        let lines = text.lines().into_iter().map(|line| line + "\n");
        return write(args, lines.collect::<String>().as_bytes());
    };
    write(args, text.to_csv().as_bytes())?;
    if args.sidecar {
        let mut sidecar = Sidecar::new(&source.schedule, &text);
        let steps = match text.flavour {
            Flavour::ComputeComms => Lowered::of_text(&text),
            Flavour::ComputeOnly => mpmd_core::pipeline::lower(&source.schedule)?,
        };
        sidecar.channel = proved_for(&steps)?.map(|channel| channel.to_string());
        sidecar.costs.clone_from(&source.costs);
        let path = path.with_extension("toml");
        fs::write(&path, sidecar.to_toml())
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The poorest of the channels over which it comes to its end, where what is computed leaves as
/// torch has it.
fn proved_for(steps: &Lowered) -> Result<Option<Channel>> {
    let flow = Flow::of_lowered(steps, Leaves::InOrder)?;
    Ok(Channel::RENDEZVOUS.into_iter().rev().find(|channel| check(&flow, *channel).is_ok()))
}

/// What each rank does with the moves: those of the text where it has them.
fn steps(source: &Source) -> Result<Lowered> {
    match &source.text {
        Some(text) if text.flavour == Flavour::ComputeComms => Ok(Lowered::of_text(text)),
        _ => Ok(mpmd_core::pipeline::lower(&source.schedule)?),
    }
}

fn simulated(source: &Source) -> Result<SimulatedSchedule> {
    let (steps, costs) = (steps(source)?, source.costs());
    Ok(simulate_lowered(&steps, &costs, Leaves::InOrder, Channel::TAGS)?)
}

fn timeline(source: &Source) -> Result<mpmd_core::trace::Timeline> {
    let schedule = &source.schedule;
    let (name, ranks, microbatches) = (schedule.name(), schedule.ranks(), schedule.microbatches());
    let title = format!("{name}, {ranks} ranks, {microbatches} microbatches");
    Ok(simulated(source)?.timeline(&title, &source.costs().unit))
}

fn write(args: &ScheduleArgs, bytes: &[u8]) -> Result<()> {
    match &args.output {
        Some(path) => {
            fs::write(path, bytes).with_context(|| format!("cannot write {}", path.display()))
        }
        None => match io::stdout().write_all(bytes).and_then(|()| io::stdout().flush()) {
            // Who reads has seen enough.
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            done => done.context("cannot write to standard output"),
        },
    }
}

/// For each rank the most forward passes that are begun and whose gradients are not all computed.
fn activations(schedule: &Schedule) -> Vec<usize> {
    use mpmd_core::pipeline::ActionKind::{Backward, BackwardWeight, Forward};
    let peak = |row: &Vec<mpmd_core::pipeline::Action>| {
        let (mut live, mut most) = (0_usize, 0);
        for action in row {
            match action.kind {
                // In inference nothing is kept.
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
