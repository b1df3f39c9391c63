//! Arguments and printed figures of programs that train on text.

use std::f64::consts::LN_2;
use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context as _;
use clap::builder::RangedU64ValueParser;
use mpmd::pipeline::{Builtin, Schedule};
use mpmd::{MpmdArray, Program};
use mpmd_train::data::Text;
use mpmd_train::{Outcome, Rate, StepReport, Trainer};

/// Arguments of a training on text.
#[derive(Clone, Debug, clap::Args)]
pub struct TrainingArgs {
    /// Files and folders to train on; default: the text of this repository
    pub paths: Vec<PathBuf>,
    /// Number of updates
    #[arg(long, default_value_t = 1000, value_parser = at_least(1))]
    pub steps: usize,
    /// Seed of the initial weights and of the windows of each step
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Number of stages
    #[arg(long, default_value_t = 4, value_parser = at_least(2))]
    pub stages: usize,
    /// Order of the passes: a built-in schedule, such as gpipe, 1f1b, interleaved or zb-h1
    #[arg(long, value_name = "NAME", default_value = "1f1b")]
    pub schedule: String,
    /// Microbatches of a step
    #[arg(long, default_value_t = 8, value_parser = at_least(1))]
    pub microbatches: usize,
    /// Windows of a microbatch
    #[arg(long, default_value_t = 2, value_parser = at_least(1))]
    pub rows: usize,
    /// Learning rate at the start; it falls linearly to a tenth
    #[arg(long, default_value_t = 3e-3)]
    pub lr: f64,
    /// Write each step's number, its loss, and the bits of the loss in hexadecimal to this file
    #[arg(long, value_name = "FILE")]
    pub losses_out: Option<PathBuf>,
}

/// Returns a parser of numbers from `least` on. Larger ones than its limit would overflow products
/// of sizes.
pub fn at_least(least: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(least..=1 << 30)
}

impl TrainingArgs {
    /// Reads the text.
    ///
    /// # Errors
    ///
    /// As [`Text::of`].
    pub fn text(&self) -> mpmd::Result<Text> {
        match &self.paths[..] {
            [] => Text::of_this_repository(),
            paths => Text::of(paths),
        }
    }

    /// Returns the schedule.
    ///
    /// # Errors
    ///
    /// If there is no such schedule, or none for these numbers of stages and microbatches.
    pub fn schedule(&self) -> anyhow::Result<Schedule> {
        let chunks = Builtin::named(&self.schedule).map_or(1, Builtin::default_chunks);
        let ranks = self.stages / chunks;
        let schedule = Schedule::named(&self.schedule, ranks, self.microbatches, Some(chunks))?;
        let (name, stages) = (schedule.name(), schedule.stages());
        anyhow::ensure!(
            stages == self.stages,
            "{name} has {chunks} stages a rank: --stages {} is no multiple of it",
            self.stages
        );
        Ok(schedule)
    }

    /// Returns the learning rate, which falls linearly to a tenth.
    pub fn rate(&self) -> Rate {
        let (peak, total) = (self.lr, self.steps as u64);
        Rate::WarmupLinear { peak, floor: peak / 10.0, warmup: 0, total }
    }
}

/// The figures of a training, on the process that prints them.
#[derive(Debug)]
pub struct Figures {
    losses: Vec<f64>,
    bytes: f64,
    start: Instant,
    /// Seconds from `start` to the last step.
    seconds: f64,
    file: Option<(File, PathBuf)>,
}

impl Figures {
    /// Prints the sizes of the text, of the model and of the training. Starts the clock, and
    /// creates the file of losses. `time` is the number of bytes of a window.
    ///
    /// # Errors
    ///
    /// If the file cannot be created.
    pub fn start(
        p: &Program,
        trainer: &Trainer<MpmdArray>,
        args: &TrainingArgs,
        text: &Text,
        time: usize,
    ) -> anyhow::Result<Self> {
        let (pipeline, processes) = (trainer.pipeline(), p.processes());
        let stages = pipeline.stages();
        let arrays = (0..stages).flat_map(|stage| pipeline.params(stage));
        let parameters: usize = arrays.map(|(_, array)| array.aval().elements()).sum();
        let (bytes, files) = (text.bytes().len(), text.files());
        println!("text: {bytes} bytes in {files} files, one block in ten held out");
        let devices = trainer.schedule().ranks();
        let plural = if processes == 1 { "process" } else { "processes" };
        println!(
            "model: {parameters} parameters in {stages} stages, on {devices} devices of \
             {processes} {plural}"
        );
        let TrainingArgs { steps, microbatches, rows, .. } = args;
        println!(
            "training: {steps} steps of {microbatches} microbatches of {rows} windows of {time} \
             bytes"
        );
        let create = |path: &PathBuf| -> anyhow::Result<(File, PathBuf)> {
            let file = File::create(path);
            Ok((file.with_context(|| format!("cannot write {}", path.display()))?, path.clone()))
        };
        let file = args.losses_out.as_ref().map(create).transpose()?;
        Ok(Self { losses: Vec::new(), bytes: 0.0, start: Instant::now(), seconds: 0.0, file })
    }

    /// Keeps the figures of a step.
    pub fn step(&mut self, report: &StepReport) {
        self.losses.push(report.loss);
        self.bytes += report.weight;
        self.seconds = self.start.elapsed().as_secs_f64();
    }

    /// Writes the file of losses, and prints the table of losses and the rate.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn finish(self, text: &Text, outcome: &Outcome) -> anyhow::Result<()> {
        let Self { losses, bytes, seconds, file, .. } = self;
        if let Some((mut file, path)) = file {
            let line =
                |(step, loss): (usize, &f64)| format!("{step} {loss} {:016x}\n", loss.to_bits());
            let lines: String = losses.iter().enumerate().map(line).collect();
            file.write_all(lines.as_bytes())
                .with_context(|| format!("cannot write {}", path.display()))?;
        }
        let last = &losses[losses.len().saturating_sub(50)..];
        let training = (!last.is_empty()).then(|| last.iter().sum::<f64>() / last.len() as f64);
        println!("{:40}{:>10}{:>10}", "per byte", "nats", "bits");
        for (name, nats) in [
            (format!("training loss, last {} steps", last.len()), training),
            ("held-out loss".to_owned(), outcome.evaluation),
            ("held-out loss of byte frequencies".to_owned(), byte_frequency_loss(text)),
        ] {
            match nats {
                Some(nats) => println!("{name:40}{nats:>10.4}{:>10.4}", nats / LN_2),
                None => println!("{name:40}{:>10}{:>10}", "-", "-"),
            }
        }
        let (steps, rate) = (losses.len() as f64 / seconds, bytes / seconds);
        println!("{} steps in {seconds:.1} s: {steps:.1} steps/s, {rate:.0} bytes/s", losses.len());
        Ok(())
    }
}

/// Returns the cross-entropy of the held-out bytes under the byte frequencies of the training text,
/// in nats per byte. Each count is one more than the number seen. `None` if nothing is held out.
fn byte_frequency_loss(text: &Text) -> Option<f64> {
    let mut seen = [1u64; 256];
    for byte in text.training_runs().flat_map(|run| &text.bytes()[run]) {
        seen[usize::from(*byte)] += 1;
    }
    let total = seen.iter().sum::<u64>() as f64;
    let held_out = text.held_out_blocks().flat_map(|block| &text.bytes()[block]);
    let losses = held_out.map(|byte| -(seen[usize::from(*byte)] as f64 / total).ln());
    let (bytes, sum) = losses.fold((0u64, 0.0), |(bytes, sum), loss| (bytes + 1, sum + loss));
    (bytes > 0).then(|| sum / bytes as f64)
}

#[cfg(test)]
mod tests {
    use mpmd_train::data::{BLOCK, HELD_OUT_EVERY};

    use super::*;

    #[test]
    fn loss_matches_its_definition() {
        let mark =
            |at: usize| if at / BLOCK % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 { b'h' } else { b't' };
        let text = Text::of_files(&[(0..10 * BLOCK - 1).map(mark).collect()]).unwrap();
        // Training text has no `h`, and each of 256 counts is one more. The separator ends the
        // held-out block.
        let total = (9 * BLOCK + 256) as f64;
        assert!((byte_frequency_loss(&text).unwrap() - total.ln()).abs() < 1e-12);
        let even: Vec<u8> = (0..20 * BLOCK).map(|i| if i % 2 == 0 { b'a' } else { b'b' }).collect();
        let loss = byte_frequency_loss(&Text::of_files(&[even]).unwrap()).unwrap();
        assert!((loss - 2f64.ln()).abs() < 0.01, "{loss}");
        assert_eq!(byte_frequency_loss(&Text::of_files(&[vec![b'x'; 9]]).unwrap()), None);
    }
}
