//! Progress of a training on stderr: a bar on a terminal, otherwise a line at intervals.

use std::collections::BTreeMap;
use std::io::{Write as _, stderr};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::report::{EvaluationReport, StepReport};

/// Shows the progress of a training and of its evaluations.
pub(super) struct Progress {
    bar: ProgressBar,
    /// Number of updates in earlier runs, and total number of updates at the end of this run.
    steps: (u64, u64),
    /// Seconds after which the training ends; `None` without a time limit.
    seconds: Option<f64>,
    start: Instant,
    /// Sum of the weights of this run's steps.
    tokens: f64,
    /// The last tenth of the run for which a line was printed.
    tenth: Option<u64>,
    /// The time of the last printed line.
    said: Instant,
}

/// The longest time in seconds between two lines of a training without a terminal.
const SILENT: u64 = 30;

impl Progress {
    /// Creates the display for a training. `steps` has the number of updates before this run and at
    /// its end. `seconds` is the time limit.
    pub(super) fn new(steps: (u64, u64), seconds: Option<f64>, start: Instant) -> Self {
        let bar = ProgressBar::new(seconds.map_or(steps.1, |seconds| seconds as u64));
        let style = ProgressStyle::with_template("{bar:30} {msg}  {eta} left");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self {
            bar,
            steps,
            seconds,
            start,
            tokens: 0.0,
            tenth: None,
            said: start,
        }
    }

    /// Shows a step's number and loss, and the tokens per second of this run. Must be called once
    /// for each step of this run.
    pub(super) fn step(&mut self, report: &StepReport) {
        let StepReport {
            step, loss, weight, ..
        } = report;
        let (done, end) = self.steps;
        self.tokens += weight;
        let elapsed = self.start.elapsed().as_secs_f64();
        let rate = self.tokens / elapsed.max(1e-9);
        let of = if self.seconds.is_none() {
            format!("/{end}")
        } else {
            String::new()
        };
        let metrics = text(&report.metrics, 3);
        let message = format!("step {step}{of}  loss {loss:.3}{metrics}  {rate:.0} tokens/s");
        if !self.bar.is_hidden() {
            self.bar.set_message(message);
            self.bar.set_position(if self.seconds.is_some() {
                elapsed as u64
            } else {
                *step
            });
            return;
        }
        let share = match self.seconds {
            Some(seconds) => (elapsed / seconds).clamp(1e-9, 1.0),
            None => (step - done) as f64 / (end - done).max(1) as f64,
        };
        let tenth = Some((10.0 * share) as u64);
        if tenth > self.tenth || self.said.elapsed().as_secs() >= SILENT {
            self.tenth = tenth;
            self.said = Instant::now();
            say(&format!(
                "{message}  {:.0} s left",
                elapsed * (1.0 / share - 1.0)
            ));
        }
    }

    /// Shows in the progress bar that `done` of `all` held-out microbatches are evaluated. Does
    /// nothing without a bar.
    pub(super) fn evaluating(&self, done: usize, all: usize) {
        self.bar
            .set_message(format!("evaluation: {done} of {all} microbatches"));
    }

    /// Shows the mean loss and metrics of an evaluation.
    pub(super) fn evaluated(&self, report: &EvaluationReport) {
        let step = report.step;
        let loss = report.loss();
        let metrics = text(&report.metrics, 4);
        let message = format!("evaluation after step {step}: loss {loss:.4}{metrics}");
        match self.bar.is_hidden() {
            true => say(&message),
            false => self.bar.println(message),
        }
    }
}

/// Formats metrics as text that follows a loss.
fn text(metrics: &BTreeMap<String, f64>, digits: usize) -> String {
    metrics
        .iter()
        .map(|(name, value)| format!("  {name} {value:.digits$}"))
        .collect()
}

/// Prints a line to stderr. Ignores errors, since `eprintln!` would panic if stderr is closed.
pub(super) fn say(line: &str) {
    let _ = stderr().write_all(format!("{line}\n").as_bytes());
}

impl Drop for Progress {
    /// Stops the progress bar and leaves it visible.
    fn drop(&mut self) {
        self.bar.abandon();
    }
}
