//! The program `generate`: a prompt to text.

use std::borrow::Cow;
use std::cell::RefCell;
use std::io::{IsTerminal as _, Write as _, stdout};
use std::process::ExitCode;

use anyhow::ensure;
use clap::builder::NonEmptyStringValueParser;
use mpmd::{Error, ProcessId, Program, Result};
use mpmd_job::{JobArgs, at_least, not_negative, printable, say};
use serde::Serialize;
use tokenizers::Tokenizer;

use crate::cut::{CutArgs, Held, Room};
use crate::folder::Folder;
use crate::inputs::compared;
use crate::sample::Sampling;
use crate::stages::Stages;
use crate::template::{Message, Templates};
use crate::text::Text;
use crate::tokens::{check_inputs, check_rows, encode_prompt, spread, tokenizer};
use crate::wrong;

/// Arguments of a generation.
#[derive(Clone, Debug, clap::Args)]
pub struct GenerateArgs {
    /// The text to continue
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// The tokens to continue
    #[arg(long, value_name = "ID,…", value_delimiter = ',', value_parser = token,
        conflicts_with = "prompt")]
    pub prompt_ids: Option<Vec<u32>>,
    /// A message to reply to, by the folder's chat template
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["prompt", "prompt_ids"])]
    pub chat: Option<String>,
    /// Largest number of new tokens
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least(1))]
    pub tokens: usize,
    /// Tokens that a sequence may have, prompt included; default: as many as are needed. With the
    /// rope types `longrope` and `dynamic` the text depends on it: positions are scaled for this
    /// length
    #[arg(long, value_name = "N", value_parser = at_least(1))]
    pub max_len: Option<usize>,
    /// Divisor of the logits; 0 takes the most probable token. Without it, tokens are drawn if
    /// generation_config.json says `do_sample`; it also has the defaults of the next four
    #[arg(long, value_parser = not_negative)]
    pub temperature: Option<f64>,
    /// Choose among this number of the most probable tokens; 0: among all
    #[arg(long, value_name = "N")]
    pub top_k: Option<usize>,
    /// Choose among the most probable tokens that have this probability together
    #[arg(long, value_name = "P", value_parser = not_negative)]
    pub top_p: Option<f64>,
    /// Choose among tokens with at least this share of the most probable one's probability
    #[arg(long, value_name = "P", value_parser = not_negative)]
    pub min_p: Option<f64>,
    /// Divide the logits of tokens that were there before by this number
    #[arg(long, value_name = "X", value_parser = not_negative)]
    pub repetition_penalty: Option<f64>,
    /// Subtract this number from the logits of tokens of the new text
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub presence_penalty: f64,
    /// Subtract this number for each time that the new text has the token
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_negative_numbers = true)]
    pub frequency_penalty: f64,
    /// Seed of the random choices
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// End where the new text has this text, and leave it out; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub stop: Vec<String>,
    /// Do not end at the model's end tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// Type of the weights in memory; sums are in f32 in any case
    #[arg(long, value_enum, default_value = "f32")]
    pub dtype: WeightType,
    /// Print one line of JSON with the new tokens and their text
    #[arg(long)]
    pub json: bool,
}

/// The type of a model's weights in memory.
#[derive(Clone, Copy, Debug, Eq, PartialEq, clap::ValueEnum)]
pub enum WeightType {
    /// Single precision.
    F32,
    /// The upper half of single precision.
    Bf16,
}

impl GenerateArgs {
    /// Returns how tokens are chosen: as the arguments say, else as the folder does.
    ///
    /// # Errors
    ///
    /// As for [`Sampling::of`]. If an argument is out of its range, or would do nothing.
    pub fn sampling(&self, folder: &Folder) -> Result<Sampling> {
        let own = Sampling::of(folder)?;
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(own.temperature),
            top_k: self.top_k.unwrap_or(own.top_k),
            top_p: self.top_p.unwrap_or(own.top_p),
            min_p: self.min_p.unwrap_or(own.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(own.repetition_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
        };
        if let Some((key, expected, found)) = sampling.out_of_range() {
            return Err(wrong(&format!("--{}", key.replace('_', "-")), expected, found));
        }
        let draws = [
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some()),
            ("--top-k", self.top_k.is_some()),
        ];
        match draws.iter().find(|(_, is_given)| *is_given && sampling.temperature == 0.0) {
            Some((name, _)) => Err(Error::Environment(format!(
                "{name}: the most probable token is taken; to draw tokens add --temperature 1"
            ))),
            None => Ok(sampling),
        }
    }

    /// Returns the tokens of the prompt.
    fn prompt(&self, folder: &Folder, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let ids = match (&self.prompt_ids, &self.chat, &self.prompt) {
            (Some(ids), ..) => {
                let rows = folder.config().vocab_size;
                if let Some(id) = ids.iter().find(|id| **id as usize >= rows) {
                    let expected = format!("--prompt-ids: expected tokens below {rows}");
                    return Err(Error::Environment(format!("{expected}, found {id}")));
                }
                ids.clone()
            }
            (_, Some(message), _) => {
                let message =
                    Message::new([("role", "user".to_owned()), ("content", message.clone())]);
                let text = Templates::of(folder)?.prompt(&[message])?;
                encode_prompt(tokenizer, &text, false)?
            }
            (.., prompt) => encode_prompt(tokenizer, prompt.as_deref().unwrap_or_default(), true)?,
        };
        check_rows(folder, tokenizer, ids.iter())?;
        Ok(ids)
    }
}

/// Reads the number of a token.
fn token(text: &str) -> Result<u32, std::num::ParseIntError> {
    text.trim().parse()
}

/// The line of `--json`.
#[derive(Serialize)]
struct Generated<'a> {
    tokens: &'a [u32],
    text: &'a str,
}

/// Generates text, and has process 0 print it to stdout as it comes, or one line of JSON. On a
/// terminal, control characters of the text are escaped. Checks the folder before a process is
/// started. Process 0 alone needs the tokenizer.
///
/// # Errors
///
/// If the folder or its tokenizer is invalid, the prompt and the new tokens are more than the model
/// has positions, or the job could not be started.
pub fn run(
    folder: &Folder,
    args: &GenerateArgs,
    cut: &CutArgs,
    job: &JobArgs,
) -> anyhow::Result<ExitCode> {
    let (sampling, none) = (args.sampling(folder)?, [] as [&str; 0]);
    ensure!(
        args.prompt.is_some() || args.prompt_ids.is_some() || args.chat.is_some(),
        "there is nothing to continue: give --prompt, --chat or --prompt-ids"
    );
    check_inputs(folder, &none, &none)?;
    let (stages, in_half) = (cut.stages(), args.dtype == WeightType::Bf16);
    // Found before processes start. The prompt's tokens are not known yet.
    let held = Held::inference(folder, Room::for_one(args.max_len.unwrap_or(args.tokens)), in_half);
    let model = Stages::new(folder, stages, 1)?.cut(cut, held)?;
    let (devices, meshes) = (model.devices(|stage| stage)?, model.meshes(|stage| stage)?);
    if cut.show_sharding {
        print!("{}", model.show_sharding()?);
        return Ok(ExitCode::SUCCESS);
    }
    let ends = if args.ignore_eos { Vec::new() } else { folder.end_tokens()? };
    mpmd_job::run(&compared(job, folder, &[]), stages, devices, |p| {
        // Read on process 0 alone.
        let own = RefCell::new(None);
        let prompt = spread(p, || {
            let mut own = own.borrow_mut();
            Ok(args.prompt(folder, own.insert(tokenizer(folder)?))?.into())
        })?;
        let needed = prompt.len() + args.tokens;
        let positions = args.max_len.unwrap_or(needed);
        if positions < needed {
            let expected = format!("at least {needed}, the prompt's tokens and --tokens");
            return Err(Error::Environment(format!(
                "--max-len: expected {expected}, found {positions}"
            ))
            .into());
        }
        let most = folder.config().positions();
        if positions > most {
            let given = prompt.len();
            return Err(Error::Environment(format!(
                "--tokens or --max-len: the model has {most} positions, and {positions} are asked \
                 for; the prompt has {given}"
            ))
            .into());
        }
        let model = Stages::new(folder, stages, positions)?;
        let mut generator = model
            .cut(cut, Held::inference(folder, Room::for_one(positions), in_half))?
            .generator(p, &meshes, in_half)?;
        let computed_by = generator.computed_by(p).filter(|_| !p.is_dry_run());
        if let Some(line) = computed_by.filter(|_| p.process() == ProcessId(0)) {
            say(&line);
        }
        let own = own.into_inner().filter(|_| !p.is_dry_run());
        let text = own.map(|tokenizer| Text::new(tokenizer.into(), args.stop.clone()));
        let form = match (args.json, stdout().is_terminal()) {
            (true, _) => Form::Json,
            (false, true) => Form::Terminal,
            (false, false) => Form::Bytes,
        };
        let output = RefCell::new(text.map(|text| Output { text, form }));
        let is_end = |p: &mut Program, tokens: &[u32]| {
            let is_end = tokens.last().is_some_and(|last| ends.contains(last));
            let next = || match (output.borrow_mut().as_mut(), tokens.last()) {
                (Some(output), Some(token)) => output.next(*token),
                _ => Ok(false),
            };
            match args.stop.is_empty() {
                true => next().map(|_| is_end),
                // Only process 0 has the text.
                false => Ok(is_end | p.broadcast_value(ProcessId(0), false, next)?),
            }
        };
        let tokens = generator.generate(p, &prompt, &sampling, args.tokens, is_end)?;
        if let Some(output) = output.into_inner() {
            output.end(&tokens)?;
        }
        anyhow::Ok(())
    })
}

/// The form in which the new text is printed.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Form {
    /// One line of JSON at the end.
    Json,
    /// As it comes, with control characters escaped: the text of a model could command the
    /// terminal.
    Terminal,
    /// As it comes, byte by byte, for a file or another program.
    Bytes,
}

impl Form {
    /// Returns what is printed of a part of the text as it comes.
    fn shown(self, part: &str) -> Cow<'_, str> {
        match self {
            Self::Json => Cow::Borrowed(""),
            Self::Terminal => printable(part),
            Self::Bytes => Cow::Borrowed(part),
        }
    }
}

/// The text of the new tokens, which is printed as it comes.
struct Output {
    text: Text,
    form: Form,
}

impl Output {
    /// Prints what a further token adds. Returns true if the text has one that ends it.
    fn next(&mut self, token: u32) -> Result<bool> {
        let more = self.text.push(token)?;
        print!("{}", self.form.shown(more));
        // If it fails, the next line does, and ends the program.
        _ = stdout().flush();
        Ok(self.text.is_stopped())
    }

    /// Prints the rest, or the line of JSON.
    fn end(mut self, tokens: &[u32]) -> anyhow::Result<()> {
        let rest = self.text.end()?;
        match self.form {
            Form::Json => println!("{}", json_line(tokens, self.text.given())?),
            form => println!("{}", form.shown(rest)),
        }
        Ok(())
    }
}

/// Returns the line of `--json`. JSON escapes some control characters by itself, and its values
/// stay if the others are escaped, too.
fn json_line(tokens: &[u32], text: &str) -> serde_json::Result<String> {
    let line = serde_json::to_string(&Generated { tokens, text })?;
    Ok(printable(&line).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_model_cannot_command_a_terminal() {
        let text = "a\u{1b}[2J\u{9b}\u{202e}\n\tb\r";
        let escaped = "a\\u001b[2J\\u009b\\u202e\n\tb\\u000d";
        assert_eq!(Form::Terminal.shown(text), escaped);
        assert_eq!(Form::Bytes.shown(text), text);
        let line = json_line(&[7], text).unwrap();
        assert!(!line.contains(|c: char| c.is_control() || c == '\u{202e}'), "{line}");
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["text"], text);
    }
}
