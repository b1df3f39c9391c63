//! Examples of prompts and replies, from a file of JSON lines, as tokens.

use std::fmt;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::sync::Arc;

use minijinja::Value;
use mpmd::train::data::Sequence;
use mpmd::{Error, Program, Result};
use serde::Deserialize;
use tokenizers::Tokenizer;

use crate::folder::Folder;
use crate::template::{Marked, Template, special_tokens};
use crate::tokens::{check_rows, guarded, spread, tokenizer};
use crate::unexpected;

/// Limit on the length of a line, in bytes. While it is turned into tokens, it takes some 200 times
/// as many bytes.
const LONGEST_LINE: u64 = 4 << 20;
/// The forms of a line, for messages.
const FORMS: &str =
    "an object with `messages`, or with `prompt` and `completion`, both texts or both messages";

/// A line. Other keys are ignored.
#[derive(Deserialize)]
struct Line {
    prompt: Option<Value>,
    completion: Option<Value>,
    messages: Option<Value>,
    tools: Option<Value>,
}

/// Returns the examples that `make` returns on process 0, on every process. Every process must call
/// it, and blocks until it has them.
///
/// # Errors
///
/// As for [`Tokens::spread`](crate::Tokens::spread).
pub fn spread_examples(
    p: &mut Program,
    make: impl Fn() -> Result<Vec<Sequence>>,
) -> Result<Vec<Sequence>> {
    // An example is its length, then twice each token, plus one if it has a loss.
    let words = |sequence: &Sequence| {
        let tokens = sequence.iter().map(|(token, has_loss)| token << 1 | u32::from(*has_loss));
        [sequence.len() as u32].into_iter().chain(tokens).collect::<Vec<u32>>()
    };
    let words: Arc<[u32]> = spread(p, || Ok(make()?.iter().flat_map(words).collect()))?;
    let (mut all, mut rest) = (Vec::new(), &words[..]);
    while let Some((len, words)) = rest.split_first() {
        let (words, others) = words.split_at(*len as usize);
        all.push(words.iter().map(|word| (word >> 1, word & 1 == 1)).collect());
        rest = others;
    }
    Ok(all)
}

/// Reads the examples of a file. A token has a loss if it is of a completion or of a reply of the
/// assistant. So has the token of the end behind a completion.
///
/// # Errors
///
/// If the file cannot be read, or has no examples. If a line has another form, needs a chat
/// template or a token that the folder lacks, or has more than `time + 1` tokens.
pub fn read_examples(file: &Path, folder: &Folder, time: usize) -> Result<Vec<Sequence>> {
    let failed = |why| unexpected(file, "", "lines of JSON", why);
    let mut lines = BufReader::new(File::open(file).map_err(failed)?);
    let mut reader = Reader {
        file,
        folder,
        tokenizer: tokenizer(folder)?,
        template: None,
        end: None,
        number: 0,
    };
    let (mut all, mut long, mut line) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        line.clear();
        reader.number += 1;
        let len = lines.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line).map_err(failed)?;
        if len as u64 == LONGEST_LINE {
            return Err(reader.wrong(format!("less than {LONGEST_LINE} bytes"), "more"));
        }
        if len == 0 {
            break;
        }
        if !line.trim_ascii().is_empty() {
            let line = serde_json::from_slice(&line).map_err(|why| reader.wrong(FORMS, why))?;
            let examples = reader.examples(&line)?;
            let lengths = examples.iter().map(|example| (example.len(), reader.number));
            long.extend(lengths.filter(|(tokens, _)| *tokens > time + 1));
            all.extend(examples);
        }
    }
    if let Some((tokens, number)) = long.iter().max() {
        reader.number = *number;
        let expected = format!("at most {} tokens, for --time {time}", time + 1);
        let (count, all) = (long.len(), all.len());
        let found = format!("{tokens}, the longest of {count} (of {all}) that are too long");
        return Err(reader.wrong(expected, found));
    }
    match all.is_empty() {
        true => Err(unexpected(file, "", "examples", "none")),
        false => Ok(all),
    }
}

/// What turns lines into tokens.
struct Reader<'a> {
    file: &'a Path,
    folder: &'a Folder,
    tokenizer: Tokenizer,
    /// Read when a line needs it.
    template: Option<Template>,
    /// The token of the end, found when a line needs it.
    end: Option<u32>,
    /// Number of the line.
    number: usize,
}

impl Reader<'_> {
    fn wrong(&self, expected: impl fmt::Display, found: impl fmt::Display) -> Error {
        unexpected(self.file, &format!("line {}", self.number), expected, found)
    }

    /// Returns the examples of a line.
    fn examples(&mut self, line: &Line) -> Result<Vec<Sequence>> {
        let messages = |value: &Value| Some(value.try_iter().ok()?.collect::<Vec<Value>>());
        let (mut prompt, completion) = match (&line.messages, &line.prompt, &line.completion) {
            (Some(all), None, None) => (Some(Vec::new()), messages(all)),
            (None, Some(prompt), Some(completion)) => {
                if let (Some(prompt), Some(completion)) = (prompt.as_str(), completion.as_str()) {
                    let end = self.end()?;
                    let reply = prompt.len()..usize::MAX;
                    let text = (format!("{prompt}{completion}"), vec![reply]);
                    return Ok(vec![self.tokens(&text, Some(end))?]);
                }
                (messages(prompt), messages(completion))
            }
            _ => (None, None),
        };
        let (Some(all), Some(completion)) = (&mut prompt, completion) else {
            return Err(self.wrong(FORMS, "other keys or values"));
        };
        let from = all.len();
        all.extend(completion);
        let template = match &self.template {
            Some(template) => template,
            None => self.template.insert(Template::of(self.folder)?),
        };
        let texts = template.texts(all, from, line.tools.as_ref());
        let texts = texts.map_err(|why| self.wrong("a conversation for the chat template", why))?;
        texts.iter().map(|text| self.tokens(text, None)).collect()
    }

    /// Turns a text into tokens. If `end` is given, with the special tokens of the tokenizer and
    /// this one behind them. Otherwise the text has all special tokens.
    fn tokens(&self, (text, replies): &Marked, end: Option<u32>) -> Result<Sequence> {
        let encode = || self.tokenizer.encode(text.as_str(), end.is_some());
        let encoding = guarded(encode).map_err(|why| self.wrong("a text", why))?;
        let is_reply = |(start, last): (usize, usize)| {
            // Some tokenizers leave out blanks, so a token of blanks is empty.
            let start = start.min(last.saturating_sub(1));
            replies.iter().any(|reply| start < reply.end && reply.start < last)
        };
        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        let mut tokens: Sequence = tokens.map(|(id, at)| (*id, is_reply(*at))).collect();
        if let Some(end) = end {
            // Some tokenizers add it themselves.
            tokens.pop_if(|(last, _)| *last == end);
            tokens.push((end, true));
        }
        check_rows(self.folder, &self.tokenizer, tokens.iter().map(|(id, _)| id))?;
        match tokens.iter().skip(1).any(|(_, has_loss)| *has_loss) {
            true => Ok(tokens),
            false => Err(self.wrong("tokens of a reply behind the first", "none")),
        }
    }

    /// Returns the token that ends a completion: the tokenizer's, or else the model's first.
    fn end(&mut self) -> Result<u32> {
        if let Some(end) = self.end {
            return Ok(end);
        }
        let special = special_tokens(self.folder)?;
        let own = special.get("eos_token").and_then(|token| self.tokenizer.token_to_id(token));
        let none = || {
            let expected = "eos_token in tokenizer_config.json, or eos_token_id in config.json";
            unexpected(self.folder.path(), "", expected, "none")
        };
        let end = own.or_else(|| self.folder.end_tokens().first().copied()).ok_or_else(none)?;
        Ok(*self.end.insert(end))
    }
}
