//! Progress of a training: a bar on a terminal, otherwise a line at intervals.

use std::time::Instant;

use indicatif::{ProgressBar, ProgressStyle};

use super::train::{Config, StepReport};

/// Shows the progress of a training on stderr: a bar on a terminal, otherwise a line at about each
/// tenth.
pub struct Progress {
    bar: ProgressBar,
    seconds: Option<f64>,
    /// Number of updates in earlier runs.
    done: u64,
    steps: u64,
    tokens: usize,
    start: Instant,
    reports: usize,
    tenths: u64,
}

impl Progress {
    /// Creates the progress of a training that began at `start` and continues after `done` updates.
    /// `seconds` is the training's duration if it has no number of steps.
    pub fn new(seconds: Option<f64>, config: &Config, done: u64, start: Instant) -> Self {
        let steps = config.rates.total;
        let bar = bar(seconds.map_or(steps, |seconds| seconds as u64));
        Self { bar, seconds, done, steps, tokens: config.tokens(), start, reports: 0, tenths: 0 }
    }

    /// Shows a step's number and loss, and the rate so far in tokens per second. It must be called
    /// once for each step of this run.
    pub fn show(&mut self, report: StepReport) {
        let StepReport { step, loss, .. } = report;
        let elapsed = self.start.elapsed().as_secs_f64();
        self.reports += 1;
        let rate = (self.reports * self.tokens) as f64 / elapsed;
        let of = if self.seconds.is_none() { format!("/{}", self.steps) } else { String::new() };
        let message = format!("step {step}{of}  loss {loss:.3}  {rate:.0} tokens/s");
        let steps = self.steps.saturating_sub(self.done).max(1) as f64;
        let done = self.seconds.map_or(self.reports as f64 / steps, |seconds| elapsed / seconds);
        if !self.bar.is_hidden() {
            self.bar.set_message(message);
            self.bar.set_position(if self.seconds.is_some() { elapsed as u64 } else { step });
        } else if self.reports == 1 || (10.0 * done) as u64 > self.tenths {
            self.tenths = (10.0 * done) as u64;
            let left = elapsed * (1.0 / done.clamp(1e-9, 1.0) - 1.0);
            eprintln!("{message}  {left:.0} s left");
        }
    }

    /// Ends the bar and leaves it visible.
    pub fn finish(&self) {
        self.bar.finish();
    }
}

/// Shows the progress of an evaluation on stderr: a bar on a terminal, otherwise a line at each
/// tenth.
pub struct Evaluation {
    bar: ProgressBar,
    /// The last tenth for which a line was written. `None` before the first line.
    tenths: Option<usize>,
}

impl Default for Evaluation {
    fn default() -> Self {
        Self { bar: bar(0), tenths: None }
    }
}

impl Evaluation {
    /// Shows that `done` of `all` sequences are evaluated. If both are equal, ends the bar.
    pub fn show(&mut self, done: usize, all: usize) {
        let message = format!("evaluation: {done} of {all} held-out sequences");
        let tenths = Some(10 * done / all.max(1));
        if !self.bar.is_hidden() {
            self.bar.set_length(all as u64);
            self.bar.set_message(message);
            self.bar.set_position(done as u64);
            if done == all {
                self.bar.finish();
            }
        } else if tenths > self.tenths {
            self.tenths = tenths;
            eprintln!("{message}");
        }
    }
}

fn bar(length: u64) -> ProgressBar {
    let bar = ProgressBar::new(length);
    let style = ProgressStyle::with_template("{bar:30} {msg}  {eta} left");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}
