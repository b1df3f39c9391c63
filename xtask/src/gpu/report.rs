//! The results of all stages: a line for each, and at the end how the failed ones failed.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;

use super::stages::GpuStage;
use super::turn::{SUMMARY, StageFailure, StagePlace, StageTurn};

/// Maximum bytes of failed commands' and tests' output in the summary. A caller may see only the
/// last 12,000 bytes that this program prints.
const OUTPUT: usize = 8000;

/// Minimum bytes of output that are shown of each failure.
const LEAST: usize = 400;

/// The results of the stages that have run so far.
pub(super) struct StageReport<'a> {
    place: &'a StagePlace<'a>,
    lines: String,
    failures: Vec<StageFailure>,
    passed: usize,
    failed: usize,
    not_run: usize,
    /// True if a stage or test did not run for lack of time.
    is_cut: bool,
}

impl<'a> StageReport<'a> {
    pub(super) fn new(place: &'a StagePlace<'a>) -> Self {
        Self {
            place,
            lines: String::new(),
            failures: Vec::new(),
            passed: 0,
            failed: 0,
            not_run: 0,
            is_cut: false,
        }
    }

    /// Adds the result of a stage. Prints the stage's line, and writes it to the summary's file.
    pub(super) fn add(&mut self, stage: &GpuStage, turn: StageTurn<'_>) -> anyhow::Result<()> {
        let took = turn.begin.elapsed().as_secs_f64();
        let (word, count) = match (&turn.not_run, turn.failures.first()) {
            (Some(_), _) => ("NOTRUN", &mut self.not_run),
            (None, Some(_)) => ("FAILED", &mut self.failed),
            (None, None) if turn.is_cut => ("CUT", &mut self.failed),
            (None, None) => ("ok", &mut self.passed),
        };
        *count += 1;

        self.is_cut |= turn.is_cut || self.place.is_stopped();
        let mut detail = turn.not_run.unwrap_or(turn.detail);
        if let (true, Some(failure)) = (detail.is_empty(), turn.failures.first()) {
            detail.clone_from(&failure.what);
        }

        let line = format!(
            "{:10} {word:6} {took:6.1} s of {:3} s  {detail}",
            stage.name, stage.limit
        );
        let line = format!("{}\n", line.trim_end());

        self.failures.extend(turn.failures);
        self.lines += &line;
        print!("{line}");
        self.write(&line)
    }

    /// Prints the summary of all stages, and returns the exit status.
    pub(super) fn end(self, took: Duration) -> anyhow::Result<ExitCode> {
        let mut text = String::new();
        let each = (OUTPUT / self.failures.len().max(1)).max(LEAST);
        for (number, StageFailure { what, output }) in self.failures.iter().enumerate() {
            let _ = writeln!(text, "\n== {what}");
            if number * each < OUTPUT {
                text += last(output.trim(), each);
            }
        }

        let Self {
            place,
            passed,
            failed,
            not_run,
            ..
        } = &self;
        let _ = writeln!(
            text,
            "\n{passed} stages passed, {failed} failed, {not_run} not run, in {:.0} s; commit {}{}",
            took.as_secs_f64(),
            place.kit.commit,
            if place.software {
                "; on a driver in software, whose figures mean nothing"
            } else {
                ""
            }
        );

        self.write(&text)?;
        println!(
            "\n{}{text}results are in {}",
            self.lines,
            place.out.display()
        );

        let is_well = self.failed == 0 && !self.is_cut;
        Ok(if is_well {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }

    fn write(&self, text: &str) -> anyhow::Result<()> {
        let written = self
            .place
            .file(SUMMARY)
            .and_then(|mut file| file.write_all(text.as_bytes()));
        written.with_context(|| format!("writing {SUMMARY}"))
    }
}

/// Returns up to `bytes` bytes from the end of a text, in whole lines if possible.
fn last(text: &str, bytes: usize) -> &str {
    let mut from = text.len().saturating_sub(bytes);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    let end = &text[from..];
    match end.find('\n') {
        Some(at) if from > 0 => &end[at + 1..],
        _ => end,
    }
}

#[cfg(test)]
mod lines {
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;
    use crate::gpu::kit::tests::TestFolder;
    use crate::gpu::stages::STAGES;

    #[test]
    fn summary_has_every_stage_and_ends_of_long_outputs() {
        let folder = TestFolder::new("report");
        let kit = folder.kit("");
        let place = StagePlace::new(&kit, true, Arc::default()).unwrap();
        let mut report = StageReport::new(&place);
        let turns: [fn(&mut StageTurn<'_>); 4] = [
            |turn| turn.detail = "fine".to_owned(),
            |turn| {
                for _ in 0..30 {
                    turn.failed("x", &"é much\n".repeat(1000));
                }
            },
            |turn| turn.not_run("no such program"),
            |turn| turn.cut("no time"),
        ];
        for (stage, fill) in STAGES.iter().zip(turns) {
            let mut turn = StageTurn::new(&place, Instant::now());
            fill(&mut turn);
            report.add(stage, turn).unwrap();
        }
        let is_cut = report.is_cut;
        report.end(Duration::from_secs(3)).unwrap();
        let written = std::fs::read_to_string(place.out.join(SUMMARY)).unwrap();
        assert!(written.starts_with("facts      ok"), "{written}");
        assert!(written.contains("doctor     FAILED") && written.contains("kernel     NOTRUN"));
        assert!(written.contains("1 stages passed, 1 failed, 2 not run, in 3 s; commit 0123"));
        assert!(is_cut && written.len() < 11_000, "{}", written.len());
    }

    #[test]
    fn last_part_of_a_text_begins_with_a_line() {
        assert_eq!(last("one\ntwo\nthree", 7), "three");
        assert_eq!(last("one\ntwo", 100), "one\ntwo");
        assert_eq!(last("ééé", 3), "é");
    }
}
