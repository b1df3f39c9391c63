//! The program `generate`: a prompt to text.

use std::cell::RefCell;
use std::io::{Write as _, stdout};
use std::process::ExitCode;

use anyhow::ensure;
use clap::builder::NonEmptyStringValueParser;
use mpmd::{Error, ProcessId, Program, Result};
use mpmd_job::{JobArgs, at_least, not_negative};
use serde::Serialize;
use tokenizers::Tokenizer;

use crate::cut::{CutArgs, Held, Room};
use crate::folder::{Folder, GENERATION};
use crate::sample::Sampling;
use crate::stages::Stages;
use crate::template::Templates;
use crate::tokens::{check_inputs, check_rows, guarded, spread, tokenizer};

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
    /// Tokens that a sequence may have, prompt included; default: as many as are needed. Scalings
    /// of positions that depend on the length of a sequence take that of this one
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
    /// If `generation_config.json` is damaged, or a value is out of its range. If an argument would
    /// do nothing.
    pub fn sampling(&self, folder: &Folder) -> Result<Sampling> {
        let sampling = self.unchecked(folder)?;
        let Sampling { temperature, top_p, min_p, repetition_penalty, .. } = sampling;
        for (key, value, is_right, expected) in [
            ("temperature", temperature, temperature >= 0.0, "0 or more"),
            ("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "more than 0, and 1 at most"),
            ("min_p", min_p, (0.0..=1.0).contains(&min_p), "0 to 1"),
            ("repetition_penalty", repetition_penalty, repetition_penalty > 0.0, "more than 0"),
        ] {
            if !is_right || !value.is_finite() {
                let file = folder.path().join(GENERATION);
                let from = format!("--{}, or in {}", key.replace('_', "-"), file.display());
                return Err(Error::Environment(format!(
                    "{from}: expected {expected}, found {value}"
                )));
            }
        }
        let draws = [
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some()),
            ("--top-k", self.top_k.is_some()),
        ];
        match draws.iter().find(|(_, is_given)| *is_given && temperature == 0.0) {
            Some((name, _)) => Err(Error::Environment(format!(
                "{name}: the most probable token is taken; to draw tokens add --temperature 1"
            ))),
            None => Ok(sampling),
        }
    }

    fn unchecked(&self, folder: &Folder) -> Result<Sampling> {
        let own = folder.generation()?;
        let number = |key: &str, default: f64| own[key].as_f64().unwrap_or(default);
        // Without it, the settings of the file do not count.
        let samples = own["do_sample"].as_bool().unwrap_or(false);
        let if_sampled = |key: &str, default: f64| {
            if samples { number(key, default) } else { default }
        };
        let temperature = if samples { number("temperature", 1.0) } else { 0.0 };
        Ok(Sampling {
            temperature: self.temperature.unwrap_or(temperature),
            top_k: self.top_k.unwrap_or(if_sampled("top_k", 0.0) as usize),
            top_p: self.top_p.unwrap_or(if_sampled("top_p", 1.0)),
            min_p: self.min_p.unwrap_or(if_sampled("min_p", 0.0)),
            repetition_penalty: self
                .repetition_penalty
                .unwrap_or(number("repetition_penalty", 1.0)),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            seed: self.seed,
        })
    }

    /// Returns the tokens of the prompt.
    fn prompt(&self, folder: &Folder, tokenizer: &Tokenizer) -> Result<Vec<u32>> {
        let of = |text: &str, special| -> Result<Vec<u32>> {
            Ok(guarded(|| tokenizer.encode(text, special))?.get_ids().to_vec())
        };
        let ids = match (&self.prompt_ids, &self.chat, &self.prompt) {
            (Some(ids), ..) => {
                let rows = folder.config().vocab_size;
                if let Some(id) = ids.iter().find(|id| **id as usize >= rows) {
                    let expected = format!("--prompt-ids: expected tokens below {rows}");
                    return Err(Error::Environment(format!("{expected}, found {id}")));
                }
                ids.clone()
            }
            (_, Some(message), _) => of(&Templates::of(folder)?.prompt(message)?, false)?,
            (.., prompt) => of(prompt.as_deref().unwrap_or_default(), true)?,
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
    text: String,
}

/// Generates text, and has process 0 print it to stdout as it comes, or one line of JSON. Checks
/// the folder before a process is started. Process 0 alone needs the tokenizer.
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
    let ends = if args.ignore_eos { Vec::new() } else { folder.end_tokens() };
    mpmd_job::run(job, stages, devices, |p| {
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
        let own = own.into_inner().filter(|_| !p.is_dry_run());
        let text = own.map(|tokenizer| Text { tokenizer, args, printed: RefCell::new(0) });
        let is_end = |p: &mut Program, tokens: &[u32]| {
            let is_end = tokens.last().is_some_and(|last| ends.contains(last));
            let next = || text.as_ref().map_or(Ok(false), |text| text.next(tokens, is_end));
            match args.stop.is_empty() {
                true => next().map(|_| is_end),
                // Only process 0 has the text.
                false => Ok(is_end | p.broadcast_value(ProcessId(0), false, next)?),
            }
        };
        let tokens = generator.generate(p, &prompt, &sampling, args.tokens, is_end)?;
        if let Some(text) = text {
            text.end(&tokens)?;
        }
        anyhow::Ok(())
    })
}

/// The text of the new tokens, which is printed as it comes.
struct Text<'a> {
    tokenizer: Tokenizer,
    args: &'a GenerateArgs,
    /// Number of bytes that were printed.
    printed: RefCell<usize>,
}

impl Text<'_> {
    /// Returns the text of tokens up to the first text that ends it, and true if it has one.
    fn of(&self, tokens: &[u32]) -> Result<(String, bool)> {
        let failed = |why| Error::Environment(format!("the tokenizer: {why}"));
        let mut text = self.tokenizer.decode(tokens, true).map_err(failed)?;
        let stop = self.args.stop.iter().filter_map(|stop| text.find(stop)).min();
        stop.into_iter().for_each(|at| text.truncate(at));
        Ok((text, stop.is_some()))
    }

    /// Prints what a further token adds. Returns true if the text has one that ends it.
    fn next(&self, tokens: &[u32], is_end: bool) -> Result<bool> {
        if self.args.json && self.args.stop.is_empty() {
            return Ok(false);
        }
        let (text, stops) = self.of(tokens)?;
        if !self.args.json {
            // An end that may still become another character or a stop is kept back.
            let held = self.args.stop.iter().map(|stop| overlap(&text, stop)).max().unwrap_or(0);
            let whole = text.trim_end_matches('\u{fffd}').len();
            let until = if stops || is_end { text.len() } else { whole.min(text.len() - held) };
            self.print(&text, until);
        }
        Ok(stops)
    }

    fn print(&self, text: &str, until: usize) {
        let mut printed = self.printed.borrow_mut();
        if let Some(more) = text.get(*printed..until) {
            print!("{more}");
            // If it fails, the next line does, and ends the program.
            _ = stdout().flush();
            *printed = until;
        }
    }

    /// Prints the rest, or the line of JSON.
    fn end(&self, tokens: &[u32]) -> anyhow::Result<()> {
        let (text, _) = self.of(tokens)?;
        if self.args.json {
            println!("{}", serde_json::to_string(&Generated { tokens, text })?);
            return Ok(());
        }
        self.print(&text, text.len());
        println!();
        Ok(())
    }
}

/// Returns the length of the longest end of a text with which `stop` begins.
fn overlap(text: &str, stop: &str) -> usize {
    let starts = stop.char_indices().map(|(at, char)| at + char.len_utf8());
    starts.filter(|len| text.ends_with(&stop[..*len])).max().unwrap_or(0)
}
