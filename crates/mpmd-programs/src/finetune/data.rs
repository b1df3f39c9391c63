//! The texts and examples of a training.

use std::path::{Path, PathBuf};

use mpmd::job::say;
use mpmd::train::data::{Data, HELD_OUT_EVERY, PackedSequences, Sequence, TextBytes, Windows};
use mpmd::{MpmdArray, ProcessId, Program, Result};
use mpmd_models::{Folder, Tokens, read_examples, spread_examples};

use super::train::TrainArgs;
use crate::inputs::{InputFiles, check_inputs};

/// The files with training data, by the options that name them.
pub(super) struct TrainingFiles {
    texts: InputFiles,
    examples: InputFiles,
    held_out: InputFiles,
}

impl TrainingFiles {
    pub(super) fn new(args: &TrainArgs) -> Self {
        Self {
            texts: InputFiles::new("TEXT", &args.paths),
            examples: InputFiles::new("--data", args.data.as_slice()),
            held_out: InputFiles::new("--held-out", args.held_out.as_slice()),
        }
    }

    pub(super) fn all(&self) -> [&InputFiles; 3] {
        [&self.texts, &self.examples, &self.held_out]
    }

    /// Checks that the tokenizer and the files can be read, before processes start.
    ///
    /// # Errors
    ///
    /// As for [`check_inputs`].
    pub(super) fn check_readable(&self, source: &Folder) -> anyhow::Result<()> {
        let mut texts = self.texts.paths().to_vec();
        let mut files = self.examples.paths().to_vec();
        let held_out = if files.is_empty() {
            &mut texts
        } else {
            &mut files
        };
        held_out.extend_from_slice(self.held_out.paths());
        check_inputs(source, &texts, &files)
    }

    /// Returns an error if a file has changed since the processes compared it. A later epoch of the
    /// job reads the files again.
    fn check_unchanged(&self) -> Result<()> {
        self.all().into_iter().try_for_each(InputFiles::check)
    }

    /// Reads texts on process 0, and returns their tokens on every process.
    fn tokens(&self, p: &mut Program, paths: &[PathBuf], source: &Folder) -> Result<Tokens> {
        Tokens::spread(p, || {
            let tokens = Tokens::of(&TextBytes::of(paths)?, source)?;
            self.check_unchanged()?;
            Ok(tokens)
        })
    }

    /// Reads examples on process 0, and returns the examples of each line on every process.
    fn examples(
        &self,
        p: &mut Program,
        file: &Path,
        source: &Folder,
        time: usize,
    ) -> Result<Vec<Vec<Sequence>>> {
        spread_examples(p, || {
            let examples = read_examples(file, source, time)?;
            self.check_unchanged()?;
            Ok(examples)
        })
    }
}

/// Reads texts or examples on process 0, and returns them as training data on every process.
///
/// # Errors
///
/// As for [`Tokens::spread`]. If a file cannot be read, is too short, or has an invalid line.
pub(super) fn data(
    p: &mut Program,
    source: &Folder,
    args: &TrainArgs,
    inputs: &TrainingFiles,
) -> Result<Box<dyn Data<MpmdArray>>> {
    match &args.data {
        None => Ok(Box::new(windows(p, source, args, inputs)?)),
        Some(file) => Ok(Box::new(packed(p, file, source, args, inputs)?)),
    }
}

/// Returns the texts as windows of tokens.
fn windows(
    p: &mut Program,
    source: &Folder,
    args: &TrainArgs,
    inputs: &TrainingFiles,
) -> Result<Windows> {
    let tokens = inputs.tokens(p, &args.paths, source)?;
    let windows = Windows::new(&tokens, args.time, args.rows)?;
    match &args.held_out {
        None => Ok(windows),
        Some(text) => {
            let held_out = inputs.tokens(p, std::slice::from_ref(text), source)?;
            windows.evaluated_on(&held_out)
        }
    }
}

/// Returns the examples of `file`, packed into rows.
fn packed(
    p: &mut Program,
    file: &Path,
    source: &Folder,
    args: &TrainArgs,
    inputs: &TrainingFiles,
) -> Result<PackedSequences> {
    let lines = inputs.examples(p, file, source, args.time)?;
    let mut training = Vec::new();
    let mut held_out = Vec::new();
    if let Some(file) = &args.held_out {
        training.extend(lines.concat());
        held_out.extend(inputs.examples(p, file, source, args.time)?.concat());
    } else {
        // All examples of a line are held out, or none: they may have the same messages.
        for (at, line) in lines.into_iter().enumerate() {
            let is_held_out = at % HELD_OUT_EVERY == HELD_OUT_EVERY - 1;
            let examples = if is_held_out {
                &mut held_out
            } else {
                &mut training
            };
            examples.extend(line);
        }
    }

    let packed = PackedSequences::new(training, Some(held_out), args.time, args.rows)?;
    if p.process() == ProcessId(0) && !p.is_dry_run() {
        let rows = packed.training_rows();
        let time = args.time;
        let steps = rows as f64 / (args.rows * args.microbatches) as f64;
        say(&format!(
            "epoch: {rows} rows of {time} tokens, {steps:.1} steps"
        ));
    }
    Ok(packed)
}
