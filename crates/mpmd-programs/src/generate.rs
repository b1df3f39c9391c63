//! The program `generate`: a prompt to text.

use std::borrow::Cow;
use std::cell::RefCell;
use std::io::{IsTerminal as _, Write as _, stdout};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{bail, ensure};
use clap::builder::NonEmptyStringValueParser;
use mpmd::job::{JobArgs, at_least, not_negative, printable, say};
use mpmd::topology::Mesh;
use mpmd::{Error, ProcessId, Program, Result};
use mpmd_models::{
    Conversation, Folder, HeldBytes, PromptEncoder, Room, Sampling, Stages, TextStream,
    TokenDecoder, check_rows, spread,
};
use serde::Serialize;
use tokenizers::Tokenizer;

use crate::chat::ChatArgs;
use crate::division::{DivisionArgs, named_option};
use crate::inputs::{check_inputs, compared};
use crate::model;
use crate::weight_type::WeightTypeArg;

/// Continue a text by a model from a folder of a model hub, as a pipeline
#[derive(Debug, clap::Parser)]
#[command(name = "generate", version)]
pub struct Generate {
    #[command(flatten)]
    job: JobArgs,
    /// Folder with config.json, tokenizer.json and the weights as safetensors; or a GGUF file; or
    /// NAME or NAME@REVISION of a model in the cache of the hub
    #[arg(long, value_name = "DIR")]
    model: PathBuf,
    /// Folder of an adapter of LoRA, as the library `peft` has it, which is added to the weights
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    #[command(flatten)]
    cut: DivisionArgs,
    #[command(flatten)]
    generation: GenerateArgs,
}

/// Generates text, and prints it. Blocks until the job has ended. Returns its exit code.
///
/// # Errors
///
/// If the folder or the arguments are invalid, or the job could not be started.
pub fn generate(args: &Generate) -> anyhow::Result<ExitCode> {
    let Generate {
        model,
        adapter,
        cut,
        generation,
        job,
    } = args;
    let folder = model::open(model, adapter.as_deref())?;
    run(&folder, generation, cut, job)
}

/// Arguments of a generation.
#[derive(Clone, Debug, clap::Args)]
struct GenerateArgs {
    /// The text to continue
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// The tokens to continue
    #[arg(long, value_name = "ID,…", value_delimiter = ',', value_parser = token,
        conflicts_with = "prompt")]
    prompt_ids: Option<Vec<u32>>,
    /// A message to reply to, by the folder's chat template
    #[arg(long, value_name = "TEXT", conflicts_with_all = ["prompt", "prompt_ids"])]
    chat: Option<String>,
    #[command(flatten)]
    template: ChatArgs,
    /// Largest number of new tokens
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least(1))]
    tokens: usize,
    /// Tokens that a sequence may have, prompt included; default: as many as are needed. With the
    /// rope types `longrope` and `dynamic` the text depends on it: positions are scaled for this
    /// length
    #[arg(long, value_name = "N", value_parser = at_least(1))]
    max_len: Option<usize>,
    /// Divisor of the logits; 0 takes the most probable token. Without it, tokens are drawn if
    /// generation_config.json says `do_sample`; it also has the defaults of the next four
    #[arg(long, value_parser = not_negative)]
    temperature: Option<f64>,
    /// Choose among this number of the most probable tokens; 0: among all
    #[arg(long, value_name = "N")]
    top_k: Option<usize>,
    /// Choose among the most probable tokens that have this probability together
    #[arg(long, value_name = "P", value_parser = not_negative)]
    top_p: Option<f64>,
    /// Choose among tokens with at least this share of the most probable one's probability
    #[arg(long, value_name = "P", value_parser = not_negative)]
    min_p: Option<f64>,
    /// Divide the logits of tokens that were there before by this number
    #[arg(long, value_name = "X", value_parser = not_negative)]
    repetition_penalty: Option<f64>,
    /// Subtract this number from the logits of tokens of the new text
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    presence_penalty: f64,
    /// Subtract this number for each time that the new text has the token
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        allow_negative_numbers = true
    )]
    frequency_penalty: f64,
    /// Seed of the random choices
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// End where the new text has this text, and leave it out; may be repeated
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    stop: Vec<String>,
    /// Do not end at the model's end tokens
    #[arg(long)]
    ignore_eos: bool,
    /// Type of the weights in memory; sums are in f32 in any case
    #[arg(long, value_enum, default_value = "f32")]
    dtype: WeightTypeArg,
    /// Print one line of JSON with the new tokens and their text
    #[arg(long)]
    json: bool,
}

impl GenerateArgs {
    /// Returns the settings for choosing tokens: from the arguments, or else from the folder.
    ///
    /// # Errors
    ///
    /// As for [`Sampling::of`]. If an argument is out of range, or would have no effect.
    fn sampling(&self, folder: &Folder) -> anyhow::Result<Sampling> {
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
        sampling.check().map_err(|invalid| named_option(&invalid))?;
        for (option, is_given) in [
            ("--top-p", self.top_p.is_some()),
            ("--min-p", self.min_p.is_some()),
            ("--top-k", self.top_k.is_some()),
        ] {
            ensure!(
                !is_given || sampling.temperature > 0.0,
                "{option}: the most probable token is taken; to draw tokens add --temperature 1"
            );
        }
        Ok(sampling)
    }

    /// Divides a model over stages and devices. Sequences have up to `positions` tokens. `room` is
    /// the number of tokens in the caches, for the memory.
    fn divided(
        &self,
        folder: &Folder,
        cut: &DivisionArgs,
        positions: usize,
        room: usize,
    ) -> anyhow::Result<Stages> {
        let held = HeldBytes::inference(folder, Room::for_one(room), self.dtype.is_half());
        let model = cut.stages_of(folder, positions, self.positions_option())?;
        cut.divide(model, held)
    }

    /// Returns the option that decides how many tokens a sequence may have.
    fn positions_option(&self) -> &'static str {
        if self.max_len.is_some() {
            "--max-len"
        } else {
            "--tokens"
        }
    }

    /// Returns the tokens of the prompt that the arguments give.
    fn prompt(&self, folder: &Folder, prompts: &PromptEncoder) -> anyhow::Result<Vec<u32>> {
        let ids = if let Some(ids) = &self.prompt_ids {
            let rows = folder.config().vocab_size;
            if let Some(id) = ids.iter().find(|id| **id as usize >= rows) {
                bail!("--prompt-ids: expected tokens below {rows}, found {id}");
            }
            ids.clone()
        } else if let Some(message) = &self.chat {
            let text = prompts.rendered(&Conversation::of_user(message), None)?;
            prompts.tokens(&text)?
        } else {
            prompts.text_tokens(self.prompt.as_deref().unwrap_or_default(), true)?
        };
        check_rows(folder, prompts.tokenizer(), ids.iter())?;
        Ok(ids)
    }
}

/// Returns an error of this process as one of the job.
fn environment(why: anyhow::Error) -> Error {
    Error::Environment(format!("{why:#}"))
}

/// Reads a token number of `--prompt-ids`.
fn token(text: &str) -> Result<u32, std::num::ParseIntError> {
    text.trim().parse()
}

/// The line of JSON that `--json` prints.
#[derive(Serialize)]
struct Generated<'a> {
    tokens: &'a [u32],
    text: &'a str,
}

/// Generates text. Process 0 prints it to stdout while it grows, or as one line of JSON. On a
/// terminal, control characters of the text are escaped.
///
/// Checks the folder before any process is started. Only process 0 needs the tokenizer in the job.
///
/// # Errors
///
/// If the folder or its tokenizer is invalid, or the job could not be started. If the prompt and
/// the new tokens together are more than the model's positions.
fn run(
    folder: &Folder,
    args: &GenerateArgs,
    cut: &DivisionArgs,
    job: &JobArgs,
) -> anyhow::Result<ExitCode> {
    let sampling = args.sampling(folder)?;
    ensure!(
        args.prompt.is_some() || args.prompt_ids.is_some() || args.chat.is_some(),
        "there is nothing to continue: give --prompt, --chat or --prompt-ids"
    );
    check_inputs(folder, &[], &[])?;
    // Found before processes start. The prompt's tokens are not known yet.
    let positions = args.max_len.unwrap_or(args.tokens);
    let model = args.divided(folder, cut, 1, positions)?;
    let devices = model.devices(|stage| stage)?;
    let meshes = model.meshes(|stage| stage)?;
    if cut.show_sharding {
        print!("{}", model.show_sharding()?);
        return Ok(ExitCode::SUCCESS);
    }

    let ends = if args.ignore_eos {
        Vec::new()
    } else {
        folder.end_tokens()?
    };
    let generation = Generation {
        folder,
        args,
        cut,
        sampling,
        ends,
    };
    mpmd::job::run(&compared(job, folder, &[]), cut.stages(), devices, |p| {
        generation.run(p, &meshes)
    })
}

/// A generation job: the same on all of its processes.
struct Generation<'a> {
    folder: &'a Folder,
    args: &'a GenerateArgs,
    cut: &'a DivisionArgs,
    sampling: Sampling,
    /// The tokens that end the text.
    ends: Vec<u32>,
}

impl Generation<'_> {
    fn run(&self, p: &mut Program, meshes: &[Mesh]) -> anyhow::Result<()> {
        let Self {
            folder, args, cut, ..
        } = *self;
        // Read on process 0 alone.
        let own = RefCell::new(None);
        let prompt = spread(p, || {
            let prompts = args.template.prompts(folder).map_err(environment)?;
            let prompt = args.prompt(folder, &prompts).map_err(environment)?;
            own.replace(Some(prompts.tokenizer().clone()));
            Ok(prompt.into())
        })?;
        let positions = self.positions(prompt.len())?;
        let model = args.divided(folder, cut, positions, positions)?;
        let mut generator = model.generator(p, meshes, args.dtype.is_half())?;
        let computed_by = generator.computed_by(p).filter(|_| !p.is_dry_run());
        if let Some(line) = computed_by.filter(|_| p.process() == ProcessId(0)) {
            say(&line);
        }

        let tokenizer = own.into_inner().filter(|_| !p.is_dry_run());
        let output = tokenizer.map(|tokenizer| PrintedText::new(tokenizer, &prompt, args));
        let output = RefCell::new(output.transpose()?);
        let is_end = |p: &mut Program, tokens: &[u32]| {
            let is_end = tokens.last().is_some_and(|last| self.ends.contains(last));
            let next = || match (output.borrow_mut().as_mut(), tokens.last()) {
                (Some(output), Some(token)) => output.next(*token, is_end),
                _ => Ok(false),
            };
            match args.stop.is_empty() {
                true => next().map(|_| is_end),
                // Only process 0 has the text.
                false => Ok(is_end | p.broadcast_value(ProcessId(0), false, next)?),
            }
        };
        let tokens = generator.generate(p, &prompt, &self.sampling, args.tokens, is_end)?;
        if let Some(output) = output.into_inner() {
            output.end(&tokens)?;
        }
        Ok(())
    }

    /// Returns the number of tokens that the sequence may have. `prompt` is the number of tokens in
    /// the prompt.
    ///
    /// # Errors
    ///
    /// If the model has fewer positions, or `--max-len` is less than needed.
    fn positions(&self, prompt: usize) -> anyhow::Result<usize> {
        let needed = prompt + self.args.tokens;
        let positions = self.args.max_len.unwrap_or(needed);
        ensure!(
            positions >= needed,
            "--max-len: expected at least {needed}, the prompt's tokens and --tokens, found \
             {positions}"
        );
        let most = self.folder.config().positions();
        ensure!(
            positions <= most,
            "{}: the model has {most} positions, and {positions} are asked for; the prompt has \
             {prompt}",
            self.args.positions_option()
        );
        Ok(positions)
    }
}

/// The form in which the program prints the generated text.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum PrintForm {
    /// One line of JSON at the end.
    Json,
    /// The text while it grows, with control characters escaped, since they could command the
    /// terminal.
    Terminal,
    /// The text while it grows, unchanged, for a file or another program.
    Bytes,
}

impl PrintForm {
    /// Returns `part` as it is printed during generation. Empty for JSON.
    fn shown(self, part: &str) -> Cow<'_, str> {
        match self {
            Self::Json => Cow::Borrowed(""),
            Self::Terminal => printable(part),
            Self::Bytes => Cow::Borrowed(part),
        }
    }
}

/// Prints the text of the new tokens behind the prompt's while it grows.
struct PrintedText {
    text: TextStream,
    form: PrintForm,
}

impl PrintedText {
    fn new(tokenizer: Arc<Tokenizer>, prompt: &[u32], args: &GenerateArgs) -> Result<Self> {
        let form = match (args.json, stdout().is_terminal()) {
            (true, _) => PrintForm::Json,
            (false, true) => PrintForm::Terminal,
            (false, false) => PrintForm::Bytes,
        };
        let decoder = TokenDecoder::new(tokenizer);
        let text = TextStream::new(decoder.into(), prompt, args.stop.clone())?;
        Ok(Self { text, form })
    }

    /// Prints the text that a new token adds; a token that ends the text adds none. Returns true
    /// once a stop text has ended the text.
    fn next(&mut self, token: u32, is_end: bool) -> Result<bool> {
        let more = match is_end {
            true => self.text.push_end(token),
            false => self.text.push(token)?,
        };
        print!("{}", self.form.shown(more));
        // If it fails, the next line does, and ends the program.
        _ = stdout().flush();
        Ok(self.text.is_stopped())
    }

    /// Prints the rest of the text, or the line of JSON.
    fn end(mut self, tokens: &[u32]) -> anyhow::Result<()> {
        let rest = self.text.end()?;
        match self.form {
            PrintForm::Json => println!("{}", json_line(tokens, self.text.given())?),
            form => println!("{}", form.shown(rest)),
        }
        Ok(())
    }
}

/// Returns the line of JSON for `--json`. Escapes control characters that JSON allows unescaped;
/// this does not change the values.
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
        assert_eq!(PrintForm::Terminal.shown(text), escaped);
        assert_eq!(PrintForm::Bytes.shown(text), text);
        let line = json_line(&[7], text).unwrap();
        assert!(
            !line.contains(|c: char| c.is_control() || c == '\u{202e}'),
            "{line}"
        );
        let value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(value["text"], text);
    }
}
