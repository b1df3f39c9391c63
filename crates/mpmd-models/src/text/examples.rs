//! Examples of prompts and replies, from a file of JSON lines, as tokens.

use std::fmt;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Read as _};
use std::path::Path;
use std::sync::Arc;

use minijinja::Value;
use minijinja::value::ValueKind;
use mpmd::train::data::Sequence;
use mpmd::train::tensors::{JsonError, read_json};
use mpmd::{Error, Program, Result};
use tokenizers::Tokenizer;

use crate::error::unexpected;
use crate::hub::folder::{Folder, TOKENIZER};
use crate::text::template::{Marked, Templates, special_tokens};
use crate::text::tokens::{check_rows, guarded, spread, tokenizer};

/// Limit on the length of a line, in bytes. The tokenizer needs some 200 times the memory of the
/// line.
const LONGEST_LINE: u64 = 4 << 20;
/// The allowed forms of a line, for messages.
const FORMS: &str = "an object with `messages`, or with `prompt` and `completion`, both texts or \
                     both messages, each with `role` and `content`";

/// The keys of a message under which templates find the model's reasoning.
const THOUGHTS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// The examples made of one line. There are several if its replies cannot share one text.
type Examples = Vec<Sequence>;

/// Calls `make` on process 0, and returns its examples on every process. Every process must call
/// it, and blocks until it has the examples.
///
/// # Errors
///
/// As for [`Tokens::spread`](crate::Tokens::spread).
pub fn spread_examples(
    p: &mut Program,
    make: impl Fn() -> Result<Vec<Examples>>,
) -> Result<Vec<Examples>> {
    // A line is the number of its examples. An example is its length, then twice each token, plus
    // one if it has a loss.
    let words = |sequence: &Sequence| {
        let tokens = sequence
            .iter()
            .map(|(token, has_loss)| token << 1 | u32::from(*has_loss));
        [sequence.len() as u32]
            .into_iter()
            .chain(tokens)
            .collect::<Vec<u32>>()
    };
    let line = |line: &Examples| {
        [line.len() as u32]
            .into_iter()
            .chain(line.iter().flat_map(words))
            .collect::<Vec<u32>>()
    };
    let words: Arc<[u32]> = spread(p, || Ok(make()?.iter().flat_map(line).collect()))?;

    let mut words = words.iter().copied();

    let mut all = Vec::new();
    while let Some(count) = words.next() {
        let mut sequence = || -> Sequence {
            let len = words.next().unwrap_or(0) as usize;
            words
                .by_ref()
                .take(len)
                .map(|word| (word >> 1, word & 1 == 1))
                .collect()
        };
        all.push((0..count).map(|_| sequence()).collect());
    }
    Ok(all)
}

/// Reads the examples of each line of a file. Only tokens of a completion or of an assistant's
/// reply have a loss, as does the end token of a completion.
///
/// # Errors
///
/// If the file cannot be read, or has no examples. If a line is in none of the allowed forms, or
/// has more than `time + 1` tokens. If it needs a chat template or an end token that the folder
/// lacks.
pub fn read_examples(file: &Path, folder: &Folder, time: usize) -> Result<Vec<Examples>> {
    let failed = |why| unexpected(file, "", "lines of JSON", why);
    let mut lines = BufReader::new(File::open(file).map_err(failed)?);
    let mut reader = ExampleReader {
        file,
        folder,
        tokenizer: tokenizer(folder)?,
        templates: None,
        end: None,
        number: 0,
    };
    let mut all = Vec::new();
    let mut long = Vec::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        reader.number += 1;
        let len = lines
            .by_ref()
            .take(LONGEST_LINE)
            .read_until(b'\n', &mut line)
            .map_err(failed)?;
        if len as u64 == LONGEST_LINE {
            return Err(reader.wrong(format!("less than {LONGEST_LINE} bytes"), "more"));
        }

        if len == 0 {
            break;
        }

        // Some editors begin a file with a mark of its encoding.
        let line = line.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&line);
        if !line.trim_ascii().is_empty() {
            let line: Value = read_json(line).map_err(|why| reader.no_json(&why))?;

            let examples = reader.examples(&line)?;
            let lengths = examples
                .iter()
                .map(|example| (example.len(), reader.number));
            long.extend(lengths.filter(|(tokens, _)| *tokens > time + 1));
            all.push(examples);
        }
    }

    if let Some((tokens, number)) = long.iter().max() {
        reader.number = *number;
        let expected = format!("at most {} tokens, for rows of {time}", time + 1);
        let count = long.len();
        let all = all.iter().map(Vec::len).sum::<usize>();
        let found = format!("{tokens}, the longest of {count} (of {all}) that are too long");
        return Err(reader.wrong(expected, found));
    }
    match all.is_empty() {
        true => Err(unexpected(file, "", "examples", "none")),
        false => Ok(all),
    }
}

/// Turns the lines of a file into examples, with the tokenizer and chat template of a folder.
struct ExampleReader<'a> {
    file: &'a Path,
    folder: &'a Folder,
    tokenizer: Tokenizer,
    /// The chat templates, read for the first line that needs them.
    templates: Option<Templates>,
    /// The end token, looked up for the first line that needs it.
    end: Option<u32>,
    /// Number of the current line, for messages.
    number: usize,
}

impl ExampleReader<'_> {
    fn wrong(&self, expected: impl fmt::Display, found: impl fmt::Display) -> Error {
        unexpected(self.file, &format!("line {}", self.number), expected, found)
    }

    /// Returns the error for a line that is no JSON. The line's number in the file takes the place
    /// of its own.
    fn no_json(&self, why: &JsonError) -> Error {
        match why {
            JsonError::RepeatedKey { key, column, .. } => self.wrong(
                "each key of an object once",
                format!("{key:?} twice, the second time at column {column}"),
            ),
            JsonError::Invalid(why) => {
                let column = why.column();
                let why = why.to_string();
                let why = why.split(" at line ").next().unwrap_or_default();
                self.wrong(FORMS, format!("no JSON: {why} at column {column}"))
            }
        }
    }

    /// Returns the examples of a line.
    fn examples(&mut self, line: &Value) -> Result<Examples> {
        let get = |key| {
            line.get_attr(key)
                .ok()
                .filter(|value| !value.is_none() && !value.is_undefined())
        };
        let prompt = get("prompt");
        let completion = get("completion");
        let (all, from) = match (prompt, completion, get("messages")) {
            (Some(prompt), Some(completion), _) => {
                if let (Some(prompt), Some(completion)) = (prompt.as_str(), completion.as_str()) {
                    let end = self.end()?;
                    let reply = prompt.len()..usize::MAX;
                    let text = (format!("{prompt}{completion}"), vec![reply]);
                    return Ok(vec![self.tokens(&text, Some(end))?]);
                }
                let all = messages(&prompt);
                let completion = messages(&completion);
                let from = all.as_ref().map_or(0, Vec::len);
                let all = all.zip(completion).map(|(all, more)| [all, more].concat());
                (all, from)
            }
            (_, None, Some(all)) => (messages(&all), 0),
            _ => (None, 0),
        };

        let Some(all) = all else {
            let found = match line.kind() {
                ValueKind::Map => {
                    let keys = line.try_iter().into_iter().flatten();
                    let keys: Vec<String> = keys.map(|key| key.to_string()).collect();
                    format!("the keys {}, or values of other types", keys.join(", "))
                }
                kind => kind.to_string(),
            };
            return Err(self.wrong(FORMS, found));
        };

        let templates = match &self.templates {
            Some(templates) => templates,
            None => self.templates.insert(Templates::of(self.folder)?),
        };
        let texts = templates.texts(&all, from, get("tools").as_ref());
        let texts = texts.map_err(|why| self.wrong("a conversation for the chat template", why))?;
        texts.iter().map(|text| self.tokens(text, None)).collect()
    }

    /// Turns a text into tokens, and marks the tokens of replies.
    ///
    /// With an `end` token, adds the tokenizer's special tokens, and `end` as the last one. Without
    /// it the text must contain all special tokens.
    fn tokens(&self, (text, replies): &Marked, end: Option<u32>) -> Result<Sequence> {
        let encode = || self.tokenizer.encode(text.as_str(), end.is_some());
        let encoding = guarded(encode).map_err(|why| self.wrong("a text", why))?;
        let is_reply = |start: usize, last: usize| {
            // Some tokenizers leave out blanks, so a token of blanks is empty.
            let start = start.min(last.saturating_sub(1));
            replies
                .iter()
                .any(|reply| start < reply.end && reply.start < last)
        };

        let tokens = encoding.get_ids().iter().zip(encoding.get_offsets());
        let mut tokens: Sequence = tokens
            .map(|(id, (start, last))| (*id, is_reply(*start, *last)))
            .collect();
        if let Some(end) = end {
            // Some tokenizers add it themselves.
            tokens.pop_if(|(last, _)| *last == end);
            tokens.push((end, true));
        }

        check_rows(
            self.folder,
            &self.tokenizer,
            tokens.iter().map(|(id, _)| id),
        )?;
        match tokens.iter().skip(1).any(|(_, has_loss)| *has_loss) {
            true => Ok(tokens),
            false => Err(self.wrong("tokens of a reply behind the first", "none")),
        }
    }

    /// Returns the end token of completions: the tokenizer's, or else the first end token of the
    /// model.
    fn end(&mut self) -> Result<u32> {
        if let Some(end) = self.end {
            return Ok(end);
        }

        let special = special_tokens(self.folder)?;
        let end = match special.get("eos_token") {
            Some(token) => self.tokenizer.token_to_id(token).ok_or_else(|| {
                let expected = "eos_token of tokenizer_config.json among its tokens";
                unexpected(
                    &self.folder.path().join(TOKENIZER),
                    "",
                    expected,
                    format!("no {token:?}"),
                )
            })?,
            None => *self.folder.end_tokens()?.first().ok_or_else(|| {
                let expected = "eos_token in tokenizer_config.json, or eos_token_id in config.json";
                unexpected(self.folder.path(), "", expected, "none")
            })?,
        };
        Ok(*self.end.insert(end))
    }
}

/// Returns the messages of a JSON list, without keys that are null. `None` if `value` is not a list
/// of messages.
fn messages(value: &Value) -> Option<Vec<Value>> {
    let message = |value: Value| {
        let keys = (value.kind() == ValueKind::Map)
            .then(|| value.try_iter().ok())
            .flatten()?;
        let pair = |key: Value| value.get_item(&key).ok().map(|value| (key, value));
        let mut pairs: Vec<(Value, Value)> = keys
            .filter_map(pair)
            .filter(|(_, value)| !value.is_none())
            .collect();
        let named = |name: &str| pairs.iter().find(|(key, _)| key.as_str() == Some(name));
        // Templates read thoughts under the first name, or the second.
        if let Some((_, thoughts)) = THOUGHTS.iter().find_map(|name| named(name)).cloned() {
            let has_second = named(THOUGHTS[1]).is_some();
            pairs.retain(|(key, _)| key.as_str() != Some(THOUGHTS[0]));
            pairs.push((THOUGHTS[0].into(), thoughts.clone()));
            pairs.extend((!has_second).then(|| (THOUGHTS[1].into(), thoughts)));
        }
        let has = |name: &str| pairs.iter().any(|(key, _)| key.as_str() == Some(name));
        (has("role") && pairs.len() > 1).then(|| Value::from_pairs(pairs))
    };
    match value.kind() {
        ValueKind::Seq => value.try_iter().ok()?.map(message).collect(),
        _ => None,
    }
}
