//! The texts, examples and tokens of a training or an evaluation.

use std::path::{Path, PathBuf};
use std::slice;

use anyhow::ensure;
use mpmd::job::say;
use mpmd::train::data::{Data, HELD_OUT_EVERY, PackedSequences, Sequence, TextBytes, Windows};
use mpmd::{MpmdArray, ProcessId, Program, Result};
use mpmd_models::{Folder, TokenType, Tokens, read_examples, spread_examples};

use super::train::TrainArgs;
use crate::inputs::{InputFiles, check_inputs};

/// The ends of the names of files with numbers of tokens.
const OF_TOKENS: [&str; 2] = ["bin", "npy"];
/// The ends of the names of files with examples.
const OF_EXAMPLES: [&str; 2] = ["jsonl", "json"];

/// True if a file has numbers of tokens, by its name.
pub(super) fn is_of_tokens(file: &Path) -> bool {
    ends_with(file, &OF_TOKENS)
}

/// True if a file has examples, by its name.
pub(super) fn is_of_examples(file: &Path) -> bool {
    ends_with(file, &OF_EXAMPLES)
}

fn ends_with(file: &Path, ends: &[&str]) -> bool {
    let end = file.extension().and_then(|end| end.to_str());
    end.is_some_and(|end| ends.contains(&end))
}

/// The files with training data, by the options that name them.
pub(super) struct TrainingFiles {
    texts: InputFiles,
    data: InputFiles,
    held_out: InputFiles,
}

impl TrainingFiles {
    pub(super) fn new(args: &TrainArgs) -> Self {
        Self {
            texts: InputFiles::new("TEXT", &args.paths),
            data: InputFiles::new("--data", args.data.as_slice()),
            held_out: InputFiles::new("--held-out", args.held_out.as_slice()),
        }
    }

    pub(super) fn all(&self) -> [&InputFiles; 3] {
        [&self.texts, &self.data, &self.held_out]
    }

    /// Checks that the tokenizer and the files can be read, before processes start.
    ///
    /// # Errors
    ///
    /// As for [`check_inputs`]. If `--data` has neither examples nor tokens by its name, or only
    /// one of training and held-out data are examples.
    pub(super) fn check_readable(&self, source: &Folder, args: &TrainArgs) -> anyhow::Result<()> {
        let mut texts = self.texts.paths().to_vec();
        let mut files = self.data.paths().to_vec();
        for file in self.data.paths() {
            ensure!(
                is_of_examples(file) || is_of_tokens(file),
                "--data {}: expected a name that ends with .jsonl or .json, of a file of examples, \
                 or with .bin or .npy, of tokens; a text is given without --data",
                file.display()
            );
        }
        for held_out in self.held_out.paths() {
            let name = held_out.display();
            ensure!(
                is_of_examples(held_out) || !args.is_of_examples(),
                "--held-out {name}: expected a file of examples (.jsonl, .json), as --data is one"
            );
            ensure!(
                args.is_of_examples() || !is_of_examples(held_out),
                "--held-out {name}: expected a text or tokens, as the training data are, found a \
                 file of examples (.jsonl, .json)"
            );
            if is_of_tokens(held_out) || is_of_examples(held_out) {
                files.push(held_out.clone());
            } else {
                texts.push(held_out.clone());
            }
        }
        check_inputs(source, &texts, &files)
    }

    /// Returns an error if a file has changed since the processes compared it. A later epoch of the
    /// job reads the files again.
    fn check_unchanged(&self) -> Result<()> {
        self.all().into_iter().try_for_each(InputFiles::check)
    }

    /// Reads texts, or a file of tokens, on process 0, and returns their tokens on every process.
    fn tokens(
        &self,
        p: &mut Program,
        paths: &[PathBuf],
        source: &Folder,
        raw: Option<TokenType>,
    ) -> Result<Tokens> {
        Tokens::spread(p, || {
            let tokens = read_tokens(paths, source, raw)?;
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
        args: &TrainArgs,
    ) -> Result<Vec<Vec<Sequence>>> {
        spread_examples(p, || {
            let examples = examples_of(file, source, args)?;
            self.check_unchanged()?;
            Ok(examples)
        })
    }
}

/// Reads the examples of each line of a file.
fn examples_of(file: &Path, source: &Folder, args: &TrainArgs) -> Result<Vec<Vec<Sequence>>> {
    let prompts = args.chat.prompts(source);
    let prompts = prompts.map_err(|why| mpmd::Error::Environment(format!("{why:#}")))?;
    read_examples(file, source, &prompts, args.time, "--time")
}

/// Reads the tokens of texts, or of one file of tokens if `raw` has their type.
fn read_tokens(paths: &[PathBuf], source: &Folder, raw: Option<TokenType>) -> Result<Tokens> {
    match (paths, raw) {
        ([file], Some(raw)) => Tokens::of_numbers(file, raw, source),
        _ => Tokens::of(&TextBytes::of(paths)?, source),
    }
}

/// Reads texts, examples or tokens on process 0, and returns them as training data on every
/// process.
///
/// # Errors
///
/// As for [`Tokens::spread`]. If a file cannot be read, is too short, or has an invalid line or
/// token.
pub(super) fn data(
    p: &mut Program,
    source: &Folder,
    args: &TrainArgs,
    inputs: &TrainingFiles,
) -> Result<Box<dyn Data<MpmdArray>>> {
    match args.data.as_deref().filter(|_| args.is_of_examples()) {
        None => Ok(Box::new(windows(p, source, args, inputs)?)),
        Some(file) => Ok(Box::new(packed(p, file, source, args, inputs)?)),
    }
}

/// Returns the error that files have too few tokens, with their option and that of a window.
fn too_short(files: &InputFiles, args: &TrainArgs, why: &mpmd::Error) -> mpmd::Error {
    mpmd::Error::Environment(format!(
        "{}: {why}: give a longer text, or less than --time {}",
        files.named(),
        args.time
    ))
}

/// Returns the texts, or the tokens of `--data`, as windows.
fn windows(
    p: &mut Program,
    source: &Folder,
    args: &TrainArgs,
    inputs: &TrainingFiles,
) -> Result<Windows> {
    let raw: TokenType = args.token_type.into();
    let tokens = match &args.data {
        None => inputs.tokens(p, &args.paths, source, None)?,
        Some(file) => inputs.tokens(p, slice::from_ref(file), source, Some(raw))?,
    };
    let source_files = match &args.data {
        None => &inputs.texts,
        Some(_) => &inputs.data,
    };
    let windows = Windows::new(&tokens, args.time, args.rows);
    let windows = windows.map_err(|why| too_short(source_files, args, &why))?;
    match &args.held_out {
        None => Ok(windows),
        Some(file) => {
            let raw = is_of_tokens(file).then_some(raw);
            let held_out = inputs.tokens(p, slice::from_ref(file), source, raw)?;
            let windows = windows.evaluated_on(&held_out);
            windows.map_err(|why| too_short(&inputs.held_out, args, &why))
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
    let lines = inputs.examples(p, file, source, args)?;
    let mut training = Vec::new();
    let mut held_out = Vec::new();
    if let Some(file) = &args.held_out {
        training.extend(lines.concat());
        held_out.extend(inputs.examples(p, file, source, args)?.concat());
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

/// The file that `--evaluate` names: a text, examples or tokens.
pub(super) struct EvaluatedFile(InputFiles);

impl EvaluatedFile {
    pub(super) fn new(file: &Path) -> Self {
        Self(InputFiles::new("--evaluate", &[file.to_owned()]))
    }

    pub(super) fn file(&self) -> &InputFiles {
        &self.0
    }

    /// Checks that the tokenizer and the file can be read, before processes start.
    ///
    /// # Errors
    ///
    /// As for [`check_inputs`].
    pub(super) fn check_readable(&self, source: &Folder) -> anyhow::Result<()> {
        let paths = self.0.paths();
        match paths
            .iter()
            .any(|file| is_of_tokens(file) || is_of_examples(file))
        {
            true => check_inputs(source, &[], paths),
            false => check_inputs(source, paths, &[]),
        }
    }

    /// Reads the file on process 0, and returns it as held-out data on every process: as a training
    /// that is evaluated on this file.
    ///
    /// # Errors
    ///
    /// As for [`data`].
    pub(super) fn data(
        &self,
        p: &mut Program,
        source: &Folder,
        args: &TrainArgs,
    ) -> Result<Box<dyn Data<MpmdArray>>> {
        let paths = self.0.paths();
        let [file] = paths else {
            return Err(mpmd::Error::kernel("one file is evaluated"));
        };
        if is_of_examples(file) {
            let lines = spread_examples(p, || {
                let examples = examples_of(file, source, args)?;
                self.0.check().map(|()| examples)
            })?;
            let examples = lines.concat();
            // Nothing is trained.
            let training = examples.clone();
            let packed = PackedSequences::new(training, Some(examples), args.time, args.rows)?;
            return Ok(Box::new(packed));
        }

        let raw = is_of_tokens(file).then(|| args.token_type.into());
        let tokens = Tokens::spread(p, || {
            let tokens = read_tokens(paths, source, raw)?;
            self.0.check().map(|()| tokens)
        })?;
        let windows = Windows::new(&tokens, args.time, args.rows)
            .and_then(|windows| windows.evaluated_on(&tokens));
        let windows = windows.map_err(|why| too_short(&self.0, args, &why))?;
        Ok(Box::new(windows))
    }
}
