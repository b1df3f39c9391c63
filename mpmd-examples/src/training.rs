//! The schedule and the printed figures of a program that trains on text.

use std::collections::BTreeMap;
use std::f64::consts::LN_2;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::Context as _;
use mpmd::job::open_output;
use mpmd::pipeline::{Builtin, Schedule, ScheduleText};
use mpmd::train::data::TextBytes;
use mpmd::train::{RunOutcome, StepReport, Trainer};
use mpmd::{MpmdArray, Program};

/// Returns the built-in schedule of this name, or reads a schedule from a file in torch's text
/// format.
///
/// `chunks` is the number of stages of each rank; the default is 2 for schedules with several, else
/// 1. A built-in schedule has 4 ranks and 8 microbatches by default. A file has its own numbers.
///
/// # Errors
///
/// If there is no such schedule, or none for these numbers. If the file is unreadable or invalid.
pub fn schedule(
    name: &str,
    chunks: Option<usize>,
    stages: Option<usize>,
    microbatches: Option<usize>,
) -> anyhow::Result<Schedule> {
    let schedule = if let Some(builtin) = Builtin::named(name) {
        let chunks = chunks.unwrap_or(builtin.default_chunks());
        let stages = stages.unwrap_or(4 * chunks);
        let microbatches = microbatches.unwrap_or(8);
        anyhow::ensure!(
            stages.is_multiple_of(chunks),
            "schedule {name} has {chunks} stages on each rank: give a multiple of {chunks}, not \
             {stages}"
        );
        Schedule::named(name, stages / chunks, microbatches, Some(chunks))?
    } else {
        let text = std::fs::read_to_string(name).with_context(|| {
            let names = Builtin::ALL.map(Builtin::name).join(", ");
            format!("schedule {name:?} is neither built in ({names}) nor a file that can be read")
        })?;
        let title = Path::new(name)
            .file_stem()
            .unwrap_or(name.as_ref())
            .to_string_lossy();
        let text = ScheduleText::parse(&text, None).with_context(|| name.to_owned())?;
        text.schedule(title).with_context(|| name.to_owned())?
    };

    let found = (schedule.stages(), schedule.microbatches());
    let asked = (stages.unwrap_or(found.0), microbatches.unwrap_or(found.1));
    anyhow::ensure!(
        found == asked,
        "schedule {name} is for {} stages and {} microbatches, not {} and {}",
        found.0,
        found.1,
        asked.0,
        asked.1
    );

    anyhow::ensure!(
        schedule.has_backward(),
        "schedule {name} has no backward passes to train with"
    );
    Ok(schedule)
}

/// The shape of a microbatch, which consists of windows of the text.
#[derive(Clone, Copy)]
pub struct WindowShape {
    /// Number of windows.
    pub rows: usize,
    /// Bytes of a window.
    pub time: usize,
}

/// The figures of a training, collected on the process that prints them.
#[derive(Debug)]
pub struct TrainingFigures {
    /// The loss of each step, by step number.
    losses: BTreeMap<u64, f64>,
    /// Number of steps so far. `bytes` is the number of bytes in them.
    steps: usize,
    bytes: f64,
    start: Instant,
    /// Seconds from `start` to the last step.
    seconds: f64,
    file: Option<LossFile>,
    /// The first error of [`TrainingFigures::step`].
    wrong: Option<anyhow::Error>,
}

/// A file with a line for each step: its number, its loss, and the bits of the loss.
#[derive(Debug)]
struct LossFile {
    file: File,
    path: PathBuf,
}

impl LossFile {
    /// Creates the file of losses, with the old file's lines of steps up to `done`. Returns the
    /// file and the losses in these lines.
    ///
    /// The new file replaces a regular one by a rename. A process that was stopped and wakes up
    /// later writes to the old file, which has no name any more.
    fn create(path: &Path, done: u64) -> anyhow::Result<(Self, BTreeMap<u64, f64>)> {
        let cannot = || format!("cannot write {}", path.display());
        let mut losses = BTreeMap::new();
        // A pipe or a device keeps nothing, and reading it could block.
        if done > 0 && path.is_file() {
            // A process that was killed may have left a part of a line.
            let text = std::fs::read_to_string(path).with_context(cannot)?;
            let whole = text
                .split_inclusive('\n')
                .filter(|line| line.ends_with('\n'));
            losses = whole
                .filter_map(Self::parse)
                .filter(|(step, _)| *step <= done)
                .collect();
        }

        let mut lines = losses.iter().map(|(step, loss)| Self::line(*step, *loss));
        let file = open_output(path, |file| {
            lines.try_for_each(|line| file.write_all(line.as_bytes()))
        });
        drop(lines);
        let this = Self {
            file: file.with_context(cannot)?,
            path: path.to_owned(),
        };
        Ok((this, losses))
    }

    fn line(step: u64, loss: f64) -> String {
        format!("{step} {loss} {:016x}\n", loss.to_bits())
    }

    fn parse(line: &str) -> Option<(u64, f64)> {
        let mut words = line.split_whitespace();
        let step = words.next()?.parse().ok()?;
        let bits = u64::from_str_radix(words.nth(1)?, 16).ok()?;
        Some((step, f64::from_bits(bits)))
    }

    fn write(&mut self, step: u64, loss: f64) -> anyhow::Result<()> {
        let written = self.file.write_all(Self::line(step, loss).as_bytes());
        written.with_context(|| format!("cannot write {}", self.path.display()))
    }
}

impl TrainingFigures {
    /// Prints the sizes of the text, of the model and of a step. In a later epoch of the job it
    /// prints the last step before that epoch instead. Starts the clock and creates the file of
    /// losses, which keeps the lines of earlier epochs.
    ///
    /// # Errors
    ///
    /// If the file cannot be created.
    pub fn start(
        p: &Program,
        trainer: &Trainer<MpmdArray>,
        text: &TextBytes,
        windows: WindowShape,
        losses_out: Option<&PathBuf>,
    ) -> anyhow::Result<Self> {
        let schedule = trainer.schedule();
        let bytes = text.bytes().len();
        let files = text.files();
        let name = schedule.name();
        let microbatches = schedule.microbatches();
        let WindowShape { rows, time } = windows;

        if p.epoch() > 1 {
            println!(
                "epoch {} of the job goes on after step {}",
                p.epoch(),
                trainer.steps()
            );
        } else {
            println!("text: {bytes} bytes in {files} files, one block in ten held out");
            println!("model: {}", trainer.model_size(p));
            println!(
                "step: {microbatches} microbatches of {rows} windows of {time} bytes, in the \
                 order of {name}"
            );
            println!("compute: {}", trainer.computed_by(p));
        }

        let done = if p.epoch() > 1 { trainer.steps() } else { 0 };
        let file = losses_out
            .map(|path| LossFile::create(path, done))
            .transpose()?;
        let (file, losses) = file.unzip();

        let losses = losses.unwrap_or_default();
        let start = Instant::now();
        let steps = 0;
        let bytes = 0.0;
        let seconds = 0.0;
        let wrong = None;
        Ok(Self {
            losses,
            steps,
            bytes,
            start,
            seconds,
            file,
            wrong,
        })
    }

    /// Records the figures of a step, and writes its line to the file of losses.
    /// [`TrainingFigures::finish`] returns the first error.
    pub fn step(&mut self, report: &StepReport) {
        let noted = self.note(report);
        self.wrong = self.wrong.take().or(noted.err());
    }

    /// Records the figures of a step. Fails if an earlier epoch of the job reported another loss
    /// for the same step, or if the file cannot be written.
    fn note(&mut self, report: &StepReport) -> anyhow::Result<()> {
        let &StepReport {
            step, loss, weight, ..
        } = report;

        if let Some(before) = self.losses.insert(step, loss) {
            let same = before.to_bits() == loss.to_bits();
            anyhow::ensure!(same, "step {step} has loss {loss}, and had {before} before");
            return Ok(());
        }

        self.steps += 1;
        self.bytes += weight;
        self.seconds = self.start.elapsed().as_secs_f64();
        self.file
            .as_mut()
            .map_or(Ok(()), |file| file.write(step, loss))
    }

    /// Prints the table of losses, and the training speed in tokens per second.
    ///
    /// # Errors
    ///
    /// If the file of losses could not be written, or a repeated step had another loss than before.
    pub fn finish(self, outcome: &RunOutcome) -> anyhow::Result<()> {
        let Self {
            losses,
            steps,
            bytes,
            seconds,
            wrong,
            ..
        } = self;

        let last = losses.values().rev().take(20);
        let count = last.len();
        let training = (count > 0).then(|| last.sum::<f64>() / count as f64);
        let mut rows = vec![(format!("training loss, last {count} steps"), training)];
        if outcome.stopped.is_none() {
            rows.push(("held-out loss".to_owned(), outcome.evaluation));
        }

        println!("{:40}{:>10}{:>10}", "per byte", "nats", "bits");
        for (name, nats) in rows {
            match nats {
                Some(nats) => println!("{name:40}{nats:>10.4}{:>10.4}", nats / LN_2),
                None => println!("{name:40}{:>10}{:>10}", "-", "-"),
            }
        }

        let rate = bytes / seconds;
        println!("{steps} steps in {seconds:.1} s: {rate:.0} tokens/s");
        wrong.map_or(Ok(()), Err)
    }
}
